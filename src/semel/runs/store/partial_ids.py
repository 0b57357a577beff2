"""Finds runs by the beginning or the end of their ids, such as the short ids that the dashboard shows."""

from __future__ import annotations

import re
import time
from typing import Any

from sqlalchemy import ColumnElement, Connection, Text, cast, select

from semel.db.schema import submitted
from semel.runs.store.queries import Filter, read_by_id
from semel.runs.types import Page, checked_id

MIN_DIGITS = 6
"""Digits that a part of an id must have to be searched for."""
UNIQUE_DIGITS = 12
"""Digits at the end of an id that no other id has: they are random, and as many as the dashboard shows."""
SCAN_SECONDS = 1.0
"""Seconds after which a search stops and returns where it stopped: a request must not take long."""
WINDOW = 20_000
"""Ids scanned between two checks of the time."""

_HEX = re.compile(r"[0-9a-f-]+")


def digits_of(text: str) -> str | None:
    """The digits of an id or of a part of one; None where the text is neither."""
    low = text.strip().lower()
    digits = low.replace("-", "")
    return digits if _HEX.fullmatch(low) and MIN_DIGITS <= len(digits) <= 32 else None


def begins_with(column: ColumnElement[str], digits: str) -> ColumnElement[bool]:
    """True for ids that begin with the digits: a range, which the index of the ids finds; of a whole id that alone."""
    if len(digits) == 32:
        return column == checked_id(digits)
    return column.between(checked_id(digits.ljust(32, "0")), checked_id(digits.ljust(32, "f")))


def ends_with(column: ColumnElement[str], digits: str) -> ColumnElement[bool]:
    """True for ids that end with the digits: no index finds them."""
    padded = digits.rjust(32, "_")
    pattern = "-".join((padded[:8], padded[8:12], padded[12:16], padded[16:20], padded[20:]))
    return cast(column, Text).like(pattern)


def edge_of_millisecond(run_id: str, *, down: bool = True) -> str:
    """The first or last id of the millisecond: a cursor with the id itself would disclose another user's run."""
    moment = run_id[:13]  # twelve digits and a dash
    return f"{moment}-0000-0000-000000000000" if down else f"{moment}-ffff-ffff-ffffffffffff"


def list_runs(
    conn: Connection, wanted: Filter, digits: str, limit: int, cursor: str | None, *, parameters: bool = True
) -> Page:
    """The runs of the filter whose ids begin with the digits; if there are none, those whose ids end with them.

    A page may have fewer runs than ``limit``, or none, and a ``next``: the search goes on there.
    """
    table, older = wanted.table, [] if cursor is None else [wanted.table.c.id < cursor]
    near = select(table.c.id).where(*wanted.conditions(table), begins_with(table.c.id, digits), *older)
    ids = list(conn.scalars(near.order_by(table.c.id.desc()).limit(limit + 1)))
    reached = ids[limit - 1] if len(ids) > limit else None
    if not ids:
        ids, reached = _scan(conn, wanted, digits, limit, cursor)
    return Page(read_by_id(conn, ids[:limit], parameters=parameters), reached)


def _scan(
    conn: Connection, wanted: Filter, digits: str, limit: int, cursor: str | None
) -> tuple[list[str], str | None]:
    """The ids that end with the digits, newest first, and where the search stopped; None at the end."""
    deadline = time.monotonic() + SCAN_SECONDS
    found: list[str] = []
    of_user = Filter(tenant=wanted.tenant, user=wanted.user).conditions(submitted) if wanted.user else []
    while True:
        window: list[Any] = of_user if cursor is None else [*of_user, submitted.c.id < cursor]
        ahead = select(submitted.c.id).where(*window).order_by(submitted.c.id.desc())
        last = conn.scalar(ahead.offset(WINDOW - 1).limit(1))
        edge = None if last is None else edge_of_millisecond(str(last))
        if edge is not None:
            window = [*window, submitted.c.id >= edge]
        ending = list(conn.scalars(select(submitted.c.id).where(*window, ends_with(submitted.c.id, digits))))
        found += _that_meet(conn, wanted, ending)
        if found and len(digits) >= UNIQUE_DIGITS:  # not if only others' runs end so: that would tell of them
            return found, None
        if len(found) >= limit:
            return found[:limit], found[limit - 1]
        if edge is None or time.monotonic() > deadline:
            return found, edge
        cursor = edge


def _that_meet(conn: Connection, wanted: Filter, ids: list[str]) -> list[str]:
    if not ids:
        return []
    table = wanted.table
    meeting = select(table.c.id).where(table.c.id.in_(ids), *wanted.conditions(table))
    return list(conn.scalars(meeting.order_by(table.c.id.desc())))
