"""B, what goes beyond the documents: fences, unknown outcomes, tombstones, lost replies, company, waiting."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from asyncio import TimerHandle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, Text, create_engine, func, make_url, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from acceptance.broken_stores import BROKEN
from acceptance.own_store import DictStore
from acceptance.pace import paced
from acceptance.proxy import line_to
from acceptance.spaces import Space
from acceptance.together import PATIENCE, beside, in_tasks, in_threads
from acceptance.wrapped import Gated, LoopGated, Noting
from semel import (
    AsyncOnce,
    Claim,
    ClaimLost,
    Granted,
    InFlight,
    InProgress,
    InvalidRequest,
    KeyReused,
    Mismatch,
    NotDone,
    Once,
    OutcomeGone,
    OutcomeUnknown,
    Policy,
    Replay,
    StoreUnavailable,
    Unknown,
    current_claim,
    fingerprint,
)
from semel.fingerprint import VERSION
from semel.once.store import Clock, Store
from semel.once.stores.memory import MemoryStore
from semel.testing import FaultyStore, StoreSuite
from semel.testing.faulty_store import Verb
from support.warm_python import WarmPython

DAY = 86400
LEASE = Policy().lease


def granted(once: Once, key: str = "order-1", **asked: Any) -> Claim:
    """Claim a key that must be free."""
    verdict = once.claim(key, **asked)
    assert isinstance(verdict, Granted)
    return verdict.claim


def replayed(once: Once, key: str = "order-1") -> Any:
    """The value of a key that must be done."""
    verdict = once.claim(key)
    assert isinstance(verdict, Replay)
    return verdict.outcome.value


# -- B1 ------------------------------------------------------------------------------------------------------------


def test_b1_every_claim_has_a_greater_fence_than_all_before(once: Once, space: Space) -> None:
    """Whether the last owner was done, gave up, vanished, or is forgotten and its record removed."""
    fences = [granted(once).fence]
    space.clock.advance(LEASE)
    lost = granted(once)
    fences.append(lost.fence)
    once.release(lost)
    done = granted(once, ttl=10)
    fences.append(done.fence)
    once.complete(done)
    space.clock.advance(11)
    assert once.purge() >= 1
    fences.append(granted(once).fence)
    assert fences == sorted(set(fences))


def test_b1_fences_grow_in_the_order_of_the_owners(space: Space) -> None:
    """Four workers with connections of their own pass one key from hand to hand."""
    workers = [space.open() for _ in range(4)]
    fences: list[int] = []

    def work(at: int) -> None:
        for _ in range(5):
            while not isinstance(verdict := workers[at].claim("handed on"), Granted):
                assert isinstance(verdict, InFlight)
            fences.append(verdict.claim.fence)
            workers[at].release(verdict.claim)

    in_threads(4, work)
    assert len(fences) == 20
    assert fences == sorted(set(fences))


def test_b1_the_fence_is_handed_to_user_code(once: Once) -> None:
    written: list[int] = []

    @once.guard(key=lambda order: order["id"])
    def ship(order: dict[str, str]) -> int:
        written.append(current_claim().fence)
        return current_claim().fence

    first = ship.call({"id": "order-1"})
    again = ship.call({"id": "order-1"})
    other = ship.call({"id": "order-2"})
    assert first.fence == again.fence == first.value
    assert written == [first.fence, other.fence]


def test_b1_a_stale_fence_can_write_nothing(once: Once, space: Space) -> None:
    """A zombie wakes up after its key was taken over: every verb refuses it, and the new owner notices nothing."""
    zombie = granted(once)
    space.clock.advance(LEASE)
    owner = granted(once)
    for write in (once.renew, once.release, lambda claim: once.complete(claim, "zombie")):
        with pytest.raises(ClaimLost):
            write(zombie)
    record = once.get("order-1")
    assert record is not None
    assert (record.fence, record.status) == (owner.fence, "in_flight")
    once.complete(once.renew(owner), "owner")
    for write in (once.renew, once.release, lambda claim: once.complete(claim, "zombie")):
        with pytest.raises(ClaimLost):
            write(zombie)
    assert replayed(once) == "owner"


@pytest.mark.parametrize("kind", ["redis", "postgres"])
def test_b1_leases_are_judged_by_the_clock_of_the_store(
    kind: str, space_of: Callable[[str], Space], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client whose clock is a day ahead, or behind, gets no other answer, and cannot stretch its lease."""
    once = space_of(kind).open(clock=None)
    claim = granted(once)
    real = time.time_ns
    for shift in (DAY, -DAY):
        with monkeypatch.context() as clocks:
            clocks.setattr(time, "time_ns", lambda: real() + shift * 10**9)  # noqa: B023 -- used at once
            clocks.setattr(time, "time", lambda: real() / 1e9 + shift)  # noqa: B023
            verdict = once.claim("order-1")
            assert isinstance(verdict, InFlight)
            assert 0 < verdict.retry_after <= LEASE
            claim = once.renew(claim)
        assert abs(claim.lease_until.timestamp() - time.time()) < LEASE + PATIENCE
    once.complete(claim)


