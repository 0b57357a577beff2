"""B27: what people did is in a chained log of its own, with who, from where, before and after."""

import getpass
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection, delete, insert, select, update

from semel import Actor, Granted, InvalidRequest, JobStore, Once, Quota, Unknown
from semel._concurrency.sync import run_sync
from semel.cli import main
from semel.cli._database import engine_of
from semel.client import Client
from semel.db.schema import audit, deliveries
from semel.http.protocol import scope_of
from semel.runs.store import lease
from semel.runs.store.audit_log import AuditEntry
from semel.runs.store.lease import LeaseRequest
from semel.service import Settings
from support.databases import DATABASES
from support.pages import browser
from support.service import TokenClient, TokenServer, shared_server

LOCAL = {"user": "root", "role": "admin", "user_tenant": "", "address": "127.0.0.1", "entrance": "api"}


@pytest.fixture(scope="module", params=DATABASES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    with shared_server(request, tmp_path_factory, Settings(private_webhooks=True)) as server:
        yield server


class Log:
    """The rows since the last look, oldest first."""

    def __init__(self, server: TokenServer) -> None:
        self._app = server.app
        self._seen: set[str] = set()
        self.new()

    def new(self) -> list[AuditEntry]:
        found = self._app.audit_log(limit=1000).entries
        new = [each for each in reversed(found) if each.digest not in self._seen]
        self._seen |= {each.digest for each in new}
        return new

    def one(self) -> AuditEntry:
        (entry,) = self.new()
        return entry


@pytest.fixture
def log(server: TokenServer) -> Iterator[Log]:
    yield Log(server)
    assert server.app.verify_audit_log().problem is None


def origin(entry: AuditEntry) -> dict[str, str]:
    return {name: getattr(entry, name) for name in LOCAL}


def lose(server: TokenServer, key: str, scope: str = "orders") -> None:
    """Claim a key, vanish, and leave it unknown whether the work happened."""
    once = Once(server.app.url, collect=False)
    assert isinstance(once.claim(key, scope=scope, lease=0.01, on_crash="unknown"), Granted)
    deadline = time.monotonic() + 30
    while not isinstance(once.claim(key, scope=scope, on_crash="unknown"), Unknown):
        assert time.monotonic() < deadline
    once.close()


def hold(server: TokenServer, key: str, scope: str = "orders") -> None:
    once = Once(server.app.url, collect=False)
    assert isinstance(once.claim(key, scope=scope, lease=600), Granted)
    once.close()


def submitted(person: TokenClient, **more: Any) -> str:
    answer = person.post("/runs", json={"model": "add", "parameters": {"a": 1}, "delay": 600, **more})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["run_id"])


def test_b27_tokens_made_rotated_and_revoked_are_logged(server: TokenServer, log: Log) -> None:
    root = server.root
    made = root.post("/admin/tokens", json={"user": "erin", "role": "operator", "name": "laptop"}).json()
    entry = log.one()
    expected = {"user": "erin", "role": "operator", "name": "laptop", "expires_at": None}
    assert (entry.action, entry.target, entry.token) == ("token.created", made["token"]["id"], root.id)
    assert (entry.before, entry.after) == (None, expected)
    assert origin(entry) == LOCAL
    rotated = root.post(f"/admin/tokens/{made['token']['id']}/rotate", json={"grace": 60}).json()
    created, old = log.new()
    assert (created.action, created.target) == ("token.created", rotated["token"]["id"])
    assert (old.action, old.target, old.before) == ("token.rotated", made["token"]["id"], expected)
    assert old.after is not None
    assert old.after["replaced_by"] == rotated["token"]["id"]
    assert old.after["expires_at"] is not None
    assert root.delete(f"/admin/tokens/{rotated['token']['id']}").status_code == 204
    entry = log.one()
    assert (entry.action, entry.before, entry.after) == ("token.revoked", expected, None)


