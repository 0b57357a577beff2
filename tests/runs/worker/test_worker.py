"""The worker: what it leases, how it ends what it holds, and what becomes of it all when it or the database dies."""

import asyncio
import os
import signal
import socket
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from acceptance.proxy import Line
from semel import App, InvalidRequest, NotMigrated, Run, StoreUnavailable
from semel.cli import main as semel
from semel.runs.store import RunStore, lease, maintenance, transitions
from semel.runs.store.outbox import OutboxEvent
from semel.runs.worker import Worker, session
from semel.runs.worker.sweeper import ROLE
from support import servers
from support.apps import worker_models
from support.quotas import KINDS, Grounds
from support.runs_harness import Workshop, effects, touch, until

PATIENCE = 60
MOMENT = 0.000001
POLITE = ("wait_politely", "await_politely", "thread_politely")
DEAF = ("wait_deaf", "await_deaf", "thread_deaf")
QUICK = {"lease": 1.5}
"""A lease so short that the worker's heart beats twice a second."""


@pytest.fixture(scope="module")
def grounds(request: pytest.FixtureRequest) -> Iterator[Grounds]:
    with ExitStack() as stack:
        yield Grounds(request, stack)


@pytest.fixture(params=KINDS)
def shop(request: pytest.FixtureRequest, grounds: Grounds, tmp_path: Path) -> Iterator[Workshop]:
    """An empty SQLite file, then an empty PostgreSQL database."""
    with grounds.empty(request.param) as ground, Workshop(ground.kind, ground.url, tmp_path) as shop:
        yield shop


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


def test_sigterm_gives_back_what_is_not_done_in_time_without_charging_an_attempt(shop: Workshop) -> None:
    """In a process, in a thread and in the loop; the worker ends with exit code 0, and the next one finishes them."""
    places = {model: shop.place(model) for model in DEAF}
    runs = {model: shop.app.submit(model, {"folder": folder}) for model, folder in places.items()}
    with shop.program(drain=0.3) as program:
        for folder in places.values():
            until(lambda folder=folder: effects(folder), "the start")
        program.send(signal.SIGTERM)
        assert program.wait() == 0, program.log
    for model, run in runs.items():
        seen = shop.app.get(run.id)
        assert (seen.status, seen.attempts, seen.losts, seen.errors) == ("PENDING", 0, 0, 0), (model, seen)
        assert steps(shop.app, run.id) == ["created", "leased", "returned"]
    assert shop.app.workers() == []
    assert is_gone(int(effects(places["wait_deaf"])[0][3])), "the child was killed"
    for folder in places.values():
        touch(folder)
    with shop.working(processes=1):
        for run in runs.values():
            ended = shop.app.wait(run.id, timeout=PATIENCE)
            assert (ended.status, ended.attempts, ended.fence) == ("SUCCEEDED", 1, 2)


def test_a_draining_worker_ends_what_it_began_keeps_its_leases_and_begins_nothing(shop: Workshop) -> None:
    """The drain outlasts the lease, and another worker sweeps: nothing is lost."""
    app = shop.open(models=QUICK)
    folder = shop.place("drained")
    run = app.submit("wait_deaf", {"folder": folder})
    with shop.working(app, queues=["none"], sweep_every=0.1), shop.program(models=QUICK, drain=50) as program:
        until(lambda: effects(folder), "the start")
        program.send(signal.SIGTERM)
        until(lambda: [worker for worker in app.workers() if worker.draining], "the drain")
        late = app.submit("add", {"a": 1})
        began = app.get(run.id).heartbeat_us
        until(lambda: (app.get(run.id).heartbeat_us or 0) > (began or 0) + 2_000_000, "two seconds of heartbeats")
        touch(folder)
        assert program.wait() == 0, program.log
        ended = app.get(run.id)
    assert (ended.status, ended.attempts, ended.losts) == ("SUCCEEDED", 1, 0)
    assert app.get(late.id).status == "PENDING"


