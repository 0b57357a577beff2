"""The rules of runs in the model are those of the SQL: every step of them is taken on every real database.

The model counts time in ticks from now and forgets how great a fence is; a database has a clock and numbers that only
grow. Here both go the same ways, and after each step the answer and the row are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sqlalchemy import Connection, select

from protocol.explorer import show
from protocol.run_rules import ENDS, LEASE, MAX_ATTEMPTS, MAX_LOST, PENDING, Rules, Run
from protocol.tours import tours
from semel import App
from semel.db.dialect import hot
from semel.db.schema import runs
from semel.runs.store import lease, transitions
from semel.runs.store.lease import LeaseRenewal
from semel.runs.store.transitions import FinishRequest
from semel.runs.types import AttemptResult
from support.databases import TestDatabase
from support.runs_harness import ManualWorker

TICK = 60
US = TICK * 1_000_000
RESULT: dict[str, Any] = {"result": "1", "result_digest": "6b86b273ff34fce1", "result_size": 1}
RULES = Rules()
START = Run(PENDING, 1, rows=1)


class Verb(NamedTuple):
    """``current``: by the newest fence, and not by an older one."""

    name: str
    current: bool = True
    end: str = ""


VERBS = [
    *(Verb(name) for name in ("submit", "lease", "sweep", "cancel", "tick")),
    *(Verb("renew", current) for current in (True, False)),
    *(Verb("finish", current, end) for end in ENDS for current in (True, False)),
]


def answer_of(run: Run, verb: Verb) -> tuple[Run, bool]:
    """The run after the verb, and whether the verb was accepted, by the model."""
    fence = run.fence if verb.current else run.fence - 1
    match verb.name:
        case "tick":
            return RULES.later(run), True
        case "submit":
            return RULES.submit(run), True
        case "renew":
            changed = RULES.renew(run, fence)
        case "finish":
            changed = RULES.finish(run, fence, verb.end)
            if changed is None:
                return run, RULES.finished_before(run, fence, verb.end)
        case name:
            changed = getattr(RULES, name)(run)
    return (run, False) if changed is None else (changed, True)


def after(run: Run, verb: Verb) -> Run:
    return answer_of(run, verb)[0]._replace(fence=1)


class RealRun:
    """A run in a real database, whose clock only goes on."""

    def __init__(self, database: TestDatabase, app: App, worker: ManualWorker, key: str) -> None:
        self._database = database
        self._app = app
        self._worker = worker
        self._key = key
        self._fence = 0
        self._id = self._submit()

    def _submit(self) -> str:
        return self._app.submit("job", {}, user=1, idempotency_key=self._key).id

    def do(self, verb: Verb) -> bool:
        """Whether the verb was accepted."""
        fence = self._fence if verb.current else self._fence - 1
        match verb.name:
            case "tick":
                self._database.clock.advance(TICK)
                return True
            case "submit":
                return self._submit() == self._id
            case "lease":
                leased = {each.id: each.fence for each in self._worker.lease(1000)}
                self._fence += self._id in leased
                return leased.get(self._id) == self._fence
            case "sweep":
                return self._id in {each.id for each in self._write(transitions.lose_expired)}
            case "cancel":
                return self._id in self._write(transitions.cancel, [self._id], "not needed")
            case "renew":
                return self._id in self._write(lease.renew, [LeaseRenewal(self._id, fence)])
        return self._id in self._write(transitions.end, [self._end(verb.end, fence)])

    def _end(self, end: str, fence: int) -> FinishRequest:
        kind: Any = "lost" if end == "returned" else end
        told = RESULT if kind == "succeeded" else {}
        return FinishRequest(self._id, fence, AttemptResult(kind=kind, **told), returned=end == "returned")

    def _write(self, verb: Callable[..., Any], *arguments: Any) -> Any:
        ledger = self._worker.ledger
        return self._worker.do(ledger.write(verb, *arguments, ledger.statement_context))

    def row(self) -> Run:
        """The row as the model has it."""
        status, fence, until, cancel, errors, losts = self._worker.do(self._worker.ledger.read(_row, self._id))
        assert fence == self._fence
        left = -1 if until is None else max((until - self._database.clock.us) // US, -1)
        return Run(status, 1, left, cancel is not None, errors, losts, rows=1)


@hot
def _row(conn: Connection, run_id: str) -> Any:
    columns = (runs.c[name] for name in ("status", "fence", "lease_until_us", "cancel_us", "errors", "losts"))
    return conn.execute(select(*columns).where(runs.c.id == run_id)).one()


def job() -> None:
    """A model that is never executed."""


def test_a_database_takes_every_step_of_the_rules(database: TestDatabase) -> None:
    ways = tours(START, VERBS, after)
    app = App(database.url, clock=database.clock)
    app.model("job", isolation="thread", max_attempts=MAX_ATTEMPTS, max_lost=MAX_LOST, lease=LEASE * TICK)(job)
    worker = ManualWorker(app)
    for number, way in enumerate(ways):
        real, run = RealRun(database, app, worker, f"{number}"), START
        for place, verb in enumerate(way):
            (_, accepted), run = answer_of(run, verb), after(run, verb)
            assert real.do(verb) == accepted, f"{way[: place + 1]}"
            assert real.row() == run, f"{way[: place + 1]}"
    worker.close()
    app.close()
    show(f"{database.kind}: {sum(map(len, ways)):,} steps on {len(ways)} runs")
