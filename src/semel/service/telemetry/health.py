"""Whether the service is healthy: the database and the brokers respond, and the database accepts writes."""

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

TIMEOUT = 3.0
"""Seconds for a response of the database or of Redis."""
FRESH = 1.0
"""Seconds for which a result is reused: requests need no token, and frequent ones must not load the database."""
WRITTEN_EVERY = 60.0
"""Seconds between two writes that check whether SQLite can still be written."""
MIN_FREE = 1 << 20
"""Bytes that must be free for a file of SQLite to grow."""

_WRITE = text("INSERT OR REPLACE INTO semel_leaders (role, holder, until_us, term_us) VALUES ('readyz', '', 0, 0)")

CheckStatus: TypeAlias = Literal["ok", "unavailable", "read-only", "not migrated", "ending"]


class Health(Struct, frozen=True, omit_defaults=True):
    """The result of the checks. Anybody may read it: it names no address, and no cause but a missing database file."""

    status: Literal["ok", "unavailable"]
    checks: dict[str, CheckStatus]
    detail: str | None = None


class HealthCheck:
    """The checks of one service."""

    def __init__(self, service: ServiceState) -> None:
        self._service = service
        self._alive = _Cached(self._check_alive)
        self._ready = _Cached(self._check_ready)
        self._wrote = -WRITTEN_EVERY

    async def alive(self) -> Health:
        """The database responds, and so do the brokers of the transport, the settings and the event stream."""
        return await self._alive.get()

    async def ready(self) -> Health:
        """The database is migrated and writable, and the server is not shutting down."""
        if self._service.watch.ending:
            return _health({"server": "ending"})
        return await self._ready.get()

    async def _check_alive(self) -> Health:
        named = [("database", _within(self._service.store.read(_select_one))), *self._brokers()]
        statuses = await asyncio.gather(*(each for _, each in named))
        checks: dict[str, CheckStatus] = {}
        for (name, _), status in zip(named, statuses, strict=True):
            if checks.get(name, "ok") == "ok":
                checks[name] = status
        return self._with_detail(checks)

    def _brokers(self) -> list[tuple[str, Awaitable[CheckStatus]]]:
        """The check of each broker in use, by name."""
        settings, transport = self._service.settings, self._service.app.transport
        urls = {url for url in (settings.redis, settings.events) if url is not None}
        found: list[tuple[str, Awaitable[CheckStatus]]] = [("redis", _within(_ping_redis(url))) for url in sorted(urls)]
        if isinstance(transport, BrokerTransport):
            found.append((transport.broker, _within(self._check_transport(transport))))
        return found

    async def _check_transport(self, transport: BrokerTransport) -> CheckStatus:
        try:
            await self._service.store.run_blocking(transport.length, queue_name("default"))
        except Exception:  # noqa: BLE001 -- whatever the broker's client raises
            return "unavailable"
        return "ok"

    async def _check_ready(self) -> Health:
        """Check writes first, as a read-only PostgreSQL cannot be opened; but open SQLite first, to create its file."""
        checks = [self._check_writes, self._check_open]
        if self._is_sqlite:
            checks.reverse()
        status: CheckStatus = "ok"
        for check in checks:
            if (status := await _within(check())) != "ok":
                break
        return self._with_detail({"database": status})

    @property
    def _is_sqlite(self) -> bool:
        return self._service.store.url.get_backend_name() == "sqlite"

    def _with_detail(self, checks: dict[str, CheckStatus]) -> Health:
        if checks["database"] != "ok" and self._is_sqlite:
            try:
                check_known(self._service.store.url.database or "")
            except FileReplaced as error:
                return Health("unavailable", checks, str(error))
        return _health(checks)

    async def _check_writes(self) -> CheckStatus:
        """Whether the database accepts writes; for SQLite, also whether its disk has room.

        Only a write detects every kind of full disk. However many requests come, SQLite is written once a minute.
        """
        store = self._service.store
        status = await store.write(_check_writable)
        if not self._is_sqlite or status != "ok":
            return status
        if not await store.run_blocking(_has_room, store.url.database or ""):
            return "unavailable"
        if time.monotonic() - self._wrote >= WRITTEN_EVERY:
            self._wrote = -WRITTEN_EVERY  # until a write succeeds, every check repeats it
            await store.write(_write)
            self._wrote = time.monotonic()
        return "ok"

    async def _check_open(self) -> CheckStatus:
        """Open the service: a mounted one may not have been opened yet."""
        await self._service.ensure_open()
        return "ok"


class _Cached:
    """Runs one check at a time, and reuses its result for a moment."""

    def __init__(self, check: Callable[[], Awaitable[Health]]) -> None:
        self._check = check
        self._lock = asyncio.Lock()
        self._at = -FRESH
        self._last: Health | None = None

    async def get(self) -> Health:
        async with self._lock:
            if self._last is None or time.monotonic() - self._at >= FRESH:
                self._last = await self._check()
                self._at = time.monotonic()
            return self._last


async def _within(check: Awaitable[CheckStatus]) -> CheckStatus:
    try:
        async with asyncio.timeout(TIMEOUT):
            return await check
    except NotMigrated:
        return "not migrated"
    except (SemelError, TimeoutError):
        return "unavailable"


def _health(checks: dict[str, CheckStatus]) -> Health:
    return Health("ok" if all(status == "ok" for status in checks.values()) else "unavailable", checks)


def _select_one(conn: Connection) -> CheckStatus:
    conn.execute(text("SELECT 1"))
    return "ok"


def _check_writable(conn: Connection) -> CheckStatus:
    """``read-only`` for a PostgreSQL standby. A read-only SQLite fails earlier, when the transaction begins."""
    if conn.dialect.name != "postgresql":
        return "ok"
    read_only = conn.execute(text("SELECT pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on'"))
    return "read-only" if read_only.scalar_one() else "ok"


def _write(conn: Connection) -> None:
    conn.execute(_WRITE)


def _has_room(file: str) -> bool:
    return shutil.disk_usage(Path(file).absolute().parent).free >= MIN_FREE


async def _ping_redis(url: str) -> CheckStatus:
    from redis.asyncio import Redis
    from redis.exceptions import RedisError

    client = Redis.from_url(url, socket_timeout=TIMEOUT, socket_connect_timeout=TIMEOUT)
    try:
        await client.ping()
    except (RedisError, OSError):
        return "unavailable"
    finally:
        await client.aclose()
    return "ok"
