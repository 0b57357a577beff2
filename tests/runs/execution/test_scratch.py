"""Folders for work in progress: gone with their process, whichever way it ended."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from semel.runs.execution.scratch import scratch
from support.programs import Program

HOLD = """
from pathlib import Path
from semel.runs.execution.scratch import scratch

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


NOBODY = 65534


def baited(place: Path, owner: int) -> tuple[Path, Path]:
    """An old folder of that user whose lock is a link to a file of ours."""
    victim = place / "victim"
    victim.write_text("precious")
    bait = place / "semel-test-bait"
    bait.mkdir()
    (bait / ".lock").symlink_to(victim)
    (bait / "link").symlink_to(place / "kept", target_is_directory=True)
    (place / "kept").mkdir()
    (place / "kept" / "file").write_text("precious")
    os.chown(bait, owner, -1)
    aged(bait)
    return victim, bait


def test_links_in_a_left_folder_are_not_followed(tmp_path: Path) -> None:
    victim, bait = baited(tmp_path, os.geteuid())
    with scratch("test", tmp_path):
        assert not bait.exists()
    assert victim.read_text() == "precious"
    assert (tmp_path / "kept" / "file").read_text() == "precious"


def test_the_folder_of_another_user_is_left_alone(tmp_path: Path) -> None:
    """Only root can make one; for others it is a folder that others may write to, which is never taken for ours."""
    victim, bait = baited(tmp_path, NOBODY if os.geteuid() == 0 else os.geteuid())
    if os.geteuid() != 0:
        bait.chmod(0o777)
    with scratch("test", tmp_path):
        assert bait.exists()
    assert victim.read_text() == "precious"


def test_a_link_to_a_folder_is_not_taken_for_one_that_was_left(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    (target / "file").write_text("precious")
    link = tmp_path / "semel-test-link"
    link.symlink_to(target, target_is_directory=True)
    aged(target)
    with scratch("test", tmp_path):
        assert link.is_symlink()
    assert (target / "file").read_text() == "precious"


def test_nobody_else_may_enter_a_folder(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with scratch("test", tmp_path) as folder:
            assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(old)
