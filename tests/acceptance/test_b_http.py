"""B, beyond the documents, through both HTTP doors: one record for all doors, the whole contract with the client."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from email.utils import formatdate
from io import BytesIO
from typing import Any

import httpx
import pytest
from sqlalchemy import Column, Integer, MetaData, Table, Text, create_engine, func, make_url, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import semel
from acceptance.exchanges import (
    DOORS,
    ITEMS,
    SCOPE,
    Answer,
    Answering,
    Asked,
    Doorway,
    Handler,
    Intake,
    Service,
    SlowIntake,
    WsgiServer,
    doorway,
)
from acceptance.spaces import Space
from acceptance.together import PATIENCE, beside
from acceptance.wrapped import Noting
from semel import Granted, InProgress, OutcomeGone, Policy, current_claim
from semel.http import asgi, wsgi
from semel.once.rules import claim_of
from semel.testing import FaultyStore

KEY = "order-1"
ITEM = {"sku": "ITEM-001", "title": "Sample Item"}
OTHER = {"sku": "ITEM-002", "title": "Different Item"}
HOUR, DAY = 3600, 86400


@pytest.fixture(params=DOORS)
def site(request: pytest.FixtureRequest, shared_space: Space) -> Iterator[Doorway]:
    """Each door over each store that processes share."""
    with doorway(request.param, shared_space) as site:
        yield site


@pytest.fixture(params=DOORS)
def entrance(request: pytest.FixtureRequest, space_of: Callable[[str], Space]) -> Iterator[Doorway]:
    """Each door over SQLite, for what is the same whatever the store."""
    with doorway(request.param, space_of("sqlite")) as entrance:
        yield entrance


@pytest.fixture
def intake() -> Intake:
    return Intake()


def is_replay(response: httpx.Response) -> bool:
    return response.headers.get("idempotent-replayed") == "true"


def header_of(context: dict[str, Any], name: str) -> str | None:
    """A header of the request, from ASGI's scope or WSGI's environ."""
    if "wsgi.input" in context:
        found: str | None = context.get(f"HTTP_{name.upper().replace('-', '_')}")
        return found
    return {key.decode(): value.decode() for key, value in context["headers"]}.get(name)


def http_time(site: Doorway, seconds: float) -> str:
    """The moment so many seconds from now, as HTTP writes it."""
    return formatdate(site.clock.us // 1_000_000 + seconds, usegmt=True)


# -- B1, B2, B8: fences, unknown outcomes, lost replies ----------------------------------------------------------------


def test_b1_the_handler_is_handed_its_claim(site: Doorway) -> None:
    fences: list[int] = []

    def handler(asked: Asked) -> Answer:
        claim = current_claim(None)
        if claim is not None:
            assert (claim.scope, claim.key) == (SCOPE, asked.headers["idempotency-key"])
            fences.append(claim.fence)
        return Answer(503 if len(fences) == 1 else 201, {"claimed": claim is not None})

    service = site.serve(handler)
    assert service.post(ITEM).json() == {"claimed": False}
    for _ in range(2):
        assert service.post(ITEM, key=KEY).json() == {"claimed": True}
    assert fences[0] < fences[1]


def test_b1_the_answer_of_a_request_that_was_taken_over_never_leaves(site: Doorway) -> None:
    slow = SlowIntake()
    service = site.serve(slow, policy=Policy.intake().but(lease=60))
    with service.under_way(slow, ITEM, key=KEY) as zombie:
        site.clock.advance(60)
        second = service.post(ITEM, key=KEY)
        assert (second.status_code, second.json()["id"]) == (201, 1)
        slow.gate.set()
        told = zombie.result(PATIENCE)
    assert (told.status_code, told.json()["error_code"]) == (409, "IDEMPOTENCY_KEY_PROCESSING")
    assert told.headers["retry-after"] == "1"
    assert service.post(ITEM, key=KEY).content == second.content


def test_b2_a_request_whose_owner_vanished_may_be_unknown(site: Doorway, intake: Intake) -> None:
    """It is not carried out again until somebody says what became of it."""
    policy = Policy.intake().but(lease=60, on_crash="unknown")
    service = site.serve(intake, policy=policy)
    for key in ("was-done", "was-not"):
        assert isinstance(site.keys.claim(key, scope=SCOPE, lease=60, on_crash="unknown"), Granted)
    site.clock.advance(60)
    for key in ("was-done", "was-not"):
        response = service.post(ITEM, key=key)
        assert response.status_code == 409
        assert response.json() == {
            "detail": "The first request with this idempotency key was interrupted, and whether it was carried out is "
            "not known; it will not be carried out again until that is settled",
            "error_code": "IDEMPOTENCY_OUTCOME_UNKNOWN",
            "idempotency_key": key,
        }
    assert intake.items == []
    site.keys.resolve("was-done", scope=SCOPE, done=True, value={"id": 7})
    site.keys.resolve("was-not", scope=SCOPE, done=False)
    assert service.post(ITEM, key="was-done").json() == {"id": 7}
    assert service.post(ITEM, key="was-not").json() == {"id": 1, **ITEM}
    assert intake.items == [ITEM]


def test_b8_a_request_whose_every_reply_from_the_store_is_lost_once_is_carried_out_once(
    site: Doorway, intake: Intake
) -> None:
    store = FaultyStore(site.store())
    service = site.serve(intake, site.open(store))
    store.lose_reply("claim")
    store.lose_reply("complete")
    first = service.post(ITEM, key=KEY)
    assert (first.status_code, is_replay(first)) == (201, False)
    again = service.post(ITEM, key=KEY)
    assert (again.content, is_replay(again)) == (first.content, True)
    assert intake.items == [ITEM]


# -- B3: one record over all doors -------------------------------------------------------------------------------------


class Orders:
    """An order may come as a request, as a message, and as a call: whoever is first carries it out."""

    def __init__(self, site: Doorway, handler: Handler | None = None, **changes: Any) -> None:
        self.done: list[str] = []
        self.site = site
        self.service = site.serve(
            handler or self._request,
            policy=Policy.intake().but(lease=60),
            scope="orders",
            fingerprint=lambda context, body: "",
        )
        by_id: Callable[..., Any] = lambda order: order["id"]  # noqa: E731
        self.call = site.keys.guard(scope="orders", key=by_id, fingerprint=False, **changes)(self._call)
        self.consume = site.keys.consumer("orders", key=by_id, **changes)(self._message)

    def post(self) -> httpx.Response:
        return self.service.post(ITEM, key=KEY)

    def _request(self, asked: Asked) -> Answer:
        self.done.append("request")
        return Answer(201, {"by": "request"})

    def _call(self, order: dict[str, Any]) -> dict[str, Any]:
        self.done.append("call")
        return {"by": "call", "total": 1.5}

    def _message(self, message: dict[str, Any]) -> None:
        self.done.append("message")


ORDER = {"id": KEY}


def test_b3_a_request_first_then_a_call_and_a_message(site: Doorway) -> None:
    orders = Orders(site)
    assert orders.post().json() == {"by": "request"}
    called = orders.call.call(ORDER)
    assert called.replayed
    assert (called.value.status, called.value.body) == (201, b'{"by": "request"}'), "the response, as data"
    assert orders.consume.call(ORDER).replayed
    assert site.keys.check_and_mark("orders", KEY) == "seen"
    assert is_replay(orders.post())
    assert orders.done == ["request"]


def test_b3_a_call_first_then_a_request_and_a_message(site: Doorway) -> None:
    orders = Orders(site)
    assert orders.call(ORDER) == {"by": "call", "total": 1.5}
    response = orders.post()
    assert (response.status_code, is_replay(response)) == (200, True)
    assert response.headers["content-type"] == "application/json"
    assert response.headers["idempotency-expires"] == http_time(site, DAY)
    assert response.json() == {"by": "call", "total": 1.5}
    assert orders.consume.call(ORDER).replayed
    assert orders.done == ["call"]


def test_b3_a_message_first_then_a_request_and_a_call(site: Doorway) -> None:
    orders = Orders(site)
    assert not orders.consume.call(ORDER).replayed
    response = orders.post()
    assert (response.status_code, response.content, is_replay(response)) == (204, b"", True)
    assert orders.call.call(ORDER).replayed
    assert orders.done == ["message"]


def test_b3_a_marked_message_then_a_request(site: Doorway) -> None:
    orders = Orders(site)
    site.keys.check_and_mark("orders", KEY, {"for": "audit only"})
    response = orders.post()
    assert (response.status_code, response.content, is_replay(response)) == (204, b"", True)
    assert orders.done == []


def test_b3_a_failure_at_one_door_leaves_the_work_to_the_others(site: Doorway) -> None:
    orders = Orders(site, Answering(Answer(500)))
    assert orders.post().status_code == 500
    assert not orders.consume.call(ORDER).replayed
    assert orders.post().status_code == 204
    assert orders.done == ["message"]


def test_b3_while_a_request_is_in_progress_a_call_and_a_message_meet_it(site: Doorway) -> None:
    slow = SlowIntake()
    orders = Orders(site, slow, in_flight="conflict")
    with orders.service.under_way(slow, ITEM, key=KEY):
        with pytest.raises(InProgress):
            orders.call(ORDER)
        with pytest.raises(InProgress):
            orders.consume(ORDER)
    assert orders.consume.call(ORDER).replayed
    assert (orders.done, slow.items) == ([], [ITEM])


@pytest.mark.parametrize("door", ["call", "message"])
def test_b3_while_a_call_or_a_message_is_in_progress_a_request_meets_it(site: Doorway, door: str) -> None:
    entered, gate = threading.Event(), threading.Event()

    def work(order: dict[str, Any]) -> dict[str, Any]:
        entered.set()
        assert gate.wait(PATIENCE)
        return {"by": door}

    orders = Orders(site)
    once = site.keys
    how: Any = {"key": lambda order: order["id"]}
    guarded = once.guard(scope="orders", fingerprint=False, **how) if door == "call" else once.consumer("orders", **how)
    with beside(lambda: guarded(work)(ORDER)) as first:
        try:
            assert entered.wait(PATIENCE)
            response = orders.post()
            assert (response.status_code, response.json()["error_code"]) == (409, "IDEMPOTENCY_KEY_PROCESSING")
            assert response.headers["retry-after"] == "1"
        finally:
            gate.set()
        first.result(PATIENCE)
    response = orders.post()
    assert (response.status_code, is_replay(response)) == ((200 if door == "call" else 204), True)
    assert orders.done == []


# -- B5: the key outlives its response ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("tombstone", "status"), [("gone", 410), ("conflict", 409)])
def test_b5_the_key_outlives_its_response(site: Doorway, intake: Intake, tombstone: Any, status: int) -> None:
    """Uniqueness for 30 days with the body for one, whether or not the collector was there."""
    policy = Policy.intake().but(ttl=30 * DAY, value_ttl=DAY, tombstone=tombstone)
    service = site.serve(intake, policy=policy)
    expires = http_time(site, 30 * DAY)
    first = service.post(ITEM, key=KEY)
    site.clock.advance(DAY)
    assert service.post(ITEM, key=KEY).content == first.content
    for pause in (1, 0, 28 * DAY):
        site.clock.advance(pause)
        response = service.post(ITEM, key=KEY)
        assert (response.status_code, is_replay(response)) == (status, True)
        assert response.headers["idempotency-expires"] == expires
        assert response.json() == {
            "detail": "The request with this idempotency key was carried out and will not be again, but its response "
            "is not kept",
            "error_code": "IDEMPOTENT_RESPONSE_GONE",
            "idempotency_key": KEY,
        }
        assert service.post(OTHER, key=KEY).json()["error_code"] == "IDEMPOTENCY_KEY_CONFLICT"
        service.ask("purge")
    assert intake.items == [ITEM]
    site.clock.advance(DAY)
    assert service.post(ITEM, key=KEY).json()["id"] == 2


@pytest.mark.parametrize("tombstone", ["gone", "conflict"])
def test_b19_a_response_too_large_to_be_kept_is_delivered_and_never_made_again(site: Doorway, tombstone: Any) -> None:
    """It passes whole; the key is done with its value gone, and a repetition is told so."""
    handler = Answering(Answer(201, b"[" + b"1," * 50 + b"1]"))
    service = site.serve(handler, policy=Policy.intake().but(tombstone=tombstone), max_response_bytes=102)
    first = service.post(ITEM, key="over")
    assert (first.status_code, len(first.content)) == (201, 103)
    for _ in range(2):
        again = service.post(ITEM, key="over")
        assert (again.status_code, is_replay(again)) == (409, True)
        assert again.json() == {
            "detail": "The request with this idempotency key was carried out and will not be again; its response was "
            "larger than what is kept, so it cannot be sent a second time",
            "error_code": "IDEMPOTENT_RESPONSE_TOO_LARGE",
            "idempotency_key": "over",
        }
    assert service.post(OTHER, key="over").json()["error_code"] == "IDEMPOTENCY_KEY_CONFLICT"
    assert handler.times == 1
    record = site.record("over")
    assert record is not None
    assert record.data is not None
    assert len(record.data) < 100, "nothing of it is stored"
    assert record.outcome is not None
    assert record.outcome.gone
    with pytest.raises(OutcomeGone, match="too large to be kept"):
        site.keys.call("over", lambda: "again", scope=SCOPE)


class Long:
    """A response of 10,000 bytes, whose length may be said, that ends early: ``how`` says by what."""

    def __init__(self, how: str, sized: bool) -> None:
        self.how = how
        self.sized = sized
        self.runs = 0

    async def asgi(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        self.runs += 1
        length = [(b"content-length", b"10000")] if self.sized else []
        await send({"type": "http.response.start", "status": 200, "headers": length})
        gone = asyncio.ensure_future(receive())
        for sent in range(100):
            if (self.how == "hears that its client left" and gone.done()) or (self.how == "ends" and sent == 50):
                break
            if self.how == "raises" and sent == 50:
                raise ConnectionError("midway")
            await send({"type": "http.response.body", "body": b"x" * 100, "more_body": sent < 99})
            await asyncio.sleep(0)

    def wsgi(self, environ: Any, start_response: Any) -> Iterator[bytes]:
        self.runs += 1
        start_response("200 OK", [("Content-Length", "10000")] if self.sized else [])
        for sent in range(100):
            if self.how == "raises" and sent == 50:
                raise ConnectionError("midway")
            if self.how == "ends" and sent == 50:
                return
            yield b"x" * 100


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
@pytest.mark.parametrize("how", ["hears that its client left", "cannot send", "raises", "ends"])
def test_b19_what_is_too_large_to_be_kept_is_done_however_it_ends(entrance: Doorway, how: str, sized: bool) -> None:
    """From the byte on that is one too many: nobody starts it again, and no server goes on with it for nobody."""
    long = Long(how, sized)
    once: Any = entrance.open()
    sent: list[Any] = []
    if entrance.kind == "asgi":
        app = asgi.IdempotencyMiddleware(long.asgi, once, max_response_bytes=1000)
        coming: list[Any] = [{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}]
        scope = {"type": "http", "method": "POST", "path": ITEMS, "headers": [(b"idempotency-key", KEY.encode())]}

        async def receive() -> Any:
            return coming.pop(0)

        async def send(message: Any) -> None:
            if how == "cannot send" and len(sent) > 20:
                raise OSError("the client left")
            sent.append(message.get("body", b""))

        with suppress(OSError):
            entrance.run(app(scope, receive, send))
    else:
        environ = {"REQUEST_METHOD": "POST", "PATH_INFO": ITEMS, "HTTP_IDEMPOTENCY_KEY": KEY, "wsgi.input": BytesIO()}
        chunks: Any = wsgi.IdempotencyMiddleware(long.wsgi, once, max_response_bytes=1000)(environ, lambda *_: None)
        with suppress(OSError):
            for chunk in chunks:
                sent.append(chunk)
                if how in {"hears that its client left", "cannot send"} and len(sent) > 20:
                    break
        chunks.close()
    assert 1000 < len(b"".join(sent)) < 10_000
    record = entrance.record(KEY)
    assert record is not None
    assert (record.status, record.kind) == ("completed", "oversized")
    assert long.runs == 1


def test_b19_what_is_too_large_is_done_before_the_byte_that_is_one_too_many_leaves(entrance: Doorway) -> None:
    """A worker that is killed later, while it still sends, has done its work."""
    statuses = []

    def look() -> None:
        record = entrance.record(KEY)
        statuses.append(None if record is None else record.status)

    once: Any = entrance.open()
    if entrance.kind == "asgi":
        app = asgi.IdempotencyMiddleware(Long("is read", True).asgi, once, max_response_bytes=200)
        scope = {"type": "http", "method": "POST", "path": ITEMS, "headers": [(b"idempotency-key", KEY.encode())]}

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            await asyncio.to_thread(look)

        entrance.run(app(scope, receive, send))
        statuses.pop(0)  # the head
    else:
        environ = {"REQUEST_METHOD": "POST", "PATH_INFO": ITEMS, "HTTP_IDEMPOTENCY_KEY": KEY, "wsgi.input": BytesIO()}
        long = Long("is read", True)
        for _ in wsgi.IdempotencyMiddleware(long.wsgi, once, max_response_bytes=200)(environ, lambda *_: None):
            look()
    assert statuses[:4] == ["in_flight", "in_flight", "completed", "completed"]
    assert len(statuses) == 100


def test_b5_a_response_of_exactly_the_limit_is_kept(site: Doorway) -> None:
    handler = Answering(Answer(201, b"x" * 102))
    service = site.serve(handler, max_response_bytes=102)
    assert [service.post(ITEM, key=KEY).content for _ in range(3)] == [b"x" * 102] * 3
    assert handler.times == 1


# -- B7: the contract with the client ----------------------------------------------------------------------------------


def test_b7_a_replay_says_so(site: Doorway, intake: Intake) -> None:
    service = site.serve(intake)
    assert "idempotent-replayed" not in service.post(ITEM, key=KEY).headers
    assert service.post(ITEM, key=KEY).headers.get_list("idempotent-replayed") == ["true"]
    assert "idempotent-replayed" not in service.post(OTHER, key=KEY).headers


def test_b7_the_client_learns_when_its_key_expires(site: Doorway, intake: Intake) -> None:
    service = site.serve(intake)
    expires = http_time(site, HOUR)
    assert expires == "Tue, 14 Nov 2023 23:13:20 GMT"
    for _ in range(2):
        assert service.post(ITEM, key=KEY).headers.get_list("idempotency-expires") == [expires]
        site.clock.advance(100)


def test_b7_retry_after_grows_with_the_age_of_the_claim_up_to_what_is_left_of_the_real_lease(site: Doorway) -> None:
    """What began just now is soon done; what is dead can be had when its lease ends. At least a second, rounded up."""
    slow = SlowIntake()
    service = site.serve(slow)
    with service.under_way(slow, ITEM, key=KEY):
        for advance, said in ((0, "1"), (0.3, "1"), (12.7, "13"), (0.5, "14"), (16.5, "30"), (20, "10"), (9.5, "1")):
            site.clock.advance(advance)
            assert service.post(ITEM, key=KEY).headers["retry-after"] == said


def test_b7_retry_after_goes_by_the_age_of_the_claim_whatever_is_renewed(site: Doorway) -> None:
    slow = SlowIntake()
    service = site.serve(slow)
    with service.under_way(slow, ITEM, key=KEY):
        for age in (50, 100, 150):
            site.clock.advance(50)
            record = site.record(KEY)
            assert record is not None
            site.keys.renew(claim_of(record))
            assert service.post(ITEM, key=KEY).headers["retry-after"] == str(min(age, 60))
        taken_over = site.record(KEY)
    assert taken_over is not None
    assert taken_over.fence == record.fence
    assert slow.items == [ITEM]


def test_b7_a_worker_that_died_blocks_its_key_for_a_minute_at_most(site: Doorway) -> None:
    """With the defaults. It is also said how long."""
    slow = SlowIntake()
    service = site.serve(slow)
    with service.under_way(slow, ITEM, key=KEY) as first:
        site.clock.advance(59)
        assert service.post(ITEM, key=KEY).status_code == 409
        site.clock.advance(1)
        assert service.post(ITEM, key=KEY).status_code == 201
        slow.gate.set()
        assert first.result(PATIENCE).status_code == 409, "should it come back, the other one's answer counts"
    assert is_replay(service.post(ITEM, key=KEY))


def test_b7_a_quoted_key_and_a_bare_one_are_the_same(site: Doorway, intake: Intake) -> None:
    service = site.serve(intake)
    first = service.post(ITEM, key="order-1")
    quoted = service.post(ITEM, key='"order-1"')
    assert (quoted.content, is_replay(quoted)) == (first.content, True)
    assert service.post(OTHER, key='"order-1"').json()["idempotency_key"] == "order-1"
    for bad in ('"order-1', 'order-1"', '"order"-1"', '"order 1"', '""', '"order-\\1"'):
        assert service.post(ITEM, key=bad).status_code == 400, bad
    assert intake.items == [ITEM]


def test_b7_a_quoted_key_in_the_ietf_dialect_may_hold_any_printable_character(site: Doorway, intake: Intake) -> None:
    service = site.serve(intake, policy="ietf")
    for key in ('"a \\"b\\" \\\\ c, d"', '"8e03978e-40d5-43dd-bc93-6894a57f9324"', "a.b:c/d"):
        assert not is_replay(service.post(ITEM, key=key))
        assert is_replay(service.post(ITEM, key=key))
    assert site.record('a "b" \\ c, d') is not None
    assert is_replay(service.post(ITEM, key="8e03978e-40d5-43dd-bc93-6894a57f9324"))
    assert len(intake.items) == 3


def test_b7_one_key_said_twice_is_one_key(site: Doorway, intake: Intake) -> None:
    """A proxy may send a header twice; two different keys are none."""
    service = site.serve(intake)
    twice = [("Idempotency-Key", KEY)] * 2
    assert service.post(ITEM, headers=twice).status_code == 201
    assert is_replay(service.post(ITEM, key=KEY))
    refused = service.post(ITEM, headers=[("Idempotency-Key", KEY), ("Idempotency-Key", "order-2")])
    assert (refused.status_code, refused.json()["error_code"]) == (400, "INVALID_IDEMPOTENCY_KEY")
    assert intake.items == [ITEM]


def test_b7_problem_details_say_what_to_do(site: Doorway) -> None:
    """RFC 9457, with the time to wait, whether it makes sense to retry, and where to look."""
    slow = SlowIntake()
    service = site.serve(slow, policy="ietf", status_path="/keys")
    with service.under_way(slow, ITEM, key=KEY):
        site.clock.advance(13)
        response = service.post(ITEM, key=KEY)
    assert response.status_code == 409
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["retry-after"] == "13"
    assert response.headers["link"] == '</keys/POST/api/v1/items?key=order-1>; rel="status"'
    assert response.json() == {
        "type": "urn:semel:idempotency-key-processing",
        "title": "A request is outstanding for this Idempotency-Key",
        "status": 409,
        "detail": "Request with this idempotency key is already being processed",
        "error_code": "IDEMPOTENCY_KEY_PROCESSING",
        "idempotency_key": KEY,
        "retryable": True,
        "retry_after": 13,
        "status_url": "/keys/POST/api/v1/items?key=order-1",
    }
    mismatch = service.post(OTHER, key=KEY)
    assert mismatch.headers["content-type"] == "application/problem+json"
    assert mismatch.json() == {
        "type": "urn:semel:idempotency-key-conflict",
        "title": "Idempotency-Key is already used",
        "status": 422,
        "detail": "Idempotency key already used with a different request: another body, query or endpoint, or other "
        "credentials",
        "error_code": "IDEMPOTENCY_KEY_CONFLICT",
        "idempotency_key": KEY,
        "retryable": False,
    }


def test_b7_a_status_url_tells_what_is_known_of_a_key(site: Doorway) -> None:
    slow = SlowIntake()
    service = site.serve(slow, policy="ietf", status_path="/keys")
    key = '"a b&c=d/é"'.encode()
    assert service.post(ITEM, key=key).status_code == 400, "not a key: é"
    key = '"a b&c=d/e?"'
    with service.under_way(slow, ITEM, key=key):
        site.clock.advance(20)
        url = service.post(ITEM, key=key).json()["status_url"]
        status = service.request("GET", url)
        assert (status.status_code, status.headers["content-type"]) == (200, "application/json")
        assert status.json() == {
            "idempotency_key": "a b&c=d/e?",
            "status": "in_flight",
            "created_at": "2023-11-14T22:13:20Z",
            "expires_at": "2023-11-15T22:13:20Z",
            "lease_left": 40.0,
        }
        site.clock.advance(40)
        assert service.request("GET", url).json()["status"] == "abandoned"
        site.clock.advance(-40)
    done = service.request("GET", url).json()
    assert (done["status"], done["lease_left"]) == ("completed", 0.0)
    absent = service.request("GET", "/keys/POST/api/v1/items?key=other")
    assert (absent.status_code, absent.json()) == (404, {"idempotency_key": "other", "status": "absent"})
    assert slow.items == [ITEM]
    assert service.ask("stats").doors["http", "http"].misses == {"absent": 1}, "looking is not counted"


def test_b7_a_status_url_needs_no_more_than_its_path(site: Doorway) -> None:
    """What is not a question for a key's status goes to the app; a key that cannot be is refused."""
    handler = Answering(Answer(200, {"by": "app"}))
    service = site.serve(handler, status_path="/keys")
    for method, url in (("GET", "/keys"), ("GET", "/keys/POST/api"), ("GET", "/keysmith/x?key=a"), ("PUT", "/keys/a")):
        assert service.request(method, url).json() == {"by": "app"}
    assert service.request("GET", "/keys/POST/api?key=%00").status_code == 400
    assert service.request("GET", f"/keys/POST/api?key={'k' * 256}").status_code == 400
    plain = site.serve(handler)
    assert plain.request("GET", "/keys/POST/api/v1/items?key=a").json() == {"by": "app"}


