"""``/ui/compare``: two runs side by side, and where they differ."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

from litestar import Response, get
from litestar.params import QueryParameter
from msgspec import Struct

from semel.api_types import Problem
from semel.dashboard.runs import queries
from semel.dashboard.runs.timeline import Timeline, draw_timeline
from semel.dashboard.templating import DASH, duration, number, page, plain_time, short, size, utc
from semel.errors import ResultStoreError, RunNotComplete
from semel.runs.diff import SECTIONS, Difference, ResultComparison, Section, compare, differences
from semel.runs.types import MICRO, Run, attempts_text
from semel.service.api.params import AnyRequest
from semel.service.api.problems import problem_of
from semel.service.api.run_manifests import visible
from semel.service.auth.middleware import Principal
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState

MAX_JSON = 500_000
"""Bytes of JSON that are compared path by path; of larger values the page shows only whether they are equal."""
FOLDED = ("Worker", "Key", "Payload hash", "Submitted", "Started", "Ended")
"""Facts that explain nothing."""
NOT_COMPARED = ResultComparison(verdict="unknown", message="")
RunQuery = Annotated[str, QueryParameter(max_length=100)]


class Fact(Struct, frozen=True):
    """A property of both runs."""

    label: str
    a: str
    b: str
    differs: bool


class JsonComparison(Struct, frozen=True):
    """How two JSON values differ, or why that cannot be shown."""

    differences: list[Difference] = []
    more: bool = False
    message: str = ""
    problem: Problem | None = None


class Side(Struct, frozen=True):
    """One of the two runs."""

    name: str
    run: Run
    timeline: Timeline


@get("/ui/compare")
async def show(
    request: AnyRequest, service: CurrentState, caller: CurrentPrincipal, a: RunQuery = "", b: RunQuery = ""
) -> Response[Any]:
    """The two runs; without them, a form that asks for their ids."""
    a, b = a.strip(), b.strip()
    data: dict[str, Any] = {"title": "Compare two runs", "a": a, "b": b, "sides": []}
    if a and b:
        one, other = await service.run(a, caller), await service.run(b, caller)
        data |= {
            "a": one.id,
            "b": other.id,
            "sides": await _sides(service, one, other),
            "facts": [fact for fact in facts(one, other) if fact.label not in FOLDED],
            "folded": [fact for fact in facts(one, other) if fact.label in FOLDED],
            "parameters": _compare_parameters(one, other),
            "sections": await _sections(service, caller, one, other),
            "result": await _compare_results(service, one, other),
        }
    return page(request, service, caller, "runs/compare.html", **data)


async def _sections(service: ServiceState, caller: Principal, one: Run, other: Run) -> list[Section]:
    """What may explain a difference: the parameters first, then the rest, the most likely first."""
    manifests = [visible(await service.engine.manifest(run.id), caller) for run in (one, other)]
    found = compare(manifests[0], manifests[1], NOT_COMPARED).sections
    by_name = {each.name: each for each in found if not each.folded}
    parameters = by_name.get("parameters", Section(name="parameters"))
    return [parameters, *(by_name[name] for name in SECTIONS if name in by_name and name != "parameters")]


async def _sides(service: ServiceState, *runs: Run) -> list[Side]:
    """Both runs, with timelines of the same length."""
    now = time.time_ns() // 1000
    steps = [await service.store.read(queries.last_steps, run.id) for run in runs]
    span = max(draw_timeline(run, each, now).span_us for run, each in zip(runs, steps, strict=True))
    return [
        Side(name, run, draw_timeline(run, each, now, span)) for name, run, each in zip("AB", runs, steps, strict=True)
    ]


def facts(one: Run, other: Run) -> list[Fact]:
    """The properties of both runs, the most interesting first."""
    rows = [(label, write(one), write(other)) for label, write in _FACTS]
    return [Fact(label, a, b, differs=a != b) for label, a, b in rows]


def _waited(run: Run) -> str:
    return duration(None if run.started_us is None else max(0, run.started_us - run.created_us) / MICRO)


def _time(at_us: int | None) -> str:
    return DASH if at_us is None else f"{plain_time(at_us)}.{utc(at_us):%f} UTC"


_FACTS = (
    ("Status", lambda run: str(run.status)),
    ("Model", lambda run: run.model),
    ("User", lambda run: run.user or DASH),
    ("Duration", lambda run: duration(queries.run_seconds(run))),
    ("Waited for first start", _waited),
    ("Attempts", attempts_text),
    ("Error", lambda run: short(run.last_error or DASH, 300) if run.status != "SUCCEEDED" else DASH),
    ("Result", lambda run: size(run.result_size) if run.status == "SUCCEEDED" else DASH),
    ("Artifacts", lambda run: short(", ".join(each.name for each in run.artifacts), 300) or DASH),
    ("Cost", lambda run: number(run.cost)),
    ("Queue", lambda run: f"{run.queue}, priority {run.priority}"),
    ("Worker", lambda run: run.worker or DASH),
    ("Key", lambda run: run.idempotency_key or DASH),
    ("Payload hash", lambda run: run.payload_hash),
    ("Submitted", lambda run: _time(run.created_us)),
    ("Started", lambda run: _time(run.started_us)),
    ("Ended", lambda run: _time(run.finished_us)),
)


def _compare_parameters(one: Run, other: Run) -> JsonComparison:
    if max(len(one.parameters_json), len(other.parameters_json)) > MAX_JSON:
        equal = "equal" if one.parameters_json == other.parameters_json else "different"
        return JsonComparison(message=f"The parameters are {equal}, and too large to compare here.")
    return _compare_json(one.parameters_json, other.parameters_json)


async def _compare_results(service: ServiceState, one: Run, other: Run) -> JsonComparison:
    try:
        found = await service.engine.compare_results(one.id, other.id)
    except (ResultStoreError, RunNotComplete) as error:
        return JsonComparison(problem=problem_of(error))
    message = "Equal." if found.verdict == "same" else f"{found.message[0].upper()}{found.message[1:]}."
    return JsonComparison(found.differences, found.more, message)


def _compare_json(one: str | bytes, other: str | bytes) -> JsonComparison:
    try:
        found, more = differences(json.loads(one), json.loads(other))
    except (ValueError, RecursionError):
        equal = "Equal" if one == other else "Different"
        return JsonComparison(message=f"{equal}, and nested too deeply to compare here.")
    return JsonComparison(found, more, message="" if found else "Equal.")


HANDLERS = (show,)
