"""The file of a SQLite database, watched while it is in use.

An open connection goes on writing into a file that was deleted, and a new connection creates or finds another file
under the same name: writes to either would be acknowledged and then lost. So a process remembers which file it began
with, by device and inode, and refuses every transaction while another file, or none, has its name. The ``-wal`` and
``-shm`` files beside it are part of the database, and are watched for each connection that has them open.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, TypeAlias
from weakref import WeakSet, WeakValueDictionary, ref

from sqlalchemy import Connection, Engine, ExceptionContext, event

from semel.errors import StoreBroken

Identity: TypeAlias = tuple[int, int]
"""The device and the inode of a file."""

_FILES = "semel_files"


class FileReplaced(StoreBroken):
    """The database file was deleted or replaced while it was in use; the message names it."""


class KnownFile:
    """A file that this process uses, for as long as this object is referenced."""

    def __init__(self, path: str, identity: Identity) -> None:
        self.path = path
        self.identity = identity
        self.engines: WeakSet[Engine] = WeakSet()

    def check(self) -> None:
        """Raise `FileReplaced` if the file was deleted or replaced."""
        _require(self.path, self.identity)


_known: WeakValueDictionary[str, KnownFile] = WeakValueDictionary()
"""By path: all engines of a process, and of its forks, must find the same file under one name."""


def know(path: str, identity: Identity | None = None) -> KnownFile | None:
    """Remember this file, or the one that exists now, as the one to use under this path; None if there is none."""
    path = os.path.realpath(path)
    found = identity or _identity(path)
    return None if found is None else _known.setdefault(path, KnownFile(path, found))


def check_known(path: str) -> None:
    """Raise `FileReplaced` if this process uses a file of that name which was deleted or replaced."""
    known = _known.get(os.path.realpath(path))
    if known is not None:
        known.check()


def make_private(path: str) -> None:
    """Create the file, if it is missing, with access for its owner only. SQLite copies the mode to the files beside it.

    An error is ignored: SQLite then cannot create the file either, and its error has the reason.
    """
    with suppress(OSError):
        os.close(os.open(os.path.realpath(path), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


class WatchedFile:
    """Watches the file of an engine, from its first connection until `forget`."""

    def __init__(self, engine: Engine) -> None:
        self._known: KnownFile | None = None
        self._engine = ref(engine)
        event.listen(engine, "connect", self._connected)
        event.listen(engine, "begin", self._before_begin, insert=True)
        event.listen(engine, "handle_error", self._on_error)

    def forget(self) -> None:
        """Forget the file when the engine is closed: when it is used again, it may find another one."""
        self._known = None

    def _connected(self, connection: Any, record: Any) -> None:
        """Remember the connection's files. SQLite has created the database by now; reading the schema opens the log."""
        cursor = connection.cursor()
        path = str(cursor.execute("PRAGMA database_list").fetchone()[2])
        cursor.execute("PRAGMA schema_version").fetchone()
        cursor.close()
        if not path:
            return
        if self._known is None:
            self._known = know(path)
        if self._known is not None and (engine := self._engine()) is not None:
            self._known.engines.add(engine)
        found = {each: _identity(each) for each in (f"{path}-wal", f"{path}-shm")}
        record.info[_FILES] = [(each, identity) for each, identity in found.items() if identity is not None]

    def _on_error(self, context: ExceptionContext) -> None:
        """Close every connection of this process to a file that was opened read-only.

        SQLite opens a file that it may not write for reading, and shares what it knows of the log between the
        connections of a process: while one of them is open, none can write, even when the file is writable again.
        """
        if "readonly" in str(context.original_exception):
            context.is_disconnect = True
            if context.execution_context is not None:  # until its cursor is closed, the connection stays open
                context.execution_context.cursor.close()
            for engine in [] if self._known is None else list(self._known.engines):
                engine.dispose()

    def _before_begin(self, conn: Connection) -> None:
        if self._known is not None:
            self._known.check()
        for path, identity in conn.info.get(_FILES, ()):
            _require(path, identity)


def _identity(path: str) -> Identity | None:
    try:
        found = os.stat(path)  # noqa: PTH116 -- faster, and called before every transaction
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
