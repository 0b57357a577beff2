"""Runs: the list with its filters and its search, and what can be done to many of them at once."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from litestar import Response, get, post
from msgspec import Struct
from sqlalchemy import Connection

from semel.dashboard.forms import Form, form_of
from semel.dashboard.runs import queries
from semel.dashboard.runs.filters import SPANS, RunFilters, asked_of
from semel.dashboard.runs.filters import read as read_asked
from semel.dashboard.runs.live import asked_if_there, holding_slot, pause
from semel.dashboard.runs.queries import IdRange, RunRow, SearchResult
from semel.dashboard.sse import ALIVE, CHECKED_EVERY, HEARTBEAT, SIGNED_OUT, replace_event, still, stream
from semel.dashboard.templating import page, redirect_with_message, render_part
from semel.errors import InvalidRequest, SemelError, StoreUnavailable
from semel.runs.store.queries import Filter
from semel.runs.types import INTERNAL_PREFIX, STATUSES, Run, checked_id
from semel.service.api.params import TheRequest
from semel.service.api.problems import problem_of
from semel.service.auth.middleware import Principal
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState

ON_A_PAGE = 50
MOST_AT_ONCE = 500
"""Runs that are cancelled or retried by one form."""
MOST_WATCHED = 200
"""Runs that one stream tells of."""
BUSY_PAUSE = 2.0
QUIET_PAUSE = 5.0
"""Seconds between two looks of an open list: after something has changed, and when nothing has for a while."""


class Listed(Struct, frozen=True):
    """A page of the list, and where its neighbours begin."""

    lines: list[RunRow]
    older: str | None
    newer: str | None
    reached: str | None

    @property
    def reached_us(self) -> int | None:
        """Until when it was looked back, if the time was up before the page was full: ids begin with a time."""
        return None if self.reached is None else int(self.reached.replace("-", "")[:12], 16) * 1000


def _look(conn: Connection, asked: RunFilters, wanted: Filter, user: str | None) -> Listed:
    """The page that was asked for: by what it is searched by, after a run, before one, or the first."""
    if asked.newer is not None:
        found = queries.scan(conn, wanted, IdRange(start=asked.newer, down=False), ON_A_PAGE + 1)
        if len(found.ids) > ON_A_PAGE or found.reached is not None:
            return _shown(conn, SearchResult(found.ids[ON_A_PAGE - 1 :: -1]), wanted, user, older=True, newer=True)
        asked = RunFilters(**asked.query)
    if asked.q and asked.cursor is None:
        found = queries.find_by_text(conn, wanted, asked.q, ON_A_PAGE)
        if found.ids:
            return _shown(conn, found, wanted, user, older=False, newer=False)
    more = queries.unindexed(asked.q) if asked.q else []
    stretch = queries.stretch_of(wanted, asked.cursor)
    found = queries.scan(conn, wanted, stretch, ON_A_PAGE + 1, more)
    cut = SearchResult(found.ids[:ON_A_PAGE], found.reached)
    there_is_newer = asked.cursor is not None and not asked.q
    return _shown(conn, cut, wanted, user, older=len(found.ids) > ON_A_PAGE, newer=there_is_newer)


def _shown(
    conn: Connection, found: SearchResult, wanted: Filter, user: str | None, *, older: bool, newer: bool
) -> Listed:
    lines = queries.lines(conn, found.ids, wanted.tenant, user)
    last = found.ids[-1] if older and found.ids else found.reached
    return Listed(lines, last, found.ids[0] if newer and found.ids else None, found.reached)


@get("/ui/runs")
async def show(request: TheRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """The page of runs, newest first."""
    asked = asked_of(request)
    wanted = asked.wanted(caller)
    listed = await service.store.read(_look, asked, wanted, caller.visible_user)
    registry = service.app.registry
    return page(
        request,
        service,
        caller,
        "runs.html",
        title="Runs",
        asked=asked,
        listed=listed,
        lines=listed.lines,
        fresh=0,
        statuses=STATUSES,
        spans=list(SPANS),
        models=[name for name in registry.names if not name.startswith(INTERNAL_PREFIX)],
        first_page=asked.cursor is None and asked.newer is None and not asked.q,
    )


@get("/ui/live/runs")
async def live(request: TheRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """The rows of an open list, anew whenever one of them changes; and how many newer ones there are."""
    asked = asked_of(request)
    ids = [known for each in request.query_params.getall("run", []) if (known := checked_id(each)) is not None]
    if len(ids) > MOST_WATCHED:
        raise InvalidRequest(f"at most {MOST_WATCHED} runs are watched at a time")
    service.wait_slots.check(caller.name)
    counts_newer = request.query_params.get("first") == "1"
    return stream(holding_slot(service, caller, _told(request, service, caller, asked, ids, counts_newer=counts_newer)))


class Seen(Struct, frozen=True):
    """What an open list has seen: its rows, and how many newer runs there are. None before the first look."""

    lines: list[RunRow] | None = None
    fresh: int = 0


async def _told(
    request: TheRequest,
    service: ServiceState,
    caller: Principal,
    asked: RunFilters,
    ids: list[str],
    *,
    counts_newer: bool,
) -> AsyncIterator[bytes]:
    said, seen = Seen(fresh=-1), Seen()
    spoken = checked = time.monotonic()
    wait = BUSY_PAUSE
    yield ALIVE
    while not service.watch.ending:
        if time.monotonic() - checked >= CHECKED_EVERY:
            if not await still(service, caller):
                yield SIGNED_OUT
                return
            checked = time.monotonic()
        newer_than = asked.wanted(caller) if counts_newer else None
        look = service.store.read(_look_again, caller, ids, seen, newer_than)
        seen = await asked_if_there(look, seen)
        given = {"lines": seen.lines or [], "fresh": seen.fresh, "asked": asked}
        changed = {"runs_rows.html": seen.lines != said.lines, "runs_fresh.html": seen.fresh != said.fresh}
        wait = min(wait * 1.5, QUIET_PAUSE)
        if news := [render_part(request, caller, name, **given) for name, new in changed.items() if new]:
            yield replace_event("".join(news))
            said, spoken, wait = seen, time.monotonic(), BUSY_PAUSE
        if time.monotonic() - spoken >= HEARTBEAT:
            yield ALIVE
            spoken = time.monotonic()
        await pause(service, wait)


def _look_again(conn: Connection, caller: Principal, ids: list[str], before: Seen, wanted: Filter | None) -> Seen:
    """The list as it stands. What was over stays as it was, and is not asked for again."""
    over = {each.id: each for each in before.lines or [] if each.done}
    open_ids = ids if before.lines is None else [each.id for each in before.lines if not each.done]
    known = over | {each.id: each for each in queries.lines(conn, open_ids, caller.tenant, caller.visible_user)}
    fresh = 0 if wanted is None else queries.newer(conn, wanted, ids[0] if ids else None)
    return Seen([known[run_id] for run_id in sorted(known, reverse=True)], fresh)


class Done(Struct, frozen=True):
    """What became of one of many."""

    run_id: str
    ok: bool
    said: str
    other: str | None = None
    """Another run that this one led to."""


@post("/ui/runs/cancel", status_code=200)
async def cancel(request: TheRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """End the runs that were ticked, and tell what became of each."""

    async def one(run: Run) -> Done:
        ended = await service.engine.cancel(run.id, tenant=caller.tenant)
        said = "cancelled" if ended.done else "cancel requested: it gets time to clean up"
        return Done(run.id, ok=True, said="was cancelled before" if run.status == "CANCELLED" else said)

    return await _to_many(request, service, caller, "Cancel", one)


@post("/ui/runs/retry", status_code=200)
async def retry(request: TheRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """Submit the failed and cancelled among the runs that were ticked again, and tell what became of each."""

    async def one(run: Run) -> Done:
        again = await service.engine.retry(run.id, tenant=caller.tenant)
        said = "a retry of it is under way already" if again.replayed else "submitted again"
        return Done(run.id, ok=True, said=said, other=again.id)

    return await _to_many(request, service, caller, "Retry", one)


@post("/ui/runs/compare", status_code=303)
async def compare(request: TheRequest, service: CurrentState) -> Response[Any]:
    """Go on to compare the two runs that were ticked."""
    form = form_of(request)
    ticked = form.every("run")
    if len(ticked) != 2:
        return redirect_with_message(
            request, service, "/ui/runs", said="Tick two runs to compare them.", **_back(form).query
        )
    return redirect_with_message(request, service, "/ui/compare", a=ticked[1], b=ticked[0])


async def _to_many(
    request: TheRequest, service: ServiceState, caller: Principal, what: str, one: Callable[[Run], Awaitable[Done]]
) -> Response[Any]:
    form = form_of(request)
    ticked = list(dict.fromkeys(form.every("run")))
    if len(ticked) > MOST_AT_ONCE:
        raise InvalidRequest(f"at most {MOST_AT_ONCE} runs at a time; {len(ticked)} were ticked")
    back = _back(form)
    if not ticked:
        return redirect_with_message(request, service, "/ui/runs", said="No run was ticked.", **back.query)
    done = await _done(service, caller, ticked, one)
    good = sum(each.ok for each in done)
    return page(
        request,
        service,
        caller,
        "runs_done.html",
        title=f"{what} runs",
        what=what,
        done=done,
        good=good,
        back=back.query,
    )


async def _done(
    service: ServiceState, caller: Principal, ticked: Sequence[str], one: Callable[[Run], Awaitable[Done]]
) -> list[Done]:
    """What became of each. When the database is away, the rest is not tried: that would take very long."""
    done: list[Done] = []
    for place, run_id in enumerate(ticked):
        try:
            done.append(await _each(service, caller, run_id, one))
        except StoreUnavailable as error:
            said = problem_of(error).detail
            return [*done, *(Done(each, ok=False, said=f"not tried: {said}") for each in ticked[place:])]
    return done


async def _each(service: ServiceState, caller: Principal, run_id: str, one: Callable[[Run], Awaitable[Done]]) -> Done:
    """One of them; what is refused stops none of the others."""
    try:
        return await one(await service.run(run_id, caller))
    except StoreUnavailable:
        raise
    except SemelError as error:
        return Done(run_id, ok=False, said=problem_of(error).detail)


def _back(form: Form) -> RunFilters:
    """The list that the form stands in: where to go back to."""
    try:
        names = ("model", "user", "queue", "last", "since", "until", "q", "stalled", "cursor", "newer")
        return read_asked(form.every("status"), {name: form.get(name) for name in names})
    except InvalidRequest:
        return RunFilters()


HANDLERS = (show, live, cancel, retry, compare)
