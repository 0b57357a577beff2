"""B10: every attempt has a manifest, which says what it was made of, and costs a run nothing."""

import importlib.util
import json
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from acceptance.project import Project, wait_for
from semel import App, InvalidRequest, RunNotFound
from semel.errors import Drifted, StoreUnavailable
from semel.runs import manifest as collecting
from semel.runs.execution import child_main
from semel.runs.models.model import make_model
from semel.runs.store import manifests
from semel.runs.worker import manifests as writing
from semel.runs.worker.manifests import ManifestWriter
from support.databases import DATABASES, Databases, TestDatabase

DAY = 86400


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest, databases: Databases) -> Iterator[TestDatabase]:
    with databases.empty(request.param) as database:
        yield database


@pytest.fixture
def project(database: TestDatabase, tmp_path: Path) -> Iterator[Project]:
    with ExitStack() as stack:
        yield Project(tmp_path / "project", database.url, stack)


def test_b10_an_attempt_says_on_what_and_with_which_code_it_ran(project: Project) -> None:
    commit = project.git("rev-parse", "HEAD")
    with project.worker(SEMEL_IMAGE="registry/image:7", SEMEL_MANIFEST_ENV="LANG_OF_TEST", LANG_OF_TEST="la"):
        run = project.run()
        others = {name: project.run(name) for name in ("forecast_async", "forecast_thread")}
    found = project.app.manifest(run.id)
    assert (found.run_id, found.model, found.attempt, found.attempts, found.step) == (
        run.id,
        "forecast",
        1,
        1,
        "succeeded",
    )
    assert found.parameters == {"x": 2.0}
    assert (found.payload_hash, found.fence, found.worker) == (run.payload_hash, run.fence, run.worker)
    assert found.result_digest == run.result_digest
    assert found.missing is None
    assert found.recorded_at is not None
    assert found.began_at is not None
    assert found.recorded_at <= found.began_at, "it was written before the attempt began"
    assert found.environment is not None
    assert found.environment["python"]["version"] == ".".join(map(str, sys.version_info[:3]))
    assert found.environment["packages"]["sqlalchemy"] == version("sqlalchemy")
    assert found.environment["image"] == "registry/image:7"
    assert found.environment["variables"] == {"LANG_OF_TEST": "la"}
    assert found.environment["cpu"]["count"] >= 1
    assert found.code is not None
    assert found.code["module"] == sha256(project.module.read_bytes()).hexdigest()
    assert len(found.code["function"]) == 64
    assert found.code["file"] == "forecasts.py"
    assert found.code["git"] == {"commit": commit, "branch": "trunk", "dirty": False, "untracked": {}}
    for name, each in others.items():
        other = project.app.manifest(each.id)
        assert other.code is not None
        assert (other.model, other.environment_digest) == (name, found.environment_digest), "stored once"
        assert other.code["function"] != found.code["function"]
        assert other.code["module"] == found.code["module"]


def test_b10_uncommitted_changes_are_a_bounded_patch_and_untracked_files_are_named(
    project: Project, database: TestDatabase
) -> None:
    project.edit("RATE = 2", "RATE = 3")
    (project.folder / "new.txt").write_text("untracked")
    with project.worker():
        small = project.run()
    found = project.app.manifest(small.id).code
    assert found is not None
    assert found["git"]["dirty"] is True
    assert "-RATE = 2\n+RATE = 3" in found["git"]["patch"]
    assert found["git"]["untracked"] == {"new.txt": sha256(b"untracked").hexdigest()}
    project.edit('"""Models', '"""' + "much more text\n" * 40_000 + "Models")
    with project.worker():
        large = project.run()
    found = project.app.manifest(large.id).code
    assert found is not None
    assert found["git"]["patch_truncated"] is True
    assert len(found["git"]["patch"]) == collecting.MAX_PATCH
    bodies = database.rows("SELECT body FROM semel_manifests")
    assert max(len(body) for (body,) in bodies) < 2 * collecting.MAX_PATCH


