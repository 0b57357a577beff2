"""Metrics for statsd, through any client: ``Once(url, on_event=StatsdMetrics(client))``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from semel.errors import InvalidRequest
from semel.metrics.names import COUNTED, SAMPLE_EVERY, interval
from semel.once.stats import MOST_SCOPES, Event, Scopes

_INVALID_IN_NAME = re.compile(r"[^A-Za-z0-9_-]+")
_INVALID_IN_TAG = re.compile(r"[^\w./:-]+", re.ASCII)


class StatsdMetrics:
    """A hook that sends events through a client with ``incr`` or ``increment``, ``timing`` and ``gauge``.

    If the client's methods take ``tags=``, as Datadog's do, it gets door, scope, reason, verb and state as tags.
    Otherwise ``by_scope=True`` puts door, scope and reason into the name. Scopes beyond ``most_scopes`` are counted
    together. ``sample_every=None`` turns off the metrics of the store's size.
    """

    def __init__(
        self,
        client: Any,
        sample_every: float | None = SAMPLE_EVERY,
        *,
        by_scope: bool = False,
        most_scopes: int = MOST_SCOPES,
    ) -> None:
        self.sample_every = interval(sample_every)
        self._count = _method(client, "increment", "incr")
        self._timing = _method(client, "timing")
        self._gauge = _method(client, "gauge")
        self._tagged = all(_takes_tags(method) for method in (self._count, self._timing, self._gauge))
        self._by_scope = by_scope
        self._scopes = Scopes(most_scopes)

    def __call__(self, event: Event) -> None:
        """Send the event."""
        match event.name:
            case "cleanup":
                self._send(self._count, "cleanup.count", int(event.value))
            case "store":
                self._send(self._timing, "store", event.value * 1000, verb=event.reason)
            case "held":
                self._send(self._gauge, "keys_held", int(event.value), state=event.reason)
            case name if name in COUNTED:
                place = {"door": event.door, "scope": self._scopes.known(event.label)}
                if event.reason:
                    place["reason"] = event.reason
                if not (self._tagged or self._by_scope):
                    place = {}
                self._send(self._count, COUNTED[name], 1, **place)

    def _send(self, method: Callable[..., object], name: str, value: float, /, **about: str) -> None:
        if self._tagged:
            tags = [f"{tag}:{_INVALID_IN_TAG.sub('_', text)}" for tag, text in about.items()]
            method(f"idempotency.{name}", value, tags=tags)
        else:
            parts = [_INVALID_IN_NAME.sub("_", text) for text in about.values()]
            method(".".join(("idempotency", name, *parts)), value)


def _method(client: object, *names: str) -> Callable[..., object]:
    for name in names:
        method: object = getattr(client, name, None)
        if callable(method):
            return method
    raise InvalidRequest(f"a statsd client must have {' or '.join(names)}(); {type(client).__name__} does not")


def _takes_tags(method: Callable[..., object]) -> bool:
    try:
        return "tags" in inspect.signature(method).parameters
    except (TypeError, ValueError):  # written in C, without a signature
        return False
