"""The worker: what it leases, how it ends what it holds, and what becomes of it all when it or the database dies."""

import asyncio
import gc
import os
import signal
import socket
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from acceptance.proxy import Line
from semel import App, InvalidRequest, NotMigrated, Run, StoreUnavailable
from semel.cli import main as semel
from semel.runs.store import RunStore, lease, maintenance, transitions
from semel.runs.store.lease import Leased
from semel.runs.store.outbox import OutboxEvent
from semel.runs.worker import Worker, session
from semel.runs.worker.sweeper import ROLE
from support import servers
from support.apps import worker_models
from support.databases import Databases
from support.runs_harness import RunsHarness, effects, touch
from support.waiting import eventually

PATIENCE = 60
MOMENT = 0.000001
POLITE = ("wait_politely", "await_politely", "thread_politely")
DEAF = ("wait_deaf", "await_deaf", "thread_deaf")
QUICK = {"lease": 3}
"""A lease so short that the worker's heart beats twice a second."""


def steps(app: App, run_id: str) -> list[str]:
    return [step.step for step in app.timeline(run_id)]


def is_gone(pid: int) -> bool:
    """Whether the process has ended, buried or not."""
    if Path("/proc/self/stat").exists():
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# -- stopping ------------------------------------------------------------------------------------------------------


def test_sigterm_gives_back_what_is_not_done_in_time_without_charging_an_attempt(harness: RunsHarness) -> None:
    """In a process, in a thread and in the loop; the worker ends with exit code 0, and the next one finishes them."""
    places = {model: harness.place(model) for model in DEAF}
    runs = {model: harness.app.submit(model, {"folder": folder}) for model, folder in places.items()}
    with harness.program(drain=0.3) as program:
        for folder in places.values():
            eventually(lambda folder=folder: effects(folder), "the start")
        program.send(signal.SIGTERM)
        assert program.wait() == 0, program.log
    for model, run in runs.items():
        seen = harness.app.get(run.id)
        assert (seen.status, seen.attempts, seen.losts, seen.errors) == ("PENDING", 0, 0, 0), (model, seen)
        assert steps(harness.app, run.id) == ["created", "leased", "returned"]
    assert harness.app.workers() == []
    assert is_gone(int(effects(places["wait_deaf"])[0][3])), "the child was killed"
    for folder in places.values():
        touch(folder)
    with harness.working(processes=1):
        for run in runs.values():
            ended = harness.app.wait(run.id, timeout=PATIENCE)
            assert (ended.status, ended.attempts, ended.fence) == ("SUCCEEDED", 1, 2)


def test_a_draining_worker_ends_what_it_began_keeps_its_leases_and_begins_nothing(harness: RunsHarness) -> None:
    """The drain outlasts the lease, and another worker sweeps: nothing is lost."""
    app = harness.open(models=QUICK)
    folder = harness.place("drained")
    run = app.submit("wait_deaf", {"folder": folder})
    with harness.working(app, queues=["none"], sweep_every=0.1), harness.program(models=QUICK, drain=50) as program:
        eventually(lambda: effects(folder), "the start")
        program.send(signal.SIGTERM)
        eventually(lambda: [worker for worker in app.workers() if worker.draining], "the drain")
        late = app.submit("add", {"a": 1})
        began = app.get(run.id).heartbeat_us
        eventually(lambda: (app.get(run.id).heartbeat_us or 0) > (began or 0) + 4_000_000, "four seconds of heartbeats")
        touch(folder)
        assert program.wait() == 0, program.log
        ended = app.get(run.id)
    assert (ended.status, ended.attempts, ended.losts) == ("SUCCEEDED", 1, 0)
    assert app.get(late.id).status == "PENDING"


def test_a_second_signal_gives_back_at_once(harness: RunsHarness) -> None:
    folder = harness.place("held")
    run = harness.app.submit("await_deaf", {"folder": folder})
    with harness.program(drain=3000, processes=0) as program:
        eventually(lambda: effects(folder), "the start")
        program.send(signal.SIGTERM)
        eventually(lambda: any(worker.draining for worker in harness.app.workers()), "the drain")
        program.send(signal.SIGINT)
        assert program.wait() == 0, program.log
    assert (harness.app.get(run.id).status, harness.app.get(run.id).attempts) == ("PENDING", 0)


def test_a_worker_leaves_the_garbage_collector_as_it_found_it(harness: RunsHarness) -> None:
    gc.freeze()
    frozen, thresholds = gc.get_freeze_count(), gc.get_threshold()
    worker = Worker(harness.app)
    worker.stop()
    worker.run()
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() > frozen / 2, "what the program had frozen is collected again"


def lock_for_a_while(file: Path, seconds: float) -> None:
    """Somebody else writes to the SQLite file, from now on for some seconds."""
    locked = threading.Event()

    def write() -> None:
        with closing(sqlite3.connect(file, isolation_level=None, timeout=PATIENCE)) as other:
            other.execute("BEGIN IMMEDIATE")
            locked.set()
            time.sleep(seconds)  # the time for which nobody gets the lock

    threading.Thread(target=write).start()
    assert locked.wait(PATIENCE)


