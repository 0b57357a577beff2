"""A scenario's processes, its phases, and the account of what became of everything that was asked for.

Each scenario has three phases of equal length: before the fault, in the fault, after it. Then nothing more is
submitted, and what is left must end.
"""

import importlib.util
import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import sqlalchemy
from sqlalchemy import text

from chaos import program
from chaos.program import ARTIFACT, CALL, COST, append, clock_error, lines
from crash.ledger import Ledger
from crash.points import Place
from semel import App, Once, SemelError, current_claim
from semel.cli import main as semel_command
from support import servers
from support.programs import processes
from support.serve_command import ServeProcess

DRAIN = 60.0
"""Seconds without an end after which the runs that are left are stuck: a busy machine is slow, but goes on."""
WORKERS = SUBMITTERS = 2
RATE = 40.0
"""Submissions a second of each submitter by default, well below what the workers can do."""
USUAL = 0.98
"""The part of the throughput before the fault that counts as recovered."""
STRIKES_WITHIN = 120.0
"""Seconds that a fault lasts longer if nothing has noticed it yet."""


@dataclass
class Account:
    """What became of what was asked for; ``after`` and ``during`` are parts of the throughput before the fault."""

    scenario: str
    seed: int
    struck: int = 0
    """How often the fault was noticed: errors that processes got, connections cut, processes killed."""
    submitted: int = 0
    acknowledged: int = 0
    finished: int = 0
    lost: int = 0
    doubled: int = 0
    stuck: int = 0
    before: float = 0.0
    during: float = 0.0
    after: float = 0.0
    recovery: float | None = None
    failed: int = 0
    """Processes that ended by themselves, and calls that failed where they should have waited."""
    notes: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """What must not be: lost, doubled or stuck work, failures, and a fault that nothing noticed."""
        names = ("lost", "doubled", "stuck", "failed")
        found = [f"{many} {name}" for name in names if (many := getattr(self, name))]
        return found if self.struck else [*found, "the fault did not strike"]

    @property
    def remarks(self) -> str:
        """What is worth a look, and may be due to a busy machine."""
        slow = [f"below {USUAL:.0%}"] if self.after < USUAL else []
        return "; ".join([*slow, *self.notes])


