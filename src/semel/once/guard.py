"""Guarded functions: the key of a call, the claim around it, and the replay.

:func:`call_once` serves ``def`` and ``async def``. Only the call of the user's function differs: that is ``invoke``,
which never suspends for a ``def``.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial, update_wrapper
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar, overload
from uuid import UUID

from semel._concurrency.sync import run_sync
from semel._validation import checked_key
from semel.codec import PLAIN, Codec
from semel.errors import InvalidRequest, NotDone, OriginalFailed, OutcomeUnknown, SemelError, Unfingerprintable
from semel.fingerprint import fingerprint
from semel.once.engine import KeyEngine
from semel.once.requests import CallRequest, Door, current
from semel.once.return_types import ReturnType, codec_of
from semel.policy import Policy
from semel.types import Claim, Kind, Replay, Result

P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D")


@overload
def current_claim() -> Claim: ...


@overload
def current_claim(default: D, /) -> Claim | D: ...


def current_claim(*default: Any) -> Any:
    """The claim that the current work runs under. Send its ``fence`` with every write to another system.

    Without a claim (as in a request without a key), returns the default, or raises if none is given.
    """
    try:
        return current.get()[0]
    except LookupError:
        if default:
            return default[0]
        raise SemelError(
            "current_claim() was called outside of a guarded call and of a request with a key; "
            "current_claim(None) returns None there"
        ) from None


@contextmanager
def current_claim_set(claim: Claim, codec: Codec = PLAIN) -> Iterator[None]:
    """Make the claim the current one inside the context."""
    token = current.set((claim, codec))
    try:
        yield
    finally:
        current.reset(token)


class GuardSpec(Generic[P, R]):
    """How a function is guarded: how its key and fingerprint are made, and its policy."""

    def __init__(
        self,
        function: Callable[P, R],
        policy: Policy,
        *,
        scope: str | None = None,
        key: Callable[P, Any] | None = None,
        fingerprint: Callable[P, str] | bool = True,
        exclude: Iterable[str | tuple[str, ...]] = (),
        renew: bool = True,
        reconcile: Callable[P, Any] | None = None,
        kind: Kind = "value",
        data: Callable[P, Any] | None = None,
    ) -> None:
        for name, given in (("key", key), ("data", data), ("reconcile", reconcile)):
            if given is not None and not callable(given):
                raise InvalidRequest(f"{name}= takes a function of the arguments, not {given!r:.80}")
        if not isinstance(fingerprint, bool) and not callable(fingerprint):
            raise InvalidRequest(f"fingerprint= takes a function of the arguments or a bool, not {fingerprint!r:.80}")
        self.function = function
        self.policy = policy
        self.scope = checked_key("scope", _name(function) if scope is None else scope)
        self.renew = renew
        self.reconcile = reconcile
        self.kind = kind
        self._key = key
        self._fingerprint = fingerprint
        self._exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        self._data = data
        self._codec = PLAIN if kind == "seen" else codec_of(function)

    @property
    def codec(self) -> Codec:
        """The codec for the function's return value. Read again if its annotation named an undefined class so far."""
        if self._codec is None:
            self._codec = codec_of(self.function) or PLAIN
        return self._codec

    def request(self, *args: P.args, **kwargs: P.kwargs) -> CallRequest:
        """The request of one call, with its key and fingerprint."""
        if callable(self._fingerprint):
            print_ = self._fingerprint(*args, **kwargs)
        else:
            print_ = self._of_arguments(*args, **kwargs) if self._fingerprint or self._key is None else ""
        key = print_ if self._key is None else key_text(self._key(*args, **kwargs))
        door: Door = "message" if self.kind == "seen" else "function"
        return CallRequest(key, self.scope, print_, self.policy, self.kind, self.renew, door=door, codec=self.codec)

    async def call(
        self, engine: KeyEngine, invoke: Invoke, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Result[Any]:
        """Call the function once for its key, or replay its outcome."""
        kept: Callable[[], Any] | None = None
        if self.kind == "seen":  # for a message, only the data for audit is recorded
            kept = _nothing if self._data is None else partial(self._data, *args, **kwargs)
        return await call_once(
            engine,
            invoke,
            self.request(*args, **kwargs),
            partial(self.function, *args, **kwargs),
            reconcile=None if self.reconcile is None else partial(self.reconcile, *args, **kwargs),
            kept=kept,
        )

    @cached_property
    def _signature(self) -> inspect.Signature:
        try:
            return inspect.signature(self.function)
        except (ValueError, TypeError) as error:
            raise InvalidRequest(
                f"{_name(self.function)} has no readable signature, so its arguments cannot be fingerprinted; "
                "pass key= and fingerprint=False"
            ) from error

    def _of_arguments(self, *args: P.args, **kwargs: P.kwargs) -> str:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        named = dict(bound.arguments)
        if isinstance(named.get("cls"), type):
            named["cls"] = f"{named['cls'].__module__}.{named['cls'].__qualname__}"
        if self._key is not None:
            named.pop("self", None)  # the key identifies the object
        try:
            return fingerprint(named, exclude=self._exclude)
        except Unfingerprintable as error:
            if str(error).startswith("$.self"):
                raise InvalidRequest(
                    f"{_name(self.function)} is a method, and its object cannot be fingerprinted; "
                    "pass key=lambda self, …: …"
                ) from error
            raise


def _name(function: Callable[..., Any]) -> str:
    """The full name of the function; of a partial's function; or of a callable object's class."""
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def is_async(function: Callable[..., Any]) -> bool:
    """True for an ``async def``, a partial of one, and an object whose ``__call__`` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004 -- not asking whether it is callable


def _nothing() -> None:
    return None


def key_text(key: Any) -> str:
    if isinstance(key, int | UUID) and not isinstance(key, bool):
        return str(key)
    if not isinstance(key, str):
        raise InvalidRequest(
            f"key= returned a {type(key).__name__}, {key!r:.80}; a key is text, a whole number or a UUID"
        )
    return key


Invoke: TypeAlias = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]


async def call_function(function: Callable[[], Any]) -> Any:
    """Call a ``def``."""
    answer = function()
    if inspect.iscoroutine(answer):
        answer.close()
        raise InvalidRequest(f"{_name(function)} is async; Once guards plain functions, use AsyncOnce for async ones")
    return answer


async def call_async_function(function: Callable[[], Any]) -> Any:
    """Call an ``async def``, or anything that returns an awaitable."""
    answer = function()
    return await answer if inspect.isawaitable(answer) else answer


async def call_once(
    engine: KeyEngine,
    invoke: Invoke,
    request: CallRequest,
    work: Callable[[], Any],
    *,
    reconcile: Callable[[], Any] | None = None,
    kept: Callable[[], Any] | None = None,
) -> Result[Any]:
    """Call ``work`` once for its key, or replay its outcome. ``kept()`` returns what to record instead of the value."""
    try:
        begun = await engine.begin(request)
    except OutcomeUnknown:
        if reconcile is None:
            raise
        request.reconciling = True
        begun = await engine.begin(request)
    if isinstance(begun, Replay):
        return _replayed(begun, request)
    if begun is None:
        return Result(await invoke(work), False, request.key, request.scope, 0)
    claim = begun.claim
    token = current.set((claim, request.codec))
    worked = False
    try:
        if request.reconciling and reconcile is not None:
            try:
                value = await invoke(reconcile)
            except NotDone:
                pass
            except BaseException:
                engine.stop_renewing(claim)  # its outcome is unknown again when the lease ends
                raise
            else:
                await engine.finish(claim, request, value)
                return Result(value, True, request.key, request.scope, claim.fence)
        try:
            value = await invoke(work)
            worked = True
            outcome = value if kept is None else kept()
        except BaseException as error:
            # If only data= failed, the message was still handled.
            await (engine.finish_without_value if worked else engine.fail)(claim, request, error)
            raise
    finally:
        current.reset(token)
    await engine.finish(claim, request, outcome)
    return Result(value, False, request.key, request.scope, claim.fence)


def _replayed(replay: Replay, request: CallRequest) -> Result[Any]:
    outcome = replay.outcome
    if outcome.kind == "error" and not outcome.gone:
        raise OriginalFailed(*outcome.value)
    value = None if request.kind == "seen" else outcome.read(request.codec)
    if outcome.kind == "resolved" and isinstance(request.codec, ReturnType):
        value = request.codec.fitted(value)
    return Result(value, True, request.key, request.scope, outcome.fence)


class Guarded(Generic[P, R]):
    """A ``def`` that runs once per key. Call it as before, or use ``call`` to learn whether it was replayed."""

    def __init__(self, engine: KeyEngine, spec: GuardSpec[P, R], first: tuple[Any, ...] = ()) -> None:
        self._engine, self._spec, self._first = engine, spec, first
        update_wrapper(self, spec.function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The function's value, from this call or replayed from the first one."""
        return self.call(*args, **kwargs).value

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Result[R]:
        """The value, whether it was replayed, and its key."""
        return run_sync(self._spec.call(self._engine, call_function, self._first + args, kwargs))

    def __reduce__(self) -> str:
        """Pickle it by its name, like a function."""
        return self._spec.function.__qualname__

    def __get__(self, instance: object, owner: type | None = None) -> Guarded[..., R]:
        """Bind a guarded method to its object."""
        return self if instance is None else Guarded(self._engine, self._spec, (instance,))


class AsyncGuarded(Generic[P, R]):
    """An ``async def`` that runs once per key. Await it as before, or use ``call`` to learn whether it was replayed."""

    def __init__(self, engine: KeyEngine, spec: GuardSpec[P, Awaitable[R]], first: tuple[Any, ...] = ()) -> None:
        self._engine, self._spec, self._first = engine, spec, first
        update_wrapper(self, spec.function)

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The function's value, from this call or replayed from the first one."""
        return (await self.call(*args, **kwargs)).value

    async def call(self, *args: P.args, **kwargs: P.kwargs) -> Result[R]:
        """The value, whether it was replayed, and its key."""
        return await self._spec.call(self._engine, call_async_function, self._first + args, kwargs)

    def __reduce__(self) -> str:
        """Pickle it by its name, like a function."""
        return self._spec.function.__qualname__

    def __get__(self, instance: object, owner: type | None = None) -> AsyncGuarded[..., R]:
        """Bind a guarded method to its object."""
        return self if instance is None else AsyncGuarded(self._engine, self._spec, (instance,))
