"""Fingerprints: a short text for a payload, equal for equal payloads.

A payload is written as canonical JSON (RFC 8785, JCS) and hashed with SHA-256. A stored fingerprint must match the same
payload in another process and in every later release, so any change of the canonical text needs a new `VERSION`.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from hashlib import sha256
from json.encoder import encode_basestring as _quote  # escapes what RFC 8785 escapes, and nothing else
from typing import Any
from uuid import UUID

import msgspec

from semel.errors import Unfingerprintable

__all__ = ["VERSION", "canonical", "fingerprint"]

VERSION = "1"
"""The version of the algorithm, and the prefix of every fingerprint."""

MAX_DEPTH = 200
"""The deepest valid nesting. It fits any usual call stack, and does not depend on the caller's depth."""

_TOO_DEEP = f"is nested more than {MAX_DEPTH} levels deep; flatten the payload"

Exclude = str | Iterable[str | tuple[str, ...]]


def fingerprint(payload: Any, *, exclude: Exclude = ()) -> str:
    """Return `"1:<64 hex>"`, which does not depend on the order of keys, the process or the machine.

    `exclude` names fields to leave out, such as the time of sending: top-level names, or tuples as paths into nested
    objects. Raises `Unfingerprintable` if the payload has a value without a JSON form.
    """
    return f"{VERSION}:{sha256(canonical(payload, exclude=exclude)).hexdigest()}"


def canonical(payload: Any, *, exclude: Exclude = ()) -> bytes:
    """Return the canonical JSON that `fingerprint` hashes, in UTF-8; takes and raises the same."""
    try:
        if exclude:
            payload = _without(payload, _tree(exclude))
        return _encoded(_write(payload, 0))
    except _Refused as refused:
        raise Unfingerprintable(refused.message()) from refused.__cause__
    except RecursionError:
        raise Unfingerprintable(
            "$ is nested too deep for what is left of the call stack; flatten it, or call from a shallower place"
        ) from None


class _Refused(Exception):
    """A value has no canonical form. Each container on the way up adds its step to the trail."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.trail: list[tuple[object, str]] = []

    def message(self) -> str:
        trail = self.trail[::-1]
        steps = [step for _, step in trail]
        met: dict[int, int] = {}
        for position, (container, _) in enumerate(trail):
            first = met.setdefault(id(container), position)
            if first != position:
                return (
                    f"{_path(steps[:position])} contains itself: it is the same object as {_path(steps[:first])};"
                    " break the circle, or leave the field out with exclude="
                )
        return f"{_path(steps)} {self.reason}"


def _path(steps: list[str]) -> str:
    if len(steps) > 16:
        steps = [*steps[:8], "…", *steps[-4:]]
    return "$" + "".join(steps).encode(errors="backslashreplace").decode()


def _step(name: str) -> str:
    return f".{name}" if name.isidentifier() else f"[{_quote(name)}]"


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # read it back to find the place, so that good payloads pay nothing for it
        _refuse_surrogates(json.loads(text, parse_int=str, parse_float=str))  # the longest numbers could not be parsed
        raise


def _refuse_surrogates(value: Any) -> None:
    inside: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        inside = [(_step(name), part) for name, item in value.items() for part in (name, item)]
    elif isinstance(value, list):
        inside = [(f"[{index}]", item) for index, item in enumerate(value)]
    elif isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise _Refused("holds half of a surrogate pair, which is not text; replace it before the call")
    for step, part in inside:
        try:
            _refuse_surrogates(part)
        except _Refused as refused:
            refused.trail.append((value, step))
            raise


def _float(value: float, _: int) -> str:
    text = repr(value)  # the shortest digits that read back as the same float, as ECMAScript demands
    if text.endswith(".0"):
        return text[:-2] if value else "0"
    if "e" in text or "n" in text:  # an exponent, nan or inf
        return _decimal(Decimal(text), 0)
    return text


_PLAIN = 10**21  # the least number that is written with an exponent


def _int(value: int, _: int) -> str:
    if -_PLAIN < value < _PLAIN:
        return repr(value)
    return _decimal(Decimal(value), 0)  # Decimal knows no limit of 4300 digits


def _decimal(value: Decimal, _: int) -> str:
    if not value.is_finite():
        raise _Refused(f"is {value}, which JSON has no number for; send None or leave the field out")
    parts = value.as_tuple()
    return _layout("-" if parts.sign else "", "".join(map(str, parts.digits)), int(parts.exponent))


def _layout(sign: str, digits: str, exponent: int) -> str:
    """Write `digits` times 10^`exponent` as ECMAScript's Number::toString would, but with every digit kept."""
    digits = digits.lstrip("0")
    point = len(digits) + exponent
    digits = digits.rstrip("0")
    count = len(digits)
    if not digits:
        return "0"
    if count <= point <= 21:
        return f"{sign}{digits}{'0' * (point - count)}"
    if 0 < point <= 21:
        return f"{sign}{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    fraction = f".{digits[1:]}" if count > 1 else ""
    return f"{sign}{digits[0]}{fraction}e{point - 1:+d}"


