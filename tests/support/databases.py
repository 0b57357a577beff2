"""Databases for tests: one for each kind of store, shared by a module; and empty ones, with a clock that tests set.

The fixtures ``urls``, ``databases`` and ``database`` of conftest.py provide them.
"""

import itertools
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from contextvars import copy_context
from functools import cached_property
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import Connection, NullPool, Table, create_engine, delete, insert, make_url, update

from semel import App, JobStore, QuotaExceeded, Run
from semel._concurrency.sync import run_sync
from semel.db.schema import active, attempts, charges, run_counts, submitted
from semel.runs.models.model import make_model
from semel.runs.store import RunStore, lease, maintenance, transitions
from semel.runs.store.lease import Leased, LeaseRenewal, LeaseRequest
from semel.runs.store.maintenance import WorkerRecord
from semel.runs.store.submit import JobDetails
from semel.runs.store.transitions import FinishRequest
from semel.runs.submission import SubmitOptions
from semel.runs.types import DAY_US, INTERNAL_QUEUE, TERMINAL, AttemptResult, EndKind
from semel.testing import FakeClock
from support.waiting import eventually

KINDS = ["memory", "sqlite", "redis", "postgres"]
"""Stores of keys."""
SHARED_KINDS = KINDS[1:]
"""Stores that processes can share."""
DATABASES = ("sqlite", "postgres")
"""Databases of runs, quotas and the service."""

TABLES = (
    *("runs", "active", "attempts", "outbox", "keys", "run_logs", "jobs", "quotas", "reservations", "workers"),
    *("leaders", "removals", "run_counts", "run_totals", "run_hours", "costs", "charges", "worker_manifests"),
    *("manifests",),
    *("subscriptions", "deliveries", "audit", "pauses", "sealing", "unsealed", "seals"),
    *("seal_leaves", "purges", "run_actions"),
)
LEASE = 60
START = 1_709_210_096.0
"""2024-02-29 12:34:56 UTC, a Thursday."""


def train(ctx: Any, number: int = 0) -> None:
    """A model that is never executed."""


def open_app(url: str, **options: Any) -> App:
    """An app with the model ``train``: three attempts, three lost workers, a lease of a minute."""
    app = App(url, **options)
    app.model("train", isolation="thread", max_attempts=3, max_lost=3, lease=LEASE)(train)
    return app


