"""``/ui/workers``: the workers that run, or ran in the last day, and what each of them holds."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Response, get
from litestar.params import QueryParameter
from msgspec import Struct
from sqlalchemy import Connection, select

from semel.dashboard.templating import page
from semel.db.dialect import StatementContext
from semel.db.schema import active
from semel.runs.store import queries
from semel.runs.types import INTERNAL_QUEUE, WorkerInfo
from semel.service.api.params import AnyRequest
from semel.service.auth.middleware import requires
from semel.service.auth.tokens import MAIN
from semel.service.state import CurrentPrincipal, CurrentState

PATH = "/ui/workers"
MAX_HELD = 100
"""Runs of a worker on its page."""

Id = Annotated[str, QueryParameter(max_length=1000)]


class HeldRun(Struct, frozen=True):
    """A run that a worker holds."""

    id: str
    model: str
    user: str
    queue: str
    began_us: int
    heartbeat_us: int | None
    lease_until_us: int
    progress: float | None


def list_held(conn: Connection, tenant: str, worker: str) -> list[HeldRun]:
    """The runs of the tenant that the worker holds, oldest first."""
    names = ("id", "model", "user_id", "queue", "began_us", "heartbeat_us", "lease_until_us", "progress")
    held = (active.c.worker == worker, active.c.lease_until_us.is_not(None))
    query = select(*(active.c[name] for name in names)).where(*queries.Filter(tenant=tenant).conditions(active), *held)
    return [HeldRun(*row) for row in conn.execute(query.order_by(active.c.id).limit(MAX_HELD))]


def state_of(worker: WorkerInfo) -> str:
    """``silent``, ``draining`` or ``alive``."""
    return "silent" if not worker.alive else "draining" if worker.draining else "alive"


def _read(
    conn: Connection, tenant: str, worker: str, terms: StatementContext
) -> tuple[list[WorkerInfo], list[HeldRun]]:
    found = [each for each in queries.list_workers(conn, terms) if each.queues != [INTERNAL_QUEUE]]
    return found, list_held(conn, tenant, worker) if worker else []


@get(PATH, guards=[requires("operator")])
async def show(request: AnyRequest, service: CurrentState, caller: CurrentPrincipal, worker: Id = "") -> Response[Any]:
    """All workers, or one of them with the runs that it holds."""
    store = service.store
    found, held = await store.read(_read, caller.tenant, worker, store.statement_context)
    found.sort(key=lambda each: (not each.alive, each.name, each.started_us))
    shown = next((each for each in found if each.id == worker), None)
    return page(
        request,
        service,
        caller,
        "workers/one.html" if worker else "workers/page.html",
        title=f"Worker {shown.name if shown else worker}" if worker else "Workers",
        worker_id=worker,
        worker=shown,
        workers=[(each, state_of(each)) for each in found],
        state="" if shown is None else state_of(shown),
        held=held,
        max_held=MAX_HELD,
        sees_hosts=caller.tenant == MAIN,
    )


HANDLERS = (show,)
