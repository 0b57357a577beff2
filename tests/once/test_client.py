"""`Once` and `AsyncOnce`: what they do unless they are told otherwise, and how they are opened and closed."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import NullPool, create_engine
from sqlalchemy.orm import Session

from semel import AsyncOnce, IdempotentProcessor, InvalidRequest, KeyReused, Once, StoreUnavailable
from semel._concurrency.batching import ThreadBatcher, Unbatched
from semel.once.stores.memory import MemoryStore
from semel.testing import FaultyStore


class Noted(FaultyStore):
    """Counts how often it is closed, too."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())

    async def close(self) -> None:
        self.calls["close"] += 1


@pytest.fixture
def store() -> Noted:
    return Noted()


def test_it_says_what_it_is() -> None:
    assert repr(Once("memory://")) == "Once(MemoryStore)"
    assert repr(AsyncOnce("memory://")) == "AsyncOnce(MemoryStore)"


def test_its_context_opens_and_closes_the_store(store: Noted) -> None:
    with Once(store) as once:
        assert isinstance(once, Once)
        assert (store.calls["open"], store.calls["close"]) == (1, 0)
    assert store.calls["close"] == 1

    async def scenario() -> None:
        async with AsyncOnce(store) as once:
            assert isinstance(once, AsyncOnce)
            assert (store.calls["open"], store.calls["close"]) == (2, 1)
        assert store.calls["close"] == 2

    asyncio.run(scenario())


def test_a_store_that_cannot_be_opened_is_closed_and_nothing_is_run(store: Noted) -> None:
    store.away = True
    with pytest.raises(StoreUnavailable), Once(store, retry_for=0):
        pytest.fail("the store is not open")
    assert store.calls["close"] == 1

    async def scenario() -> None:
        async with AsyncOnce(store, retry_for=0):
            pytest.fail("the store is not open")

    with pytest.raises(StoreUnavailable):
        asyncio.run(scenario())
    assert store.calls["close"] == 2


def test_only_a_function_is_called(store: Noted) -> None:
    once: Any = Once(store)
    for use in (lambda: once.call("key", 5), lambda: once.guard(5), lambda: AsyncOnce(store).guard(5)):  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="only a function can be guarded, not 5"):
            use()
    assert store.calls["claim"] == 0


def watched(once: Once | AsyncOnce) -> int:
    """How many leases are renewed in the background now."""
    return len(once._engine._background.here().renewer.watched())


def test_work_is_renewed_unless_it_says_otherwise() -> None:
    once = Once("memory://", collect=False)

    def work(key: str) -> int:
        return watched(once)

    def by_call(**options: Any) -> int:
        return once.call("called", lambda: watched(once), **options).value

    def by_guard(**options: Any) -> int:
        return once.guard(scope="guarded", **options)(work)("key")

    def by_consumer(**options: Any) -> int:
        return once.consumer("consumed", key=lambda key: key, **options)(work)("key")

    calls: list[Callable[..., int]] = [by_call, by_guard, by_consumer]
    assert [call() for call in calls] == [1, 1, 1]
    assert IdempotentProcessor(work, once).process("key").result == 1
    for scope in ("default", "guarded", "consumed"):
        once.forget_scope(scope)
    assert [call(renew=False) for call in calls] == [0, 0, 0]


def test_awaited_work_is_renewed_unless_it_says_otherwise() -> None:
    async def scenario() -> None:
        once = AsyncOnce("memory://", collect=False)

        async def work(key: str = "key") -> int:
            return watched(once)

        async def values(**options: Any) -> list[int]:
            called = await once.call("called", work, **options)
            guarded = await once.guard(scope="guarded", **options)(work)("key")
            consumed = await once.consumer("consumed", key=lambda key: key, **options)(work)("key")
            return [called.value, guarded, consumed]

        assert await values() == [1, 1, 1]
        for scope in ("default", "guarded", "consumed"):
            await once.forget_scope(scope)
        assert await values(renew=False) == [0, 0, 0]
        await once.close()

    asyncio.run(scenario())


def test_arguments_are_compared_for_a_function_but_not_for_a_message() -> None:
    """A message that is delivered again may look different."""
    once = Once("memory://", collect=False)
    guarded = once.guard(scope="guarded", key=lambda message: message["id"])(lambda message: "done")
    consumed = once.consumer("consumed", key=lambda message: message["id"])(lambda message: "done")
    assert [guarded({"id": "a"}), consumed({"id": "a"})] == ["done", "done"]
    with pytest.raises(KeyReused):
        guarded({"id": "a", "delivery": 2})
    assert consumed({"id": "a", "delivery": 2}) is None
    assert set(once.stats().doors) == {("message", "consumed"), ("function", "guarded")}


def test_arguments_are_compared_for_an_async_function_but_not_for_a_message() -> None:
    async def scenario() -> None:
        once = AsyncOnce("memory://", collect=False)

        async def work(message: dict[str, Any]) -> str:
            return "done"

        guarded = once.guard(scope="guarded", key=lambda message: message["id"])(work)
        consumed = once.consumer("consumed", key=lambda message: message["id"])(work)
        assert [await guarded({"id": "a"}), await consumed({"id": "a"})] == ["done", "done"]
        with pytest.raises(KeyReused):
            await guarded({"id": "a", "delivery": 2})
        assert await consumed({"id": "a", "delivery": 2}) is None
        await once.close()

    asyncio.run(scenario())


def test_expired_keys_are_collected_unless_it_says_otherwise() -> None:
    for options, expected in (({}, True), ({"collect": False}, False)):
        with Once("memory://", **options) as once:
            once.claim("key")
            assert once._engine._collector.running is expected


def test_inside_a_transaction_nothing_is_retried(sqlite_url: str) -> None:
    """What failed there has ended the transaction."""
    with Once(sqlite_url, collect=False) as once, Session(create_engine(sqlite_url, poolclass=NullPool)) as session:
        inside = once.on(session)
        assert inside._engine._retry_for == 0
        assert inside.call("key", lambda: 7).value == 7


@pytest.mark.parametrize(
    ("url", "batched", "collected"),
    [
        pytest.param("memory://", False, True, id="memory"),
        pytest.param("sqlite:///semel.db", True, True, id="sqlite"),
        pytest.param("postgresql://host/name", True, True, id="postgres"),
        pytest.param("redis://host/0", True, False, id="redis"),
    ],
)
def test_calls_are_sent_together_where_each_costs_a_round_trip(url: str, batched: bool, collected: bool) -> None:
    """And expired keys are collected where the store does not expire them by itself."""
    engine = Once(url)._engine
    assert isinstance(engine._send_claim, ThreadBatcher if batched else Unbatched)
    assert engine._collects is collected