def test_a_second_signal_gives_back_at_once(shop: Workshop) -> None:
    folder = shop.place("held")
    run = shop.app.submit("await_deaf", {"folder": folder})
    with shop.program(drain=3000, processes=0) as program:
        until(lambda: effects(folder), "the start")
        program.send(signal.SIGTERM)
        until(lambda: any(worker.draining for worker in shop.app.workers()), "the drain")
        program.send(signal.SIGINT)
        assert program.wait() == 0, program.log
    assert (shop.app.get(run.id).status, shop.app.get(run.id).attempts) == ("PENDING", 0)


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
    grounds: Grounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else it has to write may fail in time; the runs are tried for longer."""
    monkeypatch.setattr(session, "SILENT", 0.2)
    with grounds.empty("sqlite") as ground, Workshop("sqlite", ground.url, tmp_path) as shop:
        folder = shop.place("held")
        run = shop.app.submit("await_deaf", {"folder": folder})
        with shop.working(drain=3000):
            until(lambda: effects(folder), "the start")
            lock_for_a_while(Path(ground.url.removeprefix("sqlite:///")), 1.0)
        assert (shop.app.get(run.id).status, shop.app.get(run.id).attempts) == ("PENDING", 0)


def test_a_stop_at_the_very_start_is_heard(shop: Workshop) -> None:
    async def start_and_stop(turns: int) -> None:
        worker = Worker(shop.app, processes=0)
        serving = asyncio.create_task(worker.serve())
        for _ in range(turns):
            await asyncio.sleep(0)
        worker.stop()
        await asyncio.wait_for(serving, PATIENCE)

    for turns in (0, 1, 2, 3, 5, 8, 13):
        asyncio.run(start_and_stop(turns))
    assert shop.app.workers() == []


def test_children_leave_sigterm_to_their_parent(shop: Workshop) -> None:
    """A service manager sends it to all processes at once; the run is drained all the same."""
    folder = shop.place("grouped")
    run = shop.app.submit("wait_deaf", {"folder": folder})
    with shop.program(drain=50) as program:
        child = int(until(lambda: effects(folder), "the start")[0][3])
        os.kill(child, signal.SIGTERM)
        program.send(signal.SIGTERM)
        until(lambda: any(worker.draining for worker in shop.app.workers()), "the drain")
        touch(folder)
        assert program.wait() == 0, program.log
    ended = shop.app.get(run.id)
    assert (ended.status, ended.attempts, ended.losts) == ("SUCCEEDED", 1, 0)


def test_a_worker_whose_task_is_cancelled_leaves_nothing_behind(shop: Workshop) -> None:
    folder = shop.place("cancelled")
    run = shop.app.submit("await_deaf", {"folder": folder})

    async def serve_and_cancel() -> None:
        before = asyncio.all_tasks()
        serving = asyncio.create_task(Worker(shop.app, processes=0).serve())
        await asyncio.to_thread(until, lambda: effects(folder), "the start")
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(serving, PATIENCE)
        assert asyncio.all_tasks() <= before

    asyncio.run(serve_and_cancel())
    assert (Path(folder) / "cancelled").exists()
    seen = shop.app.get(run.id)
    assert (seen.status, seen.attempts) == ("PENDING", 0), "given back, uncharged"


# -- cancel --------------------------------------------------------------------------------------------------------


def begun(shop: Workshop, app: App, models: Sequence[str]) -> dict[str, tuple[Run, str]]:
    """A run of each of these models, under way, and its folder."""
    begun = {}
    for model in models:
        folder = shop.place(f"{model}-{time.monotonic_ns()}")
        begun[model] = (app.submit(model, {"folder": folder}), folder)
    for model, (_, folder) in begun.items():
        until(lambda folder=folder: effects(folder), f"the start of {model}")
    return begun


def test_a_run_that_is_cancelled_gets_time_to_clean_up(shop: Workshop) -> None:
    """In a process, in the loop, in a thread."""
    app = shop.open(models=QUICK)
    with shop.working(app, processes=1):
        for run, folder in begun(shop, app, POLITE).values():
            asked = app.cancel(run.id, why="no longer wanted")
            assert (asked.status, asked.cancel_requested) == ("RUNNING", True)
            ended = app.wait(run.id, timeout=PATIENCE)
            assert (ended.status, ended.attempts) == ("CANCELLED", 1)
            assert (Path(folder) / "cleaned").exists()
            assert steps(app, run.id) == ["created", "leased", "cancel_requested", "cancelled"]
            assert app.timeline(run.id)[2].note == "no longer wanted"


def test_a_run_that_does_not_heed_its_cancel_is_ended_by_force(shop: Workshop) -> None:
    """A process is killed, a task is cancelled, a thread is left behind; the slot is free for the next run."""
    app = shop.open(models=QUICK)
    with shop.working(app, concurrency=1, processes=1, threads=1):
        runs = begun(shop, app, DEAF)
        for run, _ in runs.values():
            app.cancel(run.id)
        for model, (run, _) in runs.items():
            assert app.wait(run.id, timeout=PATIENCE).status == "CANCELLED", model
        following = shop.place("following")
        touch(following)
        for model in DEAF:
            assert app.wait(app.submit(model, {"folder": following}).id, timeout=PATIENCE).status == "SUCCEEDED", model
        assert is_gone(int(effects(runs["wait_deaf"][1])[0][3]))
        assert (Path(runs["await_deaf"][1]) / "cancelled").exists()
        for _, folder in runs.values():
            touch(folder)
    for model, (run, _) in runs.items():
        assert app.get(run.id).status == "CANCELLED", f"what {model} does afterwards counts for nothing"


def test_a_run_that_is_done_before_its_cancel_is_heeded_has_succeeded(shop: Workshop) -> None:
    app = shop.open(models=QUICK)
    app.model("process", grace=50, lease=1.5)(worker_models.wait_deaf)
    app.model("thread", grace=50, lease=1.5, isolation="thread")(worker_models.wait_deaf)
    app.model("loop", grace=50, lease=1.5)(worker_models.await_deaf)
    with shop.working(app, processes=1):
        runs = begun(shop, app, ("process", "thread", "loop"))
        for run, folder in runs.values():
            app.cancel(run.id)
            touch(folder)
        for model, (run, _) in runs.items():
            assert app.wait(run.id, timeout=PATIENCE).status == "SUCCEEDED", model
            assert app.result(run.id) == "let through"


# -- timeouts ------------------------------------------------------------------------------------------------------


def test_a_run_whose_time_is_up_is_stopped_and_that_is_an_error(shop: Workshop) -> None:
    """Wherever it runs, and whether it stops when it is asked to or has to be ended by force."""
    app = shop.open(models={"timeout": 4.0, "max_attempts": 1})
    with shop.working(app, processes=1):
        runs = begun(shop, app, (*POLITE, *DEAF))
        for model, (run, folder) in runs.items():
            ended = app.wait(run.id, timeout=PATIENCE)
            assert (ended.status, ended.attempts, ended.errors, ended.losts) == ("FAILED", 1, 1, 0), model
            assert (ended.last_error or "").startswith("timed out after 4 seconds"), model
            assert (Path(folder) / "cleaned").exists() == (model in POLITE)
            touch(folder)


# -- progress and logs ---------------------------------------------------------------------------------------------


def test_progress_and_logs_are_seen_while_the_run_is_under_way(shop: Workshop) -> None:
    app = shop.open(models=QUICK)
    folder = shop.place("speaking")
    run = app.submit("speak", {"folder": folder})
    with shop.working(app, processes=1):
        until(lambda: app.get(run.id).progress == 0.4, "progress")
        until(lambda: len(app.logs(run.id)) >= 2, "two lines")
        seen = app.get(run.id)
        assert (seen.status, seen.progress_note) == ("RUNNING", "fitting")
        assert [(line.level, line.text) for line in app.logs(run.id)] == [
            ("INFO", "fitted 4 of 10"),
            ("STDOUT", "printed"),
        ]
        touch(folder)
        assert app.wait(run.id, timeout=PATIENCE).progress == 1.0
        lines = until(lambda: app.logs(run.id)[2:], "the last line")
    assert [(line.level, line.text) for line in lines] == [("WARNING", "that is all")]
    second = app.logs(run.id)[1]
    assert app.logs(run.id, after=(second.fence, second.line)) == lines


# -- retries and verdicts ------------------------------------------------------------------------------------------


def test_runs_that_failed_together_do_not_come_back_together(shop: Workshop) -> None:
    app = shop.timeless
    runs = [app.submit("flaky", {"failures": 1, "why": f"number {number}"}) for number in range(40)]
    with shop.working(app):
        until(lambda: all(app.get(run.id).errors for run in runs), "40 errors")
        waits = [app.get(run.id).due_us - shop.clock.us for run in runs]
        assert all(5_000_000 <= wait <= 5_500_000 for wait in waits)
        assert len(set(waits)) > 30
        shop.clock.advance(5.5)
        assert {app.wait(run.id, timeout=PATIENCE).status for run in runs} == {"SUCCEEDED"}


@pytest.mark.parametrize("raised", [True, False])
def test_retry_says_itself_when_to_try_again(shop: Workshop, raised: bool) -> None:
    app = shop.timeless
    run = app.submit("decide", {"verdict": "retry", "raised": raised})
    with shop.working(app):
        until(lambda: app.get(run.id).errors, "the error")
        seen = app.get(run.id)
        assert (seen.status, seen.attempts, seen.last_error) == ("PENDING", 1, "the other side is busy")
        assert seen.due_us == shop.clock.us + 30_000_000
        shop.clock.advance(30)
        assert app.wait(run.id, timeout=PATIENCE).attempts == 2


@pytest.mark.parametrize("raised", [True, False])
def test_fatal_ends_the_run_with_its_first_attempt(shop: Workshop, raised: bool) -> None:
    run = shop.app.submit("decide", {"verdict": "fatal", "raised": raised})
    with shop.working():
        ended = shop.app.wait(run.id, timeout=PATIENCE)
    assert (ended.status, ended.attempts, ended.last_error) == ("FAILED", 1, "this cannot work")


@pytest.mark.parametrize("raised", [True, False])
def test_a_snooze_costs_no_attempt_however_often(shop: Workshop, raised: bool) -> None:
    app = shop.timeless
    run = app.submit("decide", {"verdict": "snooze", "raised": raised, "times": 5})
    with shop.working(app):
        for snoozes in range(1, 6):
            until(lambda snoozes=snoozes: steps(app, run.id).count("snoozed") == snoozes, f"snooze {snoozes}")
            seen = app.get(run.id)
            assert (seen.status, seen.attempts, seen.errors, seen.last_error) == ("PENDING", 0, 0, None)
            assert seen.due_us == shop.clock.us + 45_000_000
            shop.clock.advance(45)
        ended = app.wait(run.id, timeout=PATIENCE)
    assert (ended.status, ended.attempts, ended.fence, app.result(run.id)) == ("SUCCEEDED", 1, 6, 1)


def test_an_error_that_the_model_declares_fatal_is_known_in_a_child_process(shop: Workshop) -> None:
    app = shop.app
    app.model("declared", fatal=worker_models.Hopeless)(worker_models.hopeless)
    app.model("undeclared", backoff=(0,), max_attempts=2)(worker_models.hopeless)
    runs = [app.submit(name) for name in ("declared", "undeclared")]
    with shop.working(processes=1):
        ended = [app.wait(run.id, timeout=PATIENCE) for run in runs]
    assert [(run.status, run.attempts) for run in ended] == [("FAILED", 1), ("FAILED", 2)]


def test_a_result_that_has_no_json_form_or_is_too_large_fails_at_once(shop: Workshop) -> None:
    app = shop.open(max_result_bytes=1000)

    @app.model("strange", isolation="thread")
    def strange() -> object:
        return object()

    runs = [app.submit("strange"), app.submit("large", {"size": 2000})]
    with shop.working(app, processes=1):
        ended = [app.wait(run.id, timeout=PATIENCE) for run in runs]
    assert [(run.status, run.attempts, run.errors) for run in ended] == [("FAILED", 1, 1)] * 2
    assert all(run.last_error for run in ended)


# -- poison --------------------------------------------------------------------------------------------------------


def test_a_run_that_kills_every_process_it_gets_ends_failed(shop: Workshop) -> None:
    """It is counted as lost, not as the model's error, and told; the worker lives and goes on with others."""
    app = shop.open(models={"max_lost": 2})
    folder = shop.place("poison")
    run = app.submit("poison", {"folder": folder})
    with shop.working(app, processes=1) as worker:
        ended = app.wait(run.id, timeout=PATIENCE)
        other = app.submit("add_apart", {"a": 1})
        assert app.wait(other.id, timeout=PATIENCE).worker == worker.id
    assert (ended.status, ended.attempts, ended.losts, ended.errors) == ("FAILED", 2, 2, 0)
    assert ended.last_error == "the child process was killed by SIGKILL (out of memory?)"
    assert [line[1:3] for line in effects(folder)] == [["1", "1"], ["2", "2"]]
    assert steps(app, run.id) == ["created", "leased", "lost", "leased", "lost"]


