"""A lease outlives an outage of nine tenths of itself, wherever the outage begins: seen on an injected clock."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from semel._concurrency.runtime import AsyncioRuntime
from semel.errors import StoreUnavailable
from semel.once.maintenance import Renewer
from semel.once.store import Renew
from semel.runs.store import lease, maintenance
from semel.runs.store.lease import LeaseRenewal
from semel.runs.worker.active_runs import ActiveRun, ActiveRuns
from semel.runs.worker.heartbeat import Heartbeat
from semel.runs.worker.run_logs import WorkerLogger
from semel.types import Claim

LEASES = [5.0, 12.0, 20.0, 21.0, 30.0, 60.0, 300.0]
PHASES = [0.0, 0.011, 0.024, 0.0371, 0.0499]
"""Parts of a lease: how long after others the outage begins."""
OUTAGE = 0.9


class Leap(asyncio.SelectorEventLoop):
    """An event loop in which nobody waits: when nothing is left to do, it is the time of what comes next."""

    now = 1000.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        inner: Any = self
        coming = [each.when() for each in inner._scheduled if not each.cancelled()]
        if coming and not inner._ready:
            self.now = max(self.now, min(coming))
        super()._run_once()  # type: ignore[misc]  # asyncio's own, and the one place where all waiting is done


class Server:
    """Keeps a lease, and is away for a while; the connections that were open then are silent for ever, or broken."""

    def __init__(self, loop: Leap, lease: float, phase: float, *, silent: bool) -> None:
        self._loop = loop
        self._silent = silent
        self.away_from = loop.now + (1 + phase) * lease
        self.away_until = self.away_from + OUTAGE * lease
        self.lease = lease
        self.ends = loop.now + lease
        self.shortest = lease
        """The least that was ever left when the lease was renewed."""

    async def answer(self) -> None:
        if self.away_from <= self._loop.now < self.away_until:
            if self._silent:
                await self._loop.create_future()
            raise StoreUnavailable("away")

    async def renew(self) -> None:
        await self.answer()
        self.shortest = min(self.shortest, self.ends - self._loop.now)
        self.ends = self._loop.now + self.lease


def renewer(server: Server) -> Coroutine[Any, Any, None]:
    async def renew(asked: Sequence[Renew]) -> list[int | None]:
        await server.renew()
        return [1 for _ in asked]

    async def work() -> None:
        renewer = Renewer(AsyncioRuntime(), renew, idle=1.0)
        renewer.watch(Claim("scope", "key", 1, "attempt", "", server.lease, 0, 0))
        await asyncio.sleep(2.2 * server.lease)
        renewer.stop()

    return work()


def heart(server: Server) -> Coroutine[Any, Any, None]:
    class Store:
        runtime = AsyncioRuntime()
        statement_context = None

        def unavailable(self, error: object) -> None:
            """It is logged elsewhere."""

        async def write_once(self, verb: object, beats: Sequence[LeaseRenewal], _: object) -> dict[str, bool]:
            assert verb is lease.renew
            await server.renew()
            return {beat.run_id: False for beat in beats}

        async def read_once(self, verb: object, held: Sequence[tuple[str, int]]) -> dict[str, bool]:
            assert verb is lease.watch
            await server.answer()
            return {run_id: False for run_id, _ in held}

        async def write(self, verb: object, _card: object, _terms: object) -> None:
            assert verb is maintenance.worker_seen
            await server.answer()

    async def work() -> None:
        active = ActiveRuns()
        leased: Any = SimpleNamespace(
            id="run", model="m", parameters="{}", payload_hash="", fence=1, attempts=1, user_id="", tenant="",
            data_ref=None, lease_us=round(server.lease * 1e6), changed_us=0, seed=None,
        )  # fmt: skip
        model: Any = SimpleNamespace(isolation="thread")
        active.add(ActiveRun(leased, model, "worker", server._loop.now))
        store: Any = Store()
        record: Any = object()
        beating = Heartbeat(store, active, WorkerLogger("w"), record=lambda: record, lost=_lost, cancelled=_lost)
        task = asyncio.ensure_future(beating.run())
        await asyncio.sleep(2.2 * server.lease)
        task.cancel()

    return work()


def _lost(run: ActiveRun) -> None:
    raise AssertionError(f"{run.leased.id} was lost")


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("keep", [renewer, heart])
def test_a_lease_outlives_nine_tenths_of_itself_without_a_store(
    keep: Callable[[Server], Coroutine[Any, Any, None]], silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for length in LEASES:
        for phase in PHASES:
            loop = Leap()
            clock = SimpleNamespace(monotonic=loop.time, time=loop.time)
            for module in (
                "semel._concurrency.periodic",
                "semel._concurrency.runtime",
                "semel.once.maintenance",
                "semel.runs.worker.heartbeat",
                "semel.runs.worker.active_runs",
            ):
                monkeypatch.setattr(f"{module}.time", clock)
            server = Server(loop, length, phase, silent=silent)
            with asyncio.Runner(loop_factory=lambda loop=loop: loop) as runner:  # type: ignore[misc]
                runner.run(keep(server))
            assert server.ends > server.away_until + length, "it was renewed since"
            left = server.shortest / length
            assert left > 0.015, (
                f"with a lease of {length} and the outage after {phase}, only {left:.3f} of it was left"
            )
