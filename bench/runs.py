"""Benchmark of runs against the nearest peers on the same servers: `./dev bench runs`.

Every run keeps its row, fence, result and history. Rates are measured in turn with the peer's, several rounds, on a
durable PostgreSQL (fsync on), and printed as the median of the rounds' ratios, with what a
job cost the server beside them. Rows can be chosen by a part of their
name: `./dev bench runs pgqueuer growth`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import psycopg
from meter import Cost, Meter, Sessions, middle
from noop_model import blocking_noop
from peers import Absent, Peer, opened
from peers.watch import LIMIT, end_in_time, from_tasks, in_a_process
from sqlalchemy import Engine, event
from table import Row, show

from semel import App, Worker
from semel.cli import main as semel_command
from semel.runs.hooks import RunEvent
from semel.runs.store import RunStore, lease, transitions
from semel.runs.store.lease import LeaseRenewal, LeaseRequest
from semel.runs.store.transitions import FinishRequest
from semel.runs.types import AttemptResult
from support import servers

ROUNDS = 3


def app_on(url: str) -> App:
    logging.getLogger("semel.worker").setLevel(logging.ERROR)
    app = App(url, artifacts=tempfile.gettempdir(), dedupe_window=0)

    @app.model("noop")
    async def noop() -> None:
        return

    app.model("blocking")(blocking_noop)
    return app


class Semel(Peer):
    """One worker process, `concurrency=1000`."""

    name = "semel"
    jobs = 20_000
    singles = 6000
    many = 20_000
    model = "noop"

    def prepare(self, postgres_url: str, redis_url: str) -> None:
        del redis_url
        self.url = postgres_url
        if semel_command(["migrate", postgres_url, "--json"]) != 0:
            raise Absent("the migration failed")

    def enqueue_many(self, count: int) -> float:
        return asyncio.run(self._enqueue_many(count))

    async def _enqueue_many(self, count: int) -> float:
        app = app_on(self.url)
        await app.aio.backlog()
        start = time.perf_counter()
        await app.aio.submit_many([{"model": self.model}] * count)
        seconds = time.perf_counter() - start
        await app.aio.close()
        return seconds

    async def enqueue_from_tasks(self, count: int, tasks: int = 64) -> float:
        app = app_on(self.url)
        await app.aio.backlog()
        seconds = await from_tasks(lambda: app.aio.submit(self.model), count, tasks)
        await app.aio.close()
        return seconds

    def drain(self, count: int) -> float:
        return in_a_process(drained, self.url, count, self.model)

    def clear(self) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(
                "TRUNCATE semel_runs, semel_active, semel_attempts, semel_keys, semel_run_logs, semel_unsealed"
            )


class Children(Semel):
    """Blocking runs in two warm child processes."""

    jobs = 3000
    model = "blocking"


def drained(url: str, count: int, model: str) -> float:
    """Seconds from the start of the first run until the end of the last one is stored."""
    app = app_on(url)
    times: list[float] = []
    left = count
    worker = Worker(app, concurrency=1000, processes=2 if model == "blocking" else 0, threads=0)

    def note(event: RunEvent) -> None:
        nonlocal left
        if event.kind == "started" and not times:
            times.append(time.perf_counter())
        if event.kind == "ended":
            left -= 1
            if not left:
                times.append(time.perf_counter())
                worker.stop()

    app.on_event(note)
    worker.run()
    return times[1] - times[0]


def sqlite_drain() -> Iterator[Row]:
    """On a file, each round on a new one: rates, and what a run costs in this process, which is the database, too."""
    rates, cpu, statements = [], [], []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder, _statements() as sent:
            ours = Semel()
            ours.url = f"sqlite:///{folder}/semel.db"
            ours.enqueue_many(ours.jobs)
            sent.clear()
            before = time.process_time()
            rates.append(ours.jobs / drained(ours.url, ours.jobs, ours.model))
            cpu.append((time.process_time() - before) * 1e6 / ours.jobs)
            statements.append(len(sent) / ours.jobs)
    note = f"{median(statements):.3f} statements a run"
    yield Row("drain on SQLite, runs a second", rates, None, note=note)
    yield Row("drain on SQLite, µs of CPU a run", cpu, None)


@contextmanager
def _statements() -> Iterator[list[str]]:
    """The statements that are sent in the block, in this process."""
    sent: list[str] = []

    def note(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
        sent.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(Engine, "before_cursor_execute", note)


SPAN = """
SELECT count(*), count(*) FILTER (WHERE fence = 1 AND status = 'SUCCEEDED'),
  count(*) FILTER (WHERE began_us >= all_us), max(ended_us) - max(all_us)
