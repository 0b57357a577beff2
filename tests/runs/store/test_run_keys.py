"""The keys of jobs, on a clock that the test sets: which job a key names, for whom, and until when."""

from collections.abc import Iterator
from typing import Any

import pytest

from semel import Granted, InProgress, KeyReused, Once, OutcomeUnknown, Replay, Run, StoreUnavailable
from semel.runs.store import lease, run_keys, submit
from support.databases import DATABASES, Databases, TestDatabase

MOMENT = 0.000001
HOUR = 3600


@pytest.fixture
def database(databases: Databases) -> Iterator[TestDatabase]:
    """One kind of database: its statements are the other's too."""
    with databases.empty("sqlite") as database:
        yield database


def test_a_key_names_the_job_that_stored_it_first_until_it_ends(database: TestDatabase) -> None:
    jobs = database.jobs
    began = database.clock.us
    assert jobs.store_idempotency_key("key", "job-1", 42, ttl_hours=1) == "job-1"
    database.clock.advance(HOUR)
    assert jobs.store_idempotency_key("key", "job-2", 42) == "job-1"
    entry = jobs.get_idempotency_key("key", 42)
    assert entry == run_keys.KeyEntry("key", "job-1", "42", "", began, began + HOUR * 1_000_000)
    database.clock.advance(MOMENT)
    assert jobs.check_idempotency_key("key", 42) is None
    assert jobs.store_idempotency_key("key", "job-2", 42) == "job-2"
    assert jobs.check_idempotency_key("key", 42) == "job-2"


def test_a_key_is_found_under_its_own_name_user_tenant_and_kind(database: TestDatabase) -> None:
    jobs, other_tenant = database.jobs, database.open_jobs(tenant="acme")
    payload = database.submit(42)
    jobs.store_idempotency_key("key", "job-42", 42)
    jobs.store_idempotency_key("key", "job-43", 43)
    jobs.store_idempotency_key("other", "job-other", 42)
    other_tenant.store_idempotency_key("key", "job-acme", 42)
    assert [jobs.check_idempotency_key("key", user) for user in (42, 43, 44)] == ["job-42", "job-43", None]
    assert other_tenant.check_idempotency_key("key", 42) == "job-acme"
    assert other_tenant.check_idempotency_key("other", 42) is None
    taken = [(jobs, "key", 42), (jobs, "key", 43), (jobs, "other", 42), (other_tenant, "key", 42)]
    named = [store.store_idempotency_key(key, "job-late", user) for store, key, user in taken]
    assert named == ["job-42", "job-43", "job-other", "job-acme"]
    assert jobs.check_idempotency_key(payload.payload_hash, 42) is None, "the hash of a payload is no key"
    assert jobs.store_idempotency_key(payload.payload_hash, "job-hash", 42) == "job-hash"


def test_without_a_user_the_oldest_live_key_of_any_user_is_found(database: TestDatabase) -> None:
    jobs = database.jobs
    for user, hours in ((41, 1), (42, 3), (43, 3)):
        jobs.store_idempotency_key("key", f"job-{user}", user, ttl_hours=hours)
        database.clock.advance(1)
    assert jobs.check_idempotency_key("key") == "job-41"
    database.clock.advance(HOUR)
    assert jobs.check_idempotency_key("key") == "job-42"
    assert database.tidy() == 0, "what was over was removed when it was looked up"


def test_a_look_removes_no_key_that_lives_to_the_end_of_this_microsecond(database: TestDatabase) -> None:
    jobs = database.jobs
    jobs.store_idempotency_key("key", "job-41", 41, ttl_hours=1)
    database.clock.advance(MOMENT)
    jobs.store_idempotency_key("key", "job-42", 42, ttl_hours=1)
    database.clock.advance(HOUR)
    assert [jobs.check_idempotency_key("key") for _ in range(2)] == ["job-42"] * 2


def test_a_payload_finds_its_run_while_that_is_under_way_and_a_key_whatever_became_of_it(
    database: TestDatabase,
) -> None:
    def submit(**options: Any) -> Run:
        return database.app.submit("train", **options)

    run, keyed = submit(), submit(idempotency_key="key")
    other = submit(user=7)
    assert (submit().id, submit(idempotency_key="key").id) == (run.id, keyed.id)
    (leased,) = database.do(lease.lease_these, "worker", [run.id])
    assert submit().id == run.id
    database.end(leased)
    database.app.cancel(keyed.id)
    assert submit().id not in (run.id, other.id), "the other's run is still under way"
    assert submit(idempotency_key="key").id == keyed.id
    assert database.jobs.check_idempotency_key("key") == keyed.id


