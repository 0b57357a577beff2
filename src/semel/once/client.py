"""``Once`` and ``AsyncOnce``: the same verbs, blocking and async, over one engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar, Unpack, overload

from semel._concurrency.runtime import AsyncioRuntime, ThreadRuntime
from semel._concurrency.sync import async_method, run_sync, sync_method
from semel._validation import checked_key, checked_seconds
from semel.codec import PLAIN
from semel.errors import InvalidRequest
from semel.once.engine import DEFAULT_SCOPE, KeyEngine
from semel.once.guard import (
    AsyncGuarded,
    Guarded,
    GuardSpec,
    call_async_function,
    call_function,
    call_once,
    is_async,
    key_text,
)
from semel.once.requests import CallRequest
from semel.once.return_types import codec_of
from semel.once.stats import Hook
from semel.once.store import Clock
from semel.once.stores import Target, join, open_store
from semel.policy import Policy, PolicyOptions
from semel.types import Result

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session

P = ParamSpec("P")
R = TypeVar("R")


class OnceBase:
    """What ``Once`` and ``AsyncOnce`` share: the constructor, and how a decorator's arguments are read."""

    _runtime_class: type[ThreadRuntime | AsyncioRuntime]

    def __init__(
        self,
        store: Target,
        *,
        policy: Policy | None = None,
        clock: Clock | None = None,
        collect: bool = True,
        retry_for: float = 5.0,
        pool: int | None = None,
        on_event: Hook | None = None,
        low_replay_rate: float | None = None,
        prefix: str | None = None,
    ) -> None:
        """Open a store by URL (or pass an engine, a client, or a store of your own); it connects when first used.

        ``policy`` is the default for every call. ``collect=False`` disables the background clean-up. ``retry_for`` is
        for how many seconds a call is retried while the store is unavailable or silent, and so the longest that it
        takes; with 0 it is tried once. ``pool`` (PostgreSQL) is the most connections that all calls of the process
        share, 5 by default. ``on_event`` is called with every event, for metrics. ``low_replay_rate=0.5`` logs a
        warning for HTTP scopes in which a smaller share of requests are replays; without it, there is no such
        warning. ``prefix`` (Redis) begins every key's name, ``semel`` by default. ``clock`` is for tests.
        """
        if policy is not None and not isinstance(policy, Policy):
            raise InvalidRequest(f"policy= takes a Policy, such as Policy(ttl=60), not {policy!r:.80}")
        seconds = checked_seconds("retry_for", retry_for, zero=True)
        is_async = self._runtime_class is AsyncioRuntime
        self._engine = KeyEngine(
            open_store(store, is_async=is_async, clock=clock, pool=pool, retry_for=seconds, prefix=prefix),
            self._runtime_class(),
            policy or Policy(),
            collect=collect,
            retry_for=retry_for,
            on_event=on_event,
            low_replay_rate=low_replay_rate,
        )

    @classmethod
    def _with_engine(cls, engine: KeyEngine) -> Self:
        once = cls.__new__(cls)
        once._engine = engine
        return once

    def _policy(self, policy: Policy | None, changes: PolicyOptions) -> Policy:
        return (policy or self._engine.policy).but(**changes)

    def _decorator(
        self, guarded: type[Guarded[..., Any] | AsyncGuarded[..., Any]], policy: Policy, **plan: Any
    ) -> Callable[[Callable[..., Any]], Any]:
        def decorate(function: Callable[..., Any]) -> Any:
            _check_function(function, must_be_async=guarded is AsyncGuarded)
            return guarded(self._engine, GuardSpec(function, policy, **plan))

        return decorate

    @staticmethod
    def _request(
        key: str, work: Callable[[], Any], scope: str, fingerprint: str, policy: Policy, *, renew: bool
    ) -> CallRequest:
        scope = checked_key("scope", scope)
        return CallRequest(key_text(key), scope, fingerprint, policy, renew=renew, codec=codec_of(work) or PLAIN)

    def _engine_on(self, session: Any, *, is_async: bool) -> KeyEngine:
        store, must_await = join(self._engine.store, session)
        if must_await != is_async:
            raise InvalidRequest("Once.on() takes a blocking session or connection, AsyncOnce.on() an async one")
        return KeyEngine(store, self._runtime_class(), self._engine.policy, retry_for=0, bound_to=self._engine)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self._engine.store).__name__})"