def test_a_run_that_kills_every_worker_ends_failed(shop: Workshop) -> None:
    """It takes the whole worker with it, twice; whoever sweeps then gives it up."""
    terms = {"max_lost": 2, "lease": 1.5}
    app = shop.open(models=terms)
    folder = shop.place("poison")
    run = app.submit("poison_here", {"folder": folder})
    for _ in range(2):
        with shop.program(models=terms, sweep_every=0.1, processes=0) as program:
            assert program.wait() == -signal.SIGKILL
    with shop.working(app, sweep_every=0.1):
        ended = app.wait(run.id, timeout=PATIENCE)
    assert (ended.status, ended.attempts, ended.losts, ended.errors) == ("FAILED", 2, 2, 0)
    assert "was lost: no sign of life before the lease ended" in (ended.last_error or "")
    assert len(effects(folder)) == 2


# -- what is leased, and in which order ----------------------------------------------------------------------------


def test_higher_priorities_first_then_the_older(shop: Workshop) -> None:
    folder = shop.place("order")
    priorities = [0, 5, -3, 5, 0, 100]
    runs = [
        shop.app.submit("note", {"folder": folder, "number": number}, priority=priority)
        for number, priority in enumerate(priorities)
    ]
    with shop.working(concurrency=1):
        for run in runs:
            shop.app.wait(run.id, timeout=PATIENCE)
    began = {line[0]: place for place, line in enumerate(effects(folder))}
    assert sorted(range(6), key=lambda number: began[runs[number].id]) == [5, 1, 3, 0, 4, 2]