class HostClock:
    """The clock of a member's host, by libfaketime: the time of day of the whole process, C code included."""

    def __init__(self, folder: Path, name: str, seconds: float) -> None:
        self._file = folder / f"clock-{name}"
        self.set(seconds)

    def set(self, seconds: float) -> None:
        """Let the clock be that many seconds ahead of the machine's, or behind it."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+.0f}\n")
        new.rename(self._file)

    def environment(self) -> dict[str, str]:
        """What a process needs to have this clock."""
        if (library := clock_library()) is None:
            raise RuntimeError("clocks are set by libfaketime, whose wheel is for Linux on x86-64 only")
        return {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }


def clock_library() -> Path | None:
    """The library of libfaketime; None where there is no wheel of it."""
    spec = importlib.util.find_spec("libfaketime")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.rglob("libfaketime.so.1"), None)


class Member:
    """One process of the fleet."""

    def __init__(self, name: str, target: Callable[..., None], *arguments: Any, clock: HostClock | None = None) -> None:
        self.name = name
        self.clock = clock
        self.process: BaseProcess
        self._target = target
        self._arguments = arguments
        self.restart()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def kill(self) -> bool:
        """SIGKILL, and wait for its end; returns False if it had ended already."""
        self.process.kill()
        self.process.join()
        return self.process.exitcode == -signal.SIGKILL

    def restart(self) -> None:
        """Start it, also after it was killed."""
        if self.clock is None:
            self.process = processes.Process(target=self._target, args=self._arguments, name=self.name)
            self.process.start()
            return
        self.process = multiprocessing.get_context("spawn").Process(
            target=self._target, args=self._arguments, name=self.name
        )
        with patch.dict(os.environ, self.clock.environment()):  # libraries are loaded before a program starts
            self.process.start()

    def send(self, number: int) -> None:
        os.kill(self.pid, number)


def end_all(members: Sequence[Member], patience: float = 30.0) -> list[Member]:
    """SIGTERM to all of them; returns those that had to be killed."""
    for member in members:
        if member.process.is_alive():
            member.send(signal.SIGCONT)  # a fault that failed may have stopped it
        member.process.terminate()
    killed = []
    for member in members:
        member.process.join(patience)
        if member.process.is_alive():
            member.kill()
            killed.append(member)
    return killed


class Stage:
    """What a fault can act on."""

    def __init__(self, kind: str, url: str, folder: Path, seconds: float, seed: int, *, rate: float = RATE) -> None:
        self.kind = kind
        self.url = url
        self.seconds = seconds
        self.rate = rate
        self.folder = folder
        self.random = random.Random(seed)
        self.workers: list[Member] = []
        self.askers: list[Member] = []
        self.paces: list[tuple[float, float]] = []
        """Submissions a second of each submitter, and since when they are due (``time.monotonic``)."""
        self.postgres: servers.Postgres | None = None
        self.redis: servers.Redis | None = None
        self.proxy: Any = None
        self.server: ServeProcess | None = None
        self.struck = 0
        self.failed = 0
        for name in ("errors", "refused"):  # a fault may make the folder read-only
            (folder / name).touch()

    def ends_at(self) -> float:
        """When the fault that begins now is to end."""
        return time.monotonic() + self.seconds

    def strike(self, count: Callable[[], int], seconds: float | None = None) -> None:
        """Let the fault last for its time, and until the count of its strikes is not 0."""
        ends_at = time.monotonic() + (self.seconds if seconds is None else seconds)
        while time.monotonic() < ends_at or (not count() and time.monotonic() < ends_at + STRIKES_WITHIN):
            time.sleep(0.05)  # other processes send no signal
        self.struck += count()

    def errors(self, words: str = "") -> Callable[[], int]:
        """Returns a count of the errors with these words that the database or semel raise in processes from now on."""

        def count() -> int:
            return sum(words in " ".join(line) for name in ("errors", "refused") for line in lines(self.folder / name))

        known = count()
        return lambda: count() - known

    def add_worker(self, url: str, clock: HostClock | None = None) -> Member:
        """Start another worker."""
        number = len(self.workers)
        arguments = (url, self.folder, f"w{number}")
        self.workers.append(Member(f"worker-{number}", program.work, *arguments, clock=clock))
        return self.workers[-1]

    def add_submitter(self, url: str, share: float = 1.0, clock: HostClock | None = None) -> Member:
        """Start another submitter, with a share of the usual rate."""
        number = len(self.askers)
        rate, start = self.rate * share, time.monotonic()
        self.paces.append((rate, start))
        arguments = (url, self.folder, f"s{number}", rate, start)
        self.askers.append(Member(f"submitter-{number}", program.submit, *arguments, clock=clock))
        return self.askers[-1]

    def due(self, seconds_ago: float) -> float:
        """How many submissions were due then."""
        now = time.monotonic() - seconds_ago
        return sum(max(0.0, now - start) * rate for rate, start in self.paces)

    def sql(self, statement: str, **values: Any) -> list[Any]:
        """Execute a statement as a client of the database, not through the proxy."""
        url = sqlalchemy.make_url(self.url)
        if self.kind == "postgres":
            url = url.set(drivername="postgresql+psycopg")
        engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
        with engine.begin() as conn:
            answer = conn.execute(text(statement), values)
            return list(answer.all()) if answer.returns_rows else []


def migrated(server: servers.Postgres | None, folder: Path) -> str:
    """The URL of a new database with its tables."""
    url = f"sqlite:///{folder / 'semel.db'}" if server is None else server.database()
    with redirect_stdout(StringIO()):
        assert semel_command(["migrate", url]) == 0
    return url


@contextmanager
def fleet(stage: Stage, workers: str, askers: str, clocks: Sequence[float] | None) -> Iterator[None]:
    """The workers and submitters, with the URLs that they are given, and the errors of their hosts' clocks."""

    def clock(name: str, number: int) -> HostClock | None:
        return None if clocks is None else HostClock(stage.folder, name, clocks[number % len(clocks)])

    for number in range(WORKERS):
        stage.add_worker(workers, clock=clock(f"w{number}", number))
    for number in range(SUBMITTERS):
        stage.add_submitter(askers, clock=clock(f"s{number}", number + 1))
    try:
        yield
    finally:
        end_all((*stage.askers, *stage.workers))


@contextmanager
def callers(stage: Stage, target: str) -> Iterator[None]:
    """Processes that call guarded work under the same keys."""
    for number in range(3):
        stage.askers.append(Member(f"caller-{number}", program.call, target, stage.folder, f"c{number}", stage.rate))
    try:
        yield
    finally:
        end_all(stage.askers)


def play(stage: Stage, fault: Callable[[Stage], None], account: Account) -> None:
    """The three phases and the drain; fills the account of a fleet of workers."""
    wait_until_working(stage)
    marks = [time.time()]
    time.sleep(stage.seconds)  # the phase before the fault
    marks.append(time.time())
    fault(stage)
    marks.append(time.time())
    time.sleep(stage.seconds)  # the phase after it
    marks.append(time.time())
    end_askers(stage, account)
    submit_unanswered(stage)
    drain(stage)
    note_ended(stage.workers, account)
    judge_runs(stage, account, marks)


