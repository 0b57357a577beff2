"""What a worker gives back that it does not know of, lease by lease."""

from typing import Any

import pytest

from semel._concurrency.sync import run_sync
from semel.runs.worker.active_runs import ActiveRun, ActiveRuns
from semel.runs.worker.fetcher import Fetcher, WorkerConfig
from semel.runs.worker.run_logs import WorkerLogger
from support.databases import DATABASES, Databases, TestDatabase


def fetcher_of(database: TestDatabase, active: ActiveRuns) -> Fetcher:
    slots: Any = {"loop": 1, "process": 0, "thread": 0}
    config = WorkerConfig(
        id="worker-1",
        name="worker",
        queues=("default",),
        slots=slots,
        max_runs_per_child=None,
        poll=1.0,
        drain=1.0,
        sweep_every=None,
        wait_for_database=0.0,
    )
    nothing: Any = None
    return Fetcher(
        config,
        database.app.registry,
        database.store,
        active,
        log=WorkerLogger("worker-1"),
        before_lease=nothing,
        begin=nothing,
        unwritten=nothing,
    )


@pytest.mark.parametrize("kind", DATABASES)
def test_a_run_is_given_back_though_an_attempt_before_is_not_known_to_have_ended(
    databases: Databases, kind: str
) -> None:
    """The replies to the end of the first attempt, and to the lease of the second, were lost."""
    with databases.empty(kind) as database:
        run, other = database.submit(), database.submit()
        active = ActiveRuns()
        for leased in database.lease(2):
            active.add(ActiveRun(leased, database.app.registry["train"], "worker-1", 0.0))
        first = active.get(run.id)
        assert first is not None
        database.end(first.leased, "retry")
        [again] = database.lease()
        assert (again.id, again.fence) == (run.id, 2)
        run_sync(fetcher_of(database, active).give_back_unknown())
        assert [step.step for step in database.app.timeline(run.id)][-2:] == ["leased", "returned"]
        assert database.app.get(other.id).status == "RUNNING", "it is executed"