FROM semel_attempts,
  (SELECT max(us) AS all_us FROM (SELECT min(began_us) AS us FROM semel_attempts GROUP BY worker) AS first) AS began
"""


def drained_by(url: str, processes: int, count: int) -> float:
    """Runs a second, by the database's clock, that so many worker processes drain from one queue; each run once.

    Counted are the runs that were leased after every process had leased some: a process takes as much CPU time to start
    as for some ten thousand runs.
    """
    context = get_context("spawn")
    ready = context.Barrier(processes + 1)
    workers = [context.Process(target=work_when_ready, args=(url, ready)) for _ in range(processes)]
    for each in workers:
        each.start()
    try:
        ready.wait(LIMIT)
        with psycopg.connect(url, autocommit=True) as connection:
            while connection.execute("SELECT 1 FROM semel_active LIMIT 1").fetchone():
                time.sleep(0.02)  # the database sends no signal for this
            ended, once, counted, span = connection.execute(SPAN).fetchone() or (0, 0, 0, 1)
    finally:
        for each in workers:
            each.terminate()
            each.join()
    if not ended == once == count:
        raise RuntimeError(f"{count} runs have {ended} attempts, of which {once} succeeded under the first lease")
    return counted * 1e6 / span


def work_when_ready(url: str, ready: Barrier) -> None:
    """Work until terminated, from the moment when all processes have started."""
    end_in_time()
    worker = Worker(app_on(url), concurrency=1000, processes=0, threads=0)
    ready.wait(LIMIT)
    worker.run()


class Bench:
    """The servers, semel set up on them, and the results so far."""

    def __init__(self, stack: ExitStack) -> None:
        self.postgres = stack.enter_context(servers.postgres(durable=True))
        self.meter = Meter(self.postgres.url)
        self.redis = stack.enter_context(servers.redis())
        self.url = self.postgres.database()
        self.ours, self.children = Semel(), Children()
        self.ours.prepare(self.url, "")
        self.children.url = self.url

    def drain(self, peer: Peer) -> Measured:
        peer.enqueue_many(peer.jobs)
        return self._measured(peer, peer.jobs, lambda: peer.drain(peer.jobs))

    def singly(self, peer: Peer) -> Measured:
        return self._measured(peer, peer.singles, lambda: asyncio.run(peer.enqueue_from_tasks(peer.singles)))

    def many(self, peer: Peer) -> Measured:
        return self._measured(peer, peer.many, lambda: peer.enqueue_many(peer.many))

    def _measured(self, peer: Peer, jobs: int, work: Callable[[], float]) -> Measured:
        with self.meter.over(jobs) as cost:
            rate = jobs / work()
        peer.clear()
        return Measured(rate, cost)

    def against(
        self, name: str, what: str, required: float, ours: Callable[[], Measured], theirs: Callable[[Peer], Measured]
    ) -> Iterator[Row]:
        try:
            with opened(name, self.postgres, self.redis) as peer:
                pairs = [(ours(), theirs(peer)) for _ in range(ROUNDS)]
        except Absent as reason:
            yield Row(f"{what}: absent, {reason}", [0.0], None)
            return
        yield Row(what, [a.rate / b.rate for a, b in pairs], required, note=_note(pairs))
        if name == "graphile" and what.startswith("drain"):
            ratios = [a.cost.cpu / b.cost.cpu for a, b in pairs]
            yield Row("the server's CPU per drained run / graphile-worker's", ratios, 1.2, at_most=True)


class Measured(NamedTuple):
    """Jobs a second, and what each of them cost the server."""

    rate: float
    cost: Cost


def _note(pairs: list[tuple[Measured, Measured]]) -> str:
    sides = zip(*pairs, strict=True)
    return " against ".join(
        f"{median(each.rate for each in side):,.0f}/s ({middle([each.cost for each in side])})" for side in sides
    )


Part: TypeAlias = Callable[[], Iterable[Row]]


def wal_rows(bench: Bench) -> Iterator[Row]:
    """Both are warm: the tables have grown, and every page was written since the last checkpoint."""
    peer = bench.ours
    peer.enqueue_many(peer.jobs)
    peer.drain(peer.jobs)
    submitted, drained = [], []
    for _ in range(ROUNDS):
        with bench.meter.over(peer.jobs) as cost:
            peer.enqueue_many(peer.jobs)
        submitted.append(cost)
        with bench.meter.over(peer.jobs) as cost:
            peer.drain(peer.jobs)
        drained.append(cost)
    peer.clear()
    for what, costs, most in (("submit", submitted, 660), ("drain", drained, 800)):
        yield Row(
            f"WAL to {what} a run, bytes", [each.wal for each in costs], most, at_most=True, note=str(middle(costs))
        )


def process_rows(bench: Bench) -> Iterator[Row]:
    """Several worker processes on one queue against one. No run is leased twice, or it raises."""
    peer, jobs = bench.ours, 2 * bench.ours.jobs
    measured: dict[int, list[Measured]] = {1: [], 2: [], 4: []}
    for processes in (1, 2, 4) * ROUNDS:
        peer.enqueue_many(jobs)
        with bench.meter.over(jobs) as cost:
            rate = drained_by(peer.url, processes, jobs)
        measured[processes].append(Measured(rate, cost))
        peer.clear()
    for processes in (2, 4):
        pairs = list(zip(measured[processes], measured[1], strict=True))
        ratios = [a.rate / b.rate for a, b in pairs]
        yield Row(f"drain by {processes} worker processes / by one", ratios, 1, note=_note(pairs))


LONG, END = 200_000, 20_000
"""Runs that are drained while an old snapshot is open, and those of the beginning and the end that are compared."""
ENDS = """
SELECT min(began_us) / 1e6, percentile_disc(ARRAY[{part}, 1 - {part}, 1]) WITHIN GROUP (ORDER BY ended_us / 1e6)
FROM semel_attempts
"""


class LongDrain(NamedTuple):
    """What a drain of many runs took, in seconds and in seconds of the server's CPU: its beginning, its end, all."""

    seconds: tuple[float, float, float]
    cpu: tuple[float, float, float]


