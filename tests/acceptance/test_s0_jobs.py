"""S0, job keys and quota reservations, as far as no HTTP is needed: keys and their time, slots, the document's SQL."""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta, tzinfo
from functools import partial
from typing import Any, LiteralString

import psycopg
import pytest
from sqlalchemy import create_engine, inspect, make_url

from acceptance.together import in_threads
from semel import AsyncJobStore, CostLimitExceeded, InvalidRequest, KeyReused, Quota, QuotaExceeded, Run
from support.databases import DATABASES as KINDS
from support.databases import Databases as Grounds
from support.databases import TestDatabase as Ground
from support.gates import meet_at_gate
from support.programs import Program
from support.quota_race import killed, last_words, race

HOUR, DAY = 3600, 86400
MOMENT = 0.000001
CI_KEYS = [
    "ci-build-4f2a9c1d",
    "jenkins-1729",
    "nightly-train-20240229",
    "user-42-config-flux-lora-1709210096",
    "3fa85f64-5717-4562-b3fc-2c963f66afa6",
    "gh-owner/repo-4f2a9c1d",
    "github-owner/repo-4f2a9c1d",
    "gitlab-group/sub/project-4f2a9c1d",
    "manual-20240229-123456-4711",
]


@pytest.fixture(scope="module")
def grounds(request: pytest.FixtureRequest) -> Iterator[Grounds]:
    with ExitStack() as stack:
        yield Grounds(request, stack)


@pytest.fixture(params=KINDS)
def ground(request: pytest.FixtureRequest, grounds: Grounds) -> Iterator[Ground]:
    """An empty SQLite file, then an empty PostgreSQL database."""
    with grounds.empty(request.param) as ground:
        yield ground


def indexed(ground: Ground, table: str) -> set[tuple[str | None, ...]]:
    """The columns of each index of a table."""
    engine = create_engine(
        make_url(ground.url).set(drivername={"sqlite": "sqlite"}.get(ground.kind, "postgresql+psycopg"))
    )
    try:
        return {tuple(index["column_names"]) for index in inspect(engine).get_indexes(table)}
    finally:
        engine.dispose()


# -- keys ----------------------------------------------------------------------------------------------------------


def test_s0_3_the_key_is_optional(ground: Ground) -> None:
    """Without one the same payload finds its run for ten minutes, unless the caller wants another."""
    first = ground.submit(number=1)
    assert (first.idempotency_key, first.replayed) == (None, False)
    assert ground.submit(number=1).id == first.id
    assert ground.submit(number=2).id != first.id
    assert ground.submit(number=1, dedupe=False).id != first.id
    ground.clock.advance(600 + MOMENT)
    assert ground.submit(number=1).id != first.id
    assert ground.count("idempotency_keys") == 0, "a hash of semel's own making is no key of the client's"


def test_s0_5_a_duplicate_answers_with_the_jobs_current_status(ground: Ground) -> None:
    def again() -> tuple[str, str, bool]:
        run = ground.submit(number=1, idempotency_key="ci-build-abc123")
        return run.id, run.status, run.replayed

    first = ground.submit(number=1, idempotency_key="ci-build-abc123")
    assert (first.status, first.replayed) == ("PENDING", False)
    assert again() == (first.id, "PENDING", True)
    (leased,) = ground.lease()
    assert again() == (first.id, "RUNNING", True)
    assert ground.end(leased)
    assert again() == (first.id, "SUCCEEDED", True)
    assert ground.count("model_runs") == 1


def test_s0_5_a_key_with_another_payload_is_refused(ground: Ground) -> None:
    ground.submit(number=1, idempotency_key="ci-build-abc123")
    with pytest.raises(KeyReused, match="key reused with different payload: 'ci-build-abc123'"):
        ground.submit(number=2, idempotency_key="ci-build-abc123")
    assert ground.count("model_runs") == 1


