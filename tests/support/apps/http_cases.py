"""Cases for the apps behind the middleware, on real servers: each is written once, for every framework.

`POST /<framework>/<store>/<rule>/<case>` calls the case in that framework behind the middleware of that rule, over that
store; http_asgi has bare ASGI and Starlette, http_wsgi bare WSGI and Flask. The environment gives the stores' URLs as
JSON (SEMEL_TEST_STORES) and a folder (SEMEL_TEST_FOLDER), where a case logs what it does and waits at gates until the
test opens them.
"""

import gzip
import json
import os
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl

from msgspec import Struct

from semel import Policy, current_claim
from support.process_peer import ProcessPeer
from support.stacks import show_stacks_on_signal

show_stacks_on_signal()
STORES: dict[str, str] = json.loads(os.environ["SEMEL_TEST_STORES"])
desk = ProcessPeer(os.environ["SEMEL_TEST_FOLDER"])

ALL_BYTES = bytes(range(256)) * 4
HASTY = 0.3
"""Seconds for which a request is retried while the store is unavailable, under the rules in ``RETRIES``."""

LEASE, CRASH_LEASE = 10, 1.2
RULES: dict[str, dict[str, Any]] = {
    "intake": {},
    "stripe": {"policy": Policy.stripe()},
    "keep": {"policy": Policy(on_error="keep")},
    "limited": {"max_response_bytes": 1000},
    "spilling": {"body_in_memory": 1 << 16, "max_request_bytes": None},
    "patient": {"policy": Policy(in_flight="conflict", lease=LEASE), "body_in_memory": 100_000},
    "hasty": {"policy": Policy(in_flight="conflict", lease=LEASE), "body_in_memory": 100_000},
    "wait": {"policy": Policy(in_flight="wait", lease=LEASE, wait=50)},
    "crash": {"policy": Policy(in_flight="conflict", lease=CRASH_LEASE)},
    "unknown": {"policy": Policy(in_flight="conflict", lease=CRASH_LEASE, on_crash="unknown")},
    "open": {"policy": Policy(in_flight="conflict", lease=LEASE, store_failure="open"), "body_in_memory": 100_000},
}
RETRIES = {rule: {"retry_for": HASTY} for rule in ("hasty", "crash", "unknown", "open")}


# -- the cases -------------------------------------------------------------------------------------------------------


class Gate(Struct):
    """The case waits until the test opens the gate."""

    name: str


class Head(Struct):
    """The response begins. Next comes its whole body, or, with `stream`, chunks that are sent one by one."""

    status: int = 200
    headers: list[tuple[str, str]] = []
    stream: bool = False


READ = object()
"""Reads the request's body: the case gets its SHA-256 and its size."""


class Broken(Exception):
    """The error of a case that fails."""


class Call:
    """A request, as a case sees it."""

    def __init__(self, key: str, query: str) -> None:
        self.key = key
        self.query = dict(parse_qsl(query, keep_blank_values=True))
        self.note("executed", fence=getattr(current_claim(None), "fence", None))
        self.times = len(desk.notes(key, "executed"))

    def note(self, what: str, **more: Any) -> None:
        desk.note(what, self.key, **more)

    def gate(self, name: object = "") -> Gate:
        return Gate(f"{self.key} {name}".strip())


Script = Iterator[Any]


def token(call: Call) -> bytes:
    """A body that is different in each execution."""
    return json.dumps({"key": call.key, "token": uuid.uuid4().hex}).encode()


def plain(call: Call) -> Script:
    """Waits first, if the query has `gate`."""
    if "gate" in call.query:
        yield call.gate()
    call.note("done")
    yield Head(int(call.query.get("code", "201")), [("Content-Type", "application/json")])
    yield token(call)


def echo(call: Call) -> Script:
    digest, size = yield READ
    yield Head(200, [("Content-Type", "application/json")])
    yield json.dumps({"sha256": digest, "size": size, "token": uuid.uuid4().hex}).encode()


def steps(call: Call) -> Script:
    """Sends three chunks, each after the test has opened its gate; with a Content-Length if the query has `sized`."""
    sized = [("Content-Length", "24")] if "sized" in call.query else []
    yield Head(200, [("Content-Type", "text/event-stream"), *sized], stream=True)
    for number in range(3):
        yield call.gate(number)
        call.note("made")
        yield b"chunk %d\n" % number


def halves(call: Call) -> Script:
    sized = [("Content-Length", "23")] if "sized" in call.query else []
    yield Head(201, [("Content-Type", "text/plain"), *sized], stream=True)
    yield b"first half, "
    yield call.gate()
    yield b"second half"


def breaks(call: Call) -> Script:
    """Fails in the middle of its first response."""
    sized = [("Content-Length", "23")] if "sized" in call.query else []
    yield Head(200, [("Content-Type", "text/plain"), *sized], stream=True)
    yield b"first half, "
    if call.times == 1:
        raise Broken("the source ran dry")
    yield b"second half"


def flood(call: Call) -> Script:
    """Sends far more than the sockets buffer, so that a disconnect is noticed before the response ends."""
    yield Head(200, [("Content-Type", "text/plain")], stream=True)
    for number in range(400):
        yield b"%06d " % number * 4096
    call.note("made")


def fails(call: Call) -> Script:
    """Fails until the test opens the gate: before its response begins, or, if the query has `late`, after its head."""
    late = "late" in call.query
    if late:
        yield Head(200, [("Content-Type", "text/plain")], stream=True)
    if not desk.is_open(call.key):
        raise Broken("the handler has a bug")
    if not late:
        yield Head(200, [("Content-Type", "text/plain")])
    yield b"at last"


def status(call: Call) -> Script:
    yield Head(int(call.query["code"]), [("X-Token", uuid.uuid4().hex)])


def binary(call: Call) -> Script:
    yield Head(200, [("Content-Type", "application/octet-stream")])
    yield ALL_BYTES


def compressed(call: Call) -> Script:
    yield Head(200, [("Content-Type", "application/octet-stream"), ("Content-Encoding", "gzip")])
    yield gzip.compress(uuid.uuid4().bytes + ALL_BYTES)


def headers(call: Call) -> Script:
    """Sends several headers of one name, whose order matters, and bytes that are not ASCII."""
    links = [("Link", "</a>; rel=next"), ("X-Between", "caf\xe9"), ("Link", "</b>; rel=prev"), ("Vary", "Accept")]
    yield Head(200, [("Content-Type", "text/plain"), *links, ("Set-Cookie", "a=1"), ("Set-Cookie", "b=2")])
    yield b"linked"


def large(call: Call) -> Script:
    """Sends `size` bytes; if the query has `pieces`, in four chunks that wait for their gates."""
    size, pieces = int(call.query["size"]), "pieces" in call.query
    yield Head(200, [("Content-Type", "text/plain")], stream=pieces)
    for number in range(4):
        if pieces:
            yield call.gate(number)
        yield b"x" * (size // 4)


def file(call: Call) -> Script:
    yield Head(200, [("Content-Type", "application/octet-stream")])
    yield (desk.folder / f"{call.key}.bin").read_bytes()


CASES: dict[str, Callable[[Call], Script]] = {
    case.__name__: case
    for case in (plain, echo, steps, halves, breaks, flood, fails, status, binary, compressed, headers, large, file)
}
