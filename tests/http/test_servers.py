"""The middleware on real servers, with real clients: what streams, breaks, is cut off, cancelled or stopped.

One suite for ASGI and WSGI: a test runs on every server, and, where the framework may make a difference, in every
framework. What only one protocol or framework has comes last.
"""

import base64
import gzip
import hashlib
import os
import signal
import socket
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path
from typing import NoReturn

import h11
import httpx
import pytest

from semel import Once
from support import servers
from support.databases import store_urls
from support.http_sites import (
    FRAMEWORKS,
    LEAVING,
    PATIENCE,
    SERVERS,
    Site,
    code_of,
    is_replay_of,
    replayed,
    running,
    serving,
    until,
)
from support.process_peer import ProcessPeer
from support.web_servers import WebServer, lives, web_server

MEGABYTE = 1 << 20
ASGI_SERVERS = [name for name, kind in SERVERS.items() if kind.protocol == "asgi"]
VARIANTS = [(name, framework) for name, kind in SERVERS.items() for framework in FRAMEWORKS[kind.protocol]]


@pytest.fixture(scope="module")
def sites(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Site]]:
    """Returns the site of a server, a framework and a store; each server starts when a test first needs it."""
    with store_urls(request) as urls, ExitStack() as cleanup:

        @cache
        def started(name: str, store: str) -> tuple[WebServer, ProcessPeer]:
            folder = tmp_path_factory.mktemp(f"{name}-{store}")
            url = f"sqlite:///{folder / 'semel.db'}" if store == "sqlite" else urls[store]
            server = cleanup.enter_context(running(name, folder, {store: url}))
            cleanup.callback(server.kill)  # how servers stop is tested elsewhere
            return server, ProcessPeer(folder)

        @cache
        def site_of(name: str, framework: str, store: str = "sqlite") -> Site:
            server, desk = started(name, store)
            return cleanup.enter_context(closing(Site(server, desk, name, framework, store)))

        yield site_of


@pytest.fixture(params=VARIANTS, ids="-".join)
def site(request: pytest.FixtureRequest, sites: Callable[..., Site]) -> Site:
    """Every server, with every framework of its protocol."""
    return sites(*request.param)


@pytest.fixture(params=[(name, FRAMEWORKS[kind.protocol][-1]) for name, kind in SERVERS.items()], ids="-".join)
def server_site(request: pytest.FixtureRequest, sites: Callable[..., Site]) -> Site:
    """Every server, with one framework."""
    return sites(*request.param)


@pytest.fixture(
    params=[*((name, framework, "sqlite") for name, framework in VARIANTS), ("uvicorn", "asgi", "redis"),
            ("granian", "starlette", "postgres"), ("gunicorn-gthread", "flask", "postgres")],
    ids="-".join,
)  # fmt: skip
def store_site(request: pytest.FixtureRequest, sites: Callable[..., Site]) -> Site:
    """Every server and framework, and every store that processes can share."""
    return sites(*request.param)


@pytest.fixture(params=ASGI_SERVERS)
def starlette(request: pytest.FixtureRequest, sites: Callable[..., Site]) -> Site:
    return sites(request.param, "starlette")


@pytest.fixture(params=["gunicorn-sync", "gunicorn-gthread"])
def bare_wsgi(request: pytest.FixtureRequest, sites: Callable[..., Site]) -> Site:
    return sites(request.param, "wsgi")


@pytest.fixture(params=["gunicorn-sync", "gunicorn-gthread"])
def flask(request: pytest.FixtureRequest, sites: Callable[..., Site]) -> Site:
    return sites(request.param, "flask")


@pytest.fixture
def key() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def twice(site: Site, place: str, key: str, content: bytes = b"{}") -> tuple[httpx.Response, httpx.Response]:
    """The first response and its replay; the app has worked once."""
    first, second = site.post(place, key, content), site.post(place, key, content)
    assert first.status_code < 400, first.text
    assert is_replay_of(first, second)
    assert second.headers.get("content-type") == first.headers.get("content-type")
    assert second.headers["idempotency-expires"] == first.headers["idempotency-expires"]
    assert site.executions(key) == 1
    return first, second


