"""The migration to tables that are written once: runs in every state, while old programs go on, killed and run again.

3,000 runs, or as many as SEMEL_TEST_RUNS says.

What the old tables held at the moment of the switch is kept beside the new ones and compared with their views, row by
row.
"""

import json
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, event, text

from semel import JobStore, Once
from semel.cli import main as semel_command
from semel.cli._database import engine_of
from semel.db import migrate
from semel.db.schema import REVISIONS
from semel.runs.app import App
from support.databases import MISCOUNTED
from support.programs import PATIENCE, Program

NEWEST = REVISIONS[-1]
MANY = int(os.environ.get("SEMEL_TEST_RUNS", "3000"))
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
    "result, result_size, data_ref"
)
EVENT = "run_id, version, at_us, step, status, fence, worker, note"


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    engine = engine_of(url)
    yield engine
    engine.dispose()


@pytest.fixture
def old(engine: Engine) -> Engine:
    """The tables of the migration before, with runs in every state."""
    with engine.begin() as conn:
        fill(conn)
    return engine


def fill(conn: Connection) -> None:
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


@contextmanager
def before_each(engine: type[Engine] | Engine, call: Callable[[Connection, str], None]) -> Iterator[None]:
    """Call this before every statement."""

    def listen(conn: Connection, _cursor: object, statement: str, *_: object) -> None:
        call(conn, statement)

    event.listen(engine, "before_cursor_execute", listen)
    yield
    event.remove(engine, "before_cursor_execute", listen)


@contextmanager
def kept_at_the_switch() -> Iterator[None]:
    """Keep what the old tables hold when they are dropped."""

    def keep(conn: Connection, statement: str) -> None:
        if statement.strip() == "DROP TABLE semel_runs":
            for table in ("semel_runs", "semel_run_events", "semel_run_keys"):
                conn.execute(text(f"CREATE TABLE old_{table[6:]} AS SELECT * FROM {table}"))

    with before_each(Engine, keep):
        yield


KILLED = """
import os, signal
from sqlalchemy import event
from semel.cli._database import engine_of
from semel.db import migrate

seen = 0
engine = engine_of(url)

def die(_conn, _cursor, statement, *_):
    global seen
    seen += at in statement
    if seen == times:
        os.kill(os.getpid(), signal.SIGKILL)

event.listen(engine, "before_cursor_execute", die)
migrate.run(engine, lambda *_: None)
tell("it was not killed")
"""
MOMENTS = {
    "CREATE TRIGGER semel_runs_gone": 1,
    "INSERT INTO semel_migration": 1,
    "INSERT INTO semel_attempts": 1,
    "INSERT INTO semel_run_counts": 2,
    "UPDATE semel_migration": 2,
    "CREATE INDEX semel_keys_run_key": 1,
    "DELETE FROM semel_attempts": 1,
    "DELETE FROM semel_changes_0008": 1,
    "INSERT INTO semel_active": 1,
    "DROP TABLE semel_run_events": 1,
    "RENAME TO semel_runs": 1,
    "UPDATE semel_version": 1,
}
"""Statements before which the migration is killed, when it comes to them for the first or so many-th time."""


MEANWHILE = (
    """
UPDATE semel_runs SET status = 'SUCCEEDED', step = 'succeeded', version = version + 1, lease_until_us = NULL,
  changed_us = changed_us + 9, finished_us = changed_us + 9, progress = 1.0, result = 'null', result_size = 4,
  result_digest = payload_hash
WHERE id = (SELECT id FROM semel_runs WHERE step = 'leased' ORDER BY id LIMIT 1)""",
    f"""
INSERT INTO semel_run_events ({EVENT}, unpublished, unsent)
SELECT id, version, changed_us, step, status, fence, worker, note, false, false FROM semel_runs
WHERE status = 'SUCCEEDED' AND NOT EXISTS (SELECT 1 FROM semel_run_events WHERE run_id = id AND step = 'succeeded')""",
    """
DELETE FROM semel_runs WHERE id = (
  SELECT id FROM semel_runs WHERE finished_us = created_us + 9 AND idempotency_key IS NULL ORDER BY id LIMIT 1)""",
    "DELETE FROM semel_run_events WHERE run_id NOT IN (SELECT id FROM semel_runs)",
)
"""A run ends, and one is removed, as programs of the release before write it."""