class TestDatabase:
    """An empty database, and runs whose state is changed by the store's own functions, without a worker.

    Everything opened on it is closed when the test ends.
    """

    __test__ = False

    def __init__(self, kind: str, url: str, stack: ExitStack) -> None:
        self.kind = kind
        self.url = url
        self.clock = FakeClock(START)
        self._stack = stack
        self._numbers = itertools.count(1)

    @cached_property
    def app(self) -> App:
        return self.open_app()

    @cached_property
    def jobs(self) -> JobStore:
        return self.open_jobs()

    def open_app(self, **options: Any) -> App:
        """Another app, with the same clock unless ``clock=`` is given."""
        app = open_app(options.pop("url", self.url), **{"clock": self.clock, **options})
        self._stack.callback(app.close)
        return app

    def open_jobs(self, **options: Any) -> JobStore:
        """Another store, with the same clock unless ``clock=`` is given."""
        jobs = JobStore(options.pop("url", self.url), **{"clock": self.clock, **options})
        self._stack.callback(jobs.close)
        return jobs

    def submit(self, user: str | int = 42, **options: Any) -> Run:
        """Submit a run with a payload of its own; the same ``number`` gives the same payload."""
        return self.app.submit("train", {"number": options.pop("number", next(self._numbers))}, user=user, **options)

    def reserve(self, user: str | int = 42, limit: int = 5, ttl: float = 300) -> str:
        """Reserve a slot, in a context of its own: no submission of the test uses it without naming it."""
        reservation = copy_context().run(self.jobs.reserve_job_slot, user, limit, ttl)
        assert reservation is not None
        return reservation

    def lease(self, most: int = 1) -> list[Leased]:
        """Lease runs as a worker does."""
        self.do(lease.wake)
        return self.do(lease.lease, LeaseRequest("worker-1", ("default",), ["train"], most))

    def renew(self, leased: Leased) -> dict[str, bool]:
        """Renew the lease of an attempt, as a heartbeat does; returns whether the run is to be cancelled, by run."""
        renewed: dict[str, bool] = self.do(lease.renew, [LeaseRenewal(leased.id, leased.fence)])
        return renewed

    def end(self, leased: Leased, kind: EndKind = "succeeded", **options: Any) -> bool:
        """End an attempt; returns False if its fence is outdated."""
        return leased.id in self.do(transitions.end, [ending(leased, kind, **options)])

    def finish_and_lease(
        self, leased: Leased, kind: EndKind = "succeeded", **options: Any
    ) -> tuple[bool, list[Leased]]:
        """As :meth:`end`, and lease the next run, as a worker does on SQLite in one transaction."""
        request = LeaseRequest("worker-1", ("default",), ["train"], 1)
        finished, [taken] = self.do(lease.finish_and_lease, [ending(leased, kind, **options)], [request])
        return leased.id in finished, taken

    def finish(self, *runs: Run) -> None:
        """Lease and finish these runs, and all that are due before them."""
        wanted = {run.id for run in runs}
        taken = self.lease(1000)
        assert wanted <= {each.id for each in taken}
        assert all(self.end(each) for each in taken)

    def lose_expired(self) -> int:
        """Recover runs whose lease has expired, as the sweeper does; returns how many."""
        return len(self.do(transitions.lose_expired))

    def tidy(self) -> int:
        """Remove expired keys and reservations, as the sweeper does; returns how many."""
        removed: int = self.do(maintenance.remove_expired)[0]
        return removed

    def see_worker(self, name: str, **more: Any) -> None:
        """Write that a worker of this name is alive; by default it has two slots for the model."""
        known: dict[str, Any] = {"queues": ["default"], "models": {"train": "thread"}, "slots": {"thread": 2}}
        record = WorkerRecord(id=name, name=name, host="host", pid=1, **{**known, **more})
        self.do(maintenance.worker_seen, record)

    @property
    def store(self) -> RunStore:
        """The store of the app."""
        return self.app._engine.store

    def do(self, verb: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function of the store that writes."""
        return run_sync(self.store.write(verb, *arguments, self.store.statement_context, **options))

    def ask(self, verb: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the store that reads, and that needs no time."""
        return run_sync(self.store.read(verb, *arguments))

    def rows(self, query: LiteralString) -> list[tuple[Any, ...]]:
        """The rows of a query, as a database client gets them."""
        if self.kind == "sqlite":
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"))) as connection:
                return connection.execute(query).fetchall()
        return self._client.execute(query).fetchall()

    def write(self, statement: LiteralString) -> None:
        """Execute a statement, as a database client does."""
        if self.kind == "sqlite":
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"))) as file, file:
                file.execute(statement)
            return
        self._client.execute(statement)

    @cached_property
    def _client(self) -> psycopg.Connection[Any]:
        """A client's connection to PostgreSQL, which stays open: to connect takes longer than most queries."""
        return self._stack.enter_context(closing(psycopg.connect(self.url, autocommit=True)))

    def count(self, relation: LiteralString, where: LiteralString = "1 = 1") -> int:
        """The number of rows of a relation."""
        counted: int = self.rows("SELECT count(*) FROM " + relation + " WHERE " + where)[0][0]
        return counted

    def concurrent(self, user: str | int = 42) -> int:
        """The number of slots that the user has in use."""
        return self.app.usage(user).concurrent


def ending(leased: Leased, kind: EndKind = "succeeded", *, returned: bool = False, **options: Any) -> FinishRequest:
    """The end of an attempt, as its worker writes it."""
    if kind == "succeeded":
        options = {"result": "null", "result_digest": "d" * 64, "result_size": 4, **options}
    return FinishRequest(leased.id, leased.fence, AttemptResult(kind=kind, **options), returned=returned)


def put_run(conn: Connection, row: dict[str, Any]) -> None:
    """Write a run that is as the row, with the columns of the view of runs: so a test controls all times."""
    _put(conn, submitted, row)
    if row["status"] in TERMINAL:
        began = row.get("started_us")
        _put(conn, attempts, {"run_id": row["id"], "ended_us": row["finished_us"], "began_us": began, **row})
        spent = row["finished_us"] - (began or 0) if row["status"] == "SUCCEEDED" else 0
        _put(conn, run_counts, {"facet": None, **row, "count": 1, "spent_us": spent})
        if row.get("cost") and row["user_id"]:
            day = row["created_us"] - row["created_us"] % DAY_US
            _put(conn, charges, {**row, "day_us": day})
    else:
        born = {"version": 1, "fence": 0, "lease_until_us": None}
        charged = row["created_us"] if row.get("cost") else None
        _put(conn, active, {"since_us": row["created_us"], "charged_us": charged, **row, **born})
        if row["status"] == "RUNNING":
            running = {name: row.get(name) for name in ("lease_until_us", "worker", "heartbeat_us", "started_us")}
            leased = {"version": 2, "fence": 1, "began_us": row.get("started_us") or row["created_us"], **running}
            conn.execute(update(active).where(active.c.id == row["id"]).values(leased))


def _put(conn: Connection, table: Table, row: dict[str, Any]) -> None:
    conn.execute(insert(table).values({name: value for name, value in row.items() if name in table.c}))


MISCOUNTED = """
SELECT tenant, model, status, sum(n) AS runs_over, sum(spent) AS spent_over FROM (
  SELECT tenant, model, status, count AS n, spent_us AS spent FROM semel_run_counts
  UNION ALL SELECT tenant, model, status, count, spent_us FROM semel_run_totals
  UNION ALL SELECT tenant, model, status, -1, CASE status WHEN 'SUCCEEDED' THEN started_us - finished_us ELSE 0 END
  FROM semel_run_states
  WHERE status NOT IN ('PENDING', 'RUNNING') AND (queue <> 'semel-service' OR user_id <> '')
) AS counted GROUP BY tenant, model, status HAVING sum(n) <> 0 OR sum(spent) <> 0
"""
"""Where the counts of the summary differ from the runs: always nothing."""

MISCHARGED = """
SELECT tenant, user_id, day_us, sum(cost) AS cost FROM (
  SELECT tenant, user_id, day_us, cost FROM semel_costs
  UNION ALL SELECT tenant, user_id, day_us, cost FROM semel_charges
  UNION ALL SELECT tenant, user_id, created_us - created_us % 86400000000, -cost FROM semel_run_states
  WHERE status NOT IN ('PENDING', 'RUNNING') AND user_id <> ''
) AS charged GROUP BY tenant, user_id, day_us HAVING sum(cost) <> 0
"""
"""Where the costs of users differ from those of the runs that ended: nothing, or what removed runs cost."""


def remove_run(conn: Connection, run_id: str) -> None:
    """Remove a run, as a purge does."""
    conn.execute(delete(active).where(active.c.id == run_id))
    conn.execute(delete(attempts).where(attempts.c.run_id == run_id))
    conn.execute(delete(submitted).where(submitted.c.id == run_id))


def held(database: TestDatabase, data: str | None = "/data", **more: Any) -> Run:
    """A job whose run cannot be leased until its data is uploaded, by a run of the service's own."""
    app = database.app
    if "semel.upload" not in app.registry.names:
        app.registry.add(make_model("semel.upload", _upload, isolation="thread", queue=INTERNAL_QUEUE))
    job = JobDetails(provider="local", config="config", data=data, upload_model="semel.upload")
    options = SubmitOptions(**{"user": 42, "dedupe": False, **more})
    return run_sync(app._engine.submit_run("train", {}, options, job=job))


def _upload(job_id: str) -> None:
    """A model that is never executed."""


class Databases:
    """Creates databases with all tables, and without rows."""

    def __init__(self, request: pytest.FixtureRequest, stack: ExitStack) -> None:
        self._request = request
        self._stack = stack

    @contextmanager
    def empty(self, kind: str) -> Iterator[TestDatabase]:
        with ExitStack() as stack:
            yield TestDatabase(kind, self._sqlite() if kind == "sqlite" else self._postgres(), stack)

    def _sqlite(self) -> str:
        return self._stack.enter_context(database_url(self._request, "sqlite"))

    @cached_property
    def _migrated(self) -> str:
        return self._stack.enter_context(database_url(self._request, "postgres"))

    def _postgres(self) -> str:
        with psycopg.connect(self._migrated, autocommit=True) as connection:
            deletes = [sql.SQL("DELETE FROM {}").format(sql.Identifier(f"semel_{table}")) for table in TABLES]
            connection.execute(sql.SQL("; ").join(deletes))  # TRUNCATE makes new files: ten times slower for a few rows
        return self._migrated


@contextmanager
def database_url(request: pytest.FixtureRequest, kind: str) -> Iterator[str]:
    """The URL of a new database of the kind, with all tables; it is removed at the end."""
    if kind == "sqlite":
        file = request.getfixturevalue("tmp_path_factory").mktemp("database") / "semel.db"
        shutil.copyfile(request.getfixturevalue("migrated_sqlite"), file)
        file.chmod(0o600)  # as semel creates it
        yield f"sqlite:///{file}"
        return
    server = request.getfixturevalue(f"{kind}_server")
    if kind == "redis":
        yield server.database()
        return
    url: str = server.database(request.getfixturevalue("migrated_postgres"))
    try:
        yield url
    finally:
        server.drop(url)


class StoreUrls(dict[str, str]):
    """The URLs by kind of store; a server starts when its URL is first needed."""

    def __init__(self, request: pytest.FixtureRequest, cleanup: ExitStack) -> None:
        super().__init__(memory="memory://")
        self._request = request
        self._cleanup = cleanup

    def __missing__(self, kind: str) -> str:
        self[kind] = self._cleanup.enter_context(database_url(self._request, kind))
        return self[kind]


@contextmanager
def store_urls(request: pytest.FixtureRequest) -> Iterator[StoreUrls]:
    with ExitStack() as cleanup:
        yield StoreUrls(request, cleanup)


def refused(database: TestDatabase, user: str | int = 42, **options: Any) -> str:
    """The message of a submission that a quota refuses; nothing is stored."""
    before = database.count("semel_runs")
    with pytest.raises(QuotaExceeded) as refusal:
        database.submit(user, **options)
    assert database.count("semel_runs") == before
    return str(refusal.value)


def behind(
    database: TestDatabase,
    first: Callable[[Connection], object],
    second: Callable[[Connection], Any],
    then: Callable[[Connection], object] = lambda _: None,
) -> Any:
    """What the second function returns that waits for a lock of PostgreSQL which the first has, such as that of a row
    it has changed, and has not committed. ``then`` is done in the first's transaction while the second waits. Unlike
    semel's own connections, this one waits for as long as it takes.
    """
    url = make_url(database.url).set(drivername="postgresql+psycopg")
    waiting: LiteralString = """
SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"""
    with ThreadPoolExecutor(1) as pool, create_engine(url, poolclass=NullPool).connect() as one:
        with one.begin():
            first(one)
            other = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT").connect()
            returned = pool.submit(second, other)
            eventually(lambda: database.rows(waiting) == [(1,)])
            then(one)
        with other:
            return returned.result()
