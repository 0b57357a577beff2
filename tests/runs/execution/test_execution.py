"""What a model returns, raises, logs and leaves behind becomes one `Ended`; in a loop, in a thread, or right here."""

import asyncio
import contextvars
import logging
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from semel.errors import InvalidRequest, Retry, RunCancelled
from semel.runs.execution import Limits, context, execute, execute_async, log_capture, run_in_thread
from semel.runs.execution.context import Context, StopFlag
from semel.runs.models.model import Model, make_model
from semel.runs.results import FileResults, open_results
from semel.runs.types import AttemptResult
from support.apps import run_models
from support.apps.run_models import Heard, job

PATIENCE = 60


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """At Python's own level, whatever other tests have made of it."""
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.WARNING)
    yield
    root.setLevel(before)


@pytest.fixture
def results(tmp_path: Path) -> FileResults:
    store = open_results(tmp_path / "results")
    assert isinstance(store, FileResults)
    return store


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Every test leaves its scratch space empty."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture(params=["here", "loop", "thread"])
def way(request: pytest.FixtureRequest, results: FileResults) -> Callable[..., AttemptResult]:
    """One of the ways to execute a sync function."""

    def run(
        function: Callable[..., Any], parameters: str = "{}", wire: Heard | None = None, **options: Any
    ) -> AttemptResult:
        model = make_model("m", function, isolation="thread", **options)
        given = (job(parameters), model, wire or Heard(), results)
        if request.param == "here":
            return execute(*given)
        return asyncio.run(execute_async(*given) if request.param == "loop" else run_in_thread(*given))

    return run


def in_loop(function: Callable[..., Any], results: FileResults, **options: Any) -> AttemptResult:
    model = make_model("m", function, **options)
    return asyncio.run(execute_async(job(), model, Heard(), results))


def test_a_value_becomes_a_result_in_the_row(way: Callable[..., AttemptResult]) -> None:
    ended = way(run_models.add, '{"a": 1}')
    assert (ended.kind, ended.result, ended.result_ref, ended.result_size) == ("succeeded", "11", None, 2)


def test_a_large_value_lies_in_the_store_under_the_fence(
    way: Callable[..., AttemptResult], results: FileResults
) -> None:
    ended = way(run_models.large, '{"size": 100000}')
    assert (ended.kind, ended.result, ended.result_size) == ("succeeded", None, 100_002)
    assert ended.result_ref is not None
    assert ended.result_ref.startswith("run-1/7/")
    assert msgspec.json.decode(results.get(ended.result_ref)) == "x" * 100_000


def test_an_async_model_is_awaited(results: FileResults) -> None:
    async def model(ctx: Context) -> list[int]:
        await asyncio.sleep(0)
        return [ctx.fence]

    assert in_loop(model, results).result == "[7]"


def test_publishing_much_does_not_stop_the_loop(results: FileResults) -> None:
    threads: list[int] = []

    class Slow(FileResults):
        def put(self, ref: str, data: bytes) -> None:
            threads.append(threading.get_ident())
            super().put(ref, data)

    async def model() -> str:
        return "x" * 20_000

    store = Slow(Path(results.url.removeprefix("file://")))
    ended = in_loop(model, store)
    assert ended.kind == "succeeded"
    assert threads != [threading.get_ident()]


@pytest.mark.parametrize("value", [object(), {"x": float("nan"), "y": object()}, "half a \ud800 pair"])
def test_a_value_without_json_form_is_fatal(way: Callable[..., AttemptResult], value: Any) -> None:
    ended = way(lambda: value)
    assert ended.kind == "fatal"
    assert "JSON" in ended.reason


def test_a_value_with_numbers_that_are_not_finite_is_kept_with_a_warning(way: Callable[..., AttemptResult]) -> None:
    ended = way(lambda: {"metrics": {"loss": float("nan"), "best": 1.5}})
    assert (ended.kind, ended.result) == ("succeeded", '{"metrics":{"loss":null,"best":1.5}}')
    assert ended.result_exact == '{"metrics":{"loss":NaN,"best":1.5}}'
    assert [each.split(",")[0] for each in ended.warnings] == ["$.metrics.loss is nan"]


