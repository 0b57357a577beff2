"""What semel writes, nobody else on the machine may read, whatever the umask is: keys, parameters, results, data."""

import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from semel import App, Once
from semel.cli import main as semel_command
from semel.errors import StoreBroken
from semel.runs.execution.context import Context
from semel.runs.results import open_results
from support.file_modes import respect_file_modes
from support.programs import processes


@pytest.fixture(autouse=True)
def everything_allowed() -> Iterator[None]:
    old = os.umask(0)
    yield
    os.umask(old)


def modes(folder: Path) -> dict[str, int]:
    """Of everything below a folder, who may do what with it."""
    return {str(path.relative_to(folder)): path.stat().st_mode & 0o777 for path in sorted(folder.rglob("*"))}


def write(ctx: Context) -> str:
    ctx.artifact("sub/file.txt").write_text("secret")
    return "x" * 100_000


def test_a_database_file_is_its_owners_alone(tmp_path: Path) -> None:
    with Once(f"sqlite:///{tmp_path}/keys.db") as once:
        once.call("key", lambda: 1)
        assert modes(tmp_path) == {"keys.db": 0o600, "keys.db-shm": 0o600, "keys.db-wal": 0o600}
    assert semel_command(["migrate", f"sqlite:///{tmp_path}/migrated.db"]) == 0
    assert modes(tmp_path)["migrated.db"] == 0o600


def test_who_made_the_file_says_who_may_read_it(tmp_path: Path) -> None:
    file = tmp_path / "shared.db"
    file.touch(0o660)
    with Once(f"sqlite:///{file}") as once:
        once.call("key", lambda: 1)
        assert set(modes(tmp_path).values()) == {0o660}


def test_results_and_artifacts_are_their_owners_alone(tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path}/semel.db", artifacts=tmp_path / "deep" / "artifacts")
    app.model("write", isolation="thread")(write)
    run = app.submit("write")
    with app.working(processes=0, threads=1):
        assert app.wait(run.id, timeout=60).status == "SUCCEEDED"
    app.close()
    found = modes(tmp_path / "deep")
    kinds = {name: (tmp_path / "deep" / name).is_dir() for name in found}
    assert {name for name in found if name.endswith(("result.json", "file.txt"))} == {
        name for name, folder in kinds.items() if not folder
    }
    assert all(mode == (0o700 if kinds[name] else 0o600) for name, mode in found.items()), found


def test_what_is_put_as_a_file_is_its_owners_alone_although_the_original_was_not(tmp_path: Path) -> None:
    original = tmp_path / "data.tar.gz"
    original.write_bytes(b"data")
    original.chmod(0o666)
    open_results(tmp_path / "results").put_file("data/abc/data.tar.gz", original)
    assert modes(tmp_path / "results") == {"data": 0o700, "data/abc": 0o700, "data/abc/data.tar.gz": 0o600}


def submit_meanwhile(file: str, given: Connection) -> None:
    """A process that may not write the file at first: says what its submissions came to."""
    respect_file_modes()
    app = App(f"sqlite:///{file}", artifacts=Path(file).parent, retry_for=0, dedupe_window=0)
    app.model("nothing", isolation="thread")(lambda: None)
    for _ in range(2):
        given.recv()
        try:
            given.send(app.submit("nothing").status)
        except StoreBroken as error:
            given.send(str(error))
    app.close()


def test_a_process_writes_again_when_the_file_is_writable_again(tmp_path: Path) -> None:
    """A connection that SQLite opened while the file was read-only stays read-only for ever."""
    file = tmp_path / "semel.db"
    assert semel_command(["migrate", f"sqlite:///{file}"]) == 0
    once = Once(f"sqlite:///{file}")
    once.check_and_mark("ack_id", "1")  # SQLite's log exists as long as a connection is open
    for path in tmp_path.iterdir():
        path.chmod(0o400)
    tmp_path.chmod(0o500)
    ours, theirs = processes.Pipe()
    process = processes.Process(target=submit_meanwhile, args=(str(file), theirs))
    process.start()
    said = []
    for _ in range(2):
        ours.send("go on")
        assert ours.poll(60)
        said.append(ours.recv())
        tmp_path.chmod(0o700)
        for path in tmp_path.iterdir():
            path.chmod(0o600)
    process.join(60)
    once.close()
    assert "attempt to write a readonly database" in said[0]
    assert said[1] == "PENDING"
