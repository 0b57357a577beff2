"""A run as its page shows it: what is known of it, cut to what a page can hold."""

from __future__ import annotations

import html
import time
from typing import Any

import msgspec
from msgspec import Struct

from semel.api_types import Problem
from semel.dashboard.runs import queries
from semel.dashboard.runs.timeline import Picture, picture
from semel.dashboard.wording import pretty
from semel.errors import ResultStoreError, RunNotComplete, RunNotFound
from semel.runs.attempt import Artifact
from semel.runs.types import INTERNAL_PREFIX, MICRO, LogLine, Run, Step, Waiting
from semel.service.api.problems import problem_of
from semel.service.auth.middleware import Principal
from semel.service.state import ServiceState

ROOM = 30_000
"""Characters of HTML that one text may take: a page weighs 200 KB at the most, with all that is in it."""
ROOM_FOR_TRACEBACK = 15_000
ROOM_FOR_JSON = 200_000
"""Bytes of JSON that are read to be laid out; what is larger is a download."""
LOG_LINES = 200
LONGEST_LINE = 2000
STEPS = 60
MOST_RETRIES = 20
IMAGES = {".gif": "image/gif", ".jpeg": "image/jpeg", ".jpg": "image/jpeg", ".png": "image/png", ".webp": "image/webp"}
"""Pictures that a browser shows and in which nothing can be run; SVG is none of them."""
LARGEST_IMAGE = 5_000_000
MOST_IMAGES = 20


class JsonPreview(Struct, frozen=True):
    """JSON on a page; without text it is too large for one, and only to be downloaded."""

    text: str | None
    size: int

    @property
    def lines(self) -> int:
        """How long it is."""
        return 0 if self.text is None else self.text.count("\n") + 1


class Log(Struct, frozen=True):
    """The last lines, and whether there were others before them."""

    lines: list[LogLine]
    cut: bool


class RunDetail(Struct, frozen=True, kw_only=True):
    """Everything that a page of a run tells."""

    run: Run
    steps: list[Step]
    log: Log
    last_line: tuple[int, int]
    waiting: Waiting | None
    retries: list[str]
    result: JsonPreview | None
    problem: Problem | None


def boxed(text: str | bytes) -> JsonPreview:
    """JSON laid out for people, if there is room for it."""
    size = len(text if isinstance(text, bytes) else text.encode("utf-8", "replace"))
    if size > ROOM_FOR_JSON:
        return JsonPreview(None, size)
    laid_out = pretty(text)
    return JsonPreview(laid_out if _weight(laid_out) <= ROOM else None, size)


def _weight(text: str) -> int:
    return len(html.escape(text).encode("utf-8", "replace"))


def truncate_head(text: str, room: int = ROOM_FOR_TRACEBACK) -> str:
    """The end of a text that is too long: of a traceback that is what counts."""
    while _weight(text) > room:
        text = "…" + text[max(1, len(text) // 4) :]
    return text


def image_kind(name: str) -> str | None:
    """What the picture is served as, if the artifact is one."""
    ending = name[name.rfind(".") :].lower() if "." in name else ""
    return IMAGES.get(ending)


def shows(artifact: Artifact) -> bool:
    """Whether the page shows the artifact itself, and not only a link to it."""
    return image_kind(artifact.name) is not None and artifact.size <= LARGEST_IMAGE


async def seen(service: ServiceState, caller: Principal, run: Run, before: RunDetail | None = None) -> RunDetail:
    """The run with what belongs to it; what cannot have changed since the look before is not asked again."""
    if before is not None and before.run.version == run.version:
        steps, retries, result, problem = before.steps, before.retries, before.result, before.problem
    else:
        steps = await service.store.read(queries.last_steps, run.id, STEPS)
        retries = await service.store.read(queries.retries, run, MOST_RETRIES) if run.done else []
        result, problem = await _result(service, caller, run)
    lines = await service.store.read(queries.tail, run.id, LOG_LINES)
    return RunDetail(
        run=run,
        steps=steps,
        log=_fitting(lines),
        last_line=(lines[-1].fence, lines[-1].line) if lines else (0, 0),
        waiting=await _waiting(service, caller, run),
        retries=retries,
        result=result,
        problem=problem,
    )


async def refresh_waiting(service: ServiceState, caller: Principal, told: RunDetail) -> RunDetail:
    """The same after a while in which nothing happened to the run; those before it in the queue may have gone."""
    return msgspec.structs.replace(told, waiting=await _waiting(service, caller, told.run))


async def _waiting(service: ServiceState, caller: Principal, run: Run) -> Waiting | None:
    if run.status != "PENDING":
        return None
    try:
        return await service.engine.waiting(run.id, tenant=caller.tenant)
    except RunNotFound:
        return None


async def _result(service: ServiceState, caller: Principal, run: Run) -> tuple[JsonPreview | None, Problem | None]:
    """What the run returned. A store that is away is no reason to show nothing of the run."""
    if run.status != "SUCCEEDED":
        return None, None
    if (run.result_size or 0) > ROOM_FOR_JSON:
        return JsonPreview(None, run.result_size or 0), None
    try:
        return boxed(await service.engine.result_json(run.id, tenant=caller.tenant)), None
    except (ResultStoreError, RunNotFound, RunNotComplete) as error:
        return None, problem_of(error)


def _fitting(lines: list[LogLine]) -> Log:
    """As many of the last lines as there is room for."""
    kept: list[LogLine] = []
    room = ROOM
    for line in reversed(lines):
        text = line.text if len(line.text) <= LONGEST_LINE else f"{line.text[:LONGEST_LINE]}…"
        room -= _weight(text) + 60
        if room < 0:
            break
        kept.append(LogLine(line.fence, line.line, line.at_us, line.level, text))
    return Log(kept[::-1], cut=len(kept) < len(lines) or len(lines) >= LOG_LINES)


def timeline_of(told: RunDetail) -> Picture:
    """The picture of the run as it stands now."""
    return picture(told.run, told.steps, time.time_ns() // 1000)


def template_context(told: RunDetail) -> dict[str, Any]:
    """What the templates of a run's parts are given."""
    run = told.run
    return {
        "seen": told,
        "run": run,
        "picture": timeline_of(told),
        "error": run.last_error if run.status != "SUCCEEDED" else None,
        "traceback": truncate_head(run.traceback) if run.traceback and run.status != "SUCCEEDED" else None,
        "images": [each for each in run.artifacts if shows(each)][:MOST_IMAGES],
        "seconds": seconds_of(run),
        "live": not run.done,
        "internal": run.model.startswith(INTERNAL_PREFIX),
    }


def seconds_of(run: Run) -> float | None:
    """From its first start to its end."""
    if run.started_us is None or run.finished_us is None:
        return None
    return (run.finished_us - run.started_us) / MICRO
