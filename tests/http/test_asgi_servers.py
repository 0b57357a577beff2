"""The ASGI door in uvicorn and granian, with real clients: what streams, breaks, is cut off, cancelled or stopped."""

import base64
import gzip
import hashlib
import os
import signal
import socket
import sqlite3
import struct
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, Self

import h11
import httpx
import pytest

from semel import Once
from support import servers
from support.databases import store_urls
from support.web_servers import WebServer, lives, web_server

KINDS = ["uvicorn", "granian"]
PATIENCE = 20
EVENTS = 5


class Site:
    """A server that runs asgi_app, what its handlers wrote, and the gates that they wait at."""

    def __init__(self, server: WebServer, folder: Path, store: str) -> None:
        self.server = server
        self.folder = folder
        self.store = store
        self.client = httpx.Client(
            base_url=server.url, timeout=PATIENCE, limits=httpx.Limits(max_keepalive_connections=0)
        )

    def close(self) -> None:
        self.client.close()

    def post(self, path: str, key: str, content: Any = b"{}", **more: Any) -> httpx.Response:
        return self.client.post(path, content=content, headers={"Idempotency-Key": key}, **more)

    def settled(self, path: str, key: str, content: Any = b"{}") -> httpx.Response:
        """The answer when nobody works on the key any more."""
        return until(lambda: _unless_processing(self.post(path, key, content)))

    def stream(self, path: str, key: str) -> Any:
        return self.client.stream("POST", path, content=b"{}", headers={"Idempotency-Key": key})

    def connect(self) -> "Wire":
        return Wire(self.server.port)

    def lines(self, key: str) -> list[str]:
        diary = self.folder / f"{key}.diary"
        return diary.read_text().splitlines() if diary.exists() else []

    def ran(self, key: str) -> int:
        return self.lines(key).count("ran")

    def wait_for(self, key: str, line: str) -> None:
        until(lambda: line in self.lines(key))

    def open(self, key: str, *gates: str) -> None:
        for gate in gates:
            (self.folder / f"{key}.{gate}").touch()


class Wire:
    """A connection whose bytes the test writes itself."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self._rest = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def response(self) -> httpx.Response:
        """The next whole response; h11.RemoteProtocolError when it is cut off."""
        status, headers, body = self.raw_response()
        return httpx.Response(status, headers=headers, content=body)

    def raw_response(self) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Status, headers and the bytes of the body as they came."""
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method="POST", target="/", headers=[("host", "test")]))
        parser.send(h11.EndOfMessage())
        if self._rest:
            parser.receive_data(self._rest)  # nothing would mean the end
        status, headers, body = 0, [], b""
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                parser.receive_data(self.socket.recv(1 << 16))
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.Response | h11.InformationalResponse):
                status, headers = event.status_code, list(event.headers)
            if isinstance(event, h11.EndOfMessage | h11.InformationalResponse):
                self._rest = bytes(parser.trailing_data[0])
                return status, headers, body

    def so_far(self, seconds: float) -> bytes:
        """All that arrives within that time."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.socket.settimeout(left)
            try:
                data = self.socket.recv(1 << 16)
            except TimeoutError:
                break
            if not data:
                break
            self._rest += data
        self.socket.settimeout(PATIENCE)
        return self._rest

    def until(self, end: bytes) -> None:
        """Wait until that has arrived."""
        while end not in self._rest:
            data = self.socket.recv(1 << 16)
            assert data, "the server closed the connection"
            self._rest += data

    def reset(self) -> None:
        """Leave as a crashed client does: without a farewell."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def head(path: str, key: str, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: test", f"Idempotency-Key: {key}", *more, "", ""]
    return "\r\n".join(lines).encode()


def whole(path: str, key: str, body: bytes = b"{}") -> bytes:
    return head(path, key, f"Content-Length: {len(body)}") + body


def until(reached: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (answer := reached()):
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)  # another process brings it about, and has no way to tell us
    return answer