def test_b7_a_status_url_works_where_a_get_may_have_a_key(entrance: Doorway) -> None:
    handler = Answering(Answer(200, {"by": "app"}))
    service = entrance.serve(handler, methods=["GET", "POST"], required=True, status_path="/keys")
    service.request("GET", "/report", key=KEY)
    assert is_replay(service.request("GET", "/report", key=KEY))
    assert service.request("GET", f"/keys/GET/report?key={KEY}").json()["status"] == "completed"
    assert handler.times == 1


def test_b7_without_a_status_path_no_status_is_told(site: Doorway) -> None:
    slow = SlowIntake()
    service = site.serve(slow, policy="ietf")
    with service.under_way(slow, ITEM, key=KEY):
        response = service.post(ITEM, key=KEY)
    assert "link" not in response.headers
    assert "status_url" not in response.json()


# -- tenants and scopes ------------------------------------------------------------------------------------------------


def test_b7_tenants_never_see_each_others_responses(site: Doorway, intake: Intake) -> None:
    service = site.serve(
        intake, policy="ietf", tenant=lambda context: header_of(context, "x-customer"), status_path="/keys"
    )
    for number, (tenant, body) in enumerate([("acme", ITEM), ("evil", OTHER), ("acme POST", ITEM), ("POST", ITEM)], 1):
        headers = [("X-Customer", tenant)]
        first = service.post(body, key=KEY, headers=headers)
        assert (first.json()["id"], is_replay(first)) == (number, False)
        assert service.post(body, key=KEY, headers=headers).content == first.content
    url = "/keys/POST/api/v1/items?key=order-1"
    assert service.request("GET", url, headers=[("X-Customer", "acme")]).json()["status"] == "completed"
    assert service.request("GET", url, headers=[("X-Customer", "mallory")]).status_code == 404


