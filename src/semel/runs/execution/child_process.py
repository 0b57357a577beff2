"""One child process in the worker's event loop: starts it, exchanges messages, reads its output, kills and reaps it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Lock, Thread

import msgspec

from semel.redaction import without_secrets
from semel.runs.execution.child_main import LENGTH, ChildConfig, FromChild, Ready, ToChild, frame
from semel.runs.execution.log_capture import MAX_LINE_BYTES

__all__ = ["ChildProcess"]

PROGRAM = "from semel.runs.execution.child_main import main; main()"
RECENT_LINES = 20
"""Lines of a child's output that are kept to explain its death."""
LAST_READ = 1.0
"""Seconds for which a dead child's connection is still read, in case a process that it forked holds it open."""
MAX_FRAME = 1 << 30
PREFIX = "SEMEL_"
SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "KEY")
"""A variable of semel with one of these in its name holds a secret, or the place of one."""

_decoder = msgspec.msgpack.Decoder(FromChild)


class ChildProcess(asyncio.Protocol):
    """A child. `on_message` and `on_output` are called in the event loop, until the future `gone` has how it ended."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.on_message: Callable[[FromChild], None] = _ignore
        self.on_output: Callable[[str], None] = _ignore
        self.ready = self._loop.create_future()
        self.gone: asyncio.Future[str] = self._loop.create_future()
        self.runs = 0
        self.terminating = self.has_orphans = False
        """``terminating``: it was killed, or is about to exit, and gets no more work."""
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._output = b""
        self._recent_output: deque[str] = deque(maxlen=RECENT_LINES)
        self._connected = True
        self._code: int | None = None
        self._lock = Lock()
        self._reaped = False

    async def start(self, config: ChildConfig, patience: float) -> None:
        """Start it and wait until it is ready for work; raise `ChildProcessError` with its last output if it fails."""
        try:
            ours = self._spawn()
        except (OSError, ValueError) as error:  # no such program, no resources, or an unsupported argument
            self.gone.set_result("was never started")
            raise ChildProcessError(f"a child process cannot be started: {error}") from error
        try:
            await self._loop.create_unix_connection(lambda: self, sock=ours)
            self.send(config)
            await asyncio.wait({self.ready, self.gone}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            self.kill()
            raise
        if not self.ready.done():
            late = not self.gone.done()
            self.kill()
            how = await self.gone
            how = f"was not ready within {patience:g} seconds" if late else f"{how} while it started"
            raise ChildProcessError(f"a child process {how}{self.recent_output()}")

    def send(self, message: ToChild) -> None:
        if self._transport is not None:
            self._transport.write(frame(message))

    def abort(self) -> None:
        """Make it print its stack and die, by SIGABRT. That may fail, so `kill` must follow."""
        with self._lock:
            if not self._reaped:
                with suppress(ProcessLookupError):
                    os.kill(self._popen.pid, signal.SIGABRT)

    def kill(self) -> None:
        """Kill it at once, with all processes that it started."""
        self.terminating = True
        with self._lock:
            if not self._reaped:
                self._kill_group()

    def read_output(self) -> None:
        """Read what is in the pipe of its stdout and stderr, so that it comes before the next message."""
        for _ in range(64):
            if not self._read_some():
                return

    def recent_output(self) -> str:
        return ": " + " | ".join(self._recent_output) if self._recent_output else ""

    def stop_listening(self) -> None:
        self.on_message = self.on_output = _ignore

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        start, have = 0, len(self._received)
        while have - start >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._received, start)
            if size > MAX_FRAME:
                self.kill()
                return
            end = start + LENGTH.size + size
            if end > have:
                break
            self._take(bytes(self._received[start + LENGTH.size : end]))
            start = end
        del self._received[:start]

    def connection_lost(self, _error: Exception | None) -> None:
        self._connected = False
        if self._code is None:
            self.kill()  # it closed the connection: nothing can be received from it
        else:
            self._finish()

    def _take(self, data: bytes) -> None:
        try:
            message = _decoder.decode(data)
        except msgspec.DecodeError:
            self.kill()
            return
        if isinstance(message, Ready):
            if not self.ready.done():
                self.ready.set_result(None)
            return
        try:
            self.on_message(message)
        except Exception as error:  # noqa: BLE001 (an error of the listener must not close the connection)
            self._loop.call_exception_handler(
                {"message": "a message of a child process could not be handled", "exception": error}
            )

    def _spawn(self) -> socket.socket:
        """Start it in a session of its own, where no Ctrl-C reaches it and all that it starts can be killed with it."""
        ours, theirs = socket.socketpair()
        output, written = os.pipe()
        try:
            self._popen = subprocess.Popen(  # noqa: S603 (our own interpreter and our own module)
                [sys.executable, "-P", "-c", PROGRAM, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=written,
                pass_fds=[theirs.fileno()],
                env={**_without_our_secrets(os.environ), "PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            os.close(output)
            raise
        finally:
            theirs.close()
            os.close(written)
        ours.setblocking(False)
        os.set_blocking(output, False)
        self._pipe = output
        self._loop.add_reader(output, self._read_some)
        Thread(target=self._watch, name=f"semel-child-{self._popen.pid}", daemon=True).start()
        return ours

    def _watch(self) -> None:
        """In a thread: wait for its end, kill what it left behind while its pid cannot be reused, and reap it."""
        if hasattr(os, "waitid"):
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOWAIT)
            with self._lock:
                self._kill_group()
                self._popen.wait()
                self._reaped = True
        else:
            self._popen.wait()
            with self._lock:
                self._reaped = True
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._exited, self._popen.returncode)

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def _exited(self, code: int) -> None:
        self._code = code
        if self._connected:
            self._loop.call_later(LAST_READ, self._finish)
        else:
            self._finish()

    def _finish(self) -> None:
        if self.gone.done():
            return
        self.terminating = True
        self.read_output()
        self._close_pipe()
        if self._transport is not None:
            self._transport.abort()
        assert self._code is not None
        self.gone.set_result(_description(self._code))

    def _read_some(self) -> bool:
        """Read once from the pipe; return whether there may be more."""
        if self._pipe < 0:
            return False
        try:
            data = os.read(self._pipe, 1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        *whole, self._output = (self._output + data).split(b"\n")
        if self._output and (not data or len(self._output) > MAX_LINE_BYTES):
            whole.append(self._output)
            self._output = b""
        for line in whole:
            text = line.decode("utf-8", "backslashreplace").rstrip("\r")
            self._recent_output.append(text[:500])
            self.on_output(text)
        if not data:
            self._close_pipe()
        return bool(data)

    def _close_pipe(self) -> None:
        if self._pipe >= 0:
            self._loop.remove_reader(self._pipe)
            os.close(self._pipe)
            self._pipe = -1


def _without_our_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for models, without the secrets of semel's own database, broker and API.

    Of a URL only the password is removed: the module of a model makes its app with the URL, but does not connect.
    """
    secret = {name for name in environ if name.startswith(PREFIX) and any(word in name for word in SECRET_WORDS)}
    kept = {name: value for name, value in environ.items() if name not in secret}
    return {name: without_secrets(value) if name.startswith(PREFIX) else value for name, value in kept.items()}


def _ignore(_: object) -> None:
    """The handler while no run uses the child."""


def _description(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}{' (out of memory?)' if -code == signal.SIGKILL else ''}"
