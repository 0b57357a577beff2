"""Inside a user's own transaction, what semel writes and what the user writes commit together or vanish together."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from semel import (
    AsyncOnce,
    Claim,
    ClaimLost,
    Granted,
    InFlight,
    KeyReused,
    Mismatch,
    Once,
    OriginalFailed,
    OutcomeGone,
    Replay,
    Unencodable,
    current_claim,
)
from support.databases import StoreUrls, store_urls

PATIENCE = 60
"""Seconds after which something that should have happened counts as hanging."""

names = count()
KINDS = ["sqlite", "postgres"]
DRIVERS = {"sqlite": ("sqlite", "sqlite+aiosqlite"), "postgres": ("postgresql+psycopg", "postgresql+asyncpg")}
INSERT = text("INSERT INTO effects VALUES (:key)")


@pytest.fixture(scope="module")
def urls(request: pytest.FixtureRequest) -> Iterator[StoreUrls]:
    """Databases with a table of the user's beside semel's own."""
    with store_urls(request) as urls:
        for kind in KINDS:
            with Once(urls[kind]):
                pass
            engine = create_engine(make_url(urls[kind]).set(drivername=DRIVERS[kind][0]))
            with engine.begin() as conn:
                conn.execute(text("CREATE TABLE effects (key text)"))
            engine.dispose()
        yield urls


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def engine(urls: StoreUrls, kind: str) -> Iterator[Engine]:
    engine = create_engine(make_url(urls[kind]).set(drivername=DRIVERS[kind][0]))
    yield engine
    engine.dispose()


@pytest.fixture
def once(urls: StoreUrls, kind: str) -> Iterator[Once]:
    with Once(urls[kind], collect=False) as once:
        yield once


@pytest.fixture
def key() -> str:
    return f"key {next(names)}"


def granted(verdict: object) -> Claim:
    assert isinstance(verdict, Granted)
    return verdict.claim


def effects(engine: Engine, key: str) -> int:
    with engine.connect() as conn:
        return int(conn.execute(text("SELECT count(*) FROM effects WHERE key = :key"), {"key": key}).scalar_one())


@contextmanager
def opened(engine: Engine, what: type[Session] | type[Connection]) -> Iterator[Any]:
    """A session or a connection of the user's, in a transaction."""
    if what is Session:
        with Session(engine) as session:
            yield session
    else:
        with engine.connect() as conn:
            yield conn


BOTH = pytest.mark.parametrize("what", [Session, Connection])


@BOTH
def test_effect_and_outcome_commit_together(once: Once, engine: Engine, key: str, what: Any) -> None:
    with opened(engine, what) as session:

        def work() -> int:
            session.execute(INSERT, {"key": key})
            return current_claim().fence

        result = once.on(session).call(key, work)
        assert result.value == result.fence
        session.commit()
    assert effects(engine, key) == 1
    replay = once.call(key, int)
    assert (replay.value, replay.replayed) == (result.fence, True)


@BOTH
def test_effect_and_outcome_vanish_together(once: Once, engine: Engine, key: str, what: Any) -> None:
    """Rolled back after all went well: the key is as free as if nothing had happened."""
    with opened(engine, what) as session:
        once.on(session).call(key, lambda: session.execute(INSERT, {"key": key}).rowcount)
        assert once.on(session).call(key, int).replayed  # inside, it is done
        session.rollback()
    assert effects(engine, key) == 0
    assert once.get(key) is None
    assert once.call(key, lambda: "again").value == "again"


def test_a_value_that_cannot_be_stored_shares_the_fate_of_its_effect(once: Once, engine: Engine, key: str) -> None:
    """Its error ends the transaction, and neither is there; caught and committed, both are, and the value is gone."""

    def work(session: Session) -> Any:
        session.execute(INSERT, {"key": key})
        return object()

    with pytest.raises(Unencodable), Session(engine) as session, session.begin():
        once.on(session).call(key, lambda: work(session))
    assert (effects(engine, key), once.get(key)) == (0, None)
    with Session(engine) as session, session.begin():
        claim = granted(once.on(session).claim(key))
        with pytest.raises(Unencodable):
            once.on(session).complete(claim, work(session))
    assert effects(engine, key) == 1
    with pytest.raises(OutcomeGone):
        once.call(key, int)


