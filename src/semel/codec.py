"""Encodes values to bytes and decodes them exactly, type for type. No pickle.

The bytes are MessagePack. Types that MessagePack lacks (big integers, Decimal, tuples, sets, dates, …) are encoded as
the extension types below. Their numbers are stored in users' databases: never change one, only add.

Objects of users' classes are stored by a :class:`Codec` that knows these classes, as a name and plain parts. A reader
that does not know the class gets the parts: no class is ever imported because of what a database contains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from msgspec import Struct, msgpack

from semel.errors import OutcomeGone, Unencodable

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
    _OBJECT,
    _PATH,
    _POSIX_PATH,
    _WINDOWS_PATH,
) = range(1, 18)
_DEEPEST = 200
LARGEST = 256 * 1024 * 1024
"""The largest value in bytes. Every store can keep it."""

_encoder = msgpack.Encoder()


class Shape(Struct, frozen=True):
    """How objects of one class are stored: by the name of the class and a list of plain parts.

    ``make(*parts(value))`` is equal to ``value``. A reader that does not know the class gets the first part.
    """

    kind: type
    name: str
    parts: Callable[[Any], list[Any]]
    make: Callable[..., Any]


class Codec:
    """Encodes and decodes plain values, and objects of the classes that it knows."""

    def __init__(self, shapes: Iterable[Shape] = ()) -> None:
        self._shapes = {shape.kind: shape for shape in shapes}
        self._names = {shape.name: shape for shape in self._shapes.values()}
        self._decoder = msgpack.Decoder(ext_hook=self._raise)

    def encode(self, value: Any) -> bytes:
        """The value as bytes. Raises :class:`Unencodable` and names the part that cannot be stored exactly."""
        try:
            data = _encoder.encode(value if _is_flat(value) else self._lower(value, 0))
        except Unencodable:
            raise
        except RecursionError as error:
            raise Unencodable("the value contains itself or is nested too deeply to be stored") from error
        except UnicodeEncodeError as error:
            raise Unencodable("a text in the value holds half of a surrogate pair, which is not valid text") from error
        except Exception as error:  # raised by a user's class
            raise Unencodable(f"the value cannot be stored: {error}") from error
        if len(data) > LARGEST:
            raise Unencodable(
                f"the value has {len(data)} bytes, and at most {LARGEST} can be stored: keep it elsewhere"
            )
        return data

    def decode(self, data: bytes) -> Any:
        """The value that was encoded: equal, and of the same types."""
        return self._decoder.decode(data)

    def _lower(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _AS_IS:
            return value
        if depth > _DEEPEST:
            raise Unencodable(f"the value contains itself or is nested deeper than {_DEEPEST} levels")
        if kind is dict:
            if all(type(name) is str for name in value):
                return {name: self._lower(item, depth + 1) for name, item in value.items()}
            return self._extension(_PAIRS, [list(pair) for pair in value.items()], depth)
        if kind is list:
            return [self._lower(item, depth + 1) for item in value]
        if kind is int:
            if -(2**63) <= value < 2**64:
                return value
            size = (value.bit_length() + 8) // 8
            return msgpack.Ext(_BIG_INT, value.to_bytes(size, "big", signed=True))
        tag = _TAGGED.get(kind)
        if tag is not None:
            return self._extension(tag[0], tag[1](value), depth)
        shape = self._shapes.get(kind)
        if shape is None:
            raise Unencodable(_advice(value))
        return self._extension(_OBJECT, [shape.name, *shape.parts(value)], depth)

    def _extension(self, code: int, plain: Any, depth: int) -> msgpack.Ext:
        return msgpack.Ext(code, _encoder.encode(self._lower(plain, depth + 1)))

    def _raise(self, code: int, data: memoryview) -> Any:
        if code == _BIG_INT:
            return int.from_bytes(data, "big", signed=True)
        plain = self._decoder.decode(data)
        return self._object(*plain) if code == _OBJECT else _UNTAGGED[code](plain)

    def _object(self, name: str, content: Any, *more: Any) -> Any:
        if not self._names:
            return content
        try:
            return self._names[name].make(content, *more)
        except Exception as error:  # raised by a user's class
            raise OutcomeGone(
                f"this work was done and will not be done again, but its result, a {name}, does not fit what the "
                f"function returns now ({type(error).__name__}: {error})"
            ) from error


def _is_flat(value: Any) -> bool:
    """Whether MessagePack encodes it exactly as it is; most outcomes are small, flat dicts."""
    if type(value) is not dict:
        return type(value) in _AS_IS
    for name, item in value.items():
        kind = type(item)
        if type(name) is not str or (kind not in _AS_IS and (kind is not int or not -(2**63) <= item < 2**64)):
            return False
    return True


def _advice(value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    known = "None, bool, int, float, str, bytes, Decimal, dates and times, UUID, Path, list, tuple, set and dict"
    return (
        f"a value of type {kind} cannot be stored so that it replays exactly; return plain data ({known}), or annotate "
        "what the function returns: the dataclasses, msgspec structs, pydantic models, enums and named tuples that a "
        "return annotation names are stored, too"
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
    type(Path()): (_PATH, str),
    PurePosixPath: (_POSIX_PATH, str),
    PureWindowsPath: (_WINDOWS_PATH, str),
}
PLAIN_TYPES: tuple[type, ...] = (*_AS_IS, int, list, dict, *_TAGGED)
"""Types that need no shape. Their subclasses do."""

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
    _PATH: Path,
    _POSIX_PATH: PurePosixPath,
    _WINDOWS_PATH: PureWindowsPath,
}

PLAIN = Codec()
"""The codec that knows no classes of users."""
encode, decode = PLAIN.encode, PLAIN.decode
