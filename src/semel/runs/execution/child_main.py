"""A warm process that executes attempts, one at a time, for the worker that started it, and dies with it.

The model runs in the main thread. A second thread reads the parent's messages, so that a cancel arrives while the model
is busy; a third sends buffered output. Messages are MessagePack with their length in front.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import queue
import random
import shutil
import signal
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Condition, Thread, Timer, local
from time import monotonic
from typing import Any, TypeAlias

import msgspec

from semel.runs import execution
from semel.runs.execution import context, log_capture, tracebacks
from semel.runs.execution.context import Context, StopFlag
from semel.runs.models.model import Model, load, make_model
from semel.runs.results import ResultStore, open_results
from semel.runs.types import Attempt, AttemptResult

__all__ = [
    "Cancel",
    "ChildConfig",
    "Finished",
    "FromChild",
    "Output",
    "Quit",
    "Ready",
    "RunAttempt",
    "ToChild",
    "frame",
    "main",
]

FLUSH_SECONDS = 0.05
FLUSH_LINES = 64
LENGTH = struct.Struct(">I")


class ChildConfig(msgspec.Struct, tag=True, frozen=True):
    """The parent's first message: what the child takes over from it."""

    path: list[str]
    argv: list[str]
    pythonpath: str | None
    log_level: int
    results_url: str
    limits: execution.Limits


class RunAttempt(msgspec.Struct, tag=True, frozen=True):
    """An attempt to execute."""

    attempt: Attempt
    reference: str
    main_path: str | None
    fatal: frozenset[str]
    scratch: str
    home: str | None = None
    """The folder from which the parent imported the model, in case it is not on the path."""
    seeded: bool = False
    """Whether the generators of random numbers are seeded before the model is called."""


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Ask the model to stop."""

    run_id: str
    fence: int


class Quit(msgspec.Struct, tag=True, frozen=True):
    """Exit normally."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The child has started."""


class Output(msgspec.Struct, tag=True, frozen=True):
    """The lines and the progress of the model since the last message."""

    lines: list[tuple[str, str]]
    progress: tuple[float, str] | None


class Finished(msgspec.Struct, tag=True, frozen=True):
    """The attempt is over."""

    ended: AttemptResult
    has_orphans: bool = False
    """The model left processes behind: this child must not be used again."""


ToChild: TypeAlias = ChildConfig | RunAttempt | Cancel | Quit
FromChild: TypeAlias = Ready | Output | Finished

_encoder = msgspec.msgpack.Encoder()


def frame(message: ToChild | FromChild) -> bytes:
    data = _encoder.encode(message)
    return LENGTH.pack(len(data)) + data


