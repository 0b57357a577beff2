"""The process that the crash test kills: it makes a guarded call, stops at a chosen point, and reports that."""

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import sqlalchemy
from sqlalchemy import event

from semel import AsyncOnce, Once, Policy, current_claim
from semel.once.store import ClaimRequest, Complete, Store, Together
from semel.once.stores import open_store
from semel.testing import FakeClock

START = 1_700_000_000.0
LEASE, TTL = 60.0, 600.0
SCOPE = "crash"

BEFORE_CLAIM, AFTER_CLAIM = "before the claim", "after the claim"
INSIDE = "inside the function"
BEFORE_COMPLETE, AFTER_COMPLETE = "before the completion", "after the completion"
POINTS = [BEFORE_CLAIM, AFTER_CLAIM, INSIDE, BEFORE_COMPLETE, AFTER_COMPLETE]

# SQLite only: everything is written, and the transaction is about to commit.
CLAIM_UNCOMMITTED, COMPLETE_UNCOMMITTED = "the claim is not committed", "the completion is not committed"


class Stop:
    """Reports that the chosen point was reached, and waits there for SIGKILL."""

    def __init__(self, point: str, parent: Connection) -> None:
        self._point = point
        self._parent = parent

    def at(self, point: str) -> None:
        if point == self._point:
            self._parent.send(point)
            while True:
                signal.pause()

    def ran(self) -> dict[str, str]:
        """The guarded function: it reports its fence, and may be stopped before it returns."""
        self._parent.send(current_claim().fence)
        self.at(INSIDE)
        return {"by": "the child"}


class StoppingStore:
    """A store that can be stopped before and after each of its writes."""

    def __init__(self, store: Store, stop: Stop) -> None:
        self._store = store
        self._stop = stop
        self._uncommitted = ""
        event.listen(sqlalchemy.Engine, "commit", lambda _: stop.at(self._uncommitted))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def claim(self, requests: Sequence[ClaimRequest]) -> Any:
        return await self._at_claim(self._store.claim, requests)

    async def _at_claim(self, verb: Any, requests: Sequence[Any]) -> Any:
        await self._store.open()  # so that the first commit is the claim's, not the migration's
        self._stop.at(BEFORE_CLAIM)
        self._uncommitted = CLAIM_UNCOMMITTED
        verdicts = await verb(requests)
        self._stop.at(AFTER_CLAIM)
        return verdicts

    async def complete(self, requests: Sequence[Complete]) -> Any:
        return await self._at_complete(self._store.complete, requests)

    async def _at_complete(self, verb: Any, requests: Sequence[Any]) -> Any:
        self._stop.at(BEFORE_COMPLETE)
        self._uncommitted = COMPLETE_UNCOMMITTED
        answers = await verb(requests)
        self._stop.at(AFTER_COMPLETE)
        return answers


class StoppingTogether(StoppingStore):
    """The same for a store that executes requests together."""

    async def together(self, requests: Sequence[Any]) -> Any:
        stopping = self._at_claim if isinstance(requests[0], ClaimRequest) else self._at_complete
        return await stopping(self._store.together, requests)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Victim:
    """The call that a child makes, and the point at which it stops."""

    url: str
    awaited: bool
    point: str
    policy: Policy
    key: str
    clock: float


def work_until_killed(victim: Victim, parent: Connection) -> None:
    """Make one guarded call; the parent kills this process when it reports that the point is reached."""
    stop = Stop(victim.point, parent)
    opened = open_store(victim.url, is_async=victim.awaited, clock=FakeClock(victim.clock))
    store = StoppingTogether(opened, stop) if isinstance(opened, Together) else StoppingStore(opened, stop)
    if victim.awaited:
        asyncio.run(_call(store, stop, victim))
    else:
        Once(store, collect=False).call(victim.key, stop.ran, scope=SCOPE, policy=victim.policy)
    parent.send("ended")


async def _call(store: StoppingStore, stop: Stop, victim: Victim) -> None:
    async def ran() -> dict[str, str]:
        return stop.ran()

    await AsyncOnce(store, collect=False).call(victim.key, ran, scope=SCOPE, policy=victim.policy)
