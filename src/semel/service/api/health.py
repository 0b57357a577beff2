"""Whether the service is well: what it leans on answers, and it takes requests."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from msgspec import Struct
from sqlalchemy import Connection, text

from semel.db.sqlite_file import FileReplaced, check_known
from semel.errors import NotMigrated, SemelError
from semel.runs.transports.broker import BrokerTransport, queue_name

if TYPE_CHECKING:
    from semel.service.state import ServiceState

PATIENCE = 3.0
"""Seconds for an answer of the database or of Redis."""
FRESH = 1.0
"""Seconds for which an answer is given again: anybody may ask, and nobody is to wear the database out by it."""

WRITTEN_EVERY = 60.0
"""Seconds between two writes that see whether SQLite can still be written."""
ROOM = 1 << 20
"""Bytes that must be free for a file of SQLite to grow."""

_WRITE = text("INSERT OR REPLACE INTO semel_leaders (role, holder, until_us, term_us) VALUES ('readyz', '', 0, 0)")

Word: TypeAlias = Literal["ok", "unavailable", "read-only", "not migrated", "ending"]


class Health(Struct, frozen=True, omit_defaults=True):
    """How it stands. Strangers may read it: it names no address and no cause, but a database file that is gone."""

    status: Literal["ok", "unavailable"]
    checks: dict[str, Word]
    detail: str | None = None


class HealthCheck:
    """Looks after one site."""

    def __init__(self, service: ServiceState) -> None:
        self._service = service
        self._alive = _Remembered(self._look_alive)
        self._ready = _Remembered(self._look_ready)
        self._wrote = -WRITTEN_EVERY

    async def alive(self) -> Health:
        """The database answers, and Redis where it is used: by the app's transport, the settings or the stream."""
        return await self._alive.get()

    async def ready(self) -> Health:
        """Requests can be taken: the database is migrated and can be written, and the server is not about to end."""
        if self._service.watch.ending:
            return _health({"server": "ending"})
        return await self._ready.get()

    async def _look_alive(self) -> Health:
        asked = [("database", self._answers()), *self._brokers()]
        words = await asyncio.gather(*(each for _, each in asked))
        checks: dict[str, Word] = {}
        for (name, _), word in zip(asked, words, strict=True):
            if checks.get(name, "ok") == "ok":
                checks[name] = word
        return self._health(checks)

    def _brokers(self) -> list[tuple[str, Awaitable[Word]]]:
        """Every broker that is used, each by the name of its check."""
        settings, transport = self._service.settings, self._service.app.transport
        urls = {url for url in (settings.redis, settings.events) if url is not None}
        found: list[tuple[str, Awaitable[Word]]] = [("redis", _within(_redis_answers(url))) for url in sorted(urls)]
        if isinstance(transport, BrokerTransport):
            found.append((transport.broker, _within(self._transport_answers(transport))))
        return found

    async def _transport_answers(self, transport: BrokerTransport) -> Word:
        try:
            await self._service.store.run_blocking(transport.length, queue_name("default"))
        except Exception:  # noqa: BLE001 -- whatever the broker's client raises
            return "unavailable"
        return "ok"

    async def _look_ready(self) -> Health:
        return self._health({"database": await self._takes_writes()})

    def _health(self, checks: dict[str, Word]) -> Health:
        url = self._service.store.url
        if checks["database"] != "ok" and url.get_backend_name() == "sqlite":
            try:
                check_known(url.database or "")
            except FileReplaced as error:
                return Health("unavailable", checks, str(error))
        return _health(checks)

    async def _answers(self) -> Word:
        return await _within(self._service.store.read(_look))

    async def _takes_writes(self) -> Word:
        """A PostgreSQL that only follows cannot be opened; a file of SQLite is made by that."""
        checks = [self._writes, self._opened]
        if self._service.store.url.get_backend_name() == "sqlite":
            checks.reverse()
        for check in checks:
            if (word := await _within(check())) != "ok":
                return word
        return "ok"

    async def _writes(self) -> Word:
        """Whether SQLite grants the right to write, and has room on its disk.

        Anybody may ask, so however many ask, they cause one small write a minute: only that finds every full disk.
        """
        store = self._service.store
        word = await store.write(_may_write)
        if store.url.get_backend_name() != "sqlite" or word != "ok":
            return word
        if not await store.run_blocking(_has_room, store.url.database or ""):
            return "unavailable"
        if time.monotonic() - self._wrote >= WRITTEN_EVERY:
            self._wrote = -WRITTEN_EVERY  # until it succeeds it is tried every time
            await store.write(_write)
            self._wrote = time.monotonic()
        return "ok"

    async def _opened(self) -> Word:
        """A service that is mounted may not have been told to start."""
        await self._service.ensure_open()
        return "ok"


class _Remembered:
    """Asks once for all who ask at the same time, and keeps the answer for a moment."""

    def __init__(self, look: Callable[[], Awaitable[Health]]) -> None:
        self._look = look
        self._lock = asyncio.Lock()
        self._at = -FRESH
        self._known: Health | None = None

    async def get(self) -> Health:
        """The answer."""
        async with self._lock:
            if self._known is None or time.monotonic() - self._at >= FRESH:
                self._known = await self._look()
                self._at = time.monotonic()
            return self._known


async def _within(asking: Awaitable[Word]) -> Word:
    try:
        async with asyncio.timeout(PATIENCE):
            return await asking
    except NotMigrated:
        return "not migrated"
    except (SemelError, TimeoutError):
        return "unavailable"


def _health(checks: dict[str, Word]) -> Health:
    return Health("ok" if all(word == "ok" for word in checks.values()) else "unavailable", checks)


def _look(conn: Connection) -> Word:
    conn.execute(text("SELECT 1"))
    return "ok"


def _may_write(conn: Connection) -> Word:
    """A PostgreSQL that only follows says so; SQLite has refused the transaction where it is not to be written."""
    if conn.dialect.name != "postgresql":
        return "ok"
    read_only = conn.execute(text("SELECT pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on'"))
    return "read-only" if read_only.scalar_one() else "ok"


def _write(conn: Connection) -> None:
    conn.execute(_WRITE)


def _has_room(file: str) -> bool:
    return shutil.disk_usage(Path(file).absolute().parent).free >= ROOM


async def _redis_answers(url: str) -> Word:
    from redis.asyncio import Redis
    from redis.exceptions import RedisError

    client = Redis.from_url(url, socket_timeout=PATIENCE, socket_connect_timeout=PATIENCE)
    try:
        await client.ping()
    except (RedisError, OSError):
        return "unavailable"
    finally:
        await client.aclose()
    return "ok"
