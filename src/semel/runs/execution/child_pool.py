"""The worker's child processes: a run gets a warm one, and whatever happens to it becomes one `AttemptResult`.

A child that does not stop when asked to is killed with all processes that it started; one that dies is replaced.
A model cannot block the event loop: all messages to and from a child go through non-blocking sockets.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from uuid import uuid4

from msgspec.structs import replace

from semel.runs.execution import Limits, timed_out_after
from semel.runs.execution.child_main import Cancel, ChildConfig, Finished, FromChild, Output, Quit, RunAttempt
from semel.runs.execution.child_process import ChildProcess
from semel.runs.execution.log_capture import AttemptSink, BoundedLog
from semel.runs.execution.tracebacks import name_of
from semel.runs.models.model import Model, home
from semel.runs.results import INLINE_BYTES, MAX_BYTES
from semel.runs.types import Attempt, AttemptResult

__all__ = ["ChildPool"]

STACK_DUMP_TIME = 0.5
"""Seconds that a child has to print its stack before it is killed."""
EXIT_TIME = 5.0
"""Seconds that an idle child may take to exit before it is killed."""


class ChildPool:
    """Up to `size` child processes, started when they are needed and kept for the next run."""

    def __init__(
        self,
        size: int,
        *,
        results_url: str,
        inline_bytes: int = INLINE_BYTES,
        max_result_bytes: int = MAX_BYTES,
        max_runs_per_child: int | None = None,
        start_timeout: float = 30.0,
    ) -> None:
        self._size = size
        self._results_url = results_url
        self._limits = Limits(inline_bytes, max_result_bytes)
        self._max_runs = max_runs_per_child
        self._start_timeout = start_timeout
        self._places = asyncio.Semaphore(size)
        self._idle: list[ChildProcess] = []
        self._processes: set[ChildProcess] = set()
        """All that were started and have not ended yet."""
        self._executions: set[_Execution] = set()
        self._endings: set[asyncio.Task[None]] = set()
        self._closed = False
        self._quiet = asyncio.Event()

    @property
    def free(self) -> int:
        """How many more runs would start at once."""
        return max(0, self._size - len(self._executions))

    async def start(self) -> None:
        """Start all children ahead of the first run. One that fails to start is tried again when it is needed."""
        starts = [self._start_ahead() for _ in range(self._size - len(self._idle) - len(self._executions))]
        await asyncio.gather(*starts, return_exceptions=True)

    async def _start_ahead(self) -> None:
        self._put_back(await self._start())

    async def run(self, attempt: Attempt, model: Model, sink: AttemptSink) -> AttemptResult:
        """Execute the attempt in a child, as soon as one is free. Cancelling this call kills the child."""
        if self._closed:
            return AttemptResult(kind="lost", reason="the worker's child processes are closed")
        execution = _Execution(attempt, model, sink)
        self._executions.add(execution)
        try:
            async with self._places:
                return execution.verdict or await self._execute(execution)
        finally:
            self._executions.discard(execution)
            if not self._executions:
                self._quiet.set()

    def cancel(self, run_id: str) -> None:
        """Ask the run to stop, and kill it if it has not stopped when its model's grace is over."""
        for execution in self._of(run_id):
            execution.ask_to_stop(AttemptResult(kind="cancelled", reason="cancelled"))

    def kill(self, run_id: str) -> None:
        """Kill the run at once, because its lease was lost."""
        for execution in self._of(run_id):
            execution.end_by_force(AttemptResult(kind="lost", reason="killed, because its lease was lost"))

    async def close(self, *, kill: bool = False) -> None:
        """End all children: at once if ``kill``, else after their runs. No new runs are accepted."""
        self._closed = True
        if kill:
            for execution in self._executions:
                execution.end_by_force(AttemptResult(kind="lost", reason="killed, because its worker was closed"))
        if self._executions:
            self._quiet.clear()
            await self._quiet.wait()
        while self._idle:
            self._later(_dismissed(self._idle.pop(), polite=not kill))
        while self._endings or self._processes:
            await asyncio.gather(*self._endings, *(process.gone for process in self._processes))

    def _of(self, run_id: str) -> list[_Execution]:
        return [execution for execution in self._executions if execution.attempt.run_id == run_id]

    async def _execute(self, execution: _Execution) -> AttemptResult:
        try:
            process = self._waiting() or await self._start()
        except ChildProcessError as error:
            return AttemptResult(kind="unstarted", reason=str(error))
        process.runs += 1
        try:
            return execution.verdict or await execution.run_on(process)
        except asyncio.CancelledError:
            process.kill()
            raise
        finally:
            await self._settle(process, execution)

    async def _settle(self, process: ChildProcess, execution: _Execution) -> None:
        if process.has_orphans:
            process.kill()  # with the processes that the model left behind
        if not process.terminating:
            self._put_back(process)
        else:
            cleared = self._later(_cleared(process, execution.scratch))
            if process.gone.done():
                await asyncio.shield(cleared)

    def _waiting(self) -> ChildProcess | None:
        while self._idle:
            process = self._idle.pop()
            if not process.terminating:
                return process
        return None

    async def _start(self) -> ChildProcess:
        config = ChildConfig(
            path=[str(entry) for entry in sys.path],
            argv=sys.argv,
            pythonpath=os.environ.get("PYTHONPATH"),
            log_level=logging.root.level,
            results_url=self._results_url,
            limits=self._limits,
        )
        process = ChildProcess()
        self._processes.add(process)
        process.gone.add_done_callback(lambda _: self._processes.discard(process))
        await process.start(config, self._start_timeout)
        return process

    def _put_back(self, process: ChildProcess) -> None:
        worn = self._max_runs is not None and process.runs >= self._max_runs
        crowded = sum(not other.terminating for other in self._processes) > self._size
        if worn or crowded or self._closed:
            self._later(_dismissed(process, polite=True))
        else:
            self._idle.append(process)

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        return task


