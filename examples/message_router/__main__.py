"""Routes messages, one JSON object a line, from standard input:

python examples/message_router < messages.jsonl

Every effect is printed as a line, however often its message comes, in this process or in another on the same store.
"""

import argparse
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from message_router.consumers import Message, supervise
from semel import Once, Policy
from semel.metrics.prometheus import RouterMetrics


class Lines:
    """The messages of a file; a line that was rejected is read again, a few times."""

    def __init__(self, file: IO[str], tries: int = 3) -> None:
        self._lines: Iterator[str] = (line for line in file if line.strip())
        self._again: list[Message] = []
        self._tried: dict[int, int] = {}
        self._tries = tries
        self._lock = threading.Lock()
        self.failed: list[Message] = []

    def receive(self) -> Message | None:
        with self._lock:
            if self._again:
                return self._again.pop()
            line = next(self._lines, None)
            return None if line is None else json.loads(line)

    def acknowledge(self, message: Message) -> None:
        with self._lock:
            self._tried.pop(id(message), None)

    def reject(self, message: Message) -> None:
        with self._lock:
            tried = self._tried[id(message)] = self._tried.get(id(message), 0) + 1
            if tried < self._tries:
                self._again.append(message)
            else:
                self.failed.append(message)


class Printed:
    """Effects that are seen: a line each."""

    def process_result(self, result: Message) -> None:
        _say("result", {name: result[name] for name in ("assignment_id", "request_id", "status") if name in result})

    def process_ack(self, ack: Message) -> None:
        _say("ack", {"assignment_id": ack["assignment_id"], "status": ack["status"]})

    def emit_usage(self, usage_id: str, usage: Message) -> None:
        _say("usage", {"usage_id": usage_id, **usage})

    def publish_assignment(self, assignment: Message) -> None:
        _say("publish", dict(assignment))


def _say(effect: str, told: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"effect": effect, **told}) + "\n")  # one write, so that threads do not mix lines
    sys.stdout.flush()


def main() -> int:
    """Route until the input ends; 1 when a message failed again and again."""
    parser = argparse.ArgumentParser(prog="message_router", description=__doc__.partition("\n")[0])
    parser.add_argument("--store", default="sqlite:///message_router.db", help="the URL of the keys")
    parser.add_argument("--consumers", type=int, default=4, metavar="N")
    parser.add_argument("--idempotency-ttl-seconds", type=float, default=3600.0, metavar="SECONDS")
    parser.add_argument("--metrics", action="store_true", help="print the metrics at the end")
    chosen = parser.parse_args()
    policy = Policy.router(idempotency_ttl_seconds=chosen.idempotency_ttl_seconds)
    once = Once(chosen.store, policy=policy, on_event=RouterMetrics())
    messages = Lines(sys.stdin)
    supervise(once, Printed(), messages, chosen.consumers)
    if chosen.metrics:
        from prometheus_client import generate_latest

        told = generate_latest().decode().splitlines()
        print(*(line for line in told if line.startswith("router_") and "_created" not in line), sep="\n")
    for message in messages.failed:
        print(f"this message failed again and again: {json.dumps(message)}", file=sys.stderr)
    return 1 if messages.failed else 0


if __name__ == "__main__":
    sys.exit(main())
