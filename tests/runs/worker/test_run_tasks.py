"""Runs that share a task: to a model it looks as if each run had a task of its own."""

import asyncio
from contextvars import ContextVar

import pytest

from semel import App, Run
from semel.runs.worker import Worker
from support.runs_harness import PATIENCE, RunsHarness

MANY = 8
here: ContextVar[str] = ContextVar("here", default="nothing")


@pytest.fixture
def app(harness: RunsHarness) -> App:
    return App(harness.url, artifacts=harness.folder / "artifacts", dedupe_window=0)


def submit(app: App, *models: str) -> list[Run]:
    return app.submit_many([{"model": model} for model in models])


def ended(app: App, runs: list[Run]) -> set[str]:
    """How they ended."""
    return {app.wait(run.id, timeout=PATIENCE).status for run in runs}


def results(app: App, runs: list[Run]) -> set[str]:
    assert ended(app, runs) == {"SUCCEEDED"}
    return {app.result(run.id) for run in runs}


@pytest.mark.parametrize("waits", [False, True])
def test_no_run_sees_the_context_variables_of_another(app: App, harness: RunsHarness, waits: bool) -> None:
    @app.model("look")
    async def look() -> str:
        seen = here.get()
        here.set("another run")
        if waits:
            await asyncio.sleep(0)
            seen += f", then {here.get()}"
        return seen

    runs = submit(app, *["look"] * MANY)
    with harness.working(app):
        seen = results(app, runs)
    assert seen == {"nothing, then another run" if waits else "nothing"}


def test_runs_that_wait_are_under_way_together(app: App, harness: RunsHarness) -> None:
    """Also the first ones, of a model that is not known to wait: each waits for all the others."""
    together = asyncio.Barrier(MANY)

    @app.model("meet")
    async def meet() -> None:
        await together.wait()

    runs = submit(app, *["meet"] * MANY)
    with harness.working(app):
        assert ended(app, runs) == {"SUCCEEDED"}


def test_a_run_that_cancels_its_task_cancels_no_other_run(app: App, harness: RunsHarness) -> None:
    @app.model("give_up", max_attempts=1)
    async def give_up() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    @app.model("go_on", max_attempts=1)
    async def go_on() -> str:
        await asyncio.sleep(0)
        return "done"

    runs = submit(app, "give_up", *["go_on"] * MANY)
    with harness.working(app):
        assert results(app, runs[1:]) == {"done"}
    for run in runs[1:]:
        assert [step.step for step in app.timeline(run.id)] == ["created", "leased", "succeeded"]


def test_a_run_that_is_cancelled_by_force_ends_alone(app: App, harness: RunsHarness) -> None:
    """It waits in a task that other runs began in, and the others wait, too."""
    go_on = asyncio.Event()

    @app.model("wait", grace=0.05)
    async def wait() -> None:
        await go_on.wait()

    @app.model("open")
    async def open_() -> None:
        go_on.set()

    first, *others = submit(app, *["wait"] * MANY)
    with harness.working(app):
        app.cancel(first.id)
        assert app.wait(first.id, timeout=PATIENCE).status == "CANCELLED"
        submit(app, "open")
        assert ended(app, others) == {"SUCCEEDED"}


class Panic(BaseException):
    """As an extension in Rust raises it: no Exception."""


@pytest.mark.parametrize("error", [Panic, KeyboardInterrupt])
def test_a_run_that_raises_what_is_no_exception_has_failed_and_the_others_go_on(
    app: App, error: type[BaseException]
) -> None:
    @app.model("panic", max_attempts=1)
    async def panic() -> None:
        raise error

    @app.model("go_on")
    async def go_on() -> None:
        """It never waits."""

    first, *others = submit(app, "panic", *["go_on"] * MANY)
    with app.working(processes=0):
        assert ended(app, [first]) == {"FAILED"}
        assert ended(app, others) == {"SUCCEEDED"}
    assert (app.get(first.id).last_error or "").startswith(error.__name__)


def test_a_run_that_cancels_its_task_and_waits_is_tried_as_often_as_after_an_error(
    app: App, harness: RunsHarness
) -> None:
    """It would be leased and given back for ever."""

    @app.model("give_up", max_attempts=2, backoff=(0,))
    async def give_up() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    (run,) = submit(app, "give_up")
    with harness.working(app):
        assert ended(app, [run]) == {"FAILED"}
    seen = app.get(run.id)
    assert (seen.attempts, seen.last_error) == (2, "the model cancelled the task in which it was executed")


def test_a_run_that_is_to_be_given_back_before_it_began_is_not_begun(app: App) -> None:
    """A worker is told twice to stop while it leases the run that it was called for."""
    begun = list[str]()

    @app.model("wait")
    async def wait() -> None:
        begun.append("begun")
        await asyncio.Event().wait()

    (run,) = submit(app, "wait")

    async def perform() -> bool:
        worker = Worker(app, processes=0)
        task = asyncio.create_task(worker.perform(run.id))
        await asyncio.sleep(0)  # it has a session from now on
        worker.stop()
        worker.stop()
        return await task

    assert asyncio.run(perform())
    assert begun == []
    assert [step.step for step in app.timeline(run.id)] == ["created", "leased", "returned"]
