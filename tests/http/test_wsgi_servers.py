"""The WSGI door behind gunicorn, with sync and with threaded workers: however an app answers and a client leaves."""

import hashlib
import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from semel.http.wsgi import IdempotencyMiddleware
from support.apps.wsgi_app import PICTURE, SHEET, both
from support.process_peer import Desk
from support.web_servers import WebServer, web_server

PATIENCE = 60
MEGABYTE = 1 << 20
WORKERS = {"sync": ["--worker-class", "sync", "--preload"], "gthread": ["--worker-class", "gthread", "--threads", "8"]}
numbers = count()


class Answer(Struct):
    """What a client got; header names as they came, lowered."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def __getitem__(self, name: str) -> str | None:
        return next((value for each, value in self.headers if each == name), None)

    @property
    def replayed(self) -> bool:
        return self["idempotent-replayed"] == "true"

    @property
    def code(self) -> str:
        said: str = json.loads(self.body)["error_code"]
        return said


def read(response: HTTPResponse) -> Answer:
    headers = [(name.lower(), value) for name, value in response.getheaders()]
    return Answer(response.status, headers, response.read())


class Site:
    """A gunicorn that runs wsgi_app, what its app notes, and ways to ask it."""

    def __init__(self, server: WebServer, desk: Desk) -> None:
        self.server = server
        self.desk = desk

    def connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE)

    def dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE)

    def post(self, path: str, key: str, body: Any = b"", **headers: str) -> Answer:
        with closing(self.connect()) as connection:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request("POST", path, body, {"Idempotency-Key": key, **named})
            return read(connection.getresponse())

    def post_until_settled(self, path: str, key: str, body: bytes = b"") -> Answer:
        """Ask until the first request is no longer being worked on."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            answer = self.post(path, key, body)
            if answer.status != 409:
                return answer
            assert answer.code == "IDEMPOTENCY_KEY_PROCESSING"
            time.sleep(0.01)  # as a client would, if shorter
        raise AssertionError("the request is still being worked on")

    def executions(self, key: str) -> int:
        return len(self.desk.notes(key, "executed"))

    def closings(self, key: str) -> int:
        return len(self.desk.notes(key, "closed"))


@pytest.fixture(scope="module", params=list(WORKERS))
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("wsgi")
    number = 2 if request.param == "sync" else 1
    with serving(folder, request.param, number=number, body_in_memory=64 * 1024, max_request_bytes=None) as site:
        yield site


@contextmanager
def serving(folder: Path, workers: str, *more: str, number: int = 1, **options: Any) -> Iterator[Site]:
    """A site of its own, for as long as the block lasts."""
    env = {
        "STORE": f"sqlite:///{folder / 'semel.db'}",
        "FOLDER": str(folder),
        "OPTIONS": json.dumps(options),
        "TMPDIR": str(folder),
    }
    arguments = [*WORKERS[workers], *more]
    with web_server("gunicorn", "support.apps.wsgi_app:app", workers=number, env=env, options=arguments) as server:
        yield Site(server, Desk(folder))


@pytest.fixture
def key() -> str:
    return f"key-{next(numbers)}"


def twice(site: Site, path: str, key: str, body: bytes = b"") -> Answer:
    """The first answer; the second is seen to be its replay, and the app to have worked once."""
    first = site.post(path, key, body)
    assert first.status < 400, first
    assert not first.replayed
    second = site.post(path, key, body)
    assert second.replayed
    assert (second.status, second.body, second["content-type"]) == (first.status, first.body, first["content-type"])
    assert second["idempotency-expires"] == first["idempotency-expires"] is not None
    assert site.executions(key) == 1
    return first


