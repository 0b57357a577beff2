"""Values to bytes and back, exactly: what replays is what was returned, type for type. No pickle.

The bytes are MessagePack; what MessagePack lacks (big integers, Decimal, tuples, sets, dates, …) travels in
extension types numbered below. The numbers are stored in users' databases: never change one, only add.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from msgspec import MsgspecError, msgpack

from semel.errors import Unencodable

(
    _BIG_INT,
    _DECIMAL,
    _DATETIME,
    _DATE,
    _TIME,
    _TIMEDELTA,
    _UUID,
    _TUPLE,
    _SET,
    _FROZENSET,
    _COMPLEX,
    _BYTEARRAY,
    _PAIRS,
) = range(1, 14)
_DEEPEST = 200

_encoder = msgpack.Encoder()


def encode(value: Any) -> bytes:
    """The value as bytes, or :class:`Unencodable` naming the part that cannot be kept exactly."""
    try:
        return _encoder.encode(value if _is_flat(value) else _lower(value, 0))
    except RecursionError as error:
        raise Unencodable("the value contains itself or is nested too deeply to be stored") from error
    except UnicodeEncodeError as error:
        raise Unencodable("a text in the value holds half of a surrogate pair, which is not valid text") from error
    except (MsgspecError, OverflowError) as error:
        raise Unencodable(f"the value cannot be stored: {error}") from error


def decode(data: bytes) -> Any:
    """The value that :func:`encode` was given: equal, and of the same types."""
    return _decoder.decode(data)


def _is_flat(value: Any) -> bool:
    """True for what MessagePack keeps exactly as it stands; most outcomes are small, flat dicts."""
    if type(value) is not dict:
        return type(value) in _AS_IS
    for name, item in value.items():
        kind = type(item)
        if type(name) is not str or (kind not in _AS_IS and (kind is not int or not -(2**63) <= item < 2**64)):
            return False
    return True


def _lower(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind in _AS_IS:
        return value
    if depth > _DEEPEST:
        raise Unencodable(f"the value contains itself or is nested deeper than {_DEEPEST} levels")
    if kind is dict:
        if all(type(name) is str for name in value):
            return {name: _lower(item, depth + 1) for name, item in value.items()}
        return msgpack.Ext(_PAIRS, _encoder.encode(_lower([list(pair) for pair in value.items()], depth + 1)))
    if kind is list:
        return [_lower(item, depth + 1) for item in value]
    if kind is int:
        if -(2**63) <= value < 2**64:
            return value
        size = (value.bit_length() + 8) // 8
        return msgpack.Ext(_BIG_INT, value.to_bytes(size, "big", signed=True))
    tag = _TAGGED.get(kind)
    if tag is None:
        raise Unencodable(_advice(value))
    code, plain = tag
    return msgpack.Ext(code, _encoder.encode(_lower(plain(value), depth + 1)))


def _advice(value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    known = "None, bool, int, float, str, bytes, Decimal, dates and times, UUID, list, tuple, set and dict"
    return (
        f"a value of type {kind} cannot be stored so that it replays exactly; return plain data instead ({known}), "
        "for example dataclasses.asdict(x), model.model_dump() or member.value"
    )


def _zone(zone: tzinfo | None, moment: datetime | time) -> Any:
    if zone is None:
        return None
    if isinstance(zone, ZoneInfo) and zone.key:
        return zone.key
    offset = moment.utcoffset()
    if offset is None:
        raise Unencodable(f"a {type(moment).__name__} with the time zone {zone!r} has no fixed offset to store")
    return offset.total_seconds()


def _unzone(plain: Any) -> tzinfo | None:
    if plain is None:
        return None
    return ZoneInfo(plain) if isinstance(plain, str) else timezone(timedelta(seconds=plain))


def _from_clock(moment: datetime | time) -> list[Any]:
    return [moment.replace(tzinfo=None, fold=0).isoformat(), moment.fold, _zone(moment.tzinfo, moment)]


def _to_clock(kind: type[datetime | time]) -> Callable[[Any], datetime | time]:
    return lambda plain: kind.fromisoformat(plain[0]).replace(fold=plain[1], tzinfo=_unzone(plain[2]))


_AS_IS = frozenset({type(None), bool, float, str, bytes})
_TAGGED: dict[type, tuple[int, Callable[[Any], Any]]] = {
    Decimal: (_DECIMAL, str),
    datetime: (_DATETIME, _from_clock),
    date: (_DATE, date.isoformat),
    time: (_TIME, _from_clock),
    timedelta: (_TIMEDELTA, lambda span: [span.days, span.seconds, span.microseconds]),
    UUID: (_UUID, lambda uuid: uuid.bytes),
    tuple: (_TUPLE, list),
    set: (_SET, list),
    frozenset: (_FROZENSET, list),
    complex: (_COMPLEX, lambda number: [number.real, number.imag]),
    bytearray: (_BYTEARRAY, bytes),
}
_UNTAGGED: dict[int, Callable[[Any], Any]] = {
    _DECIMAL: Decimal,
    _DATETIME: _to_clock(datetime),
    _DATE: date.fromisoformat,
    _TIME: _to_clock(time),
    _TIMEDELTA: lambda plain: timedelta(*plain),
    _UUID: lambda plain: UUID(bytes=plain),
    _TUPLE: tuple,
    _SET: set,
    _FROZENSET: frozenset,
    _COMPLEX: lambda plain: complex(*plain),
    _BYTEARRAY: bytearray,
    _PAIRS: dict,
}


def _raise(code: int, data: memoryview) -> Any:
    if code == _BIG_INT:
        return int.from_bytes(data, "big", signed=True)
    return _UNTAGGED[code](_decoder.decode(data))


_decoder = msgpack.Decoder(ext_hook=_raise)
