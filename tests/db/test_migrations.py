"""The schema is brought up by migrations: to what the code expects, once, however many ask for it at once."""

import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, inspect, make_url, text

from semel import App, Granted, JobStore, NotMigrated, Once, SemelError
from semel._concurrency.sync import run_sync
from semel.cli import main as semel_command
from semel.db import migrate, schema
from semel.runs.store import lease, transitions
from semel.runs.store.lease import LeaseRequest
from support.databases import ending, open_app
from support.programs import Program

PATIENCE = 60
NEWEST = schema.REVISIONS[-1]


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    """An empty database of each kind."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    parts = make_url(url)
    if parts.get_backend_name() == "postgresql":
        parts = parts.set(drivername="postgresql+psycopg")
    engine = create_engine(parts)
    yield engine
    engine.dispose()


SPARSE = {
    "semel_runs": ("priority", "lease_us"),
    "semel_attempts": ("due_us", "attempts", "errors", "losts"),
}


def belongs(conn: Connection) -> Callable[..., bool]:
    """PostgreSQL draws fences from a sequence, SQLite from a table of one row. Some of their indexes differ, and
    Alembic does not know which is whose, nor that a partition belongs to its table. SQLite has values where PostgreSQL
    has NULL for the usual one."""

    def include(thing: Any, name: str | None, kind: str, *_: Any) -> bool:
        if kind == "column" and conn.dialect.name == "sqlite":
            return name not in SPARSE.get(thing.table.name, ())
        if kind == "index" and name in ("semel_runs_hash", "semel_runs_search"):
            return False
        if conn.dialect.name != "postgresql" or kind != "table":
            return True
        return name != "semel_fence_counter" and not str(name).endswith(("_first", "_default"))

    return include


def test_a_migrated_database_is_what_the_code_expects(url: str, engine: Engine) -> None:
    """Alembic, asked for what is still missing, finds nothing."""
    assert semel_command(["migrate", url]) == 0
    with engine.connect() as conn:
        options = {
            "compare_type": True,
            "compare_server_default": True,
            "version_table": schema.VERSION_TABLE,
            "include_object": belongs(conn),
        }
        context = MigrationContext.configure(conn, opts=options)
        assert compare_metadata(context, schema.metadata) == []
        sequences = inspect(conn).get_sequence_names() if conn.dialect.name == "postgresql" else ["semel_fence"]
        assert sequences == ["semel_fence"]
        assert migrate.current(conn) == schema.REVISIONS[-1]


def test_the_list_of_revisions_is_the_chain_of_migrations() -> None:
    """What `behind` trusts is what Alembic would run."""
    config = Config()
    config.set_main_option("script_location", "semel.db:migrations")
    config.set_main_option("path_separator", "os")
    chain = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    assert tuple(reversed(chain)) == schema.REVISIONS


def test_a_second_migration_changes_nothing(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert [semel_command(["migrate", url]) for _ in range(2)] == [0, 0]
    assert capsys.readouterr().out.splitlines() == [f"migrated from nothing to {NEWEST}", f"already at {NEWEST}"]


def test_keys_survive_a_second_migration(url: str) -> None:
    assert semel_command(["migrate", url]) == 0
    with Once(url) as once:
        once.call("key", lambda: 7)
    assert semel_command(["migrate", url]) == 0
    with Once(url) as once:
        assert once.call("key", int).value == 7


def test_many_processes_may_migrate_at_once(url: str) -> None:
    """A rolling deployment: each one starts with `semel migrate`, and each one succeeds."""
    assert sorted(at_once(MIGRATE, url)) == [[0, f"already at {NEWEST}"]] * 3 + [
        [0, f"migrated from nothing to {NEWEST}"]
    ]


def go_back(engine: Engine, version: str) -> None:
    """Take migrations back, to this one or, for ``base``, all."""
    with engine.begin() as conn:
        config = Config()
        config.set_main_option("script_location", "semel.db:migrations")
        config.set_main_option("path_separator", "os")
        config.attributes["connection"] = conn
        command.downgrade(config, version)


KILLED = """
import os, signal
from sqlalchemy import event
from semel.cli._database import engine_of
from semel.db import migrate

engine = engine_of(url)
seen = []

def die(_conn, _cursor, statement, *_):
    if statement.startswith("UPDATE semel_version"):
        seen.append(statement)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