def end_askers(stage: Stage, account: Account) -> None:
    """End those who ask, each after what it is about to ask."""
    note_ended(stage.askers, account)
    account.notes += [f"{member.name} had to be killed" for member in end_all(stage.askers)]


def submit_unanswered(stage: Stage) -> None:
    """Submit what a submitter that was killed had no answer to."""
    answered = {words[0] for words in lines(stage.folder / "acknowledged")}
    if unanswered := {words[0] for words in lines(stage.folder / "asked")} - answered:
        app = program.make_app(stage.url, stage.folder)
        for key in sorted(unanswered):
            number = int(key.rpartition("-")[2])
            with suppress(SemelError):  # then it is stuck
                run = app.submit("work", {"number": number}, idempotency_key=key, user="chaos")
                append(stage.folder / "acknowledged", key, run.id)
        app.close()


def note_ended(members: list[Member], account: Account) -> None:
    """Processes that ended although nobody told them to."""
    for member in members:
        if not member.process.is_alive():
            account.failed += 1
            account.notes.append(f"{member.name} ended by itself with {member.process.exitcode}")


def play_calls(stage: Stage, fault: Callable[[Stage], None], account: Account) -> None:
    """The three phases for callers of guarded work; there is nothing to drain."""
    wait_until_working(stage)
    counts = [len(lines(stage.folder / "acknowledged"))]
    seconds = []
    for phase in (None, fault, None):
        start = time.monotonic()
        if phase is None:
            time.sleep(stage.seconds)  # the phases before and after the fault
        else:
            phase(stage)
        seconds.append(time.monotonic() - start)
        counts.append(len(lines(stage.folder / "acknowledged")))
    end_askers(stage, account)
    rates = [(end - start) / length for start, end, length in zip(counts, counts[1:], seconds, strict=False)]
    account.before = rates[0]
    account.during, account.after = (rate / max(rates[0], 1.0) for rate in rates[1:])
    judge_calls(stage, account)


def wait_until_working(stage: Stage) -> None:
    deadline = time.monotonic() + DRAIN
    while not (stage.folder / "effects").exists():
        assert time.monotonic() < deadline, "the fleet did not begin to work"
        time.sleep(0.05)  # other processes send no signal
    deadline = time.monotonic() + stage.seconds
    while time.monotonic() < deadline and len(lines(stage.folder / "effects")) < stage.due(0.3):
        time.sleep(0.05)  # until the work that was due while the processes started is done
    time.sleep(min(1.0, stage.seconds / 4))  # and the last of it, so that only the usual pace is measured


def drain(stage: Stage) -> None:
    """Wait until no run is left to do, or none has ended for so long that the others are stuck."""
    active = "SELECT count(*) FROM semel_active WHERE user_id = 'chaos'"
    left, deadline = stage.sql(active)[0][0], time.monotonic() + DRAIN
    while left and time.monotonic() < deadline:
        time.sleep(0.1)  # other processes send no signal
        if (now := stage.sql(active)[0][0]) < left:
            left, deadline = now, time.monotonic() + DRAIN


def judge_runs(stage: Stage, account: Account, marks: list[float]) -> None:
    """Compare the files of the oracle with the tables."""
    runs = stage.sql("SELECT * FROM semel_run_states WHERE user_id = 'chaos'")
    Ledger(Place(stage.kind, stage.url, stage.folder, "chaos", 0, stage.url), "chaos").check()
    ends = stage.sql(
        "SELECT run_id, count(*) AS many FROM semel_run_steps"
        " WHERE status IN ('SUCCEEDED', 'FAILED', 'CANCELLED') GROUP BY run_id"
    )
    stored = {str(run.id) for run in runs}
    acknowledged: dict[str, set[str]] = {}  # a submitter that was killed repeats some keys
    for key, run_id in lines(stage.folder / "acknowledged"):
        acknowledged.setdefault(key, set()).add(run_id)
    attempts = lines(stage.folder / "effects")
    effects = Counter((run_id, fence) for run_id, fence, *_ in attempts)
    done = {str(run.id): str(run.fence) for run in runs if run.status == "SUCCEEDED"}
    asked = {words[0] for words in lines(stage.folder / "asked")}
    account.submitted = len(asked)
    account.acknowledged = len(acknowledged)
    account.finished = len(done)
    account.stuck = sum(run.status in ("PENDING", "RUNNING") for run in runs) + len(asked - acknowledged.keys())
    account.lost = len(set().union(*acknowledged.values()) - stored)
    account.lost += sum(effects[run_id, fence] == 0 for run_id, fence in done.items())
    account.lost += sum(run.status in ("FAILED", "CANCELLED") for run in runs)
    account.doubled = sum(each.many > 1 for each in ends) + sum(many > 1 for many in effects.values())
    account.doubled += len(runs) - len({run.idempotency_key for run in runs})
    account.doubled += sum(len(each) > 1 for each in acknowledged.values())
    thorough = {(run_id, fence) for run_id, fence, flag, _ in attempts if flag == "1"}
    account.doubled += count_outdated(stage, [run for run in runs if run.status == "SUCCEEDED"], thorough)
    measure(account, sorted(run.finished_us / 1e6 for run in runs if run.finished_us), marks)


