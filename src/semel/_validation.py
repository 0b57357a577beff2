"""Names and values that nobody knows: the refusal says which are known, and which is nearest."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import inspect

_UNKNOWN = re.compile(r"unknown field `(.*?)`(?: - at `|$)", re.DOTALL)
_STEP = re.compile(r"\.(?P<name>[^.\[`]+)|\[[^\]]*\]")


def nearest(name: object, known: Iterable[str]) -> str:
    """The end of a refusal: the known name that is meant, as it seems, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(str(name), names, 1)
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(names) or 'none'}"


def misfit(said: str, kind: Any) -> str:
    """What msgspec says of data that is no ``kind``, with what there is: the nearest field, or the valid values."""
    path = [step["name"] for step in _STEP.finditer(said.rpartition(" - at `$")[2])] if " - at `$" in said else []
    known = inspect.type_info(kind)
    if unknown := _UNKNOWN.search(said):
        fields = [
            each.encode_name
            for found in _at(known, path)
            if isinstance(found, inspect.StructType)
            for each in found.fields
        ]
        return f"{said}; {nearest(unknown[1], fields)}" if fields else said
    if said.startswith("Invalid enum value"):
        there = [*_at(known, path), *_at(known, [*path, None])]  # a query's parameter that may come again has no path
        values = [value for found in there for value in _values(found)]
        return f"{said}; valid are {', '.join(values)}" if values else said
    return said


def _at(found: inspect.Type, path: Sequence[str | None]) -> list[inspect.Type]:
    """The types that may stand there. A step of the path is a field's name, or None for an item."""
    match found:
        case inspect.Metadata():
            return _at(found.type, path)
        case inspect.UnionType():
            return [inner for each in found.types for inner in _at(each, path)]
        case inspect.StructType() if path:
            inside = [each.type for each in found.fields if each.encode_name == path[0]]
            return [inner for each in inside for inner in _at(each, path[1:])]
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() if path:
            return _at(found.item_type, path[1:])
        case inspect.DictType() if path:
            return _at(found.value_type, path[1:])
    return [] if path else [found]


def _values(found: inspect.Type) -> list[str]:
    match found:
        case inspect.LiteralType():
            return [str(value) for value in found.values]
        case inspect.EnumType():
            return [str(each.value) for each in found.cls]
    return []
