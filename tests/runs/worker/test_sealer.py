"""The sealer hands heads to a file or a URL, again if that failed, and complains about seals that were replaced."""

import asyncio
import json
import logging
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import create_server
from threading import Event, Thread
from typing import Any, ClassVar

import pytest

from semel._concurrency.sync import run_sync
from semel.errors import InvalidRequest, SemelError, StoreBroken
from semel.runs.store import seals as sealing
from semel.runs.worker import sealer as sealer_module
from semel.runs.worker.sealer import AGAIN, Sealer
from semel.runs.worker.sweeper import Sweeper
from support.databases import DATABASES, Databases, TestDatabase
from support.waiting import eventually


@pytest.fixture
def database(databases: Databases) -> Iterator[TestDatabase]:
    with databases.empty("sqlite") as database:
        database.app.begin_sealing()
        yield database


class Receiver(BaseHTTPRequestHandler):
    """Keeps what is posted to it."""

    status: ClassVar[int] = 204
    posted: ClassVar[list[dict[str, Any]]] = []
    authorization: ClassVar[str | None] = None

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.status == 204:
            self.posted.append(json.loads(body))
        Receiver.authorization = self.headers["Authorization"]
        self.send_response(self.status)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Receiver, "posted", [])
    with serving() as place:
        yield place


@contextmanager
def serving() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def sealer(database: TestDatabase, monkeypatch: pytest.MonkeyPatch, heads: str, *, awaited: bool = False) -> Sealer:
    monkeypatch.setenv("SEMEL_SEAL_HEADS", heads)
    store = database.app.ledger(awaited=True) if awaited else database.app._engine.store
    if awaited:
        database._stack.callback(lambda: run_sync(store.close()))
    return Sealer(store)


def seal_one(database: TestDatabase, sealer: Sealer) -> str:
    """Seal a run; the head of its seal."""
    database.finish(database.submit())
    run = asyncio.run if sealer._store.awaited else run_sync
    assert run(sealer.seal()) == 1
    return str(database.rows("SELECT digest FROM semel_seals ORDER BY number DESC LIMIT 1")[0][0])


def hand_out(sealer: Sealer) -> None:
    run_sync(sealer.hand_out())


def test_a_head_is_posted_once_with_the_password_of_the_url(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch, receiver: str
) -> None:
    own = sealer(database, monkeypatch, f"http://sue:pa%40ss@{receiver}/heads?of=semel")
    hand_out(own)
    assert Receiver.posted == [], "there is no seal yet"
    heads = [seal_one(database, own) for _ in range(2)]
    for _ in range(2):
        hand_out(own)
    assert [each["head"] for each in Receiver.posted] == heads[1:]
    assert Receiver.authorization == f"Basic {b64encode(b'sue:pa@ss').decode()}"


@pytest.mark.parametrize("status", [302, 307, 500])
def test_a_head_that_is_not_accepted_is_posted_again(
    database: TestDatabase,
    monkeypatch: pytest.MonkeyPatch,
    receiver: str,
    status: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Receiver, "status", status)
    own = sealer(database, monkeypatch, f"http://{receiver}/")
    head = seal_one(database, own)
    hand_out(own)
    assert f"HTTP Error {status}" in caplog.text
    monkeypatch.setattr(Receiver, "status", 204)
    hand_out(own)
    assert Receiver.posted == [], "it waits before it tries again"
    own._hands_out_at -= AGAIN
    hand_out(own)
    assert [each["head"] for each in Receiver.posted] == [head]