def test_a_model_has_a_queue_and_a_priority_that_a_submit_overrides(shop: Workshop) -> None:
    shop.app.model("urgent", queue="fast", priority=7)(worker_models.add)
    run, other = shop.app.submit("urgent", {"a": 1}), shop.app.submit("urgent", {"a": 2}, queue="slow", priority=0)
    assert (run.queue, run.priority, other.queue, other.priority) == ("fast", 7, "slow", 0)


def test_queues_are_served_in_their_order_and_no_others(shop: Workshop) -> None:
    folder = shop.place("order")

    def submit(number: int, queue: str) -> str:
        return shop.app.submit("note", {"folder": folder, "number": number}, queue=queue).id

    slow, other, fast = submit(1, "slow"), submit(2, "other"), submit(3, "fast")
    with shop.working(concurrency=1, queues=["fast", "slow"]):
        for run_id in (slow, fast):
            shop.app.wait(run_id, timeout=PATIENCE)
        assert shop.app.get(other).status == "PENDING"
    assert [line[0] for line in effects(folder)] == [fast, slow]


def test_a_model_that_a_worker_does_not_know_waits_for_one_who_does(shop: Workshop) -> None:
    """It is neither failed nor in the way of what the worker knows, and says what it waits for."""
    knowing = shop.open()
    knowing.model("novel", isolation="thread", priority=9)(worker_models.add_apart)
    run = knowing.submit("novel", {"a": 1})
    with shop.working():
        known = shop.app.submit("add", {"a": 1})
        assert shop.app.wait(known.id, timeout=PATIENCE).status == "SUCCEEDED"
        waiting = shop.app.waiting(run.id)
        assert waiting is not None
        assert "no live worker of the queue 'default' knows the model 'novel'" in waiting.reason
        seen = shop.app.get(run.id)
        assert (seen.status, seen.attempts, seen.fence) == ("PENDING", 0, 0)
        with shop.working(knowing):
            assert knowing.wait(run.id, timeout=PATIENCE).status == "SUCCEEDED"