def _timedelta(value: timedelta, _: int) -> str:
    microseconds = value // timedelta(microseconds=1)
    return _layout("-" if microseconds < 0 else "", str(abs(microseconds)), -6)


def _str(value: str, _: int) -> str:
    return _quote(value)


def _datetime(value: datetime, _: int) -> str:
    if value.utcoffset() is None:
        return f'"{datetime.isoformat(value)}"'
    try:
        moment = value.astimezone(UTC).replace(tzinfo=None)
    except OverflowError:
        raise _Refused(f"is {value}, which lies outside the years 1 to 9999 in UTC; send another time") from None
    return f'"{datetime.isoformat(moment)}Z"'


def _isoformat(value: date | time, _: int) -> str:
    return f'"{value.isoformat()}"'


def _uuid(value: UUID, _: int) -> str:
    return f'"{value}"'


def _bytes(value: bytes | bytearray | memoryview, _: int) -> str:
    return f'"{b64encode(bytes(value)).decode()}"'


def _bool(value: bool, _: int) -> str:
    return "true" if value else "false"


def _none(_value: None, _: int) -> str:
    return "null"


def _elements(value: Iterable[Any], depth: int) -> list[str]:
    if depth == MAX_DEPTH:
        raise _Refused(_TOO_DEEP)
    parts: list[str] = []
    try:
        for item in value:
            parts.append(_writer(type(item), _other)(item, depth + 1))  # noqa: PERF401 (its length names the culprit)
    except _Refused as refused:
        refused.trail.append((value, f"[{len(parts)}]"))
        raise
    return parts


def _array(value: Iterable[Any], depth: int) -> str:
    return f"[{','.join(_elements(value, depth))}]"


def _set(value: Iterable[Any], depth: int) -> str:
    return f"[{','.join(sorted(_elements(value, depth)))}]"  # code points sort as their UTF-8 bytes do


def _object(value: Mapping[Any, Any], depth: int) -> str:
    if depth == MAX_DEPTH:
        raise _Refused(_TOO_DEEP)
    try:
        ascii_only = "".join(value).isascii()  # then code points, code units and bytes all sort alike
    except TypeError:  # a key is no str
        ascii_only = False
    named = value if ascii_only else _named(value)
    names = sorted(named) if ascii_only else sorted(named, key=_utf16)
    parts: list[str] = []
    name = ""
    try:
        for name in names:
            item = named[name]
            kind = type(item)
            if kind is str:  # saves a call for the most frequent kind
                parts.append(f"{_quote(name)}:{_quote(item)}")
            else:
                parts.append(f"{_quote(name)}:{_writer(kind, _other)(item, depth + 1)}")
    except _Refused as refused:
        refused.trail.append((value, _step(name)))
        raise
    return f"{{{','.join(parts)}}}"


def _utf16(name: str) -> bytes:
    return name.encode("utf-16-be", "surrogatepass")


def _named(value: Mapping[Any, Any]) -> dict[str, Any]:
    """Replace the keys by their text, which must tell them apart."""
    named: dict[str, Any] = {}
    for key in value:
        name = _name(key)
        if name in named:
            raise _Refused(f"has two keys that are both written {_quote(name)}; rename or drop one")
        named[name] = value[key]
    return named


def _name(key: Any) -> str:
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, Enum):
        return _name(key.value)
    if isinstance(key, int) and not isinstance(key, bool):
        return format(Decimal(key), "f")
    if isinstance(key, date | UUID):
        return _write(key, 0)[1:-1]
    raise _Refused(
        f"has a key of type {type(key).__qualname__} ({key!r:.60}); keys are str, int, UUID, date, datetime or Enum"
    )


