"""The commands that need no server: tokens, quotas, keys, configs, gc, doctor; on both databases."""

import io
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, inspect, make_url, select

from semel import App, Context, Once, Quota
from semel._concurrency.sync import run_sync
from semel.cli import main
from semel.cli._database import engine_of
from semel.cli.quotas import COSTS, COUNTS
from semel.db.schema import REVISIONS, metadata
from semel.runs.store import lease, maintenance
from semel.runs.store.lease import LeaseRequest
from semel.runs.store.maintenance import WorkerRecord
from semel.runs.types import INTERNAL_QUEUE
from semel.service.auth import tokens
from semel.testing import FakeClock

DAY = 86400

Told = Callable[..., tuple[int, str, str]]


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    """A database that is migrated."""
    found: str = request.getfixturevalue(f"migrated_{request.param}_url")
    return found


@pytest.fixture
def semel(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Told:
    """The command on that database, in an empty folder."""
    monkeypatch.setenv("SEMEL_DB", url)
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(arguments)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def app(url: str, tmp_path: Path) -> Iterator[App]:
    made = App(url, artifacts=tmp_path / "artifacts")
    made.model("double")(double)
    yield made
    made.close()


async def double(ctx: Context, number: int) -> int:
    ctx.artifact("letter.txt").write_text("Dear reader")
    return 2 * number


def listed(semel: Told) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(semel("token", "list", "--json")[1])["tokens"]
    return found


def test_a_token_is_made_listed_rotated_and_revoked(semel: Told, app: App) -> None:
    code, out, err = semel("token", "create", "--user", "alice", "--role", "operator", "--ttl", "30d", "--name", "CI")
    assert code == 0
    secret = out.strip()
    parsed = tokens.parse(secret)
    assert parsed is not None
    assert "not shown again" in err
    assert secret not in err
    (token,) = listed(semel)
    assert (token["user"], token["role"], token["name"], token["tenant"]) == ("alice", "operator", "CI", "")
    ends = datetime.fromisoformat(token["expires_at"]) - datetime.fromisoformat(token["created_at"])
    assert ends == timedelta(days=30)
    code, out, _ = semel("token", "list")
    assert code == 0
    assert re.search(rf"^{token['id']} +alice +operator +- +CI ", out, re.MULTILINE)
    assert parsed[1] not in out
    code, out, _ = semel("token", "rotate", token["id"], "--grace", "1h", "--json")
    assert code == 0
    new = json.loads(out)
    assert new["token"]["user"] == "alice"
    assert new["secret"] != secret
    assert len(listed(semel)) == 2
    code, out, err = semel("token", "revoke", token["id"], "missing", new["token"]["id"])
    assert code == 1
    assert out == f"revoked {token['id']}\nrevoked {new['token']['id']}\n"
    assert "no token 'missing'" in err
    assert listed(semel) == []
    assert "local requests only" in semel("token", "list")[2]


MISTAKES = [
    (["token", "create", "--user", ""], "user is empty"),
    (["token", "create", "--user", "*"], "'*'"),
    (["token", "rotate", "missing"], "no token 'missing'"),
    (["quota", "set", "alice", "--max-concurrent", "99999999999"], "max_concurrent"),
    (["quota", "set", "alice", "--warn-at", "2"], "warn_at"),
    (["quota", "set", "alice", "--cost-daily", "-1"], "cost_daily"),
    (["quota", "set", "", "--per-day", "1"], "user is empty"),
    (["keys", "resolve", "missing", "--done"], "nothing to resolve"),
    (["keys", "resolve", "missing", "--not-done", "--value", "1"], "--done"),
    (["keys", "delete", "missing"], "free already"),
    (["config", "show", "missing"], "Unknown config: missing"),
    (["config", "delete", "missing"], "Unknown config: missing"),
    (["config", "set", "../x", "{}"], "a config's name"),
    (["config", "set", "x", '{"modl": "y"}'], "modl"),
    (["gc", "--older-than", "99999w"], "older-than"),
]


def test_a_mistake_is_told_in_a_line(semel: Told) -> None:
    for arguments, expected in MISTAKES:
        code, out, err = semel(*arguments)
        assert (code, out) == (1, ""), arguments
        assert err.startswith("semel: ")
        assert expected in err
        assert err.count("\n") == 1


def test_what_an_output_cannot_write_is_written_otherwise(semel: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    assert semel("token", "create", "--user", "Zoë")[0] == 0
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    assert main(["token", "list"]) == 0
    output.seek(0)
    assert "Zo\\xeb" in output.read()


@pytest.mark.parametrize(
    "arguments",
    [
        ["token", "list"],
        ["quota", "list"],
        ["keys", "show", "k"],
        ["config", "list"],
        ["gc"],
    ],
    ids=" ".join,
)
def test_to_look_into_a_file_that_is_not_there_does_not_make_it(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SEMEL_DB", raising=False)
    assert main(arguments) == 1
    assert "there is no database at semel.db" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_database_that_is_not_migrated_is_told(postgres_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "list", "--db", postgres_url]) == 1
    assert "semel migrate" in capsys.readouterr().err


def test_the_quota_command_knows_every_limit() -> None:
    assert {*COUNTS, *COSTS, "action", "warn_at"} == set(Quota.__struct_fields__)


def test_a_quota_is_set_piece_by_piece_and_taken_away(semel: Told, app: App) -> None:
    assert semel("quota", "list")[2].startswith("there are no quotas")
    code, out, _ = semel("quota", "set", "*", "--max-concurrent", "5")
    assert (code, out) == (0, "*: 5 runs at a time (block)\n")
    assert semel("quota", "set", "alice", "--per-day", "7", "--cost-monthly", "12.5", "--action", "warn")[0] == 0
    assert semel("quota", "set", "alice", "--per-hour", "3", "--per-day", "none", "--warn-at", "0.5")[0] == 0
    assert app.quotas() == {
        "*": Quota(max_concurrent=5),
        "alice": Quota(per_hour=3, cost_monthly=12.5, action="warn", warn_at=0.5),
    }
    code, out, _ = semel("quota", "list")
    assert code == 0
    assert re.search(r"^alice +- +3 +- +- +- +12\.5 +- +warn +0\.5$", out, re.MULTILINE)
    assert json.loads(semel("quota", "list", "--json")[1])["quotas"]["*"]["max_concurrent"] == 5
    assert semel("quota", "unset", "alice")[:2] == (0, "the quota of alice is removed\n")
    assert semel("quota", "unset", "alice")[:2] == (0, "alice has no quota\n")
    assert list(app.quotas()) == ["*"]


def test_a_quota_is_shown_with_what_is_in_use(semel: Told, app: App) -> None:
    app.submit("double", {"number": 1}, user="bob", cost=2.5)
    semel("quota", "set", "*", "--max-concurrent", "5")
    code, out, _ = semel("quota", "show", "bob")
    assert code == 0
    assert re.search(r"^runs at a time +1 +5$", out, re.MULTILINE)
    assert re.search(r"^cost a day +2\.5 +-$", out, re.MULTILINE)
    told = json.loads(semel("quota", "show", "bob", "--json")[1])
    assert (told["usage"]["concurrent"], told["quota"]["max_concurrent"]) == (1, 5)


def test_the_keys_of_work_are_shown_resolved_and_forgotten(semel: Told, url: str) -> None:
    with Once(url, clock=FakeClock(time.time() - 3600), collect=False) as once:
        for key in ("lost", "undone"):
            once.claim(key, scope="orders", lease=1, on_crash="unknown")
    with Once(url, collect=False) as once:
        once.call("done", lambda: {"id": 7}, scope="orders")
        once.claim("held", scope="orders", lease=600)
        code, out, _ = semel("keys", "show", "done")
        assert code == 0
        assert "done in orders" in out
        assert "{'id': 7}" in out
        code, out, err = semel("keys", "show", "lost")
        assert code == 0
        assert "unknown" in out
        assert "semel keys resolve" in err
        assert semel("keys", "show", "missing")[::2] == (1, "the key 'missing' is free\n")
        assert semel("keys", "show", "done", "--scope", "elsewhere")[0] == 1
        assert semel("keys", "resolve", "lost", "--done", "--value", '{"id": 8}')[0] == 0
        assert once.call("lost", lambda: "again", scope="orders").value == {"id": 8}
        assert semel("keys", "resolve", "undone", "--scope", "orders", "--not-done")[0] == 0
        assert once.call("undone", lambda: "done now", scope="orders").value == "done now"
        assert semel("keys", "delete", "done", "--json")[0] == 0
        assert once.call("done", lambda: "anew", scope="orders").value == "anew"
        code, _, err = semel("keys", "delete", "held")
        assert code == 1
        assert "--force" in err
        assert semel("keys", "delete", "held", "--force")[:2] == (0, "forgotten: held\n")
        assert once.get("held", scope="orders") is None
        told = json.loads(semel("keys", "show", "lost", "--json")[1])
    assert told["keys"][0]["outcome"] == {"kind": "resolved", "value": {"id": 8}}
    assert told["keys"][0]["expires_at"].endswith("Z")


def test_one_name_in_two_scopes_is_shown_twice_and_deleted_only_when_named(semel: Told, url: str) -> None:
    with Once(url, collect=False) as once:
        for scope in ("orders", "letters"):
            once.call("same", lambda: 1, scope=scope)
    assert semel("keys", "show", "same")[1].count("same in ") == 2
    code, _, err = semel("keys", "delete", "same")
    assert code == 1
    assert "in 'letters', in 'orders'" in err
    assert semel("keys", "delete", "same", "--scope", "letters")[0] == 0
    assert semel("keys", "show", "same")[1].count("same in ") == 1


def test_the_key_of_a_run_is_shown_and_forgotten(semel: Told, app: App) -> None:
    first = app.submit("double", {"number": 1}, idempotency_key="ci-42", user="alice")
    app.submit("double", {"number": 1}, idempotency_key="ci-42", user="bob")
    code, out, _ = semel("keys", "show", "ci-42", "--user", "alice")
    assert code == 0
    assert first.id in out
    told = json.loads(semel("keys", "show", "ci-42", "--json")[1])["run_keys"]
    assert {key["user"] for key in told} == {"alice", "bob"}
    assert semel("keys", "delete", "ci-42")[0] == 1
    assert semel("keys", "delete", "ci-42", "--user", "alice")[0] == 0
    again = app.submit("double", {"number": 1}, idempotency_key="ci-42", user="alice")
    assert not again.replayed
    assert app.submit("double", {"number": 1}, idempotency_key="ci-42", user="bob").replayed


def test_keys_in_redis_are_shown_resolved_and_forgotten(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    def semel(*words: str) -> tuple[int, str]:
        code = main(["keys", *words, "--scope", "orders", "--db", redis_url])
        said = capsys.readouterr()
        return code, said.out + said.err

    with Once(redis_url, collect=False) as once:
        once.call("done", lambda: 7, scope="orders")
        once.claim("held", scope="orders", lease=600)
        code, said = semel("show", "done")
        assert code == 0
        assert "completed" in said
        assert semel("delete", "done") == (0, "forgotten: done\n")
        assert semel("delete", "done")[0] == 1
        assert once.call("done", lambda: 8, scope="orders").value == 8
        for refused in (semel("delete", "held"), semel("resolve", "held", "--done")):
            assert refused[0] == 1
            assert "--force" in refused[1]
        assert semel("resolve", "held", "--done", "--value", "9", "--force")[0] == 0
        assert once.call("held", lambda: 0, scope="orders").value == 9


def test_the_keys_of_a_scope_are_forgotten_together(semel: Told, url: str) -> None:
    with Once(url, collect=False) as once:
        for number in range(3):
            once.call(f"done {number}", lambda: 7, scope="orders")
        once.call("done", lambda: 7, scope="letters")
        once.claim("held", scope="orders", lease=600)
        for wrong in (("--all",), ("--all", "done 1", "--scope", "orders"), ("--scope", "orders")):
            assert semel("keys", "delete", *wrong)[0] == 1
        assert semel("keys", "delete", "--all", "--scope", "orders")[:2] == (0, "forgotten: 3 keys in orders\n")
        assert once.get("held", scope="orders") is not None
        told = semel("keys", "delete", "--all", "--scope", "orders", "--force", "--json")[1]
        assert json.loads(told) == {"scope": "orders", "removed": 1}
        assert once.get("done", scope="letters") is not None


def test_a_config_is_written_shown_listed_and_removed(
    semel: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEMEL_APP", "shop:app")
    body = {"model": "double", "parameters": {"number": 4, "wait_us": 5}, "cost": 1.5}
    assert semel("config", "set", "nightly", json.dumps(body))[0] == 0
    told = json.loads(semel("config", "show", "nightly", "--json")[1])
    assert {name: told[name] for name in body} == body
    toml = tmp_path / "nightly.toml"
    toml.write_text('model = "double"\n[parameters]\nnumber = 5\n')
    assert semel("config", "set", "nightly", f"@{toml}")[0] == 0
    code, out, _ = semel("config", "show", "nightly")
    assert code == 0
    assert '{"number": 5}' in out
    code, out, _ = semel("config", "list")
    assert code == 0
    assert re.search(r"^nightly +row +double +number ", out, re.MULTILINE)
    code, out, _ = semel("config", "list", "--configs", str(tmp_path), "--json")
    assert [(each["name"], each["source"]) for each in json.loads(out)["configs"]] == [("nightly", "row")]
    assert semel("config", "delete", "nightly")[:2] == (0, "removed nightly\n")
    assert semel("config", "list")[2].startswith("there are no configs")
    code, out, _ = semel("config", "show", "nightly", "--configs", str(tmp_path), "--json")
    assert json.loads(out)["source"] == "file"
    code, _, err = semel("config", "show", "nope")
    assert (code, err) == (1, "semel: Unknown config: nope; there are none; create one with: semel config set\n")


def test_configs_of_files_and_of_the_demo_are_listed_with_where_they_are_from(
    semel: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SEMEL_APP", raising=False)
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "weekly.toml").write_text('model = "double"\n')
    (folder / "production.json").write_text('{"model": "double"}')
    assert semel("config", "set", "nightly", '{"model": "double"}')[0] == 0
    monkeypatch.setenv("SEMEL_CONFIGS", str(folder))
    code, out, err = semel("config", "list")
    assert (code, err) == (0, "the demo's configs exist only on a server that serves the demo\n")
    found = {line.split()[0]: line.split()[1] for line in out.splitlines()[1:]}
    assert found == {
        "flux-lora-v1": "demo",
        "my-training-config": "demo",
        "nightly": "row",
        "production": "file",
        "production-lora": "demo",
        "weekly": "file",
    }
    assert re.search(r"^from +demo$", semel("config", "show", "my-training-config")[1], re.MULTILINE)
    code, out, err = semel("config", "show", "nope")
    assert (code, out) == (1, "")
    assert err.startswith(f"semel: Unknown config: nope; there are: {', '.join(sorted(found))}; ")
    code, _, err = semel("config", "list", "--configs", str(tmp_path / "nofolder"))
    assert (code, err.splitlines()[0]) == (0, f"semel: there is no folder {tmp_path / 'nofolder'} (--configs)")


def old_run(url: str, folder: Path) -> str:
    """A run that was over long ago, with a file and a key."""
    clock = FakeClock(time.time() - 40 * DAY)
    app = App(url, artifacts=folder, clock=clock)
    app.model("double")(double)
    try:
        with app.working(processes=0, threads=1, sweep_every=None):
            run = app.submit("double", {"number": 1}, idempotency_key="old", key_ttl=60)
            return app.wait(run.id, timeout=60).id
    finally:
        app.close()


def test_gc_removes_old_runs_with_their_files_and_what_expired(semel: Told, url: str, app: App, tmp_path: Path) -> None:
    old = old_run(url, tmp_path / "artifacts")
    young = app.submit("double", {"number": 2})
    with Once(url, clock=FakeClock(time.time() - 40 * DAY), collect=False) as once:
        once.call("expired", lambda: 1, ttl=60)
    files = tmp_path / "artifacts" / old
    assert files.is_dir()
    code, out, _ = semel("gc", "--dry-run", "--older-than", "30d")
    assert (code, out) == (0, "would remove 1 runs, 1 run keys, 0 reservations, 1 keys\n")
    code, out, err = semel("gc")
    assert (code, out) == (1, "")
    assert "--artifacts" in err
    assert app.get(old).status == "SUCCEEDED"
    code, out, _ = semel("gc", "--older-than", "50d", "--artifacts", str(tmp_path / "artifacts"), "--json")
    assert json.loads(out)["removed"]["runs"] == 0
    code, out, _ = semel("gc", "--artifacts", str(tmp_path / "artifacts"), "--json")
    assert code == 0
    assert json.loads(out)["removed"]["runs"] == 1
    assert not files.exists()
    assert [run.id for run in app.runs().runs] == [young.id]
    assert json.loads(semel("gc", "--dry-run", "--json")[1])["removed"] == {
        "runs": 0,
        "run_keys": 0,
        "reservations": 0,
        "keys": 0,
    }


def checks(semel: Told, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    code, out, err = semel("doctor", "--json", *arguments)
    assert err == ""
    return code, {each["check"]: each for each in json.loads(out)["checks"]}


def test_the_doctor_finds_nothing_where_nothing_is_wrong(semel: Told, app: App, redis_url: str) -> None:
    app.submit("double", {"number": 2})
    card = WorkerRecord(id="w", name="w", host="here", pid=1, queues=["default"], models={}, slots={})
    run_sync(app._engine.store.write(maintenance.worker_seen, card, app._engine.store.statement_context))
    code, found = checks(semel, "--transport", "rq", "--redis", redis_url)
    assert {name: each["state"] for name, each in found.items() if each["state"] not in ("ok", "skipped")} == {}
    assert code == 0
    assert set(found) == {
        "python",
        "database",
        "migrations",
        "clock",
        "write access",
        "runs",
        "partitions",
        "workers",
        "tokens",
        "database disk",
        "artifacts disk",
        "transport",
        "redis",
    }
    assert REVISIONS[-1] in found["migrations"]["said"]
    assert found["runs"]["said"] == "1 pending, 0 running"
    code, out, _ = semel("doctor")
    assert code == 0
    assert re.search(r"^ok +database +(SQLite|PostgreSQL) \d", out, re.MULTILINE)


def test_the_doctor_does_not_count_a_servers_own_worker(semel: Told, app: App) -> None:
    queues = [INTERNAL_QUEUE]
    card = WorkerRecord(id="s", name="service", host="here", pid=1, queues=queues, models={}, slots={})
    run_sync(app._engine.store.write(maintenance.worker_seen, card, app._engine.store.statement_context))
    _, found = checks(semel)
    assert (found["workers"]["state"], found["workers"]["said"]) == ("warning", "0 alive")


def everything(url: str) -> dict[str, int]:
    """How many rows there are in each table."""
    engine = engine_of(url)
    try:
        with engine.connect() as conn:
            there = [table for table in metadata.sorted_tables if inspect(conn).has_table(table.name)]
            return {table.name: conn.scalar(select(func.count()).select_from(table)) or 0 for table in there}
    finally:
        engine.dispose()


def test_the_doctor_changes_nothing(semel: Told, url: str) -> None:
    before = everything(url)
    assert semel("doctor")[0] == 0
    assert everything(url) == before
    assert not Path("artifacts").exists()


def test_the_doctor_finds_runs_that_nobody_takes_back_and_says_what_helps(
    semel: Told, url: str, tmp_path: Path
) -> None:
    app = App(url, artifacts=tmp_path / "artifacts", clock=FakeClock(time.time() - 3600))
    app.model("double")(double)
    app.submit("double", {"number": 1})
    run_sync(
        app._engine.store.write(
            lease.lease, LeaseRequest("dead", ("default",), ["double"], 1), app._engine.store.statement_context
        )
    )
    app.close()
    code, found = checks(semel)
    assert code == 1
    assert found["runs"]["state"] == "broken"
    assert "semel sweep" in found["runs"]["advice"]


def test_the_doctor_finds_runs_that_wait_for_long_and_that_nobody_works(semel: Told, url: str, tmp_path: Path) -> None:
    app = App(url, artifacts=tmp_path / "artifacts", clock=FakeClock(time.time() - 3600))
    app.model("double")(double)
    app.submit("double", {"number": 1})
    app.close()
    code, found = checks(semel)
    assert code == 0
    assert (found["runs"]["state"], found["workers"]["state"]) == ("warning", "warning")
    assert "waited for 1 h" in found["runs"]["said"]
    assert "runs wait" in found["workers"]["said"]


def test_the_doctor_wants_tokens_where_strangers_could_come(semel: Told) -> None:
    code, found = checks(semel, "--host", "0.0.0.0")
    assert (code, found["tokens"]["state"]) == (1, "broken")
    semel("token", "create", "--user", "alice", "--role", "admin")
    assert checks(semel, "--host", "0.0.0.0")[1]["tokens"]["state"] == "ok"


def test_the_doctor_finds_a_redis_that_is_missing_or_away(semel: Told) -> None:
    code, found = checks(semel, "--transport", "celery")
    assert (code, found["transport"]["state"]) == (1, "broken")
    code, found = checks(semel, "--transport", "rq", "--redis", "redis://:hunter2@127.0.0.1:1/0")
    assert (code, found["redis"]["state"]) == (1, "broken")
    assert "hunter2" not in json.dumps(found)


def test_the_doctor_says_where_to_go_when_tables_are_missing(
    postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--db", postgres_url]) == 1
    assert "→ run: semel migrate" in capsys.readouterr().out


@pytest.mark.parametrize(
    "url",
    ["nonsense", "mysql://host/name", "postgresql://user:hunter2@127.0.0.1:1/name", "sqlite:////no/such/folder/x.db"],
)
def test_the_doctor_says_that_a_database_cannot_be_had(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--db", url]) == 1
    said = capsys.readouterr()
    assert "BROKEN   database" in said.out
    assert "hunter2" not in said.out + said.err


def test_the_doctor_finds_a_database_that_cannot_be_written(
    migrated_postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    read_only = make_url(migrated_postgres_url).update_query_dict({"options": "-c default_transaction_read_only=on"})
    capsys.readouterr()
    assert main(["doctor", "--json", "--db", read_only.render_as_string(hide_password=False)]) == 1
    found = {each["check"]: each for each in json.loads(capsys.readouterr().out)["checks"]}
    assert found["write access"]["state"] == "broken"


@pytest.fixture
def shop(url: str, tmp_path: Path, semel: Told, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """MODULE:APP of an app that keeps its runs and files elsewhere than the defaults; no other database is named."""
    code = f"from semel import App\n\napp = App({url!r}, artifacts={str(tmp_path / 'artifacts')!r})\n"
    Path("corner_shop.py").write_text(code)
    monkeypatch.delenv("SEMEL_DB")
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds its folder
    yield "corner_shop:app"
    sys.modules.pop("corner_shop").app.close()


def test_commands_on_the_database_take_that_of_an_app(semel: Told, shop: str, app: App) -> None:
    assert semel("token", "create", "--user", "alice", "--app", shop)[0] == 0
    assert '"alice"' in semel("token", "list", "--app", shop, "--json")[1]
    assert semel("quota", "set", "alice", "--max-concurrent", "5", "--app", shop)[0] == 0
    assert app.quotas()["alice"].max_concurrent == 5
    app.submit("double", {"number": 2}, idempotency_key="order-1", user="alice")
    assert semel("keys", "show", "order-1", "--app", shop)[0] == 0
    assert semel("migrate", "--app", shop)[1].startswith("already at ")
    assert not Path("semel.db").exists(), "the default database was made"


def test_an_app_of_the_environment_is_taken_and_an_explicit_database_comes_first(
    semel: Told, shop: str, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEMEL_APP", shop)
    assert semel("quota", "set", "alice", "--max-concurrent", "5")[0] == 0
    assert app.quotas()["alice"].max_concurrent == 5
    assert semel("quota", "set", "bob", "--max-concurrent", "5", "--db", "sqlite:///other.db")[0] == 0
    assert "bob" not in app.quotas()
    monkeypatch.setenv("SEMEL_APP", "nowhere:app")
    assert semel("quota", "list", "--db", "sqlite:///other.db")[0] == 0, "an app that is not needed was loaded"
    assert "there is no module 'nowhere'" in semel("quota", "list")[2]


def test_gc_and_doctor_go_by_the_settings_of_an_app(semel: Told, shop: str, app: App, tmp_path: Path) -> None:
    with app.working(processes=0, threads=0):
        run = app.wait(app.submit("double", {"number": 2}).id, timeout=60)
    assert run.status == "SUCCEEDED"
    assert any((tmp_path / "artifacts").rglob("letter.txt"))
    assert semel("gc", shop, "--older-than", "0s")[1].startswith("removed 1 runs")
    assert not any((tmp_path / "artifacts").rglob("letter.txt")), "the files of the app were not found"
    found = {each["check"]: each for each in json.loads(semel("doctor", shop, "--json")[1])["checks"]}
    assert found["database"]["state"] == "ok"
    assert str(tmp_path) in found["artifacts disk"]["said"]


def test_doctor_checks_the_transport_of_an_app(semel: Told, shop: str) -> None:
    broker = "redis://:hush@localhost:1/0"
    code = f"\napp = App(app.url, transport='rq', redis={broker!r})\n"
    Path("corner_shop.py").write_text(Path("corner_shop.py").read_text() + code)
    found = {each["check"]: each for each in json.loads(semel("doctor", shop, "--json")[1])["checks"]}
    assert found["transport"] == {"check": "transport", "state": "ok", "said": "rq", "advice": None}
    assert found["redis"]["state"] == "broken"
    assert "hush" not in json.dumps(found)