def test_b27_quotas_and_reservations_are_logged_with_before_and_after(server: TokenServer, log: Log) -> None:
    root = server.root
    assert root.put("/admin/quotas/carl", json={"per_day": 5}).status_code == 200
    entry = log.one()
    assert (entry.action, entry.target, entry.before) == ("quota.set", "carl", None)
    assert entry.after is not None
    assert (entry.after["per_day"], entry.after["action"]) == (5, "block")
    assert root.put("/admin/quotas/carl", json={"per_day": 5}).status_code == 200
    assert log.new() == [], "nothing was changed"
    assert root.put("/admin/quotas/carl", json={"per_day": 6, "cost_daily": 1.5}).status_code == 200
    changed = log.one()
    assert (changed.before, changed.after) == (entry.after, {**entry.after, "per_day": 6, "cost_daily": 1.5})
    assert root.delete("/admin/quotas/carl").status_code == 204
    entry = log.one()
    assert (entry.action, entry.before, entry.after) == ("quota.removed", changed.after, None)
    jobs = JobStore(server.app.url)
    reservation = jobs.reserve_job_slot("carl", 5, 600)
    jobs.close()
    assert root.delete(f"/admin/reservations/{reservation}").status_code == 204
    entry = log.one()
    assert (entry.action, entry.target, entry.before) == ("reservation.released", reservation, {"user": "carl"})


def test_b27_configs_are_logged_with_before_and_after(server: TokenServer, log: Log) -> None:
    root, path = server.root, "/api/cloud/configs/nightly"
    for a in (1, 2):
        assert root.put(path, json={"model": "add", "parameters": {"a": a}}).status_code == 200
    assert root.delete(path).status_code == 204
    first, second, removed = log.new()
    configs = [{"config": {"model": "add", "parameters": {"a": a}}} for a in (1, 2)]
    assert [each.action for each in (first, second, removed)] == ["config.set", "config.set", "config.removed"]
    assert {each.target for each in (first, second, removed)} == {"nightly"}
    assert (first.before, first.after) == (None, configs[0])
    assert (second.before, second.after) == (configs[0], configs[1])
    assert (removed.before, removed.after) == (configs[1], None)


def test_b27_keys_resolved_and_deleted_are_logged(server: TokenServer, log: Log) -> None:
    root = server.root
    lose(server, "order-1")
    body = {"scope": "orders", "key": "order-1", "done": True, "value": {"id": 7}}
    assert root.post("/admin/keys/resolve", json=body).status_code == 204
    entry = log.one()
    assert (entry.action, entry.target) == ("key.resolved", "order-1")
    assert entry.before is not None
    assert (entry.before["scope"], entry.before["state"]) == ("orders", "unknown")
    assert entry.after == {"scope": "orders", "state": "completed"}
    with_key = {"scope": "orders", "key": "order-1"}
    assert root.get("/admin/keys", params=with_key).json()["state"] == "completed"
    assert root.delete("/admin/keys", params=with_key).status_code == 204
    entry = log.one()
    assert (entry.action, entry.target, entry.after) == ("key.deleted", "order-1", None)
    assert entry.before is not None
    assert entry.before["state"] == "completed"
    run = submitted(root, idempotency_key="ci-1")
    assert root.delete("/admin/run-keys", params={"key": "ci-1", "user": "root"}).status_code == 204
    entry = log.one()
    assert (entry.action, entry.target) == ("key.deleted", "ci-1")
    assert entry.before is not None
    assert (entry.before["run_id"], entry.before["user"], entry.before["kind"]) == (run, "root", "key")


def test_b27_runs_cancelled_retried_and_rerun_are_logged_by_whoever_does_it(server: TokenServer, log: Log) -> None:
    alice = server.admit("alice")
    run = submitted(alice)
    assert alice.post(f"/runs/{run}/cancel", json={"why": "wrong month"}).status_code == 200
    entry = log.one()
    assert (entry.action, entry.target, entry.user, entry.role) == ("run.cancelled", run, "alice", "submitter")
    assert entry.before == {"status": "PENDING", "cancel_requested": False}
    assert entry.after == {"status": "CANCELLED", "cancel_requested": True, "why": "wrong month"}
    assert alice.post(f"/runs/{run}/cancel").status_code == 200
    assert log.new() == [], "a repeat changes nothing"
    headers = {"Idempotency-Key": "again"}
    again = alice.post(f"/runs/{run}/retry", headers=headers).json()["run_id"]
    entry = log.one()
    after = {"run_id": again, "model": "add", "user": "alice"}
    assert (entry.action, entry.target, entry.before, entry.after) == ("run.retried", run, None, after)
    assert alice.post(f"/runs/{run}/retry", headers=headers).json()["run_id"] == again
    assert log.new() == [], "the same retry was found"
    other = server.root.post(f"/runs/{run}/rerun").json()["run"]["run_id"]
    entry = log.one()
    assert (entry.action, entry.target, entry.user) == ("run.rerun", run, "root")
    assert entry.after == {"run_id": other, "model": "add", "user": "alice"}
    body = {"model": "add", "parameters": {"a": 1}}
    assert server.root.put("/api/cloud/configs/job", json=body).status_code == 200
    job = alice.post("/api/cloud/jobs/submit", json={"config_name_to_load": "job"}).json()["job_id"]
    log.new()
    assert alice.post(f"/api/cloud/jobs/{job}/cancel").status_code == 200
    entry = log.one()
    assert (entry.action, entry.target, entry.user) == ("run.cancelled", job, "alice")


