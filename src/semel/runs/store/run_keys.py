"""The keys of runs and jobs: claims like every other key, in the scope of their user, with the run as their outcome.

A key of the same scope and name that ``Once`` claimed is the same key. Without a key, the hash of the payload names the
run while that is pending or running: such a run has ``dedupe`` in ``semel_active``, which is unique.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Literal, TypeAlias
from urllib.parse import quote, unquote
from uuid import UUID

from msgspec import Struct
from sqlalchemy import ColumnElement, Connection, and_, delete, literal, or_, select, update

from semel.codec import PLAIN
from semel.db.dialect import Statement, StatementContext, hot, transaction
from semel.db.schema import active, has_digest, keys, submitted
from semel.errors import InProgress, KeyReused, OutcomeUnknown, SemelError
from semel.once.store import ClaimRequest, Forget, KeyRef, OutcomeData
from semel.once.stores import sqlite
from semel.runs.store import quotas
from semel.types import Granted, InFlight, Record, Replay, Unknown, Verdict

ROUNDS = 10
"""How often to try to take or read a key that other transactions keep changing."""

KeyKind: TypeAlias = Literal["key", "payload"]
RUN = "run"
"""The kind of the outcome of a run's key. Its attempt is the run's id."""

_SCOPE = "runs"


def scope_of_runs(tenant: str, user: str) -> str:
    """The scope of the keys of this user's runs: ``runs:42``, of a tenant ``acme runs:42``, of nobody ``runs``."""
    name = f"{_SCOPE}:{user}" if user else _SCOPE
    return f"{quote(tenant, safe='', errors='surrogatepass')} {name}" if tenant else name


def owner_of(scope: str) -> tuple[str, str]:
    """The tenant and the user whose runs have their keys in this scope."""
    before, colon, user = scope.partition(f"{_SCOPE}:")  # a quoted tenant has no colon
    tenant = before if colon else scope.removesuffix(_SCOPE)
    return unquote(tenant.removesuffix(" "), errors="surrogatepass"), user


def in_scope_of(tenant: str, user: str | None) -> ColumnElement[bool]:
    """True for the keys of this user's runs; None: of every user of the tenant."""
    scope = scope_of_runs(tenant, user or "")
    if user is not None:
        return keys.c.scope == scope
    return or_(keys.c.scope == scope, and_(keys.c.scope >= f"{scope}:", keys.c.scope < f"{scope};"))


def run_key(scope: str, key: str, fingerprint: str, run_id: str, ttl_us: int) -> ClaimRequest:
    """A claim of a key that is done at once: its outcome is the run."""
    done = OutcomeData(RUN, PLAIN.encode(run_id))
    return ClaimRequest(scope, key, fingerprint, run_id, 0, ttl_us, done=done)


def take(conn: Connection, requests: Sequence[ClaimRequest], context: StatementContext) -> list[Verdict]:
    """Claim keys of different runs in the transaction of the connection."""
    store, terms = _store(conn, context)
    verdicts: list[Verdict] = store.claim(conn, requests, terms) if requests else []
    return verdicts


def read(conn: Connection, refs: Sequence[KeyRef], context: StatementContext) -> list[Record | None]:
    """The records of these keys; None where a key is free."""
    store, terms = _store(conn, context)
    records: list[Record | None] = store.get(conn, refs, terms) if refs else []
    return records


def forget(conn: Connection, requests: Sequence[Forget], context: StatementContext) -> list[bool]:
    """Make these keys free again; False where another has the key."""
    store, terms = _store(conn, context)
    forgotten: list[bool] = store.forget(conn, requests, terms)
    return forgotten


def purge(conn: Connection, most: int, context: StatementContext) -> int:
    """Remove up to ``most`` expired keys, of runs and all others; return how many."""
    store, terms = _store(conn, context)
    removed: int = store.purge(conn, most, terms)
    return removed


def _store(conn: Connection, context: StatementContext) -> tuple[Any, Any]:
    """The module with the verbs of the connection's store, and the time as they take it."""
    now = context.now
    if conn.dialect.name == "sqlite":
        return sqlite, lambda: now
    from semel.once.stores import postgres

    return postgres, {"now": now, "patience": ""}


def refusal(verdict: Verdict, key: str | None) -> SemelError:
    """Why a key cannot name a run: it belongs to other work, which is done, under way, or perhaps was done."""
    if isinstance(verdict, InFlight):
        return InProgress(f"the key {key!r} is held by other work; try again later", verdict.retry_after)
    if isinstance(verdict, Unknown):
        return OutcomeUnknown(
            f"the owner of the key {key!r} vanished; record whether its work was done, then try again"
        )
    message = f"key reused with different payload: {key!r} belongs to other work; use a new key for this"
    return KeyReused(message, idempotency_key=key)


def no_run(key: str | None, job_id: str) -> KeyReused:
    """The error for a key that names a job of another system, or a run that is gone."""
    message = f"the key {key!r} names the job {job_id!r}, which is not a run of this app"
    return KeyReused(message, idempotency_key=key)


# -- payloads ----------------------------------------------------------------------------------------------------------


def dedupe_of(tenant: str, user: str, payload_hash: str) -> str:
    """What is unique among the active runs of a user that have this payload: the start of a digest, as a UUID."""
    return str(UUID(bytes=sha256(f"{tenant}\0{user}\0{payload_hash}".encode("utf8", "surrogatepass")).digest()[:16]))


