"""``semel audit``: the sealed history of runs, and what people did. Verifying a file needs no database."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from semel.cli._database import acting, ask
from semel.cli._options import POSITIVE, TIME, argument, db_options, examples, group, json_option, option
from semel.cli._output import format_time, note, print_json, print_page, print_result, with_iso_times
from semel.errors import InvalidRequest, MissingExtra, RunNotFound

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Connection

    from semel.audit_log import AuditCheck
    from semel.runs.store.audit_log import AuditEntry

ENTRANCES = click.Choice(["api", "dashboard", "cli", "python"])


@group
def audit() -> None:
    """Export and verify the sealed history of runs, prove a run, and show what people did.

    After semel audit begin, workers seal what ended once a minute. A seal covers its attempts and all seals before it,
    so that a row that was changed, deleted or inserted is noticed. Keep a head elsewhere: it shows that nothing was cut
    off or replaced since.
    """


@audit.command()
@examples("semel audit begin", "semel audit begin --db postgresql://localhost/app")
@db_options
def begin(db: str, as_json: bool) -> None:
    """Seal the history of runs from now on, for every server and worker of the database. It cannot be ended.

    Each run that ends then costs more: about 40 % more CPU time of PostgreSQL, or twice the CPU time on SQLite.
    """
    from semel.runs.store import seals

    begun = ask(db, lambda store: store.write(seals.begin, acting(store)))
    text = "the history of runs is sealed from now on" if begun else "the history of runs was sealed before"
    print_result(as_json, {"begun": begun}, text)


@audit.command()
@examples("semel audit export > history.jsonl", "semel audit export | semel audit verify -")
@option("--db", envvar="SEMEL_DB", default="sqlite:///semel.db", metavar="URL", help="The database.")
def export(db: str) -> None:
    """Print all seals with the rows that they cover, as JSON lines, and what is not sealed yet."""
    with _snapshot(db) as conn:
        for line in _exported(conn):
            sys.stdout.write(f"{line}\n")


@audit.command()
@examples(
    "semel audit verify",
    "semel audit verify history.jsonl --head 5f0c…",
    "semel audit verify proof.jsonl --key seal.pub",
)
@argument("file", required=False, metavar="[FILE]", help="An export or a proof; - reads it from standard input.")
@option("--head", metavar="HEAD", help="A head that was kept elsewhere: it must be in the chain.")
@option(
    "--key",
    "keys",
    multiple=True,
    metavar="KEY",
    help="The public key: 64 digits, or a file; the seals are signed with it.",
)
@option("--signed-from", type=POSITIVE, default="1", help="With --key, the number of the first seal that is signed.")
@option(
    "--log-head", "log_heads", multiple=True, metavar="HEAD", help="A head of the log: its row must still be there."
)
@db_options
def verify(
    *,
    file: str | None,
    head: str | None,
    keys: tuple[str, ...],
    signed_from: int,
    log_heads: tuple[str, ...],
    db: str,
    as_json: bool,
) -> int:
    """Verify an export or a proof, without a database; or without FILE, the database, with the log of what people did.

    Prints the first place where the history is not what was sealed, or the log not what was written. The exit code is 0
    if both are, 1 if not, and 2 if that cannot be told, because the file is no export, for example.
    """
    from semel import audit as checking

    typed = click.get_current_context().get_parameter_source("signed_from") is not ParameterSource.DEFAULT
    if typed and not keys:
        raise click.UsageError("--signed-from needs --key, or it checks nothing")
    if file and log_heads:
        raise InvalidRequest("--log-head needs a database: a file does not have the log of what people did")
    try:
        kept = [each.lower() for each in log_heads]
        for each in kept:
            checking.check_head(each)
        known = [checking.read_key(each) for each in keys]
        with ExitStack() as stack:
            lines = _lines(file, db, stack)
            found = checking.verify(lines, head=head and head.lower(), keys=known, signed_from=signed_from)
        log = None if file else _check_log(db, kept)
    except checking.NotAsSealed as error:
        print_result(as_json, {"verified": False, "place": str(error)}, f"NOT AS SEALED: {error}")
        return 1
    except (checking.CannotVerify, OSError) as error:
        note(f"semel: cannot verify: {error}")
        return 2
    if log is not None and log.problem:
        print_result(as_json, {"verified": False, "place": log.problem}, f"THE LOG WAS ALTERED: {log.problem}")
        return 1
    people = "" if log is None else f"\nlog of what people did: {log.rows} rows as they were written{_heads(log)}"
    result = {"verified": True, **found._asdict()}
    result |= {} if log is None else {"log": log.rows, "log_heads": log.heads}
    print_result(as_json, result, f"{found}{people}")
    return 0


def _check_log(db: str, heads: list[str]) -> AuditCheck:
    from semel.runs.store.audit_log import verify

    return ask(db, lambda store: store.read(verify, heads))


def _heads(log: AuditCheck) -> str:
    return "".join(f"\nlog head{f' of {tenant}' if tenant else ''}: {each}" for tenant, each in log.heads.items())


def _lines(file: str | None, db: str, stack: ExitStack) -> Iterable[str | bytes]:
    if file is None:
        return _exported(stack.enter_context(_snapshot(db)))
    return sys.stdin.buffer if file == "-" else stack.enter_context(Path(file).open("rb"))


@audit.command()
@examples("semel audit prove 01a1ed55-b7ee-7cd8-8aee-791d21b7e992 > proof.jsonl")
@argument("run", help="The run's id.")
@option("--chain", is_flag=True, help="Add all later seals, so that the proof verifies against a kept --head.")
@option("--db", envvar="SEMEL_DB", default="sqlite:///semel.db", metavar="URL", help="The database.")
def prove(run: str, chain: bool, db: str) -> None:
    """Print a proof that the attempts of a run are sealed: it verifies on its own, by semel audit verify."""
    from semel.runs.store import seals
    from semel.runs.types import checked_id

    run_id = checked_id(run.strip().lower())
    if run_id is None:
        raise RunNotFound(f"{run!r} is not a run id")
    with _snapshot(db) as conn:
        lines = seals.prove(conn, run_id, chain=chain)
    if not lines:
        raise RunNotFound(f"no attempt of a run {run_id} is sealed: it did not end, ended just now, or does not exist")
    for line in lines:
        print(_encoded(line))


@audit.command()
@examples("semel audit head", "semel audit head --json >> heads.jsonl")
@db_options
def head(db: str, as_json: bool) -> int | None:
    """Print the newest seal's digest, to be kept where nobody who writes to the database can change it."""
    from msgspec.structs import asdict

    from semel.runs.store import seals

    with _snapshot(db) as conn:
        newest = seals.head(conn)
    if newest is None:
        note("semel: there is no seal yet")
        return 1
    note(f"seal {newest.number}, made at {format_time(newest.at_us)}:")
    print_result(as_json, asdict(newest), newest.digest)
    return None


