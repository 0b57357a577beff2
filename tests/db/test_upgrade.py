"""A database that an earlier release wrote (schema 0003), with keys and runs in every state, goes on under this code.

``data/`` has its rows as that release's own code wrote them.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, make_url, text

from semel import Granted, InFlight, JobStore, Mismatch, Once, Replay, Unknown
from semel.cli import main as semel_command
from support.databases import TestDatabase

DATA = Path(__file__).parent / "data"
KINDS = ("sqlite", "postgres")


class Upgraded:
    """The database after ``semel migrate``; its clock stands at the moment of the last old write."""

    def __init__(self, kind: str, url: str, stack: ExitStack) -> None:
        self.old: dict[str, Any] = json.loads((DATA / f"rows_0003_{kind}.json").read_text())
        load(url, kind, self.old)
        assert semel_command(["migrate", url]) == 0
        self.database = TestDatabase(kind, url, stack)
        self.database.clock.us = self.old["now_us"]
        self.once = stack.enter_context(Once(url, clock=self.database.clock, collect=False))

    def __getitem__(self, name: str) -> str:
        """The id of a run or reservation."""
        found: str = self.old["ids"][name]
        return found

    def status(self, name: str) -> str:
        return self.database.app.get(self[name]).status


def load(url: str, kind: str, old: dict[str, Any]) -> None:
    """Make the tables of that schema, and write its rows."""
    parts = make_url(url)
    engine = create_engine(parts.set(drivername="postgresql+psycopg") if kind == "postgres" else parts)
    with engine.begin() as conn:
        config = Config()
        config.set_main_option("script_location", "semel.db:migrations")
        config.set_main_option("path_separator", "os")
        config.attributes["connection"] = conn
        command.upgrade(config, "0003")
        for table, rows in old["tables"].items():
            if table == "semel_fence_counter":
                conn.execute(text("DELETE FROM semel_fence_counter"))
            columns = list(rows[0])
            names, values = ", ".join(columns), ", ".join(f":{column}" for column in columns)
            conn.execute(text(f"INSERT INTO {table} ({names}) VALUES ({values})"), [_decoded(row) for row in rows])
        if old["fence"] is not None:
            conn.execute(text("SELECT setval('semel_fence', :last)"), {"last": old["fence"]})
    engine.dispose()


def _decoded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: bytes.fromhex(value["bytes"]) if isinstance(value, dict) else value for name, value in row.items()}


@pytest.fixture(params=KINDS)
def upgraded(request: pytest.FixtureRequest) -> Iterator[Upgraded]:
    with ExitStack() as stack:
        yield Upgraded(request.param, request.getfixturevalue(f"{request.param}_url"), stack)


def test_keys_keep_their_state(upgraded: Upgraded) -> None:
    once = upgraded.once
    fence = max(row["fence"] for row in upgraded.old["tables"]["semel_keys"])
    assert isinstance(once.claim("live", scope="s"), InFlight)
    abandoned = once.claim("abandoned", scope="s")
    assert isinstance(abandoned, Granted)
    assert abandoned.claim.fence > fence, "a fence was granted a second time"
    assert isinstance(once.claim("unknown", scope="s"), Unknown)
    replay = once.claim("completed", scope="s", fingerprint="f")
    assert isinstance(replay, Replay)
    assert replay.outcome.value == {"n": [1, "é"]}
    assert isinstance(once.claim("completed", scope="s", fingerprint="other"), Mismatch)
    assert isinstance(once.claim("released", scope="s"), Granted)
    assert once.check_and_mark("message", "m-1") == "seen"


def test_runs_keep_their_state_and_go_on(upgraded: Upgraded) -> None:
    database = upgraded.database
    states = {name: upgraded.status(name) for name in upgraded.old["ids"] if name != "reservation"}
    assert states == {
        "pending": "PENDING",
        "delayed": "PENDING",
        "running": "RUNNING",
        "cancelling": "RUNNING",
        "succeeded": "SUCCEEDED",
        "failed": "FAILED",
        "retrying": "PENDING",
        "cancelled": "CANCELLED",
        "retry": "PENDING",
    }
    assert database.app.result(upgraded["succeeded"]) == [1, 2]
    assert database.app.get(upgraded["retry"]).retry_of == upgraded["failed"]
    database.clock.advance(7200)  # all leases and delays are over
    assert database.lose_expired() == 2
    assert upgraded.status("cancelling") == "CANCELLED"
    taken = database.lease(100)
    assert {each.id for each in taken} == {
        upgraded[name] for name in ("pending", "delayed", "running", "retrying", "retry")
    }
    assert all(database.end(each) for each in taken)
    assert database.concurrent("ann") == 0
    steps = [step.step for step in database.app.timeline(upgraded["running"])]
    assert steps == ["created", "leased", "lost", "leased", "succeeded"]
    database.clock.advance(1)
    assert database.app.purge(0) == 7, "a live key names the other two"


def test_keys_quotas_and_reservations_of_runs_hold(upgraded: Upgraded) -> None:
    database = upgraded.database
    assert database.app.quotas()["ann"].max_concurrent == 20
    usage = database.app.usage("ann")
    assert (usage.concurrent, usage.reserved) == (7, 1)
    again = database.app.submit("train", {"number": 0}, user="ann", cost=1.5, idempotency_key="k-pending")
    assert (again.id, again.replayed) == (upgraded["pending"], True)
    jobs: JobStore = database.jobs
    assert jobs.check_idempotency_key("document", "ann") == upgraded["succeeded"]
    assert jobs.consume_reservation(upgraded["reservation"], job_id=upgraded["pending"], user_id="ann")
    assert database.concurrent("ann") == 6
