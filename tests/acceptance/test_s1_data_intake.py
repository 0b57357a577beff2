"""S1.32, the Data Intake service: both forms of it as real processes, started by their one command, driven over HTTP.

To stop a service at a chosen moment, its Python starts with a ``sitecustomize`` of ours: a request waits before or
after its commit for as long as the test's file of that name is there. The services themselves know nothing of it.
"""

import asyncio
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any, Literal

import httpx
import pytest
from sqlalchemy import create_engine, make_url, text

from semel import Once, Record, Response
from support.databases import StoreUrls, store_urls
from support.servers import free_port

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "data_intake"
ITEMS = "/api/v1/items"
PATIENCE = 60
LEASE = 3

Moment = Literal["before_commit", "after_commit"]
STOPS = dedent("""\
    import asyncio, os, time
    from pathlib import Path
    from sqlalchemy import event
    from sqlalchemy.orm import Session
    from sqlalchemy.util import await_only

    def pause():
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            time.sleep(0.01)
        else:
            await_only(asyncio.sleep(0.01))

    def stop_at(moment):
        place = Path(os.environ["STOPS"], moment)

        def stop(session):
            while place.exists():
                place.with_suffix(".reached").touch()
                pause()

        event.listen(Session, moment, stop)

    stop_at("before_commit")
    stop_at("after_commit")
""")


class Service:
    """One of the two services, on one database."""

    def __init__(self, name: str, url: str | None, folder: Path) -> None:
        self.url = url or f"sqlite:///{folder / 'data_intake.db'}"
        self._folder = folder
        self._stops = folder / "stops"
        self._stops.mkdir()
        (self._stops / "sitecustomize.py").write_text(STOPS)
        port = free_port()
        self._argv = command_of(name, port)
        path = os.pathsep.join(filter(None, (str(self._stops), os.environ.get("PYTHONPATH"))))
        self._env = {**os.environ, "PYTHONPATH": path, "STOPS": str(self._stops)}
        self._env |= {"DATA_INTAKE_LEASE": str(LEASE), "PYTHONUNBUFFERED": "1"}
        if url is not None:
            self._env["DATA_INTAKE_URL"] = url
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE)
        address = make_url(self.url)
        driver = {"sqlite": "sqlite+pysqlite", "postgresql": "postgresql+psycopg"}[address.get_backend_name()]
        self._engine = create_engine(address.set(drivername=driver))
        self._keys = Once(self.url, collect=False)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._argv, cwd=self._folder, env=self._env, stdout=log, stderr=log, start_new_session=True
            )
        self.until(self._answers, "answer")

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL to all its processes."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> int:
        """SIGTERM; the code it ends with."""
        assert self._process is not None
        self._process.terminate()
        code = self._process.wait(PATIENCE)
        self._process = None
        return code

    def close(self) -> None:
        self.client.close()
        self._keys.close()
        self._engine.dispose()
        self.kill()

    def post(self, key: str | None, item: Any) -> httpx.Response:
        return self.client.post(ITEMS, json=item, headers={} if key is None else {"Idempotency-Key": key})

    @contextmanager
    def held(self, moment: Moment, key: str, item: Any) -> Iterator["Future[httpx.Response]"]:
        """A request that has got so far and waits there; at the end of the block it goes on."""
        place, reached = self._stops / moment, self._stops / f"{moment}.reached"
        reached.unlink(missing_ok=True)
        place.touch()
        with ThreadPoolExecutor(1) as other:
            try:
                answer = other.submit(self.post, key, item)
                self.until(lambda: reached.exists() or answer.done(), f"come to {moment}")
                yield answer
            finally:
                place.unlink()

    def items(self, sku: str) -> list[int]:
        """The ids of the items that exist, whatever the service says."""
        with self._engine.connect() as conn:
            return list(conn.scalars(text("SELECT id FROM items WHERE sku = :sku"), {"sku": sku}))

    def record(self, key: str) -> Record | None:
        return self._keys.get(key, scope=f"POST {ITEMS}")

    def log(self) -> str:
        return (self._folder / "log").read_text()

    def until(self, reached: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not reached():
            if not self.runs or time.monotonic() > deadline:
                pytest.fail(f"the service did not {what}:\n{self.log()}")
            time.sleep(0.02)  # another process gets there in its own time

    def _answers(self) -> bool:
        try:
            return self.client.get("/stats").status_code == 200
        except httpx.TransportError:
            return False


def command_of(name: str, port: int) -> list[str]:
    """The command at the top of the service's file, with a port of ours and from any directory."""
    wanted = f"python examples/data_intake/{name}_service.py --port 8000"
    assert wanted in (EXAMPLE / f"{name}_service.py").read_text().splitlines()
    assert wanted in (EXAMPLE / "README.md").read_text().splitlines()
    _, script, option, _ = wanted.split()
    return [sys.executable, str(ROOT / script), option, str(port)]


@pytest.fixture(scope="module")
def urls(request: pytest.FixtureRequest) -> Iterator[StoreUrls]:
    with store_urls(request) as urls:
        yield urls


@pytest.fixture(scope="module")
def running(urls: StoreUrls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], Service]]:
    """A service by name and database, started when it is asked for and does not run. On PostgreSQL they share one."""
    services: dict[tuple[str, str], Service] = {}
    with ExitStack() as cleanup:

        def service_of(name: str, kind: str) -> Service:
            if (name, kind) not in services:
                folder = tmp_path_factory.mktemp(f"{name}-{kind}")
                services[name, kind] = Service(name, urls[kind] if kind == "postgres" else None, folder)
                cleanup.callback(services[name, kind].close)
            service = services[name, kind]
            if not service.runs:
                service.start()
            return service

        yield service_of