def test_a_model_for_which_the_worker_has_no_place_is_left_to_others(shop: Workshop) -> None:
    run = shop.app.submit("add_apart", {"a": 1})
    with shop.working():
        shop.app.wait(shop.app.submit("add", {"a": 1}).id, timeout=PATIENCE)
        assert shop.app.get(run.id).status == "PENDING"


def test_a_delayed_run_starts_when_it_is_due(shop: Workshop) -> None:
    app = shop.timeless
    run = app.submit("add", {"a": 1}, delay=100)
    with shop.working(app):
        app.wait(app.submit("add", {"a": 2}).id, timeout=PATIENCE)
        shop.clock.advance(99.9)
        app.wait(app.submit("add", {"a": 3}).id, timeout=PATIENCE)
        assert app.get(run.id).status == "PENDING"
        shop.clock.advance(0.1)
        ended = app.wait(run.id, timeout=PATIENCE)
    assert (ended.status, ended.started_us) == ("SUCCEEDED", run.created_us + 100_000_000)


def test_a_delay_is_waited_for_by_the_real_clock_without_a_poll(shop: Workshop) -> None:
    with shop.working(poll=50):
        run = shop.app.submit("add", {"a": 1}, delay=0.5)
        ended = shop.app.wait(run.id, timeout=PATIENCE)
    assert ended.started_us is not None
    assert 0 <= ended.started_us - run.due_us < 10_000_000
    assert ended.due_us == run.due_us


def test_a_new_run_is_heard_of_without_a_poll(shop: Workshop) -> None:
    with shop.working(poll=50):
        until(shop.app.workers, "the start")
        for number in range(5):
            run = shop.app.submit("add", {"a": number})
            assert shop.app.wait(run.id, timeout=20).status == "SUCCEEDED"


# -- several workers -----------------------------------------------------------------------------------------------


def test_two_workers_with_the_same_name_are_two_workers(shop: Workshop) -> None:
    """Each keeps what it holds, and the end of one takes nothing from the other."""
    folder = shop.place("twins")
    with shop.working(name="twin", concurrency=1) as one:
        with shop.working(shop.open(), name="twin", concurrency=1) as two:
            runs = [shop.app.submit("await_politely", {"folder": folder}, dedupe=False) for _ in range(2)]
            until(lambda: len(effects(folder)) == 2, "both at work")
            until(lambda: [worker.name for worker in shop.app.workers()] == ["twin", "twin"], "both say who they are")
            workers = shop.app.workers()
            held = {"await_politely": 1}
            assert {worker.id: worker.holds for worker in workers} == {one.id: held, two.id: held}
        until(lambda: len(shop.app.workers()) == 1, "the end of one")
        assert {run.worker for run in shop.app.runs(status="RUNNING").runs} == {one.id}
        touch(folder)
        assert {shop.app.wait(run.id, timeout=PATIENCE).status for run in runs} == {"SUCCEEDED"}


def test_a_worker_whose_lease_was_taken_stops_and_discards(shop: Workshop) -> None:
    """What it executes is ended by force, its slots are free again, and the result is that of the heir."""
    app = shop.open(clock=shop.clock, models=QUICK)
    heir = shop.hand(app, "heir")
    with shop.working(app, sweep_every=None, concurrency=1, processes=1, threads=1) as worker:
        runs = begun(shop, app, DEAF)
        taken = {}
        for model, (run, _) in runs.items():
            taken[model] = until(lambda run=run: heir.lease_this(run) or shop.clock.advance(1.5 + MOMENT), "takeover")
        following = shop.place("following")
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


def test_a_result_that_comes_after_the_lease_was_taken_is_discarded(shop: Workshop) -> None:
    """The worker's heart has not noticed yet, so that it ends the run in good faith: the fence refuses it."""
    app = shop.timeless
    heir = shop.hand(app, "heir")
    with shop.working(app, sweep_every=None, processes=1):
        runs = begun(shop, app, DEAF)
        shop.clock.advance(60 + MOMENT)
        taken = {model: heir.lease_this(run) for model, (run, _) in runs.items()}
        for _, folder in runs.values():
            touch(folder)
        following = shop.place("following")
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


def test_when_a_worker_is_killed_another_recovers_its_runs(shop: Workshop) -> None:
    """SIGKILL to the parent: its children die with it, the leases run out, and the sweeper of another takes over."""
    app = shop.open(models=QUICK)
    places = {model: shop.place(model) for model in ("wait_deaf", "await_deaf")}
    runs = {model: app.submit(model, {"folder": folder}) for model, folder in places.items()}
    with shop.program(models=QUICK, sweep_every=0.2) as program:
        for folder in places.values():
            until(lambda folder=folder: effects(folder), "the start")
        program.send(signal.SIGKILL)
        program.wait()
    until(lambda: is_gone(int(effects(places["wait_deaf"])[0][3])), "the end of the child")
    for folder in places.values():
        touch(folder)
    with shop.working(app, sweep_every=0.2, processes=1) as worker:
        for model, run in runs.items():
            ended = app.wait(run.id, timeout=PATIENCE)
            assert (ended.status, ended.attempts, ended.losts, ended.worker) == ("SUCCEEDED", 2, 1, worker.id), model
            assert [line[1] for line in effects(places[model])] == ["1", "2"]