def test_b27_a_running_run_is_asked_to_end(server: TokenServer, log: Log) -> None:
    run = submitted(server.root, delay=0, queue="held")
    store = server.app.ledger(awaited=False)
    request = LeaseRequest("somebody", ("held",), ["add"], 1)
    assert run_sync(store.write(lease.lease, request, store.statement_context))
    run_sync(store.close())
    assert server.root.post(f"/runs/{run}/cancel").status_code == 200
    entry = log.one()
    assert entry.before == {"status": "RUNNING", "cancel_requested": False}
    assert entry.after == {"status": "RUNNING", "cancel_requested": True, "why": "cancelled by request"}


def test_b27_subscriptions_are_logged_without_what_may_be_secret(server: TokenServer, log: Log) -> None:
    url = "http://user:hunter2@127.0.0.1:9/hooks/T0/B0/XYZZY?token=abc123"
    made = server.root.post("/admin/subscriptions", json={"url": url, "events": ["RunCompleted"]})
    if made.status_code != 201:  # a URL with a password is refused
        url = "http://127.0.0.1:9/hooks/T0/B0/XYZZY?token=abc123"
        made = server.root.post("/admin/subscriptions", json={"url": url, "events": ["RunCompleted"]})
    assert made.status_code == 201, made.text
    subscription = made.json()["subscription"]["id"]
    assert server.root.delete(f"/admin/subscriptions/{subscription}").status_code == 204
    created, deleted = log.new()
    what = {"kind": "webhook", "host": "http://127.0.0.1:9", "events": ["RunCompleted"]}
    assert (created.action, created.target, created.before, created.after) == (
        "subscription.created",
        subscription,
        None,
        what,
    )
    assert (deleted.action, deleted.before, deleted.after) == ("subscription.deleted", what, None)


