"""Races and faults at both doors, over four worker processes: duplicates, dead workers, stores and disks that fail."""

import asyncio
import math
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import h11
import httpx
import psycopg
import pytest
import redis
from sqlalchemy import make_url

from semel import AsyncOnce, Once, Policy
from semel.cli import main as semel_command
from semel.http import asgi, wsgi
from semel.once.stores.memory import MemoryStore
from semel.testing import FaultyStore
from support import servers
from support.http_sites import SERVERS, RawConnection, Site, code_of, replayed, running
from support.process_peer import ProcessPeer

PATIENCE = 60
WORKERS = 4
CROWD = 50
CRASH_LEASE = 1.2
"""As http_cases has it."""

numbers = count()

KINDS = ["sqlite", "redis", "postgres"]
SERVERS_OF_FOUR = {"gunicorn-gthread": ["--threads", "16", "--preload"], "uvicorn": []}


# -- stores that can be taken away -----------------------------------------------------------------------------------


class ServerStore:
    """A Redis or PostgreSQL of our own, and a database on it."""

    def __init__(self, server: servers.Server) -> None:
        self.server = server
        self.url = server.database()
        if isinstance(server, servers.Postgres):
            assert semel_command(["migrate", self.url]) == 0

    @contextmanager
    def away(self) -> Iterator[None]:
        self.server.stop()
        try:
            yield
        finally:
            self.server.start()

    def size(self) -> int:
        """The bytes of the largest file that the app's own processes write."""
        return 0

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """As after a failover, when the address is still that of the old one."""
        if isinstance(self.server, servers.Postgres):
            self._set_read_only("on")
        else:
            self._replicate("127.0.0.1", "1")
        try:
            yield
        finally:
            if isinstance(self.server, servers.Postgres):
                self._set_read_only("off")
            else:
                self._replicate("NO", "ONE")

    def _set_read_only(self, state: str) -> None:
        with psycopg.connect(self.server.url, autocommit=True) as operator:
            operator.execute(f"ALTER SYSTEM SET default_transaction_read_only = {state}")  # type: ignore[call-overload]
            operator.execute("SELECT pg_reload_conf()")

    def _replicate(self, *whom: str) -> None:
        with redis.Redis.from_url(self.url) as operator:
            operator.execute_command("REPLICAOF", *whom)


HOLD = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.readline()
connection.rollback()
"""


class FileStore:
    """A SQLite file; it is away while another process holds its lock."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder / 'semel.db'}"
        self.folder = folder
        assert semel_command(["migrate", self.url]) == 0

    def size(self) -> int:
        return max(file.stat().st_size for file in self.folder.glob("semel.db*"))

    @contextmanager
    def away(self) -> Iterator[None]:
        argv = [sys.executable, "-c", HOLD, str(make_url(self.url).database)]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            try:
                yield
            finally:
                holder.communicate("go\n", timeout=PATIENCE)

    read_only = away


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SEMEL_TEST_POSTGRES_URL", raising=False)
        patch.delenv("SEMEL_TEST_REDIS_URL", raising=False)
        with servers.redis() as redis_server, servers.postgres() as postgres_server:
            yield {
                "sqlite": FileStore(tmp_path_factory.mktemp("file")),
                "redis": ServerStore(redis_server),
                "postgres": ServerStore(postgres_server),
            }


# -- sites -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sites(stores: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Site]]:
    """Servers of four workers, started while no store is there, and what a first request to each store gets then."""
    found = {}
    urls = {kind: store.url for kind, store in stores.items()}
    with ExitStack() as opened:
        with ExitStack() as outage:
            for store in stores.values():
                outage.enter_context(store.away())
            for name, options in SERVERS_OF_FOUR.items():
                folder = tmp_path_factory.mktemp("desk")
                server = opened.enter_context(running(name, folder, urls, *options, workers=WORKERS))
                opened.callback(server.kill)  # how servers stop is tested elsewhere
                for kind in stores:
                    site = Site(server, ProcessPeer(folder), name, SERVERS[name].protocol, kind)
                    found[name, kind] = opened.enter_context(closing(site))
                    first[name, kind] = site.post("hasty/plain", f"first-{name}-{kind}")
        yield found


first: dict[tuple[str, str], httpx.Response] = {}


