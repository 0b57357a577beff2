"""Anything that cannot work is refused with a problem that says why, and nothing is stored: one table, one property."""

import json
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest
from sqlalchemy import Engine, create_engine, func, select

from semel.db.schema import metadata
from semel.service import Settings
from support.jobs import SUBMIT, write_config
from support.run_service import app_with_models, submitted
from support.service import TestServer, serve

JSON = {"Content-Type": "application/json"}
GONE = "01980a5e-8d1c-7c3e-9f00-5f2d6a1b3c4d"
BACKGROUND = {"semel_workers", "semel_leaders", "semel_removals", "semel_fence_counter"} | {
    "semel_manifests",
    "semel_worker_manifests",
}
"""What the service writes by itself."""


class Bad(NamedTuple):
    """A request that cannot work, and how it is refused; `{run}` in a path is a run that waits."""

    method: str
    path: str
    body: bytes | None
    status: int
    code: str
    said: str = ""
    kind: str = "application/json"


def rows(where: str, said: dict[Any, str] | list[Any], status: int = 400, code: str = "INVALID_REQUEST") -> list[Bad]:
    """Bodies, as bytes or as what is written as JSON, each with a part of its refusal."""
    method, path = where.split()
    pairs = said.items() if isinstance(said, dict) else ((body, "") for body in said)
    return [Bad(method, path, as_bytes(body), status, code, text) for body, text in pairs]


