"""What is sent to the runs of the service and cannot work gets a clear refusal, never a failure of the server."""

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import pytest

from semel.service import Settings
from support.run_service import app_with_models, submitted
from support.service import TestServer, serve

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestServer]:
    with (
        app_with_models(request, tmp_path_factory.mktemp("bad")) as app,
        serve(app, Settings(max_body=200_000)) as service,
    ):
        yield service


@pytest.fixture
def client(service: TestServer) -> Iterator[httpx.Client]:
    with service.client() as client:
        yield client


def refused(answer: httpx.Response, status: int, code: str, said: str = "") -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    problem = answer.json()
    assert (problem["status"], problem["error_code"]) == (status, code)
    assert said in problem["detail"]


def nested(levels: int) -> bytes:
    return b'{"model": "echo", "parameters": {"x": ' + b"[" * levels + b"]" * levels + b"}}"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "missing"),
        (b"{", "not JSON"),
        (b"nonsense", "not JSON"),
        (b'{"model": NaN}', "not JSON"),
        (b'{"model": "\xff"}', "UTF-8"),
        (b'{"model": "\\ud800"}', "not JSON"),
        (b'{"model": 1e999}', "model"),
        (b'{"model": ' + b"9" * 5000 + b"}", "model"),
        (b"[" * 100_000, "levels"),
        (b"[" * 50_000 + b"]" * 50_000, "levels"),
        (nested(500), "levels"),
        (b"[]", "object"),
        (b"null", "object"),
        (b"7", "object"),
        (b"{}", "model"),
        (b'{"model": 7}', "model"),
        (b'{"model": ""}', "model"),
        (b'{"model": "%s"}' % (b"m" * 201), "model"),
        (b'{"model": "add", "parameters": []}', "parameters"),
        (b'{"model": "add", "parameters": null}', "parameters"),
        (b'{"model": "add", "colour": "red"}', "colour"),
        (b'{"model": "add", "delay": -1}', "delay"),
        (b'{"model": "add", "delay": 1e300}', "delay"),
        (b'{"model": "add", "delay": "soon"}', "delay"),
        (b'{"model": "add", "priority": 2147483648}', "priority"),
        (b'{"model": "add", "priority": 1.5}', "priority"),
        (b'{"model": "add", "cost": -0.01}', "cost"),
        (b'{"model": "add", "cost": 1000000.01}', "cost"),
        (b'{"model": "add", "cost": 3e8}', "cost"),
        (b'{"model": "add", "key_ttl": 1e17}', "key_ttl"),
        (b'{"model": "add", "dedupe": "no"}', "dedupe"),
        (b'{"model": "add", "dedupe": 1}', "dedupe"),
        (b'{"model": "add", "cost": "7"}', "cost"),
        (b'{"model": "add", "parameters": {"a": 1e999}}', "range"),
        (b'{"model": "add", "parameters": {"a": ' + b"9" * 5000 + b"}}", "range"),
        (b'{"model": "add", "parameters": {"a": 1}, "user": "x\\u0000"}', "control character"),
        (b'{"model": "add", "parameters": {"a": 1}, "user": "*"}', "every user"),
        (b'{"model": "add", "parameters": {"a": 1}, "queue": ""}', "queue"),
        (b'{"model": "add", "parameters": {"a": 1}, "queue": "\\n"}', "control character"),
        (b'{"model": "add", "parameters": {"a": 1}, "idempotency_key": ""}', "empty"),
        (b'{"model": "add", "parameters": {"a": 1}, "idempotency_key": "%s"}' % (b"k" * 256), "255"),
        (b'{"model": "add", "parameters": {"a": 1}, "idempotency_key": "a\\u0007"}', "control character"),
    ],
)
def test_a_body_that_cannot_work_is_a_400_that_says_why(client: httpx.Client, body: bytes, said: str) -> None:
    refused(client.post("/runs", content=body, headers=JSON), 400, "INVALID_REQUEST", said)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"a": "one"}, "'a'"),
        ({}, "lacks the parameter 'a'"),
        ({"a": 1, "c": 2}, "did you mean"),
        ({"a": 1.5}, "'a'"),
        ({"a": 1, "scenario": "\0"}, "NUL"),
        ({"a": None}, "'a'"),
    ],
)
def test_parameters_that_do_not_fit_are_a_422_that_names_them(
    client: httpx.Client, parameters: dict[str, object], said: str
) -> None:
    if said == "did you mean":
        parameters = {"a": 1, "scenari": "x"}
    refused(client.post("/runs", json={"model": "add", "parameters": parameters}), 422, "INVALID_PARAMETERS", said)


