"""Seals: a Merkle tree over what ended since the last one, chained to the seals before it, and signed.

    attempts end           the sweeper seals                          a verifier reads
    ─────────────▶ queue ─────────────────────▶ seal, with its leaves ─────────────────▶ export, proof
                           one transaction

A seal is one transaction that takes entries out of the queue and writes what covers them, so that each entry is in one
seal, whenever the process dies. Seals are made one after the other; nobody who submits or ends runs waits for them.
The bytes that are hashed are described in docs/audit.md; :mod:`semel.audit` computes them without a database.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from sqlalchemy import Connection, Row, Table, case, exc, func, insert, literal, select, text
from sqlalchemy import LargeBinary as Bytes

from semel.audit import (
    KEY_SIZE,
    LEAF_SIZE,
    ZEROS,
    content_hash,
    id_bytes,
    key_of,
    leaf_hash,
    path_of,
    root_of,
    seal_digest,
)
from semel.db.dialect import Dialect, Statement, StatementContext, hot, transaction
from semel.db.schema import active, attempts, purges, seal_leaves, seals, submitted
from semel.errors import SemelError
from semel.runs.store import audit_log, digests
from semel.runs.store.audit_log import Change
from semel.runs.store.digests import run_digest
from semel.runs.store.quotas import read_clock

MOST = 8192
"""About how many leaves a seal has at most."""
LOCK = 0x73656D656C  # "semel"
_AROUND_US = 3600 * 1_000_000
"""By how much the clock may have been put back between an attempt's end and its seal."""
_NO_LEAVES = "its leaves are malformed, semel did not write them so"
_PAGE = 500
"""Runs that an export reads at a time."""


class SigningKey(Struct, frozen=True):
    """Signs seals: the public key in hexadecimal digits, and a function from a seal's digest to the signature."""

    public: str
    sign: Callable[[bytes], bytes]


class Seal(Struct, frozen=True, kw_only=True):
    """A seal: what it covers, and what it follows."""

    number: int
    at_us: int
    count: int
    first_id: str
    last_id: str
    root: str
    previous: str | None
    public_key: str | None
    digest: str
    signature: str | None


_SIZED = f"length(entries) > 0 AND length(entries) % {LEAF_SIZE} = 0"
_WELL_FORMED = {"postgresql": _SIZED, "sqlite": f"typeof(entries) = 'blob' AND {_SIZED}"}
"""Whether a row of the queue is one that semel wrote. SQLite stores values of any type."""
_PLACES = {"postgresql": "'ctid ' || CAST(ctid AS text)", "sqlite": "'rowid ' || rowid"}
"""What names a row of the queue."""
_MALFORMED = 10
"""How many malformed rows of the queue are named."""
_TAKE = text(f"""
WITH queue AS (SELECT u.ctid AS place, u.entries FROM semel_unsealed AS u WHERE {_SIZED} LIMIT {MOST})
DELETE FROM semel_unsealed WHERE ctid = ANY(ARRAY(
  SELECT place FROM (
    SELECT place, length(entries) AS size, sum(length(entries)) OVER (ROWS UNBOUNDED PRECEDING) AS total FROM queue
  ) AS q
  WHERE total - size < {LEAF_SIZE * MOST})) RETURNING entries""")
_TRY_LOCK = text(f"SELECT pg_try_advisory_xact_lock({LOCK})")


def _take(conn: Connection) -> list[bytes]:
    """Take entries out of the queue. Malformed rows stay there."""
    if conn.dialect.name == "postgresql":
        return _split(b"".join(map(bytes, conn.scalars(_TAKE))), LEAF_SIZE)
    queue = f"semel_unsealed WHERE {_WELL_FORMED['sqlite']}"
    taken, last = b"", 0  # nobody else writes meanwhile
    for place, entries in conn.execute(text(f"SELECT rowid, entries FROM {queue} ORDER BY rowid")):
        taken, last = taken + bytes(entries), place
        if len(taken) >= MOST * LEAF_SIZE:
            break
    conn.execute(text(f"DELETE FROM {queue} AND rowid <= :last"), {"last": last})
    return _split(taken, LEAF_SIZE)