def long_drain(bench: Bench, *, snapshot: bool) -> LongDrain:
    """Drain many runs, with or without a transaction that was open before, so that vacuum removes nothing."""
    bench.ours.enqueue_many(LONG)
    with ExitStack() as stack:
        if snapshot:
            old = stack.enter_context(psycopg.connect(bench.url))
            old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            old.execute("SELECT count(*) FROM semel_active")
        course = stack.enter_context(bench.meter.course())
        bench.ours.drain(LONG)
    with psycopg.connect(bench.url, autocommit=True) as connection:
        begun, (first, last, over) = connection.execute(ENDS.format(part=END / LONG)).fetchone() or (0, (0, 0, 0))
    bench.ours.clear()
    spans = ((begun, first), (last, over), (begun, over))
    return LongDrain(tuple(b - a for a, b in spans), tuple(course.between(*span) for span in spans))


def snapshot_rows(bench: Bench) -> Iterator[Row]:
    """With an old snapshot against without one, and the end of the drain against its beginning."""
    pairs = [(long_drain(bench, snapshot=True), long_drain(bench, snapshot=False)) for _ in range(ROUNDS)]
    what = f"drain of {LONG:,} runs while an old snapshot is open"
    for name, asked, at_the_end in (("seconds", 0.9, 0.85), ("cpu", None, None)):
        cost = [(getattr(old, name), getattr(none, name)) for old, none in pairs]
        unit = "" if name == "seconds" else ", by the server's CPU"
        note = f"{median(old[2] for old, _ in cost):.1f} s against {median(none[2] for _, none in cost):.1f} s"
        yield Row(f"{what} / without one{unit}", [none[2] / old[2] for old, none in cost], asked, note=note)
        ends = [old[0] / old[1] for old, _ in cost]
        note = f"without one {median(none[0] / none[1] for _, none in cost):.2f}"
        yield Row(f"{what}: last {END:,} / first {END:,}{unit}", ends, at_the_end, note=note)


