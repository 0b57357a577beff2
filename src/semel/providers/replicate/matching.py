"""Which of Replicate's predictions is ours? Asked when a call's answer was lost.

The token of the run travels in the address of the webhook, and in an input where the config names one for it: what has
our token is ours. Where Replicate shows neither, what was asked must tell: the same model with the same input, created
since we meant to ask.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from semel.providers.replicate.types import Prediction

Verdict: TypeAlias = Literal["certain", "alike", "unclear", "other"]


class PredictionQuery(Struct, frozen=True, kw_only=True):
    """What a run asks of Replicate."""

    version: str | None = None
    model: str | None = None
    input: dict[str, Any] = {}
    token_input: str | None = None
    """An input of the model that takes any text, and gets the token."""

    def given(self, token: str) -> dict[str, Any]:
        """The input as it is sent."""
        return self.input if self.token_input is None else {**self.input, self.token_input: token}


class Choice(Struct, frozen=True, kw_only=True):
    """What a look at the list came to: the predictions that are ours or like ours, oldest first, and doubtful ones."""

    certain: list[str]
    alike: list[str]
    unclear: list[str]


def judge(found: Prediction, asked: PredictionQuery, token: str, since: float) -> Verdict:
    """Whether the prediction is the one that was asked for under the token at ``since`` or later."""
    if found.source == "web" or (found.created is not None and found.created < since):
        return "other"
    if found.webhook is not None:
        return "certain" if found.webhook.rstrip("/").endswith("/" + token) else "other"
    if found.data_removed or not isinstance(found.input, dict):
        return "other" if _same_model(found, asked) is False else "unclear"
    if asked.token_input is not None and asked.token_input in found.input:
        return "certain" if found.input[asked.token_input] == token else "other"
    same_input = _same_input(found.input, asked.given(token))
    same_model = _same_model(found, asked)
    if same_input is False or same_model is False:
        return "other"
    return "alike" if same_input and same_model else "unclear"


def choose(judged: Iterable[tuple[Prediction, Verdict]], taken: Iterable[str]) -> Choice:
    """Sort out what was judged; ``taken`` are those that other jobs have."""
    left_out = set(taken)
    by_age = sorted(judged, key=lambda each: (each[0].created or 0.0, each[0].id))
    ids: dict[str, list[str]] = {"certain": [], "alike": [], "unclear": [], "other": []}
    for found, verdict in by_age:
        if found.id not in left_out:
            ids[verdict].append(found.id)
    return Choice(certain=ids["certain"], alike=ids["alike"], unclear=ids["unclear"])


def _same_model(found: Prediction, asked: PredictionQuery) -> bool | None:
    """None where it cannot be told: Replicate hides the version of some models, and renames others."""
    if asked.version is None or "/" in asked.version:
        name, _, version = (asked.version or asked.model or "").partition(":")
    else:
        name, version = "", asked.version
    if version and found.version == version:
        return True
    if version and found.version and len(found.version) == len(version) == 64:
        return False
    if name and found.model == name and not version:
        return True
    return None


def _same_input(found: dict[str, Any], given: dict[str, Any]) -> bool | None:
    """None where it cannot be told: a file may be stored and linked, and a default be filled in."""
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
