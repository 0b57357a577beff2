"""What replays is what was returned: equal, and of the same types, all the way down; and readable for ever."""

import collections
import enum
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from math import copysign, inf, isnan, nan
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel import Unencodable
from semel.codec import decode, encode

ZONES = [UTC, ZoneInfo("Europe/Berlin"), ZoneInfo("America/St_Johns"), timezone(timedelta(hours=5, minutes=45))]


def alike(one: Any, other: Any) -> bool:
    """Equal and of the same types inside; a NaN is a NaN, and zeros keep their signs."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return (isnan(one) and isnan(other)) or (one == other and copysign(1, one) == copysign(1, other))
    if isinstance(one, complex):
        return alike(one.real, other.real) and alike(one.imag, other.imag)
    if isinstance(one, Decimal):
        return str(one) == str(other)
    if isinstance(one, datetime | time):
        return (
            one.replace(tzinfo=None) == other.replace(tzinfo=None) and one.fold == other.fold and zone_alike(one, other)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=False)
        return len(one) == len(other) and all(alike(a, b) for pair in pairs for a, b in zip(*pair, strict=True))
    if isinstance(one, set | frozenset):
        return len(one) == len(other) and all(any(alike(item, found) for found in other) for item in one)
    return bool(one == other)


def zone_alike(one: datetime | time, other: datetime | time) -> bool:
    if isinstance(one.tzinfo, ZoneInfo):
        return one.tzinfo is other.tzinfo
    return one.utcoffset() == other.utcoffset()


text = st.text(st.characters(exclude_categories=["Cs"]))
zones = st.none() | st.sampled_from(ZONES)
hashable = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**300), 2**300),
    st.floats(allow_nan=False),
    text,
    st.binary(),
    st.decimals(allow_nan=False),
    st.datetimes(timezones=zones),
    st.dates(),
    st.times(timezones=st.none() | st.just(UTC)),
    st.timedeltas(),
    st.uuids(),
    st.complex_numbers(allow_nan=False),
)
inner = st.recursive(hashable, lambda items: st.lists(items).map(tuple) | st.frozensets(items), max_leaves=5)
values = st.recursive(
    inner | st.floats() | st.decimals() | st.complex_numbers(),
    lambda items: st.one_of(
        st.lists(items),
        st.lists(items).map(tuple),
        st.dictionaries(text, items),
        st.dictionaries(inner, items),
        st.sets(inner),
        st.binary().map(bytearray),
    ),
    max_leaves=15,
)


@settings(deadline=None, database=None)
@given(values)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert alike(decode(encode(value)), value)


@settings(deadline=None, database=None)
@given(st.dictionaries(text, st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), text, st.binary())))
def test_a_flat_dict_comes_back_as_it_was(value: Any) -> None:
    """Most outcomes are such, and take a shorter way."""
    assert alike(decode(encode(value)), value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        False,
        0,
        "",
        b"",
        [],
        (),
        {},
        set(),
        frozenset(),
        0.0,
        -0.0,
        nan,
        inf,
        2**63 - 1,
        -(2**63),
        2**64 - 1,
        2**64,
        -(2**63) - 1,
        10**1000,
        {"big": 2**64},
        {"big": -(2**63) - 1},
        Decimal("1.10"),
        Decimal("-0E+7"),
        Decimal("Infinity"),
        Decimal("sNaN123"),
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
        datetime(2024, 1, 1, tzinfo=timezone(timedelta(seconds=1, microseconds=5))),
        time(23, 59, 59, 999_999, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
        timedelta.max,
        timedelta(microseconds=-1),
        date.min,
        UUID(int=0),
        {1: "int", "1": "text", (1,): "tuple", None: "none", 1.5: "float"},
        {"nested": [{"a": (1, [2, {"b": {3, 4}}])}]},
        {True: 1, "x": 2},
        "\u202e𝄞\0",
        complex(-0.0, nan),
    ],
    ids=repr,
)
def test_the_odd_ones_come_back_too(value: Any) -> None:
    assert alike(decode(encode(value)), value)


def test_true_and_one_are_told_apart() -> None:
    assert decode(encode([True, 1, 1.0, "1"])) == [True, 1, 1.0, "1"]
    assert [type(item) for item in decode(encode([True, 1, 1.0]))] == [bool, int, float]


def test_order_is_kept() -> None:
    assert list(decode(encode({"b": 1, "a": 2, "c": 3}))) == ["b", "a", "c"]
    assert list(decode(encode({2: 1, 1: 2}))) == [2, 1]


def test_each_replay_is_a_value_of_its_own() -> None:
    data = encode({"list": []})
    decode(data)["list"].append("changed")
    assert decode(data) == {"list": []}


class Colour(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


class Point(NamedTuple):
    x: int


@dataclass
class Order:
    id: int


class Text(str):
    __slots__ = ()


class FloatingZone(tzinfo):
    """It does not know its offset."""

    def utcoffset(self, moment: datetime | None) -> None:
        return None

    def dst(self, moment: datetime | None) -> None:
        return None

    def tzname(self, moment: datetime | None) -> str:
        return "floating"


def loop() -> list[Any]:
    inside: list[Any] = []
    inside.append(inside)
    return inside


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


UNKEPT = {
    "object": object(),
    "enum": Colour.RED,
    "int enum": Number.ONE,
    "named tuple": Point(1),
    "dataclass": Order(1),
    "subclass of str": Text("x"),
    "default dict": collections.defaultdict(list),
    "ordered dict": collections.OrderedDict(),
    "function": len,
    "class": int,
    "exception": ValueError("x"),
    "generator": (number for number in range(3)),
    "memoryview": memoryview(b"x"),
    "range": range(3),
    "half a surrogate pair": "\ud800",
    "half a surrogate pair inside": {"a": ["\udfff"]},
    "half a surrogate pair as a name": {"\ud800": 1},
    "a time without an offset": datetime(2024, 1, 1, tzinfo=FloatingZone()),
    "a loop": loop(),
    "too deep": deep(1000),
}


@pytest.mark.parametrize("value", UNKEPT.values(), ids=UNKEPT.keys())
def test_what_would_not_come_back_as_it_was_is_refused(value: Any) -> None:
    """Better said now than found out by whom it is replayed to."""
    with pytest.raises(Unencodable):
        encode(value)
    with pytest.raises(Unencodable):
        encode({"inside": [value]})


def test_a_refusal_says_what_to_return_instead() -> None:
    with pytest.raises(Unencodable, match=r"Order.*plain data.*annotate what the function returns"):
        encode({"order": Order(1)})


def test_two_hundred_levels_are_kept() -> None:
    assert decode(encode(deep(150))) == deep(150)


STORED = {
    "c0": None,
    "c3": True,
    "07": 7,
    "cfffffffffffffffff": 2**64 - 1,
    "c70901010000000000000000": 2**64,
    "cb3ff8000000000000": 1.5,
    "a568656c6c6f": "hello",
    "c403000102": b"\x00\x01\x02",
    "92a161c0": ["a", None],
    "82a16101a16292c2c3": {"a": 1, "b": [False, True]},
    "c70502a4312e3130": Decimal("1.10"),
    "c71f0393b3323032342d30312d30325430333a30343a303500cb0000000000000000": datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC),
    "c7240393b3323032342d30312d30325430333a30343a303500ad4575726f70652f4265726c696e": datetime(
        2024, 1, 2, 3, 4, 5, tzinfo=ZoneInfo("Europe/Berlin")
    ),
    "c70b04aa323032342d30312d3032": date(2024, 1, 2),
    "c70c0593a830333a30343a303500c0": time(3, 4, 5),
    "d60693010203": timedelta(1, 2, 3),
    "c71207c41000000000000000000000000000000007": UUID(int=7),
    "c70308920102": (1, 2),
    "d5099101": {1},
    "d50a9101": frozenset({1}),
    "c7130b92cb3ff0000000000000cb4000000000000000": 1 + 2j,
    "d60cc4026162": bytearray(b"ab"),
    "c7050d919201a161": {1: "a"},
}


@pytest.mark.parametrize("data", STORED)
def test_what_is_stored_in_databases_is_read_for_ever(data: str) -> None:
    """These bytes lie in users' databases: a release that reads them otherwise is broken."""
    assert alike(decode(bytes.fromhex(data)), STORED[data])
