"""S3, message idempotency: the router's cache, its consumers, and the seven tests that its document names."""

import asyncio
import logging
import tracemalloc
from collections import Counter
from concurrent.futures import Executor
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path

import pytest
import redis
from message_router.consumers import Router, supervise
from prometheus_client import CollectorRegistry

from acceptance import jobs
from acceptance.ledger import Ledger
from acceptance.pace import paced
from acceptance.router import Broker, Noted, exec_ack, exec_result
from acceptance.spaces import Space
from acceptance.together import in_processes, in_tasks, in_threads
from semel import Event, Once, Policy, StoreUnavailable
from semel.metrics.prometheus import RouterMetrics
from semel.testing import FakeClock
from support import servers

HOUR = 3600
KEY_TYPES = ("assignment_id", "request_id", "ack_id", "usage_id")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


@pytest.fixture
def cache(space: Space) -> Once:
    """The router's cache on each of the four stores."""
    return space.open(policy=Policy.router())


@pytest.fixture
def effects(ledger: Ledger) -> Noted:
    return Noted(ledger)


@pytest.fixture
def router(cache: Once, effects: Noted) -> Router:
    return Router(cache, effects)


def deliver(router: Router, broker: Broker, consumers: int = 8) -> None:
    """Let this many consumers empty the queue at the same time."""
    in_threads(consumers, lambda _: router.serve(broker))


# -- the cache ---------------------------------------------------------------------------------------------------


def test_s3_1_check_and_mark_answers_seen_or_not_seen(cache: Once) -> None:
    data = {"status": "success", "job_type": "text.generate", "provider_id": "provider-7"}
    assert cache.check_and_mark("assignment_id", "a-1", data) == "not_seen"
    assert cache.check_and_mark("assignment_id", "a-1", data) == "seen"
    assert cache.check_and_mark("assignment_id", "a-1") == "seen", "the data is optional and decides nothing"


def test_s3_2_the_key_is_the_pair_of_key_type_and_message_id(cache: Once) -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("a", "b:c"), ("a:b", "c"), ("1:a", "c"), ("a", "1:c")]
    assert [cache.check_and_mark(*pair) for pair in pairs] == ["not_seen"] * len(pairs)
    assert [cache.check_and_mark(*pair) for pair in pairs] == ["seen"] * len(pairs)


def test_s3_3_the_entry_holds_what_the_document_lists(cache: Once, space: Space) -> None:
    cache.check_and_mark("ack_id", "a-1", {"status": "accepted", "message": "on it"})
    entry = cache.get("a-1", scope="ack_id")
    assert entry is not None
    assert entry.message_id == "a-1"
    assert entry.key_type == "ack_id"
    assert entry.processed_at == datetime.fromtimestamp(space.clock() / 1e6, UTC)
    assert entry.expires_at == entry.processed_at + timedelta(hours=1)
    assert entry.additional_data == {"status": "accepted", "message": "on it"}


def test_s3_4_the_four_key_types_are_supported(cache: Once) -> None:
    for key_type in KEY_TYPES:
        assert cache.check_and_mark(key_type, f"{key_type}-1", {"of": key_type}) == "not_seen"
        assert cache.check_and_mark(key_type, f"{key_type}-1") == "seen"
        entry = cache.get(f"{key_type}-1", scope=key_type)
        assert entry is not None
        assert (entry.key_type, entry.additional_data) == (key_type, {"of": key_type})


def test_s3_5_each_key_type_is_a_space_of_its_own(cache: Once) -> None:
    assert [cache.check_and_mark(key_type, "one-id-for-all") for key_type in KEY_TYPES] == ["not_seen"] * 4
    assert [cache.check_and_mark(key_type, "one-id-for-all") for key_type in KEY_TYPES] == ["seen"] * 4


