"""A run that lives and makes no progress is shown as stalled, with since when, wherever runs are shown."""

import json
from collections.abc import Iterator
from datetime import timedelta

import httpx
import pytest

from semel.cli import main as semel_command
from semel.client import Client
from semel.runs.types import MICRO
from support.pages import Browser, made_run, put_runs
from support.service import TestServer, make_app, serve

STALL = 60
IDLE_SINCE = 300


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestServer]:
    folder = tmp_path_factory.mktemp("stalled")
    app = make_app(f"sqlite:///{folder / 'semel.db'}", folder)
    app.model("slow", stall_after=STALL, isolation="thread")(_slow)
    with serve(app) as service:
        yield service
    app.close()


def _slow() -> None: ...


@pytest.fixture(scope="module")
def runs(service: TestServer) -> dict[str, str]:
    """One run that is stalled, and one that moved a moment ago."""
    alive = {"status": "RUNNING", "worker": "w", "lease_until": -600, "started": 900, "stall_us": STALL * MICRO}
    ids = {}
    for name, still in (("stalled", IDLE_SINCE), ("moving", 1)):
        made = made_run(1000, **alive, model="slow", progress=0.4)
        now = made["created_us"] + 1000 * MICRO
        made |= {"heartbeat_us": now, "progress_us": now - still * MICRO}
        (ids[name],) = put_runs(service.app, [made])
    return ids


def test_the_api_and_the_clients_say_so(service: TestServer, runs: dict[str, str]) -> None:
    with Client(service.address) as client:
        stalled, moving = client.get(runs["stalled"]), client.get(runs["moving"])
        assert stalled.stalled_since is not None
        assert stalled.heartbeat_at is not None
        assert stalled.heartbeat_at - stalled.stalled_since == timedelta(seconds=IDLE_SINCE)
        assert moving.stalled_since is None
        assert [run.run_id for run in client.runs(stalled=True)] == [runs["stalled"]]
        assert {run.run_id for run in client.runs()} == set(runs.values())
        assert [model.stall_after for model in client.models() if model.name == "slow"] == [STALL]
    listed = httpx.get(f"{service.address}/runs", params={"stalled": "true"}, timeout=60).json()["runs"]
    assert [(run["run_id"], run["stalled_since"] is not None) for run in listed] == [(runs["stalled"], True)]


def test_the_dashboard_says_so(service: TestServer, runs: dict[str, str]) -> None:
    with service.client(follow_redirects=True) as client:
        somebody = Browser(client)
        stuck = somebody.open("/").one("section", id="attention")
        assert "stalled" in stuck.text
        assert [link["title"] for link in stuck.all("a", class_="id")] == [runs["stalled"]]
        assert "No progress since" in somebody.open(f"/ui/runs/{runs['stalled']}").text
        assert "No progress since" not in somebody.open(f"/ui/runs/{runs['moving']}").text
        page = somebody.open("/ui/runs", params={"stalled": "1"})
        assert [box["value"] for box in page.all("input", type="checkbox", name="run")] == [runs["stalled"]]
        assert page.one("input", name="stalled", type="checkbox").get("checked") is not None
        both = somebody.open("/ui/runs").one("tbody").all("tr")
        assert sorted("no progress since" in row.text for row in both) == [False, True]


def test_the_command_line_says_so(
    service: TestServer, runs: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert semel_command(["runs", "--stalled", "--json", "--server", service.address]) == 0
    listed = json.loads(capsys.readouterr().out)["runs"]
    assert [run["run_id"] for run in listed] == [runs["stalled"]]
    assert semel_command(["runs", "--server", service.address]) == 0
    assert "stalled: no progress since" in capsys.readouterr().out
    assert semel_command(["show", runs["stalled"], "--server", service.address]) == 0
    assert "no progress since" in capsys.readouterr().out


def test_the_metrics_count_them(service: TestServer, runs: dict[str, str]) -> None:
    assert runs
    assert "runs_stalled 1.0" in httpx.get(f"{service.address}/metrics", timeout=60).text.splitlines()
