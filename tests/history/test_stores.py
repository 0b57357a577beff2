"""Real processes on every store, some of which are killed, stopped past their lease, or cut off: nothing is wrong."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from history.actors import LEASE, SCOPE, Actor, wander
from history.requests import claim_request
from semel import Once, OutcomeGone, Policy
from semel._concurrency.sync import run_sync
from semel.once.store import ForgetScope
from semel.once.stores import open_store
from semel.once.stores.memory import MemoryStore
from semel.testing import FakeClock
from semel.testing.history import History, RecordedOnce, RecordedStore, Recorder, check, read
from semel.types import Claim
from support.databases import SHARED_KINDS, StoreUrls
from support.programs import Program, stop
from support.proxies import outage_proxy
from support.waiting import eventually

SEED = int(os.environ.get("SEMEL_TEST_SEED", "13"))
SECONDS = float(os.environ.get("SEMEL_HISTORY_SECONDS", "0.6"))
"""For how long processes work at random; set it higher for a long search."""

WANDER = """
from pathlib import Path
from history.actors import Actor, wander

actor = Actor.on(url, folder, name)
actor.get("warm up")
tell("ready")
tell(wander(actor, seed, (Path(folder) / "stop").exists))
"""
HOLD = """
import os
from history.actors import Actor

actor = Actor.on(url, folder, name)
claim = actor.wait_for(key)
tell((os.getpid(), claim.fence))
hear()
tell(actor.complete(claim, "late"))
"""
"""Takes a key, and completes it when it is told to."""


@contextmanager
def wandering(url: str, folder: Path, names: list[str]) -> Iterator[None]:
    """Processes that work at random until the end of the block."""
    with ExitStack() as stack:
        given = {"url": url, "folder": str(folder), "seed": SEED}
        programs = [stack.enter_context(Program(WANDER, name=name, **given)) for name in names]
        assert [program.hear() for program in programs] == ["ready"] * len(names)
        yield
        (folder / "stop").touch()
        assert all(program.hear() > 0 for program in programs)


@contextmanager
def holding(url: str, folder: Path, name: str) -> Iterator[tuple[Program, int, int]]:
    """A process that holds the key of its name, its process id, and its fence."""
    with Program(HOLD, url=url, folder=str(folder), name=name, key=name) as program:
        pid, fence = program.hear()
        yield program, pid, fence


def sure(folder: Path) -> History:
    """The history, in which nothing is wrong."""
    history = read(folder)
    print(f"seed {SEED}: {len(history.operations)} operations, {dict(Counter(map(kind, history.operations)))}")  # noqa: T201
    assert check(history) == []
    return history


def kind(operation: object) -> str:
    answer = getattr(operation, "answer", None)
    verb = str(getattr(operation, "verb", ""))
    return (
        f"{verb} {answer.get('verdict', answer.get('accepted', ''))}".strip() if answer is not None else f"{verb} lost"
    )


@pytest.mark.parametrize("store", SHARED_KINDS)
def test_processes_that_are_killed_and_stopped(store: str, urls: StoreUrls, tmp_path: Path) -> None:
    """One owner dies, one sleeps through its lease and wakes up; others work on, at random, all the time."""
    url = urls[store]
    me = Actor.on(url, tmp_path, "test")
    with wandering(url, tmp_path, ["w1", "w2"]):
        with holding(url, tmp_path, "killed") as (_, pid, fence):
            os.kill(pid, signal.SIGKILL)
            taken = me.wait_for("killed")
            assert taken.fence > fence
            assert me.complete(taken, "by the next")
        with holding(url, tmp_path, "stopped") as (sleeper, pid, fence):
            stop(pid)
            taken = me.wait_for("stopped")
            assert me.complete(taken, "by the next")
            os.kill(pid, signal.SIGCONT)
            sleeper.tell("go on")
            assert sleeper.hear() is False, "the sleeper's outcome was accepted"
        time.sleep(SECONDS)  # the others work at random
    me.close()
    history = sure(tmp_path)
    assert {"w1", "w2", "killed", "stopped", "test"} <= {each.process.rsplit("-", 1)[0] for each in history.operations}


@pytest.mark.parametrize("store", ["redis", "postgres"])
def test_processes_whose_connections_are_cut(store: str, urls: StoreUrls, tmp_path: Path) -> None:
    """Calls fail whose effect may have happened; whoever is not told that it has, asks again."""
    with outage_proxy(urls[store]) as (proxy, url):
        proxy.up()
        with wandering(url, tmp_path, ["w1", "w2"]):
            for _ in range(4):
                time.sleep(SECONDS / 4)  # the others work at random
                proxy.down()
                proxy.up()
            proxy.down()
            eventually(lambda: [each for each in read(tmp_path).operations if each.error], "a call fails")
            proxy.up()
    assert any(not each.answered for each in sure(tmp_path).operations)


def test_threads_in_memory(tmp_path: Path) -> None:
    store = MemoryStore()
    stop = threading.Event()
    actors = [Actor(store, tmp_path, f"t{number}") for number in range(4)]
    threads = [threading.Thread(target=wander, args=(actor, SEED, stop.is_set)) for actor in actors]
    for thread in threads:
        thread.start()
    time.sleep(SECONDS)  # they work at random
    stop.set()
    for thread in threads:
        thread.join()
    assert any(each.told("verdict") == "granted" for each in sure(tmp_path).operations)


CALL = """
import os
from pathlib import Path
from semel import Once
from semel._concurrency.sync import run_sync
from semel.once.store import ForgetScope
from semel.once.stores import open_store
from semel.testing.history import RecordedOnce, RecordedStore, Recorder