def test_runs_in_every_state_keep_it_and_their_history(url: str, old: Engine) -> None:
    """Killed at every moment and run again: each time the old tables are whole, and what was copied counts. Before it
    is run again, a run ends and another is removed.
    """
    came: list[int] = []
    for at, times in MOMENTS.items():
        with old.begin() as conn:
            for statement in MEANWHILE:
                conn.execute(text(statement))
        with Program(KILLED, url=url, at=at, times=times) as program, pytest.raises((EOFError, ConnectionError)):
            pytest.fail(str(program.hear()))
        with old.begin() as conn:
            assert migrate.current(conn) == "0007"
            assert conn.scalar(text("SELECT count(*) FROM semel_runs WHERE status = 'SUCCEEDED'")) == MANY / 5
            came.append((migrate.copied(conn) or (0, MANY))[0])
    assert came == sorted(came)
    assert (came[0], came[-1]) == (0, MANY - 4), "four were removed before anything was copied"
    with kept_at_the_switch():
        assert semel_command(["migrate", url]) == 0
    with old.begin() as conn:
        _compare(conn)
        assert migrate.copied(conn) is None
    _go_on(url)


OLD_PROGRAM = """
from collections import Counter
from time import sleep

from sqlalchemy import exc, text

from semel.cli._database import engine_of
from semel.db.errors import is_lock_error

engine = engine_of(url)
done = Counter()
now = later_us + 10**12
SUBMIT = '''
INSERT INTO semel_runs (id, tenant, user_id, model, queue, priority, status, ready, step, version, changed_us, fence,
  attempts, errors, losts, max_attempts, max_lost, parameters, payload_hash, idempotency_key, cost, asked_cost,
  created_us, due_us, lease_us)
VALUES (:id, '', 'u1', 'm1', 'default', 0, 'PENDING', true, 'created', 1, :now, 0, 0, 0, 0, 3, 3, '[]', :hash, :key, 7,
  7, :now, :now, 60000000)'''
KEY = '''
INSERT INTO semel_run_keys (tenant, user_id, kind, key, payload_hash, job_id, created_us, expires_us)
VALUES ('', 'u1', 'key', :key, :hash, :id, :now, :now + 1000000000)'''
JOB = '''
INSERT INTO semel_jobs (run_id, tenant, user_id, provider, config, created_us, data_state)
VALUES (:id, '', 'u1', 'local', 'c', :now, 'done')'''
EVENT = '''
INSERT INTO semel_run_events (run_id, version, at_us, step, status, fence, worker, note, unpublished, unsent)
SELECT id, version, changed_us, step, status, fence, worker, note, false, true FROM semel_runs WHERE id = :id'''
STEPS = {
    "leased": "status = 'RUNNING', note = NULL, fence = fence + 1, attempts = attempts + 1, worker = 'w', "
    "started_us = coalesce(started_us, :now), lease_until_us = :now + lease_us, heartbeat_us = :now, "
    "progress_us = :now",
    "retried": "status = 'PENDING', note = 'oops', lease_until_us = NULL, ready = false, due_us = :now + 10, "
    "errors = errors + 1, last_error = 'oops'",
    "succeeded": "status = 'SUCCEEDED', note = NULL, lease_until_us = NULL, finished_us = :now, progress = 1.0, "
    "result = 'null', result_size = 4, result_digest = payload_hash",
    "failed": "status = 'FAILED', note = 'no', lease_until_us = NULL, finished_us = :now, last_error = 'no', "
    "errors = errors + 1",
    "cancelled": "status = 'CANCELLED', note = 'no', cancel_us = :now, finished_us = :now, cost = 0",
    "uploaded": "data_ref = 'd'",
}

def work(conn, *statements, **values):
    for statement in statements:
        conn.execute(text(statement), {"now": now, **values})

def submit(conn, number):
    # half of the ids are smaller than all others, as of a machine whose clock is late: the copying has passed them
    identity = f"{'01880000' if number % 2 else '01900000'}-0000-7000-8000-{number:012x}"
    key = f"own-{number}" if number % 3 == 0 else None
    values = {"id": identity, "key": key, "hash": f"{number + 10**9:064x}"}
    work(conn, SUBMIT, **values)
    work(conn, EVENT, id=identity)
    if key:
        work(conn, KEY, **values)
    if number % 4 == 0:
        work(conn, JOB, **values)
        step(conn, identity, "uploaded")

def step(conn, identity, name):
    work(conn, f"UPDATE semel_runs SET step = '{name}', version = version + 1, changed_us = :now, {STEPS[name]} "
         "WHERE id = :id", EVENT, id=identity)
    done[name] += 1

def find(conn, where, newest=False):
    return conn.scalar(text(f"SELECT CAST(id AS text) FROM semel_runs WHERE {where} ORDER BY id "
                            f"{'DESC' if newest else ''} LIMIT 1"))

WAITS, WORKS = "status = 'PENDING' AND ready", "status = 'RUNNING' AND cancel_us IS NULL"

def every_step(conn, newest):
    for name in ("leased", "retried", "leased", "succeeded", "leased", "failed", "cancelled"):
        where = {"leased": WAITS, "cancelled": "status = 'PENDING' AND version = 1"}.get(name, WORKS)
        if found := find(conn, where, newest):
            step(conn, found, name)

def purge(conn, newest):
    where = "finished_us IS NOT NULL AND idempotency_key IS NULL"
    if found := find(conn, where, newest):
        work(conn, "DELETE FROM semel_runs WHERE id = :id", "DELETE FROM semel_run_events WHERE run_id = :id",
             "DELETE FROM semel_jobs WHERE run_id = :id", id=found)
        done["purged"] += 1

def forget(conn):
    work(conn, "DELETE FROM semel_run_keys WHERE key IN (SELECT key FROM semel_run_keys WHERE kind = 'key' "
         "ORDER BY key DESC LIMIT 1)")

def once(call, *args):
    while True:
        try:
            with engine.begin() as conn:
                return call(conn, *args)
        except exc.DBAPIError as error:
            if not is_lock_error(error):
                raise
            sleep(0.01)

number = 0
try:
    while True:
        for newest in (False, True):
            number, now = number + 1, now + 1000
            for call, *args in ((submit, number), (every_step, newest), (purge, newest), (forget,)):
                once(call, *args)
                sleep(0.005)  # who waits for SQLite's lock polls, and would never get it
        tell({"rounds": number})
except exc.DBAPIError as error:
    tell({"error": str(error.orig), "done": dict(done)})
"""