def malformed(conn: Connection) -> list[str]:
    """The places of some rows of the queue that semel did not write so: they name no run, and cannot be sealed."""
    where = f"({_WELL_FORMED[conn.dialect.name]}) IS NOT TRUE LIMIT {_MALFORMED}"
    return list(conn.scalars(text(f"SELECT {_PLACES[conn.dialect.name]} FROM semel_unsealed WHERE {where}")))


def _submitted(dialect: Dialect) -> str:
    """The ids and digests of what was submitted, by a list of ids: joined on PostgreSQL, whose drivers take long over
    many values.

    A list, and no join with the queue: for a join, PostgreSQL would read all runs there are.
    """
    if not dialect.writes_in_with:
        return f"SELECT r.id, {run_digest(dialect, 'r')} FROM semel_runs AS r WHERE {dialect.is_in('r.id', 'ids')}"
    return f"""SELECT string_agg(uuid_send(r.id) || {run_digest(dialect, "r")}, '') FROM semel_runs AS r
WHERE r.id = ANY(CAST(CAST(:ids AS text) AS uuid[]))"""


_SUBMITTED = Statement(_submitted)


def _submitted_digests(conn: Connection, ids: Sequence[bytes]) -> dict[bytes, bytes]:
    """The digests of what was submitted, by id."""
    if conn.dialect.name == "postgresql":
        [(joined,)] = _SUBMITTED.rows(conn, ids=f"{{{b''.join(ids).hex(',', 16)}}}")
        return {each[:16]: each[16:] for each in _split(bytes(joined or b""), 48)}
    named = [_id_and_version(each)[0] for each in ids]
    try:
        rows = _SUBMITTED.rows(conn, ids=named)
    except exc.OperationalError:  # text that is not UTF-8: such a run is sealed as if it was not there
        rows = [row for each in named for row in _readable(conn, each)]
    return {id_bytes(row_id): bytes.fromhex(digest) for row_id, digest in rows}


def _readable(conn: Connection, row_id: str) -> Sequence[Any]:
    """SQLite: the id and digest of what was submitted; nothing if its values cannot be read."""
    try:
        return _SUBMITTED.rows(conn, ids=[row_id])
    except exc.OperationalError as error:
        if getattr(error.orig, "sqlite_errorname", None) != "SQLITE_ERROR":
            raise
        return ()


def _leaves(conn: Connection, entries: Sequence[bytes]) -> list[bytes]:
    """The leaves of these entries, in order: of each its key and the hash of what it covers."""
    ids = sorted({entry[:16] for entry in entries})
    digest_of = _submitted_digests(conn, ids).get
    return [
        entry[:KEY_SIZE] + content_hash(digest_of(entry[:16], ZEROS), entry[KEY_SIZE:]) for entry in sorted(entries)
    ]


def _hashes(leaves: Sequence[bytes]) -> list[bytes]:
    return [leaf_hash(leaf[:KEY_SIZE], leaf[KEY_SIZE:]) for leaf in leaves]


def _split(joined: bytes, size: int) -> list[bytes]:
    return [joined[at : at + size] for at in range(0, len(joined), size)]


def _id_and_version(key: bytes) -> tuple[str, int]:
    digits = key[:16].hex()
    row_id = f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
    return row_id, int.from_bytes(key[16:KEY_SIZE])


def begin(conn: Connection, context: StatementContext) -> bool:
    """Seal the history of this database from now on; it is logged who began it. False if it was sealed before."""
    with transaction(conn):
        begun = digests.begin(conn, read_clock(conn, context))
        if begun:
            audit_log.record(
                conn,
                context,
                Change(
                    name="sealing.begun", tenant="", target="runs", before={"sealed": False}, after={"sealed": True}
                ),
            )
        return begun


