"""Records what workers and sweepers do, where they write it: the functions that the store of runs is given."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

from semel import App
from semel.runs.store import RunStore
from semel.runs.store.lease import Leased, LeaseRenewal, LeaseRequest
from semel.runs.store.transitions import FinishedRun, FinishRequest, Lost
from semel.testing.history import Recorder

Write: TypeAlias = Callable[..., Awaitable[Any]]
_leases: dict[tuple[str, int], int] = {}
"""How long the leases are that this process has seen, by run and fence."""


def record_app(app: App, recorder: Recorder) -> App:
    """Record what every store does that the app opens from now on: that of its worker, too."""
    ledger = app.ledger
    app.ledger = lambda **options: record(ledger(**options), recorder)  # type: ignore[method-assign]
    return app


def record(store: RunStore, recorder: Recorder) -> RunStore:
    for name in ("write", "write_once"):
        setattr(store, name, partial(_recorded, getattr(store, name), recorder))
    return store


async def _recorded(write: Write, recorder: Recorder, verb: Any, *args: Any, **kwargs: Any) -> Any:
    recording = _RECORDED.get(verb.__name__)
    call = partial(write, verb, *args, **kwargs)
    return await (call() if recording is None else recording(call, recorder, *args))


async def _lease(call: Write, recorder: Recorder, asked: LeaseRequest | str, *_: Any) -> list[Leased]:
    worker = asked if isinstance(asked, str) else asked.worker
    with recorder.begin("run", "lease", (worker,)) as pending:
        leased: list[Leased] = await call()
        _leases.update({(each.id, each.fence): each.lease_us for each in leased})
        pending.answer(runs=[(each.id, each.fence, each.lease_us) for each in leased])
    return leased


async def _renew(call: Write, recorder: Recorder, beats: list[LeaseRenewal], *_: Any) -> dict[str, bool]:
    with ExitStack() as stack:
        pending = {}
        for each in beats:
            asked = {"fence": each.fence, "lease_us": _leases.get((each.run_id, each.fence), 0)}
            pending[each.run_id] = stack.enter_context(recorder.begin("run", "renew", (each.run_id,), **asked))
        renewed: dict[str, bool] = await call()
        for run, operation in pending.items():
            operation.answer(accepted=run in renewed)
    return renewed


async def _end(call: Write, recorder: Recorder, endings: Sequence[FinishRequest], *_: Any) -> dict[str, FinishedRun]:
    with ExitStack() as stack:
        pending = {}
        for each in endings:
            how = "returned" if each.returned else each.ended.kind
            asked = {"fence": each.fence, "how": how, "value": (each.ended.result_digest or "")[:16]}
            pending[each.run_id] = stack.enter_context(recorder.begin("run", "finish", (each.run_id,), **asked))
        over: dict[str, FinishedRun] = await call()
        for run, operation in pending.items():
            operation.answer(accepted=run in over, status=over[run].status if run in over else None)
    return over


async def _lose(call: Write, recorder: Recorder, *_: Any) -> list[Lost]:
    with recorder.begin("run", "lose", ("sweeper",)) as pending:
        lost: list[Lost] = await call()
        pending.answer(runs=[(each.id, each.fence, each.status) for each in lost])
    return lost


async def _finish_and_lease(
    call: Write, recorder: Recorder, endings: Sequence[FinishRequest], requests: Sequence[LeaseRequest], *_: Any
) -> tuple[dict[str, FinishedRun], list[list[Leased]]]:
    """Both as if they were called alone, at the same time."""
    finished: dict[str, FinishedRun] = {}
    leased: list[list[Leased]] = []

    async def both() -> list[Leased]:
        nonlocal finished, leased
        finished, leased = await call()
        return list(chain.from_iterable(leased))

    async def lease() -> dict[str, FinishedRun]:
        await _lease(both, recorder, requests[0])
        return finished

    await _end(lease, recorder, endings)
    return finished, leased


_RECORDED: dict[str, Callable[..., Awaitable[Any]]] = {
    "finish_and_lease": _finish_and_lease,
    "lease": _lease,
    "lease_these": _lease,
    "renew": _renew,
    "end": _end,
    "lose_expired": _lose,
}
