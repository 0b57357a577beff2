"""Temporary folders that do not outlive their process for long, even if it was killed.

They are where every user of the machine may write. So a folder's name cannot be guessed, only its owner may enter it,
and a folder with such a name is checked through a handle: no link is followed, and nothing in it is opened or written
before the handle shows that the folder is this user's own.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if sys.platform != "win32":  # on Windows, folders of killed processes stay
    import fcntl

_YOUNG = 60.0
"""Seconds for which a new folder may not be locked yet."""


@contextmanager
def scratch(kind: str, place: Path | None = None) -> Iterator[Path]:
    """A folder until the end of the block. Folders of the kind that killed processes left are removed first.

    A folder is locked while its process lives, or one that was forked from it.
    """
    root = Path(tempfile.gettempdir()) if place is None else place
    prefix = f"semel-{kind}-"
    if sys.platform != "win32":
        for left in root.glob(f"{prefix}*"):
            with suppress(OSError):
                _remove_if_left(left)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))  # 0700, whatever the umask is
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if sys.platform == "win32":

    @contextmanager
    def _locked(folder: Path) -> Iterator[None]:  # noqa: ARG001 -- folders have no handles there
        yield

else:

    @contextmanager
    def _locked(folder: Path) -> Iterator[None]:
        handle = _opened(folder)
        try:
            with suppress(OSError):  # a file system without locks: no other process gets one, either
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(handle)

    def _opened(folder: Path) -> int:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def _remove_if_left(folder: Path) -> None:
        handle = _opened(folder)
        try:
            if _is_ours_and_old(os.fstat(handle)):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)  # it follows no link, either
        finally:
            os.close(handle)

    def _is_ours_and_old(found: os.stat_result) -> bool:
        ours = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return ours and time.time() - found.st_mtime >= _YOUNG
