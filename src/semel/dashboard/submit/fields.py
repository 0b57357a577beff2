"""The fields of a form that is made from a model's signature: which there are, what they show, and how they are read.

A field is left empty for the parameter's default, which is then not sent: whoever leaves it asks for the same as who
never named it. What a field cannot show as it is (an empty text, a null, several lines) is shown as JSON instead.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from semel.dashboard.submit import typed
from semel.runs.models.model import Model
from semel.runs.models.parameters import Signature

Widget: TypeAlias = Literal["text", "number", "choice", "json"]
Schema: TypeAlias = Mapping[str, Any]

_BOUNDS = (
    ("minimum", "at least"),
    ("exclusiveMinimum", "more than"),
    ("maximum", "at most"),
    ("exclusiveMaximum", "less than"),
    ("multipleOf", "a multiple of"),
    ("minLength", "characters, at least"),
    ("maxLength", "characters, at most"),
    ("minItems", "items, at least"),
    ("maxItems", "items, at most"),
    ("pattern", "fits"),
    ("format", "as a"),
    ("contentEncoding", "in"),
)
_WORDS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "array": "JSON list",
    "object": "JSON object",
}


class Field(Struct, kw_only=True):
    """A parameter in the form; ``text`` is what its field holds."""

    name: str
    widget: Widget
    required: bool
    nullable: bool
    description: str
    hint: str
    default: str | None
    choices: list[tuple[str, str]]
    text: str = ""

    @property
    def posted(self) -> str:
        """What it is called in the form: how it is to be read is part of that."""
        return f"{self.widget}.{self.name}"

    @property
    def place(self) -> str:
        """Where what is wrong with it is kept."""
        return place_of(self.name)

    def read(self) -> Any:
        """The value that its text stands for; UNSET to leave it to the default."""
        text = self.text if self.widget == "text" else self.text.strip()
        if text:
            return _READERS[self.widget](text)
        if not self.required:
            return msgspec.UNSET
        if self.nullable:
            return None
        raise typed.FieldError("This is needed.")

    def show(self, value: Any) -> None:
        """Put the value into it; as JSON where it would not come out of it as it went in."""
        self.text = value if self.widget == "text" and isinstance(value, str) else _json(value)
        if not self._gives(value):
            self.widget, self.text = "json", _json(value)

    def _gives(self, value: Any) -> bool:
        if any(character in self.text for character in "\r\n") and self.widget != "json":
            return False
        if self.widget == "choice" and self.text not in [choice for choice, _ in self.choices]:
            return False
        try:
            return msgspec.json.encode(self.read()) == msgspec.json.encode(value)
        except (ValueError, TypeError):
            return False


def place_of(name: str) -> str:
    """Of a parameter, among the places of a form at which something can be wrong."""
    return f"p.{name}"


def fields_of(schema: Schema) -> list[Field]:
    """A field for each parameter, in the order of the signature."""
    classes = schema.get("$defs", {})
    required = schema.get("required", ())
    return [_field(name, kind, name in required, classes) for name, kind in schema.get("properties", {}).items()]


def fill(fields: Sequence[Field], values: Mapping[str, Any]) -> dict[str, Any]:
    """Put the values into their fields, and give those that have none."""
    for field in fields:
        if field.name in values:
            field.show(values[field.name])
    names = {field.name for field in fields}
    return {name: value for name, value in values.items() if name not in names}


def parameter_faults(model: Model, given: Mapping[str, Any]) -> dict[str, str]:
    """What is wrong with each of the parameters, judged one by one as the model itself judges them."""
    told: dict[str, str] = {}
    try:
        parameters = inspect.signature(model.function).parameters.values()
    except NameError:  # an annotation that names what is not there at run time; the refusal as a whole is shown
        return told
    for parameter in parameters:
        if parameter.name in given and parameter.name in model.signature.parameters:
            try:
                _alone(model, parameter).check({parameter.name: given[parameter.name]})
            except ValueError as error:
                told[parameter.name] = _sentence(parameter.name, str(error))
    return told


def _alone(model: Model, parameter: inspect.Parameter) -> Signature:
    """The model as if it took this parameter only."""

    @functools.wraps(model.function)
    def alone() -> None: ...

    only = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    alone.__signature__ = inspect.Signature([only])  # type: ignore[attr-defined]
    return Signature(alone)


def _sentence(name: str, text: str) -> str:
    told = text.removeprefix(f"cannot take the parameter {name!r:.200}")
    return typed.sentence(told.removeprefix(":").strip().replace("`", ""))


def _field(name: str, kind: Schema, required: bool, classes: Schema) -> Field:
    inner, nullable = _inner(kind, classes)
    default = None if required or "default" not in kind else json.dumps(kind["default"], ensure_ascii=False)
    return Field(
        name=name,
        widget=_widget(inner),
        required=required,
        nullable=nullable,
        description=str(kind.get("description") or inner.get("description") or ""),
        hint=_hint(inner, nullable),
        default=default,
        choices=_choices(inner),
    )


def _inner(kind: Schema, classes: Schema) -> tuple[Schema, bool]:
    """What the parameter takes besides null, and whether it takes that."""
    several = kind.get("anyOf")
    if several is not None:
        others = [each for each in several if each.get("type") != "null"]
        if len(others) == 1:
            return _inner(others[0], classes)[0], len(others) < len(several)
        return {}, len(others) < len(several)
    if "$ref" in kind:
        return classes.get(str(kind["$ref"]).rpartition("/")[2], {}), False
    return kind, None in kind.get("enum", ())


def _widget(kind: Schema) -> Widget:
    if "enum" in kind or kind.get("type") == "boolean":
        return "choice"
    if kind.get("type") == "string":
        return "text"
    return "number" if kind.get("type") in ("integer", "number") else "json"


def _choices(kind: Schema) -> list[tuple[str, str]]:
    """What can be chosen: as JSON, which the form sends, and as people read it."""
    values = [True, False] if kind.get("type") == "boolean" else kind.get("enum", [])
    return [(_json(value), value if isinstance(value, str) and value else _json(value)) for value in values]


def _hint(kind: Schema, nullable: bool) -> str:
    words = "one of these" if "enum" in kind else _WORDS.get(str(kind.get("type")), "JSON")
    told = [f"{words} or null" if nullable and "enum" not in kind else words]
    told += [f"{said} {kind[name]}" for name, said in _BOUNDS if name in kind]
    if kind.get("type") == "array" and (inside := kind.get("items", {}).get("type")):
        told[0] += f" of {inside}s"
    if examples := kind.get("examples"):
        told.append(f"such as {_json(examples[0])}")
    return ", ".join(told)


def _json(value: Any) -> str:
    nested = isinstance(value, dict | list) and bool(value)
    return json.dumps(value, ensure_ascii=False, indent=2 if nested else None)


def _choice(text: str) -> Any:
    try:
        return typed.json_value(text)
    except typed.FieldError:
        raise typed.FieldError("This is none of the choices.") from None


_READERS: Mapping[Widget, Callable[[str], Any]] = {
    "text": str,
    "number": typed.parse_number,
    "choice": _choice,
    "json": typed.json_value,
}
