"""Races and faults at both doors, over four worker processes: duplicates, dead workers, stores and disks that fail."""

import asyncio
import json
import math
import resource
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, IncompleteRead
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import redis
from msgspec import Struct
from sqlalchemy import make_url

from semel import AsyncOnce, Once, Policy
from semel.cli import main as semel_command
from semel.http import asgi, wsgi
from semel.once.stores.memory import MemoryStore
from semel.testing import FaultyStore
from support import servers
from support.process_peer import Desk
from support.web_servers import WebServer, web_server

PATIENCE = 60
WORKERS = 4
CROWD = 50
CRASH_LEASE = 1.2
"""As fault_apps has it."""

numbers = count()

KINDS = ["sqlite", "redis", "postgres"]
DOORS = {
    "wsgi": ("gunicorn", ["--worker-class", "gthread", "--threads", "16", "--preload"]),
    "asgi": ("uvicorn", []),
}


class Answer(Struct):
    """What a client got; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def replayed(self) -> bool:
        return self.headers.get("idempotent-replayed") == "true"

    @property
    def retry_after(self) -> int:
        return int(self.headers["retry-after"])

    @property
    def code(self) -> str:
        said: str = json.loads(self.body)["error_code"]
        return said


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


class Site:
    """Four workers, a store of theirs, and what their app notes."""

    def __init__(self, server: WebServer, door: str, kind: str, store: Any, desk: Desk) -> None:
        self.server, self.kind, self.store, self.desk = server, kind, store, desk
        self.first_key = f"first-{door}-{kind}"
        self.first: Answer

    def post(self, rule: str, key: str, body: bytes = b"") -> Answer:
        """Ask under a policy; `rule` may end with a query."""
        with closing(self.connect()) as connection:
            return self.ask(connection, rule, key, body)

    def connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE)

    def ask(self, connection: HTTPConnection, rule: str, key: str, body: bytes = b"") -> Answer:
        connection.request("POST", f"/{self.kind}/{rule}", body, {"Idempotency-Key": key})
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, headers, response.read())

    def post_until(self, rule: str, key: str, *statuses: int, body: bytes = b"") -> Answer:
        """Ask again, as a good client does, until the status is one of these; refusals say when to ask again."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                answer = self.post(rule, key, body)
            except (OSError, HTTPException):
                continue  # the worker that had it is gone
            if answer.status in statuses:
                return answer
            assert answer.status in (409, 503), answer
            assert answer.retry_after >= 1
            time.sleep(0.02)  # as a client would, if shorter
        raise AssertionError(f"{rule} did not answer {statuses}")

    def executions(self, key: str) -> int:
        return len(self.desk.notes(key, "executed"))


@pytest.fixture(scope="module")
def sites(stores: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Site]]:
    """A server for each door, started while no store is there, and what a first request to each store gets then."""
    found = {}
    with ExitStack() as running:
        with ExitStack() as outage:
            for store in stores.values():
                outage.enter_context(store.away())
            for door, (program, options) in DOORS.items():
                folder = tmp_path_factory.mktemp("desk")
                env = {
                    "FAULT_DOOR": door,
                    "FAULT_STORES": json.dumps({kind: store.url for kind, store in stores.items()}),
                    "FAULT_FOLDER": str(folder),
                    "TMPDIR": str(folder),
                }
                starting = web_server(program, "support.apps.fault_apps:app", workers=WORKERS, env=env, options=options)
                server = running.enter_context(starting)
                for kind, store in stores.items():
                    site = found[door, kind] = Site(server, door, kind, store, Desk(folder))
                    site.first = site.post("conflict", site.first_key)
        yield found


@pytest.fixture(params=[(door, kind) for door in DOORS for kind in KINDS], ids="-".join)
def site(request: pytest.FixtureRequest, sites: dict[tuple[str, str], Site]) -> Site:
    return sites[request.param]


@pytest.fixture
def key() -> str:
    return f"key-{next(numbers)}"


def at_once(site: Site, rule: str, key: str, number: int = CROWD) -> list[Future[Answer]]:
    """The same request from many clients, all connected before the first byte is sent."""
    lines = [site.connect() for _ in range(number)]
    for line in lines:
        line.connect()
    start = threading.Barrier(number)

    def ask(line: HTTPConnection) -> Answer:
        with closing(line):
            start.wait(PATIENCE)
            return site.ask(line, rule, key)

    threads = ThreadPoolExecutor(number)
    calls = [threads.submit(ask, line) for line in lines]
    threads.shutdown(wait=False)
    return calls


