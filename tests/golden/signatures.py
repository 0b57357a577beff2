"""Renders public names and their signatures as text that does not depend on where the code lives.

A type is rendered by its own name, without its module. A line that contains a name of semel which no public module
exports ends with ``# not public: Name``: such a name may be renamed, everything else in the line may not change. What
these names stand for is at the end of the file, because callers meet the values: aliases, and the fields of records.
"""

import dataclasses
import enum
import functools
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_origin

from golden.annotations import is_alias_of_ours, is_ours, meaning, names_in, plain

PUBLIC: Mapping[str, tuple[str, ...]] = {
    "semel": ("AsyncClient", "Client", "SubmitResult", "submit_cloud_job"),
    "semel.client": (),
    "semel.http.asgi": ("IdempotencyMiddleware",),
    "semel.http.wsgi": ("IdempotencyMiddleware",),
    "semel.metrics.opentelemetry": ("OpenTelemetryMetrics",),
    "semel.metrics.prometheus": ("PrometheusMetrics", "ReplayRatio", "RouterMetrics", "RunMetrics", "expose"),
    "semel.metrics.statsd": ("StatsdMetrics",),
    "semel.runs.celery": ("install", "worker_app"),
    "semel.runs.rq": ("look",),
    "semel.service": (),
    "semel.testing": (),
    "semel.testing.history": (),
}
"""Every module that users import, and its public names besides those in its ``__all__``."""

SPECIALS = ("__call__", "__enter__", "__aenter__", "__iter__", "__aiter__", "__getitem__", "__len__")
"""Methods with two underscores that callers use by syntax."""
WIDE = 100
NOT_PUBLIC = "  # not public: "
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_WORD = re.compile(r"[A-Za-z_]\w*")
_DOTTED = re.compile(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])")
_LITERAL = re.compile(r"'[^']*'")


def names_of(module: str) -> list[str]:
    """The public names of a module."""
    exported = getattr(importlib.import_module(module), "__all__", ())
    return sorted({*exported, *PUBLIC[module]})


@functools.cache
def _exported() -> dict[str, set[int]]:
    """Every name that some public module exports, with the identities of what it names."""
    found: dict[str, set[int]] = {}
    for module in PUBLIC:
        home = importlib.import_module(module)
        for name in names_of(module):
            found.setdefault(name, set()).add(id(getattr(home, name)))
    return found


def _is_exported(name: str, value: Any) -> bool:
    return id(value) in _exported().get(name, ())


def render(module: str) -> list[str]:
    """Every public name of the module, one line for each thing that a caller can use."""
    return _Renderer().page(module)


