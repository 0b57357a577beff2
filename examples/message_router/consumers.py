"""The router's consumers: results, acknowledgements, usage and publications, each acted on once.

A result is known by its ``assignment_id``, or, from old workers, by its ``request_id``. What was seen is skipped and
acknowledged; what failed is left unseen and rejected, so that it is delivered again. Usage has a key of its own,
``usage-<assignment or request>``, so that a result that is processed again is not billed again.
"""

import logging
import threading
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Protocol, TypeAlias

from semel import Once

Message: TypeAlias = Mapping[str, Any]

log = logging.getLogger("message_router")


class Effects(Protocol):
    """What the router does to the world. Processing may be repeated after a failure; usage and publication are not."""

    def process_result(self, result: Message) -> None:
        """Store what came of an assignment."""

    def process_ack(self, ack: Message) -> None:
        """Note that a worker has its assignment, or refuses it."""

    def emit_usage(self, usage_id: str, usage: Message) -> None:
        """Bill the tenant."""

    def publish_assignment(self, assignment: Message) -> None:
        """Send an assignment to a worker."""


class Broker(Protocol):
    """Where messages come from: what is not acknowledged is delivered again."""

    def receive(self) -> Message | None:
        """The next message; None when there is none."""

    def acknowledge(self, message: Message) -> None:
        """It is done with."""

    def reject(self, message: Message) -> None:
        """Deliver it again."""


class Router:
    """Every effect of a message happens once, however often and wherever the message is delivered."""

    def __init__(self, once: Once, effects: Effects) -> None:
        self._once = once
        self._effects = effects
        by = itemgetter
        self._by_assignment = once.consumer("assignment_id", key=by("assignment_id"), data=_result_audit)(self._result)
        self._by_request = once.consumer("request_id", key=by("request_id"), data=_result_audit)(self._result)
        self._by_ack = once.consumer("ack_id", key=by("assignment_id"), data=_ack_audit)(effects.process_ack)
        self._publication = once.consumer("publication", key=by("assignment_id"))(effects.publish_assignment)

    def handle(self, message: Message) -> bool:
        """Do what the message asks; False when that was done before. Either way it may be acknowledged."""
        if message["type"] == "ExecAssignmentAck":
            consumer = self._by_ack
        else:
            consumer = self._by_assignment if message.get("assignment_id") else self._by_request
        return not consumer.call(message).replayed

    def serve(self, broker: Broker) -> None:
        """Consume until there are no messages."""
        while (message := broker.receive()) is not None:
            try:
                new = self.handle(message)
            except Exception:  # it failed, or another consumer is still at it (InProgress): it is unseen so far
                log.exception("a message is rejected")
                broker.reject(message)
            else:
                if not new:
                    log.info("skipped: it was seen before")
                broker.acknowledge(message)

    def publish(self, assignment: Message) -> bool:
        """Send an assignment; False when it was sent before."""
        return not self._publication.call(assignment).replayed

    def emit_usage(self, result: Message) -> None:
        """Bill the tenant. The mark comes first: a usage event that got lost can be found, a double one is charged."""
        usage_id = f"usage-{_name(result)}"
        audit = {name: result[name] for name in ("tenant_id", "provider_id", "status")}
        if self._once.check_and_mark("usage_id", usage_id, audit) == "not_seen":
            self._effects.emit_usage(usage_id, audit)

    def _result(self, result: Message) -> None:
        self._effects.process_result(result)
        self.emit_usage(result)


def supervise(once: Once, effects: Effects, broker: Broker, consumers: int = 4) -> None:
    """Open the cache, then start the consumers, and run until there are no messages.

    A store that cannot be reached is an error here, before any message is taken.
    """
    with once:
        threads = [threading.Thread(target=Router(once, effects).serve, args=(broker,)) for _ in range(consumers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _name(result: Message) -> str:
    return str(result.get("assignment_id") or result["request_id"])


def _result_audit(result: Message) -> dict[str, Any]:
    return {name: result[name] for name in ("status", "job_type", "provider_id")}


def _ack_audit(ack: Message) -> dict[str, Any]:
    return {name: ack[name] for name in ("status", "message")}
