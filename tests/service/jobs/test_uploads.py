"""The data of jobs: packed the same way every time, kept once, and there before the run begins, whatever dies."""

import asyncio
import io
import os
import tarfile
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import delete

from semel import App, ResultStoreError
from semel._concurrency.sync import run_sync
from semel.db.schema import leaders
from semel.runs.execution.input_data import ref_of, unpack
from semel.runs.results import FileResults
from semel.runs.store import lease, transitions
from semel.runs.store.transitions import FinishRequest
from semel.runs.types import AttemptResult
from semel.service import Settings, jobs
from semel.service.auth.middleware import Principal
from semel.service.jobs import uploads
from semel.service.jobs.archive import CannotPack, Packed, pack
from semel.service.state import ServiceState
from support.jobs import SlowStore, add_models, job, job_in, runs_of, submit, write_config
from support.programs import Program
from support.service import TestServer, make_app, serve
from support.waiting import eventually

FILES = {"captions.txt": "a boat", "images/one.txt": "1", "images/two.txt": "2"}
ME = Principal(user="local", role="admin")


def write(folder: Path, files: dict[str, str] = FILES) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def packed(folder: Path, target: Path) -> Packed:
    return pack(folder, target, lambda *_: None)


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    first = write(tmp_path / "first")
    second = write(tmp_path / "second", dict(reversed(FILES.items())))
    os.utime(second / "captions.txt", (1, 1))
    (second / "images").chmod(0o700)
    told: list[tuple[int, int]] = []
    one = pack(first, tmp_path / "1", lambda *said: told.append(said))
    assert packed(second, tmp_path / "2") == one
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    assert one == Packed(sha256((tmp_path / "1").read_bytes()).hexdigest(), (tmp_path / "1").stat().st_size)
    assert (told[0], told[-1]) == ((0, 8), (8, 8))
    (second / "captions.txt").write_text("a boot")
    assert packed(second, tmp_path / "3") != one


trees = st.dictionaries(
    st.lists(st.text("abñ ._-", min_size=1, max_size=5).filter(lambda name: name not in {".", ".."}), min_size=1)
    .map(lambda steps: "/".join(steps[:3]))
    .map(lambda name: f"{name}/file"),
    st.binary(max_size=2000),
    max_size=8,
)


