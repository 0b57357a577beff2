"""``/ui/compare``: two runs side by side, and where they differ."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

from litestar import Response, get
from litestar.params import QueryParameter
from msgspec import Struct

from semel.api_types import Problem
from semel.dashboard.runs import queries
from semel.dashboard.runs.timeline import Timeline, draw_timeline
from semel.dashboard.templating import DASH, duration, number, page, plain_time, short, size, utc
from semel.errors import ResultStoreError, RunNotComplete
from semel.runs.types import MICRO, Run
from semel.service.api.params import AnyRequest
from semel.service.api.problems import problem_of
from semel.service.auth.middleware import Principal
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState

MAX_JSON = 500_000
"""Bytes of JSON that are compared path by path; of larger values the page shows only whether they are equal."""
MAX_DIFFERENCES = 200
MAX_VALUE = 300
"""Characters of a value that are shown."""
MISSING = object()

Kind: TypeAlias = Literal["changed", "only in A", "only in B"]
RunQuery = Annotated[str, QueryParameter(max_length=100)]


class Fact(Struct, frozen=True):
    """A property of both runs."""

    label: str
    a: str
    b: str
    differs: bool


class Difference(Struct, frozen=True):
    """A path at which two JSON values differ; ``a`` or ``b`` is None where it has no value there."""

    path: str
    kind: Kind
    a: str | None
    b: str | None


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
            "facts": facts(one, other),
            "parameters": _compare_parameters(one, other),
            "result": await _compare_results(service, caller, one, other),
        }
    return page(request, service, caller, "runs/compare.html", **data)


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
    ("Attempts", lambda run: f"{run.attempts} (errors: {run.errors}, lost: {run.losts})"),
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


async def _compare_results(service: ServiceState, caller: Principal, one: Run, other: Run) -> JsonComparison:
    without = [name for name, run in (("A", one), ("B", other)) if run.status != "SUCCEEDED"]
    if without:
        has = "have no results" if len(without) == 2 else "has no result"
        return JsonComparison(message=f"{' and '.join(without)} {has}.")
    if one.result_digest == other.result_digest:
        return JsonComparison(message="Equal.")
    if max(one.result_size or 0, other.result_size or 0) > MAX_JSON:
        return JsonComparison(message="The results are different, and too large to compare here.")
    try:
        texts = [await service.engine.result_json(run.id, tenant=caller.tenant) for run in (one, other)]
    except (ResultStoreError, RunNotComplete) as error:
        return JsonComparison(problem=problem_of(error))
    return _compare_json(*texts)


def _compare_json(one: str | bytes, other: str | bytes) -> JsonComparison:
    try:
        found, more = differences(json.loads(one), json.loads(other))
    except (ValueError, RecursionError):
        equal = "Equal" if one == other else "Different"
        return JsonComparison(message=f"{equal}, and nested too deeply to compare here.")
    return JsonComparison(found, more, message="" if found else "Equal.")


def differences(a: Any, b: Any, most: int = MAX_DIFFERENCES) -> tuple[list[Difference], bool]:
    """The first differences of two JSON values, and whether there are more."""
    found: list[Difference] = []
    for path, one, other in _differing_paths(a, b):
        if len(found) >= most:
            return found, True
        kind: Kind = "only in B" if one is MISSING else "only in A" if other is MISSING else "changed"
        found.append(Difference(path or "(the whole value)", kind, _json_text(one), _json_text(other)))
    return found, False


def _differing_paths(a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """The paths at which they differ. Without recursion, because values can be nested to any depth."""
    stack: list[tuple[str, Any, Any]] = [("", a, b)]
    while stack:
        path, one, other = stack.pop()
        if isinstance(one, dict) and isinstance(other, dict):
            names = [*one, *(name for name in other if name not in one)]
            inner = [(_member(path, name), one.get(name, MISSING), other.get(name, MISSING)) for name in names]
        elif isinstance(one, list) and isinstance(other, list):
            inner = [(f"{path}[{n}]", _item(one, n), _item(other, n)) for n in range(max(len(one), len(other)))]
        else:
            if not _equal(one, other):
                yield path, one, other
            continue
        stack += reversed(inner)


def _item(values: list[Any], place: int) -> Any:
    return values[place] if place < len(values) else MISSING


def _member(path: str, name: str) -> str:
    if name.isidentifier():
        return f"{path}.{name}" if path else name
    return f"{path}[{json.dumps(name, ensure_ascii=False)}]"


def _equal(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: true is not equal to 1, but 1.0 is."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict | list) or isinstance(other, dict | list):
        return False
    return bool(one == other)


def _json_text(value: Any) -> str | None:
    if value is MISSING:
        return None
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        text = "(nested too deeply to show)"
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}…"


HANDLERS = (show,)
