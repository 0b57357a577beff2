"""Communication of a test with an app in another process: the app writes notes, and waits at gates of the test."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = 60
"""Seconds to wait for a note or a gate before the test fails."""


class ProcessPeer:
    """A folder through which a test and an app, in any process, communicate."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def note(self, what: str, key: str | None, **more: Any) -> None:
        """Write a note."""
        line = json.dumps({"what": what, "key": key, "pid": os.getpid(), **more}) + "\n"
        with (self.folder / "journal").open("a") as journal:
            journal.write(line)

    def notes(self, key: str, what: str) -> list[dict[str, Any]]:
        """The notes of this kind about a key."""
        found = [json.loads(line) for line in self._lines() if f'"{key}"' in line]
        return [note for note in found if note["key"] == key and note["what"] == what]

    def keys(self, what: str) -> list[str]:
        """The key of every note of this kind."""
        return [note["key"] for note in map(json.loads, self._lines()) if note["what"] == what]

    def _lines(self) -> list[str]:
        try:
            text = (self.folder / "journal").read_text()
        except FileNotFoundError:
            return []
        return [line for line in text.splitlines() if line.endswith("}")]  # the last line may be incomplete

    def wait_for(self, key: str, what: str, times: int = 1) -> dict[str, Any]:
        """Wait for the note, and return the last one."""
        self._until(lambda: len(self.notes(key, what)) >= times, f"{what} of {key}")
        return self.notes(key, what)[-1]

    def open(self, gate: str) -> None:
        """Open the gate, for current and later waiters."""
        (self.folder / f"gate {gate}").touch()

    def wait_at(self, gate: str) -> None:
        """Wait until the gate is open."""
        self._until(lambda: self.is_open(gate), f"gate {gate}")

    def is_open(self, gate: str) -> bool:
        """Whether the gate is open."""
        return (self.folder / f"gate {gate}").exists()

    @staticmethod
    def _until(reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not reached():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody came: {what}")
            time.sleep(0.003)  # the other side is another process
