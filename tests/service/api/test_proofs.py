"""Proofs over HTTP, and the run page: whether a run is sealed, and who may see it."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from semel import audit
from semel._concurrency.sync import run_sync
from semel.runs.store import seals
from support.databases import DATABASES, database_url
from support.service import PATIENCE, TokenClient, TokenServer, token_server


@pytest.fixture(params=DATABASES)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TokenServer]:
    with ExitStack() as stack:
        url = stack.enter_context(database_url(request, request.param))
        yield stack.enter_context(token_server(url, tmp_path))


def ended_run(server: TokenServer, caller: TokenClient) -> str:
    run_id: str = caller.post("/runs", json={"model": "add", "parameters": {"a": 1}}).json()["run_id"]
    server.app.cancel(run_id)
    server.app.wait(run_id, timeout=PATIENCE)
    return run_id


def test_a_run_is_sealed_some_time_after_it_ended_and_its_owner_gets_the_proof(server: TokenServer) -> None:
    caller, other = server.admit("sue"), server.admit("gus", tenant="guests")
    before = ended_run(server, caller)  # nobody seals yet
    assert caller.get(f"/runs/{before}/proof").json() == {"sealed": False, "sealed_at": None, "seal": None, "proof": []}
    assert "not yet sealed" in caller.get(f"/ui/runs/{before}").text
    server.app.begin_sealing()
    run_id = ended_run(server, caller)
    store = server.app._engine.store
    run_sync(store.write(seals.seal, None, store.statement_context))  # unless the server's sweeper was faster
    found = caller.get(f"/runs/{run_id}/proof").json()
    assert (found["sealed"], found["seal"]) == (True, 1)
    assert audit.verify([json.dumps(line) for line in found["proof"]]).rows == 2
    page = caller.get(f"/ui/runs/{run_id}").text
    assert "not yet sealed" not in page
    assert "seal 1" in page
    assert other.get(f"/runs/{run_id}/proof").status_code == 404