class Once(OnceBase):
    """Makes work happen once, from blocking code: threads and processes."""

    _runtime_class = ThreadRuntime

    claim = sync_method(KeyEngine.claim)
    complete = sync_method(KeyEngine.complete)
    release = sync_method(KeyEngine.release)
    renew = sync_method(KeyEngine.renew)
    get = sync_method(KeyEngine.get)
    resolve = sync_method(KeyEngine.resolve)
    forget = sync_method(KeyEngine.forget)
    forget_scope = sync_method(KeyEngine.forget_scope)
    purge = sync_method(KeyEngine.purge)
    stats = sync_method(KeyEngine.stats)
    open = sync_method(KeyEngine.open)
    close = sync_method(KeyEngine.close)

    def check_and_mark(
        self, key_type: str, message_id: str, data: Any = None, *, ttl: float | None = None
    ) -> Literal["seen", "not_seen"]:
        """Return whether this message was seen, and mark it as seen, in one atomic step. ``data`` is kept for audit.

        The mark stays even if the caller fails afterwards; :meth:`consumer` marks only what was handled.
        """
        engine = self._engine
        if engine.memory is not None:
            return engine.mark(engine.memory, key_type, message_id, data, ttl)
        return run_sync(engine.check_and_mark(key_type, message_id, data, ttl=ttl))

    @overload
    def guard(self, function: Callable[P, R], /) -> Guarded[P, R]: ...

    @overload
    def guard(
        self,
        *,
        scope: str | None = None,
        key: Callable[..., Any] | None = None,
        fingerprint: Callable[..., str] | bool = True,
        exclude: Iterable[str | tuple[str, ...]] = (),
        renew: bool = True,
        reconcile: Callable[..., Any] | None = None,
        policy: Policy | None = None,
        **changes: Unpack[PolicyOptions],
    ) -> Callable[[Callable[P, R]], Guarded[P, R]]: ...

    def guard(  # type: ignore[misc]  # mypy takes **changes of the overload for the positional function
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        scope: str | None = None,
        key: Callable[..., Any] | None = None,
        fingerprint: Callable[..., str] | bool = True,
        exclude: Iterable[str | tuple[str, ...]] = (),
        renew: bool = True,
        reconcile: Callable[..., Any] | None = None,
        policy: Policy | None = None,
        **changes: Unpack[PolicyOptions],
    ) -> Any:
        """Decorate a function so that it runs once per key; every later call gets the first one's value.

        ``key`` makes the key from the arguments; without it the fingerprint of the arguments is the key.
        ``fingerprint`` detects the same key with other arguments: True (all but ``exclude``), False, or a function
        of the arguments. ``scope`` is the function's own name unless given. The lease is renewed while the function
        runs, unless ``renew=False``. ``reconcile`` is called with the same arguments if the owner vanished under
        ``on_crash="unknown"``: it returns the value, or raises ``NotDone`` to run the function. Any field of
        :class:`Policy` may be given, too: ``ttl=60, in_flight="conflict"``.
        """
        decorate = self._decorator(
            Guarded,
            self._policy(policy, changes),
            scope=scope,
            key=key,
            fingerprint=fingerprint,
            exclude=exclude,
            renew=renew,
            reconcile=reconcile,
        )
        return decorate if function is None else decorate(function)

    def consumer(
        self,
        key_type: str,
        *,
        key: Callable[..., Any],
        data: Callable[..., Any] | None = None,
        renew: bool = True,
        policy: Policy | None = None,
        **changes: Unpack[PolicyOptions],
    ) -> Callable[[Callable[P, R]], Guarded[P, R]]:
        """Decorate a message handler: a message is handled once, and a failure leaves it unseen.

        A message that was seen is skipped: the handler returns None, so acknowledge it. While it is being handled
        elsewhere, the call waits, and raises ``InProgress`` at the end of ``wait``: do not acknowledge it then.
        ``data`` is a function of the message that returns what is kept for audit.
        """
        chosen = self._policy(policy, changes)
        return self._decorator(
            Guarded,
            chosen,
            scope=checked_key("scope", key_type),
            key=key,
            fingerprint=False,
            renew=renew,
            kind="seen",
            data=data,
        )

    def call(
        self,
        key: str,
        work: Callable[[], R],
        *,
        scope: str = DEFAULT_SCOPE,
        fingerprint: str = "",
        renew: bool = True,
        policy: Policy | None = None,
        **changes: Unpack[PolicyOptions],
    ) -> Result[R]:
        """Run ``work`` once for this key, or return its recorded result."""
        _check_function(work, must_be_async=False)
        request = self._request(key, work, scope, fingerprint, self._policy(policy, changes), renew=renew)
        return run_sync(call_once(self._engine, call_function, request, work))

    def on(self, session: Connection | Session) -> Once:
        """The same verbs inside your own transaction: their writes are committed or rolled back with it."""
        return Once._with_engine(self._engine_on(session, is_async=False))

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class AsyncOnce(OnceBase):
    """Makes work happen once, from the tasks of an event loop. The verbs are those of :class:`Once`, awaited."""

    _runtime_class = AsyncioRuntime

    claim = async_method(KeyEngine.claim)
    complete = async_method(KeyEngine.complete)
    release = async_method(KeyEngine.release)
    renew = async_method(KeyEngine.renew)
    get = async_method(KeyEngine.get)
    resolve = async_method(KeyEngine.resolve)
    forget = async_method(KeyEngine.forget)
    forget_scope = async_method(KeyEngine.forget_scope)
    check_and_mark = async_method(KeyEngine.check_and_mark)
    purge = async_method(KeyEngine.purge)
    stats = async_method(KeyEngine.stats)
    open = async_method(KeyEngine.open)
    close = async_method(KeyEngine.close)

    @overload
    def guard(self, function: Callable[P, Awaitable[R]], /) -> AsyncGuarded[P, R]: ...

    @overload
    def guard(
        self,
        *,
        scope: str | None = None,
        key: Callable[..., Any] | None = None,
        fingerprint: Callable[..., str] | bool = True,
        exclude: Iterable[str | tuple[str, ...]] = (),
        renew: bool = True,
        reconcile: Callable[..., Any] | None = None,
        policy: Policy | None = None,
        **changes: Unpack[PolicyOptions],
    ) -> Callable[[Callable[P, Awaitable[R]]], AsyncGuarded[P, R]]: ...

    def guard(  # type: ignore[misc]  # mypy takes **changes of the overload for the positional function
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        scope: str | None = None,
        key: Callable[..., Any] | None = None,
        fingerprint: Callable[..., str] | bool = True,
        exclude: Iterable[str | tuple[str, ...]] = (),
        renew: bool = True,
        reconcile: Callable[..., Any] | None = None,
        policy: Policy | None = None,
        **changes: Unpack[PolicyOptions],
    ) -> Any:
        """As :meth:`Once.guard`, for an ``async def``."""
        decorate = self._decorator(
            AsyncGuarded,
            self._policy(policy, changes),
            scope=scope,
            key=key,
            fingerprint=fingerprint,
            exclude=exclude,
            renew=renew,
            reconcile=reconcile,
        )
        return decorate if function is None else decorate(function)

    def consumer(
        self,
        key_type: str,
        *,
        key: Callable[..., Any],
        data: Callable[..., Any] | None = None,
        renew: bool = True,
        policy: Policy | None = None,
        **changes: Unpack[PolicyOptions],
    ) -> Callable[[Callable[P, Awaitable[R]]], AsyncGuarded[P, R]]:
        """As :meth:`Once.consumer`, for an ``async def``."""
        chosen = self._policy(policy, changes)
        return self._decorator(
            AsyncGuarded,
            chosen,
            scope=checked_key("scope", key_type),
            key=key,
            fingerprint=False,
            renew=renew,
            kind="seen",
            data=data,
        )

    async def call(
        self,
        key: str,
        work: Callable[[], Awaitable[R]],
        *,
        scope: str = DEFAULT_SCOPE,
        fingerprint: str = "",
        renew: bool = True,
        policy: Policy | None = None,
        **changes: Unpack[PolicyOptions],
    ) -> Result[R]:
        """As :meth:`Once.call`, for an ``async def``."""
        request = self._request(key, work, scope, fingerprint, self._policy(policy, changes), renew=renew)
        return await call_once(self._engine, call_async_function, request, work)

    def on(self, session: AsyncConnection | AsyncSession) -> AsyncOnce:
        """As :meth:`Once.on`, for an async session or connection."""
        return AsyncOnce._with_engine(self._engine_on(session, is_async=True))

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()


def _check_function(function: Callable[..., Any], *, must_be_async: bool) -> None:
    if not callable(function):
        raise InvalidRequest(f"only a function can be guarded, not {function!r:.80}")
    if is_async(function) != must_be_async:
        name = getattr(function, "__qualname__", repr(function))
        raise InvalidRequest(
            f"{name} is a plain def; AsyncOnce guards async functions, Once guards plain ones"
            if must_be_async
            else f"{name} is async; Once guards plain functions, use AsyncOnce for async ones"
        )