def test_a_worker_keeps_a_short_lease_under_the_eyes_of_a_sweeper(shop: Workshop) -> None:
    app = shop.open(models={"lease": 1})
    folder = shop.place("short")
    run = app.submit("await_politely", {"folder": folder})
    with shop.working(app, sweep_every=0.05):
        until(lambda: effects(folder), "the start")
        began = time.time()
        until(lambda: time.time() > began + 3, "three leases")
        touch(folder)
        ended = app.wait(run.id, timeout=PATIENCE)
    assert (ended.status, ended.attempts, ended.losts) == ("SUCCEEDED", 1, 0)


# -- the sweeper ---------------------------------------------------------------------------------------------------


def leader(shop: Workshop) -> str | None:
    rows = shop.sql("SELECT holder FROM semel_leaders WHERE role = :role", role=ROLE)
    return rows[0][0] if rows else None


def test_one_worker_sweeps_and_when_it_stops_another_does(shop: Workshop) -> None:
    with shop.working(shop.open(), sweep_every=5) as second:
        with shop.working(sweep_every=5) as first:
            until(lambda: len(shop.app.workers()) == 2, "both")
            chosen = until(lambda: leader(shop), "an election")
            for _ in range(20):
                assert leader(shop) == chosen
        if chosen == first.id:
            until(lambda: leader(shop) == second.id, "the takeover")
        assert leader(shop) == second.id


def test_a_sweeper_that_vanished_is_replaced_when_its_term_is_over(shop: Workshop) -> None:
    app = shop.timeless
    dead = shop.hand(name="dead")
    assert dead.do(dead.ledger.write(maintenance.acquire_leadership, ROLE, "dead", 70, dead.ledger.terms))
    run = app.submit("add", {"a": 1})
    dead.lease_this(run)
    shop.clock.advance(65)
    with shop.working(app, sweep_every=0.05) as worker:
        app.wait(app.submit("add", {"a": 2}).id, timeout=PATIENCE)
        assert (leader(shop), app.get(run.id).status) == ("dead", "RUNNING")
        shop.clock.advance(5 + MOMENT)
        assert app.wait(run.id, timeout=PATIENCE).losts == 1
        assert leader(shop) == worker.id


# -- the outbox ----------------------------------------------------------------------------------------------------


def test_every_step_is_published_after_it_was_committed(shop: Workshop) -> None:
    published: list[tuple[OutboxEvent, str]] = []
    reader = shop.open()

    def publish(event: OutboxEvent) -> None:
        published.append((event, reader.get(event.run_id).status))

    app = shop.open(publish=publish)
    run = app.submit("add", {"a": 1}, user=42)
    with shop.working(app, sweep_every=0.05):
        until(lambda: [event for event, _ in published if event.name == "RunCompleted"], "RunCompleted")
    names = {"RunCreated": "PENDING", "RunStarted": "RUNNING", "RunCompleted": "SUCCEEDED"}
    assert {event.name: event.status for event, _ in published} == names
    order = ["PENDING", "RUNNING", "SUCCEEDED"]
    for event, seen in published:
        assert order.index(seen) >= order.index(event.status)
        assert (event.run_id, event.model, event.user) == (run.id, "add", "42")
    assert len({event.id for event, _ in published}) == 3


def test_a_publisher_that_fails_gets_the_event_again(shop: Workshop) -> None:
    """At least once, in order, under the same id each time; nobody else suffers."""
    heard: list[OutboxEvent] = []

    def publish(event: OutboxEvent) -> None:
        heard.append(event)
        if len(heard) in (1, 2, 4):
            raise ConnectionError("the other side is away")

    app = shop.open(publish=publish)
    run = app.submit("add", {"a": 1})
    with shop.working(app, sweep_every=0.05):
        assert app.wait(run.id, timeout=PATIENCE).status == "SUCCEEDED"
        until(lambda: [event for event in heard if event.name == "RunCompleted"], "RunCompleted")
        until(lambda: shop.sql("SELECT count(*) FROM semel_run_events WHERE unpublished") == [(0,)], "all of it")
    times = Counter(event.id for event in heard)
    assert [times[f"{run.id}/{version}"] for version in (1, 2, 3)] == [3, 2, 1]
    assert [event.name for event in heard][:4] == ["RunCreated"] * 3 + ["RunStarted"]


def test_a_slow_publisher_holds_nobody_up(shop: Workshop) -> None:
    """It blocks for two seconds, and meanwhile the loop of the worker turns."""
    app = shop.open(publish=lambda event: time.sleep(2 if event.name == "RunStarted" else 0))
    gaps: list[float] = []

    @app.model("ticking")
    async def ticking() -> None:
        last = time.monotonic()
        for _ in range(120):
            await asyncio.sleep(0.02)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    run = app.submit("ticking")
    with shop.working(app, sweep_every=0.05):
        assert app.wait(run.id, timeout=PATIENCE).status == "SUCCEEDED"
    assert max(gaps) < 1.5


