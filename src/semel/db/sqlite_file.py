"""The file of a SQLite database, watched while it is in use.

A connection that is open goes on writing into a file that was deleted, and a new connection makes or finds another
file under the same name: both would acknowledge what nobody reads again. So a process remembers which file it began
with, by device and inode, and refuses every transaction as long as another one, or none, has its name. The ``-wal``
and ``-shm`` files beside it are part of the database, and are watched for each connection that has them open.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from sqlalchemy import Connection, Engine, event

from semel.errors import StoreBroken

Identity: TypeAlias = tuple[int, int]
"""The device and the inode of a file."""

_FILES = "semel_files"


class FileReplaced(StoreBroken):
    """The database file was deleted or replaced while it was in use; the message names it."""


class KnownFile:
    """A file that this process has in use. Whoever holds this object insists on the file."""

    def __init__(self, path: str, identity: Identity) -> None:
        self.path = path
        self.identity = identity

    def check(self) -> None:
        """Raise `FileReplaced` unless the file is still there."""
        _require(self.path, self.identity)


_known: WeakValueDictionary[str, KnownFile] = WeakValueDictionary()
"""All engines of a process, and of those that it forks, must find the same file under one name."""


def know(path: str, identity: Identity | None = None) -> KnownFile | None:
    """From now on insist on this file, or on the one that is there; None when there is none."""
    path = os.path.realpath(path)
    found = identity or _identity(path)
    return None if found is None else _known.setdefault(path, KnownFile(path, found))


def check_known(path: str) -> None:
    """Raise `FileReplaced` if this process has a file of that name in use, and it is not there any more."""
    known = _known.get(os.path.realpath(path))
    if known is not None:
        known.check()


def make_private(path: str) -> None:
    """Make the file, if it is missing, for its owner alone. SQLite makes the files beside it as this one is.

    What cannot be made here SQLite cannot make, either, and says why.
    """
    with suppress(OSError):
        os.close(os.open(os.path.realpath(path), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


class WatchedFile:
    """Watches the file of an engine, from its first connection until `forget`."""

    def __init__(self, engine: Engine) -> None:
        self._known: KnownFile | None = None
        event.listen(engine, "connect", self._connected)
        event.listen(engine, "begin", self._before_begin, insert=True)

    def forget(self) -> None:
        """The engine was closed: when it is used again, it may find another file."""
        self._known = None

    def _connected(self, connection: Any, record: Any) -> None:
        """SQLite has made the file by now, where there was none; the first look at the tables opens the log."""
        cursor = connection.cursor()
        path = str(cursor.execute("PRAGMA database_list").fetchone()[2])
        cursor.execute("PRAGMA schema_version").fetchone()
        cursor.close()
        if not path:
            return
        if self._known is None:
            self._known = know(path)
        found = {each: _identity(each) for each in (f"{path}-wal", f"{path}-shm")}
        record.info[_FILES] = [(each, identity) for each, identity in found.items() if identity is not None]

    def _before_begin(self, conn: Connection) -> None:
        if self._known is not None:
            self._known.check()
        for path, identity in conn.info.get(_FILES, ()):
            _require(path, identity)


def _identity(path: str) -> Identity | None:
    try:
        found = os.stat(path)  # noqa: PTH116 -- before every transaction
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _require(path: str, identity: Identity) -> None:
    found = _identity(path)
    if found != identity:
        what = "deleted" if found is None else "replaced by another file"
        raise FileReplaced(
            f"the database file {path} was {what} while it was in use, so nothing is written any more: it would be "
            "lost. Put the file back, or stop every process that uses the database and start them again"
        )
