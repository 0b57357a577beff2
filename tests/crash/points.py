"""Tries an operation once for each fault at each of its statements, until it has no further statement.

    try_every_point(operation, "postgres", url, folder)

For each point: the operation is prepared, a process begins it and meets the fault, and then others go on and the
operation's invariants are checked. The clock is injected, so nothing waits for a lease to end.
"""

import os
import pickle
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeAlias

import psycopg
import redis

from crash.statements import count_statements
from crash.wire import FAULTS, NEVER, Fault, FaultKind, FaultProxy, fault_proxy
from semel.errors import SemelError
from semel.testing import FakeClock
from support.long_lived import collect_seldom
from support.programs import PATIENCE, processes

START = 1_709_210_096.0
MOST_STATEMENTS = 1000
"""An operation with more statements than this is taken for one that never ends."""

numbers = count(1)


@dataclass(frozen=True)
class Place:
    """Where one try happens: the database, a folder, the time, and a name that no other try has."""

    kind: str
    url: str
    folder: Path
    name: str
    now_us: int
    direct: str
    """The database's URL as others reach it: what is sent there is not counted."""

    @property
    def clock(self) -> FakeClock:
        """A clock that stands at the time of the try."""
        clock = FakeClock()
        clock.us = self.now_us
        return clock

    def later(self, seconds: float) -> FakeClock:
        """A clock that much after the fault."""
        clock = self.clock
        clock.advance(seconds)
        return clock

    def at(self, url: str) -> "Place":
        """The same, with its database reached by another URL."""
        return replace(self, url=url)

    def record(self, effect: object) -> None:
        """Append an effect to the file of effects, which nothing of semel reads or writes."""
        file = os.open(self.folder / self.name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{effect}\n".encode())
        os.close(file)

    @property
    def effects(self) -> list[str]:
        """The recorded effects, in their order."""
        file = self.folder / self.name
        return file.read_text().splitlines() if file.exists() else []


@dataclass(frozen=True)
class Ended:
    """How the process ended: it was killed, raised an error of semel, or returned a value."""

    how: Literal["killed", "refused", "returned"]
    value: Any = None


class Operation(Protocol):
    """Something that a process may die in. ``act`` runs in that process, the others in the test's."""

    def prepare(self, place: Place) -> Any:
        """Make what the operation needs; returns what ``act`` and ``check`` are given."""

    def warm_up(self, place: Place) -> None:
        """Connect, before the statements are counted; an operation may leave it to ``act``.

        If the operation ``survives_forks``, a process does all of it once, without a fault, and those that meet the
        faults are forked from that one: what it has built and compiled need not be built again. It has no event loop,
        and no connections but semel's own.
        """

    def act(self, place: Place, given: Any) -> Any:
        """The operation."""

    def check(self, place: Place, given: Any, ended: Ended) -> None:
        """Let others go on, and check the invariants.

        If the operation ``changes_only_rows``, and no file or another service, then a process that dies and has
        changed no row leaves what the first one has left, which died before it had sent anything: that is checked once.
        """


@dataclass
class Tried:
    """The number of points that were tried, by fault, and how the processes ended."""

    points: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {many}" for kind, many in sorted(self.points.items()))
        ends = ", ".join(f"{many} {how}" for how, many in sorted(self.ends.items()))
        return f"{self.points.total()} points ({kinds}); processes: {ends}"


Report: TypeAlias = Callable[[Tried], None]
"""The fixture ``report``: it notes what was tried."""


def tries_all() -> bool:
    """Whether every fault is to be tried at every statement."""
    return os.environ.get("SEMEL_CRASH") == "all"


def try_every_point(operation: Operation, kind: str, url: str, folder: Path, *, each: bool = False) -> Tried:
    """Try the operation once for each point, with ``each`` all faults at each statement; returns what was tried."""
    tried = Tried()
    each = each or tries_all()
    with Bench(kind, url) as bench, Watch(kind, url) as watch:
        if getattr(operation, "survives_forks", False):
            place = Place(kind, url, folder, f"try-{next(numbers)}", round(START * 1e6), url)
            given = operation.prepare(place)
            rehearsed = bench.rehearse(operation, place, given)
            _require_answer(rehearsed)
            operation.check(place, given, rehearsed)
        skips = not each and _changes_only_rows(operation)
        prepared: tuple[Place, Any] | None = None
        for fault in bench.faults(operation, each=each):
            if prepared is None:
                place = Place(kind, url, folder, f"try-{next(numbers)}", round(START * 1e6), url)
                prepared = place, operation.prepare(place)
            place, given = prepared
            ended: Ended | None = None
            state = watch.state() if skips else None
            try:
                ended = bench.run(fault, operation, place, given)
                if bench.happened:
                    tried.points[fault.kind] += 1
                    tried.ends[ended.how] += 1
                else:
                    _require_answer(ended)
                if fault.kind == FAULTS[2] and getattr(operation, "survives_lost_replies", True):
                    assert ended.how == "returned", "the caller was not spared a single lost reply"
                if skips and fault.number > 1 and ended.how == "killed" and watch.state() == state:
                    continue  # as after the first fault, whose process died before it had sent anything
                prepared = None
                operation.check(place, given, ended)
            except BaseException as error:
                error.add_note(f"{fault}; it ended: {ended}")
                raise
    kinds = FAULTS if each else getattr(operation, "kinds", FAULTS)
    assert set(tried.points) == set(kinds), f"a kind of fault never happened: {tried}"
    return tried


def _changes_only_rows(operation: Operation) -> bool:
    return getattr(operation, "changes_only_rows", False)


def _require_answer(ended: Ended) -> None:
    """Whoever meets no fault gets an answer; what goes on in the background answers whether it was done in time."""
    assert ended.how == "returned", "refused without a fault"
    assert ended.value is not False, "not done, without a fault"


class Forker:
    """Forks the processes: one that has done the imports, and has neither threads nor connections."""

    def __init__(self) -> None:
        self.pipe, theirs = processes.Pipe()
        self._process = processes.Process(target=_fork_processes, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def end(self) -> None:
        self.pipe.close()
        self._process.kill()
        self._process.join(PATIENCE)


_forkers: dict[int, Forker] = {}


class Bench:
    """Runs an operation in a process of its own, with a fault."""

    def __init__(self, kind: str, url: str) -> None:
        self._through_proxy = fault_proxy(url) if kind != "sqlite" else nullcontext(None)
        if os.getpid() not in _forkers:  # the same one for all tests of this process, for its imports
            _forkers[os.getpid()] = Forker()
        self._pipe = _forkers[os.getpid()].pipe
        self._rehearsed = False
        self.happened = False
        self.settled = True

    def __enter__(self) -> Self:
        self._proxy: FaultProxy | None = self._through_proxy.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:  # a process may still be at work
            _forkers.pop(os.getpid()).end()
        elif self._rehearsed:
            self._pipe.send(None)
            assert self._received() == 0, "the process that was forked from has died"
        self._through_proxy.__exit__(None, None, None)

    def faults(self, operation: Operation, *, each: bool) -> Iterator[Fault]:
        """The faults at each statement, until there is no such statement.

        Every reply is lost once. A process that dies in a transaction leaves the rows as they were before it, whichever
        its statement; so it dies once in each transaction, and before and after it, which is the same moment for an
        operation that ``changes_only_rows``. With ``each`` every fault is tried at every statement, and so it is for an
        operation that names its ``kinds``; one kind at each statement if they
        are tried ``in_turn``, and a ``stride`` leaves statements out. An operation that sends more statements at
        one time than at another ends after several ``misses`` in a row.
        """
        if each:
            return self._at_each_statement(operation, FAULTS)
        if kinds := getattr(operation, "kinds", None):
            return self._at_each_statement(
                operation, kinds, getattr(operation, "stride", 1), in_turn=getattr(operation, "in_turn", False)
            )
        return self._at_each_transaction(tells_apart=not _changes_only_rows(operation))

    def _at_each_statement(
        self, operation: Operation, kinds: tuple[FaultKind, ...], stride: int = 1, *, in_turn: bool = False
    ) -> Iterator[Fault]:
        missed, enough = 0, getattr(operation, "misses", 1)
        for place, number in enumerate(range(1, MOST_STATEMENTS, stride)):
            for kind in (kinds[place % len(kinds)],) if in_turn else kinds:
                yield Fault(kind, number)
                missed = 0 if self.happened else missed + 1
                if missed == enough:
                    return
        raise AssertionError(f"the operation has not ended after {MOST_STATEMENTS} statements")

    def _at_each_transaction(self, *, tells_apart: bool) -> Iterator[Fault]:
        begins = True
        for number in range(1, MOST_STATEMENTS):
            yield Fault("loses the reply of", number)
            if not self.happened:
                return
            settled = self.settled
            if begins and (tells_apart or number == 1):
                yield Fault("dies before", number)
            if begins or settled:
                yield Fault("dies after", number)
            begins = settled
        raise AssertionError(f"the operation has not ended after {MOST_STATEMENTS} statements")

    def rehearse(self, operation: Operation, place: Place, given: Any) -> Ended:
        """Run the operation without a fault; the process stays, and those of the next runs are forked from it."""
        ended = self._run(None, operation, place, given)
        self._rehearsed = True
        return ended

    def run(self, fault: Fault, operation: Operation, place: Place, given: Any) -> Ended:
        """Run the operation; ``happened`` tells afterwards whether the fault's statement was reached.

        If a reply was lost, ``settled`` tells whether no transaction was open after the statement.
        """
        return self._run(fault, operation, place, given)

    def _run(self, fault: Fault | None, operation: Operation, place: Place, given: Any) -> Ended:
        proxy = self._proxy
        self._pipe.send(Job(fault, operation, place.at(proxy.url) if proxy else place, given))
        pid = self._received()
        assert self._received() == "warm"
        if proxy is not None:
            proxy.arm(fault or NEVER, lambda: os.kill(pid, signal.SIGKILL))
        self._pipe.send("begin")
        ended = self._ended(stays=fault is None)
        if proxy is not None:
            self.happened, self.settled = proxy.happened, proxy.settled
            proxy.disconnect()
        return ended

    def _ended(self, *, stays: bool) -> Ended:
        message = self._received()
        if isinstance(message, int):
            assert message == -signal.SIGKILL, f"the process ended with {message}"
            self.happened = True
            return Ended("killed")
        if not stays:
            self._received()
        self.happened, self.settled, ended, failure = message
        if failure is not None:
            raise failure
        assert isinstance(ended, Ended)
        return ended

    def _received(self) -> Any:
        assert self._pipe.poll(PATIENCE), "the operation hangs"
        return self._pipe.recv()


class Watch:
    """Tells whether anybody has written to a database. It may say so when nobody has."""

    def __init__(self, kind: str, url: str) -> None:
        self._kind = kind
        self._connection: Any
        if kind == "sqlite":
            self._connection = sqlite3.Connection(url.removeprefix("sqlite:///"), isolation_level=None)
        elif kind == "postgres":
            self._connection = psycopg.connect(url, autocommit=True)
        else:
            self._connection = redis.Redis.from_url(url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def state(self) -> Any:
        """What is equal as long as nobody has written."""
        if self._kind == "sqlite":
            return self._connection.execute("PRAGMA data_version").fetchone()
        if self._kind == "postgres":  # a transaction that writes takes a number, also if it is rolled back
            return self._connection.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())").fetchone()
        return self._connection.info("persistence")["rdb_changes_since_last_save"]


class Job(NamedTuple):
    """What a forked process does."""

    fault: Fault | None
    """None for a rehearsal, from whose process others are forked afterwards."""
    operation: Operation
    place: Place
    given: Any


def _fork_processes(pipe: Connection) -> None:
    """Fork a process for each job that is received, and report its id and its end."""
    collect_seldom()
    while (job := _job(pipe)) is not None:
        gate, opener = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(gate, 1)  # the parent is told the process's id first
            _act(pipe, job)
            if job.fault is None:
                _fork_processes(pipe)
            os._exit(0)
        pipe.send(pid)
        os.write(opener, b"1")
        os.close(gate)
        os.close(opener)
        pipe.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _job(pipe: Connection) -> Job | None:
    try:
        job: Job | None = pipe.recv()
    except EOFError:
        return None
    return job


def _act(pipe: Connection, job: Job) -> None:
    on_file = job.place.kind == "sqlite" and job.fault is not None
    counter = count_statements(job.fault) if on_file else None
    job.operation.warm_up(job.place)
    pipe.send("warm")
    pipe.recv()
    if counter is not None:
        counter.counts = True
    ended = _ended(job.operation, job.place, job.given)
    pipe.send((*((counter.happened, counter.settled) if counter is not None else (False, True)), *ended))


def _ended(operation: Operation, place: Place, given: Any) -> tuple[Ended | None, Exception | None]:
    try:
        return Ended("returned", operation.act(place, given)), None
    except SemelError as error:
        return Ended("refused", f"{type(error).__name__}: {error}"), None
    except Exception as error:  # noqa: BLE001 -- the test shows it
        return None, _picklable(error)


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001
        return AssertionError(f"{type(error).__name__}: {error}")
    return error
