"""The client: a POST is sent again under the same key until it is answered, and carried out once whatever is lost.

A real server (uvicorn), and between it and the client a line that loses what the test tells it to lose.
"""

import asyncio
import gzip
import json
import logging
import re
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from textwrap import dedent
from typing import Any, Self
from uuid import uuid4

import httpx
import pytest
import uvicorn

from semel import InvalidRequest
from semel.client import AsyncIdempotentTransport, IdempotentTransport
from semel.client.http import retry_after
from semel.http.asgi import IdempotencyMiddleware
from support.waiting import eventually

PATIENCE = 60
KEY = "Idempotency-Key"
TLS = ssl.create_default_context()  # made once: it takes longer than most tests, and none of them needs it
QUICK = {"backoff": 0.001, "longest_wait": 0.02, "retries": 20}


class Shop:
    """An app that counts its orders, waits in `/slow` until it is let go, and answers with what the path says."""

    def __init__(self) -> None:
        self.orders: Counter[str] = Counter()
        self.go = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        body += message["body"]
        self.orders[scope["path"]] += 1
        number = self.orders[scope["path"]]
        if scope["path"] == "/slow":
            await asyncio.to_thread(self.go.wait, PATIENCE)
        answer = json.dumps({"order": number, "bytes": len(body)}).encode()
        headers = [(b"content-type", b"application/json")]
        if not scope["path"].startswith("/chunked"):
            headers.append((b"content-length", b"%d" % len(answer)))
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


class Line:
    """Carries one request a connection. Before it carries one faithfully, it does what is on its list of faults.

    A fault is the name of a method, or the bytes of an answer of its own.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._door = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._door.getsockname()[1]}"
        self.faults: list[str | bytes] = []
        self.requests: list[bytes] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def keys(self) -> list[str]:
        """The keys of the requests that came, in turn."""
        found = [re.search(rb"(?im)^idempotency-key: *(.*)\r$", request) for request in self.requests]
        return [each[1].decode() if each else "" for each in found]

    def close(self) -> None:
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()

    def _accept(self) -> None:
        with suppress(OSError):  # the door is closed
            while True:
                client, _ = self._door.accept()
                client.settimeout(PATIENCE)
                self._threads.append(threading.Thread(target=self._carry, args=(client,)))
                self._threads[-1].start()

    def _carry(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            if self.faults[:1] == ["hang up at once"]:
                del self.faults[0]
                return
            request = _whole(client)  # a client that leaves before its request is whole has met no fault of ours
            self.requests.append(request)
            fault = self.faults.pop(0) if self.faults else "nothing"
            if isinstance(fault, bytes):
                client.sendall(fault)
            elif fault != "lose the request":
                getattr(self, fault.replace(" ", "_"))(client, self._ask(request))

    def _ask(self, request: bytes) -> bytes:
        head, _, body = request.partition(b"\r\n")
        with socket.create_connection(("127.0.0.1", self._port), PATIENCE) as server:
            server.sendall(head + b"\r\nConnection: close\r\n" + body)
            return b"".join(iter(lambda: server.recv(65536), b""))

    def nothing(self, client: socket.socket, answer: bytes) -> None:
        client.sendall(answer)

    def lose_the_answer(self, client: socket.socket, answer: bytes) -> None:
        pass

    def cut_the_answer(self, client: socket.socket, answer: bytes) -> None:
        client.sendall(answer[:-3])

    def cut_the_head(self, client: socket.socket, answer: bytes) -> None:
        client.sendall(answer[:20])

    def reset(self, client: socket.socket, answer: bytes) -> None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def keep_silent(self, client: socket.socket, answer: bytes) -> None:
        """Until the client gives up."""
        client.recv(1)


def _whole(client: socket.socket) -> bytes:
    """A request to its end."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _more(client)
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?im)^content-length: *(\d+)", head)
    while len(body) < int(length[1]) if length else not body.endswith(b"0\r\n\r\n"):
        body += _more(client)
    return head + b"\r\n\r\n" + body


def _more(client: socket.socket) -> bytes:
    data = client.recv(65536)
    if not data:
        raise ConnectionError("the client left")
    return data


