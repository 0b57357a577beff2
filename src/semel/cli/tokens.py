"""``semel token``: who may use the server."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from semel.cli import database, options, printing
from semel.errors import InvalidRequest

if TYPE_CHECKING:
    from semel.service.tokens import Issued, Token

ROLES = ("submitter", "operator", "admin")


def add_to(commands: options.Commands) -> None:
    """Add the commands."""
    verbs = options.family(
        commands,
        "token",
        help="who may use the server: make, list, rotate and revoke tokens",
        description="Tokens say who a caller is and what they may do: a submitter has runs of their own, an operator "
        "sees everybody's, an admin manages. Without any token the server answers this machine only.",
    )
    _add_create(verbs)
    listing = options.command(
        verbs,
        "list",
        help="list tokens",
        description="List tokens, oldest first. Their secrets are not kept, so they cannot be shown.",
        example="semel token list\nsemel token list --tenant acme --json",
    )
    listing.add_argument("--tenant", metavar="TENANT", help="only this tenant's")
    options.db_option(listing)
    listing.set_defaults(do=_list)
    _add_rotate(verbs)
    revoking = options.command(
        verbs,
        "revoke",
        help="take tokens away",
        description="Take tokens away at once. Servers notice within some seconds.",
        example="semel token revoke 3f9a1c5b7e2d4680",
    )
    revoking.add_argument("ids", metavar="ID", nargs="+", help="the token's id, as semel token list shows it")
    options.db_option(revoking)
    revoking.set_defaults(do=_revoke, more=("ids", str))


def _add_create(verbs: options.Commands) -> None:
    parser = options.command(
        verbs,
        "create",
        help="make a token",
        description="Make a token. It is printed this once: only a digest of it is kept.",
        example="semel token create --user alice --role operator --ttl 30d\n"
        "semel token create --user ci --name 'nightly build' > token.txt",
    )
    parser.add_argument("--user", required=True, metavar="USER", help="who it is for")
    parser.add_argument("--role", choices=ROLES, default="submitter", help="what they may do (default: submitter)")
    options.tenant_option(parser)
    parser.add_argument("--ttl", type=options.span, metavar="TIME", help="how long it is valid, as 30d (default: ever)")
    parser.add_argument("--name", default="", metavar="NAME", help="what it is for, for those who read the list")
    options.db_option(parser)
    parser.set_defaults(do=_create)


def _add_rotate(verbs: options.Commands) -> None:
    parser = options.command(
        verbs,
        "rotate",
        help="replace a token",
        description="Make a new token for the same person; the old one works for a while longer.",
        example="semel token rotate 3f9a1c5b7e2d4680 --grace 1h",
    )
    parser.add_argument("id", metavar="ID", help="the token's id, as semel token list shows it")
    parser.add_argument(
        "--grace", type=options.span, default=0.0, metavar="TIME", help="how long the old one works (default: 0)"
    )
    options.db_option(parser)
    parser.set_defaults(do=_rotate)


def _create(chosen: argparse.Namespace) -> int:
    from semel.bridge import drive
    from semel.service import tokens

    request = tokens.Request(user=chosen.user, role=chosen.role, tenant=chosen.tenant, name=chosen.name, ttl=chosen.ttl)
    with database.opened(chosen, make=True) as ledger:
        return _show(drive(ledger.write(tokens.issue, request, ledger.terms)), as_json=chosen.json)


def _show(issued: Issued, *, as_json: bool) -> int:
    """The secret alone goes to the standard output, so that it can go on into a file."""
    if as_json:
        printing.print_json({"token": _told(issued.token), "secret": issued.secret})
        return 0
    token = issued.token
    until = printing.when(token.expires_us, never="it is revoked")
    printing.say(f"token {token.id} of {token.user} ({token.role}), valid until {until}; it is not shown again:")
    print(issued.secret)
    return 0


def _told(token: Token) -> dict[str, Any]:
    from msgspec.structs import asdict

    return printing.timed(asdict(token))


def _list(chosen: argparse.Namespace) -> int:
    from semel.bridge import drive
    from semel.service import tokens

    with database.opened(chosen) as ledger:
        found = drive(ledger.read(tokens.listed, chosen.tenant))
    if chosen.json:
        printing.print_json({"tokens": [_told(each) for each in found]})
        return 0
    printing.print_table(
        ["id", "user", "role", "tenant", "name", "created", "expires", "last used"],
        [
            [
                each.id,
                each.user,
                each.role,
                each.tenant,
                each.name,
                printing.when(each.created_us),
                printing.when(each.expires_us, never="never"),
                printing.when(each.last_used_us, never="never"),
            ]
            for each in found
        ],
        nothing="there are no tokens: the server answers this machine only; make one with: semel token create",
    )
    return 0


def _rotate(chosen: argparse.Namespace) -> int:
    from semel.bridge import drive
    from semel.service import tokens

    with database.opened(chosen) as ledger:
        issued = drive(ledger.write(tokens.rotate, chosen.id, chosen.grace, ledger.terms))
    if issued is None:
        raise InvalidRequest(f"there is no token {chosen.id!r} that is valid; semel token list shows their ids")
    return _show(issued, as_json=chosen.json)


def _revoke(chosen: argparse.Namespace) -> int:
    from semel.bridge import drive
    from semel.service import tokens

    with database.opened(chosen) as ledger:
        revoked = {each: drive(ledger.write(tokens.revoke, each)) for each in chosen.ids}
    if chosen.json:
        printing.print_json({"revoked": [each for each, there in revoked.items() if there]})
    for each, there in revoked.items():
        if not there:
            printing.say(f"semel: there is no token {each!r}")
        elif not chosen.json:
            print(f"revoked {each}")
    return 0 if all(revoked.values()) else 1
