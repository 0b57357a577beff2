"""What the router of examples/message_router is tested with: messages, a broker, and effects that are noted."""

import queue
from collections.abc import Callable, Iterable

from message_router.consumers import Message

from acceptance.ledger import Ledger


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


class Noted:
    """Effects that are written down, by whatever process."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.trouble: Callable[[str], None] = lambda effect: None
        """Called before a result, an ack or a publication is complete, and after usage was emitted."""

    def process_result(self, result: Message) -> None:
        self.trouble("result")
        self.ledger.note("result", result["assignment_id"] or result["request_id"])

    def process_ack(self, ack: Message) -> None:
        self.trouble("ack")
        self.ledger.note("ack", ack["assignment_id"])

    def emit_usage(self, usage_id: str, usage: Message) -> None:
        self.ledger.note("usage", usage_id)
        self.trouble("usage")

    def publish_assignment(self, assignment: Message) -> None:
        self.trouble("publication")
        self.ledger.note("publication", assignment["assignment_id"])
