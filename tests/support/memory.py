"""Keeps the tests' files in memory, where there is enough of it.

They are many and small: to copy a database of PostgreSQL, for instance, takes 220 ms on a disk, and 17 in memory.
Nothing that is tested depends on the difference: no test cuts the power.
"""

import os
import shutil
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path

MEMORY = Path("/dev/shm")
NEEDED = 4 << 30
"""More than the files of one run of all tests."""

AFTER_MULTIPROCESSING = -200
"""It removes files of its own with priority -100."""


def keep_files_in_memory() -> None:
    """Let temporary files be made in memory until this process ends, also by all processes that it starts."""
    if "TMPDIR" in os.environ or not os.access(MEMORY, os.W_OK) or _available() < NEEDED:
        return
    _remove_left_behind()
    folder = MEMORY / f"semel-{os.getpid()}"  # short, for the paths of Unix sockets in it
    folder.mkdir()
    folder.chmod(0o755)  # PostgreSQL runs as another user
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=AFTER_MULTIPROCESSING)


def _remove_left_behind() -> None:
    """Remove the files of runs that were killed."""
    for folder in MEMORY.glob("semel-*"):
        owner = folder.name.removeprefix("semel-")
        if owner == str(os.getpid()) or (owner.isdecimal() and not Path(f"/proc/{owner}").exists()):
            shutil.rmtree(folder, ignore_errors=True)


def _available() -> int:
    """Bytes that may be used: of the file system, and of half of the memory that is free."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (memory,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min(shutil.disk_usage(MEMORY).free, memory // 2)
