"""How a test and an app in another process talk: the app notes what it does, and waits at gates that the test opens."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = 60
"""Seconds after which a note that does not come counts as never coming."""


class ProcessPeer:
    """A folder in which an app, in whichever process, and its test leave word for each other."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def note(self, what: str, key: str | None, **more: Any) -> None:
        """Say what happened."""
        line = json.dumps({"what": what, "key": key, "pid": os.getpid(), **more}) + "\n"
        with (self.folder / "journal").open("a") as journal:
            journal.write(line)

    def notes(self, key: str, what: str) -> list[dict[str, Any]]:
        """What was noted of a key."""
        found = [json.loads(line) for line in self._lines() if f'"{key}"' in line]
        return [note for note in found if note["key"] == key and note["what"] == what]

    def keys(self, what: str) -> list[str]:
        """The key of every such note."""
        return [note["key"] for note in map(json.loads, self._lines()) if note["what"] == what]

    def _lines(self) -> list[str]:
        try:
            text = (self.folder / "journal").read_text()
        except FileNotFoundError:
            return []
        return [line for line in text.splitlines() if line.endswith("}")]  # the last may be on its way

    def wait_for(self, key: str, what: str, times: int = 1) -> dict[str, Any]:
        """The note, when it is there."""
        self._until(lambda: len(self.notes(key, what)) >= times, f"{what} of {key}")
        return self.notes(key, what)[-1]

    def open(self, gate: str) -> None:
        """Let pass whoever waits there, now and later."""
        (self.folder / f"gate {gate}").touch()

    def wait_at(self, gate: str) -> None:
        """Wait until it is opened."""
        self._until(lambda: self.is_open(gate), f"gate {gate}")

    def is_open(self, gate: str) -> bool:
        """Whether it was opened."""
        return (self.folder / f"gate {gate}").exists()

    @staticmethod
    def _until(reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not reached():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody came: {what}")
            time.sleep(0.003)  # the other side is another process
