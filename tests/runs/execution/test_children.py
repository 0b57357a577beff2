"""Runs in child processes: whatever a model does there, or is done to it, the worker hears one `Ended`."""

import asyncio
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from semel.runs.execution import log_capture
from semel.runs.execution.child_pool import ChildPool
from semel.runs.models.model import make_model
from semel.runs.results import FileResults, open_results
from semel.runs.types import AttemptResult
from support.apps import run_models
from support.apps.run_models import Heard, job

PATIENCE = 60
T = TypeVar("T")


class Watched(Heard):
    """A wire on which the first sign of life can be awaited."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = asyncio.Event()

    def progress(self, fraction: float, note: str) -> None:
        super().progress(fraction, note)
        self.alive.set()

    async def note(self) -> str:
        await asyncio.wait_for(self.alive.wait(), PATIENCE)
        return self.steps[0][1]


class Crew:
    """Two warm children for all tests of this file, and the loop that they live in."""

    def __init__(self, folder: Path) -> None:
        self._runner = asyncio.Runner()
        self.results = FileResults(folder / "results")
        self.children = self.new(2)

    def new(self, size: int, **options: Any) -> ChildPool:
        async def make() -> ChildPool:
            return ChildPool(size, results_url=self.results.url, **options)

        return self._runner.run(make())

    def wait(self, work: Awaitable[T]) -> T:
        async def bounded() -> T:
            return await asyncio.wait_for(work, PATIENCE)

        return self._runner.run(bounded())

    def run(
        self, function: Callable[..., Any], parameters: str = "{}", wire: Heard | None = None, **options: Any
    ) -> AttemptResult:
        return self.wait(self.children.run(job(parameters), make_model("m", function, **options), wire or Heard()))

    def close(self) -> None:
        self.wait(self.children.close())
        self._runner.close()


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """At Python's own level, whatever other tests have made of it."""
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.WARNING)
    yield
    root.setLevel(before)


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    crew = Crew(tmp_path_factory.mktemp("crew"))
    yield crew
    crew.close()


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Every test leaves its scratch space empty."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state not in {"Z", "X"}


def wait_for_the_end_of(*pids: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"one of {pids} lives on"
        time.sleep(0.01)


def test_a_value_comes_back(crew: Crew) -> None:
    assert crew.run(run_models.add, '{"a": 1}').result == "11"


def test_a_child_is_kept_for_the_next_run(crew: Crew) -> None:
    pids = {msgspec.json.decode(crew.run(run_models.surroundings).result or "")["pid"] for _ in range(3)}
    assert len(pids) == 1


def test_the_context_travels(crew: Crew) -> None:
    said = msgspec.json.decode(crew.run(run_models.who).result or "")
    assert (said["run_id"], said["fence"], said["attempt"], said["user"]) == ("run-1", 7, 2, "ann")


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        ("ValueError", "retry", "ValueError: no luck"),
        ("Broken", "fatal", "Broken: no luck"),
        ("QuiteBroken", "fatal", "QuiteBroken: no luck"),
        ("InvalidParameters", "fatal", "InvalidParameters: no luck"),
        ("SystemExit", "retry", "the model called sys.exit: SystemExit: no luck"),
        ("KeyboardInterrupt", "retry", "KeyboardInterrupt: no luck"),
        ("MemoryError", "retry", "MemoryError: no luck"),
    ],
)
def test_errors_are_told_apart_across_processes(crew: Crew, error: str, kind: str, reason: str) -> None:
    ended = crew.run(run_models.fail, f'{{"error": "{error}"}}', fatal=(run_models.Broken,))
    assert (ended.kind, ended.reason) == (kind, reason)
    assert "run_models.py" in ended.traceback


def test_verdicts_travel(crew: Crew) -> None:
    ended = crew.run(run_models.decide, '{"verdict": "retry", "raised": true}')
    assert (ended.kind, ended.reason, ended.after) == ("retry", "busy", 3.0)


def test_all_that_is_logged_and_printed_belongs_to_the_run(crew: Crew) -> None:
    heard = Heard()
    assert crew.run(run_models.chatter, wire=heard).kind == "succeeded"
    assert set(heard.lines) == {
        ("INFO", "from ctx 1"),
        ("WARNING", "lib: from a library"),
        ("STDOUT", "printed"),
        ("STDERR", "to stderr"),
        ("STDOUT", "no end of linefrom a thread"),
        ("OUTPUT", "from C"),
    }


