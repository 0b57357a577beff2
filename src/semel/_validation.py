"""Argument checks: each returns the valid value, or raises ``InvalidRequest`` and says what is valid."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

from msgspec import inspect

from semel.errors import InvalidRequest

MAX_KEY = 255
"""Characters of a key or a scope. Fits the index of every store, in any encoding."""
MAX_NAME = 200
MAX_INT = 2**31 - 1
"""The largest whole number in a 32-bit column of a database."""
TEN_YEARS = 10 * 366 * 86400
"""Seconds. The longest delay, timeout or retention of a run."""
_MAX_SECONDS = 10**10  # more than 300 years, which is most likely a number of milliseconds
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_UNKNOWN_FIELD = re.compile(r"unknown field `(.*?)`(?: - at `|$)", re.DOTALL)
_PATH_STEP = re.compile(r"\.(?P<name>[^.\[`]+)|\[[^\]]*\]")


def checked_int(what: str, value: object, least: int = 0, most: int | None = MAX_INT) -> int:
    """A whole number from ``least`` to ``most``; without an upper limit if ``most`` is None."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        span = f", {least:,} or greater" if most is None else f" from {least:,} to {most:,}"
        raise InvalidRequest(f"{what} must be a whole number{span}, not {value!r:.80}")
    return value


def checked_number(
    what: str, value: object, least: float = 0, most: float | None = None, *, above: bool = False
) -> float:
    """A finite number from ``least`` to ``most``; greater than ``least`` if ``above``."""
    if not _is_number(value) or value < least or (above and value == least) or (most is not None and value > most):
        low = f"greater than {least:,}" if above else f"{least:,} or greater"
        span = f", {low}" if most is None else f"{f', {low} and at most' if above else f' from {least:,} to'} {most:,}"
        raise InvalidRequest(f"{what} must be a number{span}, not {value!r:.80}")
    return value


def checked_seconds(what: str, value: object, *, zero: bool = False) -> float:
    """A time of at least a microsecond; zero is valid if ``zero``."""
    if not _is_number(value):
        raise InvalidRequest(f"{what} must be a number of seconds, not {value!r:.80}")
    if value > _MAX_SECONDS:
        raise InvalidRequest(f"{what} is over 300 years; give seconds, not milliseconds")
    if value < (0 if zero else 1e-6):
        raise InvalidRequest(f"{what} must be {'zero or more' if zero else 'more than zero'} seconds, not {value!r}")
    return value


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0  # not NaN or infinity