@pytest.fixture(params=[(name, kind) for name in SERVERS_OF_FOUR for kind in KINDS], ids="-".join)
def site(request: pytest.FixtureRequest, sites: dict[tuple[str, str], Site]) -> Site:
    return sites[request.param]


@pytest.fixture
def store(site: Site, stores: dict[str, Any]) -> Any:
    """The site's own."""
    return stores[site.store]


@pytest.fixture
def key() -> str:
    return f"key-{next(numbers)}"


def at_once(site: Site, place: str, key: str, number: int = CROWD) -> list[Future[httpx.Response]]:
    """The same request from many clients, all connected before the first byte is sent."""
    connections = [site.connect() for _ in range(number)]
    start = threading.Barrier(number)

    def ask(connection: RawConnection) -> httpx.Response:
        with connection:
            start.wait(PATIENCE)
            connection.send(site.whole(place, key))
            return connection.response()

    threads = ThreadPoolExecutor(number)
    calls = [threads.submit(ask, connection) for connection in connections]
    threads.shutdown(wait=False)
    return calls


def refusal(response: httpx.Response) -> tuple[int, str, bool]:
    """Status, code, and whether it says when to ask again."""
    return response.status_code, code_of(response), int(response.headers.get("retry-after", "0")) >= 1


UNAVAILABLE = (503, "IDEMPOTENCY_STORE_UNAVAILABLE", True)
PROCESSING = (409, "IDEMPOTENCY_KEY_PROCESSING", True)


# -- a store that is not there yet -----------------------------------------------------------------------------------


def test_a_store_that_was_never_there_is_a_503_and_is_found_when_it_comes(site: Site) -> None:
    key = f"first-{site.name}-{site.store}"
    assert refusal(first[site.name, site.store]) == UNAVAILABLE
    assert site.executions(key) == 0
    assert not replayed(site.post_until("hasty/plain", key, 201))
    assert replayed(site.post("hasty/plain", key))
    assert site.executions(key) == 1


# -- races -----------------------------------------------------------------------------------------------------------


def test_of_fifty_duplicates_at_once_one_is_carried_out(site: Site, key: str) -> None:
    """Asked again until several processes had a part in a race: the system decides who accepts a connection."""
    for race in range(20):
        if len(workers_of_a_race(site, f"{key}-{race}")) > 1:
            return
    pytest.fail("one process accepted the connections of all races")


def workers_of_a_race(site: Site, key: str) -> set[str]:
    answers = [call.result(PATIENCE) for call in at_once(site, "patient/plain", key)]
    (made,) = [answer for answer in answers if answer.status_code == 201 and not replayed(answer)]
    for answer in answers:
        assert answer.content == made.content if answer.status_code == 201 else refusal(answer) == PROCESSING
    assert site.executions(key) == 1
    return {answer.headers["x-worker"] for answer in answers}


def test_while_the_first_of_fifty_works_all_others_are_told_so(site: Site, key: str) -> None:
    calls = at_once(site, "patient/plain?gate", key)
    site.desk.wait_for(key, "executed")
    deadline = time.monotonic() + PATIENCE
    while sum(call.done() for call in calls) < CROWD - 1 and time.monotonic() < deadline:
        time.sleep(0.005)  # the others' answers come when they come
    site.desk.open(key)
    answers = [call.result(PATIENCE) for call in calls]
    counted = Counter((answer.status_code, replayed(answer)) for answer in answers)
    assert counted == {(201, False): 1, (409, False): CROWD - 1}
    assert replayed(site.post("patient/plain?gate", key))
    assert site.executions(key) == 1


def test_fifty_duplicates_that_wait_get_the_same_answer(site: Site, key: str) -> None:
    calls = at_once(site, "wait/plain?gate", key)
    site.desk.wait_for(key, "executed")
    site.desk.open(key)
    answers = [call.result(PATIENCE) for call in calls]
    assert {(answer.status_code, answer.content) for answer in answers} == {(201, answers[0].content)}, (
        site.server.log()
    )
    assert Counter(map(replayed, answers)) == {False: 1, True: CROWD - 1}
    assert site.executions(key) == 1


# -- workers that die ------------------------------------------------------------------------------------------------


