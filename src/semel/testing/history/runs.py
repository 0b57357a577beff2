"""The rules of runs: a submission that was acknowledged ends, once, and each attempt has a fence of its own.

Verbs (what is asked, and what the answer tells); the subject is the run, unless another one is named:

======= ========================================== ===============================================================
submit  user, key, limit, ttl_us (about the user)  run, created; run is None if it was refused
lease   (about the worker)                         runs: a list of run, fence, lease_us
renew   fence, lease_us                            accepted
finish  fence, how, value                          accepted, status
lose    (about the sweeper)                        runs: a list of run, fence, status
cancel                                             status (RUNNING: its attempt is asked to stop), fence, value
get                                                status, fence, value; the status is "absent" if there is no run
attempt fence                                      (the model ran, from the call to the answer)
effect  fence, name
======= ========================================== ===============================================================

A run whose cancellation was acknowledged may still succeed or fail in the attempt that is under way, but no other
attempt begins: when that attempt is lost or to be repeated, the run is CANCELLED.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from semel.testing.history.linearize import IllegalStep, Search
from semel.testing.history.operations import FOREVER, History, Operation, Violation

ENDS = ("SUCCEEDED", "FAILED", "CANCELLED")
LISTED = ("lease", "lose")
"""Verbs whose answer names the runs."""
DIRECT = ("attempt", "effect", "submit")


@dataclass(frozen=True)
class RunState:
    """What is known of a run at a moment. ``lease_until`` is the earliest possible end of its lease."""

    status: str = "PENDING"
    fence: int = 0
    value: str = ""
    top: int = 0
    lease_until: int = 0
    cancelled: bool = False
    """Its cancellation was acknowledged while it was RUNNING."""
    by: Operation | None = field(default=None, compare=False)

    @property
    def proof(self) -> tuple[Operation, ...]:
        """The operation that led here, if there was one."""
        return () if self.by is None else (self.by,)

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.status in ENDS


class RunModel:
    """How a run behaves, from the moment it is pending."""

    def __init__(self, operations: Sequence[Operation], slack_us: int = 0) -> None:
        self._slack = slack_us
        leased = {each.told("fence") for each in operations if each.verb == "lease"}
        named = {each.asked("fence", 0) for each in operations} | {each.told("fence", 0) for each in operations}
        self._unleased = named - leased - {0, None}

    def start(self) -> RunState:
        """It was submitted."""
        return RunState()

    def step(self, state: RunState, operation: Operation) -> list[RunState] | IllegalStep:
        """What the answer makes of the state. A run whose lease may have ended may have been taken back unseen."""
        after = _VERBS[operation.verb](self, state, operation)
        if not isinstance(after, IllegalStep) or not self._may_be_lost(state, operation):
            return after
        for status in ("CANCELLED",) if state.cancelled else ("PENDING", "FAILED"):
            lost = replace(state, status=status, by=operation)
            again = _VERBS[operation.verb](self, lost, operation)
            if not isinstance(again, IllegalStep):
                return again
        return after

    def reads(self, operation: Operation) -> bool:
        """Whether its answer says that it only looked, or was refused."""
        return operation.verb == "get" or operation.told("accepted") is False

    def guess(self, state: RunState, operation: Operation) -> list[RunState]:
        """What a lost operation may have done."""
        found: list[RunState] = []
        for answer in self._possible(operation):
            after = self.step(state, operation.about(*operation.subject, answer=answer))
            if not isinstance(after, IllegalStep):
                found += [each for each in after if each != state and each not in found]
        return found

    def _possible(self, operation: Operation) -> list[dict[str, Any]]:
        match operation.verb:
            case "lease":
                return [{"fence": fence, "lease_us": 0} for fence in (0, *sorted(self._unleased))]
            case "finish":
                return [{"accepted": True, "status": status} for status in ("PENDING", *ENDS)]
            case "lose":
                return [{"status": status} for status in ("PENDING", "FAILED", "CANCELLED")]
            case "cancel":
                return [{"status": "CANCELLED"}, {"status": "RUNNING"}]
        return [{"accepted": True}]

    def _lease(self, state: RunState, operation: Operation) -> list[RunState] | IllegalStep:
        fence = operation.told("fence")
        if fence and fence <= state.top:
            said = f"fence {fence} was leased, although fence {state.top} was there before"
            return IllegalStep("fences-grow", said, state.proof, weak=True)
        if state.over:
            said = f"it was leased as fence {fence}, although it is {state.status}"
            return IllegalStep("run-after-its-end", said, state.proof)
        if state.cancelled:
            return _cancel_ignored(state, f"it was leased as fence {fence}")
        if state.status == "RUNNING":
            said = f"it was leased as fence {fence} while fence {state.fence} held it"
            return IllegalStep("two-workers", said, state.proof)
        until = operation.began_us + operation.told("lease_us", 0)
        return [RunState("RUNNING", fence, "", max(fence, state.top), until, by=operation)]

    def _renew(self, state: RunState, operation: Operation) -> list[RunState] | IllegalStep:
        holds = state.status == "RUNNING" and state.fence == operation.asked("fence")
        if not operation.told("accepted"):
            return [state]  # its row may have been locked
        until = operation.began_us + operation.asked("lease_us", 0)
        return [replace(state, lease_until=until, by=operation)] if holds else _stale(state, operation)

    def _finish(self, state: RunState, operation: Operation) -> list[RunState] | IllegalStep:
        holds = state.status == "RUNNING" and state.fence == operation.asked("fence")
        status, value = operation.told("status"), operation.asked("value", "")
        if not operation.told("accepted"):
            return _refused(state, operation) if holds else [state]
        if holds and state.cancelled and status == "PENDING":
            return _cancel_ignored(state, "it is PENDING again")
        if holds:
            return [replace(state, status=status, value=value if status == "SUCCEEDED" else "", by=operation)]
        again = state.status == status == "SUCCEEDED" and state.fence == operation.asked("fence")
        return [state] if again and state.value == value else _stale(state, operation)

    def _lose(self, state: RunState, operation: Operation) -> list[RunState] | IllegalStep:
        fence = operation.told("fence")
        if state.status != "RUNNING" or fence not in (None, state.fence):
            said = f"the worker of fence {fence} was given up, but the run is {state.status} under fence {state.fence}"
            return IllegalStep("stale-write", said, state.proof)
        if not self._may_have_lapsed(state, operation):
            left = (state.lease_until - operation.ended_us) / 1e6
            said = f"the worker of fence {state.fence} was given up {left:.3f} seconds or more before its lease ends"
            return IllegalStep("two-workers", said, state.proof)
        if state.cancelled and operation.told("status") != "CANCELLED":
            return _cancel_ignored(state, f"it is {operation.told('status')} after its worker was lost")
        return [replace(state, status=operation.told("status"), by=operation)]

    def _cancel(self, state: RunState, operation: Operation) -> list[RunState] | IllegalStep:
        if operation.told("refused"):
            return [state]
        if operation.told("status") == "CANCELLED" and state.status == "PENDING":
            return [replace(state, status="CANCELLED", by=operation)]
        after = self._get(state, operation)
        if isinstance(after, IllegalStep) or state.status != "RUNNING":
            return after
        return [replace(state, cancelled=True, by=operation)]

    def _get(self, state: RunState, operation: Operation) -> list[RunState] | IllegalStep:
        status, value = operation.told("status"), operation.told("value", state.value)
        fence = operation.told("fence", state.fence)
        if status == "absent":
            return IllegalStep("run-lost", f"there is no such run, but it is {state.status}", state.proof)
        if state.over and status != state.status:
            return IllegalStep("end-changed", f"it is {status}, but it had ended as {state.status}", state.proof)
        if state.over and fence != state.fence:
            said = f"it is {status} under fence {fence}, but it had ended under fence {state.fence}"
            return IllegalStep("end-changed", said, state.proof)
        if state.over and value != state.value:
            return IllegalStep("end-changed", f"its result is {value!r}, but {state.value!r} was recorded", state.proof)
        if status != state.status or (status == "RUNNING" and fence != state.fence):
            said = f"it is said to be {status} under fence {fence}, but it is {state.status} under fence {state.fence}"
            return IllegalStep("unfounded-answer", said, state.proof, weak=True)
        return [state]

    def _may_have_lapsed(self, state: RunState, operation: Operation) -> bool:
        return state.lease_until <= operation.ended_us + self._slack

    def _may_be_lost(self, state: RunState, operation: Operation) -> bool:
        return state.status == "RUNNING" and self._may_have_lapsed(state, operation)


_VERBS: dict[str, Callable[[RunModel, RunState, Operation], list[RunState] | IllegalStep]] = {
    "lease": RunModel._lease,
    "renew": RunModel._renew,
    "finish": RunModel._finish,
    "lose": RunModel._lose,
    "cancel": RunModel._cancel,
    "get": RunModel._get,
}


def _stale(state: RunState, operation: Operation) -> IllegalStep:
    fence = operation.asked("fence")
    said = f"{operation.verb} under fence {fence} was accepted, but the run is {state.status} under fence {state.fence}"
    return IllegalStep("two-ends" if state.over and operation.verb == "finish" else "stale-write", said, state.proof)


def _refused(state: RunState, operation: Operation) -> IllegalStep:
    said = f"finish under fence {operation.asked('fence')} was refused, although it holds the run"
    return IllegalStep("owner-refused", said, state.proof)


def _cancel_ignored(state: RunState, said: str) -> IllegalStep:
    more = f"although its cancellation was acknowledged while fence {state.fence} ran it"
    return IllegalStep("cancel-ignored", f"{said}, {more}", state.proof)


def check_runs(history: History) -> Iterator[Violation]:
    """Every rule for every run."""
    yield from _one_run_per_key(history)
    runs = by_run(history)
    for run, operations in runs.items():
        found = [*_one_attempt_per_fence(run, operations), *_one_effect_per_fence(run, operations)]
        yield from found or _explained(run, operations, history.slack_us)
    if history.complete:
        yield from _every_submission_ends(history, runs)


def by_run(history: History) -> dict[str, list[Operation]]:
    """The operations about each run. One whose answer was lost is about every run that it may have changed."""
    found: dict[str, list[Operation]] = {}
    lost: list[Operation] = []
    for operation in history.operations:
        if operation.kind != "run":
            continue
        if operation.verb in LISTED:
            for run, fence, more in operation.told("runs", []):
                told = {"fence": fence, "lease_us" if operation.verb == "lease" else "status": more}
                found.setdefault(run, []).append(operation.about(run, answer=told))
            lost += [] if operation.answered else [operation]
        elif operation.verb == "submit":
            if run := operation.told("run"):
                found.setdefault(run, []).append(operation)
        else:
            found.setdefault(operation.subject[0], []).append(operation)
    for run, operations in found.items():
        operations += [each.about(run) for each in lost]
    return found


def _explained(run: str, operations: list[Operation], slack_us: int) -> Iterator[Violation]:
    steps = [each for each in operations if each.verb not in DIRECT]
    if not any(each.verb == "lease" for each in steps):
        yield from _ends_once(run, steps)  # the workers were not recorded: no order can be found
        return
    stuck = Search(steps, RunModel(steps, slack_us)).run()
    if stuck is None:
        return
    if stuck.operation is None or stuck.refusal is None:
        yield Violation("undecided", "run", (run,), "its operations overlap so much that they cannot be judged")
        return
    refusal = stuck.refusal
    yield Violation(refusal.rule, "run", (run,), refusal.message, (*refusal.proof, stuck.operation))


def _ends_once(run: str, operations: list[Operation]) -> Iterator[Violation]:
    """Whatever was seen first as the end stays so, and no attempt begins after an acknowledged cancellation."""
    ends = [each for each in operations if each.told("status") in ENDS]
    looks = [each for each in operations if each.verb == "get" and each.answered]
    for end in ends[:1]:
        for later in looks:
            if later.began > end.ended and _differs(_seen(end), _seen(later)):
                told, had = (" ".join(str(part) for part in _seen(each) if part is not None) for each in (later, end))
                said = f"it is {told}, but it had ended as {had}"
                yield Violation("end-changed", "run", (run,), said, (end, later))
    cancels = [each for each in operations if each.verb == "cancel" and each.told("fence") is not None]
    for cancel in cancels[:1]:
        fence = cancel.told("fence")
        for later in (each for each in operations if max(each.asked("fence") or 0, each.told("fence") or 0) > fence):
            said = f"fence {fence} had it when its cancellation was acknowledged, but a later attempt has begun"
            yield Violation("cancel-ignored", "run", (run,), said, (cancel, later))
            return


def _seen(operation: Operation) -> tuple[Any, ...]:
    """The status, fence and result that an operation tells of; None for what it does not."""
    told = operation.answer or {}
    more = operation.arguments if operation.verb == "finish" else told
    return (told.get("status"), more.get("fence"), more.get("value"))


def _differs(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return any(None not in pair and pair[0] != pair[1] for pair in zip(one, other, strict=True))


def _one_attempt_per_fence(run: str, operations: list[Operation]) -> Iterator[Violation]:
    leases: dict[int, Operation] = {}
    attempts: dict[int, Operation] = {}
    for each in operations:
        if each.verb == "lease" and each.answered:
            other = leases.setdefault(each.told("fence"), each)
            if other is not each:
                said = f"two workers have the fence {each.told('fence')}"
                yield Violation("one-worker-per-fence", "run", (run,), said, (other, each))
        if each.verb == "attempt":
            fence = each.asked("fence")
            other = attempts.setdefault(fence, each)
            if other is not each:
                said = f"it was executed twice under fence {fence}"
                yield Violation("two-attempts-under-one-fence", "run", (run,), said, (other, each))


def _one_effect_per_fence(run: str, operations: list[Operation]) -> Iterator[Violation]:
    seen: dict[tuple[int, str], Operation] = {}
    effects = [each for each in operations if each.verb == "effect"]
    for each in effects:
        fence = each.asked("fence")
        other = seen.setdefault((fence, each.asked("name", "")), each)
        if other is not each:
            said = f"it took effect twice under fence {fence}"
            yield Violation("effect-twice", "run", (run,), said, (other, each))
    ends = [each for each in operations if each.told("status") == "SUCCEEDED" and each.verb in ("get", "finish")]
    fences = {fence for fence, _ in seen}
    for end in ends[:1]:
        fence = end.told("fence", end.asked("fence"))
        if effects and fence is not None and fence not in fences:
            said = f"it has succeeded under fence {fence}, under which nothing took effect"
            yield Violation("effect-missing", "run", (run,), said, (end, *effects[:3]))


def _one_run_per_key(history: History) -> Iterator[Violation]:
    """Whoever submits with the same key, while it is kept, gets the same run."""
    keyed: dict[tuple[Any, ...], list[Operation]] = {}
    for each in history.operations:
        if each.kind == "run" and each.verb == "submit" and each.asked("key") and each.told("run"):
            keyed.setdefault((*each.subject, each.asked("key")), []).append(each)
    for operations in keyed.values():
        for one, other in combinations(operations, 2):
            last = max(one.ended_us, other.ended_us) + history.slack_us
            kept = all(each.began_us + each.asked("ttl_us", FOREVER) > last for each in (one, other))
            if kept and one.told("run") != other.told("run"):
                said = f"the key {one.asked('key')!r} has two runs: {one.told('run')} and {other.told('run')}"
                yield Violation("two-runs-of-one-key", "run", (one.told("run"),), said, (one, other))


def _every_submission_ends(history: History, runs: dict[str, list[Operation]]) -> Iterator[Violation]:
    """A run that was acknowledged, as a new one or to a repeat, was last seen at its end, whoever died meanwhile."""
    acknowledged: dict[str, Operation] = {}
    for each in history.operations:
        if each.kind == "run" and each.verb == "submit" and each.told("run") is not None:
            acknowledged.setdefault(each.told("run"), each)
    for run, each in acknowledged.items():
        last = max(
            (get for get in runs[run] if get.verb == "get" and get.answered), key=lambda get: get.ended, default=None
        )
        if last is None:
            said = "it was acknowledged, and nobody looked what became of it: get every run at the end of the test"
            yield Violation("submission-without-end", "run", (run,), said, (each,))
        elif last.told("status") not in ENDS:
            said = f"it was acknowledged, and was left {last.told('status')}"
            yield Violation("submission-without-end", "run", (run,), said, (each, last))