def test_b10_no_secret_enters_a_manifest(project: Project, database: TestDatabase) -> None:
    project.edit(
        "RATE = 2",
        'RATE = 2\nAPI_KEY = "in-the-patch-1"\nURL = "https://me:in-the-patch-2@example.org/x"\n'
        'SETTINGS = {"db_password": "in-the-patch-3"}\n',
    )
    (project.folder / "settings.ini").write_text("aws_secret_access_key = in-the-patch-4\nname = kept\n")
    project.git("add", "settings.ini")
    (project.folder / ".env").write_text("TOKEN=in-an-ignored-file\n")
    told = "DATABASE_URL,MY_TOKEN,PLAIN"
    with project.worker(
        SEMEL_MANIFEST_ENV=told,
        DATABASE_URL="postgresql://me:in-a-url@host/db",
        MY_TOKEN="in-a-token",
        PLAIN="kept",
        NOT_ASKED="not-asked-for",
    ):
        run = project.run()
    found = project.app.manifest(run.id)
    assert found.environment is not None
    assert found.environment["variables"] == {
        "DATABASE_URL": "postgresql://me:***@host/db",
        "MY_TOKEN": "***",
        "PLAIN": "kept",
    }
    assert found.code is not None
    assert found.code["git"]["patch_redacted"] is True
    assert "+name = kept" in found.code["git"]["patch"]
    assert '+API_KEY = "***"' in found.code["git"]["patch"]
    stored = str(database.rows("SELECT body FROM semel_manifests"))
    for secret in ("in-the-patch", "in-an-ignored-file", "in-a-url", "in-a-token", "not-asked-for"):
        assert secret not in stored


@pytest.mark.parametrize(
    ("line", "stored"),
    [
        ("+API_KEY = 'abc'", "+API_KEY = '***'"),
        ("+export MY_SECRET=a=b", "+export MY_SECRET=***"),
        ('+d["password"] = "x y"', '+d["password"] = "***"'),
        ("+password: str = 'x'", "+password: str = '***'"),
        ('+f(name="x", password="y")', '+f(name="x", password="***")'),
        ("-DB_PASSWD=x", "-DB_PASSWD=***"),
        ("+DB_PASS=x", "+DB_PASS=***"),
        ("+SMTP_PWD: 'x'", "+SMTP_PWD: '***'"),
        ("+STRIPE_KEY = 'x'", "+STRIPE_KEY = '***'"),
        ("+monkey = 'kept'  # passed", "+monkey = 'kept'  # passed"),
        ("+token = read_token()", "+token = read_token()"),
        ("+name = 'kept'", "+name = 'kept'"),
        ("+auth = 'ghp_0123456789abcdefghij0123'", "+auth = '***'"),
        ("+x = 'AKIA0123456789ABCDEF'", "+x = '***'"),
        ("+-----BEGIN RSA PRIVATE KEY-----\n+abc\n+-----END RSA PRIVATE KEY-----", "+***"),
        ("+token" + "b:" * 500_000, "+***"),
    ],
)
def test_b10_values_of_secrets_are_left_out_of_a_patch(line: str, stored: str) -> None:
    assert collecting.patch_without_secrets(line) == stored