class _Renderer:
    """Renders one module, and remembers the names that it met and that are not public."""

    def __init__(self) -> None:
        self._home: types.ModuleType = importlib.import_module("semel")
        self._hidden: dict[str, dict[int, tuple[Any, types.ModuleType]]] = {}

    def page(self, module: str) -> list[str]:
        home = importlib.import_module(module)
        lines = [f"== {module}"]
        for name in names_of(module):
            self._home = home
            lines += ["", *self._object(name, getattr(home, name))]
        return [*self._marked(lines), *self._hidden_names()]

    def _marked(self, lines: list[str]) -> Iterator[str]:
        for line in lines:
            words = _WORD.findall(_LITERAL.sub("", line))
            found = sorted({word for word in words if word in self._hidden})
            yield f"{line}{NOT_PUBLIC}{', '.join(found)}" if found else line

    def _hidden_names(self) -> Iterator[str]:
        """What the names that are not public stand for; those that turn up meanwhile, too."""
        known: dict[str, list[str]] = {}
        while left := sorted(set(self._hidden) - set(known)):
            for name in left:
                meanings = sorted(self._hidden[name].values(), key=lambda each: each[1].__name__)
                known[name] = [line for value, home in meanings for line in self._meaning(name, value, home)]
        shown = [lines for _, lines in sorted(known.items()) if lines]
        if shown:
            yield from ("", "-- not public by name, but by what they hold")
        for lines in shown:
            yield from ("", *self._marked(lines))

    def _meaning(self, name: str, value: Any, home: types.ModuleType) -> Iterator[str]:
        """An alias, or a record with its fields; nothing for a class that is more than its data."""
        self._home = home
        if is_alias_of_ours(name, value):
            yield f"{name} = {self._type(value)}"
        elif _is_record(value):
            yield f"record {name}"
            yield from (f"  .{line}" for line in self._fields(value))
            for member in _members(value):
                if isinstance(inspect.getattr_static(value, member), property):
                    yield from (f"  {line}" for line in self._member(value, member))

    # -- what a name is ----------------------------------------------------------------------------------------------

    def _object(self, name: str, value: Any) -> Iterator[str]:
        if inspect.isclass(value):
            yield from self._class(name, value)
        elif inspect.isroutine(value):
            yield from self._function(name, value)
        elif get_origin(value) is not None:
            yield f"{name} = {self._type(value)}"
        else:
            yield f"{name}: {type(value).__name__}"

    def _class(self, name: str, kind: type) -> Iterator[str]:
        bases = [base.__name__ for base in kind.__mro__[1:-1] if _is_public_base(base)]
        yield f"class {name}({', '.join(bases)})" if bases else f"class {name}"
        if issubclass(kind, enum.Enum):
            yield from (f"  {each.name} = {each.value!r}" for each in kind)
            return
        if not getattr(kind, "_is_protocol", False):
            yield from (f"  {line}" for line in self._constructor(kind))
        yield from (f"  .{line}" for line in self._fields(kind))
        for member in _members(kind):
            yield from (f"  {line}" for line in self._member(kind, member))

    def _constructor(self, kind: type) -> list[str]:
        makers = [base for base in kind.__mro__ if is_ours(base) and {"__init__", "__new__"} & set(vars(base))]
        if not makers and not hasattr(kind, "__struct_fields__"):
            return ["constructor as its base's"]
        return self._signature("constructor", kind, _module_of((makers or [kind])[0]))

    def _fields(self, kind: type) -> Iterator[str]:
        """The fields of a record, and what a class declares beside its methods."""
        found: dict[str, str] = {}
        for base in reversed(kind.__mro__):
            if is_ours(base):
                self._home = _module_of(base)
                found |= {
                    name: f"{name}: {self._type(value)}"
                    for name, value in inspect.get_annotations(base).items()
                    if not name.startswith("_")
                }
        yield from found.values()

    def _member(self, kind: type, name: str) -> Iterator[str]:
        getattr(kind, name)  # a method whose module is imported late is there after its first use
        value = inspect.getattr_static(kind, name)
        if isinstance(value, staticmethod | classmethod):
            first, *more = self._function(name, getattr(kind, name))
            yield from (f"{type(value).__name__} {first}", *more)
        elif isinstance(value, property | functools.cached_property):
            yield self._property(name, value)
        elif inspect.isroutine(value):
            yield from self._function(name, value)
        elif inspect.isclass(value):
            yield f"class {name}"
        elif inspect.isdatadescriptor(value):
            yield f"attribute {name}"
        else:
            yield f"{name} = {_default(value)}"

    def _property(self, name: str, value: property | functools.cached_property[Any]) -> str:
        getter = value.fget if isinstance(value, property) else value.func
        assert getter is not None
        self._home = _module_of(getter)
        returns = self._type(inspect.get_annotations(getter).get("return", Any))
        return f"property {name}: {returns}" + (" (can be set)" if getattr(value, "fset", None) else "")

    # -- signatures --------------------------------------------------------------------------------------------------

    def _function(self, name: str, function: Callable[..., Any]) -> list[str]:
        waits = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        first, *more = self._signature(name, function, _module_of(function))
        return [f"{'async def' if waits else 'def'} {first}", *more]

    def _signature(self, name: str, function: Callable[..., Any], home: types.ModuleType) -> list[str]:
        """``name(parameters) -> type``, over several lines where it is long.

        Keyword options that a TypedDict describes are written out, each as ``[name: type]``.
        """
        self._home = home
        found = inspect.signature(function)
        parts: list[str] = []
        before: Any = None
        for parameter in found.parameters.values():
            written = self._parameter(parameter)
            options = parameter.kind is parameter.VAR_KEYWORD and written[0].startswith("[")
            parts += [*_separators(before, parameter.kind, options=options), *written]
            before = parameter.kind
        parts += _separators(before, None)
        self._home = home
        returns = "" if found.return_annotation is found.empty else f" -> {self._type(found.return_annotation)}"
        whole = f"{name}({', '.join(parts)}){returns}"
        return [whole] if len(whole) < WIDE else [f"{name}(", *(f"    {part}," for part in parts), f"){returns}"]

    def _parameter(self, parameter: inspect.Parameter) -> list[str]:
        kind = parameter.annotation
        if parameter.kind is parameter.VAR_KEYWORD and plain(kind).startswith("Unpack["):
            return self._options(plain(kind).removeprefix("Unpack[").removesuffix("]"))
        text = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name
        if kind is not parameter.empty:
            text += f": {self._type(kind)}"
        if parameter.default is not parameter.empty:
            text += f" = {_default(parameter.default)}"
        return [text]

    def _options(self, name: str) -> list[str]:
        """What ``**options: Unpack[Options]`` accepts."""
        described, _ = meaning(name, self._home)
        fields: dict[str, str] = {}
        for base in (*reversed(getattr(described, "__orig_bases__", ())), described):
            if is_ours(base):
                self._home = _module_of(base)
                fields |= {each: self._type(kind) for each, kind in inspect.get_annotations(base).items()}
        return [f"[{each}: {kind}]" for each, kind in sorted(fields.items())]

    def _type(self, value: Any) -> str:
        """The annotation as text, in the module that is being rendered."""
        text = plain(value)
        for name in names_in(text):
            found, home = meaning(name, self._home)
            hidden = is_alias_of_ours(name, found) or (inspect.isclass(found) and is_ours(found))
            if hidden and not _is_exported(name, found):
                self._hidden.setdefault(name, {}).setdefault(id(found), (found, home))
        return text


