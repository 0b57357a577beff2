"""One story that uses the whole service: its requests are made in this order, and always get the same answers."""

import time

from golden.recording import Recorder
from semel import Granted, JobStore, Once, Unknown

JSON = {"Content-Type": "application/json"}
NO_ID = "00000000-0000-7000-8000-000000000000"


def play(to: Recorder, url: str) -> None:
    """Tell the whole story to a server that has no tokens yet; ``url`` is its database."""
    _begin(to)
    _run_and_replay(to)
    _files_and_failures(to)
    _wait_and_cancel(to)
    _many_at_once(to)
    _mistakes(to)
    _jobs(to)
    _quotas(to, url)
    _keys(to, url)
    _webhooks(to)
    _tokens(to)


def _begin(to: Recorder) -> None:
    to.send("GET", "/healthz")
    to.send("GET", "/readyz")
    to.send("GET", "/models")
    to.send("GET", "/runs")


def _submitted(to: Recorder, model: str, parameters: dict[str, object], key: str) -> str:
    """The id of a new run."""
    body = {"model": model, "parameters": parameters}
    run_id: str = to.send("POST", "/runs", body, headers={"Idempotency-Key": key}).json()["run_id"]
    return run_id


def _run_and_replay(to: Recorder) -> None:
    run_id = _submitted(to, "add", {"a": 1, "b": 2}, "first")
    done = to.send("GET", f"/runs/{run_id}?wait=30")
    _submitted(to, "add", {"a": 1, "b": 2}, "first")
    to.send("POST", "/runs", {"model": "add", "parameters": {"a": 9}}, headers={"Idempotency-Key": "first"})
    to.send("GET", f"/runs/{run_id}", headers={"If-None-Match": done.headers.get("etag", "none")})
    to.send("GET", f"/runs/{run_id}/result")
    to.send("GET", f"/runs/{run_id}/timeline")
    to.send("GET", f"/runs/{run_id}/waiting")
    to.send("GET", f"/runs/{run_id}/events")
    to.send("POST", f"/runs/{run_id}/cancel", {"why": "too late"})
    to.send("POST", f"/runs/{run_id}/retry")
    talking = _submitted(to, "talk", {}, "talking")
    to.send("GET", f"/runs/{talking}?wait=30")
    to.send("GET", f"/runs/{talking}/logs?limit=10")


def _files_and_failures(to: Recorder) -> None:
    writing = _submitted(to, "write", {"text": "Dear reader"}, "writing")
    to.send("GET", f"/runs/{writing}?wait=30")
    to.send("GET", f"/runs/{writing}/artifacts/letter.txt")
    to.send("GET", f"/runs/{writing}/artifacts/none.txt")
    failing = _submitted(to, "fail", {"why": "no money"}, "failing")
    to.send("GET", f"/runs/{failing}?wait=30")
    to.send("GET", f"/runs/{failing}/result")
    again = to.send("POST", f"/runs/{failing}/retry", headers={"Idempotency-Key": "failing-2"}).json()["run_id"]
    to.send("GET", f"/runs/{again}?wait=30")


def _wait_and_cancel(to: Recorder) -> None:
    body = {"model": "wait", "priority": 3, "parameters": {}}
    waiting = to.send("POST", "/runs", body).json()["run_id"]
    to.send("POST", "/runs", body)
    to.send("GET", f"/runs/{waiting}/waiting")
    to.send("GET", f"/runs/{waiting}/result")
    to.send("POST", f"/runs/{waiting}/cancel", {"why": "not needed"})
    to.send("POST", f"/runs/{waiting}/cancel")


def _many_at_once(to: Recorder) -> None:
    good = {"model": "wait", "idempotency_key": "bulk-1"}
    to.send("POST", "/runs/bulk", [good, {"model": "wait", "idempotency_key": "bulk-2"}])
    to.send("POST", "/runs/bulk", [good, {"model": "nonsense"}, {"model": "add", "parameters": {"a": "x"}}])
    to.send("GET", "/runs?status=PENDING&limit=1")
    to.send("GET", "/runs?model=add&include=parameters")
    to.send("GET", "/summary")
    to.send("GET", "/workers")


def _mistakes(to: Recorder) -> None:
    to.send("POST", "/runs", content="{", headers=JSON)
    to.send("POST", "/runs", content="model=add", headers={"Content-Type": "text/plain"})
    to.send("POST", "/runs", content=f'{{"model": "{"x" * 5000}"}}', headers=JSON)
    to.send("POST", "/runs", {"parameters": {}})
    to.send("POST", "/runs", {"model": "nonsense"})
    to.send("POST", "/runs", {"model": "add", "parameters": {"a": "x"}})
    to.send("POST", "/runs", {"model": "add", "parameters": {"a": 1}}, headers={"Idempotency-Key": "x" * 300})
    to.send("GET", "/runs?nonsense=1")
    to.send("GET", "/runs?status=NONSENSE")
    to.send("GET", f"/runs/{NO_ID}")
    to.send("GET", "/nowhere")
    to.send("DELETE", "/runs")