def test_b7_each_path_and_each_method_has_its_own_keys(site: Doorway) -> None:
    handler = Answering(Answer(200, b"1"), Answer(200, b"2"), Answer(200, b"3"), Answer(200, b"4"))
    service = site.serve(handler, methods=["post", "PATCH"])
    for method, path in (("POST", "/a"), ("POST", "/b"), ("PATCH", "/a"), ("POST", "/%D1%91/a b")):
        first = service.request(method, path, ITEM, key=KEY)
        again = service.request(method, path, ITEM, key=KEY)
        assert (again.content, is_replay(first), is_replay(again)) == (first.content, False, True)
    assert handler.times == 4
    assert service.request("PUT", "/a", ITEM, key=KEY).status_code == 200
    assert handler.times == 5


def test_b7_the_query_is_part_of_the_request(site: Doorway, intake: Intake) -> None:
    service = site.serve(intake)
    assert service.post(ITEM, key=KEY, path=f"{ITEMS}?dry=1").status_code == 201
    assert is_replay(service.post(ITEM, key=KEY, path=f"{ITEMS}?dry=1"))
    for query in ("?dry=0", "?dry=1&more", ""):
        assert service.post(ITEM, key=KEY, path=f"{ITEMS}{query}").status_code == 409, query
    assert intake.items == [ITEM]