def as_bytes(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def asked(where: str, status: int = 400, code: str = "INVALID_REQUEST", said: str = "") -> Bad:
    method, path = where.split(" ", 1)
    return Bad(method, path, None, status, code, said)


def nested(levels: int) -> bytes:
    return b'{"model": "echo", "parameters": {"x": ' + b"[" * levels + b"]" * levels + b"}}"


def add(**more: Any) -> bytes:
    return as_bytes({"model": "add", "parameters": {"a": 1}, **more})


def with_config(**more: Any) -> bytes:
    return as_bytes({"config_name_to_load": "adding", **more})


RUNS = [
    *rows(
        "POST /runs",
        {
            b"": "the body is missing",
            b"{": "not JSON",
            b"nonsense": "not JSON",
            b'{"model": NaN}': "not JSON",
            b'{"model": "\xff"}': "UTF-8",
            b'{"model": "\\ud800"}': "not JSON",
            b'{"model": 1e999}': "model",
            b'{"model": ' + b"9" * 5000 + b"}": "model",
            b"[" * 100_000: "levels",
            b"[" * 50_000 + b"]" * 50_000: "levels",
            nested(500): "levels",
            b"[]": "object",
            b"null": "object",
            b"7": "object",
            b"{}": "model",
            b'{"model": 7}': "model",
            b'{"model": ""}': "model",
            b'{"model": "%s"}' % (b"m" * 201): "model",
            b'{"model": "add", "parameters": []}': "parameters",
            b'{"model": "add", "parameters": null}': "parameters",
            add(colour="red"): "colour",
            add(delay=-1): "delay",
            add(delay=1e300): "delay",
            add(delay="soon"): "delay",
            add(priority=2147483648): "priority",
            add(priority=1.5): "priority",
            add(cost=-0.01): "cost",
            add(cost=1000000.01): "cost",
            add(cost=3e8): "cost",
            add(cost="7"): "cost",
            add(key_ttl=1e17): "key_ttl",
            add(dedupe="no"): "dedupe",
            add(dedupe=1): "dedupe",
            b'{"model": "add", "parameters": {"a": 1e999}}': "range",
            b'{"model": "add", "parameters": {"a": ' + b"9" * 5000 + b"}}": "range",
            add(user="x\0"): "control character",
            add(user="*"): "every user",
            add(queue=""): "queue",
            add(queue="\n"): "control character",
            add(idempotency_key=""): "empty",
            add(idempotency_key="k" * 256): "255",
            add(idempotency_key="a\7"): "control character",
        },
    ),
    *rows(
        "POST /runs",
        {
            add(parameters={"a": "one"}): "'a'",
            add(parameters={}): "lacks the parameter 'a'",
            add(parameters={"a": 1, "scenari": "x"}): "did you mean",
            add(parameters={"a": 1.5}): "'a'",
            add(parameters={"a": 1, "scenario": "\0"}): "NUL",
            add(parameters={"a": None}): "'a'",
            nested(101): "100 levels",
        },
        422,
        "INVALID_PARAMETERS",
    ),
    *rows("POST /runs", {b'{"model": "adr"}': "did you mean 'add'?"}, 422, "UNKNOWN_MODEL"),
    *rows("POST /runs", [b"x" * 200_001], 413, "BODY_TOO_LARGE"),
    *rows(
        "POST /runs/bulk",
        {
            b"[%s, %s]" % (add(), add(priority="high")): "[1]",
            b"[" + b",".join([b'{"model": "add", "parameters": {}}'] * 1001) + b"]": "the body: ",
        },
    ),
    *rows("POST /runs/{run}/cancel", [{"why": 7}, {"reason": "x"}, [], {"why": "w" * 1001}]),
    *(
        Bad("POST", path, b'{"model": "add"}', 415, "UNSUPPORTED_MEDIA_TYPE", "", kind)
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "json", "")
        for path in ("/runs", "/runs/bulk", f"/runs/{GONE}/cancel")
    ),
    *(
        asked(f"GET /runs/{run}{path}", 404, "NOT_FOUND")
        for run in ("nonsense", "0", "%00", "%ff", GONE, "g" * 32, "é" * 32, "%2e%2e", "1" * 5000)
        for path in ("", "/result", "/timeline", "/waiting", "/logs", "/events", "/artifacts/a.txt")
    ),
    *(
        asked(f"GET /runs?{query}")
        for query in (
            *("status=PENDING&status=done", "limit=0", "limit=1001", "limit=many", "limit=99999999999999999999"),
            *("cursor=nonsense", "cursor=", "cursor=%00", "since=yesterday", "since=2024-01-01T00:00:00"),
            *("until=99999-01-01T00:00:00Z", "until=1777900000.5", "since=-1", "until=0", "since=20300131"),
            *("model=%00", "user=%0a", "queue=%7f", "idempotency_key=%1b", f"payload_hash={'f' * 1001}"),
        )
    ),
    *(
        asked(f"GET /runs?since={wrong}", said="as 2030-01-31T12:00:00Z")
        for wrong in ("2030-01-31", "1777900000", "1e9")
    ),
    asked("GET /runs?status=DONE", said="CANCELLED, FAILED, PENDING, RUNNING, SUCCEEDED"),
    asked("GET /runs?stauts=FAILED", said="did you mean 'status'?"),
    *(
        asked(f"GET /runs/{{run}}/logs?{query}")
        for query in (
            "after=nonsense",
            "after=1",
            "after=-1-0",
            f"after={'9' * 19}-0",
            "after=1-9999999999",
            "limit=10001",
        )
    ),
    *(asked(f"GET /runs/{{run}}?wait={wait}") for wait in ("-1", "61", "nan", "inf", "soon", "")),
    *(asked(where, 405, "METHOD_NOT_ALLOWED") for where in ("DELETE /runs", "PUT /runs/x", "GET /runs/x/cancel")),
    *(asked(f"GET {path}", 404, "NOT_FOUND") for path in ("/nothing", "/runs/x/y/z")),
]
JOBS = [
    *rows(
        f"POST {SUBMIT}",
        {
            b"": "",
            b"{": "",
            b"[]": "",
            b"{}": "",
            b'{"config_name_to_load": 5}': "",
            b'{"config_name_to_load": null}': "",
            with_config(idempotency_key=5): "",
            with_config(tracker_run_name=["x"]): "",
            with_config(tracker_run_name="nul\0"): "",
            with_config(unknown=1): "",
            with_config(ttl_hours=0, idempotency_key="k"): "ttl_hours is 0, so the key would expire at once",
            with_config(ttl_hours=-1, idempotency_key="k"): "ttl_hours must be a number from 0 to 87,840, not -1",
            with_config(ttl_hours=24): "ttl_hours sets how long a key is kept, but there is no key",
            with_config(ttl_hour=24): "unknown field `ttl_hour`; did you mean 'ttl_hours'?",
            with_config(config="adding"): "unknown field `config`; there are: config_name_to_load, idempotency_key,",
        },
    ),
    asked("GET /api/cloud/jobs?foo=1"),
    asked("GET /api/cloud/jobs?status=DONE", said="cancelled, completed, failed"),
    *rows(
        "PUT /api/cloud/configs/new",
        [
            *({"model": 5}, {"model": ""}, {"colour": "red"}, {"cost": -1}, {"priority": 2**40}),
            *({"parameters": []}, {"parameters": {"x": "\0"}}, []),
        ],
    ),
]
ADMIN = [
    *rows(
        "POST /admin/tokens",
        [
            *({}, {"user": ""}, {"user": "*"}, {"user": "a\0b"}, {"user": "x" * 201}, {"user": "a", "role": "god"}),
            *(
                {"user": "a", "ttl": 0},
                {"user": "a", "ttl": -1},
                {"user": "a", "ttl": 1e99},
                {"user": "a", "ttl": "soon"},
            ),
            *({"user": "a", "tenant": "x" * 201}, {"user": "a", "admin": True}, {"user": 7}, [], None),
        ],
    ),
    *(
        asked(f"GET /admin/tokens?after={after}")
        for after in ("x", "1-", "-", "9" * 40 + "-" + "0" * 16, "1-%00", "²-" + "0" * 16)
    ),
    *rows(
        "PUT /admin/quotas/jack",
        [
            *({"max_concurrent": -1}, {"max_concurrent": 1.5}, {"max_concurrent": True}, {"per_day": 2**31}),
            *({"per_hour": 10**30}, {"cost_daily": -0.01}, {"cost_daily": 1e300}, {"action": "shout"}, {"warn_at": 0}),
            *({"warn_at": 1.1}, {"max": 3}, [], "5"),
        ],
    ),
    *rows(
        "POST /admin/subscriptions",
        {
            b"{}": "",
            b'{"url": 7}': "",
            b'{"url": "http://127.0.0.1/", "events": []}': "",
            b'{"url": "http://127.0.0.1/", "events": ["RunVanished"]}': "RunChanged, RunCompleted",
            b'{"url": "http://127.0.0.1/", "secret": "mine"}': "",
            b'{"url": "http://127.0.0.1/%s"}' % (b"x" * 3000): "",
            b'{"url": "http://\\ud800/"}': "",
        },
    ),
    *rows("POST /admin/subscriptions", [{"url": "ftp://127.0.0.1/"}], 422, "WEBHOOK_REFUSED"),
    *rows("POST /admin/subscriptions", [{"url": "http://user:pw@127.0.0.1/"}], 422, "WEBHOOK_REFUSED"),
    *(
        asked(where, 404, "NOT_FOUND")
        for where in (
            *("GET /admin/subscriptions/nothing", "GET /admin/subscriptions/%00", "GET /admin/subscriptions/stream"),
            *(f"DELETE /admin/subscriptions/{GONE}", f"POST /admin/subscriptions/{GONE}/test"),
            *(f"POST /admin/deliveries/nothing/{GONE}/1/resend", "POST /admin/deliveries/stream/nothing/1/resend"),
        )
    ),
    *(
        asked(where)
        for where in (
            *(
                "GET /admin/deliveries?state=lost",
                "GET /admin/deliveries?limit=0",
                "GET /admin/deliveries?after=nonsense",
            ),
            f"GET /admin/deliveries?after=1.{GONE}.1.nothing",
            f"GET /admin/deliveries?after=9999999999999999999.{GONE}.1.stream",
            f"POST /admin/deliveries/stream/{GONE}/0/resend",
            f"POST /admin/deliveries/stream/{GONE}/99999999999/resend",
        )
    ),
]


