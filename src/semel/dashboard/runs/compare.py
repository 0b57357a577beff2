"""Two runs side by side: what is the same about them, and what is not."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

from litestar import Response, get
from litestar.params import QueryParameter
from msgspec import Struct

from semel.api_types import Problem
from semel.dashboard.runs import queries
from semel.dashboard.runs.differences import Difference, differences
from semel.dashboard.runs.run_detail import STEPS, seconds_of
from semel.dashboard.runs.timeline import Picture, picture
from semel.dashboard.templating import page
from semel.dashboard.wording import DASH, clock, duration, number, plain_time, short, size
from semel.errors import ResultStoreError, RunNotComplete
from semel.runs.types import MICRO, Run
from semel.service.api.params import TheRequest
from semel.service.api.problems import problem_of
from semel.service.auth.middleware import Principal
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState

LARGEST = 500_000
"""Bytes of JSON that are compared place by place; of larger results it is told whether they are equal."""

Which = Annotated[str, QueryParameter(max_length=100)]


class Fact(Struct, frozen=True):
    """Something about both."""

    label: str
    a: str
    b: str
    differs: bool


class Parted(Struct, frozen=True):
    """How two JSON values differ; or why that cannot be told."""

    found: list[Difference]
    more: bool = False
    said: str = ""
    problem: Problem | None = None


class Side(Struct, frozen=True):
    """One of the two."""

    name: str
    run: Run
    picture: Picture


@get("/ui/compare")
async def show(
    request: TheRequest, service: CurrentState, caller: CurrentPrincipal, a: Which = "", b: Which = ""
) -> Response[Any]:
    """The two runs; without them, a form that asks which."""
    a, b = a.strip(), b.strip()
    if not a or not b:
        return page(request, service, caller, "compare.html", title="Compare two runs", a=a, b=b, sides=[])
    one, other = await service.run(a, caller), await service.run(b, caller)
    return page(
        request,
        service,
        caller,
        "compare.html",
        title="Compare two runs",
        a=one.id,
        b=other.id,
        sides=await _sides(service, one, other),
        facts=facts(one, other),
        parameters=_parameters(one, other),
        result=await _results(service, caller, one, other),
    )


async def _sides(service: ServiceState, *both: Run) -> list[Side]:
    """Both with their pictures, on axes of one length."""
    now = time.time_ns() // 1000
    lives = [await service.store.read(queries.last_steps, run.id, STEPS) for run in both]
    span = max(picture(run, steps, now).span_us for run, steps in zip(both, lives, strict=True))
    return [Side(name, run, picture(run, steps, now, span)) for name, run, steps in zip("AB", both, lives, strict=True)]


def facts(one: Run, other: Run) -> list[Fact]:
    """What both have, in the order in which people ask for it."""
    rows = [(label, write(one), write(other)) for label, write in _FACTS]
    return [Fact(label, a, b, differs=a != b) for label, a, b in rows]


def _waited(run: Run) -> str:
    return duration(None if run.started_us is None else max(0, run.started_us - run.created_us) / MICRO)


def _when(at_us: int | None) -> str:
    return DASH if at_us is None else f"{plain_time(at_us)}.{clock(at_us):%f} UTC"


_FACTS = (
    ("Status", lambda run: str(run.status)),
    ("Model", lambda run: run.model),
    ("User", lambda run: run.user or DASH),
    ("Submitted", lambda run: _when(run.created_us)),
    ("Waited for its first start", _waited),
    ("Started", lambda run: _when(run.started_us)),
    ("Ended", lambda run: _when(run.finished_us)),
    ("Took", lambda run: duration(seconds_of(run))),
    ("Attempts", lambda run: f"{run.attempts} (errors: {run.errors}, lost: {run.losts})"),
    ("Error", lambda run: short(run.last_error or DASH, 300) if run.status != "SUCCEEDED" else DASH),
    ("Payload hash", lambda run: run.payload_hash),
    ("Key", lambda run: run.idempotency_key or DASH),
    ("Queue", lambda run: f"{run.queue}, priority {run.priority}"),
    ("Worker", lambda run: run.worker or DASH),
    ("Cost", lambda run: number(run.cost)),
    ("Result", lambda run: size(run.result_size) if run.status == "SUCCEEDED" else DASH),
    ("Artifacts", lambda run: short(", ".join(each.name for each in run.artifacts), 300) or DASH),
)


def _parameters(one: Run, other: Run) -> Parted:
    if max(len(one.parameters_json), len(other.parameters_json)) > LARGEST:
        equal = one.parameters_json == other.parameters_json
        return Parted([], said=f"They are {'equal' if equal else 'different'}, and too large to tell more here.")
    return _parted(one.parameters_json, other.parameters_json)


def _parted(one: str | bytes, other: str | bytes) -> Parted:
    try:
        found, more = differences(json.loads(one), json.loads(other))
    except (ValueError, RecursionError):
        return Parted(
            [], said=f"They are {'equal' if one == other else 'different'}, and nested too deep to tell more."
        )
    return Parted(found, more, said="" if found else "They are equal.")


async def _results(service: ServiceState, caller: Principal, one: Run, other: Run) -> Parted:
    without = [name for name, run in (("A", one), ("B", other)) if run.status != "SUCCEEDED"]
    if without:
        has = "have no results" if len(without) == 2 else "has no result"
        return Parted([], said=f"{' and '.join(without)} {has}.")
    if one.result_digest == other.result_digest:
        return Parted([], said="They are equal.")
    if max(one.result_size or 0, other.result_size or 0) > LARGEST:
        return Parted([], said="They are different, and too large to tell more here.")
    try:
        texts = [await service.engine.result_json(run.id, tenant=caller.tenant) for run in (one, other)]
    except (ResultStoreError, RunNotComplete) as error:
        return Parted([], problem=problem_of(error))
    return _parted(*texts)


HANDLERS = (show,)
