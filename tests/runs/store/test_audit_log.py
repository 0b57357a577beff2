"""The audit log in both databases: many who act at a time, changes that fail, large and secret values."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest
from sqlalchemy import Connection, select

from semel import Actor, Quota
from semel._concurrency.sync import run_sync
from semel.db.dialect import StatementContext
from semel.db.schema import audit, quotas
from semel.errors import StoreUnavailable
from semel.runs.store import audit_log
from semel.runs.store import quotas as quota_store
from semel.runs.store.audit_log import MAX_TEXT, Change, Place
from support.databases import DATABASES, Databases, TestDatabase, behind

ZOE = Actor(user="zoe", entrance="api")


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest, databases: Databases) -> Iterator[TestDatabase]:
    with databases.empty(request.param) as database:
        yield database


def write(database: TestDatabase, *changes: Change, by: Actor | None = ZOE) -> None:
    store = database.app.ledger(awaited=False)
    run_sync(store.write(lambda conn: audit_log.record(conn, store.acting(by), *changes)))
    run_sync(store.close())


def change(**more: Any) -> Change:
    return Change(**{"name": "quota.set", "tenant": "", "target": "ann", "after": {"per_day": 1}, **more})


def test_many_who_act_at_a_time_leave_one_unbroken_chain(database: TestDatabase) -> None:
    app = database.open_app(clock=None)

    def act(number: int) -> None:
        for turn in range(5):
            app.set_quota(f"user-{number}", Quota(per_day=turn), tenant="ab"[number % 2])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(act, range(8)))
    found = app.verify_audit_log()
    assert (found.rows, found.problem) == (40, None)
    assert sorted(found.heads) == ["a", "b"]


def test_a_change_that_fails_after_its_row_was_written_leaves_neither(database: TestDatabase) -> None:
    store = database.app.ledger(awaited=False)

    def fail(conn: Connection, context: StatementContext) -> None:
        quota_store.set_quota(conn, ("", "ann"), Quota(per_day=1), context)
        raise RuntimeError("after both")

    with pytest.raises(RuntimeError):
        run_sync(store.write(fail, store.acting(ZOE)))
    assert run_sync(store.read(lambda conn: conn.execute(select(quotas)).all())) == []
    assert database.app.audit_log().entries == []
    run_sync(store.close())


def test_who_no_person_is_and_what_changes_nothing_is_not_logged(database: TestDatabase) -> None:
    write(database, change(), by=None)
    write(database, change(before={"per_day": 1}))
    assert database.app.audit_log().entries == []


def test_several_changes_are_one_row_each_in_the_chains_of_their_tenants(database: TestDatabase) -> None:
    write(database, change(tenant="b"), change(tenant="a"), change(tenant="b", target="ben"))
    rows = {(each.tenant, each.seq, each.target) for each in database.app.audit_log().entries}
    assert rows == {("a", 1, "ann"), ("b", 1, "ann"), ("b", 2, "ben")}
    assert database.app.verify_audit_log().problem is None


def test_of_a_large_value_size_and_digest_are_kept(database: TestDatabase) -> None:
    write(database, change(after={"config": "x" * MAX_TEXT}), change(before={"a": "y" * 9}, after={"a": "z" * 9}))
    small, large = database.app.audit_log().entries
    assert small.after == {"a": "zzzzzzzzz"}
    assert large.after is not None
    assert set(large.after) == {"omitted", "bytes", "sha256"}
    assert large.after["bytes"] > MAX_TEXT


def test_any_text_is_stored_and_verifies(database: TestDatabase) -> None:
    odd = "\0 \ud800 ñ 🐍 \n\x1b"
    by = Actor(user=odd, role=odd, tenant=odd, address=odd, token=odd)
    write(database, change(target=odd, before={odd: odd}), by=by)
    assert database.app.verify_audit_log().problem is None
    (entry,) = database.app.audit_log().entries
    assert entry.before == {odd: odd}
    assert "ñ 🐍" in entry.user


def test_the_row_is_exactly_what_was_digested(database: TestDatabase) -> None:
    write(database, change(after={"b": 1.5, "a": "é"}))
    store = database.app.ledger(awaited=False)
    (row,) = run_sync(store.read(lambda conn: conn.execute(select(audit)).mappings().all()))
    run_sync(store.close())
    assert row["after"] == '{"a":"\\u00e9","b":1.5}'
    assert json.loads(row["after"]) == {"a": "é", "b": 1.5}


@pytest.fixture
def postgres(databases: Databases) -> Iterator[TestDatabase]:
    with databases.empty("postgres") as database:
        yield database


def recording(database: TestDatabase, *targets: str) -> Callable[[Connection], Place | None]:
    """Appends a row for each target, and returns the place of the last one."""

    def append(conn: Connection) -> Place | None:
        audit_log.record(conn, database.store.acting(ZOE), *(change(target=each) for each in targets))
        return audit_log.take_place(conn)

    return append


def test_who_has_read_an_end_that_is_none_any_more_appends_to_the_new_end(postgres: TestDatabase) -> None:
    behind(postgres, recording(postgres, "ann", "ben"), recording(postgres, "eve", "fay", "gil"))
    targets = [each.target for each in reversed(postgres.app.audit_log().entries)]
    assert targets == ["ann", "ben", "eve", "fay", "gil"]
    assert postgres.app.verify_audit_log().problem is None


def test_who_asks_for_a_transaction_that_is_under_way_waits_for_its_end(postgres: TestDatabase) -> None:
    places: list[Place | None] = []

    def is_committed(conn: Connection) -> bool:
        assert places[0] is not None
        return audit_log.is_committed(conn, places[0])

    assert behind(postgres, lambda conn: places.append(recording(postgres, "ann")(conn)), is_committed)


def test_a_row_in_the_place_of_one_that_was_rolled_back_is_another(database: TestDatabase) -> None:
    written = run_sync(database.store.write(recording(database, "ann")))
    assert written is not None
    assert run_sync(database.store.write(audit_log.is_committed, written))
    assert not run_sync(database.store.write(audit_log.is_committed, written._replace(digest="0" * 64)))
    assert not run_sync(database.store.write(audit_log.is_committed, written._replace(seq=2)))


def test_what_is_sent_again_after_its_commit_undoes_nothing_that_was_done_since(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, store = database.app, database.store
    app.pause(queue="gpu", by=ZOE)
    write_many, tries = store._database.write_many, count(1)

    async def lose_the_reply(work: Any) -> Any:
        answer = await write_many(work)
        if next(tries) > 1:
            return answer
        app.pause(queue="gpu", by=Actor(user="eve"))
        raise StoreUnavailable("the reply is lost")

    monkeypatch.setattr(store._database, "write_many", lose_the_reply)
    assert app.resume(queue="gpu", by=ZOE) is True
    assert [each.by for each in app.pauses()] == ["eve"]
    log = [(each.action, each.user) for each in reversed(app.audit_log().entries)]
    assert log == [("queue.paused", "zoe"), ("queue.resumed", "zoe"), ("queue.paused", "eve")]
