"""Owners on one key: every interleaving, with a crash, a lost reply and a delayed request allowed at every step.

What an owner does is the protocol of a guarded call: claim, work, renew, complete or release, and send again whatever
was not answered. A claim may say ``on_crash="unknown"``; operators resolve what is unknown, and know the truth.

Nothing is bounded but the number of owners. A caller that has its answer may call again, as may one in place of a
caller that died; time goes on for ever. The states are finite all the same: times are ticks from now, and of fences
only the order counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from protocol.explorer import Step
from protocol.key_store import LEASE, TTL, Answer, Key, KeyVerbs, is_gone, later

TWO_OWNERS = "two owners have a live lease"
FENCE = "a fence is not greater than all before it"
STALE = "a stale fence changed the key"
FORGOTTEN = "an accepted outcome was forgotten before its time"
CHANGED = "an accepted outcome was changed"
NO_OUTCOME = "an outcome was replayed that nobody made, or past its time"
OWN_REFUSED = "a caller was refused its own claim"
LONG_WAIT = "a caller has to wait although no lease lasts"
TWICE = "work was done twice although nobody may guess"
PROMISES = (TWO_OWNERS, FENCE, STALE, FORGOTTEN, CHANGED, NO_OUTCOME, OWN_REFUSED, LONG_WAIT, TWICE)

IDLE, UNANSWERED, WORKING, WORKED, FAILED = "idle", "unanswered", "working", "worked", "failed"
ASKED_TO_RESOLVE, RESOLVING = "asked to resolve", "resolving"
NAMES = "ABC"


class Owner(NamedTuple):
    """A caller, or the next one in its place. ``lease``: the ticks for which it knows that the key is its own.

    ``asks``: its claim says ``on_crash="unknown"``. ``late``: the delayed request is its own claim.
    """

    phase: str = IDLE
    fence: int = 0
    lease: int = 0
    asks: bool = False
    late: bool = False


class Delayed(NamedTuple):
    """A request that arrives later, when its sender may have sent it again. ``mine``: its attempt has the record."""

    verb: str
    fence: int = 0
    mine: bool = False
    asks: bool = False


class Truth(NamedTuple):
    """What really happened; nobody can read it."""

    last_fence: int = 0
    age: int = 0
    """Ticks since the last grant."""
    lease: int = 0
    """Ticks until the end of the last lease that was granted or renewed."""
    outcome: int = 0
    """The fence under which an outcome was accepted, and for how many ticks it must be kept."""
    kept_for: int = 0
    done_for: int = -1
    """The ticks for which an effect is remembered that happened under a live lease."""
    done_asking: bool = False
    """Whether its claim said ``on_crash="unknown"``: then nobody may do it again meanwhile."""


class State(NamedTuple):
    key: Key
    owners: tuple[Owner, ...]
    delayed: Delayed | None
    truth: Truth


class Claims:
    """The model. ``on_crash``: what claims may say.

    ``withdraws``: a resolver without an answer releases the key, which the product must not do.
    """

    def __init__(
        self,
        verbs: KeyVerbs | None = None,
        *,
        owners: int = 3,
        on_crash: tuple[str, ...] = ("retry",),
        delays: bool = False,
        withdraws: bool = False,
    ) -> None:
        self.verbs = verbs or KeyVerbs()
        self._owners = owners
        self._asks = tuple(each == "unknown" for each in on_crash)
        self._delays = delays
        self._withdraws = withdraws

    def initial(self) -> State:
        return State(Key(), (Owner(),) * self._owners, None, Truth())

    def rests(self, state: State) -> bool:
        """Whether nobody has the key, and the next caller gets it, or its outcome."""
        if any(owner.phase != IDLE for owner in state.owners):
            return False
        answer = self.verbs.claim(state.key, mine=False, unknown=self._asks[0])
        return answer.said in {"granted", "replay"}

    def representative(self, state: State) -> State:
        """Owners sorted, fences replaced by their ranks, and no age that nobody asks for."""
        owners, truth, key = state.owners, state.truth, state.key
        if truth.age and not _may_complete(state):
            truth = truth._replace(age=0)
        fences = {truth.last_fence, truth.outcome, key.last_fence, *(owner.fence for owner in owners)}
        if key.row is not None:
            fences |= {key.row.fence, key.row.outcome}
        if state.delayed is not None:
            fences.add(state.delayed.fence)
        fences.add(0)
        if len(fences) <= max(fences):
            rank = {fence: number for number, fence in enumerate(sorted(fences))}
            return _renumbered(state._replace(truth=truth), rank)
        return state._replace(owners=tuple(sorted(owners)), truth=truth)

    def steps(self, state: State) -> Iterator[Step[State]]:
        yield self._checked("a tick passes", self._tick(state))
        if (purged := self.verbs.purge(state.key)) != state.key:
            yield self._checked("the collector removes the record", state._replace(key=purged))
        if state.delayed is not None:
            yield self._arrive(state, state.delayed)
        for number, owner in enumerate(state.owners):
            if owner.phase != IDLE or owner.late:
                yield Step(f"{NAMES[number]} is killed", _put(state, number, Owner()), "", True)
            yield from self._own_steps(state, number, owner)

    def _own_steps(self, state: State, number: int, owner: Owner) -> Iterator[Step[State]]:
        match owner.phase:
            case "idle" if not owner.late:
                yield from self._call(state, number)
            case "idle" | "unanswered":
                yield from self._claim(state, number, owner, resolving=False)
            case "asked to resolve":
                yield from self._claim(state, number, owner, resolving=True)
                if self._withdraws:
                    yield from self._withdraw(state, number)
            case "working":
                yield self._work(state, number, owner)
                yield Step(f"{NAMES[number]} fails", _put(state, number, Owner(FAILED, owner.fence)))
                yield from self._send(state, number, owner, "renew")
            case "worked":
                yield from self._send(state, number, owner, "complete")
                yield from self._send(state, number, owner, "renew")
            case "failed":
                yield from self._send(state, number, owner, "release")
            case "resolving":
                yield from self._send(state, number, owner, "complete" if state.truth.done_for >= 0 else "release")

    def _call(self, state: State, number: int) -> Iterator[Step[State]]:
        for asks in self._asks:
            yield from self._claim(state, number, Owner(asks=asks), resolving=False)
        if any(self._asks) and _is_unknown(state.key):
            yield from self._claim(state, number, Owner(asks=True), resolving=True)

    def _checked(self, name: str, state: State, broken: str = "", *, fault: bool = False) -> Step[State]:
        return Step(name, state, _broken(state) or broken, fault)

    def _tick(self, state: State) -> State:
        truth = state.truth
        kept = truth.kept_for - 1 if truth.outcome else 0
        truth = truth._replace(
            age=min(truth.age + 1, TTL + 1),
            lease=max(truth.lease - 1, 0),
            outcome=truth.outcome if kept >= 0 else 0,
            kept_for=max(kept, 0),
            done_for=max(truth.done_for - 1, -1),
            done_asking=truth.done_asking and truth.done_for > 0,
        )
        owners = tuple(owner._replace(lease=owner.lease - 1) if owner.lease else owner for owner in state.owners)
        return state._replace(key=later(state.key), owners=owners, truth=truth)

    def _claim(self, state: State, number: int, owner: Owner, *, resolving: bool) -> Iterator[Step[State]]:
        mine = owner.phase in {UNANSWERED, ASKED_TO_RESOLVE}
        answer = self.verbs.claim(state.key, mine=mine, unknown=owner.asks, resolving=resolving)
        name = (
            f"{NAMES[number]} {'resolves' if resolving else 'claims'}{' with unknown' * (owner.asks and not resolving)}"
        )
        after, broken = self._claimed(state, answer)
        phase = (RESOLVING if resolving else WORKING) if answer.said == "granted" else IDLE
        told = Owner(phase, answer.fence, answer.lease, owner.asks) if phase == WORKING else Owner(phase, answer.fence)
        if answer.said == "in flight" and (owner.phase != IDLE or owner.late):
            told = owner
        broken = broken or _wrong_answer(state, answer, mine=mine)
        heard = after
        if owner.late and answer.mine and after.delayed is not None:
            heard = after._replace(delayed=after.delayed._replace(mine=True))
        yield self._checked(f"{name}: {answer.said}", _put(heard, number, told), broken)
        if answer.mine:
            waits = owner._replace(phase=ASKED_TO_RESOLVE if resolving else UNANSWERED)
            if owner.late and after.delayed is not None:
                after = after._replace(delayed=after.delayed._replace(mine=True))
            yield self._checked(f"{name}; the reply is lost", _put(after, number, waits), broken, fault=True)
        if self._delays and state.delayed is None and not resolving:
            delayed = state._replace(delayed=Delayed("claim", mine=mine, asks=owner.asks))
            yield Step(f"{name}; the request is delayed", _put(delayed, number, owner._replace(late=True)), "", True)

    def _claimed(self, state: State, answer: Answer) -> tuple[State, str]:
        """The state after a claim, whoever hears of it, and the promise about fences that it broke."""
        after = state._replace(key=answer.key)
        row = answer.key.row
        if answer.said != "granted" or row is None or row == state.key.row:
            return after, ""
        truth = state.truth._replace(last_fence=max(row.fence, state.truth.last_fence), age=0, lease=LEASE)
        if not (row.unknown or truth.done_asking):
            truth = truth._replace(done_for=-1)  # both owners chose to do it again rather than to ask
        owners = tuple(_without_record(owner) for owner in state.owners)
        delayed = state.delayed and state.delayed._replace(mine=False)
        broken = "" if row.fence > state.truth.last_fence else FENCE
        return after._replace(truth=truth, owners=owners, delayed=delayed), broken

    def _withdraw(self, state: State, number: int) -> Iterator[Step[State]]:
        row = state.key.row
        assert row is not None
        after = state._replace(key=self.verbs.release(state.key, row.fence).key)
        yield self._checked(f"{NAMES[number]} withdraws its claim", _put(after, number, Owner()), fault=True)

    def _work(self, state: State, number: int, owner: Owner) -> Step[State]:
        truth, broken = state.truth, ""
        if any(self._asks) and owner.lease:
            broken = TWICE if truth.done_for >= 0 and (truth.done_asking or owner.asks) else ""
            truth = truth._replace(done_for=_retention(truth.age), done_asking=owner.asks)
        after = _put(state._replace(truth=truth), number, Owner(WORKED, owner.fence))
        return Step(f"{NAMES[number]} does the work", after, broken)

    def _send(self, state: State, number: int, owner: Owner, verb: str) -> Iterator[Step[State]]:
        """A verb that names a fence: answered, executed without an answer, or executed later."""
        after, answer, broken = self._written(state, verb, owner.fence)
        name = f"{NAMES[number]} {verb}s"
        told = Owner()
        if verb == "renew":
            told = owner._replace(lease=answer.lease) if owner.phase == WORKING else owner
        yield self._checked(f"{name}: {answer.said}", _put(after, number, told), broken)
        if after.key != state.key:
            yield self._checked(f"{name}; the reply is lost", after, broken, fault=True)
        if self._delays and state.delayed is None:
            yield Step(f"{name}; the request is delayed", state._replace(delayed=Delayed(verb, owner.fence)), "", True)

    def _written(self, state: State, verb: str, fence: int) -> tuple[State, Answer, str]:
        send: Callable[[Key, int], Answer] = getattr(self.verbs, verb)
        answer = send(state.key, fence)
        after = state._replace(key=answer.key)
        row, truth = state.key.row, state.truth
        if answer.said == "completed" and not truth.outcome:
            after = after._replace(truth=truth._replace(outcome=fence, kept_for=_retention(truth.age), lease=0))
        elif answer.key != state.key:
            after = after._replace(truth=truth._replace(lease=LEASE if verb == "renew" else 0))
        changed = answer.key != state.key or answer.said in {"completed", "renewed"}
        if changed and (fence < truth.last_fence or row is None or row.fence != fence):
            return after, answer, STALE
        return after, answer, ""

    def _arrive(self, state: State, delayed: Delayed) -> Step[State]:
        name = f"the delayed {delayed.verb} arrives"
        state = state._replace(delayed=None)
        if delayed.verb != "claim":
            after, _, broken = self._written(state, delayed.verb, delayed.fence)
            return self._checked(name, after, broken)
        answer = self.verbs.claim(state.key, mine=delayed.mine, unknown=delayed.asks)
        after, broken = self._claimed(state, answer)
        owners = [_unanswered(owner, mine=answer.mine) if owner.late else owner for owner in after.owners]
        return self._checked(name, after._replace(owners=tuple(owners)), broken)


def _retention(age: int) -> int:
    """For how many ticks an outcome is kept that is recorded ``age`` ticks after its claim."""
    return TTL - age if age <= TTL else TTL


def _broken(state: State) -> str:
    """The promise that this state breaks."""
    if sum(owner.lease > 0 for owner in state.owners) > 1:
        return TWO_OWNERS
    row, truth = state.key.row, state.truth
    if not truth.outcome:
        return ""
    if row is None or row.state != "completed" or is_gone(row):
        return FORGOTTEN
    return CHANGED if row.outcome != truth.outcome else ""


def _wrong_answer(state: State, answer: Answer, *, mine: bool) -> str:
    if answer.said == "replay":
        return "" if state.truth.outcome == answer.outcome and answer.outcome else NO_OUTCOME
    if answer.said == "in flight" and not (mine or state.truth.lease):
        return LONG_WAIT
    return OWN_REFUSED if mine and answer.said != "granted" else ""


def _is_unknown(key: Key) -> bool:
    """What :meth:`Once.resolve` looks for before it claims."""
    row = key.row
    return row is not None and row.state == "claimed" and row.lease <= 0 and not is_gone(row)


def _put(state: State, number: int, owner: Owner) -> State:
    owners = state.owners
    return state._replace(owners=(*owners[:number], owner, *owners[number + 1 :]))


def _may_complete(state: State) -> bool:
    """Whether the last grant may still be completed: then its age counts."""
    last = state.truth.last_fence
    if state.delayed is not None and state.delayed.fence == last:
        return True
    return any(
        owner.fence == last if owner.fence else owner.phase in {UNANSWERED, ASKED_TO_RESOLVE} for owner in state.owners
    )


def _without_record(owner: Owner) -> Owner:
    """An owner that waits for an answer, after its record was replaced: it has nothing, and asks anew."""
    if owner.phase not in {UNANSWERED, ASKED_TO_RESOLVE}:
        return owner
    return owner._replace(phase=IDLE) if owner.late else Owner()


def _unanswered(owner: Owner, *, mine: bool) -> Owner:
    return owner._replace(phase=UNANSWERED if mine else owner.phase, late=False)


def _renumbered(state: State, rank: dict[int, int]) -> State:
    key, truth, delayed = state.key, state.truth, state.delayed
    row = key.row
    if row is not None:
        row = row._replace(fence=rank[row.fence], outcome=rank[row.outcome])
    owners = sorted(owner._replace(fence=rank[owner.fence]) for owner in state.owners)
    return State(
        Key(row, rank[key.last_fence]),
        tuple(owners),
        delayed and delayed._replace(fence=rank[delayed.fence]),
        truth._replace(last_fence=rank[truth.last_fence], outcome=rank[truth.outcome]),
    )