@contextmanager
def locked(site: Site) -> Iterator[None]:
    """Nobody can write to the store meanwhile."""
    with closing(sqlite3.connect(site.desk.folder / "semel.db", isolation_level=None, timeout=PATIENCE)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


def test_without_a_key_the_app_answers_as_ever(site: Site) -> None:
    responses = [site.client.post(site.path("intake/plain")) for _ in range(2)]
    assert [response.status_code for response in responses] == [201, 201]
    assert responses[0].content != responses[1].content
    for response in responses:
        assert not {"idempotent-replayed", "idempotency-expires"} & set(response.headers)


# -- responses that stream -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("query", ["", "?sized"], ids=["without a length", "with a length"])
def test_each_chunk_reaches_the_client_before_the_next_is_made(store_site: Site, key: str, query: str) -> None:
    """Only what would complete the response is held back until the outcome is stored."""
    site, place = store_site, f"intake/steps{query}"
    site.open(key, 0)
    received = b""
    with site.stream(place, key) as first:
        for chunk in first.iter_raw():
            received += chunk
            made = received.count(b"\n")
            if made < 3 and received.endswith(b"\n"):
                assert len(site.desk.notes(key, "made")) == made
                site.open(key, made)
    assert received == b"chunk 0\nchunk 1\nchunk 2\n"
    second = site.post(place, key)
    assert (second.status_code, replayed(second), second.content) == (200, True, received)
    assert second.headers["content-type"] == first.headers["content-type"]
    assert first.headers["content-type"].startswith("text/event-stream")
    site.assert_closed(key)
    assert site.executions(key) == 1


def test_a_stream_in_progress_is_a_request_in_progress(site: Site, key: str) -> None:
    site.open(key, 0)
    with site.connect() as connection:
        connection.send(site.whole("intake/steps", key))
        connection.until(b"chunk 0\n")
        duplicate = site.post("intake/steps", key)
        assert (duplicate.status_code, code_of(duplicate)) == (409, "IDEMPOTENCY_KEY_PROCESSING")
        site.open(key, 1, 2)
        assert connection.response().content == b"chunk 0\nchunk 1\nchunk 2\n"


def test_a_file_is_recorded_though_the_server_could_send_it_by_itself(site: Site, key: str) -> None:
    """granian would send a file by its path, past the middleware; it must not, since the replay needs the bytes."""
    content = os.urandom(300_000)
    path = site.desk.folder / f"{key}.bin"
    path.write_bytes(content)
    first = site.post("intake/file", key)
    path.unlink()
    second = site.post("intake/file", key)
    assert first.content == content
    assert is_replay_of(first, second)
    for name in ("content-length", "content-type", "content-disposition", "etag", "last-modified"):
        assert second.headers.get(name) == first.headers.get(name), name
    if site.framework == "starlette":
        assert "etag" in first.headers
        announced = site.client.get("/extensions").json()
        assert ("http.response.pathsend" in announced) is (site.server.kind == "granian")
        assert site.desk.notes(key, "http.response.pathsend") == []
    if site.framework == "wsgi":
        site.assert_closed(key)
    assert site.executions(key) == 1


@pytest.mark.parametrize("query", ["", "?sized"], ids=["without a length", "with a length"])
def test_a_generator_that_fails_midway_breaks_the_response_and_frees_the_key(site: Site, key: str, query: str) -> None:
    place = f"intake/breaks{query}"
    with site.connect() as connection:
        connection.send(site.whole(place, key))
        with pytest.raises(h11.RemoteProtocolError):
            connection.response()
    second = site.settled(place, key)
    assert (second.content, replayed(second)) == (b"first half, second half", False)
    assert is_replay_of(second, site.post(place, key))
    site.assert_closed(key, 2)
    assert site.executions(key) == 2


def test_under_stripe_a_generator_that_fails_midway_is_a_kept_failure(site: Site, key: str) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        site.post("stripe/breaks", key)
    second = site.settled("stripe/breaks", key)
    assert (second.status_code, replayed(second)) == (500, True)
    assert second.json()["error"]["code"] == "idempotent_request_failed"
    assert "ran dry" not in second.text
    assert site.executions(key) == 1


# -- uploads ---------------------------------------------------------------------------------------------------------


def cut(body: bytes, size: int) -> Iterator[bytes]:
    yield from (body[at : at + size] for at in range(0, len(body), size))


@pytest.mark.parametrize("size", [0, 1, 64 * 1024, 64 * 1024 + 1, 300_000])
def test_an_upload_is_the_same_request_however_it_is_sent(site: Site, key: str, size: int) -> None:
    """In memory and over its edge, in a file; whole, or in chunks of any size."""
    body = os.urandom(size)
    first = site.post("spilling/echo", key, cut(body, 70_000))
    assert (first.json()["sha256"], first.json()["size"]) == (hashlib.sha256(body).hexdigest(), size)
    if site.framework == "wsgi":  # an app reads by the length, which a chunked request does not have
        assert [noted["stated"] for noted in site.desk.notes(key, "length")] == [str(size)]
    assert is_replay_of(first, site.post("spilling/echo", key, cut(body, 999)))
    assert is_replay_of(first, site.post("spilling/echo", key, body))
    for other in (cut(body + b"!", 70_000), body + b"!"):
        refused = site.post("spilling/echo", key, other)
        assert (refused.status_code, code_of(refused)) == (409, "IDEMPOTENCY_KEY_CONFLICT")
    assert site.executions(key) == 1


@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "with a length"])
def test_a_large_upload_reaches_the_app_whole_and_stays_out_of_memory(
    server_site: Site, key: str, chunked: bool
) -> None:
    site, size = server_site, 32
    megabyte = os.urandom(MEGABYTE)
    expected = hashlib.sha256(megabyte * size).hexdigest()
    length = {} if chunked else {"Content_Length": str(size * MEGABYTE)}

    def upload() -> Iterator[bytes]:
        yield from [megabyte] * size

    for number in range(2 * len(site.server.pids)):
        site.post("spilling/echo", f"{key}-{number}", megabyte)  # what the first upload needs is not counted
    site.server.forget_most_memory()
    before = site.server.memory()
    first = site.post("spilling/echo", key, upload(), **length)
    assert (first.json()["size"], first.json()["sha256"]) == (size * MEGABYTE, expected)
    assert is_replay_of(first, site.post("spilling/echo", key, upload(), **length))
    more = site.server.most_memory() - before
    assert more < 16 * MEGABYTE, f"{more >> 20} MB for an upload of {size} MB"
    assert site.executions(key) == 1