def count_outdated(stage: Stage, runs: Sequence[Any], thorough: set[tuple[str, str]]) -> int:
    """The runs whose result, artifacts, cost or logs are not those of the attempt that ended them.

    ``thorough`` are the attempts, as run and fence, that wrote an artifact, a log line and a cost.
    """
    app = App(stage.url, artifacts=stage.folder / "artifacts")
    outdated = {
        str(each.run_id)
        for each in stage.sql("SELECT run_id, fence, text FROM semel_run_logs WHERE text LIKE 'fence %'")
        if each.text != f"fence {each.fence}"
    }
    for run in runs:
        run_id = str(run.id)
        published = {each["name"]: each["ref"] for each in json.loads(run.artifacts or "[]")}
        if (run_id, str(run.fence)) in thorough:
            right = published.keys() == {ARTIFACT} and run.cost == round(COST * 1e6) * run.fence
            right = right and b"".join(app.artifact(run_id, ARTIFACT)) == str(run.fence).encode()
        else:
            right = not published and run.cost == 0
        if run.fence > 1:
            right = right and app.result(run_id)["fence"] == run.fence
        if not right:
            outdated.add(run_id)
    app.close()
    return len(outdated)


def measure(account: Account, finished: list[float], marks: list[float]) -> None:
    """Throughput in the fault and after it, and how long after the fault it was back at 98 %."""

    def rate(start: float, end: float) -> float:
        return sum(start <= at < end for at in finished) / max(end - start, 1e-9)

    account.before = rate(marks[0], marks[1])
    usual = max(account.before, 1.0)
    account.during, account.after = rate(marks[1], marks[2]) / usual, rate(marks[2], marks[3]) / usual
    for tenth in range(int((marks[3] - marks[2]) * 10)):
        start = marks[2] + tenth / 10
        if rate(start, start + 1) >= USUAL * usual:
            account.recovery = tenth / 10
            return


def judge_calls(stage: Stage, account: Account, patience: float = DRAIN, wait: float = CALL.wait) -> None:
    """Every key was executed once, all who heard a value heard the same, and whoever asks again hears it, too."""
    effects = Counter(words[0] for words in lines(stage.folder / "effects"))
    values: dict[str, set[str]] = {}
    for key, fence, *_ in lines(stage.folder / "acknowledged"):
        values.setdefault(key, set()).add(fence)
    asked = {words[0] for words in lines(stage.folder / "asked")}
    account.submitted = len(asked)
    account.acknowledged = len(values)
    account.doubled = sum(many > 1 for many in effects.values()) + sum(len(each) > 1 for each in values.values())
    account.lost = sum(effects[key] == 0 for key in values)
    account.recovery = 0.0 if account.after >= USUAL else None
    answers = ask_again(stage, asked, patience, wait)
    for key in asked:
        if key not in values:
            account.stuck += key not in answers
            account.finished += key in answers
        elif {answers.get(key)} == values[key]:
            account.finished += 1
        else:
            account.lost += 1


def ask_again(stage: Stage, keys: set[str], patience: float, wait: float) -> dict[str, str]:
    """The value of each key, or "again" if its work was done for this question; without those that have none in time.

    A key whose owner was killed has none until its lease ends.
    """

    def work(key: str) -> dict[str, Any]:
        append(stage.folder / "again", key)
        return {"fence": current_claim().fence, "again": True}

    answers: dict[str, str] = {}
    deadline = time.monotonic() + patience
    with Once(stage.url) as once:
        while len(answers) < len(keys) and time.monotonic() < deadline:
            for key in sorted(keys - answers.keys()):
                if time.monotonic() >= deadline:
                    break
                with suppress(SemelError):
                    value = once.call(key, partial(work, key), scope="chaos", policy=CALL, wait=wait).value
                    answers[key] = "again" if "again" in value else str(value["fence"])
    return answers


def count_wrong_clocks(stage: Stage) -> int:
    """How often a submitter or a worker acted while its clock was wrong by more than half an hour."""
    right = clock_error()
    seen = [line[-1] for name in ("asked", "effects") for line in lines(stage.folder / name)]
    return sum(abs(int(each) - right) > 1800 for each in seen)