@contextmanager
def serving(app: Any) -> Iterator[int]:
    """The app on a real server; the port."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="on", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        eventually(lambda: server.started)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


class Lifespan:
    """Starts and ends with the server, and leaves requests to the app."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await self.app(scope, receive, send)
            return
        for stage in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{stage}.complete"})


shop = Shop()


@pytest.fixture(scope="module")
def bare() -> Iterator[int]:
    """The shop without a door: each request is carried out, whatever its key."""
    with serving(Lifespan(shop)) as port:
        yield port


@pytest.fixture(scope="module", params=["intake", "ietf", "stripe"])
def guarded(request: pytest.FixtureRequest) -> Iterator[int]:
    """The shop behind semel's door, in each dialect."""
    with serving(IdempotencyMiddleware(Lifespan(shop), "memory://", policy=request.param)) as port:
        yield port


@pytest.fixture
def line(bare: int) -> Iterator[Line]:
    yield from line_to(bare)


@pytest.fixture
def guarded_line(guarded: int) -> Iterator[Line]:
    yield from line_to(guarded)


def line_to(port: int) -> Iterator[Line]:
    shop.orders.clear()
    shop.go.clear()
    line = Line(port)
    yield line
    shop.go.set()
    line.close()


Post = Callable[..., httpx.Response]


@pytest.fixture(params=["blocking", "awaited"])
def post(request: pytest.FixtureRequest) -> Post:
    """One POST through the transport, in a blocking client and in an awaited one: `post(url, **of_the_request)`."""
    return post_blocking if request.param == "blocking" else post_awaited


def post_blocking(url: str, *, options: Any = QUICK, timeout: float | None = PATIENCE, **of_request: Any) -> Any:
    with httpx.Client(
        transport=IdempotentTransport(httpx.HTTPTransport(verify=TLS), **options),
        timeout=timeout,
        follow_redirects=True,
    ) as client:
        return client.post(url, **of_request)


def post_awaited(url: str, *, options: Any = QUICK, timeout: float | None = PATIENCE, **of_request: Any) -> Any:
    async def main() -> httpx.Response:
        transport = AsyncIdempotentTransport(httpx.AsyncHTTPTransport(verify=TLS), **options)
        async with httpx.AsyncClient(transport=transport, timeout=timeout, follow_redirects=True) as client:
            return await client.post(url, **of_request)

    return asyncio.run(main())


def answer(status: int, *headers: str, body: bytes = b"", length: bool = True) -> bytes:
    """An answer's bytes."""
    lines = [f"HTTP/1.1 {status} Whatever", *headers, *([f"Content-Length: {len(body)}"] if length else [])]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


def refusal(status: int, *headers: str, **content: Any) -> bytes:
    return answer(status, "Content-Type: application/json", *headers, body=json.dumps(content).encode())


PROCESSING = refusal(409, "Retry-After: 3600", error_code="IDEMPOTENCY_KEY_PROCESSING")
LOSSES: dict[str, str | bytes] = {
    name: name
    for name in (
        *("hang up at once", "lose the request", "lose the answer", "cut the answer", "cut the head", "reset"),
        "keep silent",
    )
}
FAILURES = {str(status): answer(status, body=b"sorry") for status in (500, 502, 503, 504)}
BUSY = {
    "processing": PROCESSING,
    "a retryable problem": refusal(409, title="A request is outstanding", retryable=True),
    "in use": refusal(409, error={"type": "idempotency_error", "code": "idempotency_key_in_use"}),
    "processing, compressed": answer(
        409, "Content-Encoding: gzip", body=gzip.compress(b'{"error_code": "IDEMPOTENCY_KEY_PROCESSING"}')
    ),
    "processing, of unknown length": answer(409, body=b'{"error_code": "IDEMPOTENCY_KEY_PROCESSING"}', length=False),
    "503 of unknown length": answer(503, body=b"sorry", length=False),
    "503 of a store that is away": refusal(503, "Retry-After: 1", retryable=True),
}
PASSING = LOSSES | FAILURES | BUSY
FINAL = {
    "conflict": refusal(409, error_code="IDEMPOTENCY_KEY_CONFLICT"),
    "a conflict that calls itself retryable": refusal(409, error_code="IDEMPOTENCY_KEY_CONFLICT", retryable=True),
    "unknown outcome": refusal(409, error_code="IDEMPOTENCY_OUTCOME_UNKNOWN", retryable=False),
    "422": refusal(422, error_code="IDEMPOTENCY_KEY_CONFLICT", retryable=False),
    "422 with an odd wish": refusal(422, retryable=True),
    "400": refusal(400, error={"code": "idempotency_key_reused"}),
    "400 with Retry-After": answer(400, "Retry-After: 0"),
    "404": answer(404),
    "410": refusal(410, error_code="IDEMPOTENT_RESPONSE_GONE"),
    "429": answer(429, "Retry-After: 0"),
    "another's 409": answer(409, "Content-Type: text/plain", body=b"there is a lock"),
    "409 with a list": answer(409, body=b'["IDEMPOTENCY_KEY_PROCESSING"]'),
    "409 with odd types": refusal(409, error_code=["IDEMPOTENCY_KEY_PROCESSING"], retryable="true"),
    "409 nested too deep": answer(409, body=b"[" * 100_000),
    "501": answer(501),
    "a failure that was replayed": answer(500, "Idempotent-Replayed: true", body=b"it failed"),
    "a failure that will stay": refusal(503, retryable=False),
    "201": answer(201, body=b"done"),
    "204": answer(204, length=False),
}


