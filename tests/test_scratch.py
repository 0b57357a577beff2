"""Folders for work in progress: gone with their process, whichever way it ended."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from programs import Program
from semel.scratch import scratch

HOLD = """
from pathlib import Path
from semel.scratch import scratch

with scratch("test", Path(place)) as folder:
    (folder / "file").write_text("x")
    tell(str(folder))
    hear()
"""


def aged(folder: Path) -> None:
    """As if it had been made an hour ago."""
    os.utime(folder, (time.time() - 3600,) * 2)


def test_a_folder_is_gone_after_the_block_even_with_an_error(tmp_path: Path) -> None:
    with suppress(ValueError), scratch("test", tmp_path) as folder:
        (folder / "file").write_text("x")
        raise ValueError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_has_is_not(tmp_path: Path) -> None:
    with Program(HOLD, place=str(tmp_path)) as dead, Program(HOLD, place=str(tmp_path)) as alive:
        left, kept = Path(dead.hear()), Path(alive.hear())
        for folder in (left, kept):
            aged(folder)
        assert dead._process.pid is not None
        os.kill(dead._process.pid, signal.SIGKILL)
        dead._process.join()
        with scratch("test", tmp_path) as own:
            assert set(tmp_path.iterdir()) == {kept, own}
        assert (kept / "file").read_text() == "x"
        alive.tell()


def test_a_folder_that_was_just_made_is_left_alone(tmp_path: Path) -> None:
    new, old, other = (tmp_path / name for name in ("semel-test-new", "semel-test-old", "semel-else-old"))
    for folder in (new, old, other):
        folder.mkdir()
    aged(old)
    aged(other)
    with scratch("test", tmp_path) as own:
        assert set(tmp_path.iterdir()) == {new, other, own}