# -- B2 ------------------------------------------------------------------------------------------------------------


def vanished(once: Once, space: Space) -> Claim:
    """A claim whose owner did not come back, of a kind that must not simply be run again."""
    claim = granted(once, on_crash="unknown")
    space.clock.advance(LEASE)
    return claim


def test_b2_a_vanished_owner_leaves_an_unknown_outcome(once: Once, space: Space) -> None:
    lost = vanished(once, space)
    verdict = once.claim("order-1", on_crash="unknown")
    assert isinstance(verdict, Unknown)
    assert verdict.fence == lost.fence
    assert isinstance(once.claim("order-1"), Unknown), "who would run it again does not know what was lost"
    with pytest.raises(OutcomeUnknown):
        once.call("order-1", lambda: pytest.fail("run blindly"))
    record = once.get("order-1")
    assert record is not None
    assert record.status == "unknown"
    stats = once.stats()
    assert stats.held.unknown == 1
    assert any("resolve" in warning for warning in stats.warnings)


@pytest.mark.parametrize("done", [True, False], ids=["it happened", "it did not"])
def test_b2_an_operator_resolves_it(once: Once, space: Space, done: bool) -> None:
    lost = vanished(once, space)
    once.resolve("order-1", done=done, value="paid" if done else None)
    with pytest.raises(ClaimLost):
        once.complete(lost, "from the grave")
    result = once.call("order-1", lambda: "paid now", scope="default")
    assert (result.value, result.replayed) == (("paid", True) if done else ("paid now", False))
    with pytest.raises(InvalidRequest):
        once.resolve("order-1", done=True)


def test_b2_a_reconcile_hook_decides_instead(once: Once, space: Space) -> None:
    """It says what came of the work, says that it did not happen, or fails and leaves the question open."""
    ledger: dict[str, str] = {}
    runs: list[str] = []

    def look(order: str) -> str:
        if order not in ledger:
            raise NotDone
        if ledger[order] == "unreadable":
            raise ConnectionError("the bank does not answer")
        return ledger[order]

    @once.guard(scope="default", key=lambda order: order, on_crash="unknown", reconcile=look, fingerprint=False)
    def pay(order: str) -> str:
        runs.append(order)
        return "paid now"

    for order in ("happened", "did not", "cannot tell"):
        granted(once, order, on_crash="unknown")
    space.clock.advance(LEASE)
    ledger |= {"happened": "paid before", "cannot tell": "unreadable"}

    found = pay.call("happened")
    assert (found.value, found.replayed) == ("paid before", True)
    assert pay("did not") == "paid now"
    with pytest.raises(ConnectionError):
        pay("cannot tell")
    assert runs == ["did not"]
    space.clock.advance(LEASE)
    assert isinstance(once.claim("cannot tell"), Unknown)
    ledger["cannot tell"] = "paid long ago"
    assert pay("cannot tell") == "paid long ago"
    assert [pay(order) for order in ledger] == ["paid before", "paid long ago"]
    assert runs == ["did not"]


