"""How a user stands with their quota. Apart from the other views, since quotas bring the database's library along."""

from __future__ import annotations

from msgspec import Struct

from semel.runs.store.quotas import Quota, Usage


class RemoteUsage(Struct, frozen=True, kw_only=True):
    """What a user has in use, and the quota that holds for them; ``default``: they have none of their own."""

    user: str
    usage: Usage
    quota: Quota | None = None
    default: bool = False
    tenant: str = ""
