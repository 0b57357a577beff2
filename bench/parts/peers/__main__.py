"""Measure the peers: `PYTHONPATH=tests:bench/parts .venv/bin/python -P -m peers [name…]`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import ExitStack
from statistics import median

from peers import PEERS, Absent, Peer, opened
from support import servers


def rates(peer: Peer) -> tuple[float, float, float]:
    """Jobs per second: drained, enqueued one by one from 64 tasks, enqueued in bulk."""
    peer.enqueue_many(peer.jobs)
    drained = peer.jobs / peer.drain(peer.jobs)
    singly = peer.singles / asyncio.run(peer.enqueue_from_tasks(peer.singles))
    peer.clear()
    many = peer.many / peer.enqueue_many(peer.many)
    peer.clear()
    return drained, singly, many


def shown(figures: tuple[float, ...]) -> str:
    return f"{median(figures):,.0f} ({min(figures):,.0f} to {max(figures):,.0f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", nargs="*", help=f"{', '.join(PEERS)}; all without it")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    if unknown := set(asked.peer) - set(PEERS):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}")
    print(
        "| peer | settings | drained/s | enqueued one by one/s | enqueued in bulk/s |\n|---|---|---|---|---|",
        flush=True,
    )
    with ExitStack() as stack:
        postgres = stack.enter_context(servers.postgres(durable=True))
        redis = stack.enter_context(servers.redis())
        for name in asked.peer or PEERS:
            print(row(name, postgres, redis, asked.rounds), flush=True)
    return 0


def row(name: str, postgres: servers.Postgres, redis: servers.Redis, rounds: int) -> str:
    try:
        with opened(name, postgres, redis) as peer:
            columns = zip(*(rates(peer) for _ in range(rounds)), strict=True)
            chosen = "" if peer.choice is None else peer.choice
            return f"| {peer.name} | {chosen} | {' | '.join(shown(column) for column in columns)} |"
    except Absent as reason:
        return f"| {name} | absent: {reason} | | | |"


if __name__ == "__main__":
    sys.exit(main())