# -- the ways to answer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/list", 201, b"alist!"),
        ("/tuple", 201, b"a tuple"),
        ("/empty_chunks", 202, b""),
        ("/no_content", 204, b""),
        ("/not_modified", 304, b""),
        ("/picture", 200, PICTURE),
        ("/only_write", 200, b"all of i"),
        ("/flask/file", 200, SHEET),
    ],
)
def test_a_response_replays_as_it_was(site: Site, key: str, path: str, status: int, body: bytes) -> None:
    answer = twice(site, path, key)
    assert (answer.status, answer.body) == (status, body)


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/empty", 202, b""),
        ("/lazy", 201, b"late but whole"),
        ("/file", 200, SHEET),
        ("/write", 200, b"one two three"),
        ("/reconsidered", 202, b"second"),
    ],
)
def test_the_apps_iterable_is_closed_once_and_a_replay_has_none(
    site: Site, key: str, path: str, status: int, body: bytes
) -> None:
    answer = twice(site, path, key)
    assert (answer.status, answer.body) == (status, body)
    site.desk.wait_for(key, "closed")
    assert site.closings(key) == 1


def test_a_start_that_was_replaced_leaves_nothing_behind(site: Site, key: str) -> None:
    """start_response with exc_info, before anything left: the first headers are forgotten, here and in the replay."""
    for answer in (twice(site, "/reconsidered", key), site.post("/reconsidered", key)):
        assert answer["x-first"] is None


def test_several_headers_of_one_name_keep_their_order_and_cookies_are_not_replayed(site: Site, key: str) -> None:
    first = twice(site, "/links", key)
    assert [value for name, value in first.headers if name == "set-cookie"] == ["a=1", "b=2"]
    second = site.post("/links", key)
    kept = ("link", "x-between", "vary", "set-cookie")
    assert [pair for pair in second.headers if pair[0] in kept] == [
        ("link", "</a>; rel=next"),
        ("x-between", "caf\xe9"),
        ("link", "</b>; rel=prev"),
        ("vary", "Accept"),
    ]


def test_bodiless_answers_replay_without_a_length(site: Site, key: str) -> None:
    for path, name in (("/no_content", "x-done"), ("/not_modified", "etag")):
        first, second = twice(site, path, key), site.post(path, key)
        assert first[name] == second[name] is not None
        assert second["content-length"] is None
        assert second["transfer-encoding"] is None
        key += "-other"


def test_without_a_key_the_app_answers_as_ever(site: Site) -> None:
    for _ in range(2):
        with closing(site.connect()) as connection:
            connection.request("POST", "/list")
            answer = read(connection.getresponse())
        assert (answer.status, answer.body, answer.replayed) == (201, b"alist!", False)
        assert answer["idempotency-expires"] is None


# -- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/steps", "/sized_steps", "/flask/stream"])
def test_each_chunk_reaches_the_client_before_the_next_is_made(site: Site, key: str, path: str) -> None:
    """Only what would complete the response is held back until the outcome is stored."""
    steps = 2 if path == "/flask/stream" else 3
    with closing(site.connect()) as connection:
        connection.request("POST", path, b"", {"Idempotency-Key": key})
        seen = b""
        site.desk.open(f"{key} 0")
        response = connection.getresponse()
        for number in range(1, steps):
            seen += response.readline()
            assert b"%d\n" % (number - 1) in seen
            assert len(site.desk.notes(key, "made")) == (number if steps == 3 else 0)
            site.desk.open(f"{key} {number}")
        seen += response.read()
    replay = site.post(path, key)
    assert (replay.replayed, replay.status, replay.body) == (True, 200, seen)
    assert site.executions(key) == 1
    assert site.desk.wait_for(key, "closed")
    assert site.closings(key) == 1


def test_a_stream_in_progress_is_a_request_in_progress(site: Site, key: str) -> None:
    with closing(site.connect()) as connection:
        connection.request("POST", "/steps", b"", {"Idempotency-Key": key})
        site.desk.open(f"{key} 0")
        response = connection.getresponse()
        assert response.readline() == b"chunk 0\n"
        duplicate = site.post("/steps", key)
        assert (duplicate.status, duplicate.code) == (409, "IDEMPOTENCY_KEY_PROCESSING")
        for number in (1, 2):
            site.desk.open(f"{key} {number}")
        assert response.read() == b"chunk 1\nchunk 2\n"


