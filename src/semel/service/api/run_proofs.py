"""Whether the history of a run is sealed, and the proof of it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from litestar import Response, get
from msgspec import Struct

from semel.runs.store import seals
from semel.service.api.params import RunId
from semel.service.api.responses import json, refusals
from semel.service.state import CurrentPrincipal, CurrentState
from semel.types import moment


class RunProof(Struct, frozen=True, kw_only=True):
    """Whether the end of a run is sealed, since when and in which seal; and the lines of its proof."""

    sealed: bool
    sealed_at: datetime | None
    seal: int | None
    proof: list[dict[str, Any]]
    """Each as a line of JSON, they are what ``semel audit verify`` reads."""


@get(
    "/runs/{run_id:str}/proof",
    tags=["runs"],
    operation_id="getProof",
    summary="The proof that its history is sealed",
    responses=refusals(400, 404),
)
async def proof(run_id: RunId, service: CurrentState, caller: CurrentPrincipal) -> Response[RunProof]:
    """The rows of the run with the seals that cover them: whoever has them can verify them without this server.

    A run is sealed within some minutes after it ended, if sealing had begun before (``semel audit begin``).
    """
    run = await service.run(run_id, caller)
    found = await service.store.read(seals.sealing_of, run.id)
    lines = await service.store.read(seals.prove, run.id)
    sealed_at = None if found.sealed_us is None else moment(found.sealed_us)
    return json(RunProof(sealed=found.number is not None, sealed_at=sealed_at, seal=found.number, proof=lines))


HANDLERS = (proof,)
