"""The tasks in which runs are executed: runs of models that never wait share one, as a task costs as much as they do.

Each run has a context of its own either way: what a model sets in a context variable, no other run sees.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextvars import copy_context
from typing import Any, TypeAlias

from semel.runs.worker.active_runs import ActiveRun

_Execute: TypeAlias = Callable[[ActiveRun], Coroutine[Any, Any, None]]


class RunTasks:
    """Starts runs. ``execute`` must handle all errors of a run itself.

    ``run.task`` is the task in which the run is under way, and no other run is; None until it begins.
    """

    def __init__(self, execute: _Execute) -> None:
        self._execute = execute
        self._models_that_wait: set[str] = set()
        self._in_turn: asyncio.Task[None] | None = None  # an event loop itself keeps no task alive

    def start(self, runs: Iterable[ActiveRun]) -> None:
        """Execute the runs: at the same time, if they wait."""
        in_turn: deque[ActiveRun] = deque()
        for run in runs:
            if run.model.isolation == "loop" and run.leased.model not in self._models_that_wait:
                in_turn.append(run)
            else:
                self._start_alone(run)
        if in_turn:
            self._in_turn = asyncio.get_running_loop().create_task(self._run_in_turn(in_turn))

    def _start_alone(self, run: ActiveRun) -> None:
        run.task = asyncio.get_running_loop().create_task(self._execute(run))

    async def _run_in_turn(self, runs: deque[ActiveRun]) -> None:
        """Execute the runs one by one. As soon as one of them waits, or is cancelled, the others get tasks."""
        task = asyncio.current_task()
        assert task is not None

        def wait() -> None:
            self._models_that_wait.add(run.leased.model)
            self._start_rest(runs)

        try:
            while runs and not task.cancelling():
                run = runs.popleft()
                run.task = task
                await _InContext(self._execute(run), wait)
        finally:
            self._start_rest(runs)

    def _start_rest(self, runs: deque[ActiveRun]) -> None:
        while runs:
            self._start_alone(runs.popleft())


class _InContext:
    """A coroutine in a context of its own, as in a task of its own. Before it first waits, ``wait`` is called."""

    def __init__(self, work: Coroutine[Any, Any, None], wait: Callable[[], None]) -> None:
        self._work = work
        self._wait = wait

    def __await__(self) -> Generator[Any, Any, None]:
        step = copy_context().run
        try:
            awaited = step(self._work.send, None)
            self._wait()
            while True:
                try:
                    answer = yield awaited
                except BaseException as error:  # noqa: BLE001 -- cancelled: the coroutine decides
                    awaited = step(self._work.throw, error)
                else:
                    awaited = step(self._work.send, answer)
        except StopIteration:
            return
