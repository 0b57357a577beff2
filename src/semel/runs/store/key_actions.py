"""What operators do to keys: resolve and delete them, each in one transaction with its row of the audit log.

``keys`` is the store's ``key_store()``. Keys in Redis have no log: there is no table beside them.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select

from semel._concurrency.sync import run_sync
from semel.db.dialect import StatementContext
from semel.db.schema import keys as table
from semel.once.client import Once
from semel.once.store import ForgetScope, Store
from semel.once.stores import join
from semel.runs.store import audit_log, run_keys
from semel.runs.store.audit_log import Change
from semel.runs.store.run_keys import RunKey
from semel.types import Record

BATCH = 1000
"""The most keys of a scope that one transaction deletes."""


def resolve(
    conn: Connection,
    keys: Store,
    tenant: str,
    scope: str,
    key: str,
    *,
    done: bool,
    value: Any,
    force: bool,
    context: StatementContext,
) -> None:
    """As ``Once.resolve``."""
    once, before = _locked(conn, keys, scope, key)
    once.resolve(key, scope=scope, done=done, value=value, force=force)
    after = {"scope": scope, "state": "completed" if done else "free"}
    change = Change(name="key.resolved", tenant=tenant, target=key, before=_logged(before), after=after)
    audit_log.record(conn, context, change)


def delete(
    conn: Connection, keys: Store, tenant: str, scope: str, key: str, *, force: bool, context: StatementContext
) -> bool:
    """As ``Once.forget``."""
    once, before = _locked(conn, keys, scope, key)
    if not once.forget(key, scope=scope, force=force):
        return False
    audit_log.record(conn, context, Change(name="key.deleted", tenant=tenant, target=key, before=_logged(before)))
    return True


def _locked(conn: Connection, keys: Store, scope: str, key: str) -> tuple[Once, Record | None]:
    """The verbs in this transaction, and the key's record, which stays as it is until they change it."""
    conn.execute(select(table.c.fence).where(table.c.scope == scope, table.c.key == key).with_for_update())
    once = Once(keys, collect=False).on(conn)
    return once, once.get(key, scope=scope)


def _logged(record: Record | None) -> dict[str, Any] | None:
    """What the log has of a key: not its value, which may be anything."""
    if record is None:
        return None
    return {"scope": record.scope, "state": record.status, "fence": record.fence, "attempt": record.attempt}


def delete_some(conn: Connection, keys: Store, scope: str, *, force: bool, context: StatementContext) -> int:
    """Delete some keys of the scope and return how many: fewer than ``BATCH`` means that none is left."""
    store, _ = join(keys, conn)
    count = run_sync(store.forget_scope(ForgetScope(scope, BATCH, force)))
    if count:
        change = Change(name="key.deleted", tenant="", target="*", before={"scope": scope, "keys": count})
        audit_log.record(conn, context, change)
    return count


def delete_run_key(conn: Connection, found: RunKey, context: StatementContext) -> bool:
    """As :func:`run_keys.remove`: delete a run's key, unless it names another run by now."""
    if not run_keys.remove(conn, found, context):
        return False
    before = {"user": found.user, "kind": found.kind, "run_id": found.job_id, "payload_hash": found.payload_hash}
    change = Change(name="key.deleted", tenant=found.tenant, target=found.key, before=before)
    audit_log.record(conn, context, change)
    return True
