"""B19, for functions and messages: no effect is repeated because of its value, or because it took too long."""

import asyncio
from dataclasses import dataclass
from enum import Enum

import pytest

from acceptance.spaces import Space
from semel import (
    Granted,
    IdempotentProcessor,
    InvalidRequest,
    Once,
    OutcomeGone,
    Replay,
    Unencodable,
    Unknown,
    current_claim,
)


class Opaque:
    """What nobody could store."""


class Currency(Enum):
    EUR = "eur"
    USD = "usd"


@dataclass(frozen=True)
class Charge:
    order: str
    cents: int
    currency: Currency


def test_b19_a_value_that_cannot_be_stored_repeats_no_effect(once: Once) -> None:
    """The first caller is told that its program is wrong, the others that the value is lost; one charge is made."""
    charged: list[str] = []

    @once.guard(scope="charges", key=lambda order: order)
    def charge(order: str):  # type: ignore[no-untyped-def]  # without an annotation nothing is known before
        charged.append(order)
        return {"receipt": Opaque()}

    with pytest.raises(Unencodable, match=r"Opaque.*will not be done again"):
        charge("order-1")
    for _ in range(3):
        with pytest.raises(OutcomeGone, match=r"could not be stored.*Opaque"):
            charge("order-1")
    assert charged == ["order-1"]
    record = once.get("order-1", scope="charges")
    assert record is not None
    assert record.status == "completed"
    assert record.outcome is not None
    assert record.outcome.gone


def test_b19_the_same_in_an_event_loop(space: Space) -> None:
    charged: list[str] = []

    async def charge(order: str):  # type: ignore[no-untyped-def]  # as above
        charged.append(order)
        return Opaque()

    async def scenario() -> None:
        async with space.open_async() as once:
            guarded = once.guard(scope="charges", key=lambda order: order)(charge)
            with pytest.raises(Unencodable):
                await guarded("order-1")
            with pytest.raises(OutcomeGone):
                await guarded("order-1")
            with pytest.raises(OutcomeGone):
                await once.call("order-1", lambda: charge("again"), scope="charges")

    asyncio.run(scenario())
    assert charged == ["order-1"]


def test_b19_the_same_for_messages_processors_and_claims(once: Once) -> None:
    """A message whose audit data cannot be stored, or cannot even be made, was handled all the same."""
    handled: list[str] = []
    for number, data in enumerate((lambda _: Opaque(), lambda _: 1 / 0)):
        consume = once.consumer(f"type {number}", key=lambda message: message, data=data)(handled.append)
        with pytest.raises((Unencodable, ZeroDivisionError)):
            consume("m-1")
        assert consume.call("m-1").replayed
    assert handled == ["m-1", "m-1"]

    processed: list[int] = []

    def process(payload: dict[str, int]):  # type: ignore[no-untyped-def]  # as above
        processed.append(payload["id"])
        return Opaque()

    processor = IdempotentProcessor(process, once)
    with pytest.raises(Unencodable):
        processor.process({"id": 1})
    with pytest.raises(OutcomeGone):
        processor.process({"id": 1})
    assert processed == [1]

    verdict = once.claim("by hand")
    assert isinstance(verdict, Granted)
    with pytest.raises(Unencodable):
        once.complete(verdict.claim, Opaque())
    once.complete(verdict.claim, "too late")
    again = once.claim("by hand")
    assert isinstance(again, Replay)
    assert again.outcome.gone


def test_b19_what_the_annotation_names_is_stored_and_replayed_as_that(once: Once) -> None:
    """The dataclass that charged three times: now it is replayed."""
    charged: list[str] = []

    @once.guard(scope="charges", key=lambda order: order)
    def charge(order: str) -> list[Charge]:
        charged.append(order)
        return [Charge(order, 990, Currency.EUR)]

    for _ in range(3):
        assert charge("order-1") == [Charge("order-1", 990, Currency.EUR)]
    assert charged == ["order-1"]
    record = once.get("order-1", scope="charges")
    assert record is not None
    assert record.additional_data == [{"order": "order-1", "cents": 990, "currency": "eur"}], "plain to everybody else"


def test_b19_what_can_never_be_stored_is_refused_before_anything_happens(once: Once) -> None:
    ran: list[str] = []

    def connect() -> Opaque:
        ran.append("connected")
        return Opaque()

    with pytest.raises(InvalidRequest, match=r"connect returns is annotated with Opaque, which can never be stored"):
        once.guard(connect)
    with pytest.raises(InvalidRequest, match="Opaque"):
        once.call("key", connect)
    with pytest.raises(InvalidRequest, match="Opaque"):
        IdempotentProcessor(connect, once)  # type: ignore[arg-type]  # it takes no payload, and is never called
    assert once.get("key") is None
    assert ran == []


def test_b19_work_that_outlasts_its_retention_is_not_done_again(once: Once, space: Space) -> None:
    """An outcome is never born expired: its retention counts from the end of such work."""
    done: list[int] = []

    def slow() -> str:
        done.append(1)
        space.clock.advance(30)
        once.renew(current_claim())
        space.clock.advance(45)
        return "paid"

    assert once.call("order-1", slow, ttl=20, lease=60).value == "paid"
    record = once.get("order-1")
    assert record is not None
    assert record.expires_us == space.clock() + 20_000_000
    space.clock.advance(20)
    assert once.call("order-1", slow, ttl=20, lease=60).replayed
    assert done == [1]
    space.clock.advance(1)
    assert not once.call("order-1", slow, ttl=20, lease=60).replayed


def test_b19_an_owner_that_vanishes_after_its_retention_leaves_an_unknown_outcome(once: Once, space: Space) -> None:
    """Work under ``on_crash="unknown"`` is never done blindly, however long it took before its owner vanished."""
    verdict = once.claim("order-1", lease=60, ttl=20, on_crash="unknown")
    assert isinstance(verdict, Granted)
    space.clock.advance(50)
    once.renew(verdict.claim)
    space.clock.advance(61)
    assert isinstance(once.claim("order-1"), Unknown)
    once.complete(verdict.claim, "it was alive after all")
    again = once.claim("order-1")
    assert isinstance(again, Replay)
