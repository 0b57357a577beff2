"""Benchmark of the dashboard: the pages with many runs, also in a browser, and fifty open pages.

One process on granian, as `semel serve` runs it. The overview is asked for by servers that have just started, on
100,000 runs in SQLite. Then fifty streams of it are open for a while, as fifty open pages have, while a run ends every
second; what the server's process uses of a core is compared with what it uses without open pages. A real Chromium
opens all pages with 1,000,000 runs in SQLite, of which 20,000 wait. Parts can be chosen: `./dev bench dashboard open`.
"""

from __future__ import annotations

import argparse
import http.client
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dashboard_lists import fill, list_rows
from dashboard_paint import paint_rows
from served_app import made_app
from table import Row, show

from support import servers

RUNS = 100_000
MANY_RUNS = 1_000_000
WAITING = 20_000
APART_MS = 2600
PARTS = ("overview", "open", "paint", "lists")
ROUNDS = 5
WINDOWS = ("hour", "day", "week")
OPEN = 50
SECONDS = 20.0
SETTLE = 5.0
"""Seconds before the CPU time is measured, so that one-time work is not counted."""


def milliseconds(port: int, path: str) -> tuple[float, int]:
    """The milliseconds until the whole page has arrived, and its size in bytes."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    started = time.perf_counter()
    line.request("GET", path)
    answer = line.getresponse()
    content = answer.read()
    taken = (time.perf_counter() - started) * 1000
    line.close()
    if answer.status != 200:
        raise SystemExit(f"{path} was answered with {answer.status}: {content[:300]!r}")
    return taken, len(content)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def server(url: str) -> Iterator[tuple[int, int]]:
    """The port and process id of a server on the database, which has already served a page without queries."""
    port = free_port()
    command = [sys.executable, "served_app.py", str(port), url]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=Path(__file__).parent / "parts", **quiet) as process:
        try:
            deadline = time.monotonic() + 30
            while not answers(port):
                if time.monotonic() > deadline or process.poll() is not None:
                    raise SystemExit("the server did not start")
                time.sleep(0.01)
            yield port, process.pid
        finally:
            process.terminate()


def answers(port: int) -> bool:
    """Whether the server responds. The request also makes it import what pages need."""
    try:
        milliseconds(port, "/ui/submit")
    except (OSError, http.client.HTTPException):
        return False
    return True


def overview_rows(url: str) -> Iterator[Row]:
    cold: dict[str, list[float]] = {window: [] for window in WINDOWS}
    weights = dict.fromkeys(WINDOWS, 0)
    again: list[float] = []
    for _ in range(ROUNDS):
        with server(url) as (port, _):
            for window in WINDOWS:
                taken, weights[window] = milliseconds(port, f"/?window={window}")
                cold[window].append(taken)
            again.append(milliseconds(port, "/?window=week")[0])
    for window in WINDOWS:
        note = f"{weights[window] / 1000:.0f} KB"
        yield Row(
            f"the overview's first paint, {window}, {RUNS:,} runs, ms", cold[window], 300, at_most=True, note=note
        )
    yield Row("the overview again within two seconds, ms", again, None)


def core_seconds(pid: int) -> float:
    """The CPU time of the process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def share(pid: int) -> float:
    """The CPU usage of the process, in percent of a core."""
    time.sleep(SETTLE)
    begun, used = time.monotonic(), core_seconds(pid)
    time.sleep(SECONDS)
    return (core_seconds(pid) - used) / (time.monotonic() - begun) * 100


class Lookers:
    """Open pages, each of which reads the stream of the overview."""

    def __init__(self, port: int) -> None:
        self._lines = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(OPEN)]
        self.heard = [0] * OPEN
        for line in self._lines:
            line.sendall(b"GET /ui/live HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n")
        self._threads = [threading.Thread(target=self._read, args=(place,), daemon=True) for place in range(OPEN)]
        for thread in self._threads:
            thread.start()

    def _read(self, place: int) -> None:
        try:
            while piece := self._lines[place].recv(65536):
                self.heard[place] += piece.count(b"event: replace")
        except OSError:
            pass

    def close(self) -> None:
        for line in self._lines:
            line.shutdown(socket.SHUT_RDWR)
            line.close()
        for thread in self._threads:
            thread.join(5)


@contextmanager
def a_run_a_second(url: str) -> Iterator[None]:
    """Submit a run every second, which a worker in this process executes, until the end of the block."""
    app = made_app(url)
    over = threading.Event()

    def submit() -> None:
        while not over.wait(1.0):
            app.submit("baseline_forecast_v1", {"scenario": "x", "horizon_months": 1, "region": "AU"})

    with app.working(processes=0):
        thread = threading.Thread(target=submit)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
    app.close()


def open_rows(url: str) -> Iterator[Row]:
    with a_run_a_second(url), server(url) as (port, pid):
        alone = share(pid)
        lookers = Lookers(port)
        try:
            together = share(pid)
        finally:
            lookers.close()
        least = min(lookers.heard)
        if least < 3:
            raise SystemExit(f"a page heard only {least} times of what changed")
        note = f"{together:.1f} % with, {alone:.1f} % without; each heard {least} times or more"
        yield Row(f"{OPEN} open dashboards, % of a core", [together - alone], 5, at_most=True, note=note)


def rows(chosen: list[str], stack: ExitStack) -> Iterator[Row]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="semel-bench-")))
    if {"overview", "open"} & set(chosen):
        url = f"sqlite:///{folder / 'overview.db'}"
        fill(url, RUNS, APART_MS)
        if "overview" in chosen:
            yield from overview_rows(url)
        if "open" in chosen:
            yield from open_rows(url)
    if "paint" in chosen:
        url = f"sqlite:///{folder / 'paint.db'}"
        fill(url, MANY_RUNS, APART_MS, WAITING)
        with server(url) as (port, _):
            yield from paint_rows(port, MANY_RUNS)
    if "lists" in chosen:
        yield from list_rows(stack.enter_context(servers.postgres()), folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "part", nargs="*", choices=[*PARTS, []], metavar="part", help=f"{', '.join(PARTS)}; all without it"
    )
    chosen = parser.parse_args().part or [*PARTS]
    with ExitStack() as stack:
        return show(rows(chosen, stack))


if __name__ == "__main__":
    sys.exit(main())