def test_temporary_files_do_not_outlive_their_requests(site: Site, key: str) -> None:
    """Not one is left open, whether the request was carried out, replayed, refused, or failed."""

    def open_files() -> list[str]:
        found = []
        for pid in site.server.pids:
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                try:
                    found.append(entry.readlink().name)
                except OSError:
                    continue  # closed meanwhile
        return [name for name in found if name.endswith("(deleted)") and not name.startswith("wgunicorn")]

    big = b"x" * 300_000
    for body in (big, big, big + b"y"):
        site.post("spilling/echo", key, body)
    site.post("spilling/fails", f"{key}-fails", big)
    until(lambda: not open_files())  # the server closes after the last byte left


def test_a_client_that_asks_first_is_told_to_continue(site: Site, key: str) -> None:
    with ExitStack() as opened:
        connection = opened.enter_context(site.connect())
        for times in range(2):
            connection.send(site.head("intake/echo", key, "Content-Length: 5", "Expect: 100-continue"))
            assert connection.response().status_code == 100
            connection.send(b"hello")
            response = connection.response()
            assert response.json()["sha256"] == hashlib.sha256(b"hello").hexdigest()
            assert replayed(response) is (times == 1)
            if not site.keeps_alive:
                connection = opened.enter_context(site.connect())
    assert site.executions(key) == 1


def test_duplicates_in_one_pipeline_run_once_and_are_all_answered_in_order(site: Site, key: str) -> None:
    """Sync workers answer the first and close."""
    expected = 5 if site.keeps_alive else 1
    with site.connect() as connection:
        connection.send(
            site.whole("intake/plain", key) * 4 + site.whole("intake/plain", key, b"{}", "Connection: close")
        )
        first, *others = [connection.response() for _ in range(expected)]
        assert connection.all() == b""
    assert first.status_code == 201
    assert all(is_replay_of(first, other) for other in others)
    assert site.executions(key) == 1


def test_a_refused_request_leaves_the_connection_in_step(site: Site, key: str) -> None:
    """Its body is unread; what follows on the connection is still taken for what it is, or the connection closes."""
    inner = site.whole("intake/plain", f"{key}-inner")
    with site.connect() as connection:
        connection.send(site.whole("intake/plain", "not a key!", inner))
        connection.send(site.whole("intake/plain", key, b"12345", "Connection: close"))
        responses = connection.all()
    assert responses.startswith(b"HTTP/1.1 400 ")
    assert responses.count(b"HTTP/1.1 ") == responses.count(b"HTTP/1.1 201") + 1
    assert site.executions(key) == responses.count(b"HTTP/1.1 201") <= 1
    assert site.executions(f"{key}-inner") == 0


# -- requests that end early, and lengths that lie -------------------------------------------------------------------


CHUNKED = "Transfer-Encoding: chunked"
HALVES: dict[str, Callable[[Site, str], bytes]] = {
    "in the first line": lambda site, key: site.head("intake/plain", key)[:15],
    "in the headers": lambda site, key: site.head("intake/plain", key, "Content-Length: 2")[:-8],
    "before the body": lambda site, key: site.head("intake/plain", key, "Content-Length: 2"),
    "in the body": lambda site, key: site.head("intake/plain", key, "Content-Length: 100") + b"{" * 50,
    "in a body on disk": lambda site, key: site.head("spilling/plain", key, "Content-Length: 200000") + b"x" * 150_000,
    "in a chunk": lambda site, key: site.head("intake/plain", key, CHUNKED) + b"20\r\n{}",
    "between chunks": lambda site, key: site.head("intake/plain", key, CHUNKED) + b"2\r\n{}\r\n",
    "before the last line": lambda site, key: site.head("intake/plain", key, CHUNKED) + b"2\r\n{}\r\n0\r\n",
}


