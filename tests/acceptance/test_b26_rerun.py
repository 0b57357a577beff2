"""B26: a rerun says what drifted before it runs, and whether the result is the same after; runs are compared."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from acceptance.project import Project
from semel import App, Drifted, IllegalTransition, KeyReused, Quota, QuotaExceeded, RunNotFound
from semel._concurrency.sync import run_sync
from semel.runs.diff import SECTIONS, ResultComparison, compare, compare_results
from semel.runs.submission import SubmitOptions
from semel.runs.types import Manifest
from support.databases import DATABASES, Databases, TestDatabase


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest, databases: Databases) -> Iterator[TestDatabase]:
    with databases.empty(request.param) as database:
        yield database


@pytest.fixture
def project(database: TestDatabase, tmp_path: Path) -> Iterator[Project]:
    with ExitStack() as stack:
        yield Project(tmp_path / "project", database.url, stack)


def test_b26_without_drift_a_rerun_has_the_same_seed_and_result(project: Project) -> None:
    app = project.app
    with project.worker():
        first = project.run()
        drift = app.drift(first.id)
        assert not drift.any, str(drift)
        assert drift.compared_with == f"worker {first.worker}"
        rerun = app.rerun(first.id, strict=True)
        again = app.wait(rerun.run.id, timeout=60)
    assert (again.rerun_of, again.retry_of, again.model, again.parameters) == (first.id, None, "forecast", {"x": 2.0})
    assert again.actual_seed == first.actual_seed == app.result(first.id)["seed"]
    assert app.compare_results(first.id, again.id).verdict == "same", "random was seeded"
    found = app.diff(first.id, again.id)
    assert [each.name for each in found.sections] == ["details"]
    assert found.sections[0].folded
    assert found.result.message == "same result"


def test_b26_drift_is_told_before_the_run_is_stored_and_strict_refuses(project: Project) -> None:
    app = project.app
    with project.worker():
        first = project.run()
    project.edit("RATE = 2", "RATE = 2.000001")
    with project.worker():
        project.run("forecast_async")  # the worker has written its manifest
        drift = app.drift(first.id)
        assert [each.name for each in drift.sections] == ["code"]
        paths = {each.path for each in drift.sections[0].differences}
        assert {"module", "patch_digest"} <= paths
        assert "function" not in paths, "the function itself is as it was"
        assert any("+RATE = 2.000001" in line for line in drift.sections[0].lines)
        with pytest.raises(Drifted, match="module") as refused:
            app.rerun(first.id, strict=True)
        assert refused.value.drift == drift
        assert [run.id for run in app.runs(model="forecast").runs] == [first.id], "nothing was stored"
        rerun = app.rerun(first.id, idempotency_key="once")
        assert rerun.drift == drift
        sent_again = app.rerun(first.id, strict=True, idempotency_key="once")
        assert (sent_again.run.id, sent_again.run.replayed) == (rerun.run.id, True), "it was stored before"
        with pytest.raises(KeyReused):
            app.rerun(first.id, parameters={"x": 9.0}, strict=True, idempotency_key="once")
        with pytest.raises(Drifted):
            app.rerun(first.id, strict=True, idempotency_key="another")
        again = app.wait(rerun.run.id, timeout=60)
    result = app.diff(first.id, again.id).result
    assert result.verdict == "differs"
    assert result.largest_relative_difference == pytest.approx(5e-7, rel=1e-3)
    assert result.where == "y"


def test_b26_an_untracked_file_is_drift_if_it_is_code_and_not_if_it_is_data(project: Project) -> None:
    app = project.app
    with project.worker():
        first = project.run()
    (project.folder / "semel.db").write_text("changes with every run")
    with project.worker():
        second = project.run()
        assert not app.drift(first.id).any, str(app.drift(first.id))
    (details,) = app.diff(first.id, second.id).sections
    assert 'untracked["semel.db"]' in [each.path for each in details.differences]
    (project.folder / "helper.py").write_text("RATE = 3")
    with project.worker():
        project.run()
        (code,) = app.drift(first.id).sections
    assert [each.path for each in code.differences] == ['untracked["helper.py"]']


def test_b26_packages_and_python_that_changed_are_named(project: Project, database: TestDatabase) -> None:
    with project.worker():
        first = project.run()
    alter(database, '"sqlalchemy":"', '"sqlalchemy":"0.0.1+of-then-')
    alter(database, '"implementation":"CPython"', '"implementation":"OtherPython"')
    with project.worker():
        project.run("forecast_async")
        sections = {each.name: each for each in project.app.drift(first.id).sections}
    assert list(sections) == ["packages", "python"]
    (package,) = sections["packages"].differences
    assert package.path == "sqlalchemy"
    assert package.a is not None
    assert package.a.startswith('"0.0.1+of-then-')
    assert [each.path for each in sections["python"].differences] == ["implementation"]


def alter(database: TestDatabase, before: str, after: str) -> None:
    """Change the manifests that are stored, as if another environment had written them."""
    if database.kind == "sqlite":
        statement = (
            "UPDATE semel_manifests SET digest = 'aa', body = replace(body, '{}', '{}') WHERE body LIKE '%pack%'"
        )
        database.write("UPDATE semel_worker_manifests SET environment = 'aa'")  # type: ignore[arg-type]
    else:
        statement = (
            "UPDATE semel_manifests SET digest = '\\xaa', body = replace(body, '{}', '{}') "
            "WHERE body LIKE '%\"packages\"%'"
        )
        database.write("UPDATE semel_worker_manifests SET environment = '\\xaa'")  # type: ignore[arg-type]
    database.write(statement.format(before, after))  # type: ignore[arg-type]


def test_b26_a_rerun_has_its_own_key_and_quota_and_may_change_parameters(project: Project) -> None:
    app = project.app
    with project.worker():
        first = project.run(user="7", idempotency_key="first")
        with pytest.raises(KeyReused):
            app.rerun(first.id, idempotency_key="first")
        second = app.rerun(first.id, idempotency_key="second").run
        assert app.rerun(first.id, idempotency_key="second").run.id == second.id
        app.wait(second.id, timeout=60)
        other = app.wait(app.rerun(first.id, parameters={"x": 3.0}).run.id, timeout=60)
    assert other.parameters == {"x": 3.0}
    found = app.diff(first.id, other.id)
    assert [each.name for each in found.sections] == ["parameters", "details"], "the seed is as it was"
    app.set_quota("7", Quota(per_day=3))
    with pytest.raises(QuotaExceeded):
        app.rerun(first.id)


def test_b26_only_a_run_that_ended_is_run_again(database: TestDatabase) -> None:
    run = database.submit()
    with pytest.raises(IllegalTransition, match="PENDING"):
        database.app.rerun(run.id)
    with pytest.raises(RunNotFound):
        database.app.rerun("00000000-0000-7000-8000-000000000000")
    (leased,) = database.lease()
    database.end(leased)
    again = database.app.rerun(run.id)
    assert again.run.rerun_of == run.id
    assert "code" in {each.name for each in again.drift.sections}, "what was not recorded counts as drift"
    with pytest.raises(Drifted):
        database.app.rerun(run.id, strict=True)


def manifest(**given: object) -> Manifest:
    environment = {"python": {"version": "3.12.1"}, "packages": {"numpy": "2.0"}, "sources": {}, "gpus": []}
    code = {"function": "f", "module": "m", "reference": "a:f", "git": {"commit": "c", "patch": "", "branch": "b"}}
    return Manifest(**{"run_id": "a", "model": "m", "environment": environment, "code": code, **given})  # type: ignore[arg-type]


def test_b26_a_diff_is_sorted_by_what_most_likely_explains_a_difference() -> None:
    one = manifest(parameters={"x": 1}, seed=1, seed_given=True, data_ref="data/1", host="h1")
    code = {"function": "g", "module": "m", "reference": "a:f", "git": {"commit": "c", "patch": "+1\n", "branch": "x"}}
    environment = {"python": {"version": "3.13.0"}, "packages": {"numpy": "2.1", "scipy": "1"}, "sources": {}}
    other = manifest(
        run_id="b", parameters={"x": 2}, seed=2, data_ref="data/2", host="h2", code=code, environment=environment
    )
    found = compare(one, other, compare_results("1", "1"))
    assert [each.name for each in found.sections] == [*SECTIONS, "details"]
    assert [each.folded for each in found.sections] == [False] * len(SECTIONS) + [True]
    by_name = {each.name: each for each in found.sections}
    assert [(each.path, each.a, each.b) for each in by_name["packages"].differences] == [
        ("numpy", '"2.0"', '"2.1"'),
        ("scipy", None, '"1"'),
    ]
    assert by_name["code"].lines[-1] == "++1"
    assert {"branch", "run_id"} <= {each.path for each in by_name["details"].differences}


def test_b26_results_that_json_cannot_tell_apart_differ(database: TestDatabase) -> None:
    app, values = database.app, {"nan": float("nan"), "inf": float("inf"), "none": None, "again": float("nan")}

    @app.model("diverge", isolation="thread")
    def diverge(kind: str) -> dict[str, float | None]:
        return {"loss": values[kind]}

    with app.working(processes=0, threads=1):
        runs = {kind: app.wait(app.submit("diverge", {"kind": kind}).id, timeout=60).id for kind in values}
    verdicts = {(a, b): app.compare_results(runs[a], runs[b]).verdict for a in runs for b in runs}
    assert verdicts == {(a, b): "same" if a == b or {a, b} == {"nan", "again"} else "differs" for a, b in verdicts}
    assert "NaN" in app.diff(runs["nan"], runs["none"]).result.message


_SAME = ResultComparison(verdict="same", message="same result")


def test_b26_patches_of_very_many_lines_are_not_compared_line_by_line() -> None:
    def code(first: str) -> dict[str, Any]:
        return {"git": {"patch": first + "+1\n+2\n" * 5000, "patch_digest": first, "commit": "c", "untracked": {}}}

    one, other = (Manifest(run_id=name, model="m", environment={}, code=code(f"+{name}\n")) for name in "ab")
    (section,) = [each for each in compare(one, other, _SAME).sections if each.name == "code"]
    assert [each.path for each in section.differences] == ["patch_digest"]
    assert section.lines == ["the patches differ; one has more than 2,000 lines, too many to compare"]


def test_b26_a_model_that_nobody_has_any_more_is_said_to_be_gone(project: Project) -> None:
    with project.worker():
        first = project.run()
    with closing(App(project.url, artifacts=project.artifacts)) as without:
        drift = without.drift(first.id)
    said = "no live worker has the model, and neither has this process"
    assert [each.unknown for each in drift.sections if each.name == "code"] == [f"B: {said}"]


def test_b26_numbers_are_compared_by_their_relative_difference() -> None:
    found = compare_results('{"a": [1.0, 100.0], "b": "x", "c": true}', '{"a": [1.1, 101.0], "b": "x", "c": true}')
    assert found.verdict == "differs"
    assert found.largest_relative_difference == pytest.approx(0.1 / 1.1)
    assert found.where == "a[0]"
    assert compare_results("[1]", "[1.0]").verdict == "same"
    assert compare_results("[0]", "[1e-300]").largest_relative_difference == 1.0
    assert compare_results("[1]", f"[{10**400}]").largest_relative_difference == pytest.approx(1.0)
    other_kind = compare_results('{"a": 1}', '{"a": "1"}')
    assert (other_kind.verdict, other_kind.largest_relative_difference) == ("differs", None)


def test_b26_a_rerun_has_the_data_of_its_run_and_says_if_that_is_gone(database: TestDatabase) -> None:
    run = database.submit()
    database.write("UPDATE semel_active SET data_ref = 'data/of-then.tar'")
    (leased,) = database.lease()
    database.end(leased)
    for again in (database.app.rerun(run.id), database.app.rerun(run.id, idempotency_key="key")):
        assert database.app.get(again.run.id).data_ref == "data/of-then.tar"
        first = again.drift.sections[0]
        assert first.name == "data"
        assert first.unknown is not None
        assert "data/of-then.tar" in first.unknown


def test_b26_a_run_that_is_removed_meanwhile_is_not_run_again(database: TestDatabase) -> None:
    gone, options = "00000000-0000-7000-8000-000000000000", SubmitOptions(dedupe=False)
    with pytest.raises(RunNotFound, match="was removed"):
        run_sync(database.app._engine.submit_run("train", {}, options, rerun_of=gone))
    assert database.count("semel_runs") == 0