def test_a_stream_that_fails_midway_breaks_off_and_may_be_tried_again(site: Site, key: str) -> None:
    with closing(site.connect()) as connection:
        connection.request("POST", "/breaks", b"", {"Idempotency-Key": key})
        response = connection.getresponse()
        assert response.status == 200
        with pytest.raises(HTTPException):
            response.read()
    site.desk.wait_for(key, "closed")
    site.desk.open(key)
    again = site.post_until_settled("/breaks", key)
    assert (again.status, again.body, again.replayed) == (200, b"first half, second half", False)
    assert site.post("/breaks", key).replayed
    site.desk.wait_for(key, "closed", 2)
    assert (site.executions(key), site.closings(key)) == (2, 2)


def test_an_error_after_the_first_chunk_is_raised_again_by_start_response(site: Site, key: str) -> None:
    with closing(site.connect()) as connection:
        connection.request("POST", "/too_late", b"", {"Idempotency-Key": key})
        response = connection.getresponse()
        assert response.status == 200
        with pytest.raises(HTTPException):
            response.read()
    site.desk.wait_for(key, "closed")
    assert not site.desk.notes(key, "went on")
    assert site.closings(key) == 1


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/raises", "/first_next_raises", "/flask/raises"])
def test_a_handler_that_raises_gives_its_key_back(site: Site, key: str, path: str) -> None:
    failed = site.post(path, key)
    assert failed.status == 500
    site.desk.open(key)
    again = site.post(path, key)
    assert again.status in (200, 201)
    assert not again.replayed
    assert site.post(path, key).replayed
    assert site.executions(key) == 2
    if path == "/first_next_raises":
        site.desk.wait_for(key, "closed", 2)
        assert site.closings(key) == 2


@pytest.mark.parametrize("workers", list(WORKERS))
def test_a_failure_that_is_kept_has_one_body_for_the_first_client_and_all_others(tmp_path: Path, workers: str) -> None:
    """The server has the response, whole, and then the exception, which is for its log."""
    with serving(tmp_path, workers, policy={"on_error": "keep"}) as site:
        for key, path in (("a", "/raises"), ("b", "/first_next_raises")):
            answers = [site.post(path, key) for _ in range(2)]
            assert [(answer.status, answer.replayed) for answer in answers] == [(500, False), (500, True)]
            assert answers[0].code == "IDEMPOTENT_REQUEST_FAILED"
            assert answers[1].body == answers[0].body
            assert site.executions(key) == 1


@pytest.mark.parametrize("path", ["/taken_back", "/taken_back_at_the_end"])
def test_what_was_held_back_is_taken_back_by_a_second_start(site: Site, key: str, path: str) -> None:
    """Nothing of it has left, so the app's second thought is all that the client and its retry get."""
    answer = twice(site, path, key)
    assert (answer.status, answer.body) == (202, b"said instead")


@pytest.mark.parametrize("path", ["/silent", "/twice"])
def test_an_app_that_breaks_the_rules_gets_a_500_and_its_key_is_free(site: Site, key: str, path: str) -> None:
    assert [site.post(path, key).status for _ in range(2)] == [500, 500]
    assert site.executions(key) == 2


# -- uploads ---------------------------------------------------------------------------------------------------------


def pieces(size: int) -> Iterator[bytes]:
    piece = hashlib.sha256(b"seed").digest() * 2048
    for at in range(0, size, len(piece)):
        yield piece[: size - at]


def digest_of(size: int) -> str:
    digest = hashlib.sha256()
    for piece in pieces(size):
        digest.update(piece)
    return digest.hexdigest()


