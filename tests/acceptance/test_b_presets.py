"""B7, what the presets promise beyond the document: which outcomes are kept, how refusals help, what is refused."""

import gzip
import json
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import httpx
import pytest

from acceptance.exchanges import (
    DOORS,
    ITEMS,
    Answer,
    Answering,
    Asked,
    Doorway,
    Intake,
    asgi_app,
    doorway,
    wsgi_app,
)
from acceptance.spaces import Space
from semel.http import asgi, wsgi

KEY = "order-1"
ITEM = {"sku": "ITEM-001", "title": "Sample Item"}
DOCS = "https://shop.test/docs/idempotency"


@pytest.fixture(params=DOORS)
def entrance(request: pytest.FixtureRequest, space_of: Callable[[str], Space]) -> Iterator[Doorway]:
    """Each door over SQLite: what is here is the same whatever the store."""
    with doorway(request.param, space_of("sqlite")) as entrance:
        yield entrance


def is_replay(response: httpx.Response) -> bool:
    return response.headers.get("idempotent-replayed") == "true"


class CardDeclined(Exception):
    pass


# -- which outcomes are kept -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "kept", "given_back"),
    [
        ("ietf", [200, 302, 400, 404, 422, 451], [401, 403, 408, 409, 425, 429, 500, 502, 503]),
        ("stripe", [200, 302, 402, 404, 500, 503], [400, 401, 403, 409, 422, 429]),
        ("intake", [200, 302], [400, 401, 404, 429, 500]),
    ],
)
def test_b7_which_statuses_a_preset_keeps(
    entrance: Doorway, policy: Any, kept: list[int], given_back: list[int]
) -> None:
    once = entrance.open()
    for status in (*kept, *given_back):
        handler = Answering(Answer(status, b"1"), Answer(200, b"2"))
        service = entrance.serve(handler, once, policy=policy)
        answers = [service.post(ITEM, key=f"key-{status}") for _ in range(2)]
        assert [is_replay(answer) for answer in answers] == [False, status in kept], status
        assert answers[1].status_code == (status if status in kept else 200)
        assert ("idempotency-expires" in answers[0].headers) == (status in kept)


def test_b7_which_statuses_are_kept_can_be_chosen(entrance: Doorway) -> None:
    once = entrance.open()
    for keep, status, kept in ((range(200, 300), 302, False), (lambda status: True, 429, True), ([402], 402, True)):
        service = entrance.serve(Answering(Answer(status, b"1")), once, keep=keep)
        answers = [service.post(ITEM, key=f"key-{status}") for _ in range(2)]
        assert [is_replay(answer) for answer in answers] == [False, kept]


def exchange(entrance: Doorway, handler: Any, once: Any, options: Any) -> tuple[BaseException | None, Any]:
    """What a server sees of one request: the exception, if one comes out, and status, headers and body before it."""
    error: BaseException | None = None
    if entrance.kind == "asgi":
        app = asgi.IdempotencyMiddleware(asgi_app(handler), once, **options)
        scope = {"type": "http", "method": "POST", "path": ITEMS, "headers": [(b"idempotency-key", KEY.encode())]}
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        try:
            entrance.run(app({**scope, "query_string": b""}, receive, send))
        except CardDeclined as raised:
            error = raised
        body = b"".join(message["body"] for message in sent[1:])
        return error, (sent[0]["status"], sent[0]["headers"], body) if sent else None
    door = wsgi.IdempotencyMiddleware(wsgi_app(handler), once, **options)
    environ = {
        "REQUEST_METHOD": "POST",
        "SCRIPT_NAME": "",
        "PATH_INFO": ITEMS,
        "QUERY_STRING": "",
        "HTTP_IDEMPOTENCY_KEY": KEY,
        "CONTENT_LENGTH": "2",
        "wsgi.input": BytesIO(b"{}"),
    }
    started: list[Any] = []
    body = b""
    try:
        chunks = door(environ, lambda status, headers, exc_info=None: started.append((int(status[:3]), headers)))
        for chunk in chunks:
            body += chunk
    except CardDeclined as raised:
        error = raised
    pairs = [(name.encode(), value.encode()) for name, value in started[0][1]] if started else []
    return error, (started[0][0], pairs, body) if started else None


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"policy": "stripe"}, True),
        ({"policy": "stripe", "keep": range(200, 500)}, False),
        ({"policy": "ietf"}, False),
        ({"policy": "ietf", "keep": range(200, 600)}, True),
        ({"keep": [200, 500]}, True),
    ],
)
def test_b7_a_replayed_exception_has_the_body_of_the_first(entrance: Doorway, options: Any, kept: bool) -> None:
    """The server still sees the exception, for its log; the first client is told what all others are."""
    handler = Answering(CardDeclined("card 4929 of Ms Smith"), Answer(200, b"2"))
    once = entrance.open()
    error, first = exchange(entrance, handler, once, options)
    assert isinstance(error, CardDeclined)
    nothing, (status, headers, body) = exchange(entrance, handler, once, options)
    assert nothing is None
    assert ((b"idempotent-replayed", b"true") in headers) == kept
    assert handler.times == (1 if kept else 2)
    if kept:
        told = dict(headers)
        del told[b"idempotent-replayed"]
        assert first == (500, list(first[1]), body)
        assert (status, dict(first[1])) == (500, told)
        assert b"Smith" not in body
    else:
        assert first is None


