"""The form of a submission as it stands: the model's fields and the options, with what was typed and what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import msgspec
from msgspec import Struct

from semel.api_types import Problem, RunRequest
from semel.dashboard.forms import Form
from semel.dashboard.submit import typed
from semel.dashboard.submit.fields import Field, fields_of, fill, parameter_faults, place_of
from semel.errors import CostLimitExceeded, InvalidParameters, KeyReused, QuotaExceeded, SemelError, Unfingerprintable
from semel.runs.models.model import Model
from semel.runs.types import Run
from semel.service.api.problems import problem_of

OPTIONS = ("user", "queue", "priority", "delay", "cost")
"""What can be said of a submission besides the key, by its name in the request."""
_NUMBERS = ("priority", "delay", "cost")


OWN_KEY = "ui-"
"""How the keys begin that forms make: they recognise a form that is sent twice, and are nobody's name for the run."""


def new_key() -> str:
    """A key for one submission, however often its form is sent."""
    return f"{OWN_KEY}{uuid4()}"


class SubmitForm(Struct, kw_only=True):
    """A form. ``whole`` holds the parameters where all of them are written as one JSON object, else it is None."""

    model: Model
    fields: list[Field]
    takes_extra: bool
    key: str = ""
    fresh: str = ""
    """Another key, for who means another run than the one that has the key."""
    options: dict[str, str] = {}
    dedupe: bool = True
    more: str = ""
    """Parameters besides the named ones, as a JSON object."""
    whole: str | None = None
    faults: dict[str, str] = {}
    """What is wrong, by the place where it is shown: an option, ``key``, ``more``, ``whole``, or a field's."""
    problem: Problem | None = None
    over_quota: bool = False
    key_taken: bool = False

    @property
    def shows_more(self) -> bool:
        """Whether there is a field for other parameters."""
        return self.takes_extra or bool(self.more)

    def read(self) -> tuple[dict[str, Any], dict[str, str]]:
        """What can be read of it, as the request that the API takes; and what is wrong with the rest, by its place."""
        faults: dict[str, str] = {}
        body: dict[str, Any] = {"model": self.model.name, "parameters": self._parameters(faults)}
        if self.key:
            body["idempotency_key"] = self.key
        for name, text in self.options.items():
            with collect_errors(faults, name):
                body[name] = _option(name, text.strip())
        if self.key.startswith(OWN_KEY) and self.dedupe:
            body["dedupe"] = True
        elif not self.key and not self.dedupe:
            body["dedupe"] = False
        return body, faults

    def _parameters(self, faults: dict[str, str]) -> dict[str, Any]:
        given: dict[str, Any] = {}
        place, text = ("more", self.more) if self.whole is None else ("whole", self.whole)
        with collect_errors(faults, place):
            given = typed.json_object(text) if text.strip() else {}
        if self.whole is not None:
            return given
        for field in self.fields:
            with collect_errors(faults, field.place):
                value = field.read()
                if value is not msgspec.UNSET:
                    given[field.name] = value
        return given

    def judged(self, given: Mapping[str, Any]) -> dict[str, str]:
        """What the model says of each of the parameters, by its place."""
        told = parameter_faults(self.model, given)
        if self.whole is None:
            return {place_of(name): said for name, said in told.items()}
        return {"whole": " ".join(f"{name}: {said}" for name, said in told.items())} if told else {}

    def refused(self, error: SemelError, body: Mapping[str, Any]) -> None:
        """Note why it was not taken, where that belongs."""
        self.problem = problem_of(error)
        self.over_quota = isinstance(error, QuotaExceeded | CostLimitExceeded)
        said = str(error)
        if isinstance(error, KeyReused):
            self.key_taken = True
            self.faults["key"] = "This key has a run already, and that has other parameters."
        elif isinstance(error, InvalidParameters | Unfingerprintable):
            self.faults |= self.judged(body["parameters"])
        for name, place in {"idempotency_key": "key", **{name: name for name in OPTIONS}}.items():
            if said.startswith(f"{name} "):
                self.faults[place] = typed.sentence(said)


@contextmanager
def collect_errors(faults: dict[str, str], place: str) -> Iterator[None]:
    """Note what cannot be read, and go on."""
    try:
        yield
    except typed.FieldError as fault:
        faults[place] = str(fault)


def _option(name: str, text: str) -> Any:
    value = typed.parse_number(text) if name in _NUMBERS else text
    if reason := typed.validation_error(RunRequest, {"model": "any", name: value}):
        raise typed.FieldError(reason.replace("`", ""))
    return value


def _blank(model: Model) -> SubmitForm:
    schema = model.signature.schema()
    return SubmitForm(
        model=model,
        fields=fields_of(schema),
        takes_extra=model.signature.takes_extra,
        key=new_key(),
        fresh=new_key(),
    )


def new_form(model: Model, values: Mapping[str, Any] | None = None, run: Run | None = None) -> SubmitForm:
    """A form to begin with; with the parameters and the place of a run, where one is given."""
    sheet = _blank(model)
    show_fields(sheet, values or {})
    if run is not None:
        own = {"queue": model.queue, "priority": model.priority, "cost": model.cost}
        then = {"queue": run.queue, "priority": run.priority, "cost": run.asked_cost}
        sheet.options = {name: str(value) for name, value in then.items() if value != own[name]}
    return sheet


def show_fields(sheet: SubmitForm, values: Mapping[str, Any]) -> None:
    """Show the parameters in their fields."""
    rest = fill(sheet.fields, values)
    sheet.more = json.dumps(rest, ensure_ascii=False, indent=2) if rest else ""
    sheet.whole = None


def show_whole(sheet: SubmitForm, values: Mapping[str, Any]) -> None:
    """Show the parameters as one JSON object."""
    sheet.whole = json.dumps(values, ensure_ascii=False, indent=2)


def read_form(model: Model, form: Form) -> SubmitForm:
    """The form as it was sent."""
    sheet = _blank(model)
    sheet.key = form.get("key").strip()
    sheet.fresh = form.get("fresh").strip() or sheet.fresh
    if "renew" in form:
        sheet.key, sheet.fresh = sheet.fresh, new_key()
    sheet.options = {name: form.get(name) for name in OPTIONS if form.get(name).strip()}
    sheet.dedupe = form.get("dedupe") == "yes"
    if "whole" in form:
        sheet.whole = form.get("whole")
    sheet.more = form.get("more")
    for field in sheet.fields:
        if f"json.{field.name}" in form:
            field.widget = "json"
        field.text = form.get(field.posted)
    return sheet