@hot
def seal(conn: Connection, key: SigningKey | None, context: StatementContext) -> Seal | None:
    """Seal what is in the queue, or about :data:`MOST` of it. None if there is nothing, or if another does it now."""
    with transaction(conn):
        now = read_clock(conn, context)
        if conn.dialect.name == "postgresql" and not conn.scalar(_TRY_LOCK):
            return None
        taken = _take(conn)
        return _write(conn, _leaves(conn, taken), key, now) if taken else None


def _write(conn: Connection, entries: Sequence[bytes], key: SigningKey | None, now: int) -> Seal:
    last = head(conn)
    try:
        row = _following(last, entries, key, now)
    except (ValueError, TypeError, struct.error) as error:
        number = None if last is None else last.number
        raise SemelError(
            f"the newest seal, {number!r}, is malformed: nothing can be sealed after it: {error}"
        ) from error
    conn.execute(insert(seals), row)
    conn.execute(insert(seal_leaves), {"number": row["number"], "leaves": b"".join(entries)})
    return Seal(**row)


def _following(last: Seal | None, entries: Sequence[bytes], key: SigningKey | None, now: int) -> dict[str, Any]:
    """The row of the seal that covers these entries."""
    row: dict[str, Any] = {
        "number": 1 if last is None else last.number + 1,
        "at_us": now,
        "count": len(entries),
        "first_id": _id_and_version(entries[0])[0],
        "last_id": _id_and_version(entries[-1])[0],
        "root": root_of(_hashes(entries)).hex(),
        "previous": None if last is None else last.digest,
        "public_key": None if key is None else key.public,
    }
    digest = seal_digest(row)
    return row | {"digest": digest.hex(), "signature": None if key is None else key.sign(digest).hex()}


def head(conn: Connection) -> Seal | None:
    """The newest seal."""
    row = conn.execute(select(seals).order_by(seals.c.number.desc()).limit(1)).mappings().first()
    return None if row is None else Seal(**row)


class Sealing(Struct, frozen=True):
    """Whether the end of a run is sealed: since when and in which seal; both None if it is not, or not yet."""

    number: int | None = None
    sealed_us: int | None = None


def _containing(conn: Connection, row_id: str, version: int, ended_us: int) -> Any:
    """A query for the seal that covers an attempt."""
    key = literal(key_of(row_id, version), Bytes)
    found = func.instr if conn.dialect.name == "sqlite" else _position
    return (
        select(seals, _stored_leaves(conn))
        .join(seal_leaves, seal_leaves.c.number == seals.c.number)
        .where(seals.c.at_us >= ended_us - _AROUND_US, seals.c.first_id <= row_id, seals.c.last_id >= row_id)
        .where(found(seal_leaves.c.leaves, key) > 0)
        .order_by(seals.c.at_us, seals.c.number)
        .limit(1)
    )


def _position(where: Any, what: Any) -> Any:
    return func.position(what.op("IN")(where))


def sealing_of(conn: Connection, run_id: str) -> Sealing:
    """Whether the end of this run is sealed."""
    last = attempts.c.run_id == run_id, attempts.c.status != "PENDING", attempts.c.digest.is_not(None)
    ended = conn.execute(select(attempts.c.version, attempts.c.ended_us).where(*last)).first()
    if ended is None:
        return Sealing()
    query = _containing(conn, run_id, *ended).with_only_columns(seals.c.number, seals.c.at_us)
    found = conn.execute(query).first()
    return Sealing() if found is None else Sealing(*found)


# -- export and proof ------------------------------------------------------------------------------------------------


def _shown(table: Table, row: Row[Any]) -> dict[str, Any]:
    """The columns of a row that are not NULL."""
    values = row._mapping
    return {column.name: values[column] for column in table.c if values[column] is not None}


