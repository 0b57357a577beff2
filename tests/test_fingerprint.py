"""Fingerprints: RFC 8785 to the byte, equal for equal questions, and a clear word about everything else."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import os
import re
import struct
import subprocess
import sys
from collections import ChainMap, OrderedDict, UserDict, namedtuple
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from hashlib import sha256
from types import MappingProxyType
from typing import Any, ClassVar, Self
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.errors import SemelError, Unfingerprintable
from semel.fingerprint import MAX_DEPTH, VERSION, canonical, fingerprint

# RFC 8785, Appendix B: the bits of a double and its text.
APPENDIX_B = {
    "0000000000000000": "0",
    "8000000000000000": "0",
    "0000000000000001": "5e-324",
    "8000000000000001": "-5e-324",
    "7fefffffffffffff": "1.7976931348623157e+308",
    "ffefffffffffffff": "-1.7976931348623157e+308",
    "4340000000000000": "9007199254740992",
    "c340000000000000": "-9007199254740992",
    "4430000000000000": "295147905179352830000",
    "44b52d02c7e14af5": "9.999999999999997e+22",
    "44b52d02c7e14af6": "1e+23",
    "44b52d02c7e14af7": "1.0000000000000001e+23",
    "444b1ae4d6e2ef4e": "999999999999999700000",
    "444b1ae4d6e2ef4f": "999999999999999900000",
    "444b1ae4d6e2ef50": "1e+21",
    "3eb0c6f7a0b5ed8c": "9.999999999999997e-7",
    "3eb0c6f7a0b5ed8d": "0.000001",
    "41b3de4355555553": "333333333.3333332",
    "41b3de4355555554": "333333333.33333325",
    "41b3de4355555555": "333333333.3333333",
    "41b3de4355555556": "333333333.3333334",
    "41b3de4355555557": "333333333.33333343",
    "becbf647612f3696": "-0.0000033333333333333333",
    "43143ff3c1cb0959": "1424953923781206.2",
}
APPENDIX_B_ERRORS = ["7fffffffffffffff", "7ff0000000000000", "fff0000000000000"]

# The documents of RFC 8785 (sections 3.2.2 and 3.2.3) and of its reference implementation's test data.
DOCUMENTS = {
    "rfc-3.2.2": (
        r"""{"numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
             "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
             "literals": [null, true, false]}""",
        r"""{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],
             "string":"€$\u000f\nA'B\"\\\\\"/"}""",
    ),
    "rfc-3.2.3": (
        r"""{"\u20ac": "Euro Sign", "\r": "Carriage Return", "\ufb33": "Hebrew Letter Dalet With Dagesh", "1": "One",
             "\ud83d\ude00": "Emoji: Grinning Face", "\u0080": "Control",
             "\u00f6": "Latin Small Letter O With Diaeresis"}""",
        """{"\\r":"Carriage Return","1":"One","\x80":"Control","ö":"Latin Small Letter O With Diaeresis",
            "€":"Euro Sign","\U0001f600":"Emoji: Grinning Face","\ufb33":"Hebrew Letter Dalet With Dagesh"}""",
    ),
    "arrays": ('[56, {"d": true, "10": null, "1": [ ]}]', '[56,{"1":[],"10":null,"d":true}]'),
    "french": (
        """{"peach": "This sorting order", "péché": "is wrong according to French",
            "pêche": "but canonicalization MUST", "sin": "ingnore locale"}""",
        """{"peach":"This sorting order","péché":"is wrong according to French",
            "pêche":"but canonicalization MUST","sin":"ingnore locale"}""",
    ),
    "structures": (
        r"""{"1": {"f": {"f": "hi","F": 5} ,"\n": 56.0}, "10": { }, "": "empty", "a": { }, "111": [ { } ], "A": { }}""",
        r"""{"":"empty","1":{"\n":56,"f":{"F":5,"f":"hi"}},"10":{},"111":[{}],"A":{},"a":{}}""",
    ),
    "unicode": (r'{"Unnormalized Unicode":"\u1e0d\u0307"}', '{"Unnormalized Unicode":"\u1e0d\u0307"}'),
    "values": (
        r"""{"numbers": [1E30, 4.50, 333333333.33333329, 2e-3, 0.000000000000000000000000001],
             "escaping": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/", "literals": [null, true, false]}""",
        r"""{"escaping":"€$\u000f\nA'B\"\\\\\"/","literals":[null,true,false],
             "numbers":[1e+30,4.5,333333333.3333333,0.002,1e-27]}""",
    ),
    "weird": (
        r"""{"\u20ac": "Euro Sign", "1": "One", "\u0080": "Control\u007f", "\ud83d\ude02": "Smiley",
             "\u00f6": "Latin Small Letter O With Diaeresis", "\ufb33": "Hebrew Letter Dalet With Dagesh",
             "</script>": "Browser Challenge"}""",
        """{"1":"One","</script>":"Browser Challenge","\x80":"Control\x7f","ö":"Latin Small Letter O With Diaeresis",
            "€":"Euro Sign","\U0001f602":"Smiley","\ufb33":"Hebrew Letter Dalet With Dagesh"}""",
    ),
}