def _unless_processing(response: httpx.Response) -> httpx.Response | None:
    busy = response.status_code == 409 and response.json()["error_code"] == "IDEMPOTENCY_KEY_PROCESSING"
    return None if busy else response


@contextmanager
def running(kind: str, folder: Path, store: str) -> Iterator[Site]:
    """A server of the kind with asgi_app over the store."""
    env = {"SEMEL_TEST_STORE": store, "SEMEL_TEST_FOLDER": str(folder)}
    with web_server(kind, "support.apps.asgi_app:app", env=env) as server, closing(Site(server, folder, store)) as site:
        yield site


@pytest.fixture(scope="module")
def sites(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Site]]:
    """Gives the one running site of a server and a store; it starts when a test first asks for it."""
    with store_urls(request) as urls, ExitStack() as cleanup:

        @cache
        def site_of(kind: str, store: str) -> Site:
            folder = tmp_path_factory.mktemp(f"{kind}-{store}")
            url = f"sqlite:///{folder / 'semel.db'}" if store == "sqlite" else urls[store]
            return cleanup.enter_context(running(kind, folder, url))

        yield site_of


@pytest.fixture(params=KINDS)
def site(request: pytest.FixtureRequest, sites: Callable[..., Site]) -> Site:
    return sites(request.param, "sqlite")


@pytest.fixture(
    params=[*((kind, "sqlite") for kind in KINDS), ("uvicorn", "redis"), ("granian", "postgres")], ids="-".join
)
def site_on_every_store(request: pytest.FixtureRequest, sites: Callable[..., Site]) -> Site:
    """Every server, and every store that processes can share."""
    return sites(*request.param)


@pytest.fixture
def key() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def is_replay_of(first: httpx.Response, second: httpx.Response) -> bool:
    return (
        second.headers.get("idempotent-replayed") == "true"
        and "idempotent-replayed" not in first.headers
        and second.status_code == first.status_code
        and second.content == first.content
    )


# Responses that stream


def test_each_event_reaches_the_client_before_the_next_is_made(site_on_every_store: Site, key: str) -> None:
    site = site_on_every_store
    received: list[str] = []
    site.open(key, "0")
    with site.stream("/intake/events", key) as first:
        for line in filter(None, first.iter_lines()):
            assert line.startswith(f"data: {len(received)} ")
            received.append(line)
            assert sum(made.startswith("event") for made in site.lines(key)) == len(received)
            site.open(key, str(len(received)))
    assert len(received) == EVENTS
    assert first.headers["content-type"].startswith("text/event-stream")
    second = site.post("/intake/events", key)
    assert second.headers["idempotent-replayed"] == "true"
    assert second.headers["content-type"] == first.headers["content-type"]
    assert list(filter(None, second.text.splitlines())) == received
    assert site.ran(key) == 1


def test_a_file_is_recorded_though_the_server_could_send_it_by_itself(site: Site, key: str) -> None:
    """granian would send a file by its path, past the door; it must not, since the replay needs the bytes."""
    content = os.urandom(300_000)
    path = site.folder / f"{key}.bin"
    path.write_bytes(content)
    first = site.post("/intake/file", key)
    path.unlink()
    second = site.post("/intake/file", key)
    assert first.content == content
    assert is_replay_of(first, second)
    for name in ("content-length", "content-type", "content-disposition", "etag", "last-modified"):
        assert second.headers[name] == first.headers[name], name
    announced = site.client.get("/extensions").json()
    assert ("http.response.pathsend" in announced) is (site.server.kind == "granian")
    assert "http.response.pathsend" not in site.lines(key)
    assert site.ran(key) == 1


