"""Pack a folder as a reproducible tar.gz: names in order, no times, no owners.

It is streamed in chunks. Links that lead out of the folder are refused.
"""

from __future__ import annotations

import errno
import gzip
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from msgspec import Struct

from semel.errors import ResultStoreError, SemelError

CHUNK = 1 << 20
_PERMANENT = frozenset({errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})


class CannotPack(SemelError):
    """The folder cannot be packed, and a retry will not help."""


class Packed(Struct, frozen=True):
    """An archive: its SHA-256 in hex, and its size in bytes."""

    digest: str
    size: int


class Item(Struct, frozen=True):
    """An entry of the folder; ``name`` is its relative path."""

    name: str
    path: Path
    kind: str
    size: int = 0
    executable: bool = False
    target: str = ""


def pack(folder: Path, target: Path, on_progress: Callable[[int, int], None]) -> Packed:
    """Write the folder as a tar.gz. ``on_progress`` gets the bytes packed so far and in total, and may raise."""
    try:
        items = list(_walk(folder.resolve(), folder.resolve()))
    except OSError as error:
        raise _classify(error, folder, folder) from error
    total = sum(item.size for item in items)
    count = _Count(total, on_progress)
    with target.open("xb") as file:
        digesting = _Digesting(file)
        with (
            gzip.GzipFile("", "wb", 1, digesting, mtime=0) as zipped,
            tarfile.open(fileobj=zipped, mode="w|", format=tarfile.PAX_FORMAT, bufsize=CHUNK) as archive,
        ):
            for item in items:
                _add(archive, item, count, folder)
        file.flush()
    return Packed(digesting.digest, digesting.size)


def _walk(root: Path, folder: Path) -> Iterator[Item]:
    if not folder.is_dir():
        raise CannotPack("the data does not exist or is not a folder")
    for entry in sorted(os.scandir(folder), key=lambda entry: os.fsencode(entry.name)):
        path = Path(entry.path)
        name = path.relative_to(root).as_posix()
        if entry.is_symlink():
            yield Item(name, path, "link", target=_inside(root, path, name))
        elif entry.is_dir(follow_symlinks=False):
            yield Item(name, path, "folder")
            yield from _walk(root, path)
        elif entry.is_file(follow_symlinks=False):
            status = entry.stat(follow_symlinks=False)
            yield Item(name, path, "file", size=status.st_size, executable=bool(status.st_mode & stat.S_IXUSR))
        else:
            raise CannotPack(f"{name!r} is neither a file nor a folder")


def _inside(root: Path, link: Path, name: str) -> str:
    """The target of a link, relative to the link's folder; refused if it is outside of what is packed."""
    try:
        link.stat()
    except OSError as error:  # a link to what is not there is packed as it is
        if error.errno == errno.ELOOP:
            raise CannotPack(f"the link {name!r} is part of a loop") from error
    aim = link.resolve()
    if not aim.is_relative_to(root):
        raise CannotPack(f"the link {name!r} points outside the folder")
    return os.path.relpath(aim, link.parent)


def _add(archive: tarfile.TarFile, item: Item, count: _Count, folder: Path) -> None:
    entry = tarfile.TarInfo(item.name)
    entry.mode = 0o755 if item.executable or item.kind == "folder" else 0o644
    if item.kind == "file":
        entry.size = item.size
        try:
            with _opened(item.path) as file:
                archive.addfile(entry, _Counting(file, count))
                _require_end(file)
        except OSError as error:
            raise _classify(error, item.path, folder) from error
        return
    entry.type = tarfile.DIRTYPE if item.kind == "folder" else tarfile.SYMTYPE
    entry.linkname = item.target
    archive.addfile(entry)


def _opened(path: Path) -> IO[bytes]:
    """Open the file; fails if it has become a link or a pipe meanwhile."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EAGAIN, "it was replaced while it was packed")
    return os.fdopen(handle, "rb")


def _require_end(file: IO[bytes]) -> None:
    if file.read(1):
        raise OSError(errno.EAGAIN, "it grew while it was packed")


def _classify(error: OSError, path: Path, folder: Path) -> Exception:
    """A permanent or a transient error, whose message names no folder of the server."""
    name = path.name if path == folder else path.resolve().name
    message = f"{name!r} cannot be read: {error.strerror or error}"
    return CannotPack(message) if error.errno in _PERMANENT else OSError(error.errno, message)


class _Count:
    """Counts the packed bytes."""

    def __init__(self, total: int, on_progress: Callable[[int, int], None]) -> None:
        self._total = total
        self._on_progress = on_progress
        self._packed = 0
        on_progress(0, total)

    def add(self, size: int) -> None:
        self._packed += size
        self._on_progress(self._packed, self._total)


class _Counting:
    """A file whose reads are counted."""

    def __init__(self, file: IO[bytes], count: _Count) -> None:
        self._file = file
        self._count = count

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._count.add(len(data))
        return data


class _Digesting:
    """A file that computes its digest while it is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sum = sha256()
        self.size = 0

    def write(self, data: Any) -> int:
        self._sum.update(data)
        self.size += len(data)
        try:
            return self._file.write(data)
        except OSError as error:
            raise ResultStoreError(f"there is no space to pack the data: {error.strerror}") from error

    def flush(self) -> None:
        self._file.flush()

    @property
    def digest(self) -> str:
        return self._sum.hexdigest()
