"""Without a key the same payload finds the run that is under way, by whichever entrance it comes; and tries are one."""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from semel import App, KeyReused, Quota, Run
from semel.cli import main as semel_command
from semel.client import AsyncClient, Client
from support.pages import Browser
from support.service import TestServer, make_app, serve

ME = "local"
"""Who submits on a server without tokens."""


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestServer]:
    folder = tmp_path_factory.mktemp("dedupe")
    url = f"sqlite:///{folder / 'semel.db'}"
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_server").database()
    app = make_app(url, folder)
    app.model("train", isolation="thread")(_train)
    with serve(app) as service:
        yield service
    app.close()


def _train(number: int = 0) -> None: ...


@pytest.fixture
def app(service: TestServer) -> App:
    return service.app


_numbers = itertools.count(1)


@pytest.fixture
def payload() -> dict[str, Any]:
    """Parameters that no other test has."""
    return {"number": next(_numbers)}


def by_app(service: TestServer, payload: dict[str, Any]) -> str:
    return service.app.submit("train", payload, user=ME).id


def by_app_in_bulk(service: TestServer, payload: dict[str, Any]) -> str:
    (run,) = service.app.submit_many([{"model": "train", "parameters": payload, "user": ME}])
    assert isinstance(run, Run)
    return run.id


def by_http(service: TestServer, payload: dict[str, Any]) -> str:
    run_id: str = httpx.post(
        f"{service.address}/runs", json={"model": "train", "parameters": payload}, timeout=60
    ).json()["run_id"]
    return run_id


def by_http_in_bulk(service: TestServer, payload: dict[str, Any]) -> str:
    sent = [{"model": "train", "parameters": payload}]
    run_id: str = httpx.post(f"{service.address}/runs/bulk", json=sent, timeout=60).json()[0]["run"]["run_id"]
    return run_id


def by_client(service: TestServer, payload: dict[str, Any]) -> str:
    with Client(service.address) as client:
        return client.submit("train", payload).run_id


def by_client_in_bulk(service: TestServer, payload: dict[str, Any]) -> str:
    with Client(service.address) as client:
        (run,) = client.submit_many([{"model": "train", "parameters": payload}])
    run_id: str = run.run_id  # type: ignore[union-attr]
    return run_id


def by_async_client(service: TestServer, payload: dict[str, Any]) -> str:
    async def main() -> str:
        async with AsyncClient(service.address) as client:
            return (await client.submit("train", payload)).run_id

    return asyncio.run(main())


def by_form(service: TestServer, payload: dict[str, Any]) -> str:
    with service.client(follow_redirects=True) as client:
        somebody = Browser(client)
        page = somebody.open("/ui/submit", params={"model": "train"})
        form = {"model": "train", "key": page.one("input", id="key")["value"], "dedupe": "yes"}
        (number,) = [each["name"] for each in page.all("input") if (each.get("name") or "").endswith(".number")]
        sent = somebody.send("/ui/submit", {**form, number: str(payload["number"])})
    return sent.path.rpartition("/")[2]


ENTRANCES = [by_app, by_app_in_bulk, by_http, by_http_in_bulk, by_client, by_client_in_bulk, by_async_client, by_form]


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_the_same_payload_without_a_key_finds_the_run_under_way(
    service: TestServer, app: App, payload: dict[str, Any], entrance: Callable[[TestServer, dict[str, Any]], str]
) -> None:
    first = app.submit("train", payload, user=ME)
    assert [entrance(service, payload) for _ in range(2)] == [first.id] * 2
    app.cancel(first.id)
    new = entrance(service, payload)
    assert new != first.id, "what is over is not found"
    assert app.submit("train", payload, user=ME).id == new, "nor is it only found by itself"


