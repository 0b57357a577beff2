"""A guarded function runs once per key: whose key it is, what is replayed, and what a failure leaves behind."""

import asyncio
import functools
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from semel import (
    AsyncOnce,
    ClaimLost,
    Granted,
    InProgress,
    InvalidRequest,
    KeyReused,
    NotDone,
    Once,
    OriginalFailed,
    OutcomeGone,
    OutcomeUnknown,
    Policy,
    Replay,
    SemelError,
    Unfingerprintable,
    current_claim,
    fingerprint,
)
from semel.once.guard import current_claim_set
from semel.testing import FakeClock
from support.databases import KINDS, StoreUrls

PATIENCE = 60
"""Seconds after which something that should have happened counts as hanging."""

names = count()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def once(clock: FakeClock) -> Iterator[Once]:
    with Once("memory://", clock=clock) as once:
        yield once


class Noted:
    """A function that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, order: Any, amount: int = 1, *, note: str = "") -> int:
        self.calls.append((order, amount, note))
        return len(self.calls)


# -- the key of a call -----------------------------------------------------------------------------------------------


def price(order: dict[str, Any], amount: int = 1, *, note: str = "") -> list[Any]:
    return [order, amount, note, current_claim().fence]


def test_the_same_arguments_are_the_same_call_however_they_are_written(once: Once) -> None:
    """Positional, by name, as a default, in another order inside: one key, which is their fingerprint."""
    guarded = once.guard(price)
    first = guarded.call({"a": 1, "b": 2})
    assert not first.replayed
    assert first.key == fingerprint({"order": {"a": 1, "b": 2}, "amount": 1, "note": ""})
    for again in (
        guarded.call({"b": 2, "a": 1}),
        guarded.call(order={"a": 1, "b": 2}),
        guarded.call({"a": 1.0, "b": 2}, 1),
        guarded.call({"a": 1, "b": 2}, amount=1, note=""),
    ):
        assert (again.replayed, again.value, again.key) == (True, first.value, first.key)
    assert not guarded.call({"a": 1, "b": 3}).replayed
    assert not guarded.call({"a": 1, "b": 2}, 2).replayed


def test_what_does_not_belong_to_the_question_is_excluded(once: Once) -> None:
    """A whole argument, or a path into one."""
    guarded = once.guard(exclude=["note", ("order", "sent_at")])(price)
    assert not guarded.call({"id": 1, "sent_at": "now"}, note="first").replayed
    assert guarded.call({"id": 1, "sent_at": "later"}, note="second").replayed
    assert not guarded.call({"id": 2, "sent_at": "now"}, note="first").replayed


def test_exclusions_may_come_from_any_iterable(once: Once) -> None:
    """Also one that can be walked over only once."""
    guarded = once.guard(exclude=iter(["note"]))(price)
    assert [guarded.call({}, note=note).replayed for note in ("a", "b", "c")] == [False, True, True]


def test_a_key_of_ones_own_is_watched_by_the_fingerprint(once: Once) -> None:
    """One key with other arguments is a mistake, and is said."""
    guarded = once.guard(key=lambda order, *_, **__: order["id"])(price)
    first = guarded.call({"id": "order-1"})
    assert first.key == "order-1"
    with pytest.raises(KeyReused, match="order-1"):
        guarded({"id": "order-1", "changed": True})
    assert guarded.call({"id": "order-1"}).replayed


def test_a_key_may_be_trusted_alone(once: Once) -> None:
    guarded = once.guard(key=lambda order, *_, **__: order["id"], fingerprint=False)(price)
    guarded({"id": "order-1"})
    assert guarded.call({"id": "order-1", "changed": True}).replayed


def test_a_fingerprint_may_be_made_by_hand(once: Once) -> None:
    guarded = once.guard(key=lambda order: order["id"], fingerprint=lambda order: f"mine {order['total']}")(
        lambda order: order
    )
    guarded({"id": "1", "total": 5, "seen": 1})
    assert guarded.call({"id": "1", "total": 5, "seen": 2}).replayed
    with pytest.raises(KeyReused):
        guarded({"id": "1", "total": 6})


def test_arguments_that_have_no_fingerprint_need_a_key(once: Once) -> None:
    with pytest.raises(Unfingerprintable):
        once.guard(price)({"when": object()})
    guarded = once.guard(key=lambda order: "k", fingerprint=False)(lambda order: 7)
    assert guarded({"when": object()}) == 7


def test_two_functions_do_not_share_keys_unless_they_share_a_scope(once: Once) -> None:
    def one(number: int) -> str:
        return "one"

    def two(number: int) -> str:
        return "two"

    assert (once.guard(one)(1), once.guard(two)(1)) == ("one", "two")
    shared = [once.guard(scope="shared")(function) for function in (one, two)]
    assert [guarded(1) for guarded in shared] == ["one", "one"]


def test_a_guarded_function_looks_like_itself(once: Once) -> None:
    guarded = once.guard(price)
    assert guarded.__name__ == "price"  # type: ignore[attr-defined]
    assert guarded.__doc__ == price.__doc__
    assert guarded.__wrapped__ is price  # type: ignore[attr-defined]


module_once = Once("memory://", collect=False)


@module_once.guard
def by_name(number: int) -> int:
    return number


def test_a_guarded_function_of_a_module_is_pickled_by_its_name() -> None:
    """So that it can be sent to a pool of processes or a job queue."""
    assert pickle.loads(pickle.dumps(by_name)) is by_name


async_once = AsyncOnce("memory://", collect=False)


@async_once.guard
async def awaited_by_name(number: int) -> int:
    """A docstring."""
    return number


def test_a_guarded_async_function_looks_like_itself_and_is_pickled_by_its_name() -> None:
    assert (awaited_by_name.__name__, awaited_by_name.__doc__) == ("awaited_by_name", "A docstring.")  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(awaited_by_name)) is awaited_by_name


@dataclass
class Account:
    number: int

    def charge(self, amount: int) -> list[int]:
        return [self.number, amount]


def test_methods_are_guarded_too(once: Once) -> None:
    """The key function is given the instance, like the method itself."""

    class Ledger:
        def __init__(self, number: int) -> None:
            self.number = number
            self.ran = 0

        @once.guard(key=lambda self, order: f"{self.number} {order}", fingerprint=False)
        def book(self, order: str) -> list[Any]:
            self.ran += 1
            return [self.number, order]

    one, two = Ledger(1), Ledger(2)
    assert one.book("a") == one.book("a") == [1, "a"]
    assert two.book("a") == [2, "a"]
    assert two.book.call("a").replayed
    assert (one.ran, two.ran) == (1, 1)


def test_an_object_behind_a_key_need_not_have_a_fingerprint(once: Once) -> None:
    """The key says which object it is; the other arguments are still compared."""

    class Ledger:
        @once.guard(scope="ledger", key=lambda self, order, total: order)
        def book(self, order: str, total: int) -> int:
            return total

    assert Ledger().book("a", 5) == 5
    assert Ledger().book.call("a", 5).replayed
    with pytest.raises(KeyReused):
        Ledger().book("a", 6)


def test_two_instances_are_not_one(once: Once) -> None:
    """Without a key function the arguments decide, and who `self` is matters: it is not passed over in silence."""
    guarded: Any = once.guard(Account.charge)
    assert [guarded(Account(1), 5), guarded(Account(2), 5)] == [[1, 5], [2, 5]]


def test_an_instance_that_cannot_be_told_apart_asks_for_a_key(once: Once) -> None:
    class Opaque:
        @once.guard
        def charge(self, amount: int) -> int:
            return amount

    with pytest.raises(InvalidRequest, match="key=lambda self"):
        Opaque().charge(5)


def test_partials_and_callable_objects_are_guarded_too(once: Once) -> None:
    noted = Noted()
    guarded = once.guard(noted)
    assert [guarded("a"), guarded("a"), guarded("b")] == [1, 1, 2]
    part = once.guard(scope="partial")(functools.partial(noted, "c", amount=5))
    assert [part(), part()] == [3, 3]


def test_a_piece_of_work_needs_no_decorator(once: Once) -> None:
    result = once.call("key", lambda: 7, scope="pieces")
    assert (result.value, result.replayed, result.key, result.scope) == (7, False, "key", "pieces")
    again = once.call("key", lambda: 8, scope="pieces")
    assert (again.value, again.replayed, again.fence) == (7, True, result.fence)
    once.call("other", int, fingerprint="1:a")
    with pytest.raises(KeyReused):
        once.call("other", int, fingerprint="1:b")


# -- what is replayed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [None, False, 0, "", [], {}, b"", 0.0, (1, (2,)), 2**70, {"a": {1: {2}}}], ids=repr)
def test_every_value_is_replayed_as_it_was(urls: StoreUrls, kind: str, value: Any) -> None:
    """Nothing is taken for "no value": what is falsy is as good as the rest."""
    key = f"key {next(names)}"
    with Once(urls[kind], collect=False) as once:
        assert once.call(key, lambda: value).value == value
        replay = once.call(key, lambda: "again")
        assert replay.replayed
        assert replay.value == value
        assert type(replay.value) is type(value)


def test_nobody_can_change_what_others_are_given(once: Once) -> None:
    guarded = once.guard(scope="list")(lambda: {"items": [1]})
    guarded()["items"].append(2)
    guarded()["items"].append(3)
    assert guarded() == {"items": [1]}


def test_retention_ends_and_the_work_is_done_again(once: Once, clock: FakeClock) -> None:
    noted = Noted()
    guarded = once.guard(ttl=60)(noted)
    guarded("a")
    clock.advance(60)
    assert guarded("a") == 1
    clock.advance(0.000001)
    assert guarded("a") == 2


def test_a_value_may_be_kept_for_less_long_than_its_key(once: Once, clock: FakeClock) -> None:
    """Then the work is known to be done, and never done again, though its value is gone."""
    noted = Noted()
    guarded = once.guard(ttl=600, value_ttl=60)(noted)
    guarded("a")
    clock.advance(60)
    assert guarded("a") == 1
    clock.advance(1)
    for _ in range(2):
        with pytest.raises(OutcomeGone, match="will not be done again"):
            guarded("a")
        once.purge()
    assert len(noted.calls) == 1
    clock.advance(600)
    assert guarded("a") == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_tombstone_stays_on_every_store(urls: StoreUrls, kind: str) -> None:
    clock = FakeClock()
    key = f"key {next(names)}"
    with Once(urls[kind], clock=clock, collect=False) as once:
        once.call(key, lambda: "secret", ttl=6000, value_ttl=600)
        clock.advance(601)
        with pytest.raises(OutcomeGone):
            once.call(key, str)
        assert once.purge() >= 1
        with pytest.raises(OutcomeGone):
            once.call(key, str)
        verdict = once.claim(key)
        assert isinstance(verdict, Replay)
        assert verdict.outcome.gone


# -- what a failure leaves behind ------------------------------------------------------------------------------------


class Failing:
    """It fails so many times, then works."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.ran = 0

    def __call__(self) -> str:
        self.ran += 1
        if self.errors:
            raise self.errors.pop(0)
        return "worked"


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_gives_the_key_back(urls: StoreUrls, kind: str) -> None:
    key = f"key {next(names)}"
    work = Failing(ValueError("no"), KeyError("never"))
    with Once(urls[kind], collect=False) as once:
        with pytest.raises(ValueError, match="no"):
            once.call(key, work)
        assert once.get(key) is None
        with pytest.raises(KeyError):
            once.call(key, work)
        assert once.call(key, work).value == "worked"
    assert work.ran == 3


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=lambda error: type(error).__name__
)
def test_an_interruption_gives_the_key_back_whatever_the_policy(once: Once, error: BaseException) -> None:
    """Someone stopped the program: that is not the work's own failure, so it is not kept."""
    work = Failing(error)
    with pytest.raises(type(error)):
        once.call("key", work, on_error="keep")
    assert once.call("key", work, on_error="keep").value == "worked"


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_may_be_kept_and_is_replayed_by_name(urls: StoreUrls, kind: str) -> None:
    """Its type and text are told, not its object: it is raised as OriginalFailed."""
    key = f"key {next(names)}"
    work = Failing(ValueError("the card was declined"))
    with Once(urls[kind], collect=False, policy=Policy(on_error="keep")) as once:
        with pytest.raises(ValueError, match="declined"):
            once.call(key, work)
        for _ in range(2):
            with pytest.raises(OriginalFailed, match="ValueError: the card was declined") as replayed:
                once.call(key, work)
            assert (replayed.value.error, replayed.value.message) == ("ValueError", "the card was declined")
    assert work.ran == 1


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


