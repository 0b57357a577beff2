"""``IdempotentProcessor``: any function of one payload, run once per content."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from semel.bridge import drive
from semel.errors import InvalidRequest
from semel.fingerprint import fingerprint
from semel.model import ProcessingRecord
from semel.once.calls import Plan, invoke, invoke_async, is_async, run
from semel.once.faces import AsyncOnce, Once
from semel.once.opening import Target
from semel.policy import Policy


class IdempotentProcessor:
    """Wraps ``function(payload)``: the same content, delivered any number of times, is processed once.

    The key is the SHA-256 of the payload's canonical JSON without ``exclude_fields``. An async function gives an
    async ``process``. The store is a URL, an ``Once`` or an ``AsyncOnce``; swapping it changes nothing else.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        store: Target | Once | AsyncOnce = "memory://",
        *,
        exclude_fields: Iterable[str | tuple[str, ...]] = (),
        scope: str | None = None,
        policy: Policy | None = None,
    ) -> None:
        self._exclude = (exclude_fields,) if isinstance(exclude_fields, str) else tuple(exclude_fields)
        self._async = is_async(function)
        if isinstance(store, Once | AsyncOnce):
            self.once: Once | AsyncOnce = store
        else:
            self.once = (AsyncOnce if self._async else Once)(store)
        if isinstance(self.once, AsyncOnce) != self._async:
            raise InvalidRequest("an async function needs an AsyncOnce, a plain one an Once")
        self._plan: Plan[[Any], Any] = Plan(
            function,
            policy or Policy.processor(),
            scope=scope,
            key=self.key_of,
            fingerprint=lambda payload: fingerprint(payload, exclude=self._exclude),
        )

    def key_of(self, payload: Any) -> str:
        """The idempotency key of a payload: 64 hexadecimal digits."""
        return fingerprint(payload, exclude=self._exclude).partition(":")[2]

    def process(self, payload: Any) -> Any:
        """A :class:`ProcessingRecord` (to be awaited when the function is async).

        An exception of the function propagates and leaves nothing behind: the next delivery tries again.
        """
        return self._process(payload, invoke_async) if self._async else drive(self._process(payload, invoke))

    async def _process(self, payload: Any, how: Callable[..., Any]) -> ProcessingRecord:
        result = await run(self.once._engine, how, self._plan, (payload,), {})
        return ProcessingRecord(result.value, result.replayed, result.key)
