"""SQLite takes all that is asked of it at one moment in one transaction, each answered as by its own verb."""

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest
from sqlalchemy import Engine, event

from semel import Granted, Once
from semel._concurrency.sync import run_sync
from semel.once.store import ClaimRequest, Complete, KeyRef, OutcomeData, Release, Renew
from semel.once.stores import open_store
from semel.once.stores.sqlite import SqliteStore
from semel.testing import FakeClock
from semel.types import Mismatch, Replay, Verdict

DONE = OutcomeData("value", b"\x07")
LEASE, TTL = 60_000_000, 600_000_000


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1_000_000)


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> Iterator[SqliteStore]:
    store = open_store(f"sqlite:///{tmp_path / 'keys.db'}", is_async=False, clock=clock)
    assert isinstance(store, SqliteStore)
    yield store
    run_sync(store.close())


@pytest.fixture
def commits() -> Iterator[list[object]]:
    seen: list[object] = []

    def note(connection: object) -> None:
        seen.append(connection)

    event.listen(Engine, "commit", note)
    yield seen
    event.remove(Engine, "commit", note)


def asks(
    key: str, attempt: str = "first", *, fingerprint: str = "", lease: int = LEASE, ttl: int = TTL
) -> ClaimRequest:
    return ClaimRequest("scope", key, fingerprint, f"{key} {attempt}", lease, ttl)


def fence_of(verdict: Verdict) -> int:
    assert isinstance(verdict, Granted)
    return verdict.claim.fence


def test_every_kind_in_one_transaction(store: SqliteStore, clock: FakeClock, commits: list[object]) -> None:
    names = ["done", "kept", "given", "lost", "gone", "renewed"]
    fences = dict(zip(names, map(fence_of, run_sync(store.claim([asks(name) for name in names]))), strict=True))
    run_sync(store.complete([Complete("scope", "kept", fences["kept"], DONE)]))
    run_sync(store.release([Release("scope", "gone", fences["gone"])]))
    clock.advance(61)
    taken = fence_of(run_sync(store.claim([asks("lost", "second")]))[0])
    commits.clear()

    answers = run_sync(
        store.together(
            [
                asks("new", fingerprint="a"),
                Complete("scope", "lost", fences["lost"], DONE),
                Renew("scope", "renewed", fences["renewed"], LEASE),
                Complete("scope", "done", fences["done"], DONE),
                Release("scope", "lost", fences["lost"]),
                asks("done", "third"),
                Renew("scope", "lost", fences["lost"], LEASE),
                Release("scope", "given", fences["given"]),
                Complete("scope", "kept", fences["kept"], OutcomeData("value", b"\x08")),
                Release("scope", "gone", fences["gone"]),
                asks("new", "second", fingerprint="b"),
                Renew("scope", "kept", fences["kept"], LEASE),
            ]
        )
    )

    assert len(commits) == 1
    assert isinstance(answers[0], Granted)
    assert answers[1:5] == [False, clock() + LEASE, True, False]
    assert isinstance(answers[5], Replay)
    assert answers[6:10] == [None, True, True, True]
    assert isinstance(answers[10], Mismatch)
    assert answers[11] is None
    assert len(answers) == 12
    held = run_sync(store.get([KeyRef("scope", name) for name in ("kept", "lost", "given", "renewed")]))
    kept, lost, given, renewed = held
    assert kept is not None
    assert kept.data == b"\x07"
    assert lost is not None
    assert (lost.fence, lost.state) == (taken, "claimed")
    assert given is None
    assert renewed is not None
    assert renewed.lease_until_us == clock() + LEASE


def test_an_outcome_counts_though_its_retention_ended_and_another_was_lost(
    store: SqliteStore, clock: FakeClock
) -> None:
    """The lease outlived the retention: the owner was in time, whoever else in the batch was not."""
    late, lost = map(fence_of, run_sync(store.claim([asks("late", lease=TTL, ttl=LEASE), asks("lost")])))
    clock.advance(61)
    run_sync(store.claim([asks("lost", "second")]))
    both = [Complete("scope", "late", late, DONE), Complete("scope", "lost", lost, DONE)]
    assert run_sync(store.complete(both)) == [True, False]


def test_threads_with_different_verbs_share_a_commit(tmp_path: Path, commits: list[object]) -> None:
    def in_threads(calls: list[Callable[[], object]]) -> None:
        threads = [Thread(target=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with Once(f"sqlite:///{tmp_path / 'keys.db'}", collect=False) as once:
        verdicts = [once.claim(f"key {number}") for number in range(60)]
        claims = [verdict.claim for verdict in verdicts if isinstance(verdict, Granted)]
        assert len(claims) == 60
        commits.clear()
        with once._engine.store._database._writing:  # type: ignore[attr-defined]
            threads = Thread(
                target=in_threads,
                args=[
                    [lambda claim=claim: once.complete(claim, 7) for claim in claims[:20]]
                    + [lambda claim=claim: once.release(claim) for claim in claims[20:40]]
                    + [lambda number=number: once.claim(f"other {number}") for number in range(20)]
                    + [lambda claim=claim: once.renew(claim) for claim in claims[40:]]
                ],
            )
            threads.start()
            lane = once._engine._send_claim
            while len(lane._waiting) < 79:  # type: ignore[attr-defined]
                threads.join(0.01)
        threads.join()
        assert len(commits) == 2
        assert once.stats().held.in_flight == 40
        assert once.stats().held.completed == 20