def documents(*numbers: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.one_of(st.none(), st.booleans(), st.text(), *numbers),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=25,
    )


json_values = documents(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
# Python's own reader takes digits without a point for an int, and a float of that size may not be meant to the digit.
readable_values = documents(st.integers(-(10**21) + 1, 10**21 - 1), st.floats(-(2.0**53), 2.0**53))


def double(bits: str) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(bits))[0]
    return value


def text(payload: Any, **options: Any) -> str:
    return canonical(payload, **options).decode()


def refusal(payload: Any, **options: Any) -> str:
    with pytest.raises(Unfingerprintable) as refused:
        canonical(payload, **options)
    return str(refused.value)


def nested(levels: int) -> list[Any]:
    payload: list[Any] = []
    for _ in range(levels - 1):
        payload = [payload]
    return payload


class TestRFC8785:
    @pytest.mark.parametrize(("bits", "expected"), APPENDIX_B.items())
    def test_numbers_of_appendix_b(self, bits: str, expected: str) -> None:
        assert text(double(bits)) == expected

    @pytest.mark.parametrize("bits", APPENDIX_B_ERRORS)
    def test_nan_and_infinity_are_errors(self, bits: str) -> None:
        assert "which JSON has no number for" in refusal(double(bits))

    @pytest.mark.parametrize("name", DOCUMENTS)
    def test_documents(self, name: str) -> None:
        source, expected = DOCUMENTS[name]
        assert text(json.loads(source)) == re.sub(r"\n +", "", expected)  # the line breaks are this file's

    def test_the_bytes_of_section_3_2_4(self) -> None:
        published = """
            7b 22 6c 69 74 65 72 61 6c 73 22 3a 5b 6e 75 6c 6c 2c 74 72 75 65 2c 66 61 6c 73 65 5d 2c 22 6e 75 6d 62 65
            72 73 22 3a 5b 33 33 33 33 33 33 33 33 33 2e 33 33 33 33 33 33 33 2c 31 65 2b 33 30 2c 34 2e 35 2c 30 2e 30
            30 32 2c 31 65 2d 32 37 5d 2c 22 73 74 72 69 6e 67 22 3a 22 e2 82 ac 24 5c 75 30 30 30 66 5c 6e 41 27 42 5c
            22 5c 5c 5c 5c 5c 22 2f 22 7d
        """
        assert canonical(json.loads(DOCUMENTS["rfc-3.2.2"][0])) == bytes.fromhex(published)

    def test_escapes_are_the_short_ones_then_lower_hex_and_nothing_else(self) -> None:
        short = {"\b": r"\b", "\t": r"\t", "\n": r"\n", "\f": r"\f", "\r": r"\r", '"': r"\"", "\\": r"\\"}
        for code in [*range(0x300), 0x2028, 0x2029, 0xFEFF, 0xFFFF, 0x1F602]:
            plain = f"\\u{code:04x}" if code < 0x20 else chr(code)
            assert text(chr(code)) == f'"{short.get(chr(code), plain)}"'

    def test_names_sort_by_utf16_code_units_not_by_code_points(self) -> None:
        assert text({"\U00010000": 1, "\uffff": 2, "a": 3}) == '{"a":3,"\U00010000":1,"\uffff":2}'


