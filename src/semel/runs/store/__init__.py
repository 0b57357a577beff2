"""The store of runs: runs the functions of this package (``lease.lease``, ``queries.get``, …) on the database.

``await store.write(transitions.cancel, ids, why, store.statement_context)``: such a function takes a connection first,
is safe to run twice, and is retried while the database is unavailable. The store is blocking over a blocking database,
and awaited over an async one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar

import msgspec
from sqlalchemy import URL, Connection, exc

from semel._concurrency.batching import LARGEST, Failed, flush_isolated
from semel._concurrency.retry import Outage, with_retry
from semel._concurrency.runtime import AsyncioRuntime, Runtime, ThreadRuntime
from semel._concurrency.sync import run_sync
from semel._validation import checked_seconds
from semel.db import migrate, open_database
from semel.db.database import parse
from semel.db.dialect import StatementContext, is_hot, transaction
from semel.db.errors import UNIQUE_VIOLATION, sqlstate
from semel.errors import InvalidRequest, SemelError, StoreBroken, StoreUnavailable
from semel.once.store import Clock, Store
from semel.once.stores.sqlite import SqliteStore
from semel.runs.store import audit_log, queries, quotas
from semel.runs.store import submit as store_submit
from semel.runs.store.audit_log import Change, Place
from semel.runs.store.quotas import Reserve
from semel.runs.store.submit import Answer, Created, Existing, Submission, one_of_each_group
from semel.runs.store.transitions import CHANNEL
from semel.runs.types import RETRY_FOR, Run
from semel.types import Actor

P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")

_log = logging.getLogger("semel.database")

LONG_DEADLINE = 30.0
"""Seconds for a single try of a function that goes through many rows."""
_BULK = 1000
"""Runs in one transaction of a bulk submission."""


_Run: TypeAlias = Callable[..., Awaitable[Any]]
"""A method of Database that runs a function on a connection."""


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
        parts = parse(url.replace("postgres://", "postgresql://", 1))
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
        self.retry_for = checked_seconds("retry_for", retry_for, zero=True)
        self._database = open_database(parts, is_async=awaited, pool=pool)
        self._clock = clock
        self._publish = publish
        self._ready = False
        self._repeats = False
        self.outage: Outage | None = None
        """Set by a worker or server, for whom an outage is to be logged; other callers get an error."""
        is_new = (lambda: not self._ready) if self.dialect == "sqlite" else None
        self._retried = with_retry(self._attempt, self.runtime, self.retry_for, is_new=is_new)
        self._retried_long = with_retry(self._attempt, self.runtime, self.retry_for, longest=LONG_DEADLINE)
        self.submit = self.runtime.batcher(self._submit_now)
        """Submits one :class:`Submission`; calls that come together share a transaction."""
        self.find = self.runtime.batcher(self._find_now)
        """The run of an id, or None; calls that come together share a statement."""
        self.reserve = self.runtime.batcher(self._reserve_now)
        """Reserves a slot (see quotas.reserve); calls that come together share a transaction."""

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
    def has_real_time(self) -> bool:
        """Whether times are those of the hosts and the database, as ids are, and not of a clock that was given."""
        return self._clock is None

    @property
    def statement_context(self) -> StatementContext:
        """What the functions of this package take: the clock, where the database's own is not used (SQLite's is the
        host's), and whether events are to be published."""
        return StatementContext(None, self._publish, self._clock or (_host_clock if self.dialect == "sqlite" else None))

    def acting(self, by: Actor | None) -> StatementContext:
        """As :attr:`statement_context`, for what a person does: it is written to the audit log with the change."""
        return msgspec.structs.replace(self.statement_context, by=by)

    async def open(self) -> None:
        """Check that the tables are there; on SQLite make them. Migrations of a server are the operator's decision."""
        if self.dialect == "sqlite":
            _require_folder(self.url)
            await self._database.optimistic_write(migrate.bring_up)
        else:
            await self._database.read(migrate.require)
        self._ready = True

    async def open_with_retry(self) -> None:
        """As :meth:`open`, and retry for ``retry_for`` seconds while the database is unavailable."""
        await self._with_retry(self._database.read, lambda _: None)

    async def run_blocking(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a blocking function: in a thread where this store is awaited."""
        if self.awaited:
            return await asyncio.to_thread(work, *args, **kwargs)
        return work(*args, **kwargs)

    async def close(self) -> None:
        """Give the connections back."""
        await self._database.close()

    async def read(self, verb: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function that only reads. Unless it is marked as hot it may go through many rows: it has more time."""
        if is_hot(verb):
            return await self._with_retry(self._database.read, lambda conn: verb(conn, *args, **kwargs))
        return await self._with_retry(self._database.survey, lambda conn: verb(conn, *args, **kwargs), long=True)

    async def write(self, verb: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function that writes, which must be safe to run twice: as one transaction, unless it is marked as hot.

        The statements of a hot one commit one by one; where they belong together it opens a transaction itself.
        What a person does, and is logged, is done once even if the reply of the commit is lost.
        """
        if is_hot(verb):
            return await self._with_retry(self._database.write, lambda conn: verb(conn, *args, **kwargs))
        whole = _Transaction(lambda conn: verb(conn, *args, **kwargs))
        return await self._with_retry(self._database.write_many, whole, long=True)

    async def read_once(self, verb: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a hot function that only reads, and do not retry it."""
        answer: R = await self._attempt((self._database.read, lambda conn: verb(conn, *args, **kwargs)))
        return answer

    async def write_once(self, verb: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a hot function that writes, and do not retry it: the caller has to know that its reply was lost."""
        answer: R = await self._attempt((self._database.write, lambda conn: verb(conn, *args, **kwargs)))
        return answer

    async def _with_retry(
        self, how: _Run, work: Callable[[Connection], R], *, long: bool = False, began: float | None = None
    ) -> R:
        send = self._retried_long if long else self._retried
        try:
            answer: R = await send((how, work), began)
        except StoreUnavailable as error:
            self.unavailable(error)
            raise
        return answer

    async def _attempt(self, request: tuple[_Run, Callable[[Connection], Any]]) -> Any:
        how, work = request
        if not self._ready:
            await self.open()
        answer = await how(work)
        if self.outage is not None:
            self.outage.succeeded()
        return answer

    def unavailable(self, error: object) -> None:
        """Report that the database could not be reached: an outage is logged once, not for every call."""
        if self.outage is not None:
            self.outage.failed(error)

    async def submit_by_hand(self, submission: Submission, by: Actor) -> Answer:
        """Submit what a person asked for, with its row of the audit log, in a transaction of its own."""
        work = partial(_submit, submissions=[submission], context=self.acting(by))
        answers = await self._with_retry(self._database.write, work)
        return answers[0]

    async def submit_many(self, submissions: Sequence[Submission]) -> list[Answer]:
        """Submit many, a thousand in a transaction. What fails beside others has its error in its place."""
        batches = [submissions[start : start + _BULK] for start in range(0, len(submissions), _BULK)]
        if self.awaited and len(batches) > 1 and not any(map(_may_meet, one_of_each_group(submissions))):
            answers = await self._two_at_a_time(batches)
        else:
            answers = [answer for batch in batches for answer in await self._submit_batch(batch)]
        if answers and all(isinstance(each, Failed) for each in answers):
            raise next(each.error for each in answers if isinstance(each, Failed))
        return [_error_of(each) if isinstance(each, Failed) else each for each in answers]

    async def _submit_batch(self, batch: Sequence[Submission]) -> list[Answer | Failed]:
        return await flush_isolated(self._submit_now, batch, time.monotonic())

    async def _two_at_a_time(self, batches: Sequence[Sequence[Submission]]) -> list[Answer | Failed]:
        """Submit batches that share nothing: the database writes one while this process prepares the other."""
        answers: list[list[Answer | Failed]] = [[] for _ in batches]
        left = iter(enumerate(batches))

        async def submit() -> None:
            for place, batch in left:
                answers[place] = await self._submit_batch(batch)

        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(submit())
        return list(chain.from_iterable(answers))

    async def _submit_now(self, submissions: Sequence[Submission], began: float) -> list[Answer]:
        """Where the last batch had repeats, read the keys first: that is cheaper than to find repeats while writing."""
        known: dict[str, Answer] = {}
        left = submissions
        if self._repeats:
            known = await self._run_batch(self._database.read, store_submit.recognised, submissions, began)
            left = [each for each in submissions if each.id not in known]
        answers = await self._run_batch(self._database.write, _submit, left, began) if left else []
        if known:
            known |= {each.id: answer for each, answer in zip(left, answers, strict=True)}
            answers = [known[each.id] for each in submissions]
        self._repeats = any(isinstance(answer, Existing) for answer in answers)
        return answers

    async def _run_batch(
        self,
        how: _Run,
        work: Callable[[Connection, Sequence[A], StatementContext], R],
        batch: Sequence[A],
        began: float,
    ) -> R:
        """Run a function for a batch of calls, the oldest made at ``began``; a large batch has more time."""
        return await self._with_retry(
            how, lambda conn: work(conn, batch, self.statement_context), long=len(batch) > LARGEST, began=began
        )

    async def _find_now(self, ids: Sequence[str], began: float) -> list[Run | None]:
        found = await self._with_retry(self._database.read, lambda conn: queries.get(conn, ids), began=began)
        return [found.get(run_id) for run_id in ids]

    async def _reserve_now(self, requests: Sequence[Reserve], began: float) -> list[str | None]:
        return await self._run_batch(self._database.write, _reserve, requests, began)

    def blocking(self) -> RunStore:
        """The same, for threads: itself where it blocks anyway. Close it after use."""
        if not self.awaited:
            return self
        url = self.url.render_as_string(hide_password=False)
        return RunStore(url, awaited=False, clock=self._clock, publish=self._publish, retry_for=self.retry_for)


def _host_clock() -> int:
    return time.time_ns() // 1000


def wait_for_database(store: RunStore, seconds: float) -> None:
    """Block until a blocking store can be opened, for up to ``seconds``, then close it; log once that it waits.

    Raises the last error when the time is over, and at once an error that waiting does not mend.
    """
    began = time.monotonic()
    waits = False
    try:
        while True:
            try:
                run_sync(store.open())
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
        run_sync(store.close())
    if waits:
        _log.warning("the database is available after %.0f s", time.monotonic() - began)


def _require_folder(url: URL) -> None:
    folder = Path(url.database or "").absolute().parent
    if not folder.is_dir():
        raise StoreBroken(f"the folder {folder} of the database file does not exist; create it, or correct the URL")


def _may_meet(submission: Submission) -> bool:
    """Whether the answer may depend on other submissions: by a key, a payload or a quota."""
    return bool(submission.key is not None or submission.user or submission.reserved)


def _error_of(failed: Failed) -> SemelError:
    error = failed.error
    return error if isinstance(error, SemelError) else SemelError(f"it could not be stored: {error!r}")


def _submit(conn: Connection, submissions: Sequence[Submission], context: StatementContext) -> list[Answer]:
    try:
        return _submit_and_notify(conn, submissions, context)
    except exc.DBAPIError as error:
        if sqlstate(error) != UNIQUE_VIOLATION:
            raise
    return _submit_and_notify(conn, submissions, context)  # it was sent before and under way: now it is there


def _submit_and_notify(conn: Connection, submissions: Sequence[Submission], context: StatementContext) -> list[Answer]:
    with transaction(conn) as channels:
        answers = store_submit.submit(conn, submissions, context)
        if any(isinstance(each, Created) for each in answers):
            channels.add(CHANNEL)
        if context.by is not None:
            audit_log.record(conn, context, *_actions(submissions, answers))
        return answers


def _actions(submissions: Sequence[Submission], answers: Sequence[Answer]) -> Iterator[Change]:
    """What is logged of runs that were submitted again by hand: the old run, and the new one."""
    for each, answer in zip(submissions, answers, strict=True):
        old = each.retry_of or each.rerun_of
        if isinstance(answer, Created) and old is not None:
            name = "run.retried" if each.rerun_of is None else "run.rerun"
            after = {"run_id": answer.id, "model": each.model, "user": each.user}
            yield Change(name=name, tenant=each.tenant, target=old, after=after)


def _reserve(conn: Connection, requests: Sequence[Reserve], context: StatementContext) -> list[str | None]:
    with transaction(conn):
        return quotas.reserve(conn, requests, context)


class _Transaction(Generic[R]):
    """A function in one transaction, which may be sent again.

    If an earlier try came as far as its commit, its row of the audit log says whether that happened: then its answer is
    returned. To do it again would find that there is nothing left to do, or undo what somebody did since.
    """

    def __init__(self, verb: Callable[[Connection], R]) -> None:
        self._verb = verb
        self._tried: list[tuple[Place, R]] = []

    def __call__(self, conn: Connection) -> R:
        for place, answer in self._tried:
            if audit_log.is_committed(conn, place):
                return answer
        audit_log.take_place(conn)  # that of a transaction which failed
        with transaction(conn):
            answer = self._verb(conn)
            if (written := audit_log.take_place(conn)) is not None:
                self._tried.append((written, answer))
        return answer