# -- what is replayed --------------------------------------------------------------------------------------------------


def test_b7_what_belongs_to_one_client_or_one_connection_is_not_replayed(site: Doorway) -> None:
    own = [
        ("Set-Cookie", "session=secret"),
        ("Set-Cookie", "b=2"),
        ("Date", "Tue, 14 Nov 2023 22:13:20 GMT"),
        ("Server", "intake/1"),
        ("Connection", "close, X-Hop"),
        ("X-Hop", "1"),
        ("Keep-Alive", "timeout=5"),
        ("Proxy-Authenticate", "Basic"),
        ("TE", "trailers"),
        ("Trailer", "X-Sum"),
        ("Upgrade", "h2c"),
    ]
    service = site.serve(Answering(Answer(201, {"id": 1}, [*own, ("X-Kept", "yes")])))
    first = service.post(ITEM, key=KEY)
    for name, value in own:
        assert value in first.headers.get_list(name), "the first client gets everything"
    assert sorted(service.post(ITEM, key=KEY).headers) == [
        "content-length",
        "content-type",
        "idempotency-expires",
        "idempotent-replayed",
        "x-kept",
    ]
    record = site.record(KEY)
    assert record is not None
    assert record.data is not None
    assert b"secret" not in record.data, "not even stored"


def test_b7_several_headers_of_one_name_are_replayed_in_order(site: Doorway) -> None:
    several = [("Link", "</1>; rel=next"), ("X-Other", "o"), ("Link", "</2>; rel=prev"), ("Link", "</1>; rel=next")]
    service = site.serve(Answering(Answer(200, {}, several)))
    first = service.post(ITEM, key=KEY)
    again = service.post(ITEM, key=KEY)
    assert again.headers.get_list("link") == ["</1>; rel=next", "</2>; rel=prev", "</1>; rel=next"]
    kept = [pair for pair in again.headers.multi_items() if pair[0] in {"link", "x-other"}]
    assert kept == [pair for pair in first.headers.multi_items() if pair[0] in {"link", "x-other"}]


