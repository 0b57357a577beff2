"""What is typed wrongly is named as it was typed; and what has two spellings is understood in both."""

import re
import shlex
from pathlib import Path

import pytest

from semel.cli import main
from support.cli import parsed
from support.serve_command import ServeProcess, command
from support.waiting import eventually

MISTAKES: dict[str, str] = {
    "submit --wiat": "semel submit: error: unknown option: --wiat; is it --wait?",
    "submit add a=1 --wiat": "semel submit: error: unknown option: --wiat; is it --wait?",
    "submit --coast=3": "semel submit: error: unknown option: --coast; is it --cost?",
    "submit -x": "semel submit: error: unknown option: -x",
    "submit add --cost 3 -z 4": "semel submit: error: unknown option: -z",
    "runs --stats FAILED": "semel runs: error: unknown option: --stats; is it --status?",
    "job submit --kye 1": "semel job submit: error: unknown option: --kye; is it --key?",
    "job --fast": "semel job: error: unknown option: --fast",
    "--versoin": "semel: error: unknown option: --versoin; is it --version?",
    "submit": "semel submit: error: missing argument: MODEL",
    "submit --wait": "semel submit: error: missing argument: MODEL",
    "submit --cost -1": "semel submit: error: --cost: '-1' must be a number, 0 or greater",
    "audit verify --signed-from 5": "semel audit verify: error: --signed-from needs --key, or it checks nothing",
}
"""What is typed, and the last line of the refusal."""

VALUES = [
    "submit add --cost -1",
    "submit add --cost nan",
    "submit add --cost inf",
    "submit add --cost 1000001",
    "submit add --cost much",
    "submit add --delay -1",
    "submit add --timeout -1",
    "submit add --priority 2147483648",
    "submit add --priority high",
    "runs --limit 0",
    "runs --limit -5",
    "jobs --limit 0",
    "serve --port 80a",
    "serve --port 70000",
    "serve --port -1",
    "serve --processes 0",
    "serve --processes many",
    "serve --max-body 0",
    "serve --rate -1",
    "serve --drain -1",
    "serve --concurrency x",
    "serve --worker-processes -1",
    "serve --threads x",
    "serve --queues a,,b",
    "serve --log-format loud",
    "worker --concurrency -1",
    "worker --processes x",
    "worker --threads x",
    "worker --drain -1",
    "worker --queue ,",
    "worker --log loud",
    "sweep --every -1",
]
"""The last word makes no sense for the option before it; the refusal names both."""

OTHERS = [
    "token create",
    "token create --user a --role king",
    "token create --user a --ttl long",
    "token revoke",
    "quota set a --per-day some",
    "quota set a --cost-daily much",
    "quota set a --action sing",
    "keys resolve k",
    "keys resolve k --done --not-done",
    "keys resolve k --done --value text",
    "config set a '[]'",
    "config set a @/no/such/file.toml",
    "quota set a",
    "gc --older-than -1d",
    "gc --older-than 3",
    "doctor --transport pigeon",
    "completion powershell",
    "submit add a",
    "submit add --wait a",
    "submit add =1",
    "submit add --params '[1]'",
    "submit add --params '{'",
    "submit add --params @/no/such/file",
    "submit add a=1 --fast",
    "submit add --delay soon",
    "runs --limit x",
    "runs --status LOST",
    "runs --since yesterday",
    "runs more",
    "cancel",
    "job submit",
    "fly",
    "migrate sqlite:///x.db y",
    "migrate --fast",
]


def expected(typed: str) -> str:
    """The last line of a refusal, as a pattern."""
    if typed in MISTAKES:
        return re.escape(MISTAKES[typed])
    if typed in VALUES:
        option, value = typed.split()[-2:]
        return rf"semel .*error: (\S+/)?{option}(/\S+)?: .*'{re.escape(value)}'.*"
    return r"semel.* error: .+"


@pytest.mark.parametrize("typed", [*MISTAKES, *VALUES, *OTHERS])
def test_a_mistake_is_named_in_one_line_after_the_usage_and_nothing_is_done(
    typed: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(typed))
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("usage: semel")
    assert "Traceback" not in said.err
    *usage, why = said.err.splitlines()
    assert re.fullmatch(expected(typed), why)
    assert not any(" error: " in line for line in usage)
    assert list(tmp_path.iterdir()) == [], "no database was made"


def test_a_group_alone_shows_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["token"])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert (said.out, "  rotate " in said.err) == ("", True)
    assert said.err.startswith("usage: semel token")


@pytest.mark.parametrize(
    ("typed", "queues"),
    [
        ("", None),
        ("-q a", ["a"]),
        ("--queue a --queue b", ["a", "b"]),
        ("--queues a,b", ["a", "b"]),
        ("--queues a,b --queue c -q d", ["a", "b", "c", "d"]),
    ],
)
@pytest.mark.parametrize("name", ["worker", "serve"])
def test_queues_are_named_with_commas_or_one_by_one(name: str, typed: str, queues: list[str] | None) -> None:
    assert parsed([name, *typed.split()])["queues"] == queues


@pytest.mark.parametrize(
    ("typed", "kind"),
    [("", None), ("--log text", "pretty"), ("--log json", "json"), ("--log-format pretty", "pretty")],
)
@pytest.mark.parametrize("name", ["worker", "serve"])
def test_how_to_log_is_said_in_both_spellings(name: str, typed: str, kind: str | None) -> None:
    assert parsed([name, *typed.split()])["log_format"] == kind


def test_a_value_of_the_environment_is_named_by_its_variable(tmp_path: Path) -> None:
    done = command("serve", cwd=tmp_path, SEMEL_PORT="80a")
    assert done.returncode == 1
    assert done.stderr.startswith("semel: SEMEL_PORT is '80a'")


def test_a_server_warns_of_folders_that_it_cannot_use(tmp_path: Path, sqlite_url: str) -> None:
    (tmp_path / "letter.txt").write_text("Dear reader")
    place = str(tmp_path / "letter.txt" / "artifacts")
    with ServeProcess(
        tmp_path, "--db", sqlite_url, "--no-worker", "--configs", "nofolder", "--artifacts", place
    ) as serving:
        eventually(lambda: "(--artifacts)" in serving.log, "it warns")
        assert "there is no folder nofolder (--configs)" in serving.log
        assert f"{place} (--artifacts) cannot be written (Not a directory)" in serving.log
        assert "Traceback" not in serving.log


def test_a_server_serves_the_queues_that_are_named_and_warns_of_nothing_that_is_well(
    tmp_path: Path, sqlite_url: str
) -> None:
    (tmp_path / "configs").mkdir()
    where = ["--db", sqlite_url, "--configs", "configs", "--artifacts", str(tmp_path / "made" / "here")]
    with ServeProcess(tmp_path, *where, "--queue", "one", "--queues", "two,three") as serving:
        eventually(lambda: "worker started on one, two, three" in serving.log, "the worker starts")
        assert "(--" not in serving.log
    assert list((tmp_path / "made" / "here").iterdir()) == []


def test_a_database_that_is_made_on_the_way_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever meant that of their server sees that this is another one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SEMEL_DB", raising=False)
    assert main(["token", "create", "--user", "root", "--role", "admin"]) == 0
    assert "creating a new database: semel.db (use another with --db or SEMEL_DB)" in capsys.readouterr().err
    assert main(["token", "create", "--user", "ann"]) == 0
    assert "a new database" not in capsys.readouterr().err
