"""``IdempotentProcessor``: a function of one payload, run once per content."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal, TypeAlias, cast, get_args

from semel._concurrency.sync import run_sync
from semel.errors import InvalidRequest, Unfingerprintable
from semel.fingerprint import fingerprint
from semel.once.client import AsyncOnce, Once
from semel.once.guard import GuardSpec, Invoke, call_async_function, call_function, is_async
from semel.once.idempotency_store import IdempotencyStore, StoredResults
from semel.once.stores import Target
from semel.policy import Policy
from semel.types import ProcessingRecord

KeyRecipe: TypeAlias = Literal["canonical", "json"]

_log = logging.getLogger("semel")


class IdempotentProcessor:
    """Wraps ``function(payload)``: the same content, delivered any number of times, is processed once.

    The key is the SHA-256 of the payload's canonical JSON without ``exclude_fields``. For an async function,
    ``process`` is async. The store is a URL, an ``Once``, an ``AsyncOnce`` or an ``IdempotencyStore``; another store
    changes nothing else. Function and store may be given in either order.

    ``key_recipe="json"`` makes the keys from ``json.dumps(payload, sort_keys=True, default=str)``, as other programs
    can, too: use it to keep keys that such a program made.
    """

    def __init__(
        self,
        function: Callable[[Any], Any] | Target | Once | AsyncOnce | IdempotencyStore,
        store: Target | Once | AsyncOnce | IdempotencyStore | Callable[[Any], Any] = "memory://",
        *,
        exclude_fields: Iterable[str | tuple[str, ...]] = (),
        scope: str | None = None,
        policy: Policy | None = None,
        key_recipe: KeyRecipe = "canonical",
    ) -> None:
        if _is_store(function):
            function, store = store, function
        if not callable(function):
            raise InvalidRequest(f"a processor needs a function of one payload, not {function!r:.80}")
        self._exclude = (exclude_fields,) if isinstance(exclude_fields, str) else tuple(exclude_fields)
        if key_recipe not in get_args(KeyRecipe):
            raise InvalidRequest(f"key_recipe is {key_recipe!r}; it must be one of {', '.join(get_args(KeyRecipe))}")
        if key_recipe == "json" and not all(isinstance(name, str) for name in self._exclude):
            raise InvalidRequest('key_recipe="json" leaves out fields of the payload itself: names, not paths')
        self._recipe = key_recipe
        self._async = is_async(function)
        self._results = StoredResults(store) if isinstance(store, IdempotencyStore) else None
        self._once: Once | AsyncOnce | None = None if self._results else self._opened(cast("Any", store))
        self._spec: GuardSpec[[Any], Any] = GuardSpec(
            function, policy or Policy.processor(), scope=scope, key=self.key_of, fingerprint=self._print_of
        )

    def _opened(self, store: Any) -> Once | AsyncOnce:
        once = store if isinstance(store, Once | AsyncOnce) else (AsyncOnce if self._async else Once)(store)
        if isinstance(once, AsyncOnce) != self._async:
            raise InvalidRequest("an async function needs an AsyncOnce, a plain one an Once")
        return once

    @property
    def once(self) -> Once | AsyncOnce:
        """The ``Once`` or ``AsyncOnce``. Raises ``AttributeError`` if the store is an ``IdempotencyStore``."""
        if self._once is None:
            raise AttributeError("this processor has an IdempotencyStore, and no Once")
        return self._once

    def key_of(self, payload: Any) -> str:
        """The idempotency key of a payload: 64 hexadecimal digits."""
        if self._recipe == "json":
            return _json_key(payload, self._exclude)
        return fingerprint(payload, exclude=self._exclude).partition(":")[2]

    def _print_of(self, payload: Any) -> str:
        """With ``key_recipe="json"``, the key itself: payloads with the same key may have different fingerprints."""
        return self.key_of(payload) if self._recipe == "json" else fingerprint(payload, exclude=self._exclude)

    def process(self, payload: Any) -> Any:
        """Process the payload, or replay its result: a :class:`ProcessingRecord`, awaitable if the function is async.

        An exception of the function is logged and raised, and nothing is stored: the next delivery tries again.
        """
        return self._process_async(payload) if self._async else self._process_now(payload)

    def _process_now(self, payload: Any) -> ProcessingRecord:
        if self._results is None:
            return run_sync(self._through_once(payload, call_function))
        key = self.key_of(payload)
        call = self._logging(call_function, payload)
        return self._results.process(key, lambda: run_sync(call(partial(self._spec.function, payload))))

    async def _process_async(self, payload: Any) -> ProcessingRecord:
        if self._results is None:
            return await self._through_once(payload, call_async_function)
        key = self.key_of(payload)
        call = self._logging(call_async_function, payload)
        return await self._results.process_async(key, lambda: call(partial(self._spec.function, payload)))

    async def _through_once(self, payload: Any, invoke: Invoke) -> ProcessingRecord:
        result = await self._spec.call(self.once._engine, self._logging(invoke, payload), (payload,), {})
        return ProcessingRecord(result.value, result.replayed, result.key)

    def _logging(self, invoke: Invoke, payload: Any) -> Invoke:
        """An ``invoke`` that logs a failure: the error's type, the key and the scope, never the payload."""

        async def call(function: Callable[[], Any]) -> Any:
            try:
                return await invoke(function)
            except Exception as error:
                known = {"event": "failed", "scope": self._spec.scope, "key": self.key_of(payload)}
                kind = f"{type(error).__module__}.{type(error).__qualname__}"
                message = "processing failed with %s: key %r in %r; the next delivery tries again"
                _log.error(message, kind, known["key"], known["scope"], extra={**known, "reason": kind})
                raise

        return call


def _is_store(given: object) -> bool:
    """Whether the argument is a store, not the function."""
    return isinstance(given, IdempotencyStore | Once | AsyncOnce | str) or not callable(given)


def _json_key(payload: Any, exclude: tuple[Any, ...]) -> str:
    if exclude and not isinstance(payload, Mapping):
        raise Unfingerprintable(
            f"exclude_fields leaves fields of an object out, and this is a {type(payload).__name__}"
        )
    kept = {name: value for name, value in payload.items() if name not in exclude} if exclude else payload
    try:
        text = json.dumps(kept, sort_keys=True, default=str)
    except (TypeError, ValueError) as error:
        raise Unfingerprintable(f"the payload has no key: {error}") from error
    return hashlib.sha256(text.encode()).hexdigest()
