"""PostgreSQL's partitions of runs, attempts and logs: made ahead, and dropped whole when all their runs may go.

    first              │ p20261201t000000 │ p20261205t000000 │ …   made ahead │ default
    every id until now │ ids of four days │ ids of four days │                │ ids of no other partition

An id begins with its time, so a range of ids is a range of time. A partition has an eighth of the retention, so that
few exist at once: every list asks each of them. Nothing depends on a partition: what has none is in the default one,
and its runs are removed in batches (see :mod:`semel.runs.store.maintenance`).
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias

from msgspec import Struct
from sqlalchemy import Connection, and_, text

from semel.db.dialect import StatementContext
from semel.db.schema import submitted
from semel.runs.store import audit_log
from semel.runs.store.digests import note_range
from semel.runs.store.maintenance import EVENTS_KEPT_US, LEAVE_RANGE, purged, rule_of
from semel.runs.store.quotas import read_clock
from semel.runs.types import DAY_US, MICRO, id_at

SHARE = 8
"""How many partitions the time of a retention has."""
SHORTEST_US, LONGEST_US = 3600 * MICRO, 365 * DAY_US
"""The least and the most time of a partition; the most is that of one whose runs are kept for ever."""
AHEAD_US = 60 * DAY_US
"""The most time for which partitions are made ahead; for a shorter period, two of it."""
_LOWEST = "00000000-0000-0000-0000-000000000000"

Span: TypeAlias = tuple[str | None, str | None]
"""The ids after the first and before the second; None: from the beginning, to the end."""
ALL: Span = (None, None)


class PartitionBusy(Exception):
    """Somebody reads or writes the partition, so it is not dropped now, and all is as before."""


class Partition(Struct, frozen=True):
    """The ids from ``start`` to before ``end``, in a partition of each of the three tables."""

    name: str
    """The end of the tables' names."""
    start: str
    end: str

    @property
    def start_us(self) -> int:
        return _time_of(self.start)

    @property
    def end_us(self) -> int:
        return _time_of(self.end)

    def ends_whole(self, age_us: int, now: int) -> bool:
        """Whether its runs wait until all of them may be removed: it is short, and not long overdue."""
        length = self.end_us - self.start_us
        return length <= max(2 * age_us // SHARE, SHORTEST_US) and now <= self.end_us + age_us + length


def _time_of(run_id: str) -> int:
    return int(run_id.replace("-", "")[:12], 16) * 1000


_BOUNDS = re.compile(r"FROM \((?:MINVALUE|'([0-9a-f-]+)')\) TO \('([0-9a-f-]+)'\)")
_PARTITIONS = text("""
SELECT substr(c.relname, length('semel_runs') + 1), pg_get_expr(c.relpartbound, c.oid)
FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
WHERE i.inhparent = CAST('semel_runs' AS regclass)""")
_MAY_MAKE = text("SELECT has_function_privilege('semel_make_partition(uuid, uuid)', 'EXECUTE')")


def partitions(conn: Connection) -> list[Partition]:
    """The partitions in the order of their ids, without the default one; none on SQLite."""
    if conn.dialect.name == "sqlite":
        return []
    found = ((name, _BOUNDS.search(bounds or "")) for name, bounds in conn.execute(_PARTITIONS))
    known = [Partition(name, bounds[1] or _LOWEST, bounds[2]) for name, bounds in found if bounds]
    return sorted(known, key=lambda each: each.end)


NO_PRIVILEGE = (
    "the database user may not make partitions, so that old runs are removed one by one; "
    "GRANT EXECUTE ON FUNCTION semel_make_partition, semel_lock_partition, semel_drop_partition TO that user"
)


def may_make(conn: Connection) -> bool:
    """Whether this user may make and drop partitions."""
    return bool(conn.scalar(_MAY_MAKE))


def period_of(retention: float | None) -> int:
    """For how many microseconds a new partition is."""
    return LONGEST_US if retention is None else min(max(round(retention * MICRO / SHARE), SHORTEST_US), LONGEST_US)


def missing(conn: Connection, retention: float | None, context: StatementContext) -> list[tuple[int, int]]:
    """The times, from now on and some time ahead, that have no partition yet: each the start and end of one."""
    if conn.dialect.name == "sqlite":
        return []
    at = now = read_clock(conn, context)
    period, found = period_of(retention), []
    known = partitions(conn)
    while at < now + min(2 * period, AHEAD_US):
        there = next((each for each in known if each.start_us <= at < each.end_us), None)
        if there is not None:
            at = there.end_us
            continue
        start = max(at, now + SHORTEST_US)  # what is submitted now stays where it is
        later = [each.start_us for each in known if each.start_us > at]
        end = min([start + period, *later])
        if start < end:
            found.append((start, end))
        at = end
    return found


_MAKE = text("SELECT semel_make_partition(CAST(:start AS uuid), CAST(:end AS uuid))")
_BRIEFLY = text("SELECT set_config('statement_timeout', '2s', true)")
_END_IF_SILENT = text("SELECT set_config('idle_in_transaction_session_timeout', '5s', true)")
"""Nobody can read a table that gets or loses a partition until the transaction ends, so one whose client vanished ends
before others have given up."""


def make(conn: Connection, start_us: int, end_us: int) -> bool:
    """Make a partition for this time. False if somebody reads or writes, or if the default one is too full."""
    conn.execute(_BRIEFLY)
    conn.execute(_END_IF_SILENT)
    return bool(conn.scalar(_MAKE, {"start": id_at(start_us), "end": id_at(end_us)}))


def spans(conn: Connection, age: float, context: StatementContext) -> list[Span]:
    """The ranges of ids whose runs are removed in batches: all but partitions that will be dropped whole."""
    now = read_clock(conn, context)
    found: list[Span] = []
    start = None
    for each in partitions(conn):
        if each.ends_whole(round(age * MICRO), now):
            found += [(start, each.start)] if start != each.start else []
            start = each.end
    return [*found, (start, None)]


_REMOVABLE = text("""
SELECT NOT EXISTS (SELECT FROM semel_active WHERE id >= CAST(:start AS uuid) AND id < CAST(:end AS uuid))
   AND NOT EXISTS (SELECT FROM semel_keys WHERE kind = 'run' AND state = 'completed' AND expires_us >= :now
                   AND attempt COLLATE "C" >= CAST(CAST(:start AS uuid) AS text)
                   AND attempt COLLATE "C" < CAST(CAST(:end AS uuid) AS text))
   AND NOT EXISTS (SELECT FROM semel_attempts WHERE run_id >= CAST(:start AS uuid) AND run_id < CAST(:end AS uuid)
                   AND ended_us >= :before)
   AND NOT EXISTS (SELECT FROM semel_outbox WHERE run_id >= CAST(:start AS uuid) AND run_id < CAST(:end AS uuid)
                   AND at_us >= :heard)
   AND NOT EXISTS (SELECT FROM semel_deliveries WHERE run_id >= CAST(:start AS uuid) AND run_id < CAST(:end AS uuid)
                   AND state = 'waiting' AND due_us >= :heard)""")


def _is_removable(conn: Connection, partition: Partition, age: float, now: int) -> bool:
    """Whether every run of the partition ended more than ``age`` seconds ago, no live key names one, and no event of
    one waits to be sent.
    """
    before = now - round(age * MICRO)
    ids = {"start": partition.start, "end": partition.end}
    values = {**ids, "now": now, "before": before, "heard": before - EVENTS_KEPT_US}
    return bool(conn.scalar(_REMOVABLE, values))


def removable(conn: Connection, age: float, context: StatementContext) -> list[Partition]:
    """The partitions all of whose runs may be removed."""
    if conn.dialect.name == "sqlite" or not may_make(conn):
        return []
    now = read_clock(conn, context)
    over = [each for each in partitions(conn) if each.end_us + round(age * MICRO) < now]
    return [each for each in over if _is_removable(conn, each, age, now)]


_COUNT = text(
    """
SELECT count(*), (SELECT CAST(id AS text) {0} ORDER BY id LIMIT 1),
  (SELECT CAST(id AS text) {0} ORDER BY id DESC LIMIT 1) {0}""".format(
        "FROM semel_runs WHERE id >= CAST(:start AS uuid) AND id < CAST(:end AS uuid)"
    )
)
_LOCK = text("SELECT semel_lock_partition(:name)")
_DROP = text("SELECT semel_drop_partition(:name)")


def drop(conn: Connection, partition: Partition, age: float, context: StatementContext, *, rule: str = "purge") -> int:
    """Remove the partition with its runs, and note their files and the rule. Returns how many; 0 if one must stay.

    Nobody waits for it: raises :class:`PartitionBusy` if a transaction uses the partition, such as a retry of a run.
    """
    now = read_clock(conn, context)
    if partition not in partitions(conn):
        return 0  # dropped before, and the reply was lost
    conn.execute(_END_IF_SILENT)
    if not conn.scalar(_LOCK, {"name": partition.name}):  # nobody writes to it from now on
        raise PartitionBusy(partition.name)
    if not _is_removable(conn, partition, age, now):
        return 0
    ids: dict[str, Any] = {"start": partition.start, "end": partition.end}
    count, first, last = conn.execute(_COUNT, ids).one()
    within = and_(submitted.c.id >= partition.start, submitted.c.id < partition.end)
    gone = purged(conn, age, (partition.start, partition.end), within, context)
    LEAVE_RANGE.write(conn, **ids)
    if count:
        note_range(conn, rule_of(rule, age), (first, last), count, now)
    if not conn.scalar(_DROP, {"name": partition.name}):
        raise PartitionBusy(partition.name)
    audit_log.record(conn, context, *gone)
    return int(count)
