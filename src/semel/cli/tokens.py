"""``semel token``: the tokens of the server's users."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from semel.cli._database import acting, ask, opened
from semel.cli._options import SPAN, argument, db_options, examples, group, option, tenant_option
from semel.cli._output import format_time, note, print_json, print_list, with_iso_times
from semel.errors import InvalidRequest

if TYPE_CHECKING:
    from semel.service.auth.tokens import Issued, Token

ROLES = click.Choice(["viewer", "submitter", "operator", "admin"])


@group
def token() -> None:
    """Create, list, rotate and revoke tokens for the server.

    A token identifies its user and grants a role: submitters have their own runs, operators see all runs, admins also
    manage tokens, quotas and keys; viewers see all that, and change nothing. Without any token, the server accepts
    requests from this machine only.
    """


@token.command()
@examples(
    "semel token create --user alice --role operator --ttl 30d",
    "semel token create --user ci --name 'nightly build' > token.txt",
)
@option("--user", required=True, metavar="USER", help="The user.")
@option("--role", type=ROLES, default="submitter", help="The role.")
@tenant_option
@option("--ttl", type=SPAN, help="How long the token is valid, such as 30d.  [default: no limit]")
@option("--name", default="", metavar="NAME", help="A description, shown in the list.")
@db_options
def create(db: str, as_json: bool, **request: Any) -> None:
    """Create a token. It is printed only once: the database stores a digest."""
    from semel.service.auth import tokens

    wanted = tokens.NewToken(**request)
    issued = ask(db, lambda store: store.write(tokens.issue, wanted, acting(store)), create=True)
    _print_issued(issued, as_json)


def _print_issued(issued: Issued, as_json: bool) -> None:
    """Print only the secret to stdout, so that it can be redirected to a file."""
    if as_json:
        print_json({"token": _as_fields(issued.token), "secret": issued.secret})
        return
    token = issued.token
    until = format_time(token.expires_us, never="it is revoked")
    note(f"token {token.id} of {token.user} ({token.role}), valid until {until}; it is not shown again:")
    print(issued.secret)


def _as_fields(token: Token) -> dict[str, Any]:
    from msgspec.structs import asdict

    return with_iso_times(asdict(token))


@token.command("list")
@examples("semel token list", "semel token list --tenant acme --json")
@option("--tenant", metavar="TENANT", help="Only tokens of this tenant.")
@db_options
def list_tokens(tenant: str | None, db: str, as_json: bool) -> None:
    """List tokens, oldest first. Their secrets are not stored, so they cannot be shown."""
    from semel.service.auth import tokens

    found = ask(db, lambda store: store.read(tokens.list_tokens, tenant))
    print_list(
        as_json,
        {"tokens": [_as_fields(each) for each in found]},
        ["id", "user", "role", "tenant", "name", "created", "expires", "last used"],
        map(_row, found),
        empty="there are no tokens: the server accepts local requests only; create one with: semel token create",
    )


def _row(token: Token) -> list[object]:
    created = format_time(token.created_us)
    ends, used = format_time(token.expires_us, never="never"), format_time(token.last_used_us, never="never")
    return [token.id, token.user, token.role, token.tenant, token.name, created, ends, used]


@token.command()
@examples("semel token rotate 3f9a1c5b7e2d4680 --grace 1h")
@argument("id", help="The token's id, as semel token list shows it.")
@option("--grace", type=SPAN, default="0", help="How long the old token stays valid.")
@db_options
def rotate(id: str, grace: float, db: str, as_json: bool) -> None:  # noqa: A002 -- the name of the argument
    """Replace a token by a new one of the same user."""
    from semel.service.auth import tokens

    issued = ask(db, lambda store: store.write(tokens.rotate, id, grace, acting(store)))
    if issued is None:
        raise InvalidRequest(f"there is no token {id!r}, or it is not valid; semel token list shows the ids")
    _print_issued(issued, as_json)


@token.command()
@examples("semel token revoke 3f9a1c5b7e2d4680")
@argument("ids", nargs=-1, required=True, metavar="ID...", help="Ids of tokens, as semel token list shows them.")
@db_options
def revoke(ids: tuple[str, ...], db: str, as_json: bool) -> int:
    """Revoke tokens. Servers reject them within seconds."""
    from semel._concurrency.sync import run_sync
    from semel.service.auth import tokens

    with opened(db) as store:
        revoked = {each: run_sync(store.write(tokens.revoke, each, None, acting(store))) for each in ids}
    if as_json:
        print_json({"revoked": [each for each, there in revoked.items() if there]})
    for each, there in revoked.items():
        if not there:
            note(f"semel: there is no token {each!r}")
        elif not as_json:
            print(f"revoked {each}")
    return 0 if all(revoked.values()) else 1