def _jobs(to: Recorder) -> None:
    config = {"model": "add", "parameters": {"a": 20, "b": 22}, "cost": 2.0}
    to.send("PUT", "/api/cloud/configs/sums", config)
    to.send("GET", "/api/cloud/configs/sums")
    to.send("GET", "/api/cloud/configs")
    order = {"config_name_to_load": "sums", "idempotency_key": "job-1", "tracker_run_name": "golden"}
    job_id = to.send("POST", "/api/cloud/jobs/submit?provider=local", order).json()["job_id"]
    to.send("GET", f"/runs/{job_id}?wait=30")
    to.send("POST", "/api/cloud/jobs/submit?provider=local", order)
    to.send("POST", "/api/cloud/jobs/submit?provider=local", {"config_name_to_load": "none"})
    to.send("POST", "/api/cloud/jobs/submit?provider=nobody", {"config_name_to_load": "sums"})
    to.send("GET", f"/api/cloud/jobs/{job_id}")
    to.send("GET", "/api/cloud/jobs?config=sums")
    to.send("POST", f"/api/cloud/jobs/{job_id}/cancel")
    to.send("GET", f"/api/cloud/jobs/{NO_ID}")
    to.send("GET", "/api/cloud/cost-limit/status")
    to.send("DELETE", "/api/cloud/configs/sums")
    to.send("DELETE", "/api/cloud/configs/sums")


def _quotas(to: Recorder, url: str) -> None:
    to.send("PUT", "/admin/quotas/mona", {"max_concurrent": 1, "cost_monthly": 10.0})
    to.send("PUT", "/admin/quotas/mona", {"max_concurrent": -1})
    to.send("GET", "/admin/quotas/mona")
    to.send("GET", "/admin/quotas")
    to.send("POST", "/runs", {"model": "wait", "user": "mona", "dedupe": False})
    to.send("POST", "/runs", {"model": "wait", "user": "mona", "dedupe": False})
    to.send("GET", "/usage/mona")
    to.send("GET", "/usage")
    store = JobStore(url)
    store.reserve_job_slot("liam", 2, 3600)
    store.close()
    held = to.send("GET", "/admin/reservations?user=liam").json()["reservations"]
    to.send("DELETE", f"/admin/reservations/{held[0]['id']}")
    to.send("DELETE", "/admin/quotas/mona")
    to.send("GET", "/admin/quotas/mona")


def _keys(to: Recorder, url: str) -> None:
    with Once(url, collect=False) as once:
        once.call("order-1", lambda: {"paid": True}, scope="orders")
        assert isinstance(once.claim("order-2", scope="orders", lease=0.01, on_crash="unknown"), Granted)
        while not isinstance(once.claim("order-2", scope="orders", on_crash="unknown"), Unknown):
            time.sleep(0.01)  # until the lease has ended
    to.send("GET", "/admin/keys?scope=orders&key=order-1")
    to.send("GET", "/admin/keys?scope=orders&key=none")
    to.send("GET", "/admin/keys/unresolved")
    to.send("POST", "/admin/keys/resolve", {"scope": "orders", "key": "order-2", "done": True, "value": 7})
    to.send("POST", "/admin/keys/resolve", {"scope": "orders", "key": "order-2", "done": True, "value": 7})
    to.send("DELETE", "/admin/keys?scope=orders&key=order-2")
    to.send("GET", "/admin/run-keys?key=first")
    to.send("DELETE", "/admin/run-keys?key=first&user=local")
    to.send("GET", "/admin/audit?action=nothing")
    to.send("GET", "/admin/audit?entrance=window")
    to.send("GET", "/admin/audit?cursor=nonsense")


def _webhooks(to: Recorder) -> None:
    wanted = {"url": "http://127.0.0.1:9/hook", "events": ["RunCompleted"]}
    made = to.send("POST", "/admin/subscriptions", wanted).json()["subscription"]
    to.send("POST", "/admin/subscriptions", {"url": "ftp://example.org/"})
    to.send("POST", "/admin/subscriptions", {"url": "https://example.org/", "events": ["nonsense"]})
    to.send("GET", "/admin/subscriptions")
    to.send("GET", f"/admin/subscriptions/{made['id']}")
    to.send("GET", "/admin/deliveries")
    to.send("DELETE", f"/admin/subscriptions/{made['id']}")
    to.send("GET", f"/admin/subscriptions/{made['id']}")


def _tokens(to: Recorder) -> None:
    made = to.send("POST", "/admin/tokens", {"user": "root", "role": "admin", "name": "golden"}).json()
    to.send("GET", "/runs")
    to.send("GET", "/runs", headers={"Authorization": "Bearer nonsense"})
    to.token = made["secret"]
    other = to.send("POST", "/admin/tokens", {"user": "mona", "ttl": 3600}).json()
    to.send("GET", "/admin/tokens")
    to.send("GET", "/admin/tokens", headers={"Authorization": f"Bearer {other['secret']}"})
    to.send("GET", "/usage", headers={"Authorization": f"Bearer {other['secret']}"})
    to.send("POST", f"/admin/tokens/{other['token']['id']}/rotate", {"grace": 0})
    to.send("DELETE", f"/admin/tokens/{other['token']['id']}")
    to.send("DELETE", f"/admin/tokens/{NO_ID}")
    to.send("DELETE", f"/admin/tokens/{made['token']['id']}")
