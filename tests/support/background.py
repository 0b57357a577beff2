"""Background tasks that run only when the test calls them."""

from semel._concurrency.runtime import Body, Signal, ThreadRuntime
from semel._concurrency.sync import run_sync


class ByHand(ThreadRuntime):
    """Threads in which nothing runs in the background: what would be started is noted, and the test calls `tick`."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.signals: list[Signal] = []

    def signal(self) -> Signal:
        self.signals.append(super().signal())
        return self.signals[-1]

    def spawn(self, body: Body, name: str) -> None:
        self.started.append(name)

    def nudged(self) -> bool:
        """Whether the task that was started last was told to tick now, since this was asked before."""
        return run_sync(self.signals[-1].wait(0))
