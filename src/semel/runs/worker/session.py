"""One session of a worker, from start to stop, in one event loop: joins fetcher, heartbeat, children and completer."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Self

from msgspec.structs import replace

from semel._concurrency.periodic import repeat
from semel._concurrency.retry import jittered
from semel.errors import SemelError, StoreBroken, StoreUnavailable
from semel.runs import tracing
from semel.runs.app import App
from semel.runs.execution import execute_async, run_in_thread
from semel.runs.execution.child_pool import ChildPool
from semel.runs.hooks import RunEvent
from semel.runs.store import lease, maintenance, transitions
from semel.runs.store.lease import Leased
from semel.runs.store.maintenance import WorkerRecord
from semel.runs.store.transitions import FinishRequest
from semel.runs.types import MICRO, AttemptResult, is_own_work
from semel.runs.worker.active_runs import ActiveRun, ActiveRuns
from semel.runs.worker.completer import Completer
from semel.runs.worker.fetcher import COOLDOWN, RETURNED, Fetcher, WorkerConfig
from semel.runs.worker.heartbeat import Heartbeat
from semel.runs.worker.manifests import ManifestWriter
from semel.runs.worker.notifier import ChangeNotifier
from semel.runs.worker.run_logs import EVERY as RUN_LOGS_EVERY
from semel.runs.worker.run_logs import RunLogWriter, WorkerLogger
from semel.runs.worker.run_tasks import RunTasks
from semel.runs.worker.sweeper import ROLE, Sweeper, remover

FORCED_STOP_TIMEOUT = 1.0
"""Seconds that a model in the loop may take to end once it is cancelled by force."""
GIVE_BACK_TIMEOUT = 10.0
"""Seconds for which a worker that stops tries to give back unfinished runs; after that their leases run out."""
LAST_WRITE_TIMEOUT = 5.0
"""Seconds that the database has for each of a stopping worker's last writes."""


