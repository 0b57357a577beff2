"""The rules of quotas: never more slots in use than the limit, at any moment, and each is given back once.

Verbs about a user (what is asked, and what the answer tells):

======= =================== ======================================================
reserve limit, ttl_us       reservation; None if all slots are in use
consume reservation, job    accepted
release reservation         accepted
usage                       concurrent: how many slots are in use
======= =================== ======================================================

A run that was submitted with a ``limit`` holds a slot, too, until it ends (see the verbs of runs). In a history that is
complete, a ``usage`` that was recorded after everything else of its user tells that no slot is in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from semel.testing.history.operations import FOREVER, History, Operation, Violation
from semel.testing.history.runs import ENDS, by_run

_UNLIMITED = FOREVER


class Slot(Struct, frozen=True):
    """A slot in use: surely from ``sure_from`` to ``sure_until``, perhaps from ``from_`` to ``until``."""

    by: Operation
    limit: int
    from_: int
    until: int
    sure_from: int
    sure_until: int


def check_quotas(history: History) -> Iterator[Violation]:
    """Every rule for every user."""
    runs = by_run(history)
    times = _Times(history)
    ends = _Ends(history, times)
    users = history.of("quota")
    submits = [each for each in history.operations if each.kind == "run" and each.verb == "submit"]
    for user in dict.fromkeys([*users, *(each.subject for each in submits if each.asked("limit") is not None)]):
        operations = users.get(user, [])
        own = [each for each in submits if each.subject == user]
        slots = [*_reserved(operations, own, times), *_running(own, runs, times, ends)]
        found = [
            *_given_back_once(user, operations),
            *_never_over_the_limit(user, slots),
            *_no_slot_is_lost(user, [*operations, *own], slots),
            *_counted(user, operations, slots),
        ]
        yield from found
        if history.complete and not found:
            yield from _free_at_the_end(user, operations, own, runs)


class _Times:
    """When the clock of leases was surely before a time, or surely after it, in the real order.

    Every call and answer of the history has both times.
    """

    def __init__(self, history: History) -> None:
        seen = [(each.began, each.began_us) for each in history.operations]
        seen += [(each.ended, each.ended_us) for each in history.operations if each.answered]
        self._seen = sorted(seen)
        self._slack = history.slack_us

    def surely_before(self, time_us: int) -> int:
        """The last moment until which the clock had not reached the time."""
        last = 0
        for moment, us in self._seen:
            if us + self._slack >= time_us:
                return last
            last = moment
        return FOREVER

    def surely_after(self, time_us: int) -> int:
        """The first moment at which the clock was past the time."""
        return next((moment for moment, us in self._seen if us - self._slack > time_us), FOREVER)


def _reserved(operations: Sequence[Operation], submits: Sequence[Operation], times: _Times) -> Iterator[Slot]:
    """The slots of reservations: until they expire, are consumed or released, or a run takes them."""
    for reserve in operations:
        if reserve.verb != "reserve" or (reserve.answered and reserve.told("reservation") is None):
            continue
        name = reserve.told("reservation")
        ends = [each for each in (*operations, *submits) if name is not None and each.asked("reservation") == name]
        ttl_us = reserve.asked("ttl_us")
        sure_until = min([times.surely_before(reserve.began_us + ttl_us), *(each.began for each in ends)])
        expired = times.surely_after(reserve.ended_us + ttl_us) if reserve.answered else FOREVER
        until = min([expired, *(each.ended for each in ends if each.told("accepted") or each.told("run"))])
        yield Slot(reserve, reserve.asked("limit"), reserve.began, until, reserve.ended, sure_until)


class _Ends:
    """When a run may have ended, as far as workers and sweepers were recorded."""

    def __init__(self, history: History, times: _Times) -> None:
        self._times = times
        self._swept = any(each.kind == "run" and each.verb == "lose" for each in history.operations)

    def may_begin(self, operations: Sequence[Operation]) -> list[int]:
        """The moments from which on the run may have ended: nothing else can have ended it."""
        found = [each.began for each in operations if each.verb in ("finish", "cancel", "lose") and _may_end(each)]
        if not any(each.verb in ("lease", "finish") for each in operations):  # its workers were not recorded
            return found + [each.began for each in operations if each.verb == "attempt"]
        return found if self._swept else found + self._lapses(operations)

    def _lapses(self, operations: Sequence[Operation]) -> list[int]:
        """When a sweeper that nobody recorded may have found that a lease had ended."""
        until: dict[int, int] = {}
        for each in operations:
            if each.verb == "lease":  # one without an answer may have ended at once
                end_us = each.began_us + each.told("lease_us", 0)
                until[each.told("fence")] = max(end_us, until.get(each.told("fence"), 0))
            elif each.verb == "renew" and each.told("accepted"):
                end_us = each.began_us + each.asked("lease_us", 0)
                until[each.asked("fence")] = max(end_us, until.get(each.asked("fence"), 0))
        return [self._times.surely_before(end_us) for end_us in until.values()]


def _may_end(operation: Operation) -> bool:
    """Whether it ended its run, or has no answer: a retry, or a cancellation that is only requested, ends nothing."""
    return not operation.answered or operation.told("status") in ENDS


def _running(
    submits: Sequence[Operation], runs: dict[str, list[Operation]], times: _Times, ends: _Ends
) -> Iterator[Slot]:
    """The slots of runs, whoever submitted them first."""
    named: dict[str, list[Operation]] = {}
    keyed: dict[str, list[Operation]] = {}
    for submit in submits:
        if run := submit.told("run"):
            named.setdefault(run, []).append(submit)
        if (key := submit.asked("key")) is not None:
            keyed.setdefault(key, []).append(submit)
    began = {run: own[0].began for run, own in named.items()}
    for submit in submits:
        if submit.answered:
            continue
        same = keyed.get(submit.asked("key"), [])
        repeated = {run for each in same if (run := each.told("run"))}
        for run in repeated:
            began[run] = min(began[run], submit.began)  # it may have created this run
        another = _forgotten_at(same, times) if repeated else submit.began
        yield Slot(submit, _limit(submit), max(submit.began, another), FOREVER, FOREVER, FOREVER)
    for run, own in named.items():
        ended = [each.ended for each in runs[run] if each.told("status") in ENDS]
        acknowledged = min(each.ended for each in own)
        sure_until = min(ends.may_begin(runs[run]), default=acknowledged)
        yield Slot(own[0], _limit(own[0]), began[run], min(ended, default=FOREVER), acknowledged, sure_until)


def _forgotten_at(submits: Sequence[Operation], times: _Times) -> int:
    """The moment from which on their key may name no run any more: one that arrives later may create another."""
    return times.surely_before(min(each.began_us + (each.asked("ttl_us") or FOREVER) for each in submits))


def _limit(submit: Operation) -> int:
    limit: int | None = submit.asked("limit")
    return _UNLIMITED if limit is None else limit


def _never_over_the_limit(user: tuple[str, ...], slots: Sequence[Slot]) -> Iterator[Violation]:
    """Count the slots that are surely in use at each moment at which one more surely is."""
    for latest in sorted(slots, key=lambda each: each.sure_from):
        at = latest.sure_from
        used = [each for each in slots if each.sure_from <= at < each.sure_until]
        limit = max((each.limit for each in used), default=_UNLIMITED)
        if len(used) > limit:
            said = f"{len(used)} slots are in use at {at / 1e9:.6f}, and the limit is {limit}"
            yield Violation("over-the-limit", "quota", user, said, tuple(each.by for each in used))
            return


def _no_slot_is_lost(
    user: tuple[str, ...], operations: Sequence[Operation], slots: Sequence[Slot]
) -> Iterator[Violation]:
    """Nobody is refused while a slot is free."""
    for each in operations:
        refused = each.verb == "reserve" and each.answered and each.told("reservation") is None
        if not refused and not (each.verb == "submit" and each.told("refused")):
            continue
        used = [slot for slot in slots if slot.by is not each and slot.from_ <= each.ended and slot.until >= each.began]
        if len(used) < (each.asked("limit") or 0):
            said = f"a slot was refused, although at most {len(used)} of {each.asked('limit')} were in use"
            yield Violation("slot-lost", "quota", user, said, (each, *(slot.by for slot in used)))


def _counted(user: tuple[str, ...], operations: Sequence[Operation], slots: Sequence[Slot]) -> Iterator[Violation]:
    """What usage tells lies between what is surely and what is perhaps in use: zero, when everything has ended."""
    for each in operations:
        if each.verb != "usage" or not each.answered:
            continue
        told = each.told("concurrent")
        least = sum(slot.sure_from <= each.began and each.ended <= slot.sure_until for slot in slots)
        perhaps = [slot.by for slot in slots if slot.from_ <= each.ended and slot.until >= each.began]
        if not least <= told <= len(perhaps):
            between = f"{least}" if least == len(perhaps) else f"from {least} to {len(perhaps)}"
            said = f"{told} slots are said to be in use, and {between} can be"
            yield Violation("usage-wrong", "quota", user, said, (each, *perhaps[:5]))


def _free_at_the_end(
    user: tuple[str, ...],
    operations: Sequence[Operation],
    submits: Sequence[Operation],
    runs: dict[str, list[Operation]],
) -> Iterator[Violation]:
    """The last usage, if nothing was done after it, is zero."""
    done = [each for each in (*operations, *submits) if each.verb != "usage"]
    for run in {each.told("run") for each in submits if each.told("run")}:
        done += [
            each for each in runs[run] if each.verb not in ("get", "effect") and each.told("accepted") is not False
        ]
    last_done = max((each.ended if each.answered else each.began for each in done), default=0)
    usages = [each for each in operations if each.verb == "usage" and each.answered and each.began > last_done]
    last = max(usages, key=lambda each: each.ended, default=None)
    if last is not None and last.told("concurrent"):
        said = f"{last.told('concurrent')} slots are in use at the end, although everything has ended"
        yield Violation("slots-left", "quota", user, said, (last,))


def _given_back_once(user: tuple[str, ...], operations: Sequence[Operation]) -> Iterator[Violation]:
    """A reservation is released, or becomes one job; never both, and never twice."""
    first: dict[str, Operation] = {}
    for each in operations:
        if each.verb not in ("consume", "release") or not each.told("accepted"):
            continue
        other = first.setdefault(each.asked("reservation"), each)
        same = each.verb == other.verb == "consume" and each.asked("job") == other.asked("job")
        if other is not each and not same:
            said = f"the reservation {each.asked('reservation')} was given back twice: {other.verb}, and {each.verb}"
            yield Violation("given-back-twice", "quota", user, said, (other, each))
