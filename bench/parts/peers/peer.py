"""The interface of all peers, so that they are measured in the same way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar


class Absent(Exception):
    """The peer cannot run here; the message has the reason."""


class Peer(ABC):
    """A job queue with jobs that do nothing; its settings are those that its documentation recommends for speed.

    Drains are timed from the call of the first job until every job is recorded as done: what precedes it (the start of
    the process, its connections, the first fetch) is not counted. Enqueues are timed from the first call to the last
    response, on open connections. All but `enqueue_from_tasks` block, and must not be called in a running event loop.
    """

    name: ClassVar[str]
    jobs: ClassVar[int]
    """The number of jobs for a drain of some seconds."""
    singles: ClassVar[int]
    """The number of single enqueues that take some seconds."""
    many: ClassVar[int]
    """The number of jobs for a bulk enqueue that is long enough to be timed."""
    choices: ClassVar[tuple[Any, ...]] = (None,)
    """Alternative settings, the best of which depends on the machine; `settle` chooses the fastest."""

    def __init__(self) -> None:
        self.choice = self.choices[0]

    @abstractmethod
    def prepare(self, postgres_url: str, redis_url: str) -> None:
        """Set up in these empty databases; raises `Absent` if that is impossible."""

    @abstractmethod
    def enqueue_many(self, count: int) -> float:
        """Enqueue ``count`` jobs in the fastest way, in bulk; returns the seconds."""

    @abstractmethod
    async def enqueue_from_tasks(self, count: int, tasks: int = 64) -> float:
        """Enqueue ``count`` jobs, each with its own call, from ``tasks`` concurrent tasks; returns the seconds."""

    @abstractmethod
    def drain(self, count: int) -> float:
        """Run the ``count`` waiting jobs with one worker; returns the seconds."""

    @abstractmethod
    def clear(self) -> None:
        """Delete all waiting jobs."""

    def close(self) -> None:  # noqa: B027 - most have nothing open between calls
        """Close connections."""

    def settle(self) -> None:
        """Try every choice on small drains, in turn, and keep that of the fastest drain."""
        if len(self.choices) == 1:
            return
        drains = []
        for _ in range(2):
            for choice in self.choices:
                self.choice = choice
                self.enqueue_many(self.jobs // 5)
                drains.append((self.drain(self.jobs // 5), choice))
        _, self.choice = min(drains)