@audit.command()
@examples("semel audit key seal.key > seal.pub")
@argument("file", help="Where the private key is written; it must not exist.")
@json_option
def key(file: str, as_json: bool) -> None:
    """Make a key for SEMEL_SEAL_KEY, and print its public key."""
    try:
        from cryptography.hazmat.primitives import serialization as form
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise MissingExtra(f"{error}; this needs an extra: pip install 'semel[audit]'") from error
    private = Ed25519PrivateKey.generate()
    pem = private.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    with os.fdopen(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as out:
        out.write(pem)
    public = private.public_key().public_bytes_raw().hex()
    print_result(as_json, {"public_key": public, "file": file}, public)


@audit.command()
@examples(
    "semel audit log --since 7d",
    "semel audit log --action token --user alice",
    "semel audit log --target 3f9a1c5b7e2d4680 --json",
)
@option("--user", metavar="USER", help="Only what this user did.")
@option("--action", metavar="ACTION", help="Only this action, such as token.created, or a kind, such as token.")
@option("--target", metavar="ID", help="Only what was done to this: the id of a token or run, a key, a user.")
@option("--entrance", type=ENTRANCES, help="Only what came by this entrance.")
@option("--since", type=TIME, help="Only what was done at this time or later; a span, such as 7d, is before now.")
@option("--until", type=TIME, help="Only what was done before this time.")
@option("--tenant", metavar="TENANT", help="Only what was done to this tenant.  [default: all tenants]")
@option("--limit", type=POSITIVE, default="50", help="The most rows.")
@db_options
def log(db: str, as_json: bool, limit: int, since: datetime | None, until: datetime | None, **filters: Any) -> None:
    """Show what people changed, newest first: tokens, quotas, configs, keys, runs and subscriptions.

    Each row says who did it, from where, and what was before and after. Secrets are not in it.
    """
    from semel.runs.store.audit_log import AuditFilter, entries

    wanted = AuditFilter(**filters, since_us=_us(since), until_us=_us(until))
    found = ask(db, lambda store: store.read(entries, wanted, limit + 1)).entries
    if as_json:
        print_json({"actions": [_as_fields(each) for each in found[:limit]], "more": len(found) > limit})
        return
    headings = ["no", "time", "user", "from", "action", "target", "before", "after"]
    print_page(as_json, "actions", found, limit, headings=headings, row=_row)


def _us(when: datetime | None) -> int | None:
    return None if when is None else round(when.timestamp() * 1e6)


def _as_fields(entry: AuditEntry) -> dict[str, Any]:
    from msgspec.structs import asdict

    return with_iso_times(asdict(entry))


def _row(entry: AuditEntry) -> list[object]:
    origin = f"{entry.entrance} {entry.address}"
    values = [None if each is None else json.dumps(each, ensure_ascii=False) for each in (entry.before, entry.after)]
    return [entry.seq, format_time(entry.at_us), entry.user, origin, entry.action, entry.target, *values]


@contextmanager
def _snapshot(url: str) -> Iterator[Connection]:
    """A transaction that sees one state of the database, however long it takes."""
    from sqlalchemy import text

    from semel.cli._database import engine_of, require
    from semel.db import migrate
    from semel.db.errors import translate_errors

    require(url)
    engine = engine_of(url)
    postgres = engine.dialect.name == "postgresql"
    options: dict[str, Any] = {"isolation_level": "REPEATABLE READ"} if postgres else {"semel_reads": True}
    try:
        with translate_errors(), engine.connect().execution_options(**options) as conn:
            migrate.require(conn)
            if postgres:
                for name in ("idle_in_transaction_session_timeout", "statement_timeout"):
                    conn.execute(text(f"SELECT set_config('{name}', '0', true)"))
            yield conn
    finally:
        engine.dispose()


def _exported(conn: Connection) -> Iterator[str]:
    from semel.runs.store import seals

    return map(_encoded, seals.export(conn))


def _encoded(line: dict[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":"), default=repr)