def test_a_value_over_the_limit_is_fatal(results: FileResults) -> None:
    model = make_model("m", run_models.large, isolation="thread")
    ended = execute(job('{"size": 5000}'), model, Heard(), results, Limits(100, 1000))
    assert ended.kind == "fatal"
    assert "5,002 bytes" in ended.reason


def test_a_store_that_cannot_be_written_is_tried_again(tmp_path: Path, way: Callable[..., AttemptResult]) -> None:
    (tmp_path / "results").write_text("where a folder is needed")
    ended = way(run_models.large, '{"size": 100000}')
    assert (ended.kind, ended.reason.split(":")[0]) == ("retry", "ResultStoreError")


@pytest.mark.parametrize("raised", ["true", "false"])
@pytest.mark.parametrize(
    ("verdict", "reason", "after"),
    [("retry", "busy", 3.0), ("fatal", "never", None), ("snooze", "snoozed for 4.5 seconds", 4.5)],
)
def test_a_verdict_counts_raised_and_returned(
    way: Callable[..., AttemptResult], verdict: str, raised: str, reason: str, after: float | None
) -> None:
    ended = way(run_models.decide, f'{{"verdict": "{verdict}", "raised": {raised}}}')
    assert (ended.kind, ended.reason, ended.after, ended.result) == (verdict, reason, after, None)


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        ("ValueError", "retry", "ValueError: no luck"),
        ("Broken", "fatal", "Broken: no luck"),
        ("QuiteBroken", "fatal", "QuiteBroken: no luck"),
        ("InvalidParameters", "fatal", "InvalidParameters: no luck"),
        ("Fatal", "fatal", "no luck"),
        ("MemoryError", "retry", "MemoryError: no luck"),
        ("SystemExit", "retry", "the model called sys.exit: SystemExit: no luck"),
        ("Panic", "retry", "Panic: no luck"),
    ],
)
def test_an_error_says_what_it_is(way: Callable[..., AttemptResult], error: str, kind: str, reason: str) -> None:
    ended = way(run_models.fail, f'{{"error": "{error}"}}', fatal=(run_models.Broken,))
    assert (ended.kind, ended.reason) == (kind, reason)


def test_a_traceback_shows_the_users_frames_only(way: Callable[..., AttemptResult]) -> None:
    ended = way(run_models.fail, '{"error": "ValueError"}')
    assert "run_models.py" in ended.traceback
    assert ended.traceback.endswith("ValueError: no luck\n")
    assert str(Path(log_capture.__file__).parents[1]) not in ended.traceback


def test_parameters_that_do_not_fit_are_fatal_and_name_the_parameter(way: Callable[..., AttemptResult]) -> None:
    ended = way(run_models.add, '{"a": "one"}')
    assert ended.kind == "fatal"
    assert "a" in ended.reason
    assert ended.reason.startswith("InvalidParameters: model 'm'")


def test_a_validation_error_of_msgspec_is_fatal(way: Callable[..., AttemptResult]) -> None:
    ended = way(lambda: msgspec.json.decode(b'"x"', type=int))
    assert ended.kind == "fatal"


def test_reason_and_traceback_are_bounded_and_can_be_kept_everywhere(way: Callable[..., AttemptResult]) -> None:
    def model() -> None:
        raise ValueError("a\x00b\ud800\n" + "ü" * 50_000)

    ended = way(model)
    assert len(ended.reason.encode()) <= 2000
    assert len(ended.traceback.encode()) <= 16 * 1024
    assert ended.reason.startswith("ValueError: a\\x00b\\ud800 üü")
    assert "\x00" not in ended.traceback
    msgspec.msgpack.encode(ended)


def test_an_error_that_cannot_be_shown_is_still_an_error(way: Callable[..., AttemptResult]) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("not even that")

    def model() -> None:
        raise Mute

    ended = way(model)
    assert (ended.kind, ended.reason) == ("retry", "Mute: (its message cannot be shown)")