LOST_RESPONSE = """
import os, signal
from support.databases import open_app
run = open_app(url, clock=lambda: now).submit("train", {"number": 1}, user=42, idempotency_key="client-1")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_s0_6_a_retry_after_a_lost_response_returns_the_original_job(ground: Ground) -> None:
    """Whoever submitted died after the job was created and before anyone heard of it."""
    killed(LOST_RESPONSE, url=ground.url, now=ground.clock())
    ((original,),) = ground.rows("SELECT id FROM model_runs")
    for _ in range(3):
        retried = ground.submit(number=1, idempotency_key="client-1")
        assert (retried.id, retried.replayed) == (str(original), True)
    assert ground.count("model_runs") == 1


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("k" * 256, "256 characters; at most 255"),
        ("", "empty"),
        ("ci-build\n", "control character"),
        ("\0", "control character"),
        ("ci\x7fbuild", "control character"),
        ("half \ud83d", "surrogate"),
        (None, "a text, not a NoneType"),
        (b"ci", "a text, not a bytes"),
    ],
    ids=ascii,
)
def test_s0_7_a_bad_key_is_a_clear_error_and_creates_nothing(ground: Ground, key: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"key .*{reason}"):
        ground.jobs.store_idempotency_key(key, "job-1", 42)
    with pytest.raises(InvalidRequest, match=f"key .*{reason}"):
        ground.jobs.check_idempotency_key(key)
    if key is not None:  # which is no key at all
        with pytest.raises(InvalidRequest, match=f"idempotency_key .*{reason}"):
            ground.submit(idempotency_key=key)
    assert ground.count("model_runs") == ground.count("semel_keys") == 0


def test_s0_7_a_key_of_255_characters_works(ground: Ground) -> None:
    key = "ключ" + "k" * 251
    run = ground.submit(number=1, idempotency_key=key)
    assert ground.submit(number=1, idempotency_key=key).id == run.id
    assert ground.jobs.check_idempotency_key(key) == run.id


def test_s0_8_the_documents_keys_work(ground: Ground) -> None:
    for number, key in enumerate(CI_KEYS):
        run = ground.submit(number=number, idempotency_key=key)
        assert ground.submit(number=number, idempotency_key=key).id == run.id
        assert ground.jobs.check_idempotency_key(key) == run.id
        assert ground.jobs.check_idempotency_key(key.upper()) is None
    assert ground.count("model_runs") == len(CI_KEYS)


def test_s0_9_after_24_hours_the_same_key_creates_a_new_job(ground: Ground) -> None:
    first = ground.submit(number=1, idempotency_key="nightly")
    assert ground.jobs.store_idempotency_key("by hand", "job-1", 42) == "job-1"
    ground.finish(first)
    ground.clock.advance(DAY)
    assert ground.submit(number=1, idempotency_key="nightly").id == first.id
    assert ground.jobs.store_idempotency_key("by hand", "job-2", 42) == "job-1"
    ground.clock.advance(MOMENT)
    second = ground.submit(number=2, idempotency_key="nightly")  # by now other work, too
    assert second.id != first.id
    assert ground.submit(number=2, idempotency_key="nightly").id == second.id
    assert ground.jobs.check_idempotency_key("by hand") is None
    assert ground.jobs.store_idempotency_key("by hand", "job-2", 42) == "job-2"
    assert ground.jobs.check_idempotency_key("by hand") == "job-2"


def test_s0_9_the_24_hours_run_from_the_creation_whatever_asks_for_the_key(ground: Ground) -> None:
    first = ground.submit(number=1, idempotency_key="nightly")
    ground.jobs.store_idempotency_key("by hand", "job-1", 42)
    for _ in range(4):
        ground.clock.advance(DAY / 4)
        assert ground.submit(number=1, idempotency_key="nightly").id == first.id
        assert ground.jobs.store_idempotency_key("by hand", "job-2", 42) == "job-1"
    ground.clock.advance(MOMENT)
    assert ground.submit(number=1, idempotency_key="nightly").id != first.id
    assert ground.jobs.check_idempotency_key("by hand", 42) is None


@pytest.mark.parametrize("hours", [0.5, 1, 48, 24 * 365])
def test_s0_10_the_ttl_is_configurable_for_each_key(ground: Ground, hours: float) -> None:
    ground.jobs.store_idempotency_key(key="ci-build-abc123", job_id="job-xyz789", user_id=42, ttl_hours=hours)
    run = ground.submit(number=1, idempotency_key="run", key_ttl=hours * HOUR)
    ground.clock.advance(hours * HOUR)
    assert ground.jobs.check_idempotency_key("ci-build-abc123") == "job-xyz789"
    assert ground.submit(number=1, idempotency_key="run").id == run.id
    ground.clock.advance(MOMENT)
    assert ground.jobs.check_idempotency_key("ci-build-abc123") is None
    assert ground.submit(number=1, idempotency_key="run").id != run.id


def test_s0_10_the_documents_call_is_awaited(ground: Ground) -> None:
    async def main() -> str | None:
        async_store = AsyncJobStore(ground.url, clock=ground.clock)
        await async_store.store_idempotency_key(key="ci-build-abc123", job_id="job-xyz789", user_id=42, ttl_hours=24)
        found = await async_store.check_idempotency_key("ci-build-abc123")
        await async_store.close()
        return found

    assert asyncio.run(main()) == "job-xyz789"
    entry = ground.jobs.get_idempotency_key("ci-build-abc123", 42)
    assert entry is not None
    assert (entry.job_id, entry.user, entry.expires_us - entry.created_us) == ("job-xyz789", "42", DAY * 1_000_000)


def test_s0_11_the_relation_idempotency_keys(ground: Ground) -> None:
    ground.jobs.store_idempotency_key("ci-build-abc123", "job-xyz789", 42)
    ((key, job_id, user_id, created_at, expires_at),) = ground.rows(
        "SELECT idempotency_key, job_id, user_id, created_at, expires_at FROM idempotency_keys"
    )
    assert (key, job_id, str(user_id)) == ("ci-build-abc123", "job-xyz789", "42")
    assert when(created_at) == datetime(2024, 2, 29, 12, 34, 56, tzinfo=UTC)
    assert when(expires_at) - when(created_at) == timedelta(hours=24)
    assert ("expires_us",) in indexed(ground, "semel_keys")


def when(shown: str | datetime) -> datetime:
    """The time that a view shows: a timestamp, or SQLite's text in UTC."""
    return shown if isinstance(shown, datetime) else datetime.fromisoformat(shown).replace(tzinfo=UTC)