def test_the_command_line_does_so_too(
    service: TestServer, app: App, payload: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def submitted(*options: str) -> str:
        line = ["submit", "train", f"number={payload['number']}", *options, "--server", service.address]
        assert semel_command(line) == 0
        return capsys.readouterr().out.strip()

    first = app.submit("train", payload, user=ME)
    assert submitted() == submitted() == first.id
    apart = submitted("--no-dedupe")
    named = submitted("--key", "mine")
    assert len({first.id, apart, named}) == 3
    assert submitted("--key", "yours", "--dedupe") == first.id


def test_to_have_another_run_say_so(service: TestServer, app: App, payload: dict[str, Any]) -> None:
    first = app.submit("train", payload, user=ME)
    with Client(service.address) as client:
        assert client.submit("train", payload, dedupe=False).run_id != first.id
        assert client.submit("train", payload, idempotency_key="own").run_id != first.id


def test_a_key_names_the_run_that_its_payload_found(app: App, payload: dict[str, Any]) -> None:
    """So that its second try, after the run is over, makes none."""
    first = app.submit("train", payload)
    tried = app.submit("train", payload, idempotency_key=f"try-{payload}", dedupe=True)
    assert (tried.id, tried.replayed) == (first.id, True)
    app.cancel(first.id)
    again = app.submit("train", payload, idempotency_key=f"try-{payload}", dedupe=True)
    assert (again.id, again.replayed) == (first.id, True)
    with pytest.raises(KeyReused, match="try-"):
        app.submit("train", {"number": -payload["number"]}, idempotency_key=f"try-{payload}", dedupe=True)
    assert not app.submit("train", {"number": -payload["number"]}).replayed, "nothing of the refused one is left"


def test_a_key_names_the_run_that_it_made_with_its_payload(app: App, payload: dict[str, Any]) -> None:
    key = f"made-{payload}"
    first = app.submit("train", payload, idempotency_key=key, dedupe=True)
    assert (first.replayed, first.idempotency_key) == (False, key)
    assert app.submit("train", payload).id == first.id
    app.cancel(first.id)
    assert app.submit("train", payload, idempotency_key=key, dedupe=True).id == first.id


def test_tries_at_the_same_time_are_one(app: App, payload: dict[str, Any]) -> None:
    """Two keys, four tries of each, and others without a key: one run."""

    def submit(number: int) -> str:
        key = {0: None, 1: f"a-{payload}", 2: f"b-{payload}"}[number % 3]
        return app.submit("train", payload, idempotency_key=key, dedupe=True).id

    with ThreadPoolExecutor(12) as threads:
        assert len(set(threads.map(submit, range(12)))) == 1


def test_in_one_batch_too(app: App, payload: dict[str, Any]) -> None:
    shared = {"model": "train", "dedupe": True}
    other = {"number": -payload["number"]}
    key = f"batch-{payload}"
    first, second, third, wrong, plain = app.submit_many(
        [
            {**shared, "parameters": payload, "idempotency_key": key},
            {**shared, "parameters": payload, "idempotency_key": key},
            {**shared, "parameters": payload, "idempotency_key": f"{key}-2"},
            {**shared, "parameters": other, "idempotency_key": key},
            {**shared, "parameters": other},
        ]
    )
    assert isinstance(wrong, KeyReused)
    runs = [each for each in (first, second, third, plain) if isinstance(each, Run)]
    assert [each.replayed for each in runs] == [False, True, True, False]
    assert len({each.id for each in runs[:3]}) == 1


def test_who_has_no_key_is_told_of_no_keys_end(app: App, payload: dict[str, Any]) -> None:
    keyed = {"model": "train", "parameters": payload, "idempotency_key": f"end-{payload}", "dedupe": True}
    first, plain = app.submit_many([keyed, {"model": "train", "parameters": payload}])
    assert isinstance(first, Run)
    assert isinstance(plain, Run)
    assert (plain.id, plain.replayed, plain.key_expires_us) == (first.id, True, None)
    assert first.key_expires_us is not None


def test_what_is_found_by_its_payload_meets_no_quota(app: App, payload: dict[str, Any]) -> None:
    app.set_quota("quota", Quota(max_concurrent=1))
    first = app.submit("train", payload, user="quota")
    found = app.submit("train", payload, user="quota", idempotency_key=f"quota-{payload}", dedupe=True)
    assert (found.id, app.usage("quota").concurrent) == (first.id, 1)


def test_a_lost_answer_makes_no_second_run(service: TestServer, app: App, payload: dict[str, Any]) -> None:
    """The client sends again what the server has stored, run and ended already."""
    sent: list[bytes] = []

    class Losing(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            answer = super().handle_request(request)
            sent.append(answer.read())
            if len(sent) == 1:
                app.cancel(app.runs(limit=1).runs[0].id)
                raise httpx.ReadError("the line broke")
            return answer

    with Client(service.address, transport=Losing(), backoff=0.01) as client:
        run = client.submit("train", payload)
    assert (run.replayed, run.status, len(sent)) == (True, "CANCELLED", 2)


def test_a_retry_whose_answer_was_lost_is_one_retry(service: TestServer, app: App, payload: dict[str, Any]) -> None:
    """The new run was stored, and it ended, before the client asked again."""
    failed = app.submit("train", payload, user=ME)
    app.cancel(failed.id)
    sent: list[bytes] = []

    class Losing(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            answer = super().handle_request(request)
            sent.append(answer.read())
            if len(sent) == 1:
                app.cancel(app.runs(limit=1).runs[0].id)
                raise httpx.ReadError("the line broke")
            return answer

    with Client(service.address, transport=Losing(), backoff=0.01) as client:
        again = client.retry(failed.id)
    assert (again.retry_of, again.status, again.replayed) == (failed.id, "CANCELLED", True)
    assert len([run for run in app.runs().runs if run.retry_of == failed.id]) == 1


def test_a_retry_finds_the_one_under_way_whoever_asks_and_with_whatever_key(
    service: TestServer, app: App, payload: dict[str, Any]
) -> None:
    failed = app.submit("train", payload, user=ME)
    app.cancel(failed.id)
    with Client(service.address) as client, Client(service.address) as other:
        first = client.retry(failed.id)
        assert not first.replayed
        assert {other.retry(failed.id).run_id, app.retry(failed.id).id} == {first.run_id}
        key = f"retry-{payload}"
        assert app.retry(failed.id, idempotency_key=key).id == first.run_id
        app.cancel(first.run_id)
        assert app.retry(failed.id, idempotency_key=key).id == first.run_id, "the key names it, whatever became of it"
        assert client.retry(failed.id).run_id != first.run_id