@pytest.mark.parametrize("leave", [*LEAVING, "half-closing"])
@pytest.mark.parametrize("half", HALVES)
def test_a_request_that_ends_early_is_not_carried_out(server_site: Site, key: str, half: str, leave: str) -> None:
    """A WSGI server that is told that there is no more tells the client that its request was not whole."""
    site = server_site
    with site.connect() as connection:
        connection.send(HALVES[half](site, key))
        if leave == "half-closing":
            connection.socket.shutdown(socket.SHUT_WR)
            heard = connection.all()
            if site.protocol == "wsgi" and half not in ("in the first line", "in the headers"):
                assert heard.startswith(b"HTTP/1.1 400 "), heard
        else:
            assert connection.so_far(0.02).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"") == b""
            LEAVING[leave](connection)
    assert site.executions(key) == 0
    twice(site, "intake/plain", key)


HOSTILE = ["-1", "ten", "1e3", "+5", "5 5", "0x10", "5,5", "9" * 5000, "\u0665", str(2**63), str(2**64 + 5), "9" * 30]


@pytest.mark.parametrize("length", HOSTILE, ids=lambda text: ascii(text)[:22])
def test_a_hostile_length_executes_nothing(server_site: Site, key: str, length: str) -> None:
    site = server_site
    with site.connect() as connection:
        connection.send(site.head("intake/plain", key, f"Content-Length: {length}") + b"12345")
        connection.socket.shutdown(socket.SHUT_WR)
        heard = connection.all()
    own_error = site.name == "granian" and heard.startswith(b"HTTP/1.1 500 ") and length == str(2**63)
    one_value = length == "5,5" and site.protocol == "asgi"  # RFC 9110, 8.6: a server may take equal values for one
    taken = one_value and heard.startswith(b"HTTP/1.1 201 ")
    assert not heard or heard.startswith(b"HTTP/1.1 4") or own_error or taken, heard
    assert heard.startswith(b"HTTP/1.1 400 ") or site.protocol == "asgi" or length.isdecimal(), heard
    assert site.executions(key) <= one_value
    assert site.post("intake/plain", key, b"12345").status_code == 201


# -- clients that leave ----------------------------------------------------------------------------------------------


def also_in_starlette(everywhere: list[str], *own: str) -> pytest.MarkDecorator:
    """These places in every variant, the others where there is Starlette."""
    pairs = [(variant, place) for variant in VARIANTS for place in everywhere]
    pairs += [((name, "starlette"), place) for name in ASGI_SERVERS for place in own]
    ids = ["-".join([*variant, place]) for variant, place in pairs]
    return pytest.mark.parametrize(("site", "place"), pairs, indirect=["site"], ids=ids)


@pytest.mark.parametrize("leave", LEAVING)
@also_in_starlette(["intake/plain"], "intake/attentive", "wrapped/plain", "wrapping/plain")
def test_a_client_that_leaves_while_the_handler_works_finds_the_response_later(
    site: Site, key: str, place: str, leave: str
) -> None:
    with site.connect() as connection:
        connection.send(site.whole(f"{place}?gate", key))
        site.desk.wait_for(key, "executed")
        LEAVING[leave](connection)
    time.sleep(0.05)  # the server hears of it at some time, or never; either way nothing may come of it
    site.open(key)
    site.desk.wait_for(key, "done")
    response = site.settled(f"{place}?gate", key)
    assert (response.status_code, replayed(response)) == (201, True)
    assert response.json()["key"] == key
    assert site.desk.notes(key, "stopped") == []
    assert site.executions(key) == 1


def test_a_client_that_leaves_while_the_handler_works_finds_the_response_on_every_store(
    store_site: Site, key: str
) -> None:
    site = store_site
    with site.connect() as connection:
        connection.send(site.whole("intake/plain?gate", key))
        site.desk.wait_for(key, "executed")
        assert code_of(site.post("intake/plain?gate", key)) == "IDEMPOTENCY_KEY_PROCESSING"
    site.open(key)
    assert replayed(site.settled("intake/plain?gate", key))
    assert (site.executions(key), len(site.desk.notes(key, "done"))) == (1, 1)


@pytest.mark.parametrize("leave", LEAVING)
@also_in_starlette(["intake/steps", "intake/steps?sized"], "wrapped/steps", "wrapping/steps")
def test_a_client_that_leaves_in_the_middle_of_a_stream_finds_all_of_it_later(
    site: Site, key: str, leave: str, place: str
) -> None:
    site.open(key, 0)
    with site.connect() as connection:
        connection.send(site.whole(place, key))
        connection.until(b"chunk 0\n")
        LEAVING[leave](connection)
    for number in (1, 2):
        site.open(key, number)
        site.desk.wait_for(key, "made", number + 1)  # one after the other, so that the server notices
    response = site.settled(place, key)
    assert (response.content, replayed(response)) == (b"chunk 0\nchunk 1\nchunk 2\n", True)
    site.assert_closed(key)
    assert site.executions(key) == 1