class OldProgram:
    """A program that submits, leases, ends and purges runs with the statements of the release before."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._said = threading.Condition()
        self._rounds = 0
        self.end: dict[str, Any] | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while self.end is None:
            said = self._program.hear()
            with self._said:
                self._rounds += 1
                self.end = said if "error" in said else None
                self._said.notify_all()

    def wait_for_more(self) -> None:
        """Wait until it has done everything once more; a round may be under way that began before."""
        with self._said:
            enough = self._rounds + 2
            assert self._said.wait_for(lambda: self.end or self._rounds >= enough, PATIENCE)

    def wait_for_its_end(self) -> dict[str, Any]:
        with self._said:
            assert self._said.wait_for(lambda: self.end, PATIENCE)
            assert self.end is not None
            return self.end


def test_old_programs_go_on_while_runs_are_copied_and_lose_nothing(
    url: str, old: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They submit, end and remove runs that are copied already and that are not, between any two transactions."""
    monkeypatch.setattr(migrate, "LARGEST", MANY // 5)
    shown: list[tuple[int, int]] = []
    with Program(OLD_PROGRAM, url=url, later_us=LATER_US) as program, kept_at_the_switch():
        theirs = OldProgram(program)

        def progress(copied: int, total: int) -> None:
            shown.append((copied, total))
            if len(shown) < 10:  # then both run as fast as they can
                theirs.wait_for_more()

        assert migrate.run(old, progress) == ("0007", NEWEST)
        end = theirs.wait_for_its_end()
    assert re.search("no such|does not exist|has no column", end["error"])
    assert min(end["done"][each] for each in ("succeeded", "failed", "retried", "cancelled", "uploaded", "purged")) > 3
    assert len(shown) > 5
    assert shown[-1][0] == shown[-1][1] >= MANY - end["done"]["purged"]
    with old.begin() as conn:
        _compare(conn)
    _go_on(url)


def test_a_transaction_copies_a_bounded_number_of_runs(url: str, old: Engine) -> None:
    """And the one that others wait for copies only what is under way."""
    transactions: list[Counter[str]] = [Counter()]

    def count(_conn: Connection, cursor: Any, statement: str, *_: object) -> None:
        for table in ("semel_runs_0008", "semel_attempts", "semel_active"):
            if f"INSERT INTO {table}" in statement:
                transactions[-1][table] += max(cursor.rowcount, 0)

    event.listen(old, "after_cursor_execute", count)
    event.listen(old, "commit", lambda _conn: transactions.append(Counter()))
    migrate.run(old, lambda *_: None)
    *before, switch = [each for each in transactions if each]
    assert sum(each["semel_runs_0008"] for each in before) == MANY
    assert max(each["semel_runs_0008"] for each in before) <= migrate.LARGEST
    assert max(each["semel_attempts"] for each in before) <= 2 * migrate.LARGEST
    assert switch == {"semel_active": MANY / 2, "semel_attempts": MANY / 10, "semel_runs_0008": 0}


def test_two_migrations_at_once_share_the_work(url: str, old: Engine) -> None:
    with ExitStack() as stack:
        stack.enter_context(kept_at_the_switch())
        others = [stack.enter_context(Program(MIGRATE, url=url)) for _ in range(2)]
        assert semel_command(["migrate", url]) == 0
        assert [other.hear() for other in others] == [0, 0]
    with old.begin() as conn:
        assert migrate.current(conn) == NEWEST
        assert conn.scalar(text("SELECT count(*) FROM semel_run_states WHERE status = 'SUCCEEDED'")) == MANY / 5
        assert conn.execute(text(MISCOUNTED)).all() == []
    _go_on(url)


MIGRATE = """
from semel.cli import main
tell(main(["migrate", url]))
"""


def test_a_migration_under_way_says_how_far_it_is(url: str, old: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    with Program(KILLED, url=url, at="UPDATE semel_migration", times=3) as program, pytest.raises(EOFError):
        program.hear()
    assert semel_command(["doctor", "--db", url]) == 1
    with old.begin() as conn:
        copied, total = migrate.copied(conn) or (0, 0)
    assert 0 < copied < total == MANY
    assert f"a migration from 0007 is under way: {copied:,} of {MANY:,} runs are copied" in capsys.readouterr().out
    assert semel_command(["migrate", url, "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"before": "0007", "after": NEWEST}
    shown = [json.loads(line) for line in said.err.splitlines()]
    assert shown[-1] == {"copied": MANY, "total": MANY}
    assert [each["copied"] for each in shown] == sorted(each["copied"] for each in shown)
    assert shown[0]["copied"] > copied, "it began again"
    semel_command(["doctor", "--db", url])
    assert f"at {NEWEST}" in capsys.readouterr().out


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
    assert rows("SELECT count(*) FROM semel_run_states") == rows("SELECT count(*) FROM old_runs")
    assert rows(MISCOUNTED) == []
    one = "SELECT key, payload_hash, job_id, created_us, expires_us FROM old_run_keys WHERE kind = 'key'"
    other = "SELECT key, fingerprint, attempt, created_us, expires_us FROM semel_keys WHERE kind = 'run'"
    assert rows(f"{one} EXCEPT {other} LIMIT 3") == rows(f"{other} EXCEPT {one} LIMIT 3") == []
    one = "SELECT job_id, expires_us FROM old_run_keys WHERE kind = 'payload' AND job_id IN ("
    one += "SELECT CAST(id AS text) FROM old_runs WHERE status IN ('PENDING', 'RUNNING'))"
    other = "SELECT CAST(id AS text), dedupe_until_us FROM semel_active WHERE dedupe IS NOT NULL"
    assert rows(f"{one} EXCEPT {other} LIMIT 3") == rows(f"{other} EXCEPT {one} LIMIT 3") == []


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
