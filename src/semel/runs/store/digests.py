"""The chain of a run's history, as SQL: the digest of every attempt that ends, and the queue of what is to be sealed.

The digest of an attempt is computed by the statement that writes its row, from the values that the row gets, after the
digest of the attempt before it. What was submitted is hashed with it when it is sealed (see
:mod:`semel.runs.store.seals`). Who ends a run waits for nobody: a batch adds a row of its own to the queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from sqlalchemy import Connection, insert, text

from semel.audit import FORMS, Columns, id_bytes, key_of
from semel.db.dialect import Dialect
from semel.db.schema import purges, sealing, unsealed
from semel.runs.types import new_id

_TYPES = {
    "id": "CAST({} AS uuid)",
    "int8": "CAST({} AS bigint)",
    "int4": "CAST({} AS integer)",
    "float": "CAST({} AS double precision)",
    "text": "convert_to({}, 'UTF8')",
    "hex": "CAST({} AS bytea)",
}
"""PostgreSQL: the values of each kind as they are hashed. Text is hashed in UTF-8 whatever a client's encoding is."""
NO_DIGEST = f"CAST('\\x{'00' * 32}' AS bytea)"
"""PostgreSQL: before the first digest of a chain, and for a row that is not there."""
SEALING = "EXISTS (SELECT 1 FROM semel_sealing)"
"""Whether the history is sealed (see :func:`begin`). A statement asks once, however many rows it writes."""
_FIRST = 3
"""The highest version of a run's first attempt: it was submitted, leased, and ended."""


def _digest(dialect: Dialect, form: str, values: Mapping[str, str], previous: str | None) -> str:
    """The digest of a row with these values, as they are stored; what is not among them is NULL."""
    names, columns, rare = FORMS[form].names, FORMS[form].columns, FORMS[form].rare
    if not dialect.writes_in_with:
        return f"semel_digest('{form}', {previous or 'NULL'}, {', '.join(values.get(name, 'NULL') for name in names)})"
    empty = " AND ".join(f"({values[name]}) IS NULL" for name, _ in rare if name in values)
    nested = f"CASE WHEN {empty} THEN NULL ELSE record_send(ROW({_sent(rare, values)})) END"
    row = f"record_send(ROW({_sent(columns, values)}, {nested}))"
    return f"sha256({row})" if previous is None else f"sha256({previous} || {row})"


def _sent(columns: Columns, values: Mapping[str, str]) -> str:
    return ", ".join(_TYPES[kind].format(values.get(name, "NULL")) for name, kind in columns)


def attempt_digest(dialect: Dialect, values: Mapping[str, str], run_id: str, version: str) -> str:
    """The digest of an attempt that is about to be written with these values, of this run and version; NULL if the
    history is not sealed.
    """
    before = f"""(SELECT p.digest FROM semel_attempts AS p
  WHERE p.run_id = {run_id} AND p.version < {version} ORDER BY p.version DESC LIMIT 1)"""
    if dialect.writes_in_with:
        before = f"CASE WHEN {version} <= {_FIRST} THEN {NO_DIGEST} ELSE coalesce({before}, {NO_DIGEST}) END"
    else:
        before = f"coalesce(CASE WHEN {version} > {_FIRST} THEN {before} END, '{'00' * 32}')"
    return f"CASE WHEN {SEALING} THEN {_digest(dialect, 'attempt', values, before)} END"


def run_digest(dialect: Dialect, alias: str) -> str:
    """The digest of what was submitted: a row of ``semel_runs``."""
    return _digest(dialect, "run", {name: f"{alias}.{name}" for name in FORMS["run"].names}, None)


ENQUEUE = """INSERT INTO semel_unsealed (entries)
SELECT string_agg(uuid_send(run_id) || int4send(version) || digest, '') FROM noted
WHERE digest IS NOT NULL HAVING count(*) > 0"""
"""PostgreSQL: put the attempts that the CTE ``noted`` returns (run_id, version, digest) into the queue."""


def enqueue(conn: Connection, rows: Iterable[tuple[str, int, str | None]]) -> None:
    """Put these rows (id, version and digest) into the queue: on SQLite, where the statement could not do so itself."""
    entries = b"".join(key_of(row_id, version) + bytes.fromhex(digest) for row_id, version, digest in rows if digest)
    if entries:
        conn.execute(insert(unsealed), {"entries": entries})


def is_sealed(conn: Connection) -> bool:
    """Whether the history is sealed."""
    return bool(conn.scalar(text(f"SELECT {SEALING}")))


def begin(conn: Connection, now: int) -> bool:
    """Seal the history from now on, for every process that uses this database. False if it was sealed before.

    Whoever ends a run meanwhile is waited for, so that no end is written without a digest after it.
    """
    if conn.dialect.name == "postgresql":
        conn.execute(text("LOCK TABLE semel_attempts IN SHARE MODE"))
    if is_sealed(conn):
        return False
    conn.execute(insert(sealing), {"begun_us": now})
    return True


def note_purge(conn: Connection, rule: str, ids: Sequence[str], now: int) -> None:
    """Note that these runs are removed, in the transaction that removes them, if the history is sealed."""
    listed = b"".join(map(id_bytes, sorted(ids))).hex()
    _note(conn, at_us=now, rule=rule, count=len(ids), first_id=min(ids), last_id=max(ids), ids=listed)


def note_range(conn: Connection, rule: str, span: tuple[str, str], count: int, now: int) -> None:
    """Note that all runs from the first id to the last are removed, as :func:`note_purge` does."""
    _note(conn, at_us=now, rule=rule, count=count, first_id=span[0], last_id=span[1], ids=None)


def _note(conn: Connection, **row: Any) -> None:
    if not is_sealed(conn):
        return
    row = {"id": new_id(), **row}
    conn.execute(insert(purges), row)
    enqueue(conn, [(row["id"], 0, sha256(FORMS["purge"].of(row)).hexdigest())])
