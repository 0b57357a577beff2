"""How much, how fast and in which form a request may come: over real sockets, and at the gate's own edge."""

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from semel.service import Settings
from semel.service.auth.limits import MAX_DRAIN
from semel.service.auth.middleware import AuthMiddleware
from support.service import PATIENCE, TokenServer, make_app, send_raw, serve, shared_server, status_of
from support.waiting import eventually

RUN = {"model": "add", "parameters": {"a": 1}}


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    """What is refused here never comes to a database, so one kind is enough."""
    with shared_server(request, tmp_path_factory) as server:
        yield server


def head(server: TokenServer, line: str, *more: str, token: bool = True) -> bytes:
    """The head of a request, as bytes."""
    own = [f"Authorization: Bearer {server.root.secret}"] if token else []
    return "\r\n".join([line, "Host: localhost", *own, *more, "", ""]).encode()


def count(server: TokenServer) -> int:
    return len(server.root.get("/runs", params={"limit": 1000}).json()["runs"])


def test_a_body_of_the_most_bytes_is_taken_and_one_more_is_not(server: TokenServer) -> None:
    most = Settings().max_body
    body = json.dumps(RUN).encode()
    fits = server.root.post("/runs", content=body.ljust(most), headers={"Content-Type": "application/json"})
    over = server.root.post("/runs", content=body.ljust(most + 1), headers={"Content-Type": "application/json"})
    assert (fits.status_code, over.status_code) == (201, 413)
    assert over.json()["error_code"] == "BODY_TOO_LARGE"