@pytest.mark.parametrize("how", ["", "?sized"], ids=["without a length", "with a length"])
def test_a_generator_that_fails_midway_breaks_the_response_and_frees_the_key(site: Site, key: str, how: str) -> None:
    with site.connect() as wire:
        wire.send(whole(f"/intake/breaks{how}", key))
        with pytest.raises(h11.RemoteProtocolError):
            wire.response()
    second = site.settled(f"/intake/breaks{how}", key)
    assert second.content == b"first half, second half"
    assert "idempotent-replayed" not in second.headers
    assert is_replay_of(second, site.post(f"/intake/breaks{how}", key))
    assert site.ran(key) == 2


def test_under_stripe_a_generator_that_fails_midway_is_a_kept_failure(site: Site, key: str) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        site.post("/stripe/breaks", key)
    second = site.settled("/stripe/breaks", key)
    assert second.status_code == 500
    assert second.headers["idempotent-replayed"] == "true"
    assert second.json()["error"]["code"] == "idempotent_request_failed"
    assert "ran dry" not in second.text
    assert site.ran(key) == 1


# Uploads


def test_a_chunked_upload_is_the_same_request_however_it_is_cut(site: Site, key: str) -> None:
    body = os.urandom(100_000)
    first = site.post("/intake/echo", key, iter([body[:1], body[1:70_000], body[70_000:]]))
    assert first.json()["sha256"] == hashlib.sha256(body).hexdigest()
    second = site.post("/intake/echo", key, (body[at : at + 999] for at in range(0, len(body), 999)))
    assert is_replay_of(first, second)
    assert is_replay_of(first, site.post("/intake/echo", key, body))
    assert site.post("/intake/echo", key, iter([body, b"!"])).status_code == 409
    assert site.ran(key) == 1


def test_a_large_upload_reaches_the_app_whole_and_stays_out_of_memory(site: Site, key: str) -> None:
    megabyte = os.urandom(1 << 20)
    size = 50

    def upload() -> Iterator[bytes]:
        for _ in range(size):
            yield megabyte

    expected = hashlib.sha256()
    for chunk in upload():
        expected.update(chunk)
    site.post("/spilling/echo", f"{key}-small", megabyte)  # what the first upload needs is not counted
    site.server.forget_most_memory()
    before = site.server.memory()
    first = site.post("/spilling/echo", key, upload())
    more = site.server.most_memory() - before
    assert first.json()["size"] == size << 20
    assert first.json()["sha256"] == expected.hexdigest()
    assert more < 16 << 20, f"{more >> 20} MB for an upload of {size} MB"
    assert is_replay_of(first, site.post("/spilling/echo", key, upload()))
    assert site.server.most_memory() - before < 16 << 20
    assert site.ran(key) == 1


def test_a_client_that_asks_first_is_told_to_continue(site: Site, key: str) -> None:
    with site.connect() as wire:
        for times in range(2):
            wire.send(head("/intake/echo", key, "Content-Length: 5", "Expect: 100-continue"))
            assert wire.response().status_code == 100
            wire.send(b"hello")
            response = wire.response()
            assert response.json()["sha256"] == hashlib.sha256(b"hello").hexdigest()
            assert ("idempotent-replayed" in response.headers) is (times == 1)
    assert site.ran(key) == 1


def test_duplicates_in_one_pipeline_run_once_and_are_both_answered(site: Site, key: str) -> None:
    with site.connect() as wire:
        wire.send(whole("/intake/plain", key) * 2)
        first, second = wire.response(), wire.response()
    assert first.status_code == 201
    assert is_replay_of(first, second)
    assert site.ran(key) == 1


# Clients that leave


