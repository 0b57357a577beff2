"""The tables, indexes and views that ``semel migrate`` makes: on SQLite as its catalog has them, on PostgreSQL too."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from golden.commands import run_each
from golden.comparing import compare

RELEASE = 18
COLUMNS = """
SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod),
       CASE WHEN a.attnotnull THEN ' not null' ELSE '' END,
       coalesce(' default ' || pg_get_expr(d.adbin, d.adrelid), ''),
       CASE WHEN a.attidentity = '' THEN '' ELSE ' identity' END,
       CASE WHEN coll.collname IS NULL OR coll.collname = 'default' THEN '' ELSE ' collate ' || coll.collname END
FROM pg_attribute a
JOIN pg_class c ON c.oid = a.attrelid AND c.relkind IN ('r', 'p', 'v') AND NOT c.relispartition
JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = current_schema()
LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
LEFT JOIN pg_collation coll ON coll.oid = a.attcollation
WHERE a.attnum > 0 AND NOT a.attisdropped
ORDER BY c.relname, a.attnum
"""
PARTS = {
    "constraint": "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint"
    " WHERE connamespace = current_schema()::regnamespace AND contype <> 'n'"
    " AND conrelid NOT IN (SELECT inhrelid FROM pg_inherits) ORDER BY conname, conrelid",
    "index": "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = current_schema()"
    " AND tablename NOT IN (SELECT relname FROM pg_class WHERE relispartition) ORDER BY indexname",
    "partitions of": "SELECT relname, pg_get_partkeydef(oid) FROM pg_class"
    " WHERE relnamespace = current_schema()::regnamespace AND relkind = 'p' ORDER BY relname",
    "view": "SELECT viewname, definition FROM pg_views WHERE schemaname = current_schema() ORDER BY viewname",
    "function": "SELECT proname, pg_get_functiondef(oid) FROM pg_proc"
    " WHERE pronamespace = current_schema()::regnamespace ORDER BY proname",
    "trigger": "SELECT tgname, pg_get_triggerdef(oid) FROM pg_trigger"
    " WHERE NOT tgisinternal AND tgparentid = 0 ORDER BY tgname",
    "sequence": "SELECT sequencename, data_type::text FROM pg_sequences"
    " WHERE schemaname = current_schema() ORDER BY sequencename",
    "options of": "SELECT relname, array_to_string(reloptions, ', ') FROM pg_class"
    " WHERE relnamespace = current_schema()::regnamespace AND reloptions IS NOT NULL ORDER BY relname",
}


def test_the_schema_on_sqlite_stays(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'fresh.db'}"
    (ended,) = run_each([["migrate", url]], tmp_path)
    assert ended.code == 0, ended.err
    with closing(sqlite3.connect(tmp_path / "fresh.db")) as connection:
        rows = connection.execute(
            "SELECT type, name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY type, name"
        ).fetchall()
        version = connection.execute("SELECT * FROM semel_version").fetchall()
    lines = [line for kind, name, sql in rows for line in (f"== {kind} {name}", *_lines(sql), "")]
    compare("schema-sqlite.txt", "\n".join([*lines, *_version(version)]))


def test_the_schema_on_postgresql_stays(postgres_url: str, tmp_path: Path) -> None:
    (ended,) = run_each([["migrate", postgres_url]], tmp_path)
    assert ended.code == 0, ended.err
    lines: list[str] = []
    with psycopg.connect(postgres_url) as connection:
        if connection.info.server_version // 10_000 != RELEASE:
            pytest.skip(
                f"PostgreSQL {RELEASE} wrote the golden file, and each release writes definitions in its own way"
            )
        tables: dict[str, list[str]] = {}
        for table, name, *rest in connection.execute(COLUMNS).fetchall():
            tables.setdefault(table, []).append(f"  {name} {''.join(rest)}")
        for table, columns in tables.items():
            lines += [f"== columns of {table}", *columns, ""]
        for part, query in PARTS.items():
            for name, text in connection.execute(query).fetchall():
                lines += [f"== {part} {name}", *_lines(text), ""]
        version = connection.execute("SELECT * FROM semel_version").fetchall()
    compare("schema-postgresql.txt", "\n".join([*lines, *_version(version)]))


def _lines(text: str) -> list[str]:
    """SQL, one line for each of its own, with single spaces."""
    return [f"  {' '.join(line.split())}" for line in text.splitlines() if line.strip()]


def _version(rows: list[Any]) -> list[str]:
    return ["== version of the migrations", *(f"  {row[0]}" for row in rows)]