# -- stripe ------------------------------------------------------------------------------------------------------------


def test_b7_stripe_a_key_used_at_another_endpoint_is_an_idempotency_error(entrance: Doorway) -> None:
    handler = Answering(Answer(200, {"id": 1}))
    service = entrance.serve(handler, policy="stripe", methods=["POST", "PATCH"], status_path="/keys")
    assert service.post(ITEM, key=KEY, path="/v1/charges").status_code == 200
    for method, path in (("POST", "/v1/refunds"), ("PATCH", "/v1/charges"), ("POST", "/v1/charges/1")):
        refused = service.request(method, path, ITEM, key=KEY)
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "idempotency_error")
        assert refused.json()["error"]["code"] == "idempotency_key_reused"
    assert is_replay(service.post(ITEM, key=KEY, path="/v1/charges"))
    assert handler.times == 1
    assert service.request("GET", f"/keys/POST/v1/charges?key={KEY}").json()["status"] == "completed"


def test_b7_stripe_tenants_and_scopes_of_ones_own_are_as_ever(entrance: Doorway) -> None:
    handler = Answering(Answer(200, {"id": 1}))
    service = entrance.serve(handler, policy="stripe", scope="orders")
    assert not is_replay(service.post(ITEM, key=KEY, path="/v1/charges"))
    assert is_replay(service.post(ITEM, key=KEY, path="/v2/charges")), "whoever names a scope says what belongs to it"
    assert entrance.record(KEY, "orders") is not None


# -- ietf --------------------------------------------------------------------------------------------------------------


def test_b7_ietf_problems_link_to_the_documentation(entrance: Doorway) -> None:
    service = entrance.serve(Intake(), policy="ietf", docs_url=DOCS, required=True)
    service.post(ITEM, key=KEY)
    for refused in (service.post(ITEM), service.post(ITEM, key="ключ".encode()), service.post(b"{}", key=KEY)):
        assert refused.json()["type"] == DOCS
        assert refused.headers["link"] == f'<{DOCS}>; rel="help"'
        assert refused.headers["content-type"] == "application/problem+json"
    assert "link" not in service.post(ITEM, key=KEY).headers, "a replay is not a problem"


def test_b7_the_other_dialects_link_to_it_too(entrance: Doorway) -> None:
    for policy, body in (("intake", {"detail", "error_code", "idempotency_key"}), ("stripe", {"error"})):
        refused = entrance.serve(Intake(), policy=policy, docs_url=DOCS).post(ITEM, key="")
        assert refused.headers["link"] == f'<{DOCS}>; rel="help"'
        assert set(refused.json()) == body
    assert refused.json()["error"]["doc_url"] == DOCS


@pytest.mark.parametrize("policy", ["intake", "ietf", "stripe"])
def test_b7_messages_name_the_header_that_is_configured(entrance: Doorway, policy: Any) -> None:
    service = entrance.serve(Intake(), policy=policy, header="X-Idem", required=True)
    own = [("X-Idem", KEY)]
    service.post(ITEM, headers=own)
    refusals = {
        "missing": service.post(ITEM),
        "invalid": service.post(ITEM, headers=[("X-Idem", "")]),
        "conflict": service.post(b"{}", headers=own),
    }
    for name, refused in refusals.items():
        assert "Idempotency-Key" not in refused.text, name
        if name == "missing" or policy == "ietf":
            assert "X-Idem" in refused.text, name
    assert is_replay(service.post(ITEM, headers=own))


