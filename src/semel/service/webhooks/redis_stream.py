"""Events in a Redis stream, for consumer groups. Each entry has the event's id, which identifies duplicates."""

from __future__ import annotations

from collections.abc import Sequence

import redis.asyncio
from redis.exceptions import RedisError

from semel.errors import InvalidRequest

LONGEST = 100_000
"""The approximate number of entries that are kept."""
TIMEOUT = 10.0
"""Seconds for Redis to respond."""


class RedisStream:
    """Adds events to the stream. It connects when it is first used."""

    def __init__(self, url: str, name: str) -> None:
        self._name = name
        try:
            self._redis = redis.asyncio.Redis.from_url(
                url, socket_timeout=TIMEOUT, socket_connect_timeout=TIMEOUT, max_connections=4
            )
        except ValueError:
            raise InvalidRequest("SEMEL_EVENTS is not a Redis URL; example: redis://host:6379/0") from None

    async def add(self, events: Sequence[tuple[str, str, str]]) -> str | None:
        """Add events (id, name, body) in one transaction; returns an error message, or None."""
        try:
            async with self._redis.pipeline(transaction=True) as pipeline:
                for event_id, name, body in events:
                    entry = {"id": event_id, "name": name, "body": body}
                    pipeline.xadd(self._name, entry, maxlen=LONGEST, approximate=True)  # type: ignore[arg-type]
                await pipeline.execute()
        except (RedisError, OSError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"[:500]
        return None

    async def close(self) -> None:
        """Close the connection."""
        await self._redis.aclose()
