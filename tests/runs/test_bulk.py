"""Bulk submission: what is the same in many submissions is checked and sent once, and nothing of it shows."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from itertools import count
from typing import Any
from uuid import RFC_4122, UUID

import pytest
from msgspec.structs import replace

from semel import App, Quota, QuotaExceeded, Run, SemelError
from semel._concurrency.sync import run_sync
from semel.db.dialect import Statement
from semel.errors import InvalidParameters, InvalidRequest, StoreUnavailable
from semel.runs.models.model import Registry, make_model
from semel.runs.store.submit import Created, Existing, Submission
from semel.runs.submission import BulkBuilder, SubmissionBuilder
from semel.runs.types import Artifact, DedupePolicy, new_id, new_ids
from support.databases import TestDatabase


async def forecast(scenario: str = "base", horizon: int = 1) -> None:
    """A model to be submitted."""


def builder(window: float = 600) -> SubmissionBuilder:
    registry = Registry()
    registry.add(make_model("forecast", forecast, summary="scenario", cost=2))
    return SubmissionBuilder(registry, DedupePolicy(dedupe_window=window))


def stripped(submission: Submission) -> Submission:
    return replace(submission, id="", group=0)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"user": 42, "tenant": "acme"},
    {"queue": "night", "priority": 7, "delay": 1.5, "cost": 3},
    {"dedupe": False},
    {"dedupe": True, "key_ttl": 60},
    {"reservation": "slot"},
]


@pytest.mark.parametrize("window", [600, 0])
@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_submission_like_an_earlier_one_is_made_as_if_it_were_alone(
    options: dict[str, Any], keyed: bool, window: float
) -> None:
    alone = builder(window)
    many = BulkBuilder(alone)
    payloads: list[dict[str, Any]] = [{}, {"scenario": "a"}, {"scenario": "b", "horizon": 24.0}, {}, {"scenario": "a"}]
    for place, parameters in enumerate(payloads):
        key = {"idempotency_key": f"key-{place}"} if keyed else {}
        asked = {"model": "forecast", "parameters": parameters, **options, **key}
        assert stripped(many.from_mapping(asked)) == stripped(alone.from_mapping(asked))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_submission_with_a_key_is_not_like_one_without(options: dict[str, Any]) -> None:
    alone = builder()
    many = BulkBuilder(alone)
    groups = []
    for key in ("a", None, "b", None):
        asked = {"model": "forecast", **options, **({} if key is None else {"idempotency_key": key})}
        made = many.from_mapping(asked)
        assert stripped(made) == stripped(alone.from_mapping(asked))
        groups.append(made.group)
    assert groups == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"priority": 1}, {"priority": True}),
        ({"user": 1}, {"user": True}),
        ({"delay": 0.0}, {"delay": False}),
        ({}, {"queue": []}),
        ({"idempotency_key": "k"}, {"idempotency_key": ""}),
        ({}, {"idempotency_key": ""}),
        ({}, {"modle": "forecast"}),
    ],
    ids=str,
)
def test_what_is_invalid_is_refused_after_something_that_looks_the_same(
    good: dict[str, Any], bad: dict[str, Any]
) -> None:
    many = BulkBuilder(builder())
    many.from_mapping({"model": "forecast", **good})
    with pytest.raises(InvalidRequest):
        many.from_mapping({"model": "forecast", **bad})


def test_invalid_parameters_are_refused_after_valid_ones() -> None:
    many = BulkBuilder(builder())
    many.from_mapping({"model": "forecast", "parameters": {"horizon": 1}})
    with pytest.raises(InvalidParameters, match="horizon"):
        many.from_mapping({"model": "forecast", "parameters": {"horizon": "long"}})


def test_a_list_of_pairs_is_not_a_mapping() -> None:
    many = BulkBuilder(builder())
    many.from_mapping({"model": "forecast"})
    with pytest.raises(InvalidRequest, match="is a mapping"):
        many.from_mapping([("model", "forecast")])  # type: ignore[arg-type]


def test_ids_ascend_in_the_order_of_the_call_whatever_the_options_are() -> None:
    many = BulkBuilder(builder())
    made = [many.from_mapping({"model": "forecast", "user": place % 7}).id for place in range(500)]
    assert made == sorted(set(made))
    assert new_id() > made[-1]


def test_ids_are_uuids_of_version_7_that_begin_with_the_time() -> None:
    before, ids, after = new_id(), new_ids(5000), new_id()
    assert [before, *ids, after] == sorted({before, *ids, after})
    for each in map(UUID, ids):
        assert (each.version, each.variant) == (7, RFC_4122)
    assert len({each[-12:] for each in ids}) == 5000


@pytest.mark.parametrize(
    "rows",
    [
        [("a", 1, "x"), ("b", 1, "x"), ("c", 1, "x")],
        [("a", None, "x"), ("b", None, "y")],
        [("a", 1, None), ("b", None, None), ("c", 1, "")],
        [("a", 2, "x")],
        [("a", 1, "x"), ("a", 1, "x")],
    ],
    ids=str,
)
def test_a_statement_gets_every_row_of_its_batch(database: TestDatabase, rows: list[tuple[Any, ...]]) -> None:
    columns = {"in_name": "text", "in_number": "integer", "in_text": "text"}
    statement = Statement(lambda w: f"SELECT in_name, in_number, in_text FROM {w.batch(columns)}", columns)
    found = run_sync(database.store.read(statement.rows, rows))
    assert sorted(map(tuple, found), key=str) == sorted(rows, key=str)


def ids_of(answers: list[Run | SemelError]) -> list[str]:
    assert all(isinstance(each, Run) and not each.replayed for each in answers)
    return [each.id for each in answers if isinstance(each, Run)]


async def submitted(app: App, count: int, **options: Any) -> list[Run | SemelError]:
    try:
        return await app.aio.submit_many([{"model": "train", "dedupe": False, **options}] * count)
    finally:
        await app.aio.close()


# -- what is stored, and what is returned ------------------------------------------------------------------------------

ALIKE: list[dict[str, Any]] = [
    {"parameters": {"scenario": "a"}},
    {"parameters": {"scenario": "b", "horizon": 24.0}},
    {},
    {"parameters": {"scenario": "a"}},
]
MIXED: list[dict[str, Any]] = [
    {"priority": 7, "queue": "night"},
    {"priority": 7, "queue": "night", "parameters": {"scenario": "b"}},
    {"delay": 1.5, "cost": 3},
    {"tenant": "acme", "user": 42},
    {"tenant": "acme", "user": 43},
    {"priority": 7, "queue": "night"},
]
SHARED: list[dict[str, Any]] = [
    {},
    {"priority": 7, "queue": "night"},
    {"delay": 1.5, "cost": 3},
    {"tenant": "acme", "user": 42},
    {"key_ttl": 60, "user": 42},
]


def app_with_forecast(database: TestDatabase, **options: Any) -> App:
    app = database.open_app(**options)
    app.model("forecast", summary="scenario", cost=2, lease=30, max_attempts=5, max_lost=4, stall_after=9)(forecast)
    return app


def stored(database: TestDatabase, run: Run | SemelError) -> list[str]:
    """The rows of a run, without its id and what tells its key from others."""
    assert isinstance(run, Run)
    rows = database.rows("SELECT * FROM semel_runs") + database.rows("SELECT * FROM semel_active")
    texts = [repr(row) for row in rows if str(run.id) in repr(row)]
    assert len(texts) == 2
    return [text.replace(run.id, "").replace("bulk-", "").replace("alone-", "") for text in texts]


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize(
    "asked", [*([{**options, **each} for each in ALIKE] for options in SHARED), MIXED], ids=lambda asked: str(asked[0])
)
def test_the_rows_of_runs_that_are_submitted_in_bulk_are_those_of_runs_submitted_alone(
    database: TestDatabase, asked: list[dict[str, Any]], keyed: bool
) -> None:
    app = app_with_forecast(database, dedupe_window=0)

    def named(how: str) -> list[dict[str, Any]]:
        keys = [{"idempotency_key": f"{how}-{place}"} if keyed else {} for place in range(len(asked))]
        return [{"model": "forecast", **each, **key} for each, key in zip(asked, keys, strict=True)]

    alone = [app.submit(**each) for each in named("alone")]
    bulk = app.submit_many(named("bulk"))
    assert len({*ids_of(bulk), *(run.id for run in alone)}) == 2 * len(asked)
    assert [stored(database, run) for run in bulk] == [stored(database, run) for run in alone]


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("asked", [ALIKE * 3, MIXED * 2], ids=["alike", "mixed"])
def test_what_is_returned_for_a_new_run_is_what_is_stored_of_it(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch, asked: list[dict[str, Any]], keyed: bool
) -> None:
    monkeypatch.setattr("semel.runs.store._BULK", 4)
    ticks = count(database.clock.us, 1_000_000)  # each batch has its own time
    app = app_with_forecast(database, dedupe_window=0, clock=lambda: next(ticks))
    keys = [{"idempotency_key": f"key-{place}"} if keyed else {} for place in range(12)]
    runs = app.submit_many([{"model": "forecast", **each, **key} for each, key in zip(asked, keys, strict=True)])
    assert len({run.created_us for run in runs if isinstance(run, Run)}) == 3
    for run in runs:
        assert isinstance(run, Run)
        assert (run.key_expires_us is not None) is keyed
        assert replace(run, key_expires_us=None) == app.get(run.id)


def test_the_lists_of_a_run_are_its_own(database: TestDatabase) -> None:
    runs = [run for run in database.app.submit_many([{"model": "train", "dedupe": False}] * 3) if isinstance(run, Run)]
    runs[0].warnings.append("mine")
    runs[0].quota_warnings.append("mine")
    runs[0].artifacts.append(Artifact("mine", "ref", 1, "digest"))
    for run in runs[1:]:
        assert (run.warnings, run.quota_warnings, run.artifacts) == ([], [], [])


@pytest.mark.parametrize("publish", [False, True])
@pytest.mark.parametrize("asked", [[{}] * 3, [{}, {"queue": "night"}, {}]], ids=["alike", "mixed"])
def test_the_events_of_new_runs_are_published_if_somebody_publishes(
    database: TestDatabase, asked: list[dict[str, Any]], publish: bool
) -> None:
    app = database.open_app(publish=(lambda event: None) if publish else None)
    made = ids_of(app.submit_many([{"model": "train", "dedupe": False, **each} for each in asked]))
    told = {str(run_id) for (run_id,) in database.rows("SELECT run_id FROM semel_outbox WHERE unpublished")}
    assert told == (set(made) if publish else set())


@pytest.mark.parametrize("options", [{}, {"queue": "night"}], ids=["alike", "mixed"])
def test_runs_that_were_written_before_are_found_and_the_others_are_written(
    database: TestDatabase, options: dict[str, Any]
) -> None:
    """The reply to a part of them was lost, and they are sent again with others."""
    many = BulkBuilder(database.app._engine._builder)
    asked = [many.from_mapping({"model": "train", "dedupe": False, **(options if n == 3 else {})}) for n in range(5)]
    run_sync(database.store.submit_many(asked[1:4]))
    answers = run_sync(database.store.submit_many(asked))
    assert [type(each) for each in answers] == [Created, Existing, Existing, Existing, Created]
    assert [each.id for each in answers if not isinstance(each, SemelError)] == [each.id for each in asked]
    assert database.count("semel_runs") == database.count("semel_active") == 5


def reserve_and_submit(database: TestDatabase) -> list[Run | SemelError]:
    database.jobs.reserve_job_slot(42, 1)
    return database.app.submit_many([{"model": "train", "dedupe": False, "user": 42}] * 3)


def test_the_first_of_many_runs_takes_the_slot_that_their_flow_reserved(database: TestDatabase) -> None:
    database.app.set_quota(42, Quota(max_concurrent=1))
    first, *others = copy_context().run(reserve_and_submit, database)
    assert isinstance(first, Run)
    assert [type(each) for each in others] == [QuotaExceeded] * 2
    assert database.count("semel_runs") == 1


def test_the_slot_is_the_first_run_s_too_where_there_are_no_quotas(database: TestDatabase) -> None:
    first, *_ = ids_of(copy_context().run(reserve_and_submit, database))
    assert [str(run_id) for (run_id,) in database.rows("SELECT job_id FROM semel_reservations")] == [first]
    assert database.count("semel_runs") == database.concurrent() == 3


def test_each_run_has_its_own_warnings(database: TestDatabase) -> None:
    quota = Quota(max_concurrent=2, cost_daily=10, action="warn")
    asked: dict[str, Any] = {"model": "train", "dedupe": False, "cost": 3}
    for user in (42, 43):
        database.app.set_quota(user, quota)
    alone = [database.app.submit(**asked, user=42) for _ in range(5)]
    bulk = [run for run in database.app.submit_many([{**asked, "user": 43}] * 5) if isinstance(run, Run)]
    warned = [(run.quota_warnings, run.cost_limit_warning) for run in bulk]
    assert warned == [(run.quota_warnings, run.cost_limit_warning) for run in alone]
    assert len(set(map(str, warned))) > 3


def test_one_invalid_submission_is_the_end_of_a_strict_call_before_anything_is_stored(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.runs.store._BULK", 2)
    good, bad = {"model": "train", "dedupe": False}, {"model": "train", "parameters": {"number": "x"}}
    asked = [*[good] * 6, bad, good, good]
    with pytest.raises(InvalidParameters, match="submission 6"):
        database.app.submit_many(asked)
    assert database.count("semel_runs") == 0
    answers = database.app.submit_many(asked, strict=False)
    assert isinstance(answers.pop(6), InvalidParameters)
    assert len(ids_of(answers)) == database.count("semel_runs") == 8


def test_repeats_and_new_runs_are_returned_in_the_order_of_the_call(database: TestDatabase) -> None:
    def submitted(*keys: str) -> list[tuple[str | None, bool]]:
        runs = database.app.submit_many([{"model": "train", "idempotency_key": key} for key in keys])
        return [(run.idempotency_key, run.replayed) for run in runs if isinstance(run, Run)]

    submitted("b", "d")
    assert submitted("d", "b") == [("d", True), ("b", True)]  # from now on the keys are read first
    assert submitted("a", "b", "c", "d") == [("a", False), ("b", True), ("c", False), ("d", True)]


# -- two batches at a time ---------------------------------------------------------------------------------------------


class Watched:
    """Watches the batches that an app's awaited store submits; ``hook`` is called with each before it is sent."""

    def __init__(self, app: App, hook: Callable[[Sequence[Submission]], Awaitable[None]] | None = None) -> None:
        self.most = self._now = 0
        self.done: list[str] = []
        """The first ids of the batches that were answered."""
        self.three_done = asyncio.Event()
        self._hook = hook
        store = app.aio._engine.store
        self._submit, store._submit_batch = store._submit_batch, self._watch  # type: ignore[method-assign]

    async def _watch(self, batch: Sequence[Submission]) -> Any:
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            await asyncio.sleep(0)  # the other one may begin
            if self._hook is not None:
                await self._hook(batch)
            return await self._submit(batch)
        finally:
            self._now -= 1
            self.done.append(batch[0].id)
            if len(self.done) == 3:
                self.three_done.set()


