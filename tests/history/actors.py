"""What the processes do whose histories are judged: they work on keys, with short leases, and record it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from history.requests import claim_request, complete_request, forget_request, release_request, renew_request
from semel._concurrency.sync import run_sync
from semel.errors import StoreUnavailable
from semel.once.store import Clock, KeyRef, Store
from semel.once.stores import open_store
from semel.testing.history import RecordedStore, Recorder
from semel.types import Claim, Granted, Record, Replay

LEASE = 0.12
"""Seconds: short, so that many owners lose their key in little time."""
TTL = 60.0
SCOPE = "history"


class Actor:
    """Works on keys through a recorded store, and records its effects in files of their own."""

    def __init__(self, store: Store, folder: Path, name: str, *, clock: Clock | None = None) -> None:
        self.store = RecordedStore(store, Recorder(folder, name, clock=clock))
        self.effects = Recorder(folder / "effects", name, clock=clock)
        self.name = name

    @classmethod
    def on(cls, url: str, folder: str | Path, name: str) -> Actor:
        """A process's own actor on a store that several share."""
        return cls(open_store(url, is_async=False, retry_for=1.0), Path(folder), name)

    def take(self, key: str, *, lease: float = LEASE, ttl: float = TTL) -> Claim | Replay | None:
        """Claim the key; if the answer is lost, ask once more with the same attempt."""
        request = claim_request(key, scope=SCOPE, lease=lease, ttl=ttl)
        try:
            (verdict,) = run_sync(self.store.claim([request]))
        except StoreUnavailable:
            (verdict,) = run_sync(self.store.claim([request]))
        if isinstance(verdict, Replay):
            return verdict
        if not isinstance(verdict, Granted):
            return None
        self.effects.effect("key", (SCOPE, key), verdict.claim.fence)
        return verdict.claim

    def wait_for(self, key: str) -> Claim:
        """Claim the key until it is granted: its owner has died or sleeps."""
        while True:
            with suppress(StoreUnavailable):
                claim = self.take(key)
                if isinstance(claim, Claim):
                    return claim
            time.sleep(0.01)  # until the lease of the owner ends, on the store's own clock

    def get(self, key: str) -> Record | None:
        (record,) = run_sync(self.store.get([KeyRef(SCOPE, key)]))
        return record

    def complete(self, claim: Claim, value: Any) -> bool:
        (accepted,) = run_sync(self.store.complete([complete_request(claim, value)]))
        return accepted

    def release(self, claim: Claim) -> bool:
        (accepted,) = run_sync(self.store.release([release_request(claim)]))
        return accepted

    def renew(self, claim: Claim, lease: float = LEASE) -> bool:
        (until,) = run_sync(self.store.renew([renew_request(claim, lease)]))
        return until is not None

    def forget(self, claim: Claim, *, force: bool = False) -> bool:
        (accepted,) = run_sync(self.store.forget([forget_request(claim, force=force)]))
        return accepted

    def close(self) -> None:
        run_sync(self.store.close())


def wander(actor: Actor, seed: object, stopped: Callable[[], bool]) -> int:
    """Work on keys at random until the end; the keys change with the time, so that all meet at the same ones."""
    chance = random.Random(f"{seed} {actor.name}")
    rounds = 0
    while rounds == 0 or not stopped():
        rounds += 1
        with suppress(StoreUnavailable):
            once(actor, chance, f"{int(time.monotonic() / (3 * LEASE))}")
        time.sleep(chance.uniform(0, 0.01))  # else the fastest process leaves nothing to the others
    return rounds


def once(actor: Actor, chance: random.Random, key: str) -> None:
    """Claim, and do what an owner may do."""
    claim = actor.take(key)
    if not isinstance(claim, Claim):
        actor.get(key)
        return
    match chance.choice(["complete", "release", "renew", "vanish", "late"]):
        case "complete":
            actor.complete(claim, actor.name)
        case "release":
            actor.release(claim)
        case "renew":
            actor.renew(claim)
            actor.complete(claim, actor.name)
        case "late":
            time.sleep(chance.uniform(0, 2 * LEASE))  # it may lose its lease meanwhile
            actor.complete(claim, actor.name)