class Refusing(NamedTuple):
    """A service, a run of it that waits, and its database."""

    service: TestServer
    client: httpx.Client
    run_id: str
    database: Engine

    def stored(self) -> dict[str, int]:
        """How many rows there are of everything that a request can write."""
        with self.database.connect() as connection:
            names = [name for name in metadata.tables if name not in BACKGROUND]
            counts = [select(func.count()).select_from(metadata.tables[name]).scalar_subquery() for name in names]
            return dict(zip(names, connection.execute(select(*counts)).one(), strict=True))


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def refusing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Refusing]:
    folder = tmp_path_factory.mktemp("bad")
    write_config(folder / "configs", "adding", model="add", parameters={"a": 1})
    with (
        app_with_models(request, folder) as app,
        serve(app, Settings(max_body=200_000, private_webhooks=True, configs=str(folder / "configs"))) as service,
        service.client() as client,
    ):
        run_id = submitted(client, "add", {"a": 1}, delay=3600)
        database = create_engine(app.url.replace("postgresql:", "postgresql+psycopg:"))
        yield Refusing(service, client, run_id, database)
        database.dispose()


@pytest.fixture
def client(refusing: Refusing) -> httpx.Client:
    return refusing.client


@pytest.fixture
def service(refusing: Refusing) -> TestServer:
    return refusing.service


