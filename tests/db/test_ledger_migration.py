"""The migration to tables that are written once: runs in every state, killed in the middle and run again.

20,000 runs, or as many as SEMEL_TEST_RUNS says.

What the old tables held is kept beside the new ones and compared with their views, row by row.
"""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, make_url, text

from semel import JobStore, Once
from semel.cli import main as semel_command
from semel.db import migrate
from semel.runs.app import App
from support.databases import MISCOUNTED
from support.programs import PATIENCE

MANY = int(os.environ.get("SEMEL_TEST_RUNS", "20000"))
LATER_US = 1_700_000_000_000_000

RUNS = f"""
INSERT INTO semel_runs (id, tenant, user_id, model, queue, priority, status, ready, step, note, version, changed_us,
  fence, attempts, errors, losts, max_attempts, max_lost, parameters, payload_hash, idempotency_key, cost, asked_cost,
  created_us, due_us, started_us, finished_us, worker, lease_us, lease_until_us, heartbeat_us, cancel_us, progress,
  progress_us, last_error, result, result_digest, result_size)
SELECT id, CASE n % 3 WHEN 0 THEN 'a b' ELSE '' END, CASE n % 4 WHEN 0 THEN '' ELSE 'u' || (n % 7) END,
  'm' || (n % 5), 'default', 0,
  CASE WHEN k IN (0, 1, 7) THEN 'PENDING' WHEN k IN (2, 3) THEN 'RUNNING' WHEN k = 4 THEN 'FAILED'
       WHEN k IN (5, 6) THEN 'CANCELLED' ELSE 'SUCCEEDED' END,
  k NOT IN (1, 7),
  CASE WHEN k IN (0, 7) THEN 'created' WHEN k = 1 THEN 'retried' WHEN k = 2 THEN 'leased'
       WHEN k = 3 THEN 'cancel_requested' WHEN k = 4 THEN 'failed' WHEN k IN (5, 6) THEN 'cancelled'
       ELSE 'succeeded' END,
  CASE WHEN k = 1 THEN 'oops' WHEN k IN (3, 6) THEN 'stop' WHEN k = 4 THEN 'again' WHEN k = 5 THEN 'no' END,
  CASE WHEN k IN (0, 7) THEN 1 WHEN k IN (2, 5) THEN 2 WHEN k = 6 THEN 4 WHEN k = 4 THEN 5 ELSE 3 END,
  t + CASE WHEN k IN (0, 7) THEN 0 WHEN k = 1 THEN 5 WHEN k = 2 THEN 1 WHEN k = 3 THEN 3 WHEN k = 4 THEN 15
           WHEN k = 5 THEN 4 WHEN k = 6 THEN 6 ELSE 9 END,
  CASE WHEN k IN (0, 5, 7) THEN 0 WHEN k = 4 THEN 2 ELSE 1 END,
  CASE WHEN k IN (0, 5, 7) THEN 0 WHEN k = 4 THEN 2 ELSE 1 END,
  CASE k WHEN 1 THEN 1 WHEN 4 THEN 2 ELSE 0 END, 0, 3, 3, '[' || n || ']', {{hash}},
  CASE WHEN k = 8 THEN 'key-' || n END, CASE k WHEN 5 THEN 0 ELSE 7 END, 7, t,
  t + CASE WHEN k IN (1, 4) THEN 10 WHEN k = 7 THEN 1000000 ELSE 0 END,
  CASE WHEN k NOT IN (0, 5, 7) THEN t + 1 END,
  CASE WHEN k = 4 THEN t + 15 WHEN k = 5 THEN t + 4 WHEN k = 6 THEN t + 6 WHEN k IN (8, 9) THEN t + 9 END,
  CASE WHEN k NOT IN (0, 5, 7) THEN 'w' END, 60000000, CASE WHEN k IN (2, 3) THEN t + 60000000 END,
  CASE WHEN k IN (0, 5, 7) THEN NULL WHEN k = 2 THEN t + 2 WHEN k = 4 THEN t + 11 ELSE t + 1 END,
  CASE k WHEN 3 THEN t + 3 WHEN 5 THEN t + 4 WHEN 6 THEN t + 3 END, CASE WHEN k IN (8, 9) THEN 1.0 END,
  CASE WHEN k IN (0, 5, 7) THEN NULL WHEN k = 4 THEN t + 11 ELSE t + 1 END,
  CASE k WHEN 1 THEN 'oops' WHEN 4 THEN 'again' END,
  CASE WHEN k IN (8, 9) THEN 'null' END, CASE WHEN k IN (8, 9) THEN {{hash}} END, CASE WHEN k IN (8, 9) THEN 4 END
FROM (SELECT id, n, n % 10 AS k, {LATER_US} + n * 1000 AS t FROM numbered) AS made
"""
STEPS = {
    "created": (1, 0, "PENDING", 0, None, None, "k >= 0"),
    "leased": (2, 1, "RUNNING", 1, "w", None, "k NOT IN (0, 5, 7)"),
    "retried": (3, 5, "PENDING", 1, "w", "oops", "k IN (1, 4)"),
    "leased again": (4, 11, "RUNNING", 2, "w", None, "k = 4"),
    "failed": (5, 15, "FAILED", 2, "w", "again", "k = 4"),
    "cancel_requested": (3, 3, "RUNNING", 1, "w", "stop", "k IN (3, 6)"),
    "cancelled": (4, 6, "CANCELLED", 1, "w", "stop", "k = 6"),
    "cancelled while it waited": (2, 4, "CANCELLED", 0, None, "no", "k = 5"),
    "succeeded": (3, 9, "SUCCEEDED", 1, "w", None, "k IN (8, 9)"),
}
KEYS = f"""
INSERT INTO semel_run_keys (tenant, user_id, kind, key, payload_hash, job_id, created_us, expires_us)
SELECT tenant, user_id, CASE status WHEN 'PENDING' THEN 'payload' ELSE 'key' END,
  CASE status WHEN 'PENDING' THEN payload_hash ELSE idempotency_key END, payload_hash, CAST(id AS text), created_us,
  created_us + {10**15}
FROM semel_runs WHERE idempotency_key IS NOT NULL OR (status = 'PENDING' AND version = 1 AND ready)
"""
SAME = (
    "id, tenant, user_id, model, queue, priority, status, step, note, version, changed_us, fence, attempts, errors, "
    "losts, max_attempts, max_lost, parameters, idempotency_key, cost, asked_cost, created_us, due_us, started_us, "
    "finished_us, worker, lease_us, lease_until_us, heartbeat_us, cancel_us, progress, progress_us, last_error, "
    "result, result_size"
)
EVENT = "run_id, version, at_us, step, status, fence, worker, note"


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    parts = make_url(url)
    engine = create_engine(parts.set(drivername="postgresql+psycopg") if parts.drivername == "postgresql" else parts)
    yield engine
    engine.dispose()


