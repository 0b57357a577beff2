"""Outcomes: replayed exactly as recorded, for as long as they are kept."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

from semel.once.store import Complete, OutcomeData
from semel.testing.harness import SCOPE, World, claim_request, outcome_data
from semel.types import Outcome, Replay

FALSY: tuple[Any, ...] = (None, 0, 0.0, False, "", b"", [], {}, (), set(), frozenset(), Decimal(0), timedelta(0))
VALUES: tuple[Any, ...] = (
    True,
    -1,
    2**63,
    -(2**64) - 1,
    10**400,
    0.1,
    -0.0,
    float("inf"),
    "text",
    "na\u00efve \U0001f600 \x00 \u2028",
    b"\x00\xff",
    bytearray(b"ab"),
    Decimal("1.10"),
    Decimal("-0.00"),
    Decimal("1E+400"),
    datetime(2024, 2, 29, 23, 59, 59, 999_999),  # noqa: DTZ001 -- a naive datetime replays naive
    datetime(2024, 2, 29, tzinfo=UTC),
    datetime(2024, 7, 1, 12, tzinfo=timezone(timedelta(hours=5, minutes=45))),
    date(1, 1, 1),
    time(23, 59, 59, 1, tzinfo=UTC),
    timedelta(days=-1, microseconds=1),
    UUID(int=7),
    [1, [2, (3,)]],
    (1, "two", None),
    {1, 2},
    frozenset({"a"}),
    {"nested": {"list": [1, {"set": {1}}], "none": None}},
    {1: "int", (2, 3): "tuple", None: "none"},
    1 + 2j,
)


class Outcomes:
    """A replayed value equals the recorded one."""

    def test_falsy_values_replay_as_themselves(self, world: World) -> None:
        """None, zero, False and empty values are outcomes like any other, however they were recorded."""
        _replay_exactly(world, FALSY)

    def test_values_replay_exactly(self, world: World) -> None:
        """Replayed values are equal and of the same type: big ints, Decimal, datetimes, bytes, tuples, sets, nested."""
        _replay_exactly(world, VALUES)

    def test_bytes_are_stored_as_they_are(self, world: World) -> None:
        """A store does not interpret the bytes that it keeps, few or many, nor an outcome's kind."""
        for number, data in enumerate((b"", b"\x00", bytes(range(256)), b"'\"\\%s\r\n\x1a", b"\xff" * 1_000_000)):
            kind = f"kind {number}"
            claim = world.granted(kind)
            assert world.run(world.store.complete([Complete(SCOPE, kind, claim.fence, OutcomeData(kind, data))])) == [
                True
            ]
            world.granted(f"marked {number}", done=OutcomeData(kind, data))
            for key in (kind, f"marked {number}"):
                outcome = _replayed(world, key)
                assert outcome.kind == kind
                assert outcome.data == data

    def test_a_value_may_be_kept_for_a_shorter_time_than_its_key(self, world: World) -> None:
        """After its time, counted from completion, the value is gone, but the key is still completed."""
        claim = world.granted(ttl=1000)
        world.clock.advance(5)
        assert world.complete(claim, "short-lived", value_ttl=10)
        ends = world.clock.us + 10_000_000
        world.clock.us = ends
        assert _replayed(world).value == "short-lived"
        assert world.value() == "short-lived"
        world.clock.us = ends + 1
        assert _replayed(world).gone
        outcome = world.record().outcome
        assert outcome is not None
        assert outcome.gone
        world.clock.us = claim.expires_us
        assert _replayed(world).gone
        world.clock.us = claim.expires_us + 1
        assert world.get() is None

    def test_a_value_recorded_with_the_claim_fades_alike(self, world: World) -> None:
        """If the outcome is recorded with the claim, the value's time counts from the claim."""
        world.granted(ttl=1000, done=outcome_data("short-lived", value_ttl=10))
        world.clock.advance(10)
        assert _replayed(world).value == "short-lived"
        world.clock.us += 1
        assert _replayed(world).gone

    def test_a_value_without_a_time_of_its_own_lives_as_long_as_its_key(self, world: World) -> None:
        """The value is kept to the last microsecond of retention; a longer time of its own changes nothing."""
        claim = world.completed("plain", value=1, ttl=1000)
        other = world.granted("longer", ttl=1000)
        assert world.complete(other, 2, value_ttl=10_000)
        world.clock.us = claim.expires_us
        assert (_replayed(world, "plain").value, _replayed(world, "longer").value) == (1, 2)
        world.clock.us = claim.expires_us + 1
        assert world.get("plain") is None
        assert world.get("longer") is None

    def test_a_new_owner_starts_without_the_old_outcome(self, world: World) -> None:
        """A key that is claimed again has nothing of its former value, kind and times."""
        claim = world.granted(ttl=10)
        assert world.complete(claim, "old", value_ttl=5)
        world.clock.us = claim.expires_us + 1
        world.granted()
        record = world.record()
        assert record.outcome is None
        assert record.data is None
        assert (record.completed_us, record.kind, record.value_until_us) == (0, "", None)


def _replay_exactly(world: World, values: tuple[Any, ...]) -> None:
    for number, value in enumerate(values):
        world.completed(f"completed {number}", value=value)
        world.granted(f"marked {number}", done=outcome_data(value))
    for number, value in enumerate(values):
        for key in (f"completed {number}", f"marked {number}"):
            replayed = _replayed(world, key).value
            assert repr(replayed) == repr(value)
            assert type(replayed) is type(value)


def _replayed(world: World, key: str = "key") -> Outcome:
    (verdict,) = world.claims([claim_request(key)])
    assert isinstance(verdict, Replay), f"expected a replay of {key!r}, got {verdict}"
    return verdict.outcome
