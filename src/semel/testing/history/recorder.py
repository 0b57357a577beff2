"""Records what each process does, as JSON lines in an append-only file of its own, and reads the files of all.

The line of a call is written before the call is made, and the line of its answer after the answer was seen; each line
is one write. So a process that is killed at any moment leaves whole lines, and a call without an answer may or may not
have happened.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

import msgspec
from msgspec import Struct

from semel.testing.history.operations import History, Kind, Operation

Clock: TypeAlias = Callable[[], int]
"""Returns microseconds since 1970: the clock of the store under test, where a test replaces that."""

_CLOSE_NS = 100_000
_TRIES = 5
_encode = msgspec.json.Encoder(enc_hook=repr).encode


class HistoryError(Exception):
    """A history that cannot be read, or whose operations have no common order."""


class Line(Struct, omit_defaults=True):
    """One line of a file: the call of an operation, or its answer."""

    id: str
    what: Literal["call", "answer", "error"]
    at_ns: int
    wall_us: int
    process: str = ""
    machine: str = ""
    kind: Kind = "key"
    verb: str = ""
    subject: tuple[str, ...] = ()
    arguments: dict[str, Any] = {}
    answer: dict[str, Any] = {}
    error: str = ""
    store_us: int | None = None
    """The time of the recorder's own clock, if it has one."""


class Recorder:
    """Appends to ``folder/name-<pid>.jsonl``. Threads may share it, and a forked child gets a file of its own.

    ``clock`` is that of the store, if the test replaces it (``FakeClock``): leases and retention are judged by it.
    """

    def __init__(self, folder: str | Path, name: str = "process", *, clock: Clock | None = None) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._name = name
        self._clock = clock
        self._machine = _machine()
        self._lock = threading.Lock()
        self._pid = 0
        self._file = -1
        self._numbers = itertools.count(1)
        self._token = secrets.token_hex(4)  # several recorders of a process may have the same name

    @property
    def process(self) -> str:
        """The name of this process in the history."""
        return f"{self._name}-{os.getpid()}"

    def begin(self, kind: Kind, verb: str, subject: Iterable[str], **arguments: Any) -> PendingOperation:
        """Record that a call is about to be made. Do this before the call, and record its answer after it."""
        number = f"{self._token}.{os.getpid()}.{next(self._numbers)}"
        call = self._line(number, "call")
        call.process, call.machine = self.process, self._machine
        call.kind, call.verb, call.subject, call.arguments = kind, verb, tuple(subject), arguments
        self._write(call)
        return PendingOperation(self, number)

    def effect(self, kind: Kind, subject: Iterable[str], fence: int, name: str = "") -> None:
        """Record an effect under a fence. Use a recorder for effects only: its file is then an oracle of its own."""
        self.begin(kind, "effect", subject, fence=fence, name=name).answer()

    def end(self, number: str, what: Literal["answer", "error"], answer: dict[str, Any], error: str) -> None:
        """Record the end of an operation."""
        line = self._line(number, what)
        line.answer, line.error = answer, error
        self._write(line)

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        with self._lock:
            if self._file >= 0 and self._pid == os.getpid():
                os.close(self._file)
            self._file = -1

    def _line(self, number: str, what: Literal["call", "answer", "error"]) -> Line:
        at_ns, wall_us = _both_clocks()
        return Line(number, what, at_ns, wall_us, store_us=None if self._clock is None else self._clock())

    def _write(self, line: Line) -> None:
        data = _encode(line) + b"\n"
        with self._lock:
            if self._file < 0 or self._pid != os.getpid():
                self._pid = os.getpid()
                self._file = self._opened()
            if os.write(self._file, data) != len(data):
                raise HistoryError(f"the history in {self.folder} could not be written: is the disk full?")

    def _opened(self) -> int:
        path = self.folder / f"{self.process}.jsonl"
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


class PendingOperation:
    """A call that was recorded and has no answer yet. As a context, an error in its block is recorded, too."""

    def __init__(self, recorder: Recorder, number: str) -> None:
        self._recorder = recorder
        self._number = number
        self._ended = False

    def answer(self, **told: Any) -> None:
        """Record the answer: the call has happened."""
        self._recorder.end(self._number, "answer", told, "")
        self._ended = True

    def failed(self, error: BaseException) -> None:
        """Record that the call got an error instead of an answer: it may or may not have happened."""
        self._recorder.end(self._number, "error", {}, f"{type(error).__name__}: {error}"[:200])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and not self._ended:
            self.failed(error)


def _both_clocks() -> tuple[int, int]:
    """The monotonic clock in nanoseconds and the wall clock in microseconds, read at the same moment."""
    for _ in range(_TRIES - 1):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        if after - before < _CLOSE_NS:  # else this process was stopped in between
            return before, wall // 1000
    return time.monotonic_ns(), time.time_ns() // 1000


def _machine() -> str:
    """The machine since it started: the monotonic clocks of two of them have nothing in common."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def read(folder: str | Path, *, complete: bool = True) -> History:
    """The history in all files of a folder. ``complete=False`` if work was still under way when it was recorded.

    The last line of a killed process may be cut off: it is left out, because its call was not made yet.
    """
    files = sorted(Path(folder).rglob("*.jsonl"))
    if not files:
        raise HistoryError(f"there is no history in {folder}: no file ends in .jsonl")
    calls: dict[str, Operation] = {}
    offsets: list[int] = []
    machines: set[str] = set()
    for file in files:
        for number, line in _lines(file):
            offsets.append(line.wall_us - line.at_ns // 1000)
            machines |= {line.machine} if line.machine else set()
            _add(calls, line, f"{file.name}:{number}")
    if len(machines) > 1:
        raise HistoryError("this history was recorded on several machines, whose clocks give no common order")
    operations = sorted(calls.values(), key=lambda each: each.began)
    moved = max(offsets, default=0) - min(offsets, default=0)
    return History(operations, slack_us=moved + _set_back(operations), complete=complete)


def _set_back(operations: Iterable[Operation]) -> int:
    """By how many microseconds the clock of leases was set back: leases may end as much earlier."""
    latest = most = 0
    for each in operations:
        latest = max(latest, each.began_us)
        most = max(most, latest - each.began_us)
    return most


def _lines(file: Path) -> Iterable[tuple[int, Line]]:
    decode = msgspec.json.Decoder(Line).decode
    for number, text in enumerate(file.read_bytes().split(b"\n")[:-1], 1):
        try:
            yield number, decode(text)
        except msgspec.DecodeError as error:
            raise HistoryError(f"{file}:{number} is no line of a history: {error}") from error


def _add(calls: dict[str, Operation], line: Line, place: str) -> None:
    at_us = line.at_ns // 1000 if line.store_us is None else line.store_us
    if line.what == "call":
        if line.id in calls:
            raise HistoryError(f"{place} is a call that was recorded before, in {calls[line.id].lines[0]}")
        calls[line.id] = Operation(
            line.id,
            line.process,
            line.kind,
            line.verb,
            line.subject,
            line.arguments,
            line.at_ns,
            at_us,
            lines=(place,),
        )
        return
    call = calls.get(line.id)
    if call is None or len(call.lines) > 1:
        raise HistoryError(f"{place} is the answer to a call that was not recorded, or that has an answer already")
    lines = (*call.lines, place)
    if line.what == "error":
        calls[line.id] = msgspec.structs.replace(call, error=line.error, lines=lines)
    else:
        calls[line.id] = msgspec.structs.replace(
            call, ended=line.at_ns, ended_us=at_us, answer=line.answer, lines=lines
        )