def test_an_object_completed_inside_is_replayed_as_what_the_function_returns(
    once: Once, engine: Engine, key: str
) -> None:
    @dataclass
    class Receipt:
        number: int

    @once.guard(scope="receipts", key=lambda: key)
    def work() -> Receipt:
        receipt = Receipt(7)
        with Session(engine) as session, session.begin():
            session.execute(INSERT, {"key": key})
            once.on(session).complete(current_claim(), receipt)
        return receipt

    assert [work(), work()] == [Receipt(7)] * 2
    assert effects(engine, key) == 1


@BOTH
def test_work_that_fails_leaves_no_trace_once_it_is_rolled_back(
    once: Once, engine: Engine, key: str, what: Any
) -> None:
    with opened(engine, what) as session:

        def work() -> None:
            session.execute(INSERT, {"key": key})
            raise ValueError("after the effect")

        with pytest.raises(ValueError, match="after the effect"):
            once.on(session).call(key, work)
        session.rollback()
    assert effects(engine, key) == 0
    assert once.get(key) is None


def test_a_failure_that_the_policy_keeps_is_kept_with_the_transaction(once: Once, engine: Engine, key: str) -> None:
    with Session(engine) as session:
        with pytest.raises(ZeroDivisionError):
            once.on(session).call(key, lambda: 1 // 0, on_error="keep")
        session.commit()
    with pytest.raises(OriginalFailed, match="ZeroDivisionError"):
        once.call(key, int)


@BOTH
def test_a_claim_from_outside_is_completed_inside(once: Once, engine: Engine, key: str, what: Any) -> None:
    """The claim is everybody's to see; only its outcome belongs to the transaction. This is what a handler does."""
    claim = granted(once.claim(key))
    with opened(engine, what) as session:
        session.execute(INSERT, {"key": key})
        once.on(session).complete(claim, 7)
        session.rollback()
    record = once.get(key)
    assert record is not None
    assert record.status == "in_flight"

    with opened(engine, what) as session:
        session.execute(INSERT, {"key": key})
        once.on(session).complete(claim, 8)
        session.commit()
    assert effects(engine, key) == 1
    assert once.call(key, int).value == 8


def test_a_claim_that_was_lost_stops_the_transaction(once: Once, engine: Engine, key: str) -> None:
    """The zombie's effects are written in the same transaction, so the refusal of its fence takes them back."""
    zombie = granted(once.claim(key, lease=0.001))
    with Session(engine) as session:
        until_granted(once, key)
        session.execute(INSERT, {"key": key})
        with pytest.raises(ClaimLost):
            once.on(session).complete(zombie, "the zombie's")
        session.rollback()
    assert effects(engine, key) == 0


def until_granted(once: Once, key: str) -> None:
    """Real time must pass here: the lease of a millisecond ends on the store's own clock."""
    for _ in range(1000):
        if isinstance(once.claim(key), Granted):
            return
        threading.Event().wait(0.005)
    raise AssertionError("the lease never ended")


@BOTH
def test_a_message_is_marked_with_what_it_caused(once: Once, engine: Engine, key: str, what: Any) -> None:
    """The inbox: seen and acted upon, or neither."""
    for attempt in range(3):
        with opened(engine, what) as session:
            if once.on(session).check_and_mark("inbox", key) == "seen":
                break
            session.execute(INSERT, {"key": key})
            session.rollback() if attempt == 0 else session.commit()
    assert attempt == 2
    assert effects(engine, key) == 1


def test_every_verb_takes_part(once: Once, engine: Engine, key: str) -> None:
    with Session(engine) as session:
        inside = once.on(session)
        claim = granted(inside.claim(key, fingerprint="1:a"))
        assert isinstance(inside.claim(key), InFlight)
        assert isinstance(inside.claim(key, fingerprint="1:b"), Mismatch)
        assert inside.renew(claim, lease=600).lease == 600
        record = inside.get(key)
        assert record is not None
        assert record.status == "in_flight"
        inside.release(claim)
        again = granted(inside.claim(key))
        assert again.fence > claim.fence
        inside.complete(again, 6)
        assert inside.forget(key)
        assert not inside.forget(key)
        inside.complete(granted(inside.claim(key)), 7)
        assert isinstance(inside.claim(key), Replay)
        assert inside.forget_scope(f"{key} alone") == 0
        assert inside.stats().held.completed >= 1
        session.commit()
    assert once.call(key, int).value == 7


def test_a_refusal_leaves_the_transaction_usable(once: Once, engine: Engine, key: str) -> None:
    """In flight elsewhere, used with other content: that is an answer, not a failure of the database."""
    granted(once.claim(key, fingerprint="1:a"))
    with Session(engine) as session:
        session.execute(INSERT, {"key": key})
        inside = once.on(session)
        assert isinstance(inside.claim(key, fingerprint="1:a"), InFlight)
        with pytest.raises(KeyReused):
            inside.call(key, int, fingerprint="1:b")
        session.execute(INSERT, {"key": key})
        session.commit()
    assert effects(engine, key) == 2


def test_a_savepoint_is_a_transaction_too(once: Once, engine: Engine, key: str) -> None:
    """What was claimed and completed inside vanishes with the savepoint, while the rest stays."""
    with Session(engine) as session:
        session.execute(INSERT, {"key": key})
        savepoint = session.begin_nested()
        once.on(session).call(key, lambda: "inside")
        savepoint.rollback()
        assert once.on(session).get(key) is None
        assert once.on(session).call(key, lambda: "outside").value == "outside"
        session.commit()
    assert once.call(key, str).value == "outside"
    assert effects(engine, key) == 1


def test_a_transaction_counts_and_tells_like_everything_else(
    urls: StoreUrls, kind: str, engine: Engine, key: str
) -> None:
    heard: list[str] = []
    with (
        Once(urls[kind], collect=False, on_event=lambda event: heard.append(event.name)) as once,
        Session(engine) as session,
    ):
        once.on(session).call(key, int, scope=key)
        once.on(session).call(key, int, scope=key)
        session.commit()
        assert once.stats().scopes[key].hits == 1
    assert heard == ["miss", "hit"]


def test_what_is_claimed_in_an_open_transaction_is_in_flight_to_others(urls: StoreUrls, key: str) -> None:
    """PostgreSQL: nobody waits for the transaction to end, and nobody gets the key before it does."""
    engine = create_engine(make_url(urls["postgres"]).set(drivername="postgresql+psycopg"))
    with Once(urls["postgres"], collect=False) as once:
        with Session(engine) as session:
            once.on(session).call(key, lambda: "inside")
            assert isinstance(once.claim(key), InFlight)
            assert once.get(key) is None
            session.commit()
        assert once.call(key, str).value == "inside"
    engine.dispose()


def test_two_transactions_on_one_key_have_one_winner(urls: StoreUrls, key: str) -> None:
    """PostgreSQL: the second waits for the first, as for any row; then it replays, or works if the first gave up."""
    engine = create_engine(make_url(urls["postgres"]).set(drivername="postgresql+psycopg"))

    with Once(urls["postgres"], collect=False) as once, ThreadPoolExecutor(1) as thread:

        def second(name: str) -> tuple[str, bool]:
            with Session(engine) as session:
                result = once.on(session).call(name, lambda: "second")
                session.commit()
                return result.value, result.replayed

        for end, expected in (("commit", ("first", True)), ("rollback", ("second", False))):
            name = f"{key} {end}"
            with Session(engine) as session:
                once.on(session).call(name, lambda: "first")
                waiting = thread.submit(second, name)
                getattr(session, end)()
            assert waiting.result(PATIENCE) == expected
    engine.dispose()


def test_a_guarded_function_runs_in_the_transaction_of_its_caller(once: Once, engine: Engine, key: str) -> None:
    def transfer(session: Session, order: str) -> str:
        guarded = once.on(session).guard(scope="transfer", exclude=["session"])(move)
        return guarded(session, order)

    def move(session: Session, order: str) -> str:
        session.execute(INSERT, {"key": order})
        return f"moved {order}"

    for _ in range(3):
        with Session(engine) as session:
            assert transfer(session, key) == f"moved {key}"
            session.commit()
    assert effects(engine, key) == 1


# -- awaited ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def async_opened(engine: Engine, what: type[AsyncSession] | type[AsyncConnection]) -> AsyncIterator[Any]:
    """The same on an async engine to the same database."""
    driver = DRIVERS["sqlite" if engine.dialect.name == "sqlite" else "postgres"][1]
    async_engine = create_async_engine(engine.url.set(drivername=driver))
    try:
        if what is AsyncSession:
            async with AsyncSession(async_engine) as session:
                yield session
        else:
            async with async_engine.connect() as conn:
                yield conn
    finally:
        await async_engine.dispose()


@asynccontextmanager
async def async_once(engine: Engine) -> AsyncIterator[AsyncOnce]:
    """Semel's own, by the URL of the same database."""
    url = engine.url.set(drivername=engine.dialect.name).render_as_string(hide_password=False)
    async with AsyncOnce(url, collect=False) as once:
        yield once


@pytest.mark.parametrize("what", [AsyncSession, AsyncConnection])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_effect_and_outcome_share_their_fate_in_a_loop_too(engine: Engine, key: str, what: Any, end: str) -> None:
    async def scenario() -> None:
        async with async_once(engine) as once:
            async with async_opened(engine, what) as session:

                async def work() -> int:
                    await session.execute(INSERT, {"key": key})
                    return current_claim().fence

                result = await once.on(session).call(key, work)
                assert result.value == result.fence
                assert (await once.on(session).call(key, work)).replayed
                await getattr(session, end)()

            assert effects(engine, key) == (1 if end == "commit" else 0)
            assert (await once.get(key) is None) == (end == "rollback")

    asyncio.run(scenario())


@pytest.mark.parametrize("what", [AsyncSession, AsyncConnection])
def test_a_claim_from_outside_is_completed_inside_a_loop_too(engine: Engine, key: str, what: Any) -> None:
    async def scenario() -> None:
        async with async_once(engine) as once:
            claim = granted(await once.claim(key))
            for end, value in (("rollback", 7), ("commit", 8)):
                async with async_opened(engine, what) as session:
                    await session.execute(INSERT, {"key": key})
                    await once.on(session).complete(claim, value)
                    await getattr(session, end)()
            verdict = await once.claim(key)
            assert isinstance(verdict, Replay)
            assert verdict.outcome.value == 8

    asyncio.run(scenario())
    assert effects(engine, key) == 1


def test_async_verbs_take_part_too(engine: Engine, key: str) -> None:
    async def scenario() -> None:
        async with async_once(engine) as once:
            async with async_opened(engine, AsyncSession) as session:
                inside = once.on(session)
                claim = granted(await inside.claim(key))
                assert isinstance(await inside.claim(key), InFlight)
                assert (await inside.renew(claim, lease=600)).lease == 600
                await inside.release(claim)
                assert await inside.check_and_mark("inbox", key) == "not_seen"
                assert await inside.check_and_mark("inbox", key) == "seen"
                await session.commit()
            assert await once.get(key) is None
            assert await once.check_and_mark("inbox", key) == "seen"

    asyncio.run(scenario())