def test_parameters_as_deep_as_allowed_are_taken_and_deeper_ones_are_not(client: httpx.Client) -> None:
    assert client.post("/runs", content=nested(99), headers=JSON).status_code == 201
    refused(client.post("/runs", content=nested(101), headers=JSON), 422, "INVALID_PARAMETERS", "100 levels")


def test_an_unknown_model_is_a_422(client: httpx.Client) -> None:
    refused(client.post("/runs", json={"model": "adr"}), 422, "UNKNOWN_MODEL", "did you mean 'add'?")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "json", ""])
def test_what_is_not_said_to_be_json_is_a_415(client: httpx.Client, kind: str) -> None:
    headers = {"Content-Type": kind} if kind else {}
    for path in ("/runs", "/runs/bulk", f"/runs/{uuid4()}/cancel"):
        answer = client.post(path, content=b'{"model": "add"}', headers=headers)
        refused(answer, 415, "UNSUPPORTED_MEDIA_TYPE")


def test_json_may_be_said_in_more_than_one_way(client: httpx.Client) -> None:
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
        answer = client.post("/runs", content=b'{"model": "echo"}', headers={"Content-Type": kind})
        assert answer.status_code == 201


def test_a_body_that_is_too_large_is_a_413(client: httpx.Client) -> None:
    refused(client.post("/runs", content=b"x" * 200_001, headers=JSON), 413, "BODY_TOO_LARGE")


@pytest.mark.parametrize(
    "run_id",
    ["nonsense", "0", "%00", "%ff", "01980a5e-8d1c-7c3e-9f00-5f2d6a1b3c4d", "g" * 32, "é" * 32, "%2e%2e", "1" * 5000],
)
def test_what_is_no_run_is_a_404(client: httpx.Client, run_id: str) -> None:
    for path in ("", "/result", "/timeline", "/waiting", "/logs", "/events", "/artifacts/a.txt"):
        refused(client.get(f"/runs/{run_id}{path}"), 404, "NOT_FOUND")


def test_an_id_may_be_written_in_capitals_and_without_dashes(client: httpx.Client) -> None:
    run_id = submitted(client, "add", {"a": 1})
    assert client.get(f"/runs/{run_id.replace('-', '').upper()}").json()["run_id"] == run_id


@pytest.mark.parametrize(
    "query",
    [
        "status=DONE",
        "status=PENDING&status=done",
        "limit=0",
        "limit=1001",
        "limit=many",
        "limit=99999999999999999999",
        "cursor=nonsense",
        "cursor=",
        "cursor=%00",
        "since=yesterday",
        "since=2024-01-01T00:00:00",
        "until=99999-01-01T00:00:00Z",
        "since=1777900000",
        "until=1777900000.5",
        "since=-1",
        "since=1e9",
        "until=0",
        "since=20300131",
        "model=%00",
        "user=%0a",
        "queue=%7f",
        "idempotency_key=%1b",
        f"payload_hash={'f' * 1001}",
    ],
)
def test_a_list_that_cannot_be_had_is_a_400(client: httpx.Client, query: str) -> None:
    refused(client.get(f"/runs?{query}"), 400, "INVALID_REQUEST")


@pytest.mark.parametrize("query", ["since=0001-01-01T00:00:00Z", "until=9999-12-31T23:59:59Z", "model=%ff"])
def test_a_list_of_the_unlikely_is_a_list(client: httpx.Client, query: str) -> None:
    answer = client.get(f"/runs?{query}")
    assert (answer.status_code, sorted(answer.json())) == (200, ["next", "runs"])


@pytest.mark.parametrize(
    "query", ["after=nonsense", "after=1", "after=-1-0", f"after={'9' * 19}-0", "after=1-9999999999", "limit=10001"]
)
def test_logs_from_nowhere_are_a_400(client: httpx.Client, query: str) -> None:
    run_id = submitted(client, "add", {"a": 1})
    refused(client.get(f"/runs/{run_id}/logs?{query}"), 400, "INVALID_REQUEST")


@pytest.mark.parametrize("wait", ["-1", "61", "nan", "inf", "soon", ""])
def test_a_wait_of_no_time_is_a_400(client: httpx.Client, wait: str) -> None:
    run_id = submitted(client, "add", {"a": 1})
    refused(client.get(f"/runs/{run_id}?wait={wait}"), 400, "INVALID_REQUEST")


@pytest.mark.parametrize("body", [b'{"why": 7}', b'{"reason": "x"}', b"[]", b'{"why": "%s"}' % (b"w" * 1001)])
def test_a_cancel_that_says_nonsense_is_a_400_and_cancels_nothing(client: httpx.Client, body: bytes) -> None:
    run_id = submitted(client, "add", {"a": 1}, delay=3600)
    refused(client.post(f"/runs/{run_id}/cancel", content=body, headers=JSON), 400, "INVALID_REQUEST")
    assert client.get(f"/runs/{run_id}").json()["status"] == "PENDING"