@pytest.mark.parametrize(
    ("line", "stored"),
    [
        ("+API_KEY=hunter2\r", "+API_KEY=***\r"),
        ("+password: hunter2\r", "+password: ***\r"),
        ("+API_KEY=hunter2 ", "+API_KEY=*** "),
        ("+API_KEY=hunter2  # prod", "+API_KEY=***  # prod"),
        ('+password: hunter2 # it\'s "prod"', '+password: *** # it\'s "prod"'),
        ("+PASSWORD=hun;ter2", "+PASSWORD=***"),
        ("+password: hun;ter2,x", "+password: ***"),
        ("+PASSWORD=hun'ter2", "+PASSWORD=***"),
        ("+PASSWORD=hunter2, HOST=kept", "+PASSWORD=*** HOST=kept"),
        ("+  PASSWORD=hunter2 ./run --kept", "+  PASSWORD=*** ./run --kept"),
        ("+password: aHVudGVyMg=", "+password: ***"),
        ("+password: hunter=2", "+password: ***"),
        ('+PASSWORD = b"hunter2"', '+PASSWORD = b"***"'),
        ("+PASSWORD = f'hunter2{x}'", "+PASSWORD = f'***'"),
        ("+PASSWORD = Rb'hunter2'", "+PASSWORD = Rb'***'"),
        ('+password = """hunter2"""', '+password = """***"""'),
        ("+password = '''hunter2'''", "+password = '''***'''"),
        ('+password = """hunter2', '+password = """***'),
        ('+password = "hunter2 and', '+password = "***'),
        ('+password = ("hunter2")', '+password = ("***")'),
        ('+password = ("hun" "ter2"  # kept', '+password = ("***" "***"  # kept'),
        ('+auth=("me", "hunter2"), timeout="kept"', '+auth=("***", "***"), timeout="kept"'),
        ('+tokens = ["hunter2", "hunter3"]', '+tokens = ["***", "***"]'),
        ('+password := "hunter2"', '+password := "***"'),
        ("+PASSWORD ?= hunter2", "+PASSWORD ?= ***"),
        ("+'password' => 'hunter2',", "+'password' => '***',"),
        ('+pwd="hunter2"', '+pwd="***"'),
        ("+PWD: hunter2", "+PWD: ***"),
        ('+"password": hunter2,', '+"password": ***,'),
        ('+token = os.environ.get("TOKEN", "hunter2")', '+token = os.environ.get("TOKEN", "***")'),
        ('+token = os.environ.get("TOKEN") or "hunter2"', '+token = os.environ.get("TOKEN") or "***"'),
        ('+key = c.get("a", {"kept": 1}).get("key", "hunter2")', '+key = c.get("a", {"kept": 1}).get("key", "***")'),
        ('+"token": getenv("TOKEN", default="hunter2"),', '+"token": getenv("TOKEN", default="***"),'),
        ('+password = SecretStr("hunter2")', '+password = SecretStr("***")'),
        ("+password = make_password('hunter2')", "+password = make_password('***')"),
        ('+password: str | None = "hunter2"', '+password: str | None = "***"'),
        (
            '+password: Optional[str] = Field("hunter2", title="kept")',
            '+password: Optional[str] = Field("***", title="kept")',
        ),
        (r'+password = "hun\"ter2"', '+password = "***"'),
        (r'+password="hun\"ter2"', '+password="***"'),
        (
            '+d(password="x", user="kept", token="y") == "kept"',
            '+d(password="***", user="kept", token="***") == "kept"',
        ),
        ('+<db password = "x" host="kept"/>', '+<db password = "***" host="kept"/>'),
        ("-PASSWORD=one\r\n+PASSWORD=two\r\n kept: x\r", "-PASSWORD=***\r\n+PASSWORD=***\r\n kept: x\r"),
    ],
)
def test_b10_common_forms_of_secrets_are_left_out_of_a_patch(line: str, stored: str) -> None:
    assert collecting.patch_without_secrets(line) == stored


@pytest.mark.parametrize(
    "line",
    [
        "+password = get_password()",
        "+password = get_password(user, 1)\r",
        '+token = os.environ["TOKEN"]',
        '+token = os.environ.get("TOKEN")  # it\'s "kept"',
        '+token = os.Getenv("TOKEN")',
        '+password = getpass("Password: ")',
        '+password = forms.CharField(label="Your password")',
        '+password = ""',
        '+password = """',
        "+password: str,",
        "+password: str | None = None  # of the database",
        "+    token: the token of the user, if it's there",
        '+if token: raise ValueError("no token")',
        '+if token == "kept" or not token:',
        "+if token:\r",
        '+auth = {"user": "kept", "host": "kept"}',
        "+const token = user.token;",
        "+    secret_key=settings.secret_key,",
        '+Token::new("kept")',
        '+items.sort(key=lambda item: item["kept"])',
        "diff --git a/auth.py b/auth.py",
        "+pwd = os.getcwd()",
        "@@ -1,2 +3,4 @@ class Token:",
    ],
)
def test_b10_code_without_the_value_of_a_secret_is_kept(line: str) -> None:
    assert collecting.patch_without_secrets(line) == line