@pytest.fixture(params=["fastapi", "flask"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["sqlite", "postgres"])
def service(name: str, request: pytest.FixtureRequest, running: Callable[[str, str], Service]) -> Service:
    return running(name, request.param)


@pytest.fixture
def key() -> str:
    """A key that no other test uses; also a SKU."""
    return f"key-{uuid.uuid4().hex}"


def item_of(sku: str, title: str = "Sample Item") -> dict[str, str]:
    return {"sku": sku, "title": title}


def body_of(answer: httpx.Response) -> tuple[int, Any]:
    return answer.status_code, answer.json()


def test_s1_32_the_four_scenarios_of_the_document(service: Service, key: str) -> None:
    first = service.post(key, item_of(key))
    assert first.status_code == 201
    assert first.headers["content-type"] == "application/json"
    created = first.json()
    assert {name: created[name] for name in ("sku", "title")} == item_of(key)
    assert body_of(service.client.get(f"{ITEMS}/{created['id']}")) == (200, created)
    assert service.client.get(first.headers["location"]).json() == created
    assert "idempotent-replayed" not in first.headers

    again = service.post(key, item_of(key))
    assert (again.status_code, again.content) == (201, first.content)
    assert again.headers["location"] == first.headers["location"]
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["idempotency-expires"] == first.headers["idempotency-expires"]

    other = service.post(key, item_of("ITEM-002", "Different Item"))
    assert body_of(other) == (
        409,
        {
            "detail": "Idempotency key already used with different request body",
            "error_code": "IDEMPOTENCY_KEY_CONFLICT",
            "idempotency_key": key,
        },
    )

    race = f"race-{key}"
    with service.held("before_commit", race, item_of(race)) as first_of_two:
        second = service.post(race, item_of(race))
        assert body_of(second) == (
            409,
            {
                "detail": "Request with this idempotency key is already being processed",
                "error_code": "IDEMPOTENCY_KEY_PROCESSING",
                "idempotency_key": race,
            },
        )
        assert 1 <= int(second.headers["retry-after"]) <= LEASE
    assert first_of_two.result().status_code == 201
    assert service.items(key) == [created["id"]]
    assert service.items(race) == [first_of_two.result().json()["id"]]


@pytest.mark.parametrize("bad", ["invalid@key#123", "", "k" * 256])
def test_s1_32_what_is_no_key_is_refused_and_nothing_is_created(service: Service, key: str, bad: str) -> None:
    assert body_of(service.post(bad, item_of(key))) == (
        400,
        {
            "detail": "Invalid idempotency key format. Key must be 1-255 characters long and contain only letters, "
            "numbers, hyphens, and underscores",
            "error_code": "INVALID_IDEMPOTENCY_KEY",
            "idempotency_key": bad[:255],
        },
    )
    assert service.items(key) == []


def test_s1_32_without_a_key_every_post_creates_an_item(service: Service, key: str) -> None:
    answers = [service.post(None, item_of(key)) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert sorted(answer.json()["id"] for answer in answers) == sorted(service.items(key))
    assert not any(name.startswith("idempoten") for answer in answers for name in answer.headers)


def test_s1_32_a_refused_item_gives_the_key_back(service: Service, key: str) -> None:
    """The error is not the key's outcome: the corrected request may have the same key."""
    for wrong in ({"sku": key}, item_of(key, ""), [key]):
        assert service.post(key, wrong).status_code == 422
        assert service.record(key) is None
    assert service.client.get(f"{ITEMS}/999999999").status_code == 404
    assert service.post(key, item_of(key)).status_code == 201
    assert len(service.items(key)) == 1


def test_s1_32_twenty_duplicates_at_once_create_one_item(service: Service, key: str) -> None:
    async def all_at_once() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=service.client.base_url, timeout=PATIENCE) as client:
            headers = {"Idempotency-Key": key}
            return await asyncio.gather(*(client.post(ITEMS, json=item_of(key), headers=headers) for _ in range(20)))

    answers = asyncio.run(all_at_once())
    done = [answer for answer in answers if answer.status_code == 201]
    assert len({answer.content for answer in done}) == 1
    assert len([answer for answer in done if "idempotent-replayed" not in answer.headers]) == 1
    refused = [answer.json()["error_code"] for answer in answers if answer not in done]
    assert set(refused) <= {"IDEMPOTENCY_KEY_PROCESSING"}
    assert service.items(key) == [done[0].json()["id"]]
    assert service.post(key, item_of(key)).content == done[0].content


def test_s1_32_killed_at_the_worst_moments_it_neither_loses_nor_repeats_an_item(service: Service, key: str) -> None:
    """One transaction: what was written but not committed is gone with the process, and the retry creates it. What was
    committed replays, though the response was never sent."""
    early, late = f"{key}-early", f"{key}-late"
    with (
        service.held("after_commit", late, item_of(late)) as unheard,
        service.held("before_commit", early, item_of(early)) as lost,
    ):
        service.kill()
        for answer in (unheard, lost):
            assert isinstance(answer.exception(PATIENCE), httpx.TransportError)
    assert service.items(early) == []
    assert stored(service, early) is None
    [number] = service.items(late)
    kept = stored(service, late)
    assert kept is not None

    service.start()
    replay = service.post(late, item_of(late))
    assert (replay.status_code, replay.content, replay.json()["id"]) == (201, kept.body, number)
    assert replay.headers["idempotent-replayed"] == "true"
    assert service.client.get(replay.headers["location"]).json() == replay.json()

    deadline = time.monotonic() + PATIENCE
    while (retry := service.post(early, item_of(early))).status_code == 409:
        assert retry.json()["error_code"] == "IDEMPOTENCY_KEY_PROCESSING"
        assert int(retry.headers["retry-after"]) <= LEASE
        assert time.monotonic() < deadline
        time.sleep(0.1)  # the lease of the dead process is about to end
    assert retry.status_code == 201
    assert "idempotent-replayed" not in retry.headers
    assert service.items(early) == [retry.json()["id"]]
    assert service.items(late) == [number]


def stored(service: Service, key: str) -> Response | None:
    """The response that a key which was claimed replays, if it is done."""
    record = service.record(key)
    assert record is not None
    return None if record.outcome is None else record.outcome.value


def test_s1_32_the_two_services_know_each_others_keys(running: Callable[[str, str], Service], key: str) -> None:
    fastapi, flask = running("fastapi", "postgres"), running("flask", "postgres")
    first = fastapi.post(key, item_of(key))
    again = flask.post(key, item_of(key))
    assert first.status_code == again.status_code == 201
    assert again.headers["idempotent-replayed"] == "true"
    assert again.content == first.content
    assert len(flask.items(key)) == 1


def test_s1_32_numbers_and_log_tell_what_happened_and_never_a_body(service: Service, key: str) -> None:
    before = service.client.get("/stats").json()
    for title in ("a title that must not be logged", "a title that must not be logged", "another"):
        service.post(key, item_of(key, title))
    after = service.client.get("/stats").json()
    assert {name: after[name] - before.get(name, 0) for name in ("hit", "miss", "conflict", "keys")} == {
        "hit": 1,
        "miss": 1,
        "conflict": 1,
        "keys": 1,
    }
    assert after["hit_rate_is"] in ("good", "fair", "to be looked at")
    log = service.log()
    for event in ("miss", "hit", "conflict"):
        assert f"{event}: key '{key}' in 'POST {ITEMS}'" in log
    assert "must not be logged" not in log


COUNTS = ("hit", "miss", "conflict", "processing_collision", "keys")
SESSION = re.compile(r"^```console\n\$ (.+?)\n(.+?)^```$", re.MULTILINE | re.DOTALL)


def test_s1_32_the_session_in_its_readme_is_what_happens(name: str, running: Callable[[str, str], Service]) -> None:
    """From the first line to the last; the dots stand for anything."""
    client = running(name, "sqlite").client
    before = client.get("/stats").json()
    commands = SESSION.findall((EXAMPLE / "README.md").read_text())
    assert len(commands) == 5
    for command, shown in commands:
        answer = curl(client, command)
        promised = shown.splitlines()
        assert promised[0].casefold() == f"HTTP/1.1 {answer.status_code} {answer.reason_phrase}".casefold()
        for line in promised[1 : promised.index("")]:
            header, _, value = line.partition(": ")
            assert same(value, answer.headers[header]), line
        content = answer.json()
        if command.endswith("/stats"):
            content |= {count: content[count] - before.get(count, 0) for count in COUNTS}
        assert same(promised[-1], json.dumps(ordered(content, promised[-1]), separators=(",", ":")))


def curl(client: httpx.Client, command: str) -> httpx.Response:
    program, show_head, address, *options = shlex.split(command)
    assert (program, show_head) == ("curl", "-i")
    headers = dict(value.split(": ") for flag, value in itertools.pairwise(options) if flag == "-H")
    data = options[options.index("-d") + 1] if "-d" in options else None
    path = address.removeprefix("localhost:8000")
    return client.request("GET" if data is None else "POST", path, headers=headers, content=data)


def ordered(content: dict[str, Any], shown: str) -> dict[str, Any]:
    """Its fields in the order in which they are shown: JSON has none."""
    return dict(sorted(content.items(), key=lambda field: shown.index(f'"{field[0]}"')))


def same(promised: str, found: str) -> bool:
    return re.fullmatch(".*".join(re.escape(part) for part in promised.split("…")), found) is not None


@pytest.mark.parametrize(("name", "package"), [("fastapi", "aiosqlite"), ("flask", "gunicorn")])
def test_s1_32_a_package_that_is_missing_is_named(name: str, package: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{package!r}] = None\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    argv = command_of(name, 1)
    ended = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"{package} is not installed; this service needs: pip install semel ")
    assert "Traceback" not in ended.stderr


def test_s1_32_told_to_end_it_ends_without_a_complaint(service: Service) -> None:
    assert service.stop() in (0, -signal.SIGTERM)
    assert "Traceback" not in service.log()