def test_a_stream_that_nobody_reads_is_finished_all_the_same(site: Site, key: str) -> None:
    """The client leaves with megabytes to come: they are made, kept, and are there when it is back."""
    with site.connect() as connection:
        connection.send(site.whole("intake/flood", key))
        assert connection.socket.recv(1000).startswith(b"HTTP/1.1 200 ")
        connection.reset()
    again = site.settled("intake/flood", key)
    assert (replayed(again), again.content) == (True, b"".join(b"%06d " % number * 4096 for number in range(400)))
    site.assert_closed(key)
    assert (site.executions(key), len(site.desk.notes(key, "made"))) == (1, 1)


@pytest.mark.parametrize("others", [0, 2], ids=["alone", "behind others"])
@pytest.mark.parametrize("place", ["intake/plain?gate", "intake/halves", "limited/large?size=8000&pieces"])
def test_a_client_that_leaves_while_its_outcome_is_stored_finds_it_later(
    server_site: Site, key: str, place: str, others: int, threads: ThreadPoolExecutor
) -> None:
    site = server_site
    site.open(key, 0, 1, 2)
    with site.connect() as connection:
        connection.send(site.whole(place, key))
        site.desk.wait_for(key, "executed")
        if "gate" not in place:
            connection.until(b"\r\n\r\n")
        with locked(site):
            rule = place.split("/", maxsplit=1)[0]
            crowd = [threads.submit(site.post, f"{rule}/plain", f"{key}-{number}") for number in range(others)]
            time.sleep(0.1)  # now the others' claims wait for the store, which nobody outside can see
            site.open(key, "", 3)
            time.sleep(0.1)  # now the outcome waits to be stored
            connection.reset()
            time.sleep(0.1)  # now the server has heard that the client left
    response = site.settled(place, key)
    assert [other.result().status_code for other in crowd] == [201] * others
    assert response.status_code == (409 if "limited" in place else 201)
    assert replayed(response)
    assert site.executions(key) == 1


@pytest.mark.parametrize("case", ["plain?gate", "halves?sized", "halves"])
def test_no_client_has_all_of_a_response_before_its_outcome_is_stored(server_site: Site, key: str, case: str) -> None:
    """Else it would take the work as done, and a crash at that moment would have it done again."""
    site, place = server_site, f"intake/{case}"
    with site.connect() as connection:
        connection.send(site.whole(place, key))
        site.desk.wait_for(key, "executed")
        if case.startswith("halves"):
            connection.until(b"first half, ")
        with locked(site):
            site.open(key)
            arrived = connection.so_far(0.3)  # as long as the store is busy, there is nothing to wait for
            if case == "plain?gate":
                assert arrived == b""
            elif case == "halves?sized":
                assert arrived.endswith(b"first half, ")
            else:
                assert not arrived.endswith(b"0\r\n\r\n")
        first = connection.response()
    assert is_replay_of(first, site.post(place, key))
    assert site.executions(key) == 1


# -- handlers that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("query", ["", "?late"], ids=["before the response", "at the first chunk"])
def test_a_handler_that_fails_gives_its_key_back(site: Site, key: str, query: str) -> None:
    place = f"intake/fails{query}"
    for times in (1, 2):
        failed = site.post(place, key)
        assert (failed.status_code, replayed(failed)) == (500, False)
        assert site.executions(key) == times
    site.open(key)
    again = site.settled(place, key)
    assert (again.status_code, again.content, replayed(again)) == (200, b"at last", False)
    assert is_replay_of(again, site.post(place, key))
    assert site.executions(key) == 3
    if query:
        site.assert_closed(key, 3)


@pytest.mark.parametrize("rule", ["stripe", "keep"])
def test_a_failure_that_is_kept_has_one_body_for_the_first_client_and_all_others(
    site: Site, key: str, rule: str
) -> None:
    """The server has the response, whole, and then the exception, which is for its log."""
    first = site.post(f"{rule}/fails", key)
    second = site.settled(f"{rule}/fails", key)
    assert first.status_code == 500
    assert is_replay_of(first, second)
    assert "has a bug" not in first.text
    if site.framework in ("asgi", "wsgi"):  # the others make a response of the exception
        said = first.json()
        code = said["error"]["code"] if rule == "stripe" else said["error_code"]
        assert code.upper() == "IDEMPOTENT_REQUEST_FAILED"
    assert site.executions(key) == 1


# -- what a response may consist of ----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [204, 304])
def test_a_response_without_a_body_replays_without_one(site: Site, key: str, code: int) -> None:
    request = site.whole(f"intake/status?code={code}", key)
    with ExitStack() as opened:
        connection = opened.enter_context(site.connect())
        responses = []
        for _ in range(3):  # on one connection nothing is left between them
            connection.send(request)
            responses.append(connection.response())
            if not site.keeps_alive:
                connection = opened.enter_context(site.connect())
    first = responses[0]
    assert (first.status_code, first.content) == (code, b"")
    for second in responses[1:]:
        assert is_replay_of(first, second)
        assert second.headers["x-token"] == first.headers["x-token"]
        assert not {"content-length", "transfer-encoding"} & set(second.headers)
    assert site.executions(key) == 1