@pytest.mark.parametrize("status", [204, 304])
def test_b7_a_response_without_a_body_is_replayed_without_one(site: Doorway, status: int) -> None:
    handler = Answering(Answer(status, b"", [("ETag", '"7"')]))
    service = site.serve(handler)
    for replayed in (False, True):
        response = service.post(ITEM, key=KEY)
        assert (response.status_code, response.content, is_replay(response)) == (status, b"", replayed)
        assert response.headers["etag"] == '"7"'
        assert "content-length" not in response.headers
        assert "content-type" not in response.headers
    assert handler.times == 1


def test_b7_a_binary_body_is_replayed_byte_for_byte(site: Doorway) -> None:
    content = bytes(range(256))
    handler = Answering(Answer(200, content, [("Content-Type", "image/png"), ("Content-Encoding", "identity")]))
    service = site.serve(handler)
    for _ in range(2):
        response = service.post(bytes(reversed(content)), key=KEY)
        assert response.content == content
        assert (response.headers["content-type"], response.headers["content-length"]) == ("image/png", "256")
        assert response.headers["content-encoding"] == "identity"
    assert [asked.body for asked in handler.asked] == [bytes(reversed(content))]


# -- presets -----------------------------------------------------------------------------------------------------------


def test_b7_ietf_a_missing_key_is_refused_where_one_is_required(site: Doorway, intake: Intake) -> None:
    service = site.serve(intake, policy="ietf", required=True)
    response = service.post(ITEM)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json() == {
        "type": "urn:semel:missing-idempotency-key",
        "title": "Idempotency-Key is missing",
        "status": 400,
        "detail": "This operation requires an idempotency key: send one that is unique to the operation in the header "
        "Idempotency-Key",
        "error_code": "MISSING_IDEMPOTENCY_KEY",
        "idempotency_key": None,
        "retryable": False,
    }
    assert intake.items == []
    assert service.post(ITEM, key=KEY).status_code == 201
    assert service.request("GET", ITEMS, ITEM).status_code == 201, "only of requests that may have one"


def test_b7_ietf_responses_below_500_are_replayed_and_others_are_not(site: Doorway) -> None:
    handler = Answering(Answer(404, b"1"), Answer(500, b"2"), Answer(503, b"3"), Answer(422, b"4"))
    service = site.serve(handler, policy="ietf")
    for _ in range(3):
        assert (service.post(ITEM, key="first").status_code, handler.times) == (404, 1)
    answers = [service.post(ITEM, key="second") for _ in range(4)]
    assert [each.content for each in answers] == [b"2", b"3", b"4", b"4"]
    assert [is_replay(each) for each in answers] == [False, False, False, True]
    assert handler.times == 4