def test_s0_12_an_expired_key_is_cleaned_when_it_is_looked_up(ground: Ground) -> None:
    ground.jobs.store_idempotency_key("looked up", "job-1", 42)
    ground.jobs.store_idempotency_key("forgotten", "job-2", 42)
    ground.clock.advance(DAY + MOMENT)
    assert ground.count("idempotency_keys") == 2
    assert ground.jobs.check_idempotency_key("looked up") is None
    assert ground.rows("SELECT idempotency_key FROM idempotency_keys") == [("forgotten",)]
    assert ground.tidy() == 1, "the sweeper takes what nobody asks for"
    assert ground.count("idempotency_keys") == 0


# -- reservations --------------------------------------------------------------------------------------------------


def test_s0_13_of_two_concurrent_requests_at_4_of_5_exactly_one_is_granted(ground: Ground) -> None:
    """On PostgreSQL both have counted before one commits, unless the lock of the user keeps the second from it."""
    stores = [ground.open_jobs() for _ in range(2)]
    assert None not in [stores[number % 2].reserve_job_slot(42, 5) for number in range(4)]
    asks = [partial(store.reserve_job_slot, 42, 5) for store in stores]
    if ground.kind == "postgres":
        granted = meet_at_gate(ground.url, *asks)
    else:
        granted = in_threads(2, lambda number: asks[number]())
    assert [each is None for each in granted].count(True) == 1
    assert ground.count("job_reservations") == 5


def test_s0_13_of_processes_that_reserve_at_once_at_4_of_5_exactly_one_is_granted(ground: Ground) -> None:
    users = tuple(range(1, 4))
    jobs = ground.open_jobs(clock=None)  # the processes go by the real clock
    assert None not in [jobs.reserve_job_slot(user, 5) for user in users for _ in range(4)]
    granted = race(ground.url, [("reserve",)] * 2, tries=1, limit=5, users=users)
    assert sorted(user for user, _ in granted) == list(users), "one each"


def test_s0_14_reserve_job_slot_gives_an_id_or_none(ground: Ground) -> None:
    async def main() -> list[str | None]:
        async_store = AsyncJobStore(ground.url, clock=ground.clock)
        got = [
            await async_store.reserve_job_slot(user_id=42, max_concurrent=5, ttl_seconds=300),
            *[await async_store.reserve_job_slot(42, 5) for _ in range(5)],
        ]
        await async_store.close()
        return got

    got = asyncio.run(main())
    assert len({*got[:5]}) == 5
    assert all(isinstance(reservation, str) for reservation in got[:5])
    assert got[5] is None
    rows = ground.rows("SELECT created_at, expires_at FROM job_reservations")
    assert [when(until) - when(since) for since, until in rows] == [timedelta(minutes=5)] * 5