def test_a_chunked_body_is_counted_as_it_comes(server: TokenServer) -> None:
    most = Settings().max_body
    parts = iter([json.dumps(RUN).encode(), *[b" " * 65536] * (most // 65536)])
    answer = server.root.post("/runs", content=parts, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error_code"]) == (413, "BODY_TOO_LARGE")
    parts = iter([b'{"model": "add",', b' "parameters": {"a": 1}}'])
    assert server.root.post("/runs", content=parts, headers={"Content-Type": "application/json"}).status_code == 201


def test_a_body_that_is_announced_too_large_is_refused_before_it_is_sent(server: TokenServer) -> None:
    for size in (Settings().max_body + 1, MAX_DRAIN + 1, 10**40):
        told = head(server, "POST /runs HTTP/1.1", f"Content-Length: {size}", "Expect: 100-continue")
        assert status_of(send_raw(server.address, told)) in (400, 413)


@pytest.mark.parametrize("length", ["-1", "abc", "1, 2", "0x10", "+5"])
def test_a_content_length_that_is_no_number_is_refused(server: TokenServer, length: str) -> None:
    answer = send_raw(server.address, head(server, "POST /runs HTTP/1.1", f"Content-Length: {length}") + b"{}")
    assert status_of(answer) == 400


def test_a_body_shorter_than_announced_is_not_taken_for_whole(server: TokenServer) -> None:
    before = count(server)
    body = json.dumps(RUN).encode()
    sent = head(server, "POST /runs HTTP/1.1", f"Content-Length: {len(body) + 10}", "Content-Type: application/json")
    assert send_raw(server.address, sent + body, then_close=True) == b""
    assert count(server) == before


def test_what_follows_a_body_is_no_part_of_it(server: TokenServer) -> None:
    body = json.dumps(RUN).encode()
    form = (f"Content-Length: {len(body)}", "Content-Type: application/json", "Connection: close")
    answer = send_raw(server.address, head(server, "POST /runs HTTP/1.1", *form) + body + b"GET /runs HTTP/1.1\r\n\r\n")
    assert status_of(answer) == 201
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("name", ["Content-Encoding", "Content-Type"])
@pytest.mark.parametrize("second", [0, 1])
def test_a_second_header_about_the_body_is_not_overlooked(server: TokenServer, name: str, second: int) -> None:
    body = json.dumps(RUN).encode()
    said = {"Content-Encoding": ("identity", "gzip"), "Content-Type": ("application/json", "text/plain")}[name]
    pair = [f"{name}: {said[second]}", f"{name}: {said[1 - second]}"]
    if name != "Content-Type":
        pair.append("Content-Type: application/json")
    sent = head(server, "POST /runs HTTP/1.1", f"Content-Length: {len(body)}", "Connection: close", *pair) + body
    assert status_of(send_raw(server.address, sent)) in (400, 415)
    same = head(server, "POST /runs HTTP/1.1", f"Content-Length: {len(body)}", "Connection: close", pair[0], pair[0])
    assert status_of(send_raw(server.address, same + body)) in (400, 415)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "identity, gzip", "GZIP"])
def test_a_compressed_body_is_refused(server: TokenServer, encoding: str) -> None:
    answer = server.root.post("/runs", content=b"\x1f\x8b\x08" + b"\0" * 50, headers={"Content-Encoding": encoding})
    assert (answer.status_code, answer.json()["error_code"]) == (415, "UNSUPPORTED_MEDIA_TYPE")


def test_identity_is_no_compression(server: TokenServer) -> None:
    assert server.root.post("/runs", json=RUN, headers={"Content-Encoding": "Identity"}).status_code == 201


def test_a_refused_client_that_sends_all_before_it_reads_sees_why(server: TokenServer) -> None:
    body = b" " * (3 * Settings().max_body)
    for who in (server.nobody, server.root):
        answer = who.post("/runs", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == (413 if who is server.root else 401)


def test_a_body_that_comes_too_slowly_is_given_up(tmp_path: Any, migrated_sqlite_url: str) -> None:
    app = make_app(migrated_sqlite_url, tmp_path)
    with serve(app, Settings(body_timeout=0.2)) as service:
        told = b"POST /runs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
        answer = send_raw(service.address, told)
        assert status_of(answer) == 408
        assert b"BODY_TOO_SLOW" in answer
        assert b"connection: close" in answer.lower()
        drip = b"POST /runs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\n{\r\n" * 3
        assert status_of(send_raw(service.address, drip)) == 408
    app.close()


TRICKS = [
    "/healthz/../runs",
    "//healthz",
    "/healthz/",
    "/healthz%2f..",
    "/healthz%2f..%2fruns",
    "/healthz/..;/runs",
    "/healthz?/../runs",
    "/healthz%00",
    "/healthz%0a",
    "/HEALTHZ",
    "/./runs",
    "/runs/",
    "//runs",
    "/runs//",
    "/%72uns",
    "/runs%2f",
    "/runs/%2e%2e/runs",
    "/runs/..%2f..%2fetc%2fpasswd",
    "/runs\\..\\x",
    "/%ff%fe",
    "/%",
    "/%zz",
    "/runs/%00",
    "/admin/tokens/%00",
    "/admin/quotas/%00",
    "/admin/quotas/%ff",
    "/usage//",
    "http://localhost/runs",
    "http://evil.example/healthz",
    "http://evil.example/runs",
    "*",
    "healthz",
    "",
]


@pytest.mark.parametrize("target", TRICKS)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_no_spelling_of_a_path_passes_the_gate_or_breaks_the_server(
    server: TokenServer, method: str, target: str
) -> None:
    before = count(server)
    line = f"{method} {target} HTTP/1.1"
    closed = ("Connection: close", "Content-Length: 0")
    outside = send_raw(server.address, head(server, line, *closed, token=False))
    inside = send_raw(server.address, head(server, line, *closed))
    opened = target.startswith("/healthz?")
    assert status_of(outside) in ((200, 405) if opened else (400, 401, 404)), outside
    assert b"runs" not in outside or not outside.startswith(b"HTTP/1.1 200"), outside
    assert status_of(inside) < 500, inside
    assert count(server) == before


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "FOO", "get", "PROPFIND"])
@pytest.mark.parametrize("path", ["/runs", "/healthz", "/admin/tokens", "/nowhere"])
def test_no_method_passes_the_gate_or_breaks_the_server(server: TokenServer, method: str, path: str) -> None:
    line = f"{method} {path} HTTP/1.1"
    outside = send_raw(server.address, head(server, line, "Connection: close", token=False))
    inside = send_raw(server.address, head(server, line, "Connection: close"))
    assert status_of(outside) in ((200, 204, 400, 405) if path == "/healthz" else (400, 401))
    assert status_of(inside) < 500, inside
    if method == "HEAD":
        assert outside.endswith(b"\r\n\r\n")


def test_a_request_line_or_header_that_is_far_too_long_is_refused(server: TokenServer) -> None:
    long = send_raw(server.address, head(server, f"GET /runs?q={'x' * 200_000} HTTP/1.1", "Connection: close"))
    assert status_of(long) < 500
    wide = send_raw(server.address, head(server, "GET /runs HTTP/1.1", f"X-Wide: {'x' * 200_000}", "Connection: close"))
    assert status_of(wide) < 500


def test_a_websocket_is_turned_away(server: TokenServer) -> None:
    shake = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: eHh4eA==")
    answer = send_raw(server.address, head(server, "GET /runs HTTP/1.1", *shake, "Content-Length: 0"), then_close=True)
    assert answer == b"" or status_of(answer) in (200, 400, 403)


def at_the_gate(messages: list[dict[str, Any]], method: str = "POST", **settings: Any) -> tuple[list[Any], list[Any]]:
    """What the service behind the gate hears, and what the client is sent, when the server says these messages."""
    heard: list[Any] = []
    sent: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        while len(messages) > 1:
            heard.append(await receive())

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    async def opened() -> None: ...

    guarded = AuthMiddleware(inner, None, Settings(**settings), opened)  # type: ignore[arg-type]
    scope = {"type": "http", "method": method, "path": "/healthz", "headers": []}
    asyncio.run(guarded(scope, receive, send))
    return heard, sent


def test_a_client_that_hangs_up_within_its_body_is_not_served() -> None:
    part = {"type": "http.request", "body": b"{}", "more_body": True}
    heard, sent = at_the_gate([part, {"type": "http.disconnect"}])
    assert (heard, sent[0]["status"]) == ([], 400)


def test_after_the_body_the_service_hears_that_its_client_went_away() -> None:
    whole = {"type": "http.request", "body": b"{}", "more_body": False}
    gone = {"type": "http.disconnect"}
    heard, _ = at_the_gate([whole, gone, gone])
    assert heard == [whole, gone]
    heard, _ = at_the_gate([gone, gone], method="GET")
    assert heard == [gone]


def test_a_stream_of_events_ends_on_the_server_when_its_client_goes_away(
    server: TokenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    real = server.state.auth.caller

    async def caller(scope: Any) -> Any:
        loops.append(asyncio.get_running_loop())
        return await real(scope)

    monkeypatch.setattr(server.state.auth, "caller", caller)
    run = server.root.post("/runs", json=RUN | {"delay": 3600}).json()["run_id"]

    def answering() -> int:
        return sum("run_asgi" in repr(task) for task in asyncio.all_tasks(loops[0]))

    eventually(lambda: answering() == 0)
    host, _, port = server.address.removeprefix("http://").partition(":")
    with closing(socket.create_connection((host, int(port)), timeout=PATIENCE)) as line:
        line.sendall(head(server, f"GET /runs/{run}/events HTTP/1.1"))
        answer = b""
        while b"PENDING" not in answer:
            part = line.recv(4096)
            assert part, answer
            answer += part
        assert answering() == 1
    eventually(lambda: answering() == 0)