recorder = Recorder(folder, name)
store = RecordedStore(open_store(url, is_async=False), recorder)
once = RecordedOnce(Once(store, collect=False), recorder, Recorder(Path(folder) / "effects", name))
tell("ready")
hear()


def work():
    if name == "killed":
        os.kill(os.getpid(), 9)
    return name


lease = short if name == "killed" else 30  # a busy machine must not take it from the others
tell([once.call(key, work, scope="calls", ttl=60, lease=lease, wait=30).value for key in keys])
tell([once.check_and_mark("messages", key, ttl=60) for key in keys])
"""


@pytest.mark.parametrize("store", SHARED_KINDS)
def test_calls_of_a_function_of_which_one_is_killed(store: str, urls: StoreUrls, tmp_path: Path) -> None:
    """Everybody gets the same value, and the work has one effect under each fence, as the store's verbs tell, too."""
    keys = [f"{tmp_path.name} {number}" for number in range(4)]
    given = {"url": urls[store], "folder": str(tmp_path), "short": LEASE}
    with ExitStack() as stack:
        programs = {
            name: stack.enter_context(Program(CALL, name=name, keys=keys[:1] if name == "killed" else keys, **given))
            for name in ("killed", "c1", "c2")
        }
        assert {program.hear() for program in programs.values()} == {"ready"}
        programs["killed"].tell("go")
        programs["killed"]._process.join()
        for name in ("c1", "c2"):
            programs[name].tell("go")
        values = [programs[name].hear() for name in ("c1", "c2")]
        marks = [programs[name].hear() for name in ("c1", "c2")]
    assert values[0] == values[1]
    assert all(sorted(pair) == ["not_seen", "seen"] for pair in zip(*marks, strict=True))
    history = sure(tmp_path)
    left = {each.verb for each in history.operations if each.process.startswith("killed") and not each.answered}
    assert "call" in left
    assert left <= {"call", "renew"}  # it may be killed while its lease is renewed


def test_every_verb_of_a_store_is_recorded(tmp_path: Path) -> None:
    me = Actor(MemoryStore(), tmp_path, "me")
    claim = me.take("a")
    assert isinstance(claim, Claim)
    assert me.renew(claim)
    assert me.complete(claim, 1)
    assert me.forget(claim)
    claim = me.take("a")
    assert isinstance(claim, Claim)
    assert me.release(claim)
    run_sync(me.store.claim([claim_request("a", scope=SCOPE, lease=LEASE, unknown=True, fingerprint="x")]))
    run_sync(me.store.claim([claim_request("a", scope=SCOPE, fingerprint="y")]))
    time.sleep(LEASE)  # the lease ends on the store's own clock
    run_sync(me.store.claim([claim_request("a", scope=SCOPE)]))
    assert run_sync(me.store.forget_scope(ForgetScope(SCOPE, 10))) == 1
    me.get("a")
    seen = [each for each in map(kind, sure(tmp_path).operations) if not each.startswith("effect")]
    assert seen == [
        "claim granted",
        "renew True",
        "complete True",
        "forget True",
        "claim granted",
        "release True",
        "claim granted",
        "claim mismatch",
        "claim unknown",
        "forgotten",
        "get",
    ]


def test_how_long_a_value_is_kept_is_recorded(tmp_path: Path) -> None:
    """A caller that is told that the value is gone has got an answer, which may come too early."""
    clock = FakeClock()
    recorder = Recorder(tmp_path, clock=clock)
    with Once(RecordedStore(MemoryStore(clock), recorder), policy=Policy(value_ttl=20), collect=False) as once:
        recorded = RecordedOnce(once, recorder)
        recorded.call("own", lambda: 1, ttl=60, value_ttl=10)
        recorded.call("default", lambda: 2, ttl=60)
        recorded.call("policy", lambda: 3, ttl=60, policy=Policy(value_ttl=30))
        recorded.call("for ever", lambda: 4, ttl=60, policy=Policy())
        clock.advance(31)
        for key in ("own", "default", "policy"):
            with pytest.raises(OutcomeGone):
                recorded.call(key, lambda: 5, ttl=60)
        assert recorded.call("for ever", lambda: 5, ttl=60).value == 4
    history = sure(tmp_path)
    kept = {
        (each.subject[1], each.verb): each.asked("value_ttl_us")
        for each in reversed(history.operations)
        if each.verb in ("call", "complete")
    }
    assert kept == {
        (key, verb): kept
        for key, kept in (("own", 10_000_000), ("default", 20_000_000), ("policy", 30_000_000), ("for ever", None))
        for verb in ("call", "complete")
    }
    assert [each.told("gone") for each in history.operations if each.verb == "call"] == [None] * 4 + [True] * 3 + [None]
    early = [replace(each, arguments=each.arguments | {"value_ttl_us": 40_000_000}) for each in history.operations]
    assert {each.rule for each in check(replace(history, operations=early))} == {"value-forgotten"}


def test_a_recorded_store_does_the_rest_as_the_store_itself(tmp_path: Path) -> None:
    store = RecordedStore(open_store("memory://", is_async=False), Recorder(tmp_path))
    with Once(store) as once:
        once.call("a", lambda: 1)
        assert once.stats().held.live == 1
        assert once.purge() == 0
    assert RecordedOnce(once, Recorder(tmp_path)).once is once