def drain_rows(bench: Bench) -> dict[str, Part]:
    asked = {"pgqueuer": 2.5, "procrastinate": 44, "rq": 88, "celery": 29, "dbos": 37, "graphile": 1.2}

    def row(name: str, required: float) -> Part:
        return lambda: bench.against(name, f"drain / {name}", required, lambda: bench.drain(bench.ours), bench.drain)

    return {f"drain {name}": row(name, required) for name, required in asked.items()}


def submit_rows(bench: Bench) -> dict[str, Part]:
    return {
        "submit graphile": lambda: bench.against(
            "graphile",
            "submit one by one, 64 tasks / graphile-worker's addJob",
            3,
            lambda: bench.singly(bench.ours),
            bench.singly,
        ),
        "bulk graphile": lambda: bench.against(
            "graphile",
            "bulk submit / graphile-worker's addJobs",
            1,
            lambda: bench.many(bench.ours),
            bench.many,
        ),
        "submit": lambda: bench.against(
            "procrastinate",
            "submit one by one, 64 tasks / Procrastinate's defer",
            3,
            lambda: bench.singly(bench.ours),
            bench.singly,
        ),
        "bulk": lambda: bench.against(
            "procrastinate",
            "bulk submit / Procrastinate's defer one by one",
            10,
            lambda: bench.many(bench.ours),
            bench.singly,
        ),
        "bulk against ours": lambda: [_bulk_against_ours(bench)],
        "children": lambda: bench.against(
            "rq-forking",
            "2 warm child processes / RQ's forking worker",
            5,
            lambda: bench.drain(bench.children),
            bench.drain,
        ),
    }


def _bulk_against_ours(bench: Bench) -> Row:
    pairs = [(bench.many(bench.ours), bench.singly(bench.ours)) for _ in range(ROUNDS)]
    ratios = [a.rate / b.rate for a, b in pairs]
    return Row("bulk submit / our own one by one from 64 tasks", ratios, None, note=_note(pairs))


def latency(url: str, at_most: float) -> Row:
    seconds, trip = asyncio.run(_latency(url))
    kind = url.split(":", 1)[0]
    note = f"{seconds * 1e3:.1f} ms, {seconds / trip:.1f} round trips of {trip * 1e3:.2f} ms"
    return Row(f"submit to start on an idle worker, {kind}, ms", [seconds * 1e3], at_most, at_most=True, note=note)


async def _latency(url: str) -> tuple[float, float]:
    """The median time from the call of submit to that of the model, and of one round trip to the database."""
    app = app_on(url)
    begun: asyncio.Queue[float] = asyncio.Queue()

    @app.model("mark")
    async def mark() -> None:
        begun.put_nowait(time.perf_counter())

    worker = Worker(app, processes=0)
    serving = asyncio.create_task(worker.serve())
    waits, trips = [], []
    for _ in range(100):
        await asyncio.sleep(0.05)
        start = time.perf_counter()
        await app.aio.submit("mark")
        waits.append(await begun.get() - start)
        start = time.perf_counter()
        await app.aio.quotas()
        trips.append(time.perf_counter() - start)
    worker.stop()
    await serving
    await app.aio.close()
    return median(waits), median(trips)


FILL = """
WITH made AS (
  INSERT INTO semel_runs (id, created_us, max_attempts, max_lost, tenant, user_id, model, queue, payload_hash,
    parameters)
  SELECT uuidv7(), n, 3, 3, '', '', CASE n % {rare} WHEN 9 THEN 'rare' ELSE 'noop' END, 'default',
    sha256(n::text::bytea), '{{}}'
  FROM generate_series({start} + 1, {end}) AS n RETURNING id, created_us AS n
)
"""
PENDING = """
INSERT INTO semel_active (id, since_us, due_us, lease_us, fence, priority, version, attempts, errors, losts, ready,
  tenant, user_id, queue, model)
SELECT id, n, n, 60000000, 0, 0, 1, 0, 0, 0, true, '', '', 'default', 'noop' FROM made
"""
ENDED = """
INSERT INTO semel_attempts (run_id, fence, ended_us, version, tenant, status, began_us, worker, result)
SELECT id, 1, n, 3, '', CASE n % 100 WHEN 0 THEN 'FAILED' ELSE 'SUCCEEDED' END, n, 'worker-1',
  CASE n % 100 WHEN 0 THEN NULL ELSE 'null' END
FROM made
"""
COUNT = """
INSERT INTO semel_run_counts (tenant, model, status, count, spent_us)
VALUES ('', 'noop', 'SUCCEEDED', {count} * 99 / 100 - {rare}, 0), ('', 'noop', 'FAILED', {count} / 100, 0),
  ('', 'rare', 'SUCCEEDED', {rare}, 0)
"""


