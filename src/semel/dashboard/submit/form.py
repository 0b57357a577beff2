"""The form that submits a run, made from the signature of its model.

An empty field stands for the parameter's default, and is not sent: the request is then the same as one that never
named the parameter. A value that its field cannot show (an empty text, null, several lines) is shown as JSON.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias
from uuid import uuid4

import msgspec
from msgspec import Struct

from semel.api_types import Problem, RunRequest
from semel.dashboard.forms import (
    FieldError,
    Form,
    parse_json,
    parse_json_object,
    parse_number,
    sentence,
    validation_error,
)
from semel.errors import CostLimitExceeded, InvalidParameters, KeyReused, QuotaExceeded, SemelError, Unfingerprintable
from semel.runs.models.model import Model
from semel.runs.models.parameters import Signature
from semel.runs.types import Run
from semel.service.api.problems import problem_of

Widget: TypeAlias = Literal["text", "number", "choice", "json"]
Schema: TypeAlias = Mapping[str, Any]

OPTIONS = ("user", "queue", "priority", "delay", "cost")
"""The options of a submission besides its key, as the API's request names them."""
_NUMBERS = ("priority", "delay", "cost")
GENERATED_KEY = "ui-"
"""The prefix of keys that the form generates, which make sending a form twice harmless."""
_BOUNDS = (
    ("minimum", "at least {}"),
    ("exclusiveMinimum", "greater than {}"),
    ("maximum", "at most {}"),
    ("exclusiveMaximum", "less than {}"),
    ("multipleOf", "a multiple of {}"),
    ("minLength", "at least {} characters"),
    ("maxLength", "at most {} characters"),
    ("minItems", "at least {} items"),
    ("maxItems", "at most {} items"),
    ("pattern", "matches {}"),
    ("format", "format {}"),
    ("contentEncoding", "encoded as {}"),
)
_TYPES = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "array": "JSON list",
    "object": "JSON object",
}


class Field(Struct, kw_only=True):
    """The field of a parameter; ``text`` is what it holds."""

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
    def posted_name(self) -> str:
        """Its name in the form, which includes the widget: that decides how the text is read."""
        return f"{self.widget}.{self.name}"

    @property
    def error_key(self) -> str:
        """Its key among the form's errors."""
        return _error_key(self.name)

    def read(self) -> Any:
        """The value of its text; UNSET where it is empty and the parameter has a default."""
        text = self.text if self.widget == "text" else self.text.strip()
        if text:
            return _READERS[self.widget](text)
        if not self.required:
            return msgspec.UNSET
        if self.nullable:
            return None
        raise FieldError("This field is required.")

    def show(self, value: Any) -> None:
        """Shows the value; as JSON where reading the field would return another one."""
        self.text = value if self.widget == "text" and isinstance(value, str) else _json(value)
        if not self._reads_as(value):
            self.widget, self.text = "json", _json(value)

    def _reads_as(self, value: Any) -> bool:
        if any(character in self.text for character in "\r\n") and self.widget != "json":
            return False
        if self.widget == "choice" and self.text not in [choice for choice, _ in self.choices]:
            return False
        try:
            return msgspec.json.encode(self.read()) == msgspec.json.encode(value)
        except (ValueError, TypeError):
            return False