@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "with a length"])
@pytest.mark.parametrize("size", [0, 1, 64 * 1024, 64 * 1024 + 1, 300_000])
def test_an_upload_arrives_as_it_was_sent(site: Site, key: str, size: int, chunked: bool) -> None:
    """In memory and over its edge, in a file."""
    headers = {} if chunked else {"Content_Length": str(size)}
    answers = [site.post("/digest", key, pieces(size), **headers) for _ in range(2)]
    assert [(answer.status, answer.replayed) for answer in answers] == [(201, False), (201, True)]
    for answer in answers:
        assert json.loads(answer.body) == {"sha256": digest_of(size), "size": size, "length": str(size)}
    other = site.post(
        "/digest", key, pieces(size + 1), **({"Content_Length": str(size + 1)} if not chunked else headers)
    )
    assert (other.status, other.code) == (409, "IDEMPOTENCY_KEY_CONFLICT")
    assert site.executions(key) == 1


@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "with a length"])
def test_fifty_megabytes_pass_in_little_memory(site: Site, key: str, chunked: bool) -> None:
    size = 50 * MEGABYTE
    headers = {} if chunked else {"Content_Length": str(size)}
    for number in range(2 * len(site.server.pids)):
        site.post("/digest", f"{key}-{number}", b"small")  # what the first request needs is not counted
    before = {pid: peak_since_now(pid) for pid in site.server.pids}
    for expected in (False, True):
        answer = site.post("/digest", key, pieces(size), **headers)
        assert (answer.status, answer.replayed) == (201, expected)
        assert json.loads(answer.body) == {"sha256": digest_of(size), "size": size, "length": str(size)}
    assert site.executions(key) == 1
    for pid, used in before.items():
        assert peak(pid) - used < 16 * MEGABYTE


def peak_since_now(pid: int) -> int:
    """The memory that a process has in use; its peak is counted from here on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak(pid)


def peak(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def test_temporary_files_do_not_outlive_their_requests(site: Site, key: str) -> None:
    """Not one is left open, whether the request was carried out, replayed or refused."""
    big = b"x" * 300_000
    for body in (big, big, big + b"y"):
        site.post("/digest", key, body)
    site.post("/raises", f"{key}-raises", big)

    def open_files() -> list[str]:
        found = []
        for pid in site.server.pids:
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                try:
                    found.append(entry.readlink().name)
                except OSError:
                    continue  # closed meanwhile
        return [name for name in found if name.endswith("(deleted)") and not name.startswith("wgunicorn")]

    deadline = time.monotonic() + PATIENCE
    while open_files() and time.monotonic() < deadline:
        time.sleep(0.01)  # the server closes after the last byte left
    assert open_files() == []


def test_a_form_with_a_file_reaches_flask(site: Site, key: str) -> None:
    data = os.urandom(200_000)
    body = (
        b'--edge\r\nContent-Disposition: form-data; name="field"\r\n\r\nvalue\r\n'
        b'--edge\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + data + b"\r\n--edge--\r\n"
    )
    for replayed in (False, True):
        answer = site.post("/flask/form", key, body, Content_Type="multipart/form-data; boundary=edge")
        assert (answer.status, answer.replayed) == (200, replayed)
        assert json.loads(answer.body) == {"field": "value", "sha256": hashlib.sha256(data).hexdigest()}
    assert site.executions(key) == 1


def test_json_reaches_flask(site: Site, key: str) -> None:
    for replayed in (False, True):
        answer = site.post("/flask/item", key, b'{"sku": "7"}', Content_Type="application/json")
        assert (answer.status, answer.replayed, json.loads(answer.body)) == (201, replayed, {"got": {"sku": "7"}})
    assert site.executions(key) == 1


# -- bodies that end early, and lengths that lie ---------------------------------------------------------------------


def head(key: str, *lines: str) -> bytes:
    return "\r\n".join(["POST /digest HTTP/1.1", "Host: x", f"Idempotency-Key: {key}", *lines, "", ""]).encode()


SHORT = {
    "with a length": (["Content-Length: 10"], b"only "),
    "with a length, on disk": (["Content-Length: 200000"], b"x" * 150_000),
    "chunked, inside a chunk": (["Transfer-Encoding: chunked"], b"a\r\nonly "),
    "chunked, between chunks": (["Transfer-Encoding: chunked"], b"5\r\nonly \r\n"),
    "chunked, before the end": (["Transfer-Encoding: chunked"], b"5\r\nonly \r\n0\r\n"),
}


@pytest.mark.parametrize("how", SHORT)
def test_a_body_that_ends_early_executes_nothing(site: Site, key: str, how: str) -> None:
    """The client closes its side: it is told that its request was not whole. Then its retry is carried out, once."""
    lines, sent = SHORT[how]
    with site.dial() as line:
        line.sendall(head(key, *lines) + sent)
        line.shutdown(socket.SHUT_WR)
        answer = received(line)
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert site.executions(key) == 0
    again = site.post("/digest", key, b"all of it")
    assert (again.status, again.replayed) == (201, False)
    assert site.post("/digest", key, b"all of it").replayed
    assert site.executions(key) == 1


def received(line: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    parts = []
    try:
        while part := line.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


@pytest.mark.parametrize("how", SHORT)
def test_a_client_that_vanishes_while_it_sends_executes_nothing(site: Site, key: str, how: str) -> None:
    lines, sent = SHORT[how]
    with site.dial() as line:
        line.sendall(head(key, *lines) + sent)
        hang_up(line)
    again = site.post("/digest", key, b"all of it")
    assert (again.status, again.replayed) == (201, False)
    assert site.executions(key) == 1


def hang_up(line: socket.socket) -> None:
    """Leave without a goodbye: what still comes is answered by a reset."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.close()


