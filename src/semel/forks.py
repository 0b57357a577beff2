"""What must not be shared with a forked child: locks that a vanished thread held, and the parent's connections."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Forkable(Protocol):
    """Something that knows how to start anew in a child process."""

    def after_fork(self) -> None:
        """Forget what belongs to the parent, without closing it there."""


_alive: WeakSet[Forkable] = WeakSet()


def survive_fork(thing: Forkable) -> None:
    """Call ``thing.after_fork()`` in every child forked while it is alive."""
    _alive.add(thing)


def _in_child() -> None:
    for thing in list(_alive):
        thing.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