async def submit_as_documented(store: AsyncJobStore, submit: Callable[[], Any]) -> str | None:
    """The document's flow: reserve, create the job, consume; release when the job could not be created."""
    reservation_id = await store.reserve_job_slot(user_id=42, max_concurrent=5, ttl_seconds=300)
    if reservation_id is None:
        return "Quota exceeded: Maximum 5 concurrent jobs allowed"
    try:
        await submit()
        await store.consume_reservation(reservation_id)
    except Exception:
        await store.release_reservation(reservation_id)
        raise
    return None


def test_s0_15_16_17_the_documents_flow(ground: Ground) -> None:
    async def create() -> None:
        await ground.app.aio.submit("train", {"number": ground.count("model_runs")}, user=42)

    async def fail() -> None:
        raise ConnectionError("the upload broke off")

    async def main() -> list[str | None]:
        store = AsyncJobStore(ground.url, clock=ground.clock)
        for _ in range(10):  # a failure leaves nothing behind
            with pytest.raises(ConnectionError):
                await submit_as_documented(store, fail)
        answers = [await submit_as_documented(store, create) for _ in range(7)]
        await store.close()
        await ground.app.aio.close()
        return answers

    answers = asyncio.run(main())
    assert answers == [None] * 5 + ["Quota exceeded: Maximum 5 concurrent jobs allowed"] * 2
    assert ground.count("model_runs") == ground.count("job_reservations", "consumed = 1") == 5


def test_s0_15_consume_is_fenced(ground: Ground) -> None:
    """False for a reservation that was released, never made, or is someone else's: the job was created by then."""
    reservation = ground.reserve()
    for someone in ({"user_id": 43}, {"user_id": ""}):
        assert ground.jobs.consume_reservation(reservation, **someone) is False
    assert ground.open_jobs(tenant="other").consume_reservation(reservation) is False
    assert ground.app.usage(42).reserved == 1
    assert ground.jobs.consume_reservation(reservation, user_id=42) is True
    assert ground.jobs.consume_reservation(reservation, user_id=42) is True  # its reply may have been lost
    released = ground.reserve()
    assert ground.jobs.release_reservation(released)
    for lost in (released, "never made"):
        assert ground.jobs.consume_reservation(lost) is False
    assert ground.jobs.consume_reservation(ground.reserve(ttl=0)) is True


def test_s0_15_an_expired_reservation_is_consumed_while_its_slot_is_free(ground: Ground) -> None:
    late, first = ground.reserve(43, limit=1), ground.reserve(limit=2)
    second = ground.reserve(limit=2)
    ground.clock.advance(300 + MOMENT)
    run = ground.submit(43)
    assert ground.jobs.consume_reservation(late, job_id=run.id) is True, "nobody else has the slot"
    assert ground.jobs.consume_reservation(late, job_id=run.id) is True
    ground.reserve(limit=2)
    assert ground.jobs.consume_reservation(first, job_id="one") is True, "one of two slots is free"
    taken = ground.reserve(limit=2)
    job = ground.submit()
    assert ground.jobs.consume_reservation(second, job_id=job.id) is False, "both are taken by others"
    assert ground.app.get(job.id).status == "PENDING", "the job stands"
    assert ground.jobs.release_reservation(taken)
    assert ground.jobs.consume_reservation(second, job_id=job.id) is True
    assert ground.concurrent() == 2


def test_s0_16_release_frees_the_slot_once(ground: Ground) -> None:
    kept, reservation = ground.reserve(limit=2), ground.reserve(limit=2)
    assert not ground.jobs.release_reservation(reservation, user_id=43)
    assert not ground.open_jobs(tenant="other").release_reservation(reservation)
    assert ground.jobs.reserve_job_slot(42, 2) is None
    assert ground.jobs.release_reservation(reservation)
    assert not ground.jobs.release_reservation(reservation)
    assert not ground.jobs.release_reservation("never made")
    assert ground.jobs.reserve_job_slot(42, 2) is not None
    assert ground.jobs.reserve_job_slot(42, 2) is None
    ground.jobs.consume_reservation(kept)
    assert not ground.jobs.release_reservation(kept), "the job has it now"


def test_s0_17_a_denial_says_what_the_limit_is(ground: Ground) -> None:
    ground.app.set_quota(42, Quota(max_concurrent=5))
    for _ in range(5):
        ground.submit()
    with pytest.raises(QuotaExceeded) as denied:
        ground.submit(idempotency_key="sixth")
    assert str(denied.value) == "Quota exceeded: Maximum 5 concurrent jobs allowed"
    assert not isinstance(denied.value, CostLimitExceeded)
    assert ground.count("model_runs") == 5
    assert ground.count("idempotency_keys") == 0, "the key is free for the next try"


