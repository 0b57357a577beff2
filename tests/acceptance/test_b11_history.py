"""B11: the history of runs is chained and sealed, and verifies offline, by one file that knows nothing of semel."""

import ast
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psycopg
import pytest

import semel
from acceptance.project import Project
from semel import audit
from support.databases import DATABASES, Databases, TestDatabase

HOST = Path(audit.__file__)


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest, databases: Databases) -> Iterator[TestDatabase]:
    with databases.empty(request.param) as database:
        database.app.begin_sealing()
        yield database


class Auditor:
    """Runs commands with the database, and the verifier without it."""

    def __init__(self, project: Project, folder: Path) -> None:
        self.project, self.folder = project, folder
        self.key = folder / "seal.key"
        self.heads = folder / "heads.jsonl"
        self.public = self.semel("audit", "key", str(self.key)).stdout.strip()
        self.verifier = folder / "audit.py"
        shutil.copyfile(HOST, self.verifier)

    def semel(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        own = {"SEMEL_DB": self.project.url, "SEMEL_ARTIFACTS": str(self.project.artifacts)}
        if self.key.exists():
            own |= self.settings()
        command = [sys.executable, "-m", "semel.cli", *arguments]
        return subprocess.run(
            command, env=os.environ | own, cwd=self.project.folder, capture_output=True, text=True, check=False
        )

    def settings(self) -> dict[str, str]:
        """What every process needs that may seal."""
        return {"SEMEL_SEAL_KEY": str(self.key), "SEMEL_SEAL_HEADS": str(self.heads)}

    def sweep(self) -> None:
        done = self.semel("sweep", "forecasts:app", "--once")
        assert done.returncode == 0, done.stderr

    def export(self, name: str = "history.jsonl") -> Path:
        file = self.folder / name
        file.write_text(self.semel("audit", "export").stdout)
        return file

    def verify(self, file: Path, *options: str) -> "subprocess.CompletedProcess[str]":
        """Verify with a copy of the one file, in a Python that cannot import semel."""
        command = [sys.executable, "-I", str(self.verifier), str(file), *options]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)

    def alter(self, statement: str) -> None:
        """Change what semel wrote, as an administrator of the database can."""
        url = self.project.url
        if url.startswith("sqlite"):
            with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file, file:
                file.execute("DROP TRIGGER IF EXISTS semel_attempts_guard")
                assert file.execute(statement).rowcount == 1
            return
        with psycopg.connect(url) as conn:
            conn.execute("SET session_replication_role = replica")
            assert conn.execute(statement.encode()).rowcount == 1


@pytest.fixture
def auditor(database: TestDatabase, tmp_path: Path) -> Iterator[Auditor]:
    with ExitStack() as stack:
        yield Auditor(Project(tmp_path / "project", database.url, stack), tmp_path)


def test_b11_a_third_party_verifies_an_export_and_finds_what_was_changed(auditor: Auditor) -> None:
    project = auditor.project
    with project.worker(**auditor.settings()):
        runs = [project.run("forecast_async") for _ in range(3)]
    auditor.sweep()
    head = auditor.semel("audit", "head").stdout.strip()
    assert json.loads(auditor.heads.read_text().splitlines()[-1])["head"] == head
    file = auditor.export()
    good = auditor.verify(file, "--head", head, "--key", auditor.public)
    assert good.returncode == 0, good.stderr
    assert good.stdout.startswith("verified: 6 rows in ")
    assert good.stdout.endswith(f"head: {head}\n")

    proof = auditor.folder / "proof.jsonl"
    proof.write_text(auditor.semel("audit", "prove", runs[1].id).stdout)
    assert auditor.verify(proof, "--key", auditor.public).returncode == 0
    proof.write_text(proof.read_text().replace("worker", "walker", 1))
    assert auditor.verify(proof).returncode != 0

    auditor.alter(f"UPDATE semel_attempts SET result = '0.83' WHERE run_id = '{runs[1].id}'")
    for found in (auditor.verify(auditor.export("later.jsonl")), auditor.semel("audit", "verify")):
        assert found.returncode == 1
        assert f"run {runs[1].id}, version 3, in seal " in found.stdout + found.stderr
        assert "the attempt differs from its digest" in found.stdout + found.stderr
    assert auditor.verify(file).returncode == 0, "what was exported before is as it was"
    assert auditor.verify(file, "--head", "00" * 32).returncode == 1
    assert auditor.verify(file, "--key", "00" * 32).returncode == 1
    assert "--signed-from needs --key" in auditor.verify(file, "--signed-from", "5").stderr
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    cut = auditor.verify(file)
    assert (cut.returncode, "cut off" in cut.stderr) == (1, True)


def test_b11_seals_say_what_retention_removed(auditor: Auditor) -> None:
    project = auditor.project
    with project.worker(**auditor.settings()):
        project.run("forecast_async")
    auditor.sweep()
    with closing(semel.App(project.url, artifacts=project.artifacts)) as app:
        assert app.purge(0) == 1
    auditor.sweep()
    file = auditor.export()
    assert '"rule":"purge: ended more than 0 s ago"' in file.read_text()
    found = auditor.verify(file, "--key", auditor.public)
    assert found.returncode == 0, found.stderr
    assert ", 1 attempts purged, 0 not yet sealed" in found.stdout
    auditor.alter("DELETE FROM semel_purges")
    assert auditor.verify(auditor.export()).returncode == 1


def test_b11_what_cannot_be_verified_is_said_in_a_line(tmp_path: Path) -> None:
    key, nothing, folder = tmp_path / "seal.key", tmp_path / "nothing.jsonl", str(tmp_path)
    key.write_bytes(b"\xff\xfe")
    nothing.write_text("")
    given = [[str(nothing)], [str(nothing), "--key", str(key)], [str(tmp_path / "none")], [folder], [str(HOST)]]
    for command in ([sys.executable, "-I", str(HOST)], [sys.executable, "-m", "semel.cli", "audit", "verify"]):
        for arguments in given:
            found = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
            assert (found.returncode, found.stdout) == (2, ""), found
            assert "cannot verify: " in found.stderr
            assert len(found.stderr.splitlines()) == 1


def test_b11_the_verifier_runs_where_it_is_installed_beside_files_named_like_the_standard_librarys(
    auditor: Auditor,
) -> None:
    file = auditor.export()
    assert HOST.with_name("types.py").exists()
    for options in ([], ["-S"]):
        for folder, script in ((auditor.folder, str(HOST)), (HOST.parent, HOST.name)):
            command = [sys.executable, *options, script, str(file)]
            found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            assert (found.returncode, found.stderr) == (0, "")
            assert found.stdout.startswith("verified: 0 rows in 0 seals")


@pytest.mark.parametrize("head", ["zz", "5f0c", ""])
def test_b11_a_head_that_is_none_accuses_nobody(auditor: Auditor, head: str) -> None:
    for option in ("--head", "--log-head"):
        found = auditor.semel("audit", "verify", option, head)
        assert (found.returncode, found.stdout) == (2, "")
        said = f"semel: cannot verify: the head {head!r} is not one: it has 64 hexadecimal digits\n"
        assert found.stderr == said
    missing = auditor.semel("audit", "verify", "--log-head", "AB" * 32)
    assert missing.returncode == 1
    assert f"no row has the kept head {'ab' * 32}" in missing.stdout


def test_b11_the_verifier_is_one_file_of_some_hundred_lines() -> None:
    source = HOST.read_text()
    assert len(source.splitlines()) < 800
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    assert imported - set(sys.stdlib_module_names) == {"cryptography"}
