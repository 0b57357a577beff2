"""Workers on runs: every interleaving, with a crash and a lost reply allowed at every step.

A client submits each run, and may repeat that at any time. A worker leases a run, renews its lease, and writes the end
of its attempt. A worker whose lease is not answered finds the run later and gives it back, or never learns of it; one
whose end is not answered sends it again. At any time somebody may cancel a run, and the sweeper takes back what has no
live lease.

Nothing is bounded but the number of workers and runs: a worker that died is replaced, and time goes on for ever. The
states are finite all the same: times are ticks from now, and of fences only the order counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from protocol.explorer import Step
from protocol.run_rules import (
    ABSENT,
    ENDED,
    ENDS,
    LEASE,
    MAX_ATTEMPTS,
    MAX_LOST,
    PENDING,
    RUNNING,
    SUCCEEDED,
    Rules,
    Run,
)

FENCE = "the fence of a lease is not greater than all before it"
STALE = "a write of an attempt that lost its run was accepted"
TWO_ATTEMPTS = "two attempts have a live lease of one run"
END_CHANGED = "a run that had ended was changed"
CANCEL_IGNORED = "a run can begin again although it was cancelled"
OVERSPENT = "a run began again although its attempts were used up"
DOUBLED = "one submission made two runs"
LOST = "a run that was submitted is not there"
WRONG_ACCEPT = "a worker was told that its success counts, and it does not"
WRONG_REFUSAL = "a worker was told that its success does not count, and it does"
PROMISES = (
    FENCE,
    STALE,
    TWO_ATTEMPTS,
    END_CHANGED,
    CANCEL_IGNORED,
    OVERSPENT,
    DOUBLED,
    LOST,
    WRONG_ACCEPT,
    WRONG_REFUSAL,
)

NOTHING = -1


class Worker(NamedTuple):
    """A worker, or the next one in its place, with the run that it has.

    ``lease``: the ticks for which it knows that the run is its own; -1 if it does not know. ``end``: what it wrote, if
    that was not answered; it is sent again.
    """

    run: int = NOTHING
    fence: int = 0
    lease: int = -1
    end: str = ""


IDLE = Worker()


class State(NamedTuple):
    runs: tuple[Run, ...]
    workers: tuple[Worker, ...]


class Runs:
    """The model. Unless it is ``exact``, :func:`_free_worker` makes it smaller."""

    def __init__(self, rules: Rules | None = None, *, runs: int = 2, workers: int = 3, exact: bool = False) -> None:
        self._short = _short_worker if exact else _free_worker
        self._start = State((Run(),) * runs, (IDLE,) * workers)
        rules = rules or Rules()
        self._submit, self._lease, self._renew = cache(rules.submit), cache(rules.lease), cache(rules.renew)
        self._finish, self._finished_before = cache(rules.finish), cache(rules.finished_before)
        self._sweep, self._cancel, self._later = cache(rules.sweep), cache(rules.cancel), cache(rules.later)

    def initial(self) -> State:
        return self._start

    def rests(self, state: State) -> bool:
        return all(run.status in ENDED for run in state.runs)

    def representative(self, state: State) -> State:
        """Runs and workers sorted, and fences replaced by their order."""
        runs, short = state.runs, self._short
        workers = [w if w.run < 0 else short(w, runs[w.run]) for w in state.workers]
        runs = tuple([_short_run(run) for run in runs])
        if len(runs) == 1 or runs[0] < runs[1]:
            return State(runs, tuple(sorted(workers)))
        swapped = tuple(sorted([_on_the_other(w) for w in workers]))
        return State(runs[::-1], swapped if runs[1] < runs[0] else min(swapped, tuple(sorted(workers))))

    def steps(self, state: State) -> Iterator[Step[State]]:
        yield Step("a tick passes", self._tick(state))
        for number, run in enumerate(state.runs):
            yield from self._outside(state, number, run)
        for number, worker in enumerate(state.workers):
            name = f"worker {number + 1}"
            if worker.run == NOTHING:
                for each, run in enumerate(state.runs):
                    if (leased := self._lease(run)) is not None:
                        yield from self._leased(state, number, each, leased)
                continue
            yield Step(f"{name} is killed", _put(state, number, IDLE), "", True)
            yield from self._renewed(state, number, worker)
            yield from self._ended(state, number, worker)

    def _tick(self, state: State) -> State:
        workers = tuple(w._replace(lease=w.lease - 1) if w.lease >= 0 else w for w in state.workers)
        return State(tuple(self._later(run) for run in state.runs), workers)

    def _outside(self, state: State, number: int, run: Run) -> Iterator[Step[State]]:
        name = f"run {number + 1}"
        yield _change(state, number, self._submit(run), f"{name} is submitted")
        if (swept := self._sweep(run)) is not None:
            yield _change(state, number, swept, f"the sweeper takes {name} back")
        if (cancelled := self._cancel(run)) is not None:
            yield _change(state, number, cancelled, f"{name} is cancelled")

    def _leased(self, state: State, number: int, each: int, leased: Run) -> Iterator[Step[State]]:
        name = f"worker {number + 1} leases run {each + 1}"
        before = state.runs[each]
        step = _change(state, each, leased, name)
        if not step.broken and leased.fence <= max(before.fence, *(w.fence for w in state.workers if w.run == each), 0):
            step = step._replace(broken=FENCE)
        elif not step.broken and (before.errors >= MAX_ATTEMPTS or before.losts >= MAX_LOST):
            step = step._replace(broken=OVERSPENT)
        yield _with_leases(_then(step, number, Worker(each, leased.fence, LEASE)))
        yield _unanswered(_then(step, number, Worker(each, leased.fence, end="returned")))
        yield _unanswered(step, " for ever")

    def _renewed(self, state: State, number: int, worker: Worker) -> Iterator[Step[State]]:
        name = f"worker {number + 1} renews its lease of run {worker.run + 1}"
        before = state.runs[worker.run]
        renewed = self._renew(before, worker.fence)
        if renewed is None:
            yield Step(f"{name}: lost", _put(state, number, IDLE))
            return
        step = _if_held(_change(state, worker.run, renewed, name), before, worker)
        yield _with_leases(_then(step, number, worker._replace(lease=-1 if worker.end else LEASE)))
        if renewed != before:
            yield _unanswered(step)

    def _ended(self, state: State, number: int, worker: Worker) -> Iterator[Step[State]]:
        before = state.runs[worker.run]
        refused = False
        for end in (worker.end,) if worker.end else ENDS:
            if end == "cancelled" and not (before.cancel or worker.end):
                continue
            name = f"worker {number + 1} writes the end of run {worker.run + 1}, {end}"
            after = self._finish(before, worker.fence, end)
            if after is not None:
                step = _if_held(_change(state, worker.run, after, name), before, worker)
                yield _then(step, number, IDLE)
                yield _unanswered(_then(step, number, worker._replace(lease=-1, end=end)))
            elif (broken := self._wrongly_told(before, worker, end)) or not refused:
                refused = True  # all others are refused alike
                yield Step(f"{name}: refused", _put(state, number, IDLE), broken)

    def _wrongly_told(self, run: Run, worker: Worker, end: str) -> str:
        told = self._finished_before(run, worker.fence, end)
        counts = end == "succeeded" and run.status == SUCCEEDED and run.fence == worker.fence
        return "" if told == counts else WRONG_ACCEPT if told else WRONG_REFUSAL


def _put(state: State, number: int, worker: Worker) -> State:
    workers = state.workers
    return State(state.runs, (*workers[:number], worker, *workers[number + 1 :]))


def _then(step: Step[State], number: int, worker: Worker) -> Step[State]:
    return step._replace(after=_put(step.after, number, worker))


def _unanswered(step: Step[State], how: str = "") -> Step[State]:
    return step._replace(name=f"{step.name}; the reply is lost{how}", fault=True)


def _change(state: State, number: int, run: Run, name: str) -> Step[State]:
    """A step that writes a run, with the promises about runs checked."""
    before = state.runs[number]
    broken = ""
    if before.status in ENDED and run != before:
        broken = END_CHANGED
    elif run.rows > 1:
        broken = DOUBLED
    elif run.cancel and run.status == PENDING:
        broken = CANCEL_IGNORED
    elif run.status == ABSENT:
        broken = LOST
    return Step(name, State((*state.runs[:number], run, *state.runs[number + 1 :]), state.workers), broken)


def _if_held(step: Step[State], before: Run, worker: Worker) -> Step[State]:
    """The step, with the promise about stale attempts checked."""
    held = before.status == RUNNING and before.fence == worker.fence
    return step if step.broken or held else step._replace(broken=STALE)


def _with_leases(step: Step[State]) -> Step[State]:
    """The step, with the promise about leases checked."""
    live = [worker.run for worker in step.after.workers if worker.lease >= 0]
    return step if step.broken or len(set(live)) == len(live) else step._replace(broken=TWO_ATTEMPTS)


@cache
def _on_the_other(worker: Worker) -> Worker:
    return worker if worker.run == NOTHING else worker._replace(run=1 - worker.run)


@cache
def _short_run(run: Run) -> Run:
    """The run without what makes no difference any more: how great its fence is, and the counters if it has ended."""
    return Run(run.status, 2, rows=run.rows) if run.status in ENDED else run._replace(fence=2)


@cache
def _short_worker(worker: Worker, run: Run) -> Worker:
    """The worker on this run, with 2 for the run's own fence and 1 for an older one."""
    fence = 2 + (worker.fence > run.fence) - (worker.fence < run.fence)
    return worker._replace(fence=fence)


@cache
def _free_worker(worker: Worker, run: Run) -> Worker:
    """As above; and a worker that sends an end that is refused anyway may do whatever it likes.

    That is more than it can do, so nothing is missed, and there are far fewer states.
    """
    held = worker.fence == run.fence and run.status in {RUNNING, SUCCEEDED}
    return _short_worker(worker if held else worker._replace(end=""), run)
