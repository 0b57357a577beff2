"""Tokens, which identify callers and their roles. Only digests are stored."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Literal, TypeAlias, get_args

from msgspec import Struct, structs
from sqlalchemy import Connection, and_, delete, func, or_, select, update

from semel._validation import TEN_YEARS, checked_choice, checked_name, checked_number
from semel.db.dialect import StatementContext
from semel.db.schema import tokens
from semel.runs.store import audit_log
from semel.runs.store.audit_log import Change
from semel.runs.store.quotas import read_clock
from semel.runs.types import MICRO, checked_user
from semel.types import moment

Role: TypeAlias = Literal["viewer", "submitter", "operator", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
"""In ascending order of what they may change. A viewer changes nothing, and sees what an admin sees."""

MAIN = ""
"""The tenant whose admins manage every tenant's tokens, quotas and keys."""

_MARK = "semel"
_ID = re.compile("[0-9a-f]{16}")
_SHAPE = re.compile(rf"{_MARK}_([0-9a-f]{{16}})_([A-Za-z0-9_-]{{43}})")
_KEPT_EXPIRED = 30 * 86400 * MICRO
_NO_DIGEST = sha256(b"").hexdigest()
"""Compared with the secret if the id is unknown, to take the same time; it never matches."""


class Token(Struct, frozen=True, kw_only=True):
    """A token as it is stored, without its digest."""

    id: str
    tenant: str
    user: str
    role: Role
    name: str
    created_us: int
    ttl_us: int | None
    """Its lifetime, which a rotated token gets again."""
    expires_us: int | None
    last_used_us: int | None


class Issued(Struct, frozen=True, kw_only=True):
    """A new token. ``secret`` is shown only once."""

    token: Token
    secret: str

    def __repr__(self) -> str:
        """Without the secret."""
        return f"Issued(token={self.token!r}, secret='…')"


class NewToken(Struct, frozen=True, kw_only=True):
    """The fields of a new token."""

    user: str
    role: Role = "submitter"
    tenant: str = ""
    name: str = ""
    ttl: float | None = None
    """Seconds until it expires; None for never."""


def parse(text: str) -> tuple[str, str] | None:
    """The id and the secret of a token; None if the text is not a token."""
    found = _SHAPE.fullmatch(text)
    return None if found is None else (found[1], found[2])


def is_id(text: str) -> bool:
    """Whether the text has the form of a token's id."""
    return _ID.fullmatch(text) is not None


def fits(secret: str, digest: str) -> bool:
    """Whether the secret has this digest, in constant time. A secret has 256 bits, so a plain hash is enough."""
    return hmac.compare_digest(sha256(secret.encode()).hexdigest(), digest)


def issue(conn: Connection, request: NewToken, terms: StatementContext) -> Issued:
    """Create a token, and delete those that expired a month ago."""
    checked_choice("role", request.role, ROLES)
    user = checked_user("user", request.user, empty=False)
    now = read_clock(conn, terms)
    ttl = None if request.ttl is None else round(checked_number("ttl", request.ttl, 0, TEN_YEARS, above=True) * MICRO)
    secret = secrets.token_urlsafe(32)
    token = Token(
        id=secrets.token_hex(8),
        tenant=checked_name("tenant", request.tenant),
        user=user,
        role=request.role,
        name=checked_name("name", request.name),
        created_us=now,
        ttl_us=ttl,
        expires_us=None if ttl is None else now + ttl,
        last_used_us=None,
    )
    values = {name: getattr(token, name) for name in Token.__struct_fields__ if name != "user"}
    digest = sha256(secret.encode()).hexdigest()
    conn.execute(tokens.insert().values(**values, user_id=token.user, digest=digest))
    conn.execute(delete(tokens).where(tokens.c.expires_us < now - _KEPT_EXPIRED))
    audit_log.record(conn, terms, _action("token.created", token, after=_logged(token)))
    return Issued(token=token, secret=f"{_MARK}_{token.id}_{secret}")


def _action(name: str, token: Token, **values: Any) -> Change:
    return Change(name=name, tenant=token.tenant, target=token.id, **values)


def _logged(token: Token) -> dict[str, Any]:
    """What the audit log has of a token: neither its secret nor the digest of that."""
    return {
        "user": token.user,
        "role": token.role,
        "name": token.name,
        "expires_at": None if token.expires_us is None else moment(token.expires_us).isoformat(),
    }


_COLUMNS = [
    tokens.c.id,
    tokens.c.tenant,
    tokens.c.user_id.label("user"),
    tokens.c.role,
    tokens.c.name,
    tokens.c.created_us,
    tokens.c.ttl_us,
    tokens.c.expires_us,
    tokens.c.last_used_us,
]