def fill(conn: Connection) -> None:
    """The tables of the migration before, with runs in every state, and a copy of all of it."""
    config = Config()
    config.set_main_option("script_location", "semel.db:migrations")
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = conn
    command.upgrade(config, "0007")
    sqlite = conn.dialect.name == "sqlite"
    digits = "printf('%012x', n)" if sqlite else "lpad(to_hex(n), 12, '0')"
    identity = f"'01890000-0000-7000-8000-' || {digits}"
    numbers = (
        f"(WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < {MANY}) SELECT n FROM c)"
        if sqlite
        else f"generate_series(1, {MANY}) AS n"
    )
    made = identity if sqlite else f"CAST({identity} AS uuid)"
    conn.execute(text(f"CREATE TABLE numbered AS SELECT n, {made} AS id FROM {numbers}"))
    hashed = "printf('%064x', n)" if sqlite else "lpad(to_hex(n), 64, '0')"
    conn.execute(text(RUNS.format(hash=hashed)))
    for step, (version, after, status, fence, worker, note, where) in STEPS.items():
        values = {
            "step": "leased" if step == "leased again" else step.split(" ")[0],
            "status": status,
            "worker": worker,
            "note": note,
        }
        conn.execute(
            text(f"""
INSERT INTO semel_run_events ({EVENT}, unpublished, unsent)
SELECT id, {version}, {LATER_US} + n * 1000 + {after}, CAST(:step AS text), CAST(:status AS text), {fence},
  CAST(:worker AS text), CAST(:note AS text), false, n % 1000 = 0
FROM (SELECT id, n, n % 10 AS k FROM numbered) AS made WHERE {where}"""),
            values,
        )
    conn.execute(text(KEYS))
    for table in ("semel_runs", "semel_run_events", "semel_run_keys"):
        conn.execute(text(f"CREATE TABLE old_{table[6:]} AS SELECT * FROM {table}"))


