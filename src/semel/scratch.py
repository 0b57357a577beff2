"""Folders for work in progress that do not outlive their process for long, even one that was killed."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

if sys.platform != "win32":  # where what is left stays
    import fcntl

_LOCK = ".lock"
_YOUNG = 60.0
"""Seconds in which a new folder may not have its lock yet."""


@contextmanager
def scratch(kind: str, place: Path | None = None) -> Iterator[Path]:
    """A folder until the end of the block. What killed processes left of the kind is removed first.

    A folder is locked while its process lives, or one that was forked from it.
    """
    root = Path(tempfile.gettempdir()) if place is None else place
    prefix = f"semel-{kind}-"
    for left in root.glob(f"{prefix}*"):
        _remove_if_left(left)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    try:
        with (folder / _LOCK).open("wb") as lock:
            _locked(lock)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_if_left(folder: Path) -> None:
    with suppress(OSError):
        if sys.platform == "win32" or time.time() - folder.stat().st_mtime < _YOUNG:
            return
        with (folder / _LOCK).open("wb") as lock:
            if _locked(lock):
                shutil.rmtree(folder, ignore_errors=True)


def _locked(lock: IO[bytes]) -> bool:
    if sys.platform != "win32":
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True
