"""Many submissions in few requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import msgspec
from msgspec import Raw

from semel._validation import nearest
from semel.api_types import BulkAnswer, RemoteRun
from semel.client.errors import Answer, refusal, unexpected_response
from semel.client.http import HttpSession, given, written
from semel.client.sending import SubmitOptions, key_and_dedupe
from semel.errors import InvalidRequest, SemelError, ServerUnreachable

MOST_AT_ONCE = 500
BYTES_AT_ONCE = 256 * 1024
"""What one request holds: a server takes 1,000 submissions, and a mebibyte unless it is told otherwise."""

_FIELDS = ("model", "parameters", *SubmitOptions.__annotations__)


async def submitted(exchange: HttpSession, submissions: Sequence[Mapping[str, Any]]) -> list[RemoteRun | SemelError]:
    """The runs, or what there is instead. A server that cannot be reached any more leaves its error with the rest."""
    if isinstance(submissions, str | Mapping):
        raise InvalidRequest("submit_many takes a list of mappings, each with the arguments of submit")
    asked = [_prepared(place, each) for place, each in enumerate(submissions)]
    answers: list[RemoteRun | SemelError] = []
    for some in _batches([written(each) for each in asked]):
        try:
            answers += await _sent(exchange, some)
        except SemelError as error:
            if not answers:
                raise
            answers += [_left_open(error, each["idempotency_key"]) for each in asked[len(answers) :]]
            break
    return answers


def _prepared(place: int, submission: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(submission)
    for name in fields:
        if name not in _FIELDS:
            raise InvalidRequest(f"submission {place}: a submission has no {name!r}; {nearest(name, _FIELDS)}")
    if "model" not in fields:
        raise InvalidRequest(
            f"submission {place}: it is a mapping with 'model' and any of {', '.join(_FIELDS[1:])}; "
            f"got {', '.join(map(repr, fields)) or 'nothing'}"
        )
    fields["idempotency_key"], fields["dedupe"] = key_and_dedupe(fields.get("idempotency_key"), fields.get("dedupe"))
    if fields.get("user") is not None:
        fields["user"] = str(fields["user"])
    return given(fields)


def _batches(written_ones: list[bytes]) -> Iterator[list[bytes]]:
    """As many as go into one request, in their order."""
    some: list[bytes] = []
    size = 0
    for each in written_ones:
        if some and (len(some) == MOST_AT_ONCE or size + len(each) > BYTES_AT_ONCE):
            yield some
            some, size = [], 0
        some.append(each)
        size += len(each)
    if some:
        yield some


async def _sent(exchange: HttpSession, some: list[bytes]) -> list[RemoteRun | SemelError]:
    answer = await exchange.ask("POST", "/runs/bulk", body=[Raw(each) for each in some])
    said = exchange.decoded(answer, list[BulkAnswer])
    if len(said) != len(some):
        raise unexpected_response(answer, exchange.place)
    return [_one(each) for each in said]


def _one(said: BulkAnswer) -> RemoteRun | SemelError:
    if said.run is not None:
        return said.run
    return refusal(Answer(said.status, httpx.Headers(), msgspec.json.encode(said.problem)))


def _left_open(error: SemelError, key: str) -> SemelError:
    """The same error for one that was, or would have been, in a request that failed."""
    return ServerUnreachable(str(error), idempotency_key=key) if isinstance(error, ServerUnreachable) else error