# -- S1.31: the contract for clients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING.keys())
def test_s1_31_failures_of_server_and_network_are_retried_with_the_same_key(
    line: Line, post: Post, fault: str | bytes
) -> None:
    line.faults = [fault, fault]
    said = post(f"{line.url}/orders", json={"sku": "A"}, timeout=0.2 if fault == "keep silent" else PATIENCE)
    assert said.status_code == 201
    assert said.json()["bytes"] == 11
    assert len(line.keys) >= (1 if fault == "hang up at once" else 3)
    assert set(line.keys) == {said.request.headers[KEY]}
    assert re.fullmatch("[0-9a-f]{32}", line.keys[0])


@pytest.mark.parametrize("final", FINAL.values(), ids=FINAL.keys())
def test_s1_31_conflicts_and_other_answers_are_final(line: Line, post: Post, final: bytes) -> None:
    line.faults = [final]
    said = post(f"{line.url}/orders", json={})
    assert said.status_code == int(final.split()[1])
    assert said.content == final.partition(b"\r\n\r\n")[2]
    assert len(line.requests) == 1
    assert shop.orders.total() == 0


def test_an_answer_that_cannot_be_unpacked_is_final(line: Line, post: Post) -> None:
    line.faults = [answer(409, "Content-Encoding: gzip", body=b"no gzip")]
    with pytest.raises(httpx.DecodingError):
        post(f"{line.url}/orders", json={})
    assert len(line.requests) == 1


@pytest.mark.parametrize("fault", LOSSES)
def test_s1_31_with_the_door_an_order_is_carried_out_once_whatever_is_lost(
    guarded_line: Line, post: Post, fault: str
) -> None:
    guarded_line.faults = [fault] if fault == "keep silent" else [fault, fault]
    said = post(f"{guarded_line.url}/orders", json={}, timeout=0.3 if fault == "keep silent" else PATIENCE)
    assert (said.status_code, said.json()) == (201, {"order": 1, "bytes": 2})
    assert shop.orders.total() == 1
    lost_before = fault in {"hang up at once", "lose the request"}
    assert ("idempotent-replayed" in said.headers) is not lost_before


def test_s1_31_with_the_door_every_loss_in_turn_leaves_one_order(guarded_line: Line, post: Post) -> None:
    guarded_line.faults = [*LOSSES.values(), *FAILURES.values(), PROCESSING]
    said = post(f"{guarded_line.url}/orders", json={}, timeout=0.5)
    assert (said.status_code, said.json()["order"]) == (201, 1)
    assert shop.orders.total() == 1
    assert len(set(guarded_line.keys)) == 1
    assert guarded_line.faults == []


