"""Hooks for what happens to runs in this process: metrics, logs, dashboards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, TypeAlias

from msgspec import Struct

_log = logging.getLogger("semel.runs")


class RunEvent(Struct, frozen=True):
    """Something that happened to runs in this process.

    ``seconds`` is the queue lag of a run that started, from the moment it was due, or the duration of the last attempt
    of a run that ended or is retried; else 0. ``count`` is the number of runs.
    """

    kind: Literal["created", "replayed", "refused", "started", "ended", "retried", "stuck"]
    model: str = ""
    status: str = ""
    seconds: float = 0.0
    count: int = 1


Hook: TypeAlias = Callable[[RunEvent], None]


class EventHooks:
    """Calls every hook. An error in a hook is logged and does not stop the others."""

    def __init__(self) -> None:
        self._hooks: list[Hook] = []

    def add(self, hook: Hook) -> None:
        """Call ``hook`` from now on, in the thread in which an event happens. Adding it again changes nothing."""
        if hook not in self._hooks:
            self._hooks.append(hook)

    def emit(self, event: RunEvent) -> None:
        """Call every hook with the event."""
        for hook in self._hooks:
            try:
                hook(event)
            except Exception:  # noqa: BLE001 -- the user's code
                _log.exception("a hook for run events failed")

    @property
    def has_hooks(self) -> bool:
        """Whether there are any hooks: without one, no event need be made."""
        return bool(self._hooks)