LEAVING: dict[str, Callable[[Wire], None]] = {
    "closing": lambda wire: wire.socket.close(),
    "resetting": Wire.reset,
}
HALVES = {
    "in the first line": b"POST /intake/pl",
    "in the headers": b"POST /intake/plain HTTP/1.1\r\nHost: test\r\nIdempotency-Key: {key}\r\nContent-Le",
    "before the body": head("/intake/plain", "{key}", "Content-Length: 2"),
    "in the body": head("/intake/plain", "{key}", "Content-Length: 100") + b"{" * 50,
    "in a chunked body": head("/intake/plain", "{key}", "Transfer-Encoding: chunked") + b"2\r\n{}\r\n",
    "in a chunk": head("/intake/plain", "{key}", "Transfer-Encoding: chunked") + b"20\r\n{}",
}


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("half", HALVES)
def test_a_request_that_ends_early_is_not_carried_out(site: Site, key: str, half: str, leave: str) -> None:
    with site.connect() as wire:
        wire.send(HALVES[half].replace(b"{key}", key.encode()))
        assert wire.so_far(0.02).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"") == b""
        LEAVING[leave](wire)
    response = site.post("/intake/plain", key)
    assert response.status_code == 201
    assert "idempotent-replayed" not in response.headers
    assert is_replay_of(response, site.post("/intake/plain", key))
    assert site.ran(key) == 1


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("path", ["/intake/slow", "/intake/attentive", "/wrapped/slow", "/wrapping/slow"])
def test_a_client_that_leaves_while_the_handler_works_finds_the_response_later(
    site: Site, key: str, path: str, leave: str
) -> None:
    with site.connect() as wire:
        wire.send(whole(path, key))
        site.wait_for(key, "ran")
        LEAVING[leave](wire)
    time.sleep(0.05)  # the server hears of it at some time, or never; either way nothing may come of it
    site.open(key, "go")
    site.wait_for(key, "finished")
    response = site.settled(path, key)
    assert response.status_code == 200
    assert response.headers["idempotent-replayed"] == "true"
    assert response.json()["token"]
    assert site.lines(key) == ["ran", "finished"]


def test_a_client_that_leaves_while_the_handler_works_finds_the_response_on_every_store(
    site_on_every_store: Site, key: str
) -> None:
    site = site_on_every_store
    with site.connect() as wire:
        wire.send(whole("/intake/slow", key))
        site.wait_for(key, "ran")
        assert site.post("/intake/slow", key).json()["error_code"] == "IDEMPOTENCY_KEY_PROCESSING"
    site.open(key, "go")
    response = site.settled("/intake/slow", key)
    assert response.headers["idempotent-replayed"] == "true"
    assert site.lines(key) == ["ran", "finished"]


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("door", ["intake", "wrapped", "wrapping"])
def test_a_client_that_leaves_in_the_middle_of_a_stream_finds_all_of_it_later(
    site: Site, key: str, leave: str, door: str
) -> None:
    site.open(key, "0", "1")
    with site.connect() as wire:
        wire.send(whole(f"/{door}/events", key))
        wire.until(b"data: 1 ")
        LEAVING[leave](wire)
    for number in range(2, EVENTS):
        site.open(key, str(number))
        site.wait_for(key, f"event {number}")  # one after the other, so that the server notices that nobody reads
    site.wait_for(key, "finished")
    response = site.settled(f"/{door}/events", key)
    assert response.headers["idempotent-replayed"] == "true"
    assert [line.split()[1] for line in response.text.splitlines() if line] == [str(n) for n in range(EVENTS)]
    assert site.ran(key) == 1


@pytest.mark.parametrize("others", [0, 2], ids=["alone", "behind others"])
@pytest.mark.parametrize("path", ["/intake/slow", "/intake/unsized", "/limited/large?size=8000&pieces"])
def test_a_client_that_leaves_while_its_outcome_is_stored_finds_it_later(
    site: Site, key: str, path: str, others: int, threads: ThreadPoolExecutor
) -> None:
    site.open(key, "0", "1", "2")
    with site.connect() as wire:
        wire.send(whole(path, key))
        site.wait_for(key, "ran")
        if not path.endswith("slow"):
            wire.until(b"\r\n\r\n")
        with locked(site):
            door = path.split("/")[1]
            crowd = [threads.submit(site.post, f"/{door}/plain", f"{key}-{number}") for number in range(others)]
            time.sleep(0.1)  # now the others' claims wait for the store, which nobody outside can see
            site.open(key, "go", "3")
            time.sleep(0.1)  # now the outcome waits to be stored
            wire.reset()
            time.sleep(0.1)  # now the server has heard that the client left
    response = site.settled(path, key)
    assert [other.result().status_code for other in crowd] == [201] * others
    assert response.status_code == (409 if "limited" in path else 200)
    assert response.headers["idempotent-replayed"] == "true"
    assert site.ran(key) == 1