def test_s1_31_with_the_door_a_timeout_is_retried_until_the_first_request_is_done(
    guarded_line: Line, post: Post
) -> None:
    """The first try times out, the next ones meet 409 while it is in progress, the last one gets its answer."""

    def let_go_after_some_tries() -> None:
        eventually(lambda: len(guarded_line.requests) >= 4)
        shop.go.set()

    letting_go = threading.Thread(target=let_go_after_some_tries)
    letting_go.start()
    said = post(f"{guarded_line.url}/slow", json={}, timeout=0.3, options={**QUICK, "retries": 500})
    letting_go.join()
    assert (said.status_code, said.json()["order"]) == (201, 1)
    assert said.headers["idempotent-replayed"] == "true"
    assert shop.orders == {"/slow": 1}
    assert len(set(guarded_line.keys)) == 1


def test_s1_31_with_the_door_other_content_under_the_same_key_is_a_conflict_at_once(
    guarded_line: Line, post: Post
) -> None:
    headers = {KEY: uuid4().hex}
    first = post(f"{guarded_line.url}/orders", json={"sku": "A"}, headers=headers)
    second = post(f"{guarded_line.url}/orders", json={"sku": "B"}, headers=headers)
    assert first.status_code == 201
    assert second.status_code in {400, 409, 422}
    assert len(guarded_line.requests) == 2
    assert shop.orders.total() == 1


# -- keys ------------------------------------------------------------------------------------------------------------


def test_each_request_has_a_key_of_its_own(line: Line, post: Post) -> None:
    for _ in range(3):
        post(f"{line.url}/orders", json={})
    assert len(set(line.keys)) == 3


def test_a_key_that_the_caller_gave_is_kept(line: Line, post: Post) -> None:
    line.faults = [answer(503), "lose the answer"]
    said = post(f"{line.url}/orders", json={}, headers={"idempotency-key": "mine"})
    assert line.keys == ["mine"] * 3
    assert said.request.headers[KEY] == "mine"


def test_header_and_keys_can_be_chosen(line: Line, post: Post) -> None:
    options = {**QUICK, "header": "X-Once", "new_key": lambda: "chosen"}
    post(f"{line.url}/orders", json={}, options=options)
    assert b"x-once: chosen\r\n" in line.requests[0].lower()
    assert line.keys == [""]


def test_other_methods_pass_untouched(line: Line) -> None:
    line.faults = [answer(503)]
    with httpx.Client(transport=IdempotentTransport(**QUICK)) as client:
        assert client.put(f"{line.url}/orders", json={}).status_code == 503
    assert line.keys == [""]


def test_the_methods_can_be_chosen(line: Line) -> None:
    line.faults = [answer(503), answer(503)]
    with httpx.Client(transport=IdempotentTransport(**QUICK, methods=["patch"])) as client:
        assert client.patch(f"{line.url}/orders", json={}).status_code == 201
        assert client.post(f"{line.url}/orders", json={}).status_code == 201
    assert len(set(line.keys)) == 2
    assert line.keys[-1] == ""


def test_the_error_that_reaches_the_caller_names_the_key_to_go_on_with(line: Line, post: Post) -> None:
    line.faults = ["lose the answer"] * 2
    with pytest.raises(httpx.TransportError) as caught:
        post(f"{line.url}/orders", json={}, options={**QUICK, "retries": 1})
    assert [caught.value.request.headers[KEY]] * 2 == line.keys


def test_a_redirect_that_keeps_the_method_keeps_the_key(line: Line, post: Post) -> None:
    line.faults = [answer(307, f"Location: {line.url}/elsewhere"), answer(502)]
    said = post(f"{line.url}/orders", json={})
    assert said.json()["order"] == 1
    assert shop.orders == {"/elsewhere": 1}
    assert len(line.keys) == 3
    assert len(set(line.keys)) == 1


# -- how often and how long ------------------------------------------------------------------------------------------


def test_the_last_answer_is_the_callers_when_all_tries_failed(line: Line, post: Post) -> None:
    line.faults = ["lose the answer", answer(500), answer(503, "X-Try: last", body=b"closed")]
    said = post(f"{line.url}/orders", json={}, options={**QUICK, "retries": 2})
    assert (said.status_code, said.headers["x-try"], said.content) == (503, "last", b"closed")