def test_s0_18_an_active_reservation_blocks_others(ground: Ground) -> None:
    ground.reserve(limit=1)
    assert ground.jobs.reserve_job_slot(42, 1) is None
    ground.app.set_quota(42, Quota(max_concurrent=1))
    with pytest.raises(QuotaExceeded):
        ground.submit()  # which is not of the flow that has the slot


def test_s0_19_a_consumed_reservation_counts_no_more_and_its_job_does(ground: Ground) -> None:
    reservation = ground.reserve(limit=1)
    run = ground.submit()
    ground.jobs.consume_reservation(reservation, job_id=run.id)
    assert (ground.app.usage(42).reserved, ground.concurrent()) == (0, 1)
    assert ground.jobs.reserve_job_slot(42, 1) is None
    ground.finish(run)
    assert ground.concurrent() == 0
    assert ground.jobs.reserve_job_slot(42, 1) is not None


def test_s0_20_an_expired_reservation_is_ignored(ground: Ground) -> None:
    ground.reserve(limit=1, ttl=10)
    ground.clock.advance(10)
    assert ground.jobs.reserve_job_slot(42, 1) is None
    ground.clock.advance(MOMENT)
    assert ground.jobs.reserve_job_slot(42, 1) is not None


def test_s0_21_a_released_reservation_frees_the_slot_at_once(ground: Ground) -> None:
    for _ in range(3):
        assert ground.jobs.release_reservation(ground.reserve(limit=1))
    assert ground.concurrent() == ground.count("job_reservations") == 0


def test_s0_22_the_ttl_is_enforced_at_query_time(ground: Ground) -> None:
    """The row is still there, and counts for nothing."""
    ground.reserve()
    ground.app.set_quota(42, Quota(max_concurrent=1))
    ground.clock.advance(300 + MOMENT)
    assert ground.concurrent() == 0
    ground.submit()
    assert ground.count("job_reservations") == 1


def test_s0_23_expired_reservations_are_cleaned_automatically(ground: Ground) -> None:
    for user in (42, 42, 43):
        ground.reserve(user)
    ground.jobs.consume_reservation(ground.reserve(44))
    ground.clock.advance(300 + MOMENT)
    assert (ground.concurrent(), ground.tidy()) == (0, 0), "it counts no more; its job may just have been created"
    ground.clock.advance(3600)
    new = ground.reserve(42)
    assert ground.count("job_reservations") == 3, "its user's went with the next one's coming"
    assert ground.tidy() == 2
    assert ground.rows("SELECT reservation_id FROM job_reservations") == [(new,)]


def test_s0_24_the_relation_job_reservations(ground: Ground) -> None:
    reservation = ground.reserve()
    query: LiteralString = "SELECT reservation_id, user_id, created_at, expires_at, consumed FROM job_reservations"
    ((shown, user_id, created_at, expires_at, consumed),) = ground.rows(query)
    assert (shown, str(user_id), consumed) == (reservation, "42", 0)
    assert when(expires_at) - when(created_at) == timedelta(seconds=300)
    ground.jobs.consume_reservation(reservation)
    assert ground.rows(query)[0][-1] == 1
    indexes = indexed(ground, "semel_reservations")
    assert ("expires_us",) in indexes
    assert any("user_id" in columns for columns in indexes)


def test_s0_25_use_is_active_jobs_and_live_reservations_that_have_no_job_yet(ground: Ground) -> None:
    waiting, running, over = (ground.submit() for _ in range(3))
    ground.app.cancel(over.id)
    ground.lease()
    ground.reserve()
    assert ground.jobs.release_reservation(ground.reserve())
    ground.submit(reservation=ground.reserve())
    assert {ground.app.get(run.id).status for run in (waiting, running)} == {"PENDING", "RUNNING"}
    used = ground.app.usage(42)
    assert (used.concurrent, used.reserved) == (4, 1)
    assert [ground.jobs.reserve_job_slot(42, limit) is None for limit in (3, 4, 5)] == [True, True, False]


