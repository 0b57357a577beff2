"""Benchmark of the HTTP middleware against the bare app, hand-written code and other middleware.

One small Starlette service on granian, one worker; the two of a row are served at the same time and loaded in turn,
many rounds, so that whatever else the machine does touches both alike.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from multiprocessing import get_context
from pathlib import Path

from load import keyed, load, request
from table import Row, show

from semel.cli import main as semel_command
from support import servers

ROUNDS = 7
CONNECTIONS = 64
REQUESTS = 4000
names = count()
PARTS = Path(__file__).parent / "parts"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serving(kind: str, store: str = "") -> Iterator[int]:
    """Serve the app behind this middleware until the end of the block; yields the port."""
    port = free_port()
    command = [sys.executable, "-m", "granian", "--interface", "asgi", "--port", str(port), "--workers", "1"]
    server = subprocess.Popen(
        [*command, "--log-level", "warning", "--loop", "asyncio", "web_apps:app"],
        cwd=PARTS,
        env={**os.environ, "BENCH_APP": kind, "BENCH_STORE": store},
    )
    try:
        until_it_answers(port, server)
        yield port
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def until_it_answers(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise SystemExit("the server did not start")


def rate(port: int, how: str) -> float:
    """Requests per second, sent by a process of its own; fails if one did not succeed."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=measure, args=(port, how, f"k{next(names)}", theirs))
    process.start()
    answer = ours.recv()
    process.join()
    if isinstance(answer, str):
        raise SystemExit(answer)
    result: float = answer
    return result


def measure(port: int, how: str, name: str, pipe: object) -> None:
    match how:
        case "without a key":
            line = request(None)
            requests = iter(lambda: line, None)
        case "replays":
            requests = keyed(f"again{port}", again=500)()
        case _:
            requests = keyed(name)()
    speed, statuses = load(port, requests, CONNECTIONS, REQUESTS)
    wrong = {status: number for status, number in statuses.items() if status != b"201"}
    pipe.send(f"answers other than 201: {wrong}" if wrong else speed)  # type: ignore[attr-defined]


def against(what: str, ours: tuple[int, str], theirs: tuple[int, str], required: float | None) -> Row:
    """Compare our port and kind of request with theirs."""
    for port, how in (ours, theirs, ours, theirs):
        rate(port, how)
    ratios = []
    mine = 0.0
    for number in range(ROUNDS):
        if number % 2:
            mine = rate(*ours)
            ratios.append(mine / rate(*theirs))
        else:
            other = rate(*theirs)
            mine = rate(*ours)
            ratios.append(mine / other)
    return Row(what, ratios, required, note=f"{mine:,.0f} requests/s")


def rows(chosen: list[str], stack: ExitStack) -> Iterator[Row]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="semel-bench-")))
    bare = stack.enter_context(serving("bare"))
    if "bare" in chosen:
        with serving("semel", "memory://") as ours:
            yield against("no header, against the bare app", (ours, "without a key"), (bare, "without a key"), 0.95)
            yield against("replay from memory, against the bare app", (ours, "replays"), (bare, "new keys"), 0.8)
        with serving("semel", f"sqlite:///{folder / 'semel.db'}") as ours:
            yield against("replay from SQLite, against the bare app", (ours, "replays"), (bare, "new keys"), None)
    if "redis" in chosen:
        url = stack.enter_context(servers.redis()).url
        with serving("semel", url) as ours:
            yield against("replay from Redis, against the bare app", (ours, "replays"), (bare, "new keys"), 0.4)
            for peer in ("asgi-idempotency-header", "fastapi-idempotency-key"):
                with serving(peer, url) as theirs:
                    name = f"on the same Redis, against {peer}"
                    yield against(f"first request {name}", (ours, "new keys"), (theirs, "new keys"), 1.5)
                    if peer != "fastapi-idempotency-key":  # 0.1.1 responds to a repeated request with 422 here
                        yield against(f"replay {name}", (ours, "replays"), (theirs, "replays"), 1.5)
    if "postgres" in chosen:
        server = stack.enter_context(servers.postgres(durable=True))
        url = server.database()
        semel_command(["migrate", url])
        with serving("semel", url) as ours, serving("by hand", url) as theirs:
            yield against("replay from PostgreSQL, against the bare app", (ours, "replays"), (bare, "new keys"), 0.3)
            yield against(
                "first request on PostgreSQL, against INSERT and UPDATE by hand",
                (ours, "new keys"),
                (theirs, "new keys"),
                1.3,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="*", help="bare, redis, postgres; all without it")
    chosen = parser.parse_args().part or ["bare", "redis", "postgres"]
    with ExitStack() as stack:
        return show(rows(chosen, stack))


if __name__ == "__main__":
    sys.exit(main())
