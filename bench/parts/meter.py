"""What work costs the PostgreSQL server: bytes and records of WAL, and CPU time.

    with meter.over(20_000) as cost:
        ...
    print(cost)  # 655 B WAL, 6.0 records, 31 µs

WAL does not depend on how busy the machine is; rates do.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psycopg

_TICKS = os.sysconf("SC_CLK_TCK")


class Cost:
    """The cost of one job."""

    def __init__(self) -> None:
        self.wal = self.records = self.cpu = 0.0

    def __str__(self) -> str:
        return f"{self.wal:,.0f} B WAL, {self.records:.1f} records, {self.cpu * 1e6:.0f} µs of the server"


def middle(costs: list[Cost]) -> Cost:
    """The median of each figure."""
    found = Cost()
    for name in ("wal", "records", "cpu"):
        setattr(found, name, median(getattr(each, name) for each in costs))
    return found


class Course:
    """The server's CPU time, read again and again."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._spent: list[float] = []

    def note(self, spent: float) -> None:
        self._times.append(time.time())
        self._spent.append(spent)

    def between(self, since: float, until: float) -> float:
        """Seconds of CPU between these times, in seconds since 1970."""
        places = (bisect_left(self._times, each) for each in (since, until))
        begun, ended = (self._spent[min(place, len(self._spent) - 1)] for place in places)
        return ended - begun


class Meter:
    """Reads the counters of a server that this machine runs."""

    def __init__(self, url: str) -> None:
        self._url = url

    @contextmanager
    def over(self, jobs: int) -> Iterator[Cost]:
        """Measure the block, which does this many jobs; the cost is known after it."""
        cost = Cost()
        with psycopg.connect(self._url, autocommit=True) as connection:
            server = self._server(connection)
            before, spent = self._counters(connection), cpu_of(server)
            yield cost
            after = self._counters(connection)
            cost.cpu = (cpu_of(server) - spent) / jobs
            cost.wal, cost.records = ((b - a) / jobs for a, b in zip(before, after, strict=True))

    @contextmanager
    def course(self) -> Iterator[Course]:
        """The CPU time of the server in the course of the block."""
        with psycopg.connect(self._url, autocommit=True) as connection:
            server = self._server(connection)
        course, over = Course(), threading.Event()

        def read() -> None:
            while not over.wait(0.05):
                course.note(cpu_of(server))

        course.note(cpu_of(server))
        thread = threading.Thread(target=read)
        thread.start()
        try:
            yield course
        finally:
            over.set()
            thread.join()
            course.note(cpu_of(server))

    def _server(self, connection: psycopg.Connection[Any]) -> int:
        row = connection.execute("SELECT setting FROM pg_settings WHERE name = 'data_directory'").fetchone()
        assert row is not None
        return int(Path(row[0], "postmaster.pid").read_text().split()[0])

    def _counters(self, connection: psycopg.Connection[tuple[float, float]]) -> tuple[float, float]:
        time.sleep(1.2)  # other connections report their statistics once a second
        connection.execute("SELECT pg_stat_force_next_flush()")
        query = "SELECT pg_current_wal_insert_lsn() - '0/0', wal_records FROM pg_stat_wal"
        row = connection.execute(query).fetchone()
        assert row is not None
        return float(row[0]), float(row[1])


class Sessions:
    """The sessions of one database, without this one: the CPU time that they used, and the pages that they touched."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)

    def cpu(self) -> float:
        """Seconds, to the nanosecond: those that have ended do not count."""
        query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        return sum(_on_cpu(row[0]) for row in self._connection.execute(query))

    def close(self) -> None:
        self._connection.close()


def _on_cpu(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except FileNotFoundError:
        return 0.0


def cpu_of(server: int) -> float:
    """Seconds of CPU that the server's processes used, including those that have ended."""
    mine = _times(server)
    return (sum(mine) + sum(sum(_times(child)[:2]) for child in _children(server))) / _TICKS


def _times(pid: int) -> list[int]:
    """User and system time, of the process and of its children that have ended; nothing if it just has."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return [0, 0, 0, 0]
    return [int(each) for each in fields[11:15]]


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
