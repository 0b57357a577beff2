"""The contract between the engine and a store: few verbs, each atomic per key, each taking a batch.

The docstrings here are the specification; :mod:`semel.testing` is the same in executable form. A store is one
class that keeps them all: there are no optional verbs. (A store with one writer may also take its verbs mixed, in one
transaction: see :class:`Together`. It is a matter of speed alone.)

Verbs are ``async`` in shape. A *blocking* store never suspends (it does its work and returns), so the engine can
drive it without an event loop; an *async* store suspends as it likes. Every verb answers in the order of its batch.

Rules that hold for all verbs:

* Time is the store's. A store takes an optional ``clock`` (microseconds since 1970) that replaces it in tests.
* A record is **gone** when its retention ended (``now > expires``). A claim whose lease ends after that is remembered
  for one more retention after its lease, so that its owner may still complete it and nobody works blindly after one who
  vanished. A gone record is absent to every verb, whether or not the collector has removed it.
* No lease lasts longer than it was asked for. A store whose clock went back finds leases with more than ``lease_us``
  left: the first claim that meets such a lease moves its end to ``now + lease_us``.
* Every verb may be sent again after its reply was lost, and then answers as the first time.
* A verb that cannot reach its data raises :class:`~semel.errors.StoreUnavailable`. It never guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from msgspec import Struct

from semel.types import Held, Kind, Record, Verdict

Clock: TypeAlias = Callable[[], int]
"""Microseconds since 1970, for tests; stores use their own time without it."""

OnReleased: TypeAlias = Callable[[str, str], None]
"""``ring(scope, key)``: somebody ended a claim on this key. May be called from any thread."""


class ClaimRequest(Struct):
    """Someone asks for a key. Times are microseconds."""

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
    """Take the key from an owner whose lease lives, too."""


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
    """The owner of ``fence`` leaves the outcome."""

    scope: str
    key: str
    fence: int
    done: OutcomeData


class Release(Struct):
    """The owner of ``fence`` gives the key back undone."""

    scope: str
    key: str
    fence: int


class Renew(Struct):
    """The owner of ``fence`` is alive and wants its lease to end ``lease_us`` from now."""

    scope: str
    key: str
    fence: int
    lease_us: int


class Forget(Struct):
    """An operator wants the record of ``fence`` to be absent; with ``force`` also while its lease lives."""

    scope: str
    key: str
    fence: int
    force: bool = False


class ForgetScope(Struct):
    """An operator wants at most ``limit`` of a scope's records to be absent; with ``force`` also those at work."""

    scope: str
    limit: int
    force: bool = False


Owned: TypeAlias = Complete | Release | Renew | Forget
"""What names the fence of the record that it is about."""


class Store(Protocol):
    """Where records live."""

    coalesce: bool
    """True when concurrent calls should leave together in one batch (anything with a round trip)."""

    expires_itself: bool
    """True when the store drops gone records without being told: it is only purged for values that end earlier."""

    async def open(self) -> None:
        """Check that the store can be reached and is ready for use; make an embedded one ready. May be repeated."""

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        """Grant each key or say why not; :func:`semel.once.rules.judge` is the law.

        A grant writes a record with a fence greater than any that this key ever had, even if its records were
        purged in between, with ``created = now``, ``lease_until = now + lease``, ``expires = now + ttl``. With
        ``done`` the record is written as completed in the same step. Two requests for one key in one batch are
        judged one after the other. A request whose ``attempt`` owns the record is granted again with the same
        fence. ``waiting`` asks the store to ring (see :meth:`watch`) when the present owner ends its claim.
        """

    async def renew(self, requests: Sequence[Renew]) -> list[int | None]:
        """Move each lease's end to ``now + lease`` and answer it; None when the fence no longer holds the key.

        A lease that ended is renewed as long as nobody took the key over. Where the owner itself has the record locked,
        in a transaction that is about to complete it, the answer may be the live lease that it has.
        """

    async def complete(self, requests: Sequence[Complete]) -> list[bool]:
        """Record each outcome; False when the fence no longer holds the key.

        Retention is not extended, unless the work ended outside of it (past ``expires``, or before ``created`` since
        the clock went back): then it counts from now, so that no outcome is born expired.

        A completed record is never overwritten: completing it again with its own fence changes nothing and is True.
        """

    async def release(self, requests: Sequence[Release]) -> list[bool]:
        """Give each key back; False when another fence has taken it over.

        A released key is absent. Releasing what is absent, or what this very fence completed, changes nothing
        and is True.
        """

    async def forget(self, requests: Sequence[Forget]) -> list[bool]:
        """Make each record absent, whatever its state; False when another fence has the key, or a live lease holds it.

        ``force`` overrules the lease: its owner has lost the key. Forgetting what is absent changes nothing and is
        True. The next claim's fence is greater, as ever.
        """

    async def forget_scope(self, request: ForgetScope) -> int:
        """Make at most ``limit`` records of the scope absent; answer how many. Fewer means that none is left.

        Records with a live lease stay, unless ``force`` is set.
        """

    async def get(self, refs: Sequence[KeyRef]) -> list[Record | None]:
        """Each key's record with ``now_us`` set, or None when it is absent."""

    async def purge(self, limit: int) -> int:
        """Remove at most ``limit`` gone or released records, and values past their time; answer how many.

        A record that is not gone is never removed. Fewer than ``limit`` means that nothing is left for now.
        """

    async def stats(self) -> Held:
        """Count what is held. May be slow; not for hot paths."""

    def watch(self, ring: OnReleased) -> None:
        """Begin to call ``ring`` for claims that other processes end; may do nothing, since waiters also poll."""

    async def close(self) -> None:
        """Give back connections and threads. May be repeated."""


@runtime_checkable
class Together(Protocol):
    """A store where a commit costs more than all the verbs in it."""

    async def together(self, requests: Sequence[ClaimRequest | Owned]) -> list[Any]:
        """Carry out verbs of every kind in one transaction, each answered as its own verb answers it."""
