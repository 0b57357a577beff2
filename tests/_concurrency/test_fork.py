"""A process forks with an open store: parent and child go on, each with connections and locks of its own.

The forks happen in processes of their own: a fork of the tests' own would copy all that the tests have open.
"""

import textwrap
from itertools import count
from typing import Any

import pytest

from support.databases import KINDS, SHARED_KINDS, StoreUrls
from support.programs import outcome

names = count()

PREAMBLE = """
import asyncio, json, os, signal, threading, warnings
warnings.simplefilter("ignore")  # Python warns of every fork with threads; that it works is what is tested here
from semel import AsyncOnce, Granted, InFlight, Once, Replay, current_claim

def in_child(work):
    # Fork; what `work` gives in the child, as JSON. A child that hangs is ended by its alarm.
    answers, tells = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(100)
        try:
            os.write(tells, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(tells)
    with os.fdopen(answers) as reported:
        said = reported.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child hung or crashed"
    return json.loads(said)

def key(name):
    return f"{mark} {name}"
"""


def run(program: str, url: str) -> Any:
    """What the program tells."""
    return outcome(PREAMBLE + textwrap.dedent(program), url=url, mark=f"fork {next(names)}")


@pytest.mark.parametrize("kind", KINDS)
def test_parent_and_child_both_go_on(urls: StoreUrls, kind: str) -> None:
    """The child sees what was done before, does work of its own, and the parent sees that (if the store is shared)."""
    reported = run(
        """
        once = Once(url)
        once.call(key("before"), lambda: "parent")
        child = in_child(lambda: [
            once.call(key("before"), lambda: "child").value,
            once.call(key("child"), lambda: "child").value,
            in_child(lambda: once.call(key("grandchild"), lambda: "grandchild").value),
            once.call(key("child"), lambda: "again").value,
        ])
        parent = [once.call(key(name), lambda: "parent").value for name in ("before", "child", "grandchild", "after")]
        once.close()
        tell([child, parent])
        """,
        urls[kind],
    )
    shared = kind != "memory"
    assert reported == [
        ["parent", "child", "grandchild", "child"],
        ["parent", "child" if shared else "parent", "grandchild" if shared else "parent", "parent"],
    ]


@pytest.mark.parametrize("kind", SHARED_KINDS)
def test_a_fork_in_the_middle_of_a_crowd_hangs_nobody(urls: StoreUrls, kind: str) -> None:
    """Eight threads claim and complete all the time, so locks are held and batches gather at every fork."""
    reported = run(
        """
        once = Once(url, collect=False)
        stop = threading.Event()
        done = []

        def crowd(number):
            at = 0
            while not stop.is_set():
                once.call(key(f"thread {number} {at}"), lambda: at)
                done.append((number, at))
                at += 1

        threads = [threading.Thread(target=crowd, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        children = [in_child(lambda: [once.call(key(f"child {number} {at}"), lambda: at).value for at in range(3)])
                    for number in range(8)]
        stop.set()
        for thread in threads:
            thread.join(30)
        replayed = [once.call(key(f"thread {number} {at}"), lambda: "lost").value == at for number, at in done[:200]]
        tell([children, all(replayed), len(replayed) > 8, any(thread.is_alive() for thread in threads)])
        """,
        urls[kind],
    )
    assert reported == [[[0, 1, 2]] * 8, True, True, False]


@pytest.mark.parametrize("kind", SHARED_KINDS)
def test_parent_and_child_are_rivals_like_any_others(urls: StoreUrls, kind: str) -> None:
    """Their next claims are for the same key: they must not pass for one and the same attempt."""
    reported = run(
        """
        once = Once(url)
        once.claim(key("before"))
        kinds = []
        for at in range(3):
            child = in_child(lambda: type(once.claim(key(f"wanted {at}"))).__name__)
            kinds.append([child, type(once.claim(key(f"wanted {at}"))).__name__])
        tell(kinds)
        """,
        urls[kind],
    )
    assert reported == [["Granted", "InFlight"]] * 3


