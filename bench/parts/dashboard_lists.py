"""The cost of the dashboard's pages with many runs, compared with 10,000: the whole page as HTML.

    yield from list_rows(postgres, folder)

Both databases have a run every 130 seconds until now, so that the last fifteen days, which is all that the overview and
the quotas look at, are the same in both. Fifty runs of each are of a model of their own, spread evenly. The pages are
requested in turn, in one process, without a network.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import TypeAlias

import httpx
import psycopg
from meter import Sessions
from sqlalchemy import create_engine
from table import Row

from semel import App
from semel.cli import main as semel_command
from semel.dashboard.overview.feed import FeedCache
from semel.service import Settings
from semel.service.app import build
from semel.service.state import ServiceState
from support import servers

SMALL = 10_000
LARGE = {"SQLite": 1_000_000, "PostgreSQL": 10_000_000}
APART_MS = 130_000
WAITING = 20
RARE = 50
"""Runs of the model ``rare`` in each database."""
ROUNDS = 5
PAGES = 15
"""Requests for each page in a round; the fastest counts, because of other load on the machine."""
STATES = """CASE WHEN n < {waiting} THEN 'PENDING' WHEN n % 25 = 1 THEN 'FAILED' WHEN n % 200 = 2 THEN 'CANCELLED'
  ELSE 'SUCCEEDED' END AS status"""
RUNS = """id, created_us, lease_us, priority, max_attempts, max_lost, tenant, user_id, model, queue,
  parameters, idempotency_key, payload_hash"""
MODEL = "CASE n % {rare} WHEN 9 THEN 'rare' ELSE 'model' || (n % 10) END AS model"
VALUES = """us, {lease}, {priority}, 3, 3, '', 'user' || (n % 100), model, 'default', '{{{{}}}}', 'key' || n"""
POSTGRES = f"""
CREATE UNLOGGED TABLE made AS SELECT *,
  (lpad(to_hex(us / 1000), 12, '0') || '7' || lpad(to_hex(n % 4096), 3, '0') || '8'
  || substr(md5(n::text), 1, 15))::uuid AS id, {STATES}, {MODEL} FROM
  (SELECT n, {{now}} - n::bigint * {{apart}} AS us FROM generate_series({{count}} - 1, 0, -1) AS n);
INSERT INTO semel_runs ({RUNS}) SELECT id, {VALUES.format(lease="NULL", priority="NULL")}, sha256(n::text::bytea)
FROM made
"""
SQLITE = f"""
CREATE TABLE made AS
WITH RECURSIVE counted(n) AS (SELECT {{count}} - 1 UNION ALL SELECT n - 1 FROM counted WHERE n > 0),
timed AS (SELECT n, {{now}} - n * {{apart}} AS us FROM counted),
named AS (SELECT *, {STATES}, {MODEL},
  printf('%012x7%03x8', us / 1000, n % 4096) || substr(lower(hex(randomblob(8))), 1, 15) AS x
  FROM timed)
SELECT n, us, status, model, substr(x, 1, 8) || '-' || substr(x, 9, 4) || '-' || substr(x, 13, 4) || '-'
  || substr(x, 17, 4) || '-' || substr(x, 21) AS id FROM named;
INSERT INTO semel_runs ({RUNS}) SELECT id, {VALUES.format(lease=60000000, priority=0)}, printf('%064x', n) FROM made
"""
STATES_OF = """
INSERT INTO semel_active (id, since_us, due_us, lease_us, fence, priority, version, attempts, errors, losts, ready,
  tenant, user_id, queue, model)
SELECT id, us, us, 60000000, 0, 0, 1, 0, 0, 0, true, '', 'user' || (n % 100), 'default', model
FROM made WHERE status = 'PENDING';
INSERT INTO semel_attempts (run_id, fence, due_us, ended_us, version, attempts, errors, losts, tenant, status, began_us,
  worker, last_error)