def test_the_last_words_of_c_code_come_before_the_end(crew: Crew) -> None:
    model = make_model("m", run_models.speak_last)
    for number in range(30):
        heard = Heard()
        crew.wait(crew.children.run(job(f'{{"number": {number}}}'), model, heard))
        assert heard.lines == [("OUTPUT", f"last word {number}")]


def test_a_progress_bar_is_one_line(crew: Crew) -> None:
    heard = Heard()
    crew.run(run_models.progress_bar, wire=heard)
    assert heard.lines == [("STDOUT", "100%")]


def test_the_parents_level_of_logging_counts_in_the_child(crew: Crew) -> None:
    heard, logger = Heard(), logging.getLogger()
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        children = crew.new(1)
        crew.wait(children.run(job(), make_model("m", run_models.chatter), heard))
        crew.wait(children.close())
    finally:
        logger.setLevel(before)
    assert ("INFO", "lib: too quiet") in heard.lines


def test_a_module_that_configures_logging_is_heard_once(crew: Crew, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "logging_model.py").write_text(
        textwrap.dedent("""
            import logging
            logging.basicConfig(level="INFO")

            def model():
                logging.getLogger("lib").info("said once")
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    import logging_model  # the parent's own configuration is pytest's, so that this changes nothing here

    heard, children = Heard(), crew.new(1)
    crew.wait(children.run(job(), make_model("first", run_models.nothing), Heard()))
    crew.wait(children.run(job(), make_model("m", logging_model.model), heard))
    crew.wait(children.close())
    assert heard.lines == [("INFO", "lib: said once")]


def test_the_log_of_a_flood_is_bounded(crew: Crew) -> None:
    heard = Heard()
    assert crew.run(run_models.flood, f'{{"lines": {log_capture.MAX_LINES + 10}}}', wire=heard).kind == "succeeded"
    assert len(heard.lines) == log_capture.MAX_LINES + 1
    assert heard.lines[-1] == ("WARNING", "more than 10,000 lines: the rest was dropped")


def test_progress_is_heard_while_the_model_runs_and_in_the_loop(crew: Crew) -> None:
    heard = Heard()
    crew.run(run_models.steps, wire=heard)
    assert heard.steps == [(0.25, "quarter"), (0.5, "")]


def test_a_wire_that_fails_does_not_harm_the_run(crew: Crew) -> None:
    class Failing(Heard):
        def progress(self, fraction: float, note: str) -> None:
            raise RuntimeError("cannot hear")

    async def scenario() -> tuple[AttemptResult, list[Any]]:
        complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, about: complaints.append(about["exception"]))
        try:
            return await crew.children.run(job(), make_model("m", run_models.steps), Failing()), complaints
        finally:
            asyncio.get_running_loop().set_exception_handler(None)

    ended, complaints = crew.wait(scenario())
    assert ended.kind == "succeeded"
    assert str(complaints[0]) == "cannot hear"


def test_a_child_has_the_parents_surroundings(crew: Crew, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEMEL_TEST_MARK", "here")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.syspath_prepend("/also/nowhere")
    with socket.create_server(("127.0.0.1", 0)):
        children = crew.new(1)
        ended = crew.wait(children.run(job(), make_model("m", run_models.surroundings), Heard()))
        crew.wait(children.close())
    found = msgspec.json.decode(ended.result or "")
    assert found["cwd"] == str(tmp_path)
    assert found["path"] == sys.path
    assert (found["mark"], found["python_path"]) == ("here", "/nowhere")
    assert found["main_thread"]
    assert found["interrupts_ignored"]
    assert found["leaves_sigterm_to_its_parent"]
    assert found["leads_its_group"]
    assert len(found["open_sockets"]) == 1, "only the connection with the parent, nothing of the parent's own"


def test_a_child_has_no_secret_of_semels_own(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "SEMEL_DB": "postgresql://semel:hush@db.internal:5432/semel?sslpassword=hush",
        "SEMEL_REDIS": "redis://:hush@redis.internal/0",
        "SEMEL_EVENTS": "rediss://events:hush@redis.internal/1",
        "SEMEL_TOKEN": "hush",
        "SEMEL_TOKEN_FILE": "/run/hush",
        "SEMEL_REPLICATE_TOKEN": "hush",
        "SEMEL_REPLICATE_WEBHOOK_SECRET": "whsec_hush",
        "SEMEL_CONCURRENCY": "7",
        "DATABASE_URL": "postgresql://model:own@db.internal/theirs",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    children = crew.new(1)
    ended = crew.wait(children.run(job(), make_model("m", run_models.surroundings), Heard()))
    crew.wait(children.close())
    found = msgspec.json.decode(ended.result or "")["environment"]
    assert not [name for name, value in found.items() if "hush" in value]
    assert found["SEMEL_DB"] == "postgresql://semel:***@db.internal:5432/semel?sslpassword=***"
    assert found["SEMEL_CONCURRENCY"] == "7"
    assert found["DATABASE_URL"] == given["DATABASE_URL"], "what is not ours is the model's"
    assert "SEMEL_TOKEN" not in found


def test_a_model_of_a_program_runs_in_its_children(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
            import asyncio
            from support.apps.run_models import Heard, job
            from semel.runs.execution.child_pool import ChildPool
            from semel.runs.models.model import make_model

            class Mine(Exception):
                pass

            def model(fails: bool):
                if fails:
                    raise Mine("of this file")
                return __name__

            async def main():
                children = ChildPool(1, results_url="file:///unused")
                made = make_model("m", model, fatal=(Mine,))
                print((await children.run(job('{"fails": false}'), made, Heard())).result)
                print((await children.run(job('{"fails": true}'), made, Heard())).kind)
                await children.close()

            if __name__ == "__main__":
                asyncio.run(main())
        """)
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(program)], env=env, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.stdout, done.stderr) == ('"__semel_main__"\nfatal\n', "")


