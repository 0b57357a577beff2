"""What a process does with keys, and what must hold whenever it dies."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sqlalchemy
from sqlalchemy import text

from crash.points import Ended, Place
from crash.wire import FAULTS
from semel import (
    AsyncOnce,
    Claim,
    ClaimLost,
    Granted,
    InFlight,
    Once,
    OutcomeUnknown,
    Policy,
    Replay,
    StoreUnavailable,
    Unknown,
    current_claim,
)
from semel.testing import FakeClock
from support.programs import PATIENCE

SCOPE = "crash"
LEASE, TTL = 60.0, 600.0
RETAKE = Policy(lease=LEASE, ttl=TTL, in_flight="conflict")
UNKNOWN = RETAKE.but(on_crash="unknown")


_kept: dict[str, tuple[Once, FakeClock]] = {}


@contextmanager
def kept_open(url: str) -> Iterator[None]:
    """Keep one Once open for all tries of this process: to open one takes longer than to use it."""
    clock = FakeClock()
    with Once(url, clock=clock, policy=RETAKE, collect=False, retry_for=PATIENCE) as once:
        _kept[url] = once, clock
        try:
            yield
        finally:
            del _kept[url]


@contextmanager
def opened(place: Place, later: float = 0.0) -> Iterator[Once]:
    """The keys of the try, with its clock, or a later one."""
    kept, clock = _kept.get(place.url, (None, place.clock))
    clock.us = place.later(later).us
    if kept is not None:
        yield kept
        return
    with Once(place.url, clock=clock, policy=RETAKE, collect=False, retry_for=PATIENCE) as once:
        yield once


class Unconnected:
    """An operation that begins with connecting."""

    def warm_up(self, place: Place) -> None: ...

    def prepare(self, place: Place) -> None: ...


class Connected:
    """An operation of a process that is connected already."""

    survives_forks = True

    def warm_up(self, place: Place) -> None:
        if place.url not in _kept:
            clock = FakeClock()
            once = Once(place.url, clock=clock, policy=RETAKE, collect=False, retry_for=PATIENCE)
            _kept[place.url] = once, clock
        once, _ = _kept[place.url]
        once.claim("warm", scope="warm")  # a script of Redis is loaded by its first use

    def prepare(self, place: Place) -> Any: ...


def work(place: Place) -> dict[str, int]:
    """The guarded function: it records its fence."""
    fence = current_claim().fence
    place.record(fence)
    return {"fence": fence}


def agree(place: Place, ended: Ended, policy: Policy) -> None:
    """The next callers execute what was not done, replay what was, and do neither if that is unknown.

    The lease of the process that died is over.
    """
    before = [int(fence) for fence in place.effects]
    assert len(before) <= 1, "one call executed the function twice"
    with opened(place, LEASE + 1) as once:
        try:
            result = once.call(place.name, lambda: work(place), scope=SCOPE, policy=policy)
        except OutcomeUnknown:
            assert policy.on_crash == "unknown"
            assert ended.how != "returned"
            assert [int(fence) for fence in place.effects] == before
            return
        again = once.call(place.name, lambda: work(place), scope=SCOPE, policy=policy)
    effects = [int(fence) for fence in place.effects]
    assert effects == sorted(set(effects)), "a fence was granted twice, or a lower one later"
    assert again.replayed
    assert again.value == result.value == {"fence": effects[-1]}
    assert result.replayed == (effects == before)
    if ended.how == "returned":
        assert result.replayed
        assert ended.value == result.value
    if policy.on_crash == "unknown":
        assert len(effects) == 1, "executed again although the first outcome is unknown"


@dataclass(frozen=True)
class GuardedCall(Connected):
    """A guarded function."""

    policy: Policy

    def act(self, place: Place, given: None) -> Any:
        with opened(place) as once:
            return once.call(place.name, lambda: work(place), scope=SCOPE, policy=self.policy).value

    def check(self, place: Place, given: None, ended: Ended) -> None:
        agree(place, ended, self.policy)


class FirstCall(Unconnected):
    """The first guarded call of a process, which also connects."""

    def act(self, place: Place, given: None) -> Any:
        return GuardedCall(RETAKE).act(place, None)

    def check(self, place: Place, given: None, ended: Ended) -> None:
        agree(place, ended, RETAKE)


class FirstAsyncCall(FirstCall):
    """The same in an event loop."""

    def act(self, place: Place, given: None) -> Any:
        return asyncio.run(self._call(place))

    async def _call(self, place: Place) -> Any:
        async def working() -> dict[str, int]:
            return work(place)

        async with AsyncOnce(place.url, clock=place.clock, policy=RETAKE, collect=False, retry_for=PATIENCE) as once:
            return (await once.call(place.name, working, scope=SCOPE)).value


class OpenEmpty(Unconnected):
    """The first call on a SQLite file that does not exist yet, which creates its tables."""

    kinds = FAULTS
    stride = 14
    in_turn = True
    """The tables are made in one transaction of many statements: it is enough to try some of them."""

    def _own(self, place: Place) -> Place:
        return place.at(f"sqlite:///{place.folder / place.name}.db")

    def act(self, place: Place, given: None) -> Any:
        return GuardedCall(RETAKE).act(self._own(place), None)

    def check(self, place: Place, given: None, ended: Ended) -> None:
        agree(self._own(place), ended, RETAKE)


class ClaimKey(Connected):
    """``claim``: afterwards the key is free, or it is claimed until the lease ends."""

    changes_only_rows = True

    def act(self, place: Place, given: None) -> Any:
        with opened(place) as once:
            verdict = once.claim(place.name, scope=SCOPE)
        assert isinstance(verdict, Granted), verdict
        return verdict.claim

    def check(self, place: Place, given: None, ended: Ended) -> None:
        with opened(place) as once:
            verdict = once.claim(place.name, scope=SCOPE)
            assert isinstance(verdict, Granted | InFlight)
        claim = ended.value if ended.how == "returned" else None
        if claim is not None:
            assert isinstance(verdict, InFlight)
        with opened(place, LEASE + 1) as once:
            taken = once.claim(place.name, scope=SCOPE)
            assert isinstance(taken, Granted)
            for old in (claim, verdict.claim if isinstance(verdict, Granted) else None):
                if old is not None:
                    assert taken.claim.fence > old.fence
                    assert refuses(once, old)
            once.complete(taken.claim, "done")
            replay = once.claim(place.name, scope=SCOPE)
            assert isinstance(replay, Replay)
            assert replay.outcome.value == "done"


def refuses(once: Once, claim: Claim) -> bool:
    """Whether the store refuses every write of an owner whose fence is outdated."""
    for write in (lambda: once.complete(claim, "stale"), lambda: once.release(claim), lambda: once.renew(claim)):
        try:
            write()
        except ClaimLost:
            continue
        return False
    return True


class OwnerVerb(Connected):
    """A verb of the owner of a claim that another process made."""

    changes_only_rows = True

    def prepare(self, place: Place) -> Claim:
        with opened(place) as once:
            verdict = once.claim(place.name, scope=SCOPE)
        assert isinstance(verdict, Granted)
        return verdict.claim


class Complete(OwnerVerb):
    """``complete``: afterwards the outcome is there for good, or the claim is in flight until its lease ends."""

    def act(self, place: Place, given: Claim) -> Any:
        with opened(place) as once:
            once.complete(given, "first")

    def check(self, place: Place, given: Claim, ended: Ended) -> None:
        with opened(place, LEASE + 1) as once:
            verdict = once.claim(place.name, scope=SCOPE)
            if ended.how == "returned":
                assert isinstance(verdict, Replay)
            if isinstance(verdict, Granted):
                assert verdict.claim.fence > given.fence
                assert refuses(once, given)
                once.complete(verdict.claim, "second")
            again = once.claim(place.name, scope=SCOPE)
            assert isinstance(again, Replay)
            assert again.outcome.value == ("second" if isinstance(verdict, Granted) else "first")


class Release(OwnerVerb):
    """``release``: afterwards the key is free, at the latest when the lease ends."""

    def act(self, place: Place, given: Claim) -> Any:
        with opened(place) as once:
            once.release(given)

    def check(self, place: Place, given: Claim, ended: Ended) -> None:
        with opened(place) as once:
            verdict = once.claim(place.name, scope=SCOPE)
        if ended.how == "returned":
            assert isinstance(verdict, Granted)
        if not isinstance(verdict, Granted):
            with opened(place, LEASE + 1) as once:
                verdict = once.claim(place.name, scope=SCOPE)
        assert isinstance(verdict, Granted)
        assert verdict.claim.fence > given.fence
        with opened(place) as once:
            assert refuses(once, given)


class Renew(OwnerVerb):
    """``renew``: the lease ends at its old or at its new end, the owner's fence holds, and nobody else's does."""

    def act(self, place: Place, given: Claim) -> Any:
        with opened(place) as once:
            return once.renew(given, 3 * LEASE).lease_until_us

    def check(self, place: Place, given: Claim, ended: Ended) -> None:
        with opened(place, 2 * LEASE) as once:
            verdict = once.claim(place.name, scope=SCOPE)
            if ended.how == "returned":
                assert isinstance(verdict, InFlight)
            if isinstance(verdict, Granted):
                assert refuses(once, given)
                once.release(verdict.claim)
            else:
                once.complete(given, "by the owner")
                replay = once.claim(place.name, scope=SCOPE)
                assert isinstance(replay, Replay)


@dataclass(frozen=True)
class Resolve(Connected):
    """``resolve`` of a key whose outcome is unknown: afterwards it is resolved, or unknown as before."""

    changes_only_rows = True

    done: bool

    def prepare(self, place: Place) -> Claim:
        with opened(place) as once:
            verdict = once.claim(place.name, scope=SCOPE, on_crash="unknown")
        assert isinstance(verdict, Granted)
        return verdict.claim

    def act(self, place: Place, given: Claim) -> Any:
        with opened(place, LEASE + 1) as once:
            once.resolve(place.name, scope=SCOPE, done=self.done, value="resolved")

    def check(self, place: Place, given: Claim, ended: Ended) -> None:
        with opened(place, 3 * LEASE) as once:
            verdict = once.claim(place.name, scope=SCOPE, on_crash="unknown")
            if isinstance(verdict, Unknown):
                assert ended.how != "returned"
                once.resolve(place.name, scope=SCOPE, done=self.done, value="resolved")
                verdict = once.claim(place.name, scope=SCOPE, on_crash="unknown")
            assert refuses(once, given)
        if self.done:
            assert isinstance(verdict, Replay)
            assert verdict.outcome.value == "resolved"
        else:
            assert isinstance(verdict, Granted)
            assert verdict.claim.fence > given.fence


class CheckAndMark(Connected):
    """``check_and_mark``: a message is new to at most one caller who hears the answer, and then it is seen."""

    changes_only_rows = True

    def act(self, place: Place, given: None) -> Any:
        with opened(place) as once:
            return once.check_and_mark(SCOPE, place.name, ttl=TTL)

    def check(self, place: Place, given: None, ended: Ended) -> None:
        with opened(place) as once:
            answers = [once.check_and_mark(SCOPE, place.name, ttl=TTL) for _ in range(2)]
        if ended.how == "returned":
            assert ended.value == "not_seen"
            assert answers == ["seen", "seen"]
        assert answers[1] == "seen"


class InTransaction(Connected):
    """A call whose completion is part of the user's own transaction: both are there, or neither."""

    survives_forks = False
    """The user's own connections do not."""
    survives_lost_replies = False
    """The user's transaction is the user's to repeat."""

    def prepare(self, place: Place) -> None:
        with connected(place) as user:
            user.execute(text("CREATE TABLE IF NOT EXISTS orders (name text)"))
            user.commit()

    def act(self, place: Place, given: None) -> Any:
        try:
            self._order(place)
        except sqlalchemy.exc.DBAPIError as error:
            raise StoreUnavailable("the user's transaction has failed") from error

    def _order(self, place: Place) -> None:
        with opened(place) as once, connected(place) as user:
            verdict = once.claim(place.name, scope=SCOPE)
            assert isinstance(verdict, Granted)
            user.execute(text("INSERT INTO orders VALUES (:name)"), {"name": place.name})
            once.on(user).complete(verdict.claim, "ordered")
            user.commit()

    def check(self, place: Place, given: None, ended: Ended) -> None:
        with opened(place, LEASE + 1) as once:
            verdict = once.claim(place.name, scope=SCOPE)
        with connected(place) as user:
            found = user.execute(text("SELECT count(*) FROM orders WHERE name = :name"), {"name": place.name}).scalar()
        assert found == (1 if isinstance(verdict, Replay) else 0)
        if ended.how == "returned":
            assert isinstance(verdict, Replay)


def connected(place: Place) -> sqlalchemy.Connection:
    """A connection of the user's own."""
    return _engine(place.kind, place.url).connect()


_engines: dict[str, sqlalchemy.Engine] = {}


def _engine(kind: str, address: str) -> sqlalchemy.Engine:
    if address not in _engines:
        url = sqlalchemy.make_url(address)
        if kind == "postgres":
            url = url.set(drivername="postgresql+psycopg")
        _engines[address] = sqlalchemy.create_engine(url, pool_size=1)
    return _engines[address]


def disconnect() -> None:
    """Close the connections that were kept open between two tries."""
    for engine in _engines.values():
        engine.dispose()
    _engines.clear()