@pytest.mark.parametrize("quota", [None, Quota(max_concurrent=5)], ids=["limit of the flow", "quota of the app"])
def test_s0_25_in_the_documents_flow_a_submission_counts_once_at_every_moment(
    ground: Ground, quota: Quota | None
) -> None:
    """Five flows under a limit of five, all of them between create and consume at the same time."""
    ground.app.set_quota(42, quota)
    counted: list[int] = []
    consumed: list[bool] = []

    async def flow(store: AsyncJobStore, created: asyncio.Barrier, number: int) -> bool:
        reservation_id = await store.reserve_job_slot(user_id=42, max_concurrent=5, ttl_seconds=300)
        if reservation_id is None:
            return False
        try:
            await ground.app.aio.submit("train", {"number": number}, user=42)
            async with created:
                counted.append((await ground.app.aio.usage(42)).concurrent)
            consumed.append(await store.consume_reservation(reservation_id))
        except Exception:
            await store.release_reservation(reservation_id)
            raise
        return True

    async def main() -> None:
        store = AsyncJobStore(ground.url, clock=ground.clock)
        created = asyncio.Barrier(5)
        assert await asyncio.gather(*(flow(store, created, number) for number in range(5))) == [True] * 5
        assert not await flow(store, created, 5)
        await store.close()
        await ground.app.aio.close()

    asyncio.run(main())
    assert (counted, consumed) == ([5] * 5, [True] * 5)
    used = ground.app.usage(42)
    assert (used.concurrent, used.reserved) == (5, 0)


def test_s0_25_blocking_too_and_a_run_that_was_there_already_takes_no_second_slot(ground: Ground) -> None:
    for expected in (1, 1, 2):
        reservation = ground.jobs.reserve_job_slot(42, 2)
        assert reservation is not None
        ground.submit(number=expected)
        used = ground.app.usage(42)
        assert (used.concurrent, used.reserved) == (expected, 0)
        assert ground.jobs.consume_reservation(reservation) is True
    ground.clock.advance(3600)
    expired = ground.jobs.reserve_job_slot(43, 1, ttl_seconds=10)
    assert expired is not None
    ground.clock.advance(11)
    ground.submit(43)
    assert ground.jobs.consume_reservation(expired) is True, "its own job is no other's"


RESERVE_AND_STAY = """
from semel import JobStore
tell(JobStore(url, clock=lambda: now).reserve_job_slot(42, 1))
hear()
"""


def test_s0_26_the_reservation_of_a_killed_process_is_gone_after_5_minutes(ground: Ground) -> None:
    """It was killed between reserve and consume."""
    orphan = last_words(RESERVE_AND_STAY, url=ground.url, now=ground.clock())
    assert isinstance(orphan, str)
    ground.clock.advance(300)
    assert ground.jobs.reserve_job_slot(42, 1) is None
    ground.clock.advance(MOMENT)
    assert ground.jobs.reserve_job_slot(42, 1) is not None
    assert ground.jobs.consume_reservation(orphan) is False


# -- what a person with a database client sees ---------------------------------------------------------------------

CHECK_KEY: LiteralString = """
-- Check if a key exists (connect to jobs.db)
SELECT idempotency_key, job_id, created_at, expires_at
FROM idempotency_keys
WHERE idempotency_key = 'your-key-here';
"""
ACTIVE_KEYS: LiteralString = """
-- List all active keys
SELECT * FROM idempotency_keys
WHERE expires_at > datetime('now')
ORDER BY created_at DESC;
"""
ACTIVE_RESERVATIONS: LiteralString = """
-- Active (unconsumed, unexpired) reservations
SELECT reservation_id, user_id, created_at, expires_at
FROM job_reservations
WHERE consumed = 0 AND expires_at > datetime('now');
"""
SLOTS_PER_USER: LiteralString = """
-- Count active slots per user
SELECT user_id, COUNT(*) as active_reservations
FROM job_reservations
WHERE consumed = 0 AND expires_at > datetime('now')
GROUP BY user_id;
"""


def seed(ground: Ground, now: float) -> tuple[list[str], Run]:
    """Keys and reservations in every state on the real clock; the live reservations, and the run of the newest key."""
    ground.clock.us = round((now - DAY - 2) * 1e6)
    ground.jobs.store_idempotency_key("expired", "job-0", 42)
    ground.clock.us = round((now - 302) * 1e6)
    ground.reserve(42)
    ground.clock.us = round((now - DAY + 60) * 1e6)
    ground.jobs.store_idempotency_key("your-key-here", "job-1", 42)
    ground.clock.us = round((now - 240) * 1e6)
    live = [ground.reserve(43), ground.reserve(43), ground.reserve("ann")]
    ground.jobs.consume_reservation(ground.reserve(43))
    assert ground.jobs.release_reservation(ground.reserve(43))
    return live, ground.submit(42, number=1, idempotency_key="newest")


