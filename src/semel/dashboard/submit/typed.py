"""What people type into the fields of a form, read as values; what cannot be read is a sentence for its field."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from semel.runs import strict_json
from semel.service.api.request import DEEPEST, MOST_VALUES


class FieldError(ValueError):
    """What is wrong with a field, as it is shown beside it."""


def parse_number(text: str) -> int | float:
    """A number, whole where it is written so."""
    try:
        value = float(text)
        if text.lstrip("+-").isdecimal():
            return int(text)
    except ValueError:
        raise FieldError("This is no number.") from None
    if not math.isfinite(value):
        raise FieldError("This is no number that can be kept.")
    return value


def json_value(text: str) -> Any:
    """A value written as JSON."""
    data = text.encode(errors="replace")
    if strict_json.count(data) > MOST_VALUES:
        raise FieldError(f"This has more than {MOST_VALUES:,} values.")
    if strict_json.depth(data) > DEEPEST:
        raise FieldError("This is nested too deeply.")
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise FieldError(f"This is not JSON: {_reason(str(error))}. A text is written in double quotes.") from None
    except RecursionError:
        raise FieldError("This is nested too deeply.") from None


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    value = json_value(text)
    if not isinstance(value, dict):
        raise FieldError('This is no JSON object, such as {"name": 1}.')
    return value


def validation_error(kind: type, values: dict[str, Any]) -> str | None:
    """Why the values are none of that kind, as a sentence; None when they are."""
    try:
        msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        return sentence(str(error).partition(" - at `$")[0])
    return None


def sentence(text: str) -> str:
    """A reason with a capital at its beginning and a full stop at its end."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _reason(message: str) -> str:
    return message.removeprefix("JSON is malformed: ").rstrip(".")
