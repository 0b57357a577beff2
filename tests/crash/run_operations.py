"""What a process does with runs and quotas, and what must hold whenever it dies."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from crash.ledger import Ledger
from crash.points import Ended, Place
from crash.rows import read_rows
from crash.wire import FAULTS
from semel import Actor, Quota, Run
from semel._concurrency.sync import run_sync
from semel.audit import key_of, verify
from semel.runs.actions import BATCH
from semel.runs.manifest import Parts, make_part
from semel.runs.store import manifests, partitions, seals, transitions
from semel.runs.store.lease import Leased
from semel.runs.types import INTERNAL_QUEUE, MICRO, ActionKind, EndKind, RunAction
from semel.runs.worker.sweeper import sweep_until_signalled
from support.databases import LEASE, MISCOUNTED, TestDatabase, held
from support.waiting import eventually

CRASH = Actor(user="crash")
COST = 1.5
DAY = 86400


_kept: dict[str, TestDatabase] = {}


@contextmanager
def kept_open(kind: str, url: str) -> Iterator[None]:
    """Keep one database open for all tries of this process: to open one takes longer than to use it."""
    with ExitStack() as stack:
        _kept[url] = TestDatabase(kind, url, stack)
        try:
            yield
        finally:
            del _kept[url]


@contextmanager
def opened(place: Place, later: float = 0.0) -> Iterator[TestDatabase]:
    """The database of the try, with its clock, or a later one."""
    with ExitStack() as stack:
        database = _kept.get(place.url) or TestDatabase(place.kind, place.url, stack)
        database.clock.us = place.later(later).us
        yield database


class Connected:
    """An operation of a process that is connected already."""

    survives_forks = True
    changes_only_rows = True

    def warm_up(self, place: Place) -> None:
        if place.url not in _kept:
            _kept[place.url] = TestDatabase(place.kind, place.url, ExitStack())
        self._connect(_kept[place.url])

    def _connect(self, database: TestDatabase) -> None:
        database.app.usage("nobody")


def go_on(place: Place, *, later: float = LEASE + 1, many: int = 1) -> Ledger:
    """Others take over: lost runs are taken back, and all runs are executed. Returns the rows afterwards."""
    Ledger(place, place.name).check()
    with opened(place, later) as database:
        while set(Ledger(place, place.name).statuses) & {"PENDING", "RUNNING"}:
            database.lose_expired()
            for leased in database.lease(100):
                assert database.end(leased)
            database.clock.advance(LEASE + 1)
        assert database.concurrent(place.name) == 0, "a slot is still taken"
    ledger = Ledger(place, place.name)
    ledger.check_ended(many)
    return ledger


class Submit(Connected):
    """``submit`` with a key, under a quota of one run, and a cost limit that allows it once."""

    def prepare(self, place: Place) -> str | None:
        with opened(place) as database:
            database.app.set_quota(place.name, Quota(max_concurrent=1, cost_daily=COST))
        return None

    def _submit(self, database: TestDatabase, place: Place, given: str | None) -> Run:
        return database.submit(place.name, number=1, idempotency_key="key", cost=COST, reservation=given)

    def act(self, place: Place, given: str | None) -> Any:
        with opened(place) as database:
            return self._submit(database, place, given).id

    def check(self, place: Place, given: str | None, ended: Ended) -> None:
        before = Ledger(place, place.name).check()
        with opened(place) as database:
            usage = database.app.usage(place.name)
            assert usage.concurrent == (1 if before.runs or given else 0)
            assert usage.spent["daily"] == (COST if before.runs else 0)
            run = self._submit(database, place, given)
            assert run.replayed == bool(before.runs)
            assert database.app.usage(place.name).concurrent == 1
        if ended.how == "returned":
            assert before.ids == [ended.value]
        after = Ledger(place, place.name)
        assert after.ids == [run.id]
        assert len(after.keys) == 1
        if given:
            assert [each.job_id for each in after.reservations] == [run.id]
        self._check_run(place, run)
        go_on(place)

    def _check_run(self, place: Place, run: Run) -> None: ...


class SubmitData(Submit):
    """``submit`` of a job with data: the run waits for the run that uploads it, or nothing is there."""

    def _submit(self, database: TestDatabase, place: Place, given: str | None) -> Run:
        return held(database, user=place.name, idempotency_key="key", cost=COST)

    def _check_run(self, place: Place, run: Run) -> None:
        rows = read_rows(
            place,
            "SELECT j.run_id, j.data_state, u.queue FROM semel_jobs AS j JOIN semel_active AS u ON u.id = j.upload_id"
            " WHERE j.user_id = :user",
            user=place.name,
        )
        assert [(str(row.run_id), row.data_state, row.queue) for row in rows] == [(run.id, "uploading", INTERNAL_QUEUE)]
        with opened(place) as database:
            assert database.lease() == [], "the run was leased without its data"
            assert database.do(transitions.release, run.id, "data/1") == "default"


class FirstSubmit(Submit):
    """The first submission of a process, which also connects."""

    survives_forks = False

    def warm_up(self, place: Place) -> None: ...


class SubmitReserved(Submit):
    """``submit`` for a slot that was reserved."""

    def prepare(self, place: Place) -> str | None:
        super().prepare(place)
        with opened(place) as database:
            return database.reserve(place.name, limit=1)


class SubmitMany(Connected):
    """``submit_many`` with keys: sent again, every run is there once."""

    many = 3

    def prepare(self, place: Place) -> None:
        with opened(place) as database:
            database.app.set_quota(place.name, Quota(max_concurrent=self.many))

    def _submit(self, database: TestDatabase, place: Place) -> list[str]:
        asked = [
            {"model": "train", "parameters": {"number": n}, "user": place.name, "idempotency_key": str(n)}
            for n in range(self.many)
        ]
        runs = database.app.submit_many(asked)
        assert all(isinstance(run, Run) for run in runs), runs
        return [run.id for run in runs if isinstance(run, Run)]

    def act(self, place: Place, given: None) -> Any:
        with opened(place) as database:
            return self._submit(database, place)

    def check(self, place: Place, given: None, ended: Ended) -> None:
        before = Ledger(place, place.name).check()
        with opened(place) as database:
            found = self._submit(database, place)
        assert len(set(found)) == self.many
        assert set(before.ids) <= set(found)
        if ended.how == "returned":
            assert ended.value == found
            assert len(before.runs) == self.many
        go_on(place, many=self.many)


class OfPendingRun(Connected):
    """An operation on a run that waits."""

    def prepare(self, place: Place) -> Any:
        with opened(place) as database:
            return database.submit(place.name, cost=COST).id


class Lease(OfPendingRun):
    """``lease``: the run waits as before, or has one attempt, which is lost when its lease ends."""

    def act(self, place: Place, given: str) -> Any:
        with opened(place) as database:
            leased = database.lease()  # sent again after a lost reply, it has nothing more to lease
            return leased[0] if leased else None

    def check(self, place: Place, given: str, ended: Ended) -> None:
        (run,) = Ledger(place, place.name).check().runs
        if ended.value is not None:
            assert (run.status, run.fence) == ("RUNNING", ended.value.fence)
        ledger = go_on(place)
        assert ledger.statuses == ["SUCCEEDED"]
        assert ledger.runs[0].losts == (1 if run.status == "RUNNING" else 0)
        if ended.value is not None:
            with opened(place, 1000) as database:
                assert not database.end(ended.value), "an outdated attempt could end the run"


class OfRunningRun(Connected):
    """An operation on a run that has a lease."""

    def prepare(self, place: Place) -> Leased:
        with opened(place) as database:
            database.submit(place.name, cost=COST)
            (leased,) = database.lease()
            return leased


class Heartbeat(OfRunningRun):
    """``renew``: the lease ends at its old or its new end, and the attempt goes on."""

    def act(self, place: Place, given: Leased) -> Any:
        with opened(place, LEASE / 2) as database:
            return database.renew(given)

    def check(self, place: Place, given: Leased, ended: Ended) -> None:
        (run,) = Ledger(place, place.name).check().runs
        start = place.now_us
        assert run.lease_until_us - start in (LEASE * 10**6, LEASE * 3 * 10**6 // 2)
        if ended.how == "returned":
            assert ended.value == {given.id: False}
            assert run.lease_until_us - start == LEASE * 3 * 10**6 // 2
        with opened(place, LEASE / 2) as database:
            assert database.end(given)
        assert go_on(place).statuses == ["SUCCEEDED"]


@dataclass(frozen=True)
class Finish(OfRunningRun):
    """The end of an attempt: it is written as a whole, or the attempt is lost; a second try changes nothing."""

    kind: EndKind
    status: str

    def _end(self, place: Place, given: Leased) -> bool:
        options = {} if self.kind == "succeeded" else {"reason": self.kind}
        with opened(place) as database:
            return database.end(given, self.kind, **options)

    def act(self, place: Place, given: Leased) -> Any:
        return self._end(place, given)

    def check(self, place: Place, given: Leased, ended: Ended) -> None:
        before = Ledger(place, place.name).check()
        assert before.statuses in ([self.status], ["RUNNING"])
        if ended.how == "returned":
            assert before.statuses == [self.status]
            assert ended.value or self.kind != "succeeded", "a worker whose success is stored was told that it is lost"
        if before.statuses == [self.status]:
            assert self._end(place, given) == (self.kind == "succeeded"), "only a success is confirmed twice"
            assert Ledger(place, place.name).runs == before.runs, "a second try changed the run"
        after = go_on(place)
        if self.status != "PENDING" and before.statuses == [self.status]:
            assert after.runs == before.runs
        else:
            assert after.statuses == ["SUCCEEDED"]


class FinishAndLease(Connected):
    """The end of an attempt and the lease of the next run: on SQLite both are written, or neither is."""

    def prepare(self, place: Place) -> Leased:
        with opened(place) as database:
            for _ in range(2):
                database.submit(place.name, cost=COST)
            (leased,) = database.lease()
            return leased

    def act(self, place: Place, given: Leased) -> Any:
        with opened(place) as database:
            return database.finish_and_lease(given)

    def check(self, place: Place, given: Leased, ended: Ended) -> None:
        before = Ledger(place, place.name).check().statuses
        possible = [["RUNNING", "PENDING"], ["SUCCEEDED", "RUNNING"]]
        if place.kind != "sqlite":
            possible.append(["SUCCEEDED", "PENDING"])
        assert before in possible
        if ended.how == "returned":
            assert ended.value[0], "a worker whose success is stored was told that it is lost"
            assert before == ["SUCCEEDED", "RUNNING"]
        with opened(place) as database:
            assert database.end(given), "the end cannot be written alone"
        ledger = go_on(place, many=2)
        assert ledger.statuses == ["SUCCEEDED", "SUCCEEDED"]
        assert [run.losts for run in ledger.runs] == [0, 1 if before[1] == "RUNNING" else 0]


class Sweep(OfRunningRun):
    """The sweeper takes a lost run back, and removes an expired key."""

    kinds = FAULTS
    in_turn = True
    stride = 2

    def prepare(self, place: Place) -> Leased:
        with opened(place) as database:
            database.submit(place.name, idempotency_key="key", key_ttl=1, cost=COST)
            (leased,) = database.lease()
            return leased

    def act(self, place: Place, given: Leased) -> Any:
        with opened(place, LEASE + 1) as database:
            return sweep_until_signalled(database.app, every=1, once=True)

    def check(self, place: Place, given: Leased, ended: Ended) -> None:
        before = Ledger(place, place.name).check()
        assert before.statuses in (["RUNNING"], ["PENDING"])
        if ended.how == "returned":
            assert before.statuses == ["PENDING"]
            assert before.keys == []
        if before.statuses == ["PENDING"]:
            with opened(place, LEASE + 1) as database:
                assert not database.end(given), "a lost attempt could end the run"
                (taken,) = database.lease()
                assert not database.end(given), "a lost attempt could end the run of another"
                assert database.end(taken)
        (run,) = go_on(place, later=LEASE + 1).runs
        assert (run.status, run.losts, run.fence) == ("SUCCEEDED", 1, 2)


class CancelPending(OfPendingRun):
    """``cancel`` of a run that waits: it is cancelled, or it waits as before."""

    def act(self, place: Place, given: str) -> Any:
        with opened(place) as database:
            return database.app.cancel(given).status

    def check(self, place: Place, given: str, ended: Ended) -> None:
        before = Ledger(place, place.name).check()
        if ended.how == "returned":
            assert before.statuses == [ended.value] == ["CANCELLED"]
        expected = "CANCELLED" if before.statuses == ["CANCELLED"] else "SUCCEEDED"
        assert go_on(place).statuses == [expected]


class CancelRunning(OfRunningRun):
    """``cancel`` of a run that has a lease: the request is there, or it is not; a lost worker then cancels the run."""

    def act(self, place: Place, given: Leased) -> Any:
        with opened(place) as database:
            return database.app.cancel(given.id).status

    def check(self, place: Place, given: Leased, ended: Ended) -> None:
        (run,) = Ledger(place, place.name).check().runs
        assert run.status == "RUNNING"
        if ended.how == "returned":
            assert run.cancel_us is not None
        with opened(place, LEASE + 1) as database:
            assert database.lose_expired() == 1
        expected = "CANCELLED" if run.cancel_us is not None else "SUCCEEDED"
        assert go_on(place).statuses == [expected]


class Pause(OfPendingRun):
    """``pause`` of the queue of a run that waits: it is paused as a whole, or not at all; others resume it."""

    paused_before = False

    def prepare(self, place: Place) -> str:
        with opened(place) as database:
            run_id: str = database.submit(place.name).id
            self._set(database, paused=self.paused_before)
            return run_id

    def _set(self, database: TestDatabase, *, paused: bool) -> None:
        if paused:
            database.app.pause(queue="default", by=CRASH)
        else:
            database.app.resume(queue="default", by=CRASH)

    def act(self, place: Place, given: str) -> Any:
        with opened(place) as database:
            self._set(database, paused=not self.paused_before)

    def check(self, place: Place, given: str, ended: Ended) -> None:
        log = [row for row in Ledger(place, place.name).log if row["target"] == "default"]
        with opened(place) as database:
            paused = [each.by for each in database.app.pauses()] == ["crash"]
            turns = [("queue.paused", "queue.resumed")[number % 2] for number in range(len(log))]
            assert [row["action"] for row in log] == turns, "a pause or its end is logged twice, or not"
            assert bool(len(log) % 2) == paused, "the log says other than the table"
            assert {row["user"] for row in log} <= {"crash"}
            if ended.how == "returned":
                assert paused != self.paused_before
            assert not paused or not database.lease(), "a run of a paused queue was leased"
            database.app.resume(queue="default", by=CRASH)
        assert go_on(place).statuses == ["SUCCEEDED"]


class Resume(Pause):
    """``resume`` of the queue of a run that waits."""

    paused_before = True


class Retry(OfRunningRun):
    """``retry`` of a failed run with a key: sent again, there is one new run."""

    end: EndKind = "fatal"
    first_status, named_by = "FAILED", "retry_of"

    def prepare(self, place: Place) -> Leased:
        leased = super().prepare(place)
        with opened(place) as database:
            assert database.end(leased, self.end)
        return leased

    def _retry(self, place: Place, given: Leased) -> str:
        with opened(place) as database:
            return database.app.retry(given.id, idempotency_key="again").id

    def act(self, place: Place, given: Leased) -> Any:
        return self._retry(place, given)

    def check(self, place: Place, given: Leased, ended: Ended) -> None:
        before = Ledger(place, place.name).check()
        new = self._retry(place, given)
        assert before.ids in ([given.id], [given.id, new])
        if ended.how == "returned":
            assert before.ids == [given.id, ended.value] == [given.id, new]
        ledger = go_on(place, many=2)
        assert ledger.statuses == [self.first_status, "SUCCEEDED"]
        assert [str(getattr(run, self.named_by)) for run in ledger.runs][1] == given.id


@dataclass(frozen=True)
class Act(Connected):
    """An action on three runs, in batches of two: sent again with its key, it is finished, and no run changed twice."""

    kinds = FAULTS
    in_turn = True
    stride = 2
    action: ActionKind

    def prepare(self, place: Place) -> list[str]:
        with opened(place) as database:
            runs = [database.submit(place.name).id for _ in range(3)]
            if self.action == "retry":
                assert all(database.end(each, "fatal") for each in database.lease(3))
        return runs

    def _act(self, place: Place, later: float = 0.0) -> RunAction:
        with opened(place, later) as database, patch.dict(BATCH, {self.action: 2}):
            priority = 7 if self.action == "set_priority" else None
            return database.app.act(
                self.action, user=place.name, priority=priority, idempotency_key=place.name, by=CRASH
            )

    def act(self, place: Place, given: list[str]) -> Any:
        return self._act(place).done

    def check(self, place: Place, given: list[str], ended: Ended) -> None:
        before = Ledger(place, place.name).check()
        done = self._act(place, LEASE + 1)
        assert (done.state, done.matched, done.done, done.failed, done.skipped) == ("finished", 3, 3, 0, 0)
        after = Ledger(place, place.name).check()
        assert len([row for row in after.log if row["target"] == done.id]) == 1, "the log has not the one action"
        if ended.how == "returned":
            assert ended.value == 3
            assert after.ids == before.ids
        if self.action == "retry":
            assert sorted(str(run.retry_of) for run in after.runs if run.retry_of) == sorted(given)
            assert go_on(place, many=6).statuses == ["FAILED"] * 3 + ["SUCCEEDED"] * 3
        elif self.action == "cancel":
            assert go_on(place, many=3).statuses == ["CANCELLED"] * 3
        else:
            assert {run.priority for run in after.runs} == {7}
            assert go_on(place, many=3).statuses == ["SUCCEEDED"] * 3


class Rerun(Retry):
    """``rerun`` of a run that succeeded, with a key: sent again, there is one new run."""

    kinds = FAULTS
    in_turn = True
    stride = 2
    end = "succeeded"
    first_status, named_by = "SUCCEEDED", "rerun_of"

    def _retry(self, place: Place, given: Leased) -> str:
        with opened(place) as database:
            return database.app.rerun(given.id, idempotency_key="again").run.id


class WriteManifest(Connected):
    """A worker writes its manifest: it is there with both of its bodies, or not; written again, it is."""

    def prepare(self, place: Place) -> None: ...

    def _write(self, place: Place) -> None:
        parts = Parts(make_part({"environment": place.name}), make_part({"code": place.name}), "host")
        with opened(place) as database:
            database.do(manifests.write, place.name, parts)

    def act(self, place: Place, given: None) -> Any:
        self._write(place)

    def check(self, place: Place, given: None, ended: Ended) -> None:
        assert _manifests_without_body(place) == 0
        self._write(place)
        with opened(place) as database:
            rows = database.rows("SELECT worker FROM semel_worker_manifests")
        assert [row[0] for row in rows].count(place.name) == 1
        assert _manifests_without_body(place) == 0


class RemoveManifests(WriteManifest):
    """The sweeper removes manifests of a worker that is gone: what is left has its bodies, and then nothing is left."""

    def prepare(self, place: Place) -> None:
        self._write(place)

    def _remove(self, place: Place) -> None:
        with opened(place, 10 * DAY) as database:
            database.do(manifests.remove_unused)
        with opened(place, 11 * DAY) as database:
            database.do(manifests.remove_unused)

    def act(self, place: Place, given: None) -> Any:
        self._remove(place)

    def _removed(self, place: Place) -> bool:
        self._remove(place)
        with opened(place) as database:
            return database.count("semel_worker_manifests") == 0

    def check(self, place: Place, given: None, ended: Ended) -> None:
        assert _manifests_without_body(place) == 0
        eventually(lambda: self._removed(place), "the removal of what the dead process had locked")
        with opened(place) as database:
            assert database.count("semel_manifests") == 0


class SealHistory(OfRunningRun):
    """``seal``: the attempt is in one seal, or still in the queue; sealed again, it is in one seal."""

    def prepare(self, place: Place) -> Leased:
        leased = super().prepare(place)
        with opened(place) as database:
            database.app.begin_sealing()
            assert database.end(leased)
        return leased

    def _seal(self, place: Place) -> Any:
        with opened(place) as database:
            return database.do(seals.seal, None)

    def act(self, place: Place, given: Leased) -> Any:
        self._seal(place)

    def _sealed_and_queued(self, place: Place, given: Leased) -> tuple[int, int]:
        key = key_of(given.id, 3)
        with opened(place) as database:
            leaves = b"".join(bytes(row[0]) for row in database.rows("SELECT leaves FROM semel_seal_leaves"))
            entries = b"".join(bytes(row[0]) for row in database.rows("SELECT entries FROM semel_unsealed"))
        return leaves.count(key), entries.count(key)

    def check(self, place: Place, given: Leased, ended: Ended) -> None:
        found = self._sealed_and_queued(place, given)
        assert found in ((1, 0), (0, 1)), "in no seal and not in the queue, or in both"
        if ended.how == "returned":
            assert found == (1, 0)

        def sealed() -> bool:
            self._seal(place)
            return self._sealed_and_queued(place, given) == (1, 0)

        eventually(sealed, "the seal, while the dead process may hold its lock")
        with opened(place) as database:
            proof = [json.dumps(line) for line in database.ask(seals.prove, given.id)]
            numbers = [row[0] for row in database.rows("SELECT number FROM semel_seals ORDER BY number")]
        assert verify(proof).rows == 2
        assert numbers == list(range(1, len(numbers) + 1)), "a seal is missing in the chain"


def _manifests_without_body(place: Place) -> int:
    """Rows that name a body that is not there."""
    with opened(place) as database:
        return database.count(
            "semel_worker_manifests AS w",
            "NOT EXISTS (SELECT 1 FROM semel_manifests AS m WHERE m.digest = w.environment)"
            " OR NOT EXISTS (SELECT 1 FROM semel_manifests AS m WHERE m.digest = w.code)",
        )


class Purge(OfRunningRun):
    """``purge``: a run is there with its files, or gone; the next purge removes what is left."""

    changes_only_rows = False
    kinds = FAULTS[::2]  # files are removed between statements: who dies before the next one has removed them
    in_turn = True
    stride = 2

    def prepare(self, place: Place) -> Leased:
        leased = super().prepare(place)
        self.logged = Ledger(place, place.name).purged
        with opened(place) as database:
            assert database.end(leased, result=None, result_ref=f"{leased.id}/1/result")
            self._results(place, database).put(f"{leased.id}/1/result", b"1")
        return leased

    def _results(self, place: Place, database: TestDatabase) -> Any:
        return database.open_app(artifacts=place.folder / "artifacts").results

    def _purge(self, place: Place) -> int:
        with opened(place, 1000) as database:
            return database.open_app(artifacts=place.folder / "artifacts").purge(100)

    def _purged(self, place: Place) -> bool:
        self._purge(place)
        return not Ledger(place, place.name).runs

    def act(self, place: Place, given: Leased) -> Any:
        return self._purge(place)

    def check(self, place: Place, given: Leased, ended: Ended) -> None:
        before = Ledger(place, place.name).check()
        assert before.purged - self.logged == 1 - len(before.runs), "the audit log has other runs than were purged"
        files = list((place.folder / "artifacts").rglob("result*"))
        if before.runs:
            assert files, "the run has lost its files"
            assert ended.how != "returned"
        if ended.how == "returned":
            assert ended.value in (0, 1)
            assert not files
        eventually(lambda: self._purged(place), "the purge of a run that the dead process had locked")
        assert list((place.folder / "artifacts").rglob("result*")) == []
        assert [row.cost for row in Ledger(place, place.name).mischarged] == [COST * MICRO], (
            "the run has cost something"
        )
        with opened(place) as database:
            assert database.count("semel_removals") == 0


class DropPartition(Purge):
    """``purge`` when every run of a partition is old: the partition is there with all its runs, or gone."""

    def prepare(self, place: Place) -> Leased:
        with opened(place) as database:
            now = time.time_ns() // 1000
            there = database.ask(partitions.partitions)
            if database.kind == "postgres" and not any(each.start_us <= now < each.end_us for each in there):
                hour = 3600 * MICRO
                assert run_sync(database.store.write(partitions.make, now - hour, now + hour))
        return super().prepare(place)

    def check(self, place: Place, given: Leased, ended: Ended) -> None:
        super().check(place, given, ended)
        with opened(place) as database:
            assert database.rows(MISCOUNTED) == []
            if database.kind == "postgres":
                assert database.count("semel_run_logs_default") == 0
                assert database.ask(partitions.partitions) == []

    def _purge(self, place: Place) -> int:
        with opened(place, 20 * 365 * 86400) as database:  # the time of the partition is long over
            return database.open_app(artifacts=place.folder / "artifacts").purge(100)


class OfQuota(Connected):
    """An operation of a store of jobs."""

    def _connect(self, database: TestDatabase) -> None:
        database.jobs.check_idempotency_key("no key")


class Reserve(OfQuota):
    """``reserve_job_slot`` of the only slot: a lost process holds it until the reservation expires, not longer."""

    def prepare(self, place: Place) -> None: ...

    def act(self, place: Place, given: None) -> Any:
        with opened(place) as database:
            return database.jobs.reserve_job_slot(place.name, 1, 300)

    def check(self, place: Place, given: None, ended: Ended) -> None:
        before = Ledger(place, place.name).check().reservations
        assert len(before) <= 1
        if ended.how == "returned":
            assert [each.id for each in before] == [ended.value]
        with opened(place) as database:
            assert database.concurrent(place.name) == len(before)
            other = copy_context().run(database.jobs.reserve_job_slot, place.name, 1, 300)
            assert (other is None) == (len(before) == 1), "two have the only slot, or nobody"
        with opened(place, 301) as database:
            assert database.concurrent(place.name) == 0
            assert database.reserve(place.name, limit=1)


class OfReservation(OfQuota):
    """An operation on a reserved slot, for a job that exists."""

    def prepare(self, place: Place) -> tuple[str, str]:
        with opened(place) as database:
            reservation = database.reserve(place.name, limit=1)
            return reservation, database.submit(f"{place.name}-other").id


class Consume(OfReservation):
    """``consume_reservation``: the slot is reserved, or consumed; a second call gives the same answer."""

    def act(self, place: Place, given: tuple[str, str]) -> Any:
        with opened(place) as database:
            return database.jobs.consume_reservation(given[0], job_id=given[1], user_id=place.name)

    def check(self, place: Place, given: tuple[str, str], ended: Ended) -> None:
        (before,) = Ledger(place, place.name).reservations
        if ended.how == "returned":
            assert ended.value is True
            assert before.consumed
        with opened(place) as database:
            assert database.concurrent(place.name) == (0 if before.consumed else 1)
            assert self.act(place, given) is True
            assert database.concurrent(place.name) == 0
        (after,) = Ledger(place, place.name).reservations
        assert (after.consumed, after.job_id) == (True, given[1])


class ReleaseReservation(OfReservation):
    """``release_reservation``: the slot is reserved, or free, once."""

    def act(self, place: Place, given: tuple[str, str]) -> Any:
        with opened(place) as database:
            return database.jobs.release_reservation(given[0], user_id=place.name)

    def check(self, place: Place, given: tuple[str, str], ended: Ended) -> None:
        before = Ledger(place, place.name).reservations
        if ended.how == "returned":
            assert before == []
        with opened(place) as database:
            assert database.concurrent(place.name) == len(before)
            assert database.jobs.release_reservation(given[0], user_id=place.name) == bool(before)
            assert database.concurrent(place.name) == 0
            assert database.reserve(place.name, limit=1)
