"""``semel quota``: how much users may run and spend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from semel.cli._database import acting, ask, opened
from semel.cli._options import Function, Value, argument, db_options, examples, group, option, tenant_option
from semel.cli._output import note, print_json, print_list, print_result, print_table

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from semel.db.dialect import StatementContext
    from semel.runs.store.quotas import Person
    from semel.runs.types import Quota

COUNTS = {"max_concurrent": "runs at a time", "per_hour": "runs an hour", "per_day": "runs a day"}
COSTS = {
    "cost_daily": "cost a day",
    "cost_weekly": "cost a week",
    "cost_monthly": "cost a month",
    "cost_yearly": "cost a year",
}
LIMITS = {**COUNTS, **COSTS}
NO_LIMIT = object()
"""The value of ``none``, which removes a limit."""


@group
def quota() -> None:
    """Limit how much users may run and spend.

    The quota of the user * applies to every user without a quota of their own.
    """


@quota.command("list")
@examples("semel quota list")
@tenant_option
@db_options
def list_quotas(tenant: str, db: str, as_json: bool) -> None:
    """List the quotas of a tenant."""
    from semel.runs.store import quotas

    found = ask(db, lambda store: store.read(quotas.list_quotas, tenant))
    names = [*LIMITS, "action", "warn_at"]
    print_list(
        as_json,
        {"quotas": found},
        ["user", *(name.replace("_", " ") for name in names)],
        [[user, *(_format(getattr(quota, name)) for name in names)] for user, quota in found.items()],
        empty="there are no quotas: no user is limited; set one with: semel quota set",
    )


def _format(value: object) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


@quota.command()
@examples("semel quota show alice")
@argument("user", help="The user; * stands for all users without a quota of their own.")
@tenant_option
@db_options
def show(user: str, tenant: str, db: str, as_json: bool) -> None:
    """Show the effective quota of a user, and their usage."""
    from semel.runs.store import quotas

    used, quota = ask(
        db, lambda store: store.read(quotas.usage_and_quota, _person(tenant, user), store.statement_context)
    )
    if as_json:
        print_json({"user": user, "quota": quota, "usage": used})
        return
    counts = [used.concurrent, used.last_hour, used.last_day]
    in_use = {**dict(zip(COUNTS, counts, strict=True)), **{f"cost_{each}": spent for each, spent in used.spent.items()}}
    rows = [[what, _format(in_use[name]), _format(getattr(quota, name, None))] for name, what in LIMITS.items()]
    print_table(["what", "in use", "limit"], rows, empty="")
    if quota is None:
        note(f"{user} has no quota")
    elif quota.action == "warn":
        note("submissions over a limit are accepted with a warning")


def _person(tenant: str, user: str) -> Person:
    from semel._validation import checked_name

    return checked_name("tenant", tenant), checked_name("user", user, empty=False)


def _count(text: str) -> Any:
    if text != "none" and not text.isdecimal():
        raise ValueError(f"{text!r} must be a whole number, 0 or greater, or none")
    return NO_LIMIT if text == "none" else int(text)


def _cost(text: str) -> Any:
    try:
        return NO_LIMIT if text == "none" else float(text)
    except ValueError:
        raise ValueError(f"{text!r} must be a number, or none") from None


def _limit_options(function: Function) -> Function:
    for names, kind in ((COSTS, Value("X", _cost)), (COUNTS, Value("N", _count))):
        for name, what in reversed(names.items()):
            about = f"{what[0].upper()}{what[1:]}, or none."
            function = option(f"--{name.replace('_', '-')}", type=kind, help=about)(function)
    return function


@quota.command("set")
@examples(
    "semel quota set '*' --max-concurrent 5",
    "semel quota set alice --max-concurrent 20 --cost-monthly 500 --action warn",
    "semel quota set alice --cost-monthly none",
)
@argument("user", help="The user; * stands for all users without a quota of their own.")
@_limit_options
@option("--action", type=click.Choice(["block", "warn"]), help="Refuse submissions over a limit, or only warn.")
@option("--warn-at", type=float, metavar="PART", help="The fraction of a limit at which to warn, such as 0.8.")
@tenant_option
@db_options
def set_quota(user: str, tenant: str, db: str, as_json: bool, **limits: Any) -> None:
    """Set limits of a user. Other limits do not change; none removes a limit."""
    changes = {name: None if value is NO_LIMIT else value for name, value in limits.items() if value is not None}
    if not changes:
        raise click.UsageError("nothing to set: give a limit, such as --max-concurrent 5; none removes one")
    person = _person(tenant, user)
    quota = ask(db, lambda store: store.write(_change, person, changes, acting(store)), create=True)
    there = ((getattr(quota, name), what) for name, what in LIMITS.items())
    shown = [_format_limit(value, what) for value, what in there if value is not None]
    text = f"{user}: {', '.join(shown) or 'no limit'} ({quota.action})"
    print_result(as_json, {"user": user, "quota": quota}, text)


def _format_limit(value: float, what: str) -> str:
    return f"{_format(value)} {what.replace('runs', 'run', 1) if value == 1 else what}"


def _change(conn: Connection, person: Person, changes: dict[str, Any], terms: StatementContext) -> Quota:
    """Read and write the quota in one transaction."""
    from msgspec.structs import asdict

    from semel.runs.store import quotas
    from semel.runs.types import Quota

    quotas.read_clock(conn, terms)
    quotas.lock(conn, [person])
    known = quotas.list_quotas(conn, person[0]).get(person[1], Quota())
    quota = Quota(**{**asdict(known), **changes})
    quotas.set_quota(conn, person, quota, terms)
    return quota


@quota.command()
@examples("semel quota unset alice")
@argument("user", help="The user; * stands for all users without a quota of their own.")
@tenant_option
@db_options
def unset(user: str, tenant: str, db: str, as_json: bool) -> None:
    """Remove the quota of a user; the quota of * applies then, if there is one."""
    from semel._concurrency.sync import run_sync
    from semel.runs.store import quotas

    with opened(db) as store:
        there = user in run_sync(store.read(quotas.list_quotas, tenant))
        run_sync(store.write(quotas.set_quota, _person(tenant, user), None, acting(store)))
    text = f"the quota of {user} is removed" if there else f"{user} has no quota"
    print_result(as_json, {"user": user, "removed": there}, text)