class WorkerSession:
    """A worker from its start to its stop. Use it as a context manager, which closes its parts."""

    def __init__(self, app: App, config: WorkerConfig) -> None:
        self._app = app
        self._config = config
        self._log = WorkerLogger(config.id)
        self._stop_requested = asyncio.Event()
        self._active = ActiveRuns()
        self._tasks = RunTasks(self._attempt)
        self._stopping = self._at_once = self._database_silent = False
        self._owner: asyncio.Task[Any] | None = None  # the task of the session
        self._store = app.ledger(awaited=True)
        self._store.outage = app.outage
        self._results = app.results
        self._run_logs = RunLogWriter(self._store, self._active)
        self._manifests = ManifestWriter(self._store, app.registry, config.id, self._log)
        self._fetcher = Fetcher(
            config,
            app.registry,
            self._store,
            self._active,
            log=self._log,
            before_lease=self._manifests.write_if_changed,
            begin=self._begin,
            unwritten=lambda: len(self._completer),
        )
        self._wakeup = self._fetcher.wakeup
        self._completer = Completer(
            self._store,
            self._active,
            self._run_logs,
            log=self._log,
            hooks=app.hooks,
            results=lambda: app.results,
            finish=self._fetcher.finish,
            written=self._wakeup.set,
        )
        self._children = ChildPool(
            config.slots["process"],
            results_url=app.results.url,
            inline_bytes=app.limits.inline_bytes,
            max_result_bytes=app.limits.max_bytes,
            max_runs_per_child=config.max_runs_per_child,
        )
        self._sweeper = Sweeper(
            self._store,
            config.id,
            transport=app.transport,
            hooks=app.hooks,
            publish=app.publish,
            remove_old=remover(app, self._store),
            retention=app.retention,
            interval=config.sweep_every or 5.0,
        )
        self._notifier = ChangeNotifier(self._store.url, self._fetcher.on_change, poll=config.poll, database=app.outage)
        self._heartbeat = Heartbeat(
            self._store, self._active, self._log, record=self._record, lost=self._lost, cancelled=self._cancelled
        )

    async def __aenter__(self) -> Self:
        self._owner = asyncio.current_task()
        self._manifests.collect()
        try:
            await self._open()
        except BaseException:
            self._manifests.close()
            await self._store.close()
            raise
        self._background = [
            asyncio.create_task(self._heartbeat.run()),
            asyncio.create_task(repeat(self._run_logs.write_active, "writing the logs of runs", RUN_LOGS_EVERY)),
        ]
        return self

    async def _open(self) -> None:
        ends_at = time.monotonic() + self._config.wait_for_database
        while True:
            try:
                return await self._store.open_with_retry()
            except StoreUnavailable as error:
                if isinstance(error, StoreBroken) or self._stopping or time.monotonic() >= ends_at:
                    raise

    async def __aexit__(self, *_: object) -> None:
        """Give back the runs that are not finished, also when the task is cancelled, and close everything.

        In a task of its own: before Python 3.11.3, ``asyncio.timeout`` ends a task that was cancelled once.
        """
        await asyncio.create_task(self._close())

    async def _close(self) -> None:
        self._manifests.close()
        if len(self._active) and not self._database_silent:
            self.stop(at_once=True)
            await self._drain_all()
        tasks = [run.task for run in self._active if run.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=FORCED_STOP_TIMEOUT)
        await self._best_effort(self._fetcher.give_back_unknown())
        for task in self._background:
            task.cancel()
        await asyncio.wait(self._background, timeout=FORCED_STOP_TIMEOUT)
        await self._children.close(kill=True)
        await self._best_effort(self._store.write(maintenance.worker_gone, self._config.id))
        await self._best_effort(self._store.close())

    def stop(self, *, at_once: bool) -> None:
        """Begin nothing new; ``at_once`` also gives back what is not done."""
        self._stopping, self._at_once = True, at_once
        self._fetcher.stopped = True
        self._stop_requested.set()
        self._wakeup.set()
        if len(self._active) and not at_once:
            left = f"waiting up to {self._config.drain:g} s for {len(self._active)} runs"
            self._log.log(logging.INFO, f"stopping: {left}; a second signal gives them back at once")

    async def work(self) -> None:
        """Work until stopped."""
        models = ", ".join(self._app.registry.names) or "no models"
        self._log.log(
            logging.INFO, f"worker started on {', '.join(self._config.queues)} of {self._store.place} with {models}"
        )
        self._warn_of_idle_models()
        if self._config.sweep_every:
            self._sweeper.start()
        self._notifier.start()
        warming = asyncio.create_task(self._children.start()) if "process" in self._fetcher.kinds() else None
        try:
            await self._fetch_until_stopped()
            await self._drain_all()
        finally:
            self._notifier.stop()
            if warming is not None:
                warming.cancel()
            if self._config.sweep_every:
                await self._sweeper.end()
                await self._best_effort(self._store.write(maintenance.release_leadership, ROLE, self._config.id))
            self._log.log(logging.INFO, "worker stopped")

    def _warn_of_idle_models(self) -> None:
        if not self._app.registry.names:
            self._log.log(logging.WARNING, "this app has no models: are the modules imported that define them?")
        idle = [model.name for model in self._app.registry if not self._config.slots[model.isolation]]
        if idle:
            self._log.log(logging.WARNING, f"this worker has no slots for the models {', '.join(idle)}: they wait")

    async def work_on(self, run_id: str) -> bool:
        await self._manifests.write_if_changed()
        leased = await self._store.write(lease.lease_these, self._config.id, [run_id], self._store.statement_context)
        for each in leased:
            if each.model in self._app.registry:
                self._begin([each])
            else:
                await self._store.write(
                    transitions.end,
                    [FinishRequest(each.id, each.fence, RETURNED, returned=True)],
                    self._store.statement_context,
                )
        while len(self._active) and not self._stopping:
            self._wakeup.clear()
            await self._wakeup.wait()
        await self._drain_all()
        return bool(leased)

    async def _fetch_until_stopped(self) -> None:
        """Fetch runs. A stop takes effect even if the database is silent: what a lost lease took is given back."""
        fetching, stopped = (
            asyncio.create_task(self._fetcher.fetch_loop()),
            asyncio.create_task(self._stop_requested.wait()),
        )
        try:
            await asyncio.wait({fetching, stopped}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({fetching}, timeout=1.0)
            if fetching.done():
                fetching.result()
        finally:
            for task in (fetching, stopped):
                task.cancel()
            await asyncio.gather(fetching, stopped, return_exceptions=True)

    def _begin(self, leased: Sequence[Leased]) -> None:
        now = time.monotonic()
        runs = [ActiveRun(each, self._app.registry[each.model], self._config.id, now) for each in leased]
        watched = self._app.hooks.has_hooks or self._log.logs(logging.INFO)
        for run in runs:
            self._active.add(run)
            self._heartbeat.watch(run)
            self._fetcher.busy[run.model.isolation] += 1
            if watched:
                self._report(run)
            if run.model.timeout is not None and run.model.isolation == "loop":
                limit = run.model.timeout + run.model.grace
                asyncio.get_running_loop().call_later(limit, self._overdue, run)
        self._tasks.start(runs)

    def _report(self, run: ActiveRun) -> None:
        leased = run.leased
        if self._app.hooks.has_hooks and not is_own_work(leased.model, leased.user_id):
            lag = max(0.0, (leased.changed_us - leased.due_us) / MICRO)
            self._app.hooks.emit(RunEvent("started", leased.model, "RUNNING", lag))
        self._log.log(logging.INFO, "run started", run)

    async def _attempt(self, run: ActiveRun) -> None:
        try:
            with tracing.attempt(run.leased, self._config.id) as span:
                given_back = run.lost or run.handing_back  # before it had a task that could be cancelled
                ended = RETURNED if given_back else await self._execute(run)
                if span is not None:
                    span.ended(ended)
        except asyncio.CancelledError:
            ended = self._end_of_cancelled(run)
        except Exception as error:  # noqa: BLE001 -- ours, not the model's: a run must never hang for it
            ended = AttemptResult(kind="lost", reason=f"the worker failed: {type(error).__name__}: {error}")
        except KeyboardInterrupt:  # the owner of the loop decides what it ends; the run ends in any case
            self._on_end(run, AttemptResult(kind="retry", reason="KeyboardInterrupt"))
            raise
        self._on_end(run, ended)

    def _end_of_cancelled(self, run: ActiveRun) -> AttemptResult:
        """The end of a run whose task was cancelled: by this worker, by its owner, or else by the model itself."""
        if run.cancelled_at is not None:
            return AttemptResult(kind="cancelled", reason="cancelled by force")
        if run.lost or run.handing_back or self._stopping or self._owner is None or self._owner.cancelling():
            run.handing_back = True
            return RETURNED
        return AttemptResult(kind="retry", reason="the model cancelled the task in which it was executed")

    def _on_end(self, run: ActiveRun, ended: AttemptResult) -> None:
        self._fetcher.busy[run.model.isolation] -= 1
        if not run.finished:
            self._conclude(run, ended)
        self._wakeup.set()

    def _conclude(self, run: ActiveRun, ended: AttemptResult) -> None:
        """Write the end, unless another worker has the run by now. Only the first end counts."""
        if ended.kind == "unstarted":
            self._on_unstarted(run, ended.reason)
        run.finished = True
        if run.lost:
            self._active.drop(run)
            return  # the heartbeat has logged it
        try:
            ending = self._ending(run, ended)
        except Exception as error:  # noqa: BLE001 -- a run must never hang for it
            failed = AttemptResult(kind="fatal", reason=f"its end could not be determined: {error!r}")
            ending = FinishRequest(run.leased.id, run.leased.fence, failed)
        self._completer.add(run, ending)

    def _on_unstarted(self, run: ActiveRun, reason: str) -> None:
        self._fetcher.pause_kind(run.model.isolation)
        self._log.log(
            logging.ERROR, f"the run cannot be started; leasing no such runs for {COOLDOWN:g} s: {reason}", run
        )

    def _abandon(self, run: ActiveRun, ended: AttemptResult) -> None:
        """The task ignores its cancellation: leave it behind, and let the run go on elsewhere."""
        if not run.finished:
            self._log.log(logging.ERROR, "the model does not stop: it is abandoned, and keeps its slot", run)
            self._conclude(run, ended)
            self._wakeup.set()

    def _execute(self, run: ActiveRun) -> Coroutine[Any, Any, AttemptResult]:
        if run.model.isolation == "process":
            return self._children.run(replace(run.attempt, trace=tracing.current()), run.model, run)
        execute = execute_async if run.model.isolation == "loop" else run_in_thread
        return execute(run.attempt, run.model, run, self._results, self._app.limits, cancelled=run.stop)

    def _ending(self, run: ActiveRun, ended: AttemptResult) -> FinishRequest:
        if ended.kind == "succeeded":
            return FinishRequest(run.leased.id, run.leased.fence, ended)
        if ended.kind == "unstarted":
            return FinishRequest(run.leased.id, run.leased.fence, ended, round(COOLDOWN / 10 * MICRO), returned=True)
        delay = ended.after or 0.0
        if ended.kind == "retry" and ended.after is None:
            delay = run.model.delay(run.leased.errors + 1, jittered(1.0, 0.0, 1.0))
        returned = run.handing_back and ended.kind in ("lost", "cancelled")
        if returned:
            ended = RETURNED
        if ended.kind not in ("retry", "snooze") or returned:
            delay = 0.0
        return FinishRequest(run.leased.id, run.leased.fence, ended, round(delay * MICRO), returned=returned)

    def _lost(self, run: ActiveRun) -> None:
        """Another worker may have the run: end the work by force, and ignore its outcome."""
        run.lost = True
        run.stop.set()
        self._force(run)

    def _force(self, run: ActiveRun) -> None:
        if run.model.isolation == "process":
            self._children.kill(run.leased.id)
        elif run.task is not None:
            run.task.cancel()
            by_force = AttemptResult(kind="cancelled", reason="cancelled by force")
            ended = RETURNED if run.cancelled_at is None else by_force
            asyncio.get_running_loop().call_later(FORCED_STOP_TIMEOUT, self._abandon, run, ended)

    def _overdue(self, run: ActiveRun) -> None:
        """Abandon a run that was cancelled when its timeout ended, and did not stop within its grace."""
        late = f"timed out after {run.model.timeout:g} seconds and did not stop"
        self._abandon(run, AttemptResult(kind="retry", reason=late))

    def _cancelled(self, run: ActiveRun) -> None:
        """Ask the model to stop; after its grace period, end it by force."""
        run.cancelled_at = time.monotonic()
        run.stop.set()
        self._log.log(logging.INFO, "cancellation requested", run)
        if run.model.isolation == "process":
            self._children.cancel(run.leased.id)
        elif run.model.isolation == "loop":
            asyncio.get_running_loop().call_later(run.model.grace, self._end_of_grace, run)

    def _end_of_grace(self, run: ActiveRun) -> None:
        if not run.finished:
            self._force(run)

    async def _drain_all(self) -> None:
        """Wait for active runs; give back what is not finished in time, without charging an attempt."""
        if len(self._active):
            self._heartbeat.nudge()  # it writes that this worker drains: giving runs back must not wait for that
        deadline = time.monotonic() + self._config.drain
        while len(self._active) and time.monotonic() < deadline and not self._at_once:
            self._wakeup.clear()
            await self._fetcher.sleep(min(0.2, deadline - time.monotonic()))
        ends_by = time.monotonic() + GIVE_BACK_TIMEOUT
        while len(self._active) and time.monotonic() < ends_by:
            self._hand_back()
            self._wakeup.clear()
            await self._fetcher.sleep(0.1)
        if left := len(self._active):
            self._database_silent = True
            self._log.log(
                logging.ERROR,
                f"{left} runs could not be given back in {GIVE_BACK_TIMEOUT:g} s: their leases will expire",
            )

    def _hand_back(self) -> None:
        """End what runs by force; also what an end that was being written leased meanwhile."""
        for run in self._active:
            if not run.finished and not run.handing_back:
                run.handing_back = True
                self._force(run)

    def _record(self) -> WorkerRecord:
        return WorkerRecord(
            id=self._config.id,
            name=self._config.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            queues=self._config.queues,
            models={model.name: model.isolation for model in self._app.registry},
            slots={str(kind): count for kind, count in self._config.slots.items()},
            draining=self._stopping,
        )

    async def _best_effort(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do work that may fail, and must not take long. After one timeout the database is not asked again."""
        if self._database_silent and self._stopping:
            work.close()
            return
        try:
            await asyncio.wait_for(work, LAST_WRITE_TIMEOUT)
        except (SemelError, TimeoutError) as error:
            self._database_silent = isinstance(error, TimeoutError)
            why = str(error) or f"no reply in {LAST_WRITE_TIMEOUT:g} seconds"
            self._log.log(logging.WARNING, f"the database did not answer: {why}")