@contextmanager
def killed(url: str, key: str, on_crash: str) -> Iterator[int]:
    """A worker in a process of its own that was killed in the middle of its work; gives the fence that it had."""
    script = Path(__file__).with_name("vanishing.py")
    with WarmPython([sys.executable, str(script), url, key, on_crash], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        fence = int(worker.stdout.readline())
        worker.send_signal(signal.SIGKILL)
    yield fence


def test_b2_a_killed_process_leaves_an_unknown_outcome(shared_space: Space) -> None:
    once = shared_space.open()
    with killed(shared_space.url, "order-1", "unknown") as fence:
        assert isinstance(once.claim("order-1"), InFlight), "its lease stands"
        shared_space.clock.advance(LEASE)
        verdict = once.claim("order-1")
        assert isinstance(verdict, Unknown)
        assert verdict.fence == fence


# -- B5 ------------------------------------------------------------------------------------------------------------


def test_b5_the_key_outlives_its_value(space: Space) -> None:
    """Unique for thirty days, with the body for one; on every store the body goes without anybody asking."""
    once, pace = paced(space, policy=Policy(ttl=30 * DAY, value_ttl=DAY))
    runs: list[str] = []

    @once.guard(scope="default", key=lambda: "order-1", renew=False)
    def ship() -> bytes:
        runs.append("shipped")
        return b"a large label"

    ship()
    space.clock.advance(DAY)
    assert ship() == b"a large label"
    space.clock.advance(1)
    with pytest.raises(OutcomeGone):
        ship()
    verdict = once.claim("order-1", fingerprint=fingerprint({}))
    assert isinstance(verdict, Replay)
    assert verdict.outcome.gone

    pace.pause()
    pace.wake()
    pace.pause()
    record = once.get("order-1")
    assert record is not None
    assert record.data is None, "the body is no longer stored"
    assert record.status == "completed"

    space.clock.advance(29 * DAY - 2)
    with pytest.raises(OutcomeGone):
        ship()
    assert runs == ["shipped"]
    space.clock.advance(2)
    assert ship() == b"a large label"
    assert runs == ["shipped", "shipped"]


# -- B6 ------------------------------------------------------------------------------------------------------------


def test_b6_the_fingerprint_in_the_record_names_its_version(once: Once) -> None:
    asked = fingerprint({"amount": 7})
    once.complete(granted(once, fingerprint=asked))
    record = once.get("order-1")
    assert record is not None
    assert record.fingerprint == asked
    assert record.fingerprint.startswith(f"{VERSION}:")


def test_b6_a_new_version_does_not_break_keys_in_flight(once: Once) -> None:
    """A release that hashes otherwise meets the keys of the one before: they cannot be compared, so they are equal."""
    new_version = f"{int(VERSION) + 1}:"
    once.complete(granted(once, fingerprint=fingerprint({"amount": 7})), "shipped")
    verdict = once.claim("order-1", fingerprint=new_version + "f" * 64)
    assert isinstance(verdict, Replay)
    assert verdict.outcome.value == "shipped"
    assert isinstance(once.claim("order-1", fingerprint=fingerprint({"amount": 8})), Mismatch)
    once.complete(granted(once, "order-2", fingerprint=new_version + "f" * 64))
    assert isinstance(once.claim("order-2", fingerprint=fingerprint({"amount": 7})), Replay)
    assert isinstance(once.claim("order-2", fingerprint=new_version + "e" * 64), Mismatch)
    with pytest.raises(KeyReused):
        once.call("order-2", lambda: None, fingerprint=new_version + "e" * 64)


# -- B8 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["claim", "complete", "renew", "release"])
def test_b8_a_verb_whose_reply_was_lost_recognises_itself(space: Space, verb: Verb) -> None:
    """It was carried out, nobody heard, and it is sent again: one claim, one fence, no false "in progress"."""
    faulty = FaultyStore(space.store())
    faulty.lose_reply(verb, 2)
    once = space.open(faulty)
    claim = granted(once)
    record = once.get("order-1")
    assert record is not None
    assert record.fence == claim.fence
    claim = once.renew(claim)
    if verb == "release":
        once.release(claim)
        assert once.get("order-1") is None
    else:
        once.complete(claim, "shipped")
    assert faulty.calls[verb] == 3, "two replies were lost"
    if verb != "release":
        assert replayed(once) == "shipped"


def test_b8_a_guarded_call_whose_every_reply_is_lost_once_runs_once(space: Space) -> None:
    faulty = FaultyStore(space.store())
    faulty.lose_reply("claim")
    faulty.lose_reply("complete")
    once = space.open(faulty)
    runs: list[int] = []
    result = once.call("order-1", lambda: runs.append(current_claim().fence))
    assert not result.replayed
    assert once.call("order-1", lambda: pytest.fail("run twice")).replayed
    assert runs == [result.fence]


@pytest.mark.parametrize("kind", ["redis", "postgres"])
def test_b8_a_line_that_is_cut_before_the_reply_grants_the_claim_all_the_same(
    kind: str, space_of: Callable[[str], Space]
) -> None:
    """A real connection to a real server, cut when the server has answered."""
    space = space_of(kind)
    with line_to(space.url) as (line, url), Once(url, clock=space.clock) as once:
        granted(once, "warm-up")
        line.lose_reply_to(b"order-1")
        claim = granted(once)
        assert line.cuts == 1
        line.lose_reply_to(b"order-1")
        once.complete(claim, "shipped")
        assert line.cuts == 2
        assert replayed(once) == "shipped"
    direct = space.open()
    record = direct.get("order-1")
    assert record is not None
    assert record.fence == claim.fence


# -- B15 -----------------------------------------------------------------------------------------------------------


def broken_rules(open_store: Callable[..., Store], *, all_of_them: bool) -> Iterator[str]:
    """Run the kit as a store's author would, and name the rules that the store breaks, or the first of them."""

    class Suite(StoreSuite):
        def open(self, clock: Clock | None) -> Store:
            return open_store(clock) if clock is not None else open_store()

    suite = Suite()
    for name in dir(suite):
        if name.startswith("test_"):
            try:
                with suite.new_world() as world:
                    getattr(suite, name)(world)
            except (AssertionError, ValueError):  # two winners where one was unpacked are a ValueError
                yield name
                if not all_of_them:
                    return


def test_b15_the_kit_accepts_a_strangers_store() -> None:
    assert list(broken_rules(DictStore, all_of_them=True)) == []


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_b15_the_kit_catches_a_broken_store(broken: type[DictStore]) -> None:
    assert list(broken_rules(broken, all_of_them=False)) != []


def test_b15_the_kit_injects_faults_into_any_store(space: Space) -> None:
    """A request that is lost, a reply that is lost, a store that is away: an error, and never a false grant."""
    faulty = FaultyStore(space.store())
    once = space.open(faulty, retry_for=0)
    for lose in (faulty.lose_request, faulty.lose_reply):
        lose("claim")
        with pytest.raises(StoreUnavailable):
            once.claim("order-1")
    deadline = time.monotonic() + 30
    while not isinstance(once.claim("order-1"), Granted):  # whose reply was lost is given back by itself
        assert time.monotonic() < deadline
    faulty.away = True
    with pytest.raises(StoreUnavailable):
        once.call("order-2", lambda: pytest.fail("ran without a grant"))
    faulty.away = False
    assert once.call("order-2", lambda: "shipped").value == "shipped"


# -- B16 -----------------------------------------------------------------------------------------------------------


def parked_in_the_lane(threads: list[threading.Thread]) -> bool:
    """True when every thread stands in the code that gathers calls."""
    frames = sys._current_frames()
    return all(
        (frame := frames.get(thread.ident or 0)) is not None
        and frame.f_code.co_filename.endswith("_concurrency/batching.py")
        for thread in threads
    )


def test_b16_threads_that_come_while_a_statement_is_under_way_leave_together(shared_space: Space) -> None:
    gated = Gated(shared_space.store())
    once = shared_space.open(gated)
    verdicts: list[Any] = []
    threads = [threading.Thread(target=lambda at=at: verdicts.append(once.claim(f"order-{at}"))) for at in range(64)]
    threads[0].start()
    assert gated.reached.wait(PATIENCE)
    for thread in threads[1:]:
        thread.start()
    deadline = time.monotonic() + PATIENCE
    while not parked_in_the_lane(threads[1:]) and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread that has fallen asleep gives no other sign
    gated.gate.set()
    for thread in threads:
        thread.join(PATIENCE)
    sizes = [size for verb, size in gated.seen if verb == "claim"]
    assert sizes[0] == 1, "the first one left at once"
    assert sum(sizes) == 64
    assert len(sizes) <= 4, "one for the rest, if none of them was a moment late"
    assert {verdict.claim.key for verdict in verdicts} == {f"order-{at}" for at in range(64)}


def test_b16_tasks_that_come_while_a_statement_is_under_way_leave_together(shared_space: Space) -> None:
    async def race() -> tuple[list[Any], list[tuple[str, int]]]:
        gated = LoopGated(shared_space.store(awaited=True))
        async with shared_space.open_async(gated) as once:
            first = asyncio.create_task(once.claim("order-0"))
            await gated.reached.wait()
            others = [asyncio.create_task(once.claim(f"order-{at}")) for at in range(1, 128)]
            await asyncio.sleep(0)  # each runs until it waits
            gated.gate.set()
            return await asyncio.gather(first, *others), gated.seen

    verdicts, seen = asyncio.run(race())
    assert seen == [("claim", 1), ("claim", 127)]
    assert [verdict.claim.key for verdict in verdicts] == [f"order-{at}" for at in range(128)]


def test_b16_the_callers_of_a_shared_statement_each_get_their_own_answer(shared_space: Space) -> None:
    """New, done, in flight and other content, all in one batch."""
    once = shared_space.open()
    once.complete(granted(once, "done"), "value")
    granted(once, "taken")
    granted(once, "other", fingerprint="1:" + "a" * 64)

    async def race() -> list[Any]:
        gated = LoopGated(shared_space.store(awaited=True))
        async with shared_space.open_async(gated) as tasks:
            first = asyncio.create_task(tasks.claim("first"))
            await gated.reached.wait()
            asked = [
                asyncio.create_task(tasks.claim(key, fingerprint="1:" + "b" * 64))
                for key in ("new", "done", "taken", "other", "twice", "twice")
            ]
            await asyncio.sleep(0)
            gated.gate.set()
            answers = await asyncio.gather(first, *asked)
            assert [size for _, size in gated.seen] == [1, 6]
            return answers[1:]

    new, done, taken, other, twice, again = asyncio.run(race())
    assert isinstance(new, Granted)
    assert new.claim.key == "new"
    assert isinstance(done, Replay)
    assert done.outcome.value == "value"
    assert isinstance(taken, InFlight)
    assert isinstance(other, Mismatch)
    assert {type(twice), type(again)} == {Granted, InFlight}


def test_b16_an_idle_store_is_asked_at_once(shared_space: Space) -> None:
    """Nobody waits for company: each lone call is a statement of its own."""
    noting = Noting(shared_space.store())
    once = shared_space.open(noting)
    for at in range(5):
        once.complete(granted(once, f"order-{at}"))
    assert noting.seen == [("claim", 1), ("complete", 1)] * 5


def test_b16_an_idle_lane_sets_no_timer() -> None:
    timers: list[float] = []

    class Watched(asyncio.SelectorEventLoop):
        def call_at(  # type: ignore[override]  # it passes on whatever it is given
            self, when: float, *args: Any, **kwargs: Any
        ) -> TimerHandle:
            if when - self.time() < 1:  # the call's deadline is later, and nobody waits for it
                timers.append(when)
            return super().call_at(when, *args, **kwargs)

    async def alone() -> None:
        noting = Noting(MemoryStore())
        async with AsyncOnce(noting, collect=False) as once:
            verdict = await once.claim("order-1")
            assert isinstance(verdict, Granted)
            await once.complete(verdict.claim)
        assert noting.seen == [("claim", 1), ("complete", 1)]

    with asyncio.Runner(loop_factory=Watched) as runner:
        runner.run(alone())
        assert timers == []


# -- B17 -----------------------------------------------------------------------------------------------------------

shipments = Table("shipments", MetaData(), Column("id", Integer, primary_key=True), Column("label", Text))
SHIP = shipments.insert().values(label="to Rome")
SHIPPED = select(func.count()).select_from(shipments)


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, space_of: Callable[[str], Space]) -> Iterator[Space]:
    """A database that holds the user's own table beside semel's."""
    space = space_of(request.param)
    engine = create_engine(with_driver(space.url))
    shipments.create(engine)
    yield space
    shipments.drop(engine)
    engine.dispose()