FILL_BATCH = 1_000_000
RARE = 50
"""Ended runs of the model ``rare``, at equal distances among those of the other."""


def filled(bench: Bench, pending: int, finished: int) -> str:
    """A database with so many runs, as the store writes runs without a user and with the defaults of a model."""
    url = bench.postgres.database()
    semel_command(["migrate", url, "--json"])
    with psycopg.connect(url, autocommit=True) as connection:
        for count, table in ((pending, PENDING), (finished, ENDED)):
            for start in range(0, count, FILL_BATCH):
                end = min(start + FILL_BATCH, count)
                connection.execute(FILL.format(start=start, end=end, rare=max(finished // RARE, 10)) + table)
        connection.execute(COUNT.format(count=finished, rare=RARE if finished else 0))
        connection.execute("VACUUM ANALYZE semel_runs, semel_active, semel_attempts")
    return url


SMALL, LARGE = 10_000, 10_000_000
"""Ended runs in the two databases that are compared; each has WAITING more that wait."""
WAITING = 2000


def growth(bench: Bench) -> Iterator[Row]:
    """Every verb and every list with many ended runs, against few: in turn, 15 times."""
    small, large = filled(bench, WAITING, SMALL), filled(bench, WAITING, LARGE)
    with psycopg.connect(large, autocommit=True) as connection:
        row = connection.execute("SELECT pg_database_size(current_database())").fetchone()
        assert row is not None
        yield Row(f"disk for {LARGE:,} small ended runs, GB", [row[0] / 1e9], 3.5, at_most=True)
    yield from _growth_rows("growth", small, large, LARGE)
    bench.postgres.drop(small)
    bench.postgres.drop(large)


def _growth_rows(name: str, small: str, large: str, ended: int) -> Iterator[Row]:
    for what, (few, many) in asyncio.run(_verb_costs(small, large)).items():
        note = f"{many.seconds * 1e3:.2f} ms against {few.seconds * 1e3:.2f} ms, CPU {many.cpu / few.cpu:.2f}"
        ratio = many.seconds / few.seconds
        yield Row(f"{name}: {what}, {ended:,} ended runs / {SMALL:,}", [ratio], 1.25, at_most=True, note=note)


LARGE_FILE = 1_000_000
SQLITE_RUNS = """
INSERT INTO semel_runs (id, created_us, lease_us, asked_cost, priority, max_attempts, max_lost, tenant, user_id,
  model, queue, payload_hash, parameters)
WITH RECURSIVE made(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM made WHERE n < :count)
SELECT printf('{kind}-%04x-7000-8000-%012x', n >> 8, n), n, 60000000, 0, 0, 3, 3, '', '',
  CASE n % {rare} WHEN 9 THEN 'rare' ELSE 'noop' END, 'default',
  printf('%064x', n * 7919), '{{}}' FROM made
"""
SQLITE_ENDED = """
INSERT INTO semel_attempts (run_id, fence, due_us, ended_us, version, attempts, errors, losts, tenant, status, began_us,
  result_size, worker, result_digest, result)
SELECT id, 1, created_us, created_us, 3, 1, 0, 0, '',
  CASE created_us % 100 WHEN 0 THEN 'FAILED' ELSE 'SUCCEEDED' END, created_us, 4, 'worker-1',
  CASE created_us % 100 WHEN 0 THEN NULL ELSE payload_hash END, CASE created_us % 100 WHEN 0 THEN NULL ELSE 'null' END
FROM semel_runs
"""
SQLITE_PENDING = """
INSERT INTO semel_active (id, since_us, due_us, lease_us, fence, priority, version, attempts, errors, losts, ready,
  tenant, user_id, queue, model)
SELECT id, created_us, created_us, 60000000, 0, 0, 1, 0, 0, 0, true, '', '', 'default', 'noop' FROM semel_runs
WHERE id NOT IN (SELECT run_id FROM semel_attempts)
"""


def filled_file(folder: str, finished: int) -> str:
    file = f"{folder}/{finished}.db"
    semel_command(["migrate", f"sqlite:///{file}", "--json"])
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(SQLITE_RUNS.format(kind="00000000", rare=finished // RARE), {"count": finished})
        connection.execute(SQLITE_ENDED)
        connection.execute(SQLITE_RUNS.format(kind="00000001", rare=2**40), {"count": WAITING})
        connection.execute(SQLITE_PENDING)
        connection.execute(COUNT.format(count=finished, rare=RARE))
    return f"sqlite:///{file}"


def sqlite_growth() -> Iterator[Row]:
    """As growth, on files."""
    with tempfile.TemporaryDirectory() as folder:
        small, large = (filled_file(folder, count) for count in (SMALL, LARGE_FILE))
        yield from _growth_rows("growth on SQLite", small, large, LARGE_FILE)


class Taken(NamedTuple):
    """The seconds that a verb took, and those of CPU: of the server's sessions, or of this process, which is SQLite."""

    seconds: float
    cpu: float


async def _verb_costs(*urls: str) -> dict[str, tuple[Taken, Taken]]:
    """The median cost of each verb in each database."""
    apps = [app_on(url) for url in urls]
    costs: dict[str, tuple[list[Taken], list[Taken]]] = {}
    with ExitStack() as stack:
        cpus = [_cpu_of(url, stack) for url in urls]
        for _ in range(15):
            for side, app in enumerate(apps):
                async for what, taken in _verbs(app, cpus[side]):
                    costs.setdefault(what, ([], []))[side].append(taken)
    for app in apps:
        await app.aio.close()
    return {what: (_median(few), _median(many)) for what, (few, many) in costs.items()}


def _cpu_of(url: str, stack: ExitStack) -> Callable[[], float]:
    return time.process_time if url.startswith("sqlite") else stack.enter_context(closing(Sessions(url))).cpu


def _median(costs: list[Taken]) -> Taken:
    return Taken(median(each.seconds for each in costs), median(each.cpu for each in costs))


async def _verbs(app: App, cpu: Callable[[], float]) -> AsyncIterator[tuple[str, Taken]]:
    """Each verb once, with what it took. It leaves as many runs waiting as there were."""
    aio, store = app.aio, app.aio._engine.store
    context, now = store.statement_context, datetime.now(UTC)

    async def timed(work: Awaitable[Any]) -> tuple[Any, Taken]:
        spent, start = cpu(), time.perf_counter()
        answer = await work
        return answer, Taken(time.perf_counter() - start, cpu() - spent)

    run, taken = await timed(aio.submit("noop"))
    yield "submit", taken
    _, taken = await timed(aio.submit_many([{"model": "noop"}] * 99))
    yield "bulk submit of 99", taken
    leased, taken = await timed(store.write(lease.lease, LeaseRequest("w", ("default",), ["noop"], 100), context))
    yield "lease of 100", taken
    beats = [LeaseRenewal(each.id, each.fence) for each in leased]
    yield "heartbeat of 100", (await timed(store.write(lease.renew, beats, context)))[1]
    result = AttemptResult(kind="succeeded", result="null", result_digest="0" * 64, result_size=4)
    ends = [FinishRequest(each.id, each.fence, result) for each in leased]
    yield "finish of 100", (await timed(store.write(transitions.end, ends, context)))[1]
    yield "sweep", (await timed(store.write(transitions.lose_expired, context)))[1]
    reads: dict[str, Callable[[], Awaitable[Any]]] = {
        "get": lambda: aio.get(run.id),
        "timeline": lambda: aio.timeline(leased[0].id),
        "list": lambda: aio.runs(limit=50),
        "list of what failed": lambda: aio.runs(limit=50, status="FAILED"),
        "list of what waits": lambda: aio.runs(limit=50, status="PENDING"),
        "list of a model": lambda: aio.runs(limit=50, model="noop"),
        "list of a model without runs": lambda: aio.runs(limit=50, model="blocking"),
        "list of a model with 50 runs": lambda: aio.runs(limit=50, model="rare"),
        "list of what failed of it": lambda: aio.runs(limit=50, model="rare", status="FAILED"),
        "list of a tenant without runs": lambda: aio.runs(limit=50, tenant="nobody"),
        "list of what was submitted until a day ago": lambda: aio.runs(limit=50, until=now - timedelta(days=1)),
        "usage of a user": lambda: aio.usage("ann"),
        "list of a payload": lambda: aio.runs(limit=50, payload_hash=run.payload_hash[::-1]),
        "summary": aio.summary,
        "summary, grouped": lambda: aio.summary(grouped=True),
        "backlog": aio.backlog,
        "why a run waits": lambda: aio.waiting(run.id),
    }
    for what, read in reads.items():
        yield what, (await timed(read()))[1]


def heartbeat(bench: Bench) -> Row:
    url = filled(bench, 1000, 0)
    milliseconds = asyncio.run(_heartbeat(url)) * 1e3
    bench.postgres.drop(url)
    return Row("heartbeat of 1,000 leases, one statement, ms", [milliseconds], 50, at_most=True)


async def _heartbeat(url: str) -> float:
    ledger = RunStore(url, awaited=True)
    leased = await ledger.write(lease.lease, LeaseRequest("w", ("default",), ["noop"], 1000), ledger.statement_context)
    beats = [LeaseRenewal(each.id, each.fence) for each in leased]
    times = []
    for _ in range(20):
        start = time.perf_counter()
        assert len(await ledger.write_once(lease.renew, beats, ledger.statement_context)) == 1000
        times.append(time.perf_counter() - start)
    await ledger.close()
    return median(times)


def idle(bench: Bench) -> Iterator[Row]:
    """A real `semel worker` process without runs, after its start."""
    url = bench.postgres.database()
    semel_command(["migrate", url, "--json"])
    environment = {**os.environ, "SEMEL_DB": url, "SEMEL_ARTIFACTS": tempfile.gettempdir()}
    command = [sys.executable, "-m", "semel.cli", "worker", "semel.demo:app", "--quiet", "--processes", "2"]
    process = subprocess.Popen(command, env=environment)
    try:
        time.sleep(15)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET autovacuum = off")  # its transactions would count, too
            connection.execute("SELECT pg_reload_conf()")
            before, begun = transactions(connection), time.monotonic()
            time.sleep(60)
            queries = (transactions(connection) - before - 2) / (time.monotonic() - begun)
        status = Path(f"/proc/{process.pid}/status").read_text()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM RESET autovacuum")
            connection.execute("SELECT pg_reload_conf()")
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024
    yield Row("idle worker: queries a second", [queries], 0.5, at_most=True)
    yield Row("idle worker: MB resident", [resident], 120, at_most=True)


def transactions(connection: psycopg.Connection[tuple[int]]) -> int:
    """The committed and rolled back transactions of this database; every statement of an idle worker is one."""
    connection.execute("SELECT pg_stat_force_next_flush()")
    time.sleep(1.2)  # other connections report their statistics once a second
    query = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
    row = connection.execute(query).fetchone()
    assert row is not None
    return row[0]


def rows(bench: Bench, wanted: list[str]) -> Iterator[Row]:
    sqlite = f"sqlite:///{tempfile.mkdtemp()}/semel.db"
    parts: dict[str, Part] = {
        "wal": lambda: wal_rows(bench),
        **drain_rows(bench),
        "drain sqlite": sqlite_drain,
        "processes": lambda: process_rows(bench),
        "snapshot": lambda: snapshot_rows(bench),
        **submit_rows(bench),
        "latency postgresql": lambda: [latency(bench.url, 10)],
        "latency sqlite": lambda: [latency(sqlite, 11.8)],
        "growth": lambda: growth(bench),
        "growth sqlite": sqlite_growth,
        "heartbeat": lambda: [heartbeat(bench)],
        "idle": lambda: idle(bench),
    }
    for name, part in parts.items():
        if not wanted or any(each in name for each in wanted):
            yield from part()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("row", nargs="*", help="a part of a row's name; all without it")
    asked = parser.parse_args()
    with ExitStack() as stack:
        return show(rows(Bench(stack), asked.row))


if __name__ == "__main__":
    sys.exit(main())
