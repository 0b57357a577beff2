"""S4, idempotent processing of any function: keys from content, one run per key, and back ends that can be swapped."""

import asyncio
import functools
import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
import redis
from msgspec.structs import replace as but
from sqlalchemy import create_engine

from acceptance import jobs, payloads
from acceptance.ledger import Ledger
from acceptance.own_store import DictStore
from acceptance.spaces import STORES, Space
from acceptance.together import PATIENCE, beside, in_processes, in_tasks, in_threads
from acceptance.wrapped import Gated, Noting, Wrapped
from semel import (
    Event,
    Granted,
    IdempotencyStore,
    IdempotentProcessor,
    InMemoryIdempotencyStore,
    InvalidRequest,
    Once,
    Policy,
    ProcessingRecord,
    Replay,
    StoreUnavailable,
    Unfingerprintable,
)
from semel.cli import main as semel
from semel.once.store import Store
from semel.once.stores import open_store
from semel.once.stores.memory import MemoryStore
from semel.testing import FaultyStore
from support import servers

DAY = 86400
SUBMISSION = {"company": "Acme", "revenue": 100, "lines": ["property", "cyber"]}


class Pricing:
    """A function that counts its runs."""

    def __init__(self) -> None:
        self.runs: list[Any] = []

    def price(self, payload: dict[str, Any]) -> dict[str, Any]:
        self.runs.append(payload["company"])
        return {"price": payload["revenue"] * 2}

    async def price_later(self, payload: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)  # let every other task come as far as it can
        return self.price(payload)


@pytest.fixture
def pricing() -> Pricing:
    return Pricing()


# -- the key -------------------------------------------------------------------------------------------------------


def test_s4_1_the_key_is_the_sha_256_of_the_canonical_payload() -> None:
    canonical = json.dumps(SUBMISSION, sort_keys=True, separators=(",", ":"))
    assert canonical == '{"company":"Acme","lines":["property","cyber"],"revenue":100}'
    assert payloads.key_of(SUBMISSION) == hashlib.sha256(canonical.encode()).hexdigest()
    assert payloads.key_of({**SUBMISSION, "revenue": 101}) != payloads.key_of(SUBMISSION)


def test_s4_2_exclude_fields_leaves_the_envelope_out_of_the_key(once: Once, pricing: Pricing) -> None:
    """The same submission at T+0 and at T+5 seconds, delivered twice because of a network blip."""
    processor = IdempotentProcessor(
        pricing.price, once, exclude_fields=["delivered_at", "retries", ("trace", "correlation_id")]
    )
    first = processor.process({**SUBMISSION, "delivered_at": 0, "retries": 0, "trace": {"correlation_id": "a"}})
    second = processor.process({**SUBMISSION, "delivered_at": 5, "retries": 1, "trace": {"correlation_id": "b"}})
    other = processor.process({**SUBMISSION, "delivered_at": 0, "trace": {"correlation_id": "a", "source": "mail"}})
    assert (first.was_replay, second.was_replay, other.was_replay) == (False, True, False)
    assert first.idempotency_key == second.idempotency_key != other.idempotency_key


def test_s4_3_the_order_of_keys_is_irrelevant() -> None:
    ordered = {"a": 1, "b": {"x": [1, 2], "y": None}}
    assert payloads.key_of({"b": {"y": None, "x": [1, 2]}, "a": 1}) == payloads.key_of(ordered)
    assert payloads.key_of({"a": 1, "b": {"x": [2, 1], "y": None}}) != payloads.key_of(ordered), "a list has an order"


def test_s4_4_decimal_datetime_and_uuid_have_a_key() -> None:
    key = payloads.key_of(payloads.DOCUMENTED)
    assert key == payloads.key_of(
        {
            "premium": Decimal("1200.500"),
            "received": datetime(2025, 11, 30, 14, 0, tzinfo=timezone(timedelta(hours=2))),
            "company_id": UUID(hex="12345678123456781234567812345678"),
        }
    ), "the same number, moment and id, written otherwise"
    for name, other in {
        "premium": Decimal("1200.51"),
        "received": datetime(2025, 11, 30, 12, 1, tzinfo=UTC),
        "company_id": UUID(int=1),
    }.items():
        assert payloads.key_of({**payloads.DOCUMENTED, name: other}) != key


