"""Forks: a child must not use locks that the parent's threads held, nor the parent's connections."""

from __future__ import annotations

import os
from typing import Protocol, runtime_checkable
from weakref import WeakSet


class Forkable(Protocol):
    """An object that can start anew in a child process."""

    def after_fork(self) -> None:
        """In the child: forget what belongs to the parent, without closing it for the parent."""


@runtime_checkable
class Quiescent(Protocol):
    """An object that must also be idle at the moment of the fork."""

    def before_fork(self) -> None:
        """In the parent: finish what is under way, and wait."""

    def after_fork_in_parent(self) -> None:
        """In the parent: resume."""


_alive: WeakSet[Forkable] = WeakSet()
_resting: list[Quiescent] = []


def survive_fork(thing: Forkable) -> None:
    """Call ``thing.after_fork()`` in every child that is forked while ``thing`` exists."""
    _alive.add(thing)


def _before() -> None:
    for thing in list(_alive):
        if isinstance(thing, Quiescent):
            thing.before_fork()
            _resting.append(thing)


def _in_parent() -> None:
    while _resting:
        _resting.pop().after_fork_in_parent()


def _in_child() -> None:
    _resting.clear()
    for thing in list(_alive):
        thing.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
