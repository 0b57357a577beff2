"""Manifests, diffs, drift and reruns over HTTP and by command: who sees what, and what is refused."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text

from semel._concurrency.sync import run_sync
from semel.cli import main
from semel.client import Client
from semel.errors import Drifted, RunNotFound
from semel.runs.manifest import Parts, content_of, make_part
from semel.runs.worker import manifests as writing
from support.databases import DATABASES, database_url
from support.service import PATIENCE, TokenClient, TokenServer, token_server

UNKNOWN = "00000000-0000-7000-8000-000000000000"


class Recorded:
    """A server whose worker says that its code has these changes."""

    def __init__(self, server: TokenServer, worker: ExitStack) -> None:
        self.server = server
        self.worker = worker
        self.operator = server.admit("otto", "operator")

    def run(self, caller: TokenClient | None = None, **body: Any) -> str:
        caller = caller or self.operator
        answer = caller.post("/runs", json={"model": "add", "parameters": {"a": 1}, **body})
        assert answer.status_code == 201, answer.text
        run_id: str = answer.json()["run_id"]
        self.server.app.wait(run_id, timeout=PATIENCE)
        return run_id


@pytest.fixture(params=DATABASES)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    collect = writing.collector.parts

    def altered(models: Any) -> Parts:
        parts = collect(models)
        code, environment = content_of(parts.code.body), content_of(parts.environment.body)
        for name in code["models"]:
            code["models"][name]["repository"] = "project"
        code["repositories"] = {
            "project": {
                "commit": "c" * 40,
                "branch": "trunk",
                "dirty": True,
                "patch": "+secret line\n",
                "patch_digest": "d",
                "untracked": {"notes.py": "e"},
            }
        }
        environment["variables"] = {"LANG": "la"}
        return Parts(make_part(environment), make_part(code), "the-host")

    monkeypatch.setattr(writing.collector, "parts", altered)
    with ExitStack() as stack:
        url = stack.enter_context(database_url(request, request.param))
        server = stack.enter_context(token_server(url, tmp_path))
        worker = stack.enter_context(ExitStack())
        worker.enter_context(server.app.working(processes=0, threads=0))
        yield Recorded(server, worker)


def test_a_manifest_shows_each_caller_what_is_theirs_to_see(place: Recorded) -> None:
    run_id = place.run()
    whole = place.operator.get(f"/runs/{run_id}/manifest").json()
    assert (whole["host"], whole["environment"]["variables"]) == ("the-host", {"LANG": "la"})
    assert whole["code"]["git"]["patch"] == "+secret line\n"
    assert whole["attempt"] == whole["attempts"] == 1
    own = place.server.admit("sue")
    seen = own.get(f"/runs/{place.run(own)}/manifest").json()
    assert seen["host"] is None
    assert "variables" not in seen["environment"]
    assert seen["code"]["git"]["patch"] == "+secret line\n"
    guest = place.server.admit("gus", "operator", tenant="guests")
    seen = guest.get(f"/runs/{place.run(guest)}/manifest").json()
    assert seen["host"] is None
    assert sorted(seen["code"]["git"]) == ["branch", "commit", "dirty", "patch_digest"]
    assert place.operator.get(f"/runs/{run_id}/manifest", params={"attempt": 2}).status_code == 404
    assert place.operator.get(f"/runs/{run_id}/manifest", params={"attempt": 0}).status_code == 400


def test_nothing_is_said_of_the_runs_of_others(place: Recorded) -> None:
    mine, sue = place.run(), place.server.admit("sue")
    own = place.run(sue)
    guest = place.server.admit("gus", "admin", tenant="guests")
    theirs = place.run(guest)
    for caller, seen, hidden in ((sue, own, mine), (guest, theirs, mine), (place.operator, mine, theirs)):
        for gone in (hidden, UNKNOWN, "no-id"):
            asked = [("GET", f"/runs/{gone}/{what}") for what in ("manifest", "drift", f"diff/{seen}")]
            for method, path in [*asked, ("GET", f"/runs/{seen}/diff/{gone}"), ("POST", f"/runs/{gone}/rerun")]:
                answer = caller.request(method, path)
                assert answer.status_code == 404, path
                assert answer.json()["detail"] == f"there is no run {gone!r}"
    place.server.app.purge(0)
    assert place.operator.get(f"/runs/{mine}/diff/{mine}").status_code == 404


def test_a_rerun_says_what_drifted_and_a_strict_one_is_refused(place: Recorded) -> None:
    operator, run_id = place.operator, place.run()
    guest = place.server.admit("gus", "operator", tenant="guests")
    theirs = place.run(guest)
    assert operator.get(f"/runs/{run_id}/drift").json()["sections"] == []
    answer = operator.post(f"/runs/{run_id}/rerun", json={"strict": True}, headers={"Idempotency-Key": "again"})
    assert answer.status_code == 201
    first = answer.json()["run"]
    assert (first["rerun_of"], first["parameters"]) == (run_id, {"a": 1})
    again = operator.post(f"/runs/{run_id}/rerun", headers={"Idempotency-Key": "again"})
    assert (again.status_code, again.json()["run"]["run_id"]) == (200, first["run_id"])
    with Client(place.server.address, token=operator.secret) as client:
        assert client.wait(first["run_id"], timeout=PATIENCE).status == "SUCCEEDED"
        assert client.diff(run_id, first["run_id"]).result.verdict == "same"
        other = client.rerun(run_id, parameters={"b": 5}, seed=7).run
        assert (other.parameters, other.seed) == ({"a": 1, "b": 5}, 7)
        client.wait(other.run_id, timeout=PATIENCE)
        found = client.diff(run_id, other.run_id)
        assert [each.name for each in found.sections] == ["parameters", "seed", "details"]
        assert found.result.largest_relative_difference == pytest.approx(5 / 6)
        assert client.manifest(other.run_id).seed == 7
        alter_code(place)
        with pytest.raises(Drifted, match="function") as refused:
            client.rerun(run_id, strict=True)
        assert refused.value.drift.sections[0].name == "code"  # type: ignore[attr-defined]
        with pytest.raises(RunNotFound):
            client.rerun(UNKNOWN)
    for caller, one, sees in ((operator, run_id, True), (guest, theirs, False)):
        problem = caller.post(f"/runs/{one}/rerun", json={"strict": True})
        assert (problem.status_code, problem.json()["error_code"]) == (409, "DRIFTED")
        assert problem.json()["drift"]["sections"][0]["name"] == "code"
        told = problem.text + caller.get(f"/runs/{one}/drift").text + caller.post(f"/runs/{one}/rerun").text
        assert ("notes.py" in told, "secret line" in told) == (sees, sees)


def alter_code(place: Recorded) -> None:
    """Stop the worker, and let the code that it wrote be other than it is, as if it had been changed since."""
    place.worker.close()

    def alter(conn: Connection) -> None:
        for (body,) in conn.execute(text("SELECT body FROM semel_manifests")).all():
            content = content_of(body)
            if "add" in content.get("models", {}):
                content["models"]["add"]["function"] = "0" * 64
                content["repositories"] = {"project": {"commit": "c" * 40, "dirty": False, "untracked": {}}}
                values = {"new": json.dumps(content), "body": body}
                conn.execute(text("UPDATE semel_manifests SET body = :new WHERE body = :body"), values)

    store = place.server.app.ledger(awaited=False)
    run_sync(store.write(alter))
    run_sync(store.close())


def test_the_commands_print_the_same(
    place: Recorded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEMEL_SERVER", place.server.address)
    monkeypatch.setenv("SEMEL_TOKEN", str(place.operator.secret))

    def semel(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        said = capsys.readouterr()
        return code, said.out, said.err

    run_id = place.run()
    code, out, _ = semel("manifest", run_id)
    assert code == 0
    for expected in (f"commit      {'c' * 40}", "branch      trunk, with uncommitted changes", "the-host", "notes.py"):
        assert expected in out
    assert semel("manifest", run_id, "--patch")[:2] == (0, "+secret line\n")
    assert json.loads(semel("manifest", run_id, "--json")[1])["run_id"] == run_id
    assert "sqlalchemy" in semel("manifest", run_id, "--packages")[1]
    code, out, err = semel("rerun", run_id, "--wait", "--strict")
    assert code == 0
    assert "nothing changed since" in err
    assert f"same result, compared with {run_id}" in err
    code, out, err = semel("rerun", run_id, "--set", "b=5", "--wait")
    assert (code, "the results differ" in err) == (1, True)
    code, out, _ = semel("diff", run_id, out.strip())
    assert code == 1
    assert out.startswith("parameters\n")
    assert "the results differ; numbers by up to 0.833 of their size" in out
    assert "run_id" not in out
    assert semel("diff", run_id, UNKNOWN)[0] == 1
