"""One engine for two worlds: code is written ``async`` once, and blocking callers drive it without a loop.

A coroutine over a blocking store never suspends, so one ``send(None)`` runs it to its end, in the caller's thread,
for less than a microsecond.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from semel.errors import SemelError
from semel.forks import survive_fork

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E")
E_co = TypeVar("E_co", covariant=True)


class Face(Protocol[E_co]):
    """A face over an engine, blocking or awaited."""

    @property
    def _engine(self) -> E_co: ...


class HomeLoop:
    """The event loop that connections belong to. When it is closed, the next loop starts with new ones."""

    def __init__(self, forget: Callable[[], None]) -> None:
        self._forget = forget
        self._loop: asyncio.AbstractEventLoop | None = None
        survive_fork(self)

    def after_fork(self) -> None:
        """No loop of the parent runs here."""
        self._loop = None

    def enter(self) -> None:
        """Call it before the connections are used."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._loop is not None:
                if not self._loop.is_closed():
                    raise SemelError("this is in use in another event loop already; make one for each loop")
                self._forget()
            self._loop = loop


def drive(coroutine: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # StopIteration.value is Any; it is the coroutine's R
    coroutine.close()
    raise RuntimeError("a blocking store suspended; open the store for AsyncOnce instead")


def blocking(method: Callable[Concatenate[E, P], Coroutine[Any, Any, R]]) -> Callable[Concatenate[Face[E], P], R]:
    """The blocking face of an engine's method: the same parameters, the same promise, no ``await``."""

    @wraps(method)
    def call(self: Face[E], /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            method(self._engine, *args, **kwargs).send(None)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # as in drive(), which is inlined here for speed
        raise RuntimeError("a blocking store suspended; open the store for AsyncOnce instead")

    return call


def awaited(
    method: Callable[Concatenate[E, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Face[E], P], Coroutine[Any, Any, R]]:
    """The async face of an engine's method: the same, through the face."""

    @wraps(method)
    async def call(self: Face[E], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await method(self._engine, *args, **kwargs)

    return call
