"""`semel serve` as a command: its processes, signals and log."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from support.waiting import eventually
from support.warm_python import WarmPython, run

PATIENCE = 60.0
HERE = Path(__file__).parents[1]


def environment(**more: str) -> dict[str, str]:
    """The environment of a command: without settings of semel."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONDONTWRITEBYTECODE", "PROMETHEUS_MULTIPROC_DIR")
        and not name.startswith(("SEMEL_", "REPLICATE_"))
    }
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(HERE)]))
    return {**kept, "PYTHONPATH": path, **more}


def command(*arguments: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run `semel` with these arguments, and wait for its end."""
    return run([sys.executable, "-m", "semel.cli", *arguments], cwd=cwd, env=environment(**more), timeout=PATIENCE)


class ServeProcess:
    """A server until the end of the block; checks that it and all of its processes have ended then."""

    def __init__(self, folder: Path, *arguments: str, **more: str) -> None:
        self.folder = folder
        self._arguments = arguments
        self._more = more
        self._said, self._logged = folder / "said.txt", folder / "log.txt"
        self._known: set[int] = set()

    def __enter__(self) -> Self:
        with self._said.open("w") as said, self._logged.open("w") as logged:
            self.process = WarmPython(
                [sys.executable, "-m", "semel.cli", "serve", "--port", "0", *self._arguments],
                cwd=self.folder,
                env=environment(TMPDIR=str(self.folder), **self._more),  # a killed server leaves its files there
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=logged,
                start_new_session=True,
            )
        self.address = eventually(self._address, "the server starts")
        return self

    def _address(self) -> str | None:
        assert self.process.poll() is None, f"it ended: {self.log[-600:]}"
        found = re.search(r"http://\S+", self._said.read_text())
        return found and found[0]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._known |= set(self.children())
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                self.process.wait(5 if kind else PATIENCE)
            if kind is None:
                eventually(lambda: not self.left(), "all its processes have ended")
        finally:
            for pid in [self.process.pid, *self.left()] if self.process.poll() is None else self.left():
                os.kill(pid, signal.SIGKILL)
            self.process.wait()

    @property
    def said(self) -> str:
        return self._said.read_text()

    @property
    def log(self) -> str:
        return self._logged.read_text()

    def lines(self) -> list[dict[str, Any]]:
        """The lines of the log that are JSON."""
        return [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.address, timeout=PATIENCE, verify=False)

    def children(self) -> list[int]:
        """Its running child processes, oldest first."""
        try:
            found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            return []
        self._known |= {int(pid) for pid in found}
        return [int(pid) for pid in found]

    def left(self) -> list[int]:
        """Its processes that are still running."""
        return [pid for pid in self._known if _runs(pid)]

    def stop(self, number: int = signal.SIGTERM, *, group: bool = False) -> None:
        """Send the signal to the server, or to its whole process group, as a terminal does."""
        self.children()
        (os.killpg if group else os.kill)(self.process.pid, number)

    def ended(self) -> int:
        """Wait for its end; returns its exit code."""
        return self.process.wait(PATIENCE)

    def submit(self, model: str, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
        with self.client() as client:
            answer = client.post("/runs", json={"model": model, "parameters": parameters, **more})
        assert answer.status_code == 201, answer.text
        run: dict[str, Any] = answer.json()
        return run

    def run(self, run_id: str) -> dict[str, Any]:
        with self.client() as client:
            run: dict[str, Any] = client.get(f"/runs/{run_id}").json()
        return run

    def becomes(self, run_id: str, *statuses: str) -> dict[str, Any]:
        """The run, once it has one of these statuses."""

        def there() -> dict[str, Any] | None:
            run = self.run(run_id)
            return run if run["status"] in statuses else None

        found: dict[str, Any] = eventually(there, f"run {run_id} becomes {statuses}")
        return found


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
