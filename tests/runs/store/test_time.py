"""Which time a statement of runs has."""

import sqlite3
import threading
import time
from pathlib import Path

from semel import App
from semel._concurrency.sync import run_sync
from semel.runs.store import RunStore, lease
from semel.runs.store.lease import Leased, LeaseRequest


def test_a_statement_that_waited_for_the_lock_of_the_file_has_the_time_after_the_wait(tmp_path: Path) -> None:
    """Otherwise a worker could start a run before it was submitted, with a lease that is too short."""
    url = f"sqlite:///{tmp_path / 'semel.db'}"
    app = App(url, artifacts=tmp_path)

    @app.model("work")
    async def work() -> None: ...

    app.submit("work")
    store = RunStore(url, awaited=False)
    found: list[Leased] = []

    def take() -> None:
        request = LeaseRequest("w", ("default",), ["work"], 1)
        found.extend(run_sync(store.write_once(lease.lease, request, store.statement_context)))

    other = sqlite3.connect(tmp_path / "semel.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    taking = threading.Thread(target=take)
    taking.start()
    time.sleep(0.2)  # the lease waits now; if not, the test passes without having seen it
    released = time.time_ns() // 1000
    other.execute("COMMIT")
    taking.join(10)
    other.close()
    run_sync(store.close())
    app.close()
    assert [each.changed_us >= released for each in found] == [True]
