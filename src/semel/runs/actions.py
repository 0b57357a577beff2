"""Carries out actions on all runs that match a filter: in batches, whichever process began them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from semel.errors import SemelError, StoreUnavailable
from semel.runs.store import RunStore, actions, queries
from semel.runs.store.actions import Batch
from semel.runs.store.submit import Answer, Submission
from semel.runs.types import ActionKind, Run, RunAction

BATCH: dict[ActionKind, int] = {"cancel": 500, "retry": 50, "set_priority": 500}
"""Runs that one transaction changes. Those of a retry have all their parameters in memory."""


class ActionCarrier:
    """Carries out actions. ``build`` makes the submission that retries a run; ``created`` is called with submissions
    and the answers to them.
    """

    def __init__(
        self,
        store: RunStore,
        build: Callable[[Run], Submission],
        created: Callable[[Sequence[Submission], Sequence[Answer]], Awaitable[None]],
    ) -> None:
        self._store = store
        self._build = build
        self._created = created

    async def carry_out(self, action: RunAction) -> RunAction:
        """Do what is left of the action; returns it when it is finished.

        If a batch is refused, its runs are changed one by one, so that those at fault are counted as failed.
        """
        left_alone = 0
        while action.state == "running":
            limit = 1 if left_alone else BATCH[action.action]
            ids = await self._store.read(actions.next_batch, action, limit)
            try:
                action = await self._advance(action, await self._prepared(action, ids, more=len(ids) == limit))
            except StoreUnavailable:
                raise
            except SemelError as error:
                if not ids:
                    raise
                if len(ids) > 1:
                    left_alone = len(ids)
                    continue
                failed = Batch(ids=(), last=ids[0], more=True, failed=1, error=f"run {ids[0]}: {error}")
                action = await self._advance(action, failed)
            left_alone = max(0, left_alone - 1)
        return action

    async def _advance(self, action: RunAction, batch: Batch) -> RunAction:
        advanced = await self._store.write(actions.advance, action, batch, self._store.statement_context)
        if advanced is None:
            return await self._store.read(actions.get, action.id) or action
        await self._created(batch.submissions, advanced[1])
        return advanced[0]

    async def _prepared(self, action: RunAction, ids: Sequence[str], *, more: bool) -> Batch:
        """The batch of these runs; for a retry, with what is submitted for each of them."""
        last = ids[-1] if ids else None
        if action.action != "retry":
            return Batch(ids=ids, last=last, more=more)
        runs = await self._store.read(queries.read_by_id, ids)
        return await self._store.run_blocking(self._retries, runs, last, more)

    def _retries(self, runs: Sequence[Run], last: str | None, more: bool) -> Batch:
        submissions, errors, skipped = [], [], 0
        for run in runs:
            if run.retry_refusal is not None:
                skipped += 1
                continue
            try:
                submissions.append(self._build(run))
            except SemelError as error:  # the model is gone, or takes other parameters now
                errors.append(f"run {run.id}: {error}")
        return Batch(
            ids=(),
            last=last,
            more=more,
            submissions=submissions,
            failed=len(errors),
            skipped=skipped,
            error=errors[0] if errors else None,
        )