def test_b27_queues_and_models_paused_and_resumed_are_logged(
    server: TokenServer, log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    olga = server.admit("olga", "operator")
    assert olga.put("/pauses/queue/gpu", json={"why": "a new driver"}).status_code == 200
    entry = log.one()
    assert (entry.action, entry.target, entry.tenant, entry.before) == ("queue.paused", "gpu", "", None)
    assert entry.after is not None
    assert (entry.after["by"], entry.after["why"]) == ("olga", "a new driver")
    assert origin(entry) == {**LOCAL, "user": "olga", "role": "operator"}
    assert server.root.put("/pauses/queue/gpu", json={"why": "again"}).status_code == 200
    assert log.new() == [], "it was paused already"
    assert server.root.delete("/pauses/queue/gpu").status_code == 204
    resumed = log.one()
    assert (resumed.action, resumed.target, resumed.user) == ("queue.resumed", "gpu", "root")
    assert (resumed.before, resumed.after) == (entry.after, None)
    assert server.root.delete("/pauses/queue/gpu").status_code == 404
    assert log.new() == [], "nothing was resumed"
    for words in (("pause", "model", "add", "--why", "wrong"), ("resume", "model", "add")):
        assert main([*words, "--server", server.address, "--token", olga.secret]) == 0
    capsys.readouterr()
    server.app.pause(model="add", by=Actor(user="zoe", address="192.0.2.7"))
    server.app.resume(model="add")
    new = log.new()
    assert [each.action for each in new] == ["model.paused", "model.resumed"] * 2
    assert [(each.user, each.entrance) for each in new] == [
        *(("olga", "api"), ("olga", "api"), ("zoe", "python"), (getpass.getuser(), "python"))
    ]
    assert (new[2].address, (new[3].before or {})["by"]) == ("192.0.2.7", "zoe")


def test_b27_a_delivery_that_is_sent_again_is_logged(server: TokenServer, log: Log) -> None:
    made = server.root.post("/admin/subscriptions", json={"url": "http://127.0.0.1:9/", "events": ["RunCompleted"]})
    subscription, run = made.json()["subscription"]["id"], submitted(server.root)
    row = {"subscription_id": subscription, "run_id": run, "version": 7, "state": "delivered", "attempts": 2}
    event: dict[str, Any] = {
        "note": None,
        "id": f"{run}/7",
        "name": "RunCompleted",
        "run_id": run,
        "version": 7,
        "model": "add",
        "tenant": "",
    }
    event |= {"user": "root", "status": "SUCCEEDED", "step": "succeeded", "at": "2026-01-01T00:00:00Z", "fence": 1}
    with engine_of(server.app.url).begin() as conn:
        conn.execute(insert(deliveries).values(**row, due_us=0, body=json.dumps(event)))
    log.new()
    sent = server.root.post(f"/admin/deliveries/{subscription}/{run}/7/resend")
    assert (sent.status_code, sent.json()["state"]) == (202, "waiting")
    entry = log.one()
    assert (entry.action, entry.target) == ("delivery.resent", f"{run}/7")
    assert origin(entry) == LOCAL
    before, after = entry.before or {}, entry.after or {}
    assert (before["subscription"], before["state"], before["attempts"]) == (subscription, "delivered", 2)
    assert (after["subscription"], after["state"]) == (subscription, "waiting")
    assert server.root.post(f"/admin/deliveries/{subscription}/{run}/8/resend").status_code == 404
    assert server.root.delete(f"/admin/subscriptions/{subscription}").status_code == 204
    assert log.one().action == "subscription.deleted"


def test_b27_what_is_refused_or_fails_leaves_no_row(server: TokenServer, log: Log) -> None:
    root, alice = server.root, server.admit("alice")
    run = submitted(alice)
    bob = server.admit("bob")
    hold(server, "held")
    refused = [
        alice.post("/admin/tokens", json={"user": "eve"}),
        root.post("/admin/tokens", json={"user": "*"}),
        root.delete("/admin/tokens/0123456789abcdef"),
        root.delete(f"/admin/tokens/{root.id}"),
        alice.put("/admin/quotas/alice", json={}),
        root.put("/admin/quotas/alice", json={"per_day": -1}),
        root.delete("/admin/quotas/nobody"),
        alice.put("/api/cloud/configs/mine", json={"model": "add"}),
        root.delete("/api/cloud/configs/nothing"),
        root.delete("/admin/keys", params={"scope": "orders", "key": "held"}),
        root.delete("/admin/keys", params={"scope": "orders", "key": "free"}),
        root.post("/admin/keys/resolve", json={"scope": "orders", "key": "held", "done": True}),
        root.delete("/admin/run-keys", params={"key": "free", "user": "alice"}),
        bob.post(f"/runs/{run}/cancel"),
        alice.post(f"/runs/{run}/retry"),
        alice.post(f"/runs/{run}/rerun"),
        root.post("/admin/subscriptions", json={"url": "ftp://127.0.0.1/"}),
        root.delete("/admin/subscriptions/01980a5e-8d1c-7c3e-9f00-5f2d6a1b3c4d"),
        root.delete("/admin/reservations/nothing"),
        server.nobody.post(f"/runs/{run}/cancel"),
    ]
    assert [each.status_code for each in refused if each.status_code < 400] == []
    assert log.new() == []
    server.app.set_quota("tight", Quota(max_concurrent=0))
    tight = server.admit("tight")
    server.app.set_quota("tight", None)
    run = submitted(tight)
    assert tight.post(f"/runs/{run}/cancel").status_code == 200
    server.app.set_quota("tight", Quota(max_concurrent=0))
    log.new()
    assert tight.post(f"/runs/{run}/retry").status_code == 429
    assert log.new() == [], "the quota refused the retry in its transaction"


def test_b27_the_dashboard_says_so_and_its_forms_are_logged(server: TokenServer, log: Log) -> None:
    run = submitted(server.root)
    hold(server, "shown")
    with browser(server, server.root) as visitor:
        visitor.open(f"/ui/runs/{run}")
        assert visitor.send(f"/ui/runs/{run}/cancel", {}).status < 400
        deleting = {"scope": "orders", "key": "shown", "sure": "yes", "force": "yes"}
        assert visitor.send("/ui/keys/delete", deleting).status < 400
        cancelled, deleted = log.new()
        assert [cancelled.action, deleted.action] == ["run.cancelled", "key.deleted"]
        assert origin(cancelled) == origin(deleted) == {**LOCAL, "entrance": "dashboard"}
        page = visitor.open("/ui/audit", params={"target": run})
    (row,) = page.one(id="actions").rows()
    assert "root admin" in row[2]
    assert "dashboard 127.0.0.1" in row[3]
    assert row[4] == "run.cancelled"


def test_b27_commands_on_the_database_are_logged_as_the_users_of_the_machine(
    server: TokenServer, log: Log, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def semel(*words: str) -> str:
        capsys.readouterr()
        assert main([*words, "--db", server.app.url]) == 0
        return capsys.readouterr().out

    token = json.loads(semel("token", "create", "--user", "ann", "--json"))["token"]["id"]
    semel("token", "rotate", token)
    semel("token", "revoke", token)
    semel("quota", "set", "ann", "--per-day", "3")
    semel("quota", "set", "ann", "--per-hour", "2")
    semel("quota", "unset", "ann")
    semel("config", "set", "weekly", '{"model": "add"}')
    semel("config", "delete", "weekly")
    lose(server, "cli-1", "clis")
    semel("keys", "resolve", "cli-1", "--scope", "clis", "--not-done")
    hold(server, "cli-2", "clis")
    semel("keys", "delete", "cli-2", "--scope", "clis", "--force")
    hold(server, "cli-3", "clis")
    hold(server, "cli-4", "clis")
    semel("keys", "delete", "--all", "--scope", "clis", "--force")
    run = submitted(server.root, idempotency_key="cli-5")
    semel("keys", "delete", "cli-5", "--user", "root")
    new = log.new()
    assert [each.action for each in new] == [
        *("token.created", "token.created", "token.rotated", "token.revoked"),
        *("quota.set", "quota.set", "quota.removed", "config.set", "config.removed"),
        *("key.resolved", "key.deleted", "key.deleted", "key.deleted"),
    ]
    here = {"user": getpass.getuser(), "address": socket.gethostname(), "entrance": "cli", "user_tenant": ""}
    assert {(name, getattr(each, name)) for each in new for name in here} == set(here.items())
    assert new[9].after == {"scope": "clis", "state": "free"}
    assert new[11].before == {"scope": "clis", "keys": 2}
    assert (new[12].before or {})["run_id"] == run
    server.app.cancel(run)
    log.new()
    semel("gc", "--older-than", "0s", "--artifacts", str(tmp_path))
    purged = log.new()
    assert {each.action for each in purged} == {"runs.purged"}
    assert purged[0].entrance == "cli"
    assert all(each.after is not None and each.after["first"] <= each.after["last"] for each in purged)
    shown = json.loads(semel("audit", "log", "--action", "runs", "--entrance", "cli", "--limit", "1", "--json"))
    assert shown["actions"][0]["digest"] == purged[-1].digest
    assert "runs.purged" in semel("audit", "log", "--since", "1h")


def test_b27_python_programs_name_who_acts(server: TokenServer, log: Log) -> None:
    app = server.app
    zoe = Actor(user="zoe", role="on call", address="192.0.2.7")
    run = app.submit("add", {"a": 1}, delay=600)
    app.cancel(run.id)
    app.retry(run.id, by=zoe)
    app.rerun(run.id, by=zoe)
    app.set_quota("ben", Quota(per_day=1), by=zoe)
    new = log.new()
    assert [each.action for each in new] == ["run.cancelled", "run.retried", "run.rerun", "quota.set"]
    assert {each.entrance for each in new} == {"python"}
    assert (new[0].user, new[0].address) == (getpass.getuser(), socket.gethostname())
    assert {(each.user, each.role, each.address) for each in new[1:]} == {("zoe", "on call", "192.0.2.7")}
    assert app.purge(0) >= 1
    assert {each.action for each in log.new()} == {"runs.purged"}


BAD_ACTORS: list[Any] = [
    "zoe",
    msgspec.structs.replace(Actor(user=""), user=None),
    Actor(user="x" * 2000),
    msgspec.structs.replace(Actor(user="zoe"), entrance="window"),
]


@pytest.mark.parametrize("by", BAD_ACTORS)
def test_b27_an_actor_that_cannot_be_is_refused(server: TokenServer, log: Log, by: Any) -> None:
    run = server.app.submit("add", {"a": 1}, delay=600)
    with pytest.raises(InvalidRequest):
        server.app.cancel(run.id, by=by)
    assert server.app.get(run.id).status == "PENDING"
    assert log.new() == []


def test_b27_what_no_person_does_is_not_logged(server: TokenServer, log: Log) -> None:
    app = server.app
    with app.working(processes=0):
        run = app.submit("add", {"a": 1})
        app.wait(run.id, timeout=60)
    engine = app.engine(awaited=False)
    assert run_sync(engine.remove_old(0, whole=True))[0] >= 0, "as the sweeper removes them"
    run_sync(engine.close())
    assert log.new() == []


def test_b27_admins_see_what_was_done_to_their_tenant_and_the_operator_sees_everything(
    server: TokenServer, log: Log
) -> None:
    root, wile = server.root, server.admit("wile", "admin", "acme")
    assert root.put("/admin/quotas/kim?tenant=acme", json={"per_day": 1}).status_code == 200
    assert wile.put("/admin/quotas/kim", json={"per_day": 2}).status_code == 200
    assert root.put("/admin/quotas/kim", json={"per_day": 3}).status_code == 200
    hold(server, "theirs", scope_of("acme", "orders"))
    deleting = {"scope": "orders", "key": "theirs", "force": "true"}
    assert wile.delete("/admin/keys", params=deleting).status_code == 204
    theirs = wile.get("/admin/audit").json()["actions"]
    assert {each["tenant"] for each in theirs} == {"acme"}
    assert [(each["user"], each["user_tenant"], each["action"]) for each in theirs[:3]] == [
        ("wile", "acme", "key.deleted"),
        ("wile", "acme", "quota.set"),
        ("root", "", "quota.set"),
    ]
    assert [each["seq"] for each in theirs] == list(range(len(theirs), 0, -1)), "their log is a chain of its own"
    for name in ("", "globex"):
        assert wile.get("/admin/audit", params={"tenant": name}).status_code == 403
    with browser(server, wile) as visitor:
        assert len(visitor.open("/ui/audit").one(id="actions").rows()) == len(theirs)
    every = root.get("/admin/audit", params={"limit": 1000}).json()["actions"]
    assert {each["tenant"] for each in every} >= {"", "acme"}
    ours = root.get("/admin/audit", params={"tenant": "acme"}).json()["actions"]
    assert ours == theirs
    for person in (server.admit("op", "operator"), server.admit("sub"), server.nobody):
        assert person.get("/admin/audit").status_code in (401, 403)
    assert server.app.verify_audit_log(tenant="acme").rows == len(theirs)


def test_b27_the_log_is_filtered_and_paged(server: TokenServer) -> None:
    for number in range(5):
        server.app.set_quota(f"paged-{number}", Quota(per_day=number), by=Actor(user="pager"))
    with Client(server.address, token=server.root.secret) as client:
        found = list(client.audit_log(user="pager"))
        assert [each.target for each in found] == [f"paged-{number}" for number in (4, 3, 2, 1, 0)]
        assert [each.target for each in client.audit_log(target="paged-2")] == ["paged-2"]
        for none in ("token", "quot_", "%"):
            assert list(client.audit_log(user="pager", action=none)) == [], none
        assert len(list(client.audit_log(user="pager", action="quota"))) == 5
        assert len(list(client.audit_log(user="pager", action="quota.set", entrance="python"))) == 5
        assert list(client.audit_log(user="pager", entrance="api")) == []
        middle = found[2].at
        assert [each.seq for each in client.audit_log(user="pager", since=middle)] == [e.seq for e in found[:3]]
        assert [each.seq for each in client.audit_log(user="pager", until=middle)] == [e.seq for e in found[3:]]
    seen, cursor = [], None
    while True:
        params = {"user": "pager", "limit": 2} | ({} if cursor is None else {"cursor": cursor})
        page = server.root.get("/admin/audit", params=params).json()
        seen += [each["target"] for each in page["actions"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert seen == [each.target for each in found]
    for bad in ("x", "1", "1.1", "a.1.", "1.b."):
        assert server.root.get("/admin/audit", params={"cursor": bad}).status_code == 400
    assert server.root.get("/admin/audit", params={"entrance": "window"}).status_code == 400


def test_b27_secrets_are_not_in_the_log(server: TokenServer, log: Log) -> None:
    root = server.root
    made = root.post("/admin/tokens", json={"user": "sam", "name": "for https://sam:hunter2@example.com/"}).json()
    rotated = root.post(f"/admin/tokens/{made['token']['id']}/rotate", json={}).json()
    config = {
        "model": "add",
        "parameters": {"a": 1, "url": "postgresql://sam:hunter2@db/app", "deep": [{"apiKey": "hunter2"}]},
        "providers": {"replicate": {"api_token": "hunter2", "note": "Bearer hunter2"}},
    }
    for _ in range(2):
        assert root.put("/api/cloud/configs/secret", json=config).status_code == 200
    assert root.delete("/api/cloud/configs/secret").status_code == 204
    hook = root.post("/admin/subscriptions", json={"url": "http://127.0.0.1:9/hunter2?token=hunter2"}).json()
    run = submitted(root)
    assert root.post(f"/runs/{run}/cancel", json={"why": "password=hunter2"}).status_code == 200
    lose(server, "order-9")
    body = {"scope": "orders", "key": "order-9", "done": True, "value": "hunter2"}
    assert root.post("/admin/keys/resolve", json=body).status_code == 204
    assert len(log.new()) == 8
    with engine_of(server.app.url).connect() as conn:
        stored = str(conn.execute(select(audit)).all())
    assert "hunter2" not in stored
    for secret in (made["secret"], rotated["secret"], hook["secret"]):
        assert secret not in stored
        assert secret.rpartition("_")[2] not in stored
    assert "***" in stored


class Tampered:
    """The table as an administrator of the database changes it, who is undone at the end."""

    def __init__(self, server: TokenServer) -> None:
        self._engine = engine_of(server.app.url)
        self._server = server

    def problem(self, alter: Callable[[Connection, int], None], seq: int, heads: list[str] | None = None) -> str | None:
        with self._engine.begin() as conn:
            before = [dict(row) for row in conn.execute(select(audit).where(audit.c.tenant == "t")).mappings()]
            alter(conn, seq)
        try:
            found: str | None = self._server.app.verify_audit_log(heads or []).problem
            if not heads:
                assert main(["audit", "verify", "--db", self._server.app.url]) == (0 if found is None else 1)
            return found
        finally:
            with self._engine.begin() as conn:
                conn.execute(delete(audit).where(audit.c.tenant.in_(["t", "tx"])))
                conn.execute(insert(audit), before)


def _row(seq: int) -> Any:
    return (audit.c.tenant == "t") & (audit.c.seq == seq)


def _swap(conn: Connection, seq: int) -> None:
    for old, new in ((seq, -1), (seq + 1, seq), (-1, seq + 1)):
        conn.execute(update(audit).where(_row(old)).values(seq=new))


def _add(conn: Connection, seq: int) -> None:
    """Add a row, and move the others: from the last on, as the numbers are unique."""
    row = dict(conn.execute(select(audit).where(_row(seq))).mappings().one())
    for number in range(11, seq - 1, -1):
        conn.execute(update(audit).where(_row(number)).values(seq=number + 1))
    conn.execute(insert(audit), [row])


def test_b27_whatever_is_altered_behind_semels_back_is_found(server: TokenServer) -> None:
    app = server.app
    for number in range(10):
        app.set_quota(f"user-{number}", Quota(per_day=number), tenant="t")
    app.set_quota("user-3", Quota(per_day=100), tenant="t")
    check = app.verify_audit_log()
    assert check.problem is None
    kept = list(check.heads.values())
    tampered = Tampered(server)
    for column in audit.c:
        value: Any = column + 1000 if column.name in ("seq", "at_us") else "x"
        if column.name == "tenant":
            value = "tx"
        found = tampered.problem(
            lambda conn, seq, column=column, value=value: conn.execute(  # type: ignore[misc]
                update(audit).where(_row(seq)).values({column.name: value})
            ),
            5,
        )
        assert found is not None, f"a change of {column.name} was not found"
        assert "of tenant t" in found
    assert "row 6" in str(tampered.problem(lambda conn, seq: conn.execute(delete(audit).where(_row(seq))) and None, 5))
    assert tampered.problem(_swap, 5) is not None
    assert tampered.problem(_add, 5) is not None
    cut = lambda conn, seq: conn.execute(delete(audit).where(_row(seq))) and None  # noqa: E731
    assert tampered.problem(cut, 11) is None, "nothing that is left tells"
    assert "kept head" in str(tampered.problem(cut, 11, kept))
    assert app.verify_audit_log(kept).problem is None, "and all was undone"
