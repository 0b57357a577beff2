"""The ledger of runs in a database: every verb as a call, each one transaction, safe to send again.

Blocking over a blocking database, awaited over an async one; one body serves both.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from sqlalchemy import URL, Connection

from semel._concurrency.batching import LARGEST, Failed, flush_apart
from semel._concurrency.retry import Outage, with_retry
from semel._concurrency.runtime import AsyncioRuntime, Runtime, ThreadRuntime
from semel._concurrency.sync import run_sync
from semel.db import blocking as db_blocking
from semel.db import migrate
from semel.db.dialect import StatementContext, transaction
from semel.db.opening import open_database
from semel.errors import InvalidRequest, SemelError, StoreBroken, StoreUnavailable
from semel.once.store import Clock, Store
from semel.once.stores.sqlite import SqliteStore
from semel.policy import seconds
from semel.runs.store import lease as store_lease
from semel.runs.store import maintenance, queries, quotas, run_keys, transitions
from semel.runs.store import submit as store_submit
from semel.runs.store.lease import Leased, LeaseRenewal, LeaseRequest
from semel.runs.store.maintenance import LogLineRow, OutboxEvent, PendingRun, WorkerCard
from semel.runs.store.queries import Backlog, Filter, RunVersion
from semel.runs.store.quotas import Person, Reserve
from semel.runs.store.run_keys import KeyEntry, StoreKey
from semel.runs.store.submit import Answer, Existing, Submission
from semel.runs.store.transitions import FinishedRun, FinishRequest, Lost
from semel.runs.types import MICRO, LogLine, Page, Quota, Run, Step, Summary, Usage, Waiting, WorkerInfo

P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")

_log = logging.getLogger("semel.database")

RETRY_FOR = 10.0
"""Seconds for which a verb is tried again while the database is unavailable or silent. A SQLite file has one writer,
who is not chosen by turns: under load it may take some tries of a second each."""
DEADLINE = 30.0
"""Seconds for a single try of what goes through many rows."""
TIDYING = 5.0
"""Seconds that a clean-up may take before the sweeper turns to its other work."""
_BULK = 1000
"""Runs in one transaction of a bulk submission."""


_Run: TypeAlias = Callable[..., Awaitable[Any]]
"""A way of Database to run a verb."""


class RunStore:
    """Everything that is known of runs, keys and quotas. PostgreSQL or SQLite is the only truth."""

    def __init__(
        self,
        url: str,
        *,
        awaited: bool,
        clock: Clock | None = None,
        publish: bool = False,
        retry_for: float = RETRY_FOR,
        pool: int | None = None,
    ) -> None:
        parts = db_blocking.parse(url.replace("postgres://", "postgresql://", 1))
        self.dialect = parts.get_backend_name()
        if self.dialect not in ("sqlite", "postgresql"):
            raise InvalidRequest(
                f"runs live in SQLite or PostgreSQL, not in {self.dialect!r}: sqlite:///semel.db, postgresql://host/name"
            )
        if self.dialect == "sqlite" and (not parts.database or ":memory:" in parts.database):
            raise InvalidRequest("runs need a file that every process sees: sqlite:///semel.db, with three slashes")
        self.url = parts
        self.awaited = awaited
        self.runtime: Runtime = AsyncioRuntime() if awaited else ThreadRuntime()
        self._retry_for = seconds("retry_for", retry_for, zero=True)
        self._database = open_database(parts, awaited=awaited, pool=pool)
        self._clock = clock
        self._publish = publish
        self._ready = False
        self._repeats = False
        self.outage: Outage | None = None
        """Set by a worker or server, for whom an outage is to be logged; other callers get an error."""
        self._lane = self.runtime.lane(self._submit_now)
        self._looking = self.runtime.lane(self._look_now)
        self._reserving = self.runtime.lane(self._reserve_now)

    def key_store(self) -> Store:
        """The keys of the claim engine in the same database, over the same connections."""
        if self.dialect == "sqlite":
            return SqliteStore(self._database, self._clock)
        from semel.once.stores.postgres import PostgresStore

        return PostgresStore(self._database, self._clock)

    @property
    def file(self) -> Path | None:
        """The file of a SQLite database, wherever the process goes."""
        return Path(self.url.database or "").absolute() if self.dialect == "sqlite" else None

    @property
    def place(self) -> str:
        """Where the database is, for a log: the whole path of a file, no password."""
        return str(self.file or self.url.set(drivername=self.dialect).render_as_string(hide_password=True))

    @property
    def terms(self) -> StatementContext:
        """What verbs are told: SQLite has no clock of its own but the host's."""
        if self._clock is not None:
            return StatementContext(self._clock(), self._publish)
        return StatementContext(time.time_ns() // 1000 if self.dialect == "sqlite" else None, self._publish)

    async def open(self) -> None:
        """Check that the tables are there; on SQLite make them. Migrations of a server are the operator's decision."""
        if self.dialect == "sqlite":
            _require_folder(self.url)
            await self._database.look_and_write(migrate.bring_up)
        else:
            await self._database.read(migrate.require)
        self._ready = True

    async def apart(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Blocking work of others, where it holds nobody up."""
        if self.awaited:
            return await asyncio.to_thread(work, *args, **kwargs)
        return work(*args, **kwargs)

    async def close(self) -> None:
        """Give the connections back."""
        await self._database.close()

    async def _write(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._patiently(self._database.write, lambda conn: work(conn, *args, **kwargs))

    async def _read(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._patiently(self._database.read, lambda conn: work(conn, *args, **kwargs))

    async def read(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Ask for what goes through many rows: lists, counts, and statements of others, such as the service's own."""
        return await self._patiently(self._database.survey, lambda conn: work(conn, *args, **kwargs), longest=DEADLINE)

    async def write(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Write through many rows (clean-ups), or with statements of others, as one transaction."""
        whole = partial(_in_transaction, work=work, args=args, kwargs=kwargs)
        return await self._patiently(self._database.write_many, whole, longest=DEADLINE)

    async def _at_once(
        self,
        work: Callable[Concatenate[Connection, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Several statements as one transaction."""
        return await self._write(_in_transaction, work, args, kwargs)

    async def _patiently(
        self, how: _Run, work: Callable[[Connection], R], longest: float | None = None, began: float | None = None
    ) -> R:
        """A connection that broke is no reason to give up: every verb may be sent again."""
        send = with_retry(partial(self._once, how), self.runtime, self._retry_for, longest=longest)
        try:
            answer: R = await send(work, began)
        except StoreUnavailable as error:
            self.unavailable(error)
            raise
        return answer

    async def _once(self, how: _Run, work: Callable[[Connection], R]) -> R:
        if not self._ready:
            await self.open()
        answer: R = await how(work)
        if self.outage is not None:
            self.outage.succeeded()
        return answer

    def unavailable(self, error: object) -> None:
        """The database could not be had: where an outage is reported, that is logged in few lines."""
        if self.outage is not None:
            self.outage.failed(error)

    async def submit(self, submission: Submission) -> Answer:
        """Submit one, in company where there is some."""
        return await self._lane(submission)

    async def submit_many(self, submissions: Sequence[Submission]) -> list[Answer]:
        """Submit many, a thousand in a transaction. What fails beside others has its error in its place."""
        told: list[Answer | Failed] = []
        for start in range(0, len(submissions), _BULK):
            answers = await flush_apart(self._submit_now, submissions[start : start + _BULK], time.monotonic())
            told.extend(answers)
        if told and all(isinstance(each, Failed) for each in told):
            raise next(each.error for each in told if isinstance(each, Failed))
        return [_error_of(each) if isinstance(each, Failed) else each for each in told]

    async def _submit_now(self, submissions: Sequence[Submission], began: float) -> list[Answer]:
        """Where repeats were met lately, look for them first: that is cheaper than to find out while writing."""
        answers = {}
        if self._repeats:
            answers = await self._in_company(self._database.read, store_submit.recognised, submissions, began)
        left = [each for each in submissions if each.id not in answers]
        if left:
            written = await self._in_company(self._database.write, _submit, left, began)
            answers |= {each.id: answer for each, answer in zip(left, written, strict=True)}
        self._repeats = any(isinstance(answer, Existing) for answer in answers.values())
        return [answers[each.id] for each in submissions]

    async def _in_company(
        self,
        how: _Run,
        work: Callable[[Connection, Sequence[A], StatementContext], R],
        batch: Sequence[A],
        began: float,
    ) -> R:
        """A verb for a batch of calls, the oldest of which was made when ``began`` says; a large one has more time."""
        longest = DEADLINE if len(batch) > LARGEST else None
        return await self._patiently(how, lambda conn: work(conn, batch, self.terms), longest, began)

    async def lease(self, request: LeaseRequest) -> list[Leased]:
        """See lease.lease. Not sent again by itself: what its reply would have named is given back later."""
        return await self.runtime.within(
            self._retry_for / 2 or RETRY_FOR,
            self._once(self._database.write, lambda conn: store_lease.lease(conn, request, self.terms)),
        )

    async def lease_these(self, worker: str, ids: Sequence[str]) -> list[Leased]:
        """See lease.lease_these."""
        return await self._at_once(store_lease.lease_these, worker, ids, self.terms)

    async def wake(self) -> tuple[int, float | None]:
        """See lease.wake; the pause until the next is due in seconds."""
        woken, until_next = await self._write(store_lease.wake, self.terms)
        return woken, None if until_next is None else max(0.0, until_next / MICRO)

    async def renew(self, beats: Sequence[LeaseRenewal]) -> dict[str, bool]:
        """See lease.renew. Not sent again by itself: the next heartbeat comes soon."""
        return await self._once(self._database.write, lambda conn: store_lease.renew(conn, beats, self.terms))

    async def watch(self, held: Sequence[tuple[str, int]]) -> dict[str, bool]:
        """See lease.watch. Not sent again by itself, either."""
        return await self._once(self._database.read, lambda conn: store_lease.watch(conn, held))

    async def end(self, endings: Sequence[FinishRequest]) -> dict[str, FinishedRun]:
        """See transitions.end. A success that was written before, its reply lost, is answered as the first time."""
        over = await self._write(transitions.end, endings, self.terms)
        if len(over) < len(endings):
            missing = [each for each in endings if each.run_id not in over]
            over |= await self._read(transitions.succeeded_before, missing)
        return over

    async def held_by(self, worker: str) -> dict[str, int]:
        """The runs that the worker holds by the ledger, with their fences."""
        return await self._read(store_lease.held_by, worker)

    async def mend_times(self) -> None:
        """After the clock was put back: let leases and reservations last no longer than they were asked for."""
        await self._write(_mend_times, self.terms)

    async def lose_expired(self) -> list[Lost]:
        """See transitions.lose_expired."""
        return await self._write(transitions.lose_expired, self.terms)

    async def attempts_began(self, attempts: Sequence[tuple[str, int]]) -> dict[str, int]:
        """See transitions.attempts_began."""
        return await self._read(transitions.attempts_began, attempts)

    async def cancel(self, ids: Sequence[str], why: str) -> dict[str, Any]:
        """See transitions.cancel."""
        return await self._write(transitions.cancel, ids, why, self.terms)

    async def get(self, ids: Sequence[str], tenant: str | None = None) -> dict[str, Run]:
        """See queries.get."""
        return await self._read(queries.get, ids, tenant)

    async def find(self, run_id: str) -> Run | None:
        """One run, if it is there; in company where there is some."""
        return await self._looking(run_id)

    async def _look_now(self, ids: Sequence[str], began: float) -> list[Run | None]:
        found = await self._patiently(self._database.read, lambda conn: queries.get(conn, ids, None), began=began)
        return [found.get(run_id) for run_id in ids]

    async def marks(self, ids: Sequence[str]) -> dict[str, tuple[RunVersion, tuple[int, int]]]:
        """See queries.versions."""
        return await self._read(queries.versions, ids)

    async def list_runs(self, wanted: Filter, limit: int, cursor: str | None, **how: Any) -> Page:
        """See queries.list_runs."""
        return await self.read(queries.list_runs, wanted, limit, cursor, **how)

    async def result(self, run_id: str, tenant: str | None) -> tuple[Run, str | None, str | None] | None:
        """See queries.result."""
        return await self._read(queries.result, run_id, tenant)

    async def timeline(self, run_id: str) -> list[Step]:
        """See queries.timeline."""
        return await self.read(queries.timeline, run_id)

    async def logs(self, run_id: str, after: tuple[int, int], limit: int) -> list[LogLine]:
        """See queries.logs."""
        return await self.read(queries.logs, run_id, after, limit)

    async def summary(self, tenant: str, *, grouped: bool, user: str | None = None) -> list[Summary]:
        """See queries.summary."""
        return await self.read(queries.summary, tenant, grouped=grouped, user=user)

    async def backlog(self) -> Backlog:
        """See queries.backlog."""
        return await self.read(queries.backlog, self.terms)

    async def waiting(self, run_id: str) -> Waiting | None:
        """See queries.waiting."""
        return await self._read(queries.waiting, run_id, self.terms)

    async def workers(self) -> list[WorkerInfo]:
        """See queries.list_workers."""
        return await self.read(queries.list_workers, self.terms)

    async def due(self, silent: float, most: int) -> list[PendingRun]:
        """See maintenance.due."""
        return await self._read(maintenance.due, round(silent * MICRO), most, self.terms)

    async def worker_seen(self, card: WorkerCard) -> None:
        """See maintenance.worker_seen."""
        await self._write(maintenance.worker_seen, card, self.terms)

    async def worker_gone(self, worker_id: str) -> None:
        """See maintenance.worker_gone."""
        await self._write(maintenance.worker_gone, worker_id)

    async def lead(self, role: str, holder: str, term: float) -> bool:
        """See maintenance.acquire_leadership."""
        return await self._write(maintenance.acquire_leadership, role, holder, term, self.terms)

    async def term_left(self, role: str, holder: str) -> float:
        """See maintenance.term_left."""
        return await self._read(maintenance.term_left, role, holder, self.terms)

    async def step_down(self, role: str, holder: str) -> None:
        """See maintenance.release_leadership."""
        await self._write(maintenance.release_leadership, role, holder)

    async def log(self, lines: Sequence[LogLineRow]) -> None:
        """See maintenance.log."""
        await self._write(maintenance.log, lines)

    async def unpublished(self) -> list[OutboxEvent]:
        """See maintenance.unpublished."""
        return await self._read(maintenance.unpublished)

    async def published(self, events: Sequence[OutboxEvent]) -> None:
        """See maintenance.published."""
        await self._write(maintenance.published, events)

    async def tidy(self) -> int:
        """Remove keys and reservations that expired, and workers that have been silent for a day.

        In batches, for some seconds: what is left then is for the next time.
        """
        total, more = 0, True
        ends_at = time.monotonic() + TIDYING
        while more and time.monotonic() < ends_at:
            removed, more = await self.write(_tidy, self.terms)
            total += removed
        return total

    def blocking(self) -> RunStore:
        """The same, for threads: itself where it blocks anyway. Close it after use."""
        if not self.awaited:
            return self
        url = self.url.render_as_string(hide_password=False)
        return RunStore(url, awaited=False, clock=self._clock, publish=self._publish, retry_for=self._retry_for)

    async def set_quota(self, person: Person, quota: Quota | None) -> None:
        """See quotas.set_quota."""
        await self._at_once(quotas.set_quota, person, quota, self.terms)

    async def quotas(self, tenant: str) -> dict[str, Quota]:
        """See quotas.list_quotas."""
        return await self.read(quotas.list_quotas, tenant)

    async def usage(self, person: Person) -> tuple[Usage, Quota | None]:
        """What a user has in use, and the quota that holds."""
        return await self.read(_usage, person, self.terms)

    async def reserve(self, request: Reserve) -> str | None:
        """See quotas.reserve; in company where there is some."""
        return await self._reserving(request)

    async def _reserve_now(self, requests: Sequence[Reserve], began: float) -> list[str | None]:
        return await self._in_company(self._database.write, _reserve, requests, began)

    async def consume(self, reservation: str, person: tuple[str, str | None], job_id: str | None) -> bool:
        """See quotas.consume_after."""
        return await self._at_once(quotas.consume_after, reservation, person, job_id, self.terms)

    async def release(self, reservation: str, person: tuple[str, str | None]) -> bool:
        """See quotas.release."""
        return await self._write(quotas.release, reservation, person)

    async def store_key(self, request: StoreKey) -> str:
        """See run_keys.store_key."""
        return await self._at_once(run_keys.store_key, request, self.terms)

    async def check_key(self, person: tuple[str, str | None], key: str) -> KeyEntry | None:
        """See run_keys.check_key."""
        return await self._at_once(run_keys.check_key, person, key, self.terms)


def wait_for_database(ledger: RunStore, seconds: float) -> None:
    """Block until a blocking ledger can be opened, for so long; one line says that it is waited for.

    Raises what is in the way when the time is over, and at once when waiting would not help. Closes the ledger.
    """
    began = time.monotonic()
    waits = False
    try:
        while True:
            try:
                run_sync(ledger.open())
            except StoreUnavailable as error:
                left = seconds - (time.monotonic() - began)
                if left <= 0 or isinstance(error, StoreBroken):
                    raise
                if not waits:
                    waits = True
                    _log.warning("the database is unavailable, waiting for it for up to %g s: %s", seconds, error)
                time.sleep(min(0.5, left))
            else:
                break
    finally:
        run_sync(ledger.close())
    if waits:
        _log.warning("the database is available after %.0f s", time.monotonic() - began)


def _require_folder(url: URL) -> None:
    folder = Path(url.database or "").absolute().parent
    if not folder.is_dir():
        raise StoreBroken(f"the folder {folder} of the database file is not there; make it, or mend the URL")


def _error_of(failed: Failed) -> SemelError:
    error = failed.error
    return error if isinstance(error, SemelError) else SemelError(f"it could not be stored: {error!r}")


def _submit(conn: Connection, submissions: Sequence[Submission], terms: StatementContext) -> list[Answer]:
    with transaction(conn):
        return store_submit.submit(conn, submissions, terms)


def _reserve(conn: Connection, requests: Sequence[Reserve], terms: StatementContext) -> list[str | None]:
    with transaction(conn):
        return quotas.reserve(conn, requests, terms)


def _in_transaction(conn: Connection, work: Any, args: Any, kwargs: Any) -> Any:
    with transaction(conn):
        return work(conn, *args, **kwargs)


def _mend_times(conn: Connection, terms: StatementContext) -> None:
    maintenance.shorten_leases(conn, terms)
    quotas.restart_reservations(conn, terms)


def _tidy(conn: Connection, terms: StatementContext) -> tuple[int, bool]:
    most = 1000
    maintenance.forget_workers(conn, 86400 * MICRO, terms)
    removed = run_keys.purge_keys(conn, terms, most), quotas.purge_reservations(conn, terms, most)
    return sum(removed), max(removed) >= most


def _usage(conn: Connection, person: Person, terms: StatementContext) -> tuple[Usage, Quota | None]:
    used = quotas.usage(conn, person, quotas.read_clock(conn, terms))
    return used, quotas.quotas_of(conn, [person]).get(person)