class TestNumbers:
    @pytest.mark.parametrize("one", [1, 1.0, Decimal(1), Decimal("1.0"), Decimal("1.000"), Decimal("0.1e1")])
    def test_one_is_one_however_it_is_written(self, one: Any) -> None:
        assert text(one) == "1"

    @pytest.mark.parametrize("zero", [0, 0.0, -0.0, Decimal("-0"), Decimal("0e500"), Decimal("0.000")])
    def test_zero_has_no_sign(self, zero: Any) -> None:
        assert text(zero) == "0"

    @pytest.mark.parametrize(
        ("number", "expected"),
        [
            (2**53 + 1, "9007199254740993"),
            (10**21 - 1, "999999999999999999999"),
            (10**21, "1e+21"),
            (1e21, "1e+21"),
            (10**21 + 1, "1.000000000000000000001e+21"),
            (-(10**21), "-1e+21"),
            (123 * 10**30, "1.23e+32"),
            (0.000001, "0.000001"),
            (Decimal("0.000001"), "0.000001"),
            (1e-7, "1e-7"),
            (Decimal("-0.00000012"), "-1.2e-7"),
            (Decimal("100.0"), "100"),
            (Decimal("1e2"), "100"),
            (Decimal("19.90"), "19.9"),
            (Decimal("0.1234567890123456789012345"), "0.1234567890123456789012345"),
            (Decimal("1e999999999"), "1e+999999999"),
            (Decimal("-1.5e-999999999"), "-1.5e-999999999"),
        ],
    )
    def test_every_digit_is_kept_in_the_layout_of_ecmascript(self, number: Any, expected: str) -> None:
        assert text(number) == expected

    def test_an_int_longer_than_the_interpreter_prints_keeps_its_digits(self) -> None:
        assert text(10**5000 + 1) == f"1.{'0' * 4999}1e+5000"
        assert text({10**5000: 1}) == f'{{"1{"0" * 5000}":1}}'

    @pytest.mark.parametrize("number", [Decimal("nan"), Decimal("snan"), Decimal("-inf"), float("inf"), float("nan")])
    def test_what_is_not_a_number_is_refused_with_its_path(self, number: Any) -> None:
        assert refusal({"items": [0, 1, 2, {"price": number}]}).startswith("$.items[3].price is ")

    def test_true_is_not_one(self) -> None:
        assert text([True, False, 1, 0]) == "[true,false,1,0]"

    @given(st.floats(allow_nan=False, allow_infinity=False))
    def test_a_float_reads_back_and_has_an_exponent_only_outside_1e_6_to_1e21(self, number: float) -> None:
        written = text(number)
        assert float(written) == number
        assert re.fullmatch(r"0|-?(?:[1-9]\d*|0(?=\.))(?:\.\d*[1-9])?(?:e[+-][1-9]\d*)?", written)
        assert ("e" in written) == (number != 0 and not 1e-6 <= abs(number) < 1e21)

    @given(st.integers() | st.decimals(allow_nan=False, allow_infinity=False))
    def test_an_int_or_decimal_reads_back_exactly(self, number: int | Decimal) -> None:
        assert Decimal(text(number)) == number

    @given(st.integers(-(2**53), 2**53))
    def test_int_float_and_decimal_agree(self, number: int) -> None:
        assert text(number) == text(float(number)) == text(Decimal(number)) == text(Decimal(f"{number}.00"))


class Colour(enum.Enum):
    RED = "red"
    BLUE = 2


class Size(enum.IntEnum):
    SMALL = 1


class Unit(bytes, enum.Enum):
    KILO = (1, "kg")

    def __new__(cls, code: int, label: str) -> Self:
        member = bytes.__new__(cls, [code])
        member._value_ = label
        return member


class Shout(str):
    __slots__ = ()

    def __str__(self) -> str:
        return self.upper()


class Loud(int):
    def __repr__(self) -> str:
        return "loud"


class LoudFloat(float):
    __slots__ = ()
    __repr__ = Loud.__repr__


Point = namedtuple("Point", "x y")  # noqa: PYI024 (the plain kind is the one to be written as an array)