def _rows_of(conn: Connection, keys: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """The rows that these keys name, in their order, as an export has them."""
    for at in range(0, len(keys), _PAGE):
        page = [_id_and_version(key) for key in keys[at : at + _PAGE]]
        ids = list({row_id for row_id, _ in page})
        runs = {
            row.id: _shown(submitted, row) for row in conn.execute(select(submitted).where(submitted.c.id.in_(ids)))
        }
        noted = {row.id: _shown(purges, row) for row in conn.execute(select(purges).where(purges.c.id.in_(ids)))}
        ended: dict[str, list[dict[str, Any]]] = {}
        query = select(attempts).where(attempts.c.run_id.in_(ids)).order_by(attempts.c.run_id, attempts.c.version)
        for row in conn.execute(query):
            ended.setdefault(row.run_id, []).append(_shown(attempts, row))
        for row_id, version in page:
            yield _rows_at(row_id, version, runs, noted, ended)


def _rows_at(
    row_id: str,
    version: int,
    runs: Mapping[str, dict[str, Any]],
    noted: Mapping[str, dict[str, Any]],
    ended: Mapping[str, list[dict[str, Any]]],
) -> dict[str, Any]:
    if version == 0:
        return {"purge": noted[row_id]} if row_id in noted else {}
    line: dict[str, Any] = {"run": runs[row_id]} if row_id in runs else {}
    before = None
    for attempt in ended.get(row_id, ()):
        if attempt["version"] == version:
            line["attempt"] = attempt
            if before is not None:
                line["previous"] = before
            break
        before = attempt.get("digest")
    return line


def export(conn: Connection) -> Iterator[dict[str, Any]]:
    """The lines of an export: every seal with the rows that it covers, and what no seal covers. See docs/audit.md.

    It reads for long: the connection must be in a transaction that sees one state of the database.
    """
    yield {"export": "semel history of runs", "version": 1}
    seen: set[bytes] = set()
    count, number = 0, 0
    while (found := _next_seal(conn, number)) is not None:
        count, number = count + 1, found["number"]
        yield {"seal": found}
        leaves = _leaves_of(conn, number)
        if leaves is None:
            yield {"broken": f"seal {number}: {_NO_LEAVES}"}
        entries = _split(leaves or b"", LEAF_SIZE)
        keys = [entry[:KEY_SIZE] for entry in entries]
        seen.update(keys)
        for entry, rows in zip(entries, _rows_of(conn, keys), strict=True):
            yield {"key": entry[:KEY_SIZE].hex(), "content": entry[KEY_SIZE:].hex(), **rows}
    for place in malformed(conn):
        yield {"broken": f"{place} of the queue semel_unsealed: the row is malformed, semel did not write it so"}
    queue = text(f"SELECT entries FROM semel_unsealed WHERE {_WELL_FORMED[conn.dialect.name]}")
    waiting = sorted(each for row in conn.scalars(queue) for each in _split(bytes(row), LEAF_SIZE))
    keys = [entry[:KEY_SIZE] for entry in waiting]
    seen.update(keys)
    for entry, rows in zip(waiting, _rows_of(conn, keys), strict=True):
        yield {"open": entry[:KEY_SIZE].hex(), "digest": entry[KEY_SIZE:].hex(), **rows}
    yield from _uncovered(conn, seen)
    if count and not digests.is_sealed(conn):
        yield {"broken": "sealing was ended: the row of semel_sealing was deleted"}
    lone = select(seal_leaves.c.number).where(seal_leaves.c.number.not_in(select(seals.c.number)))
    for orphan in conn.scalars(lone.order_by(seal_leaves.c.number)):
        yield {"broken": f"leaves of seal {orphan}: they were inserted, or their seal was deleted"}
    yield {"end": {"seals": count}}


def _next_seal(conn: Connection, after: int) -> dict[str, Any] | None:
    row = conn.execute(select(seals).where(seals.c.number > after).order_by(seals.c.number).limit(1)).first()
    return None if row is None else _shown(seals, row)


def _leaves_of(conn: Connection, number: int) -> bytes | None:
    """The leaves of this seal, none if their row is gone; None if they are malformed."""
    found = conn.execute(select(_stored_leaves(conn)).where(seal_leaves.c.number == number)).first()
    return b"" if found is None else _whole(found.leaves)


def _stored_leaves(conn: Connection) -> Any:
    """The leaves of a seal; NULL where they are not bytes, since SQLite stores values of any type."""
    stored = seal_leaves.c.leaves
    return stored if conn.dialect.name != "sqlite" else case((func.typeof(stored) == "blob", stored)).label("leaves")


def _whole(leaves: Any) -> bytes | None:
    """These leaves; None if they are not bytes of whole leaves."""
    return None if leaves is None or len(leaves) % LEAF_SIZE else bytes(leaves)


def _uncovered(conn: Connection, seen: set[bytes]) -> Iterator[dict[str, Any]]:
    """Rows that no seal has and that do not wait for one: older than the chain, or inserted by somebody else."""
    query = select(attempts.c.run_id, attempts.c.version, attempts.c.ended_us, attempts.c.digest)
    chained = None
    for row in _paged(conn, query, attempts.c.run_id, attempts.c.version):
        covered = _key(row.run_id, row.version) in seen
        if covered or row.digest is not None:
            chained = row.run_id
        if not covered:
            if row.run_id != chained:
                yield {"unchained": [row.run_id, row.version, row.ended_us]}
            else:  # an older row cannot come after one that is chained
                yield {"stray": f"run {row.run_id}, version {row.version}"}
    noted = select(purges.c.id)
    for row in _paged(conn, noted, purges.c.id):
        if _key(row.id, 0) not in seen:
            yield {"stray": f"purge {row.id}"}
    lone = (
        select(submitted.c.id)
        .outerjoin(active, active.c.id == submitted.c.id)
        .outerjoin(attempts, attempts.c.run_id == submitted.c.id)
        .where(active.c.id.is_(None), attempts.c.run_id.is_(None))
    )
    for row in conn.execute(lone):
        yield {"stray": f"run {row.id}, which neither ended nor is under way"}


def _key(row_id: str, version: int) -> bytes | None:
    """The key of a row; None if it cannot have one, and so no seal."""
    try:
        return key_of(row_id, version)
    except (ValueError, TypeError, AttributeError, OverflowError):
        return None


def _paged(conn: Connection, query: Any, *order: Any) -> Iterator[Row[Any]]:
    """The rows of a query in this order, without having all of them in memory."""
    yield from conn.execute(query.order_by(*order), execution_options={"stream_results": True, "yield_per": 5000})


def prove(conn: Connection, run_id: str, *, chain: bool = False) -> list[dict[str, Any]]:
    """The lines of a proof that the run's attempts are sealed; without any if none is.

    With ``chain``, the seals after them are added, so that it can be verified against a head that was kept.
    """
    lines: list[dict[str, Any]] = []
    ended = select(attempts.c.version, attempts.c.ended_us)
    ended = ended.where(attempts.c.run_id == run_id, attempts.c.digest.is_not(None))
    for version, ended_us in conn.execute(ended.order_by(attempts.c.version)).all():
        found = conn.execute(_containing(conn, run_id, version, ended_us)).first()
        if found is None:
            break
        lines.append(_proof(conn, found, key_of(run_id, version)))
    if not lines:
        return []
    if chain:
        own = {line["seal"]["number"] for line in lines}
        later = conn.execute(select(seals).where(seals.c.number > min(own)).order_by(seals.c.number))
        lines += [{"seal": _shown(seals, row)} for row in later if row.number not in own]
    return [{"proof": f"semel run {run_id}", "version": 1}, *lines]


def _proof(conn: Connection, found: Row[Any], key: bytes) -> dict[str, Any]:
    entries = _split(_whole(found.leaves) or b"", LEAF_SIZE)
    index = next((at for at, entry in enumerate(entries) if entry.startswith(key)), None)
    if index is None:
        raise SemelError(f"seal {found.number}: {_NO_LEAVES}")
    path = path_of(_hashes(entries), index)
    (rows,) = _rows_of(conn, [key])
    beside = {"index": index, "path": [each.hex() for each in path]}
    return {"key": key.hex(), "seal": _shown(seals, found), **beside, **rows}
