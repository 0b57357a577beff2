"""The `semel` command: what it prints, how it ends, and never a traceback."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from sqlalchemy import make_url

from semel import App, Once, __version__
from semel._concurrency.sync import run_sync
from semel.cli import GROUPS, cli, main
from semel.db.schema import REVISIONS
from semel.runs.store import lease
from semel.runs.store.lease import LeaseRequest
from semel.testing import FakeClock
from support import servers
from support.cli import parsed

USAGE, FAILURE = 2, 1
NEWEST = REVISIONS[-1]


def told(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    said = capsys.readouterr()
    return said.out, said.err


def semel(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command itself, as a shell would start it."""
    program = Path(sys.executable).with_name("semel")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_the_command_migrates(sqlite_url: str) -> None:
    done = semel("migrate", sqlite_url)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"migrated from nothing to {NEWEST}\n", "")
    with Once(sqlite_url) as once:
        assert once.call("key", lambda: 7).value == 7


def test_the_module_is_the_same_command(sqlite_url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "semel.cli", "migrate", sqlite_url, "--json"],
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout) == {"before": None, "after": NEWEST}


def test_json_is_for_programs(postgres_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert [main(["migrate", postgres_url, "--json"]) for _ in range(2)] == [0, 0]
    out, err = told(capsys)
    assert [json.loads(line) for line in out.splitlines()] == [
        {"before": None, "after": NEWEST},
        {"before": NEWEST, "after": NEWEST},
    ]
    assert err == ""


def test_the_short_name_of_postgresql_is_understood(postgres_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", postgres_url.replace("postgresql://", "postgres://", 1)]) == 0
    with Once(postgres_url) as once:
        assert once.call("key", lambda: 7).value == 7


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_a_url_with_a_driver_is_understood(postgres_url: str, driver: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The URL of a user's own engine."""
    url = make_url(postgres_url).set(drivername=f"postgresql+{driver}").render_as_string(hide_password=False)
    assert main(["migrate", url]) == 0


BAD_URLS = {
    "not a URL": ("nonsense", "not a URL"),
    "empty": ("", "not a URL"),
    "an unknown kind": ("mysql://user:hunter2@host/name", "mysql"),
    "Redis": ("redis://localhost/0", "redis"),
    "memory": ("memory://", "memory"),
    "SQLite without a file": ("sqlite://", "file"),
    "a port that is none": ("postgresql://user:hunter2@host:port/name", "URL"),
    "a server that is not there": ("postgresql://user:hunter2@127.0.0.1:1/name", "127.0.0.1"),
    "a directory that does not exist": ("sqlite:////does/not/exist/semel.db", "unable to open"),
}


@pytest.mark.parametrize(("url", "expected"), BAD_URLS.values(), ids=BAD_URLS.keys())
def test_what_cannot_be_migrated_is_said_in_one_line(
    url: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No traceback, no password, exit code 1."""
    assert main(["migrate", url]) == FAILURE
    out, err = told(capsys)
    assert out == ""
    assert err.startswith("semel: ")
    assert expected in err
    assert err.count("\n") == 1
    assert "hunter2" not in err


def test_a_file_that_is_no_database_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    letter = tmp_path / "letter.txt"
    letter.write_text("Dear reader, " * 1000)
    assert main(["migrate", f"sqlite:///{letter}"]) == FAILURE
    assert "not a database" in told(capsys)[1]
    assert letter.read_text().startswith("Dear reader")


def test_a_database_that_does_not_exist_is_said_in_one_line(
    postgres_server: servers.Postgres, capsys: pytest.CaptureFixture[str]
) -> None:
    url = make_url(postgres_server.url).set(database="missing").render_as_string(hide_password=False)
    assert main(["migrate", url]) == FAILURE
    _, err = told(capsys)
    assert "missing" in err
    assert err.count("\n") == 1


def test_the_bare_command_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == USAGE
    said = told(capsys)[1]
    assert said.startswith("usage: semel COMMAND")
    assert "  submit " in said


def test_help_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["migrate", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        assert "migrate" in told(capsys)[0]


def test_a_failure_in_a_shell_has_no_traceback(tmp_path: Path) -> None:
    done = semel("migrate", f"sqlite:///{tmp_path / 'missing' / 'semel.db'}")
    assert done.returncode == FAILURE
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("semel: ")


APP = """
from semel import App

app = App("{url}", artifacts="{folder}/artifacts")


@app.model("double")
def double(number: int) -> int:
    return 2 * number
"""


def test_a_worker_of_the_command_runs_the_apps_runs_and_stops_when_told(tmp_path: Path, sqlite_url: str) -> None:
    (tmp_path / "shop.py").write_text(APP.format(url=sqlite_url, folder=tmp_path))
    command = [sys.executable, "-m", "semel.cli", "worker", "shop:app", "--processes", "1"]
    app = App(sqlite_url)
    app.model("double", isolation="thread")(lambda number: 2 * number)
    app.runs()
    worker = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        run = app.submit("double", {"number": 21})
        assert app.wait(run.id, timeout=60).status == "SUCCEEDED"
        assert app.result(run.id) == 42
        app.close()
    finally:
        worker.terminate()
        _, said = worker.communicate(timeout=60)
    assert worker.returncode == 0, said
    assert "worker started on default" in said
    assert "worker stopped" in said
    assert "a new one is made" not in said


def test_a_worker_that_finds_no_file_says_which_one_it_makes(tmp_path: Path) -> None:
    """A relative path in another folder than the server's: what is submitted there would not be seen here."""
    (tmp_path / "shop.py").write_text(APP.format(url="sqlite:///shop.db", folder=tmp_path))
    command = [sys.executable, "-m", "semel.cli", "worker", "shop:app", "--processes", "1"]
    worker = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert worker.stderr is not None
    said = ""
    while "worker started" not in said and (line := worker.stderr.readline()):
        said += line
    worker.terminate()
    worker.communicate(timeout=60)
    file = tmp_path / "shop.db"
    assert f"there is no database file at {file}, so a new one is created" in said
    assert "Set --db to the path of the server's file" in said
    assert f"worker started on default of {file} with double" in said


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("shop", "'shop' does not name an app; use MODULE:APP, such as myproject.runs:app"),
        ("./shop:app", "'./shop:app' does not name an app; use MODULE:APP, such as myproject.runs:app"),
        ("shop.py:app", "use the module's name, not its file: shop:app"),
        ("json:app", "the module 'json' has no 'app'; there is no semel.App in it"),
        ("semel.demo:ap", "the module 'semel.demo' has no 'ap'; there is app"),
        ("json:dumps", "'json:dumps' is a function, not a semel.App; create the app at the top level of a module"),
    ],
)
def test_a_wrong_place_of_an_app_is_told(capsys: pytest.CaptureFixture[str], place: str, told: str) -> None:
    assert main(["worker", place]) == 1
    assert capsys.readouterr().err == f"semel: {told}\n"


def started_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "semel.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_a_module_that_is_not_there_is_told_with_where_it_was_looked_for(tmp_path: Path) -> None:
    done = started_in(tmp_path, "worker", "nowhere:app")
    assert done.returncode == 1
    assert done.stderr == f"semel: there is no module 'nowhere' in {tmp_path} or elsewhere on the path\n"


def test_a_module_that_fails_is_told_with_the_users_own_lines(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("import math\n\nmath.nonsense()\n")
    done = started_in(tmp_path, "worker", "shop:app")
    assert done.returncode == 1
    assert done.stderr.startswith("semel: cannot import 'shop'\nTraceback (most recent call last):\n")
    assert 'shop.py", line 3' in done.stderr
    assert "AttributeError: module 'math' has no attribute 'nonsense'" in done.stderr
    assert "importlib" not in done.stderr


def test_sweep_takes_back_what_a_dead_worker_held(tmp_path: Path, sqlite_url: str) -> None:
    (tmp_path / "shop.py").write_text(APP.format(url=sqlite_url, folder=tmp_path))
    clock = FakeClock(time.time() - 3600)
    app = App(sqlite_url, clock=clock)
    app.model("double", isolation="thread")(lambda number: 2 * number)
    run = app.submit("double", {"number": 1})
    run_sync(
        app._engine.store.write(
            lease.lease, LeaseRequest("dead", ("default",), ["double"], 1), app._engine.store.statement_context
        )
    )
    command = [sys.executable, "-m", "semel.cli", "sweep", "shop:app"]
    once = subprocess.run([*command, "--once"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert once.stdout == "1 lost runs were recovered\n"
    assert (app.get(run.id).status, app.get(run.id).losts) == ("PENDING", 1)
    run_sync(
        app._engine.store.write(
            lease.lease, LeaseRequest("dead", ("default",), ["double"], 1), app._engine.store.statement_context
        )
    )
    sweeper = subprocess.Popen([*command, "--every", "0.1"], cwd=tmp_path)
    try:
        deadline = time.monotonic() + 60
        while app.get(run.id).losts < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)  # another process is at work
    finally:
        sweeper.terminate()
        assert sweeper.wait(30) == 0
    app.close()


def every(context: click.Context) -> Iterator[click.Context]:
    """The commands under this one, and theirs."""
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            command = context.command.get_command(context, name)
            assert command is not None
            each = click.Context(command, context, name)
            yield each
            yield from every(each)


COMMANDS = {each.command_path: each for each in every(click.Context(cli, info_name="semel"))}
PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_help_shows_every_command_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(name.split()[1] for name in COMMANDS if name.count(" ") == 1)
    with pytest.raises(SystemExit):
        main(["--help"])
    out, _ = told(capsys)
    for name in grouped:
        assert re.search(rf"^  {name} +\w", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example_of_it(name: str) -> None:
    said = COMMANDS[name].get_help()
    if "VERB ..." in said.split("\n\n")[0]:
        return
    assert f"  {name}" in said.partition("examples:\n")[2]


def test_what_prints_a_table_or_an_object_can_print_json() -> None:
    quiet = {"semel serve", "semel worker", "semel sweep", "semel completion"}
    verbs = {name for name in COMMANDS if not any(other.startswith(f"{name} ") for other in COMMANDS)}
    without = {name for name in verbs if "--json" not in COMMANDS[name].get_help()}
    as_lines = {"semel audit export", "semel audit prove"}  # they print JSON anyway
    assert without == quiet | as_lines


def test_every_command_and_every_option_is_on_the_page() -> None:
    page = PAGE.read_text()
    headings = [found[1] for found in re.finditer(r"^#{2,4} `(semel [a-z ]+)`$", page, re.MULTILINE)]
    assert sorted(headings) == sorted(COMMANDS)
    for name, command in COMMANDS.items():
        section = re.split(r"^#{2,4} ", page.partition(f" `{name}`\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
        if not any(other.startswith(f"{name} ") for other in COMMANDS):
            assert name in section, f"{name} has no example"
        if name == "semel serve":
            continue  # has a page of its own
        names = [name for param in command.command.get_params(command) for name in (*param.opts, *param.secondary_opts)]
        options = {option for option in names if option[:2] == "--"}
        shared = {"--help", "--json", "--server", "--token", "--db", "--app"}
        assert [option for option in sorted(options - shared) if f"`{option}" not in section] == [], name


def examples() -> list[str]:
    """Every line that the page and the helps show, up to where the shell takes over."""
    said = [PAGE.read_text(), *(each.command.help or "" for each in COMMANDS.values())]
    lines = [line.strip() for text in said for line in text.splitlines()]
    shown = [line for line in lines if re.match(r"semel [a-z]+\b", line) and "  " not in line]
    return sorted({re.split(r" [>|;#]", line)[0] for line in shown} - {"semel COMMAND --help"})


@pytest.mark.parametrize("line", examples())
def test_every_example_can_be_typed(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("inputs.json").write_text("{}")
    Path("nightly.toml").write_text("")
    assert isinstance(parsed(shlex.split(line)[1:]), dict)


LIGHT = """
import sys
from semel.cli import main
try:
    main({arguments!r})
except SystemExit:
    pass
heavy = ("litestar", "sqlalchemy", "httpx", "alembic", "asyncio", "redis", "rich")
print([name for name in heavy if name in sys.modules])
"""


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["submit", "--help"], ["serve", "--help"]], ids=" ".join
)
def test_help_loads_no_more_than_it_needs(arguments: list[str]) -> None:
    code = LIGHT.format(arguments=arguments)
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.splitlines()[-1] == "[]"


COMPLETIONS = [
    ("semel qu", ["quota"]),
    ("semel quota se", ["set"]),
    ("semel gc --old", ["--older-than"]),
    ("semel token create --role op", ["operator"]),
]


def completed(line: str, script: Path) -> list[str]:
    """What bash offers for the last word of a line."""
    asked = (
        f"source {script}; COMP_WORDS=({line}); COMP_CWORD={line.count(' ')}; _semel_completion; echo ${{COMPREPLY[@]}}"
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", asked], env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_a_shell_learns_to_complete_the_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for shell in ("zsh", "fish", "bash"):
        assert main(["completion", shell]) == 0
        script, said = told(capsys)
        assert "_SEMEL_COMPLETE" in script
        assert said == ""
    bash = tmp_path / "semel.bash"
    bash.write_text(script.replace("$1)", "semel)"))
    assert {line: completed(line, bash) for line, _ in COMPLETIONS} == dict(COMPLETIONS)


def test_the_database_to_migrate_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEMEL_DB", f"sqlite:///{tmp_path / 'mine.db'}")
    assert main(["migrate"]) == 0
    assert main(["migrate", "--db", f"sqlite:///{tmp_path / 'other.db'}"]) == 0
    assert sorted(path.name for path in tmp_path.glob("*.db")) == ["mine.db", "other.db"]
    assert told(capsys)[0] == 2 * f"migrated from nothing to {NEWEST}\n"


def test_a_worker_is_put_on_another_database_and_without_an_app_it_is_the_demos(
    tmp_path: Path, sqlite_url: str
) -> None:
    command = [sys.executable, "-m", "semel.cli", "worker", "--processes", "1"]
    where = ["--db", sqlite_url, "--artifacts", str(tmp_path / "elsewhere")]
    worker = subprocess.Popen([*command, *where], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    app = App(sqlite_url, artifacts=tmp_path / "elsewhere")
    app.model("baseline_forecast_v1", isolation="thread")(lambda **parameters: parameters)
    try:
        run = app.submit("baseline_forecast_v1", {"seconds": 0.0})
        assert app.wait(run.id, timeout=60).status == "SUCCEEDED"
    finally:
        worker.terminate()
        _, said = worker.communicate(timeout=60)
        app.close()
    assert worker.returncode == 0, said
    assert "no MODULE:APP was given, so this uses the demo's app, semel.demo:app" in said


@pytest.mark.parametrize("command", ["worker", "sweep"])
def test_a_wrong_place_for_an_app_is_told(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"shop_of_{command}.py").write_text(APP.format(url=f"sqlite:///{tmp_path / 'x.db'}", folder=tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    place = f"shop_of_{command}:app"
    assert main([command, place, "--db", "redis://localhost/0"]) == FAILURE
    assert main([command, place, "--transport", "rq"]) == FAILURE
    monkeypatch.setenv("SEMEL_TRANSPORT", "pigeon")
    assert main([command, place]) == FAILURE
    lines = told(capsys)[1].splitlines()
    assert [line.startswith("semel: ") for line in lines] == [True, True, True]
    assert "redis" in lines[0]
    assert "redis" in lines[1]
    assert "pigeon" in lines[2]


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"semel {__version__}\n"