def test_b7_ietf_covers_patch_and_the_document_only_post(entrance: Doorway) -> None:
    once = entrance.open()
    for policy, kept in (("ietf", True), ("intake", False), ("stripe", False)):
        service = entrance.serve(Answering(Answer(200, b"1")), once, policy=policy)
        answers = [service.request("PATCH", f"/{policy}", ITEM, key=KEY) for _ in range(2)]
        assert [is_replay(answer) for answer in answers] == [False, kept]


@pytest.mark.parametrize("key", ["order:17", "a.b", "gh-owner/repo-sha"])
def test_b7_intake_refuses_what_its_document_refuses_and_names_the_way_out(entrance: Doorway, key: str) -> None:
    intake = Intake()
    refused = entrance.serve(intake).post(ITEM, key=key)
    assert (refused.status_code, intake.items) == (400, [])
    assert refused.json() == {
        "detail": "Invalid idempotency key format. Key must be 1-255 characters long and contain only letters, "
        "numbers, hyphens, and underscores",
        "error_code": "INVALID_IDEMPOTENCY_KEY",
        "idempotency_key": key,
        "hint": 'This service takes the keys of policy="intake"; with policy="ietf" it would take this one',
    }
    assert entrance.serve(intake, policy="ietf").post(ITEM, key=key).status_code == 201


@pytest.mark.parametrize("key", ["@invalid-key#123", "", "k" * 256, "a." * 200])
def test_b7_intake_gives_no_hint_where_there_is_no_such_way(entrance: Doorway, key: str) -> None:
    assert "hint" not in entrance.serve(Intake()).post(ITEM, key=key).json()


# -- content codings ---------------------------------------------------------------------------------------------------


def compressing(asked: Asked) -> Answer:
    """As compression inside of the app does it: by what the client accepts."""
    body = json.dumps({"rows": ["row"] * 100}).encode()
    accepted = asked.headers.get("accept-encoding", "")
    if "br" in accepted:
        return Answer(200, b"\x00brotli", [("Content-Encoding", "br")])
    if "gzip" in accepted:
        return Answer(200, gzip.compress(body), [("Content-Encoding", "gzip"), ("Vary", "Accept-Encoding")])
    return Answer(200, body)


@pytest.mark.parametrize("first", ["gzip, deflate, br, zstd", "br", "*", "identity", None])
def test_b7_a_replay_honours_accept_encoding(entrance: Doorway, first: str | None) -> None:
    service = entrance.serve(compressing)

    def post(accepted: str | None) -> httpx.Response:
        return service.post(ITEM, key=KEY, headers=[("Accept-Encoding", accepted)] if accepted is not None else [])

    content = post(first).content
    for accepted in ("identity", "gzip", "br", "", "gzip;q=0, *;q=0", "deflate"):
        again = post(accepted)
        assert (again.status_code, is_replay(again)) == (200, True)
        assert again.content == content
        assert len(again.content) > 500
        if accepted != "gzip":
            assert "content-encoding" not in again.headers
        assert again.headers["content-length"] == str(again.num_bytes_downloaded or len(content))


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["intake", "ietf", "stripe"])
@pytest.mark.parametrize("in_memory", [0, 1 << 20])
def test_b7_a_request_over_the_limit_is_refused_and_leaves_nothing(
    entrance: Doorway, policy: Any, in_memory: int
) -> None:
    intake = Intake()
    service = entrance.serve(intake, policy=policy, max_request_bytes=100, body_in_memory=in_memory)
    body = json.dumps(ITEM).encode().ljust(100)
    refused = service.post(body + b" ", key=KEY)
    assert refused.status_code == 413
    assert "request_body_too_large" in refused.text.lower()
    assert (intake.items, service.ask("stats").held.live) == ([], 0)
    assert service.post(body, key=KEY).status_code == 201
    assert service.post(body + b" ").status_code == 201, "without a key nothing changes"


def test_b7_a_request_over_ten_mebibytes_is_refused_by_default(entrance: Doorway) -> None:
    handler = Answering(Answer(201, b"1"))
    service = entrance.serve(handler)
    body = b"x" * (10 << 20)
    assert [service.post(body + b"x", key=KEY).status_code, service.post(body, key=KEY).status_code] == [413, 201]
    assert service.request("POST", ITEMS, body + b"x").status_code == 201
    assert handler.times == 2