def test_without_a_publisher_nothing_waits_to_be_published(shop: Workshop) -> None:
    shop.app.submit("add", {"a": 1})
    assert shop.sql("SELECT count(*) FROM semel_run_events WHERE unpublished") == [(0,)]


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
    with Workshop("postgres", url, tmp_path) as shop:
        early, late = shop.place("early"), shop.place("late")
        asked = [{"model": "await_deaf", "parameters": {"folder": early}, "dedupe": False}] * 50
        asked += [{"model": "await_deaf", "parameters": {"folder": late}, "dedupe": False}] * 50
        shop.app.submit_many(asked)
        with shop.working():
            until(lambda: len(effects(early)) + len(effects(late)) == 100, "100 leases")
            own_server.stop(crash=crash)
            touch(early)
            own_server.start()
            touch(late)
            until(lambda: shop.app.backlog().pending + shop.app.backlog().running == 0, "the end of all")
            assert shop.app.wait(shop.app.submit("add", {"a": 1}).id, timeout=PATIENCE).status == "SUCCEEDED"
        counted = shop.sql("SELECT status, attempt_count, count(*) FROM model_runs WHERE model <> 'add' GROUP BY 1, 2")
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
def cut_off(own_server: servers.Postgres, tmp_path: Path) -> Iterator[tuple[Workshop, Workshop, Silent]]:
    """The same database twice, the second time over a line that can fall silent."""
    url = make_url(own_server.database())
    plain = url.render_as_string(hide_password=False)
    assert semel(["migrate", plain]) == 0
    line = Silent(f"{url.query['host']}/.s.PGSQL.5432")
    far = f"postgresql://postgres@127.0.0.1:{line.port}/{url.database}"
    with closing(line), Workshop("postgres", plain, tmp_path) as here, Workshop("postgres", far, tmp_path) as there:
        yield here, there, line


def test_a_worker_cut_off_from_a_silent_database_lets_go_when_its_leases_end(
    cut_off: tuple[Workshop, Workshop, Silent],
) -> None:
    """It cannot hear that another has its run; it knows when its lease has ended, and stops by then."""
    here, there, line = cut_off
    folder = here.place("silent")
    run = here.open(models=QUICK).submit("await_deaf", {"folder": folder})
    with there.working(there.open(models=QUICK)):
        until(lambda: effects(folder), "the start")
        line.speaks.clear()
        fell_silent = time.monotonic()
        try:
            until((Path(folder) / "cancelled").exists, "the end of the attempt")
            assert time.monotonic() - fell_silent < 10
            touch(folder)
            with here.working(here.open(models=QUICK), sweep_every=0.1) as worker:
                ended = here.app.wait(run.id, timeout=PATIENCE)
        finally:
            line.speaks.set()
    assert (ended.status, ended.attempts, ended.losts, ended.worker) == ("SUCCEEDED", 2, 1, worker.id)


def test_a_stop_is_heard_although_the_database_is_silent(cut_off: tuple[Workshop, Workshop, Silent]) -> None:
    here, there, line = cut_off
    folder = here.place("silent")
    here.app.submit("await_deaf", {"folder": folder})
    with there.program(drain=0.5, processes=0) as program:
        try:
            until(lambda: effects(folder), "the start")
            line.speaks.clear()
            program.send(signal.SIGTERM)
            program.wait()
        finally:
            line.speaks.set()