def with_driver(url: str, *, is_async: bool = False) -> Any:
    drivers = {"sqlite": ("pysqlite", "aiosqlite"), "postgresql": ("psycopg", "asyncpg")}
    address = make_url(url)
    return address.set(drivername=f"{address.drivername}+{drivers[address.drivername][is_async]}")


def test_b17_effect_and_record_commit_together(database: Space) -> None:
    once = database.open()
    engine = create_engine(with_driver(database.url))
    claim = granted(once)

    def ship(*, fail: bool) -> None:
        with Session(engine) as session, session.begin():
            session.execute(SHIP)
            once.on(session).complete(claim, "shipped")
            if fail:
                raise ConnectionError("before the commit")

    with pytest.raises(ConnectionError):
        ship(fail=True)
    with Session(engine) as session:
        assert session.scalar(SHIPPED) == 0
    assert isinstance(once.claim("order-1"), InFlight), "the record vanished with the effect"

    ship(fail=False)
    with engine.connect() as connection:
        assert connection.scalar(SHIPPED) == 1
    assert replayed(once) == "shipped"
    engine.dispose()


def test_b17_a_zombie_cannot_commit_its_effect(database: Space) -> None:
    """Its claim was taken over: completing raises in its transaction, so that its effect is rolled back."""
    once = database.open()
    engine = create_engine(with_driver(database.url))
    zombie = granted(once)
    database.clock.advance(LEASE)
    owner = granted(once)

    def ship(claim: Claim, value: str) -> None:
        with engine.begin() as connection:
            connection.execute(SHIP)
            once.on(connection).complete(claim, value)

    with pytest.raises(ClaimLost):
        ship(zombie, "zombie")
    with engine.connect() as connection:
        assert connection.scalar(SHIPPED) == 0
    ship(owner, "owner")
    assert replayed(once) == "owner"
    engine.dispose()


