"""``/ui/runs/{id}``: one run with its timeline, result, error and log, kept up to date until it ends."""

from __future__ import annotations

import html
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from litestar import Response, get, post
from litestar.response import Stream
from msgspec import Struct

from semel.api_types import Problem
from semel.dashboard.runs import queries
from semel.dashboard.runs.downloads import image_type
from semel.dashboard.runs.timeline import attempts_of, draw_timeline
from semel.dashboard.sse import END_EVENT, NO_UPDATE, live_response, replace_event
from semel.dashboard.templating import page, pretty, redirect_with_message, render_part, short_id
from semel.errors import IllegalTransition, ResultStoreError, RunNotComplete, RunNotFound, StoreUnavailable
from semel.runs.diff import ResultComparison
from semel.runs.store import seals
from semel.runs.store.seals import Sealing
from semel.runs.types import INTERNAL_PREFIX, MICRO, LogLine, Manifest, Run, Step, Waiting
from semel.service.api.params import AnyRequest, RunId
from semel.service.api.problems import problem_of
from semel.service.api.run_manifests import visible, visible_drift
from semel.service.auth.middleware import Principal
from semel.service.sse import longest_wait, to_completion
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState

PARTS = ("state", "waiting", "timeline", "outcome", "log", "facts", "manifest")
"""The parts of the page that change; each is a template in the folder run."""
PARTS_BY_TIME = ("waiting", "timeline")
"""The parts that change as time passes, although nothing happens to the run."""
MIN_INTERVAL = 0.4
"""Seconds between two updates at least, however fast a run logs."""
REDRAW_EVERY = 2.0
"""Seconds after which the timeline of a running run is drawn again; less often for a long run."""
QUEUE_EVERY = 5.0
"""Seconds after which the place in the queue is read again."""
MAX_HTML = 30_000
"""Bytes of HTML that one text may take, so that a whole page stays below 200 KB."""
MAX_TRACEBACK = 15_000
MAX_JSON = 200_000
"""Bytes of JSON that are formatted for the page; larger values can only be downloaded."""
MAX_PATCH = 20_000
"""Bytes of HTML that uncommitted changes of the code may take."""
MAX_LOG_LINES = 200
MAX_LINE = 2000
MAX_RETRIES = 20
MAX_IMAGE_SIZE = 5_000_000
MAX_IMAGES = 20


class JsonPreview(Struct, frozen=True):
    """JSON for the page; ``text`` is None where it is too large to show."""

    text: str | None
    size: int

    @property
    def lines(self) -> int:
        """The number of lines of the text."""
        return 0 if self.text is None else self.text.count("\n") + 1


class RunDetail(Struct, frozen=True, kw_only=True):
    """Everything that the page shows of a run."""

    run: Run
    steps: list[Step]
    log: list[LogLine]
    log_is_cut: bool
    last_line: tuple[int, int]
    """Fence and number of the last line of the log."""
    waiting: Waiting | None
    retries: list[str]
    result: JsonPreview | None
    result_problem: Problem | None
    manifest: Manifest
    """That of the last attempt, as far as the caller may see it."""
    comparison: ResultComparison | None
    """Of a rerun that has ended: whether its result is that of the run that it runs again."""
    sealing: Sealing
    """Of a run that has ended: in which seal its history is."""