def test_s4_5_date_bytes_set_dataclass_and_enum_have_a_key() -> None:
    key = payloads.key_of(payloads.EXTENDED)
    assert key == payloads.key_of({**payloads.EXTENDED, "perils": {"hail", "quake", "fire", "flood", "theft", "storm"}})
    for name, other in {
        "inception": date(2026, 1, 2),
        "attachment": b"\x00\xfe",
        "perils": {"fire"},
        "broker": replace(payloads.EXTENDED["broker"], licence=8),
        "line": payloads.Line.PROPERTY,
    }.items():
        assert payloads.key_of({**payloads.EXTENDED, name: other}) != key


def test_s4_6_keys_are_the_same_in_every_process() -> None:
    """Processes in which sets have another order, as the order of hashes is random."""
    script = "from acceptance.payloads import *; print(key_of(DOCUMENTED), key_of(EXTENDED), *EXTENDED['perils'])"
    seen = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[1])}
        run = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, check=True, text=True
        )
        seen.append(run.stdout.split())
    assert len({tuple(perils) for _, _, *perils in seen}) > 1, "the seeds must matter for this to prove anything"
    here = (payloads.key_of(payloads.DOCUMENTED), payloads.key_of(payloads.EXTENDED))
    assert {(documented, extended) for documented, extended, *_ in seen} == {here}


# -- the store -----------------------------------------------------------------------------------------------------


def test_s4_7_anyone_can_implement_the_store(pricing: Pricing) -> None:
    """A stranger's store, written from the contract (and typed against it), does all that the processor needs."""
    store: Store = DictStore()
    processor = IdempotentProcessor(pricing.price, store)
    answers = in_threads(10, lambda _: processor.process(SUBMISSION))
    assert Counter(answer.was_replay for answer in answers) == {False: 1, True: 9}
    assert {answer.result["price"] for answer in answers} == {200}
    assert pricing.runs == ["Acme"]


def test_s4_8_the_memory_store_is_thread_safe_and_never_overwrites() -> None:
    with Once("memory://") as once:
        for key in map("m-{}".format, range(50)):
            answers = in_threads(8, lambda at: once.check_and_mark("raced", key, at))  # noqa: B023 -- used at once
            record = once.get(key, scope="raced")
            assert record is not None
            assert Counter(answers) == {"not_seen": 1, "seen": 7}
            assert record.additional_data == answers.index("not_seen"), "what the winner wrote"
        granted = once.claim("twice")
        assert isinstance(granted, Granted)
        once.complete(granted.claim, "first")
        once.complete(granted.claim, "second")
        verdict = once.claim("twice")
        assert isinstance(verdict, Replay)
        assert verdict.outcome.value == "first"


# -- processing ----------------------------------------------------------------------------------------------------


def test_s4_9_process_gives_a_record_with_result_was_replay_and_key(once: Once, pricing: Pricing) -> None:
    processor = IdempotentProcessor(pricing.price, once)
    key = payloads.key_of(SUBMISSION)
    assert processor.process(SUBMISSION) == ProcessingRecord({"price": 200}, False, key)
    assert processor.process(SUBMISSION) == ProcessingRecord({"price": 200}, True, key)
    assert pricing.runs == ["Acme"]


def test_s4_10_the_fast_path_is_one_look_at_the_store(space: Space, pricing: Pricing) -> None:
    """A replay asks once and writes nothing; nor does it wait for work on another key."""
    noting = Noting(space.store())
    inside, done = threading.Event(), threading.Event()

    def slow(payload: dict[str, Any]) -> dict[str, Any]:
        if payload["company"] == "Slow":
            inside.set()
            assert done.wait(PATIENCE)
        return pricing.price(payload)

    processor = IdempotentProcessor(slow, space.open(noting))
    processor.process(SUBMISSION)
    with beside(lambda: processor.process({**SUBMISSION, "company": "Slow"})) as other:
        assert inside.wait(PATIENCE)
        noting.seen.clear()
        assert processor.process(SUBMISSION).was_replay
        assert noting.seen == [("claim", 1)]
        done.set()
    assert not other.result().was_replay