# -- a store that is not there yet -----------------------------------------------------------------------------------


def test_a_store_that_was_never_there_is_a_503_and_is_found_when_it_comes(site: Site) -> None:
    key, first = site.first_key, site.first
    assert (first.status, first.code) == (503, "IDEMPOTENCY_STORE_UNAVAILABLE")
    assert first.retry_after >= 1
    assert site.executions(key) == 0
    assert not site.post_until("conflict", key, 201).replayed
    assert site.post("conflict", key).replayed
    assert site.executions(key) == 1


# -- races -----------------------------------------------------------------------------------------------------------


def test_of_fifty_duplicates_at_once_one_is_carried_out(site: Site, key: str) -> None:
    """Asked again until several processes had a part in a race: the system decides who accepts a connection."""
    for race in range(20):
        if len(workers_of_a_race(site, f"{key}-{race}")) > 1:
            return
    pytest.fail("one process accepted the connections of all races")


def workers_of_a_race(site: Site, key: str) -> set[str]:
    answers = [call.result(PATIENCE) for call in at_once(site, "patient", key)]
    made = [answer for answer in answers if answer.status == 201 and not answer.replayed]
    assert len(made) == 1
    for answer in answers:
        if answer.status == 201:
            assert answer.body == made[0].body
        else:
            assert (answer.status, answer.code) == (409, "IDEMPOTENCY_KEY_PROCESSING")
            assert answer.retry_after >= 1
    assert site.executions(key) == 1
    return {answer.headers["x-worker"] for answer in answers}


def test_while_the_first_of_fifty_works_all_others_are_told_so(site: Site, key: str) -> None:
    calls = at_once(site, "patient?gate", key)
    site.desk.wait_for(key, "executed")
    deadline = time.monotonic() + PATIENCE
    while sum(call.done() for call in calls) < CROWD - 1 and time.monotonic() < deadline:
        time.sleep(0.005)  # the others' answers come when they come
    site.desk.open(key)
    answers = [call.result(PATIENCE) for call in calls]
    assert Counter((answer.status, answer.replayed) for answer in answers) == {(201, False): 1, (409, False): CROWD - 1}
    assert site.post("patient?gate", key).replayed
    assert site.executions(key) == 1


def test_fifty_duplicates_that_wait_get_the_same_answer(site: Site, key: str) -> None:
    calls = at_once(site, "wait?gate", key)
    site.desk.wait_for(key, "executed")
    site.desk.open(key)
    answers = [call.result(PATIENCE) for call in calls]
    assert {(answer.status, answer.body) for answer in answers} == {(201, answers[0].body)}
    assert Counter(answer.replayed for answer in answers) == {False: 1, True: CROWD - 1}
    assert site.executions(key) == 1


# -- workers that die ------------------------------------------------------------------------------------------------


def leave_unfinished(site: Site, rule: str, *keys: str) -> float:
    """Workers are killed while they handle the requests, and the clients see their connections break. Says when."""
    with ExitStack() as opened:
        lines = []
        for key in keys:
            line = socket.create_connection(("127.0.0.1", site.server.port), timeout=PATIENCE)
            lines.append(opened.enter_context(line))
            head = [
                f"POST /{site.kind}/{rule}?gate HTTP/1.1",
                "Host: x",
                f"Idempotency-Key: {key}",
                "Content-Length: 0",
            ]
            line.sendall("\r\n".join([*head, "", ""]).encode())
        pids = {site.desk.wait_for(key, "executed")["pid"] for key in keys}
        assert pids <= set(site.server.pids)
        killed = time.monotonic()
        for pid in pids:
            site.server.kill_worker(pid)
        for line in lines:
            with suppress(ConnectionResetError):
                assert line.recv(1000) == b""
    return killed


def refusals(site: Site, rule: str, key: str, killed: float) -> tuple[list[Answer], Answer]:
    """What a client hears while its request is said to be in progress, and what it hears then."""
    heard: list[Answer] = []
    while time.monotonic() < killed + PATIENCE:
        answer = site.post(f"{rule}?gate", key)
        if answer.status != 409 or answer.code != "IDEMPOTENCY_KEY_PROCESSING":
            assert heard or time.monotonic() > killed + CRASH_LEASE / 2, "its lease had not ended"
            return heard, answer
        heard.append(answer)
        time.sleep(0.02)  # as a client would, if shorter
    raise AssertionError("in progress for ever")