def begin_to_migrate(url: str, engine: Engine) -> subprocess.Popen[bytes]:
    """A process that is in the middle of the migration."""
    process = subprocess.Popen([sys.executable, "-m", "semel.cli", "migrate", url], stdout=subprocess.DEVNULL)
    ends = time.monotonic() + 4 * PATIENCE
    while not _is_under_way(url, engine):
        assert process.poll() is None, "it was done before it could be killed"
        assert time.monotonic() < ends
        time.sleep(0.01)
    return process


def _is_under_way(url: str, engine: Engine) -> bool:
    if url.startswith("sqlite"):
        log = Path(f"{make_url(url).database}-wal")
        return log.exists() and log.stat().st_size > 1_000_000
    with engine.connect() as conn:
        query = (
            "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE '%INSERT INTO semel_attempts%'"
        )
        return bool(conn.scalar(text(query + " AND pid <> pg_backend_pid() AND datname = current_database()")))


def test_runs_in_every_state_keep_it_and_their_history(url: str, engine: Engine) -> None:
    with engine.begin() as conn:
        fill(conn)
    if url.startswith("sqlite"):
        engine.dispose()
        with closing(sqlite3.connect(make_url(url).database or "")) as file:
            file.execute("PRAGMA journal_mode = wal")
            file.execute("PRAGMA wal_checkpoint(truncate)")
    process = begin_to_migrate(url, engine)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with engine.begin() as conn:
        assert migrate.current(conn) == "0007"
        assert conn.scalar(text("SELECT count(*) FROM semel_runs WHERE status = 'SUCCEEDED'")) == MANY / 5
    assert semel_command(["migrate", url]) == 0
    with engine.begin() as conn:
        _compare(conn)
    _go_on(url)


def _compare(conn: Connection) -> None:
    def rows(query: str) -> list[tuple[object, ...]]:
        return [tuple(row) for row in conn.execute(text(query))]

    digits = "{}" if conn.dialect.name == "sqlite" else "encode({}, 'hex')"
    hashes = ", ".join(digits.format(name) for name in ("payload_hash", "result_digest"))
    one, other = (
        f"SELECT {SAME}, payload_hash, result_digest FROM old_runs",
        f"SELECT {SAME}, {hashes} FROM semel_run_states",
    )
    assert rows(f"{one} EXCEPT {other} LIMIT 3") == rows(f"{other} EXCEPT {one} LIMIT 3") == []
    one, other = f"SELECT {EVENT} FROM old_run_events", f"SELECT {EVENT} FROM semel_run_steps"
    assert rows(f"{one} EXCEPT {other} LIMIT 3") == rows(f"{other} EXCEPT {one} LIMIT 3") == []
    one, other = f"SELECT {EVENT} FROM old_run_events WHERE unsent", f"SELECT {EVENT} FROM semel_outbox WHERE unsent"
    assert rows(f"{one} EXCEPT {other} LIMIT 3") == rows(f"{other} EXCEPT {one} LIMIT 3") == []
    assert rows("SELECT count(*) FROM semel_run_states") == [(MANY,)]
    assert rows(MISCOUNTED) == []
    one = "SELECT key, payload_hash, job_id, created_us, expires_us FROM old_run_keys WHERE kind = 'key'"
    other = "SELECT key, fingerprint, attempt, created_us, expires_us FROM semel_keys WHERE kind = 'run'"
    assert rows(f"{one} EXCEPT {other} LIMIT 3") == rows(f"{other} EXCEPT {one} LIMIT 3") == []
    named = "SELECT count(*) FROM semel_active WHERE dedupe IS NOT NULL AND dedupe_until_us IS NOT NULL"
    assert rows(named) == rows("SELECT count(*) FROM old_run_keys WHERE kind = 'payload'") == [(MANY / 10,)]


def _go_on(url: str) -> None:
    """The new code finds the keys and the payloads, and goes on with what was under way."""
    app = App(url)
    app.model("m3", isolation="thread")(lambda: None)
    app.model("m0", isolation="thread")(lambda: None)
    with Once(url, collect=False) as once:
        record = once.get("key-18", scope="a%20b runs:u4")
        assert record is not None
        named = app.get(record.attempt)
    assert (named.status, named.idempotency_key, named.tenant, named.user) == ("SUCCEEDED", "key-18", "a b", "u4")
    jobs = JobStore(url, tenant="a b")
    assert jobs.check_idempotency_key("key-18", "u4") == named.id
    jobs.close()
    waits = app.runs(status="PENDING", limit=1).runs[0]
    assert app.cancel(waits.id).status == "CANCELLED"
    (summary,) = [each for each in app.summary() if each.model == "m3"]
    assert summary.counts["SUCCEEDED"] > 0
    app.close()