def test_told_twice_a_worker_gives_back_although_the_database_is_silent_for_a_while(
    cut_off: tuple[Workshop, Workshop, Silent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else it has to write may fail in time; the runs are tried for longer."""
    monkeypatch.setattr(session, "SILENT", 0.2)
    here, there, line = cut_off
    folder = here.place("silent")
    run = here.app.submit("await_deaf", {"folder": folder})
    with there.working(drain=3000):
        until(lambda: effects(folder), "the start")
        line.speaks.clear()
        threading.Timer(1.0, line.speaks.set).start()
    assert (here.app.get(run.id).status, here.app.get(run.id).attempts) == ("PENDING", 0)


def test_a_worker_without_its_database_lets_go_when_its_leases_end(
    own_server: servers.Postgres, tmp_path: Path
) -> None:
    """Another may have its runs by then. When the database is back it begins anew."""
    url = own_server.database()
    assert semel(["migrate", url]) == 0
    with Workshop("postgres", url, tmp_path) as shop:
        app = shop.open(models=QUICK)
        folder = shop.place("away")
        run = app.submit("await_deaf", {"folder": folder})
        with shop.working(app, sweep_every=0.2):
            until(lambda: effects(folder), "the start")
            own_server.stop()
            until((Path(folder) / "cancelled").exists, "the end of the attempt")
            own_server.start()
            touch(folder)
            ended = app.wait(run.id, timeout=PATIENCE)
    assert (ended.status, ended.fence) == ("SUCCEEDED", 2)
    assert ended.attempts - ended.losts == 1, "given back by the worker, or found lost by the sweeper"


def losing_replies(monkeypatch: pytest.MonkeyPatch, verb: Callable[..., Any], times: int = 1) -> list[str]:
    """The store does what it is asked by this verb, and the first replies are lost; who asked is noted."""
    lost: list[str] = []

    def patch(method: str) -> None:
        real = getattr(RunStore, method)

        async def losing(self: RunStore, asked: Callable[..., Any], *args: Any) -> Any:
            answer = await real(self, asked, *args)
            if asked is verb and len(lost) < times and answer:
                lost.append(verb.__name__)
                raise StoreUnavailable("the reply was lost")
            return answer

        monkeypatch.setattr(RunStore, method, losing)

    for method in ("read", "write", "write_once"):
        patch(method)
    return lost


def test_what_was_leased_by_a_statement_whose_reply_was_lost_is_given_back_uncharged(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [shop.app.submit("add", {"a": number}) for number in range(3)]
    lost = losing_replies(monkeypatch, lease.lease)
    with shop.working():
        for run in runs:
            ended = shop.app.wait(run.id, timeout=PATIENCE)
            assert (ended.status, ended.attempts, ended.losts, ended.fence) == ("SUCCEEDED", 1, 0, 2)
            assert steps(shop.app, run.id) == ["created", "leased", "returned", "leased", "succeeded"]
    assert lost == ["lease"]


def test_a_worker_in_doubt_outlives_a_database_that_goes_away_again(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shop.app.submit("add", {"a": 1})
    losing_replies(monkeypatch, lease.lease)
    lost = losing_replies(monkeypatch, lease.held_by, 2)
    with shop.working():
        assert shop.app.wait(run.id, timeout=PATIENCE).status == "SUCCEEDED"
    assert lost == ["held_by"] * 2


def test_an_end_whose_reply_was_lost_is_written_once_and_told_as_it_is(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, str]] = []
    shop.app.on_event(lambda event: told.append((event.kind, event.status)))
    lost = losing_replies(monkeypatch, transitions.end)
    with shop.working():
        run = shop.app.submit("add", {"a": 1})
        shop.app.wait(run.id, timeout=PATIENCE)
        until(lambda: ("ended", "SUCCEEDED") in told, "the news")
    assert lost == ["end"]
    assert steps(shop.app, run.id) == ["created", "leased", "succeeded"]
    assert told == [("created", ""), ("started", "RUNNING"), ("ended", "SUCCEEDED")]


def test_a_sqlite_file_that_someone_else_locks_for_a_while_costs_nothing(grounds: Grounds, tmp_path: Path) -> None:
    with grounds.empty("sqlite") as ground, Workshop("sqlite", ground.url, tmp_path) as shop:
        folder = shop.place("locked")
        shop.app.submit_many([{"model": "await_deaf", "parameters": {"folder": folder}, "dedupe": False}] * 20)
        with shop.working():
            until(lambda: len(effects(folder)) == 20, "20 leases")
            with closing(sqlite3.connect(ground.url.removeprefix("sqlite:///"), isolation_level=None)) as other:
                other.execute("BEGIN EXCLUSIVE")
                touch(folder)
                began = time.monotonic()
                until(lambda: time.monotonic() > began + 1.5, "a while")
                other.execute("COMMIT")
            until(lambda: shop.app.backlog().running == 0, "the end of all")
        assert shop.sql("SELECT status, attempt_count, count(*) FROM model_runs GROUP BY 1, 2") == [
            ("SUCCEEDED", 1, 20)
        ]


def test_a_worker_says_that_the_database_was_never_migrated(postgres_url: str, tmp_path: Path) -> None:
    app = App(postgres_url, artifacts=tmp_path)
    with pytest.raises(NotMigrated, match="semel migrate"):
        asyncio.run(Worker(app).serve())


# -- the clock -----------------------------------------------------------------------------------------------------


def test_a_clock_that_jumps_ahead_lets_leases_end_and_nothing_is_done_twice_under_one_fence(shop: Workshop) -> None:
    """What is held counts as lost by the new time: the attempt is discarded, and the run is done by another one."""
    app = shop.timeless
    folder = shop.place("jump")
    run = app.submit("await_deaf", {"folder": folder})
    with shop.working(app, sweep_every=0.05):
        until(lambda: effects(folder), "the start")
        shop.clock.advance(3600)
        until(lambda: len(effects(folder)) == 2, "the second attempt")
        touch(folder)
        ended = app.wait(run.id, timeout=PATIENCE)
    assert (ended.status, ended.attempts, ended.losts, ended.fence) == ("SUCCEEDED", 2, 1, 2)
    assert steps(app, run.id) == ["created", "leased", "lost", "leased", "succeeded"]


def test_a_clock_that_jumps_back_stops_nothing(shop: Workshop) -> None:
    app = shop.timeless
    folder = shop.place("jump")
    waiting = app.submit("note", {"folder": folder, "number": 1}, queue="later")
    held = app.submit("await_deaf", {"folder": folder})
    with shop.working(app, sweep_every=0.05, queues=["default", "new"]):
        until(lambda: effects(folder), "the start")
        shop.clock.advance(-3600)
        new = app.submit("note", {"folder": folder, "number": 2}, queue="new")
        assert app.wait(new.id, timeout=PATIENCE).status == "SUCCEEDED"
        touch(folder)
        assert app.wait(held.id, timeout=PATIENCE).attempts == 1
    with shop.working(app, queues=["later"]):
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
