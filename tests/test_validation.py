"""A name that nobody knows is refused with the nearest known one, wherever it stands in a body."""

from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta, Struct

from semel._validation import with_valid_values


class Wheel(Struct, forbid_unknown_fields=True):
    size: int = 1


class Car(Struct, forbid_unknown_fields=True):
    colour: str = ""
    wheels: Annotated[list[Wheel], Meta(max_length=9)] = []
    spare: Wheel | None = None
    named: dict[str, Wheel] = {}
    anything: Any = None


@pytest.mark.parametrize(
    ("kind", "data", "end"),
    [
        (Car, {"color": "red"}, "; did you mean 'colour'?"),
        (Car, {"zzz": 1}, "; there are: anything, colour, named, spare, wheels"),
        (Car, {"wheels": [{"size": 1}, {"sise": 2}]}, "; did you mean 'size'?"),
        (Car, {"spare": {"sizes": 1}}, "; did you mean 'size'?"),
        (Car, {"named": {"left": {"siz": 1}}}, "; did you mean 'size'?"),
        (list[Car], [{}, {"colours": ""}], "; did you mean 'colour'?"),
        (Car | None, {"colours": ""}, "; did you mean 'colour'?"),
        (Car, {"colour": 7}, "Expected `str`, got `int` - at `$.colour`"),
        (Car, {"a`b": 7}, "; there are: anything, colour, named, spare, wheels"),
    ],
)
def test_an_unknown_field_is_named_with_the_nearest(kind: Any, data: Any, end: str) -> None:
    with pytest.raises(msgspec.ValidationError) as wrong:
        msgspec.convert(data, kind)
    assert with_valid_values(str(wrong.value), kind).endswith(end)