@pytest.mark.parametrize("kind", ["redis", "postgres"])
def test_no_connection_is_shared(urls: StoreUrls, kind: str) -> None:
    """Asked for its number by the server, each process names another."""
    reported = run(
        """
        from sqlalchemy import text
        once = Once(url)
        once.call(key("before"), int)
        store = once._engine.store

        def connection():
            once.call(key(os.getpid()), int)
            if url.startswith("redis"):
                return store._client.client_id()

            async def number():
                return await store._database.read(lambda conn: conn.scalar(text("SELECT pg_backend_pid()")))

            from semel._concurrency.sync import run_sync
            return run_sync(number())

        tell([connection(), in_child(connection), in_child(connection), connection()])
        """,
        urls[kind],
    )
    parent, first, second, again = reported
    assert parent == again
    assert len({parent, first, second}) == 3


@pytest.mark.parametrize("kind", SHARED_KINDS)
def test_what_the_child_does_stays_done_when_the_parent_has_closed(urls: StoreUrls, kind: str) -> None:
    """A file's last connection clears up when it closes; the parent's is not the last one while the child works."""
    reported = run(
        """
        once = Once(url, collect=False)
        once.call(key("before"), int)
        closed, tells_closed = os.pipe()
        worked, tells_worked = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(100)
            once.call(key("while open"), lambda: "child")
            os.write(tells_worked, b".")
            os.read(closed, 1)
            once.call(key("after the close"), lambda: "child")
            os.write(tells_worked, b".")
            os._exit(0)
        os.read(worked, 1)
        once.close()
        os.write(tells_closed, b".")
        os.read(worked, 1)
        os.waitpid(child, 0)
        with Once(url) as other:
            values = [other.call(key(name), lambda: "lost").value for name in ("while open", "after the close")]
        tell(values)
        """,
        urls[kind],
    )
    assert reported == ["child", "child"]


def test_locks_that_other_threads_held_are_free_in_the_child(urls: StoreUrls) -> None:
    """Each lock of the machinery is held by a thread that the child does not have."""
    reported = run(
        """
        from semel.once.stores.memory import MemoryStore

        def holding(lock):
            # Another thread takes the lock and keeps it.
            held, leave = threading.Event(), threading.Event()
            def hold():
                with lock:
                    held.set()
                    leave.wait()
            threading.Thread(target=hold, daemon=True).start()
            held.wait()
            return leave

        answers = []
        memory = Once("memory://", collect=False)
        file = Once(url, collect=False)
        file.call(key("before"), int)
        locks = {
            "memory": (memory, memory._engine.store._lock),
            "bell": (file, file._engine._waiters._lock),
            "lane": (file, file._engine._send_claim._lock),
        }
        for name, (once, lock) in locks.items():
            once.claim(key("held"))
            leave = holding(lock)
            answers.append(in_child(lambda: [
                type(once.claim(key("held"), wait=0.05)).__name__, once.call(key(name), lambda: name).value
            ][1]))
            leave.set()
            assert once.call(key(f"{name} in the parent"), lambda: name).value == name

        from semel.runs import types
        leave = holding(types._stamps._lock)
        answers.append(len(in_child(types.new_id)))
        leave.set()

        from semel.once.idempotency_store import InMemoryIdempotencyStore, StoredResults
        results = StoredResults(InMemoryIdempotencyStore())
        for lock in (results.store._lock, results._threads._guard, results._tasks._guard):
            leave = holding(lock)
            answers.append(in_child(lambda: results.process("key", lambda: "processed").result))
            leave.set()
        tell(answers)
        """,
        urls["sqlite"],
    )
    assert reported == ["memory", "bell", "lane", 36, *["processed"] * 3]