def test_the_last_error_is_the_callers_when_all_tries_failed(line: Line, post: Post) -> None:
    line.faults = [answer(503), "keep silent"]
    with pytest.raises(httpx.ReadTimeout):
        post(f"{line.url}/orders", json={}, timeout=1.0, options={**QUICK, "retries": 1})
    eventually(lambda: len(line.requests) == 2)


def test_without_retries_a_request_is_sent_once(line: Line, post: Post) -> None:
    line.faults = [answer(503)]
    assert post(f"{line.url}/orders", json={}, options={"retries": 0}).status_code == 503
    assert len(line.requests) == 1


def test_nobody_listens(post: Post) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    with pytest.raises(httpx.ConnectError):
        post(f"http://127.0.0.1:{port}/", json={}, options={**QUICK, "retries": 3})


def test_retry_after_is_waited_for(line: Line, post: Post) -> None:
    line.faults = [answer(503, "Retry-After: 1")]
    began = time.monotonic()
    said = post(f"{line.url}/orders", json={}, options={"backoff": 0.001})
    assert said.status_code == 201
    assert time.monotonic() - began >= 1


def test_retry_after_is_not_waited_for_beyond_the_longest_wait(line: Line, post: Post) -> None:
    line.faults = [answer(503, "Retry-After: 3600"), PROCESSING, answer(503, f"Retry-After: {'9' * 5000}")]
    began = time.monotonic()
    assert post(f"{line.url}/orders", json={}).status_code == 201
    assert time.monotonic() - began < PATIENCE


def test_a_wait_that_would_pass_the_deadline_is_not_begun(line: Line, post: Post) -> None:
    line.faults = [answer(503, "Retry-After: 50")]
    began = time.monotonic()
    options = {"longest_wait": 100, "deadline": 40}
    assert post(f"{line.url}/orders", json={}, options=options).status_code == 503
    assert time.monotonic() - began < 20
    assert len(line.requests) == 1


def test_the_deadline_ends_a_try_that_has_no_timeout(line: Line, post: Post) -> None:
    line.faults = ["keep silent"] * 3
    with pytest.raises(httpx.ReadTimeout):
        post(f"{line.url}/orders", json={}, timeout=None, options={**QUICK, "deadline": 0.3})
    assert len(line.requests) == 1


def test_without_a_deadline_the_timeouts_are_the_callers(line: Line, post: Post) -> None:
    line.faults = ["keep silent"]
    assert post(f"{line.url}/orders", json={}, timeout=0.3, options={**QUICK, "deadline": None}).status_code == 201


def test_waits_double_and_differ(line: Line, caplog: pytest.LogCaptureFixture) -> None:
    line.faults = [answer(503)] * 5
    with caplog.at_level(logging.INFO, "semel"):
        assert post_blocking(f"{line.url}/orders", json={}, options={"backoff": 0.04}).status_code == 201
    waits = [float(found[1]) for found in re.finditer(r"again in ([\d.]+) s", caplog.text)]
    assert len(waits) == 5
    for number, wait in enumerate(waits):
        assert 0.02 * 2**number - 0.006 <= wait <= 0.04 * 2**number + 0.006


def test_what_retry_after_means() -> None:
    now = datetime.now(UTC)
    assert retry_after("120") == 120
    assert 100 < retry_after(format_datetime(now + timedelta(seconds=120), usegmt=True)) <= 120
    assert retry_after(format_datetime(now - timedelta(seconds=120), usegmt=True)) == 0
    assert retry_after("9" * 5000) > 1e10
    for senseless in ("", "soon", "-5", "1.5", "٣", "Mon, 99 Foo 2026 99:99:99 GMT", "Mon, 01 Jan 99999 00:00:00 GMT"):
        assert retry_after(senseless) == 0


# -- bodies ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "upload"
    file.write_bytes(b"12345" * 1000)
    return file


async def slices(size: int, times: int) -> AsyncIterator[bytes]:
    for _ in range(times):
        yield b"x" * size


UPLOADS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "bytes": lambda file: {"content": b"x" * 5000},
    "generator": lambda file: {"content": (b"x" * 500 for _ in range(10))},
    "file": lambda file: {"content": file.open("rb")},
    "form": lambda file: {"data": {"x": "y" * 4998}},
    "nothing": lambda file: {},
}