HOSTILE = ["-1", "ten", "1e3", "+5", "5 5", "0x10", "5,5", "9" * 5000, "\u0665"]


@pytest.mark.parametrize("length", HOSTILE, ids=ascii)
def test_a_hostile_length_executes_nothing_over_the_wire(site: Site, key: str, length: str) -> None:
    with site.dial() as line:
        line.sendall(
            f"POST /digest HTTP/1.1\r\nHost: x\r\nIdempotency-Key: {key}\r\nContent-Length: {length}\r\n\r\n".encode()
            + b"12345"
        )
        line.shutdown(socket.SHUT_WR)
        answer = received(line)
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert site.executions(key) == 0
    assert site.post("/digest", key, b"12345").status == 201


@pytest.mark.parametrize("length", [str(2**63), str(2**64 + 5), "9" * 30])
def test_a_huge_length_takes_no_memory_and_executes_nothing(site: Site, key: str, length: str) -> None:
    with site.dial() as line:
        line.sendall(head(key, f"Content-Length: {length}") + b"12345")
        line.shutdown(socket.SHUT_WR)
        answer = received(line)
    assert b" 5" not in answer[:12], answer
    assert site.executions(key) == 0
    assert site.post("/digest", key, b"12345").status == 201


class Called:
    """The middleware called by hand, as a server with fewer scruples than gunicorn would."""

    def __init__(self, folder: Path, store: str = "memory://") -> None:
        self.desk = Desk(folder)
        self.door = IdempotencyMiddleware(both(self.desk), store)

    def __call__(self, key: str, **environ: Any) -> tuple[str, bytes]:
        started: list[str] = []

        def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
            started.append(status)
            return lambda _: None

        given = {
            "REQUEST_METHOD": "POST",
            "SCRIPT_NAME": "",
            "PATH_INFO": "/digest",
            "QUERY_STRING": "",
            "HTTP_IDEMPOTENCY_KEY": key,
            "wsgi.input": BytesIO(b"12345"),
            **environ,
        }
        answer = self.door(given, start)
        body = b"".join(answer)
        if hasattr(answer, "close"):
            answer.close()
        assert len(started) == 1
        return started[0], body