def test_s4_10_the_fast_path_does_not_wait_for_the_file_of_sqlite(space_of: Callable[[str], Space]) -> None:
    """While somebody else writes to the file, a result that exists is read all the same."""
    space = space_of("sqlite")
    processor = IdempotentProcessor(Pricing().price, space.open(retry_for=0))
    processor.process(SUBMISSION)
    engine = create_engine(space.url)
    with engine.connect() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        assert processor.process(SUBMISSION).was_replay
    engine.dispose()


def test_s4_10_the_fast_path_does_not_wait_for_the_row_of_postgresql(space_of: Callable[[str], Space]) -> None:
    space = space_of("postgres")
    processor = IdempotentProcessor(Pricing().price, space.open(retry_for=0))
    processor.process(SUBMISSION)
    with psycopg.connect(space.url) as connection:
        assert len(connection.execute("SELECT * FROM semel_keys FOR UPDATE").fetchall()) == 1
        assert processor.process(SUBMISSION).was_replay


def test_s4_11_one_key_is_worked_on_by_one_at_a_time(space: Space, pricing: Pricing) -> None:
    """The second delivery comes while the first is in the function: it waits outside."""
    inside, done, waiting = threading.Event(), threading.Event(), threading.Event()

    def slow(payload: dict[str, Any]) -> dict[str, Any]:
        result = pricing.price(payload)
        inside.set()
        assert done.wait(PATIENCE)
        return result

    first = IdempotentProcessor(slow, space.open(), scope="pricing")
    second = IdempotentProcessor(slow, space.open(Noting(space.store(), waiting)), scope="pricing")
    with beside(lambda: first.process(SUBMISSION)) as original:
        assert inside.wait(PATIENCE)
        with beside(lambda: second.process(SUBMISSION)) as duplicate:
            assert waiting.wait(PATIENCE)
            assert pricing.runs == ["Acme"]
            assert not duplicate.done()
            done.set()
        assert duplicate.result() == but(original.result(), was_replay=True)
    assert pricing.runs == ["Acme"]


def test_s4_12_who_was_overtaken_on_the_way_meets_the_result(space: Space, pricing: Pricing) -> None:
    """The window between the first look and the lock: the other delivery is done with everything in between."""
    gated = Gated(space.store())
    late = IdempotentProcessor(pricing.price, space.open(gated), scope="pricing")
    quick = IdempotentProcessor(pricing.price, space.open(), scope="pricing")
    with beside(lambda: late.process(SUBMISSION)) as overtaken:
        assert gated.reached.wait(PATIENCE)
        assert not quick.process(SUBMISSION).was_replay
        gated.gate.set()
    assert overtaken.result().was_replay
    assert pricing.runs == ["Acme"]


def test_s4_13_ten_threads_run_the_function_once(space: Space, pricing: Pricing) -> None:
    """Each over connections of its own, as ten workers would."""
    workers = [IdempotentProcessor(pricing.price, space.open(), scope="pricing") for _ in range(10)]
    answers = in_threads(10, lambda at: workers[at].process(SUBMISSION))
    assert pricing.runs == ["Acme"]
    assert Counter(answer.was_replay for answer in answers) == {False: 1, True: 9}
    assert [answer.result for answer in answers] == [{"price": 200}] * 10


def test_s4_14_thirty_two_tasks_run_the_function_once(space: Space, pricing: Pricing) -> None:
    async def race() -> list[ProcessingRecord]:
        async with space.open_async() as once:
            processor = IdempotentProcessor(pricing.price_later, once)
            return await in_tasks(32, lambda _: processor.process(SUBMISSION))

    answers = asyncio.run(race())
    assert pricing.runs == ["Acme"]
    assert Counter(answer.was_replay for answer in answers) == {False: 1, True: 31}
    assert [answer.result for answer in answers] == [{"price": 200}] * 32


