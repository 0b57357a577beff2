"""The rules of a key: a register that is written once, by one owner at a time, each with a greater fence.

Verbs (what is asked, and what the answer tells):

========= ============================================== ============================================================
claim     attempt, lease_us, ttl_us, force, unknown,     verdict (granted, replay, in_flight, mismatch, unknown),
          resolving, outcome, value_ttl_us               fence, value
renew     fence, lease_us                                accepted
complete  fence, value, value_ttl_us                     accepted
release   fence                                          accepted
forget    fence, force                                   accepted
forgotten force                                          (a whole scope was forgotten: this key perhaps)
get                                                      status (absent, claimed, completed), fence, value
call      ttl_us, value_ttl_us                           fence, value, replayed: work was done, or its value replayed;
                                                         gone: it was done, and its value is not kept any more
mark      ttl_us                                         replayed: a message was marked, or had been seen
effect    fence, name
========= ============================================== ============================================================

A value is kept as long as its key, or until ``value_ttl_us`` have passed since the completion: then it may be "".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Literal

from semel.testing.history.linearize import IllegalStep, Search
from semel.testing.history.operations import FOREVER, History, Operation, Violation

Status = Literal["absent", "claimed", "completed"]
DIRECT = ("call", "mark", "effect")
"""Verbs that are judged by rules of their own: they consist of several steps, or of none that the store knows."""


@dataclass(frozen=True)
class KeyState:
    """What is known of a key at a moment. The times are the earliest possible ones."""

    status: Status = "absent"
    fence: int = 0
    attempt: str = ""
    value: str = ""
    unknown: bool = False
    top: int = 0
    """The greatest fence so far."""
    lease_until: int = 0
    kept_until: int = 0
    value_until: int = FOREVER
    by: Operation | None = field(default=None, compare=False)
    """The operation that led here."""

    @property
    def proof(self) -> tuple[Operation, ...]:
        """The operation that led here, if there was one."""
        return () if self.by is None else (self.by,)

    def absent(self, by: Operation) -> KeyState:
        """The same key without a record. Its fences go on."""
        return KeyState(top=self.top, by=by)


class KeyModel:
    """How a key behaves."""

    def __init__(self, operations: Sequence[Operation], slack_us: int = 0) -> None:
        self._slack = slack_us
        self._unclaimed = _unclaimed_fences(operations)
        self._granted: dict[str, set[int]] = {}
        for each in operations:
            if each.told("verdict") == "granted":
                self._granted.setdefault(each.asked("attempt"), set()).add(each.told("fence"))

    def start(self) -> KeyState:
        """No record."""
        return KeyState()

    def step(self, state: KeyState, operation: Operation) -> list[KeyState] | IllegalStep:
        """What the answer makes of the state. A record whose time may be over may also be absent."""
        verb = _VERBS[operation.verb]
        after = verb(self, state, operation)
        if state.status == "absent" or not self._may_be_gone(state, operation):
            return after
        gone = verb(self, state.absent(operation), operation)
        if isinstance(gone, IllegalStep):
            return after
        return gone if isinstance(after, IllegalStep) else after + [each for each in gone if each not in after]

    def reads(self, operation: Operation) -> bool:
        """Whether its answer says that it only looked, or was refused."""
        if operation.verb == "claim":
            return bool(operation.told("verdict") != "granted")
        return operation.verb == "get" or operation.told("accepted") is False

    def guess(self, state: KeyState, operation: Operation) -> list[KeyState]:
        """What a lost operation may have done: the same as if its answer had been the best one."""
        found: list[KeyState] = []
        for answer in self._possible(operation):
            after = self.step(state, _with_answer(operation, answer))
            if not isinstance(after, IllegalStep):
                found += [each for each in after if each != state and each not in found]
        return found

    def _possible(self, operation: Operation) -> list[dict[str, Any]]:
        if operation.verb != "claim":
            return [{"accepted": True}]
        fences = self._unclaimed | self._granted.get(operation.asked("attempt"), set())
        return [{"verdict": "granted", "fence": fence} for fence in (0, *sorted(fences))]

    def _claim(self, state: KeyState, operation: Operation) -> list[KeyState] | IllegalStep:
        verdict = operation.told("verdict")
        if verdict == "granted":
            return self._grant(state, operation)
        if state.status != "absent" and state.attempt == operation.asked("attempt") and verdict != "mismatch":
            said = f"the attempt that holds it as fence {state.fence} was told {verdict!r} when it asked again"
            return IllegalStep("owner-refused", said, state.proof)
        return _VERDICTS[verdict](self, state, operation)

    def _grant(self, state: KeyState, operation: Operation) -> list[KeyState] | IllegalStep:
        fence = operation.told("fence")
        ours = state.status != "absent" and state.attempt == operation.asked("attempt")
        if ours and fence == state.fence:
            return [state]
        if fence and fence <= state.top:
            said = f"fence {fence} was granted, although fence {state.top} was there before"
            return IllegalStep("fences-grow", said, state.proof, weak=True)
        refusal = self._not_free(state, operation)
        return refusal if refusal is not None else [self._taken(state, operation, fence)]

    def _taken(self, state: KeyState, operation: Operation, fence: int) -> KeyState:
        outcome = operation.asked("outcome")
        return KeyState(
            "claimed" if outcome is None else "completed",
            fence,
            operation.asked("attempt", ""),
            outcome or "",
            bool(operation.asked("unknown")),
            max(fence, state.top),
            operation.began_us + operation.asked("lease_us", 0),
            operation.began_us + operation.asked("ttl_us", 0),
            FOREVER if outcome is None else _value_until(operation),
            operation,
        )

    def _not_free(self, state: KeyState, operation: Operation) -> IllegalStep | None:
        fence = operation.told("fence")
        if state.status == "completed":
            left = (state.kept_until - operation.ended_us) / 1e6
            return IllegalStep(
                "outcome-forgotten",
                f"its work was done under fence {state.fence}, and is granted again as fence {fence}, although the "
                f"outcome is to be kept for {left:.3f} more seconds at least",
                state.proof,
            )
        if state.status == "absent" or operation.asked("force"):
            return None
        if not self._may_have_lapsed(state, operation):
            left = (state.lease_until - operation.ended_us) / 1e6
            return IllegalStep(
                "two-owners",
                f"fence {fence} was granted while fence {state.fence} held the key, for {left:.3f} more seconds at "
                "least",
                state.proof,
            )
        if (state.unknown or operation.asked("unknown")) and not operation.asked("resolving"):
            ours = state.attempt == operation.asked("attempt")
            return None if ours else _unknown_repeated(state, operation)
        return None

    def _replay(self, state: KeyState, operation: Operation) -> list[KeyState] | IllegalStep:
        fence, value = operation.told("fence"), operation.told("value", state.value)
        if state.status != "completed":
            return _unfounded(state, operation, f"replays an outcome of fence {fence}, which nobody recorded")
        if fence not in (0, state.fence) or value not in ("", state.value):
            return _changed(state, operation)
        if value != state.value and state.value_until >= operation.ended_us + self._slack:
            said = f"the outcome of fence {state.fence} is replayed without its value, which is to be kept longer"
            return IllegalStep("value-forgotten", said, state.proof)
        return [state]

    def _in_flight(self, state: KeyState, operation: Operation) -> list[KeyState] | IllegalStep:
        fence = operation.told("fence")
        if state.status == "completed":
            return IllegalStep(
                "outcome-lost", f"it is said to be in flight, but fence {state.fence} has completed it", state.proof
            )
        if state.status == "absent" or fence not in (0, state.fence):
            return _unfounded(state, operation, f"says that fence {fence} works on it, which does not hold it")
        return [state]

    def _mismatch(self, state: KeyState, operation: Operation) -> list[KeyState] | IllegalStep:
        if state.status == "absent":
            return _unfounded(state, operation, "says that it was used with other content, but nobody holds it")
        return [state]

    def _unknown(self, state: KeyState, operation: Operation) -> list[KeyState] | IllegalStep:
        if state.status != "claimed" or operation.told("fence") not in (0, state.fence):
            return _unfounded(state, operation, f"says that the owner of fence {operation.told('fence')} vanished")
        if not self._may_have_lapsed(state, operation):
            return _unfounded(state, operation, f"says that fence {state.fence} vanished, but its lease still lasts")
        return [state]

    def _renew(self, state: KeyState, operation: Operation) -> list[KeyState] | IllegalStep:
        holds = state.status == "claimed" and state.fence == operation.asked("fence")
        if operation.told("accepted"):
            until = operation.began_us + operation.asked("lease_us")
            return [replace(state, lease_until=until, by=operation)] if holds else _stale(state, operation)
        return _refused(state, operation) if holds else [state]

    def _complete(self, state: KeyState, operation: Operation) -> list[KeyState] | IllegalStep:
        holds = state.status != "absent" and state.fence == operation.asked("fence")
        if not operation.told("accepted"):
            return _refused(state, operation) if holds else [state]
        if not holds:
            return _stale(state, operation)
        if state.status == "completed":
            return [state]
        value, until = operation.asked("value"), _value_until(operation)
        return [replace(state, status="completed", value=value, value_until=until, by=operation)]

    def _release(self, state: KeyState, operation: Operation) -> list[KeyState] | IllegalStep:
        holds = state.status != "absent" and state.fence == operation.asked("fence")
        if not operation.told("accepted"):
            return _refused(state, operation) if holds or state.status == "absent" else [state]
        if state.status == "claimed" and holds:
            return [state.absent(operation)]
        return [state] if holds or state.status == "absent" else _stale(state, operation)

    def _forget(self, state: KeyState, operation: Operation) -> list[KeyState] | IllegalStep:
        if state.status == "absent":
            return [state] if operation.told("accepted") else _refused(state, operation)
        own = state.fence == operation.asked("fence")
        live = state.status == "claimed" and not operation.asked("force")
        if not operation.told("accepted"):
            return [state] if not own or live else _refused(state, operation)
        if not own:
            return _stale(state, operation)
        if live and not self._may_have_lapsed(state, operation):
            return IllegalStep("two-owners", f"it was forgotten while fence {state.fence} held it", state.proof)
        return [state.absent(operation)]

    def _forgotten(self, state: KeyState, operation: Operation) -> list[KeyState] | IllegalStep:
        live = state.status == "claimed" and not operation.asked("force")
        if state.status == "absent" or (live and not self._may_have_lapsed(state, operation)):
            return [state]
        return [state, state.absent(operation)]

    def _get(self, state: KeyState, operation: Operation) -> list[KeyState] | IllegalStep:
        status = operation.told("status")
        if status == "absent" == state.status:
            return [state]
        if status == "absent":
            rule = "outcome-forgotten" if state.status == "completed" else "claim-forgotten"
            return IllegalStep(rule, f"it is absent, although fence {state.fence} has {state.status} it", state.proof)
        if status == "completed":
            return self._replay(state, operation)
        return self._in_flight(state, operation)

    def _may_have_lapsed(self, state: KeyState, operation: Operation) -> bool:
        return state.lease_until <= operation.ended_us + self._slack

    def _may_be_gone(self, state: KeyState, operation: Operation) -> bool:
        until = state.kept_until if state.status == "completed" else max(state.kept_until, state.lease_until)
        return until < operation.ended_us + self._slack


_Verb = Callable[[KeyModel, KeyState, Operation], list[KeyState] | IllegalStep]
_VERBS: dict[str, _Verb] = {
    "claim": KeyModel._claim,
    "renew": KeyModel._renew,
    "complete": KeyModel._complete,
    "release": KeyModel._release,
    "forget": KeyModel._forget,
    "forgotten": KeyModel._forgotten,
    "get": KeyModel._get,
}
_VERDICTS: dict[str, _Verb] = {
    "replay": KeyModel._replay,
    "in_flight": KeyModel._in_flight,
    "mismatch": KeyModel._mismatch,
    "unknown": KeyModel._unknown,
}


def _unclaimed_fences(operations: Sequence[Operation]) -> set[int]:
    """Fences that were named, but not in the answer to a claim: those of claims whose answer was lost."""
    granted = {each.told("fence") for each in operations if each.told("verdict") == "granted"}
    named = {fence for each in operations for fence in (each.told("fence", 0), each.asked("fence", 0))}
    return named - granted - {0}


def _value_until(operation: Operation) -> int:
    """The earliest time at which the value that it records may be forgotten."""
    value_ttl_us = operation.asked("value_ttl_us")
    return FOREVER if value_ttl_us is None else operation.began_us + int(value_ttl_us)


def _with_answer(operation: Operation, answer: dict[str, Any]) -> Operation:
    return operation.about(*operation.subject, answer=answer)


def _stale(state: KeyState, operation: Operation) -> IllegalStep:
    holder = {
        "absent": "nobody holds it",
        "claimed": f"fence {state.fence} holds it",
        "completed": f"fence {state.fence} has completed it",
    }[state.status]
    fence = operation.asked("fence")
    return IllegalStep(
        "stale-write", f"{operation.verb} under fence {fence} was accepted, although {holder}", state.proof
    )


def _refused(state: KeyState, operation: Operation) -> IllegalStep:
    said = f"{operation.verb} under fence {operation.asked('fence')} was refused, although no other fence has the key"
    return IllegalStep("owner-refused", said, state.proof)


def _changed(state: KeyState, operation: Operation) -> IllegalStep:
    return IllegalStep(
        "outcome-changed",
        f"its outcome is {operation.told('value')!r} of fence {operation.told('fence')}, but "
        f"{state.value!r} of fence {state.fence} was recorded before",
        state.proof,
    )


def _unfounded(state: KeyState, operation: Operation, said: str) -> IllegalStep:
    return IllegalStep(
        "unfounded-answer", f"the answer to {operation.verb} {said}; it is {state.status}", state.proof, True
    )


def _unknown_repeated(state: KeyState, operation: Operation) -> IllegalStep:
    return IllegalStep(
        "unknown-repeated",
        f"the owner of fence {state.fence} vanished, and whether its work happened is not known; it was granted again "
        f"as fence {operation.told('fence')}, although the caller asked to be told",
        state.proof,
    )


def check_keys(history: History) -> Iterator[Violation]:
    """Every rule for every key."""
    for subject, operations in _by_key(history).items():
        found = [*_one_owner_per_fence(operations), *_done_once(operations, history.slack_us), *_effects(operations)]
        yield from found or _explained(subject, operations, history.slack_us)


def _by_key(history: History) -> dict[tuple[str, ...], list[Operation]]:
    """The operations of each key. One that forgets a whole scope is about each of its keys."""
    found = history.of("key")
    scopes = {subject[0]: found.pop(subject) for subject in list(found) if len(subject) == 1}
    for subject, operations in found.items():
        operations.extend(each.about(*subject, answer=each.answer) for each in scopes.get(subject[0], ()))
    return found


def _explained(subject: tuple[str, ...], operations: list[Operation], slack_us: int) -> Iterator[Violation]:
    steps = [each for each in operations if each.verb not in DIRECT]
    stuck = Search(steps, KeyModel(steps, slack_us)).run()
    if stuck is None:
        return
    if stuck.operation is None or stuck.refusal is None:
        said = "its operations overlap so much that they cannot be judged: use more keys, or fewer operations on each"
        yield Violation("undecided", "key", subject, said)
        return
    refusal = stuck.refusal
    yield Violation(refusal.rule, "key", subject, refusal.message, (*refusal.proof, stuck.operation))


def _one_owner_per_fence(operations: list[Operation]) -> Iterator[Violation]:
    owners: dict[int, Operation] = {}
    for each in operations:
        if each.told("verdict") != "granted":
            continue
        other = owners.setdefault(each.told("fence"), each)
        if other.asked("attempt") != each.asked("attempt"):
            said = f"two owners have the fence {each.told('fence')}"
            yield Violation("one-owner-per-fence", "key", each.subject, said, (other, each))


def _done_once(operations: list[Operation], slack_us: int) -> Iterator[Violation]:
    """Calls and marks: the work is done once while its outcome is kept, and everybody gets the same value."""
    calls = [each for each in operations if each.verb in ("call", "mark") and each.answered]
    forgets = [each for each in operations if each.verb in ("forget", "forgotten")]
    for one, other in combinations(calls, 2):
        done, later = (one, other) if not one.told("replayed") else (other, one)
        if done.told("replayed") or _may_have_ended(done, later, forgets, slack_us):
            continue
        if not later.told("replayed"):
            said = "the work was done twice: both callers are told that theirs is the outcome"
            yield Violation("done-twice", "key", done.subject, said, (done, later))
        elif later.told("gone"):
            if _value_until(done) >= later.ended_us + slack_us:
                said = "the work was done, and its value is gone, although it is to be kept longer"
                yield Violation("value-forgotten", "key", done.subject, said, (done, later))
        elif (later.told("value"), later.told("fence")) != (done.told("value"), done.told("fence")):
            said = f"{later.told('value')!r} was replayed, but the work had returned {done.told('value')!r}"
            yield Violation("outcome-changed", "key", done.subject, said, (done, later))


def _may_have_ended(one: Operation, other: Operation, forgets: list[Operation], slack_us: int) -> bool:
    """Whether the outcome of either may have been forgotten, by time or on request, before the other."""
    last = max(one.ended_us, other.ended_us) + slack_us
    kept = all(each.began_us + each.asked("ttl_us", FOREVER) > last for each in (one, other))
    return not kept or any(each.began < max(one.ended, other.ended) for each in forgets)


def _effects(operations: list[Operation]) -> Iterator[Violation]:
    claims = [each for each in operations if each.verb in ("claim", "call")]
    known = {each.told("fence") for each in claims if each.told("verdict", "granted") == "granted"}
    lost = any(not each.answered for each in claims)
    seen: dict[tuple[int, str], Operation] = {}
    effects = [each for each in operations if each.verb == "effect"]
    for each in effects:
        fence = each.asked("fence")
        first = seen.setdefault((fence, each.asked("name", "")), each)
        if first is not each:
            yield Violation(
                "effect-twice", "key", each.subject, f"it took effect twice under fence {fence}", (first, each)
            )
        if claims and not lost and fence not in known:
            said = f"it took effect under fence {fence}, which nobody was granted"
            yield Violation("effect-without-claim", "key", each.subject, said, (each,))
    fences = {fence for fence, _ in seen}
    for each in operations:
        if each.verb == "call" and effects and each.told("fence") not in {None, *fences}:
            said = f"a caller got the outcome of fence {each.told('fence')}, under which nothing took effect"
            yield Violation("effect-missing", "key", each.subject, said, (each, *effects[:3]))