SELECT id, 1, us, us, 3, 1, 0, 0, '', status, us, 'w', CASE status WHEN 'FAILED' THEN 'ValueError: as told' END
FROM made WHERE status <> 'PENDING';
INSERT INTO semel_quotas (tenant, user_id, per_day, cost_daily, action, warn_at)
SELECT '', 'user' || (n % 100), 1000, 1000000, 'block', 0.8 FROM made WHERE n < 10;
INSERT INTO semel_run_counts (tenant, model, status, count, spent_us)
SELECT '', model, status, count(*), 0 FROM made WHERE status <> 'PENDING' GROUP BY 2, 3;
DROP TABLE made
"""
INDEXES = """
SELECT indexname, replace(indexdef, ' ON ONLY ', ' ON ') FROM pg_indexes
WHERE tablename IN ('semel_runs', 'semel_attempts') AND indexname NOT LIKE '%\\_pkey'
"""


def fill(url: str, count: int, apart_ms: int = APART_MS, waiting: int = WAITING) -> None:
    """Insert ``count`` runs so many milliseconds apart, the newest of which is submitted now; the newest ones wait."""
    values = {"now": time.time_ns() // 1000, "count": count, "apart": apart_ms * 1000, "rare": count // RARE}
    values["waiting"] = waiting
    if url.startswith("postgresql"):
        semel_command(["migrate", url, "--json"])
        with psycopg.connect(url, autocommit=True) as connection:
            indexes = connection.execute(INDEXES).fetchall()
            for name, _ in indexes:
                connection.execute(f"DROP INDEX {name}".encode())
            connection.execute((POSTGRES.format(**values) + ";" + STATES_OF).encode())
            for _, definition in indexes:  # to make them afterwards takes a fraction of the time
                connection.execute(definition.encode())
            connection.execute("VACUUM ANALYZE semel_runs, semel_active, semel_attempts")
        return
    app = App(url)
    app.runs(limit=1)  # creates the tables
    app.close()
    engine = create_engine(url)
    with engine.begin() as connection:
        for statement in (SQLITE.format(**values) + ";" + STATES_OF).split(";"):
            connection.exec_driver_sql(statement)
    engine.dispose()


class Desk:
    """Requests pages of the dashboard on one database."""

    def __init__(self, url: str, count: int) -> None:
        self.site = ServiceState(App(url), Settings())
        transport = httpx.ASGITransport(build(self.site), client=("127.0.0.1", 50000))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
        self.cpu = cpu_of(url)
        self.count = count
        self.known: dict[str, str] = {}

    async def prepare(self) -> None:
        """Read the id and the payload hash of a run in the middle."""
        newest = await self.site.engine.runs(limit=1)
        stamp = int(newest.runs[0].id.replace("-", "")[:12], 16) - self.count // 2 * APART_MS
        middle = f"{stamp:012x}"
        cursor = f"{middle[:8]}-{middle[8:]}-7000-8000-000000000000"
        run = (await self.site.engine.runs(cursor=cursor, limit=1)).runs[0]
        self.known = {"id": run.id, "hash": run.payload_hash}

    async def page(self, path: str) -> tuple[float, float]:
        """Request a page, which must succeed; returns the seconds it took, and those of CPU (see ``cpu_of``)."""
        self.site.overview_feeds = FeedCache(self.site)  # it would show the overview of the request before
        spent, start = self.cpu(), time.perf_counter()
        answer = await self.client.get(path.format(**self.known))
        seconds, spent = time.perf_counter() - start, self.cpu() - spent
        assert answer.status_code == 200, answer.text[:500]
        return seconds, spent

    async def close(self) -> None:
        await self.client.aclose()
        await self.site.close()


def cpu_of(url: str) -> Callable[[], float]:
    """The CPU time of the server's sessions, or of this process, which is SQLite and the dashboard."""
    return time.process_time if url.startswith("sqlite") else Sessions(url).cpu


