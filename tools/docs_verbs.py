"""An extension of griffe: `claim = sync_method(KeyEngine.claim)` is documented as the method that it makes."""

from __future__ import annotations

import re
from typing import Any

import griffe

_MADE = re.compile(r"(a?sync)_method\(([\w.]+)\.(\w+)\)")


class Verbs(griffe.Extension):
    """Makes methods of the class attributes that wrap a method of an engine."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Replace them, once everything is loaded."""
        for module in _modules(pkg):
            for kind in module.classes.values():
                if not kind.is_alias:
                    _replace(kind, loader)


def _modules(module: griffe.Module) -> list[griffe.Module]:
    inner = [each for each in module.modules.values() if not each.is_alias]
    return [module, *(deeper for each in inner for deeper in _modules(each))]


def _replace(kind: griffe.Class, loader: griffe.GriffeLoader) -> None:
    for name, attribute in list(kind.members.items()):
        made = None if attribute.is_alias or not attribute.is_attribute else _MADE.fullmatch(str(attribute.value))
        if made is None:
            continue
        engine = loader.modules_collection[kind.module.resolve(made[2])]
        source: Any = engine.all_members[made[3]]  # its own, or that of a class which it extends
        method = griffe.Function(
            name,
            parameters=source.parameters,
            returns=source.returns,
            docstring=source.docstring,
            lineno=attribute.lineno,
            endlineno=attribute.endlineno,
        )
        if made[1] == "async":
            method.labels.add("async")
        kind.set_member(name, method)
