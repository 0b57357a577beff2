"""A process dies before and after every statement that it sends for a run or a quota, or loses its reply."""

from pathlib import Path

import pytest

from crash.points import Operation, Report, try_every_point
from crash.run_operations import (
    Act,
    CancelPending,
    CancelRunning,
    Consume,
    DropPartition,
    Finish,
    FinishAndLease,
    FirstSubmit,
    Heartbeat,
    Lease,
    Pause,
    Purge,
    ReleaseReservation,
    RemoveManifests,
    Rerun,
    Reserve,
    Resume,
    Retry,
    SealHistory,
    Submit,
    SubmitData,
    SubmitMany,
    SubmitReserved,
    Sweep,
    WriteManifest,
    kept_open,
)
from support.databases import TestDatabase

OPERATIONS: dict[str, Operation] = {
    "first submit": FirstSubmit(),
    "submit": Submit(),
    "submit with a reservation": SubmitReserved(),
    "submit with data": SubmitData(),
    "submit many": SubmitMany(),
    "lease": Lease(),
    "heartbeat": Heartbeat(),
    "success": Finish("succeeded", "SUCCEEDED"),
    "retryable error": Finish("retry", "PENDING"),
    "fatal error": Finish("fatal", "FAILED"),
    "end of a lost attempt": Finish("lost", "PENDING"),
    "end of a cancelled attempt": Finish("cancelled", "CANCELLED"),
    "snooze": Finish("snooze", "PENDING"),
    "end and lease": FinishAndLease(),
    "sweep": Sweep(),
    "cancel a pending run": CancelPending(),
    "cancel a running run": CancelRunning(),
    "pause": Pause(),
    "resume": Resume(),
    "retry": Retry(),
    "rerun": Rerun(),
    "cancel all that match": Act("cancel"),
    "retry all that match": Act("retry"),
    "reprioritize all that match": Act("set_priority"),
    "write a manifest": WriteManifest(),
    "remove manifests": RemoveManifests(),
    "seal": SealHistory(),
    "purge": Purge(),
    "drop a partition": DropPartition(),
    "reserve": Reserve(),
    "consume": Consume(),
    "release": ReleaseReservation(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_runs_and_quotas_outlive_a_process_that_dies_at_any_statement(
    name: str, database: TestDatabase, tmp_path: Path, report: Report
) -> None:
    with kept_open(database.kind, database.url):
        tried = try_every_point(OPERATIONS[name], database.kind, database.url, tmp_path)
    report(tried)
