"""Reads the tables of runs as a database client does, and checks that they agree with each other.

One fact is one transaction, so they agree at every moment, also right after a process died.
"""

import json
from collections import Counter, defaultdict
from functools import cached_property
from itertools import pairwise
from typing import Any

from crash.points import Place
from crash.rows import read_all
from semel.audit_log import verify_log
from support.databases import MISCHARGED, MISCOUNTED

ACTIVE = ("PENDING", "RUNNING")
QUERIES = {
    "runs": "SELECT * FROM semel_run_states WHERE user_id = :user ORDER BY id",
    "events": "SELECT e.* FROM semel_run_steps AS e JOIN semel_runs AS r ON r.id = e.run_id"
    " WHERE r.user_id = :user ORDER BY e.run_id, e.version",
    "keys": "SELECT key, attempt AS job_id FROM semel_keys"
    " WHERE scope = 'runs:' || :user AND kind = 'run' AND state = 'completed'",
    "reservations": "SELECT * FROM semel_reservations WHERE user_id = :user",
    "unsuccessful": "SELECT run_id, status FROM semel_unsuccessful WHERE user_id = :user ORDER BY run_id",
    "counted_otherwise": MISCOUNTED,
    "charged_otherwise": MISCHARGED,
    "audit": 'SELECT a.*, a.user_id AS "user" FROM semel_audit AS a ORDER BY tenant, seq',
}


class Ledger:
    """The rows of one user's runs, each table of ``QUERIES`` as it is when it is first asked for."""

    def __init__(self, place: Place, user: str) -> None:
        self._place, self._user = place, user

    def _read(self, *names: str) -> None:
        """Read these tables, as far as they have not been read yet."""
        missing = [name for name in names if name not in vars(self)]
        found = read_all(self._place, *(QUERIES[name] for name in missing), user=self._user)
        vars(self).update(zip(missing, found, strict=True))

    def __getattr__(self, name: str) -> list[Any]:
        if name not in QUERIES:
            raise AttributeError(name)
        self._read(name)
        rows: list[Any] = vars(self)[name]
        return rows

    @cached_property
    def mischarged(self) -> list[Any]:
        return [row for row in self.charged_otherwise if row.user_id == self._user]

    @cached_property
    def log(self) -> list[dict[str, Any]]:
        return [row._asdict() for row in self.audit]

    @property
    def statuses(self) -> list[str]:
        return [run.status for run in self.runs]

    @property
    def ids(self) -> list[str]:
        return [str(run.id) for run in self.runs]

    def check(self) -> "Ledger":
        """Every run agrees with its events, every key and every reservation with its run."""
        self._read(*QUERIES)
        events: dict[str, list[Any]] = defaultdict(list)
        for event in self.events:
            events[str(event.run_id)].append(event)
        for run in self.runs:
            _check_run(run, events[str(run.id)])
        for key in self.keys:
            assert key.job_id in self.ids, f"the key {key.key} names no run"
        unsuccessful = [(run.id, run.status) for run in self.runs if run.status in ("FAILED", "CANCELLED")]
        assert [(row.run_id, row.status) for row in self.unsuccessful] == unsuccessful, "a list has other runs"
        assert self.counted_otherwise == [], "the summary counts other runs than there are"
        assert not (self.runs and self.mischarged), "the user is charged for other runs than ended"
        used = Counter(each.job_id for each in self.reservations if each.job_id is not None)
        assert set(used) <= set(self.ids), "a reservation was consumed by a run that does not exist"
        assert set(used.values()) <= {1}, "two reservations were consumed by one run"
        assert all(each.consumed or each.job_id is None for each in self.reservations)
        self._check_log(events)
        return self

    def logged(self, action: str, target: str | None = None) -> list[dict[str, Any]]:
        """What the audit log says was done."""
        return [row for row in self.log if row["action"] == action and target in (None, row["target"])]

    @property
    def purged(self) -> int:
        """How many runs people purged, by the audit log."""
        return sum(json.loads(row["after"])["runs"] for row in self.logged("runs.purged"))

    def _check_log(self, events: dict[str, list[Any]]) -> None:
        """What people did to these runs is in the audit log, once, and nothing else is."""
        assert verify_log(self.log).problem is None
        acted = self._actions()
        for run in self.runs:
            by_hand = _cancelled_by_hand(events[str(run.id)]) and "runs.cancelled" not in acted
            assert len(self.logged("run.cancelled", str(run.id))) == by_hand, "the log has not the one cancellation"
            for action, old in (("run.retried", run.retry_of), ("run.rerun", run.rerun_of)):
                new = [json.loads(row["after"])["run_id"] for row in self.logged(action)]
                alone = old is not None and action.replace("run.", "runs.") not in acted
                assert new.count(str(run.id)) == alone, f"the log has not the one {action}"
        again = [row for name in ("run.retried", "run.rerun") for row in self.logged(name) if row["target"] in self.ids]
        assert {json.loads(row["after"])["run_id"] for row in again} <= set(self.ids), "a run of the log does not exist"

    def _actions(self) -> set[str]:
        """What somebody did to all runs of the user: it has one row for all of them."""
        rows = [(row["action"], json.loads(row["after"])) for row in self.log if row["action"].startswith("runs.")]
        return {action for action, after in rows if after.get("filter", {}).get("user") == self._user}

    def check_ended(self, many: int = 1) -> None:
        """There are this many runs, each of which has ended, once."""
        self.check()
        assert len(self.runs) == many
        assert not set(self.statuses) & set(ACTIVE)


def _cancelled_by_hand(events: list[Any]) -> bool:
    """Whether a running run was asked to end, or one that waited was cancelled."""
    asked = any(event.step == "cancel_requested" for event in events)
    return asked or any(event.step == "cancelled" and old.status == "PENDING" for old, event in pairwise(events))


def _check_run(run: Any, events: list[Any]) -> None:
    assert [event.version for event in events] == list(range(1, run.version + 1)), "an event is missing"
    last = events[-1]
    assert (last.step, last.status, last.fence) == (run.step, run.status, run.fence), "the last event is another's"
    steps = Counter(event.step for event in events)
    assert steps["created"] == 1
    assert sum(event.status not in ACTIVE for event in events) == (run.status not in ACTIVE), "not one end"
    assert steps["leased"] == run.fence == run.attempts + steps["returned"] + steps["snoozed"]
    assert steps["lost"] == run.losts
    fences = [event.fence for event in events]
    assert fences == sorted(fences), "a fence went back"
    leased = [event.fence for event in events if event.step == "leased"]
    assert len(leased) == len(set(leased)), "two attempts have one fence"