@pytest.mark.parametrize("length", [*HOSTILE, str(2**63), " 5", "5 ", "6"], ids=ascii)
@pytest.mark.parametrize("terminated", [True, False], ids=["input terminated", "input open"])
def test_the_door_itself_refuses_a_hostile_length(tmp_path: Path, length: str, terminated: bool) -> None:
    called = Called(tmp_path)
    status, body = called("k", CONTENT_LENGTH=length, **{"wsgi.input_terminated": terminated})
    assert (status, json.loads(body)["error_code"]) == ("400 Bad Request", "INCOMPLETE_REQUEST_BODY")
    assert called.desk.notes("k", "executed") == []
    assert called("k", CONTENT_LENGTH="5")[0] == "201 Created"


def test_the_door_reads_no_further_than_the_length(tmp_path: Path) -> None:
    """A server's input may be the connection itself, with the next request behind the body."""
    called = Called(tmp_path)
    stream = BytesIO(b"12345POST /next")
    assert called("k", CONTENT_LENGTH="5", **{"wsgi.input": stream})[0] == "201 Created"
    assert stream.read() == b"POST /next"


def test_without_a_length_only_input_that_ends_by_itself_is_read(tmp_path: Path) -> None:
    called = Called(tmp_path)
    for number, (length, terminated, size) in enumerate([("", False, 0), ("", True, 5), (None, True, 5)]):
        environ = {} if length is None else {"CONTENT_LENGTH": length}
        status, body = called(f"k{number}", **environ, **{"wsgi.input_terminated": terminated})
        assert (status, json.loads(body)["size"]) == ("201 Created", size)


