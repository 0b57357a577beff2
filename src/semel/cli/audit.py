"""``semel audit``: what people did, from the audit log of a database."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from semel.cli._database import ask
from semel.cli._options import POSITIVE, TIME, db_options, examples, group, option
from semel.cli._output import format_time, print_json, print_page, with_iso_times

if TYPE_CHECKING:
    from datetime import datetime

    from semel.runs.store.audit_log import AuditEntry

ENTRANCES = click.Choice(["api", "dashboard", "cli", "python"])


@group
def audit() -> None:
    """Show what people did, and prove that nobody changed it."""


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