def test_s4_14_eight_processes_run_the_function_once(
    shared_space: Space, tmp_path: Path, eight_processes: Executor
) -> None:
    names = [f"company-{number}" for number in range(10)]
    submissions = [{"company": name, "revenue": at} for at, name in enumerate(names)]
    answers = in_processes(eight_processes, jobs.process, shared_space.url, tmp_path / "ledger", submissions)
    assert Ledger(tmp_path / "ledger").noted("priced") == names
    for at, each in enumerate(zip(*answers, strict=True)):
        assert Counter(was_replay for _, was_replay in each) == {False: 1, True: 7}
        assert [result for result, _ in each] == [{"price": at * 2}] * 8


def test_s4_15_different_keys_run_at_the_same_time(space: Space) -> None:
    """Each run waits inside the function until the other is inside, too."""
    meeting = threading.Barrier(2)

    def meet(payload: str) -> int:
        return meeting.wait(PATIENCE)

    processor = IdempotentProcessor(meet, space.open())
    records = in_threads(2, lambda at: processor.process(f"company-{at}"))
    assert sorted(record.result for record in records) == [0, 1]


def test_s4_15_different_keys_run_at_the_same_time_in_one_loop(space: Space) -> None:
    async def race() -> list[ProcessingRecord]:
        inside: list[str] = []
        both = asyncio.Event()

        async def meet(payload: str) -> str:
            inside.append(payload)
            if len(inside) == 2:
                both.set()
            async with asyncio.timeout(PATIENCE):
                await both.wait()
            return payload

        async with space.open_async() as once:
            processor = IdempotentProcessor(meet, once)
            return await in_tasks(2, lambda at: processor.process(f"company-{at}"))

    assert [record.result for record in asyncio.run(race())] == ["company-0", "company-1"]


# -- failures ------------------------------------------------------------------------------------------------------


def test_s4_16_an_exception_propagates_and_the_next_delivery_retries(once: Once) -> None:
    attempts: list[int] = []

    def enrich(payload: dict[str, Any]) -> str:
        attempts.append(len(attempts))
        if len(attempts) < 3:
            raise ConnectionError(f"attempt {len(attempts)}")
        return "enriched"

    processor = IdempotentProcessor(enrich, once, scope="enrichment")
    for number in (1, 2):
        with pytest.raises(ConnectionError, match=f"attempt {number}"):
            processor.process(SUBMISSION)
        assert once.get(processor.key_of(SUBMISSION), scope="enrichment") is None, "nothing is stored"
    assert processor.process(SUBMISSION) == ProcessingRecord("enriched", False, processor.key_of(SUBMISSION))
    assert processor.process(SUBMISSION).was_replay
    assert len(attempts) == 3


def test_s4_17_a_result_that_could_not_be_stored_is_processed_again(space: Space, pricing: Pricing) -> None:
    """Better to process twice than to lose the result: the redelivery runs once the lost claim's lease is over.

    The first worker never gets through to the store again; if it did, the redelivery would get its result.
    """
    faulty = FaultyStore(space.store())
    faulty.lose_request("complete", 100_000)
    processor = IdempotentProcessor(pricing.price, space.open(faulty, retry_for=0), scope="pricing")
    with pytest.raises(StoreUnavailable):
        processor.process(SUBMISSION)
    space.clock.advance(Policy.processor().lease)
    other = IdempotentProcessor(pricing.price, space.open(faulty.inner), scope="pricing")
    assert not other.process(SUBMISSION).was_replay
    assert other.process(SUBMISSION).was_replay
    assert pricing.runs == ["Acme", "Acme"]


def test_s4_17_a_result_is_stored_when_the_store_is_back(space: Space, pricing: Pricing) -> None:
    """The worker that has it lives: nothing is processed again."""
    faulty = FaultyStore(space.store())
    faulty.lose_request("complete")
    processor = IdempotentProcessor(pricing.price, space.open(faulty, retry_for=0))
    with pytest.raises(StoreUnavailable):
        processor.process(SUBMISSION)
    assert processor.process(SUBMISSION).was_replay
    assert pricing.runs == ["Acme"]


# -- back ends -----------------------------------------------------------------------------------------------------