def test_b7_ietf_keys_live_for_24_hours(site: Doorway, intake: Intake) -> None:
    service = site.serve(intake, policy="ietf")
    assert service.post(ITEM, key=KEY).headers["idempotency-expires"] == http_time(site, DAY)
    site.clock.advance(DAY)
    assert is_replay(service.post(ITEM, key=KEY))
    site.clock.advance(1)
    assert not is_replay(service.post(ITEM, key=KEY))


class CardDeclined(Exception):
    pass


def test_b7_stripe_every_outcome_is_kept(site: Doorway) -> None:
    handler = Answering(Answer(500, b"1"), Answer(402, b"2"), Answer(200, b"3"))
    service = site.serve(handler, policy="stripe")
    for key, status, content in (("a", 500, b"1"), ("b", 402, b"2"), ("c", 200, b"3")):
        for replayed in (False, True, True):
            response = service.post(ITEM, key=key)
            assert (response.status_code, response.content, is_replay(response)) == (status, content, replayed)
    assert handler.times == 3


def test_b7_stripe_an_exception_is_kept_and_its_text_never_shown(site: Doorway) -> None:
    handler = Answering(CardDeclined("card 4929 of Ms Smith"))
    service = site.serve(handler, policy="stripe")
    with pytest.raises(CardDeclined):
        service.post(ITEM, key=KEY)
    for _ in range(2):
        response = service.post(ITEM, key=KEY)
        assert (response.status_code, is_replay(response)) == (500, True)
        assert response.json() == {
            "error": {
                "type": "idempotency_error",
                "code": "idempotent_request_failed",
                "message": "The first request with this idempotency key failed; use a new key to try again",
            }
        }
        assert "Smith" not in response.text
        assert "CardDeclined" not in response.text
    assert handler.times == 1


def test_b7_stripe_refusals(site: Doorway) -> None:
    slow = SlowIntake()
    service = site.serve(slow, policy="stripe")
    with service.under_way(slow, ITEM, key=KEY):
        busy = service.post(ITEM, key=KEY)
    assert (busy.status_code, busy.headers["retry-after"]) == (409, "1")
    assert busy.json()["error"]["code"] == "idempotency_key_in_use"
    other = service.post(OTHER, key=KEY)
    assert other.status_code == 400
    assert other.json() == {
        "error": {
            "type": "idempotency_error",
            "code": "idempotency_key_reused",
            "message": "Idempotency key already used with a different request: another body, query or endpoint, or "
            "other credentials",
        }
    }


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "covered", "left_alone"),
    [
        ({"paths": "/api/*"}, ["/api/v1/items", "/api/"], ["/api", "/health", "/my/api/v1"]),
        ({"paths": ["/orders", "/items/?"]}, ["/orders", "/items/7"], ["/orders/7", "/items", "/items/77"]),
        ({"paths": lambda path: path.endswith("!")}, ["/now!"], ["/now"]),
        ({"exclude": "/health*"}, ["/api", "/"], ["/health", "/health/live"]),
        ({"paths": "/api/*", "exclude": ["/api/raw/*", "/api/log"]}, ["/api/x"], ["/api/raw/x", "/api/log", "/x"]),
    ],
    ids=["pattern", "patterns", "function", "exclude", "both"],
)
def test_b7_paths_and_exclude_say_where(
    entrance: Doorway, options: dict[str, Any], covered: list[str], left_alone: list[str]
) -> None:
    handler = Answering(Answer(200))
    service = entrance.serve(handler, required=True, **options)
    for path in covered:
        service.post(ITEM, key=KEY, path=path)
        assert is_replay(service.post(ITEM, key=KEY, path=path)), path
        assert service.post(ITEM, path=path).status_code == 400, path
    assert handler.times == len(covered)
    for path in left_alone:
        for key in (KEY, KEY, None, "not a key"):
            response = service.post(ITEM, key=key, path=path)
            assert (response.status_code, is_replay(response)) == (200, False), path
    assert handler.times == len(covered) + 4 * len(left_alone)


def test_b7_the_key_may_be_in_another_header(entrance: Doorway, intake: Intake) -> None:
    service = entrance.serve(intake, header="X-Request-Id")
    for _ in range(2):
        assert service.post(ITEM, headers=[("x-request-id", KEY)]).json()["id"] == 1
        service.post(ITEM, key=KEY)
    assert len(intake.items) == 3, "the usual header is nothing special here"


def test_b7_json_is_compared_by_its_content(entrance: Doorway, intake: Intake) -> None:
    service = entrance.serve(intake, fingerprint="json")
    service.post(b'{"sku": "ITEM-001", "price": 1.0, "tags": ["a", "b"]}', key=KEY)
    same = b'\n{ "tags":["a","b"],"price":1 ,"sku":"\\u0049TEM-001"}'
    assert is_replay(service.post(same, key=KEY))
    for other in (b'{"sku": "ITEM-001", "price": 1.0, "tags": ["b", "a"]}', b"not json", b""):
        assert service.post(other, key=KEY).status_code == 409
    assert service.post(same, key=KEY, path=f"{ITEMS}?dry=1").status_code == 409
    assert len(intake.items) == 1


def test_b7_what_is_not_json_is_compared_by_its_bytes(entrance: Doorway) -> None:
    handler = Answering(Answer(200))
    service = entrance.serve(handler, fingerprint="json")
    for number, body in enumerate((b"{", b"", b"\xff\xfe", b"NaN", b"[" * 100_000)):
        service.post(body, key=f"key-{number}")
        assert is_replay(service.post(body, key=f"key-{number}"))
        assert service.post(body + b" ", key=f"key-{number}").status_code == 409
    assert handler.times == 5


def test_b7_a_function_may_say_what_is_compared(entrance: Doorway, intake: Intake) -> None:
    def sku_for_customer(context: dict[str, Any], body: bytes) -> str:
        return semel.fingerprint([header_of(context, "x-customer"), json.loads(body)["sku"]])

    service = entrance.serve(intake, fingerprint=sku_for_customer)
    acme = [("X-Customer", "acme")]
    service.post(ITEM, key=KEY, headers=acme)
    assert is_replay(service.post({**ITEM, "title": "Another Title"}, key=KEY, headers=acme))
    assert service.post(OTHER, key=KEY, headers=acme).status_code == 409
    assert service.post(ITEM, key=KEY).status_code == 409


def test_b7_the_scope_may_be_a_function_of_the_request(entrance: Doorway, intake: Intake) -> None:
    service = entrance.serve(intake, scope=lambda context: f"for {header_of(context, 'x-customer')}")
    service.post(ITEM, key=KEY, headers=[("X-Customer", "acme")])
    assert entrance.record(KEY, "for acme") is not None
    assert is_replay(service.post(ITEM, key=KEY, path="/another", headers=[("X-Customer", "acme")]))
    assert not is_replay(service.post(ITEM, key=KEY, headers=[("X-Customer", "other")]))