def test_b17_a_guarded_function_completes_its_claim_in_its_own_transaction(database: Space) -> None:
    """It commits effect and record, and fails afterwards: that cannot undo what was recorded."""
    once = database.open()
    engine = create_engine(with_driver(database.url))

    @once.guard(scope="default", key=lambda: "order-1")
    def ship() -> str:
        with Session(engine) as session, session.begin():
            session.execute(SHIP)
            once.on(session).complete(current_claim(), "shipped")
        raise ConnectionError("the reply to the customer was lost")

    with pytest.raises(ConnectionError):
        ship()
    assert ship() == "shipped"
    with engine.connect() as connection:
        assert connection.scalar(SHIPPED) == 1
    engine.dispose()


def test_b17_effect_and_record_commit_together_in_an_async_session(database: Space) -> None:
    async def ship(connection: AsyncConnection | AsyncSession, once: AsyncOnce, claim: Claim, *, fail: bool) -> None:
        async with connection, connection.begin():
            await connection.execute(SHIP)
            await once.on(connection).complete(claim, "shipped")
            if fail:
                raise ConnectionError("before the commit")

    async def scenario() -> None:
        engine = create_async_engine(with_driver(database.url, is_async=True))
        async with database.open_async() as once:
            verdict = await once.claim("order-1")
            assert isinstance(verdict, Granted)
            for connection in (AsyncSession(engine), engine.connect()):
                with pytest.raises(ConnectionError):
                    await ship(connection, once, verdict.claim, fail=True)
                assert isinstance(await once.claim("order-1"), InFlight)
            await ship(AsyncSession(engine), once, verdict.claim, fail=False)
            replay = await once.claim("order-1")
            assert isinstance(replay, Replay)
            assert replay.outcome.value == "shipped"
            async with engine.connect() as connection:
                assert await connection.scalar(SHIPPED) == 1
        await engine.dispose()

    asyncio.run(scenario())