def leave_unfinished(site: Site, rule: str, *keys: str) -> float:
    """Workers are killed while they handle the requests, and the clients see their connections break. Says when."""
    with ExitStack() as opened:
        connections = [opened.enter_context(site.connect()) for _ in keys]
        for connection, key in zip(connections, keys, strict=True):
            connection.send(site.whole(f"{rule}/plain?gate", key))
        pids = {site.desk.wait_for(key, "executed")["pid"] for key in keys}
        assert pids <= set(site.server.pids)
        killed = time.monotonic()
        for pid in pids:
            site.server.kill_worker(pid)
        assert [connection.all() for connection in connections] == [b""] * len(keys)
    return killed


def answered(site: Site, rule: str, key: str) -> httpx.Response:
    """The answer to a request, as a client hears it that tries again while the store is unavailable: on a busy machine
    SQLite's one writer may keep the others waiting."""
    ends = time.monotonic() + PATIENCE
    while (answer := site.post(f"{rule}/plain?gate", key)).status_code == 503 and time.monotonic() < ends:
        time.sleep(0.02)  # as a client would, if shorter
    return answer


def refusals(site: Site, rule: str, key: str, killed: float) -> tuple[list[int], httpx.Response]:
    """The seconds that a client is told to wait while its request is in progress, and what it hears then."""
    heard: list[int] = []
    while time.monotonic() < killed + PATIENCE:
        answer = answered(site, rule, key)
        if answer.status_code != 409 or code_of(answer) != "IDEMPOTENCY_KEY_PROCESSING":
            assert heard or time.monotonic() > killed + CRASH_LEASE / 2, "its lease had not ended"
            return heard, answer
        heard.append(int(answer.headers["retry-after"]))
        time.sleep(0.02)  # as a client would, if shorter
    raise AssertionError("in progress for ever")


def test_a_killed_workers_request_is_carried_out_again_when_its_lease_has_ended(site: Site, key: str) -> None:
    killed = leave_unfinished(site, "crash", key)
    site.desk.open(key)
    refused, answer = refusals(site, "crash", key, killed)
    assert all(1 <= seconds <= math.ceil(CRASH_LEASE) for seconds in refused)
    assert (answer.status_code, replayed(answer)) == (201, False)
    first, second = site.desk.notes(key, "executed")
    assert second["fence"] > first["fence"]
    assert site.post("crash/plain?gate", key).content == answer.content
    assert (site.executions(key), len(site.desk.notes(key, "done"))) == (2, 1)


def test_a_killed_workers_request_stays_unknown_until_someone_says(site: Site, key: str, store: Any) -> None:
    happened, did_not = f"{key}-happened", f"{key}-did-not"
    killed = leave_unfinished(site, "unknown", happened, did_not)
    for each in (happened, did_not):
        site.desk.open(each)
        refused, answer = refusals(site, "unknown", each, killed)
        assert all(1 <= seconds <= math.ceil(CRASH_LEASE) for seconds in refused)
        for again in (answer, site.post("unknown/plain?gate", each)):
            assert refusal(again) == (409, "IDEMPOTENCY_OUTCOME_UNKNOWN", False)
        assert site.executions(each) == 1

    with Once(store.url) as operator:
        scope = f"POST {site.path('unknown/plain')}"
        operator.resolve(happened, scope=scope, done=True, value={"found": "by hand"})
        operator.resolve(did_not, scope=scope, done=False)
    answer = site.post("unknown/plain?gate", happened)
    assert (answer.status_code, replayed(answer), answer.json()) == (200, True, {"found": "by hand"})
    answers = [site.post("unknown/plain?gate", did_not) for _ in range(2)]
    assert [(answer.status_code, replayed(answer)) for answer in answers] == [(201, False), (201, True)]
    assert (site.executions(happened), site.executions(did_not)) == (1, 2)


# -- stores that go away ---------------------------------------------------------------------------------------------


