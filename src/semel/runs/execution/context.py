"""The context of a run, as its model sees it: user, progress, log, files, and whether to stop."""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Protocol

from semel.errors import InvalidRequest, RunCancelled
from semel.runs.execution import log_capture
from semel.runs.execution.input_data import unpack
from semel.runs.execution.log_capture import AttemptSink, BoundedLog
from semel.runs.results import ResultStore, place
from semel.runs.types import Attempt, checked_cost, seed_of

__all__ = ["AttemptSink", "Context", "Stop", "StopFlag"]

MAX_NOTE_BYTES = 1000


class Stop(Protocol):
    """A request to stop, with the interface of `threading.Event`."""

    def is_set(self) -> bool: ...

    def set(self) -> None: ...


class StopFlag:
    """A `Stop` that costs nothing to make."""

    __slots__ = ("_set",)

    def __init__(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True


class Context:
    """One attempt, as its model sees it. Its methods may be called from any thread of the model."""

    __slots__ = (
        "_artifacts",
        "_attempt",
        "_closed",
        "_cost",
        "_data",
        "_lines",
        "_log",
        "_saw_stop",
        "_scratch",
        "_sink",
        "_stop",
    )

    def __init__(self, attempt: Attempt, sink: AttemptSink, stop: Stop, scratch: Path | None = None) -> None:
        self._attempt = attempt
        self._sink = sink
        self._stop = stop
        self._lines = BoundedLog(sink)
        self._scratch = scratch
        self._artifacts: dict[str, Path] | None = None
        self._cost: float | None = None
        self._data: Path | None = None
        self._closed = False
        self._log: _RunLog | None = None
        self._saw_stop = False
        """Whether the model saw that it should stop: what it returns after that may be incomplete."""

    @property
    def run_id(self) -> str:
        return self._attempt.run_id

    @property
    def model(self) -> str:
        return self._attempt.model

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1."""
        return self._attempt.attempt

    @property
    def fence(self) -> int:
        """A number that only grows: what was written under a higher one must not be overwritten under this one."""
        return self._attempt.fence

    @property
    def user(self) -> str:
        return self._attempt.user

    @property
    def tenant(self) -> str:
        return self._attempt.tenant

    @property
    def payload_hash(self) -> str:
        return self._attempt.payload_hash

    @property
    def worker(self) -> str:
        return self._attempt.worker

    @property
    def seed(self) -> int:
        """A number from 0 to 2³² - 1: that which was given at submit, or one that is the same for the same payload."""
        given = self._attempt.seed
        return seed_of(self._attempt.payload_hash) if given is None else given

    @property
    def data(self) -> Path | None:
        """The folder with the data of the run, unpacked for this attempt alone; None for a run without data."""
        return self._data

    @property
    def data_ref(self) -> str | None:
        """The ref of that data in the result store; it contains the digest of the content."""
        return self._attempt.data_ref

    @property
    def cancelled(self) -> bool:
        """Whether the run should stop: it was cancelled, or its time is up."""
        if self._stop.is_set():
            self._saw_stop = True
            return True
        return False

    def check(self) -> None:
        """Raise `RunCancelled` if the run should stop."""
        if self.cancelled:
            raise RunCancelled(f"run {self.run_id} was asked to stop")

    def progress(self, fraction: float, note: str = "") -> None:
        """Report how far the run is, from 0 to 1. Raises `RunCancelled` if the run should stop."""
        self.check()
        if not math.isfinite(fraction):  # long work must not fail for this
            self.log.warning("progress is a fraction from 0 to 1, not %r: it was left out", fraction)
            return
        if not 0 <= fraction <= 1:
            raise InvalidRequest(f"progress is a fraction from 0 to 1, not {fraction!r}")
        self._sink.progress(float(fraction), log_capture.clean(note, MAX_NOTE_BYTES))

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger whose lines, from INFO up, are stored with the run."""
        if self._log is None:
            self._log = _RunLog(self._attempt, self._lines)
        return self._log

    def artifact(self, name: str) -> Path:
        """Return a path to write to: if the attempt succeeds, the file is published under this name."""
        place(self.run_id, self.fence, f"artifacts/{name}")  # raises if the name could lead elsewhere
        path = self._folder() / "artifacts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        assert self._artifacts is not None
        self._artifacts[name] = path
        return path

    def cost(self, amount: float) -> None:
        """Report what the attempt really cost; the last call counts."""
        self._cost = float(checked_cost("a cost", amount))

    def _folder(self) -> Path:
        if self._artifacts is None:
            if self._scratch is None:
                self._scratch = Path(tempfile.mkdtemp(prefix="semel-run-"))
            else:
                self._scratch.mkdir(mode=0o700)  # it must be new: an existing one is somebody else's
            self._artifacts = {}
        assert self._scratch is not None
        return self._scratch

    def __repr__(self) -> str:
        return f"<Context of run {self.run_id}, attempt {self.attempt}, fence {self.fence}>"


def fetch_data(context: Context, results: ResultStore) -> None:
    """Unpack the run's data into the scratch folder, which is removed with the attempt."""
    assert context._attempt.data_ref is not None
    try:
        context._data = unpack(results, context._attempt.data_ref, context._folder() / "data")
    finally:
        if context._closed and context._scratch is not None:  # the attempt is over
            shutil.rmtree(context._scratch, ignore_errors=True)


def files(context: Context) -> dict[str, Path]:
    """The artifacts that were written, a folder as the files in it."""
    found: dict[str, Path] = {}
    for name, path in (context._artifacts or {}).items():
        if path.is_dir():
            inside = [item for item in sorted(path.rglob("*")) if item.is_file()]
            found.update({f"{name}/{item.relative_to(path).as_posix()}": item for item in inside})
        elif path.exists():
            found[name] = path
        else:
            context.log.warning("the artifact %r was requested but never written", name)
    return found


def close(context: Context) -> None:
    """Close the log of the attempt, and remove its scratch folder."""
    context._lines.close()
    context._closed = True
    if context._artifacts is not None and context._scratch is not None:
        shutil.rmtree(context._scratch, ignore_errors=True)


class _RunLog(logging.LoggerAdapter[logging.Logger]):
    """The run's logger: every record has the run's fields, and belongs to the run in whatever thread it is logged."""

    def __init__(self, attempt: Attempt, lines: BoundedLog) -> None:
        logger = logging.getLogger(log_capture.RUN_LOGGER)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
        super().__init__(
            logger,
            {
                "run_id": attempt.run_id,
                "model": attempt.model,
                "payload_hash": attempt.payload_hash,
                "worker_id": attempt.worker,
                "status": "RUNNING",
                "attempt_count": attempt.attempt,
            },
        )
        self._lines = lines

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # this frame is not the caller
        with log_capture.LogBinding(self._lines):
            super().log(level, msg, *args, **kwargs)