# -- B18 -----------------------------------------------------------------------------------------------------------


def test_b18_a_duplicate_waits_for_the_first_ones_result(space: Space) -> None:
    """It stands at another ``Once``, as in another process, and runs nothing itself."""
    waiting = threading.Event()
    here, there = space.open(), space.open(Noting(space.store(), waiting))
    claim = granted(here)
    with beside(lambda: there.call("order-1", lambda: pytest.fail("run twice"))) as duplicate:
        assert waiting.wait(PATIENCE)
        assert not duplicate.done()
        here.complete(claim, "shipped")
        result = duplicate.result(PATIENCE)
    assert (result.value, result.replayed) == ("shipped", True)


def test_b18_a_claim_may_wait_too(space: Space) -> None:
    waiting = threading.Event()
    here, there = space.open(), space.open(Noting(space.store(), waiting))
    claim = granted(here)
    with beside(lambda: there.claim("order-1", wait=PATIENCE)) as duplicate:
        assert waiting.wait(PATIENCE)
        here.complete(claim, "shipped")
        verdict = duplicate.result(PATIENCE)
    assert isinstance(verdict, Replay)
    assert verdict.outcome.value == "shipped"


def test_b18_waiting_ends_at_its_deadline(once: Once) -> None:
    granted(once)
    with pytest.raises(InProgress) as error:
        once.call("order-1", lambda: pytest.fail("run twice"), wait=0.05)
    assert 0 < error.value.retry_after <= LEASE
    assert isinstance(once.claim("order-1", wait=0.05), InFlight)
    with pytest.raises(InProgress):
        once.call("order-1", lambda: pytest.fail("run twice"), in_flight="conflict")