@get("/ui/runs/{run_id:str}")
async def show(run_id: RunId, request: AnyRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """The page of a run."""
    run = await service.run(run_id, caller)
    data = template_context(await _read_detail(service, caller, run))
    data |= {"title": f"Run {short_id(run.id)}", "parameters": preview_json(run.parameters_json)}
    return page(request, service, caller, "run/page.html", **data)


@get("/ui/live/runs/{run_id:str}")
async def live(run_id: RunId, request: AnyRequest, service: CurrentState, caller: CurrentPrincipal) -> Stream:
    """The parts of the page that change, until the run ends."""
    run = await service.run(run_id, caller)
    return live_response(service, caller, _updates(request, service, caller, run))


async def _updates(
    request: AnyRequest, service: ServiceState, caller: Principal, run: Run
) -> AsyncGenerator[bytes, None]:
    detail = await to_completion(_read_detail(service, caller, run))
    sent: dict[str, str] = {}
    names: Sequence[str] = PARTS
    while True:
        data = template_context(detail)
        parts = {name: render_part(request, caller, f"run/{name}.html", **data) for name in names}
        changed = [part for name, part in parts.items() if sent.get(name) != part]
        yield replace_event("".join(changed)) if changed else NO_UPDATE
        sent |= parts
        if detail.run.done:
            yield END_EVENT
            return
        changed_run = await _wait_for_change(service, detail)
        names = PARTS if changed_run else PARTS_BY_TIME
        try:
            detail = await to_completion(_read_again(service, caller, detail, changed=changed_run))
        except StoreUnavailable:
            pass  # a short outage ends no stream
        except RunNotFound:
            return


async def _wait_for_change(service: ServiceState, detail: RunDetail) -> bool:
    """Waits until the run has changed (True), or until the page changes by the time that has passed (False)."""
    earliest = time.monotonic() + MIN_INTERVAL
    changed = await service.watch.change(detail.run, _redraw_after(detail.run), line=detail.last_line)
    if changed and (early := earliest - time.monotonic()) > 0:
        await service.watch.change(detail.run, early, end_only=True)
    return changed


def _redraw_after(run: Run) -> float:
    if run.status == "PENDING":
        return QUEUE_EVERY
    age = 0 if run.started_us is None else time.time_ns() // 1000 - run.started_us
    return min(max(REDRAW_EVERY, age / MICRO / 20), longest_wait())


async def _read_again(service: ServiceState, caller: Principal, detail: RunDetail, *, changed: bool) -> RunDetail:
    if not changed:  # the runs before it in the queue may have changed
        return msgspec.structs.replace(detail, waiting=await _read_waiting(service, caller, detail.run))
    return await _read_detail(service, caller, await service.run(detail.run.id, caller), detail)


async def _read_detail(
    service: ServiceState, caller: Principal, run: Run, before: RunDetail | None = None
) -> RunDetail:
    """The run with everything that the page shows; what cannot have changed since ``before`` is not read again."""
    if before is not None and before.run.version == run.version:
        steps, retries, result, problem = before.steps, before.retries, before.result, before.result_problem
        manifest, comparison = before.manifest, before.comparison
    else:
        steps = await service.store.read(queries.last_steps, run.id)
        retries = await service.store.read(queries.retries, run, MAX_RETRIES) if run.done else []
        result, problem = await _read_result(service, caller, run)
        manifest = visible(await service.engine.manifest(run.id), caller)
        comparison = await _compare_with_first(service, caller, run)
    lines = await service.store.read(queries.last_lines, run.id, MAX_LOG_LINES)
    shown = _fit_log(lines)
    return RunDetail(
        run=run,
        steps=steps,
        log=shown,
        log_is_cut=len(shown) < len(lines) or len(lines) >= MAX_LOG_LINES,
        last_line=(lines[-1].fence, lines[-1].line) if lines else (0, 0),
        waiting=await _read_waiting(service, caller, run),
        retries=retries,
        result=result,
        result_problem=problem,
        manifest=manifest,
        comparison=comparison,
        sealing=await service.store.read(seals.sealing_of, run.id) if run.done else Sealing(),
    )


async def _compare_with_first(service: ServiceState, caller: Principal, run: Run) -> ResultComparison | None:
    """Of a rerun that has ended, the comparison of its result; None if the first run was removed."""
    if run.rerun_of is None or not run.done:
        return None
    try:
        await service.run(run.rerun_of, caller)
        return await service.engine.compare_results(run.rerun_of, run.id)
    except (ResultStoreError, RunNotFound, RunNotComplete):
        return None


async def _read_waiting(service: ServiceState, caller: Principal, run: Run) -> Waiting | None:
    if run.status != "PENDING":
        return None
    try:
        return await service.engine.waiting(run.id, tenant=caller.tenant)
    except RunNotFound:
        return None


async def _read_result(service: ServiceState, caller: Principal, run: Run) -> tuple[JsonPreview | None, Problem | None]:
    """The run's result, or why it cannot be read: the page shows the rest while the result store is unavailable."""
    if run.status != "SUCCEEDED":
        return None, None
    if (run.result_size or 0) > MAX_JSON:
        return JsonPreview(None, run.result_size or 0), None
    try:
        return preview_json(await service.engine.result_json(run.id, tenant=caller.tenant)), None
    except (ResultStoreError, RunNotFound, RunNotComplete) as error:
        return None, problem_of(error)


def _fit_log(lines: list[LogLine]) -> list[LogLine]:
    """As many of the last lines as fit on the page."""
    fitting: list[LogLine] = []
    room = MAX_HTML
    for line in reversed(lines):
        text = line.text if len(line.text) <= MAX_LINE else f"{line.text[:MAX_LINE]}…"
        room -= _html_size(text) + 60
        if room < 0:
            break
        fitting.append(LogLine(line.fence, line.line, line.at_us, line.level, text))
    return fitting[::-1]


def preview_json(text: str | bytes) -> JsonPreview:
    """JSON formatted for the page, if it fits."""
    size = len(text if isinstance(text, bytes) else text.encode("utf-8", "replace"))
    if size > MAX_JSON:
        return JsonPreview(None, size)
    formatted = pretty(text)
    return JsonPreview(formatted if _html_size(formatted) <= MAX_HTML else None, size)


def truncate_head(text: str, room: int = MAX_TRACEBACK) -> str:
    """The end of a text that is too long for the page: in a traceback, that is where the error is."""
    while _html_size(text) > room:
        text = "…" + text[max(1, len(text) // 4) :]
    return text


def _html_size(text: str) -> int:
    return len(html.escape(text).encode("utf-8", "replace"))


def template_context(detail: RunDetail) -> dict[str, Any]:
    """The variables of the page's templates."""
    run = detail.run
    failed = run.status != "SUCCEEDED"
    attempts = attempts_of(detail.steps, run)
    images = [each for each in run.artifacts if image_type(each.name) and each.size <= MAX_IMAGE_SIZE]
    return {
        "detail": detail,
        "run": run,
        "timeline": draw_timeline(run, detail.steps, time.time_ns() // 1000),
        "unlucky": [each for each in attempts if each.outcome in ("lost", "retried")],
        "attempt_of": {each.fence: each.number for each in attempts} if run.attempts > 1 else {},
        "error": run.last_error if failed else None,
        "traceback": truncate_head(run.traceback) if run.traceback and failed else None,
        "images": images[:MAX_IMAGES],
        "seconds": queries.run_seconds(run),
        "internal": run.model.startswith(INTERNAL_PREFIX),
        "manifest": detail.manifest,
        "patch": _shown_patch(detail.manifest),
    }


def _shown_patch(manifest: Manifest) -> str | None:
    """The uncommitted changes of the code, as far as they fit on the page."""
    git = (manifest.code or {}).get("git")
    patch = git.get("patch") if isinstance(git, dict) else None
    if patch is None or _html_size(patch) <= MAX_PATCH:
        return patch
    return f"{patch[: MAX_PATCH // 2]}\n…"


@post("/ui/runs/{run_id:str}/cancel", status_code=303)
async def cancel(run_id: RunId, request: AnyRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """Cancel the run, or request it where the run is running."""
    run = await service.run(run_id, caller)
    ended = await service.engine.cancel(run.id, tenant=caller.tenant, by=caller.actor)
    message = "Cancelled." if ended.done else "Cancel requested. The run has time to clean up."
    return redirect_with_message(request, service, f"/ui/runs/{run.id}", message)


@post("/ui/runs/{run_id:str}/retry", status_code=303)
async def retry(run_id: RunId, request: AnyRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """Submit the run again, and redirect to the new run."""
    run = await service.run(run_id, caller)
    again = await service.engine.retry(run.id, tenant=caller.tenant, by=caller.actor)
    message = f"A retry of {run.id} is already active: this one." if again.replayed else f"This is a retry of {run.id}."
    return redirect_with_message(request, service, f"/ui/runs/{again.id}", message)


@get("/ui/runs/{run_id:str}/rerun")
async def ask_for_rerun(
    run_id: RunId, request: AnyRequest, service: CurrentState, caller: CurrentPrincipal
) -> Response[Any]:
    """What changed since the run, and a button that runs it again."""
    run = await service.run(run_id, caller)
    if refusal := run.rerun_refusal:
        raise IllegalTransition(refusal)
    drift = visible_drift(await service.engine.drift(run.id), caller)
    return page(request, service, caller, "run/rerun.html", title=f"Run {short_id(run.id)} again", run=run, drift=drift)


@post("/ui/runs/{run_id:str}/rerun", status_code=303)
async def rerun(run_id: RunId, request: AnyRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """Run the run again, and redirect to the new run."""
    run = await service.run(run_id, caller)
    again = await service.engine.rerun(run.id, tenant=caller.tenant, by=caller.actor)
    return redirect_with_message(request, service, f"/ui/runs/{again.run.id}", f"This is a rerun of {run.id}.")


HANDLERS = (show, live, cancel, retry, ask_for_rerun, rerun)
