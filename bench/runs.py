"""Benchmark of runs against the nearest peers on the same servers: `./dev bench runs`.

Every run keeps its row, fence, result and events. Rates are measured in turn with the peer's, several rounds, on a
durable PostgreSQL (fsync on), and printed as the median of the rounds' ratios. Rows can be chosen by a part of their
name: `./dev bench runs pgqueuer growth`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import psycopg
from noop_model import blocking_noop
from peers import Absent, Peer, opened
from peers.watch import from_tasks, in_a_process
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
            connection.execute("TRUNCATE semel_runs, semel_run_events, semel_run_keys, semel_run_logs")


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


class Bench:
    """The servers, semel set up on them, and the results so far."""

    def __init__(self, stack: ExitStack) -> None:
        self.postgres = stack.enter_context(servers.postgres(durable=True))
        self.redis = stack.enter_context(servers.redis())
        self.url = self.postgres.database()
        self.ours, self.children = Semel(), Children()
        self.ours.prepare(self.url, "")
        self.children.url = self.url

    def drain(self, peer: Peer) -> float:
        peer.enqueue_many(peer.jobs)
        rate = peer.jobs / peer.drain(peer.jobs)
        peer.clear()
        return rate

    def singly(self, peer: Peer) -> float:
        rate = peer.singles / asyncio.run(peer.enqueue_from_tasks(peer.singles))
        peer.clear()
        return rate

    def many(self, peer: Peer) -> float:
        rate = peer.many / peer.enqueue_many(peer.many)
        peer.clear()
        return rate

    def against(
        self, name: str, what: str, required: float, ours: Callable[[], float], theirs: Callable[[Peer], float]
    ) -> Row:
        try:
            with opened(name, self.postgres, self.redis) as peer:
                pairs = [(ours(), theirs(peer)) for _ in range(ROUNDS)]
        except Absent as reason:
            return Row(f"{what}: absent, {reason}", [0.0], None)
        note = f"{median(a for a, _ in pairs):,.0f}/s against {median(b for _, b in pairs):,.0f}/s"
        return Row(what, [a / b for a, b in pairs], required, note=note)


def drain_rows(bench: Bench) -> dict[str, Callable[[], Row]]:
    asked = {"pgqueuer": 1.3, "procrastinate": 20, "rq": 20, "celery": 10, "dbos": 20, "graphile": 0.7}

    def row(name: str, required: float) -> Callable[[], Row]:
        return lambda: bench.against(name, f"drain / {name}", required, lambda: bench.drain(bench.ours), bench.drain)

    return {f"drain {name}": row(name, required) for name, required in asked.items()}


def submit_rows(bench: Bench) -> dict[str, Callable[[], Row]]:
    return {
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
        "bulk against ours": lambda: _bulk_against_ours(bench),
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
    note = f"{median(a for a, _ in pairs):,.0f}/s against {median(b for _, b in pairs):,.0f}/s"
    return Row("bulk submit / our own one by one from 64 tasks", [a / b for a, b in pairs], None, note=note)


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
INSERT INTO semel_runs (id, tenant, user_id, model, queue, priority, status, ready, step, version, changed_us, fence,
  attempts, errors, losts, max_attempts, max_lost, parameters, payload_hash, cost, asked_cost, created_us, due_us,
  started_us, finished_us, lease_us, worker)
SELECT uuidv7(), '', '', 'noop', 'default', 0, '{status}', true, 'x', {version}, n, {version} - 1, 0, 0, 0, 3,
  3, '{{}}', md5(n::text), 0, 0, n, n, {ended}, {ended}, 60000000, 'w'
FROM generate_series(1, {count}) AS n
"""


def filled(bench: Bench, pending: int, finished: int) -> str:
    url = bench.postgres.database()
    semel_command(["migrate", url, "--json"])
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(FILL.format(status="PENDING", version=1, ended="NULL", count=pending))
        if finished:
            connection.execute(FILL.format(status="SUCCEEDED", version=3, ended="n", count=finished))
        connection.execute("VACUUM ANALYZE semel_runs")
    return url


def growth(bench: Bench) -> Row:
    small, large = filled(bench, 10_000, 0), filled(bench, 100_000, 1_000_000)
    pairs = [asyncio.run(_lease_costs(small, large)) for _ in range(5)]
    note = f"{median(b for _, b in pairs) * 1e3:.1f} ms against {median(a for a, _ in pairs) * 1e3:.1f} ms for 100 runs"
    bench.postgres.drop(small)
    bench.postgres.drop(large)
    what = "growth: a lease with 1,000,000 finished and 100,000 pending / 10,000"
    return Row(what, [b / a for a, b in pairs], 1.25, at_most=True, note=note)


async def _lease_costs(small: str, large: str) -> tuple[float, float]:
    """The median cost of leasing 100 runs in each database, in turn; the leased runs are given back."""
    ledgers = [RunStore(url, awaited=True) for url in (small, large)]
    costs: list[list[float]] = [[], []]
    for _ in range(15):
        for ledger, cost in zip(ledgers, costs, strict=True):
            start = time.perf_counter()
            leased = await ledger.write(
                lease.lease, LeaseRequest("w", ("default",), ["noop"], 100), ledger.statement_context
            )
            cost.append(time.perf_counter() - start)
            assert len(leased) == 100
            await ledger.write(
                transitions.end,
                [FinishRequest(x.id, x.fence, AttemptResult(kind="lost"), returned=True) for x in leased],
                ledger.statement_context,
            )
    for ledger in ledgers:
        await ledger.close()
    return median(costs[0]), median(costs[1])


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
    url = bench.postgres.database()  # a new one: vacuuming would count as transactions, too
    semel_command(["migrate", url, "--json"])
    environment = {**os.environ, "SEMEL_DB": url, "SEMEL_ARTIFACTS": tempfile.gettempdir()}
    command = [sys.executable, "-m", "semel.cli", "worker", "semel.demo:app", "--quiet", "--processes", "2"]
    process = subprocess.Popen(command, env=environment)
    try:
        time.sleep(6)
        with psycopg.connect(url, autocommit=True) as connection:
            before, begun = transactions(connection), time.monotonic()
            time.sleep(20)
            queries = (transactions(connection) - before - 2) / (time.monotonic() - begun)
        status = Path(f"/proc/{process.pid}/status").read_text()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024
    yield Row("idle worker: queries a second", [queries], 1, at_most=True)
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
    parts: dict[str, Callable[[], Row]] = {
        **drain_rows(bench),
        **submit_rows(bench),
        "latency postgresql": lambda: latency(bench.url, 10),
        "latency sqlite": lambda: latency(sqlite, 20),
        "growth": lambda: growth(bench),
        "heartbeat": lambda: heartbeat(bench),
    }
    for name, part in parts.items():
        if not wanted or any(each in name for each in wanted):
            yield part()
    if not wanted or "idle" in wanted:
        yield from idle(bench)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("row", nargs="*", help="a part of a row's name; all without it")
    asked = parser.parse_args()
    with ExitStack() as stack:
        return show(rows(Bench(stack), asked.row))


if __name__ == "__main__":
    sys.exit(main())