@pytest.mark.parametrize(
    "piece",
    [
        "token=",
        'token="',
        'token="\\',
        "token: a",
        "token:[",
        "token=(",
        "token='''",
        "token ",
        "a:b|[c",
        "PWD=a ",
        "(",
        ";a:;",
        "key:;",
    ],
)
def test_b10_secrets_are_found_in_linear_time(piece: str) -> None:
    def took(line: str, number: int) -> float:
        began = time.process_time()
        collecting.patch_without_secrets("\n".join([line] * number))
        return time.process_time() - began

    assert took("+token=" + piece * (256 * 1024 // len(piece)), 1) < 1, "a line of 256 KiB"
    longest = "+token=" + piece * ((collecting.MAX_LINE - 8) // len(piece))
    assert took(longest, 50) < 2, "256 KiB of the longest lines that are searched"


CONFIGURED = """
[diff]
    noprefix = true
    mnemonicPrefix = true
    context = 1
    interHunkContext = 20
    algorithm = patience
    indentHeuristic = false
    renames = false
    renameLimit = 1
    orderFile = ORDER
    suppressBlankEmpty = true
    external = false
    submodule = log
[core]
    abbrev = 20
[color]
    ui = always
[status]
    showStash = true
"""


def test_b10_a_patch_is_the_same_and_can_be_applied_however_git_is_configured(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = collecting_model(project, monkeypatch)
    (project.folder / "moved.txt").write_text("".join(f"line {number}\n" for number in range(50)))
    project.commit("Add a file")
    project.git("mv", "moved.txt", "a_moved.txt")
    project.edit("RATE = 2", "RATE = 3")
    project.edit("return x * RATE\n\n\n@app.model", "return RATE * x\n\n\n@app.model")
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    plain = collecting.code([model])["repositories"]["project"]
    (home / "order").write_text("*.py\n")
    (home / ".gitconfig").write_text(CONFIGURED.replace("ORDER", str(home / "order")))
    assert project.git("diff", "--no-ext-diff", "HEAD") != plain["patch"], "the configuration is read"
    configured = collecting.code([model])["repositories"]["project"]
    assert configured == plain
    after = project.module.read_text()
    project.git("reset", "-q", "--hard")
    (tmp_path / "patch").write_text(configured["patch"])
    project.git("apply", str(tmp_path / "patch"))
    assert project.module.read_text() == after
    assert (project.folder / "a_moved.txt").exists()


def test_b10_a_stash_is_no_change(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    model = collecting_model(project, monkeypatch)
    project.git("config", "status.showStash", "true")
    project.edit("RATE = 2", "RATE = 3")
    project.git("stash")
    assert collecting.code([model])["repositories"]["project"]["dirty"] is False


def test_b10_a_lost_attempt_has_its_manifest_and_each_attempt_its_own(project: Project, tmp_path: Path) -> None:
    folder = tmp_path / "meeting"
    folder.mkdir()
    with project.worker() as first:
        run = project.app.submit("forecast", {"x": 2.0, "folder": str(folder)})
        wait_for(folder / "begun")
        running = project.app.manifest(run.id)
        assert (running.step, running.ended_at) == ("running", None)
        assert running.code is not None, "it is there while the attempt runs"
        first.send_signal(signal.SIGKILL)
        first.wait()
    project.edit("RATE = 2", "RATE = 3")
    commit = project.commit("Change the rate")
    with project.worker():
        assert project.app.wait(run.id, timeout=60).status == "SUCCEEDED"
    lost, last = (project.app.manifest(run.id, attempt=number) for number in (1, 2))
    assert (lost.step, last.step) == ("lost", "succeeded")
    assert lost.code is not None
    assert last.code is not None
    assert last.code["git"]["commit"] == commit != lost.code["git"]["commit"]
    assert lost.result_digest is None
    assert project.app.manifest(run.id).attempt == 2, "the last one unless another is asked for"
    with pytest.raises(RunNotFound, match="no attempt 3"):
        project.app.manifest(run.id, attempt=3)


def test_b10_a_run_that_has_not_begun_has_no_attempt(project: Project) -> None:
    found = project.app.manifest(project.app.submit("forecast", {"x": 1.0}).id)
    assert (found.attempt, found.environment, found.missing) == (0, None, "the run has not begun")


def test_b10_a_worker_writes_once_however_many_runs_it_executes(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "LOOK_EVERY", 0.0)  # it looks at the files before every lease
    app = App(database.url)
    app.model("double", isolation="loop")(double)
    with app.working(processes=0, threads=0):
        runs = app.submit_many([{"model": "double", "parameters": {"x": number}} for number in range(200)])
        for run in runs:
            assert not isinstance(run, Exception)
            app.wait(run.id, timeout=60)
    written = [row[0] for row in database.rows("SELECT worker FROM semel_worker_manifests")]
    assert len(written) == 1
    (count,) = database.rows("SELECT count(*) FROM semel_manifests")[0]
    assert count == 2
    app.close()


async def double(x: int) -> int:
    return 2 * x


def test_b10_what_cannot_be_found_out_is_recorded_and_fails_nothing(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "bin"
    broken.mkdir()
    (broken / "git").write_text("#!/bin/sh\necho 'fatal: https://me:hidden@example.org is broken' >&2\nexit 128\n")
    (broken / "git").chmod(0o755)
    with project.worker(PATH=str(broken)):
        run = project.run()
    found = project.app.manifest(run.id).code
    assert found is not None
    assert found["git"] == "unavailable: git: fatal: https://me:***@example.org is broken"
    assert found["module"] == sha256(project.module.read_bytes()).hexdigest()


def test_b10_a_slow_program_is_ended(project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setattr(collecting, "PROGRAM_TIMEOUT", 0.1)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    content = collecting.code([project.app.registry["forecast"]])
    name = content["models"]["forecast"]["repository"]
    assert content["repositories"] == {name: "unavailable: git took longer than 0.1 s"}


def test_b10_changed_files_are_noticed_and_looked_at_seldom(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    model = collecting_model(project, monkeypatch)
    looks: list[object] = []
    look = collecting._stamp
    monkeypatch.setattr(collecting, "_stamp", lambda models: looks.append(None) or look(models))
    collector = collecting.Collector()
    first = collector.parts([model])
    for _ in range(1000):
        assert collector.parts([model]) is first
    assert len(looks) == 1, "files are looked at every few seconds, not for every lease"
    project.edit("RATE = 2", "RATE = 30")
    (kept,) = collector._kept.values()
    kept.looked_at -= collecting.LOOK_EVERY
    second = collector.parts([model])
    assert second.code.digest != first.code.digest
    assert second.environment is first.environment
    assert kept.pause == 2 * collecting.LOOK_EVERY, "files that change all the time are looked at less often"
    assert "RATE = 30" in json.loads(second.code.body)["repositories"]["project"]["patch"]


def test_b10_an_edited_file_that_only_a_child_imports_is_drift(project: Project) -> None:
    helper = project.folder / "lhelper.py"
    helper.write_text("RATE = 3\n")
    project.edit("    if folder", "    import lhelper\n    if folder")
    project.commit("Import when called")
    with project.worker():
        run = project.run()
        assert not project.app.drift(run.id).any
        helper.write_text("RATE = 30\n")
        deadline = time.monotonic() + 6 * collecting.LOOK_EVERY
        while not project.app.drift(run.id).any:
            assert time.monotonic() < deadline
            time.sleep(0.2)
            project.run()  # a worker looks at the files before a lease
        with pytest.raises(Drifted, match="code"):
            project.app.rerun(run.id, strict=True)


def test_b10_a_file_that_was_committed_since_is_looked_at(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    model = collecting_model(project, monkeypatch)
    collecting._stamp([model])
    (project.folder / "data.csv").write_text("1\n")
    project.commit("Add data")
    before = collecting._stamp([model])
    (project.folder / "data.csv").write_text("10\n")
    assert collecting._stamp([model]) != before


def test_b10_files_of_a_linked_worktree_are_looked_at(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    project.git("worktree", "add", "-q", str(tmp_path / "linked"))
    project.folder = tmp_path / "linked"
    project.module = project.folder / "forecasts.py"
    model = collecting_model(project, monkeypatch)
    before = collecting._stamp([model])
    (project.folder / "data.csv").write_text("1\n")
    project.commit("Add data")
    after = collecting._stamp([model])
    assert after != before
    assert str(project.folder / "data.csv") in {each[0] for each in after if each}


def test_b10_of_many_files_only_those_of_python_are_looked_at(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lhelper.py", "data.csv"):
        (project.folder / name).write_text("1\n")
    project.commit("Add files")
    found = collecting._tracked(project.folder, "all")
    assert {Path(each).name for each in found} == {".gitignore", "forecasts.py", "lhelper.py", "data.csv"}
    for name, few in (("MAX_TRACKED", 3), ("MAX_LISTED", 30)):
        with monkeypatch.context() as patch:
            patch.setattr(collecting, name, few)
            found = collecting._tracked(project.folder, name)
            assert {Path(each).name for each in found} == {"forecasts.py", "lhelper.py"}


def test_b10_a_repository_of_which_git_says_nothing_is_looked_at(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = collecting_model(project, monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    before = collecting._stamp([model])
    project.edit("RATE = 2", "RATE = 30")
    assert collecting._stamp([model]) != before


def collecting_model(project: Project, monkeypatch: pytest.MonkeyPatch) -> collecting.Model:
    """The project's model, imported here."""
    monkeypatch.setenv("SEMEL_DB", project.url)
    monkeypatch.setenv("SEMEL_ARTIFACTS", str(project.artifacts))
    spec = importlib.util.spec_from_file_location(f"forecasts_{id(project)}", project.module)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    model: collecting.Model = module.app.registry["forecast"]
    return model


def test_b10_a_store_that_does_not_answer_delays_the_manifest_and_no_run(database: TestDatabase) -> None:
    app = App(database.url)
    app.model("double", isolation="loop")(double)
    refused: list[object] = []
    write = ManifestWriter.write_if_changed

    async def refuse_once(self: ManifestWriter) -> None:
        store, verb = self._store, self._store.write_once

        async def unavailable(*_: object, **__: object) -> None:
            refused.append(None)
            raise StoreUnavailable("not now")

        if not refused:
            store.write_once = unavailable  # type: ignore[method-assign]
        try:
            await write(self)
        finally:
            store.write_once = verb  # type: ignore[method-assign]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ManifestWriter, "write_if_changed", refuse_once)
        run = app.submit("double", {"x": 1})
        with app.working(processes=0, threads=0):
            assert app.wait(run.id, timeout=60).status == "SUCCEEDED"
            again = app.submit("double", {"x": 2})
            app.wait(again.id, timeout=60)
    assert refused
    found = app.manifest(run.id)
    assert found.code is not None
    assert found.missing is not None
    assert "after the attempt began" in found.missing
    assert app.manifest(again.id).missing is None
    app.close()


def written(name: str) -> collecting.Parts:
    """What a worker writes: an environment that all of them share, and code of its own."""
    code = {"models": {"train": {"function": name, "repository": None}}, "repositories": {}}
    return collecting.Parts(collecting.make_part({"all": 1}), collecting.make_part(code), "host")


def test_b10_an_attempt_has_what_its_worker_wrote_last_before_it_began(database: TestDatabase) -> None:
    runs = []
    for name in ("before", "after"):
        database.do(manifests.write, "worker-1", written(name))
        database.clock.advance(1)
        runs.append(database.submit())
        database.lease()
        database.clock.advance(1)
    found = [database.app.manifest(run.id) for run in runs]
    assert [each.code and each.code["function"] for each in found] == ["before", "after"]


def test_b10_retention_removes_the_manifests_of_workers_and_runs_that_are_gone(database: TestDatabase) -> None:
    for name in ("worker-1", "worker-2", "alive"):
        database.do(manifests.write, name, written(name))
    database.submit()
    (leased,) = database.lease()  # by worker-1
    database.clock.advance(2 * DAY)
    database.see_worker("alive")
    assert database.do(manifests.remove_unused) == 0
    assert left(database) == (3, 4), "a run that is left may be theirs"
    database.end(leased)
    database.clock.advance(2 * DAY)
    assert database.app.purge(DAY) == 1
    assert database.do(manifests.remove_unused) == 2
    assert left(database) == (1, 2), "what a live worker names stays"
    database.write("DELETE FROM semel_workers")
    database.do(manifests.remove_unused)
    database.clock.advance(1)
    assert database.do(manifests.remove_unused) == 1
    assert left(database) == (0, 0)


def test_b10_a_worker_that_is_seen_again_is_not_gone(database: TestDatabase) -> None:
    database.do(manifests.write, "worker-1", written("worker-1"))
    database.clock.advance(2 * DAY)
    assert database.do(manifests.remove_unused) == 0, "it was found gone just now"
    database.see_worker("worker-1")
    database.clock.advance(1)
    assert database.do(manifests.remove_unused) == 0
    run = database.submit()
    (leased,) = database.lease()
    database.end(leased)
    database.write("DELETE FROM semel_workers")
    database.clock.advance(1)
    database.do(manifests.remove_unused)
    database.clock.advance(1)
    assert database.do(manifests.remove_unused) == 0, "its run is left"
    assert database.app.manifest(run.id).code is not None


def left(database: TestDatabase) -> tuple[int, int]:
    tables = ("semel_worker_manifests", "semel_manifests")
    found = [database.rows(f"SELECT count(*) FROM {name}")[0][0] for name in tables]
    return (found[0], found[1])


def test_b10_the_same_submission_has_the_same_seed_unless_one_is_given(project: Project) -> None:
    app = project.app
    with project.worker():
        first, again = project.run(), project.run()
        given = project.run(seed=7)
    results = [app.result(run.id) for run in (first, again, given)]
    assert results[0] == results[1], "random is seeded with it"
    assert results[0]["seed"] == first.actual_seed == app.manifest(first.id).seed
    assert first.payload_hash == again.payload_hash
    assert (results[2]["seed"], given.seed, app.manifest(given.id).seed) == (7, 7, 7)
    assert results[2]["chance"] != results[0]["chance"]
    assert given.payload_hash != first.payload_hash, "another seed is another submission"


def test_b10_seeds_of_many_submissions_are_their_own(database: TestDatabase) -> None:
    asked = [{"model": "train", "parameters": {"number": 1}, "seed": seed} for seed in (None, 0, 1, 1, 2**32 - 1)]
    runs = [run for run in database.app.submit_many(asked) if not isinstance(run, Exception)]
    assert [database.app.get(run.id).seed for run in runs] == [None, 0, 1, 1, 2**32 - 1]
    assert [run.seed for run in runs] == [None, 0, 1, 1, 2**32 - 1]
    assert runs[2].id == runs[3].id, "the same payload and seed find the active run"
    assert len({run.payload_hash for run in runs}) == 4
    assert {each.id: each.seed for each in database.lease(10)} == {run.id: run.seed for run in runs}
    for wrong in (-1, 2**32, 1.5, "1", True):
        with pytest.raises(InvalidRequest, match="seed"):
            database.app.submit("train", seed=wrong)  # type: ignore[arg-type]


def test_b10_a_retry_has_the_seed_of_its_run(database: TestDatabase) -> None:
    run = database.submit(seed=7)
    (leased,) = database.lease()
    database.end(leased, "fatal", reason="no")
    assert database.app.retry(run.id).seed == 7


def test_b10_numpy_and_torch_are_seeded_where_they_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[tuple[str, int]] = []
    numpy = SimpleNamespace(random=SimpleNamespace(seed=lambda seed: seeded.append(("numpy", seed))))
    torch = SimpleNamespace(manual_seed=lambda seed: seeded.append(("torch", seed)))
    monkeypatch.setitem(sys.modules, "numpy", numpy)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    child_main._seed(7)
    assert seeded == [("numpy", 7), ("torch", 7)]
    assert random.random() == random.Random(7).random()
    monkeypatch.delitem(sys.modules, "numpy")
    monkeypatch.delitem(sys.modules, "torch")
    child_main._seed(8)
    assert not {"numpy", "torch"} & set(sys.modules), "nothing is imported for it"


def test_b10_only_a_process_of_its_own_can_be_seeded() -> None:
    with pytest.raises(InvalidRequest, match=r"use ctx\.seed"):
        make_model("double", double, seeded=True)
    with pytest.raises(InvalidRequest, match="seeded is True or False"):
        make_model("double", double, seeded="yes")  # type: ignore[arg-type]