def test_endless_recursion_is_an_error_like_others(way: Callable[..., AttemptResult]) -> None:
    def model() -> None:
        model()

    ended = way(model)
    assert ended.kind == "retry"
    assert ended.reason.startswith("RecursionError")


@pytest.mark.parametrize("wish", [float("nan"), -1, float("inf"), "soon"])
def test_a_time_that_cannot_be_is_left_to_the_backoff(way: Callable[..., AttemptResult], wish: Any) -> None:
    assert way(lambda: Retry("later", after=wish)).after is None


def test_a_cancel_is_seen_and_ends_the_run(results: FileResults) -> None:
    stop = StopFlag()
    stop.set()
    for function in (lambda ctx: ctx.check(), lambda ctx: ctx.cancelled and 1, lambda ctx: ctx.progress(0.5)):
        model = make_model("m", function, isolation="thread")
        ended = execute(job(), model, Heard(), results, cancelled=stop)
        assert (ended.kind, ended.result) == ("cancelled", None)


def test_an_error_after_the_model_was_told_to_stop_is_the_cancel(results: FileResults) -> None:
    def model(ctx: Context) -> None:
        if ctx.cancelled:
            raise OSError("interrupted")

    stop = StopFlag()
    stop.set()
    made = make_model("m", model, isolation="thread")
    assert execute(job(), made, Heard(), results, cancelled=stop).kind == "cancelled"


def test_a_model_that_never_looked_has_succeeded(results: FileResults) -> None:
    stop = StopFlag()
    stop.set()
    model = make_model("m", run_models.nothing, isolation="thread")
    assert execute(job(), model, Heard(), results, cancelled=stop).kind == "succeeded"


def test_a_cancelled_task_comes_through_and_the_files_go(results: FileResults) -> None:
    cleaned: list[str] = []

    async def model(ctx: Context) -> None:
        ctx.artifact("x").write_text("x")
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            cleaned.append("up")

    async def scenario() -> None:
        task = asyncio.ensure_future(execute_async(job(), make_model("m", model), Heard(), results))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert cleaned == ["up"]


def test_a_cancelled_error_of_the_models_own_making_is_an_error(results: FileResults) -> None:
    async def model() -> None:
        task = asyncio.ensure_future(asyncio.sleep(PATIENCE))
        task.cancel()
        await task

    ended = in_loop(model, results)
    assert (ended.kind, ended.reason) == ("retry", "CancelledError")


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_model_in_the_loop_that_takes_too_long_is_stopped(results: FileResults, stubborn: bool) -> None:
    async def model() -> str:
        try:
            await asyncio.sleep(PATIENCE)
        except asyncio.CancelledError:
            if not stubborn:
                raise
        return "half of it"

    ended = in_loop(model, results, timeout=0.05)
    assert (ended.kind, ended.reason, ended.result) == ("retry", "timed out after 0.05 seconds", None)


def test_a_timeout_error_of_the_models_own_is_not_ours(results: FileResults) -> None:
    async def model() -> None:
        raise TimeoutError("upstream")

    assert in_loop(model, results, timeout=PATIENCE).reason == "TimeoutError: upstream"


def test_a_thread_is_asked_to_stop_when_its_time_is_up(results: FileResults) -> None:
    model = make_model("m", run_models.wait_politely, isolation="thread", timeout=0.05, grace=PATIENCE)
    ended = asyncio.run(run_in_thread(job(), model, Heard(), results))
    assert (ended.kind, ended.reason) == ("retry", "timed out after 0.05 seconds")


