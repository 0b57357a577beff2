"""What really happened, written down where threads and processes can both write."""

import os
from pathlib import Path


class Ledger:
    """A file with one line for each effect; appending a short line is atomic, whoever writes."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def note(self, what: str, name: str) -> None:
        line = f"{what} {name}\n".encode()
        handle = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)

    def noted(self, what: str) -> list[str]:
        """The names of all effects of this kind, sorted."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return sorted(name for kind, _, name in (line.partition(" ") for line in lines) if kind == what)
