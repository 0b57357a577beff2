"""A request's body, hashed while it arrives: small ones stay in memory, large ones go to a file without a name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from io import BytesIO
from tempfile import TemporaryFile
from typing import IO

CHUNK = 1 << 16


class Body:
    """Takes chunks, then gives them back from the start."""

    def __init__(self, in_memory: int) -> None:
        self._room = in_memory
        self._parts: list[bytes] = []
        self._file: IO[bytes] | None = None
        self._hash = hashlib.sha256()
        self.size = 0

    def add(self, chunk: bytes) -> None:
        """Take the next chunk; OSError when it belongs on a disk that is full."""
        self.size += len(chunk)
        self._hash.update(chunk)
        if self._file is not None:
            self._file.write(chunk)
            self._file.flush()
        elif self.size <= self._room:
            self._parts.append(chunk)
        else:
            self._file = TemporaryFile(prefix="semel-")  # noqa: SIM115 -- it outlives this call; see close()
            for part in (*self._parts, chunk):
                self._file.write(part)
            self._file.flush()
            self._parts.clear()

    @property
    def digest(self) -> bytes:
        """SHA-256 of all of it."""
        return self._hash.digest()

    def whole(self) -> bytes:
        """All of it, in memory."""
        return b"".join(self.chunks())

    def chunks(self) -> Iterator[bytes]:
        """From the start, in pieces."""
        if self._file is None:
            yield b"".join(self._parts)
            return
        self._file.seek(0)
        while chunk := self._file.read(CHUNK):
            yield chunk

    def file(self) -> IO[bytes]:
        """As a file to read from."""
        if self._file is None:
            return BytesIO(b"".join(self._parts))
        self._file.seek(0)
        return self._file

    def close(self) -> None:
        """Give the disk back."""
        if self._file is not None:
            self._file.close()