class Load:
    """Clients that ask for the same keys, one after the other, until told to stop, each again until it is answered."""

    def __init__(self, site: Site, rule: str, key: str) -> None:
        self._site, self._rule, self._key = site, rule, key
        self._lock = threading.Lock()
        self.seen: Counter[int] = Counter()
        self.bodies: dict[str, set[bytes]] = {}
        self.underway, self.refused, self.over = threading.Event(), threading.Event(), threading.Event()

    def client(self) -> None:
        for number in count():
            if self.over.is_set():
                return
            key = f"{self._key}-{number}"
            answer = self._insist(key)
            with self._lock:
                self.bodies.setdefault(key, set()).add(answer.content)
                if number > 1:
                    self.underway.set()

    def _insist(self, key: str) -> httpx.Response:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            answer = self._site.post(f"{self._rule}/plain", key)
            with self._lock:
                self.seen[answer.status_code] += 1
            if answer.status_code == 201:
                return answer
            assert answer.status_code in (409, 503), f"{answer.text}\n{self._site.server.log()}"
            assert refusal(answer) in (PROCESSING, UNAVAILABLE)
            if answer.status_code == 503:
                self.refused.set()
            time.sleep(0.02)  # as a client would, if shorter
        raise AssertionError(f"no answer for {key}")


@pytest.mark.parametrize("rule", ["hasty", "patient"])
def test_a_store_that_goes_away_under_load_does_nothing_twice_and_loses_nothing(
    site: Site, key: str, rule: str, store: Any
) -> None:
    """Answers are 2xx, 409 or 503, each refusal says when to ask again, and who asks again has an answer in the end."""
    load = Load(site, rule, key)
    with ThreadPoolExecutor(12) as threads:
        clients = [threads.submit(load.client) for _ in range(12)]
        try:
            assert load.underway.wait(PATIENCE)
            with store.away():
                assert rule == "patient" or load.refused.wait(PATIENCE)
            site.post_until("patient/plain", f"{key}-until-it-is-back", 201)
        finally:
            load.over.set()
        for client in clients:
            client.result(2 * PATIENCE)
    executed = Counter(each for each in site.desk.keys("executed") if each in load.bodies)
    assert executed == dict.fromkeys(load.bodies, 1)
    assert {len(answers) for answers in load.bodies.values()} == {1}
    assert not load.seen.keys() - {201, 409, 503}


def test_an_outcome_that_could_not_be_recorded_is_recorded_when_the_store_is_back(
    site: Site, key: str, store: Any
) -> None:
    """The store goes away between the work and its outcome: 503, and by itself the outcome is there for the retry."""
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(site.post, "hasty/plain?gate", key)
        site.desk.wait_for(key, "executed")
        with store.away():
            site.desk.open(key)
            assert refusal(call.result(PATIENCE)) == UNAVAILABLE
    answer = site.post_until("hasty/plain?gate", key, 201)
    assert replayed(answer)
    assert answer.json()["key"] == key
    assert site.executions(key) == 1


def test_a_stream_whose_outcome_could_not_be_recorded_does_not_look_complete(site: Site, key: str, store: Any) -> None:
    """Its beginning is with the client already: the connection breaks before the last byte, and the retry has all."""
    place = "hasty/halves?sized"
    site.post_until("hasty/plain", f"{key}-before", 201)  # whatever was away before is back
    with site.connect() as connection:
        connection.send(site.whole(place, key))
        connection.until(b"\r\n\r\n")
        if b" 503 " in connection.so_far(0.05)[:15]:  # for this worker it was not
            connection.response()
            connection.send(site.whole(place, key))
        connection.until(b"first half, ")
        with store.away():
            site.open(key)
            with pytest.raises((h11.RemoteProtocolError, ConnectionError)):
                connection.response()
    answer = site.post_until(place, key, 201)
    assert (replayed(answer), answer.content) == (True, b"first half, second half")
    assert site.executions(key) == 1


def test_a_store_that_cannot_be_written_is_a_503_until_it_can(site: Site, key: str, store: Any) -> None:
    """A file that someone has locked, a replica, a standby."""
    tries = 0
    with store.read_only():
        deadline = time.monotonic() + PATIENCE
        while (answer := site.post("hasty/plain", f"{key}-{tries}")).status_code == 201:
            tries += 1  # it takes a server a moment to notice
            assert time.monotonic() < deadline
        assert refusal(answer) == UNAVAILABLE
        assert site.executions(f"{key}-{tries}") == 0
    assert not replayed(site.post_until("hasty/plain", f"{key}-{tries}", 201))
    assert site.executions(f"{key}-{tries}") == 1