class SubmitForm(Struct, kw_only=True):
    """The form: its fields and options with what was typed, and the errors."""

    model: Model
    fields: list[Field]
    takes_extra: bool
    key: str = ""
    new_key: str = ""
    """Another key, to submit another run when the key already has one."""
    options: dict[str, str] = {}
    dedupe: bool = True
    extra: str = ""
    """Parameters that the signature does not name, as a JSON object."""
    all_json: str | None = None
    """All parameters as one JSON object, where the form shows them so; None where it shows fields."""
    errors: dict[str, str] = {}
    """By option, ``key``, ``extra``, ``all_json``, or the ``error_key`` of a field."""
    problem: Problem | None = None
    over_quota: bool = False
    key_taken: bool = False

    @property
    def shows_extra(self) -> bool:
        """Whether there is a field for extra parameters."""
        return self.takes_extra or bool(self.extra)

    def read(self) -> tuple[dict[str, Any], dict[str, str]]:
        """The body of the API's request, as far as it can be read, and the errors of the rest."""
        errors: dict[str, str] = {}
        body: dict[str, Any] = {"model": self.model.name, "parameters": self._parameters(errors)}
        if self.key:
            body["idempotency_key"] = self.key
        for name, text in self.options.items():
            with collect_errors(errors, name):
                body[name] = _option(name, text.strip())
        if self.key.startswith(GENERATED_KEY) and self.dedupe:
            body["dedupe"] = True
        elif not self.key and not self.dedupe:
            body["dedupe"] = False
        return body, errors

    def _parameters(self, errors: dict[str, str]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        key, text = ("extra", self.extra) if self.all_json is None else ("all_json", self.all_json)
        with collect_errors(errors, key):
            values = parse_json_object(text) if text.strip() else {}
        if self.all_json is not None:
            return values
        for field in self.fields:
            with collect_errors(errors, field.error_key):
                value = field.read()
                if value is not msgspec.UNSET:
                    values[field.name] = value
        return values

    def validate(self, parameters: Mapping[str, Any]) -> dict[str, str]:
        """The errors that the model reports for each parameter."""
        found = _parameter_errors(self.model, parameters)
        if self.all_json is None:
            return {_error_key(name): message for name, message in found.items()}
        return {"all_json": " ".join(f"{name}: {message}" for name, message in found.items())} if found else {}

    def refuse(self, error: SemelError, body: Mapping[str, Any]) -> None:
        """Adds the error that the submission raised, next to the field that caused it."""
        self.problem = problem_of(error)
        self.over_quota = isinstance(error, QuotaExceeded | CostLimitExceeded)
        text = str(error)
        if isinstance(error, KeyReused):
            self.key_taken = True
            self.errors["key"] = "This key already has a run with other parameters."
        elif isinstance(error, InvalidParameters | Unfingerprintable):
            self.errors |= self.validate(body["parameters"])
        for name, key in {"idempotency_key": "key", **{name: name for name in OPTIONS}}.items():
            if text.startswith(f"{name} "):
                self.errors[key] = sentence(text)

    def show_fields(self, values: Mapping[str, Any]) -> None:
        """Shows the parameters in their fields, and those without a field as extra ones."""
        for field in self.fields:
            if field.name in values:
                field.show(values[field.name])
        names = {field.name for field in self.fields}
        rest = {name: value for name, value in values.items() if name not in names}
        self.extra = json.dumps(rest, ensure_ascii=False, indent=2) if rest else ""
        self.all_json = None

    def show_json(self, values: Mapping[str, Any]) -> None:
        """Shows the parameters as one JSON object."""
        self.all_json = json.dumps(values, ensure_ascii=False, indent=2)


@contextmanager
def collect_errors(errors: dict[str, str], key: str) -> Iterator[None]:
    """Adds a FieldError of the block to the errors."""
    try:
        yield
    except FieldError as error:
        errors[key] = str(error)


def empty_form(model: Model) -> SubmitForm:
    """The form of a model, with a generated key."""
    return SubmitForm(
        model=model,
        fields=_fields(model.signature.schema()),
        takes_extra=model.signature.takes_extra,
        key=_generate_key(),
        new_key=_generate_key(),
    )


def form_of_run(model: Model, run: Run) -> SubmitForm:
    """The form with the parameters of a run, and its options where they differ from the model's."""
    form = empty_form(model)
    form.show_fields(msgspec.json.decode(run.parameters_json))
    defaults = {"queue": model.queue, "priority": model.priority, "cost": model.cost}
    values = {"queue": run.queue, "priority": run.priority, "cost": run.asked_cost}
    form.options = {name: str(value) for name, value in values.items() if value != defaults[name]}
    return form


def posted_form(model: Model, sent: Form) -> SubmitForm:
    """The form as the browser sent it."""
    form = empty_form(model)
    form.key = sent.get("key").strip()
    form.new_key = sent.get("new_key").strip() or form.new_key
    if "use_new_key" in sent:
        form.key, form.new_key = form.new_key, _generate_key()
    form.options = {name: sent.get(name) for name in OPTIONS if sent.get(name).strip()}
    form.dedupe = sent.get("dedupe") == "yes"
    form.all_json = sent.optional("all_json")
    form.extra = sent.get("extra")
    for field in form.fields:
        if f"json.{field.name}" in sent:
            field.widget = "json"
        field.text = sent.get(field.posted_name)
    return form


def _generate_key() -> str:
    return f"{GENERATED_KEY}{uuid4()}"


def _option(name: str, text: str) -> Any:
    value = parse_number(text) if name in _NUMBERS else text
    if reason := validation_error(RunRequest, {"model": "any", name: value}):
        raise FieldError(reason.replace("`", ""))
    return value


def _error_key(name: str) -> str:
    return f"p.{name}"  # a parameter may have the name of an option


def _parameter_errors(model: Model, given: Mapping[str, Any]) -> dict[str, str]:
    """The error of each parameter, validated one by one as the model validates them."""
    errors: dict[str, str] = {}
    try:
        parameters = inspect.signature(model.function).parameters.values()
    except NameError:  # an annotation uses a name that does not exist at run time; the form shows one error instead
        return errors
    for parameter in parameters:
        if parameter.name in given and parameter.name in model.signature.parameters:
            try:
                _signature_of_one(model, parameter).check({parameter.name: given[parameter.name]})
            except ValueError as error:
                reason = str(error).removeprefix(f"cannot take the parameter {parameter.name!r:.200}")
                errors[parameter.name] = sentence(reason.removeprefix(":").strip().replace("`", ""))
    return errors


def _signature_of_one(model: Model, parameter: inspect.Parameter) -> Signature:
    """The model's signature as if it had only this parameter."""

    @functools.wraps(model.function)
    def function() -> None: ...

    only = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    function.__signature__ = inspect.Signature([only])  # type: ignore[attr-defined]
    return Signature(function)


def _fields(schema: Schema) -> list[Field]:
    definitions = schema.get("$defs", {})
    required = schema.get("required", ())
    return [_field(name, kind, name in required, definitions) for name, kind in schema.get("properties", {}).items()]


def _field(name: str, kind: Schema, required: bool, definitions: Schema) -> Field:
    inner, nullable = _without_null(kind, definitions)
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


def _without_null(kind: Schema, definitions: Schema) -> tuple[Schema, bool]:
    """The schema without null, and whether it allowed null."""
    several = kind.get("anyOf")
    if several is not None:
        others = [each for each in several if each.get("type") != "null"]
        if len(others) == 1:
            return _without_null(others[0], definitions)[0], len(others) < len(several)
        return {}, len(others) < len(several)
    if "$ref" in kind:
        return definitions.get(str(kind["$ref"]).rpartition("/")[2], {}), False
    return kind, None in kind.get("enum", ())


def _widget(kind: Schema) -> Widget:
    if "enum" in kind or kind.get("type") == "boolean":
        return "choice"
    if kind.get("type") == "string":
        return "text"
    return "number" if kind.get("type") in ("integer", "number") else "json"


def _choices(kind: Schema) -> list[tuple[str, str]]:
    """The choices: the JSON that the form sends, and the label."""
    values = [True, False] if kind.get("type") == "boolean" else kind.get("enum", [])
    return [(_json(value), value if isinstance(value, str) and value else _json(value)) for value in values]


def _hint(kind: Schema, nullable: bool) -> str:
    words = "one of these" if "enum" in kind else _TYPES.get(str(kind.get("type")), "JSON")
    if kind.get("type") == "array" and (inside := kind.get("items", {}).get("type")):
        words += f" of {inside}s"
    hints = [f"{words} or null" if nullable and "enum" not in kind else words]
    hints += [hint.format(kind[name]) for name, hint in _BOUNDS if name in kind]
    if examples := kind.get("examples"):
        hints.append(f"such as {_json(examples[0])}")
    return ", ".join(hints)


def _json(value: Any) -> str:
    nested = isinstance(value, dict | list) and bool(value)
    return json.dumps(value, ensure_ascii=False, indent=2 if nested else None)


def _choice(text: str) -> Any:
    try:
        return parse_json(text)
    except FieldError:
        raise FieldError("Must be one of the choices.") from None


_READERS: Mapping[Widget, Callable[[str], Any]] = {
    "text": str,
    "number": parse_number,
    "choice": _choice,
    "json": parse_json,
}
