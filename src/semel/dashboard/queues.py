"""``/ui/queues``: what waits and runs in each queue and who serves it; operators pause and resume queues and models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, get_args

from litestar import Response, get, post
from litestar.params import QueryParameter
from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import Connection, case, func, select

from semel.api_types import PauseRequest
from semel.dashboard.forms import form_of
from semel.dashboard.templating import page, redirect_with_message
from semel.db.dialect import StatementContext
from semel.db.schema import active
from semel.errors import InvalidRequest
from semel.runs.store import pauses, queries
from semel.runs.store.quotas import read_clock
from semel.runs.types import INTERNAL_PREFIX, INTERNAL_QUEUE, Pause, PauseKind, WorkerInfo
from semel.service.api import pauses as api
from semel.service.api.params import AnyRequest
from semel.service.api.problems import ApiError
from semel.service.auth.middleware import Principal, requires
from semel.service.auth.tokens import MAIN
from semel.service.state import CurrentPrincipal, CurrentState, ServiceState

PATH = "/ui/queues"
MAX_WHY = 500

Name = Annotated[str, QueryParameter(max_length=1000)]


class QueueRow(Struct, frozen=True, kw_only=True):
    """A queue: what waits and runs in it, who serves it, and whether it is paused."""

    name: str
    due: int
    """Runs that could start now."""
    later: int
    running: int
    oldest_due_us: int | None
    workers: list[WorkerInfo]
    """The live workers that serve it."""
    pause: Pause | None

    @property
    def is_unserved(self) -> bool:
        """Whether runs wait that no live worker will start."""
        return self.due > 0 and not self.workers and self.pause is None


def list_queues(
    conn: Connection, tenant: str, known: Iterable[str], terms: StatementContext
) -> tuple[list[QueueRow], list[Pause]]:
    """The queues that have active runs of the tenant or live workers, and the ``known`` ones; and what is paused."""
    now = read_clock(conn, terms)
    waits = active.c.lease_until_us.is_(None)
    is_due = case((waits & (active.c.due_us <= now), 1), else_=0)
    counted = select(
        active.c.queue,
        func.sum(is_due),
        func.sum(case((waits, 1), else_=0)),
        func.count(),
        func.min(case((waits & (active.c.due_us <= now), active.c.due_us))),
    )
    mine = queries.Filter(tenant=tenant).conditions(active)
    counts = {row[0]: row for row in conn.execute(counted.where(*mine).group_by(active.c.queue))}
    paused = pauses.list_pauses(conn)
    if tenant != MAIN:  # who paused it is the main tenant's business
        paused = [replace(each, by="") for each in paused]
    stopped = {each.name: each for each in paused if each.kind == "queue"}
    live = [each for each in queries.list_workers(conn, terms) if each.alive]
    served = {queue for each in live for queue in each.queues}
    rows = []
    names = {*counts, *served, *known, *(stopped if tenant == MAIN else ())}
    for name in sorted(names - {INTERNAL_QUEUE}):
        _, due, waiting, total, oldest = counts.get(name, (name, 0, 0, 0, None))
        rows.append(
            QueueRow(
                name=name,
                due=int(due),
                later=int(waiting) - int(due),
                running=int(total) - int(waiting),
                oldest_due_us=oldest,
                workers=[each for each in live if name in each.queues],
                pause=stopped.get(name),
            )
        )
    return rows, paused


@get(PATH, guards=[requires("operator")])
async def show(request: AnyRequest, service: CurrentState, caller: CurrentPrincipal, queue: Name = "") -> Response[Any]:
    """All queues, or one."""
    store = service.store
    async with service.slow_query_lock:
        rows, paused = await store.read(list_queues, caller.tenant, _known(service), store.statement_context)
    rows = [each for each in rows if queue in ("", each.name)]
    if queue and not rows:
        raise ApiError(404, "NOT_FOUND", f"no run, worker or model uses the queue {queue!r}")
    return page(
        request,
        service,
        caller,
        "queues/page.html",
        title=f"Queue {queue}" if queue else "Queues",
        queue=queue,
        rows=rows,
        paused_models=[each for each in paused if each.kind == "model"] if may_pause(caller) else [],
        may_pause=may_pause(caller),
        max_why=MAX_WHY,
    )


def _known(service: ServiceState) -> set[str]:
    """The queues of the models that this server knows."""
    registry = service.app.registry
    return {registry[name].queue for name in registry.names if not name.startswith(INTERNAL_PREFIX)}


def may_pause(caller: Principal) -> bool:
    """Whether they may pause queues and models, which belong to all tenants."""
    return caller.tenant == MAIN and caller.may("operator")


@post("/ui/queues/pause", status_code=303, guards=[requires("operator")])
async def pause(request: AnyRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """Let no run of the queue or model start; what runs goes on."""
    kind, name = _target(request)
    why = PauseRequest(why=form_of(request).get("why").strip()[:MAX_WHY])
    found = await api.pause.fn(kind=kind, name=name, data=why, service=service, caller=caller)
    waiting = "1 run is pending" if found.pending == 1 else f"{found.pending:,} runs are pending"
    message = f"Paused the {kind} {name}: nothing new starts, and what runs goes on; {waiting}."
    return _back(request, service, kind, name, message)


@post("/ui/queues/resume", status_code=303, guards=[requires("operator")])
async def resume(request: AnyRequest, service: CurrentState, caller: CurrentPrincipal) -> Response[Any]:
    """Let runs of the queue or model start again."""
    kind, name = _target(request)
    message = f"Resumed the {kind} {name}."
    try:
        await api.resume.fn(kind=kind, name=name, service=service, caller=caller)
    except ApiError as error:
        if error.status != 404:
            raise
        message = f"The {kind} {name} was not paused any more."
    return _back(request, service, kind, name, message)


def _target(request: AnyRequest) -> tuple[PauseKind, str]:
    form = form_of(request)
    for kind in get_args(PauseKind):
        if form.get("kind") == kind and form.get("name"):
            return kind, form.get("name")
    raise InvalidRequest("kind must be queue or model, and name must not be empty")


def _back(request: AnyRequest, service: ServiceState, kind: PauseKind, name: str, message: str) -> Response[Any]:
    if kind == "model":
        return redirect_with_message(request, service, "/ui/models", message, model=name)
    return redirect_with_message(request, service, PATH, message)


HANDLERS = (show, pause, resume)
