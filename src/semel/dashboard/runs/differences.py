"""Where two JSON values differ, path by path."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

from msgspec import Struct

Kind: TypeAlias = Literal["changed", "only in A", "only in B"]
MOST = 200
"""Differences that are told; who has more looks at the files."""
LONGEST = 300
"""Characters of a value that are shown."""
NOTHING = object()


class Difference(Struct, frozen=True):
    """One place in which they differ. ``a`` or ``b`` is None where there is nothing."""

    path: str
    kind: Kind
    a: str | None
    b: str | None


def differences(a: Any, b: Any, most: int = MOST) -> tuple[list[Difference], bool]:
    """The first so many in the order of the values, and whether there are more."""
    found: list[Difference] = []
    for path, one, other in _walk(a, b):
        if len(found) >= most:
            return found, True
        kind: Kind = "only in B" if one is NOTHING else "only in A" if other is NOTHING else "changed"
        found.append(Difference(path or "(all of it)", kind, _written(one), _written(other)))
    return found, False


def _walk(a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """The paths at which they part, without recursion: values may be nested as deep as they like."""
    left: list[tuple[str, Any, Any]] = [("", a, b)]
    while left:
        path, one, other = left.pop()
        if isinstance(one, dict) and isinstance(other, dict):
            names = [*one, *(name for name in other if name not in one)]
            inner = [(_named(path, name), one.get(name, NOTHING), other.get(name, NOTHING)) for name in names]
        elif isinstance(one, list) and isinstance(other, list):
            inner = [
                (f"{path}[{place}]", _at(one, place), _at(other, place)) for place in range(max(len(one), len(other)))
            ]
        else:
            if not _same(one, other):
                yield path, one, other
            continue
        left += reversed(inner)


def _at(values: list[Any], place: int) -> Any:
    return values[place] if place < len(values) else NOTHING


def _named(path: str, name: str) -> str:
    if name.isidentifier():
        return f"{path}.{name}" if path else name
    return f"{path}[{json.dumps(name, ensure_ascii=False)}]"


def _same(one: Any, other: Any) -> bool:
    """As JSON says it: true is not 1, but 1.0 is."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict | list) or isinstance(other, dict | list):
        return False
    return bool(one == other)


def _written(value: Any) -> str | None:
    if value is NOTHING:
        return None
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        text = "(nested too deep to be shown)"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