def test_a_look_at_a_key_removes_no_other(database: TestDatabase) -> None:
    jobs = database.jobs
    for key, user in (("key", 42), ("key", 43), ("other", 42)):
        jobs.store_idempotency_key(key, "job", user, ttl_hours=1)
    database.clock.advance(HOUR)
    assert jobs.check_idempotency_key("key", 42) == "job"
    assert database.tidy() == 0, "all live to the end of this microsecond"
    database.clock.advance(MOMENT)
    assert jobs.check_idempotency_key("key", 42) is None
    assert database.tidy() == 2


def test_a_key_that_never_stops_changing_hands_is_an_error_worth_another_try(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "ROUNDS", 0)
    with pytest.raises(StoreUnavailable, match="the key 'key' changed hands"):
        database.open_app(retry_for=0).submit("train", idempotency_key="key")


def test_a_taken_key_is_read_on_every_database(databases: Databases) -> None:
    with databases.empty("postgres") as database:
        assert [database.jobs.store_idempotency_key("key", job) for job in ("job-1", "job-2")] == ["job-1"] * 2


# -- the keys of Once --------------------------------------------------------------------------------------------------


@pytest.fixture(params=DATABASES)
def both(request: pytest.FixtureRequest, databases: Databases) -> Iterator[tuple[TestDatabase, Once]]:
    """Runs and keys in one database, with one clock."""
    with (
        databases.empty(request.param) as database,
        Once(database.url, clock=database.clock, collect=False) as once,
    ):
        yield database, once


def test_b3_a_runs_key_and_a_key_of_once_in_one_scope_are_one_key(both: tuple[TestDatabase, Once]) -> None:
    database, once = both
    for tenant, user, scope in (("", "", "runs"), ("", "42", "runs:42"), ("a c:me", "42", "a%20c%3Ame runs:42")):
        run = database.app.submit("train", user=user, tenant=tenant, idempotency_key="key")
        record = once.get("key", scope=scope)
        assert record is not None
        assert (record.status, record.attempt, record.fingerprint) == ("completed", run.id, run.payload_hash)
        assert record.outcome is not None
        assert (record.outcome.kind, record.outcome.value) == ("run", run.id)
        verdict = once.claim("key", scope=scope)
        assert isinstance(verdict, Replay)
        assert verdict.outcome.value == run.id
        assert run_keys.owner_of(scope) == (tenant, user)


def test_b3_a_run_is_not_submitted_under_a_key_that_other_work_has(both: tuple[TestDatabase, Once]) -> None:
    database, once = both
    claim = once.claim("key", scope="runs:42", lease=60)
    assert isinstance(claim, Granted)
    with pytest.raises(InProgress, match="'key' is held by other work") as waits:
        database.submit(42, idempotency_key="key")
    assert 0 < waits.value.retry_after <= 60
    once.complete(claim.claim, {"paid": True})
    with pytest.raises(KeyReused, match="'key' belongs to other work"):
        database.submit(42, idempotency_key="key")
    assert database.count("semel_runs") == database.count("semel_active") == 0
    assert not database.submit(43, idempotency_key="key").replayed, "another user has another scope"


def test_b3_a_job_is_not_stored_under_a_key_that_other_work_has(both: tuple[TestDatabase, Once]) -> None:
    database, once = both
    claim = once.claim("key", scope="runs:42", lease=60)
    assert isinstance(claim, Granted)
    with pytest.raises(InProgress, match="'key' is held by other work"):
        database.jobs.store_idempotency_key("key", "job-1", 42)
    once.release(claim.claim)
    assert database.jobs.store_idempotency_key("key", "job-1", 42) == "job-1"


def test_b3_a_key_that_once_gave_up_names_the_next_run(both: tuple[TestDatabase, Once]) -> None:
    database, once = both
    claim = once.claim("key", scope="runs:42", lease=60)
    assert isinstance(claim, Granted)
    once.release(claim.claim)
    run = database.submit(42, idempotency_key="key")
    record = once.get("key", scope="runs:42")
    assert record is not None
    assert record.attempt == run.id
    assert record.fence > claim.claim.fence
    assert once.forget("key", scope="runs:42")
    assert database.submit(42, idempotency_key="key", number=7).id != run.id


def test_b3_a_key_whose_owner_vanished_names_no_run_until_it_is_resolved(both: tuple[TestDatabase, Once]) -> None:
    database, once = both
    assert isinstance(once.claim("key", scope="runs:42", lease=60, on_crash="unknown"), Granted)
    database.clock.advance(61)
    with pytest.raises(OutcomeUnknown, match="the owner of the key 'key' vanished"):
        database.submit(42, idempotency_key="key")
    once.resolve("key", scope="runs:42", done=False)
    assert not database.submit(42, idempotency_key="key").replayed
