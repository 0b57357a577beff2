"""Starts a real ``semel serve`` with the models of ``served_app`` on SQLite."""

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from golden.commands import PATIENCE, environment, semel

OPTIONS = ("--port", "0", "--worker-processes", "1", "--max-body", "4096", "--private-webhooks", "--drain", "1")


class Server(NamedTuple):
    """A server that answers."""

    address: str
    url: str
    folder: Path


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """The server while the block lasts; its database and its files are in the folder."""
    url = f"sqlite:///{folder / 'semel.db'}"
    said, logged = folder / "said.txt", folder / "log.txt"
    with said.open("w") as out, logged.open("w") as err:
        process = subprocess.Popen(
            [semel(), "serve", "served_app:app", *OPTIONS],
            cwd=folder,
            env=environment(SEMEL_DB=url, TMPDIR=str(folder)),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
    try:
        yield Server(_address(process, said, logged), url, folder)
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], said: Path, logged: Path) -> str:
    deadline = time.monotonic() + PATIENCE
    while True:
        if found := re.search(r"http://[\w.:]+", said.read_text()):
            return found[0]
        assert process.poll() is None, f"the server ended: {logged.read_text()[-1000:]}"
        assert time.monotonic() < deadline, "the server did not start in time"
        time.sleep(0.02)  # the server says its address when it listens