@pytest.mark.parametrize(("timeout", "kind"), [(3.0, "retry"), (None, "cancelled")])
def test_a_thread_that_does_not_stop_is_left_behind_unheard(
    results: FileResults, timeout: float | None, kind: str
) -> None:
    begun, release, heard, stop = threading.Event(), threading.Event(), Heard(), threading.Event()
    threads: list[threading.Thread] = []

    def model(ctx: Context) -> str:
        threads.append(threading.current_thread())
        ctx.log.info("before")
        begun.set()
        release.wait(PATIENCE)
        ctx.log.info("after")
        return "too late"

    async def scenario() -> AttemptResult:
        made = make_model("m", model, isolation="thread", timeout=timeout, grace=0.05)
        waiting = asyncio.ensure_future(run_in_thread(job(), made, heard, results, cancelled=stop))
        await asyncio.to_thread(begun.wait, PATIENCE)
        if timeout is None:
            stop.set()
        ended = await waiting
        release.set()
        await asyncio.to_thread(threads[0].join, PATIENCE)
        await asyncio.sleep(0)
        return ended

    ended = asyncio.run(scenario())
    assert ended.kind == kind
    assert ended.reason.endswith("it did not stop within 0.05 seconds and was left behind in its thread")
    assert heard.lines == [("INFO", "before")]
    assert threads[0].name == "semel-run-run-1"


def test_an_attempt_that_was_left_behind_is_closed_without_a_complaint(results: FileResults) -> None:
    """The garbage collector closes it, in whatever context that happens."""

    async def model(ctx: Context) -> None:
        await asyncio.sleep(PATIENCE)

    async def scenario() -> None:
        attempt = execute_async(job(), make_model("m", model), Heard(), results)
        contextvars.copy_context().run(attempt.send, None)
        attempt.close()

    asyncio.run(scenario())


def test_a_cancelled_caller_leaves_its_thread_behind(results: FileResults) -> None:
    release = threading.Event()

    async def scenario() -> None:
        model = make_model("m", lambda: release.wait(PATIENCE), isolation="thread")
        task = asyncio.ensure_future(run_in_thread(job(), model, Heard(), results))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        release.set()

    asyncio.run(scenario())


def test_the_wire_of_a_thread_is_called_in_the_loop_and_sees_the_callers_context(results: FileResults) -> None:
    heard = Heard()
    here: contextvars.ContextVar[str] = contextvars.ContextVar("here")

    def model(ctx: Context) -> list[Any]:
        ctx.progress(0.5)
        ctx.log.info("x")
        return [threading.get_ident(), here.get()]

    here.set("carried along")
    ended = asyncio.run(run_in_thread(job(), make_model("m", model, isolation="thread"), heard, results))
    thread, carried = msgspec.json.decode(ended.result or "")
    assert heard.threads == {threading.get_ident()}
    assert thread != threading.get_ident()
    assert carried == "carried along"


def test_the_context_says_what_run_it_is(way: Callable[..., AttemptResult]) -> None:
    said = msgspec.json.decode(way(run_models.who).result or "")
    assert said == {
        "run_id": "run-1",
        "model": "m",
        "attempt": 2,
        "fence": 7,
        "user": "ann",
        "tenant": "acme",
        "payload_hash": "hash",
        "worker": "w1",
        "cancelled": False,
    }


@pytest.mark.parametrize("fraction", [float("nan"), float("inf")])
def test_a_progress_that_is_not_finite_ends_no_run(fraction: float) -> None:
    heard = Heard()
    Context(job(), heard, StopFlag()).progress(fraction)
    assert heard.steps == []


@pytest.mark.parametrize("fraction", [-0.01, 1.01])
def test_a_progress_that_is_no_fraction_is_refused(fraction: float) -> None:
    with pytest.raises(InvalidRequest, match="from 0 to 1"):
        Context(job(), Heard(), StopFlag()).progress(fraction)


def test_progress_reaches_the_wire(way: Callable[..., AttemptResult]) -> None:
    heard = Heard()
    way(run_models.steps, wire=heard)
    assert heard.steps == [(0.25, "quarter"), (0.5, "")]


def test_check_raises_once_a_cancel_was_asked_for() -> None:
    stop = StopFlag()
    ctx = Context(job(), Heard(), stop)
    ctx.check()
    stop.set()
    with pytest.raises(RunCancelled):
        ctx.check()


@pytest.mark.parametrize("name", ["", "../x", "/x", "a/../b", "a\\b", "x\x00", "x" * 300, "."])
def test_an_artifact_that_could_lie_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        Context(job(), Heard(), StopFlag()).artifact(name)