@pytest.mark.parametrize("upload", UPLOADS)
def test_a_retry_sends_the_whole_body_again(line: Line, file: Path, upload: str) -> None:
    line.faults = ["lose the answer", answer(503)]
    given = UPLOADS[upload](file)
    said = post_blocking(f"{line.url}/orders", **given)
    if upload == "file":
        given["content"].close()
    assert said.json()["bytes"] == (0 if upload == "nothing" else 5000)
    assert len({request.partition(b"\r\n\r\n")[2] for request in line.requests}) == 1
    assert len(line.requests) == 3


def test_a_retry_sends_the_files_of_a_form_again(line: Line, file: Path, post: Post) -> None:
    line.faults = [answer(503)]
    with file.open("rb") as opened:
        assert post(f"{line.url}/orders", files={"upload": opened}).status_code == 201
    assert [request.count(b"12345") for request in line.requests] == [1000, 1000]


def test_an_awaited_generator_is_sent_again(line: Line) -> None:
    line.faults = [answer(503), "cut the answer"]
    assert post_awaited(f"{line.url}/orders", content=slices(500, 10)).json()["bytes"] == 5000


def test_an_upload_over_the_buffer_is_sent_whole_and_once(line: Line, file: Path) -> None:
    line.faults = [answer(503), answer(503)]
    options = {**QUICK, "buffer": 2000}
    with file.open("rb") as opened:
        assert post_blocking(f"{line.url}/orders", content=opened, options=options).status_code == 503
    assert post_awaited(f"{line.url}/orders", content=slices(500, 10), options=options).status_code == 503
    assert len(line.requests) == 2
    assert post_awaited(f"{line.url}/orders", content=slices(500, 10), options=options).json()["bytes"] == 5000
    assert "" not in line.keys


def test_bytes_are_sent_again_however_many(line: Line, post: Post) -> None:
    line.faults = [answer(503)]
    said = post(f"{line.url}/orders", content=b"x" * 5000, options={**QUICK, "buffer": 0})
    assert said.json()["bytes"] == 5000


def test_an_upload_that_can_be_sent_once_does_not_follow_a_redirect_half(line: Line) -> None:
    line.faults = [answer(307, f"Location: {line.url}/elsewhere")]
    with pytest.raises(httpx.StreamConsumed):
        post_blocking(f"{line.url}/orders", content=iter([b"x" * 500] * 10), options={**QUICK, "buffer": 2000})
    assert shop.orders.total() == 0


def test_a_body_that_fails_while_it_is_made_is_the_callers_error(line: Line) -> None:
    def broken() -> Iterator[bytes]:
        yield b"x"
        raise LookupError("no more")

    with pytest.raises(LookupError):
        post_blocking(f"{line.url}/orders", content=broken())
    assert line.requests == []


def test_a_long_answer_is_passed_on_while_it_comes(line: Line, post: Post) -> None:
    """Longer than the buffer or of unknown length: where it breaks, the caller is told, and knows the key."""
    long = answer(201, body=b"x" * 100_000)
    line.faults = [long]
    assert post(f"{line.url}/orders", options={**QUICK, "buffer": 1000}).content == b"x" * 100_000
    line.faults = [long[:-5]]
    with pytest.raises(httpx.RemoteProtocolError) as caught:
        post(f"{line.url}/orders", options={**QUICK, "buffer": 1000})
    assert caught.value.request.headers[KEY] == line.keys[-1]
    assert post(f"{line.url}/chunked").json()["order"] == 1


def test_a_long_failure_is_passed_on_whole(line: Line, post: Post) -> None:
    line.faults = [answer(503, body=b"x" * 100_000)] * 2
    said = post(f"{line.url}/orders", options={**QUICK, "buffer": 1000, "retries": 1})
    assert (said.status_code, len(said.content)) == (503, 100_000)


def test_the_raw_bytes_of_an_answer_can_be_read(line: Line) -> None:
    packed = gzip.compress(b"plain")
    line.faults = [answer(200, "Content-Encoding: gzip", body=packed)] * 2
    with httpx.Client(transport=IdempotentTransport()) as client:
        with client.stream("POST", line.url) as said:
            assert b"".join(said.iter_raw()) == packed
        assert client.post(line.url).text == "plain"