def test_a_module_that_cannot_be_imported_is_said_and_the_child_stays(
    crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone_model.py").write_text("def model(): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import gone_model

    model = make_model("m", gone_model.model)
    (tmp_path / "gone_model.py").write_text("import sys\nsys.exit('not today')\n")
    children = crew.new(1)
    ended = crew.wait(children.run(job(), model, Heard()))
    assert ended.kind == "retry"
    assert ended.reason.startswith("cannot import model 'gone_model:model': SystemExit: not today")
    (tmp_path / "gone_model.py").write_text("def model(): return 22\n")
    assert crew.wait(children.run(job(), model, Heard())).result == "22"
    crew.wait(children.close())


def test_results_and_artifacts_of_a_success_lie_under_the_fence(crew: Crew) -> None:
    ended = crew.run(run_models.leave_files)
    assert {artifact.name for artifact in ended.artifacts} == {"plots/one.txt", "table/part/0.csv"}
    assert all(artifact.ref.startswith("run-1/7/") for artifact in ended.artifacts)
    assert crew.results.get(ended.artifacts[0].ref) == b"one"
    large = crew.run(run_models.large, '{"size": 3000000}')
    assert (large.result, large.result_size) == (None, 3_000_002)
    assert crew.results.size(large.result_ref or "") == 3_000_002


def test_nothing_of_a_failure_is_visible(crew: Crew) -> None:
    model = make_model("m", run_models.leave_files)
    ended = crew.wait(crew.children.run(job('{"fails": true}', run_id="failing"), model, Heard()))
    assert (ended.kind, ended.artifacts, ended.result_ref) == ("retry", [], None)
    assert not (Path(crew.results.url.removeprefix("file://")) / "failing").exists()


def test_large_parameters_arrive(crew: Crew) -> None:
    parameters = msgspec.json.encode({"error": "ValueError", "text": "x" * 900_000}).decode()
    assert crew.run(run_models.fail, parameters).reason.startswith("ValueError: xxx")


@pytest.mark.parametrize(
    ("function", "parameters", "reason"),
    [
        (run_models.exit_now, '{"code": 3}', "the child process exited with code 3"),
        (run_models.exit_now, '{"code": 0}', "the child process exited with code 0"),
        (run_models.die_by, '{"number": 9}', "the child process was killed by SIGKILL (out of memory?)"),
        (run_models.die_by, '{"number": 6}', "the child process was killed by SIGABRT"),
    ],
)
def test_a_child_that_dies_is_lost_and_replaced(
    crew: Crew, function: Callable[..., Any], parameters: str, reason: str
) -> None:
    ended = crew.run(function, parameters)
    assert (ended.kind, ended.reason) == ("lost", reason)
    assert crew.run(run_models.nothing).kind == "succeeded"


def test_a_crash_in_c_says_where(crew: Crew) -> None:
    heard = Heard()
    ended = crew.run(run_models.crash, wire=heard)
    assert (ended.kind, ended.reason) == ("lost", "the child process was killed by SIGSEGV")
    assert any("in crash" in text for level, text in heard.lines if level == "OUTPUT")


def test_a_child_that_dies_while_idle_is_not_given_work(crew: Crew) -> None:
    async def scenario() -> list[str]:
        children = ChildPool(1, results_url=crew.results.url)
        ended = await children.run(job(), make_model("m", run_models.surroundings), Heard())
        pid = msgspec.json.decode(ended.result or "")["pid"]
        (process,) = children._processes
        os.kill(pid, signal.SIGKILL)
        await process.gone
        kinds = [ended.kind, (await children.run(job(), make_model("m", run_models.nothing), Heard())).kind]
        await children.close()
        return kinds

    assert crew.wait(scenario()) == ["succeeded", "succeeded"]


@pytest.mark.parametrize("function", [run_models.wait_politely, run_models.return_when_told])
def test_a_cancel_lets_the_model_leave_by_itself(crew: Crew, function: Callable[..., Any]) -> None:
    async def scenario() -> AttemptResult:
        heard = Watched()
        model = make_model("m", function, grace=PATIENCE)
        run = asyncio.ensure_future(crew.children.run(job(), model, heard))
        await heard.note()
        crew.children.cancel("another")
        crew.children.cancel("run-1")
        return await run

    ended = crew.wait(scenario())
    assert (ended.kind, ended.reason, ended.result) == ("cancelled", "cancelled", None)


@pytest.mark.parametrize("function", [run_models.hang, run_models.burn])
def test_a_model_that_ignores_a_cancel_is_killed_after_its_grace(crew: Crew, function: Callable[..., Any]) -> None:
    async def scenario() -> tuple[AttemptResult, int]:
        heard = Watched()
        run = asyncio.ensure_future(crew.children.run(job(), make_model("m", function, grace=0.1), heard))
        pid = int(await heard.note())
        crew.children.cancel("run-1")
        return await run, pid

    ended, pid = crew.wait(scenario())
    assert ended.kind == "cancelled"
    assert ended.reason == "cancelled; it did not stop within 0.1 seconds and was killed"
    assert not alive(pid)


def test_a_model_that_finishes_without_looking_has_succeeded(crew: Crew, tmp_path: Path) -> None:
    async def scenario() -> AttemptResult:
        heard, until = Watched(), tmp_path / "until"
        model = make_model("m", run_models.finish_untold, grace=PATIENCE)
        parameters = msgspec.json.encode({"until": str(until)}).decode()
        run = asyncio.ensure_future(crew.children.run(job(parameters), model, heard))
        await heard.note()
        crew.children.cancel("run-1")
        until.touch()
        return await run

    ended = crew.wait(scenario())
    assert (ended.kind, ended.result) == ("succeeded", '"all of it"')


@pytest.mark.parametrize("function", [run_models.wait_politely, run_models.return_when_told])
def test_a_model_that_takes_too_long_is_asked_to_stop(crew: Crew, function: Callable[..., Any]) -> None:
    ended = crew.run(function, timeout=0.2, grace=PATIENCE)
    assert (ended.kind, ended.reason) == ("retry", "timed out after 0.2 seconds")


def test_a_model_that_takes_too_long_and_does_not_stop_is_killed(crew: Crew) -> None:
    ended = crew.run(run_models.hang, timeout=0.2, grace=0.1)
    assert ended.kind == "retry"
    assert ended.reason == "timed out after 0.2 seconds; it did not stop within 0.1 seconds and was killed"


def test_a_run_whose_lease_is_lost_is_killed_at_once_with_its_files(crew: Crew, scratch: Path) -> None:
    async def scenario() -> tuple[AttemptResult, bool]:
        heard = Watched()
        model = make_model("m", run_models.leave_files_and_hang)
        run = asyncio.ensure_future(crew.children.run(job(run_id="taken"), model, heard))
        folder = Path(await heard.note())
        written = (folder / "big.bin").exists() and folder.is_relative_to(scratch)
        crew.children.kill("taken")
        return await run, written

    ended, written = crew.wait(scenario())
    assert (ended.kind, ended.reason) == ("lost", "killed, because its lease was lost")
    assert written
    assert not (Path(crew.results.url.removeprefix("file://")) / "taken").exists()


def test_what_a_model_started_dies_with_it(crew: Crew) -> None:
    async def scenario() -> list[int]:
        heard = Watched()
        run = asyncio.ensure_future(crew.children.run(job(), make_model("m", run_models.start_others), heard))
        pids = [int(pid) for pid in (await heard.note()).split()]
        os.kill(pids[0], signal.SIGKILL)  # even if only the child itself is hit
        assert (await run).kind == "lost"
        return pids

    wait_for_the_end_of(*crew.wait(scenario()))


def test_a_cancelled_call_kills_its_child(crew: Crew) -> None:
    async def scenario() -> int:
        heard = Watched()
        run = asyncio.ensure_future(crew.children.run(job(), make_model("m", run_models.hang), heard))
        pid = int(await heard.note())
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert crew.children.free == 2
        return pid

    wait_for_the_end_of(crew.wait(scenario()))


def test_a_model_that_holds_the_interpreters_lock_does_not_stop_the_loop(crew: Crew) -> None:
    async def scenario() -> tuple[AttemptResult, float]:
        heard = Watched()
        model = make_model("m", run_models.hold_the_lock, grace=0.2)
        run = asyncio.ensure_future(crew.children.run(job('{"seconds": 600}'), model, heard))
        await heard.note()
        crew.children.cancel("run-1")
        longest, last = 0.0, time.monotonic()
        while not run.done():
            await asyncio.sleep(0.005)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        return await run, longest

    ended, longest = crew.wait(scenario())
    assert ended.reason.endswith("was killed")
    assert longest < 5


def test_forked_workers_of_a_model_print_into_its_log(crew: Crew) -> None:
    heard = Heard()
    ended = crew.run(run_models.fork_others, wire=heard)
    assert ended.result == str([number * number for number in range(50)]).replace(" ", "")
    assert sorted(heard.lines) == sorted(("OUTPUT", f"worker {number}") for number in range(50))


def test_a_forked_process_can_be_terminated_from_its_first_moment() -> None:
    """A pool with little work terminates workers that have hardly begun, and waits until they are gone."""
    program = textwrap.dedent("""
        import os, signal, time

        os.register_at_fork(after_in_child=lambda: time.sleep(0.5))  # the signal comes before what is done after it

        from semel.runs.execution import child_main

        child_main._ignore_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        os.kill(pid, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), signal.pthread_sigmask(signal.SIG_BLOCK, []))
    """)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.stdout, done.stderr) == (f"{-signal.SIGTERM} set()\n", "")