class TestTypes:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (None, "null"),
            (datetime(2025, 3, 14, 9, 26, 53, tzinfo=UTC), '"2025-03-14T09:26:53Z"'),
            (datetime(2025, 3, 14, 11, 26, 53, 120, timezone(timedelta(hours=2))), '"2025-03-14T09:26:53.000120Z"'),
            (datetime(2025, 3, 14, 9, 26), '"2025-03-14T09:26:00"'),  # noqa: DTZ001 (naive on purpose)
            (date(2025, 3, 14), '"2025-03-14"'),
            (time(9, 26, 53, 5), '"09:26:53.000005"'),
            (timedelta(days=1, seconds=2), "86402"),
            (timedelta(microseconds=-1500000), "-1.5"),
            (timedelta(microseconds=1), "0.000001"),
            (UUID("12345678-1234-5678-1234-567812345678"), '"12345678-1234-5678-1234-567812345678"'),
            (b"\xff\xfe\x00", '"//4A"'),
            (bytearray(b"abc"), '"YWJj"'),
            (memoryview(b"a-b-c-")[::2], '"YWJj"'),
            ((1, "a"), '[1,"a"]'),
            (Point(1, 2), "[1,2]"),
            ({3, 10, 2}, "[10,2,3]"),
            (frozenset({"b", "a", "é", "\U0001f602"}), '["a","b","é","\U0001f602"]'),
            ({frozenset({2, 1}), frozenset()}, "[[1,2],[]]"),
            (Colour.RED, '"red"'),
            (Colour.BLUE, "2"),
            (Size.SMALL, "1"),
            (Unit.KILO, '"kg"'),
            (Shout("quiet"), '"quiet"'),
            (Loud(7), "7"),
            (LoudFloat(7.5), "7.5"),
            (OrderedDict(b=1, a=2), '{"a":2,"b":1}'),
            (MappingProxyType({"b": 1, "a": 2}), '{"a":2,"b":1}'),
            (ChainMap({"b": 1}, {"a": 2, "b": 3}), '{"a":2,"b":1}'),
            (UserDict(b=1, a=UserDict()), '{"a":{},"b":1}'),
        ],
    )
    def test_each_has_its_natural_json_form(self, value: Any, expected: str) -> None:
        assert text(value) == expected
        assert text({"in": [value]}) == f'{{"in":[{expected}]}}'

    def test_the_same_moment_in_two_zones_is_one(self) -> None:
        noon = datetime(2025, 6, 1, 12, tzinfo=UTC)
        assert fingerprint(noon) == fingerprint(noon.astimezone(timezone(timedelta(hours=-7))))

    def test_a_moment_before_the_first_year_is_refused(self) -> None:
        first = datetime.min.replace(tzinfo=timezone(timedelta(hours=1)))
        assert "outside the years 1 to 9999" in refusal(first)

    @pytest.mark.parametrize("value", [object(), 1j, Fraction(1, 2), iter([]), int, Colour, range(3)])
    def test_anything_else_is_refused_with_its_path_and_type(self, value: Any) -> None:
        message = refusal({"a": {"b c": (1, value)}})
        assert message.startswith(f'$.a["b c"][1] is of type {type(value).__qualname__}, which has no JSON form')
        assert "exclude=" in message

    def test_the_error_is_a_value_error_of_semel(self) -> None:
        assert issubclass(Unfingerprintable, ValueError)
        assert issubclass(Unfingerprintable, SemelError)


@dataclasses.dataclass
class Line:
    sku: str
    count: int
    unit: ClassVar[str] = "piece"


@dataclasses.dataclass(frozen=True, slots=True)
class DataOrder:
    id: int
    lines: list[Any]
    sent_at: float = 0.0


@dataclasses.dataclass
class Unready:
    later: int = dataclasses.field(init=False)


class StructOrder(msgspec.Struct, rename="camel"):
    id: int
    lines: list[Any]
    sent_at: float = 0.0
    note: str | msgspec.UnsetType = msgspec.UNSET


class ModelOrder(pydantic.BaseModel):
    id: int
    lines: list[Any]
    sent_at: float = pydantic.Field(default=0.0, serialization_alias="sentAt")


class Deposit(msgspec.Struct, tag=True):
    amount: int


class Withdrawal(msgspec.Struct, tag=True):
    amount: int


class Root(pydantic.RootModel[list[int]]):
    pass


class Rich(pydantic.BaseModel):
    at: datetime
    price: Decimal
    raw: bytes
    tags: set[str]
    colour: Colour
    home: pydantic.HttpUrl
    line: Line


class Knot(pydantic.BaseModel):
    next: Any = None


