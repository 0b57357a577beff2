"""The commands that go through a server: what they print, how they end."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from semel import Quota
from semel.api_types import RemoteJob, RemoteUpload
from semel.cli import main
from semel.cli.jobs import print_job
from semel.dashboard.templating import short_id
from semel.runs.store import partial_ids
from semel.service.auth import tokens
from support.cli import ID, UNSERVED, CliServer, add_models, cli_server
from support.service import PATIENCE, TestServer, make_app, serve


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CliServer]:
    folder = tmp_path_factory.mktemp("cli")
    with cli_server(f"sqlite:///{folder / 'semel.db'}", folder) as place:
        yield place


@pytest.fixture
def server(place: CliServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[CliServer]:
    monkeypatch.setenv("SEMEL_SERVER", place.service.address)
    for name in ("SEMEL_TOKEN", "SEMEL_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    place.gate.clear()
    yield place
    place.gate.set()


Told = Callable[..., tuple[int, str, str]]


@pytest.fixture
def semel(server: CliServer, capsys: pytest.CaptureFixture[str]) -> Told:
    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(arguments)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_submit_prints_the_id_alone_so_that_it_can_be_used(server: CliServer, semel: Told) -> None:
    code, out, err = semel("submit", "add", "a=1")
    assert (code, err) == (0, "")
    assert ID.fullmatch(out.strip())
    assert server.app.wait(out.strip(), timeout=PATIENCE).parameters == {"a": 1}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("b=2", 2),
        ("b=[1, 2]", [1, 2]),
        ("b=null", None),
        ('b="2"', "2"),
        ("b=two=2", "two=2"),
        ("b=NaN", "NaN"),
        ("b=1e999", "1e999"),
        ("b=", ""),
    ],
)
def test_a_value_is_json_where_it_is_json_and_text_otherwise(
    server: CliServer, semel: Told, given: str, meant: Any
) -> None:
    code, out, _ = semel("submit", "add", "--queue", UNSERVED, "a=1", given)
    assert code == 0
    assert server.app.get(out.strip()).parameters == {"a": 1, "b": meant}


def test_parameters_come_from_a_file_and_are_overridden_by_words(
    server: CliServer, semel: Told, tmp_path: Path
) -> None:
    file = tmp_path / "inputs.json"
    file.write_text('{"a": 1, "b": "of the file"}')
    code, out, _ = semel("submit", "add", "--params", f"@{file}", "--queue", UNSERVED, "a=5")
    assert code == 0
    assert server.app.get(out.strip()).parameters == {"a": 5, "b": "of the file"}


def test_the_same_key_finds_the_same_run(semel: Told) -> None:
    first = semel("submit", "add", "a=1", "--key", "the-key", "--queue", UNSERVED)
    second = semel("submit", "add", "a=1", "--key", "the-key", "--queue", UNSERVED)
    assert first[:2] == second[:2]
    assert "the run existed already (PENDING)" in second[2]
    code, _, err = semel("submit", "add", "a=2", "--key", "the-key")
    assert code == 1
    assert err.startswith("semel: ")
    assert "key" in err


def test_without_a_key_the_same_again_is_the_run_under_way(semel: Told) -> None:
    ids = {semel("submit", "add", "a=1", "--queue", UNSERVED)[1] for _ in range(2)}
    assert len(ids) == 1
    assert semel("submit", "add", "a=1", "--queue", UNSERVED, "--no-dedupe")[1] not in ids


def test_wait_tells_of_the_way_in_lines_and_ends_as_the_run_ends(semel: Told) -> None:
    code, out, err = semel("submit", "add", "a=505", "--wait")
    assert code == 0
    assert ID.fullmatch(out.strip())
    assert "SUCCEEDED after" in err
    assert f"semel result {out.strip()}" in err
    assert "\r" not in err
    code, out, err = semel("submit", "fail", "why=no paper", "--wait")
    assert code == 1
    assert re.search(r"FAILED.*no paper", err)


def test_a_printed_command_can_be_pasted_where_the_command_has_another_name(
    semel: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEMEL_PROGRAM", "./dev semel")
    _, out, err = semel("submit", "add", "a=717", "--wait")
    assert f"; ./dev semel result {out.strip()} shows the result" in err
    assert f": ./dev semel result {out.strip()}" in semel("show", out.strip())[1]


def test_wait_with_json_prints_the_run_as_it_ended(semel: Told) -> None:
    code, out, _ = semel("submit", "add", "a=506", "--wait", "--json")
    assert code == 0
    run = json.loads(out)
    assert (run["status"], run["model"], run["parameters"]) == ("SUCCEEDED", "add", {"a": 506})


def test_a_wait_that_takes_too_long_leaves_the_run_alone(server: CliServer, semel: Told) -> None:
    code, out, err = semel("submit", "hold", "--wait", "--timeout", "0.3s")
    assert code == 1
    assert f"it has not ended in 0.3 s; the run goes on: semel wait {out.strip()} (or show, " in err
    assert not server.app.get(out.strip()).done
    code, out, err = semel("wait", out.strip(), "--timeout", "0.1s", "--json")
    assert (code, json.loads(out)["model"]) == (1, "hold")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["submit", "nothing"], "nothing"),
        (["submit", "add"], "a"),
        (["submit", "add", "a=x"], "a"),
        (["submit", "add", "a=1", "--key", ""], "empty"),
        (["submit", "add", "a=1", "b=\udcff"], "not text"),
        (["runs", "--user", "\udcff"], "not text in UTF-8"),
        (["show", "xyz"], "is not a run id"),
        (["show", "abc"], "is not a run id"),
        (["show", "00000000-0000-7000-8000-000000000000"], "no run"),
        (["show", "00000000"], "no run begins or ends with"),
        (["result", "00000000-0000-7000-8000-000000000000"], "no run"),
        (["logs", "00000000-0000-7000-8000-000000000000"], "no run"),
        (["cancel", "00000000-0000-7000-8000-000000000000"], "no run"),
    ],
    ids=lambda value: ascii(" ".join(value)) if isinstance(value, list) else "",
)
def test_a_mistake_is_told_in_a_line(semel: Told, arguments: list[str], expected: str) -> None:
    code, out, err = semel(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith("semel: ")
    assert expected in err
    assert err.count("\n") == 1


def test_a_server_that_is_not_there_is_told_with_where_it_was_looked_for(
    semel: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEMEL_SERVER", "http://127.0.0.1:1")
    code, out, err = semel("models")
    assert (code, out) == (1, "")
    assert "http://127.0.0.1:1" in err
    assert "Traceback" not in err
    code, out, err = semel("models", "--server", "nonsense")
    assert (code, out) == (1, "")
    assert err.startswith("semel: ")


def test_runs_are_listed_newest_first_and_filtered(server: CliServer, semel: Told) -> None:
    ids = [server.submit("add", {"a": number}, queue="listed") for number in range(3)]
    code, out, err = semel("runs", "--queue", "listed")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["RUN", "STATUS", "MODEL", "USER", "SUBMITTED", "TOOK", "NOTE"]
    assert [line.split()[0] for line in lines[1:]] == ids[::-1]
    assert re.search(r" (\d+\.\d s ago|now) ", lines[1])
    code, out, err = semel("runs", "--queue", "listed", "--limit", "2", "--json")
    assert [run["run_id"] for run in json.loads(out)["runs"]] == ids[:0:-1]
    assert json.loads(out)["more"] is True
    assert json.loads(semel("runs", "--queue", "listed", "--status", "failed", "--json")[1])["runs"] == []
    assert len(json.loads(semel("runs", "--queue", "listed", "--since", "1h", "--json")[1])["runs"]) == 3
    assert json.loads(semel("runs", "--queue", "listed", "--until", "1h", "--json")[1])["runs"] == []


def test_no_runs_are_no_failure(semel: Told) -> None:
    assert semel("runs", "--queue", "empty") == (0, "", "there are no such runs\n")


def test_show_tells_of_a_runs_life(server: CliServer, semel: Told) -> None:
    run_id = server.ended("add", {"a": 1}, idempotency_key=f"show-{time.time_ns()}")
    code, out, _ = semel("show", run_id)
    assert code == 0
    counts = "attempt 1 · errors 0 of 3 · lost 0 of 3"
    for part in (run_id, "SUCCEEDED", '{"a": 1}', "created", "leased", "succeeded", counts):
        assert part in out
    told = json.loads(semel("show", run_id, "--json")[1])
    assert [step["step"] for step in told["timeline"]] == ["created", "leased", "succeeded"]
    assert told["waiting"] is None
    assert told["run"]["run_id"] == run_id


def test_an_error_that_was_overcome_is_shown_as_the_last_one(server: CliServer, semel: Told) -> None:
    code, out, err = semel("submit", "falter", "--wait")
    assert code == 0, err
    code, out, _ = semel("show", out.strip())
    assert re.search(r"^attempts +attempt 2 · errors 1 of 2 · lost 0 of 3$", out, re.MULTILINE)
    assert re.search(r"^last error +ConnectionError: the line was busy$", out, re.MULTILINE)
    assert "Traceback" not in out
    run_id = server.ended("fail", {"why": "no paper"})
    out = semel("show", run_id)[1]
    assert re.search(r"^error +.*no paper$", out, re.MULTILINE)
    assert "Traceback" in out


def test_a_run_that_was_submitted_before_is_waited_for(server: CliServer, semel: Told) -> None:
    run_id = server.submit("hold")
    code, out, err = semel("wait", run_id, "--timeout", "0.2s")
    assert (code, out.strip()) == (1, run_id)
    assert "the run goes on" in err
    server.gate.set()
    code, _, err = semel("wait", run_id[-10:])
    assert code == 0
    assert "SUCCEEDED after" in err
    told = json.loads(semel("wait", run_id, "--json")[1])
    assert (told["run_id"], told["status"]) == (run_id, "SUCCEEDED")
    assert semel("wait", server.ended("fail", {}))[0] == 1


def test_show_says_why_a_run_waits(server: CliServer, semel: Told) -> None:
    run_id = server.submit("add", {"a": 1}, queue=UNSERVED)
    assert f"no live worker serves the queue '{UNSERVED}'" in semel("show", run_id)[1]
    assert UNSERVED in json.loads(semel("show", run_id, "--json")[1])["waiting"]["reason"]


def test_a_failure_is_shown_with_its_error(server: CliServer, semel: Told) -> None:
    run_id = server.ended("fail", {"why": "no paper"})
    assert "no paper" in semel("show", run_id)[1]
    code, out, err = semel("result", run_id)
    assert (code, out) == (1, "")
    assert "FAILED" in err


def test_a_part_of_an_id_is_enough(server: CliServer, semel: Told) -> None:
    run_id = server.submit("add", {"a": 1}, queue=UNSERVED)
    assert json.loads(semel("show", run_id[-8:], "--json")[1])["run"]["run_id"] == run_id
    assert json.loads(semel("show", run_id[-14:].upper(), "--json")[1])["run"]["run_id"] == run_id
    assert json.loads(semel("show", run_id.replace("-", ""), "--json")[1])["run"]["run_id"] == run_id
    server.submit("add", {"a": 1}, queue=UNSERVED)
    code, _, err = semel("cancel", run_id[:7])
    assert code == 1
    assert re.search(r"several runs begin or end with '.*', such as .* and ", err)


def test_every_short_id_of_the_dashboard_is_found_however_old(
    server: CliServer, semel: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_ids, "WINDOW", 2)  # as if there were very many runs
    monkeypatch.setattr(partial_ids, "SCAN_SECONDS", 0.0)  # a request for each window
    run_id = server.submit("add", {"a": 1}, queue=UNSERVED)
    for _ in range(9):
        server.submit("add", {"a": 1}, queue=UNSERVED)
    for part in (short_id(run_id), run_id[-6:], run_id[:30]):
        assert json.loads(semel("show", part, "--json")[1])["run"]["run_id"] == run_id
    code, _, err = semel("show", "0123456789ab")
    assert (code, err) == (1, "semel: no run begins or ends with '0123456789ab'\n")
    assert "not a run id, nor at least six" in semel("show", "a-b-c-d-e")[2]


async def diverge() -> dict[str, float]:
    return {"loss": float("nan")}


def test_a_result_that_is_not_finite_is_printed_as_json_with_its_warning(
    server: CliServer, semel: Told, tmp_path: Path
) -> None:
    server.app.model("diverge")(diverge)
    run_id = server.ended("diverge", {})
    code, out, err = semel("result", run_id)
    assert (code, json.loads(out)) == (0, {"loss": None})
    assert err.startswith("semel: warning: $.loss is nan")
    target = tmp_path / "result.json"
    assert semel("result", run_id, "-o", str(target))[:2] == (0, "")
    assert json.loads(target.read_text()) == {"loss": None}
    assert re.search(r"^warnings +\$\.loss is nan", semel("show", run_id)[1], re.MULTILINE)


def test_a_result_is_printed_and_written(server: CliServer, semel: Told, tmp_path: Path) -> None:
    run_id = server.ended("add", {"a": 1, "b": "zwölf \x1b[31m"})
    code, out, err = semel("result", run_id)
    assert (code, err) == (0, "")
    assert json.loads(out) == {"text": "zwölf \x1b[31m"}
    assert "\x1b" not in out
    target = tmp_path / "result.json"
    assert semel("result", run_id, "-o", str(target))[:2] == (0, "")
    assert json.loads(target.read_text()) == {"text": "zwölf \x1b[31m"}
    code, _, err = semel("result", run_id, "-o", str(tmp_path / "missing" / "result.json"))
    assert code == 1
    assert "missing" in err
    assert "Traceback" not in err


def test_a_file_that_a_run_left_is_fetched(server: CliServer, tmp_path: Path, capfdbinary: Any) -> None:
    run_id = server.ended("leave", {"text": "Dear reader"})
    target = tmp_path / "letter.txt"
    assert "notes/a letter.txt (11 B)" in main_out(capfdbinary, "show", run_id)
    assert main(["result", run_id, "--artifact", "notes/a letter.txt", "-o", str(target)]) == 0
    assert target.read_text() == "Dear reader"
    capfdbinary.readouterr()
    assert main_out(capfdbinary, "result", run_id, "--artifact", "notes/a letter.txt") == "Dear reader"
    assert main(["result", run_id, "--artifact", "another", "-o", str(tmp_path / "another")]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["letter.txt"]


def main_out(capture: Any, *arguments: str) -> str:
    assert main(arguments) == 0
    return str(capture.readouterr().out.decode())


def test_logs_are_printed_and_followed_to_the_end(server: CliServer, semel: Told) -> None:
    run_id = server.ended("add", {"a": 1})
    code, out, _ = semel("logs", run_id)
    assert code == 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO    adding 1 to 10\n", out)
    assert json.loads(semel("logs", run_id, "--json")[1])["text"] == "adding 1 to 10"
    run_id = server.submit("hold", {"why": "for the log"})
    server.until(run_id, lambda run: run.status == "RUNNING")
    threading.Timer(0.2, server.gate.set).start()
    code, out, _ = semel("logs", run_id, "--follow")
    assert code == 0
    assert "holding for the log" in out
    assert server.app.get(run_id).done


def test_cancel_and_retry_take_several_and_tell_of_each(server: CliServer, semel: Told) -> None:
    ids = [server.submit("add", {"a": number}, queue=UNSERVED) for number in range(2)]
    done = server.ended("add", {"a": 1})
    code, out, err = semel("cancel", ids[0], done, "--why", "no need", ids[1])
    assert code == 1
    assert out == "".join(f"{each} CANCELLED\n" for each in ids)
    assert "SUCCEEDED already" in err
    assert server.app.timeline(ids[0])[-1].note == "no need"
    code, out, err = semel("retry", *ids)
    assert (code, err) == (0, "")
    again = out.split()
    assert [server.app.get(each).retry_of for each in again] == ids
    assert semel("retry", ids[0])[1].split() == again[:1]
    told = json.loads(semel("cancel", "--json", *again)[1])
    assert [run["status"] for run in told["runs"]] == ["CANCELLED", "CANCELLED"]


def test_a_running_run_is_asked_to_end(server: CliServer, semel: Told) -> None:
    run_id = server.submit("hold", {})
    server.until(run_id, lambda run: run.status == "RUNNING")
    code, out, _ = semel("cancel", run_id)
    assert (code, out) == (0, f"{run_id} will be cancelled\n")
    server.until(run_id, lambda run: run.status == "CANCELLED")


def test_models_workers_and_sums_are_told(server: CliServer, semel: Told) -> None:
    server.ended("add", {"a": 1})
    code, out, _ = semel("models")
    assert code == 0
    assert re.search(r"^add +a\* b +default +Adds, and says so\.$", out, re.MULTILINE)
    assert {model["name"] for model in json.loads(semel("models", "--json")[1])["models"]} >= {
        "add",
        "fail",
        "falter",
        "leave",
        "hold",
    }
    code, out, _ = semel("workers")
    assert code == 0
    assert re.search(r"\balive +\d+ +default +loop:100 thread:1\b", out)
    assert [
        worker["alive"]
        for worker in json.loads(semel("workers", "--json")[1])["workers"]
        if "default" in worker["queues"]
    ] == [True]
    code, out, _ = semel("summary")
    assert code == 0
    assert re.search(r"^add +\d+ +\d+ +[1-9]\d* +\d+ +\d+ +[\d.]+ s$", out, re.MULTILINE)
    assert "GROUP" in semel("summary", "--grouped")[1]
    (added,) = [each for each in json.loads(semel("summary", "--json")[1])["summary"] if each["model"] == "add"]
    assert added["counts"]["SUCCEEDED"] >= 1


def test_warnings_of_a_quota_are_told(server: CliServer, semel: Told) -> None:
    server.app.set_quota("warned", Quota(max_concurrent=1, action="warn"))
    code, _, err = semel("submit", "add", "a=1", "--user", "warned", "--queue", UNSERVED)
    assert code == 0
    assert "1 of 1 concurrent jobs in use" in err


def test_a_job_is_submitted_once_shown_listed_and_cancelled(
    server: CliServer, semel: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEMEL_DB", server.app.url)
    body = {"model": "add", "parameters": {"a": 1}, "queue": UNSERVED}
    assert semel("config", "set", "sums", json.dumps(body))[0] == 0
    code, out, err = semel("job", "submit", "sums", "--key", "job-1")
    assert (code, err) == (0, "")
    job_id = out.strip()
    assert ID.fullmatch(job_id)
    again = semel("job", "submit", "sums", "--key", "job-1")
    assert again[1] == out
    assert "the job existed already" in again[2]
    code, out, _ = semel("job", "show", job_id)
    assert code == 0
    for part in (job_id, "sums", "local", "job-1"):
        assert part in out
    code, out, _ = semel("jobs", "--config", "sums")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["JOB", job_id]
    told = json.loads(semel("jobs", "--json")[1])
    assert [job["job_id"] for job in told["jobs"]] == [job_id]
    assert json.loads(semel("job", "cancel", job_id[-10:], "--json")[1])["status"] == "cancelled"
    assert semel("jobs", "--status", "queued") == (0, "", "there are no such jobs\n")
    assert semel("job", "submit", "sums", "--key", "")[:2] == (1, "")


def test_a_job_that_is_refused_is_told_in_words_of_its_config(
    server: CliServer, semel: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEMEL_DB", server.app.url)
    for name in ("odd", "even"):
        assert semel("config", "set", name, '{"model": "nosuch", "parameters": {}}')[0] == 0
    code, out, err = semel("job", "submit", "odd")
    assert (code, out) == (1, "")
    assert err.startswith("semel: no job was created from the config 'odd': unknown model 'nosuch'; there are: add, ")
    assert "HTTP" not in err
    assert "JOB_REFUSED" not in err
    code, out, err = semel("job", "submit", "missing")
    assert (code, out) == (1, "")
    assert err.startswith("semel: Unknown config: missing; there are: ")
    assert {"odd", "even"} <= set(re.split(r"[,:;] ", err))


def test_a_job_is_shown_with_its_data_in_words_and_how_to_get_its_result(
    server: CliServer, semel: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEMEL_DB", server.app.url)
    assert semel("config", "set", "done", '{"model": "add", "parameters": {"a": 1}}')[0] == 0
    job_id = semel("job", "submit", "done")[1].strip()
    server.until(job_id, lambda run: run.done)
    code, out, _ = semel("job", "show", job_id)
    assert code == 0
    assert re.search(rf"^result +semel result {job_id}$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("upload", "said"),
    [
        (RemoteUpload(state="waiting"), "waiting"),
        (RemoteUpload(state="uploading", bytes=512, total=2048), "uploading, 512 B of 2.0 KiB"),
        (RemoteUpload(state="uploaded", bytes=2, total=2, data_ref="x"), "uploaded, 2 B"),
        (RemoteUpload(state="uploading", total=2), "uploading, 0 B of 2 B"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_data_of_a_job_is_told_in_words(
    upload: RemoteUpload, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = RemoteJob(
        job_id="1",
        status="uploading",
        provider="local",
        config_name="sums",
        created_at=datetime.now(UTC),
        upload=upload,
    )
    print_job(job, as_json=False)
    assert f"data       {said}\n" in capsys.readouterr().out


def test_a_run_that_nobody_serves_is_submitted_with_a_remark(server: CliServer, semel: Told) -> None:
    code, out, err = semel("submit", "add", "a=501", "--queue", "nosuch")
    assert (code, ID.fullmatch(out.strip()) is not None) == (0, True)
    assert err == "semel: no live worker serves the queue 'nosuch'; the run waits until one does\n"
    code, out, err = semel("submit", "add", "a=502", "--queue", "nosuch", "--json")
    assert (code, json.loads(out)["status"]) == (0, "PENDING")
    assert "no live worker" in err
    code, out, err = semel("submit", "add", "a=503", "--queue", "nosuch", "--wait", "--timeout", "0.1s")
    assert code == 1
    assert "no live worker" in err
    assert semel("submit", "add", "a=504", "--queue", "nosuch", "--delay", "1h")[2] == ""


def test_the_fields_of_a_run_that_waits_are_in_line(server: CliServer, semel: Told) -> None:
    run_id = server.submit("add", {"a": 1}, queue=UNSERVED)
    code, out, _ = semel("show", run_id)
    assert code == 0
    fields = out.partition("\n\n")[0].splitlines()
    assert fields[-1].startswith("waits")
    assert {re.match(r"[a-z ]+?  +", line).end() for line in fields} == {12}  # type: ignore[union-attr]


@pytest.fixture
def guarded(
    migrated_sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[TestServer, str]]:
    """A server that wants tokens, and the URL of its database."""
    app = make_app(migrated_sqlite_url, tmp_path)
    add_models(app, threading.Event())
    with serve(app) as service:
        monkeypatch.setenv("SEMEL_SERVER", service.address)
        yield service, migrated_sqlite_url
    app.close()


def test_a_token_of_the_command_opens_the_server(
    guarded: tuple[TestServer, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, url = guarded
    capsys.readouterr()
    assert main(["token", "create", "--db", url, "--user", "alice"]) == 0
    secret = capsys.readouterr().out.strip()
    assert tokens.parse(secret) is not None
    assert main(["runs"]) == 1
    assert "a token is required: give one by --token, $SEMEL_TOKEN or" in capsys.readouterr().err
    assert main(["runs", "--token", secret]) == 0
    monkeypatch.setenv("SEMEL_TOKEN", secret)
    assert main(["submit", "add", "a=1"]) == 0
    monkeypatch.delenv("SEMEL_TOKEN")
    file = tmp_path / "token"
    file.write_text(f"{secret}\n")
    monkeypatch.setenv("SEMEL_TOKEN_FILE", str(file))
    capsys.readouterr()
    assert main(["runs", "--json"]) == 0
    assert [run["user"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["alice"]
    monkeypatch.setenv("SEMEL_TOKEN_FILE", str(tmp_path / "nowhere"))
    assert main(["runs"]) == 1
    assert "SEMEL_TOKEN_FILE" in capsys.readouterr().err
    monkeypatch.setenv("SEMEL_TOKEN", f"{secret[:-4]}AAAA")
    assert main(["runs"]) == 1
    said = capsys.readouterr().err
    assert secret[-43:-4] not in said
