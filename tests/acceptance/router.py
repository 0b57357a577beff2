"""The router of the message document: consumers of results and acknowledgements, usage emission, publication.

Each effect is noted in a ledger. Messages come from a broker that delivers at least once.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any, TypeAlias

from acceptance.ledger import Ledger
from semel import Once

Message: TypeAlias = Mapping[str, Any]


def exec_result(
    assignment_id: str | None, request_id: str = "r-0", *, status: str = "success", tenant_id: str = "t-1"
) -> Message:
    """A worker says what came of an assignment; old workers know the request only."""
    return {
        "type": "ExecResult",
        "assignment_id": assignment_id,
        "request_id": request_id,
        "status": status,
        "job_type": "text.generate",
        "provider_id": "provider-7",
        "tenant_id": tenant_id,
    }


def exec_ack(assignment_id: str, status: str = "accepted") -> Message:
    """A worker says that it has an assignment."""
    return {"type": "ExecAssignmentAck", "assignment_id": assignment_id, "status": status, "message": "on it"}


class Broker:
    """A queue that delivers at least once: what is not acknowledged comes back."""

    def __init__(self, messages: Iterable[Message] = (), *, copies: int = 1) -> None:
        self._ready: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.delivered: list[Message] = []
        self.acknowledged: list[Message] = []
        for message in messages:
            for _ in range(copies):
                self._ready.put(message)

    def receive(self) -> Message | None:
        """The next message, or None when there is none at the moment."""
        try:
            message = self._ready.get_nowait()
        except queue.Empty:
            return None
        self.delivered.append(message)
        return message

    def acknowledge(self, message: Message) -> None:
        self.acknowledged.append(message)

    def reject(self, message: Message) -> None:
        self._ready.put(message)


class Router:
    """Every effect of a message happens once, however often and wherever it is delivered."""

    def __init__(self, once: Once, ledger: Ledger) -> None:
        self.once = once
        self.ledger = ledger
        self.trouble: Callable[[str], None] = lambda effect: None
        """Called before each effect is complete; a test may make it raise."""
        by = itemgetter
        self._by_assignment = once.consumer("assignment_id", key=by("assignment_id"), data=_result_audit)(self._result)
        self._by_request = once.consumer("request_id", key=by("request_id"), data=_result_audit)(self._result)
        self._by_ack = once.consumer("ack_id", key=by("assignment_id"), data=_ack_audit)(self._ack)
        self._publication = once.consumer("publication", key=by("assignment_id"))(self._send)

    def handle(self, message: Message) -> bool:
        """Do what the message asks; False when that was done before. Either way it may be acknowledged."""
        if message["type"] == "ExecAssignmentAck":
            consumer = self._by_ack
        else:
            consumer = self._by_assignment if message["assignment_id"] else self._by_request
        return not consumer.call(message).replayed

    def serve(self, broker: Broker) -> None:
        """Consume until the queue is empty. A failure rejects the message, so that it comes back."""
        while (message := broker.receive()) is not None:
            try:
                self.handle(message)
            except OSError:
                broker.reject(message)
            else:
                broker.acknowledge(message)

    def publish(self, assignment: Message) -> bool:
        """Send an assignment to its worker; False when it was sent before."""
        return not self._publication.call(assignment).replayed

    def _result(self, message: Message) -> None:
        name = message["assignment_id"] or message["request_id"]
        self.emit_usage(message)
        self.trouble("result")
        self.ledger.note("result", name)

    def _ack(self, message: Message) -> None:
        self.trouble("ack")
        self.ledger.note("ack", message["assignment_id"])

    def emit_usage(self, message: Message) -> None:
        """Bill the tenant. The mark comes first: a usage event that is lost can be found, a double one is charged."""
        usage_id = f"usage-{message['assignment_id'] or message['request_id']}"
        audit = {name: message[name] for name in ("tenant_id", "provider_id", "status")}
        if self.once.check_and_mark("usage_id", usage_id, audit) == "not_seen":
            self.ledger.note("usage", usage_id)

    def _send(self, assignment: Message) -> None:
        self.trouble("publication")
        self.ledger.note("publication", assignment["assignment_id"])


def _result_audit(message: Message) -> dict[str, Any]:
    return {name: message[name] for name in ("status", "job_type", "provider_id")}


def _ack_audit(message: Message) -> dict[str, Any]:
    return {name: message[name] for name in ("status", "message")}


def supervise(once: Once, ledger: Ledger, broker: Broker, consumers: int = 4) -> None:
    """Start the cache, then the consumers, and run until the queue is empty."""
    with once:
        threads = [threading.Thread(target=Router(once, ledger).serve, args=(broker,)) for _ in range(consumers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