class Twice(Mapping[str, int]):
    """A mapping that gives one key two times, as some multi-dictionaries do."""

    def __getitem__(self, key: str) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        return iter(["a", "a"])

    def __len__(self) -> int:
        return 2


class TestObjects:
    ORDERS: ClassVar = [
        {"id": 7, "lines": [{"sku": "x", "count": 1}], "sent_at": 1.5},
        DataOrder(7, [Line("x", 1)], 1.5),
        StructOrder(7, [Line("x", 1)], 1.5),
        ModelOrder(id=7, lines=[Line("x", 1)], sent_at=1.5),
        MappingProxyType({"id": 7, "lines": (Line("x", 1),), "sent_at": Decimal("1.5")}),
    ]

    @pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
    def test_dict_dataclass_struct_and_model_of_one_content_agree(self, order: Any) -> None:
        assert text(order) == '{"id":7,"lines":[{"count":1,"sku":"x"}],"sent_at":1.5}'

    @pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
    def test_exclude_works_alike_on_all_of_them(self, order: Any) -> None:
        assert text(order, exclude=("sent_at",)) == '{"id":7,"lines":[{"count":1,"sku":"x"}]}'
        assert text({"order": order}, exclude=[("order", "sent_at"), ("order", "lines")]) == '{"order":{"id":7}}'

    def test_a_tag_tells_two_structs_of_one_shape_apart(self) -> None:
        assert text(Deposit(5)) == '{"amount":5,"type":"Deposit"}'
        assert fingerprint(Deposit(5)) != fingerprint(Withdrawal(5))

    def test_a_root_model_is_its_root(self) -> None:
        assert text(Root([1, 2])) == "[1,2]"

    def test_a_model_keeps_its_rich_values(self) -> None:
        model = Rich(
            at=datetime(2025, 1, 1, tzinfo=UTC),
            price=Decimal("9.50"),
            raw=b"abc",
            tags={"b", "a"},
            colour=Colour.BLUE,
            home=pydantic.HttpUrl("https://example.com/x"),
            line=Line("x", 1),
        )
        assert json.loads(canonical(model)) == {
            "at": "2025-01-01T00:00:00Z",
            "price": 9.5,
            "raw": "YWJj",
            "tags": ["a", "b"],
            "colour": 2,
            "home": "https://example.com/x",
            "line": {"sku": "x", "count": 1},
        }

    def test_an_object_that_cannot_be_read_is_refused_with_its_cause(self) -> None:
        with pytest.raises(
            Unfingerprintable, match=r"^\$\.all\[0\] is of type Unready and could not be read: "
        ) as refused:
            canonical({"all": [Unready()]})
        assert isinstance(refused.value.__cause__, AttributeError)

    def test_a_model_that_contains_itself_is_refused(self) -> None:
        knot = Knot()
        knot.next = knot
        assert refusal({"knots": [knot]}).startswith("$.knots[0]")

    def test_a_mapping_that_gives_a_key_twice_is_refused(self) -> None:
        assert "gives one key more than once" in refusal(Twice())


class TestKeys:
    def test_ids_dates_and_enums_are_written_as_their_text(self) -> None:
        identity = UUID(int=1)
        noon = datetime(2025, 6, 1, 12, tzinfo=UTC)
        payload = {identity: 1, date(2025, 6, 1): 2, noon: 3, Colour.RED: 4, Colour.BLUE: 5, -7: 6, Size.SMALL: 7}
        assert json.loads(canonical(payload)) == {
            "00000000-0000-0000-0000-000000000001": 1,
            "2025-06-01": 2,
            "2025-06-01T12:00:00Z": 3,
            "red": 4,
            "2": 5,
            "-7": 6,
            "1": 7,
        }

    @pytest.mark.parametrize("payload", [{1: "a", "1": "b"}, {Colour.RED: "a", "red": "b"}])
    def test_two_keys_of_one_text_are_refused(self, payload: Any) -> None:
        assert refusal({"map": payload}).startswith("$.map has two keys that are both written ")

    @pytest.mark.parametrize("key", [True, None, 1.5, (1, 2), b"x"])
    def test_other_keys_are_refused(self, key: Any) -> None:
        assert refusal([{key: 1, "a": 2}]).startswith(f"$[0] has a key of type {type(key).__qualname__} (")

    def test_a_str_subclass_is_its_text(self) -> None:
        assert text({Shout("b"): 1, "a": 2}) == '{"a":2,"b":1}'


