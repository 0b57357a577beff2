"""Iteration in two worlds: an async generator is written once, and blocking callers iterate over it without a loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from semel._concurrency.sync import HasEngine, run_sync

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E")


def iterated(
    method: Callable[Concatenate[E, P], AsyncGenerator[R, None]],
) -> Callable[Concatenate[HasEngine[E], P], Iterator[R]]:
    """The blocking face of an engine's generator: for ``for``."""

    @wraps(method)
    def call(self: HasEngine[E], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        source = method(self._engine, *args, **kwargs)
        try:
            while True:
                try:
                    yield run_sync(source.asend(None))
                except StopAsyncIteration:
                    return
        finally:
            run_sync(source.aclose())

    return call


def awaited_iterated(
    method: Callable[Concatenate[E, P], AsyncGenerator[R, None]],
) -> Callable[Concatenate[HasEngine[E], P], AsyncIterator[R]]:
    """The async face of an engine's generator: for ``async for``."""

    @wraps(method)
    def call(self: HasEngine[E], /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[R]:
        return method(self._engine, *args, **kwargs)

    return call