def test_every_byte_value_replays(site: Site, key: str) -> None:
    first, second = twice(site, "intake/binary", key, bytes(range(256)))
    assert first.content == bytes(range(256)) * 4
    assert second.headers["content-type"] == "application/octet-stream"


def test_a_compressed_response_replays_as_it_was_or_readable(site: Site, key: str) -> None:
    def response(*more: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        with site.connect() as connection:
            connection.send(site.whole("intake/compressed", key, b"{}", *more))
            return connection.raw_response()

    first, second = (response("Accept-Encoding: br, gzip") for _ in range(2))
    plain = response()
    assert plain[2] == gzip.decompress(first[2])
    assert not any(name == b"content-encoding" for name, _ in plain[1])
    for _, headers, body in (first, second):
        assert gzip.decompress(body)[16:] == bytes(range(256)) * 4
        assert (b"content-encoding", b"gzip") in headers
        assert (b"content-length", b"%d" % len(body)) in headers
    assert second[2] == first[2]
    assert (b"idempotent-replayed", b"true") in second[1]
    assert site.executions(key) == 1


def test_several_headers_of_one_name_replay_in_their_order_and_cookies_never(site: Site, key: str) -> None:
    first, second = twice(site, "intake/headers", key)
    kept = [("link", "</a>; rel=next"), ("x-between", "caf\xe9"), ("link", "</b>; rel=prev"), ("vary", "Accept")]
    order = (lambda pair: pair[0]) if site.name == "granian" else (lambda _: 0)  # granian puts equal names together
    for response in (first, second):
        pairs = [(name.decode().lower(), value.decode("latin-1")) for name, value in response.headers.raw]
        assert sorted((pair for pair in pairs if pair in kept), key=order) == sorted(kept, key=order)
    assert first.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert "set-cookie" not in second.headers


# -- responses that are too large to be kept -------------------------------------------------------------------------


def test_a_response_over_the_limit_is_delivered_once_and_never_made_again(site: Site, key: str) -> None:
    first = site.post("limited/large?size=100000", key)
    second = site.post("limited/large?size=100000", key)
    assert first.content == b"x" * 100_000
    assert (second.status_code, code_of(second), replayed(second)) == (409, "IDEMPOTENT_RESPONSE_TOO_LARGE", True)
    assert site.executions(key) == 1


def test_a_response_at_the_limit_is_kept(site: Site, key: str) -> None:
    twice(site, "limited/large?size=1000", key)


@pytest.mark.parametrize("leave", LEAVING)
def test_a_stream_over_the_limit_whose_client_left_is_never_made_again(site: Site, key: str, leave: str) -> None:
    place = "limited/large?size=8000&pieces"
    site.open(key, 0)
    with site.connect() as connection:
        connection.send(site.whole(place, key))
        connection.until(b"x" * 2000)
        LEAVING[leave](connection)
    site.open(key, 1, 2, 3)
    response = site.settled(place, key)
    assert (response.status_code, code_of(response)) == (409, "IDEMPOTENT_RESPONSE_TOO_LARGE")
    assert site.executions(key) == 1


# -- the life of a server --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_that_is_told_to_stop_finishes_and_stores_what_it_works_on(
    name: str, key: str, tmp_path: Path, sqlite_url: str, threads: ThreadPoolExecutor
) -> None:
    with serving(name, tmp_path, sqlite_url) as site:
        places = {key: "intake/plain?gate", f"{key}-2": "intake/halves"}
        asked = {each: threads.submit(site.post, place, each) for each, place in places.items()}
        for each in places:
            site.desk.wait_for(each, "executed")
        site.server.signal(signal.SIGTERM)
        time.sleep(0.1)  # the signal arrives while they work
        for each in places:
            site.open(each)
        first, streamed = (each.result() for each in asked.values())
        site.server.wait_until_gone()
        assert bool(site.desk.notes("life", "started")) == (site.protocol == "asgi")
        if name != "granian":  # it ended once in 45 times without telling the app
            assert bool(site.desk.notes("life", "ended")) == (site.protocol == "asgi")
        assert (first.status_code, streamed.content) == (201, b"first half, second half")
        scopes = [f"POST {site.path(place).partition('?')[0]}" for place in places.values()]
    with Once(sqlite_url) as once:
        stored = [once.get(each, scope=scope) for each, scope in zip(places, scopes, strict=True)]
    assert [record.outcome.value.body for record in stored] == [first.content, streamed.content]


