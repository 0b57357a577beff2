"""Which of the account's predictions belongs to a run, for when the response to a call was lost.

The run's token is part of the webhook's address, and of an input if the config names one for it: a prediction with the
token is the run's. If Replicate shows neither, the model, the input and the time of creation are compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from semel.providers.replicate.types import Prediction

Verdict: TypeAlias = Literal["certain", "alike", "unclear", "other"]


class PredictionQuery(Struct, frozen=True, kw_only=True):
    """What a run asks Replicate to predict."""

    version: str | None = None
    model: str | None = None
    input: dict[str, Any] = {}
    token_input: str | None = None
    """An input of the model that takes any text: it is set to the token."""

    def input_with(self, token: str) -> dict[str, Any]:
        """The input to send."""
        return self.input if self.token_input is None else {**self.input, self.token_input: token}


class Candidates(Struct, frozen=True, kw_only=True):
    """Predictions that are the run's, may be the run's, and those that cannot be judged; each list oldest first."""

    certain: list[str]
    alike: list[str]
    unclear: list[str]


def judge(found: Prediction, query: PredictionQuery, token: str, since: float) -> Verdict:
    """Whether the prediction is the one that was requested with the token, at ``since`` or later."""
    if found.source == "web" or (found.created is not None and found.created < since):
        return "other"
    if found.webhook is not None:
        return "certain" if found.webhook.rstrip("/").endswith("/" + token) else "other"
    if found.data_removed or not isinstance(found.input, dict):
        return "other" if _same_model(found, query) is False else "unclear"
    if query.token_input is not None and query.token_input in found.input:
        return "certain" if found.input[query.token_input] == token else "other"
    same_input = _same_input(found.input, query.input_with(token))
    same_model = _same_model(found, query)
    if same_input is False or same_model is False:
        return "other"
    return "alike" if same_input and same_model else "unclear"


def group_by_verdict(judged: Iterable[tuple[Prediction, Verdict]], claimed: Iterable[str]) -> Candidates:
    """The judged predictions by verdict, without those ``claimed`` by other jobs."""
    left_out = set(claimed)
    by_age = sorted(judged, key=lambda each: (each[0].created or 0.0, each[0].id))
    ids: dict[str, list[str]] = {"certain": [], "alike": [], "unclear": [], "other": []}
    for found, verdict in by_age:
        if found.id not in left_out:
            ids[verdict].append(found.id)
    return Candidates(certain=ids["certain"], alike=ids["alike"], unclear=ids["unclear"])


def _same_model(found: Prediction, query: PredictionQuery) -> bool | None:
    """None if unknown: Replicate hides the version of some models, and renames others."""
    if query.version is None or "/" in query.version:
        name, _, version = (query.version or query.model or "").partition(":")
    else:
        name, version = "", query.version
    if version and found.version == version:
        return True
    if version and found.version and len(found.version) == len(version) == 64:
        return False
    if name and found.model == name and not version:
        return True
    return None


def _same_input(found: dict[str, Any], given: dict[str, Any]) -> bool | None:
    """None if unknown: a file may be stored and linked, and a default be filled in."""
    if found == given:
        return True
    for name, value in given.items():
        if name in found and found[name] != value and not _is_file(value):
            return False
        if name not in found:
            return False
    return None


def _is_file(value: Any) -> bool:
    if isinstance(value, list):
        return any(_is_file(each) for each in value)
    return isinstance(value, str) and value.startswith("data:")