def in_short(bad: Bad) -> str:
    body = "" if bad.body is None else f" {ascii(bad.body)[2:-1]}"
    return f"{bad.method} {bad.path}{body}"[:70].replace("[", "(").replace("]", ")")


@pytest.mark.parametrize("bad", [*RUNS, *JOBS, *ADMIN], ids=in_short)
def test_what_cannot_work_is_a_problem_that_says_why_and_stores_nothing(refusing: Refusing, bad: Bad) -> None:
    before = refusing.stored()
    headers = {} if bad.body is None or not bad.kind else {"Content-Type": bad.kind}
    path = bad.path.replace("{run}", refusing.run_id)
    answer = refusing.client.request(bad.method, path, content=bad.body, headers=headers)
    assert answer.status_code == bad.status, answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    problem = answer.json()
    assert (problem["status"], problem["error_code"]) == (bad.status, bad.code)
    assert bad.said in problem["detail"]
    assert problem["detail"]
    assert "user:pw" not in answer.text
    assert refusing.stored() == before
    assert refusing.client.get(f"/runs/{refusing.run_id}").json()["status"] == "PENDING"


# -- what is odd, and works ------------------------------------------------------------------------------------------


def test_parameters_as_deep_as_allowed_are_taken(client: httpx.Client) -> None:
    assert client.post("/runs", content=nested(99), headers=JSON).status_code == 201


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"])
def test_json_may_be_said_in_more_than_one_way(client: httpx.Client, kind: str) -> None:
    answer = client.post("/runs", content=b'{"model": "echo"}', headers={"Content-Type": kind})
    assert answer.status_code == 201


def test_an_id_may_be_written_in_capitals_and_without_dashes(refusing: Refusing) -> None:
    run_id = refusing.run_id
    assert refusing.client.get(f"/runs/{run_id.replace('-', '').upper()}").json()["run_id"] == run_id


@pytest.mark.parametrize(
    "path",
    [
        "/runs?since=0001-01-01T00:00:00Z",
        "/runs?until=9999-12-31T23:59:59Z",
        "/runs?model=%ff",
        "/runs?status=FAILED&status=SUCCEEDED&limit=3",
        "/healthz?probe=1",
        f"/admin/deliveries?after=1.{GONE}.1.stream",
        "/admin/deliveries?subscription=nothing",
    ],
)
def test_a_question_for_the_unlikely_is_answered(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    if path.startswith("/runs"):
        assert sorted(answer.json()) == ["next", "runs"]


@pytest.mark.parametrize("path", ["//runs//", "/../etc/passwd"])
def test_a_path_that_leads_nowhere_is_no_failure(client: httpx.Client, path: str) -> None:
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


@pytest.mark.parametrize(
    ("path", "allowed"), [("/runs", "GET, HEAD, OPTIONS, POST"), ("/runs/x/cancel", "OPTIONS, POST")]
)
def test_a_method_that_is_not_there_is_told_with_those_that_are(client: httpx.Client, path: str, allowed: str) -> None:
    told = client.patch(path)
    assert (told.status_code, told.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize("path", ["/runs", "/healthz", "/runs/nothing"])
def test_the_head_of_an_answer_is_that_of_get(client: httpx.Client, path: str) -> None:
    head, full = client.head(path), client.get(path)
    assert (head.status_code, head.headers["content-type"]) == (full.status_code, full.headers["content-type"])
    assert head.content == b""