PATHS = {
    "the overview of an hour": "/?window=hour",
    "the overview of a day": "/?window=day",
    "the overview of a week": "/?window=week",
    "quotas": "/ui/quotas",
    "the quota of a user": "/ui/quotas?user=user7",
    "a run": "/ui/runs/{id}",
    "keys": "/ui/keys",
    "the first page": "/ui/runs",
    "a page in the middle": "/ui/runs?cursor={id}",
    "back from the middle": "/ui/runs?newer={id}",
    "FAILED": "/ui/runs?status=FAILED",
    "three states": "/ui/runs?status=PENDING&status=FAILED&status=SUCCEEDED",
    "of the last hour": "/ui/runs?last=1h",
    "of a user": "/ui/runs?user=user7",
    "FAILED of a user who has none": "/ui/runs?user=user7&status=FAILED",
    "CANCELLED of a user who has some": "/ui/runs?user=user2&status=CANCELLED",
    "of a model": "/ui/runs?model=model3",
    "of a model that few run": "/ui/runs?model=rare",
    "of a model that nobody ran": "/ui/runs?model=none",
    "search by id": "/ui/runs?q={id}",
    "search by payload hash": "/ui/runs?q={hash}",
}
WORST = {
    "a key that nobody had": "/ui/runs?q=nobody",
    "the end of no id": "/ui/runs?q=0f0f0f0f0f0f",
}
"""Filters without an index that match nothing: the page stops the search after a while, and shows that."""


Costs: TypeAlias = dict[str, list[tuple[tuple[float, float], tuple[float, float]]]]
"""For each page and round what it took with few and with many runs: seconds, and seconds of CPU."""


async def _costs(urls: tuple[str, str], large: int, paths: dict[str, str], times: int) -> Costs:
    desks = [Desk(url, count) for url, count in zip(urls, (SMALL, large), strict=True)]
    found: Costs = {name: [] for name in paths}
    for desk in desks:
        await desk.prepare()
    for _ in range(ROUNDS):
        for name, path in paths.items():
            costs: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
            for _ in range(times):
                for desk, cost in zip(desks, costs, strict=True):
                    cost.append(await desk.page(path))
            few, many = ((min(each[0] for each in side), min(each[1] for each in side)) for side in costs)
            found[name].append((few, many))
    for desk in desks:
        await desk.close()
    return found


def measured(kind: str, urls: tuple[str, str]) -> Iterator[Row]:
    """The rows of the table for one kind of database."""
    large = LARGE[kind]
    for name, pairs in asyncio.run(_costs(urls, large, PATHS, PAGES)).items():
        few, many = (median(pair[side][0] for pair in pairs) * 1e3 for side in (0, 1))
        cpu = median(many[1] / few[1] for few, many in pairs)
        note = f"{many:.1f} ms against {few:.1f} ms, CPU {cpu:.2f}"
        ratios = [many[0] / few[0] for few, many in pairs]
        yield Row(f"dashboard, {kind}: {name}, {large:,} / {SMALL:,}", ratios, 1.25, at_most=True, note=note)
    for name, pairs in asyncio.run(_costs(urls, large, WORST, 1)).items():
        milliseconds = [many[0] * 1e3 for _, many in pairs]
        yield Row(f"dashboard, {kind}: {name}, ms with {large:,}", milliseconds, 1000, at_most=True)


def list_rows(postgres: servers.Postgres, folder: Path) -> Iterator[Row]:
    """The rows of the table for SQLite and PostgreSQL."""
    places: dict[str, Callable[[str], str]] = {
        "SQLite": lambda name: f"sqlite:///{folder / name}.db",
        "PostgreSQL": lambda _: postgres.database(),
    }
    for kind, place in places.items():
        urls = (place("small"), place("large"))
        for url, count in zip(urls, (SMALL, LARGE[kind]), strict=True):
            fill(url, count)
        yield from measured(kind, urls)
        if kind == "PostgreSQL":
            for url in urls:
                postgres.drop(url)