def _is_public_base(base: type) -> bool:
    """Whether a base is part of the promise: an exported class of semel, or one that semel does not own."""
    if is_ours(base):
        return _is_exported(base.__name__, base)
    return not base.__name__.startswith("_") and base.__module__ not in ("typing", "abc") and base is not BaseException


def _is_record(kind: type) -> bool:
    return hasattr(kind, "__struct_fields__") or dataclasses.is_dataclass(kind) or issubclass(kind, tuple | dict)


def _members(kind: type) -> list[str]:
    ours = [base for base in kind.__mro__ if is_ours(base)]
    declared = {name for base in ours for name in inspect.get_annotations(base)}
    found = {name for base in ours for name in vars(base)} - declared
    return sorted(name for name in found if not name.startswith(("_", "test_")) or name in SPECIALS)


def _module_of(value: Any) -> types.ModuleType:
    return sys.modules[inspect.unwrap(value).__module__]


def _separators(before: Any, kind: Any, *, options: bool = False) -> list[str]:
    """The ``/`` and the ``*`` between parameters of these kinds."""
    found: list[str] = []
    parameter = inspect.Parameter
    if before is parameter.POSITIONAL_ONLY and kind is not before:
        found.append("/")
    named = (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
    if (kind is parameter.KEYWORD_ONLY or options) and before not in named:
        found.append("*")
    return found


def _default(value: Any) -> str:
    if inspect.isroutine(value) or inspect.isclass(value):
        return f"<{value.__name__}>"
    if type(value).__repr__ is object.__repr__:
        return f"<{type(value).__name__}>"
    return _ADDRESS.sub("", _DOTTED.sub("", repr(value)) if is_ours(type(value)) else repr(value))
