"""A race: many processes want the same keys at the same moment, and each key's work happens once.

    python examples/race.py
    python examples/race.py --store redis://localhost/0 --processes 16

Every process tries every key, all in the same order. The proof does not come from semel: the work itself adds a line
to a ledger, a plain file, and at the end the lines are counted.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while the imports take their time: no traceback

import argparse
import json
import multiprocessing
import os
import re
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import BrokenBarrierError
from typing import NamedTuple, NoReturn

from semel import Granted, InFlight, Once, Replay, SemelError

WORK_TAKES = 0.002
PATIENCE = 60.0


class Race(NamedTuple):
    """What every process knows about the race."""

    store: str
    processes: int
    keys: int
    scope: str
    place: Path

    @property
    def ledger(self) -> Path:
        """A line for each execution, written by the work: key and outcome."""
        return self.place / "ledger"

    @property
    def log(self) -> Path:
        """A line for each attempt: how it went, key and outcome."""
        return self.place / "log"

    @property
    def complaints(self) -> Path:
        """A line for each process that could not go on: why."""
        return self.place / "complaints"

    @property
    def attempts(self) -> int:
        """How many there will be."""
        return self.processes * self.keys


def compete(race: Race, start: Barrier) -> None:
    """One process: try every key."""
    watcher = os.getppid()
    try:
        with Once(race.store) as once:
            start.wait(PATIENCE)
            for number in range(race.keys):
                if os.getppid() != watcher:
                    return  # nobody is watching any more
                add_line(race.log, *attempt(once, race, f"key-{number}"))
    except SemelError as error:
        add_line(race.complaints, str(error).replace("\n", " "))
        start.abort()
    except BrokenBarrierError:
        pass  # another process has complained


def attempt(once: Once, race: Race, key: str) -> tuple[str, str, str]:
    """Do the work, or get what another process made of it."""
    verdict, how = once.claim(key, scope=race.scope, ttl=600), "replayed"
    if isinstance(verdict, InFlight):
        verdict, how = once.claim(key, scope=race.scope, ttl=600, wait=PATIENCE), "waited"
    match verdict:
        case Granted(claim):
            made = work(race, key)
            once.complete(claim, made)
            return "executed", key, made
        case Replay(outcome):
            return how, key, outcome.value
    raise SemelError(f"after {PATIENCE:.0f} s the verdict on {key} is {verdict}")


def work(race: Race, key: str) -> str:
    """What must happen once. It takes a moment, so that others meet it under way."""
    made = secrets.token_hex(8)
    add_line(race.ledger, key, made)
    time.sleep(WORK_TAKES)
    return made


def add_line(path: Path, *words: str) -> None:
    """Write a line at the end of the file, in one piece whoever else writes there."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, (" ".join(words) + "\n").encode())
    finally:
        os.close(file)


class Summary(NamedTuple):
    """How it went."""

    store: str
    processes: int
    keys: int
    attempts: int
    executed: int
    replayed: int
    waited: int
    seconds: float
    claims_per_second: int
    executed_twice: list[str]
    never_executed: list[str]
    wrong_outcome: list[str]

    @property
    def good(self) -> bool:
        """Each key's work happened once, and everybody got its outcome."""
        return not (self.executed_twice or self.never_executed or self.wrong_outcome)

    def __str__(self) -> str:
        rows = [
            ("keys", self.keys, ""),
            ("processes", self.processes, ""),
            ("attempts", self.attempts, "every process tried every key"),
            ("executed", self.executed, "lines that the work wrote into the ledger"),
            ("replayed", self.replayed, "attempts that got the outcome at once"),
            ("waited", self.waited, "attempts that met the work under way, and got its outcome"),
            ("time", f"{self.seconds:.2f}", "seconds"),
            ("claims", self.claims_per_second, "a second"),
        ]
        lines = [f"{name:<10} {number:>7}  {remark}".rstrip() for name, number, remark in rows]
        return "\n".join([*lines, "", *self._findings()])

    def _findings(self) -> Iterator[str]:
        if self.good:
            yield f"good: each of the {self.keys} keys was executed exactly once, and every attempt got its outcome"
        for what, keys in (
            ("executed more than once", self.executed_twice),
            ("never executed", self.never_executed),
            ("not the outcome of the execution", self.wrong_outcome),
        ):
            if keys:
                yield f"BAD: {what}: {len(keys)} keys, among them {', '.join(keys[:5])}"