def _other(value: Any, depth: int) -> str:
    """Write a value whose exact type is not in the table: an Enum, a subclass, or an object with fields."""
    if isinstance(value, Enum):
        return _write(value.value, depth)
    if isinstance(value, int):  # the writers of numbers use repr, which a subclass may have made its own
        return _int(int.__int__(value), depth)
    if isinstance(value, float):
        return _float(float.__float__(value), depth)
    for base in type(value).__mro__:
        if base in _WRITERS:
            return _WRITERS[base](value, depth)
    try:
        return _write(_fields(value), depth)
    except _Refused as refused:
        refused.trail.append((value, ""))
        raise


def _write(value: Any, depth: int) -> str:
    return _writer(type(value), _other)(value, depth)


_WRITERS: dict[type, Callable[[Any, int], str]] = {
    str: _str,
    int: _int,
    float: _float,
    bool: _bool,
    type(None): _none,
    dict: _object,
    list: _array,
    tuple: _array,
    set: _set,
    frozenset: _set,
    Decimal: _decimal,
    datetime: _datetime,
    date: _isoformat,
    time: _isoformat,
    timedelta: _timedelta,
    UUID: _uuid,
    bytes: _bytes,
    bytearray: _bytes,
    memoryview: _bytes,
}
_writer = _WRITERS.get


def _fields(value: Any) -> Any:
    opened = _opened(value)
    if opened is value:
        raise _Refused(
            f"is of type {type(value).__qualname__}, which has no JSON form; turn it into a dict, list, str or number,"
            " or leave the field out with exclude="
        )
    return opened


def _opened(value: Any) -> Any:
    """Return an object with fields as a dict of them, by their Python names; any other value as it is."""
    kind = type(value)
    opened = value
    try:
        if is_dataclass(kind):
            opened = {field.name: getattr(value, field.name) for field in fields(kind)}
        elif isinstance(value, msgspec.Struct):
            opened = _struct(value)
        elif hasattr(kind, "model_dump") and hasattr(kind, "__pydantic_serializer__"):
            opened = value.model_dump(mode="python", by_alias=False)
        elif hasattr(kind, "unicode_string"):  # a URL of pydantic, which the dump of a model holds
            opened = str(value)
        elif isinstance(value, Mapping) and not isinstance(value, dict):
            opened = _mapping(value)
    except Exception as error:
        raise _Refused(f"is of type {kind.__qualname__} and could not be read: {error}") from error
    return opened


def _struct(value: msgspec.Struct) -> dict[str, Any]:
    """The fields that are set, and the tag, which tells apart two Structs of one shape."""
    named = {name: getattr(value, name) for name in value.__struct_fields__}
    config = value.__struct_config__
    if config.tag_field is not None:
        named[config.tag_field] = config.tag
    return {name: item for name, item in named.items() if item is not msgspec.UNSET}


def _mapping(value: Mapping[Any, Any]) -> dict[Any, Any]:
    pairs = list(value.items())
    opened = dict(pairs)
    if len(opened) != len(pairs):
        raise ValueError("it gives one key more than once")
    return opened


_Tree = dict[str, "_Tree"]  # the names to leave out; an empty tree leaves out the whole field


def _tree(exclude: Exclude) -> _Tree:
    paths: list[tuple[str, ...]] = []
    for path in [exclude] if isinstance(exclude, str) else exclude:
        names: Any = (path,) if isinstance(path, str) else path
        if not isinstance(names, tuple) or not names or not all(isinstance(name, str) for name in names):
            raise TypeError(f"exclude takes names and tuples of names, not {path!r}")
        paths.append(names)
    tree: _Tree = {}
    for path in sorted(paths, key=len, reverse=True):  # the shortest last: a whole field wins over a part of it
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = {}
    return tree


def _without(value: Any, tree: _Tree) -> Any:
    """Return the value without the fields of the tree, which goes through arrays; what is not there is ignored."""
    try:
        opened = _opened(value)
        if isinstance(opened, list | tuple):
            return [_without(item, tree) for item in opened]
        if not isinstance(opened, dict):
            return value
        branches = {key: tree.get(_name(key)) for key in opened}
    except _Refused:
        return value  # its writer will refuse it as well, and knows where it is
    kept = {key: item for key, item in opened.items() if branches[key] != {}}
    return {key: _without(item, branch) if (branch := branches[key]) else item for key, item in kept.items()}