@pytest.mark.parametrize("end", ["releases", "dies"])
def test_b18_one_of_those_who_wait_takes_over_when_the_owner(space: Space, end: str) -> None:
    waiting = threading.Event()
    here, there = space.open(), space.open(Noting(space.store(), waiting))
    claim = granted(here)
    runs: list[int] = []

    def ship() -> str:
        runs.append(current_claim().fence)
        return "shipped"

    def owner_ends() -> None:
        assert waiting.wait(PATIENCE)
        if end == "releases":
            here.release(claim)
        else:
            space.clock.advance(LEASE)

    with beside(owner_ends):
        results = in_threads(5, lambda _: there.call("order-1", ship))
    assert len(runs) == 1
    assert runs[0] > claim.fence
    assert Counter(result.replayed for result in results) == {False: 1, True: 4}
    assert {result.value for result in results} == {"shipped"}


def test_b18_tasks_wait_as_threads_do(space: Space) -> None:
    runs: list[int] = []

    async def race() -> list[Any]:
        begun, finish, waiting = asyncio.Event(), asyncio.Event(), asyncio.Event()
        async with space.open_async(Noting(space.store(awaited=True), waiting)) as once:

            async def ship() -> str:
                runs.append(current_claim().fence)
                begun.set()
                await finish.wait()
                return "shipped"

            first = asyncio.create_task(once.call("order-1", ship))
            await begun.wait()
            others = asyncio.create_task(in_tasks(8, lambda _: once.call("order-1", ship)))
            await waiting.wait()
            assert not others.done()
            finish.set()
            return [await first, *await others]

    results = asyncio.run(race())
    assert len(runs) == 1
    assert [result.replayed for result in results] == [False] + [True] * 8
    assert {result.value for result in results} == {"shipped"}