def test_a_model_that_forks_has_one_end(crew: Crew) -> None:
    for _ in range(5):
        assert crew.run(run_models.fork_badly).result == '"original"'


def test_a_model_that_misbehaves_does_not_spoil_the_next(crew: Crew) -> None:
    children = crew.new(1)
    crew.wait(children.run(job(), make_model("m", run_models.misbehave), Heard()))
    heard = Heard()
    ended = crew.wait(children.run(job(), make_model("n", run_models.outlive_an_alarm), heard))
    assert (ended.result, heard.lines) == ('"alive"', [("STDOUT", "still heard")])
    found = crew.wait(children.run(job(), make_model("o", run_models.surroundings), Heard())).result
    assert msgspec.json.decode(found or "")["cwd"] == str(Path.cwd())
    crew.wait(children.close())


def test_a_child_is_replaced_after_so_many_runs(crew: Crew) -> None:
    children = crew.new(1, max_runs_per_child=2)
    model = make_model("m", run_models.surroundings)
    pids = [msgspec.json.decode(crew.wait(children.run(job(), model, Heard())).result or "")["pid"] for _ in range(4)]
    crew.wait(children.close())
    assert pids[0] == pids[1] != pids[2] == pids[3]
    wait_for_the_end_of(*pids)


def test_a_child_that_cannot_start_is_lost_with_its_last_words(crew: Crew, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "msgspec.py").write_text("raise ImportError('broken on purpose')\n")
    monkeypatch.syspath_prepend(tmp_path)
    children = crew.new(1)
    ended = crew.wait(children.run(job(), make_model("m", run_models.nothing), Heard()))
    assert ended.kind == "unstarted"
    assert ended.reason.startswith("a child process exited with code 1 while it started: Traceback")
    assert "broken on purpose" in ended.reason
    monkeypatch.undo()
    assert crew.wait(children.run(job(), make_model("m", run_models.nothing), Heard())).kind == "succeeded"
    crew.wait(children.close())