class TestExclude:
    PAYLOAD: ClassVar = {"a": 1, "sent_at": 2, "headers": {"trace": 3, "host": 4}, "items": [{"sku": 5, "trace": 6}]}

    def test_names_and_paths_are_left_out(self) -> None:
        assert text(self.PAYLOAD, exclude=("sent_at", "items", ("headers", "trace"))) == '{"a":1,"headers":{"host":4}}'

    def test_one_name_may_stand_alone(self) -> None:
        assert text({"sent_at": 1, "a": 2}, exclude="sent_at") == '{"a":2}'

    def test_a_path_goes_through_arrays(self) -> None:
        assert json.loads(canonical(self.PAYLOAD, exclude=[("items", "trace")]))["items"] == [{"sku": 5}]
        assert text([{"id": 1, "at": 2}, (), 3], exclude="at") == '[{"id":1},[],3]'

    @pytest.mark.parametrize("payload", [None, 1, "sent_at", {"a": 1}, {"sent_at_all": 1}, ["sent_at"], {"x"}])
    def test_what_is_not_there_is_ignored(self, payload: Any) -> None:
        assert text(payload, exclude=("sent_at", ("a", "b", "c"))) == text(payload)

    def test_a_whole_field_wins_over_a_part_of_it(self) -> None:
        for exclude in (("headers", ("headers", "trace")), (("headers", "trace"), "headers")):
            assert "headers" not in json.loads(canonical(self.PAYLOAD, exclude=exclude))

    def test_keys_are_matched_by_their_text(self) -> None:
        assert text({1: "a", Colour.RED: {2: "b", 3: "c"}}, exclude=("1", ("red", "2"))) == '{"red":{"3":"c"}}'

    def test_an_excluded_field_may_hold_anything(self) -> None:
        assert text({"a": 1, "lock": object()}, exclude=("lock",)) == '{"a":1}'

    def test_the_payload_itself_is_not_changed(self) -> None:
        payload = {"a": {"b": 1, "c": 2}}
        assert text(payload, exclude=[("a", "b")]) == '{"a":{"c":2}}'
        assert payload == {"a": {"b": 1, "c": 2}}

    def test_a_refusal_still_names_the_path(self) -> None:
        assert refusal({"a": [{"b": {1.5: 1}, "c": 2}]}, exclude=[("a", "b", "x")]).startswith("$.a[0].b has a key")

    @pytest.mark.parametrize("exclude", [(1,), [()], [["a", "b"]], [("a", 1)], [None]])
    def test_anything_but_names_and_tuples_of_names_is_a_type_error(self, exclude: Any) -> None:
        with pytest.raises(TypeError, match="exclude takes names and tuples of names"):
            fingerprint({}, exclude=exclude)


class TestShape:
    def test_nesting_is_followed_to_the_limit_and_no_further(self) -> None:
        assert text(nested(MAX_DEPTH)) == "[" * MAX_DEPTH + "]" * MAX_DEPTH
        assert f"nested more than {MAX_DEPTH} levels deep" in refusal(nested(MAX_DEPTH + 1))
        assert len(refusal(nested(100_000))) < 200

    def test_a_circle_is_named(self) -> None:
        loop: dict[str, Any] = {"a": [1, {}]}
        loop["a"][1]["back"] = loop["a"]
        assert refusal({"x": loop}).startswith("$.x.a[1].back contains itself: it is the same object as $.x.a;")

    def test_a_circle_is_named_in_every_kind_of_container(self) -> None:
        order = DataOrder(1, [])
        order.lines.append(order)
        assert refusal(order).startswith("$.lines[0] contains itself: it is the same object as $;")
        strange: dict[Any, Any] = {"é": 1}
        strange[2] = UserDict(inner=OrderedDict(strange=strange))
        assert refusal(strange).startswith('$["2"].inner.strange contains itself: it is the same object as $;')

    def test_one_object_in_two_places_is_no_circle(self) -> None:
        shared: dict[str, Any] = OrderedDict(a=UserDict())
        assert text([shared, {"again": shared}]) == '[{"a":{}},{"again":{"a":{}}}]'
        assert refusal(OrderedDict(a=object())).startswith("$.a is of type object")

    def test_a_call_from_deep_inside_is_no_recursion_error(self) -> None:
        def dive(frames: int) -> bytes:
            return dive(frames - 1) if frames else canonical(nested(150))

        with pytest.raises(Unfingerprintable, match="call stack"):
            dive(sys.getrecursionlimit() - len(inspect.stack()) - 100)

    @pytest.mark.parametrize(
        ("payload", "path"),
        [
            ("\ud800", "$"),
            ({"a": ["ok", "é\udfff"]}, "$.a[1]"),
            ({"a": {"n": 10**5000, "\udc00": 1}}, '$.a["\\udc00"]'),
            ({"\U0001f602": {"\ud83d\ude02"}}, '$["\U0001f602"][0]'),
        ],
    )
    def test_half_a_surrogate_pair_is_refused(self, payload: Any, path: str) -> None:
        message = refusal(payload)
        assert message.startswith(f"{path} holds half of a surrogate pair")
        assert message.encode()