class ParentSink:
    """Sends the latest progress and the lines to the parent together, at most every 50 ms or 64 lines."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._change = Condition()
        self._lines: list[tuple[str, str]] = []
        self._progress: tuple[float, str] | None = None
        self._sent_at = 0.0
        self._mute = False

    def progress(self, fraction: float, note: str) -> None:
        if not self._mute:
            with self._change:
                self._progress = (fraction, note)
                self._flush_or_notify()

    def line(self, level: str, text: str) -> None:
        if self._mute:
            os.write(2, f"{text}\n".encode("utf-8", "backslashreplace"))
            return
        with self._change:
            self._lines.append((level, text))
            self._flush_or_notify()

    def send(self, message: FromChild) -> None:
        with self._change:
            self._flush()
            self._write(message)
            self._sent_at = 0.0  # the first message of the next run need not wait

    def send_leftovers(self) -> None:
        """Forever send the output that came too soon after the last message."""
        while True:
            with self._change:
                self._change.wait_for(self._has_output)
                wait = self._sent_at + FLUSH_SECONDS - monotonic()
                if wait > 0:
                    self._change.wait(wait)
                self._flush()

    def after_fork(self) -> None:
        """Send nothing more, in a process that the model forked: messages of two processes would mix."""
        self._mute = True
        self._connection.close()

    def _has_output(self) -> bool:
        return bool(self._lines) or self._progress is not None

    def _flush_or_notify(self) -> None:
        """Send now if the last message was long ago: the model may hold the GIL for long from here on."""
        if len(self._lines) >= FLUSH_LINES or monotonic() - self._sent_at >= FLUSH_SECONDS:
            self._flush()
        else:
            self._change.notify()

    def _write(self, message: FromChild) -> None:
        try:
            self._connection.sendall(frame(message))
        except OSError:  # the parent is gone, or the model closed the socket: no result could be sent
            _kill_group()

    def _flush(self) -> None:
        if self._has_output():
            output = Output(self._lines, self._progress)
            self._lines, self._progress = [], None
            self._write(output)
        self._sent_at = monotonic()


class Child:
    """The child's side of the connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sink = ParentSink(connection)
        self._work: queue.SimpleQueue[tuple[RunAttempt, StopFlag] | None] = queue.SimpleQueue()
        self._now: tuple[RunAttempt, StopFlag] | None = None
        self._models: dict[tuple[str, str, str | None], Model] = {}
        self._results: ResultStore | None = None
        self._streams = (log_capture.CapturedStream("STDOUT", 1), log_capture.CapturedStream("STDERR", 2))
        self._texts = tuple(stream.as_text() for stream in self._streams)

    def serve(self) -> None:
        receive = receiver(self._connection)
        config = receive()
        if not isinstance(config, ChildConfig):
            return
        self._config = config
        _apply_config(config)
        self._folder = Path.cwd()
        os.register_at_fork(after_in_child=self._after_fork)
        Thread(target=self._listen, args=(receive,), name="semel-parent", daemon=True).start()
        Thread(target=self._sink.send_leftovers, name="semel-lines", daemon=True).start()
        self._sink.send(Ready())
        while task := self._work.get():
            ended = self._execute(*task)
            self._sink.send(Finished(ended, _has_children()))

    def _after_fork(self) -> None:
        self._sink.after_fork()
        log_capture.forget_process()
        for stream in self._streams:
            stream.after_fork()

    def _listen(self, receive: Callable[[], ToChild | None]) -> None:
        while message := receive():
            if isinstance(message, RunAttempt):
                self._now = (message, StopFlag())
                self._work.put(self._now)
            elif isinstance(message, Quit):
                self._work.put(None)
            elif isinstance(message, Cancel) and self._now is not None:
                work, flag = self._now
                if (work.attempt.run_id, work.attempt.fence) == (message.run_id, message.fence):
                    flag.set()
        self._die()

    def _die(self) -> None:
        """Kill this process and all that the model started, because the parent is gone."""
        Timer(0.5, _kill_group).start()
        if self._now is not None:
            shutil.rmtree(self._now[0].scratch, ignore_errors=True)
        _kill_group()

    def _execute(self, work: RunAttempt, stop: StopFlag) -> AttemptResult:
        ctx = Context(work.attempt, self._sink, stop, Path(work.scratch))
        lines = ctx._lines
        log_capture.bind_process(lines)
        self._tidy_up()
        try:
            try:
                model = self._model(work)
                results = self._opened()
            except BaseException as error:  # noqa: BLE001 (a module may do anything while it is imported)
                reason = tracebacks.reason_of(error).removeprefix("ImportError: ")
                return AttemptResult(kind="retry", reason=reason, traceback=tracebacks.traceback_of(error))
            if stop.is_set():
                return AttemptResult(kind="cancelled", reason="cancelled before it began")
            log_capture.mute_captured_handlers(self._texts)
            if work.seeded:
                _seed(ctx.seed)
            return execution.execute_attempt(ctx, work.attempt, model, results, self._config.limits, fatal=work.fatal)
        finally:
            for stream in self._streams:
                stream.finish(lines)
            context.close(ctx)
            log_capture.bind_process(None)

    def _tidy_up(self) -> None:
        """Undo what an earlier model may have done to what all of them share."""
        if any(text.closed for text in self._texts):
            self._texts = tuple(stream.as_text() for stream in self._streams)
        sys.stdout, sys.stderr = self._texts
        signal.setitimer(signal.ITIMER_REAL, 0)
        with contextlib.suppress(OSError):
            os.chdir(self._folder)

    def _opened(self) -> ResultStore:
        if self._results is None:
            self._results = open_results(self._config.results_url)
        return self._results

    def _model(self, work: RunAttempt) -> Model:
        key = (work.attempt.model, work.reference, work.main_path)
        model = self._models.get(key)
        if model is None:
            log_capture.unbind_handler()
            if work.home is not None and work.home not in sys.path:
                sys.path.append(work.home)
            function = load(work.reference, work.main_path)
            model = make_model(work.attempt.model, function, isolation="thread")  # the main thread
            model = self._models[key] = replace(model, function=_in_one_process(function))
        return model