# Handlers that fail, hang or are cancelled


def test_a_handler_that_fails_answers_500_and_runs_again(site: Site, key: str) -> None:
    for times in (1, 2):
        response = site.post("/intake/fails", key)
        assert response.status_code == 500
        assert "idempotent-replayed" not in response.headers
        assert site.ran(key) == times


def test_under_stripe_a_handler_that_fails_is_not_run_again(site: Site, key: str) -> None:
    first = site.post("/stripe/fails", key)
    second = site.settled("/stripe/fails", key)
    assert first.status_code == 500
    assert is_replay_of(first, second)
    assert site.ran(key) == 1


def test_under_stripe_an_exception_has_one_body_for_the_first_client_and_all_others(site: Site, key: str) -> None:
    """The server has the response, whole, and then the exception, which is for its log."""
    first = site.post("/raising/fails", key)
    assert (first.status_code, first.json()["error"]["code"]) == (500, "idempotent_request_failed")
    assert is_replay_of(first, site.post("/raising/fails", key))
    assert site.ran(key) == 1


def test_a_handler_that_times_out_fails_and_runs_again(site: Site, key: str) -> None:
    assert site.post("/intake/hangs", key).status_code == 500
    second = site.post("/intake/hangs", key)
    assert second.status_code == 200
    assert is_replay_of(second, site.post("/intake/hangs", key))
    assert site.ran(key) == 2


def test_a_handler_that_is_cancelled_from_outside_frees_the_key(
    site: Site, key: str, threads: ThreadPoolExecutor
) -> None:
    answer = threads.submit(site.post, "/impatient/endless", key)
    site.wait_for(key, "ran")
    site.open(key, "cancel")
    assert answer.result().status_code == 504
    assert site.lines(key) == ["ran", "cancelled", "gave up"]
    (site.folder / f"{key}.cancel").unlink()
    second = site.post("/impatient/endless", key)
    assert second.status_code == 200
    assert "idempotent-replayed" not in second.headers
    assert is_replay_of(second, site.post("/impatient/endless", key))
    assert site.ran(key) == 2


@pytest.mark.parametrize("others", [0, 2], ids=["alone", "behind others"])
def test_what_is_cancelled_while_its_outcome_is_stored_was_carried_out(
    site: Site, key: str, others: int, threads: ThreadPoolExecutor
) -> None:
    answer = threads.submit(site.post, "/impatient/slow", key)
    site.wait_for(key, "ran")
    with locked(site):
        crowd = [threads.submit(site.post, "/impatient/plain", f"{key}-{number}") for number in range(others)]
        time.sleep(0.1)  # now the others' claims wait for the store, which nobody outside can see
        site.open(key, "go")
        site.wait_for(key, "finished")
        time.sleep(0.1)  # now the outcome waits to be stored
        site.open(key, "cancel")
        time.sleep(0.1)  # now the work is cancelled
    first = answer.result()
    (site.folder / f"{key}.cancel").unlink()
    second = site.settled("/impatient/slow", key)
    assert [other.result().status_code for other in crowd] == [201] * others
    assert first.status_code == 504
    assert second.status_code == 200
    assert second.headers["idempotent-replayed"] == "true"
    assert site.ran(key) == 1


