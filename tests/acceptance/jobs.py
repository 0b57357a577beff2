"""What the eight processes do."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from message_router.consumers import Message, Router

from acceptance.ledger import Ledger
from acceptance.router import Noted
from acceptance.together import PATIENCE
from semel import IdempotentProcessor, Once, Policy

_barrier: threading.Barrier


def prepare(barrier: threading.Barrier) -> None:
    """Called once in every new process."""
    global _barrier  # noqa: PLW0603 -- how a process of the pool gets what cannot be sent with a job
    _barrier = barrier


def together() -> None:
    """Wait until all eight are here."""
    _barrier.wait(PATIENCE)


def mark(url: str, key_type: str, message_ids: Sequence[str]) -> list[str]:
    """Mark the messages; answer those that were not seen."""
    with Once(url) as once:
        together()
        return [name for name in message_ids if once.check_and_mark(key_type, name) == "not_seen"]


def consume(url: str, ledger: Path, messages: Sequence[Message]) -> int:
    """Handle the messages as one of the router's consumers; answer how many were new to all of them."""
    with Once(url, policy=Policy.router()) as once:
        router = Router(once, Noted(Ledger(ledger)))
        together()
        return sum(router.handle(message) for message in messages)


def process(url: str, ledger: Path, payloads: Sequence[Any]) -> list[tuple[Any, bool]]:
    """Process the payloads; answer each result and whether it was a replay."""

    def price(payload: Any) -> Any:
        Ledger(ledger).note("priced", payload["company"])
        return {"price": payload["revenue"] * 2}

    with Once(url) as once:
        processor = IdempotentProcessor(price, once, scope="pricing")
        together()
        return [(record.result, record.was_replay) for record in map(processor.process, payloads)]