def test_s3_6_readers_and_writers_work_at_the_same_time(cache: Once) -> None:
    """Four threads write while four read: a reader meets nothing or a whole entry, and what was written before."""
    cache.check_and_mark("ack_id", "early", {"number": -1})

    def write(lane: int) -> None:
        for number in range(lane, 100, 4):
            assert cache.check_and_mark("ack_id", f"m-{number}", {"number": number}) == "not_seen"
            entry = cache.get(f"m-{number}", scope="ack_id")
            assert entry is not None
            assert entry.additional_data == {"number": number}

    def read() -> None:
        for number in range(100):
            entry = cache.get(f"m-{number}", scope="ack_id")
            assert entry is None or entry.additional_data == {"number": number}
            early = cache.get("early", scope="ack_id")
            assert early is not None
            assert early.additional_data == {"number": -1}

    in_threads(8, lambda at: write(at // 2) if at % 2 else read())
    assert cache.stats().held.completed == 101


def test_s3_7_check_and_mark_are_one_step_for_threads(space: Space) -> None:
    """Sixteen threads, each with connections of its own, mark the same messages in the same order."""
    caches = [space.open(policy=Policy.router()) for _ in range(16)]
    names = [f"m-{number}" for number in range(10)]
    answers = in_threads(16, lambda at: [caches[at].check_and_mark("usage_id", name) for name in names])
    assert [Counter(each) for each in zip(*answers, strict=True)] == [Counter(not_seen=1, seen=15)] * 10


def test_s3_7_check_and_mark_are_one_step_for_tasks(space: Space) -> None:
    async def mark() -> list[str]:
        async with space.open_async() as cache:
            return await in_tasks(64, lambda _: cache.check_and_mark("usage_id", "m-1"))

    assert Counter(asyncio.run(mark())) == Counter(not_seen=1, seen=63)


def test_s3_7_check_and_mark_are_one_step_for_processes(shared_space: Space, eight_processes: Executor) -> None:
    names = [f"m-{number}" for number in range(20)]
    answers = in_processes(eight_processes, jobs.mark, shared_space.url, "usage_id", names)
    assert sorted(chain.from_iterable(answers)) == sorted(names)


def test_s3_8_an_absent_message_is_not_seen(cache: Once) -> None:
    assert cache.get("a-1", scope="assignment_id") is None
    assert cache.check_and_mark("assignment_id", "a-1") == "not_seen"
    assert cache.check_and_mark("assignment_id", "a-2") == "not_seen"


def test_s3_9_a_valid_message_is_seen(cache: Once, space: Space) -> None:
    cache.check_and_mark("assignment_id", "a-1", {"first": True})
    for _ in range(3):
        space.clock.advance(HOUR / 3)
        assert cache.check_and_mark("assignment_id", "a-1", {"first": False}) == "seen"
    entry = cache.get("a-1", scope="assignment_id")
    assert entry is not None
    assert entry.additional_data == {"first": True}, "a duplicate changes nothing"


def test_s3_10_an_expired_message_is_renewed_and_not_seen(cache: Once, space: Space) -> None:
    cache.check_and_mark("assignment_id", "a-1", {"round": 1})
    space.clock.advance(HOUR + 1)
    assert cache.check_and_mark("assignment_id", "a-1", {"round": 2}) == "not_seen"
    space.clock.advance(HOUR)
    assert cache.check_and_mark("assignment_id", "a-1", {"round": 3}) == "seen", "renewed for a whole hour"
    entry = cache.get("a-1", scope="assignment_id")
    assert entry is not None
    assert entry.additional_data == {"round": 2}


def test_s3_11_the_ttl_is_an_hour_unless_configured(space: Space) -> None:
    assert Policy.router().ttl == HOUR
    configured = Policy.router(idempotency_ttl_seconds=120)
    assert configured == Policy.router().but(ttl=120)
    for ttl, policy in {HOUR: Policy.router(), 120: configured}.items():
        cache = space.open(policy=policy)
        cache.check_and_mark("ack_id", f"lasts-{ttl}")
        entry = cache.get(f"lasts-{ttl}", scope="ack_id")
        assert entry is not None
        assert entry.expires_at - entry.created_at == timedelta(seconds=ttl)


@pytest.mark.parametrize(("ttl", "every"), [(HOUR, 60), (100, 10)], ids=["an hour", "100 seconds"])
def test_s3_12_expired_entries_are_cleaned_every_tenth_of_the_ttl_or_minute(
    space: Space, ttl: float, every: float, caplog: pytest.LogCaptureFixture
) -> None:
    """The interval has 10 % of jitter. A Redis server needs no cleaner: it is told when each entry ends."""
    policy = Policy.router().but(ttl=ttl)
    assert policy.collect_interval == every
    if space.kind == "redis":
        space.open(policy=policy, clock=None).check_and_mark("ack_id", "a-1")
        with redis.Redis.from_url(space.url) as client:
            lives = [client.ttl(name) for name in client.scan_iter("*ack_id*")]
        assert len(lives) == 1
        assert ttl <= lives[0] <= ttl + 60, "kept a minute longer, to tell expired from absent"
        return
    caplog.set_level(logging.DEBUG, "semel")
    cache, pace = paced(space, policy=policy)
    for number in range(7):
        cache.check_and_mark("ack_id", f"a-{number}")
    assert pace.pause() == pytest.approx(every, rel=0.1)
    space.clock.advance(ttl + 1)
    cache.check_and_mark("ack_id", "young")
    pace.wake()
    assert pace.pause() == pytest.approx(every, rel=0.1)
    logged = [record for record in caplog.records if hasattr(record, "purged")]
    assert [(record.levelno, record.purged) for record in logged] == [(logging.DEBUG, 7)]
    held = cache.stats().held
    assert (held.completed, held.expired) == (1, 0)


def test_s3_13_hits_are_counted_by_key_type(cache: Once) -> None:
    for key_type, deliveries in {"ack_id": 4, "usage_id": 2, "request_id": 1}.items():
        for _ in range(deliveries):
            cache.check_and_mark(key_type, "m-1")
    scopes = cache.stats().scopes
    assert {key_type: counts.hits for key_type, counts in scopes.items()} == {
        "ack_id": 3,
        "usage_id": 1,
        "request_id": 0,
    }


def test_s3_14_misses_are_counted_by_key_type_and_reason(cache: Once, space: Space) -> None:
    for name in ("m-1", "m-2", "m-3"):
        cache.check_and_mark("ack_id", name)
    cache.check_and_mark("usage_id", "m-1")
    space.clock.advance(HOUR + 1)
    cache.check_and_mark("ack_id", "m-1")
    scopes = cache.stats().scopes
    assert scopes["ack_id"].misses == {"absent": 3, "expired": 1}
    assert scopes["usage_id"].misses == {"absent": 1}
    assert scopes["ack_id"].hits == 0


def test_s3_13_and_14_the_metrics_have_the_documents_names(space: Space) -> None:
    registry = CollectorRegistry()
    cache = space.open(policy=Policy.router(), on_event=RouterMetrics(registry))
    for _ in range(3):
        cache.check_and_mark("ack_id", "a-1")
    handle = cache.consumer("request_id", key=str)(lambda message: None)
    handle("r-1")
    handle("r-1")
    cache.call("no message", int)
    space.clock.advance(HOUR + 1)
    cache.check_and_mark("ack_id", "a-1")

    def counted(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"router_idempotency_{name}_total", labels)

    assert (counted("hit", key_type="ack_id"), counted("hit", key_type="request_id")) == (2, 1)
    assert (
        counted("miss", key_type="ack_id", reason="absent") == counted("miss", key_type="ack_id", reason="expired") == 1
    )
    assert counted("miss", key_type="request_id", reason="absent") == 1
    labels = {tuple(sample.labels.values()) for metric in registry.collect() for sample in metric.samples}
    assert labels == {
        ("ack_id",),
        ("request_id",),
        ("ack_id", "absent"),
        ("ack_id", "expired"),
        ("request_id", "absent"),
    }


def test_s3_15_the_message_id_is_in_the_event_and_never_in_a_label(space: Space) -> None:
    events: list[Event] = []
    cache = space.open(policy=Policy.router(), on_event=events.append)
    for number in range(50):
        cache.check_and_mark("ack_id", f"secret-{number}", {"status": "private"})
    cache.check_and_mark("ack_id", "secret-0")
    space.clock.advance(HOUR + 1)
    cache.check_and_mark("ack_id", "secret-0")
    assert [(event.name, event.key, event.reason) for event in events[-3:]] == [
        ("miss", "secret-49", "absent"),
        ("hit", "secret-0", ""),
        ("miss", "secret-0", "expired"),
    ]
    stats = cache.stats()
    assert stats.scopes.keys() == {"ack_id"}, "fifty messages make one series, not fifty"
    assert "secret" not in repr(stats)
    assert "private" not in repr(events)


# -- the consumers -----------------------------------------------------------------------------------------------


def test_s3_16_a_result_is_known_by_its_assignment_id(router: Router, ledger: Ledger) -> None:
    assert router.handle(exec_result("a-1", "r-1"))
    assert not router.handle(exec_result("a-1", "r-2"))
    assert router.handle(exec_result("a-2", "r-1"))
    assert ledger.noted("result") == ["a-1", "a-2"]


def test_s3_17_a_result_without_assignment_id_is_known_by_its_request_id(router: Router, ledger: Ledger) -> None:
    assert router.handle(exec_result(None, "r-1"))
    assert not router.handle(exec_result(None, "r-1"))
    assert router.handle(exec_result(None, "r-2"))
    assert router.handle(exec_result("r-1", "r-9")), "an assignment that is called as a request was is another message"
    assert ledger.noted("result") == ["r-1", "r-1", "r-2"]


def test_s3_18_a_seen_result_is_skipped_and_acknowledged(router: Router, ledger: Ledger) -> None:
    broker = Broker([exec_result("a-1")], copies=5)
    router.serve(broker)
    assert ledger.noted("result") == ["a-1"]
    assert len(broker.acknowledged) == 5
    assert broker.receive() is None, "nothing comes back"


def test_s3_19_an_ack_is_handled_once_apart_from_the_result(router: Router, ledger: Ledger) -> None:
    broker = Broker([exec_result("a-1"), exec_ack("a-1")], copies=3)
    router.serve(broker)
    assert ledger.noted("ack") == ["a-1"]
    assert ledger.noted("result") == ["a-1"]
    assert len(broker.acknowledged) == 6


def test_s3_20_the_usage_id_is_made_from_assignment_or_request(router: Router, ledger: Ledger, cache: Once) -> None:
    router.handle(exec_result("a-1", "r-1"))
    router.handle(exec_result(None, "r-2"))
    assert ledger.noted("usage") == ["usage-a-1", "usage-r-2"]
    for usage_id in ("usage-a-1", "usage-r-2"):
        assert cache.check_and_mark("usage_id", usage_id) == "seen"


def test_s3_21_usage_is_emitted_once_though_the_result_is_processed_again(
    router: Router, effects: Noted, ledger: Ledger
) -> None:
    """It breaks before the result is stored, then after it was billed: the message comes back, and is not billed."""
    failures = iter([("result", ConnectionResetError("the database went away")), ("usage", TimeoutError("no reply"))])
    expected, failure = next(failures)

    def trouble(effect: str) -> None:
        nonlocal expected, failure
        if effect == expected:
            raised = failure
            expected, failure = next(failures, ("", raised))
            raise raised

    effects.trouble = trouble
    broker = Broker([exec_result("a-1")])
    router.serve(broker)
    assert len(broker.delivered) == 3
    assert len(broker.acknowledged) == 1
    assert ledger.noted("result") == ["a-1", "a-1"], "the second time because its usage got no reply"
    assert ledger.noted("usage") == ["usage-a-1"]


def test_s3_22_the_data_is_kept_for_audit(router: Router, cache: Once) -> None:
    router.handle(exec_result("a-1", status="failed", tenant_id="t-9"))
    router.handle(exec_ack("a-1", status="rejected"))
    kept = {}
    for key_type, name in (("assignment_id", "a-1"), ("ack_id", "a-1"), ("usage_id", "usage-a-1")):
        entry = cache.get(name, scope=key_type)
        assert entry is not None
        kept[key_type] = entry.additional_data
    assert kept == {
        "assignment_id": {"status": "failed", "job_type": "text.generate", "provider_id": "provider-7"},
        "ack_id": {"status": "rejected", "message": "on it"},
        "usage_id": {"tenant_id": "t-9", "provider_id": "provider-7", "status": "failed"},
    }


# -- the document's own test suite, with consumers that really run at the same time --------------------------------


def test_s3_23_result_idempotency_by_assignment_id(router: Router, ledger: Ledger) -> None:
    broker = Broker([exec_result("a-1", "r-1"), exec_result("a-1", "r-2")], copies=8)
    deliver(router, broker)
    assert ledger.noted("result") == ["a-1"]
    assert len(broker.acknowledged) == 16


def test_s3_24_result_idempotency_by_request_id(router: Router, ledger: Ledger) -> None:
    broker = Broker([exec_result(None, "r-1"), exec_result(None, "r-2")], copies=8)
    deliver(router, broker)
    assert ledger.noted("result") == ["r-1", "r-2"]
    assert len(broker.acknowledged) == 16


def test_s3_25_usage_event_idempotency(router: Router, ledger: Ledger) -> None:
    """Eight places emit the usage of one assignment at once."""
    in_threads(8, lambda _: router.emit_usage(exec_result("a-1")))
    assert ledger.noted("usage") == ["usage-a-1"]


def test_s3_26_ack_idempotency(router: Router, ledger: Ledger) -> None:
    broker = Broker([exec_ack("a-1"), exec_ack("a-2", "rejected")], copies=8)
    deliver(router, broker)
    assert ledger.noted("ack") == ["a-1", "a-2"]
    assert len(broker.acknowledged) == 16


def test_s3_27_assignment_publication_idempotency(router: Router, effects: Noted, ledger: Ledger) -> None:
    """Eight schedulers publish one assignment; and a publication that failed is not taken for done."""
    assert sorted(in_threads(8, lambda _: router.publish({"assignment_id": "a-1"}))) == [False] * 7 + [True]

    def trouble(effect: str) -> None:
        raise ConnectionError("the broker is away")

    effects.trouble = trouble
    with pytest.raises(ConnectionError):
        router.publish({"assignment_id": "a-2"})
    effects.trouble = lambda effect: None
    assert router.publish({"assignment_id": "a-2"})
    assert ledger.noted("publication") == ["a-1", "a-2"]


def test_s3_28_concurrent_result_processing(router: Router, ledger: Ledger) -> None:
    names = [f"a-{number:02}" for number in range(20)]
    broker = Broker(map(exec_result, names), copies=4)
    deliver(router, broker)
    assert ledger.noted("result") == names
    assert len(broker.acknowledged) == 80


def test_s3_29_concurrent_usage_emission(router: Router, effects: Noted, ledger: Ledger) -> None:
    """Results whose processing fails the first time, so that they come back while their copies are being handled."""
    names = [f"a-{number:02}" for number in range(10)]
    tried: Counter[str] = Counter()

    def trouble(effect: str) -> None:
        tried[effect] += 1
        if effect == "result" and tried[effect] % 2:
            raise ConnectionError("every second time")

    effects.trouble = trouble
    broker = Broker(map(exec_result, names), copies=4)
    deliver(router, broker)
    assert ledger.noted("usage") == [f"usage-{name}" for name in names]
    assert ledger.noted("result") == names
    assert len(broker.acknowledged) == 40
    assert len(broker.delivered) > 40


def test_s3_30_eight_processes_bill_each_assignment_once(
    shared_space: Space, ledger: Ledger, eight_processes: Executor
) -> None:
    names = [f"a-{number:02}" for number in range(20)]
    messages = [message for name in names for message in (exec_ack(name), exec_result(name))]
    new = in_processes(eight_processes, jobs.consume, shared_space.url, ledger.file, messages)
    assert sum(new) == 40
    assert ledger.noted("usage") == [f"usage-{name}" for name in names]
    assert ledger.noted("result") == names
    assert ledger.noted("ack") == names


# -- starting up, and the limitations ------------------------------------------------------------------------------


def unreachable(kind: str, directory: Path) -> str:
    """A URL behind which there is no store."""
    return {
        "sqlite": f"sqlite:///{directory / 'missing' / 'semel.db'}",
        "redis": f"redis://127.0.0.1:{servers.free_port()}/0",
        "postgres": f"postgresql://postgres@/none?host={directory / 'missing'}",
    }[kind]


def test_s3_31_the_cache_is_up_before_the_consumers(space: Space, ledger: Ledger, tmp_path: Path) -> None:
    """Entering ``with Once(...)`` is the check: a store that is down stops the start, before any message is taken."""
    broker = Broker([exec_result("a-1")], copies=3)
    if space.kind != "memory":  # which cannot be down
        with pytest.raises(StoreUnavailable):
            supervise(Once(unreachable(space.kind, tmp_path), retry_for=0.1), Noted(ledger), broker)
        assert broker.delivered == []
    supervise(Once(f"{space.kind}://" if space.kind == "memory" else space.url), Noted(ledger), broker)
    assert ledger.noted("result") == ["a-1"]
    assert len(broker.acknowledged) == 3


def test_s3_32_publication_is_guarded_too(router: Router, ledger: Ledger) -> None:
    assert [router.publish({"assignment_id": "a-1"}) for _ in range(3)] == [True, False, False]
    assert ledger.noted("publication") == ["a-1"]


def test_s3_32_expiry_is_exact_at_read_whatever_the_cleaner_does(space: Space) -> None:
    """To the microsecond, with the cleaner switched off."""
    cache = space.open(policy=Policy.router(), collect=False)
    cache.check_and_mark("ack_id", "a-1")
    space.clock.advance(HOUR)
    assert cache.get("a-1", scope="ack_id") is not None
    assert cache.check_and_mark("ack_id", "a-1") == "seen"
    space.clock.advance(0.000001)
    assert cache.get("a-1", scope="ack_id") is None
    assert cache.check_and_mark("ack_id", "a-1") == "not_seen"


def test_s3_32_growth_is_bounded_by_what_is_alive(space: Space) -> None:
    """Five hours of a hundred messages each leave what is alive, and the counters do not grow with them."""
    cache = space.open(policy=Policy.router())
    for hour in range(5):
        for number in range(100):
            cache.check_and_mark("ack_id", f"m-{hour}-{number}")
        space.clock.advance(HOUR + 1)
        cache.check_and_mark("usage_id", f"alive-{hour}")
        assert cache.purge() == 100 + (hour > 0)
        held = cache.stats().held
        assert (held.live, held.expired) == (1, 0)
    assert cache.stats().scopes.keys() == {"ack_id", "usage_id"}


def test_s3_32_a_message_that_keeps_failing_leaves_nothing_behind() -> None:
    """In memory the growth is counted in bytes: thousands of failed deliveries hold less than an entry each would."""
    cache = Once("memory://", policy=Policy.router(), clock=FakeClock())

    @cache.consumer("assignment_id", key=lambda message: message)
    def handle(message: str) -> None:
        raise ConnectionError("the database is away")

    def fail(times: int) -> None:
        for _ in range(times):
            with pytest.raises(ConnectionError):
                handle("a-1")

    fail(2000)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        fail(5000)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
        cache.close()
    assert grown < 5000 * 100