def test_b7_doors_are_counted_by_their_names(entrance: Doorway, intake: Intake) -> None:
    events: list[semel.Event] = []
    once = entrance.open(collect=False)
    items = entrance.serve(intake, once, name="items", on_event=events.append)
    orders = entrance.serve(intake, once, name="orders")
    items.post(ITEM, key=KEY)
    items.post(ITEM, key=KEY)
    orders.post(ITEM, key=KEY, path="/orders")
    doors = items.ask("stats").doors
    assert {place: (found.hits, found.misses) for place, found in doors.items()} == {
        ("http", "items"): (1, {"absent": 1}),
        ("http", "orders"): (0, {"absent": 1}),
    }
    seen = [(event.name, event.door, event.label, event.scope, event.key) for event in events if event.key]
    assert seen == [
        ("miss", "http", "items", SCOPE, KEY),
        ("hit", "http", "items", SCOPE, KEY),
        ("miss", "http", "orders", "POST /orders", KEY),
    ]


# -- B18: waiting ------------------------------------------------------------------------------------------------------


def test_b18_a_duplicate_waits_for_the_first_answer(site: Doorway) -> None:
    slow, waiting = SlowIntake(), threading.Event()
    once = site.open(Noting(site.store(), waiting))
    service = site.serve(slow, once, policy=Policy.intake().but(in_flight="wait"))
    with service.under_way(slow, ITEM, key=KEY) as first, beside(lambda: service.post(ITEM, key=KEY)) as second:
        try:
            assert waiting.wait(PATIENCE)
            assert service.post(OTHER, key=KEY).status_code == 409, "there is nothing to wait for"
            assert not second.done()
        finally:
            slow.gate.set()
        assert second.result(PATIENCE).content == first.result(PATIENCE).content
        assert is_replay(second.result())
    assert slow.items == [ITEM]


def test_b18_who_waits_carries_the_request_out_when_the_first_fails(site: Doorway) -> None:
    waiting = threading.Event()

    class FailsFirst(SlowIntake):
        def __call__(self, asked: Asked) -> Answer:
            first = not self.entered.is_set()
            answer = super().__call__(asked)
            return Answer(503) if first else answer

    slow = FailsFirst()
    once = site.open(Noting(site.store(), waiting))
    service = site.serve(slow, once, policy=Policy.intake().but(in_flight="wait"))
    with service.under_way(slow, ITEM, key=KEY) as first, beside(lambda: service.post(ITEM, key=KEY)) as second:
        try:
            assert waiting.wait(PATIENCE)
        finally:
            slow.gate.set()
        assert first.result(PATIENCE).status_code == 503
        assert (second.result(PATIENCE).status_code, is_replay(second.result())) == (201, False)


def test_b18_waiting_ends_at_its_deadline(site: Doorway) -> None:
    slow = SlowIntake()
    service = site.serve(slow, policy=Policy.intake().but(in_flight="wait", wait=0.05))
    with service.under_way(slow, ITEM, key=KEY):
        response = service.post(ITEM, key=KEY)
        assert (response.status_code, response.json()["error_code"]) == (409, "IDEMPOTENCY_KEY_PROCESSING")
        assert response.headers["retry-after"] == "1"


# -- the store is away -------------------------------------------------------------------------------------------------


def test_b7_while_the_store_is_away_nothing_is_carried_out(site: Doorway, intake: Intake) -> None:
    store = FaultyStore(site.store())
    service = site.serve(intake, site.open(store, retry_for=0), status_path="/keys")
    store.away = True
    response = service.post(ITEM, key=KEY)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json() == {
        "detail": "It cannot be told at the moment whether this request was carried out before; send it again with "
        "the same key",
        "error_code": "IDEMPOTENCY_STORE_UNAVAILABLE",
        "idempotency_key": KEY,
    }
    assert service.request("GET", "/keys/POST/api/v1/items?key=order-1").status_code == 503
    assert intake.items == []
    assert service.post(ITEM).status_code == 201, "without a key nothing changes"
    store.away = False
    response = service.post(ITEM, key=KEY)
    assert response.json().get("id") == 2, response.text


def test_b7_a_response_that_cannot_be_recorded_is_withheld(site: Doorway, intake: Intake) -> None:
    """Its client would take it as said for good. Whoever asks again meanwhile does not start it anew."""
    store = FaultyStore(site.store())
    service = site.serve(intake, site.open(store, retry_for=0))
    store.lose_request("complete", 1000)
    response = service.post(ITEM, key=KEY)
    assert (response.status_code, response.json()["error_code"]) == (503, "IDEMPOTENCY_STORE_UNAVAILABLE")
    assert service.post(ITEM, key=KEY).json()["error_code"] == "IDEMPOTENCY_KEY_PROCESSING"
    assert intake.items == [ITEM]


def test_b7_a_list_is_a_whole_answer_without_its_length(space_of: Callable[[str], Space]) -> None:
    """A WSGI app may leave it to the server to count: nothing of it leaves before it is recorded all the same."""
    space = space_of("sqlite")
    store = FaultyStore(space.store())
    once = space.open(store, retry_for=0, policy=Policy.intake())

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("201 Created", [("Content-Type", "text/plain")])
        return [b"crea", b"ted"]

    server = WsgiServer(wsgi.IdempotencyMiddleware(app, once))
    with httpx.Client(transport=server, base_url="http://intake") as client:
        store.lose_request("complete")
        headers = {"Content-Type": "text/plain", "Idempotency-Key": KEY}
        assert client.post("/", content=b"x", headers=headers).status_code == 503
        headers["Idempotency-Key"] = "order-2"
        assert [client.post("/", content=b"x", headers=headers).content for _ in range(2)] == [b"created"] * 2


def test_b7_where_the_policy_says_so_requests_are_carried_out_without_protection(
    site: Doorway, intake: Intake, caplog: pytest.LogCaptureFixture
) -> None:
    store = FaultyStore(site.store())
    service = site.serve(intake, site.open(store, retry_for=0), policy=Policy.intake().but(store_failure="open"))
    store.away = True
    for number in (1, 2):
        response = service.post(ITEM, key=KEY)
        assert (response.status_code, response.json()) == (201, {"id": number, **ITEM})
        assert "idempotency-expires" not in response.headers, "nothing is promised"
    assert len([each for each in caplog.records if "without protection" in each.getMessage()]) == 2
    store.away = False
    assert service.post(ITEM, key=KEY).json()["id"] == 3
    assert is_replay(service.post(ITEM, key=KEY))


def test_b7_where_the_policy_says_so_a_response_leaves_before_it_is_recorded(site: Doorway, intake: Intake) -> None:
    store = FaultyStore(site.store())
    service = site.serve(intake, site.open(store, retry_for=0), policy=Policy.intake().but(store_failure="open"))
    store.lose_request("complete", 1000)
    assert service.post(ITEM, key=KEY).json()["id"] == 1
    assert service.post(ITEM, key=KEY).status_code == 409
    assert intake.items == [ITEM]