class Progress:
    """A bar on a terminal, a line now and then elsewhere."""

    def __init__(self, total: int, *, silent: bool) -> None:
        self._total = total
        self._silent = silent
        self._bar = sys.stderr.isatty()
        self._full, self._empty = "█░" if "utf" in sys.stderr.encoding.lower() else "#."
        self._told = (time.monotonic(), 0.0)

    def begin(self, race: Race) -> None:
        """Say what is coming."""
        if not self._silent:
            print(f"{race.processes} processes race for {race.keys} keys on {shown(race.store)}", file=sys.stderr)

    def show(self, done: int) -> None:
        """So many attempts are done."""
        if self._silent:
            return
        share = done / self._total
        if self._bar:
            full = int(share * 40)
            bar = self._full * full + self._empty * (40 - full)
            print(f"\r{bar} {done}/{self._total} ", end="", file=sys.stderr, flush=True)
        elif done and self._is_news(share):
            print(f"{done} of {self._total} attempts", file=sys.stderr, flush=True)

    def _is_news(self, share: float) -> bool:
        """After a second, or a quarter of the way."""
        now = time.monotonic()
        then, told = self._told
        news = share > told and (now - then > 1 or share - told >= 0.25 or share == 1)
        if news:
            self._told = (now, share)
        return news

    def end(self) -> None:
        """Leave the bar's line."""
        if self._bar and not self._silent:
            print(file=sys.stderr)


def watch(race: Race, progress: Progress) -> Summary:
    """Run the race and count."""
    with Once(race.store):
        pass  # a store that cannot be used says so here, once, and not in every process
    for path in (race.ledger, race.log, race.complaints):
        path.touch()
    lines: list[str] = []
    with started(race) as (team, start), race.log.open() as log:
        wait_for(start, race)
        begun = time.monotonic()
        while any(process.is_alive() for process in team):
            lines += log.readlines()
            progress.show(len(lines))
            time.sleep(0.02)
        seconds = time.monotonic() - begun
        lines += log.readlines()
        progress.show(len(lines))
    if len(lines) < race.attempts:
        raise SemelError(complaint(race) or "a process ended before its time")
    return count(race, lines, seconds)


@contextmanager
def started(race: Race) -> Iterator[tuple[list[BaseProcess], Barrier]]:
    """The processes, waiting for the start; they are gone at the end, however it comes."""
    world: BaseContext = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    start = world.Barrier(race.processes + 1)
    team: list[BaseProcess] = []
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # children inherit it: Ctrl-C is for who watches
    try:
        for _ in range(race.processes):
            process = world.Process(target=compete, args=(race, start))  # type: ignore[attr-defined]  # missing in its stub
            process.start()
            team.append(process)
        signal.signal(signal.SIGINT, interrupt)
        yield team, start
    finally:
        signal.signal(signal.SIGINT, interrupt)
        for process in team:
            process.kill()
            process.join()


def wait_for(start: Barrier, race: Race) -> None:
    """Let them go when all are ready."""
    try:
        start.wait(PATIENCE)
    except BrokenBarrierError:
        raise SemelError(complaint(race) or "the processes did not start") from None


def complaint(race: Race) -> str:
    """The first one, or nothing."""
    return race.complaints.read_text().partition("\n")[0]


def shown(url: str) -> str:
    """The URL without its password."""
    return re.sub(r"//([^/@:]*):[^/@]*@", r"//\1:***@", url)


def count(race: Race, lines: list[str], seconds: float) -> Summary:
    """What the ledger says, against what each attempt got."""
    ledger = [line.split() for line in race.ledger.read_text().splitlines()]
    times = Counter(key for key, _ in ledger)
    made = dict(ledger)
    attempts = [line.split() for line in lines]
    how = Counter(how for how, _, _ in attempts)
    return Summary(
        store=shown(race.store),
        processes=race.processes,
        keys=race.keys,
        attempts=len(attempts),
        executed=len(ledger),
        replayed=how["replayed"],
        waited=how["waited"],
        seconds=round(seconds, 3),
        claims_per_second=round(len(attempts) / seconds),
        executed_twice=[key for key, number in times.items() if number > 1],
        never_executed=[key for number in range(race.keys) if (key := f"key-{number}") not in times],
        wrong_outcome=sorted({key for _, key, outcome in attempts if made.get(key) != outcome}),
    )


def main() -> int:
    """Run the command; 0 when each key was executed once, 1 when not, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description="Many processes race for the same keys; each key is executed once.")
    parser.add_argument("--processes", type=positive, default=8, metavar="N", help="how many race (8)")
    parser.add_argument("--keys", type=positive, default=200, metavar="N", help="how many keys they race for (200)")
    parser.add_argument("--store", metavar="URL", help="where the keys live (a new SQLite file, removed afterwards)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="semel-race-") as place:
        store = chosen.store or f"sqlite:///{place}/semel.db"
        race = Race(store, chosen.processes, chosen.keys, f"race-{secrets.token_hex(8)}", Path(place))
        progress = Progress(race.attempts, silent=chosen.json)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, end)
        progress.begin(race)
        try:
            summary = watch(race, progress)
        except KeyboardInterrupt:
            progress.end()
            print("interrupted", file=sys.stderr)
            return 130
        except SemelError as error:
            progress.end()
            print(f"race: {error}", file=sys.stderr)
            return 1
    progress.end()
    print(json.dumps(summary._asdict()) if chosen.json else summary)
    return 0 if summary.good else 1


def positive(word: str) -> int:
    """A number from 1 on."""
    if not word.isascii() or not word.isdigit() or int(word) == 0:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number from 1 on")
    return int(word)


def end(number: int, _frame: object) -> NoReturn:
    """Leave by the way that cleans up."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