def test_a_folder_that_lies_there_already_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    planted.mkdir(mode=0o777)
    with pytest.raises(FileExistsError):
        Context(job(), Heard(), StopFlag(), planted).artifact("x")
    ctx = Context(job(), Heard(), StopFlag(), tmp_path / "own")
    assert ctx.artifact("x").parent.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("amount", [-1, 1_000_001, float("nan"), float("inf")])
def test_a_cost_that_cannot_be_is_refused(amount: float) -> None:
    with pytest.raises(InvalidRequest, match="cost"):
        Context(job(), Heard(), StopFlag()).cost(amount)


@pytest.mark.parametrize("fails", [False, True])
def test_a_cost_is_kept_whatever_the_end(way: Callable[..., AttemptResult], fails: bool) -> None:
    def model(ctx: Context) -> None:
        ctx.cost(1.5)
        ctx.cost(2)
        if fails:
            raise ValueError

    assert way(model).cost == 2.0


def test_artifacts_of_a_success_are_published_under_the_fence(
    way: Callable[..., AttemptResult], results: FileResults
) -> None:
    heard = Heard()
    ended = way(run_models.leave_files, wire=heard)
    assert ended.kind == "succeeded"
    kept = {artifact.name: artifact for artifact in ended.artifacts}
    assert kept.keys() == {"plots/one.txt", "table/part/0.csv"}
    assert results.get(kept["table/part/0.csv"].ref) == b"a,b"
    assert all(artifact.ref.startswith("run-1/7/") for artifact in ended.artifacts)
    assert ("WARNING", "the artifact 'never-written' was requested but never written") in heard.lines


def test_artifacts_of_a_failure_are_not_published(way: Callable[..., AttemptResult], tmp_path: Path) -> None:
    ended = way(run_models.leave_files, '{"fails": true}')
    assert (ended.kind, ended.artifacts) == ("retry", [])
    assert not (tmp_path / "results").exists()


def test_what_is_logged_belongs_to_the_run(way: Callable[..., AttemptResult]) -> None:
    heard = Heard()
    way(run_models.chatter, wire=heard)
    assert heard.lines == [("INFO", "from ctx 1"), ("WARNING", "lib: from a library")]


def test_the_lines_of_runs_in_one_loop_are_told_apart(results: FileResults) -> None:
    async def model(ctx: Context, name: str) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
            logging.getLogger().warning("I am %s", name)

    made = make_model("m", model)
    wires = {name: Heard() for name in "abcd"}

    async def scenario() -> None:
        runs = (execute_async(job(f'{{"name": "{name}"}}'), made, wire, results) for name, wire in wires.items())
        await asyncio.gather(*runs)

    asyncio.run(scenario())
    for name, wire in wires.items():
        assert wire.lines == [("WARNING", f"I am {name}")] * 3


def test_the_runs_logger_works_in_threads_of_the_model(way: Callable[..., AttemptResult]) -> None:
    def model(ctx: Context) -> None:
        thread = threading.Thread(target=ctx.log.info, args=("from a thread",))
        thread.start()
        thread.join()

    heard = Heard()
    way(model, wire=heard)
    assert heard.lines == [("INFO", "from a thread")]


def test_records_of_the_runs_logger_carry_the_runs_fields(caplog: pytest.LogCaptureFixture) -> None:
    ctx = Context(job(), Heard(), StopFlag())
    ctx.log.warning("hot", extra={"temperature": 90})
    (record,) = caplog.records
    fields = {"run_id": "run-1", "payload_hash": "hash", "worker_id": "w1", "status": "RUNNING", "attempt_count": 2}
    assert fields.items() <= vars(record).items()
    assert vars(record)["temperature"] == 90
    assert record.filename == "test_execution.py"


