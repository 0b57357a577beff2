"""Background work that sleeps until the test says that its time has come."""

import queue
from typing import Any

from acceptance.spaces import Space
from acceptance.together import PATIENCE
from semel import Once
from semel._concurrency.runtime import Signal, ThreadRuntime


class _Sleep:
    """A signal whose waiter tells how long it means to sleep, and sleeps until it is woken."""

    def __init__(self, inner: Signal, asleep: "queue.Queue[float]") -> None:
        self._inner = inner
        self._asleep = asleep

    def set(self) -> None:
        self._inner.set()

    async def wait(self, seconds: float) -> bool:
        self._asleep.put(seconds)
        return await self._inner.wait(PATIENCE)

    def is_current(self) -> bool:
        return self._inner.is_current()


class Pace(ThreadRuntime):
    """Threads in which every pause lasts until ``wake``."""

    def __init__(self) -> None:
        self._asleep: queue.Queue[float] = queue.Queue()
        self._sleeps: list[_Sleep] = []

    def signal(self) -> Signal:
        self._sleeps.append(_Sleep(super().signal(), self._asleep))
        return self._sleeps[-1]

    def pause(self) -> float:
        """How long the background work means to sleep now, after all it did before."""
        return self._asleep.get(timeout=PATIENCE)

    def wake(self) -> None:
        """The time has come."""
        self._sleeps[-1].set()


def paced(space: Space, **options: Any) -> tuple[Once, Pace]:
    """An opened ``Once`` whose background work is paced."""
    pace = Pace()

    class PacedOnce(Once):
        _runtime_class = staticmethod(lambda: pace)  # type: ignore[assignment]  # a ready runtime instead of a class

    return space.open(once_class=PacedOnce, **options), pace
