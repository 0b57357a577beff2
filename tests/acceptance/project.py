"""A project in a git repository of its own, with models, and workers of it in processes."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import semel
from semel import App

PATIENCE = 60
MODULE = '''\
"""Models of a project."""

import asyncio
import os
import random
import time
from pathlib import Path

import semel

app = semel.App(os.environ["SEMEL_DB"], artifacts=os.environ["SEMEL_ARTIFACTS"])
RATE = 2


@app.model("forecast", lease=2, seeded=SEEDED)
def forecast(ctx, x: float, folder: str = "") -> dict:
    """Multiply; in a folder, wait there until the file ``open`` exists, from the second attempt on not."""
    if folder and ctx.attempt == 1:
        (Path(folder) / "begun").touch()
        while not (Path(folder) / "open").exists():
            time.sleep(0.01)
    return {"y": x * RATE, "seed": ctx.seed, "chance": random.random()}


@app.model("forecast_async")
async def forecast_async(ctx, x: float) -> float:
    return x * RATE


@app.model("forecast_thread", isolation="thread")
def forecast_thread(ctx, x: float) -> float:
    return x * RATE
'''


class Project:
    """A folder with a committed module ``forecasts``, and the database of its runs."""

    def __init__(self, folder: Path, url: str, stack: ExitStack) -> None:
        self.folder = folder
        self.url = url
        self.artifacts = folder.parent / "artifacts"
        self._stack = stack
        folder.mkdir()
        self.module = folder / "forecasts.py"
        self.module.write_text(MODULE.replace("SEEDED", "True"))
        (folder / ".gitignore").write_text("__pycache__/\n.env\n")
        self.git("init", "-q", "-b", "trunk")
        self.commit("Begin")
        self.app = self.open()

    def open(self) -> App:
        """An app on the database, which can submit the project's models and does not work on them."""
        app = App(self.url, artifacts=self.artifacts)
        self._stack.callback(app.close)
        app.model("forecast", lease=2)(forecast)
        app.model("forecast_async")(forecast_async)
        app.model("forecast_thread", isolation="thread")(forecast_thread)
        return app

    def git(self, *arguments: str) -> str:
        """What git prints."""
        name = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", "-C", str(self.folder), *name, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, why: str) -> str:
        """Commit everything; returns the commit."""
        self.git("add", "-A")
        self.git("commit", "-q", "-m", why)
        return self.git("rev-parse", "HEAD")

    def edit(self, before: str, after: str) -> None:
        """Change the module."""
        text = self.module.read_text()
        assert before in text
        self.module.write_text(text.replace(before, after))

    @contextmanager
    def worker(self, program: str = "worker", **environ: str) -> Iterator[subprocess.Popen[bytes]]:
        """A worker of the project in a process of its own, until the end of the block."""
        log = self.folder.parent / f"worker-{time.monotonic_ns()}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "semel.cli", program, "forecasts:app", "--processes", "1"],
                cwd=self.folder,
                env={**os.environ, "SEMEL_DB": self.url, "SEMEL_ARTIFACTS": str(self.artifacts), **environ},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE)
            finally:
                process.kill()
                process.wait()

    def run(self, model: str = "forecast", parameters: dict[str, Any] | None = None, **options: Any) -> semel.Run:
        """Submit a run and wait for its end."""
        run = self.app.submit(model, parameters or {"x": 2.0}, **{"dedupe": False, **options})
        ended = self.app.wait(run.id, timeout=PATIENCE)
        assert ended.status == "SUCCEEDED", ended
        return ended


def forecast(x: float, folder: str = "") -> dict[str, float]:
    raise AssertionError("the workers have the model")


async def forecast_async(x: float) -> float:
    raise AssertionError("the workers have the model")


def forecast_thread(x: float) -> float:
    raise AssertionError("the workers have the model")


def wait_for(file: Path) -> None:
    """Wait until a model has made the file."""
    deadline = time.monotonic() + PATIENCE
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # the model is in another process