def test_an_error_is_logged_with_its_traceback(way: Callable[..., AttemptResult]) -> None:
    def model(ctx: Context) -> None:
        try:
            {}["lost"]
        except KeyError:
            ctx.log.exception("that hurt")

    heard = Heard()
    way(model, wire=heard)
    ((level, text),) = heard.lines
    assert level == "ERROR"
    assert text.startswith("that hurt\nTraceback")


def test_the_log_of_an_attempt_is_bounded(results: FileResults) -> None:
    def model(ctx: Context) -> None:
        ctx.log.info("é" * 10_000)
        for _ in range(log_capture.MAX_LINES + 50):
            ctx.log.info("x")

    heard = Heard()
    execute(job(), make_model("m", model, isolation="thread"), heard, results)
    assert len(heard.lines) == log_capture.MAX_LINES + 1
    assert len(heard.lines[0][1].encode()) <= log_capture.MAX_LINE_BYTES
    assert heard.lines[0][1].endswith("é…")
    assert heard.lines[-1] == ("WARNING", "more than 10,000 lines: the rest was dropped")


def test_what_a_task_left_behind_says_belongs_to_no_run(results: FileResults) -> None:
    async def scenario() -> Heard:
        go, tasks, heard = asyncio.Event(), [], Heard()

        async def later(ctx: Context) -> None:
            await go.wait()
            ctx.log.warning("too late")

        async def model(ctx: Context) -> None:
            tasks.append(asyncio.ensure_future(later(ctx)))

        await execute_async(job(), make_model("m", model), heard, results)
        go.set()
        await tasks[0]
        return heard

    assert asyncio.run(scenario()).lines == []


def test_a_wire_that_logs_does_not_listen_to_itself(results: FileResults) -> None:
    class Loud(Heard):
        def line(self, level: str, text: str) -> None:
            super().line(level, text)
            logging.getLogger().warning("I heard %s", text)

    heard = Loud()
    execute(job(), make_model("m", run_models.chatter, isolation="thread"), heard, results)
    assert len(heard.lines) == 2


def test_logging_shows_what_it_showed_before(tmp_path: Path) -> None:
    program = """
        import logging
        from support.apps.run_models import Heard, job, chatter
        from semel.runs.execution import execute
        from semel.runs.models.model import make_model
        from semel.runs.results import open_results
        execute(job(), make_model("m", chatter, isolation="thread"), Heard(), open_results("unused"))
        logging.getLogger("elsewhere").warning("not of a run")
        logging.getLogger("elsewhere").info("too quiet")
    """
    lines = "\n".join(line.strip() for line in program.splitlines())
    done = subprocess.run(
        [sys.executable, "-c", lines],
        cwd=Path(__file__).parents[2],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr.splitlines() == ["from a library", "to stderr", "not of a run"]


def test_a_handler_that_was_swept_away_comes_back(results: FileResults) -> None:
    model: Model = make_model("m", run_models.chatter, isolation="thread")
    execute(job(), model, Heard(), results)
    before = list(logging.root.handlers)
    for handler in before:
        logging.root.removeHandler(handler)
    try:
        heard = Heard()
        execute(job(), model, heard, results)
        assert len(heard.lines) == 2
    finally:
        logging.root.handlers[:] = before


def test_a_run_without_logs_and_files_makes_neither(results: FileResults, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing of the kind is needed")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    monkeypatch.setattr(asyncio, "to_thread", refuse)
    monkeypatch.setattr(context, "_RunLog", refuse)

    async def model(ctx: Context) -> dict[str, Any]:
        ctx.progress(1)
        return {"objective": 0.83, "notes": ["simulated"]}

    assert in_loop(model, results).kind == "succeeded"


def test_many_runs_in_one_loop(results: FileResults) -> None:
    async def model() -> None: ...

    async def scenario() -> float:
        made, heard = make_model("m", model), Heard()
        started = time.perf_counter()
        for _ in range(5000):
            ended = await execute_async(job(), made, heard, results)
            assert ended.kind == "succeeded"
        return 5000 / (time.perf_counter() - started)

    rate = asyncio.run(scenario())
    sys.stdout.write(f"{rate:,.0f} runs a second in the loop\n")
    assert rate > 0