def test_s4_18_redis_keeps_a_result_for_a_day_and_sets_it_atomically(
    space_of: Callable[[str], Space], pricing: Pricing
) -> None:
    space = space_of("redis")
    workers = [IdempotentProcessor(pricing.price, space.open(clock=None), scope="pricing") for _ in range(16)]
    answers = in_threads(16, lambda at: workers[at].process(SUBMISSION))
    assert Counter(answer.was_replay for answer in answers) == {False: 1, True: 15}
    with redis.Redis.from_url(space.url) as client:
        (name,) = client.scan_iter("*pricing*")
        left = client.ttl(name)
    assert DAY - 60 < left <= DAY + 60, "the server drops it a minute after its end, which readers keep exactly"

    on_time = IdempotentProcessor(pricing.price, space.open(), scope="on time")
    on_time.process(SUBMISSION)
    space.clock.advance(DAY)
    assert on_time.process(SUBMISSION).was_replay
    space.clock.advance(1)
    assert not on_time.process(SUBMISSION).was_replay


def test_s4_19_postgresql_keeps_a_result_for_a_day_on_its_own_clock(
    space_of: Callable[[str], Space], pricing: Pricing
) -> None:
    space = space_of("postgres")
    processor = IdempotentProcessor(pricing.price, space.open(clock=None), scope="pricing")
    processor.process(SUBMISSION)
    with psycopg.connect(space.url) as connection:
        row = connection.execute(
            "SELECT extract(epoch FROM to_timestamp(expires_us / 1e6) - now()), expires_us - created_us FROM semel_keys"
        ).fetchone()
    assert row is not None
    assert DAY - PATIENCE < row[0] <= DAY
    assert row[1] == DAY * 1_000_000

    on_time = IdempotentProcessor(pricing.price, space.open(), scope="on time")
    on_time.process(SUBMISSION)
    space.clock.advance(DAY)
    assert on_time.process(SUBMISSION).was_replay
    space.clock.advance(1)
    assert not on_time.process(SUBMISSION).was_replay


@pytest.fixture(params=["redis", "postgres"])
def own_server(request: pytest.FixtureRequest) -> Iterator[servers.Server]:
    """A server that may be stopped without anybody else noticing."""
    with getattr(servers, request.param)() as server:
        if not server.managed:
            pytest.skip("the environment names a server, and that one is not ours to stop")
        yield server


def test_s4_20_a_write_is_tried_again_when_the_connection_is_lost(own_server: servers.Server) -> None:
    """The server goes away while the function runs, and is started again when the write has been tried in vain."""
    url = own_server.database()
    if isinstance(own_server, servers.Postgres):
        assert semel(["migrate", url]) == 0
    runs: list[str] = []
    refused = threading.Event()

    def price(payload: dict[str, Any]) -> int:
        runs.append(payload["company"])
        own_server.stop()
        return 200

    class Listening(Wrapped):
        async def complete(self, requests: Any) -> list[bool]:
            try:
                return await super().complete(requests)
            except StoreUnavailable:
                refused.set()
                raise

    def repair() -> None:
        assert refused.wait(PATIENCE)
        own_server.start()

    store = Listening(open_store(url, is_async=False))
    with Once(store, retry_for=PATIENCE) as once, beside(repair):
        processor = IdempotentProcessor(price, once)
        assert processor.process(SUBMISSION).result == 200
        assert processor.process(SUBMISSION).was_replay
    assert runs == ["Acme"]
    assert refused.is_set()


def test_s4_21_the_back_end_is_swapped_without_touching_the_processor(
    space_of: Callable[[str], Space], pricing: Pricing
) -> None:
    def handle(store: Once) -> list[tuple[Any, bool, str]]:
        """The processor and its callers; they do not know what they stand on."""
        processor = IdempotentProcessor(pricing.price, store, exclude_fields=["at"])
        deliveries = [{**SUBMISSION, "at": 0}, {**SUBMISSION, "at": 5}, {**SUBMISSION, "revenue": 7}]
        return [(each.result, each.was_replay, each.idempotency_key) for each in map(processor.process, deliveries)]

    answers = [handle(space_of(kind).open()) for kind in STORES] + [handle(Once(DictStore()))]
    assert [(result, was_replay) for result, was_replay, _ in answers[0]] == [
        ({"price": 200}, False),
        ({"price": 200}, True),
        ({"price": 14}, False),
    ]
    assert all(answer == answers[0] for answer in answers)
    assert len(pricing.runs) == 2 * len(answers)


