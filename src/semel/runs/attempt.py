"""One execution of a run as data: what it is given, and what it came to. Between processes it is MessagePack."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

EndKind: TypeAlias = Literal["succeeded", "retry", "fatal", "snooze", "cancelled", "lost", "unstarted"]
"""How an attempt ends. ``lost``: whoever worked on it vanished, so nobody knows how far it came. ``unstarted``: this
worker could not even begin, which is no fault of the run."""


class Attempt(Struct, frozen=True, kw_only=True):
    """What whoever executes an attempt is told."""

    run_id: str
    model: str
    parameters: str
    """The parameters as JSON."""
    payload_hash: str
    fence: int
    attempt: int
    user: str = ""
    tenant: str = ""
    worker: str = ""
    data_ref: str | None = None
    """Where the data of the run lies in the result store, if it has any."""
    trace: str | None = None
    """The span that the attempt is, as ``traceparent``: for one in another process."""


class Artifact(Struct, frozen=True):
    """A file that the attempt leaves in the result store."""

    name: str
    ref: str
    size: int
    digest: str
    """SHA-256 of the content, in hex."""


class AttemptResult(Struct, frozen=True, kw_only=True):
    """What an attempt came to."""

    kind: EndKind
    reason: str = ""
    """For everything but success: what happened, in a sentence; becomes ``last_error``."""
    traceback: str = ""
    after: float | None = None
    """For ``retry`` and ``snooze``: seconds from now; None leaves it to the model's backoff."""
    result: str | None = None
    """The result as JSON, where it is small enough to live in the row."""
    result_ref: str | None = None
    """Where the result lies in the result store, where it does not."""
    result_digest: str | None = None
    """SHA-256 of the result's JSON, in hex."""
    result_size: int = 0
    result_exact: str | None = None
    """With NaN and infinity as they are, of a result that has any: the text, or where it lies, as of the result."""
    warnings: list[str] = []
    artifacts: list[Artifact] = []
    cost: float | None = None
    """What the attempt really cost, if the model said so."""
