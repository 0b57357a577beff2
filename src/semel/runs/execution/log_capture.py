"""The log of a run: the lines that its model logs and, in a process of its own, prints.

One handler at the root of `logging` serves all runs of a process; a context variable has the run of a record.
"""

from __future__ import annotations

import io
import logging
import os
from contextvars import ContextVar, Token
from threading import Lock, get_ident, main_thread
from threading import enumerate as enumerate_threads
from typing import Any, Protocol

__all__ = ["MAX_LINES", "MAX_LINE_BYTES", "AttemptSink", "BoundedLog", "LogBinding", "clean"]

MAX_LINES = 10_000
"""The most lines of an attempt; the rest is dropped, and one more line says so."""
MAX_LINE_BYTES = 8 * 1024

RUN_LOGGER = "semel.run"
"""The logger behind `ctx.log`."""


class AttemptSink(Protocol):
    """Receives the progress and the log lines of an attempt while it runs."""

    def progress(self, fraction: float, note: str) -> None:
        """Receive how far the attempt is, from 0 to 1; only the latest counts."""

    def line(self, level: str, text: str) -> None:
        """Receive a log line. The level is one of `logging`'s, or STDOUT, STDERR, OUTPUT for what was printed."""


class BoundedLog:
    """The log of one attempt, passed on to the sink: bounded, thread-safe, closed when the attempt is over."""

    __slots__ = ("_left", "_lock", "_sink")

    def __init__(self, sink: AttemptSink) -> None:
        self._sink: AttemptSink | None = sink
        self._left = MAX_LINES
        self._lock = Lock()

    @property
    def closed(self) -> bool:
        return self._sink is None

    def add(self, level: str, text: str) -> None:
        with self._lock:
            if self._left < 0 or self._sink is None:
                return
            self._left -= 1
            if self._left >= 0:
                self._sink.line(level, clean(text, MAX_LINE_BYTES))
            else:
                self._sink.line("WARNING", f"more than {MAX_LINES:,} lines: the rest was dropped")

    def close(self) -> None:
        """Drop all further lines: what a thread or task that was left behind logs belongs to no run."""
        self._sink = None


def clean(text: str, limit: int) -> str:
    """Return the text as every database can store it, cut to `limit` bytes of UTF-8."""
    if "\x00" in text:
        text = text.replace("\x00", "\\x00")
    data = text[: limit + 1].encode("utf-8", "backslashreplace")
    if len(data) <= limit:
        return data.decode()
    return data[: limit - 3].decode("utf-8", "ignore") + "…"


_bound_log: ContextVar[BoundedLog | None] = ContextVar("semel_run_lines", default=None)


class _Process:
    """The one attempt that everything in this process belongs to, in a child process."""

    lines: BoundedLog | None = None
    leftover_threads: frozenset[int | None] = frozenset()
    """Threads that an earlier attempt left behind: their lines belong to no run."""


class LogBinding:
    """Within its block, all that is logged in this context belongs to this attempt."""

    __slots__ = ("_lines", "_token")

    def __init__(self, lines: BoundedLog) -> None:
        self._lines = lines

    def __enter__(self) -> None:
        if _handler not in logging.root.handlers:  # the user's own configuration may have removed it
            logging.root.addHandler(_handler)
        self._token: Token[BoundedLog | None] = _bound_log.set(self._lines)

    def __exit__(self, *_: object) -> None:
        try:  # noqa: SIM105 -- entered for every run, and suppress() takes as long as all the rest
            _bound_log.reset(self._token)
        except ValueError:
            pass  # a task that was left behind is closed in another context, where nothing is bound


def bind_process(lines: BoundedLog | None) -> None:
    """Let all output of this process belong to this attempt: of every new thread, and all that is printed."""
    main = main_thread()
    _Process.leftover_threads = frozenset(thread.ident for thread in enumerate_threads() if thread is not main)
    _Process.lines = lines


def forget_process() -> None:
    """In a process that the model forked: send its output to the real streams, whatever locks were held."""
    for lines in (_bound_log.get(), _Process.lines):
        if lines is not None:
            lines.close()
    _Process.lines = None