@pytest.mark.parametrize("others", [0, 2], ids=["alone", "behind others"])
def test_what_is_cancelled_while_its_failure_is_noted_frees_the_key(
    site: Site, key: str, others: int, threads: ThreadPoolExecutor
) -> None:
    answer = threads.submit(site.post, "/impatient/slow?code=422", key)
    site.wait_for(key, "ran")
    with locked(site):
        crowd = [threads.submit(site.post, "/impatient/plain", f"{key}-{number}") for number in range(others)]
        time.sleep(0.1)  # now the others' claims wait for the store, which nobody outside can see
        site.open(key, "go")
        site.wait_for(key, "finished")
        time.sleep(0.1)  # now the key waits to be given back
        site.open(key, "cancel")
        time.sleep(0.1)  # now the work is cancelled
    assert answer.result().status_code == 504
    assert [other.result().status_code for other in crowd] == [201] * others
    (site.folder / f"{key}.cancel").unlink()
    second = site.settled("/impatient/slow?code=422", key)
    assert second.status_code == 422
    assert "idempotent-replayed" not in second.headers
    assert site.ran(key) == 2


@pytest.mark.parametrize("query", ["", "?fails"], ids=["that works", "that fails"])
def test_a_background_task_runs_once_after_the_response(site: Site, key: str, query: str) -> None:
    first = site.post(f"/intake/background{query}", key)
    assert site.lines(key) == ["ran"]
    assert is_replay_of(first, site.post(f"/intake/background{query}", key))
    site.open(key, "go")
    site.wait_for(key, "task")
    assert is_replay_of(first, site.post(f"/intake/background{query}", key))
    assert site.lines(key) == ["ran", "task"]


# What a response may consist of


@pytest.mark.parametrize("code", [204, 304])
def test_a_response_without_a_body_replays_without_one(site: Site, key: str, code: int) -> None:
    with site.connect() as wire:
        request = whole(f"/intake/status?code={code}", key)
        wire.send(request)
        first = wire.response()
        wire.send(request)
        second = wire.response()
        wire.send(request)
        assert is_replay_of(first, wire.response())  # nothing was left on the line between them
    assert first.status_code == code
    assert first.content == b""
    assert is_replay_of(first, second)
    assert second.headers["x-token"] == first.headers["x-token"]
    assert "content-length" not in second.headers
    assert site.ran(key) == 1


def test_every_byte_value_replays(site: Site, key: str) -> None:
    first = site.post("/intake/binary", key, bytes(range(256)))
    assert first.content == bytes(range(256)) * 4
    second = site.post("/intake/binary", key, bytes(range(256)))
    assert is_replay_of(first, second)
    assert second.headers["content-type"] == "application/octet-stream"
    assert site.ran(key) == 1


def test_a_compressed_response_replays_as_it_was_or_readable(site: Site, key: str) -> None:
    accepting = whole("/intake/compressed", key).replace(b"\r\n", b"\r\nAccept-Encoding: br, gzip\r\n", 1)
    with site.connect() as wire:
        wire.send(accepting * 2 + whole("/intake/compressed", key))
        first, second, plain = wire.raw_response(), wire.raw_response(), wire.raw_response()
    assert plain[2] == gzip.decompress(first[2])
    assert not any(name == b"content-encoding" for name, _ in plain[1])
    for _, headers, body in (first, second):
        assert gzip.decompress(body)[16:] == bytes(range(256)) * 4
        assert (b"content-encoding", b"gzip") in headers
        assert (b"content-length", b"%d" % len(body)) in headers
    assert second[2] == first[2]
    assert (b"idempotent-replayed", b"true") in second[1]
    assert site.ran(key) == 1


def test_several_headers_of_one_name_replay_one_by_one_and_cookies_never(site: Site, key: str) -> None:
    first, second = site.post("/intake/headers", key), site.post("/intake/headers", key)
    assert is_replay_of(first, second)
    for response in (first, second):
        assert [value for name, value in response.headers.multi_items() if name == "x-many"] == [
            "one",
            "two, three",
            "four",
        ]
    assert first.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert "set-cookie" not in second.headers
    assert site.ran(key) == 1


