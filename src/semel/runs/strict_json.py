"""Python values as strict JSON: a value that cannot be read back is refused, with its place, and never becomes null."""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import msgspec

__all__ = ["MAX_DEPTH", "count", "depth", "has_nul", "is_small", "non_finite", "read_exact", "write", "write_exact"]

MAX_DEPTH = 100
"""Levels of nesting that parameters may have."""

_WIDE = 1 << 64
_FEW = 1000
"""Up to how many values an approximate count is enough."""
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_SURROGATE = re.compile("[\ud800-\udfff]")


def write(value: Any, *, ordered: bool = False) -> bytes:
    """Return the value as compact JSON in UTF-8, `ordered` with its keys and sets sorted (where they can be).

    Raises `ValueError` with the place and the reason if the value has no JSON form: NaN, infinity, half a surrogate
    pair, an integer of thousands of digits, a circular reference, an object that cannot be converted to data.
    """
    if value is None:
        return b"null"
    try:
        data = _in_order(value) if ordered else _AS_GIVEN.encode(value)
        if b"null" in data:  # msgspec writes NaN and infinity as null
            json.dumps(msgspec.to_builtins(value, enc_hook=_opened, str_keys=True), allow_nan=False)
    except RecursionError:
        raise ValueError("$ is nested too deep, or contains itself") from None
    except Exception as error:  # whatever the user's own objects raise while they are read
        raise ValueError(_trouble(value) or f"$ has no JSON form: {error}") from error
    return data


def write_exact(value: Any) -> tuple[bytes, bytes | None]:
    """As `write`, but with null for NaN and infinity; where there are any, also the text that `read_exact` reads."""
    try:
        return write(value), None
    except ValueError as error:
        plain = _plain(value)
        try:
            if next(non_finite(plain), None) is not None:
                exact = json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()
                return _AS_GIVEN.encode(plain), exact
        except Exception as other:  # something else has no JSON form, either
            raise ValueError(f"{error}; and {other}") from other
        raise


def read_exact(data: bytes) -> Any:
    """The value of a JSON text in which numbers may be NaN, Infinity and -Infinity."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return json.loads(data)


def non_finite(value: Any, place: str = "$") -> Iterator[tuple[str, float]]:
    """The places of NaN and infinity in plain data, such as ``$.metrics.loss``."""
    if isinstance(value, float):
        if not math.isfinite(value):
            yield place, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from non_finite(item, f"{place}.{_shown(name)}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from non_finite(item, f"{place}[{index}]")


def has_nul(data: bytes) -> bool:
    """Whether a string in the JSON holds the character U+0000, which PostgreSQL's jsonb cannot keep."""
    return b"\\u0000" in data and _NUL.search(data) is not None


def depth(data: bytes) -> int:
    """How deep arrays and objects are nested; up to MAX_DEPTH, an upper bound.

    Found without decoding, so that a hostile text costs no more than any other of its length.
    """
    opened = data.count(b"{") + data.count(b"[")
    if opened <= MAX_DEPTH:
        return opened
    steps = array("b", _outside_strings(data).translate(_STEPS, _NO_BRACKETS))
    return max(accumulate(steps), default=0)


def count(data: bytes) -> int:
    """How many values there are, found without decoding; an empty array that is written with a space counts twice."""
    marks = _marks(data)
    return marks if marks < _FEW else _marks(_outside_strings(data))


def is_small(value: Any, most: int) -> bool:
    """Whether the value is plain data whose JSON certainly has at most ``most`` bytes, and no NUL."""
    return _left(value, most) >= 0


def _left(value: Any, budget: int) -> int:
    """What is left of a budget of bytes after the value's JSON; negative if the value may be too large."""
    kind = type(value)
    if value is None or kind is bool or kind is float or (kind is int and -_WIDE < value < _WIDE):
        return budget - 32
    if kind is str:
        return -1 if "\0" in value else budget - 32 - 6 * len(value)
    budget -= 32
    if kind is dict:
        for name, item in value.items():
            budget = _left(name, budget) if budget < 0 else _left(item, _left(name, budget))
            if budget < 0:
                return budget
        return budget
    if kind is list or kind is tuple:
        for item in value:
            budget = _left(item, budget)
            if budget < 0:
                return budget
        return budget
    return -1


def _marks(data: bytes) -> int:
    opened = data.count(b"[") + data.count(b"{") - data.count(b"[]") - data.count(b"{}")
    return 1 + data.count(b",") + opened


def _outside_strings(data: bytes) -> bytes:
    """The JSON with a quote in the place of every string."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b'"'.join(data.split(b'"')[::2])


def _opened(value: Any) -> Any:
    """Convert an object that msgspec does not know: a mapping, a subclass of a plain type, pydantic's or numpy's."""
    kind = type(value)
    opened = value
    if isinstance(value, Mapping):
        opened = dict(value)
    elif isinstance(value, str):
        opened = str.__str__(value)
    elif isinstance(value, int):
        opened = int.__int__(value)
    elif isinstance(value, float):
        opened = float.__float__(value)
    elif hasattr(kind, "model_dump") and hasattr(kind, "__pydantic_serializer__"):
        opened = value.model_dump(mode="python")
    elif hasattr(kind, "tolist"):
        opened = value.tolist()
    if type(opened) is kind:
        raise TypeError(f"type {kind.__qualname__} has no JSON form; use dicts, lists, text and numbers")
    return opened


def _in_order(value: Any) -> bytes:
    try:
        return _ORDERED.encode(value)
    except TypeError:  # the keys of a dict are not text, or a set holds what cannot be sorted
        return _AS_GIVEN.encode(value)


_AS_GIVEN = msgspec.json.Encoder(enc_hook=_opened)
_ORDERED = msgspec.json.Encoder(enc_hook=_opened, order="deterministic")


def _trouble(value: Any) -> str | None:
    """The place and reason of the first part that JSON cannot represent; None if no usual cause is found."""
    for place, item in _parts(value, "$"):
        if isinstance(item, float) and not math.isfinite(item):
            return f"{place} is {item}, which JSON has no number for"
        if isinstance(item, str) and _SURROGATE.search(item):
            return f"{place} holds half of a surrogate pair, which is not text"
        if not isinstance(item, dict | list | tuple):
            reason = _refusal(item)
            if reason:
                return f"{place}: {reason}"
    return None


def _refusal(item: Any) -> str:
    try:
        msgspec.json.encode(item, enc_hook=_opened)
    except Exception as error:  # noqa: BLE001 (as in write)
        return str(error)
    return ""


def _parts(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict | list | tuple):
        value = _plain(value)
    yield place, value
    if isinstance(value, dict):
        for name, item in value.items():
            yield f"{place}, in a name", name
            yield from _parts(item, f"{place}.{_shown(name)}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _parts(item, f"{place}[{index}]")


def _plain(value: Any) -> Any:
    try:
        return msgspec.to_builtins(value, enc_hook=_opened, str_keys=True)
    except Exception:  # noqa: BLE001 (as in write)
        return value


def _shown(name: object) -> str:
    return str(name).encode(errors="backslashreplace").decode()