_ACTIVE_OF = Statement(
    lambda w: (
        f"""SELECT {w.as_text("k.dedupe")}, {w.as_text("k.id")} FROM semel_active AS k
WHERE {w.is_in("k.dedupe", "dedupes", "uuid")} AND k.dedupe_until_us >= {w.now}"""
    )
)
_LET_GO = Statement(
    lambda w: (
        f"""UPDATE semel_active AS k SET dedupe = NULL
WHERE {w.is_in("k.dedupe", "dedupes", "uuid")} AND k.dedupe_until_us < {w.now}"""
    )
)


def active_of(conn: Connection, dedupes: Sequence[str], context: StatementContext) -> dict[str, str]:
    """The active runs that payloads name, by ``dedupe``."""
    return dict(tuple(row) for row in _ACTIVE_OF.rows(conn, dedupes=list(dedupes), now=context.now)) if dedupes else {}


def let_go(conn: Connection, dedupes: Sequence[str], context: StatementContext) -> None:
    """Let payloads whose time is over name no run any more."""
    if dedupes:
        _LET_GO.count(conn, dedupes=list(dedupes), now=context.now)


# -- keys by themselves ------------------------------------------------------------------------------------------------


class KeyEntry(Struct, frozen=True):
    """A key of a user, and the job that it names."""

    key: str
    job_id: str
    user: str
    payload_hash: str
    created_us: int
    expires_us: int


class RunKey(KeyEntry, frozen=True):
    """A key with its tenant, or a payload that names its run."""

    tenant: str = ""
    kind: KeyKind = "key"


class StoreKey(Struct, frozen=True, kw_only=True):
    """A request to store a key for a job that the caller created."""

    tenant: str
    user: str
    key: str
    job_id: str
    ttl_us: int


@hot
def store_key(conn: Connection, request: StoreKey, context: StatementContext) -> str:
    """Store the key unless it is in use. Returns the job that it names: the caller's, or an earlier one."""
    with transaction(conn):
        scope = scope_of_runs(request.tenant, request.user)
        (verdict,) = take(conn, [run_key(scope, request.key, "", request.job_id, request.ttl_us)], context)
        if isinstance(verdict, Replay):
            return str(verdict.outcome.value)
        if not isinstance(verdict, Granted):
            raise refusal(verdict, request.key)
        return request.job_id


@hot
def check_key(conn: Connection, person: tuple[str, str | None], key: str, context: StatementContext) -> KeyEntry | None:
    """The live key of one user (None: of any user), or None. Expired ones of this name are removed."""
    with transaction(conn):
        now = quotas.read_clock(conn, context)
        own = [keys.c.key == key, _names_run, in_scope_of(*person)]
        found = [_entry(row) for row in conn.execute(select(keys).where(*own).order_by(keys.c.created_us))]
        if any(entry.expires_us < now for entry in found):
            conn.execute(delete(keys).where(*own, keys.c.expires_us < now))
        live = next((entry for entry in found if entry.expires_us >= now), None)
        return None if live is None else KeyEntry(*(getattr(live, name) for name in KeyEntry.__struct_fields__))


_names_run = and_(keys.c.kind == literal(RUN, literal_execute=True), keys.c.state == "completed")
"""True for a record whose outcome is a run; written so that the partial indexes are used."""


def _entry(row: Any) -> RunKey:
    tenant, user = owner_of(row.scope)
    return RunKey(row.key, row.attempt, user, row.fingerprint, row.created_us, row.expires_us, tenant)


MOST = 1000
"""How many keys of one name are read."""


def entries(
    conn: Connection,
    key: str,
    tenant: str | None,
    user: str | None,
    context: StatementContext,
) -> list[RunKey]:
    """The live keys of this name, and the payload with this hash if it names a run; None: of every tenant or user."""
    now = quotas.read_clock(conn, context)
    owned = [keys.c.key == key, _names_run, keys.c.expires_us >= now]
    if tenant is not None:
        owned.append(in_scope_of(tenant, user))
    rows = conn.execute(select(keys).where(*owned).order_by(keys.c.created_us, keys.c.scope).limit(MOST))
    found = [entry for entry in map(_entry, rows) if user in (None, entry.user)]
    return found + _payloads(conn, key, tenant, user, now)


def _payloads(conn: Connection, payload_hash: str, tenant: str | None, user: str | None, now: int) -> list[RunKey]:
    query = (
        select(submitted, active.c.dedupe_until_us)
        .join_from(submitted, active, submitted.c.id == active.c.id)
        .where(has_digest(submitted.c.payload_hash, payload_hash), active.c.dedupe_until_us >= now)
        .where(active.c.dedupe.is_not(None))
    )
    if tenant is not None:
        query = query.where(submitted.c.tenant == tenant)
    if user is not None:
        query = query.where(submitted.c.user_id == user)
    return [
        RunKey(
            payload_hash,
            row.id,
            row.user_id,
            row.payload_hash,
            row.created_us,
            row.dedupe_until_us,
            row.tenant,
            "payload",
        )
        for row in conn.execute(query.order_by(submitted.c.id).limit(MOST))
    ]


def remove(conn: Connection, found: RunKey, context: StatementContext) -> bool:
    """Remove the key, unless it names another run by now: the same submission then makes a new run."""
    if found.kind == "payload":
        mine = [active.c.id == found.job_id, active.c.dedupe.is_not(None)]
        return bool(conn.execute(update(active).where(*mine).values(dedupe=None)).rowcount)
    ref = KeyRef(scope_of_runs(found.tenant, found.user), found.key)
    (record,) = read(conn, [ref], context)
    if record is None or record.attempt != found.job_id:
        return False
    return all(forget(conn, [Forget(ref.scope, ref.key, record.fence)], context))
