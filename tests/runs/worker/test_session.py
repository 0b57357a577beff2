"""What a worker reports when it starts a run, on a clock that the test sets."""

from semel.runs.hooks import RunEvent
from support.runs_harness import PATIENCE, RunsHarness


def test_the_lag_of_a_run_begins_when_it_is_due_and_ends_when_it_is_leased(harness: RunsHarness) -> None:
    """One is due when it is submitted, one 100 seconds later: the lag of each is counted from its own moment."""
    app, heard = harness.timeless, list[RunEvent]()
    app.on_event(heard.append)
    now, later = app.submit("add", {"a": 1}), app.submit("add", {"a": 2}, delay=100)
    harness.clock.advance(108)
    with harness.working(app, sweep_every=None):
        for run in (now, later):
            assert app.wait(run.id, timeout=PATIENCE).status == "SUCCEEDED"
    assert sorted(each.seconds for each in heard if each.kind == "started") == [8.0, 108.0]
