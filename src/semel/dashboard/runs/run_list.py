"""``/ui/runs``: the list of runs with filters and search, kept up to date, and actions on many runs at once."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from litestar import Response, get, post
from litestar.response import Stream
from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import Connection

from semel.dashboard.forms import Form, form_of
from semel.dashboard.runs import queries
from semel.dashboard.runs.filters import SPANS, RunFilters, parse_filters
from semel.dashboard.runs.queries import IdRange, RunRow, SearchResult
from semel.dashboard.sse import NO_UPDATE, live_response, replace_event
from semel.dashboard.templating import address, page, redirect, redirect_with_message, render_part
from semel.errors import InvalidRequest, SemelError, StoreUnavailable
from semel.runs.store.queries import Filter, find
from semel.runs.types import INTERNAL_PREFIX, STATUSES, Run, checked_id
from semel.service.api.params import AnyRequest, root_of
from semel.service.api.problems import problem_of
from semel.service.auth.middleware import Principal
from semel.service.sse import pause, to_completion
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState

PATH = "/ui/runs"
PAGE_SIZE = 50
MAX_SELECTED = 500
"""Runs that one form can cancel or retry."""
MAX_WATCHED = 200
"""Runs that one live stream follows."""
BUSY_PAUSE = 2.0
QUIET_PAUSE = 5.0
"""Seconds between two reads of an open list: after a change, and after a while without one."""


class ListPage(Struct, frozen=True):
    """A page of the list, and where the pages next to it begin."""

    rows: list[RunRow]
    older: str | None
    newer: str | None
    reached: str | None

    @property
    def reached_us(self) -> int | None:
        """The time back to which runs were searched, if that stopped before the page was full: ids begin with it."""
        return None if self.reached is None else int(self.reached.replace("-", "")[:12], 16) * 1000


async def _list_page(service: ServiceState, filters: RunFilters, caller: Principal) -> ListPage:
    """The page. Runs of a model are searched for by the store, if it has a short way to them."""
    wanted = service.engine.filter_of(caller.tenant, **filters.options(caller))
    known = None
    if wanted.model is not None and filters.after is None and not filters.q and not filters.oldest_first:
        start = queries.range_of(wanted, filters.before).start
        known = await service.store.read(find, replace(wanted, real_time=True), start, PAGE_SIZE + 1)
    return await service.store.read(_read_page, filters, wanted, caller.visible_user, known)


def _read_page(
    conn: Connection, filters: RunFilters, wanted: Filter, user: str | None, known: list[str] | None
) -> ListPage:
    if filters.after is not None:
        found = queries.scan(conn, wanted, IdRange(start=filters.after, down=False), PAGE_SIZE + 1)
        if len(found.ids) > PAGE_SIZE or found.reached is not None:
            newest_first = SearchResult(found.ids[PAGE_SIZE - 1 :: -1])
            return _page_of(conn, newest_first, wanted, user, older=True, newer=True)
        filters = RunFilters(**filters.query)  # fewer than a page are newer: show the first page
    if filters.q and filters.before is None:
        found = queries.find_by_text(conn, wanted, filters.q, PAGE_SIZE)
        if found.ids:
            return _page_of(conn, found, wanted, user, older=False, newer=False)
    patience = 1 if filters.before is None else queries.FURTHER
    if filters.oldest_first:
        found = queries.scan(conn, wanted, queries.range_up(wanted, filters.before), PAGE_SIZE + 1, patience=patience)
    elif known is None:
        ids = queries.range_of(wanted, filters.before)
        found = queries.scan(conn, wanted, ids, PAGE_SIZE + 1, filters.q, patience=patience)
    else:
        found = SearchResult(known)
    shown = SearchResult(found.ids[:PAGE_SIZE], found.reached)
    newer = filters.before is not None and not filters.q and not filters.oldest_first
    listed = _page_of(conn, shown, wanted, user, older=len(found.ids) > PAGE_SIZE, newer=newer)
    return replace(listed, rows=listed.rows[::-1]) if filters.oldest_first else listed


def _page_of(
    conn: Connection, found: SearchResult, wanted: Filter, user: str | None, *, older: bool, newer: bool
) -> ListPage:
    rows = queries.rows(conn, found.ids, wanted.tenant, user)
    last = found.ids[-1] if older and found.ids else found.reached
    return ListPage(rows, last, found.ids[0] if newer and found.ids else None, found.reached)


@get(PATH)
async def show(request: AnyRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """The list of runs, newest first."""
    filters = _filters_of(request)
    run_page = await _list_page(service, filters, caller)
    return page(
        request,
        service,
        caller,
        "runs/list.html",
        title="Runs",
        filters=filters,
        run_page=run_page,
        rows=run_page.rows,
        newer_runs=0,
        statuses=STATUSES,
        spans=list(SPANS),
        models=[name for name in service.app.registry.names if not name.startswith(INTERNAL_PREFIX)],
        may_act=caller.may("submitter"),
        first_page=filters.before is None and filters.after is None and not filters.q and not filters.oldest_first,
    )


@get("/ui/live/runs")
async def live(request: AnyRequest, service: CurrentState, caller: CurrentPrincipal) -> Stream:
    """The rows of an open list whenever one of them changes, and the number of newer runs."""
    ids = [known for each in request.query_params.getall("run", []) if (known := checked_id(each)) is not None]
    if len(ids) > MAX_WATCHED:
        raise InvalidRequest(f"at most {MAX_WATCHED} runs can be watched at a time")
    counts_newer = request.query_params.get("first") == "1"
    updates = _updates(request, service, caller, _filters_of(request), ids, counts_newer=counts_newer)
    return live_response(service, caller, updates)


class OpenList(Struct, frozen=True):
    """What an open list shows: its rows (None before the first read), and the number of newer runs."""

    rows: list[RunRow] | None = None
    newer_runs: int = 0


async def _updates(
    request: AnyRequest,
    service: ServiceState,
    caller: Principal,
    filters: RunFilters,
    ids: list[str],
    *,
    counts_newer: bool,
) -> AsyncGenerator[bytes, None]:
    sent, latest = OpenList(newer_runs=-1), OpenList()
    wait = BUSY_PAUSE
    while True:
        wanted = service.engine.filter_of(caller.tenant, **filters.options(caller)) if counts_newer else None
        with suppress(StoreUnavailable):  # a short outage ends no stream
            latest = await to_completion(service.store.read(_read_again, caller, ids, latest, wanted))
            if filters.oldest_first:
                latest = replace(latest, rows=(latest.rows or [])[::-1])
        data = {"rows": latest.rows or [], "newer_runs": latest.newer_runs, "filters": filters}
        changed = {
            "runs/rows.html": latest.rows != sent.rows,
            "runs/newer.html": latest.newer_runs != sent.newer_runs,
        }
        parts = [render_part(request, caller, name, **data) for name, is_new in changed.items() if is_new]
        yield replace_event("".join(parts)) if parts else NO_UPDATE
        sent, wait = latest, BUSY_PAUSE if parts else min(wait * 1.5, QUIET_PAUSE)
        await pause(service, wait)


def _read_again(
    conn: Connection, caller: Principal, ids: list[str], before: OpenList, wanted: Filter | None
) -> OpenList:
    """The list as it is now. Runs that have ended do not change, and are not read again."""
    ended = {row.id: row for row in before.rows or [] if row.done}
    open_ids = ids if before.rows is None else [row.id for row in before.rows if not row.done]
    known = ended | {row.id: row for row in queries.rows(conn, open_ids, caller.tenant, caller.visible_user)}
    newer = 0 if wanted is None else queries.count_newer(conn, wanted, ids[0] if ids else None)
    return OpenList([known[run_id] for run_id in sorted(known, reverse=True)], newer)


class ActionResult(Struct, frozen=True):
    """What an action on many runs did to one of them."""

    run_id: str
    ok: bool
    message: str
    new_run: str | None = None


Action = Callable[[Run], Awaitable[ActionResult]]


@post("/ui/runs/cancel", status_code=200)
async def cancel(request: AnyRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """Cancel the selected runs, and show the result for each."""

    async def cancel_run(run: Run) -> ActionResult:
        ended = await service.engine.cancel(run.id, tenant=caller.tenant, by=caller.actor)
        message = "cancelled" if ended.done else "cancel requested; the run has time to clean up"
        return ActionResult(run.id, ok=True, message="already cancelled" if run.status == "CANCELLED" else message)

    return await _for_selected(request, service, caller, "Cancel", cancel_run)


@post("/ui/runs/retry", status_code=200)
async def retry(request: AnyRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """Retry the selected runs that failed or were cancelled, and show the result for each."""

    async def retry_run(run: Run) -> ActionResult:
        again = await service.engine.retry(run.id, tenant=caller.tenant, by=caller.actor)
        message = "a retry is already active" if again.replayed else "submitted again"
        return ActionResult(run.id, ok=True, message=message, new_run=again.id)

    return await _for_selected(request, service, caller, "Retry", retry_run)


@post("/ui/runs/compare", status_code=303)
async def compare(request: AnyRequest, service: CurrentState) -> Response[Any]:
    """Redirect to the comparison of the two selected runs."""
    form = form_of(request)
    selected = form.every("run")
    if len(selected) != 2:
        return redirect_with_message(request, service, PATH, "Select two runs to compare.", **_list_query(form))
    return redirect(address(root_of(request), "/ui/compare", a=selected[1], b=selected[0]))


async def _for_selected(
    request: AnyRequest, service: ServiceState, caller: Principal, label: str, action: Action
) -> Response[Any]:
    form = form_of(request)
    selected = list(dict.fromkeys(form.every("run")))
    if len(selected) > MAX_SELECTED:
        raise InvalidRequest(f"at most {MAX_SELECTED} runs can be selected; {len(selected)} were")
    back = _list_query(form)
    if not selected:
        return redirect_with_message(request, service, PATH, "No runs selected.", **back)
    results = await _act(service, caller, selected, action)
    done = sum(each.ok for each in results)
    data: dict[str, Any] = {"title": f"{label} runs", "label": label, "results": results, "done": done, "back": back}
    return page(request, service, caller, "runs/results.html", **data)


async def _act(service: ServiceState, caller: Principal, run_ids: Sequence[str], action: Action) -> list[ActionResult]:
    """The action on each run; a refusal stops none of the others. During an outage the rest is not tried."""
    results: list[ActionResult] = []
    for place, run_id in enumerate(run_ids):
        try:
            results.append(await action(await service.run(run_id, caller)))
        except StoreUnavailable as error:
            message = f"not tried: {problem_of(error).detail}"
            return [*results, *(ActionResult(each, ok=False, message=message) for each in run_ids[place:])]
        except SemelError as error:
            results.append(ActionResult(run_id, ok=False, message=problem_of(error).detail))
    return results


def _filters_of(request: AnyRequest) -> RunFilters:
    query = request.query_params
    return parse_filters(query.getall("status", []), lambda name: query.get(name, ""))


def _list_query(form: Form) -> dict[str, Any]:
    """The filters of the list that the form is part of, as a query."""
    try:
        return parse_filters(form.every("status"), form.get).query
    except InvalidRequest:
        return {}


HANDLERS = (show, live, cancel, retry, compare)
