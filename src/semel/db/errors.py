"""Translates a driver's errors to semel's: try again later, give up, or migrate first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import exc

from semel.errors import NotMigrated, SemelError, StoreBroken, StoreUnavailable

_BROKEN_STATES = {
    "28000": "the database refused the user",
    "28P01": "the database refused the password",
    "3D000": "there is no such database",
    "42501": "the database user lacks a privilege",
    "53100": "the database's disk is full",
}
_PASSING_CLASSES = ("08", "25", "40", "53", "55", "57", "58")
"""Connections, read-only standbys, deadlocks, resources, locks, shutdowns, I/O: another try may succeed."""

LOCK_TIMEOUT, UNIQUE_VIOLATION, DEADLOCK = "55P03", "23505", "40P01"

_POOLER = ("prepared statement", "unsupported startup parameter")
"""What PostgreSQL or PgBouncer says if a session is lent for one transaction, and the client does not know it."""

# psycopg has no error code for a failure to connect, only the server's message.
_BROKEN_CONNECTION = ("authentication failed", "does not exist", "no pg_hba.conf entry", "no password supplied")
_BROKEN_SQLITE = ("readonly", "disk is full", "not a database", "malformed", "unable to open", "no such column")
_UNDECODABLE = re.compile("Could not decode to UTF-8 column '([^']*)'")
"""What Python's SQLite says of text that is none: the file is fine, but another try would fail, too."""


DATABASE_ERRORS = (exc.TimeoutError, exc.DBAPIError, OSError)
"""The errors of a database. OSError, since asyncpg does not wrap a failure to connect."""


@contextmanager
def translate_errors(file: str = "") -> Iterator[None]:
    """Raise semel's errors instead of the database's. ``file`` is the path of a SQLite database, for the message."""
    try:
        yield
    except DATABASE_ERRORS as error:
        raise translate(error, file) from error


def translate(error: BaseException, file: str = "") -> Exception:
    """semel's error for one of ``DATABASE_ERRORS``."""
    if isinstance(error, exc.TimeoutError):
        return StoreUnavailable(f"no connection of the pool became free in time: {error}")
    if isinstance(error, exc.DBAPIError):
        return _of_damage(error) or _of_driver(error, file)
    return StoreUnavailable(f"the database cannot be reached: {error}")


def sqlstate(error: exc.DBAPIError) -> str | None:
    """PostgreSQL's five-character code, whichever driver raised the error."""
    state = getattr(error.orig, "sqlstate", None)
    return state if isinstance(state, str) else None


def is_lock_error(error: exc.DBAPIError) -> bool:
    """Whether others held a lock for too long: another try may get it."""
    name = str(getattr(error.orig, "sqlite_errorname", ""))
    return sqlstate(error) in (LOCK_TIMEOUT, DEADLOCK) or name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def _is_statement_error(error: BaseException | None) -> bool:
    """Whether it is SQLite's general error, as for an overflow: the file is fine, but another try would fail, too."""
    return getattr(error, "sqlite_errorname", None) == "SQLITE_ERROR" and "no such column" not in str(error)


def _permission_hint(message: str) -> str:
    if "readonly" not in message and "unable to open" not in message:
        return ""
    return (
        "; this process must be allowed to write the file and its folder, where SQLite keeps its log: "
        "change the owner or the permissions of both, or run as another user"
    )


def _of_damage(error: exc.DBAPIError) -> Exception | None:
    """The error for a damaged value. It is looked for first: the message has the value, which may say anything."""
    found = _UNDECODABLE.match(str(error.orig))
    return found and SemelError(f"a value in the column {found[1]} is damaged: it is text that is not UTF-8")


def _of_driver(error: exc.DBAPIError, file: str) -> Exception:
    message = str(error.orig).strip().split("\n")[0]
    state = sqlstate(error)
    if state in ("42P01", "42703") or "no such table" in message:
        advice = "run: semel migrate URL, or update this program if a newer release has migrated it"
        return NotMigrated(f"the database lacks semel's tables ({message}); {advice}")
    if any(words in str(error.orig) for words in _POOLER):
        return StoreBroken(
            f"the database refused the connection's settings or prepared statements: {message}; "
            "if PgBouncer is between, add pool_mode=transaction to the URL: postgresql://host/name?pool_mode=transaction"
        )
    if state in _BROKEN_STATES:
        return StoreBroken(f"{_BROKEN_STATES[state]}: {message}")
    if state is not None:
        if state.startswith(_PASSING_CLASSES):
            return StoreUnavailable(message)
        return SemelError(f"the database reported an error: {message}")
    if any(words in message for words in _BROKEN_CONNECTION):
        return StoreBroken(f"the database refused the connection: {message}")
    if _is_statement_error(error.orig):
        return SemelError(f"the database reported an error: {message}")
    if any(words in message for words in _BROKEN_SQLITE):
        which = f"the database file {file}" if file else "the database file"
        return StoreBroken(f"{which} cannot be used: {message}{_permission_hint(message)}")
    if isinstance(error, exc.OperationalError | exc.InterfaceError) or error.connection_invalidated:
        return StoreUnavailable(f"the database cannot be reached: {message}")
    return SemelError(f"the database reported an error: {message}")
