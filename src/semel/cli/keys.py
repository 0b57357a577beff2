"""``semel keys``: look at keys, say what became of lost work, forget them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from semel.cli import database, options, printing
from semel.errors import InProgress, InvalidRequest

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from semel.model import Record
    from semel.runs.ledger import Ledger
    from semel.sql.statements import Terms

MOST = 100
"""Keys of one name that are shown."""


def add_to(commands: options.Commands) -> None:
    """Add the commands."""
    verbs = options.family(
        commands,
        "keys",
        help="look keys up, say what became of lost work, forget keys",
        description="Idempotency keys: those of functions, messages and HTTP requests (in a scope), and those of runs "
        "(of a user).",
    )
    showing = options.command(
        verbs,
        "show",
        help="what is known of a key",
        description="What is known of a key: whether somebody works on it, what came of it, which run it names. "
        "In a Redis only a key whose scope is named can be found.",
        example="semel keys show order-1\nsemel keys show order-1 --scope orders --db redis://localhost/0",
    )
    resolving = options.command(
        verbs,
        "resolve",
        help="say what became of work whose owner vanished",
        description="Say what became of work whose owner vanished: it was done, with this value, or it was not, so "
        "that the next caller does it. Look first: semel cannot know.",
        example="semel keys resolve order-1 --scope orders --done --value '{\"id\": 7}'\n"
        "semel keys resolve order-1 --scope orders --not-done",
    )
    became = resolving.add_mutually_exclusive_group(required=True)
    became.add_argument("--done", action="store_true", help="it happened; every later caller gets the value")
    became.add_argument("--not-done", action="store_true", help="it did not; the next caller does it")
    resolving.add_argument("--value", type=options.json_value, metavar="JSON", help="what it returned (default: null)")
    deleting = options.command(
        verbs,
        "delete",
        help="forget a key, or all of a scope",
        description="Forget a key, so that the next caller's work is done anew: what was protected from happening "
        "twice can then happen again. A run that the key names is left as it is. "
        "In a Redis only a key whose scope is named can be found.",
        example="semel keys delete order-1 --scope orders\nsemel keys delete ci-42 --user alice\n"
        "semel keys delete --all --scope orders --db redis://localhost/0",
    )
    deleting.add_argument("--all", action="store_true", help="every key of the scope; those that are worked on stay")
    for parser in (resolving, deleting):
        parser.add_argument(
            "--force", action="store_true", help="also from those who work on it: they lose their claim"
        )
    for parser, do in ((showing, _show), (resolving, _resolve), (deleting, _delete)):
        parser.add_argument("key", metavar="KEY", nargs="?" if do is _delete else None, help="the key")
        parser.add_argument("--scope", metavar="SCOPE", help="only in this scope (default: wherever it is)")
        if do is not _resolve:
            parser.add_argument("--user", metavar="USER", help="only this user's key of a run")
            parser.add_argument("--tenant", metavar="TENANT", help="only this tenant's key of a run")
        options.db_option(parser)
        parser.set_defaults(do=do)


def _show(chosen: argparse.Namespace) -> int:
    claims, named = _claims(chosen), _run_keys(chosen)
    if chosen.json:
        printing.print_json(
            {"keys": [_told(each) for each in claims], "run_keys": [printing.timed(each) for each in named]}
        )
    elif not claims and not named:
        printing.say(f"the key {chosen.key!r} is free")
    else:
        for record in claims:
            _print_claim(record)
        for row in named:
            _print_run_key(row)
    return 0 if claims or named else 1


def _told(record: Record) -> dict[str, Any]:
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
    return printing.timed(fields)


def _outcome(record: Record) -> Any:
    """What is replayed, in a form that can be printed."""
    outcome = record.outcome
    if outcome is None:
        return None
    if outcome.gone:
        return {"kind": outcome.kind, "gone": True}
    value = outcome.value
    if outcome.kind == "response":
        return {"kind": "response", "status": value.status, "bytes": len(value.body or b"")}
    return {"kind": outcome.kind, "value": value}


def _print_claim(record: Record) -> None:
    outcome = _outcome(record)
    printing.print_fields(
        {
            "key": f"{record.key} in {record.scope}",
            "status": record.status.replace("_", " "),
            "created": printing.when(record.created_us),
            "lease ends": printing.when(record.lease_until_us) if record.state == "claimed" else None,
            "completed": printing.when(record.completed_us) if record.completed_us else None,
            "expires": printing.when(record.expires_us),
            "fence": record.fence,
            "fingerprint": record.fingerprint or None,
            "outcome": None if outcome is None else repr(printing.plain(outcome)),
        }
    )
    if record.status == "unknown":
        printing.say("nobody knows whether its work happened: find out, then say it with semel keys resolve")


def _print_run_key(row: dict[str, Any]) -> None:
    tenant = f" of {row['tenant']}" if row["tenant"] else ""
    printing.print_fields(
        {
            "key": f"{row['key']} of {row['user'] or 'nobody in particular'}{tenant}",
            "names run": row["job_id"],
            "created": printing.when(row["created_us"]),
            "expires": printing.when(row["expires_us"]),
            "payload": row["payload_hash"] or None,
        }
    )


def _resolve(chosen: argparse.Namespace) -> int:
    from semel.once.faces import Once

    if chosen.not_done and chosen.value is not None:
        raise InvalidRequest("--value is what the work returned, so it goes with --done")
    undone = [each for each in _claims(chosen) if each.status != "completed"]
    scope = chosen.scope or (_only(undone, "--scope").scope if undone else "default")
    with Once(options.database(chosen), collect=False) as once, _forced(chosen):
        once.resolve(chosen.key, scope=scope, done=chosen.done, value=chosen.value, force=chosen.force)
    if chosen.json:
        printing.print_json({"scope": scope, "key": chosen.key, "done": chosen.done})
    else:
        print(f"{chosen.key} in {scope} is {'done' if chosen.done else 'free: the next caller does the work'}")
    return 0


def _delete(chosen: argparse.Namespace) -> int:
    from semel.once.faces import Once

    if chosen.all:
        return _delete_all(chosen)
    if chosen.key is None:
        raise InvalidRequest("which key? name it, or say --all for every key of --scope")
    claims, named = _claims(chosen), _run_keys(chosen)
    if not claims and not named:
        printing.say(f"semel: the key {chosen.key!r} is free already")
        return 1
    found = _only([*claims, *named], "--scope, or --user and --tenant")
    if isinstance(found, dict):
        removed = _in_ledger(chosen, lambda ledger: ledger.write(_forget, found))
    else:
        with Once(options.database(chosen), collect=False) as once, _forced(chosen):
            removed = once.forget(found.key, scope=found.scope, force=chosen.force)
    if chosen.json:
        printing.print_json({"key": chosen.key, "removed": removed})
    else:
        print(f"forgotten: {chosen.key}" if removed else f"{chosen.key} has changed hands just now; look again")
    return 0 if removed else 1


def _delete_all(chosen: argparse.Namespace) -> int:
    from semel.once.faces import Once

    if chosen.key is not None or not chosen.scope:
        raise InvalidRequest("--all forgets every key of a scope: name it with --scope, and no KEY")
    url = options.database(chosen)
    if not _is_redis(url):
        database.require(url)
    with Once(url, collect=False) as once:
        removed = once.forget_scope(chosen.scope, force=chosen.force)
    if chosen.json:
        printing.print_json({"scope": chosen.scope, "removed": removed})
    else:
        print(f"forgotten: {removed} keys in {chosen.scope}")
    return 0


@contextmanager
def _forced(chosen: argparse.Namespace) -> Iterator[None]:
    """Say how to insist in the words of the command line."""
    try:
        yield
    except InProgress as error:
        left = printing.lasting(error.retry_after)
        raise InvalidRequest(
            f"somebody works on {chosen.key!r} (for {left} more, or longer); --force takes it from them"
        ) from error


def _only(found: list[Any], narrower: str) -> Any:
    if len(found) > 1:
        places = [f"of user {each['user']!r}" if isinstance(each, dict) else f"in {each.scope!r}" for each in found]
        raise InvalidRequest(f"there are {len(found)} such keys, {', '.join(places)}: say which with {narrower}")
    return found[0]


def _is_redis(url: str) -> bool:
    return url.partition(":")[0].partition("+")[0] in ("redis", "rediss", "unix")


def _claims(chosen: argparse.Namespace) -> list[Record]:
    """The key's records, in the scope that was named or in all."""
    from semel.once.faces import Once

    url = options.database(chosen)
    if getattr(chosen, "user", None) is not None or getattr(chosen, "tenant", None) is not None:
        return []
    if not _is_redis(url):
        database.require(url)
    scopes = [chosen.scope] if chosen.scope else _scopes(chosen, url)
    with Once(url, collect=False) as once:
        found = [once.get(chosen.key, scope=scope) for scope in scopes]
    return [each for each in found if each is not None]