def test_s0_35_the_documents_debug_sql_runs_unchanged_on_the_file_and_tells_the_truth(grounds: Grounds) -> None:
    with grounds.empty("sqlite") as ground:
        live, run = seed(ground, datetime.now(UTC).timestamp())
        with closing(sqlite3.connect(ground.url.removeprefix("sqlite:///"))) as file:
            ((key, job_id, created_at, expires_at),) = file.execute(CHECK_KEY).fetchall()
            assert (key, job_id) == ("your-key-here", "job-1")
            assert when(expires_at) - when(created_at) == timedelta(hours=24)
            active = file.execute(ACTIVE_KEYS).fetchall()
            assert [row[:3] for row in active] == [("newest", run.id, 42), ("your-key-here", "job-1", 42)]
            assert {row[0] for row in file.execute(ACTIVE_RESERVATIONS)} == set(live)
            assert dict(file.execute(SLOTS_PER_USER).fetchall()) == {43: 2, "ann": 1}


COUNTED = """
    SELECT COUNT(*) FROM job_reservations
    WHERE user_id = ? AND expires_at > ? AND consumed = 0
"""
EXPIRING = "SELECT expires_at FROM job_reservations ORDER BY expires_at"


@pytest.mark.parametrize("zone", [UTC, None], ids=["aware", "naive"])
def test_s0_35_the_documents_count_by_isoformat_tells_the_truth_too(grounds: Grounds, zone: tzinfo | None) -> None:
    """Its text has a T where SQL's has a space; both are right, of what expires today and of what did."""
    with grounds.empty("sqlite") as ground:
        seed(ground, datetime.now(UTC).timestamp())
        with closing(sqlite3.connect(ground.url.removeprefix("sqlite:///"))) as file:
            isoformat = datetime.now(UTC).replace(tzinfo=zone).isoformat()
            counted = {user: file.execute(COUNTED, (user, isoformat)).fetchone()[0] for user in (42, 43, "ann")}
            assert counted == {42: 0, 43: 2, "ann": 1}
            assert dict(file.execute(SLOTS_PER_USER).fetchall()) == {43: 2, "ann": 1}
            expiring = [when(row[0]) for row in file.execute(EXPIRING)]
            assert expiring == sorted(expiring)


def test_s0_22_the_documents_count_by_isoformat_tells_the_truth_on_postgresql(grounds: Grounds) -> None:
    with grounds.empty("postgres") as ground:
        seed(ground, datetime.now(UTC).timestamp())
        with psycopg.connect(ground.url) as connection:
            query = COUNTED.replace("?", "%s").encode()
            for user, count in (("42", 0), ("43", 2), ("ann", 1)):
                assert connection.execute(query, (user, datetime.now(UTC).isoformat())).fetchone() == (count,)


def test_s0_35_the_same_relations_are_on_postgresql(grounds: Grounds) -> None:
    """PostgreSQL spells the current time in its own way; all else is the document's."""
    with grounds.empty("postgres") as ground:
        live, run = seed(ground, datetime.now(UTC).timestamp())

        def told(query: LiteralString) -> list[tuple[Any, ...]]:
            with psycopg.connect(ground.url) as connection:
                return connection.execute(query.replace("datetime('now')", "now()")).fetchall()

        assert [row[:2] for row in told(CHECK_KEY)] == [("your-key-here", "job-1")]
        assert [row[:3] for row in told(ACTIVE_KEYS)] == [("newest", run.id, "42"), ("your-key-here", "job-1", "42")]
        assert {row[0] for row in told(ACTIVE_RESERVATIONS)} == set(live)
        assert dict(told(SLOTS_PER_USER)) == {"43": 2, "ann": 1}
        ((run_id, status, attempts),) = told("SELECT id, status, attempt_count FROM model_runs")
        assert (str(run_id), status, attempts) == (run.id, "PENDING", 0)


# -- across processes, and the symptoms ----------------------------------------------------------------------------

STORE_AND_STAY = """
from semel import JobStore
store = JobStore(url, clock=lambda: now)
job = store.store_idempotency_key("ci-build-abc123", "job of the first", 42)
tell((job, store.reserve_job_slot(42, 1)))
hear()
"""


def test_s0_36_keys_and_slots_hold_across_processes_and_after_one_dies(ground: Ground) -> None:
    job, reservation = last_words(STORE_AND_STAY, url=ground.url, now=ground.clock())
    again, refused = last_words(STORE_AND_STAY, url=ground.url, now=ground.clock())
    assert (job, again, refused) == ("job of the first", "job of the first", None)
    assert ground.jobs.check_idempotency_key("ci-build-abc123") == "job of the first"
    assert ground.jobs.reserve_job_slot(42, 1) is None
    ground.jobs.consume_reservation(reservation)
    assert ground.jobs.reserve_job_slot(42, 1) is not None


