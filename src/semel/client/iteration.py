"""Iteration in two worlds: an async generator is written once, and blocking callers iterate over it without a loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from semel.bridge import Face, drive

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E")


def iterated(
    method: Callable[Concatenate[E, P], AsyncGenerator[R, None]],
) -> Callable[Concatenate[Face[E], P], Iterator[R]]:
    """The blocking face of an engine's generator: for ``for``."""

    @wraps(method)
    def call(self: Face[E], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        source = method(self._engine, *args, **kwargs)
        try:
            while True:
                try:
                    yield drive(source.asend(None))
                except StopAsyncIteration:
                    return
        finally:
            drive(source.aclose())

    return call


def awaited_iterated(
    method: Callable[Concatenate[E, P], AsyncGenerator[R, None]],
) -> Callable[Concatenate[Face[E], P], AsyncIterator[R]]:
    """The async face of an engine's generator: for ``async for``."""

    @wraps(method)
    def call(self: Face[E], /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[R]:
        return method(self._engine, *args, **kwargs)

    return call
