"""``semel quota``: how much users may have at a time, and spend."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from semel.cli import database, options, printing

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from semel.runs.quotas import Person, Quota
    from semel.sql.statements import Terms

COUNTS = {
    "max_concurrent": "runs at a time",
    "per_hour": "runs an hour",
    "per_day": "runs a day",
}
COSTS = {
    "cost_daily": "cost a day",
    "cost_weekly": "cost a week",
    "cost_monthly": "cost a month",
    "cost_yearly": "cost a year",
}
EVERYBODY = "* is everybody who has no quota of their own"


def add_to(commands: options.Commands) -> None:
    """Add the commands."""
    verbs = options.family(
        commands,
        "quota",
        help="how much users may run and spend",
        description=f"Limits of users. {EVERYBODY}; a user's own quota replaces it as a whole.",
    )
    listing = options.command(
        verbs, "list", help="list quotas", description="Every quota of a tenant.", example="semel quota list"
    )
    showing = options.command(
        verbs,
        "show",
        help="a user's quota, and what is in use",
        description="The quota that holds for a user, and what they have in use.",
        example="semel quota show alice",
    )
    showing.add_argument("user", metavar="USER", help="the user")
    _add_set(verbs)
    unsetting = options.command(
        verbs,
        "unset",
        help="take a quota away",
        description="Take a user's own quota away; then the one of everybody holds, if there is one.",
        example="semel quota unset alice",
    )
    unsetting.add_argument("user", metavar="USER", help=f"the user; {EVERYBODY}")
    for parser, do in ((listing, _list), (showing, _show), (unsetting, _unset)):
        options.tenant_option(parser)
        options.db_option(parser)
        parser.set_defaults(do=do)


def _add_set(verbs: options.Commands) -> None:
    parser = options.command(
        verbs,
        "set",
        help="set limits of a user",
        description="Set limits of a user. What is not named stays as it is; none takes a limit away.",
        example="semel quota set '*' --max-concurrent 5\n"
        "semel quota set alice --max-concurrent 20 --cost-monthly 500 --action warn\n"
        "semel quota set alice --cost-monthly none",
    )
    parser.add_argument("user", metavar="USER", help=f"the user; {EVERYBODY}")
    for name, what in COUNTS.items():
        parser.add_argument(_flag(name), type=_count, metavar="N", help=f"{what}, or none", default=argparse.SUPPRESS)
    for name, what in COSTS.items():
        parser.add_argument(_flag(name), type=_cost, metavar="X", help=f"{what}, or none", default=argparse.SUPPRESS)
    parser.add_argument(
        "--action",
        choices=("block", "warn"),
        default=argparse.SUPPRESS,
        help="refuse what is over a limit, or only say so",
    )
    parser.add_argument(
        "--warn-at", type=float, metavar="PART", default=argparse.SUPPRESS, help="part of a limit at which to warn: 0.8"
    )
    options.tenant_option(parser)
    options.db_option(parser)
    parser.set_defaults(do=_set, refuse=parser.error)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _count(text: str) -> int | None:
    if text == "none":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on, nor none")
    return int(text)


def _cost(text: str) -> float | None:
    try:
        return None if text == "none" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number, nor none") from None


def _person(chosen: argparse.Namespace) -> Person:
    from semel.runs.records import checked_name

    return checked_name("tenant", chosen.tenant), checked_name("user", chosen.user, empty=False)


def _list(chosen: argparse.Namespace) -> int:
    from semel.bridge import drive

    with database.opened(chosen) as ledger:
        found = drive(ledger.quotas(chosen.tenant))
    if chosen.json:
        printing.print_json({"quotas": found})
        return 0
    names = [*COUNTS, *COSTS, "action", "warn_at"]
    printing.print_table(
        ["user", *(name.replace("_", " ") for name in names)],
        [[user, *(_said(getattr(quota, name)) for name in names)] for user, quota in found.items()],
        nothing="there are no quotas: nobody is limited; set one with: semel quota set",
    )
    return 0


def _said(value: object) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _show(chosen: argparse.Namespace) -> int:
    from semel.bridge import drive

    with database.opened(chosen) as ledger:
        used, quota = drive(ledger.usage(_person(chosen)))
    if chosen.json:
        printing.print_json({"user": chosen.user, "quota": quota, "usage": used})
        return 0
    in_use: dict[str, Any] = {
        "max_concurrent": used.concurrent,
        "per_hour": used.last_hour,
        "per_day": used.last_day,
        **{f"cost_{period}": amount for period, amount in used.spent.items()},
    }
    rows = [
        [what, _said(in_use[name]), _said(getattr(quota, name, None))] for name, what in {**COUNTS, **COSTS}.items()
    ]
    printing.print_table(["what", "in use", "limit"], rows, nothing="")
    if quota is None:
        printing.say(f"no quota holds for {chosen.user}")
    elif quota.action == "warn":
        printing.say("what is over a limit is let through, with a warning")
    return 0


def _set(chosen: argparse.Namespace) -> int:
    from semel.bridge import drive

    changes = {name: getattr(chosen, name) for name in (*COUNTS, *COSTS, "action", "warn_at") if hasattr(chosen, name)}
    if not changes:
        chosen.refuse("nothing to set: name a limit, such as --max-concurrent 5; none takes one away")
    with database.opened(chosen, make=True) as ledger:
        quota = drive(ledger.write(_changed, _person(chosen), changes, ledger.terms))
    if chosen.json:
        printing.print_json({"user": chosen.user, "quota": quota})
    else:
        said = ((getattr(quota, name), what) for name, what in {**COUNTS, **COSTS}.items())
        limits = [_limit(value, what) for value, what in said if value is not None]
        print(f"{chosen.user}: {', '.join(limits) or 'no limit'} ({quota.action})")
    return 0


def _limit(value: float, what: str) -> str:
    return f"{_said(value)} {what.replace('runs', 'run', 1) if value == 1 else what}"


def _changed(conn: Connection, person: Person, changes: dict[str, Any], terms: Terms) -> Quota:
    """The quota with the changes, written in the transaction in which it was read."""
    from msgspec.structs import asdict

    from semel.runs import quotas

    quotas.read_clock(conn, terms)
    quotas.lock(conn, [person])
    known = quotas.list_quotas(conn, person[0]).get(person[1], quotas.Quota())
    quota = quotas.Quota(**{**asdict(known), **changes})
    quotas.set_quota(conn, person, quota, terms)
    return quota


def _unset(chosen: argparse.Namespace) -> int:
    from semel.bridge import drive

    with database.opened(chosen) as ledger:
        there = chosen.user in drive(ledger.quotas(chosen.tenant))
        drive(ledger.set_quota(_person(chosen), None))
    if chosen.json:
        printing.print_json({"user": chosen.user, "removed": there})
    else:
        print(f"the quota of {chosen.user} is removed" if there else f"{chosen.user} has no quota")
    return 0