def test_a_killed_workers_request_is_carried_out_again_when_its_lease_has_ended(site: Site, key: str) -> None:
    killed = leave_unfinished(site, "crash", key)
    site.desk.open(key)
    refused, answer = refusals(site, "crash", key, killed)
    assert all(1 <= each.retry_after <= math.ceil(CRASH_LEASE) for each in refused)
    assert (answer.status, answer.replayed) == (201, False)
    first, second = site.desk.notes(key, "executed")
    assert second["fence"] > first["fence"]
    assert site.post("crash?gate", key).body == answer.body
    assert (site.executions(key), len(site.desk.notes(key, "done"))) == (2, 1)


def test_a_killed_workers_request_stays_unknown_until_someone_says(site: Site, key: str) -> None:
    happened, did_not = f"{key}-happened", f"{key}-did-not"
    killed = leave_unfinished(site, "unknown", happened, did_not)
    for each in (happened, did_not):
        site.desk.open(each)
        refused, answer = refusals(site, "unknown", each, killed)
        assert all(1 <= each.retry_after <= math.ceil(CRASH_LEASE) for each in refused)
        for again in (answer, site.post("unknown?gate", each)):
            assert (again.status, again.code) == (409, "IDEMPOTENCY_OUTCOME_UNKNOWN")
            assert "retry-after" not in again.headers
        assert site.executions(each) == 1

    with Once(site.store.url) as operator:
        operator.resolve(happened, scope=f"POST /{site.kind}/unknown", done=True, value={"found": "by hand"})
        operator.resolve(did_not, scope=f"POST /{site.kind}/unknown", done=False)
    answer = site.post("unknown?gate", happened)
    assert (answer.status, answer.replayed, json.loads(answer.body)) == (200, True, {"found": "by hand"})
    answers = [site.post("unknown?gate", did_not) for _ in range(2)]
    assert [(answer.status, answer.replayed) for answer in answers] == [(201, False), (201, True)]
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
                self.bodies.setdefault(key, set()).add(answer.body)
                if number > 1:
                    self.underway.set()

    def _insist(self, key: str) -> Answer:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            answer = self._site.post(self._rule, key)
            with self._lock:
                self.seen[answer.status] += 1
            if answer.status == 201:
                return answer
            assert answer.status in (409, 503), answer
            assert answer.retry_after >= 1
            if answer.status == 503:
                self.refused.set()
            time.sleep(0.02)  # as a client would, if shorter
        raise AssertionError(f"no answer for {key}")


@pytest.mark.parametrize("rule", ["conflict", "patient"], ids=["hasty", "patient"])
def test_a_store_that_goes_away_under_load_does_nothing_twice_and_loses_nothing(
    site: Site, key: str, rule: str
) -> None:
    """Answers are 2xx, 409 or 503, each refusal says when to ask again, and who asks again has an answer in the end."""
    load = Load(site, rule, key)
    with ThreadPoolExecutor(12) as threads:
        clients = [threads.submit(load.client) for _ in range(12)]
        try:
            assert load.underway.wait(PATIENCE)
            with site.store.away():
                assert rule == "patient" or load.refused.wait(PATIENCE)
            site.post_until("patient", f"{key}-until-it-is-back", 201)
        finally:
            load.over.set()
        for client in clients:
            client.result(2 * PATIENCE)
    executed = Counter(each for each in site.desk.keys("executed") if each in load.bodies)
    assert executed == dict.fromkeys(load.bodies, 1)
    assert {len(answers) for answers in load.bodies.values()} == {1}
    assert not load.seen.keys() - {201, 409, 503}


def test_an_outcome_that_could_not_be_recorded_is_recorded_when_the_store_is_back(site: Site, key: str) -> None:
    """The store goes away between the work and its outcome: 503, and by itself the outcome is there for the retry."""
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(site.post, "conflict?gate", key)
        site.desk.wait_for(key, "executed")
        with site.store.away():
            site.desk.open(key)
            answer = call.result(PATIENCE)
            assert (answer.status, answer.code) == (503, "IDEMPOTENCY_STORE_UNAVAILABLE")
            assert answer.retry_after >= 1
    answer = site.post_until("conflict?gate", key, 201)
    assert answer.replayed
    assert json.loads(answer.body)["key"] == key
    assert site.executions(key) == 1