def test_told_twice_a_worker_gives_back_although_the_file_is_locked_for_a_while(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else it has to write may fail in time; the runs are tried for longer."""
    monkeypatch.setattr(session, "LAST_WRITE_TIMEOUT", 0.2)
    with databases.empty("sqlite") as database, RunsHarness("sqlite", database.url, tmp_path) as harness:
        folder = harness.place("held")
        run = harness.app.submit("await_deaf", {"folder": folder})
        with harness.working(drain=3000):
            eventually(lambda: effects(folder), "the start")
            lock_for_a_while(Path(database.url.removeprefix("sqlite:///")), 1.0)
        assert (harness.app.get(run.id).status, harness.app.get(run.id).attempts) == ("PENDING", 0)


def test_a_stop_at_the_very_start_is_heard(harness: RunsHarness) -> None:
    async def start_and_stop(turns: int) -> None:
        worker = Worker(harness.app, processes=0)
        serving = asyncio.create_task(worker.serve())
        for _ in range(turns):
            await asyncio.sleep(0)
        worker.stop()
        await asyncio.wait_for(serving, PATIENCE)

    for turns in (0, 1, 2, 3, 5, 8, 13):
        asyncio.run(start_and_stop(turns))
    assert harness.app.workers() == []


def test_children_leave_sigterm_to_their_parent(harness: RunsHarness) -> None:
    """A service manager sends it to all processes at once; the run is drained all the same."""
    folder = harness.place("grouped")
    run = harness.app.submit("wait_deaf", {"folder": folder})
    with harness.program(drain=50) as program:
        child = int(eventually(lambda: effects(folder), "the start")[0][3])
        os.kill(child, signal.SIGTERM)
        program.send(signal.SIGTERM)
        eventually(lambda: any(worker.draining for worker in harness.app.workers()), "the drain")
        touch(folder)
        assert program.wait() == 0, program.log
    ended = harness.app.get(run.id)
    assert (ended.status, ended.attempts, ended.losts) == ("SUCCEEDED", 1, 0)


@pytest.mark.parametrize("slow", [False, True], ids=["at once", "after a while"])
def test_a_worker_whose_task_is_cancelled_leaves_nothing_behind(
    harness: RunsHarness, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    folder = harness.place("cancelled")
    run = harness.app.submit("await_deaf", {"folder": folder})
    give_back, tries = session.WorkerSession._hand_back, count(1)
    if slow:  # the worker waits for its run three times before it can be given back
        monkeypatch.setattr(
            session.WorkerSession, "_hand_back", lambda self: give_back(self) if next(tries) > 3 else None
        )

    async def serve_and_cancel() -> None:
        before = asyncio.all_tasks()
        serving = asyncio.create_task(Worker(harness.app, processes=0).serve())
        await asyncio.to_thread(eventually, lambda: effects(folder), "the start")
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(serving, PATIENCE)
        for _ in range(100):  # the loop may still be closing a generator that was cancelled
            if asyncio.all_tasks() <= before:
                break
            await asyncio.sleep(0.01)
        assert asyncio.all_tasks() <= before

    asyncio.run(serve_and_cancel())
    assert (Path(folder) / "cancelled").exists()
    seen = harness.app.get(run.id)
    assert (seen.status, seen.attempts) == ("PENDING", 0), "given back, uncharged"


# -- cancel --------------------------------------------------------------------------------------------------------


def begun(harness: RunsHarness, app: App, models: Sequence[str]) -> dict[str, tuple[Run, str]]:
    """A run of each of these models, under way, and its folder."""
    begun = {}
    for model in models:
        folder = harness.place(f"{model}-{time.monotonic_ns()}")
        begun[model] = (app.submit(model, {"folder": folder}), folder)
    for model, (_, folder) in begun.items():
        eventually(lambda folder=folder: effects(folder), f"the start of {model}")
    return begun


def test_a_run_that_is_cancelled_gets_time_to_clean_up(harness: RunsHarness) -> None:
    """In a process, in the loop, in a thread."""
    app = harness.open(models=QUICK)
    with harness.working(app, processes=1):
        for run, folder in begun(harness, app, POLITE).values():
            assert app.cancel(run.id, why="no longer wanted").cancel_requested
            ended = app.wait(run.id, timeout=PATIENCE)
            assert (ended.status, ended.attempts) == ("CANCELLED", 1)
            assert (Path(folder) / "cleaned").exists()
            assert steps(app, run.id) == ["created", "leased", "cancel_requested", "cancelled"]
            assert app.timeline(run.id)[2].note == "no longer wanted"


def test_a_run_that_does_not_heed_its_cancel_is_ended_by_force(harness: RunsHarness) -> None:
    """A process is killed, a task is cancelled, a thread is left behind; the slot is free for the next run."""
    app = harness.open(models=QUICK)
    with harness.working(app, concurrency=1, processes=1, threads=1):
        runs = begun(harness, app, DEAF)
        for run, _ in runs.values():
            app.cancel(run.id)
        for model, (run, _) in runs.items():
            assert app.wait(run.id, timeout=PATIENCE).status == "CANCELLED", model
        following = harness.place("following")
        touch(following)
        for model in DEAF:
            assert app.wait(app.submit(model, {"folder": following}).id, timeout=PATIENCE).status == "SUCCEEDED", model
        assert is_gone(int(effects(runs["wait_deaf"][1])[0][3]))
        assert (Path(runs["await_deaf"][1]) / "cancelled").exists()
        for _, folder in runs.values():
            touch(folder)
    for model, (run, _) in runs.items():
        assert app.get(run.id).status == "CANCELLED", f"what {model} does afterwards counts for nothing"


def test_a_run_that_is_done_before_its_cancel_is_heeded_has_succeeded(harness: RunsHarness) -> None:
    app = harness.open(models=QUICK)
    app.model("process", grace=50, lease=5)(worker_models.wait_deaf)
    app.model("thread", grace=50, lease=5, isolation="thread")(worker_models.wait_deaf)
    app.model("loop", grace=50, lease=5)(worker_models.await_deaf)
    with harness.working(app, processes=1):
        runs = begun(harness, app, ("process", "thread", "loop"))
        for run, folder in runs.values():
            app.cancel(run.id)
            touch(folder)
        for model, (run, _) in runs.items():
            assert app.wait(run.id, timeout=PATIENCE).status == "SUCCEEDED", model
            assert app.result(run.id) == "let through"


# -- timeouts ------------------------------------------------------------------------------------------------------


def test_a_run_whose_time_is_up_is_stopped_and_that_is_an_error(harness: RunsHarness) -> None:
    """Wherever it runs, and whether it stops when it is asked to or has to be ended by force."""
    app = harness.open(models={"timeout": 4.0, "max_attempts": 1})
    with harness.working(app, processes=1):
        runs = begun(harness, app, (*POLITE, *DEAF))
        for model, (run, folder) in runs.items():
            ended = app.wait(run.id, timeout=PATIENCE)
            assert (ended.status, ended.attempts, ended.errors, ended.losts) == ("FAILED", 1, 1, 0), model
            assert (ended.last_error or "").startswith("timed out after 4 seconds"), model
            assert (Path(folder) / "cleaned").exists() == (model in POLITE)
            touch(folder)


# -- progress and logs ---------------------------------------------------------------------------------------------


def test_progress_and_logs_are_seen_while_the_run_is_under_way(harness: RunsHarness) -> None:
    app = harness.open(models=QUICK)
    folder = harness.place("speaking")
    run = app.submit("speak", {"folder": folder})
    with harness.working(app, processes=1):
        eventually(lambda: app.get(run.id).progress == 0.4, "progress")
        eventually(lambda: len(app.logs(run.id)) >= 2, "two lines")
        seen = app.get(run.id)
        assert (seen.status, seen.progress_note) == ("RUNNING", "fitting")
        assert [(line.level, line.text) for line in app.logs(run.id)] == [
            ("INFO", "fitted 4 of 10"),
            ("STDOUT", "printed"),
        ]
        touch(folder)
        assert app.wait(run.id, timeout=PATIENCE).progress == 1.0
        lines = eventually(lambda: app.logs(run.id)[2:], "the last line")
    assert [(line.level, line.text) for line in lines] == [("WARNING", "that is all")]
    second = app.logs(run.id)[1]
    assert app.logs(run.id, after=(second.fence, second.line)) == lines


# -- retries and verdicts ------------------------------------------------------------------------------------------


def test_runs_that_failed_together_do_not_come_back_together(harness: RunsHarness) -> None:
    app = harness.timeless
    runs = [app.submit("flaky", {"failures": 1, "why": f"number {number}"}) for number in range(40)]
    with harness.working(app):
        eventually(lambda: all(app.get(run.id).errors for run in runs), "40 errors")
        waits = [app.get(run.id).due_us - harness.clock.us for run in runs]
        assert all(5_000_000 <= wait <= 5_500_000 for wait in waits)
        assert len(set(waits)) > 30
        harness.clock.advance(5.5)
        assert {app.wait(run.id, timeout=PATIENCE).status for run in runs} == {"SUCCEEDED"}


@pytest.mark.parametrize("raised", [True, False])
def test_retry_says_itself_when_to_try_again(harness: RunsHarness, raised: bool) -> None:
    app = harness.timeless
    run = app.submit("decide", {"verdict": "retry", "raised": raised})
    with harness.working(app):
        eventually(lambda: app.get(run.id).errors, "the error")
        seen = app.get(run.id)
        assert (seen.status, seen.attempts, seen.last_error) == ("PENDING", 1, "the other side is busy")
        assert seen.due_us == harness.clock.us + 30_000_000
        harness.clock.advance(30)
        assert app.wait(run.id, timeout=PATIENCE).attempts == 2


@pytest.mark.parametrize("raised", [True, False])
def test_fatal_ends_the_run_with_its_first_attempt(harness: RunsHarness, raised: bool) -> None:
    run = harness.app.submit("decide", {"verdict": "fatal", "raised": raised})
    with harness.working():
        ended = harness.app.wait(run.id, timeout=PATIENCE)
    assert (ended.status, ended.attempts, ended.last_error) == ("FAILED", 1, "this cannot work")


@pytest.mark.parametrize("raised", [True, False])
def test_a_snooze_costs_no_attempt_however_often(harness: RunsHarness, raised: bool) -> None:
    app = harness.timeless
    run = app.submit("decide", {"verdict": "snooze", "raised": raised, "times": 5})
    with harness.working(app):
        for snoozes in range(1, 6):
            eventually(lambda snoozes=snoozes: steps(app, run.id).count("snoozed") == snoozes, f"snooze {snoozes}")
            seen = app.get(run.id)
            assert (seen.status, seen.attempts, seen.errors, seen.last_error) == ("PENDING", 0, 0, None)
            assert seen.due_us == harness.clock.us + 45_000_000
            harness.clock.advance(45)
        ended = app.wait(run.id, timeout=PATIENCE)
    assert (ended.status, ended.attempts, ended.fence, app.result(run.id)) == ("SUCCEEDED", 1, 6, 1)


def test_an_error_that_the_model_declares_fatal_is_known_in_a_child_process(harness: RunsHarness) -> None:
    app = harness.app
    app.model("declared", fatal=worker_models.Hopeless)(worker_models.hopeless)
    app.model("undeclared", backoff=(0,), max_attempts=2)(worker_models.hopeless)
    runs = [app.submit(name) for name in ("declared", "undeclared")]
    with harness.working(processes=1):
        ended = [app.wait(run.id, timeout=PATIENCE) for run in runs]
    assert [(run.status, run.attempts) for run in ended] == [("FAILED", 1), ("FAILED", 2)]


def test_a_result_that_has_no_json_form_or_is_too_large_fails_at_once(harness: RunsHarness) -> None:
    app = harness.open(max_result_bytes=1000)

    @app.model("strange", isolation="thread")
    def strange() -> object:
        return object()

    runs = [app.submit("strange"), app.submit("large", {"size": 2000})]
    with harness.working(app, processes=1):
        ended = [app.wait(run.id, timeout=PATIENCE) for run in runs]
    assert [(run.status, run.attempts, run.errors) for run in ended] == [("FAILED", 1, 1)] * 2
    assert all(run.last_error for run in ended)


# -- poison --------------------------------------------------------------------------------------------------------


def test_a_run_that_kills_every_process_it_gets_ends_failed(harness: RunsHarness) -> None:
    """It is counted as lost, not as the model's error, and told; the worker lives and goes on with others."""
    app = harness.open(models={"max_lost": 2})
    folder = harness.place("poison")
    run = app.submit("poison", {"folder": folder})
    with harness.working(app, processes=1) as worker:
        ended = app.wait(run.id, timeout=PATIENCE)
        other = app.submit("add_apart", {"a": 1})
        assert app.wait(other.id, timeout=PATIENCE).worker == worker.id
    assert (ended.status, ended.attempts, ended.losts, ended.errors) == ("FAILED", 2, 2, 0)
    assert ended.last_error == "the child process was killed by SIGKILL (out of memory?)"
    assert [line[1:3] for line in effects(folder)] == [["1", "1"], ["2", "2"]]
    assert steps(app, run.id) == ["created", "leased", "lost", "leased", "lost"]


def test_a_run_that_kills_every_worker_ends_failed(harness: RunsHarness) -> None:
    """It takes the whole worker with it, twice; whoever sweeps then gives it up."""
    terms = {"max_lost": 2, "lease": 1.5}
    app = harness.open(models=terms)
    folder = harness.place("poison")
    run = app.submit("poison_here", {"folder": folder})
    for _ in range(2):
        with harness.program(models=terms, sweep_every=0.1, processes=0) as program:
            assert program.wait() == -signal.SIGKILL
    with harness.working(app, sweep_every=0.1):
        ended = app.wait(run.id, timeout=PATIENCE)
    assert (ended.status, ended.attempts, ended.losts, ended.errors) == ("FAILED", 2, 2, 0)
    assert "was lost: no sign of life before the lease ended" in (ended.last_error or "")
    assert len(effects(folder)) == 2


# -- what is leased, and in which order ----------------------------------------------------------------------------


def test_higher_priorities_first_then_the_older(harness: RunsHarness) -> None:
    folder = harness.place("order")
    priorities = [0, 5, -3, 5, 0, 100]
    runs = [
        harness.app.submit("note", {"folder": folder, "number": number}, priority=priority)
        for number, priority in enumerate(priorities)
    ]
    with harness.working(concurrency=1):
        for run in runs:
            harness.app.wait(run.id, timeout=PATIENCE)
    began = {line[0]: place for place, line in enumerate(effects(folder))}
    assert sorted(range(6), key=lambda number: began[runs[number].id]) == [5, 1, 3, 0, 4, 2]


def test_a_model_has_a_queue_and_a_priority_that_a_submit_overrides(harness: RunsHarness) -> None:
    harness.app.model("urgent", queue="fast", priority=7)(worker_models.add)
    run, other = (
        harness.app.submit("urgent", {"a": 1}),
        harness.app.submit("urgent", {"a": 2}, queue="slow", priority=0),
    )
    assert (run.queue, run.priority, other.queue, other.priority) == ("fast", 7, "slow", 0)


def test_queues_are_served_in_their_order_and_no_others(harness: RunsHarness) -> None:
    folder = harness.place("order")

    def submit(number: int, queue: str) -> str:
        return harness.app.submit("note", {"folder": folder, "number": number}, queue=queue).id

    slow, other, fast = submit(1, "slow"), submit(2, "other"), submit(3, "fast")
    with harness.working(concurrency=1, queues=["fast", "slow"]):
        for run_id in (slow, fast):
            harness.app.wait(run_id, timeout=PATIENCE)
        assert harness.app.get(other).status == "PENDING"
    assert [line[0] for line in effects(folder)] == [fast, slow]


def test_a_model_that_a_worker_does_not_know_waits_for_one_who_does(harness: RunsHarness) -> None:
    """It is neither failed nor in the way of what the worker knows, and says what it waits for."""
    knowing = harness.open()
    knowing.model("novel", isolation="thread", priority=9)(worker_models.add_apart)
    run = knowing.submit("novel", {"a": 1})
    with harness.working():
        known = harness.app.submit("add", {"a": 1})
        assert harness.app.wait(known.id, timeout=PATIENCE).status == "SUCCEEDED"
        waiting = harness.app.waiting(run.id)
        assert waiting is not None
        assert "no live worker of the queue 'default' knows the model 'novel'" in waiting.reason
        seen = harness.app.get(run.id)
        assert (seen.status, seen.attempts, seen.fence) == ("PENDING", 0, 0)
        with harness.working(knowing):
            assert knowing.wait(run.id, timeout=PATIENCE).status == "SUCCEEDED"


def test_a_model_for_which_the_worker_has_no_place_is_left_to_others(harness: RunsHarness) -> None:
    run = harness.app.submit("add_apart", {"a": 1})
    with harness.working():
        harness.app.wait(harness.app.submit("add", {"a": 1}).id, timeout=PATIENCE)
        assert harness.app.get(run.id).status == "PENDING"


def test_a_delayed_run_starts_when_it_is_due(harness: RunsHarness) -> None:
    app = harness.timeless
    run = app.submit("add", {"a": 1}, delay=100)
    with harness.working(app):
        app.wait(app.submit("add", {"a": 2}).id, timeout=PATIENCE)
        harness.clock.advance(99.9)
        app.wait(app.submit("add", {"a": 3}).id, timeout=PATIENCE)
        assert app.get(run.id).status == "PENDING"
        harness.clock.advance(0.1)
        ended = app.wait(run.id, timeout=PATIENCE)
    assert (ended.status, ended.started_us) == ("SUCCEEDED", run.created_us + 100_000_000)


def test_a_delay_is_waited_for_by_the_real_clock_without_a_poll(harness: RunsHarness) -> None:
    with harness.working(poll=50):
        run = harness.app.submit("add", {"a": 1}, delay=0.5)
        ended = harness.app.wait(run.id, timeout=PATIENCE)
    assert ended.started_us is not None
    assert 0 <= ended.started_us - run.due_us < 10_000_000
    assert ended.due_us == run.due_us


def test_a_new_run_is_heard_of_without_a_poll(harness: RunsHarness) -> None:
    with harness.working(poll=50):
        eventually(harness.app.workers, "the start")
        for number in range(5):
            run = harness.app.submit("add", {"a": number})
            assert harness.app.wait(run.id, timeout=20).status == "SUCCEEDED"


# -- several workers -----------------------------------------------------------------------------------------------


def test_two_workers_with_the_same_name_are_two_workers(harness: RunsHarness) -> None:
    """Each keeps what it holds, and the end of one takes nothing from the other."""
    folder = harness.place("twins")
    with harness.working(name="twin", concurrency=1) as one:
        with harness.working(harness.open(), name="twin", concurrency=1) as two:
            runs = [harness.app.submit("await_politely", {"folder": folder}, dedupe=False) for _ in range(2)]
            eventually(lambda: len(effects(folder)) == 2, "both at work")
            eventually(
                lambda: [worker.name for worker in harness.app.workers()] == ["twin", "twin"], "both say who they are"
            )
            workers = harness.app.workers()
            held = {"await_politely": 1}
            assert {worker.id: worker.holds for worker in workers} == {one.id: held, two.id: held}
        eventually(lambda: len(harness.app.workers()) == 1, "the end of one")
        assert {run.worker for run in harness.app.runs(status="RUNNING").runs} == {one.id}
        touch(folder)
        assert {harness.app.wait(run.id, timeout=PATIENCE).status for run in runs} == {"SUCCEEDED"}


def test_a_worker_whose_lease_was_taken_stops_and_discards(harness: RunsHarness) -> None:
    """What it executes is ended by force, its slots are free again, and the result is that of the heir."""
    app = harness.open(clock=harness.clock, models=QUICK)
    heir = harness.hand(app, "heir")
    with harness.working(app, sweep_every=None, concurrency=1, processes=1, threads=1) as worker:
        runs = begun(harness, app, DEAF)
        taken = {}
        for model, (run, _) in runs.items():
            taken[model] = eventually(
                lambda run=run: heir.lease_this(run) or harness.clock.advance(1.5 + MOMENT), "takeover"
            )
        following = harness.place("following")
        touch(following)
        for model in DEAF:
            after = app.submit(model, {"folder": following})
            assert app.wait(after.id, timeout=PATIENCE).worker == worker.id, model
        assert is_gone(int(effects(runs["wait_deaf"][1])[0][3]))
        assert (Path(runs["await_deaf"][1]) / "cancelled").exists()
        for model, (run, folder) in runs.items():
            touch(folder)
            again = taken[model] if heir.end(taken[model], result='"of the heir"') else None
            assert again is not None, model
            assert (app.get(run.id).worker, app.result(run.id)) == ("heir", "of the heir")


def test_a_result_that_comes_after_the_lease_was_taken_is_discarded(harness: RunsHarness) -> None:
    """The worker's heart has not noticed yet, so that it ends the run in good faith: the fence refuses it."""
    app = harness.timeless
    heir = harness.hand(app, "heir")
    with harness.working(app, sweep_every=None, processes=1):
        runs = begun(harness, app, DEAF)
        harness.clock.advance(60 + MOMENT)
        taken = {model: heir.lease_this(run) for model, (run, _) in runs.items()}
        for _, folder in runs.values():
            touch(folder)
        following = harness.place("following")
        touch(following)
        for model in DEAF:
            assert app.wait(app.submit(model, {"folder": following}).id, timeout=PATIENCE).status == "SUCCEEDED"
            seen = app.get(runs[model][0].id)
            assert (seen.status, seen.fence, seen.worker) == ("RUNNING", 2, "heir")
    for model, (run, _) in runs.items():
        leased = taken[model]
        assert leased is not None
        assert heir.end(leased, result='"of the heir"')
        assert app.result(run.id) == "of the heir"
        assert steps(app, run.id) == ["created", "leased", "lost", "leased", "succeeded"]


def test_when_a_worker_is_killed_another_recovers_its_runs(harness: RunsHarness) -> None:
    """SIGKILL to the parent: its children die with it, the leases run out, and the sweeper of another takes over."""
    app = harness.open(models=QUICK)
    places = {model: harness.place(model) for model in ("wait_deaf", "await_deaf")}
    runs = {model: app.submit(model, {"folder": folder}) for model, folder in places.items()}
    with harness.program(models=QUICK, sweep_every=0.2) as program:
        for folder in places.values():
            eventually(lambda folder=folder: effects(folder), "the start")
        program.send(signal.SIGKILL)
        program.wait()
    eventually(lambda: is_gone(int(effects(places["wait_deaf"])[0][3])), "the end of the child")
    for folder in places.values():
        touch(folder)
    with harness.working(app, sweep_every=0.2, processes=1) as worker:
        for model, run in runs.items():
            ended = app.wait(run.id, timeout=PATIENCE)
            assert (ended.status, ended.attempts, ended.losts, ended.worker) == ("SUCCEEDED", 2, 1, worker.id), model
            assert [line[1] for line in effects(places[model])] == ["1", "2"]


def test_a_worker_keeps_a_short_lease_under_the_eyes_of_a_sweeper(harness: RunsHarness) -> None:
    app = harness.open(models={"lease": 6})
    folder = harness.place("short")
    run = app.submit("await_politely", {"folder": folder})
    with harness.working(app, sweep_every=0.05):
        eventually(lambda: effects(folder), "the start")
        began = time.time()
        eventually(lambda: time.time() > began + 13, "two leases")
        touch(folder)
        ended = app.wait(run.id, timeout=PATIENCE)
    assert (ended.status, ended.attempts, ended.losts) == ("SUCCEEDED", 1, 0)


# -- the sweeper ---------------------------------------------------------------------------------------------------


def leader(harness: RunsHarness) -> str | None:
    rows = harness.sql("SELECT holder FROM semel_leaders WHERE role = :role", role=ROLE)
    return rows[0][0] if rows else None


def test_one_worker_sweeps_and_when_it_stops_another_does(harness: RunsHarness) -> None:
    with harness.working(harness.open(), sweep_every=5) as second:
        with harness.working(sweep_every=5) as first:
            eventually(lambda: len(harness.app.workers()) == 2, "both")
            chosen = eventually(lambda: leader(harness), "an election")
            for _ in range(20):
                assert leader(harness) == chosen
        if chosen == first.id:
            eventually(lambda: leader(harness) == second.id, "the takeover")
        assert leader(harness) == second.id


def test_a_sweeper_that_vanished_is_replaced_when_its_term_is_over(harness: RunsHarness) -> None:
    app = harness.timeless
    dead = harness.hand(name="dead")
    assert dead.do(dead.ledger.write(maintenance.acquire_leadership, ROLE, "dead", 70, dead.ledger.statement_context))
    run = app.submit("add", {"a": 1})
    dead.lease_this(run)
    harness.clock.advance(65)
    with harness.working(app, sweep_every=0.05) as worker:
        app.wait(app.submit("add", {"a": 2}).id, timeout=PATIENCE)
        assert (leader(harness), app.get(run.id).status) == ("dead", "RUNNING")
        harness.clock.advance(5 + MOMENT)
        assert app.wait(run.id, timeout=PATIENCE).losts == 1
        assert leader(harness) == worker.id


# -- the outbox ----------------------------------------------------------------------------------------------------


def test_every_step_is_published_after_it_was_committed(harness: RunsHarness) -> None:
    published: list[tuple[OutboxEvent, str]] = []
    reader = harness.open()

    def publish(event: OutboxEvent) -> None:
        published.append((event, reader.get(event.run_id).status))

    app = harness.open(publish=publish)
    run = app.submit("add", {"a": 1}, user=42)
    with harness.working(app, sweep_every=0.05):
        eventually(lambda: [event for event, _ in published if event.name == "RunCompleted"], "RunCompleted")
    names = {"RunCreated": "PENDING", "RunStarted": "RUNNING", "RunCompleted": "SUCCEEDED"}
    assert {event.name: event.status for event, _ in published} == names
    order = ["PENDING", "RUNNING", "SUCCEEDED"]
    for event, seen in published:
        assert order.index(seen) >= order.index(event.status)
        assert (event.run_id, event.model, event.user) == (run.id, "add", "42")
    assert len({event.id for event, _ in published}) == 3


def test_a_publisher_that_fails_gets_the_event_again(harness: RunsHarness) -> None:
    """At least once, in order, under the same id each time; nobody else suffers."""
    heard: list[OutboxEvent] = []

    def publish(event: OutboxEvent) -> None:
        heard.append(event)
        if len(heard) in (1, 2, 4):
            raise ConnectionError("the other side is away")

    app = harness.open(publish=publish)
    run = app.submit("add", {"a": 1})
    with harness.working(app, sweep_every=0.05):
        assert app.wait(run.id, timeout=PATIENCE).status == "SUCCEEDED"
        eventually(lambda: [event for event in heard if event.name == "RunCompleted"], "RunCompleted")
        eventually(lambda: harness.sql("SELECT count(*) FROM semel_outbox WHERE unpublished") == [(0,)], "all of it")
    times = Counter(event.id for event in heard)
    assert [times[f"{run.id}/{version}"] for version in (1, 2, 3)] == [3, 2, 1]
    assert [event.name for event in heard][:4] == ["RunCreated"] * 3 + ["RunStarted"]


def test_a_slow_publisher_holds_nobody_up(harness: RunsHarness) -> None:
    """It blocks until the run is over, which it could not be if the loop of the worker did not turn meanwhile."""
    blocked, over = threading.Event(), threading.Event()

    def publish(event: OutboxEvent) -> None:
        if event.name == "RunStarted":
            blocked.set()
            over.wait(PATIENCE)

    app = harness.open(publish=publish)

    @app.model("ticking")
    async def ticking() -> None:
        while not blocked.is_set():  # noqa: ASYNC110 -- a thread sets it
            await asyncio.sleep(0.02)

    run = app.submit("ticking")
    with harness.working(app, sweep_every=0.05):
        try:
            assert app.wait(run.id, timeout=PATIENCE).status == "SUCCEEDED"
            assert not over.is_set()
        finally:
            over.set()


def test_without_a_publisher_nothing_waits_to_be_published(harness: RunsHarness) -> None:
    harness.app.submit("add", {"a": 1})
    assert harness.sql("SELECT count(*) FROM semel_outbox WHERE unpublished") == [(0,)]


# -- the database --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_server() -> Iterator[servers.Postgres]:
    """A PostgreSQL server that may be restarted."""
    with servers.postgres() as server:
        yield server


@pytest.mark.parametrize("crash", [False, True])
def test_a_restart_of_the_database_while_100_runs_are_leased_costs_none_of_them(
    own_server: servers.Postgres, tmp_path: Path, crash: bool
) -> None:
    """Half of them end while it is away: their ends are kept until it is back."""
    url = own_server.database()
    assert semel(["migrate", url]) == 0
    with RunsHarness("postgres", url, tmp_path) as harness:
        early, late = harness.place("early"), harness.place("late")
        asked = [{"model": "await_deaf", "parameters": {"folder": early}, "dedupe": False}] * 50
        asked += [{"model": "await_deaf", "parameters": {"folder": late}, "dedupe": False}] * 50
        harness.app.submit_many(asked)
        with harness.working():
            eventually(lambda: len(effects(early)) + len(effects(late)) == 100, "100 leases")
            own_server.stop(crash=crash)
            touch(early)
            own_server.start()
            touch(late)
            eventually(lambda: harness.app.backlog().pending + harness.app.backlog().running == 0, "the end of all")
            assert harness.app.wait(harness.app.submit("add", {"a": 1}).id, timeout=PATIENCE).status == "SUCCEEDED"
        counted = harness.sql(
            "SELECT status, attempt_count, count(*) FROM model_runs WHERE model <> 'add' GROUP BY 1, 2"
        )
        assert counted == [("SUCCEEDED", 1, 100)]
        assert len({line[0] for line in effects(early) + effects(late)}) == 100
        assert len(effects(early) + effects(late)) == 100


class Silent(Line):
    """A line on which answers can be held back: the other side is there, and says nothing."""

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self.speaks = threading.Event()
        self.speaks.set()

    def _answer(self, client: socket.socket, server: socket.socket, doomed: threading.Event) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                self.speaks.wait()
                client.sendall(data)
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def cut_off(own_server: servers.Postgres, tmp_path: Path) -> Iterator[tuple[RunsHarness, RunsHarness, Silent]]:
    """The same database twice, the second time over a line that can fall silent."""
    url = make_url(own_server.database())
    plain = url.render_as_string(hide_password=False)
    assert semel(["migrate", plain]) == 0
    line = Silent(f"{url.query['host']}/.s.PGSQL.5432")
    far = f"postgresql://postgres@127.0.0.1:{line.port}/{url.database}"
    with (
        closing(line),
        RunsHarness("postgres", plain, tmp_path) as here,
        RunsHarness("postgres", far, tmp_path) as there,
    ):
        yield here, there, line


def test_a_worker_cut_off_from_a_silent_database_lets_go_when_its_leases_end(
    cut_off: tuple[RunsHarness, RunsHarness, Silent],
) -> None:
    """It cannot hear that another has its run; it knows when its lease has ended, and stops by then."""
    here, there, line = cut_off
    folder = here.place("silent")
    run = here.open(models=QUICK).submit("await_deaf", {"folder": folder})
    with there.working(there.open(models=QUICK)):
        eventually(lambda: effects(folder), "the start")
        line.speaks.clear()
        fell_silent = time.monotonic()
        try:
            eventually((Path(folder) / "cancelled").exists, "the end of the attempt")
            assert time.monotonic() - fell_silent < 10
            touch(folder)
            with here.working(here.open(models=QUICK), sweep_every=0.1) as worker:
                ended = here.app.wait(run.id, timeout=PATIENCE)
        finally:
            line.speaks.set()
    assert (ended.status, ended.attempts, ended.losts, ended.worker) == ("SUCCEEDED", 2, 1, worker.id)


def test_a_stop_is_heard_although_the_database_is_silent(cut_off: tuple[RunsHarness, RunsHarness, Silent]) -> None:
    here, there, line = cut_off
    folder = here.place("silent")
    here.app.submit("await_deaf", {"folder": folder})
    with there.program(drain=0.5, processes=0) as program:
        try:
            eventually(lambda: effects(folder), "the start")
            line.speaks.clear()
            program.send(signal.SIGTERM)
            program.wait()
        finally:
            line.speaks.set()


def test_told_twice_a_worker_gives_back_although_the_database_is_silent_for_a_while(
    cut_off: tuple[RunsHarness, RunsHarness, Silent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else it has to write may fail in time; the runs are tried for longer."""
    monkeypatch.setattr(session, "LAST_WRITE_TIMEOUT", 0.2)
    here, there, line = cut_off
    folder = here.place("silent")
    run = here.app.submit("await_deaf", {"folder": folder})
    with there.working(drain=3000):
        eventually(lambda: effects(folder), "the start")
        line.speaks.clear()
        threading.Timer(1.0, line.speaks.set).start()
    assert (here.app.get(run.id).status, here.app.get(run.id).attempts) == ("PENDING", 0)


def test_a_worker_without_its_database_lets_go_when_its_leases_end(
    own_server: servers.Postgres, tmp_path: Path
) -> None:
    """Another may have its runs by then. When the database is back it begins anew."""
    url = own_server.database()
    assert semel(["migrate", url]) == 0
    with RunsHarness("postgres", url, tmp_path) as harness:
        app = harness.open(models=QUICK)
        folder = harness.place("away")
        run = app.submit("await_deaf", {"folder": folder})
        with harness.working(app, sweep_every=0.2):
            eventually(lambda: effects(folder), "the start")
            own_server.stop()
            eventually((Path(folder) / "cancelled").exists, "the end of the attempt")
            own_server.start()
            touch(folder)
            ended = app.wait(run.id, timeout=PATIENCE)
    assert (ended.status, ended.fence) == ("SUCCEEDED", 2)
    assert ended.attempts - ended.losts == 1, "given back by the worker, or found lost by the sweeper"


def test_a_worker_waits_at_its_start_for_a_database_that_is_away_if_it_is_told_to(
    own_server: servers.Postgres, tmp_path: Path
) -> None:
    url = own_server.database()
    assert semel(["migrate", url]) == 0
    with RunsHarness("postgres", url, tmp_path) as harness:
        run = harness.app.submit("await_deaf", {"folder": (folder := harness.place("late"))})
        touch(folder)
        own_server.stop()
        app = harness.open(retry_for=0.2)
        with pytest.raises(StoreUnavailable):
            asyncio.run(Worker(app, processes=0).serve())
        worker = Worker(app, processes=0, wait_for_database=PATIENCE)
        serving = threading.Thread(target=lambda: asyncio.run(worker.serve()))
        serving.start()
        time.sleep(1)  # several times as long as it tries without being told to wait
        own_server.start()
        try:
            assert harness.app.wait(run.id, timeout=PATIENCE).status == "SUCCEEDED"
        finally:
            worker.stop()
            serving.join(PATIENCE)


def losing_replies(
    monkeypatch: pytest.MonkeyPatch,
    *verbs: Callable[..., Any],
    times: int = 1,
    which: Callable[[Any], object] = bool,
) -> list[str]:
    """The store does what it is asked by these verbs, and the first replies are lost; who asked is noted."""
    lost: list[str] = []

    def patch(method: str) -> None:
        real = getattr(RunStore, method)

        async def losing(self: RunStore, asked: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            answer = await real(self, asked, *args, **kwargs)
            if asked in verbs and len(lost) < times and which(answer):
                lost.append(asked.__name__)
                raise StoreUnavailable("the reply was lost")
            return answer

        monkeypatch.setattr(RunStore, method, losing)

    for method in ("read", "write", "write_once"):
        patch(method)
    return lost


def test_what_was_leased_by_a_statement_whose_reply_was_lost_is_given_back_uncharged(
    harness: RunsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [harness.app.submit("add", {"a": number}) for number in range(3)]
    lost = losing_replies(monkeypatch, lease.finish_and_lease, which=has_leased)
    with harness.working():
        for run in runs:
            ended = harness.app.wait(run.id, timeout=PATIENCE)
            assert (ended.status, ended.attempts, ended.losts, ended.fence) == ("SUCCEEDED", 1, 0, 2)
            assert steps(harness.app, run.id) == ["created", "leased", "returned", "leased", "succeeded"]
    assert lost == ["finish_and_lease"]


def has_leased(answer: tuple[object, list[list[Leased]]]) -> bool:
    return any(answer[1])


def test_a_lost_reply_to_an_end_and_the_next_lease_ends_one_run_and_gives_the_other_back(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On SQLite they are one transaction."""
    with databases.empty("sqlite") as database, RunsHarness("sqlite", database.url, tmp_path) as harness:
        told: list[str] = []
        app = harness.app
        app.on_event(lambda event: told.append(event.kind))
        runs = [app.submit("add", {"a": number}) for number in range(3)]
        both = losing_replies(
            monkeypatch, lease.finish_and_lease, which=lambda answer: answer[0] and has_leased(answer)
        )
        with harness.working(app, concurrency=1):
            ended = [app.wait(run.id, timeout=PATIENCE) for run in runs]
            eventually(lambda: told.count("ended") == 3, "the news")
        assert both == ["finish_and_lease"]
        assert [(run.status, run.attempts, run.fence) for run in ended] == [
            ("SUCCEEDED", 1, 1),
            ("SUCCEEDED", 1, 2),
            ("SUCCEEDED", 1, 1),
        ]
        assert steps(app, runs[0].id) == ["created", "leased", "succeeded"]
        assert steps(app, runs[1].id) == ["created", "leased", "returned", "leased", "succeeded"]


def test_ends_are_written_while_no_run_can_be_leased(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StoreUnavailable("there are no leases today")

    with databases.empty("sqlite") as database, RunsHarness("sqlite", database.url, tmp_path) as harness:
        folder = harness.place("refused")
        run = harness.app.submit("await_politely", {"folder": folder})
        with harness.working(concurrency=2):
            eventually(lambda: effects(folder), "the start")
            monkeypatch.setattr(lease, "lease", refuse)
            touch(folder)
            assert harness.app.wait(run.id, timeout=PATIENCE).status == "SUCCEEDED"
            monkeypatch.undo()
            run = harness.app.submit("add", {"a": 1})
            assert harness.app.wait(run.id, timeout=PATIENCE).status == "SUCCEEDED"


def test_a_worker_in_doubt_outlives_a_database_that_goes_away_again(
    harness: RunsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = harness.app.submit("add", {"a": 1})
    losing_replies(monkeypatch, lease.finish_and_lease, which=has_leased)
    lost = losing_replies(monkeypatch, lease.held_by, times=2)
    with harness.working():
        assert harness.app.wait(run.id, timeout=PATIENCE).status == "SUCCEEDED"
    assert lost == ["held_by"] * 2


def test_an_end_whose_reply_was_lost_is_written_once_and_told_as_it_is(
    harness: RunsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, str]] = []
    harness.app.on_event(lambda event: told.append((event.kind, event.status)))
    lost = losing_replies(
        monkeypatch,
        transitions.end,
        lease.finish_and_lease,
        which=lambda answer: answer[0] if isinstance(answer, tuple) else answer,
    )
    with harness.working():
        run = harness.app.submit("add", {"a": 1})
        harness.app.wait(run.id, timeout=PATIENCE)
        eventually(lambda: ("ended", "SUCCEEDED") in told, "the news")
    assert len(lost) == 1
    assert steps(harness.app, run.id) == ["created", "leased", "succeeded"]
    assert told == [("created", ""), ("started", "RUNNING"), ("ended", "SUCCEEDED")]


def test_a_sqlite_file_that_someone_else_locks_for_a_while_costs_nothing(databases: Databases, tmp_path: Path) -> None:
    with databases.empty("sqlite") as database, RunsHarness("sqlite", database.url, tmp_path) as harness:
        folder = harness.place("locked")
        harness.app.submit_many([{"model": "await_deaf", "parameters": {"folder": folder}, "dedupe": False}] * 20)
        with harness.working():
            eventually(lambda: len(effects(folder)) == 20, "20 leases")
            with closing(sqlite3.connect(database.url.removeprefix("sqlite:///"), isolation_level=None)) as other:
                other.execute("BEGIN EXCLUSIVE")
                touch(folder)
                began = time.monotonic()
                eventually(lambda: time.monotonic() > began + 1.5, "a while")
                other.execute("COMMIT")
            eventually(lambda: harness.app.backlog().running == 0, "the end of all")
        assert harness.sql("SELECT status, attempt_count, count(*) FROM model_runs GROUP BY 1, 2") == [
            ("SUCCEEDED", 1, 20)
        ]


def test_a_worker_says_that_the_database_was_never_migrated(postgres_url: str, tmp_path: Path) -> None:
    app = App(postgres_url, artifacts=tmp_path)
    with pytest.raises(NotMigrated, match="semel migrate"):
        asyncio.run(Worker(app).serve())


# -- the clock -----------------------------------------------------------------------------------------------------


def test_a_clock_that_jumps_ahead_lets_leases_end_and_nothing_is_done_twice_under_one_fence(
    harness: RunsHarness,
) -> None:
    """What is held counts as lost by the new time: the attempt is discarded, and the run is done by another one."""
    app = harness.timeless
    folder = harness.place("jump")
    run = app.submit("await_deaf", {"folder": folder})
    with harness.working(app, sweep_every=0.05):
        eventually(lambda: effects(folder), "the start")
        harness.clock.advance(3600)
        eventually(lambda: len(effects(folder)) == 2, "the second attempt")
        touch(folder)
        ended = app.wait(run.id, timeout=PATIENCE)
    assert (ended.status, ended.attempts, ended.losts, ended.fence) == ("SUCCEEDED", 2, 1, 2)
    assert steps(app, run.id) == ["created", "leased", "lost", "leased", "succeeded"]


def test_a_clock_that_jumps_back_stops_nothing(harness: RunsHarness) -> None:
    app = harness.timeless
    folder = harness.place("jump")
    waiting = app.submit("note", {"folder": folder, "number": 1}, queue="later")
    held = app.submit("await_deaf", {"folder": folder})
    with harness.working(app, sweep_every=0.05, queues=["default", "new"]):
        eventually(lambda: effects(folder), "the start")
        harness.clock.advance(-3600)
        new = app.submit("note", {"folder": folder, "number": 2}, queue="new")
        assert app.wait(new.id, timeout=PATIENCE).status == "SUCCEEDED"
        touch(folder)
        assert app.wait(held.id, timeout=PATIENCE).attempts == 1
    with harness.working(app, queues=["later"]):
        assert app.wait(waiting.id, timeout=PATIENCE).status == "SUCCEEDED"


# -- options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"queues": []},
        {"queues": "default"},
        {"queues": [""]},
        {"name": "x" * 101},
        {"name": "a\nb"},
        {"concurrency": -1},
        {"processes": 1.5},
        {"threads": True},
        {"poll": 0},
        {"poll": -1},
        {"drain": -1},
        {"sweep_every": 0},
        {"max_runs_per_child": 0},
        {"concurrency": 0, "processes": 0, "threads": 0},
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        Worker(App(f"sqlite:///{tmp_path / 'semel.db'}"), **options)  # type: ignore[arg-type]


def test_what_is_leased_with_an_end_while_the_worker_stops_at_once_is_given_back(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply comes only when all other runs were told to stop."""
    with databases.empty("sqlite") as database, RunsHarness("sqlite", database.url, tmp_path) as harness:
        app = harness.app
        ending, held, next_one = (harness.place(name) for name in ("ending", "held", "next"))
        app.submit("await_politely", {"folder": ending})
        app.submit("await_deaf", {"folder": held})
        real = RunStore.write_once

        async def late(self: RunStore, asked: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            answer = await real(self, asked, *args, **kwargs)
            if asked is lease.finish_and_lease and args[0]:
                worker.stop()
                worker.stop()
                assert worker._session is not None
                while not any(run.handing_back for run in worker._session._active):  # noqa: ASYNC110 -- nobody tells
                    await asyncio.sleep(0.01)
            return answer

        with harness.working(app, concurrency=2) as worker:
            eventually(lambda: effects(ending) and effects(held), "both starts")
            run = app.submit("await_deaf", {"folder": next_one})
            monkeypatch.setattr(RunStore, "write_once", late)
            touch(ending)
            eventually(lambda: not app.workers(), "the end of the worker")
        assert steps(app, run.id) == ["created", "leased", "returned"]
        assert (app.get(run.id).status, app.get(run.id).attempts) == ("PENDING", 0)