@pytest.mark.parametrize(
    "error", [ValueError("\ud800"), Unspeakable(), ValueError("x" * 100_000)], ids=["half", "none", "long"]
)
def test_keeping_a_failure_never_hides_it(once: Once, error: Exception) -> None:
    work = Failing(error)
    with pytest.raises(type(error)):
        once.call("key", work, on_error="keep")
    with pytest.raises(OriginalFailed):
        once.call("key", work, on_error="keep")


def test_a_failure_that_cannot_be_given_back_is_still_the_callers_error(
    once: Once, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The claim was taken over meanwhile; the caller gets what its own work raised, and the log the rest."""

    def work() -> None:
        clock.advance(61)
        assert once.call("key", lambda: "the new owner's").value == "the new owner's"
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        once.call("key", work, renew=False)
    assert "could not be recorded" in caplog.text
    assert once.call("key", str).value == "the new owner's"


def test_a_zombies_value_is_not_recorded(once: Once, clock: FakeClock) -> None:
    def work() -> str:
        clock.advance(61)
        once.call("key", lambda: "the new owner's")
        return "the zombie's"

    with pytest.raises(ClaimLost, match="do not publish"):
        once.call("key", work, renew=False)
    assert once.call("key", str).value == "the new owner's"


def test_work_that_completes_its_own_claim_is_left_as_it_completed_it(once: Once) -> None:
    """A handler may complete inside its own transaction; what the function returns later changes nothing."""

    def work() -> str:
        once.complete(current_claim(), "completed inside")
        return "returned"

    assert once.call("key", work).value == "returned"
    assert once.call("key", str).value == "completed inside"


def test_a_call_inside_its_own_key_does_not_wait_for_itself_for_ever(once: Once) -> None:
    def work() -> str:
        with pytest.raises(InProgress):
            once.call("key", str, wait=0.05)
        return once.call("another key", lambda: "nested").value

    assert once.call("key", work).value == "nested"


# -- an unknown outcome ----------------------------------------------------------------------------------------------


class Reconciled:
    """A function whose owner vanished, and a hook that looks at what became of its work."""

    def __init__(self, once: Once, clock: FakeClock) -> None:
        self.once, self.clock = once, clock
        self.ran = self.asked = 0
        self.answer: Any = "found"
        self.guarded = once.guard(scope="scope", key=lambda: "key", on_crash="unknown", reconcile=self._look)(
            self._work
        )
        assert isinstance(once.claim("key", scope="scope", lease=60, on_crash="unknown"), Granted)
        clock.advance(60)

    def _work(self) -> str:
        self.ran += 1
        return "worked"

    def _look(self) -> str:
        self.asked += 1
        assert len(self.once._engine._background.here().renewer.watched()) == 1
        if isinstance(self.answer, BaseException):
            raise self.answer
        return str(self.answer)


@pytest.fixture
def reconciled(once: Once, clock: FakeClock) -> Reconciled:
    return Reconciled(once, clock)


def test_what_the_hook_finds_is_the_outcome_from_then_on(reconciled: Reconciled) -> None:
    for _ in range(2):
        result = reconciled.guarded.call()
        assert (result.value, result.replayed) == ("found", True)
    assert (reconciled.asked, reconciled.ran) == (1, 0)


def test_if_the_hook_finds_nothing_the_function_runs(reconciled: Reconciled) -> None:
    reconciled.answer = NotDone()
    assert [reconciled.guarded.call().replayed for _ in range(2)] == [False, True]
    assert (reconciled.asked, reconciled.ran) == (1, 1)


def test_if_the_hook_fails_the_outcome_stays_unknown(reconciled: Reconciled) -> None:
    reconciled.answer = ConnectionError("the bank does not answer")
    with pytest.raises(ConnectionError):
        reconciled.guarded()
    assert reconciled.once._engine._background.here().renewer.watched() == []
    reconciled.clock.advance(60)
    with pytest.raises(OutcomeUnknown):
        reconciled.once.call("key", str, scope="scope")
    reconciled.answer = "found later"
    assert reconciled.guarded() == "found later"
    assert reconciled.ran == 0


def test_the_hook_is_not_asked_where_nothing_is_unknown(once: Once) -> None:
    guarded = once.guard(scope="scope", reconcile=lambda: pytest.fail("asked"))(lambda: "worked")
    assert [guarded(), guarded()] == ["worked", "worked"]


def test_a_plain_function_that_returns_a_coroutine_is_refused_and_its_key_released(once: Once) -> None:
    async def work() -> None: ...

    def plain() -> Any:
        return work()

    with pytest.raises(InvalidRequest, match="is async; Once guards plain functions"):
        once.call("key", plain)
    assert once.get("key") is None


# -- the current claim -----------------------------------------------------------------------------------------------


def test_there_is_no_current_claim_outside(once: Once) -> None:
    with pytest.raises(SemelError, match="outside of a guarded call"):
        current_claim()
    once.call("key", lambda: current_claim().key)
    with pytest.raises(SemelError):
        current_claim()
    with pytest.raises(ZeroDivisionError):
        once.call("other", lambda: 1 // 0)
    with pytest.raises(SemelError):
        current_claim()


def test_a_default_is_returned_where_there_is_no_current_claim(once: Once) -> None:
    assert current_claim("none") == "none"
    assert once.call("key", lambda: current_claim("none").key).value == "key"  # type: ignore[union-attr]


def test_a_claim_is_the_current_one_inside_its_context_alone(once: Once) -> None:
    """As the middleware sets it."""
    verdict = once.claim("key")
    assert isinstance(verdict, Granted)
    with current_claim_set(verdict.claim):
        assert current_claim() is verdict.claim
    assert current_claim(None) is None


def test_the_current_claim_is_that_of_the_innermost_call(once: Once) -> None:
    def outer() -> list[str]:
        before = current_claim().key
        inner = once.call("inner", lambda: current_claim().key).value
        return [before, inner, current_claim().key]

    assert once.call("outer", outer).value == ["outer", "inner", "outer"]


def test_each_thread_has_its_own_current_claim(once: Once) -> None:
    together = threading.Barrier(8)

    def work() -> list[Any]:
        first = current_claim()
        together.wait(PATIENCE)  # all are inside at the same time
        return [first.key, current_claim().key, current_claim().fence]

    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(once.call, f"key {number}", work) for number in range(8)]
        results = [call.result(PATIENCE) for call in calls]
    assert [result.value for result in results] == [[f"key {at}", f"key {at}", results[at].fence] for at in range(8)]


def test_a_thread_started_inside_knows_the_claim_if_it_is_given_the_context(once: Once) -> None:
    def work() -> str:
        with ThreadPoolExecutor(1) as thread:
            with pytest.raises(SemelError):
                thread.submit(current_claim).result(PATIENCE)
            return thread.submit(copy_context().run, current_claim).result(PATIENCE).key

    assert once.call("key", work).value == "key"


def test_each_task_has_its_own_current_claim() -> None:
    """And the tasks that it starts inherit it."""

    async def scenario() -> None:
        everyone = asyncio.Barrier(8)

        async def child() -> str:
            return current_claim().key

        async def work() -> list[str]:
            first = current_claim().key
            await everyone.wait()
            inherited = await asyncio.gather(child(), asyncio.to_thread(lambda: current_claim().key))
            return [first, *inherited, current_claim().key]

        async with AsyncOnce("memory://") as once:
            results = await asyncio.gather(*(once.call(f"key {number}", work) for number in range(8)))
            assert [result.value for result in results] == [[f"key {at}"] * 4 for at in range(8)]
            with pytest.raises(SemelError):
                current_claim()

    asyncio.run(scenario())


# -- awaited ---------------------------------------------------------------------------------------------------------


def test_async_functions_are_guarded_alike() -> None:
    async def scenario() -> None:
        clock = FakeClock()
        ran: list[Any] = []

        async def work(order: dict[str, Any], *, note: str = "") -> int:
            ran.append(order)
            await asyncio.sleep(0)
            if order.get("fails"):
                raise ValueError(note)
            return len(ran)

        async with AsyncOnce("memory://", clock=clock) as once:
            guarded = once.guard(exclude=["note"], ttl=60)(work)
            assert [await guarded({"id": 1}), await guarded({"id": 1}, note="x"), await guarded({"id": 2})] == [1, 1, 2]
            assert (await guarded.call({"id": 1})).replayed
            for _ in range(2):
                with pytest.raises(ValueError, match="oops"):
                    await guarded({"fails": True}, note="oops")
            kept = once.guard(scope="kept", on_error="keep")(work)
            with pytest.raises(ValueError, match="kept"):
                await kept({"fails": True}, note="kept")
            with pytest.raises(OriginalFailed):
                await kept({"fails": True}, note="kept")
            clock.advance(61)
            assert await guarded({"id": 1}) == 6
            assert (await once.call("key", lambda: work({"id": 3}))).value == 7
            together = await asyncio.gather(*(guarded({"id": 9}) for _ in range(20)))
            assert set(together) == {8}

    asyncio.run(scenario())


def test_async_methods_are_guarded_too() -> None:
    async def scenario() -> None:
        async with AsyncOnce("memory://") as once:

            class Ledger:
                @once.guard(key=lambda self, order: order, fingerprint=False)
                async def book(self, order: str) -> str:
                    return f"booked {order}"

            ledger = Ledger()
            assert await ledger.book("a") == "booked a"
            assert (await ledger.book.call("a")).replayed

    asyncio.run(scenario())


# -- messages --------------------------------------------------------------------------------------------------------


def handler_for(once: Once, seen: list[str], **options: Any) -> Callable[[dict[str, Any]], Any]:
    @once.consumer("assignment_id", key=lambda message: message["assignment_id"] or message["request_id"], **options)
    def handle(message: dict[str, Any]) -> str:
        seen.append(message["request_id"])
        if message.get("fails"):
            raise ValueError("not now")
        return "handled"

    return handle


def test_a_message_is_handled_once(once: Once) -> None:
    seen: list[str] = []
    handle = handler_for(once, seen, data=lambda message: {"from": message["request_id"]})
    message = {"assignment_id": "a-1", "request_id": "r-1"}
    assert handle(message) == "handled"
    assert handle(message) is None
    assert handle(message | {"request_id": "r-2"}) is None
    assert seen == ["r-1"]
    record = once.get("a-1", scope="assignment_id")
    assert record is not None
    assert (record.message_id, record.key_type, record.additional_data) == ("a-1", "assignment_id", {"from": "r-1"})
    assert record.processed_at is not None


def test_a_message_that_failed_is_unseen(once: Once) -> None:
    seen: list[str] = []
    handle = handler_for(once, seen)
    for fails in (True, True, False, True):
        try:
            handle({"assignment_id": None, "request_id": "r-1", "fails": fails})
        except ValueError:
            assert fails
    assert seen == ["r-1"] * 3
    assert once.check_and_mark("assignment_id", "r-1") == "seen"


def test_a_message_in_hand_elsewhere_is_not_acknowledged(once: Once) -> None:
    once.claim("a-1", scope="assignment_id")
    with pytest.raises(InProgress):
        handler_for(once, [], wait=0.05)({"assignment_id": "a-1", "request_id": "r-1"})


def test_a_builtin_without_a_signature_needs_a_key(once: Once) -> None:
    with pytest.raises(InvalidRequest, match="key="):
        once.guard(scope="dict")(dict)()
    assert once.guard(scope="dict", key=lambda: "k", fingerprint=False)(dict)() == {}