def test_s0_36_eight_processes_with_one_key_make_one_job(ground: Ground) -> None:
    source = """
    from support.databases import open_app
    app = open_app(url)
    app.usage(0)
    tell("ready")
    hear()
    tell([app.submit("train", {"number": number}, user=42, idempotency_key=f"ci-{number}").id for number in range(5)])
    app.close()
    """
    with ExitStack() as stack:
        programs = [stack.enter_context(Program(source, url=ground.url)) for _ in range(8)]
        assert [program.hear() for program in programs] == ["ready"] * 8
        for program in programs:
            program.tell()
        answers = [program.hear() for program in programs]
    assert all(answer == answers[0] for answer in answers)
    assert len(set(answers[0])) == ground.count("model_runs") == 5


def test_s0_37_symptom_1_duplicates_come_without_keys(ground: Ground) -> None:
    first = ground.submit(number=1)
    ground.finish(first)
    assert ground.submit(number=1).id != first.id
    keyed = ground.submit(number=1, idempotency_key="key")
    ground.finish(keyed)
    assert ground.submit(number=1, idempotency_key="key").id == keyed.id


def test_s0_37_symptom_2_quota_exceeded_on_the_first_job_after_crashed_requests(ground: Ground) -> None:
    ground.app.set_quota(42, Quota(max_concurrent=2))
    for _ in range(2):
        ground.reserve(limit=2)  # and nobody comes back
    with pytest.raises(QuotaExceeded, match="Quota exceeded"):
        ground.submit()
    assert ground.count("model_runs") == 0
    ground.clock.advance(300 + MOMENT)
    assert ground.submit().status == "PENDING"


def test_s0_37_symptom_3_a_key_older_than_24_hours_does_not_match(ground: Ground) -> None:
    day, week = (ground.submit(number=1, idempotency_key=key, key_ttl=ttl) for key, ttl in [("a", DAY), ("b", 7 * DAY)])
    ground.clock.advance(DAY + MOMENT)
    assert ground.submit(number=1, idempotency_key="a").id != day.id
    assert ground.submit(number=1, idempotency_key="b").id == week.id


def test_s0_37_symptom_4_the_count_is_of_reservations_and_active_jobs(ground: Ground) -> None:
    runs = [ground.submit() for _ in range(3)]
    ground.reserve()
    assert ground.concurrent() == 4
    ground.reserve()
    assert ground.jobs.reserve_job_slot(42, 5) is None
    ground.app.cancel(runs[0].id)
    assert ground.jobs.reserve_job_slot(42, 5) is not None


# -- cost limits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", ["daily", "weekly", "monthly", "yearly"])
def test_s0_39_a_cost_limit_blocks_and_says_what_was_spent(ground: Ground, period: str) -> None:
    ground.app.set_quota(42, Quota(**{f"cost_{period}": 10}))  # type: ignore[arg-type]
    assert ground.submit(cost=7.5).cost_limit_warning is None
    with pytest.raises(CostLimitExceeded) as refused:
        ground.submit(cost=2.51)
    said = f"Cost limit exceeded: $7.50 spent of $10.00 {period} limit."
    assert str(refused.value) == f"{said} This job would cost $2.51."
    assert ground.submit(cost=2.5).cost_limit_warning == f"$10.00 spent of $10.00 {period} limit."
    with pytest.raises(CostLimitExceeded, match=rf"\$10\.00 spent of \$10\.00 {period} limit\."):
        ground.submit()
    assert ground.count("model_runs") == 2


def test_s0_39_a_cost_limit_warns_where_that_is_the_action_and_above_80_percent(ground: Ground) -> None:
    ground.app.set_quota(42, Quota(cost_monthly=10, action="warn"))
    assert ground.submit(cost=7.99).cost_limit_warning is None
    assert ground.submit(cost=0.01).cost_limit_warning == "$8.00 spent of $10.00 monthly limit."
    assert ground.submit(cost=100).cost_limit_warning == "$108.00 spent of $10.00 monthly limit."
    ground.app.set_quota(43, Quota(cost_monthly=10))
    assert ground.submit(43, cost=7.99).cost_limit_warning is None
    assert ground.submit(43, cost=1).cost_limit_warning == "$8.99 spent of $10.00 monthly limit."
