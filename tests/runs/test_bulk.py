"""Bulk submission: what is the same in many submissions is checked and sent once, and nothing of it shows."""

import asyncio
from typing import Any
from uuid import RFC_4122, UUID

import pytest
from msgspec.structs import replace

from semel import App, Run, SemelError
from semel._concurrency.sync import run_sync
from semel.db.dialect import Statement
from semel.errors import InvalidParameters, InvalidRequest
from semel.runs.models.model import Registry, make_model
from semel.runs.store.submit import Submission
from semel.runs.submission import BulkBuilder, SubmissionBuilder
from semel.runs.types import DedupePolicy, new_id, new_ids
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