def test_a_batch_that_was_under_way_stays_with_the_parent() -> None:
    """A thread is flushing and others wait behind it: the child starts idle, and the parent's callers are answered."""
    reported = run(
        """
        from semel.once.stores.memory import MemoryStore

        class SlowStore:
            coalesce = True
            def __init__(self):
                self.memory = MemoryStore()
                self.flushing, self.go_on = threading.Event(), threading.Event()
            def __getattr__(self, name):
                return getattr(self.memory, name)
            async def claim(self, requests):
                if requests[0].key == "slow":
                    self.flushing.set()
                    assert self.go_on.wait(30)
                return await self.memory.claim(requests)

        store = SlowStore()
        once = Once(store, collect=False)
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(type(once.claim("slow")).__name__))]
        threads[0].start()
        store.flushing.wait()
        threads += [threading.Thread(target=lambda at=at: answers.append(type(once.claim(f"waiting {at}")).__name__))
                    for at in range(3)]
        for thread in threads[1:]:
            thread.start()
        lane = once._engine._send_claim
        while len(lane._waiting) < 3:
            threading.Event().wait(0.01)
        child = in_child(lambda: [type(once.claim(name)).__name__ for name in ("in the child", "waiting 0")])
        store.go_on.set()
        for thread in threads:
            thread.join(30)
        tell([child, answers])
        """,
        "memory://",
    )
    assert reported == [["Granted", "Granted"], ["Granted"] * 4]


@pytest.mark.parametrize("kind", KINDS)
def test_the_parents_work_is_the_parents_to_renew(urls: StoreUrls, kind: str) -> None:
    """A fork inside a guarded call: the parent's lease goes on being renewed by the parent, and by it alone."""
    reported = run(
        """
        once = Once(url)

        def look():
            record = once.get(key("long"))
            return record.lease_until_us

        def work():
            renewer = once._engine._background.here().renewer
            child = in_child(lambda: [len(renewer.watched()), once.call(key("other"), lambda: 8).value])
            first = look()
            while look() <= first:
                threading.Event().wait(0.01)
            return child

        tell([once.call(key("long"), work, lease=3).value, once.call(key("long"), int).replayed])
        """,
        urls[kind],
    )
    assert reported == [[0, 8], True]


@pytest.mark.parametrize("kind", ["redis", "postgres"])
def test_a_waiter_in_the_child_is_woken_by_a_listener_of_its_own(urls: StoreUrls, kind: str) -> None:
    """The parent's listening thread did not come along."""
    reported = run(
        """
        once = Once(url)
        for name in ("a", "b"):
            once.claim(key(name), lease=60)
        assert isinstance(once.claim(key("a"), wait=0.2), InFlight)  # the parent listens now

        def child():
            assert once._engine.store._listener._thread is None
            verdict = once.claim(key("a"), wait=0.2)
            return [type(verdict).__name__, once._engine.store._listener._thread.is_alive()]

        tell(in_child(child))
        """,
        urls[kind],
    )
    assert reported == ["InFlight", True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["between two loops", "inside a loop"])
def test_an_async_store_is_forked_too(urls: StoreUrls, kind: str, where: str) -> None:
    """The child runs a loop of its own, with connections of its own; the parent's loop goes on."""
    reported = run(
        f"""
        once = AsyncOnce(url)

        async def call(name):
            async def work():
                return name
            return (await once.call(key(name), work)).value

        def child():
            return asyncio.run(call("child"))

        async def inside():
            before = await call("before")
            return [before, in_child(child), await call("after")]

        if {where == "inside a loop"}:
            reported = asyncio.run(inside())
        else:
            reported = [asyncio.run(call("before")), in_child(child), asyncio.run(call("after"))]
        tell(reported)
        """,
        urls[kind],
    )
    assert reported == ["before", "child", "after"]


@pytest.mark.parametrize("kind", SHARED_KINDS)
def test_a_pool_of_forked_workers_does_each_thing_once(urls: StoreUrls, kind: str) -> None:
    """The usual way: a module's `once`, used before and after multiprocessing forks."""
    reported = run(
        """
        import multiprocessing
        once = Once(url)
        once.call(key("before"), int)

        @once.guard(scope=mark)
        def who(number):
            return [number, os.getpid()]

        with multiprocessing.get_context("fork").Pool(4) as pool:
            answers = pool.map(who, [number % 10 for number in range(60)], chunksize=1)
        tell(answers)
        """,
        urls[kind],
    )
    assert len(reported) == 60
    assert len({tuple(answer) for answer in reported}) == 10