@contextmanager
def saying(line: bytes) -> Iterator[int]:
    """The port of a receiver that answers one request with this line instead of HTTP."""
    with closing(create_server(("127.0.0.1", 0))) as server:

        def respond() -> None:
            conn, _ = server.accept()
            with conn:
                conn.recv(65536)
                conn.sendall(line + b"\r\n\r\n")

        thread = Thread(target=respond)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def test_a_receiver_that_does_not_speak_http_stops_no_sweeper(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with saying(b"nonsense") as port:
        own = sealer(database, monkeypatch, f"http://sue:hunter2@127.0.0.1:{port}/")
        seal_one(database, own)
        hand_out(own)
    assert "could not be handed to SEMEL_SEAL_HEADS: nonsense" in caplog.text
    assert "hunter2" not in caplog.text


class Dripping:
    """A receiver that sends one byte of its status line after the other, and never the whole of it."""

    def __init__(self) -> None:
        self.asked = 0
        self._over = Event()

    def __enter__(self) -> str:
        self._server = create_server(("127.0.0.1", 0))
        self._thread = Thread(target=self._serve)
        self._thread.start()
        return f"http://127.0.0.1:{self._server.getsockname()[1]}/"

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._server.close()

    def _serve(self) -> None:
        self._server.settimeout(0.05)
        while not self._over.is_set():
            try:
                conn, _ = self._server.accept()
            except TimeoutError:
                continue
            with conn:
                self.asked += 1
                conn.recv(65536)
                while not self._over.wait(0.05):
                    conn.sendall(b"H")


@pytest.mark.parametrize("awaited", [False, True])
def test_a_receiver_that_responds_too_slowly_is_waited_for_only_so_long_and_asked_once_at_a_time(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, awaited: bool
) -> None:
    monkeypatch.setattr(sealer_module, "POST_FOR", 0.3)
    dripping = Dripping()
    with dripping as place:
        own = sealer(database, monkeypatch, place, awaited=awaited)
        seal_one(database, own)
        began = time.monotonic()
        longest = 5.0
        run = asyncio.run if awaited else run_sync

        async def hand_out_in_time() -> None:
            await asyncio.wait_for(own.hand_out(), longest) if awaited else await own.hand_out()

        for _ in range(2):
            run(hand_out_in_time())
            own._hands_out_at -= AGAIN
        assert time.monotonic() - began < longest
        assert dripping.asked == 1
        assert "SEMEL_SEAL_HEADS: it took longer than 0.3 seconds" in caplog.text
        assert "SEMEL_SEAL_HEADS: the attempt before has not ended yet" in caplog.text
        sending = own._sending
    assert sending is not None
    eventually(lambda: not sending.is_alive())
    with serving() as place:
        monkeypatch.setattr(Receiver, "posted", [])
        own._keep = sealer(database, monkeypatch, f"http://{place}/")._keep
        run(own.hand_out())
    assert len(Receiver.posted) == 1, "it is tried again"


@pytest.mark.parametrize(
    "place",
    [
        "http://",
        "https://host:nonsense/",
        "http://sue:hunter2@[::1/",
        "HTTP://:80/",
        "ftp://sue:hunter2@host/heads",
        "file:///hunter2",
        " http://sue:hunter2@host/",
        "http:/sue:hunter2@host/",
        "http://host/a b?x=hunter2",
        "http://host/?x=hunter2\n",
        "http://host/?x=\x1bhunter2",
        "http://host/?x=\u00a0hunter2",
    ],
)
def test_what_is_no_url_is_refused_at_the_start(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    with pytest.raises(InvalidRequest, match="SEMEL_SEAL_HEADS: this is not a URL") as refused:
        sealer(database, monkeypatch, place)
    assert "hunter2" not in str(refused.value)


def test_what_a_receiver_says_of_the_secrets_of_its_url_is_not_logged(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with saying(b"nonsense: k=hunt%20er2&n=1 of suzanne:pa@ss, or hunt er2") as port:
        place = f"http://suzanne:pa%40ss@127.0.0.1:{port}/heads?k=hunt%20er2&n=1"
        own = sealer(database, monkeypatch, place)
        seal_one(database, own)
        hand_out(own)
    assert "could not be handed to SEMEL_SEAL_HEADS: nonsense: *** of ***, or ***" in caplog.text


@pytest.mark.parametrize("place", ["C:/none/heads", "none/http/heads"])
def test_a_path_is_no_url(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    own = sealer(database, monkeypatch, place)
    seal_one(database, own)
    hand_out(own)
    assert f"No such file or directory: '{place}'" in caplog.text


@pytest.mark.parametrize("kind", DATABASES)
def test_a_malformed_row_of_the_queue_is_logged_once_and_the_others_are_sealed(
    databases: Databases, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    with databases.empty(kind) as database:
        database.app.begin_sealing()
        database.finish(database.submit())
        database.write("INSERT INTO semel_unsealed VALUES ('x')")

        async def seal() -> list[int]:
            store = database.app.ledger(awaited=True)
            own = Sealer(store)
            try:
                return [await own.seal() for _ in range(3)]
            finally:
                await store.close()

        assert asyncio.run(seal()) == [1, 0, 0]
    place = "rowid 2" if kind == "sqlite" else "ctid (0,2)"
    assert caplog.text.count(f"{place} of the queue semel_unsealed is malformed") == 1


@pytest.mark.parametrize("step", ["seal", "head"])
def test_a_sealer_that_fails_stops_neither_heads_nor_retention(
    database: TestDatabase,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    step: str,
) -> None:
    heads = tmp_path / "heads.jsonl"
    seal_one(database, sealer(database, monkeypatch, str(heads)))
    removed: list[float] = []
    errors = [StoreBroken("no privilege"), TypeError("unforeseen"), SemelError("impossible")]

    async def remove_old(seconds: float) -> None:
        removed.append(seconds)

    def fail(*_: object) -> None:
        raise errors.pop()

    monkeypatch.setattr(sealing, step, fail)
    app = database.app
    for failed in ("failed; retrying: impossible", "failed; retrying\nTraceback", "failed; retrying: no privilege"):
        sweeper = Sweeper(
            app._engine.store, "me", transport=app.transport, hooks=app.hooks, remove_old=remove_old, retention=1.0
        )
        run_sync(sweeper.sweep())
        assert failed in caplog.text
    assert heads.exists() == (step == "seal")
    assert len(removed) == 3


def test_the_head_of_a_process_that_died_before_it_could_is_handed_out_by_the_next(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "heads.jsonl"
    head = seal_one(database, sealer(database, monkeypatch, str(file)))
    assert not file.exists()
    hand_out(sealer(database, monkeypatch, str(file)))
    assert json.loads(file.read_text())["head"] == head


def test_a_seal_that_was_removed_behind_the_sealers_back_is_logged(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = sealer(database, monkeypatch, "")
    heads = [seal_one(database, own) for _ in range(3)]
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]
    database.write("DELETE FROM semel_seals WHERE number = 3")
    database.write("DELETE FROM semel_seal_leaves WHERE number = 3")
    seal_one(database, own)
    assert f"seal 3 does not follow seal 3, whose head was {heads[2]}" in caplog.text