class Triage:
    """A callable that is not a function."""

    def __call__(self, payload: Any) -> str:
        return f"called with {payload}"

    def method(self, payload: Any) -> str:
        return f"method with {payload}"


class LaterTriage:
    async def __call__(self, payload: Any) -> str:
        return f"called with {payload}"


def plain(payload: Any) -> str:
    return f"plain with {payload}"


def with_setting(setting: str, payload: Any) -> str:
    return f"{setting} with {payload}"


async def later(payload: Any) -> str:
    await asyncio.sleep(0)
    return f"later with {payload}"


@pytest.mark.parametrize(
    ("function", "result"),
    [
        (plain, "plain with 1"),
        (lambda payload: f"lambda with {payload}", "lambda with 1"),
        (Triage().method, "method with 1"),
        (functools.partial(with_setting, "partial"), "partial with 1"),
        (Triage(), "called with 1"),
        (str, "1"),
    ],
    ids=["function", "lambda", "method", "partial", "callable", "builtin"],
)
def test_s4_22_any_function_is_wrapped(function: Callable[[Any], Any], result: str) -> None:
    processor = IdempotentProcessor(function)
    assert [(record.result, record.was_replay) for record in map(processor.process, (1, 1))] == [
        (result, False),
        (result, True),
    ]


@pytest.mark.parametrize(
    ("function", "result"),
    [
        (later, "later with 1"),
        (functools.partial(later), "later with 1"),
        (LaterTriage(), "called with 1"),
    ],
    ids=["async function", "partial", "callable"],
)
def test_s4_22_any_async_function_is_wrapped(function: Callable[[Any], Any], result: str) -> None:
    async def twice() -> list[tuple[Any, bool]]:
        processor = IdempotentProcessor(function)
        records = [await processor.process(1), await processor.process(1)]
        return [(record.result, record.was_replay) for record in records]

    assert asyncio.run(twice()) == [(result, False), (result, True)]


# -- watching it ---------------------------------------------------------------------------------------------------


def test_s4_23_the_replay_rate_is_a_metric(space: Space, pricing: Pricing) -> None:
    events: list[Event] = []
    once = space.open(on_event=events.append)
    processor = IdempotentProcessor(pricing.price, once, scope="submission.processed")
    for revenue in (1, 2, 3, 3, 3):
        processor.process({**SUBMISSION, "revenue": revenue})
    assert [event.name for event in events] == ["miss", "miss", "miss", "hit", "hit"]
    assert once.stats().scopes["submission.processed"].replay_rate == pytest.approx(0.4)


def test_s4_24_a_replay_rate_above_five_percent_is_flagged(once: Once) -> None:
    """Upstream retries too aggressively."""
    processor = IdempotentProcessor(lambda payload: payload, once, scope="eager")
    for number in range(95):
        processor.process(number)
    for number in range(5):
        processor.process(number)
    assert once.stats().warnings == [], "5 % is not above 5 %"
    processor.process(0)
    (warning,) = once.stats().warnings
    assert "eager" in warning
    assert "5.9%" in warning


def test_s4_24_a_replay_rate_of_zero_for_weeks_is_flagged() -> None:
    """Probably every delivery looks new, because the key is computed wrongly."""
    with Once("memory://") as once:
        processor = IdempotentProcessor(lambda payload: payload, once, scope="never")
        for number in range(1000):
            processor.process(number)
        stats = once.stats()
        assert stats.warnings == [], "the first day proves nothing"
        (warning,) = but(stats, since=14 * DAY).warnings
        assert "never" in warning
        processor.process(0)
        assert but(once.stats(), since=14 * DAY).warnings == []


