"""What a submission writes, and what it finds instead: a key is recognised by a read before the transaction, if the
last batch had repeats, and in it, and both judge alike."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

from semel import App, KeyReused, Quota, QuotaExceeded, Run, RunNotFound, SemelError
from semel._concurrency.sync import run_sync
from semel.db.schema import submitted
from semel.errors import ReservationLost
from semel.runs.job_store import close_reservation
from semel.runs.store import lease
from semel.runs.store.lease import LeaseRequest
from semel.runs.store.submit import Created, Existing, Submission
from semel.runs.submission import SubmitOptions
from semel.runs.types import INTERNAL_QUEUE
from support.databases import DATABASES, Databases, TestDatabase, held, refused
from support.waiting import eventually

DAY = 86400
WINDOW = 600
"""Seconds for which a payload finds its run."""


def warmed(database: TestDatabase) -> App:
    """An app that reads the keys first, because its last submission was a repeat."""
    app = database.app
    _, again = (app.submit("train", {"number": 0}, idempotency_key="warm", user=42) for _ in range(2))
    assert again.replayed
    return app


def test_a_key_with_another_payload_is_refused_on_the_fast_path(database: TestDatabase) -> None:
    app = warmed(database)
    with pytest.raises(KeyReused, match="warm"):
        app.submit("train", {"number": 1}, idempotency_key="warm", user=42)
    assert database.count("semel_runs") == 1


def test_a_key_with_another_payload_is_refused_on_the_slow_path(database: TestDatabase) -> None:
    warmed(database)
    with pytest.raises(KeyReused, match="warm"):
        database.open_app().submit("train", {"number": 1}, idempotency_key="warm", user=42)
    assert database.count("semel_runs") == 1


def test_after_repeats_a_run_without_a_key_is_new(database: TestDatabase) -> None:
    app = warmed(database)
    assert not any(app.submit("train", dedupe=False).replayed for _ in range(2))
    assert database.count("semel_runs") == 3


@pytest.mark.parametrize("how", [{"idempotency_key": "k"}, {"idempotency_key": "k", "dedupe": True}, {}], ids=str)
@pytest.mark.parametrize("other", [{"tenant": "acme"}, {"user": 43}], ids=str)
@pytest.mark.parametrize("path", ["fast", "slow"])
def test_a_key_and_a_payload_find_no_run_of_another_tenant_or_user(
    database: TestDatabase, how: dict[str, object], other: dict[str, object], path: str
) -> None:
    app = warmed(database) if path == "fast" else database.app
    theirs = {"user": 42, **other}
    mine = app.submit("train", {"number": 1}, **{"user": 42, **how})  # type: ignore[arg-type]
    if path == "fast":
        warmed(database)
    foreign = app.submit("train", {"number": 1}, **theirs, **how)  # type: ignore[arg-type]
    assert (foreign.replayed, foreign.id != mine.id) == (False, True)
    again = app.submit("train", {"number": 1}, **theirs, **how)  # type: ignore[arg-type]
    assert (again.id, again.replayed, again.tenant) == (foreign.id, True, other.get("tenant", ""))


@pytest.mark.parametrize("how", [{"idempotency_key": "k"}, {}], ids=str)
def test_submissions_of_one_batch_with_equal_keys_are_one_run_for_each_tenant_and_user(
    database: TestDatabase, how: dict[str, str]
) -> None:
    asked = {"model": "train", "parameters": {"number": 1}, **how}
    owners: list[dict[str, Any]] = [{"user": 42}, {"user": 43}, {"user": 42, "tenant": "acme"}]
    made = database.app.submit_many([{**asked, **owner} for owner in (*owners, *owners)])
    ids = [each.id for each in made if isinstance(each, Run)]
    assert len(set(ids[:3])) == 3
    assert ids[3:] == ids[:3]
    assert [(each.user, each.tenant) for each in made if isinstance(each, Run)][:3] == [
        ("42", ""),
        ("43", ""),
        ("42", "acme"),
    ]


# -- on one kind of database: the statements are the other's too -------------------------------------------------------


@pytest.fixture
def sqlite(databases: Databases) -> Iterator[TestDatabase]:
    with databases.empty("sqlite") as database:
        yield database


def submission(database: TestDatabase, number: int = 0, **options: Any) -> Submission:
    """A submission that is not sent yet."""
    return database.app._engine._builder.submission("train", {"number": number}, SubmitOptions(**options))


def send(database: TestDatabase, *submissions: Submission) -> list[Any]:
    answers: list[Any] = run_sync(database.store.submit_many(submissions))
    return answers


def test_a_submission_that_is_sent_again_while_the_first_is_under_way_is_one_run(databases: Databases) -> None:
    """Its connection was lost, and the server goes on with it: the second waits for its end, and finds the run."""
    with databases.empty("postgres") as database, ThreadPoolExecutor(1) as pool:
        asked = submission(database)
        columns = ", ".join(column.name for column in submitted.c if column.name != "id")
        template = database.app.submit("train", {"number": 1})
        with psycopg.connect(database.url) as first:
            copied = f"INSERT INTO semel_runs (id, {columns}) SELECT %s, {columns} FROM semel_runs"
            first.execute(copied.encode(), [asked.id])
            second = pool.submit(copy_context().run, send, database, asked)
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'transactionid'"
            eventually(lambda: database.rows(waiting) == [(1,)])
            first.commit()
        (answer,) = second.result()
        assert (type(answer), answer.id) == (Existing, asked.id)
        assert database.count("semel_runs") == 2
        assert template.id != asked.id


def test_a_key_that_another_takes_before_it_can_name_a_run_that_was_found_is_the_others(databases: Databases) -> None:
    """The run of a payload is found, and is to be named by a second key, which is free until then."""
    with databases.empty("postgres") as database, ThreadPoolExecutor(1) as pool:
        asked = [submission(database, dedupe=True, idempotency_key=key, user=42) for key in ("mine", "theirs")]
        with psycopg.connect(database.url) as other:
            other.execute(
                """