# -- B17: the handler's own transaction --------------------------------------------------------------------------------

items = Table("items", MetaData(), Column("id", Integer, primary_key=True), Column("sku", Text))
STORED = select(func.count()).select_from(items)


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, space_of: Callable[[str], Space]) -> Iterator[Space]:
    """A database that holds the service's own table beside semel's."""
    space = space_of(request.param)
    engine = create_engine(with_driver(space.url))
    items.create(engine)
    yield space
    items.drop(engine)
    engine.dispose()


@pytest.fixture(params=DOORS)
def shop(request: pytest.FixtureRequest, database: Space) -> Iterator[Doorway]:
    """Each door over each database."""
    with doorway(request.param, database) as shop:
        yield shop


def with_driver(url: str, *, is_async: bool = False) -> Any:
    drivers = {"sqlite": ("pysqlite", "aiosqlite"), "postgresql": ("psycopg", "asyncpg")}
    address = make_url(url)
    return address.set(drivername=f"{address.drivername}+{drivers[address.drivername][is_async]}")


class CrashedAt(Exception):
    """The handler failed at this point."""


class Shop:
    """A service that commits an item and its key's outcome together; it can be told where to fail."""

    def __init__(self, site: Doorway) -> None:
        self.fails = ""
        self.times = 0
        self._once: Any = site.open()
        if site.kind == "asgi":
            self._async_engine = create_async_engine(with_driver(site.space.url, is_async=True))
            self.service = site.serve(self._handle_async, self._once)
        else:
            self._engine = create_engine(with_driver(site.space.url))
            self.service = site.serve(self._handle, self._once)
        self._site = site

    def stored(self) -> int:
        engine = create_engine(with_driver(self._site.space.url))
        with engine.connect() as connection:
            number: int = connection.execute(STORED).scalar_one()
        engine.dispose()
        return number

    def close(self) -> None:
        if self._site.kind == "asgi":
            self._site.run(self._async_engine.dispose())
        else:
            self._engine.dispose()

    def _handle(self, asked: Asked) -> Answer:
        self.times += 1
        with Session(self._engine) as session, session.begin():
            number = session.execute(items.insert().values(sku="ITEM-001")).inserted_primary_key[0]
            self._once.on(session).complete(current_claim(), self._created(number))
            self._maybe_fail("before the commit")
        return self._answer(number)

    async def _handle_async(self, asked: Asked) -> Answer:
        self.times += 1
        async with AsyncSession(self._async_engine) as session, session.begin():
            number = (await session.execute(items.insert().values(sku="ITEM-001"))).inserted_primary_key[0]
            await self._once.on(session).complete(current_claim(), self._created(number))
            self._maybe_fail("before the commit")
        await asyncio.sleep(0)
        return self._answer(number)

    def _created(self, number: int) -> semel.Response:
        return semel.Response.json({"id": number}, 201)

    def _answer(self, number: int) -> Answer:
        self._maybe_fail("after the commit")
        if self.fails == "with a 500":
            return Answer(500, b"?")
        return Answer(201, b'{"id":%d}' % number)

    def _maybe_fail(self, where: str) -> None:
        if self.fails == where:
            raise CrashedAt(where)


@pytest.fixture
def open_shop(shop: Doorway) -> Iterator[Shop]:
    opened = Shop(shop)
    yield opened
    opened.close()


def test_b17_item_and_key_commit_together(open_shop: Shop, shop: Doorway) -> None:
    first = open_shop.service.post(ITEM, key=KEY)
    assert (first.status_code, first.json()) == (201, {"id": 1})
    again = open_shop.service.post(ITEM, key=KEY)
    assert (again.status_code, again.content, is_replay(again)) == (201, first.content, True)
    assert again.headers["content-type"] == "application/json"
    assert open_shop.service.post(OTHER, key=KEY).status_code == 409
    assert (open_shop.stored(), open_shop.times) == (1, 1)


def test_b17_item_and_key_vanish_together(open_shop: Shop, shop: Doorway) -> None:
    """The transaction is rolled back: nothing happened, and the next request with the key is the first."""
    open_shop.fails = "before the commit"
    with pytest.raises(CrashedAt):
        open_shop.service.post(ITEM, key=KEY)
    assert open_shop.stored() == 0
    assert shop.record(KEY) is None
    open_shop.fails = ""
    response = open_shop.service.post(ITEM, key=KEY)
    assert (response.status_code, is_replay(response)) == (201, False)
    assert open_shop.stored() == 1


@pytest.mark.parametrize("failure", ["after the commit", "with a 500"])
def test_b17_what_was_committed_is_replayed_whatever_comes_after(open_shop: Shop, failure: str) -> None:
    """Its client never saw the answer; the item is there, and its retry gets the answer that was committed with it."""
    open_shop.fails = failure
    if failure == "after the commit":
        with pytest.raises(CrashedAt):
            open_shop.service.post(ITEM, key=KEY)
    else:
        assert open_shop.service.post(ITEM, key=KEY).status_code == 500
    open_shop.fails = ""
    again = open_shop.service.post(ITEM, key=KEY)
    assert (again.status_code, again.json(), is_replay(again)) == (201, {"id": 1}, True)
    assert (open_shop.stored(), open_shop.times) == (1, 1)


def test_b17_a_zombie_cannot_commit_its_item(shop: Doorway) -> None:
    """While its handler was held, another took over: completing raises in its transaction."""
    if shop.kind == "asgi":
        engine: Any = create_async_engine(with_driver(shop.space.url, is_async=True))
    else:
        engine = create_engine(with_driver(shop.space.url))
    once: Any = shop.open()
    slow = SlowIntake()

    def handler(asked: Asked) -> Answer:
        answer = slow(asked)
        with Session(engine) as session, session.begin():
            session.execute(items.insert().values(sku="ITEM-001"))
            once.on(session).complete(current_claim(), semel.Response(201, [], answer.body))
        return answer

    async def handler_async(asked: Asked) -> Answer:
        answer = await asyncio.to_thread(slow, asked)
        async with AsyncSession(engine) as session, session.begin():
            await session.execute(items.insert().values(sku="ITEM-001"))
            await once.on(session).complete(current_claim(), semel.Response(201, [], answer.body))
        return answer

    chosen: Handler = handler_async if shop.kind == "asgi" else handler
    service: Service = shop.serve(chosen, once, policy=Policy.intake().but(lease=60))
    with service.under_way(slow, ITEM, key=KEY) as zombie:
        shop.clock.advance(60)
        assert service.post(ITEM, key=KEY).status_code == 201
        slow.gate.set()
        with pytest.raises(semel.ClaimLost):
            zombie.result(PATIENCE)
    counted = create_engine(with_driver(shop.space.url))
    with counted.connect() as connection:
        assert connection.scalar(STORED) == 1
    counted.dispose()
    if shop.kind == "asgi":
        shop.run(engine.dispose())
    else:
        engine.dispose()
