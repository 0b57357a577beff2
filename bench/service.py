"""Benchmark of the service over HTTP against an endpoint of the same app that only parses and echoes the body.

One process on granian, as `semel serve` runs it, on a durable PostgreSQL; 64 connections that are kept, loaded from a
process of their own, in turn, many rounds. Then how soon `semel serve` answers on SQLite, and what it holds in memory
after 50,000 submissions.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count, cycle
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from load import load
from table import Row, show

from semel.cli import main as semel_command
from support import servers

ROUNDS = 7
CONNECTIONS = 64
REQUESTS = 4000
SUBMISSIONS = 50_000
KNOWN = 500
"""The number of runs that are requested again, and of keys that are sent again."""
PARTS = Path(__file__).parent / "parts"
PARAMETERS = {"scenario": "high_inflation", "horizon_months": 24, "region": "AU"}
BODY = json.dumps({"model": "baseline_forecast_v1", "parameters": PARAMETERS}).encode()

names = count()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def posted(path: str, key: str | None = None) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n"
    )
    header = "" if key is None else f"Idempotency-Key: {key}\r\n"
    return f"{head}{header}\r\n".encode() + BODY


def asked(run_id: str, tag: str) -> bytes:
    return f"GET /runs/{run_id} HTTP/1.1\r\nHost: 127.0.0.1\r\nIf-None-Match: {tag}\r\n\r\n".encode()


def requests_of(kind: str, name: str, known: list[tuple[str, str]]) -> Iterator[bytes]:
    """Requests of this kind, without end."""
    match kind:
        case "echo":
            line = posted("/echo", "key")
            return iter(lambda: line, None)
        case "new":
            return (posted("/runs", f"{name}-{number}") for number in count())
        case "again":
            return (posted("/runs", f"again-{number % KNOWN}") for number in count())
    return cycle([asked(run_id, tag) for run_id, tag in known])


STATUS = {"echo": b"201", "new": b"201", "again": b"200", "known": b"304"}


def measure(port: int, kind: str, name: str, known: list[tuple[str, str]], pipe: Any) -> None:
    many = SUBMISSIONS if name == "memory" else REQUESTS
    speed, statuses = load(port, requests_of(kind, name, known), CONNECTIONS, many)
    wrong = Counter({status: number for status, number in statuses.items() if status != STATUS[kind]})
    pipe.send(f"answers to {kind} other than {STATUS[kind]!r}: {wrong}" if wrong else speed)


def rate(port: int, kind: str, known: list[tuple[str, str]] | None = None, name: str = "") -> float:
    """Requests per second, sent by a process of its own; fails if a response had another status than expected."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=measure, args=(port, kind, name or f"k{next(names)}", known or [], theirs))
    process.start()
    answer = ours.recv()
    process.join()
    if isinstance(answer, str):
        raise SystemExit(answer)
    speed: float = answer
    return speed


@contextmanager
def running(command: list[str], **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=PARTS, env={**os.environ, **environment}, **quiet)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def first_answer(port: int, process: subprocess.Popen[bytes], path: str = "/models") -> bytes:
    """The first response; the request is repeated until there is one."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        try:
            return exchange(port, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        except OSError:
            time.sleep(0.005)
    raise SystemExit("the server did not start")


def exchange(port: int, request: bytes) -> bytes:
    """The response to one request on a new connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as line:
        line.sendall(request)
        answer = b""
        while b"\r\n\r\n" not in answer:
            piece = line.recv(65536)
            if not piece:
                raise ConnectionResetError
            answer += piece
        return answer


def header(answer: bytes, name: bytes) -> str:
    head = answer.partition(b"\r\n\r\n")[0].lower()
    return head.partition(name + b": ")[2].partition(b"\r\n")[0].decode()


def known_runs(port: int) -> list[tuple[str, str]]:
    """Submit runs with the keys that are sent again; returns their ids and ETags."""
    known = []
    for number in range(KNOWN):
        path = header(exchange(port, posted("/runs", f"again-{number}")), b"location")
        tag = header(exchange(port, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()), b"etag")
        known.append((path.rpartition("/")[2], tag))
    return known


def against_echo(what: str, required: float, port: int, kind: str, known: list[tuple[str, str]]) -> Row:
    def ask() -> float:
        return rate(port, kind, known)

    rate(port, "echo")
    ask()
    ratios = []
    mine = 0.0
    for number in range(ROUNDS):
        if number % 2:
            mine = ask()
            ratios.append(mine / rate(port, "echo"))
        else:
            other = rate(port, "echo")
            mine = ask()
            ratios.append(mine / other)
    return Row(what, ratios, required, note=f"{mine:,.0f} requests/s")


def resident(pid: int) -> float:
    """The resident memory of the process, in megabytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("the server is gone")


def seconds_to_first_answer(folder: str, number: int) -> float:
    """Seconds until the server responds, on a new database. It has bytecode, as after pip install."""
    port = free_port()
    environment = {
        "SEMEL_DB": f"sqlite:///{folder}/start{number}.db",
        "SEMEL_ARTIFACTS": folder,
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": f"{folder}/bytecode",
    }
    command = [sys.executable, "-m", "semel.cli", "serve", "--port", str(port)]
    started = time.perf_counter()
    with running(command, **environment) as process:
        first_answer(port, process)
        return time.perf_counter() - started


def rows(chosen: list[str], stack: ExitStack) -> Iterator[Row]:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="semel-bench-"))
    if "start" in chosen:
        seconds_to_first_answer(folder, 0)  # writes the bytecode
        times = [seconds_to_first_answer(folder, number) for number in range(1, 6)]
        yield Row("semel serve on SQLite, seconds to the first answer", times, 1.5, at_most=True)
    if not {"requests", "memory"} & set(chosen):
        return
    url = stack.enter_context(servers.postgres(durable=True)).database()
    semel_command(["migrate", url])
    port = free_port()
    server = stack.enter_context(running([sys.executable, "served_app.py", str(port), url]))
    first_answer(port, server)
    if "requests" in chosen:
        known = known_runs(port)
        yield against_echo("POST /runs, against the echo", 0.4, port, "new", known)
        yield against_echo("POST /runs again (replay), against the echo", 0.5, port, "again", known)
        yield against_echo("GET /runs/{id} with a matching ETag, against the echo", 0.6, port, "known", known)
    if "memory" in chosen:
        rate(port, "new", name="memory")
        yield Row(f"megabytes resident after {SUBMISSIONS:,} submissions", [resident(server.pid)], 150, at_most=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="*", help="start, requests, memory; all without it")
    chosen = parser.parse_args().part or ["start", "requests", "memory"]
    with ExitStack() as stack:
        return show(rows(chosen, stack))


if __name__ == "__main__":
    sys.exit(main())