INSERT INTO semel_keys (scope, key, fingerprint, state, fence, attempt, unknown, awaited, created_us, lease_us,
  lease_until_us, expires_us, completed_us, kind, value)
SELECT 'runs:42', 'theirs', repeat('0', 64), 'completed', nextval('semel_fence'), '', false, false, us, 0, us,
  us + 1000000000, us, 'run', ''
FROM (SELECT CAST(%s AS bigint) AS us) AS clock""",
                [database.clock.us],
            )
            sent = pool.submit(copy_context().run, send, database, *asked)
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'transactionid'"
            eventually(lambda: database.rows(waiting) == [(1,)])
            other.commit()
        mine, theirs = sent.result()
        assert (type(mine), type(theirs)) == (Created, KeyReused)
        assert database.count("semel_runs") == 1


@pytest.mark.parametrize("kind", DATABASES)
@pytest.mark.parametrize("many", [3, 64, 65, 150])
def test_payloads_in_a_batch_of_any_size_name_the_runs_under_way(databases: Databases, kind: str, many: int) -> None:
    with databases.empty(kind) as database:
        first = database.app.submit("train", {"number": 0})
        numbers = [*range(many), 1, 2]
        found = database.app.submit_many([{"model": "train", "parameters": {"number": number}} for number in numbers])
        runs = [run for run in found if isinstance(run, Run)]
        assert [run.replayed for run in runs] == [True, *[False] * (many - 1), True, True]
        assert [run.id for run in runs[-2:]] == [runs[1].id, runs[2].id]
        assert runs[0].id == first.id
        assert database.count("semel_runs") == database.count("semel_active") == many


def test_a_run_is_ready_at_once_or_after_its_delay(sqlite: TestDatabase) -> None:
    later, now = sqlite.submit(delay=5), sqlite.submit(key_ttl=None)
    assert (now.due_us, later.due_us) == (sqlite.clock.us, sqlite.clock.us + 5_000_000)
    assert [sqlite.app.get(run.id).due_us for run in (now, later)] == [now.due_us, later.due_us]
    request = LeaseRequest("worker-1", ("default",), ["train"], 10)
    assert [each.id for each in sqlite.do(lease.lease, request)] == [now.id]


def test_what_a_submission_says_is_stored_as_it_is_returned(sqlite: TestDatabase) -> None:
    options: dict[str, Any] = {"tenant": "acme", "queue": "other", "priority": 3, "cost": 2.5}
    for more in ({}, {"idempotency_key": "key"}, {"idempotency_key": "own", "dedupe": True}, {"dedupe": False}):
        run = sqlite.submit(7, **options, **more)
        stored = sqlite.app.get(run.id)
        assert stored.idempotency_key == more.get("idempotency_key")
        assert (run.key_expires_us is None) == ("idempotency_key" not in more)
        assert sqlite.app.submit("train", run.parameters, user=7, **options, dedupe=False).id != run.id
        assert [getattr(stored, name) for name in Run.__struct_fields__ if name != "key_expires_us"] == [
            getattr(run, name) for name in Run.__struct_fields__ if name != "key_expires_us"
        ]


@pytest.mark.parametrize("how", ["a repeat", "the same batch", "a lost reply"])
@pytest.mark.parametrize("dedupe", [None, True])
def test_who_has_a_key_is_told_until_when_it_names_the_run(sqlite: TestDatabase, how: str, dedupe: bool | None) -> None:
    asked: dict[str, Any] = {"idempotency_key": "key", "key_ttl": DAY, "dedupe": dedupe}
    expected = sqlite.clock.us + DAY * 1_000_000
    if how == "the same batch":
        runs = sqlite.app.submit_many([{"model": "train", **asked}] * 2)
    elif how == "a repeat":
        runs = []
        for _ in range(3):
            runs.append(sqlite.app.submit("train", **asked))
            sqlite.clock.advance(5)
    else:
        first = submission(sqlite, **asked)
        send(sqlite, first)
        sqlite.clock.advance(5)
        assert send(sqlite, first) == [Existing(first.id, expires_us=expected)]
        return
    assert [run.key_expires_us for run in runs if isinstance(run, Run)] == [expected] * len(runs)


@pytest.mark.parametrize("fast", [False, True], ids=["slow path", "fast path"])
def test_a_key_that_finds_a_run_by_its_payload_names_it_from_then_on(sqlite: TestDatabase, fast: bool) -> None:
    first = sqlite.app.submit("train")
    if fast:
        warmed(sqlite)
    sqlite.clock.advance(5)
    asked: dict[str, Any] = {"idempotency_key": "key", "key_ttl": DAY, "dedupe": True}
    found = sqlite.app.submit("train", **asked)
    assert (found.id, found.key_expires_us) == (first.id, sqlite.clock.us + DAY * 1_000_000)
    expires = found.key_expires_us
    sqlite.clock.advance(5)
    again = sqlite.app.submit("train", **asked)
    assert (again.id, again.key_expires_us) == (first.id, expires), "the second try does not prolong it"
    sqlite.clock.advance(WINDOW)
    late = sqlite.app.submit("train", **asked)
    assert (late.id, late.key_expires_us) == (first.id, expires), "the payload finds it no more, the key does"
    assert sqlite.app.submit("train").id != first.id


def test_who_has_only_a_payload_is_told_of_no_end(sqlite: TestDatabase) -> None:
    runs = [sqlite.app.submit("train") for _ in range(3)]
    assert len({run.id for run in runs}) == 1
    assert [run.key_expires_us for run in runs] == [None] * 3


def test_a_submission_that_is_sent_twice_is_stored_once(sqlite: TestDatabase) -> None:
    """With a key, by its payload, or with neither: its id is its own."""
    asked = [
        submission(sqlite, n, **each) for n, each in enumerate(({"idempotency_key": "key"}, {}, {"dedupe": False}))
    ]
    first, second = send(sqlite, *asked), send(sqlite, *asked)
    assert [isinstance(each, Created) for each in first] == [True] * 3
    assert [(isinstance(each, Existing), each.id) for each in second] == [(True, each.id) for each in asked]
    assert len(sqlite.app.runs().runs) == 3
    again, new = send(sqlite, asked[2], submission(sqlite, dedupe=False))
    assert (type(again), again.id, type(new)) == (Existing, asked[2].id, Created)


def test_repeats_of_a_batch_are_answered_like_the_first(sqlite: TestDatabase) -> None:
    """The same key and payload, another payload, the payload alone, and neither."""
    asked = [
        submission(sqlite, 1, idempotency_key="key"),
        submission(sqlite, 1, idempotency_key="key"),
        submission(sqlite, 2, idempotency_key="key"),
        submission(sqlite, 1),
        submission(sqlite, 1),
        submission(sqlite, 1, dedupe=False),
        submission(sqlite, 1, dedupe=False),
    ]
    first, repeat, reused, plain, found, *apart = send(sqlite, *asked)
    assert [each.id for each in (first, repeat, plain, found, *apart)] == [asked[n].id for n in (0, 0, 3, 3, 5, 6)]
    assert [type(each) for each in (first, repeat, plain, found, *apart)] == [
        *(Created, Existing, Created, Existing),
        *(Created, Created),
    ]
    assert isinstance(reused, KeyReused)
    assert "'key' belongs to other work" in str(reused)


def test_a_key_that_came_too_late_leaves_nothing_of_its_payload(sqlite: TestDatabase) -> None:
    """Two submissions with one key and two payloads: of the second nothing is stored, not even that it was there."""
    asked = [submission(sqlite, n, idempotency_key="key", dedupe=True, key_ttl=DAY) for n in (1, 2)]
    first, second = send(sqlite, *asked)
    assert (first.id, type(second)) == (asked[0].id, KeyReused)
    sqlite.clock.advance(2 * DAY)
    assert sqlite.tidy() == 1, "the key"
    assert sqlite.count("semel_runs") == sqlite.count("semel_active") == 1


def test_a_batch_has_new_runs_repeats_and_refusals_each_in_its_place(sqlite: TestDatabase) -> None:
    old = sqlite.app.submit("train", {"number": 1}, idempotency_key="key")
    for _ in range(2):  # the first time in the transaction, then before it
        answers = sqlite.app.submit_many(
            [
                {"model": "train", "parameters": {"number": 2}, "idempotency_key": "key"},
                {"model": "train", "parameters": {"number": 1}, "idempotency_key": "key"},
                {"model": "train", "parameters": {"number": 3}, "dedupe": False},
            ]
        )
        assert [type(each) for each in answers] == [KeyReused, Run, Run]
        runs = [each for each in answers if not isinstance(each, SemelError)]
        assert [(run.id == old.id, run.replayed) for run in runs] == [(True, True), (False, False)]
    assert len(sqlite.app.runs().runs) == 3


@pytest.mark.parametrize("path", ["fast", "slow"])
def test_a_repeat_gives_its_reservation_back_on_either_path(sqlite: TestDatabase, path: str) -> None:
    app = warmed(sqlite) if path == "fast" else sqlite.app
    app.submit("train", idempotency_key="key", user=42)
    if path == "fast":
        warmed(sqlite)
    used = sqlite.concurrent()
    again = app.submit("train", idempotency_key="key", user=42, reservation=sqlite.reserve())
    assert (again.replayed, sqlite.concurrent()) == (True, used)


def test_a_run_takes_the_slot_that_was_reserved_just_before_it(sqlite: TestDatabase) -> None:
    """In the same thread, without a word: the second finds no slot, and one that has ended gives none."""

    def flow() -> None:
        sqlite.app.set_quota(42, Quota(max_concurrent=1))
        reservation = sqlite.jobs.reserve_job_slot(42, 1)
        assert reservation is not None
        run = sqlite.submit()
        assert sqlite.concurrent() == 1
        refused(sqlite)
        assert sqlite.jobs.consume_reservation(reservation, job_id=run.id) is True
        assert sqlite.concurrent() == 1
        sqlite.app.cancel(run.id)
        assert sqlite.jobs.reserve_job_slot(42, 1, ttl_seconds=10) is not None
        sqlite.clock.advance(11)
        other = sqlite.open_jobs().reserve_job_slot(42, 1)
        close_reservation(other or "")
        refused(sqlite)

    copy_context().run(flow)


def test_a_batch_takes_a_reserved_slot_once(sqlite: TestDatabase) -> None:
    """Tasks that began after the reservation all know of it."""
    sqlite.app.set_quota(42, Quota(max_concurrent=1))
    slot = sqlite.reserve(limit=1)
    asked = [replace(submission(sqlite, number, user=42), slot=slot) for number in range(2)]
    assert [type(each) for each in send(sqlite, *asked)] == [Created, QuotaExceeded]
    assert sqlite.concurrent() == 1


@pytest.mark.parametrize("quota", [None, Quota(max_concurrent=1)], ids=["no quota", "quota"])
def test_a_reservation_that_ends_while_the_lock_is_waited_for_is_lost(
    sqlite: TestDatabase, quota: Quota | None
) -> None:
    sqlite.app.set_quota(42, quota)
    reservation = sqlite.reserve(limit=1, ttl=10)
    times = [sqlite.clock.us + seconds * 1_000_000 for seconds in (11, 9)]
    app = sqlite.open_app(clock=lambda: times.pop() if len(times) > 1 else times[0])
    with pytest.raises(ReservationLost, match="has expired"):
        app.submit("train", user=42, reservation=reservation)


def test_a_repeat_is_the_job_of_the_slot_that_was_reserved_just_before_it(sqlite: TestDatabase) -> None:
    def flow() -> None:
        run = sqlite.submit(idempotency_key="key", number=1)
        reservation = sqlite.jobs.reserve_job_slot(42, 5)
        assert reservation is not None
        assert sqlite.concurrent() == 2
        assert sqlite.submit(idempotency_key="key", number=1).id == run.id
        assert sqlite.concurrent() == 1, "both are the same job"

    copy_context().run(flow)


def test_a_retry_of_a_run_that_was_removed_is_refused_beside_others(sqlite: TestDatabase) -> None:
    there, gone = sqlite.submit(idempotency_key="key"), sqlite.submit(dedupe=False)
    for run in (there, gone):
        sqlite.app.cancel(run.id)
    builder = sqlite.app._engine._builder
    retries = [builder.submission("train", run.parameters, SubmitOptions(), retry_of=run.id) for run in (there, gone)]
    sqlite.clock.advance(1)
    assert sqlite.app.purge(0) == 1, "the key keeps the other"
    retry, refused, other = send(sqlite, *retries, submission(sqlite, 7))
    assert [type(each) for each in (retry, refused, other)] == [Created, RunNotFound, Created]
    assert sqlite.app.get(retry.id).retry_of == there.id
    unkeyed = builder.submission("train", gone.parameters, SubmitOptions(dedupe=False), retry_of=gone.id)
    assert [type(each) for each in send(sqlite, unkeyed)] == [RunNotFound]


def test_a_retry_has_the_data_of_its_run_and_others_have_none(database: TestDatabase) -> None:
    run = database.submit()
    database.write("UPDATE semel_active SET data_ref = 'data/1'")
    other = database.submit()
    database.app.cancel(run.id)
    retry = database.app.retry(run.id)
    assert [database.app.get(each.id).data_ref for each in (retry, other)] == ["data/1", None]


# -- jobs --------------------------------------------------------------------------------------------------------------


def test_a_job_is_stored_with_its_run_and_with_the_run_that_uploads_its_data(sqlite: TestDatabase) -> None:
    sqlite.submit()
    run = held(sqlite)
    (upload,) = sqlite.app.runs(queue=INTERNAL_QUEUE).runs
    assert (upload.model, upload.parameters, upload.user) == ("semel.upload", {"job_id": run.id}, "")
    assert (run.held, sqlite.app.get(run.id).held) == (True, True)
    stored = sqlite.rows(
        "SELECT run_id, user_id, provider, config, created_us, data, data_state, upload_id FROM semel_jobs"
    )
    assert stored == [(run.id, "42", "local", "config", run.created_us, "/data", "uploading", upload.id)]
    steps = [[step.step for step in sqlite.app.timeline(each.id)] for each in (run, upload)]
    assert steps == [["created"], ["created"]]


def test_a_job_without_data_has_no_upload_and_can_begin(sqlite: TestDatabase) -> None:
    run = held(sqlite, data=None)
    assert not run.held
    assert sqlite.app.runs(queue=INTERNAL_QUEUE).runs == []
    assert sqlite.rows("SELECT run_id, data_state, upload_id FROM semel_jobs") == [(run.id, None, None)]
    assert [each.id for each in sqlite.lease()] == [run.id]


@pytest.mark.parametrize("kind", DATABASES)
def test_a_key_names_its_run_although_the_payload_names_another(databases: Databases, kind: str) -> None:
    with databases.empty(kind) as database:
        first = database.submit(number=1, idempotency_key="k", dedupe=True)
        database.finish(first)
        under_way = database.submit(number=1)
        assert under_way.id != first.id
        asked: dict[str, Any] = {"model": "train", "parameters": {"number": 1}, "user": 42, "dedupe": True}
        for _ in range(2):
            assert database.submit(number=1, idempotency_key="k", dedupe=True).id == first.id
            keyed, plain = database.app.submit_many([{**asked, "idempotency_key": "k"}, asked])
            assert isinstance(keyed, Run)
            assert isinstance(plain, Run)
            assert (keyed.id, plain.id) == (first.id, under_way.id)