def _scopes(chosen: argparse.Namespace, url: str) -> list[str]:
    if _is_redis(url):
        return ["default"]
    found: list[str] = _in_ledger(chosen, lambda ledger: ledger.read(_scopes_of, chosen.key))
    return found


def _run_keys(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    if chosen.scope or _is_redis(options.database(chosen)):
        return []
    found: list[dict[str, Any]] = _in_ledger(
        chosen, lambda ledger: ledger.read(_run_keys_of, chosen.key, chosen.user, chosen.tenant, ledger.terms)
    )
    return found


def _in_ledger(chosen: argparse.Namespace, ask: Callable[[Ledger], Any]) -> Any:
    from semel.bridge import drive

    with database.opened(chosen) as ledger:
        return drive(ask(ledger))


def _scopes_of(conn: Connection, key: str) -> list[str]:
    from sqlalchemy import select

    from semel.sql.schema import keys

    return list(conn.scalars(select(keys.c.scope).where(keys.c.key == key).order_by(keys.c.scope).limit(MOST)))


def _run_keys_of(
    conn: Connection, key: str, user: str | None, tenant: str | None, terms: Terms
) -> list[dict[str, Any]]:
    from sqlalchemy import select

    from semel.runs.quotas import read_clock
    from semel.sql.schema import run_keys

    query = select(run_keys).where(run_keys.c.key == key, run_keys.c.expires_us >= read_clock(conn, terms)).limit(MOST)
    if user is not None:
        query = query.where(run_keys.c.user_id == user)
    if tenant is not None:
        query = query.where(run_keys.c.tenant == tenant)
    rows = [dict(row) for row in conn.execute(query).mappings()]
    return [{"user": row.pop("user_id"), **row} for row in rows]


def _forget(conn: Connection, found: dict[str, Any]) -> bool:
    """Forget a run's key, unless it names another run by now."""
    from sqlalchemy import delete

    from semel.sql.schema import run_keys

    own = [run_keys.c[name] == found[name] for name in ("tenant", "kind", "key", "job_id")]
    query = delete(run_keys).where(*own, run_keys.c.user_id == found["user"])
    return bool(conn.execute(query).rowcount)