def test_s4_25_an_exception_is_logged_without_the_payload_and_raised_again(
    once: Once, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(payload: dict[str, Any]) -> None:
        raise ValueError(f"cannot price {payload['company']}")

    for store in (once, InMemoryIdempotencyStore()):
        caplog.clear()
        processor = IdempotentProcessor(fail, store, scope="pricing")
        with pytest.raises(ValueError, match="Acme"):
            processor.process(SUBMISSION)
        (line,) = [record for record in caplog.records if getattr(record, "event", "") == "failed"]
        key = processor.key_of(SUBMISSION)
        assert (line.levelno, line.scope, line.key, line.reason) == (
            logging.ERROR,
            "pricing",
            key,
            "builtins.ValueError",
        )
        assert "pricing" in line.getMessage()
        assert key in line.getMessage()
        assert "Acme" not in caplog.text


# -- the document's own store, processor and key ---------------------------------------------------------------------


class DocumentStore(IdempotencyStore):
    """A back end as somebody wrote it for the document's processor: two verbs, and results as they are."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}
        self.asked: list[str] = []

    def get(self, key: str) -> Any | None:
        self.asked.append(key)
        return self.results.get(key)

    def set_if_absent(self, key: str, result: Any) -> bool:
        return self.results.setdefault(key, result) is result


def documents_key(payload: dict[str, Any], exclude_fields: frozenset[str] = frozenset()) -> str:
    """The document's recipe, letter by letter."""
    filtered = {k: v for k, v in payload.items() if k not in exclude_fields}
    canonical = json.dumps(filtered, sort_keys=True, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()


class CalledStore(DocumentStore):
    """It is a store all the same."""

    def __call__(self, payload: Any) -> None: ...


@pytest.mark.parametrize("make", [DocumentStore, InMemoryIdempotencyStore, CalledStore, MemoryStore])
def test_s4_7_the_documents_store_is_enough(
    make: Callable[[], IdempotencyStore | MemoryStore], pricing: Pricing
) -> None:
    """Function and store in either order, as the document's readers have them."""
    for processor in (IdempotentProcessor(pricing.price, make()), IdempotentProcessor(make(), pricing.price)):
        pricing.runs.clear()
        first, second = processor.process(SUBMISSION), processor.process(SUBMISSION)
        assert (first.result, first.was_replay) == (second.result, not second.was_replay) == ({"price": 200}, False)
        assert first.idempotency_key == second.idempotency_key == processor.key_of(SUBMISSION)
        assert pricing.runs == ["Acme"]


def test_s4_8_the_in_memory_store_never_overwrites_and_is_thread_safe() -> None:
    store = InMemoryIdempotencyStore()
    stored = in_threads(10, lambda at: store.set_if_absent("key", at))
    assert Counter(stored) == Counter({False: 9, True: 1})
    assert store.get("key") == stored.index(True)
    assert store.get("other") is None


def test_s4_13_the_documents_store_sees_one_run_for_each_key_under_10_threads(pricing: Pricing) -> None:
    """And different keys run at the same time."""
    beside_each_other = threading.Barrier(2, timeout=PATIENCE)

    def meet(payload: dict[str, Any]) -> dict[str, Any]:
        beside_each_other.wait()
        return pricing.price(payload)

    processor = IdempotentProcessor(meet, InMemoryIdempotencyStore())
    two = [SUBMISSION, {**SUBMISSION, "company": "Zenith"}]
    records = in_threads(10, lambda at: processor.process(two[at % 2]))
    assert Counter(record.was_replay for record in records) == Counter({True: 8, False: 2})
    assert sorted(pricing.runs) == ["Acme", "Zenith"]


def test_s4_14_the_documents_store_takes_an_async_function(pricing: Pricing) -> None:
    processor = IdempotentProcessor(pricing.price_later, InMemoryIdempotencyStore())
    records = asyncio.run(in_tasks(32, lambda _: processor.process(SUBMISSION)))
    assert Counter(record.was_replay for record in records) == Counter({True: 31, False: 1})
    assert pricing.runs == ["Acme"]


def test_s4_16_with_the_documents_store_a_failure_leaves_nothing_behind(pricing: Pricing) -> None:
    failures = iter([ConnectionError("the enrichment is away")])

    def price(payload: dict[str, Any]) -> dict[str, Any]:
        if (failure := next(failures, None)) is not None:
            raise failure
        return pricing.price(payload)

    processor = IdempotentProcessor(price, store := DocumentStore())
    with pytest.raises(ConnectionError):
        processor.process(SUBMISSION)
    assert store.results == {}
    assert not processor.process(SUBMISSION).was_replay


def test_s4_15_another_process_that_was_quicker_is_believed(pricing: Pricing) -> None:
    store = DocumentStore()

    def price(payload: dict[str, Any]) -> dict[str, Any]:
        store.results[processor.key_of(payload)] = {"price": "of the other process"}
        return pricing.price(payload)

    processor = IdempotentProcessor(price, store)
    assert processor.process(SUBMISSION).result == {"price": "of the other process"}


@pytest.mark.parametrize("kind", ["once", "store"])
def test_s4_1_the_documents_keys_are_carried_over(kind: str, pricing: Pricing) -> None:
    """The same recipe makes the same keys, so that what the old processor has done is not done again."""
    payload = {**SUBMISSION, **payloads.DOCUMENTED, "delivered_at": 5}
    envelope = frozenset({"delivered_at"})
    store: Any = Once("memory://") if kind == "once" else DocumentStore()
    processor = IdempotentProcessor(pricing.price, store, exclude_fields=envelope, key_recipe="json")
    assert processor.key_of(payload) == documents_key(payload, envelope)
    assert processor.key_of(payload) != IdempotentProcessor(pricing.price, exclude_fields=envelope).key_of(payload)
    if kind == "store":
        store.results[documents_key(payload, envelope)] = {"price": "of last week"}
        assert processor.process(payload).result == {"price": "of last week"}
        assert pricing.runs == []
        return
    assert not processor.process(payload).was_replay
    alike = {**payload, "premium": str(payload["premium"]), "delivered_at": 6}
    assert processor.process(alike).was_replay, "the recipe writes a Decimal as its text"
    store.close()


def test_what_the_documents_recipe_cannot_do_is_refused(pricing: Pricing) -> None:
    with pytest.raises(InvalidRequest, match="names, not paths"):
        IdempotentProcessor(pricing.price, key_recipe="json", exclude_fields=[("trace", "id")])
    with pytest.raises(InvalidRequest, match="one of canonical, json"):
        IdempotentProcessor(pricing.price, key_recipe="md5")  # type: ignore[arg-type]
    processor = IdempotentProcessor(pricing.price, key_recipe="json", exclude_fields=["a"])
    with pytest.raises(Unfingerprintable, match="this is a list"):
        processor.process([1])
    with pytest.raises(Unfingerprintable, match="the payload has no key: '<' not supported"):
        processor.process({1: "number", "1": "text"})
    with pytest.raises(InvalidRequest, match="needs a function"):
        IdempotentProcessor("memory://", "memory://")
    with pytest.raises(AttributeError, match="has an IdempotencyStore, and no Once"):
        _ = IdempotentProcessor(pricing.price, DocumentStore()).once


@pytest.mark.parametrize("value", [None, 0, False, "", [], {}], ids=repr)
def test_s4_26_a_falsy_result_replays_from_the_in_memory_store(value: object) -> None:
    runs: list[object] = []
    processor = IdempotentProcessor(lambda payload: (runs.append(payload), value)[1], InMemoryIdempotencyStore())
    assert [processor.process(SUBMISSION).was_replay for _ in range(2)] == [False, True]
    assert processor.process(SUBMISSION).result == value
    assert len(runs) == 1


@pytest.mark.parametrize("value", [None, 0, False, "", [], {}], ids=repr)
def test_s4_26_a_falsy_result_replays_as_itself(once: Once, value: object) -> None:
    runs: list[object] = []

    def give(payload: object) -> object:
        runs.append(payload)
        return value

    processor = IdempotentProcessor(give, once)
    first, second = processor.process(SUBMISSION), processor.process(SUBMISSION)
    assert (first.was_replay, second.was_replay) == (False, True)
    assert second.result == value
    assert type(second.result) is type(value)
    assert len(runs) == 1