# -- what is left behind ---------------------------------------------------------------------------------------------


class WatchedStream(httpx.SyncByteStream):
    """Notes that it was closed."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.closed = stream, False

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.stream)

    def close(self) -> None:
        self.closed = True
        self.stream.close()


class Watched(httpx.BaseTransport):
    """Insists that earlier answers are closed before it sends another request, and notes how it was used."""

    def __init__(self) -> None:
        self.inner = httpx.HTTPTransport(verify=TLS)
        self.streams: list[WatchedStream] = []
        self.entered = self.closed = False

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        assert all(stream.closed for stream in self.streams)
        response = self.inner.handle_request(request)
        self.streams.append(WatchedStream(response.stream))
        response.stream = self.streams[-1]
        return response

    def __enter__(self) -> Self:
        self.entered = True
        return self

    def close(self) -> None:
        self.closed = True
        self.inner.close()


def test_answers_that_are_not_given_to_the_caller_are_closed_before_the_next_try(line: Line) -> None:
    line.faults = [answer(503, body=b"x" * 5000), answer(503, body=b"short"), answer(500, length=False)]
    watched = Watched()
    with httpx.Client(transport=IdempotentTransport(watched, **QUICK, buffer=1000)) as client:
        assert client.post(f"{line.url}/orders").status_code == 201
    assert [stream.closed for stream in watched.streams] == [True] * 4
    assert watched.entered
    assert watched.closed


def test_an_answer_that_breaks_off_is_closed_before_the_next_try(line: Line) -> None:
    line.faults = ["cut the answer", answer(503, body=b"x" * 500)[:-5]]
    watched = Watched()
    with httpx.Client(transport=IdempotentTransport(watched, **QUICK)) as client:
        assert client.post(f"{line.url}/orders").status_code == 201
    assert [stream.closed for stream in watched.streams] == [True] * 3


def test_each_try_is_logged_without_the_body(line: Line, post: Post, caplog: pytest.LogCaptureFixture) -> None:
    line.faults = [answer(503, body=b"SECRET-ANSWER"), "lose the answer"]
    with caplog.at_level(logging.DEBUG, "semel"):
        post(f"{line.url}/orders?token=SECRET-QUERY", json={"card": "SECRET-CARD"})
    told = [record.getMessage() for record in caplog.records if record.name == "semel"]
    assert [record.levelname for record in caplog.records if record.name == "semel"] == ["INFO"] * 3
    assert all(line.keys[0] in message and "POST 127.0.0.1/orders" in message for message in told)
    assert re.search(r"try 1 of 21: 503; again in 0\.\d\d s$", told[0])
    assert re.search(r"try 2 of 21: \w+Error; again in", told[1])
    assert told[2].endswith("try 3 of 21: 201")
    assert "SECRET" not in "".join(told)


def test_a_cancelled_wait_ends_at_once(line: Line) -> None:
    line.faults = [answer(503, "Retry-After: 3600")] * 2

    async def main() -> None:
        async with httpx.AsyncClient(transport=AsyncIdempotentTransport(longest_wait=3600, deadline=None)) as client:
            posting = asyncio.create_task(client.post(f"{line.url}/orders"))
            await asyncio.to_thread(eventually, lambda: line.requests)
            posting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await posting

    asyncio.run(main())
    assert len(line.requests) == 1


@pytest.mark.parametrize(
    "options",
    [{"retries": -1}, {"retries": 1.5}, {"buffer": -1}, {"backoff": -1}, {"deadline": 0}, {"longest_wait": "1"}],
)
def test_options_that_make_no_sense_are_refused(options: Any) -> None:
    for transport in (IdempotentTransport, AsyncIdempotentTransport):
        with pytest.raises(InvalidRequest):
            transport(**options)


def test_without_httpx_the_error_names_the_extra() -> None:
    code = dedent("""\
        import sys, semel
        sys.modules["httpx"] = None
        try:
            import semel.client
        except semel.MissingExtra as error:
            print(error)
    """)
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'semel[client]'" in finished.stdout