def call(app: App, asked: list[dict[str, Any]]) -> list[Run | SemelError]:
    async def calling() -> list[Run | SemelError]:
        try:
            return await app.aio.submit_many([{"model": "train", "dedupe": False, **each} for each in asked])
        finally:
            await app.aio.close()

    return asyncio.run(calling())


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 2),
        ({"queue": "night", "tenant": "acme"}, 2),
        ({"user": 42}, 1),
        ({"idempotency_key": "k"}, 1),
        ({"dedupe": True}, 1),
        ({"reservation": "slot"}, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["all", "last"])
def test_batches_are_written_together_only_if_no_submission_may_meet_another(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], most: int, where: str
) -> None:
    monkeypatch.setattr("semel.runs.store._BULK", 3)
    watched = Watched(database.app)
    call(database.app, [options] * 12 if where == "all" else [{}] * 11 + [options])
    assert (watched.most, len(watched.done)) == (most, 4)


def test_batches_that_share_a_quota_do_not_exceed_it(database: TestDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.runs.store._BULK", 3)
    database.app.set_quota(42, Quota(max_concurrent=5))
    runs = call(database.app, [{"user": 42}] * 12)
    assert [type(run) for run in runs] == [Run] * 5 + [QuotaExceeded] * 7


def test_the_answers_are_in_their_places_if_a_later_batch_is_answered_first(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.runs.store._BULK", 5)
    first: list[str] = []

    async def wait_for_the_others(batch: Sequence[Submission]) -> None:
        first.append(batch[0].id)
        if len(first) == 1:
            await asyncio.wait_for(watched.three_done.wait(), 60)

    watched = Watched(database.app, wait_for_the_others)
    runs = call(database.app, [{"parameters": {"number": number}} for number in range(20)])
    assert watched.done == [*first[1:], first[0]]
    assert [run.parameters for run in runs if isinstance(run, Run)] == [{"number": number} for number in range(20)]


@contextmanager
def queue_refused(database: TestDatabase) -> Iterator[None]:
    """In the block the database refuses the runs of one queue, as it does what it cannot store."""
    if database.kind == "sqlite":
        database.write(
            "CREATE TRIGGER refused BEFORE INSERT ON semel_runs WHEN NEW.queue = 'refused' "
            "BEGIN SELECT RAISE(ABORT, 'refused'); END"
        )
        yield
        return
    database.write("ALTER TABLE semel_runs ADD CONSTRAINT refused CHECK (queue <> 'refused')")
    try:
        yield
    finally:  # the tests of the module share the tables
        database.write("ALTER TABLE semel_runs DROP CONSTRAINT refused")


@pytest.mark.parametrize("bad", [{7}, {5, 6, 7, 8, 9}, {0, 19}], ids=str)
def test_what_the_database_refuses_has_its_error_in_its_place_and_the_other_batches_are_stored(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch, bad: set[int]
) -> None:
    monkeypatch.setattr("semel.runs.store._BULK", 5)
    database.app.usage(42)
    with queue_refused(database):
        runs = call(database.app, [{"queue": "refused"} if place in bad else {} for place in range(20)])
    assert {place for place, run in enumerate(runs) if isinstance(run, SemelError)} == bad
    assert len(ids_of([run for run in runs if isinstance(run, Run)])) == database.count("semel_active") == 20 - len(bad)


def test_a_batch_that_cannot_be_sent_has_its_errors_in_their_places_and_the_others_are_stored(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.runs.store._BULK", 5)
    store = database.app.aio._engine.store
    submit_now, sent = store._submit_now, []

    async def fail_once(batch: Sequence[Submission], began: float) -> list[Any]:
        sent.append(batch)
        if len(sent) == 2:
            raise StoreUnavailable("the line went dead")
        return await submit_now(batch, began)

    monkeypatch.setattr(store, "_submit_now", fail_once)
    runs = call(database.app, [{}] * 20)
    assert [type(run) for run in runs] == [Run] * 5 + [StoreUnavailable] * 5 + [Run] * 10
    assert database.count("semel_runs") == 15


@pytest.mark.parametrize("options", [{}, {"user": 42}], ids=str)
def test_batches_that_are_written_together_are_returned_in_the_order_of_the_call(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr("semel.runs.store._BULK", 20)
    made = ids_of(asyncio.run(submitted(database.app, 130, **options)))
    assert made == sorted(set(made))
    assert len(made) == database.count("semel_runs") == database.count("semel_active") == 130


def test_the_first_submission_with_a_key_makes_its_run_also_if_its_repeats_are_in_other_batches(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.runs.store._BULK", 2)
    runs = asyncio.run(submitted(database.app, 20, idempotency_key="k"))
    assert [run.replayed for run in runs if isinstance(run, Run)] == [False] + [True] * 19
    assert database.count("semel_runs") == 1
