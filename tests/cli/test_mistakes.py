"""What is typed wrongly is named as it was typed; and what has two spellings is understood in both."""

from pathlib import Path

import pytest

from semel.cli import main
from support.cli import parsed
from support.serve_command import ServeProcess, command
from support.waiting import eventually

USAGE = 2


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The last line of what is said of a mistake in the use."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == USAGE
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("usage: semel")
    return said.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("submit --wiat", "semel submit: error: unknown option: --wiat; is it --wait?"),
        ("submit add a=1 --wiat", "semel submit: error: unknown option: --wiat; is it --wait?"),
        ("submit --coast=3", "semel submit: error: unknown option: --coast; is it --cost?"),
        ("submit -x", "semel submit: error: unknown option: -x"),
        ("submit add --cost 3 -z 4", "semel submit: error: unknown option: -z"),
        ("runs --stats FAILED", "semel runs: error: unknown option: --stats; is it --status?"),
        ("job submit --kye 1", "semel job submit: error: unknown option: --kye; is it --key?"),
        ("job --fast", "semel job: error: unknown option: --fast"),
        ("--versoin", "semel: error: unknown option: --versoin; is it --version?"),
        ("submit", "semel submit: error: missing argument: MODEL"),
        ("submit --wait", "semel submit: error: missing argument: MODEL"),
        ("submit --cost -1", "semel submit: error: --cost: '-1' must be a number, 0 or greater"),
    ],
    ids=lambda value: value if " error: " not in value else "",
)
def test_a_word_that_is_not_known_is_named(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *arguments.split()) == said


@pytest.mark.parametrize(
    "typed",
    [
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
    ],
)
def test_a_value_that_makes_no_sense_is_named_by_its_option(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    option, value = typed.split()[-2:]
    said = refused(capsys, *typed.split())
    names, _, why = said.partition(" error: ")[2].partition(": ")
    assert option in names.split("/")
    assert f"'{value}'" in why


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
