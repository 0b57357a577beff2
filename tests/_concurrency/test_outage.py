"""An outage is logged when it begins, once a minute, and when it ends, however often it is met."""

import logging

import pytest

from semel._concurrency.retry import Outage

LOG = logging.getLogger("semel.test")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lasting(outage: Outage, clock: Clock, seconds: int) -> None:
    """Somebody tries four times a second."""
    for _ in range(4 * seconds):
        outage.failed("no route to host")
        clock.now += 0.25


def test_an_outage_is_logged_when_it_begins_once_a_minute_and_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    outage = Outage(LOG, "the database", "retrying", clock=clock)
    for _ in range(2):
        outage.succeeded()
        lasting(outage, clock, 150)
        assert outage.ongoing
        clock.now += 5
        outage.succeeded()
        outage.succeeded()
        assert not outage.ongoing
    once = [
        "the database is unavailable; retrying: no route to host",
        "the database has been unavailable for 60 s; retrying: no route to host",
        "the database has been unavailable for 120 s; retrying: no route to host",
        "the database is available again after 155 s",
    ]
    assert caplog.messages == [*once, *once]


def test_what_fails_and_succeeds_by_turns_is_one_outage(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    outage = Outage(LOG, "the database", "retrying", clock=clock)
    for _ in range(100):
        lasting(outage, clock, 1)
        outage.succeeded()
    assert len(caplog.messages) == 2


def test_an_outage_that_is_short_is_not_logged_where_it_means_nothing(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    outage = Outage(LOG, "the listener", "polling goes on", patience=5, clock=clock)
    lasting(outage, clock, 4)
    clock.now += 2
    outage.succeeded()
    assert caplog.messages == []
    lasting(outage, clock, 6)
    clock.now += 2
    outage.succeeded()
    assert caplog.messages == [
        "the listener is unavailable; polling goes on: no route to host",
        "the listener is available again after 8 s",
    ]
