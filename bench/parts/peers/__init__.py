"""Comparable systems, measured on the same machine and the same servers as semel, with jobs that do nothing.

    with opened("procrastinate", postgres, redis) as peer:  # servers of tests/support/servers.py
        seconds = peer.enqueue_many(peer.jobs)
        seconds = peer.drain(peer.jobs)
        seconds = await peer.enqueue_from_tasks(peer.singles)
        peer.clear()

`python -m peers` measures them all and prints a table. peer.py describes what is timed; each peer's settings are in its
own file.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peers.peer import Absent, Peer

__all__ = ["PEERS", "Absent", "Peer", "opened"]

PEERS = {
    "pgqueuer": "peers.pgqueuer:Pgqueuer",
    "graphile": "peers.graphile_worker:GraphileWorker",
    "procrastinate": "peers.procrastinate:Procrastinate",
    "dbos": "peers.dbos:Dbos",
    "celery": "peers.celery:Celery",
    "rq": "peers.rq:SimpleRq",
    "rq-forking": "peers.rq:ForkingRq",
}


@contextmanager
def opened(name: str, postgres: Any, redis: Any) -> Iterator[Peer]:
    """The peer, set up and settled in databases of its own on these servers, which are empty or dropped afterwards.

    Raises `Absent` if it cannot run here.
    """
    peer = found(name)
    url = postgres.database()
    try:
        peer.prepare(url, redis.database())
        try:
            peer.settle()
            yield peer
        finally:
            peer.close()
    finally:
        postgres.drop(url)


def found(name: str) -> Peer:
    module, _, kind = PEERS[name].partition(":")
    try:
        peer: Peer = getattr(importlib.import_module(module), kind)()
    except ModuleNotFoundError as error:
        raise Absent(f"{error.name} is not installed") from None
    return peer