def test_a_stream_whose_outcome_could_not_be_recorded_does_not_look_complete(site: Site, key: str) -> None:
    """Its beginning is with the client already: the connection breaks before the last byte, and the retry has all."""
    site.post_until("conflict", f"{key}-before", 201)  # whatever was away before is back
    with closing(site.connect()) as connection:
        connection.request("POST", f"/{site.kind}/conflict?stream", b"", {"Idempotency-Key": key})
        response = connection.getresponse()
        if response.status == 503:  # for this worker it was not
            response.read()
            connection.request("POST", f"/{site.kind}/conflict?stream", b"", {"Idempotency-Key": key})
            response = connection.getresponse()
        assert response.read(5) == b"first"
        with site.store.away():
            site.desk.open(key)
            with pytest.raises((IncompleteRead, ConnectionError)):
                response.read()
    answer = site.post_until("conflict?stream", key, 201)
    assert (answer.replayed, answer.body) == (True, b"first last")
    assert site.executions(key) == 1


def test_a_store_that_cannot_be_written_is_a_503_until_it_can(site: Site, key: str) -> None:
    """A file that someone has locked, a replica, a standby."""
    tries = 0
    with site.store.read_only():
        deadline = time.monotonic() + PATIENCE
        while (answer := site.post("conflict", f"{key}-{tries}")).status == 201:
            tries += 1  # it takes a server a moment to notice
            assert time.monotonic() < deadline
        assert (answer.status, answer.code) == (503, "IDEMPOTENCY_STORE_UNAVAILABLE")
        assert answer.retry_after >= 1
        assert site.executions(f"{key}-{tries}") == 0
    assert not site.post_until("conflict", f"{key}-{tries}", 201).replayed
    assert site.executions(f"{key}-{tries}") == 1


def test_an_open_policy_carries_requests_out_while_the_store_is_away(site: Site, key: str) -> None:
    big = b"x" * 300_000
    with site.store.away():
        answers = [site.post("open", key, body) for body in (b"", big)]
        assert [(answer.status, answer.replayed) for answer in answers] == [(201, False)] * 2
    assert site.executions(key) == 2
    site.post_until("conflict", f"{key}-until-it-is-back", 201)
    answers = [site.post("open", f"{key}-again") for _ in range(20)]
    assert {answer.status for answer in answers} == {201}
    assert answers[-1].replayed


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


def statuses(door: str, store: FaultyStore, handler: Handler) -> list[int]:
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

    insist() if door == "wsgi" else asyncio.run(insist_async())
    return seen


@pytest.mark.parametrize("door", list(DOORS))
def test_a_claim_whose_reply_was_lost_does_not_block_the_retry(door: str) -> None:
    """The client was told to try again; the claim that nobody works under is given back, not kept for its lease."""
    store, handler = FaultyStore(MemoryStore()), Handler()
    store.lose_reply("claim")
    seen = statuses(door, store, handler)
    assert (seen[0], seen[-1]) == (503, 201)
    assert handler.executions == 1


@pytest.mark.parametrize("door", list(DOORS))
def test_a_failure_whose_claim_could_not_be_given_back_does_not_block_the_retry(door: str) -> None:
    """The handler failed while the store was away: when it is back, the retry is carried out, long before the lease."""
    store, handler = FaultyStore(MemoryStore()), Handler(failures=1)
    store.lose_request("release", 3)
    seen = statuses(door, store, handler)
    assert (seen[0], seen[-1]) == (500, 201)
    assert handler.executions == 2


# -- a disk that is full ---------------------------------------------------------------------------------------------


def test_a_body_that_finds_no_room_on_the_disk_is_a_503_and_executes_nothing(site: Site, key: str) -> None:
    """Files may not grow over so much for a while: larger bodies are refused, small ones are not."""
    room = site.store.size() + (2 << 20)
    large = b"x" * (room + (1 << 20))
    pids = site.server.pids
    limits = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
    for pid, (_, hard) in limits.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, hard))
    try:
        answer = site.post("conflict", key, large)
        assert (answer.status, answer.code) == (503, "IDEMPOTENCY_STORE_UNAVAILABLE")
        assert answer.retry_after >= 1
        assert site.post("conflict", f"{key}-small", b"x" * 200_000).status == 201
        assert site.executions(key) == 0
    finally:
        for pid, limit in limits.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
    assert site.post("conflict", key, large).status == 201
    assert site.post("conflict", key, large).replayed
    assert site.executions(key) == 1
