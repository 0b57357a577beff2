"""A request's body, hashed while it arrives: in memory if small, in an unnamed temporary file if large."""

from __future__ import annotations

import hashlib
import threading
from contextlib import suppress
from io import BytesIO
from tempfile import TemporaryFile
from typing import IO

CHUNK = 1 << 16


class BodyTooLarge(Exception):
    """The body is larger than what is accepted."""


class SpooledBody:
    """Takes chunks, then returns them from the start.

    If the disk is full, the rest of the body is read and dropped, and :meth:`require_room` raises: a server that
    responds before it has read the whole request resets the connection, and the client may lose the response.
    An event loop uses threads for what touches the disk, and may close the body while a thread still works on it.
    """

    def __init__(self, in_memory: int, limit: int | None = None) -> None:
        self.limit = limit
        self._room = in_memory
        self._parts: list[bytes] = []
        self._file: IO[bytes] | None = None
        self._hash = hashlib.sha256()
        self._lock = threading.Lock()
        self._closed = False
        self._disk_error: OSError | None = None
        self.size = 0

    def spills(self, more: int) -> bool:
        """Whether adding so many bytes writes to the disk."""
        return self.on_disk or self.size + more > self._room

    @property
    def on_disk(self) -> bool:
        return self._file is not None

    def add(self, chunk: bytes) -> None:
        """Add the next chunk."""
        if self.limit is not None and self.size + len(chunk) > self.limit:
            raise BodyTooLarge
        with self._lock:
            spills = self.spills(len(chunk))
            self.size += len(chunk)
            self._hash.update(chunk)
            if not spills:
                self._parts.append(chunk)
            elif not self._closed and self._disk_error is None:
                try:
                    self._spill(chunk)
                except OSError as error:
                    self._disk_error = error
                    self._drop()
        if self._closed:
            self.close()

    def _spill(self, chunk: bytes) -> None:
        if self._file is None:
            self._file = TemporaryFile(prefix="semel-")  # noqa: SIM115 -- it outlives this call; see close()
        for part in (*self._parts, chunk):
            self._file.write(part)
        self._file.flush()
        self._parts.clear()

    def _drop(self) -> None:
        self._parts.clear()
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # what is left in its buffer has no room either
                file.close()

    def require_room(self) -> None:
        """Raise the OSError of a disk that was full."""
        if self._disk_error is not None:
            raise self._disk_error

    @property
    def digest(self) -> bytes:
        """The SHA-256 of the whole body."""
        return self._hash.digest()

    def read(self, at: int, size: int) -> bytes:
        """Up to ``size`` bytes from position ``at``; empty at the end."""
        with self._lock:
            if self._file is None:
                found = b"".join(self._parts)[at : at + size]
            else:
                self._file.seek(at)
                found = self._file.read(size)
        if self._closed:
            self.close()
        return found

    def whole(self) -> bytes:
        """The whole body, in memory."""
        return self.read(0, self.size)

    def file(self) -> IO[bytes]:
        """A file to read the body from."""
        if self._file is None:
            return BytesIO(b"".join(self._parts))
        self._file.seek(0)
        return self._file

    def close(self) -> None:
        """Free the disk: now, or when the thread that writes or reads is done."""
        self._closed = True
        if self._lock.acquire(blocking=False):
            try:
                if self._file is not None:
                    self._file.close()
            finally:
                self._lock.release()
