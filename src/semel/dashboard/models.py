"""``/ui/models``: how each model does, and whether it gets worse: runs, failures and durations over time.

What a chart shows comes from the sums of each hour (``schema.run_hours``), and the rest from the newest runs. So the
page of a model costs the same however many runs there are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from litestar import Response, get
from litestar.params import QueryParameter
from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import Connection

from semel.dashboard.errors import FailedAttempt, list_failures
from semel.dashboard.overview.chart import DAY, HEIGHT, RIGHT, WEEK, WIDTH, Chart, ChartTick, Window, stacked_chart
from semel.dashboard.queues import may_pause
from semel.dashboard.runs.queries import run_seconds
from semel.dashboard.templating import address, as_json, duration, page, redirect, short
from semel.db.dialect import StatementContext
from semel.runs.store import durations, pauses, queries
from semel.runs.store.quotas import read_clock
from semel.runs.types import INTERNAL_PREFIX, MICRO, Pause, Run, Summary, WorkerInfo
from semel.service.api.params import AnyRequest, root_of
from semel.service.api.problems import ApiError
from semel.service.api.views import model_view
from semel.service.auth.middleware import Principal
from semel.service.auth.tokens import MAIN
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState

PATH = "/ui/models"
MONTH = Window("month", "30 days", "30 days", 86400, 30, 60.0)
WINDOWS = {each.name: each for each in (DAY, WEEK, MONTH)}
NEWEST = 300
"""The newest runs, of which the slowest and the parameters most used are shown."""
MAX_BYTES = 2_000_000
"""Of the parameters of these runs together: if they are large, fewer runs are read."""
SHOWN = 8
"""Slow runs, failures and values of a parameter."""
MAX_PARAMETERS = 12
WORSE = 1.5
"""How many times as high a figure is as in the time before, to be marked."""
MIN_RUNS = 20
"""Runs in both times before a figure is marked: fewer prove nothing."""
STACK = ("SUCCEEDED", "FAILED", "CANCELLED")

ModelName: TypeAlias = Annotated[str, QueryParameter(max_length=1000)]
WindowName: TypeAlias = Annotated[Literal["day", "week", "month"], QueryParameter(name="window")]
HourRow: TypeAlias = tuple[int, str, int, int]


class Period(Struct, frozen=True):
    """Runs of a model that ended in some time: how many, and how long they took by bucket."""

    counts: Counter[str]
    buckets: Counter[int]

    @property
    def ended(self) -> int:
        """The runs that succeeded or failed."""
        return self.counts["SUCCEEDED"] + self.counts["FAILED"]

    @property
    def failure_rate(self) -> float | None:
        """The share of these that failed; None without any."""
        return self.counts["FAILED"] / self.ended if self.ended else None

    def percentile(self, part: float) -> float | None:
        """About that percentile of their durations, in seconds."""
        return durations.percentile(self.buckets, part)


class Trend(Struct, frozen=True, kw_only=True):
    """A figure of the window, and of the window before it."""

    label: str
    now: float | None
    before: float | None
    is_worse: bool


class Line(Struct, frozen=True):
    """A line of the chart: its points, and the stretches between neighbours."""

    name: str
    points: list[tuple[float, float, str]]
    stretches: list[str]


class DurationChart(Struct, frozen=True, kw_only=True):
    """p50 and p95 over time, in the coordinates of an SVG."""

    width: int = WIDTH
    height: int = HEIGHT
    left: int
    right: int = WIDTH - RIGHT
    levels: list[ChartTick]
    times: list[ChartTick]
    lines: list[Line]


class ModelReading(Struct, frozen=True, kw_only=True):
    """What was read of a model."""

    summary: Summary | None
    hours: list[HourRow]
    newest: list[Run]
    failures: list[FailedAttempt]
    pause: Pause | None
    workers: list[WorkerInfo]
    """The live workers that run it."""


def read_model(conn: Connection, tenant: str, model: str, since_us: int, terms: StatementContext) -> ModelReading:
    """The sums of a model since then, its newest runs and its latest failures."""
    read_clock(conn, terms)
    wanted = queries.Filter(tenant=tenant, model=model)
    paused = next((each for each in pauses.list_pauses(conn) if (each.kind, each.name) == ("model", model)), None)
    if paused is not None and tenant != MAIN:  # who paused it is the main tenant's business
        paused = replace(paused, by="")
    summary = next((each for each in queries.summary(conn, tenant, grouped=False) if each.model == model), None)
    failed = 0 if summary is None else summary.counts.get("FAILED", 0)  # nothing is searched for that is not there
    return ModelReading(
        summary=summary,
        hours=queries.model_hours(conn, tenant, model, since_us),
        newest=queries.list_runs(conn, wanted, NEWEST, None, max_bytes=MAX_BYTES).runs,
        failures=list_failures(conn, tenant, min(SHOWN, failed), model=model),
        pause=paused,
        workers=[each for each in queries.list_workers(conn, terms) if each.alive and model in each.models],
    )


def period(hours: Iterable[HourRow], since_us: int, until_us: int) -> Period:
    """What ended from one time up to another."""
    counts: Counter[str] = Counter()
    buckets: Counter[int] = Counter()
    for hour_us, status, bucket, count in hours:
        if since_us <= hour_us < until_us:
            counts[status] += count
            if bucket >= 0:
                buckets[bucket] += count
    return Period(counts, buckets)


def trends(now: Period, before: Period) -> list[Trend]:
    """Whether the model gets worse: figures of two times of the same length."""
    enough = min(now.ended, before.ended) >= MIN_RUNS

    def trend(label: str, of: Callable[[Period], float | None], least: float) -> Trend:
        latest, earlier = of(now), of(before)
        grew = latest is not None and earlier is not None and latest > max(least, WORSE * earlier)
        return Trend(label=label, now=latest, before=earlier, is_worse=enough and grew)

    return [
        trend("Failure rate", lambda each: each.failure_rate, 0.01),
        trend("p50", lambda each: each.percentile(0.5), 0.0),
        trend("p95", lambda each: each.percentile(0.95), 0.0),
    ]


def duration_chart(counted: Chart, periods: Sequence[Period], labels: Sequence[str]) -> DurationChart | None:
    """The chart below another one, with the same times; None without durations."""
    values = {name: [each.percentile(part) for each in periods] for name, part in (("p50", 0.5), ("p95", 0.95))}
    known = [value for line in values.values() for value in line if value is not None]
    if not known:
        return None
    top, bottom = 20.0, HEIGHT - 20.0
    highest = max(*known, 0.001)
    scale = (bottom - top) / highest
    levels = [ChartTick(round(bottom - part * highest * scale, 2), duration(part * highest)) for part in (0, 0.5, 1)]
    left = max(counted.left, 10 + 7 * max(len(each.label) for each in levels))
    pitch = (WIDTH - left - RIGHT) / len(periods)
    lines = []
    for name, line in values.items():
        points = [
            None
            if value is None
            else (
                round(left + pitch * (place + 0.5), 2),
                round(bottom - value * scale, 2),
                f"{labels[place]}: {name} {duration(value)}",
            )
            for place, value in enumerate(line)
        ]
        lines.append(Line(name, [each for each in points if each is not None], _stretches(points)))
    times = [ChartTick(round(left + pitch * place, 2), label) for place, label in _ticks(counted, len(periods))]
    return DurationChart(left=left, levels=levels, times=times, lines=lines)


def _ticks(counted: Chart, steps: int) -> list[tuple[int, str]]:
    every = max(1, steps // 6)
    return [(place * every, each.label) for place, each in enumerate(counted.times)]


def _stretches(points: Sequence[tuple[float, float, str] | None]) -> list[str]:
    """The points as polylines, which end where a step has none."""
    found: list[list[str]] = [[]]
    for point in points:
        if point is None:
            found.append([])
        else:
            found[-1].append(f"{point[0]},{point[1]}")
    return [" ".join(each) for each in found if len(each) > 1]


def used_values(newest: Sequence[Run]) -> list[tuple[str, int, list[tuple[str, int]]]]:
    """The parameters most used: for each, how many runs gave it, and its most frequent values."""
    given: dict[str, Counter[str]] = {}
    for run in newest:
        parameters = json.loads(run.parameters_json or "{}")
        for name, value in parameters.items():
            given.setdefault(name, Counter())[short(as_json(value), 60)] += 1
    found = [(name, values.total(), values.most_common(SHOWN)) for name, values in given.items()]
    return sorted(found, key=lambda each: (-each[1], each[0]))[:MAX_PARAMETERS]


def slowest(newest: Sequence[Run]) -> list[tuple[Run, float]]:
    """The slowest of these runs."""
    took = [(run, seconds) for run in newest if run.done and (seconds := run_seconds(run)) is not None]
    return sorted(took, key=lambda each: -each[1])[:SHOWN]


@get(PATH)
async def show(
    request: AnyRequest,
    service: CurrentState,
    caller: CurrentPrincipal,
    model: ModelName = "",
    window: WindowName = "day",
) -> Response[Any]:
    """All models, or one. These are sums over all users: who sees their own runs only is shown the list of these."""
    if caller.visible_user is not None:
        return redirect(address(root_of(request), "/ui/runs", model=model or None))
    if model:
        return await _model_page(request, service, caller, model, WINDOWS[window])
    return await _list_page(request, service, caller)


async def _list_page(request: AnyRequest, service: ServiceState, caller: Principal) -> Response[Any]:
    summaries, paused = await service.store.read(_read_list, caller.tenant)
    known = {each.model: each for each in summaries}
    here = {name for name in service.app.registry.names if not name.startswith(INTERNAL_PREFIX)}
    rows = [(name, known.get(name), name in paused) for name in sorted(here | set(known))]
    return page(request, service, caller, "models/list.html", title="Models", rows=rows)


def _read_list(conn: Connection, tenant: str) -> tuple[list[Summary], set[str]]:
    paused = {each.name for each in pauses.list_pauses(conn) if each.kind == "model"}
    return queries.summary(conn, tenant, grouped=False), paused


async def _model_page(
    request: AnyRequest, service: ServiceState, caller: Principal, model: str, window: Window
) -> Response[Any]:
    store = service.store
    now_us = await store.read(read_clock, store.statement_context)
    starts = window.starts(now_us)
    step_us = window.step * MICRO
    before_us = starts[0] - window.seconds * MICRO
    async with service.slow_query_lock:
        found = await store.read(read_model, caller.tenant, model, before_us, store.statement_context)
    known = model_view(service.app.registry[model]) if model in service.app.registry else None
    if known is None and found.summary is None and not found.hours and found.pause is None and not found.newest:
        raise ApiError(404, "NOT_FOUND", f"no run has the model {model!r}, and this server does not know it")
    steps = [period(found.hours, start, start + step_us) for start in starts]
    chart = stacked_chart(window, starts, [each.counts for each in steps], STACK)
    now = period(found.hours, starts[0], starts[-1] + step_us)
    labels = [window.label_of(start) for start in starts]
    return page(
        request,
        service,
        caller,
        "models/page.html",
        title=f"Model {model}",
        model=model,
        known=known,
        window=window,
        windows=list(WINDOWS.values()),
        found=found,
        now=now,
        trends=trends(now, period(found.hours, before_us, starts[0])),
        chart=chart,
        chart_durations=duration_chart(chart, steps, labels),
        steps=list(zip(labels, steps, strict=True)),
        statuses=STACK,
        failures=found.failures,
        slowest=slowest(found.newest),
        parameters=used_values(found.newest),
        pause=found.pause,
        may_pause=may_pause(caller),
    )


HANDLERS = (show,)
