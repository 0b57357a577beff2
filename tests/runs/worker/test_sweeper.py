"""The sweeper turn by turn, on a clock that the test sets: what it reports of lost runs, and what it publishes."""

import pytest

from semel import App
from semel._concurrency.sync import run_sync
from semel.runs.hooks import RunEvent
from semel.runs.store.outbox import OutboxEvent
from semel.runs.worker.sweeper import Sweeper
from support.runs_harness import RunsHarness


def sweep(app: App) -> int:
    """One turn; returns how many lost runs it found."""
    store = app._engine.store
    return run_sync(Sweeper(store, "me", transport=app.transport, hooks=app.hooks, publish=app.publish).sweep())


def test_the_duration_of_a_lost_run_is_that_of_its_last_attempt_until_it_was_taken_back(harness: RunsHarness) -> None:
    """The first attempt lasted longer, and there was a pause between them; neither counts."""
    app, heard = harness.open({"lease": 60, "max_lost": 2}, clock=harness.clock), list[RunEvent]()
    hand = harness.hand(app)
    run = app.submit("add", {"a": 1})
    for seconds in (500, 64):
        harness.clock.advance(30)
        assert hand.lease_this(run) is not None
        harness.clock.advance(seconds)
        app.on_event(heard.append)
        assert sweep(app) == 1
    assert app.get(run.id).status == "FAILED"
    stuck = RunEvent("stuck", count=1)
    assert heard == [stuck, stuck, RunEvent("ended", "add", "FAILED", 64.0)]


class Publishing:
    """Publishes events, and fails while it has fewer than ``failures`` failures."""

    def __init__(self, *, only: str, failures: int = 1) -> None:
        self.told: list[str] = []
        self._only = only
        self._left = failures

    def __call__(self, event: OutboxEvent) -> None:
        if event.name == self._only and self._left:
            self._left -= 1
            raise ConnectionError("the other side is away")
        self.told.append(event.name)


@pytest.mark.parametrize("name", ["RunCreated", "RunStarted", "RunCompleted"])
def test_an_event_that_could_not_be_published_waits_and_so_do_those_behind_it(harness: RunsHarness, name: str) -> None:
    names = ["RunCreated", "RunStarted", "RunCompleted"]
    publishing = Publishing(only=name, failures=2)
    app = harness.open(clock=harness.clock, publish=publishing)
    hand = harness.hand(app)
    app.submit("add", {"a": 1})
    hand.end(hand.lease()[0])
    place = names.index(name)
    for _ in range(2):
        sweep(app)
        assert publishing.told == names[:place]
        assert unpublished(harness) == 3 - place
    sweep(app)
    assert (publishing.told, unpublished(harness)) == (names, 0)


def unpublished(harness: RunsHarness) -> int:
    (row,) = harness.sql("SELECT count(*) FROM semel_outbox WHERE unpublished")
    count: int = row[0]
    return count