def test_an_input_that_fails_while_it_is_read_is_not_a_store_that_is_away(tmp_path: Path) -> None:
    """The client's connection broke: that is an incomplete body, and nobody is asked to wait for a store."""

    class Reset(BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise ConnectionResetError("by peer")

    called = Called(tmp_path)
    status, _ = called("k", CONTENT_LENGTH="5", **{"wsgi.input": Reset()})
    assert status.startswith("400 ")
    assert called.desk.notes("k", "executed") == []


# -- clients that leave ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("politely", [True, False], ids=["closes", "resets"])
def test_a_client_that_leaves_before_the_response_finds_it_when_it_is_back(
    site: Site, key: str, politely: bool
) -> None:
    with site.dial() as line:
        line.sendall(head(key).replace(b"/digest", b"/waits"))
        site.desk.wait_for(key, "executed")
        line.close() if politely else hang_up(line)
    site.desk.open(key)
    again = site.post_until_settled("/waits", key)
    assert (again.status, again.body, again.replayed) == (201, b"done", True)
    site.desk.wait_for(key, "closed")
    assert (site.executions(key), site.closings(key)) == (1, 1)


@pytest.mark.parametrize("path", ["/steps", "/sized_steps"])
def test_a_client_that_leaves_in_the_middle_of_a_stream_finds_it_when_it_is_back(
    site: Site, key: str, path: str
) -> None:
    with site.dial() as line:
        line.sendall(head(key).replace(b"/digest", path.encode()))
        site.desk.open(f"{key} 0")
        seen = b""
        while b"chunk 0\n" not in seen:
            seen += line.recv(1000)
        hang_up(line)
    for number in (1, 2):
        site.desk.open(f"{key} {number}")
    again = site.post_until_settled(path, key)
    assert (again.status, again.body, again.replayed) == (200, b"chunk 0\nchunk 1\nchunk 2\n", True)
    site.desk.wait_for(key, "closed")
    assert (site.executions(key), site.closings(key)) == (1, 1)


def test_a_stream_that_nobody_reads_is_finished_all_the_same(site: Site, key: str) -> None:
    """The client leaves with megabytes to come: they are made, kept, and are there when it is back."""
    with site.dial() as line:
        line.sendall(head(key).replace(b"/digest", b"/flood"))
        assert line.recv(1000).startswith(b"HTTP/1.1 200 ")
        hang_up(line)
    site.desk.wait_for(key, "closed")
    again = site.post_until_settled("/flood", key)
    assert (again.replayed, again.body) == (True, b"".join(b"%06d " % number * 4096 for number in range(400)))
    assert (site.executions(key), site.closings(key), len(site.desk.notes(key, "made"))) == (1, 1, 1)


# -- one connection, several requests --------------------------------------------------------------------------------


def test_pipelined_duplicates_execute_once(site: Site, key: str) -> None:
    """Five requests in one packet. Sync workers answer the first and close; threaded ones answer all, in order."""
    one = head(key, "Content-Length: 5") + b"12345"
    last = head(key, "Content-Length: 5", "Connection: close") + b"12345"
    with site.dial() as line:
        line.sendall(one * 4 + last)
        answers = received(line)
    statuses = answers.count(b"HTTP/1.1 201 Created")
    assert statuses == answers.count(b"HTTP/1.1 ")
    assert statuses in (1, 5)
    assert answers.lower().count(b"idempotent-replayed: true") == statuses - 1
    assert site.executions(key) == 1


def test_a_refused_request_leaves_the_connection_in_step(site: Site, key: str) -> None:
    """Its body is unread; what follows on the connection is still taken for what it is, or the connection closes."""
    body = b"POST /list HTTP/1.1\r\nHost: x\r\n\r\n"
    refused = head("not a key!", f"Content-Length: {len(body)}") + body
    with site.dial() as line:
        line.sendall(refused + head(key, "Content-Length: 5", "Connection: close") + b"12345")
        answers = received(line)
    assert answers.startswith(b"HTTP/1.1 400 ")
    assert answers.count(b"HTTP/1.1 ") == answers.count(b"HTTP/1.1 201") + 1
    assert site.executions(key) == answers.count(b"HTTP/1.1 201") <= 1
    assert b"alist!" not in answers


# -- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", list(WORKERS))
def test_a_handler_finishes_when_the_server_is_told_to_end(tmp_path: Path, workers: str) -> None:
    """SIGTERM while it works: the client gets its answer, and whoever serves next replays it."""
    with serving(tmp_path, workers) as site:
        answers: list[Answer] = []
        client = threading.Thread(target=lambda: answers.append(site.post("/waits", "term")))
        client.start()
        site.desk.wait_for("term", "executed")
        site.server.signal(signal.SIGTERM)
        site.desk.open("term")
        client.join(PATIENCE)
        site.server.wait_until_gone()
        assert [(answer.status, answer.replayed) for answer in answers] == [(201, False)]
    called = Called(tmp_path, f"sqlite:///{tmp_path / 'semel.db'}")
    assert called("term", PATH_INFO="/waits", CONTENT_LENGTH="0") == ("201 Created", b"done")
    called.door.close()
    assert (site.executions("term"), site.closings("term")) == (1, 1)


def test_a_handler_that_gunicorn_gives_up_on_gives_its_key_back(tmp_path: Path) -> None:
    """A sync worker over its time limit is aborted by a signal, inside the handler; the retry is carried out."""
    with serving(tmp_path, "sync", "--timeout", "2") as site:
        assert insistent(site, "/list", "warm").status == 201
        client = threading.Thread(target=insistent, args=(site, "/waits", "hangs"))
        client.start()
        site.desk.wait_for("hangs", "executed", 2)  # the first was aborted, and its key was free at once
        site.desk.open("hangs")
        client.join(PATIENCE)
        assert insistent(site, "/waits", "hangs").replayed
        assert len(site.desk.notes("hangs", "done")) == 1
        assert "WORKER TIMEOUT" in site.server.log()


def insistent(site: Site, path: str, key: str) -> Answer:
    """Ask until there is an answer that is not an error, as a good client does."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            answer = site.post(path, key)
        except (HTTPException, OSError):
            continue
        if answer.status < 400:
            return answer
        assert answer.status in (409, 500)
        time.sleep(0.01)  # as a client would, if shorter
    raise AssertionError("no answer")