def find(conn: Connection, token_id: str, terms: StatementContext) -> tuple[Token, str] | None:
    """The token of that id with its digest, unless it has expired."""
    now = read_clock(conn, terms)
    row = conn.execute(select(*_COLUMNS, tokens.c.digest).where(tokens.c.id == token_id)).mappings().first()
    if row is None or (row["expires_us"] is not None and row["expires_us"] <= now):
        return None
    fields = dict(row)
    return Token(**{name: fields[name] for name in Token.__struct_fields__}), fields["digest"]


def check(conn: Connection, token_id: str, secret: str, terms: StatementContext) -> tuple[Token, float | None] | None:
    """The token and the seconds until it expires, if the secret is right.

    An unknown id takes as long as a wrong secret, so that ids cannot be guessed.
    """
    found = find(conn, token_id, terms)
    fitting = fits(secret, _NO_DIGEST if found is None else found[1])
    if found is None or not fitting:
        return None
    until = found[0].expires_us
    return found[0], None if until is None else (until - read_clock(conn, terms)) / MICRO


def any_there(conn: Connection) -> bool:
    """Whether there is any token. Before the first, local requests are trusted."""
    return conn.execute(select(func.count()).select_from(select(tokens.c.id).limit(1).subquery())).scalar_one() > 0


def list_tokens(
    conn: Connection, tenant: str | None, *, after: tuple[int, str] = (-1, ""), limit: int | None = None
) -> list[Token]:
    """The tokens of a tenant, or all, oldest first; ``after``: the time and the id of the last page's last one."""
    made, last = after
    later = or_(tokens.c.created_us > made, and_(tokens.c.created_us == made, tokens.c.id > last))
    query = select(*_COLUMNS).where(later).order_by(tokens.c.created_us, tokens.c.id).limit(limit)
    if tenant is not None:
        query = query.where(tokens.c.tenant == tenant)
    return [Token(**row) for row in conn.execute(query).mappings()]


def revoke(conn: Connection, token_id: str, tenant: str | None, terms: StatementContext) -> bool:
    """Delete a token; False if there is none."""
    query = delete(tokens).where(tokens.c.id == token_id).returning(*_COLUMNS)
    if tenant is not None:
        query = query.where(tokens.c.tenant == tenant)
    row = conn.execute(query).mappings().one_or_none()
    if row is None:
        return False
    gone = Token(**row)
    audit_log.record(conn, terms, _action("token.revoked", gone, before=_logged(gone)))
    return True


def revoke_but_last(
    conn: Connection, token_id: str, tenant: str | None, terms: StatementContext
) -> Literal["revoked", "absent", "last"]:
    """As revoke, but keep the last token of the main tenant's admins: without it, nobody could create another.

    A token that expires within a day does not count as another. The admins' tokens are locked first, so that two admins
    who revoke each other's cannot both succeed.
    """
    now = read_clock(conn, terms)
    valid = or_(tokens.c.expires_us.is_(None), tokens.c.expires_us > now)
    query = select(tokens.c.id, tokens.c.expires_us).where(tokens.c.tenant == MAIN, tokens.c.role == "admin", valid)
    admins = {row.id: row.expires_us for row in conn.execute(query.order_by(tokens.c.id).with_for_update())}
    lasting = {each for each, until in admins.items() if until is None or until > now + 86400 * MICRO}
    reached = tenant in (None, MAIN)  # admins of other tenants get "absent"
    if reached and token_id in admins and not lasting - {token_id}:
        return "last"
    return "revoked" if revoke(conn, token_id, tenant, terms) else "absent"


def rotate(
    conn: Connection, token_id: str, grace: float, terms: StatementContext, tenant: str | None = None
) -> Issued | None:
    """Create a new token for the same user; the old one is valid for ``grace`` seconds more."""
    conn.execute(select(tokens.c.id).where(tokens.c.id == token_id).with_for_update())
    found = find(conn, token_id, terms)
    if found is None or (tenant is not None and found[0].tenant != tenant):
        return None
    old = found[0]
    now = read_clock(conn, terms)
    end = now + round(checked_number("grace", grace, 0, TEN_YEARS) * MICRO)
    until = end if old.expires_us is None else min(end, old.expires_us)
    conn.execute(update(tokens).where(tokens.c.id == token_id).values(expires_us=until))
    ttl = None if old.ttl_us is None else old.ttl_us / MICRO
    issued = issue(conn, NewToken(user=old.user, role=old.role, tenant=old.tenant, name=old.name, ttl=ttl), terms)
    after = {**_logged(structs.replace(old, expires_us=until)), "replaced_by": issued.token.id}
    audit_log.record(conn, terms, _action("token.rotated", old, before=_logged(old), after=after))
    return issued


def used(conn: Connection, token_ids: Sequence[str], terms: StatementContext) -> None:
    """Store that these were used now."""
    now = read_clock(conn, terms)
    conn.execute(update(tokens).where(tokens.c.id.in_(token_ids)).values(last_used_us=now))