class _Execution:
    """One attempt in a child, and how it ends."""

    def __init__(self, attempt: Attempt, model: Model, sink: AttemptSink) -> None:
        self._loop = asyncio.get_running_loop()
        self.attempt = attempt
        self.scratch = Path(tempfile.gettempdir()) / f"semel-run-{uuid4().hex}"
        self.verdict: AttemptResult | None = None
        """How it ends, whatever the child reports."""
        self._model = model
        self._sink = sink
        self._lines = BoundedLog(sink)
        self._ended: asyncio.Future[AttemptResult] = self._loop.create_future()
        self._stopping: AttemptResult | None = None
        self._process: ChildProcess | None = None
        self._timers: list[asyncio.TimerHandle] = []

    async def run_on(self, process: ChildProcess) -> AttemptResult:
        """Execute it on this child, which executes nothing else meanwhile."""
        self._process = process
        process.on_message, process.on_output = self._on_message, self._on_output
        process.gone.add_done_callback(self._child_gone)
        if self._model.timeout is not None:
            self._after(self._model.timeout, self._time_is_up)
        fatal = frozenset(name_of(kind) for kind in self._model.fatal)
        model = self._model
        process.send(
            RunAttempt(
                self.attempt,
                model.reference,
                model.main_path,
                fatal,
                str(self.scratch),
                home(model.reference),
                model.seeded,
            )
        )
        try:
            return await self._ended
        finally:
            for timer in self._timers:
                timer.cancel()
            self._lines.close()
            process.stop_listening()
            process.gone.remove_done_callback(self._child_gone)

    def ask_to_stop(self, outcome: AttemptResult) -> None:
        """Ask the model to stop within its grace, then kill it; either way this is the outcome."""
        if self._process is None:
            self.verdict = self.verdict or outcome
            return
        first = self._stopping is None
        self._stopping = outcome
        if first:
            self._process.send(Cancel(self.attempt.run_id, self.attempt.fence))
            self._after(self._model.grace, self._grace_is_over)

    def end_by_force(self, outcome: AttemptResult) -> None:
        self.verdict = outcome
        if self._process is not None:
            self._process.kill()

    def _after(self, seconds: float, step: Callable[[], None]) -> None:
        self._timers.append(self._loop.call_later(seconds, step))

    def _time_is_up(self) -> None:
        if self._stopping is None:
            self.ask_to_stop(timed_out_after(self._model))

    def _grace_is_over(self) -> None:
        assert self._stopping is not None
        how = f"; it did not stop within {self._model.grace:g} seconds and was killed"
        self.verdict = self.verdict or replace(self._stopping, reason=self._stopping.reason + how)
        if self._process is not None:
            self._process.abort()  # it prints its stack, which shows where it hangs
        self._after(STACK_DUMP_TIME, self._end_now)

    def _end_now(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _on_message(self, message: FromChild) -> None:
        if isinstance(message, Output):
            for level, text in message.lines:
                self._lines.add(level, text)
            if message.progress is not None:
                self._sink.progress(*message.progress)
        elif isinstance(message, Finished):
            assert self._process is not None
            self._process.read_output()
            self._process.has_orphans = message.has_orphans
            self._settle(message.ended)

    def _on_output(self, text: str) -> None:
        self._lines.add("OUTPUT", text)

    def _child_gone(self, gone: asyncio.Future[str]) -> None:
        self._settle(AttemptResult(kind="lost", reason=f"the child process {gone.result()}"))

    def _settle(self, ended: AttemptResult) -> None:
        """End as the child reports, or with its death. The cause of a stop outweighs how the model reacted to it."""
        if self._stopping is not None and ended.kind == "cancelled":
            ended = replace(ended, kind=self._stopping.kind, reason=self._stopping.reason)
        if self.verdict is not None and (ended.kind == "lost" or self.verdict.kind == "lost"):
            ended = self.verdict
        if not self._ended.done():
            self._ended.set_result(ended)


async def _cleared(process: ChildProcess, scratch: Path) -> None:
    """Remove the scratch folder, which a killed child could not."""
    await process.gone
    await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)


async def _dismissed(process: ChildProcess, *, polite: bool) -> None:
    """End a child that is not needed any more."""
    process.terminating = True
    if polite:
        process.send(Quit())
        await asyncio.wait({process.gone}, timeout=EXIT_TIME)
    process.kill()
    await process.gone