def _seed(seed: int) -> None:
    """Seed Python's generator, and those of NumPy and torch if the model has imported them; nothing is imported."""
    random.seed(seed)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed(seed)
    if torch is not None:
        torch.manual_seed(seed)


def _has_children() -> bool:
    """Whether a process that was started here has not been waited for yet, alive or dead."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _in_one_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let only the original process return from a model that forks: one run has one end."""

    def call(*arguments: Any, **named: Any) -> Any:
        pid = os.getpid()
        try:
            return function(*arguments, **named)
        finally:
            if os.getpid() != pid:
                os._exit(0)

    return call


def receiver(connection: socket.socket) -> Callable[[], ToChild | None]:
    """Return a function that waits for the parent's next message, None at the end."""
    stream = connection.makefile("rb")
    decoder = msgspec.msgpack.Decoder(ToChild)

    def receive() -> ToChild | None:
        try:
            head = stream.read(LENGTH.size)
            if len(head) < LENGTH.size:
                return None
            size: int = LENGTH.unpack(head)[0]
            data = stream.read(size)
            return decoder.decode(data) if len(data) == size else None
        except OSError:
            return None

    return receive


def _apply_config(config: ChildConfig) -> None:
    sys.path[:] = config.path
    sys.argv[:] = config.argv
    if config.pythonpath is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = config.pythonpath
    logging.root.setLevel(config.log_level)


def _kill_group() -> None:
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _die_with_parent(parent: int) -> None:
    """Ask Linux for a signal when the parent dies, in case a model holds the GIL then.

    The signal is SIGHUP, number 1, and its handler is C's `alarm`, called as `alarm(1)`: the listening thread has a
    second to kill the process group before SIGALRM ends this process alone. Python's handlers would wait for the GIL.
    """
    if sys.platform != "linux":
        return
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        libc: Any = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal.restype = ctypes.c_void_p
        libc.signal(signal.SIGHUP, ctypes.cast(libc.alarm, ctypes.c_void_p))
        pr_set_pdeathsig = 1
        libc.prctl(pr_set_pdeathsig, signal.SIGHUP, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _ignore_sigterm() -> None:
    """Ignore SIGTERM here, but not in programs and processes that the model starts.

    A signal to the whole group (systemd, docker) is for the parent, which drains. Exec drops our handler, and a forked
    process restores the default. Until it has, SIGTERM is blocked there: Python drops signals that arrive during a
    fork, and ``multiprocessing.Pool`` would wait for ever for a worker that it terminated so early.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)
    masks = local()

    def block() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def restore_default() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=restore_default)


def main() -> None:
    """`python -c "from semel.runs.execution.child_main import main; main()" FD PARENT`."""
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _ignore_sigterm()
    _die_with_parent(parent)
    faulthandler.enable(2)
    os.set_inheritable(fd, False)
    Child(socket.socket(fileno=fd)).serve()