event.listen(engine, "before_cursor_execute", die)
migrate.run(engine, lambda *_: None)
tell("it was not killed")
"""


def test_each_migration_is_kept_although_the_next_one_is_killed(url: str, engine: Engine) -> None:
    """Its transaction has ended, with all its locks, before the next one begins; and the next process goes on there."""
    assert semel_command(["migrate", url]) == 0
    with closing(open_app(url)) as app:
        run = app.submit("train", {"number": 1}, user="ann")
    go_back(engine, "0008")
    reached = []
    for _ in schema.REVISIONS[schema.REVISIONS.index("0008") : -2]:
        with Program(KILLED, url=url) as program, pytest.raises((EOFError, ConnectionError)):
            program.hear()
        with engine.connect() as conn:
            reached.append(migrate.current(conn))
    assert reached == list(schema.REVISIONS[schema.REVISIONS.index("0009") : -1])
    assert [exit_code for exit_code, _ in at_once(MIGRATE, url)] == [0] * 4
    test_a_migrated_database_is_what_the_code_expects(url, engine)
    with closing(open_app(url)) as app:
        assert app.get(run.id).status == "PENDING"


MIGRATE = """
import contextlib, io
from semel.cli import main
with contextlib.redirect_stdout(io.StringIO()) as said:
    tell("ready")
    hear()
    tell([main(["migrate", url]), said.getvalue().strip()])
"""

FIRST_START = """
from semel import Once
tell("ready")
hear()
with Once(url) as once:
    tell(once.call("key", lambda: number).value)
"""


def at_once(source: str, url: str) -> list[Any]:
    """What four processes tell that start to work at the same moment."""
    with ExitStack() as stack:
        programs = [stack.enter_context(Program(source, url=url, number=number)) for number in range(4)]
        assert [program.hear() for program in programs] == ["ready"] * 4
        for program in programs:
            program.tell()
        return [program.hear() for program in programs]


def test_a_new_file_is_made_ready_by_whoever_is_first(sqlite_url: str) -> None:
    """The embedded default needs no command: four processes start on a file that does not exist, and agree."""
    assert len(set(at_once(FIRST_START, sqlite_url))) == 1


def test_a_new_file_is_made_ready_by_whichever_thread_is_first(sqlite_url: str) -> None:
    with ThreadPoolExecutor(8) as threads:
        stores = [Once(sqlite_url, collect=False) for _ in range(8)]
        calls = [threads.submit(once.call, "key", lambda at=at: at) for at, once in enumerate(stores)]
        assert len({call.result(PATIENCE).value for call in calls}) == 1
    for once in stores:
        once.close()


def test_a_migration_can_be_taken_back_and_run_again(url: str, engine: Engine) -> None:
    """Nothing of semel's is left in between, and everything works afterwards."""
    assert semel_command(["migrate", url]) == 0
    go_back(engine, "base")
    with engine.connect() as conn:
        assert [name for name in inspect(conn).get_table_names() if name != schema.VERSION_TABLE] == []
        if conn.dialect.name == "postgresql":
            assert inspect(conn).get_sequence_names() == []
        with pytest.raises(NotMigrated):
            migrate.require(conn)
    assert semel_command(["migrate", url]) == 0
    with Once(url) as once:
        assert isinstance(once.claim("key"), Granted)


def test_runs_keys_and_reservations_survive_the_way_back_and_forth(url: str, engine: Engine) -> None:
    """Back step by step, to the first revision that knows runs, and forth through all of them."""
    assert semel_command(["migrate", url]) == 0
    with closing(open_app(url)) as app, closing(JobStore(url)) as jobs:
        for asked, reported in ((3, None), (4, 5)):
            app.submit("train", {"number": asked}, user="ann", cost=asked)
            finish_next(app, reported)
        run = app.submit("train", {"number": 1}, user="ann", idempotency_key="k", cost=2.5)
        over = app.submit("train", {"number": 2}, user="ann")
        app.cancel(over.id)
        spent = app.usage("ann").spent
        assert spent["yearly"] == 2.5 + 3 + 5
        slot = jobs.reserve_job_slot("ann", 5)
        jobs.store_idempotency_key("document", over.id, "ann")
    for revision in reversed(schema.REVISIONS[2:-1]):
        go_back(engine, revision)
        with engine.connect() as conn:
            for view in ("model_runs", "idempotency_keys", "job_reservations"):
                assert conn.execute(text(f"SELECT * FROM {view}")).all() != [], revision
    assert semel_command(["migrate", url]) == 0
    with closing(open_app(url)) as app, closing(JobStore(url)) as jobs:
        assert (app.usage("ann").concurrent, app.usage("ann").spent) == (2, spent)
        again = app.submit("train", {"number": 1}, user="ann", idempotency_key="k", cost=2.5)
        assert (again.id, again.replayed, again.cost) == (run.id, True, 2.5)
        assert app.get(over.id).status == "CANCELLED"
        assert [each.id for each in app.runs(user="ann", status=["FAILED", "CANCELLED"]).runs] == [over.id]
        assert slot is not None
        assert jobs.consume_reservation(slot, job_id=run.id)
        assert jobs.check_idempotency_key("document", "ann") == over.id
        assert app.purge(0) == 2, "a live key names the one that was cancelled"
        assert app.usage("ann").spent == spent