@settings(max_examples=40, deadline=None)
@given(files=trees)
def test_what_is_packed_comes_out_again(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        folder = root / "in"
        folder.mkdir()
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if not (folder / name).is_dir():
                (folder / name).write_bytes(content)
        archive = packed(folder, root / "archive")
        store = FileResults(root / "store")
        store.put_file(ref_of(archive.digest), root / "archive")
        out = unpack(store, ref_of(archive.digest), root / "out")
        assert contents(out) == contents(folder)
        assert {path.name for path in root.iterdir()} == {"in", "out", "archive", "store"}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_links_inside_stay_links_and_those_that_lead_out_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    (folder / "script").write_text("#!/bin/sh")
    (folder / "script").chmod(0o755)
    (folder / "images/link").symlink_to("../captions.txt")
    (folder / "absolute").symlink_to(folder / "captions.txt")
    archive = packed(folder, tmp_path / "archive")
    store = FileResults(tmp_path / "store")
    store.put_file(ref_of(archive.digest), tmp_path / "archive")
    out = unpack(store, ref_of(archive.digest), tmp_path / "out")
    assert (out / "images/link").is_symlink()
    assert (out / "images/link").read_text() == (out / "absolute").read_text() == "a boat"
    assert os.access(out / "script", os.X_OK)
    (folder / "images/out").symlink_to(tmp_path)
    with pytest.raises(CannotPack, match="'images/out' points outside the folder"):
        packed(folder, tmp_path / "2")
    (folder / "images/out").unlink()
    (folder / "ring").symlink_to("ring")
    with pytest.raises(CannotPack, match="'ring' is part of a loop"):
        packed(folder, tmp_path / "3")


def test_what_is_neither_file_nor_folder_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    os.mkfifo(folder / "pipe")
    with pytest.raises(CannotPack, match="'pipe' is neither a file nor a folder"):
        packed(folder, tmp_path / "1")
    with pytest.raises(CannotPack, match="does not exist or is not a folder"):
        packed(tmp_path / "nowhere", tmp_path / "2")


def test_a_file_that_changes_while_it_is_packed_is_tried_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", {"a": "x" * 10, "b": "y" * 10})

    def change(done: int, total: int) -> None:
        if 0 < done < total:
            (folder / "b").write_text(text)

    for text in ("shorter", "longer than it was"):
        write(folder, {"b": "y" * 10})
        with pytest.raises(OSError, match="'b' cannot be read"):
            pack(folder, tmp_path / text, change)


def test_data_that_was_changed_in_the_store_is_not_unpacked(tmp_path: Path) -> None:
    store = FileResults(tmp_path / "store")
    archive = packed(write(tmp_path / "data"), tmp_path / "archive")
    ref = ref_of(archive.digest)
    store.put(ref, (tmp_path / "archive").read_bytes() + b"!")
    with pytest.raises(ResultStoreError, match="its digest differs"):
        unpack(store, ref, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("member", ["../evil", "/evil", "link"])
def test_an_archive_that_leads_out_writes_nothing_there(tmp_path: Path, member: str) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        entry = tarfile.TarInfo(member)
        if member == "link":
            entry.type, entry.linkname = tarfile.SYMTYPE, "../../evil"
        archive.addfile(entry)
    data = made.getvalue()
    store = FileResults(tmp_path / "store")
    store.put(ref_of(sha256(data).hexdigest()), data)
    with pytest.raises(ResultStoreError, match="cannot be unpacked"):
        unpack(store, ref_of(sha256(data).hexdigest()), tmp_path / "x/out")
    assert not (tmp_path / "x/evil").exists()
    assert not (tmp_path / "evil").exists()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"migrated_{request.param}_url")
    return url


@pytest.fixture
def store(tmp_path: Path) -> SlowStore:
    return SlowStore(tmp_path / "artifacts")


@pytest.fixture
def app(url: str, tmp_path: Path, store: SlowStore) -> Iterator[App]:
    app = make_app(url, tmp_path)
    app._artifacts = store
    add_models(app)
    yield app
    store.go_on.set()
    app.close()


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    folder = tmp_path / "configs"
    write_config(folder, "reading", model="read", data="data")
    write_config(folder, "looping", model="read_in_loop", data="data")
    write(folder / "data")
    return folder


def kept(store: SlowStore) -> list[str]:
    return [path.parent.name for path in store.kept() if path.parent.parent.name == "data"]


def test_a_run_begins_when_its_data_is_there_and_finds_it_in_a_folder(
    client: httpx.Client, app: App, store: SlowStore, configs: Path
) -> None:
    with app.working(processes=0):
        said = submit(client, "reading", "k")
        assert (said["status"], said["data_uploaded"]) == ("uploading", True)
        assert store.began.wait(30)
        upload = eventually(lambda: job(client, said["job_id"])["upload"]["bytes"] and job(client, said["job_id"]))[
            "upload"
        ]
        assert upload == {"state": "uploading", "bytes": 8, "total": 8, "data_ref": None}
        waits = app.waiting(said["job_id"])
        assert waits is not None
        assert waits.reason == "its data is being uploaded: 8 of 8 bytes"
        assert (waits.place, waits.due_us) == (None, None)
        assert submit(client, "reading", "k") == {**said, "idempotent_hit": True}
        assert [each["job_id"] for each in client.get("/api/cloud/jobs?status=uploading").json()["jobs"]] == [
            said["job_id"]
        ]
        store.go_on.set()
        done = job_in(client, said["job_id"], "completed")
        assert client.get(done["result"]).json() == FILES
        assert [step.step for step in app.timeline(said["job_id"])] == ["created", "uploaded", "leased", "succeeded"]
        first = kept(store)
        assert done["upload"]["data_ref"] == f"data/{first[0]}/data.tar.gz"
        modified = next(path for path in store.kept() if path.parent.name == first[0]).stat().st_mtime_ns
        other = job_in(client, submit(client, "looping")["job_id"], "completed")
        assert client.get(other["result"]).json() == ["captions.txt", "images"]
        assert kept(store) == first
        assert next(path for path in store.kept() if path.parent.name == first[0]).stat().st_mtime_ns == modified
        write(configs / "data", {"captions.txt": "a ship"})
        job_in(client, submit(client, "looping")["job_id"], "completed")
        assert len(kept(store)) == 2


def test_data_is_removed_with_the_last_run_that_has_it(client: httpx.Client, app: App, store: SlowStore) -> None:
    store.go_on.set()
    late = submit(client, "looping")["job_id"]
    with app.working(processes=0):
        job_in(client, late, "completed")
    early = submit(client, "reading")["job_id"]
    eventually(lambda: job(client, early)["upload"]["state"] == "uploaded")
    eventually(lambda: not app.runs(queue="semel-service", status=["PENDING", "RUNNING"]).runs)
    assert app.purge(0) >= 1
    assert len(kept(store)) == 1, "the run that waits needs it"
    with app.working(processes=0):
        job_in(client, early, "completed")
    app.purge(0)
    assert kept(store) == []


def test_uploads_are_nobodys_runs(service: TestServer, client: httpx.Client, app: App, store: SlowStore) -> None:
    said = submit(client, "reading")
    assert store.began.wait(30)
    assert [each["run_id"] for each in runs_of(service)] == [said["job_id"]]
    (upload,) = runs_of(service, "semel-service")
    assert (upload["model"], upload["user"], upload["status"]) == ("semel.upload", "", "RUNNING")
    assert [each.model for each in app.summary()] == ["read"]
    assert app.usage("local").concurrent == 1
    backlog = app.backlog()
    assert (backlog.pending, backlog.running) == (1, 0)
    store.go_on.set()
    eventually(lambda: runs_of(service, "semel-service")[0]["status"] == "SUCCEEDED")
    with app.working(processes=0):
        job_in(client, said["job_id"], "completed")
    shown = client.get("/metrics").text
    assert 'runs_succeeded_total{model="read"} ' in shown
    assert "semel.upload" not in shown


@pytest.mark.parametrize("way", ["/api/cloud/jobs/{}/cancel", "/runs/{}/cancel"])
def test_who_cancels_the_job_cancels_its_upload(
    service: TestServer, client: httpx.Client, app: App, store: SlowStore, way: str
) -> None:
    said = submit(client, "reading")
    assert store.began.wait(30)
    answer = client.post(way.format(said["job_id"]), json={})
    assert answer.status_code == 200, answer.text
    assert job(client, said["job_id"])["status"] == "cancelled"
    if way.startswith("/api"):
        assert runs_of(service, "semel-service")[0]["cancel_requested"]
    store.go_on.set()
    upload = eventually(lambda: [each for each in runs_of(service, "semel-service") if each["status"] != "RUNNING"])[0]
    assert upload["status"] in ("CANCELLED", "SUCCEEDED")
    eventually(lambda: job(client, said["job_id"])["upload"]["state"] == "cancelled")
    assert [step.step for step in app.timeline(said["job_id"])] == ["created", "cancelled"]
    assert job(client, said["job_id"])["status"] == "cancelled"


def test_what_can_never_be_packed_fails_the_job_and_says_why(
    client: httpx.Client, app: App, configs: Path, tmp_path: Path
) -> None:
    (configs / "data/out").symlink_to(tmp_path)
    said = submit(client, "reading", "k")
    assert said["status"] == "uploading"
    failed = job_in(client, said["job_id"], "failed")
    assert failed["error"] == "the data cannot be packed: the link 'out' points outside the folder"
    assert failed["upload"]["state"] == "failed"
    assert str(tmp_path) not in failed["error"]
    run = app.get(said["job_id"])
    assert (run.status, run.held, run.attempts) == ("CANCELLED", True, 0)
    assert [each["job_id"] for each in client.get("/api/cloud/jobs?status=failed").json()["jobs"]] == [said["job_id"]]
    assert client.get("/api/cloud/jobs?status=cancelled").json()["jobs"] == []
    assert submit(client, "reading", "k") == {**said, "status": "failed", "idempotent_hit": True}
    assert app.usage("local").concurrent == 0


def test_a_config_whose_data_is_missing_makes_no_job(client: httpx.Client, configs: Path) -> None:
    write_config(configs, "poor", model="read", data="nowhere")
    said = submit(client, "poor")
    assert said == {"success": False, "error": "the config 'poor' has data, but its folder does not exist"}
    assert client.get("/api/cloud/jobs").json()["jobs"] == []


async def submitted(app: App, configs: Path, act: Any) -> str:
    """A job whose upload nobody works on; ``act`` is done to the upload, then it is settled."""
    site = ServiceState(app, Settings(configs=str(configs)))
    uploads.install(app)
    await site.store.open()
    try:
        asked = jobs.JobSubmission(provider="local", config="reading", key=None)
        job_id = (await jobs.submit(site, ME, asked)).job_id
        (upload,) = (await site.engine.runs(queue="semel-service")).runs
        assert (
            await site.store.read(lease.due, 0, 100, site.store.statement_context) == []
        )  # no broker is told of the upload, nor of a run that is held
        await act(site, upload.id)
        assert await site.store.write(uploads.settle, site.store.statement_context) == 1
        assert await site.store.write(uploads.settle, site.store.statement_context) == 0
        return job_id
    finally:
        await site.store.close()
        await site.engine.close()


async def give_up(site: ServiceState, upload_id: str) -> None:
    (leased,) = await site.store.write(lease.lease_these, "worker", [upload_id], site.store.statement_context)
    await site.store.write(
        transitions.end,
        [FinishRequest(upload_id, leased.fence, AttemptResult(kind="fatal", reason="the disk is full"))],
        site.store.statement_context,
    )


async def call_off(site: ServiceState, upload_id: str) -> None:
    await site.engine.cancel(upload_id)


@pytest.mark.parametrize(
    ("act", "status", "error"),
    [
        (give_up, "failed", "the data could not be uploaded: the disk is full"),
        (call_off, "cancelled", "the upload of its data was cancelled"),
    ],
)
def test_a_job_whose_upload_ended_otherwise_does_not_wait_for_ever(
    app: App, configs: Path, act: Any, status: str, error: str
) -> None:
    job_id = asyncio.run(submitted(app, configs, act))
    with serve(app, Settings(configs=str(configs))) as service, service.client() as client:
        over = job(client, job_id)
    assert (over["status"], over["error"]) == (status, error)
    assert app.get(job_id).status == "CANCELLED"


DIES = """
from pathlib import Path
import httpx
from support.jobs import SlowStore, add_models
from semel import App
from semel.service import Settings
from semel.service.jobs import uploads
from support.service import serve

uploads.LEASE = 1.0
app = App(url, artifacts=SlowStore(Path(artifacts)))
add_models(app)
with serve(app, Settings(configs=configs)) as service:
    body = {"config_name_to_load": "reading", "idempotency_key": "k"}
    answer = httpx.post(f"{service.address}/api/cloud/jobs/submit", json=body, timeout=60).json()
    assert app.results.began.wait(30)
    tell(answer)
    hear()
"""


def test_a_server_that_is_killed_in_the_middle_of_an_upload_loses_nothing(
    url: str, configs: Path, tmp_path: Path
) -> None:
    app = make_app(url, tmp_path)
    add_models(app)
    with Program(DIES, url=url, configs=str(configs), artifacts=str(tmp_path / "artifacts")) as program:
        said = program.hear()
        program._process.kill()
        program._process.join()
    ledger = app.ledger(awaited=False)
    run_sync(ledger.write(lambda conn: conn.execute(delete(leaders))))  # whose terms would end some seconds later
    run_sync(ledger.close())
    assert said["status"] == "uploading"
    with (
        serve(app, Settings(configs=str(configs))) as service,
        service.client() as client,
        app.working(processes=0),
    ):
        assert submit(client, "reading", "k")["job_id"] == said["job_id"]
        done = job_in(client, said["job_id"], "completed")
        assert client.get(done["result"]).json() == FILES
        (upload,) = runs_of(service, "semel-service")
        assert upload["attempts"] >= 2
    app.close()


TOLD_TWICE = """
import os, signal, socket, threading
from pathlib import Path
import httpx
from support.jobs import SlowStore, add_models
from semel import App
from semel.service import Settings
from semel.service.server.granian import serve_requests
from semel.service.server import claim_port

app = App(url, artifacts=SlowStore(Path(artifacts)))
add_models(app)
held, settings = claim_port(Settings(port=0, configs=configs, drain=600))

def ask():
    body = {"config_name_to_load": "reading", "idempotency_key": "k"}
    place = f"http://127.0.0.1:{settings.port}/api/cloud/jobs/submit"
    said = httpx.post(place, json=body, timeout=60).json()
    assert app.results.began.wait(30)
    slow = socket.create_connection(("127.0.0.1", settings.port))
    slow.sendall(b"POST /runs HTTP/1.1\\r\\nHost: here\\r\\nContent-Length: 10\\r\\n\\r\\n")
    httpx.get(f"http://127.0.0.1:{settings.port}/healthz", timeout=60)
    os.kill(os.getpid(), signal.SIGTERM)
    while True:  # until nobody listens any more: the first signal was heard
        try:
            socket.create_connection(("127.0.0.1", settings.port)).close()
        except ConnectionRefusedError:
            break
        except ConnectionResetError:  # it was in the queue of those that are not accepted any more
            pass
    tell(said)
    os.kill(os.getpid(), signal.SIGTERM)

serve_requests(app, settings, threading.Thread(target=ask).start)
"""


def test_a_server_that_is_told_twice_gives_its_own_runs_back(url: str, configs: Path, tmp_path: Path) -> None:
    """A request that does not end keeps it, and an upload is under way."""
    app = make_app(url, tmp_path)
    with Program(TOLD_TWICE, url=url, configs=str(configs), artifacts=str(tmp_path / "artifacts")) as program:
        said = program.hear()
        program._process.join(60)
        assert program._process.exitcode == 0
    assert said["status"] == "uploading"
    (upload,) = app.runs(queue="semel-service").runs
    assert (upload.status, upload.attempts) == ("PENDING", 0)
    app.close()


def test_brokers_hear_of_the_job_when_its_data_is_there_and_never_of_the_upload(
    url: str, redis_url: str, configs: Path, tmp_path: Path
) -> None:
    from redis import Redis

    app = make_app(url, tmp_path, transport="rq", redis=redis_url)
    add_models(app)
    with (
        serve(app, Settings(configs=str(configs))) as service,
        service.client() as client,
        Redis.from_url(redis_url) as redis,
    ):
        said = submit(client, "reading")
        job_in(client, said["job_id"], "queued")
        eventually(lambda: redis.llen("rq:queue:semel"))
        messages = [
            redis.hget(f"rq:job:{each.decode()}", "description") for each in redis.lrange("rq:queue:semel", 0, -1)
        ]
        # The sweeper may announce the job, too: a second message does no harm.
        assert {each.decode() for each in messages} == {f"semel run {said['job_id']}"}
        assert redis.smembers("rq:queues") == {b"rq:queue:semel"}
    app.close()


def test_a_job_is_announced_although_the_attempt_that_released_it_died(
    url: str, redis_url: str, configs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from redis import Redis

    app = make_app(url, tmp_path, transport="rq", redis=redis_url)
    add_models(app)
    announce, died = app.transport.announce, []

    def die_first(runs: Any, *, again: bool = False) -> bool:
        if runs and not died:
            died.append(runs)
            raise RuntimeError("the attempt ends here")
        return announce(runs, again=again)

    monkeypatch.setattr(app.transport, "announce", die_first)
    with (
        serve(app, Settings(configs=str(configs))) as service,
        service.client() as client,
        Redis.from_url(redis_url) as redis,
    ):
        job = submit(client, "reading")["job_id"]
        eventually(lambda: redis.llen("rq:queue:semel"), "the next attempt announces the job")
        assert [run_id for run_id, _ in died[0]] == [job]
    app.close()