def test_an_open_policy_carries_requests_out_while_the_store_is_away(site: Site, key: str, store: Any) -> None:
    big = b"x" * 300_000
    with store.away():
        answers = [site.post("open/plain", key, body) for body in (b"", big)]
        assert [(answer.status_code, replayed(answer)) for answer in answers] == [(201, False)] * 2
    assert site.executions(key) == 2
    site.post_until("hasty/plain", f"{key}-until-it-is-back", 201)
    answers = [site.post("open/plain", f"{key}-again") for _ in range(20)]
    assert {answer.status_code for answer in answers} == {201}
    assert replayed(answers[-1])


# -- what a store that goes away leaves behind -----------------------------------------------------------------------


class Handler:
    """Answers 201, or fails as often as told; the same behind both doors."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.executions = 0

    def status(self) -> int:
        self.executions += 1
        self.failures -= 1
        return 201 if self.failures < 0 else 500

    def wsgi(self, environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
        start(f"{self.status()} Status", [("Content-Length", "4")])
        return [b"said"]

    async def asgi(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status(), "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"said"})


def statuses(interface: str, store: FaultyStore, handler: Handler) -> list[int]:
    """What a client gets that asks again and again until it is served."""
    headers, policy = {"Idempotency-Key": "key"}, Policy.intake()
    seen: list[int] = []

    def insist() -> None:
        blocking = Once(store, retry_for=0, collect=False)
        transport = httpx.WSGITransport(wsgi.IdempotencyMiddleware(handler.wsgi, blocking, policy=policy))
        with httpx.Client(transport=transport, base_url="http://test") as client, blocking:
            while 201 not in seen and len(seen) < 500:
                seen.append(client.post("/", headers=headers).status_code)
                time.sleep(0.01)  # as a client would, if shorter

    async def insist_async() -> None:
        awaited = AsyncOnce(store, retry_for=0, collect=False)
        transport = httpx.ASGITransport(asgi.IdempotencyMiddleware(handler.asgi, awaited, policy=policy))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client, awaited:
            while 201 not in seen and len(seen) < 500:
                seen.append((await client.post("/", headers=headers)).status_code)
                await asyncio.sleep(0.01)  # as a client would, if shorter

    insist() if interface == "wsgi" else asyncio.run(insist_async())
    return seen


@pytest.mark.parametrize("interface", ["asgi", "wsgi"])
def test_a_claim_whose_reply_was_lost_does_not_block_the_retry(interface: str) -> None:
    """The client was told to try again; the claim that nobody works under is given back, not kept for its lease."""
    store, handler = FaultyStore(MemoryStore()), Handler()
    store.lose_reply("claim")
    seen = statuses(interface, store, handler)
    assert (seen[0], seen[-1]) == (503, 201)
    assert handler.executions == 1


@pytest.mark.parametrize("interface", ["asgi", "wsgi"])
def test_a_failure_whose_claim_could_not_be_given_back_does_not_block_the_retry(interface: str) -> None:
    """The handler failed while the store was away: when it is back, the retry is carried out, long before the lease."""
    store, handler = FaultyStore(MemoryStore()), Handler(failures=1)
    store.lose_request("release", 3)
    seen = statuses(interface, store, handler)
    assert (seen[0], seen[-1]) == (500, 201)
    assert handler.executions == 2


# -- a disk that is full ---------------------------------------------------------------------------------------------


def test_a_body_that_finds_no_room_on_the_disk_is_a_503_and_executes_nothing(site: Site, key: str, store: Any) -> None:
    """Files may not grow over so much for a while: larger bodies are refused, small ones are not.

    The server reads the rest of a refused body, so that the client gets the response and no reset connection.
    """
    room = store.size() + (2 << 20)
    large = b"x" * (room + (4 << 20))
    pids = site.server.pids
    limits = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
    for pid, (_, hard) in limits.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, hard))
    try:
        assert refusal(site.post("hasty/plain", key, large)) == UNAVAILABLE
        assert site.post("hasty/plain", f"{key}-small", b"x" * 200_000).status_code == 201
        assert site.executions(key) == 0
    finally:
        for pid, limit in limits.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
    assert site.post("hasty/plain", key, large).status_code == 201
    assert replayed(site.post("hasty/plain", key, large))
    assert site.executions(key) == 1
