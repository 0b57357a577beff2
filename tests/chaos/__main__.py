"""`./dev chaos [scenario …] [--minutes N] [--seed S] [--rate R]`: play scenarios, and print what became of the work."""

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from chaos.scenarios import SCENARIOS, Theatre
from chaos.stage import RATE, Account

COLUMNS = (
    "scenario",
    "struck",
    "submitted",
    "acknowledged",
    "finished",
    "lost",
    "doubled",
    "stuck",
    "in the fault",
    "after it",
    "recovered after",
    "remarks",
)


def line(account: Account) -> str:
    """The line of the table."""
    counts = (account.submitted, account.acknowledged, account.finished, account.lost, account.doubled, account.stuck)
    recovery = "-" if account.recovery is None else f"{account.recovery:.1f} s"
    rates = (f"{account.during:.0%}", f"{account.after:.0%}")
    return row(account.scenario, account.struck, *counts, *rates, recovery, account.remarks)


def row(*cells: object) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the scenarios; the exit code is 1 if work was lost, doubled or stuck, or if a fault did not strike.

    A scenario that is slow after its fault is only marked: the machine may be busy.
    """
    options = _options(arguments)
    if options.list:
        for each in SCENARIOS.values():
            say(f"{each.name:22} {each.what}")
        return 0
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    chosen = [SCENARIOS[name] for name in options.scenario or SCENARIOS]
    seconds = max(1.0, options.minutes * 60 / len(chosen) / 4)
    say(f"seed {seed}, {seconds:.1f} seconds for each of three phases\n")
    say(f"{row(*COLUMNS)}\n|{'---|' * len(COLUMNS)}")
    bad: list[str] = []
    with tempfile.TemporaryDirectory(prefix="semel-chaos-") as folder, ExitStack() as stack:
        theatre = Theatre(Path(folder), stack)
        for each in chosen:
            account = theatre.run(each, seconds=seconds, seed=seed, rate=options.rate)
            say(line(account))
            bad += [f"{each.name}: {fault}" for fault in account.faults]
    say("\nevery fault struck, and nothing was lost, doubled or stuck" if not bad else "\n" + "\n".join(bad))
    return 1 if bad else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./dev chaos", description=__doc__)
    parser.add_argument("scenario", nargs="*", help="all of them, if none is named")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all scenarios together (default: 10)")
    parser.add_argument("--seed", type=int, default=None, help="repeats the random choices of a run")
    parser.add_argument(
        "--rate", type=float, default=RATE, help=f"submissions a second of each submitter (default: {RATE:g})"
    )
    parser.add_argument("--list", action="store_true", help="print the scenarios and what each does")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.scenario if name not in SCENARIOS]:
        parser.error(f"there is no scenario {unknown[0]!r}; --list prints them")
    return options


if __name__ == "__main__":
    sys.exit(main())
