"""The contract between the engine and a store: few verbs, each atomic per key, each taking a batch.

The docstrings here are the specification; :mod:`semel.testing` has it as tests. A store is one class with all the
verbs: none is optional. (A store with one writer may also run different verbs in one transaction, only for speed: see
:class:`Together`.)

Every verb is an ``async def``. A *blocking* store never suspends, so the engine can run it without an event loop; an
*async* store may suspend. Every verb returns its results in the order of its batch.

Rules that hold for all verbs:

* Time is the store's. A store takes an optional ``clock`` (microseconds since 1970) that replaces it in tests.
* A record is **gone** when its retention ended (``now > expires``). A claim whose lease ends after that is kept for
  one more retention after its lease, so that its owner can still complete it, and the next caller learns of an owner
  that vanished. Every verb treats a gone record as absent, whether or not the collector has removed it.
* No lease lasts longer than requested. After the store's clock was set back, a lease may have more than ``lease_us``
  left: the first claim that meets such a lease moves its end to ``now + lease_us``.
* Every verb may be sent again after its reply was lost, and then returns the same as the first time.
* A verb that cannot reach its data raises :class:`~semel.errors.StoreUnavailable`. It never guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from msgspec import Struct

from semel.types import Held, Kind, Record, Verdict

Clock: TypeAlias = Callable[[], int]
"""Returns microseconds since 1970. For tests; without it, stores use their own time."""

OnReleased: TypeAlias = Callable[[str, str], None]
"""Called with the scope and key of a claim that ended, from any thread."""


class ClaimRequest(Struct):
    """A request to claim a key. Times are microseconds."""

    scope: str
    key: str
    fingerprint: str
    attempt: str
    lease_us: int
    ttl_us: int
    unknown: bool = False
    waiting: bool = False
    resolving: bool = False
    done: OutcomeData | None = None
    force: bool = False
    """Take the key even from an owner whose lease has not ended."""


class OutcomeData(Struct):
    """The outcome to record: its kind, its encoded value, and how long the value is kept (None: as long as the key)."""

    kind: Kind
    data: bytes
    value_ttl_us: int | None = None


class KeyRef(Struct, frozen=True):
    """A key in its scope."""

    scope: str
    key: str


class Complete(Struct):
    """The owner of ``fence`` records the outcome."""

    scope: str
    key: str
    fence: int
    done: OutcomeData


class Release(Struct):
    """The owner of ``fence`` releases the key without an outcome."""

    scope: str
    key: str
    fence: int


class Renew(Struct):
    """The owner of ``fence`` is alive: its lease shall end ``lease_us`` from now."""

    scope: str
    key: str
    fence: int
    lease_us: int


class Forget(Struct):
    """An operator forgets the record of ``fence``; with ``force``, even while its lease lasts."""

    scope: str
    key: str
    fence: int
    force: bool = False


class ForgetScope(Struct):
    """An operator forgets at most ``limit`` records of a scope; with ``force``, also those with a lease that lasts."""

    scope: str
    limit: int
    force: bool = False


Owned: TypeAlias = Complete | Release | Renew | Forget
"""The requests that name the fence of their record."""


class Store(Protocol):
    """Keeps the records of keys."""

    coalesce: bool
    """True if concurrent calls should be sent as one batch: for any store with round trips."""

    expires_itself: bool
    """True if the store removes gone records by itself; it is then purged only for values that end earlier."""

    async def open(self) -> None:
        """Check that the store is available and ready; create the tables of an embedded one. May be repeated."""

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        """Grant each key, or return why not, as :func:`semel.once.rules.judge` decides.

        A grant writes a record with a fence greater than any that this key ever had, even if its records were
        purged in between, with ``created = now``, ``lease_until = now + lease``, ``expires = now + ttl``. With
        ``done``, the record is written as completed in the same step. Two requests for one key in one batch are
        judged one after the other. A request whose ``attempt`` owns the record is granted again with the same
        fence. With ``waiting``, the store notifies (see :meth:`watch`) when the present owner ends its claim.
        """

    async def renew(self, requests: Sequence[Renew]) -> list[int | None]:
        """Move each lease's end to ``now + lease`` and return it; None if the fence no longer holds the key.

        A lease that ended is renewed as long as nobody took the key over. If the owner itself has locked the record,
        in a transaction that is about to complete it, the result may be the unchanged end of its lease.
        """

    async def complete(self, requests: Sequence[Complete]) -> list[bool]:
        """Record each outcome; False if the fence no longer holds the key.

        Retention is not extended, unless the work ended outside of it (past ``expires``, or before ``created`` since
        the clock was set back): then it counts from now, so that no outcome is expired when it is recorded.

        A completed record is never overwritten: completing it again with its own fence changes nothing and returns
        True.
        """

    async def release(self, requests: Sequence[Release]) -> list[bool]:
        """Release each key; False if another fence has taken it over.

        A released key is absent. Releasing an absent key, or one that this same fence completed, changes nothing
        and returns True.
        """

    async def forget(self, requests: Sequence[Forget]) -> list[bool]:
        """Make each record absent, whatever its state; False if another fence has the key, or a lease protects it.

        ``force`` overrides the lease: its owner has lost the key. Forgetting an absent key changes nothing and
        returns True. The next claim's fence is greater, as always.
        """

    async def forget_scope(self, request: ForgetScope) -> int:
        """Make at most ``limit`` records of the scope absent, and return how many. Fewer means that none is left.

        Records whose lease has not ended stay, unless ``force`` is set.
        """

    async def get(self, refs: Sequence[KeyRef]) -> list[Record | None]:
        """Each key's record with ``now_us`` set, or None if it is absent."""

    async def purge(self, limit: int) -> int:
        """Remove at most ``limit`` gone or released records, and values past their time, and return how many.

        A record that is not gone is never removed. Fewer than ``limit`` means that nothing is left for now.
        """

    async def stats(self) -> Held:
        """Count the records by state. May be slow; not for hot paths."""

    def watch(self, ring: OnReleased) -> None:
        """Call ``ring`` for claims that other processes end, from now on. May do nothing, since waiters also poll."""

    async def close(self) -> None:
        """Close connections and end threads. May be repeated."""


@runtime_checkable
class Together(Protocol):
    """A store where a commit costs more than all the verbs in it."""

    async def together(self, requests: Sequence[ClaimRequest | Owned]) -> list[Any]:
        """Run verbs of different kinds in one transaction; each result is that of its own verb."""
