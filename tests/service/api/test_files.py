"""The files that runs leave, as downloads: whole, of a harmless kind, and nothing but what the run named."""

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from support.run_service import app_with_models, ended, submitted
from support.service import TestServer, serve

NAMES = ["a.txt", "page.html", "picture.svg", "table.csv", "sub/ü n.json", "x.tar.gz", "noending", "run.js", "100%.log"]


@pytest.fixture(scope="module", params=["sqlite"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestServer]:
    with (
        app_with_models(request, tmp_path_factory.mktemp("files")) as app,
        serve(app) as service,
        app.working(processes=0),
    ):
        yield service


@pytest.fixture
def client(service: TestServer) -> Iterator[httpx.Client]:
    with service.client() as client:
        yield client


@pytest.fixture(scope="module")
def run_id(service: TestServer) -> str:
    with service.client() as client:
        run_id = submitted(client, "files", {"names": NAMES, "text": "content"})
        assert ended(client, run_id)["status"] == "SUCCEEDED"
    return run_id


def test_every_file_is_listed_with_a_link_that_works(client: httpx.Client, run_id: str) -> None:
    artifacts = client.get(f"/runs/{run_id}").json()["artifacts"]
    assert sorted(each["name"] for each in artifacts) == sorted(NAMES)
    for each in artifacts:
        answer = client.get(each["link"])
        assert (answer.status_code, answer.text) == (200, "content"), each
        assert answer.headers["Content-Length"] == str(each["size"])
        assert answer.headers["ETag"] == f'"{each["digest"]}"'


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.txt", "text/plain; charset=utf-8"),
        ("table.csv", "text/csv; charset=utf-8"),
        ("sub/ü n.json", "application/json"),
        ("x.tar.gz", "application/gzip"),
        ("page.html", "application/octet-stream"),
        ("picture.svg", "application/octet-stream"),
        ("run.js", "application/octet-stream"),
        ("noending", "application/octet-stream"),
        ("100%.log", "text/plain; charset=utf-8"),
    ],
)
def test_a_file_is_of_its_kind_unless_a_browser_would_run_it(
    client: httpx.Client, run_id: str, name: str, kind: str
) -> None:
    links = {each["name"]: each["link"] for each in client.get(f"/runs/{run_id}").json()["artifacts"]}
    answer = client.get(links[name])
    assert answer.headers["Content-Type"] == kind
    assert answer.headers["Content-Disposition"].startswith("attachment; filename=")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "sandbox" in answer.headers["Content-Security-Policy"]


def test_a_name_is_written_for_every_client(client: httpx.Client, run_id: str) -> None:
    answer = client.get(f"/runs/{run_id}/artifacts/sub/ü n.json")
    assert (
        answer.headers["Content-Disposition"] == "attachment; filename=\"_ n.json\"; filename*=UTF-8''%C3%BC%20n.json"
    )


def test_a_file_that_is_known_is_not_sent_again(client: httpx.Client, run_id: str) -> None:
    path = f"/runs/{run_id}/artifacts/a.txt"
    tag = client.get(path).headers["ETag"]
    known = client.get(path, headers={"If-None-Match": tag})
    assert (known.status_code, known.content) == (304, b"")


@pytest.mark.parametrize(
    "name",
    [
        b"../../../../../../etc/passwd",
        b"..%2f..%2f..%2fetc%2fpasswd",
        b"%2e%2e/%2e%2e/etc/passwd",
        b"..%5c..%5cetc",
        b"/etc/passwd",
        b"%2fetc%2fpasswd",
        b"a.txt%00",
        b"a.txt/",
        b"./a.txt",
        b"sub/../a.txt",
        b"sub",
        b"result.json",
        b"A.TXT",
        b"\xff\xfe",
        b"%ff",
        b"a" * 5000,
    ],
)
def test_a_name_with_tricks_finds_nothing(service: TestServer, run_id: str, name: bytes) -> None:
    place = urlsplit(service.address)
    assert place.port is not None
    with socket.create_connection(("127.0.0.1", place.port), timeout=20) as line:
        target = f"/runs/{run_id}/artifacts/".encode() + name
        line.sendall(b"GET " + target + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        answer = line.makefile("rb").read()
    status = answer.split(None, 2)[1]
    if name == b"a.txt/":  # the slash at the end is nobody's
        assert status == b"200"
    else:
        assert status in {b"404", b"400"}
        assert b"root:" not in answer


def test_a_large_file_comes_whole_while_others_are_answered(client: httpx.Client) -> None:
    run_id = submitted(client, "files", {"names": ["large.bin"], "text": "ä" * 400_000})
    ended(client, run_id)
    with client.stream("GET", f"/runs/{run_id}/artifacts/large.bin") as answer:
        pieces = answer.iter_bytes()
        first = next(pieces)
        assert client.get("/models").status_code == 200
        whole = first + b"".join(pieces)
    assert whole == "ä".encode() * 400_000


def test_a_run_without_a_result_has_no_files(client: httpx.Client) -> None:
    run_id = submitted(client, "files", {"names": ["a.txt"]}, delay=3600)
    answer = client.get(f"/runs/{run_id}/artifacts/a.txt")
    assert (answer.status_code, answer.json()["error_code"]) == (409, "RUN_NOT_COMPLETE")


def test_a_file_that_the_store_has_lost_is_a_503(service: TestServer, client: httpx.Client) -> None:
    run_id = submitted(client, "files", {"names": ["a.txt"]})
    ended(client, run_id)
    service.app.results.remove(run_id)
    answer = client.get(f"/runs/{run_id}/artifacts/a.txt")
    assert (answer.status_code, answer.json()["error_code"]) == (503, "RESULT_STORE_UNAVAILABLE")