def test_a_handler_that_gunicorn_gives_up_on_gives_its_key_back(tmp_path: Path, sqlite_url: str) -> None:
    """A sync worker over its time limit is aborted by a signal, inside the handler; the retry is carried out."""
    with serving("gunicorn-sync", tmp_path, sqlite_url, "--timeout", "2", framework="wsgi") as site:
        site.post_until("intake/plain", "warm", 201, 500)
        with ThreadPoolExecutor(1) as thread:
            retried = thread.submit(site.post_until, "intake/plain?gate", "hangs", 201, 500)
            site.desk.wait_for("hangs", "executed", 2)  # the first was aborted, and its key was free at once
            site.open("hangs")
            retried.result(PATIENCE)
        assert replayed(site.post_until("intake/plain?gate", "hangs", 201, 500))
        assert len(site.desk.notes("hangs", "done")) == 1
        assert "WORKER TIMEOUT" in site.server.log()


@pytest.mark.parametrize("name", ASGI_SERVERS)
def test_a_store_given_as_url_is_opened_at_the_start_and_closed_at_the_end(name: str, tmp_path: Path) -> None:
    """SQLite's write-ahead log exists while the file is open, and is gone once the last connection closed it."""
    path = tmp_path / "keys.db"
    with running(name, tmp_path, {"main": f"sqlite:///{path}"}, app="with_url") as server:
        assert path.exists()
        response = httpx.post(
            f"{server.url}/starlette/main/intake/plain", headers={"Idempotency-Key": "a"}, timeout=PATIENCE
        )
        assert response.status_code == 201
        assert path.with_name("keys.db-wal").exists()
        server.stop()
        assert not path.with_name("keys.db-wal").exists()


@pytest.mark.parametrize("name", ASGI_SERVERS)
def test_a_database_without_tables_stops_the_start_and_says_what_to_do(
    name: str, tmp_path: Path, postgres_url: str
) -> None:
    options = ["--no-respawn-failed-workers"] if name == "granian" else []
    with (
        pytest.raises(servers.ServerError, match="semel migrate"),
        running(name, tmp_path, {"main": postgres_url}, *options, app="with_url"),
    ):
        pass


def test_a_store_that_is_away_lets_the_server_start_with_a_warning(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    """It is tried for some seconds first, hence both servers at once."""

    def start(name: str) -> WebServer:
        return stack.enter_context(running(name, tmp_path, {"main": redis.url}, app="with_url"))

    with servers.redis() as redis, ExitStack() as stack:
        redis.stop()
        started = list(threads.map(start, ASGI_SERVERS))
        urls = [f"{server.url}/starlette/main/intake/plain" for server in started]
        for server, url in zip(started, urls, strict=True):
            assert "the store of idempotency keys is unavailable" in server.log()
            assert httpx.post(url, timeout=PATIENCE).status_code == 201
        redis.start()
        responses = [httpx.post(url, headers={"Idempotency-Key": "a"}, timeout=PATIENCE) for url in urls]
    assert is_replay_of(*responses)


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
        httpx.get(server.url, timeout=PATIENCE)


# -- ASGI and Starlette ----------------------------------------------------------------------------------------------


def test_a_handler_that_times_out_fails_and_runs_again(starlette: Site, key: str) -> None:
    assert starlette.post("intake/hangs", key).status_code == 500
    second = starlette.post("intake/hangs", key)
    assert second.status_code == 200
    assert is_replay_of(second, starlette.post("intake/hangs", key))
    assert starlette.executions(key) == 2


def cancelled(site: Site, key: str) -> None:
    (site.desk.folder / f"gate {key} cancel").unlink()


def test_a_handler_that_is_cancelled_from_outside_frees_the_key(
    starlette: Site, key: str, threads: ThreadPoolExecutor
) -> None:
    first = threads.submit(starlette.post, "impatient/endless", key)
    starlette.desk.wait_for(key, "executed")
    starlette.open(key, "cancel")
    assert first.result().status_code == 504
    assert [len(starlette.desk.notes(key, what)) for what in ("executed", "cancelled", "gave up")] == [1, 1, 1]
    cancelled(starlette, key)
    second = starlette.post("impatient/endless", key)
    assert (second.status_code, replayed(second)) == (200, False)
    assert is_replay_of(second, starlette.post("impatient/endless", key))
    assert starlette.executions(key) == 2


@pytest.mark.parametrize("others", [0, 2], ids=["alone", "behind others"])
@pytest.mark.parametrize("code", [200, 422], ids=["its outcome is stored", "its failure is noted"])
def test_what_is_cancelled_while_it_ends(
    starlette: Site, key: str, code: int, others: int, threads: ThreadPoolExecutor
) -> None:
    """What was carried out stays so, and what failed frees its key."""
    site, place = starlette, f"impatient/plain?gate&code={code}"
    first = threads.submit(site.post, place, key)
    site.desk.wait_for(key, "executed")
    with locked(site):
        crowd = [threads.submit(site.post, "impatient/plain", f"{key}-{number}") for number in range(others)]
        time.sleep(0.1)  # now the others' claims wait for the store, which nobody outside can see
        site.open(key)
        site.desk.wait_for(key, "done")
        time.sleep(0.1)  # now the outcome waits to be stored, or the key to be given back
        site.open(key, "cancel")
        time.sleep(0.1)  # now the work is cancelled
    assert first.result().status_code == 504
    assert [other.result().status_code for other in crowd] == [201] * others
    cancelled(site, key)
    second = site.settled(place, key)
    assert (second.status_code, replayed(second)) == (code, code == 200)
    assert site.executions(key) == (1 if code == 200 else 2)


@pytest.mark.parametrize("query", ["", "?fails"], ids=["that works", "that fails"])
def test_a_background_task_runs_once_after_the_response(starlette: Site, key: str, query: str) -> None:
    place = f"intake/background{query}"
    first, _ = twice(starlette, place, key)
    assert starlette.desk.notes(key, "task") == []
    starlette.open(key)
    starlette.desk.wait_for(key, "task")
    assert is_replay_of(first, starlette.post(place, key))
    assert (starlette.executions(key), len(starlette.desk.notes(key, "task"))) == (1, 1)


def test_a_websocket_passes_untouched(key: str, sites: Callable[..., Site]) -> None:
    """Only granian speaks it without further packages."""
    site = sites("granian", "starlette")
    nonce = base64.b64encode(os.urandom(16)).decode()
    with site.connect() as connection:
        lines = [f"GET {site.path('intake/talk')} HTTP/1.1", "Host: test", f"Idempotency-Key: {key}"]
        lines += ["Upgrade: websocket", "Connection: Upgrade", f"Sec-WebSocket-Key: {nonce}"]
        connection.send("\r\n".join([*lines, "Sec-WebSocket-Version: 13", "", ""]).encode())
        connection.until(b"\r\n\r\n")
        connection.send(b"\x81\x85\x00\x00\x00\x00hello")  # a text of five bytes, masked with zeros
        connection.until(f"hello {key}".encode())
    assert site.executions(key) == 0


# -- WSGI and Flask --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "status", "body"),
    [
        ("several", 201, b"alist!"),
        ("pair", 201, b"a tuple"),
        ("empty_chunks", 202, b""),
        ("only_write", 200, b"all of i"),
        ("taken_back", 202, b"sent instead"),
    ],
)
def test_a_response_replays_as_it_was(bare_wsgi: Site, key: str, case: str, status: int, body: bytes) -> None:
    """Also what was held back and is taken back by a second start: nothing of it has left."""
    first, _ = twice(bare_wsgi, f"intake/{case}", key)
    assert (first.status_code, first.content) == (status, body)