# When the end of a response leaves


@pytest.mark.parametrize("case", ["slow", "sized", "unsized"])
def test_no_client_has_all_of_a_response_before_its_outcome_is_stored(site: Site, key: str, case: str) -> None:
    """Else it would take the work as done, and a crash at that moment would have it done again."""
    with site.connect() as wire:
        wire.send(whole(f"/intake/{case}", key))
        site.wait_for(key, "ran")
        if case != "slow":
            wire.until(b"first half, ")
        with locked(site):
            site.open(key, "go")
            arrived = wire.so_far(0.3)  # as long as the store is busy, there is nothing to wait for
            if case == "slow":
                assert arrived == b""
            elif case == "sized":
                assert arrived.endswith(b"first half, ")
            else:
                assert not arrived.endswith(b"0\r\n\r\n")
        first = wire.response()
    assert is_replay_of(first, site.post(f"/intake/{case}", key))
    assert site.ran(key) == 1


@contextmanager
def locked(site: Site) -> Iterator[None]:
    """Nobody can write to the store meanwhile."""
    with closing(sqlite3.connect(site.folder / "semel.db", isolation_level=None, timeout=PATIENCE)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


# Responses that are too large to be kept


def test_a_response_over_the_limit_is_delivered_once_and_never_made_again(site: Site, key: str) -> None:
    first = site.post("/limited/large?size=100000", key)
    second = site.post("/limited/large?size=100000", key)
    assert first.content == b"x" * 100_000
    assert second.status_code == 409
    assert second.json()["error_code"] == "IDEMPOTENT_RESPONSE_TOO_LARGE"
    assert second.headers["idempotent-replayed"] == "true"
    assert site.ran(key) == 1


def test_a_response_at_the_limit_is_kept(site: Site, key: str) -> None:
    first = site.post("/limited/large?size=1000", key)
    assert is_replay_of(first, site.post("/limited/large?size=1000", key))
    assert site.ran(key) == 1


@pytest.mark.parametrize("leave", LEAVING)
def test_a_stream_over_the_limit_whose_client_left_is_never_made_again(site: Site, key: str, leave: str) -> None:
    path = "/limited/large?size=8000&pieces"
    site.open(key, "0")
    with site.connect() as wire:
        wire.send(whole(path, key))
        wire.until(b"x" * 2000)
        LEAVING[leave](wire)
    for number in range(1, 4):
        site.open(key, str(number))
    response = site.settled(path, key)
    assert (response.status_code, response.json()["error_code"]) == (409, "IDEMPOTENT_RESPONSE_TOO_LARGE")
    assert site.ran(key) == 1


# The life of the server


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_is_told_to_stop_finishes_and_stores_what_it_works_on(
    kind: str, key: str, tmp_path: Path, sqlite_url: str, threads: ThreadPoolExecutor
) -> None:
    with running(kind, tmp_path, sqlite_url) as site:
        assert site.lines("life") == ["started"]
        answers = [
            threads.submit(site.post, "/intake/slow", key),
            threads.submit(site.post, "/intake/unsized", f"{key}-2"),
        ]
        site.wait_for(key, "ran")
        site.wait_for(f"{key}-2", "ran")
        site.server.signal(signal.SIGTERM)
        time.sleep(0.1)  # the signal arrives while they work
        site.open(key, "go")
        site.open(f"{key}-2", "go")
        first, streamed = (answer.result() for answer in answers)
        site.server.wait_until_gone()
        assert site.lines("life") == ["started", "ended"]
        assert first.status_code == 200
        assert streamed.content == b"first half, second half"
    with Once(sqlite_url) as once:
        stored = [once.get(key, scope="POST /intake/slow"), once.get(f"{key}-2", scope="POST /intake/unsized")]
    assert [record.outcome.value.body for record in stored] == [first.content, streamed.content]


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_given_as_url_is_opened_at_the_start_and_closed_at_the_end(kind: str, tmp_path: Path) -> None:
    """SQLite's write-ahead log exists while the file is open, and is gone once the last connection closed it."""
    path = tmp_path / "keys.db"
    env = {"SEMEL_TEST_STORE": f"sqlite:///{path}", "SEMEL_TEST_FOLDER": str(tmp_path)}
    with web_server(kind, "support.apps.asgi_app:with_url", env=env) as server:
        assert path.exists()
        response = httpx.post(f"{server.url}/intake/plain", headers={"Idempotency-Key": "a"})
        assert response.status_code == 201
        assert path.with_name("keys.db-wal").exists()
        server.stop()
        assert not path.with_name("keys.db-wal").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_database_without_tables_stops_the_start_and_says_what_to_do(
    kind: str, tmp_path: Path, postgres_url: str
) -> None:
    env = {"SEMEL_TEST_STORE": postgres_url, "SEMEL_TEST_FOLDER": str(tmp_path)}
    options = ["--no-respawn-failed-workers"] if kind == "granian" else []
    with (
        pytest.raises(servers.ServerError, match="semel migrate"),
        web_server(kind, "support.apps.asgi_app:with_url", env=env, options=options),
    ):
        pass


def test_a_store_that_is_away_lets_the_server_start_with_a_warning(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    """It is tried for some seconds first, hence both servers at once."""

    def start(kind: str) -> WebServer:
        return stack.enter_context(web_server(kind, "support.apps.asgi_app:with_url", env=env))

    with servers.redis() as redis, ExitStack() as stack:
        redis.stop()
        env = {"SEMEL_TEST_STORE": redis.url, "SEMEL_TEST_FOLDER": str(tmp_path)}
        started = list(threads.map(start, KINDS))
        for server in started:
            assert "the store of idempotency keys is away" in server.log()
            assert httpx.post(f"{server.url}/intake/plain").status_code == 201
        redis.start()
        responses = [
            httpx.post(f"{server.url}/intake/plain", headers={"Idempotency-Key": "a"}, timeout=PATIENCE)
            for server in started
        ]
    assert is_replay_of(*responses)


# WebSockets


def test_a_websocket_passes_untouched(key: str, sites: Callable[..., Site]) -> None:
    """Only granian speaks it without further packages."""
    site = sites("granian", "sqlite")
    nonce = base64.b64encode(os.urandom(16)).decode()
    with site.connect() as wire:
        lines = ["GET /intake/talk HTTP/1.1", "Host: test", f"Idempotency-Key: {key}", "Upgrade: websocket"]
        lines += ["Connection: Upgrade", f"Sec-WebSocket-Key: {nonce}", "Sec-WebSocket-Version: 13", "", ""]
        wire.send("\r\n".join(lines).encode())
        wire.until(b"\r\n\r\n")
        wire.send(b"\x81\x85\x00\x00\x00\x00hello")  # a text of five bytes, masked with zeros
        wire.until(f"hello {key}".encode())
    assert site.ran(key) == 0


# The servers that these tests lean on


def test_a_web_server_is_gone_when_its_block_ends_also_by_a_failure() -> None:
    def fail() -> NoReturn:
        raise RuntimeError("the test failed")

    with ExitStack() as stack:
        stack.enter_context(pytest.raises(RuntimeError, match="the test failed"))
        server = stack.enter_context(web_server("gunicorn", "wsgiref.simple_server:demo_app", workers=2))
        assert len(server.pids) == 2
        victim = server.kill_worker()
        until(lambda: len(server.pids) == 2)
        assert victim not in server.pids
        pids = [server.pid, *server.pids]
        fail()
    assert [pid for pid in pids if lives(pid)] == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)
