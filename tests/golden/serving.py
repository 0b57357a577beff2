"""Starts a real ``semel serve`` with the models of ``served_app`` on SQLite."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from golden.commands import HERE
from support.serve_command import ServeProcess

OPTIONS = ("--worker-processes", "1", "--max-body", "4096", "--private-webhooks", "--drain", "1")


class Server(NamedTuple):
    """A server that answers."""

    address: str
    url: str
    folder: Path


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """The server while the block lasts; its database and its files are in the folder."""
    url = f"sqlite:///{folder / 'semel.db'}"
    with ServeProcess(folder, "served_app:app", *OPTIONS, SEMEL_DB=url, PYTHONPATH=str(HERE), TZ="UTC") as server:
        yield Server(server.address, url, folder)