def finish_next(app: App, cost: float | None) -> None:
    """Lease the next run and end it, with the cost that it reports."""
    store = app._engine.store
    request = LeaseRequest("worker-1", ("default",), ["train"], 1)
    (leased,) = run_sync(store.write(lease.lease, request, store.statement_context))
    assert run_sync(store.write(transitions.end, [ending(leased, cost=cost)], store.statement_context))


def test_a_newer_database_is_accepted(url: str, engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    """In a rolling deployment the database is migrated first, while the old release still runs."""
    assert semel_command(["migrate", url]) == 0
    with engine.begin() as conn:
        conn.execute(text(f"UPDATE {schema.VERSION_TABLE} SET version_num = '9999'"))
    with Once(url) as once:
        assert isinstance(once.claim("key"), Granted)
    capsys.readouterr()

    assert semel_command(["migrate", url]) in (0, 1)  # there is nothing that the old release could do; it says so
    said = capsys.readouterr()
    assert "9999" in said.out + said.err
    assert "Traceback" not in said.err
    with engine.connect() as conn:
        assert migrate.current(conn) == "9999"


def test_users_tables_are_left_alone(url: str, engine: Engine) -> None:
    """A user's own schema, and own Alembic, live in the same database."""
    with engine.begin() as conn:
        conn.execute(text("CREATE TABLE orders (id integer)"))
        conn.execute(text("CREATE TABLE alembic_version (version_num varchar(32))"))
        conn.execute(text("INSERT INTO alembic_version VALUES ('theirs')"))
    assert semel_command(["migrate", url]) == 0
    with engine.connect() as conn:
        assert conn.scalar(text("SELECT version_num FROM alembic_version")) == "theirs"
        assert {"orders", "semel_keys"} <= set(inspect(conn).get_table_names())


def test_a_migration_that_fails_leaves_nothing_behind(postgres_url: str) -> None:
    """It is one transaction: a name that is taken stops it, and it can be run again when the name is free."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE SEQUENCE semel_fence")
        assert semel_command(["migrate", postgres_url]) == 1
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        assert tables == []
        connection.execute("DROP SEQUENCE semel_fence")
    assert semel_command(["migrate", postgres_url]) == 0


def test_a_schema_chosen_in_the_url_is_where_the_tables_go(postgres_url: str) -> None:
    """libpq's `options` are the user's; semel adds its own to them."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA tenant")
    url = make_url(postgres_url).update_query_dict({"options": "-csearch_path=tenant"})
    address = url.render_as_string(hide_password=False)
    assert semel_command(["migrate", address]) == 0
    with psycopg.connect(postgres_url) as connection:
        found = connection.execute("SELECT schemaname FROM pg_tables WHERE tablename = 'semel_keys'").fetchall()
        assert found == [("tenant",)]
    with Once(address) as once:
        assert once.call("key", lambda: 7).value == 7
    with pytest.raises(SemelError), Once(postgres_url):
        pass


def test_every_new_file_of_a_process_is_what_the_migrations_make(tmp_path: Path) -> None:
    """The first file of a process is migrated, the others are made from what that gave."""
    files = [tmp_path / f"{name}.db" for name in ("migrated", "first", "second")]
    assert semel_command(["migrate", f"sqlite:///{files[0]}"]) == 0
    for file in files[1:]:
        with Once(f"sqlite:///{file}", collect=False) as once:
            once.get("a key")

    def contents(file: Path) -> list[Any]:
        with closing(sqlite3.connect(file)) as connection:
            made = connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY type, name").fetchall()
            tables = [name for kind, name, _ in made if kind == "table"]
            return [made, *(connection.execute(f"SELECT * FROM {name}").fetchall() for name in tables)]

    assert contents(files[1]) == contents(files[2]) == contents(files[0])
