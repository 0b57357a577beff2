# ruff: noqa: T201 (models print)
"""Models for the tests of how runs are executed, where child processes can import them; and a recording wire."""

import ctypes
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from semel.errors import Fatal, InvalidParameters, Retry, RunCancelled, Snooze
from semel.runs.execution.context import Context
from semel.runs.types import Attempt


class Heard:
    """A wire that records progress and log lines, and the threads that sent them."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, str]] = []
        self.lines: list[tuple[str, str]] = []
        self.threads: set[int] = set()

    def progress(self, fraction: float, note: str) -> None:
        self.threads.add(threading.get_ident())
        self.steps.append((fraction, note))

    def line(self, level: str, text: str) -> None:
        self.threads.add(threading.get_ident())
        self.lines.append((level, text))


def job(parameters: str = "{}", *, run_id: str = "run-1", fence: int = 7, model: str = "m") -> Attempt:
    return Attempt(
        run_id=run_id,
        model=model,
        parameters=parameters,
        payload_hash="hash",
        fence=fence,
        attempt=2,
        user="ann",
        tenant="acme",
        worker="w1",
    )


class Broken(Exception):
    """An error that a model declares fatal."""


class QuiteBroken(Broken):
    """A subclass of the fatal error."""


class Panic(BaseException):
    """As an extension in Rust raises it: no Exception."""


def nothing() -> None:
    return None


def add(a: int, b: int = 10) -> int:
    return a + b


def who(ctx: Context) -> dict[str, Any]:
    names = ("run_id", "model", "attempt", "fence", "user", "tenant", "payload_hash", "worker", "cancelled")
    return {name: getattr(ctx, name) for name in names}


def fail(error: str, text: str = "no luck") -> None:
    kinds = {"Broken": Broken, "QuiteBroken": QuiteBroken, "InvalidParameters": InvalidParameters, "Fatal": Fatal}
    kinds |= {"ValueError": ValueError, "SystemExit": SystemExit, "MemoryError": MemoryError}
    kinds |= {"KeyboardInterrupt": KeyboardInterrupt, "Panic": Panic}
    raise kinds[error](text)


def decide(ctx: Context, verdict: str, raised: bool) -> Any:
    said = {"retry": Retry("busy", after=3), "fatal": Fatal("never"), "snooze": Snooze(4.5)}[verdict]
    if raised:
        raise said
    return said


def chatter(ctx: Context) -> None:
    ctx.log.info("from ctx %s", 1)
    logging.getLogger("lib").warning("from a library")
    logging.getLogger("lib").info("too quiet")
    print("printed")
    print("to stderr", file=sys.stderr)
    print("no end of line", end="")
    thread = threading.Thread(target=print, args=("from a thread",))
    thread.start()
    thread.join()
    os.write(1, b"from C\n")


def speak_last(number: int) -> None:
    os.write(1, f"last word {number}\n".encode())


def progress_bar() -> None:
    sys.stdout.write("\r10%")
    sys.stdout.write("\r50%")
    sys.stdout.write("\r100%\n")


def flood(lines: int) -> None:
    for number in range(lines):
        print(number)


def steps(ctx: Context) -> None:
    ctx.progress(0.25, "quarter")
    time.sleep(0.1)
    ctx.progress(0.5)


def leave_files(ctx: Context, fails: bool = False) -> dict[str, str]:
    ctx.artifact("plots/one.txt").write_text("one")
    folder = ctx.artifact("table")
    (folder / "part").mkdir(parents=True)
    (folder / "part" / "0.csv").write_text("a,b")
    ctx.artifact("never-written")
    if fails:
        raise ValueError("after the files were written")
    return {"scratch": str(folder.parent)}


def leave_files_and_hang(ctx: Context) -> None:
    ctx.artifact("big.bin").write_bytes(b"x" * 1000)
    ctx.progress(0.1, str(ctx.artifact("x").parent))
    time.sleep(600)


def large(size: int) -> str:
    return "x" * size


def exit_now(code: int) -> None:
    os._exit(code)


def die_by(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(600)


def crash() -> None:
    ctypes.string_at(0)


def wait_politely(ctx: Context) -> None:
    ctx.progress(0.1, "waiting")
    while True:
        time.sleep(0.01)
        ctx.check()


def return_when_told(ctx: Context) -> str:
    ctx.progress(0.1, "waiting")
    while not ctx.cancelled:
        time.sleep(0.01)
    return "half of it"


def finish_untold(ctx: Context, until: str) -> str:
    ctx.progress(0.1, "waiting")
    while not Path(until).exists():
        time.sleep(0.01)
    return "all of it"


def say(ctx: Context, note: object) -> None:
    """Report progress, and ignore a cancellation."""
    with suppress(RunCancelled):
        ctx.progress(0.1, str(note))


def hang(ctx: Context) -> None:
    say(ctx, os.getpid())
    while True:
        try:
            time.sleep(600)
        except BaseException:  # noqa: BLE001 (a model that ignores every exception)
            continue


def hold_the_lock(ctx: Context, seconds: int) -> None:
    """Hold the GIL in a C function for ``seconds``."""
    say(ctx, os.getpid())
    ctypes.PyDLL(None).sleep(seconds)


def burn(ctx: Context) -> None:
    say(ctx, os.getpid())
    while True:
        pass


def start_others(ctx: Context) -> None:
    other = subprocess.Popen(["sleep", "600"])
    ctx.progress(0.1, f"{os.getpid()} {other.pid}")
    time.sleep(600)


def fork_others() -> list[int]:
    """Fork workers, which print and return values, from the child."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(shout, range(50), chunksize=1)


def shout(number: int) -> int:
    print(f"worker {number}", flush=True)
    return number * number


def fork_badly() -> str:
    """Fork, and return from the model in both processes."""
    return "copy" if os.fork() == 0 else "original"


def surroundings() -> dict[str, Any]:
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return {
        "cwd": str(Path.cwd()),
        "path": sys.path,
        "python_path": os.environ.get("PYTHONPATH"),
        "mark": os.environ.get("SEMEL_TEST_MARK"),
        "environment": dict(os.environ),
        "main_thread": threading.current_thread() is threading.main_thread(),
        "interrupts_ignored": ignored,
        "leaves_sigterm_to_its_parent": callable(signal.getsignal(signal.SIGTERM)),
        "leads_its_group": os.getpgrp() == os.getpid(),
        "pid": os.getpid(),
        "open_sockets": [target for target in open_files() if target.startswith("socket:")],
    }


def open_files() -> list[str]:
    found = []
    for entry in list(Path("/proc/self/fd").iterdir()) if sys.platform == "linux" else []:
        try:
            found.append(str(entry.readlink()))
        except OSError:
            continue  # the listing itself
    return found


def misbehave() -> None:
    """Change global state: the next model in this process must not be affected."""
    os.chdir(tempfile.gettempdir())
    signal.alarm(1)
    sys.stdout.close()


def outlive_an_alarm() -> str:
    print("still heard")
    time.sleep(1.2)
    return "alive"
