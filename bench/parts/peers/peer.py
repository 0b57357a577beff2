"""What every peer offers to a benchmark, so that all are measured alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar


class Absent(Exception):
    """This peer cannot run here; the message says why."""


class Peer(ABC):
    """A job queue with jobs that do nothing; its settings are those that its own pages name for speed.

    Drains are timed from the first job's call until every job is recorded as done: what comes before (the process's
    start, its connections, the first fetch) is not counted. Enqueues are timed from the first call to the last
    answer, on connections that are open already. All but `enqueue_from_tasks` block, and are not for a running loop.
    """

    name: ClassVar[str]
    jobs: ClassVar[int]
    """How many jobs make a drain of some seconds."""
    singles: ClassVar[int]
    """How many enqueues, one by one, take some seconds."""
    many: ClassVar[int]
    """How many jobs make a bulk enqueue that can be timed."""
    choices: ClassVar[tuple[Any, ...]] = (None,)
    """Settings whose best depends on the machine; `settle` takes the fastest."""

    def __init__(self) -> None:
        self.choice = self.choices[0]

    @abstractmethod
    def prepare(self, postgres_url: str, redis_url: str) -> None:
        """Set up in these empty databases; raises `Absent` where that cannot be."""

    @abstractmethod
    def enqueue_many(self, count: int) -> float:
        """Enqueue so many jobs in the fastest way for many; seconds."""

    @abstractmethod
    async def enqueue_from_tasks(self, count: int, tasks: int = 64) -> float:
        """Enqueue so many jobs, each with a call of its own, from so many tasks at once; seconds."""

    @abstractmethod
    def drain(self, count: int) -> float:
        """Let one worker run the jobs that wait, of which there are so many; seconds."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every job that waits."""

    def close(self) -> None:  # noqa: B027 - most have nothing open between calls
        """Let go of connections."""

    def settle(self) -> None:
        """Try every choice on small drains, in turn, and keep the one with the fastest of all."""
        if len(self.choices) == 1:
            return
        drains = []
        for _ in range(2):
            for choice in self.choices:
                self.choice = choice
                self.enqueue_many(self.jobs // 5)
                drains.append((self.drain(self.jobs // 5), choice))
        _, self.choice = min(drains)
