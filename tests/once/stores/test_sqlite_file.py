"""A SQLite file that is deleted or replaced under a live process: nothing is acknowledged into nowhere."""

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from semel import App, AsyncOnce, Once, StoreBroken
from support.programs import outcome
from support.serve_command import ServeProcess
from support.waiting import eventually

GONE = "the database file {} was {} while it was in use"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "semel.db"


def url_of(file: Path) -> str:
    return f"sqlite:///{file}"


def delete(path: Path) -> None:
    path.rename(path.with_suffix(".away"))


def replace(path: Path) -> None:
    shutil.copy(path, path.with_suffix(".copy"))
    delete(path)
    path.with_suffix(".copy").rename(path)


def put_back(path: Path) -> None:
    path.with_suffix(".away").rename(path)


def refuses(call: Callable[[], object], path: Path, how: str = "deleted") -> None:
    with pytest.raises(StoreBroken) as refused:
        call()
    assert GONE.format(path, how) in str(refused.value)
    assert "Put the file back, or stop every process" in str(refused.value)


VERBS: dict[str, Callable[[Once], object]] = {
    "claim": lambda once: once.claim("new"),
    "call": lambda once: once.call("new", lambda: pytest.fail("it worked")),
    "get": lambda once: once.get("done"),
    "check_and_mark": lambda once: once.check_and_mark("ack_id", "new"),
    "purge": lambda once: once.purge(),
    "stats": lambda once: once.stats(),
}


@pytest.fixture
def once(file: Path) -> Iterator[Once]:
    with Once(url_of(file), collect=False) as once:
        once.call("done", lambda: 7)
        yield once


def test_no_verb_goes_on_without_the_file_and_all_do_when_it_is_back(once: Once, file: Path) -> None:
    delete(file)
    for verb in VERBS.values():
        refuses(lambda verb=verb: verb(once), file)
    assert not file.exists(), "nobody made another one"
    put_back(file)
    assert once.call("done", lambda: 8).value == 7


def test_another_file_of_the_same_name_is_not_taken_for_it(once: Once, file: Path) -> None:
    replace(file)
    refuses(lambda: once.claim("new"), file, "replaced by another file")
    refuses(lambda: Once(url_of(file)).claim("new"), file, "replaced by another file")


@pytest.mark.parametrize("beside", ["-wal", "-shm"])
def test_the_files_beside_it_are_part_of_it(once: Once, file: Path, beside: str) -> None:
    """What was committed lately is in the log alone: with a new one it would be lost."""
    part = file.with_name(file.name + beside)
    delete(part)
    refuses(lambda: once.claim("new"), part)
    put_back(part)
    assert once.call("done", lambda: 8).value == 7


def test_in_an_event_loop(file: Path) -> None:
    async def use() -> None:
        async with AsyncOnce(url_of(file), collect=False) as once:
            await once.call("done", lambda: 7)
            delete(file)
            with pytest.raises(StoreBroken, match="was deleted while it was in use"):
                await once.claim("new")
            put_back(file)
            assert (await once.call("done", lambda: 8)).value == 7

    asyncio.run(use())


def test_a_file_that_is_not_there_yet_is_made_by_the_first_use(file: Path) -> None:
    once = Once(url_of(file))
    assert not file.exists()
    assert once.call("key", lambda: 1).value == 1
    once.close()


def test_who_has_closed_it_may_find_another_file(file: Path) -> None:
    once = Once(url_of(file))
    once.call("key", lambda: 1)
    once.close()
    file.unlink()
    with Once(url_of(file)) as anew:
        assert anew.call("key", lambda: 2).value == 2
    file.unlink()
    with once:
        assert once.call("key", lambda: 3).value == 3


def test_a_log_that_others_made_anew_is_theirs_to_make(file: Path) -> None:
    """While nobody has the file open there is no log; who opens it makes one."""
    with Once(url_of(file)) as first:
        first.call("key", lambda: 1)
    assert not file.with_name("semel.db-wal").exists()
    with Once(url_of(file)) as one, Once(url_of(file)) as other:
        assert one.call("key", lambda: 2).value == 1
        other.call("other", lambda: 2)
        one.close()
        assert other.call("key", lambda: 3).value == 1


def test_a_child_process_insists_on_its_parents_file(file: Path) -> None:
    """A server that forks: the child's own connections, made after the fork, find the same file or none."""
    said = outcome(
        """
        import os
        from pathlib import Path
        from semel import Once, StoreBroken

        once = Once(url)
        once.call("done", lambda: 7)
        reads, writes = os.pipe()
        Path(file).rename(file + ".away")
        if not os.fork():
            try:
                said = str(once.claim("new"))
            except StoreBroken as error:
                said = str(error)
            os.write(writes, said.encode())
            os._exit(0)
        os.wait()
        tell(os.read(reads, 10_000).decode())
        """,
        url=url_of(file),
        file=str(file),
    )
    assert GONE.format(file, "deleted") in said


def test_an_app_accepts_no_runs(file: Path) -> None:
    app = App(url_of(file))
    app.model("add", isolation="thread")(lambda a: a)
    run = app.submit("add", {"a": 1})
    delete(file)
    refuses(lambda: app.submit("add", {"a": 2}), file)
    refuses(lambda: app.get(run.id), file)
    put_back(file)
    assert app.get(run.id).status == "PENDING"
    app.close()


def test_a_server_says_so_and_no_worker_of_it_takes_another_file(file: Path, tmp_path: Path) -> None:
    with (
        ServeProcess(tmp_path, "support.apps.serve_app:app", "--db", url_of(file)) as serving,
        serving.client() as client,
    ):
        run = serving.submit("sleep", {"seconds": 600})
        serving.becomes(run["run_id"], "RUNNING")
        replace(file)
        eventually(lambda: client.get("/healthz").status_code == 503, "it is unwell")
        for answer in (
            client.get("/healthz"),
            client.get("/readyz"),
            client.get("/runs"),
            client.post("/runs", json={"model": "add", "parameters": {"a": 1}}),
            client.post("/api/cloud/jobs/submit", json={"config_name_to_load": "any"}),
        ):
            assert answer.status_code == 503, answer.text
            assert GONE.format(file, "replaced by another file") in answer.text
        before = serving.log
        os.kill(serving.children()[-1], signal.SIGKILL)
        eventually(lambda: str(file) in serving.log[len(before) :].partition("has died")[2], "the next worker says so")
        assert "worker started" not in serving.log[len(before) :]
        file.unlink()
        put_back(file)
        eventually(lambda: client.get("/readyz").status_code == 200, "it is well again")
        assert client.get(f"/runs/{run['run_id']}").json()["status"] == "RUNNING"
