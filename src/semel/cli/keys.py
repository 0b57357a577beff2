"""``semel keys``: show keys, resolve unknown outcomes, delete keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from semel._validation import checked_key
from semel.cli._database import acting, ask, require
from semel.cli._options import JSON_VALUE, argument, db_options, examples, group, option
from semel.cli._output import (
    format_span,
    format_time,
    note,
    plain,
    print_fields,
    print_json,
    print_result,
    with_iso_times,
)
from semel.errors import InProgress, InvalidRequest

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from semel.db.dialect import StatementContext
    from semel.types import Record

MOST = 100
"""How many keys of the same name are shown."""

scope_option = option("--scope", metavar="SCOPE", help="Only in this scope.  [default: all scopes]")
user_option = option("--user", metavar="USER", help="Only the run key of this user.")
tenant_option = option("--tenant", metavar="TENANT", help="Only the run key of this tenant.")
force_option = option("--force", is_flag=True, help="Even while the key is claimed: its owner loses the claim.")


@group
def keys() -> None:
    """Show keys, resolve unknown outcomes, delete keys.

    Keys of functions, messages and HTTP requests belong to a scope; keys of runs belong to a user. In Redis, a key can
    only be found by its scope.
    """


@keys.command()
@examples("semel keys show order-1", "semel keys show order-1 --scope orders --db redis://localhost/0")
@argument("key", help="The key.")
@scope_option
@user_option
@tenant_option
@db_options
def show(key: str, db: str, as_json: bool, **where: str | None) -> int:
    """Show a key: whether it is claimed, its outcome, and the run that it names.

    The exit code is 1 if the key is free. In Redis, a key can only be found by its scope.
    """
    records, run_keys = _find(db, key, **where)
    if as_json:
        print_json(
            {"keys": [_as_fields(each) for each in records], "run_keys": [with_iso_times(each) for each in run_keys]}
        )
    elif not records and not run_keys:
        note(f"the key {key!r} is free")
    else:
        for record in records:
            _print_record(record)
        for row in run_keys:
            _print_run_key(row)
    return 0 if records or run_keys else 1


def _as_fields(record: Record) -> dict[str, Any]:
    fields = {
        "scope": record.scope,
        "key": record.key,
        "status": record.status,
        "fence": record.fence,
        "fingerprint": record.fingerprint,
        "created_us": record.created_us,
        "lease_until_us": record.lease_until_us if record.state == "claimed" else None,
        "completed_us": record.completed_us or None,
        "expires_us": record.expires_us,
        "outcome": _outcome(record),
    }
    return with_iso_times(fields)


def _outcome(record: Record) -> Any:
    """The outcome in a form that can be printed."""
    outcome = record.outcome
    if outcome is None:
        return None
    if outcome.gone:
        return {"kind": outcome.kind, "gone": True}
    value = outcome.value
    if outcome.kind == "response":
        return {"kind": "response", "status": value.status, "bytes": len(value.body or b"")}
    return {"kind": outcome.kind, "value": value}


def _print_record(record: Record) -> None:
    outcome = _outcome(record)
    print_fields(
        {
            "key": f"{record.key} in {record.scope}",
            "status": record.status.replace("_", " "),
            "created": format_time(record.created_us),
            "lease ends": format_time(record.lease_until_us) if record.state == "claimed" else None,
            "completed": format_time(record.completed_us) if record.completed_us else None,
            "expires": format_time(record.expires_us),
            "fence": record.fence,
            "fingerprint": record.fingerprint or None,
            "outcome": None if outcome is None else repr(plain(outcome)),
        }
    )
    if record.status == "unknown":
        note("it is unknown whether the work was done: find out, then record it with semel keys resolve")


def _print_run_key(row: dict[str, Any]) -> None:
    tenant = f" of {row['tenant']}" if row["tenant"] else ""
    print_fields(
        {
            "key": f"{row['key']} of {row['user'] or 'nobody in particular'}{tenant}",
            "names run": row["job_id"],
            "created": format_time(row["created_us"]),
            "expires": format_time(row["expires_us"]),
            "payload": row["payload_hash"] or None,
        }
    )


@keys.command()
@examples(
    "semel keys resolve order-1 --scope orders --done --value '{\"id\": 7}'",
    "semel keys resolve order-1 --scope orders --not-done",
)
@argument("key", help="The key.")
@option("--done", is_flag=True, help="The work was done; later callers get --value.")
@option("--not-done", is_flag=True, help="The work was not done; the next caller does it.")
@option("--value", type=JSON_VALUE, help="The result of the work.  [default: null]")
@force_option
@scope_option
@db_options
def resolve(key: str, db: str, as_json: bool, **options: Any) -> None:
    """Record the outcome of work whose owner vanished.

    Either the work was done, with this value, or it was not, and the next caller does it. Find out first: semel cannot
    know.
    """
    from semel.once.client import Once

    done, value, force = options["done"], options["value"], options["force"]
    if done == options["not_done"]:
        raise click.UsageError("either --done or --not-done is required")
    if not done and value is not None:
        raise InvalidRequest("--value is the result of the work, so it needs --done")
    undone = [each for each in _records(db, key, options["scope"]) if each.status != "completed"]
    scope = options["scope"] or (_only(undone, "--scope").scope if undone else "default")
    with _suggesting_force(key):
        if _is_redis(db):
            with Once(db, collect=False) as once:
                once.resolve(key, scope=scope, done=done, value=value, force=force)
        else:
            _change(db, "resolve", "", checked_key("scope", scope), key, done=done, value=value, force=force)
    text = f"{key} in {scope} is {'done' if done else 'free: the next caller does the work'}"
    print_result(as_json, {"scope": scope, "key": key, "done": done}, text)


@keys.command()
@examples(
    "semel keys delete order-1 --scope orders",
    "semel keys delete ci-42 --user alice",
    "semel keys delete --all --scope orders --db redis://localhost/0",
)
@argument("key", required=False, help="The key.")
@option("--all", "whole_scope", is_flag=True, help="Every key of the scope, except those that are claimed.")
@force_option
@scope_option
@user_option
@tenant_option
@db_options
def delete(key: str | None, whole_scope: bool, db: str, as_json: bool, force: bool, **where: str | None) -> int:
    """Delete a key, or all keys of a scope.

    The next caller does the work again, so what the key prevented from happening twice can happen twice. A run that
    the key names is kept. In Redis, a key can only be found by its scope.
    """
    if whole_scope:
        return _delete_scope(key, where["scope"], db, force, as_json)
    if key is None:
        raise InvalidRequest("give a KEY, or --all for every key of --scope")
    records, run_keys = _find(db, key, **where)
    if not records and not run_keys:
        note(f"semel: the key {key!r} is free already")
        return 1
    removed = _delete_one(_only([*records, *run_keys], "--scope, or --user and --tenant"), db, force)
    text = f"forgotten: {key}" if removed else f"{key} was claimed by another caller just now; check again"
    print_result(as_json, {"key": key, "removed": removed}, text)
    return 0 if removed else 1


def _delete_one(found: Any, db: str, force: bool) -> bool:
    from semel.once.client import Once

    if isinstance(found, dict):
        return ask(db, lambda store: store.write(_delete_run_key, found, acting(store)))
    with _suggesting_force(found.key):
        if _is_redis(db):
            with Once(db, collect=False) as once:
                return once.forget(found.key, scope=found.scope, force=force)
        removed: bool = _change(db, "delete", "", found.scope, found.key, force=force)
        return removed


def _change(db: str, verb: str, *where: str, **how: Any) -> Any:
    """Change keys of a database, and log it."""
    from semel.runs.store import key_actions

    change = getattr(key_actions, verb)
    return ask(db, lambda store: store.write(change, store.key_store(), *where, **how, context=acting(store)))


def _delete_scope(key: str | None, scope: str | None, db: str, force: bool, as_json: bool) -> int:
    from semel.once.client import Once

    if key is not None or not scope:
        raise InvalidRequest("--all deletes every key of a scope: give --scope, and no KEY")
    if _is_redis(db):
        with Once(db, collect=False) as once:
            removed = once.forget_scope(scope, force=force)
    else:
        removed = _delete_all(db, checked_key("scope", scope), force)
    print_result(as_json, {"scope": scope, "removed": removed}, f"forgotten: {removed} keys in {scope}")
    return 0


def _delete_all(db: str, scope: str, force: bool) -> int:
    """Delete the keys of a scope in bounded steps, each of which is logged."""
    from semel.runs.store.key_actions import BATCH

    total, count = 0, BATCH
    while count == BATCH:
        count = _change(db, "delete_some", scope, force=force)
        total += count
    return total


@contextmanager
def _suggesting_force(key: str) -> Iterator[None]:
    """Turn InProgress into an error that names ``--force``."""
    try:
        yield
    except InProgress as error:
        left = format_span(error.retry_after)
        raise InvalidRequest(
            f"{key!r} is claimed (for at least {left} more); --force takes it from its owner"
        ) from error


def _only(found: list[Any], narrower: str) -> Any:
    if len(found) > 1:
        places = [f"of user {each['user']!r}" if isinstance(each, dict) else f"in {each.scope!r}" for each in found]
        raise InvalidRequest(f"there are {len(found)} such keys, {', '.join(places)}: choose one with {narrower}")
    return found[0]


def _is_redis(url: str) -> bool:
    return url.partition(":")[0].partition("+")[0] in ("redis", "rediss", "unix")


def _find(
    db: str, key: str, scope: str | None, user: str | None, tenant: str | None
) -> tuple[list[Record], list[dict[str, Any]]]:
    """The records of the key, and the run keys of the same name."""
    records = _records(db, key, scope) if user is None and tenant is None else []
    if scope or _is_redis(db):
        return records, []
    return records, ask(db, lambda store: store.read(_run_keys_of, key, user, tenant, store.statement_context))


def _records(db: str, key: str, scope: str | None) -> list[Record]:
    """The records of the key, in this scope or in all."""
    from semel.once.client import Once

    if not _is_redis(db):
        require(db)
    scopes = [scope] if scope else _scopes(db, key)
    with Once(db, collect=False) as once:
        found = [once.get(key, scope=each) for each in scopes]
    return [each for each in found if each is not None and (scope or each.kind != "run")]


def _scopes(db: str, key: str) -> list[str]:
    if _is_redis(db):
        return ["default"]
    return ask(db, lambda store: store.read(_scopes_of, key))


def _scopes_of(conn: Connection, key: str) -> list[str]:
    from sqlalchemy import select

    from semel.db.schema import keys

    return list(conn.scalars(select(keys.c.scope).where(keys.c.key == key).order_by(keys.c.scope).limit(MOST)))


def _run_keys_of(
    conn: Connection, key: str, user: str | None, tenant: str | None, terms: StatementContext
) -> list[dict[str, Any]]:
    from msgspec.structs import asdict

    from semel.runs.store.run_keys import entries

    found = entries(conn, key, tenant, user, terms)[:MOST]
    return [{name: asdict(each)[name] for name in _RUN_KEY} for each in found]


_RUN_KEY = ("user", "tenant", "kind", "key", "payload_hash", "job_id", "created_us", "expires_us")


def _delete_run_key(conn: Connection, found: dict[str, Any], terms: StatementContext) -> bool:
    """Delete a run key, unless it names another run by now."""
    from semel.runs.store.key_actions import delete_run_key
    from semel.runs.store.run_keys import RunKey

    return delete_run_key(conn, RunKey(**found), terms)