@pytest.mark.parametrize(
    ("case", "status", "body"),
    [
        ("empty", 202, b""),
        ("lazy", 201, b"late but whole"),
        ("write", 200, b"one two three"),
        ("reconsidered", 202, b"second"),
        ("taken_back_at_the_end", 202, b"sent instead"),
    ],
)
def test_the_apps_iterable_is_closed_once_and_a_replay_has_none(
    bare_wsgi: Site, key: str, case: str, status: int, body: bytes
) -> None:
    first, second = twice(bare_wsgi, f"intake/{case}", key)
    assert (first.status_code, first.content) == (status, body)
    assert not {"x-first"} & {*first.headers, *second.headers}, "the start that was replaced left nothing behind"
    bare_wsgi.assert_closed(key)


def test_an_error_after_the_first_chunk_is_raised_again_by_start_response(bare_wsgi: Site, key: str) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        bare_wsgi.post("intake/too_late", key)
    bare_wsgi.assert_closed(key)
    assert not bare_wsgi.desk.notes(key, "went on")


@pytest.mark.parametrize("case", ["silent", "twice"])
def test_an_app_that_breaks_the_rules_gets_a_500_and_its_key_is_free(bare_wsgi: Site, key: str, case: str) -> None:
    assert [bare_wsgi.post(f"intake/{case}", key).status_code for _ in range(2)] == [500, 500]
    assert bare_wsgi.executions(key) == 2


def test_a_form_with_a_file_reaches_flask(flask: Site, key: str) -> None:
    data = os.urandom(200_000)
    body = (
        b'--edge\r\nContent-Disposition: form-data; name="field"\r\n\r\nvalue\r\n'
        b'--edge\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + data + b"\r\n--edge--\r\n"
    )
    for times in range(2):
        response = flask.post("spilling/form", key, body, Content_Type="multipart/form-data; boundary=edge")
        assert (response.status_code, replayed(response)) == (200, times == 1)
        assert response.json() == {"field": "value", "sha256": hashlib.sha256(data).hexdigest()}
    assert flask.executions(key) == 1


def test_json_reaches_flask(flask: Site, key: str) -> None:
    for times in range(2):
        response = flask.post("intake/item", key, b'{"sku": "7"}', Content_Type="application/json")
        assert (response.status_code, replayed(response), response.json()) == (201, times == 1, {"got": {"sku": "7"}})
    assert flask.executions(key) == 1