def unbind_handler() -> None:
    """Remove the handler while a model's module is imported: `logging.basicConfig` works only without handlers."""
    logging.root.removeHandler(_handler)


def current_log() -> BoundedLog | None:
    """The log of the attempt that runs here, or None."""
    lines = _bound_log.get()
    if lines is None and get_ident() not in _Process.leftover_threads:
        lines = _Process.lines
    return None if lines is None or lines.closed else lines


class _Handler(logging.Handler):
    """Adds a record to the log of the attempt in whose context it was made, and ignores all others."""

    def emit(self, record: logging.LogRecord) -> None:
        lines = current_log()
        if lines is not None:
            self._add(lines, record)
        if _Process.lines is None:
            _last_resort(record)

    def _add(self, lines: BoundedLog, record: logging.LogRecord) -> None:
        token = _bound_log.set(_DISCARD)  # the sink may log, too
        try:
            text = self.format(record)
            if record.name not in {RUN_LOGGER, "root"}:
                text = f"{record.name}: {text}"
            lines.add(record.levelname, text)
        except Exception:  # noqa: BLE001 (as in logging itself, a log line never raises)
            self.handleError(record)
        finally:
            _bound_log.reset(token)


class _NullSink:
    def progress(self, fraction: float, note: str) -> None: ...

    def line(self, level: str, text: str) -> None: ...


_DISCARD = BoundedLog(_NullSink())
_handler = _Handler()


def _last_resort(record: logging.LogRecord) -> None:
    """Print a warning that no other handler shows: logging itself does so only while the root has no handler."""
    fallback = logging.lastResort
    if fallback is None or record.levelno < fallback.level or logging.root.handlers != [_handler]:
        return
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None and logger is not logging.root:
        if logger.handlers:
            return
        logger = logger.parent
    fallback.handle(record)


class CapturedStream(io.RawIOBase):
    """A stream whose lines belong to the attempt that runs; while none does they go to the real stream."""

    def __init__(self, level: str, fd: int) -> None:
        super().__init__()
        self._level = level
        self._fd = fd
        self._partial = b""
        self._lock = Lock()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """Stay open: the next model prints, too."""

    def write(self, data: Any) -> int:
        data = bytes(data)
        if get_ident() in _Process.leftover_threads:
            return len(data)  # a thread of an earlier attempt: dropped
        with self._lock:
            *whole, self._partial = (self._partial + data).split(b"\n")
            if len(self._partial) > MAX_LINE_BYTES:
                whole.append(self._partial)
                self._partial = b""
        lines = current_log()
        if lines is None and whole:
            os.write(self._fd, b"\n".join([*whole, b""]))  # whole lines, which do not mix with those of others
        elif lines is not None:
            for line in whole:
                self._add(lines, line)
        return len(data)

    def flush(self) -> None:
        if current_log() is None and self._partial:
            os.write(self._fd, self._take_partial())

    def finish(self, lines: BoundedLog) -> None:
        """Add what was printed without a newline at its end."""
        partial = self._take_partial()
        if partial:
            self._add(lines, partial)

    def after_fork(self) -> None:
        """Replace the lock, which another thread may have held."""
        self._lock = Lock()
        self._partial = b""

    def _take_partial(self) -> bytes:
        with self._lock:
            partial, self._partial = self._partial, b""
        return partial

    def _add(self, lines: BoundedLog, line: bytes) -> None:
        shown = line.rstrip(b"\r").rpartition(b"\r")[2]  # what a terminal would show of a progress bar
        lines.add(self._level, shown.decode("utf-8", "backslashreplace"))

    def as_text(self) -> io.TextIOWrapper:
        return io.TextIOWrapper(self, "utf-8", "backslashreplace", line_buffering=True, write_through=True)  # type: ignore[arg-type]


def mute_captured_handlers(streams: tuple[io.TextIOWrapper, ...]) -> None:
    """Turn off the root's handlers that print to captured streams: their records are captured as records already."""
    for handler in logging.root.handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream in streams:
            handler.setStream(_NullStream())


class _NullStream(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)