def test_one_bad_one_of_many_is_a_400_that_says_where(client: httpx.Client) -> None:
    good = {"model": "add", "parameters": {"a": 1}}
    refused(client.post("/runs/bulk", json=[good, {**good, "priority": "high"}]), 400, "INVALID_REQUEST", "[1]")


@pytest.mark.parametrize(("method", "path"), [("DELETE", "/runs"), ("PUT", "/runs/x"), ("GET", "/runs/x/cancel")])
def test_a_method_that_is_not_there_is_a_405(client: httpx.Client, method: str, path: str) -> None:
    refused(client.request(method, path), 405, "METHOD_NOT_ALLOWED")


@pytest.mark.parametrize("path", ["/nothing", "/runs/x/y/z", "//runs//", "/../etc/passwd"])
def test_a_path_that_leads_nowhere_is_a_404(client: httpx.Client, path: str) -> None:
    answer = client.post(path) if path == "//runs//" else client.get(path)
    assert answer.status_code in (400, 404, 405, 415)  # of some, clients make the root, which has a page


@pytest.mark.parametrize(
    "target", [b"/runs/\xff\xfe", b"/runs?model=\xff", b"/runs/%", b"/runs/%zz/result", b"/runs?limit=%"]
)
def test_bytes_that_are_no_text_in_the_target_are_no_failure(service: TestServer, target: bytes) -> None:
    place = urlsplit(service.address)
    assert place.port is not None
    with socket.create_connection(("127.0.0.1", place.port), timeout=20) as line:
        line.sendall(b"GET " + target + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        head = line.makefile("rb").readline()
    assert head.split()[1] in {b"200", b"400", b"404"}


@pytest.mark.parametrize("header", [b"\xff\xfe", b"caf\xc3\xa9", b"\x01", b'"', b'""', b"k" * 300])
def test_a_key_in_the_header_that_cannot_be_one_is_no_failure(client: httpx.Client, header: bytes) -> None:
    answer = client.post("/runs", json={"model": "echo"}, headers={b"Idempotency-Key": header})
    assert answer.status_code in (201, 400)


def test_a_query_that_nobody_reads_is_refused_with_what_was_meant(client: httpx.Client) -> None:
    told = client.get("/runs?stauts=FAILED")
    assert (told.status_code, told.json()["error_code"]) == (400, "INVALID_REQUEST")
    assert "did you mean 'status'?" in told.json()["detail"]
    assert client.get("/api/cloud/jobs?foo=1").status_code == 400
    assert client.get("/runs?status=FAILED&status=SUCCEEDED&limit=3").status_code == 200
    assert client.get("/healthz?probe=1").status_code == 200


def test_what_is_wrong_is_said_in_words_of_the_request(client: httpx.Client) -> None:
    headers = {"Content-Type": "application/json"}
    assert client.post("/runs", headers=headers).json()["detail"] == "the body is missing"
    many = [{"model": "add", "parameters": {}}] * 1001
    assert client.post("/runs/bulk", json=many).json()["detail"].startswith("the body: ")
    for wrong in ("2030-01-31", "1777900000", "1e9"):
        assert "as 2030-01-31T12:00:00Z" in client.get("/runs", params={"since": wrong}).json()["detail"]


def test_a_method_that_is_not_there_is_told_with_those_that_are(client: httpx.Client) -> None:
    for path, allowed in (("/runs", "GET, HEAD, OPTIONS, POST"), ("/runs/x/cancel", "OPTIONS, POST")):
        told = client.patch(path)
        assert (told.status_code, told.headers["allow"]) == (405, allowed)


def test_the_head_of_an_answer_is_that_of_get(client: httpx.Client) -> None:
    for path in ("/runs", "/healthz", "/runs/nothing"):
        head, full = client.head(path), client.get(path)
        assert (head.status_code, head.headers["content-type"]) == (full.status_code, full.headers["content-type"])
        assert head.content == b""


@pytest.mark.parametrize(
    ("method", "path", "body", "valid"),
    [
        ("POST", "/admin/subscriptions", {"url": "http://x", "events": ["RunFinished"]}, "RunChanged, RunCompleted"),
        ("GET", "/runs?status=DONE", None, "CANCELLED, FAILED, PENDING, RUNNING, SUCCEEDED"),
        ("GET", "/api/cloud/jobs?status=DONE", None, "cancelled, completed, failed"),
    ],
)
def test_who_names_something_that_is_not_there_is_told_what_is(
    client: httpx.Client, method: str, path: str, body: object, valid: str
) -> None:
    refused(client.request(method, path, json=body), 400, "INVALID_REQUEST", valid)
