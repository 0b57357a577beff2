"""Writes the ends of attempts in batches: those that end while a batch is written make the next one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from semel._concurrency.retry import Backoff
from semel.errors import ResultStoreError, StoreUnavailable
from semel.runs.hooks import EventHooks, RunEvent
from semel.runs.results import FileResults, ResultStore, flat_ref
from semel.runs.store import RunStore
from semel.runs.store.transitions import FinishedRun, FinishRequest
from semel.runs.types import AttemptResult, is_own_work
from semel.runs.worker.active_runs import ActiveRun, ActiveRuns
from semel.runs.worker.run_logs import RunLogWriter, WorkerLogger

LARGEST = 500
_BACKOFF = Backoff(0.05, 5.0)


class Completer:
    """Writes ends in batches. While the database is unavailable it retries; the heartbeat keeps the leases."""

    def __init__(
        self,
        store: RunStore,
        active: ActiveRuns,
        run_logs: RunLogWriter,
        *,
        log: WorkerLogger,
        hooks: EventHooks,
        results: Callable[[], ResultStore],
        finish: Callable[[Sequence[FinishRequest]], Awaitable[dict[str, FinishedRun]]],
        written: Callable[[], None],
    ) -> None:
        self._store = store
        self._active = active
        self._run_logs = run_logs
        self._log = log
        self._hooks = hooks
        self._results = results
        self._finish = finish
        self._written = written
        self._waiting: list[tuple[ActiveRun, FinishRequest]] = []
        self._task: asyncio.Task[None] | None = None
        self._isolate = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, run: ActiveRun, ending: FinishRequest) -> None:
        """Write the end with the next batch."""
        run.finished = True
        self._waiting.append((run, ending))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._write_all())

    async def _write_all(self) -> None:
        failures = 0
        try:
            await asyncio.sleep(0)  # runs that end in this turn of the loop join the batch
            while self._waiting:
                size = 1 if self._isolate else LARGEST
                self._isolate = max(0, self._isolate - 1)
                batch, self._waiting = self._waiting[:size], self._waiting[size:]
                try:
                    await self._run_logs.write([run for run, _ in batch])  # whoever reads the end finds the whole log
                    finished = await self._finish([ending for _, ending in batch])
                except StoreUnavailable as error:
                    self._log.log(logging.DEBUG, f"{len(batch)} ends could not be written yet: {error}")
                    self._isolate = len(batch) if len(batch) > 1 else self._isolate  # perhaps one of them is locked
                    self._waiting += [each for each in batch if not each[0].lost]
                    failures += 1
                    await asyncio.sleep(_BACKOFF.after(failures))
                    continue
                except Exception as error:  # noqa: BLE001 -- whatever it is, no run may hang for it
                    self._refused(batch, error)
                    continue
                failures = 0
                await self._give_names(batch, finished)
                self._settle(batch, finished)
        finally:
            self._task = None
            self._written()

    async def _give_names(self, batch: list[tuple[ActiveRun, FinishRequest]], finished: dict[str, FinishedRun]) -> None:
        """Rename results in a flat folder to their final names; whoever reads one before that renames it, too."""
        filed = [ending for _, ending in batch if ending.ended.result_ref is not None and ending.run_id in finished]
        for ending in filed:
            results = self._results()
            if isinstance(results, FileResults) and ending.ended.result_ref == flat_ref(ending.run_id):
                try:
                    await self._store.run_blocking(results.give_name, ending.run_id, ending.fence)
                except ResultStoreError as error:
                    self._log.log(
                        logging.WARNING, f"a result could not be renamed, and will be when it is first read: {error}"
                    )

    def _refused(self, batch: list[tuple[ActiveRun, FinishRequest]], error: Exception) -> None:
        """The database rejects the batch: write each end alone, and give up the one that cannot be written."""
        if len(batch) > 1:
            self._isolate = len(batch)
            self._waiting = batch + self._waiting
            return
        run, ending = batch[0]
        if ending.ended.kind != "fatal":
            self._log.log(
                logging.ERROR, f"the end of the run cannot be written; marking the run as failed: {error}", run
            )
            failed = AttemptResult(kind="fatal", reason=f"its end could not be written: {error}")
            self._waiting.insert(0, (run, FinishRequest(ending.run_id, ending.fence, failed)))
            return
        self._log.log(logging.ERROR, f"the end of the run cannot be written; its lease will expire: {error}", run)
        self._active.drop(run)

    def _settle(self, batch: list[tuple[ActiveRun, FinishRequest]], finished: dict[str, FinishedRun]) -> None:
        for run, ending in batch:
            self._active.drop(run)
            if ending.run_id in finished:
                self._report(run, ending, finished[ending.run_id])
        self._log.log_lost([run for run, ending in batch if ending.run_id not in finished])
        self._written()

    def _report(self, run: ActiveRun, ending: FinishRequest, end: FinishedRun) -> None:
        seconds = (end.changed_us - run.leased.changed_us) / 1e6
        level = logging.INFO if end.status == "SUCCEEDED" else logging.WARNING
        if self._log.logs(level):
            reason = f": {ending.ended.reason}" if ending.ended.reason else ""
            self._log.log(level, f"run {end.step} after {seconds:.3f} s{reason}", run, end.status)
        if self._hooks.has_hooks and not is_own_work(end.model, run.leased.user_id):
            again = end.status == "PENDING"
            self._hooks.emit(RunEvent("retried" if again else "ended", end.model, end.status, seconds))