def test_a_child_that_does_not_come_up_in_time_is_lost(crew: Crew, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "msgspec.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    children = crew.new(1, start_timeout=0.5)
    ended = crew.wait(children.run(job(), make_model("m", run_models.nothing), Heard()))
    crew.wait(children.close())
    assert (ended.kind, ended.reason) == ("unstarted", "a child process was not ready within 0.5 seconds")


def test_an_interpreter_that_is_not_there_is_said(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    children = crew.new(1)
    ended = crew.wait(children.run(job(), make_model("m", run_models.nothing), Heard()))
    crew.wait(children.close())
    assert ended.kind == "unstarted"
    assert "cannot be started" in ended.reason


def test_a_run_that_waits_for_a_child_can_be_cancelled_and_killed(crew: Crew) -> None:
    async def scenario() -> list[str]:
        children = ChildPool(1, results_url=crew.results.url)
        heard, waiting = Watched(), make_model("m", run_models.return_when_told, grace=PATIENCE)
        first = asyncio.ensure_future(children.run(job(run_id="first"), waiting, heard))
        await heard.note()
        others = [
            asyncio.ensure_future(children.run(job(run_id=name), waiting, Heard())) for name in ("second", "third")
        ]
        await asyncio.sleep(0)
        children.cancel("second")
        children.kill("third")
        children.cancel("first")
        kinds = [ended.kind for ended in await asyncio.gather(first, *others)]
        await children.close()
        return kinds

    assert crew.wait(scenario()) == ["cancelled", "cancelled", "lost"]


def test_more_children_than_asked_for_do_not_stay(crew: Crew) -> None:
    async def scenario() -> int:
        children = ChildPool(1, results_url=crew.results.url)
        model = make_model("m", run_models.nothing)
        await asyncio.gather(children.start(), children.run(job(), model, Heard()))
        await children.run(job(), model, Heard())
        while len(children._processes) > 1:
            await asyncio.wait({process.gone for process in children._processes if process.terminating})
        left = len(children._processes)
        await children.close()
        return left

    assert crew.wait(scenario()) == 1


def test_closing_waits_for_the_runs_under_way_and_takes_no_more(crew: Crew, tmp_path: Path) -> None:
    async def scenario() -> tuple[AttemptResult, AttemptResult]:
        children, heard, until = ChildPool(2, results_url=crew.results.url), Watched(), tmp_path / "until"
        await children.start()
        parameters = msgspec.json.encode({"until": str(until)}).decode()
        run = asyncio.ensure_future(children.run(job(parameters), make_model("m", run_models.finish_untold), heard))
        await heard.note()
        closing = asyncio.ensure_future(children.close())
        await asyncio.sleep(0)
        refused = await children.run(job(), make_model("m", run_models.nothing), Heard())
        until.touch()
        await closing
        assert run.done()
        return await run, refused

    finished, refused = crew.wait(scenario())
    assert (finished.kind, refused.kind) == ("succeeded", "lost")


def test_closing_by_force_kills_the_runs_under_way(crew: Crew) -> None:
    async def scenario() -> tuple[AttemptResult, int]:
        children, heard = ChildPool(1, results_url=crew.results.url), Watched()
        run = asyncio.ensure_future(children.run(job(), make_model("m", run_models.hang), heard))
        pid = int(await heard.note())
        await children.close(kill=True)
        return await run, pid

    ended, pid = crew.wait(scenario())
    assert (ended.kind, ended.reason) == ("lost", "killed, because its worker was closed")
    assert not alive(pid)


def test_the_flag_of_one_run_does_not_reach_the_next(crew: Crew) -> None:
    async def scenario() -> str:
        children = ChildPool(1, results_url=crew.results.url)
        heard = Watched()
        run = asyncio.ensure_future(
            children.run(job(), make_model("m", run_models.wait_politely, grace=PATIENCE), heard)
        )
        await heard.note()
        children.cancel("run-1")
        await run
        ended = await children.run(job(fence=8), make_model("n", run_models.who), Heard())
        await children.close()
        return ended.result or ""

    assert msgspec.json.decode(crew.wait(scenario()))["cancelled"] is False


@pytest.mark.parametrize("function", ["hang", "burn", "hold_the_lock", "start_others"])
def test_no_child_outlives_a_killed_parent(function: str, scratch: Path) -> None:
    program = """
        import asyncio, sys
        from support.apps import run_models
        from support.apps.run_models import Heard, job
        from semel.runs.execution.child_pool import ChildPool
        from semel.runs.models.model import make_model

        class Telling(Heard):
            def progress(self, fraction, note):
                print(note, flush=True)

        async def main():
            children = ChildPool(1, results_url="file:///unused")
            parameters = '{"seconds": 600}' if sys.argv[1] == "hold_the_lock" else "{}"
            await children.run(job(parameters), make_model("m", getattr(run_models, sys.argv[1])), Telling())

        asyncio.run(main())
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(scratch)}
    command = [sys.executable, "-c", textwrap.dedent(program), function]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            pids = [int(pid) for pid in parent.stdout.readline().split()]
            assert pids
            assert all(alive(pid) for pid in pids)
        finally:
            parent.kill()
    wait_for_the_end_of(*pids)


def test_many_runs_through_two_warm_children(crew: Crew) -> None:
    async def scenario() -> tuple[set[str], float]:
        model, heard = make_model("m", run_models.nothing), Heard()
        await asyncio.gather(*(crew.children.run(job(), model, heard) for _ in range(2)))
        started = time.perf_counter()
        ends = await asyncio.gather(*(crew.children.run(job(), model, heard) for _ in range(200)))
        return {ended.kind for ended in ends}, 200 / (time.perf_counter() - started)

    kinds, rate = crew.wait(scenario())
    sys.stdout.write(f"{rate:,.0f} runs a second through two warm children\n")
    assert kinds == {"succeeded"}


def test_a_child_needs_neither_a_database_nor_an_event_loop() -> None:
    """What the child itself imports; the package's own `__init__` apart."""
    program = """
        import sys, types
        package = types.ModuleType("semel")
        package.__path__ = [sys.argv[1]]
        sys.modules["semel"] = package
        import semel.runs.execution.child_main
        print([name for name in ("sqlalchemy", "asyncio", "alembic") if name in sys.modules])
    """
    folder = Path(log_capture.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(folder)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.stdout == "[]\n"
    assert isinstance(open_results("unused"), FileResults)


@pytest.mark.parametrize(
    ("name", "imports"),
    [("light_app", "from semel import App"), ("light_program", "from semel import App, Context, Worker")],
)
def test_a_child_imports_no_database_until_its_model_uses_the_app(
    name: str, imports: str, crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{name}.py").write_text(
        textwrap.dedent(f"""
            import sys
            {imports}

            app = App("sqlite:///{tmp_path / "semel.db"}", artifacts="{tmp_path}")

            @app.model("m")
            def loaded(ctx):
                heavy = {{"sqlalchemy", "alembic", "click", "semel.runs.store"}}
                return [sorted(heavy & set(sys.modules)), app.runs().runs]
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    children = crew.new(1)
    model = make_model("m", importlib.import_module(name).loaded)
    ended = crew.wait(children.run(job(), model, Heard()))
    crew.wait(children.close())
    assert (ended.kind, ended.result) == ("succeeded", "[[],[]]"), ended