STABLE = """
import enum
from semel.fingerprint import fingerprint

class Colour(enum.Enum):
    RED = "red"
    BLUE = 2
    BOTH = ("red", 2)

tags = {f"tag-{number}" for number in range(50)}
print(fingerprint({"tags": tags, Colour.RED: set(Colour), "deep": [{frozenset("xyz"), frozenset()}, {1, 2.5, "3"}]}))
"""


class TestFingerprint:
    def test_it_is_the_version_and_the_sha256_of_the_canonical_text(self) -> None:
        assert VERSION == "1"
        assert fingerprint({"b": 1.0, "a": "é"}) == "1:" + sha256('{"a":"é","b":1}'.encode()).hexdigest()

    def test_it_never_changes(self) -> None:
        assert fingerprint({}) == "1:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
        payload = {"id": UUID(int=7), "at": datetime(2025, 1, 1, tzinfo=UTC), "n": [1.5, 1e300, Decimal("0.10")]}
        assert fingerprint(payload) == "1:fe4bc1ecae7b2dd810936005ef77efa4918a8bbf9607fe8dcf76decccf95f5b6"

    def test_it_is_the_same_in_every_process(self) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        prints = {
            subprocess.run(
                [sys.executable, "-c", STABLE],
                env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for seed in ("0", "1", "4242", "random")
        }
        assert len(prints) == 1
        assert re.fullmatch(r"1:[0-9a-f]{64}\n", prints.pop())

    @given(readable_values)
    def test_canonical_json_reads_back_as_the_payload(self, payload: Any) -> None:
        assert json.loads(canonical(payload)) == payload

    @given(json_values)
    def test_canonical_json_is_its_own_canonical_form(self, payload: Any) -> None:
        assert canonical(json.loads(canonical(payload), parse_float=Decimal)) == canonical(payload)

    @given(st.dictionaries(st.text(), json_values), st.randoms())
    def test_the_order_of_keys_is_irrelevant(self, payload: dict[str, Any], random: Any) -> None:
        items = list(payload.items())
        random.shuffle(items)
        assert fingerprint(dict(items)) == fingerprint(payload)

    @given(json_values)
    def test_equal_payloads_of_other_types_have_one_fingerprint(self, payload: Any) -> None:
        assert fingerprint(retyped(payload)) == fingerprint(payload)

    @given(readable_values, readable_values)
    def test_different_payloads_have_different_fingerprints(self, one: Any, other: Any) -> None:
        assert (fingerprint(one) == fingerprint(other)) == (distinct(one) == distinct(other))


def distinct(payload: Any) -> Any:
    """The payload in a form in which == tells True from 1."""
    match payload:
        case bool():
            return ("bool", payload)
        case dict():
            return {name: distinct(item) for name, item in payload.items()}
        case list():
            return [distinct(item) for item in payload]
        case _:
            return payload


def retyped(payload: Any) -> Any:
    """An equal payload, with other types for the same things."""
    match payload:
        case dict():
            return MappingProxyType({name: retyped(payload[name]) for name in reversed(payload)})
        case list():
            return tuple(retyped(item) for item in payload)
        case float():
            return Decimal(repr(payload))
        case int() if not isinstance(payload, bool):
            return float(payload) if abs(payload) <= 2**53 else Decimal(payload)
        case _:
            return payload