def checked_retention(what: str, value: object, *, unit: int = 1) -> float:
    """For how long a key of a run is kept: more than 0, up to ten years, in units of ``unit`` seconds."""
    kept = checked_number(what, value, 0, TEN_YEARS // unit)
    if not kept:
        raise InvalidRequest(
            f"{what} is 0, so the key would expire at once and protect nothing; give a time above 0, or no key"
        )
    return kept


def checked_bytes(what: str, value: object) -> int | None:
    """A number of bytes, or None for no limit."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise InvalidRequest(f"{what} must be a number of bytes, or None, not {value!r:.80}")
    return value


def checked_bool(what: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise InvalidRequest(f"{what} must be True or False, not {value!r:.80}")
    return value


def checked_text(what: str, value: object) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{what} must be text that is not empty, not {value!r:.80}")
    return value


def checked_choice(what: str, value: Any, choices: Sequence[Any]) -> Any:
    """One of a few words."""
    if value not in choices:
        raise InvalidRequest(f"{what} must be one of {', '.join(map(repr, choices))}, not {value!r:.80}")
    return value


def checked_name(what: str, value: object, *, most: int = MAX_NAME, empty: bool = True) -> str:
    """Text that every store can keep, such as a user or a tenant. A whole number is a valid user, too."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**100:
        value = str(value)
    if not isinstance(value, str):
        raise InvalidRequest(f"{what} must be a text, not a {type(value).__name__}")
    if problem := _problem_of(value, most, empty):
        raise InvalidRequest(f"{what} {problem}")
    return value


def checked_run_key(what: str, key: object) -> str:
    """The idempotency key of a run or a job."""
    try:
        return checked_name(what, key, most=MAX_KEY, empty=False)
    except InvalidRequest as error:
        shown = _shown(key if isinstance(key, str) else repr(key))
        raise InvalidRequest(f"{error}: {shown!r}", idempotency_key=shown) from None


def checked_key(what: str, key: object) -> str:
    """A key or a scope of :class:`Once`."""
    if type(key) is str and 0 < len(key) <= MAX_KEY and key.isprintable():
        return key
    if not isinstance(key, str):
        raise InvalidRequest(f"the {what} must be a text, not a {type(key).__name__}: {key!r:.80}")
    if problem := _problem_of(key, MAX_KEY, empty=False):
        raise InvalidRequest(f"the {what} {problem}: {_shown(key)!r}" if key else f"the {what} {problem}")
    return str(key)


def checked_fingerprint(fingerprint: object) -> str:
    """A fingerprint; empty if there is none."""
    if not isinstance(fingerprint, str) or _problem_of(fingerprint, MAX_NAME, empty=True):
        raise InvalidRequest(
            f"a fingerprint must be text of at most {MAX_NAME} characters without control characters; "
            "semel.fingerprint(payload) makes one"
        )
    return fingerprint


def _problem_of(text: str, most: int, empty: bool) -> str:
    """Why the text is not valid, or an empty text if it is."""
    if not text:
        return "" if empty else "is empty"
    if len(text) > most:
        return f"has {len(text)} characters; at most {most} are allowed"
    if found := _CONTROL.search(text):
        return f"has a control character at position {found.start()}"
    if found := _SURROGATE.search(text):
        return f"has half of a surrogate pair at position {found.start()}, which is not text"
    return ""


def _shown(text: str) -> str:
    return text if len(text) <= MAX_KEY else f"{text[:MAX_KEY]}…"


def nearest(name: object, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the known name that is most like it, or all known names."""
    names = sorted(known)
    close = difflib.get_close_matches(str(name), names, 1)
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(names) or 'none'}"


def with_valid_values(message: str, kind: Any) -> str:
    """msgspec's error message about data that is not a ``kind``, with the nearest field name or the valid values."""
    _, found, path_text = message.rpartition(" - at `$")
    path = [step["name"] for step in _PATH_STEP.finditer(path_text)] if found else []
    types = inspect.type_info(kind)
    if unknown := _UNKNOWN_FIELD.search(message):
        structs = [each for each in _types_at(types, path) if isinstance(each, inspect.StructType)]
        fields = [field.encode_name for struct in structs for field in struct.fields]
        return f"{message}; {nearest(unknown[1], fields)}" if fields else message
    if message.startswith("Invalid enum value"):
        # msgspec gives no path for a query parameter that may be repeated
        there = [*_types_at(types, path), *_types_at(types, [*path, None])]
        values = [value for each in there for value in _values_of(each)]
        return f"{message}; valid are {', '.join(values)}" if values else message
    return message


def _types_at(found: inspect.Type, path: Sequence[str | None]) -> list[inspect.Type]:
    """The types that are valid at the path. Each step of a path is the name of a field, or None for an item."""
    match found:
        case inspect.Metadata():
            return _types_at(found.type, path)
        case inspect.UnionType():
            return [inner for each in found.types for inner in _types_at(each, path)]
        case inspect.StructType() if path:
            inside = [each.type for each in found.fields if each.encode_name == path[0]]
            return [inner for each in inside for inner in _types_at(each, path[1:])]
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() if path:
            return _types_at(found.item_type, path[1:])
        case inspect.DictType() if path:
            return _types_at(found.value_type, path[1:])
    return [] if path else [found]


def _values_of(found: inspect.Type) -> list[str]:
    match found:
        case inspect.LiteralType():
            return [str(value) for value in found.values]
        case inspect.EnumType():
            return [str(each.value) for each in found.cls]
    return []


_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


def span_in(text: str) -> float:
    """The seconds in ``90``, ``90s``, ``15m``, ``12h``, ``30d`` or ``2w``."""
    found = _SPAN.fullmatch(text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a span of time, such as 90s, 15m, 12h, 30d or 2w")
    return float(found[1]) * _UNITS[found[2]]


def is_span(text: str) -> bool:
    """Whether the text is a number with a unit of time, or looks like one."""
    return not _has_no_unit(text) and _SPAN.fullmatch(text.strip().lower()) is not None


def age_in(text: str) -> float:
    """The seconds in a span that has a unit: where data is deleted, a bare number is ambiguous."""
    if _has_no_unit(text):
        raise ValueError(f"{text!r} has no unit; days are written as {text.strip()}d")
    return span_in(text)


def _has_no_unit(text: str) -> bool:
    return text.strip().replace(".", "", 1).isdecimal()
