"""One engine for blocking and async callers: it is written ``async``, and blocking callers run it without a loop.

A coroutine over a blocking store never suspends, so one ``send(None)`` runs it to its end in the caller's thread. This
costs less than a microsecond.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from functools import wraps
from importlib import import_module
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from semel._concurrency.fork import survive_fork
from semel.errors import SemelError

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E")
T = TypeVar("T")
E_co = TypeVar("E_co", covariant=True)


class HasEngine(Protocol[E_co]):
    """A class with the methods of an engine, blocking or async."""

    @property
    def _engine(self) -> E_co: ...


class LoopGuard:
    """Binds connections to one event loop at a time. When that is closed, the next loop starts with new ones."""

    def __init__(self, forget: Callable[[], None]) -> None:
        self._forget = forget
        self._loop: asyncio.AbstractEventLoop | None = None
        survive_fork(self)

    def after_fork(self) -> None:
        """The parent's event loop does not run in the child."""
        self._loop = None

    def check(self) -> None:
        """Raise unless the connections may be used in the running loop. Call it before each use."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._loop is not None:
                if not self._loop.is_closed():
                    raise SemelError("this is already in use in another event loop; create one for each loop")
                self._forget()
            self._loop = loop


class PerLoop(Generic[T]):
    """One ``T`` per event loop, made on the first call of :meth:`here` in that loop.

    ``end`` is awaited in the loop when the loop shuts down, as at the end of ``asyncio.run``. ``abandon`` is called
    with the ``T`` of a loop that was closed without shutting down, when another loop calls ``here``; it must not block.
    """

    def __init__(
        self,
        make: Callable[[], T],
        end: Callable[[T], Awaitable[None]] | None = None,
        abandon: Callable[[T], None] | None = None,
    ) -> None:
        self._make = make
        self._end = end
        self._abandon = abandon
        self._inherited: list[Any] = []
        self._start()
        survive_fork(self)

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._last: tuple[asyncio.AbstractEventLoop, T] | None = None
        self._all: dict[asyncio.AbstractEventLoop, tuple[T, AsyncGenerator[None, None] | None]] = {}

    def after_fork(self) -> None:
        """The parent's event loops do not run in the child: what belongs to them is neither used nor closed."""
        self._inherited.append(self._all)
        self._start()

    def here(self) -> T:
        """The ``T`` of the running loop."""
        loop, last = asyncio.get_running_loop(), self._last
        return last[1] if last is not None and last[0] is loop else self._of(loop)

    def everywhere(self) -> list[T]:
        """The ``T`` of every loop."""
        with self._lock:
            return [thing for thing, _ in self._all.values()]

    def _of(self, loop: asyncio.AbstractEventLoop) -> T:
        with self._lock:
            left = [self._all.pop(each)[0] for each in list(self._all) if each.is_closed()]
            if loop not in self._all:
                thing = self._make()
                self._all[loop] = (thing, None if self._end is None else self._watch(loop, thing))
            thing = self._all[loop][0]
            self._last = (loop, thing)
        for each in left:
            if self._abandon is not None:
                self._abandon(each)
        return thing

    def _watch(self, loop: asyncio.AbstractEventLoop, thing: T) -> AsyncGenerator[None, None]:
        """Notice when the loop shuts down: it then closes its async generators, so also the one made here."""

        async def wait() -> AsyncGenerator[None, None]:
            try:
                yield
            finally:
                await self._finish(loop, thing)

        watching = wait()
        with suppress(StopIteration):  # it yields at once, without having suspended
            watching.__anext__().send(None)
        return watching

    async def end(self) -> None:
        """End the ``T`` of the running loop; :meth:`here` makes a new one on its next call."""
        loop = asyncio.get_running_loop()
        found = self._all.get(loop)
        if found is not None:
            await self._finish(loop, found[0])

    async def _finish(self, loop: asyncio.AbstractEventLoop, thing: T) -> None:
        with self._lock:
            found = self._all.get(loop)
            if found is None or found[0] is not thing:
                return
            del self._all[loop]
            self._last = None
        if self._end is not None:
            await self._end(thing)


def close_all(transport: Any) -> None:
    """Close the socket of a transport whose event loop is closed."""
    with suppress(OSError, AttributeError):
        transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
    own = getattr(transport, "_sock", None)  # only asyncio's own loops have it; others close their sockets themselves
    if own is not None:
        own.close()
        transport._sock = None


def run_sync(coroutine: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine that never suspends, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # StopIteration.value is Any; it is the coroutine's R
    coroutine.close()
    raise RuntimeError("a blocking store suspended; open the store for AsyncOnce instead")


class LateClass:
    """Stands for a class whose module is imported when the class, or one of its methods, is first used."""

    def __init__(self, module: str, name: str) -> None:
        self._module = module
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._loaded()(*args, **kwargs)

    def __getattr__(self, method: str) -> LateMethod:
        if method.startswith("__"):  # as inspect asks every object for __wrapped__
            raise AttributeError(method)
        return LateMethod(lambda: getattr(self._loaded(), method))

    def _loaded(self) -> Any:
        return getattr(import_module(self._module), self._name)


class LateMethod:
    """A method of a :class:`LateClass`, in another class; the first use puts the method in its place."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, instance: object, owner: type) -> Any:
        method = self._load()
        setattr(self._owner, self._name, method)
        return method.__get__(instance, owner)

    def turned(self, turn: Callable[[Any], Any]) -> Any:
        """What ``turn`` makes of the method, once that is used."""
        return LateMethod(lambda: turn(self._load()))


def sync_method(
    method: Callable[Concatenate[E, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[HasEngine[E], P], R]:
    """An engine's method as a blocking method: the same parameters and result, without ``await``."""
    late: object = method
    if isinstance(late, LateMethod):
        return late.turned(sync_method)  # type: ignore[no-any-return]

    @wraps(method)
    def call(self: HasEngine[E], /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            method(self._engine, *args, **kwargs).send(None)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # as in run_sync(), inlined here for speed
        raise RuntimeError("a blocking store suspended; open the store for AsyncOnce instead")

    return call


def async_method(
    method: Callable[Concatenate[E, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[HasEngine[E], P], Coroutine[Any, Any, R]]:
    """An engine's method as an async method of the class that has the engine."""
    late: object = method
    if isinstance(late, LateMethod):
        return late.turned(async_method)  # type: ignore[no-any-return]

    @wraps(method)
    async def call(self: HasEngine[E], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await method(self._engine, *args, **kwargs)

    return call


def sync_iterator(
    method: Callable[Concatenate[E, P], AsyncGenerator[R, None]],
) -> Callable[Concatenate[HasEngine[E], P], Iterator[R]]:
    """An engine's async generator as a generator, for ``for``."""

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


def async_iterator(
    method: Callable[Concatenate[E, P], AsyncGenerator[R, None]],
) -> Callable[Concatenate[HasEngine[E], P], AsyncIterator[R]]:
    """An engine's async generator as a method of the class that has the engine, for ``async for``."""

    @wraps(method)
    def call(self: HasEngine[E], /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[R]:
        return method(self._engine, *args, **kwargs)

    return call
