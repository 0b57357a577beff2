"""The history of runs cannot be rewritten unnoticed: the chain of every run, seals, purges, and what verify finds."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import (
    Column,
    Connection,
    Float,
    Integer,
    LargeBinary,
    RowMapping,
    Table,
    Uuid,
    delete,
    insert,
    select,
    text,
    update,
)

from semel import audit
from semel._concurrency.sync import run_sync
from semel.audit import FORMS, CannotVerify, Form, NotAsSealed, Verified
from semel.cli._database import engine_of
from semel.db.errors import translate_errors
from semel.db.schema import Digest, attempts, purges, seal_leaves, seals, submitted, unsealed
from semel.errors import SemelError, StoreUnavailable
from semel.runs.store import seals as sealing
from semel.runs.store.seals import Seal, SigningKey
from semel.runs.types import new_id
from support.databases import DATABASES, Databases, TestDatabase

PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = PRIVATE.public_key().public_bytes_raw()


def key_of(private: Ed25519PrivateKey) -> SigningKey:
    public = private.public_key().public_bytes_raw().hex()
    return SigningKey(public, lambda digest: private.sign(audit.SIGNED + digest))


KEY = key_of(PRIVATE)
TABLES: dict[Table, Form] = {
    submitted: FORMS["run"],
    attempts: FORMS["attempt"],
    purges: FORMS["purge"],
    seals: FORMS["seal"],
}


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest, databases: Databases) -> Iterator[TestDatabase]:
    with databases.empty(request.param) as database:
        database.app.begin_sealing()
        yield database


@pytest.mark.parametrize("kind", DATABASES)
def test_nothing_is_chained_queued_or_noted_before_sealing_begins(databases: Databases, kind: str) -> None:
    with databases.empty(kind) as database:
        before = database.submit()
        database.finish(before)
        database.app.cancel(database.submit().id)
        database.clock.advance(86400)
        assert database.app.purge(older_than=60) == 2
        assert seal(database) is None
        for table in ("unsealed", "seals", "purges"):
            assert not database.rows(f"SELECT * FROM semel_{table}"), table
        last = database.submit()
        database.finish(last)
        assert [row[0] for row in database.rows("SELECT digest FROM semel_attempts")] == [None]
        assert [database.app.begin_sealing(), database.app.begin_sealing()] == [True, False]
        database.finish(database.submit())
        assert (made := seal(database)) is not None
        assert made.count == 1
        begun = [each.target for each in database.app.audit_log(action="sealing.begun").entries]
        assert begun == ["runs"]
        with behind_its_back(database) as conn:
            assert verify(conn).unchained == 1


def seal(database: TestDatabase, key: SigningKey | None = KEY) -> Seal | None:
    made: Seal | None = database.do(sealing.seal, key)
    return made


def verify(conn: Connection, **options: Any) -> Verified:
    lines = [json.dumps(line) for line in sealing.export(conn)]
    return audit.verify(lines, **{"keys": [PUBLIC], **options})


def place(conn: Connection, **options: Any) -> str:
    """The first place that verify finds."""
    with pytest.raises(NotAsSealed) as found:
        verify(conn, **options)
    return str(found.value)


@contextmanager
def behind_its_back(database: TestDatabase) -> Iterator[Connection]:
    """A client's transaction that may change what semel never does; it is rolled back at the end."""
    engine = engine_of(database.url)
    try:
        with engine.connect() as conn:
            if database.kind == "postgres":
                conn.execute(text("SET session_replication_role = replica"))
            else:
                for table in ("runs", "attempts"):
                    conn.execute(text(f"DROP TRIGGER IF EXISTS semel_{table}_guard"))
            yield conn
            conn.rollback()
    finally:
        engine.dispose()


def history(database: TestDatabase) -> None:
    """Three seals, over runs that succeeded, failed, were retried, cancelled and purged."""
    for _ in range(5):
        database.submit()
    gone, again, failed, *done = database.lease(5)
    for each in (gone, *done):
        assert database.end(each, result='{"objective": 0.83}', warnings=("über",))
    assert database.end(again, "retry", reason="not yet", traceback="Traceback …")
    assert database.end(failed, "fatal", reason="never")
    assert seal(database) is not None
    database.clock.advance(1)
    for each in database.lease(5):
        assert database.end(each)
    database.app.cancel(database.submit().id)
    assert seal(database) is not None
    database.clock.advance(7 * 86400)
    assert database.app.purge(6 * 86400) == 6
    database.finish(database.submit(), database.submit(idempotency_key="k", priority=3))
    database.submit()
    (failing,) = database.lease()
    assert database.end(failing, "retry", reason="once")
    database.clock.advance(100)
    (failing,) = database.lease()
    assert database.end(failing, "fatal", reason="twice")
    assert seal(database) is not None


def other(column: Column[Any], value: Any) -> Any:
    """Another value for the column."""
    match column.type, value:
        case (Uuid(), _):
            return new_id()
        case (Digest(), None):
            return "ab" * 32
        case (Digest(), _):
            return f"{int(value[:2], 16) ^ 1:02x}{value[2:]}"
        case (LargeBinary(), _):
            return value[:-1] + bytes([value[-1] ^ 1])
        case (Integer(), _):
            return 7 if value is None else value + 10
        case (Float(), _):
            return 0.25 if value is None else value + 0.25
        case (_, "FAILED"):
            return "CANCELLED"
        case _:
            return "x" if value is None else f"{value}x"


def first_row(conn: Connection, table: Table) -> RowMapping:
    query = select(table)
    if table is attempts:
        query = query.where(attempts.c.status == "FAILED")
    if table is submitted:
        query = query.where(submitted.c.id.in_(select(attempts.c.run_id)))
    return conn.execute(query.limit(1)).mappings().one()


def test_every_column_is_in_the_form_that_is_hashed() -> None:
    for table, form in TABLES.items():
        assert len(form.names) == len(set(form.names))
        hashed = {column.name for column in table.c} - {"digest", "signature"}
        assert set(form.names) == hashed


def test_a_history_that_nobody_touched_verifies(database: TestDatabase) -> None:
    history(database)
    with behind_its_back(database) as conn:
        found = verify(conn)
        head = sealing.head(conn)
        assert head is not None
        assert verify(conn, head=head.digest, keys=[]) == found
    assert found == Verified(3, 9, 7, 0, 0, 3, head.digest)


def test_every_attempt_follows_the_one_before_it(database: TestDatabase) -> None:
    run, cancelled = database.submit(priority=1), database.submit()
    for each in database.lease(2):
        assert database.end(each, "retry", reason="not yet")
    database.app.cancel(cancelled.id)
    for kind in ("retry", "succeeded"):
        (leased,) = database.lease()
        assert database.end(leased, kind)
    assert seal(database) is not None
    with behind_its_back(database) as conn:
        assert verify(conn).rows == 2 * (3 + 2)
        digests = select(attempts.c.digest).where(attempts.c.run_id == run.id).order_by(attempts.c.version)
        first, second, _ = conn.scalars(digests)
        previous = [line.get("previous") for line in sealing.prove(conn, run.id)[1:]]
    assert previous == [None, first, second]


@pytest.mark.parametrize("table", [*TABLES, seal_leaves], ids=lambda table: table.name)
def test_a_changed_field_of_every_column_is_noticed(database: TestDatabase, table: Table) -> None:
    history(database)
    for column in table.c:
        with behind_its_back(database) as conn:
            row = first_row(conn, table)
            if column.name.startswith(("result", "artifacts")) and table is attempts:
                found = conn.execute(select(attempts).where(attempts.c.status == "SUCCEEDED").limit(1))
                row = found.mappings().one()
            mine = [each == row[each.name] for each in table.primary_key]
            changed = update(table).where(*mine).values({column.name: other(column, row[column.name])})
            assert conn.execute(changed).rowcount == 1
            assert place(conn), f"{table.name}.{column.name}"


def test_a_change_is_named_by_its_run_and_seal(database: TestDatabase) -> None:
    history(database)
    with behind_its_back(database) as conn:
        row = first_row(conn, attempts)
        conn.execute(update(attempts).where(attempts.c.run_id == row["run_id"]).values(worker="another"))
        assert place(conn).startswith(f"run {row['run_id']}, version ")
        assert "in seal 3: the attempt differs from its digest" in place(conn)


@pytest.mark.parametrize("table", [*TABLES, seal_leaves], ids=lambda table: table.name)
def test_a_deleted_row_is_noticed(database: TestDatabase, table: Table) -> None:
    history(database)
    with behind_its_back(database) as conn:
        row = first_row(conn, table)
        mine = [each == row[each.name] for each in table.primary_key]
        assert conn.execute(delete(table).where(*mine)).rowcount == 1
        assert place(conn)


def test_a_run_that_is_deleted_whole_is_noticed(database: TestDatabase) -> None:
    history(database)
    with behind_its_back(database) as conn:
        run_id = first_row(conn, attempts)["run_id"]
        conn.execute(delete(attempts).where(attempts.c.run_id == run_id))
        conn.execute(delete(submitted).where(submitted.c.id == run_id))
        assert "it was deleted, and no purge names it" in place(conn)
        assert run_id in place(conn)


@pytest.mark.parametrize("digest", ["", "00" * 32, None], ids=["its own", "of zeros", "without digest"])
def test_an_inserted_attempt_is_noticed(database: TestDatabase, digest: str | None) -> None:
    history(database)
    with behind_its_back(database) as conn:
        row = dict(first_row(conn, attempts))
        row |= {"run_id": new_id(), "digest": row["digest"] if digest == "" else digest}
        conn.execute(insert(attempts), row)
        assert row["run_id"] in place(conn)


def test_an_inserted_run_is_noticed(database: TestDatabase) -> None:
    history(database)
    with behind_its_back(database) as conn:
        row = dict(first_row(conn, submitted)) | {"id": new_id()}
        conn.execute(insert(submitted), row)
        assert row["id"] in place(conn)


def test_an_inserted_purge_or_seal_is_noticed(database: TestDatabase) -> None:
    history(database)
    for table, new in ((purges, {"id": new_id()}), (seals, {"number": 4})):
        with behind_its_back(database) as conn:
            conn.execute(insert(table), dict(first_row(conn, table)) | new)
            assert place(conn)


def test_leaves_without_a_seal_are_noticed(database: TestDatabase) -> None:
    history(database)
    with behind_its_back(database) as conn:
        conn.execute(insert(seal_leaves), {"number": 4, "leaves": b"x"})
        assert place(conn) == "leaves of seal 4: they were inserted, or their seal was deleted"


def test_sealing_that_was_ended_is_noticed(database: TestDatabase) -> None:
    history(database)
    with behind_its_back(database) as conn:
        conn.execute(text("DELETE FROM semel_sealing"))
        assert "sealing was ended" in place(conn)


def test_two_swapped_rows_are_noticed(database: TestDatabase) -> None:
    history(database)
    for table in (submitted, attempts):
        with behind_its_back(database) as conn:
            wanted = {} if table is submitted else {"status": "SUCCEEDED"}
            a, b = conn.execute(select(table).filter_by(**wanted).limit(2)).mappings().all()
            for mine, new in ((a, b), (b, a)):
                same = {each.name: mine[each.name] for each in table.primary_key}
                conn.execute(update(table).filter_by(**same).values({**new, **same}))
            assert place(conn)


def test_two_swapped_leaves_or_seals_are_noticed(database: TestDatabase) -> None:
    history(database)
    with behind_its_back(database) as conn:
        leaves = conn.scalar(select(seal_leaves.c.leaves).where(seal_leaves.c.number == 3))
        assert leaves is not None
        swapped = leaves[52:104] + leaves[:52] + leaves[104:]
        conn.execute(update(seal_leaves).where(seal_leaves.c.number == 3).values(leaves=swapped))
        assert "out of order" in place(conn)
    with behind_its_back(database) as conn:
        for old, new in ((1, 9), (2, 1), (9, 2)):
            for table in (seals, seal_leaves):
                conn.execute(update(table).where(table.c.number == old).values(number=new))
        assert "seal 1" in place(conn)


def cut(conn: Connection, after: int) -> None:
    """Remove the newest seals with all that they cover."""
    for leaves in conn.scalars(select(seal_leaves.c.leaves).where(seal_leaves.c.number > after)).all():
        for at in range(0, len(leaves), 52):
            run_id, version = sealing._id_and_version(leaves[at : at + 20])
            conn.execute(delete(attempts).where(attempts.c.run_id == run_id, attempts.c.version == version))
            conn.execute(delete(submitted).where(submitted.c.id == run_id))
            conn.execute(delete(purges).where(purges.c.id == run_id))
    for table in (seals, seal_leaves):
        conn.execute(delete(table).where(table.c.number > after))


def test_a_tail_that_was_cut_off_is_noticed_against_a_kept_head(database: TestDatabase) -> None:
    last = None
    for _ in range(2):
        database.finish(database.submit())
        last = seal(database)
    assert last is not None
    with behind_its_back(database) as conn:
        cut(conn, after=1)
        assert verify(conn).seals == 1, "without a head it cannot be noticed"
        assert "the kept head is not in the chain" in place(conn, head=last.digest)


def test_a_head_that_was_kept_long_ago_is_in_the_chain(database: TestDatabase) -> None:
    database.finish(database.submit())
    kept = seal(database)
    assert kept is not None
    database.finish(database.submit())
    seal(database)
    with behind_its_back(database) as conn:
        assert verify(conn, head=kept.digest).seals == 2


def forge(conn: Connection, key: SigningKey | None) -> None:
    """Change a result, and make the digests, leaves and seals anew, as an administrator without the key could."""
    row = dict(conn.execute(select(attempts).where(attempts.c.status == "SUCCEEDED")).mappings().one())
    row["result"] = '{"objective": 1.0}'
    digest = audit.chained(audit.ZEROS, audit.FORMS["attempt"].of(row))
    row["digest"] = digest.hex()
    conn.execute(update(attempts).where(attempts.c.run_id == row["run_id"]).values(row))
    entry = audit.key_of(row["run_id"], row["version"]) + digest
    conn.execute(delete(seals))
    conn.execute(delete(seal_leaves))
    sealing._write(conn, sealing._leaves(conn, [entry]), key, row["ended_us"])


def test_a_history_that_was_forged_whole_is_noticed_by_its_head_or_its_key(database: TestDatabase) -> None:
    database.finish(database.submit())
    made = seal(database)
    assert made is not None
    with behind_its_back(database) as conn:
        forge(conn, None)
        assert verify(conn, keys=[]).seals == 1, "without a head and a key it cannot be noticed"
        assert "seal 1 is not signed" in place(conn)
        assert "the kept head is not in the chain" in place(conn, keys=[], head=made.digest)
        forge(conn, key_of(Ed25519PrivateKey.generate()))
        assert "seal 1: it is signed with another key" in place(conn)
        forge(conn, SigningKey(KEY.public, lambda digest: bytes(64)))
        assert "seal 1: its signature is wrong" in place(conn)
        assert "seal 1: its signature is wrong" in place(conn, keys=[])


def test_seals_made_anew_under_one_that_is_signed_are_noticed(database: TestDatabase) -> None:
    database.finish(database.submit())
    seal(database)
    with behind_its_back(database) as conn:
        forge(conn, None)
        conn.commit()
    database.finish(database.submit())
    assert (made := seal(database)) is not None, "its sealer does not know better, and signs"
    with behind_its_back(database) as conn:
        assert place(conn) == "seal 1 is not signed"
        assert verify(conn, signed_from=made.number).seals == 2, "if there was no key before"


def test_a_leaf_whose_run_is_gone_still_names_it(database: TestDatabase) -> None:
    """Or else whoever deletes a run could give its leaf the name of one that was purged."""
    database.finish(database.submit())
    database.clock.advance(100)
    database.finish(deleted := database.submit())
    assert seal(database) is not None
    assert database.app.purge(50) == 1
    seal(database)
    with behind_its_back(database) as conn:
        assert verify(conn).purged == 1
        conn.execute(delete(attempts).where(attempts.c.run_id == deleted.id))
        conn.execute(delete(submitted).where(submitted.c.id == deleted.id))
        assert "it was deleted, and no purge names it" in place(conn)
        leaves = conn.execute(select(seal_leaves.c.leaves).where(seal_leaves.c.number == 1)).scalar_one()
        purged, own = leaves[: audit.LEAF_SIZE], leaves[audit.LEAF_SIZE :]
        renamed = purged + purged[:16] + (4).to_bytes(4) + own[audit.KEY_SIZE :]
        conn.execute(update(seal_leaves).where(seal_leaves.c.number == 1).values(leaves=renamed))
        assert place(conn) == "seal 1: its leaves are not those that were sealed"


def test_seals_that_are_signed_no_more_are_noticed(database: TestDatabase) -> None:
    database.finish(database.submit())
    seal(database)
    database.finish(database.submit())
    seal(database, key=None)
    with behind_its_back(database) as conn:
        assert "seal 2 is not signed" in place(conn)
        assert verify(conn, keys=[]).signed == 1


def test_what_is_not_sealed_yet_has_its_digest_in_the_row_and_in_the_queue(database: TestDatabase) -> None:
    database.finish(database.submit())
    with behind_its_back(database) as conn:
        assert verify(conn, keys=[]).unsealed == 1
        conn.execute(update(attempts).values(worker="another"))
        assert "not yet sealed: the attempt differs from its digest" in place(conn, keys=[])
    with behind_its_back(database) as conn:
        conn.execute(delete(attempts))
        assert "not yet sealed: the attempt was deleted" in place(conn, keys=[])
    with behind_its_back(database) as conn:
        entries = conn.scalars(select(unsealed.c.entries)).one()
        conn.execute(update(unsealed).values(entries=other(unsealed.c.entries, entries)))
        assert "it differs from its digest in the queue" in place(conn, keys=[])


def test_what_was_deleted_before_its_seal_is_noticed_after_it(database: TestDatabase) -> None:
    run = database.submit()
    database.finish(run)
    database.finish(database.submit())
    with behind_its_back(database) as conn:
        conn.execute(delete(attempts).where(attempts.c.run_id == run.id))
        conn.execute(delete(submitted).where(submitted.c.id == run.id))
        conn.commit()
    if database.kind == "sqlite":
        database.write("CREATE TRIGGER semel_runs_guard BEFORE UPDATE ON semel_runs BEGIN SELECT 1; END")
        database.write("CREATE TRIGGER semel_attempts_guard BEFORE UPDATE ON semel_attempts BEGIN SELECT 1; END")
    seal(database)
    with behind_its_back(database) as conn:
        assert run.id in place(conn)


def test_a_purge_says_what_was_removed_when_and_by_which_rule(database: TestDatabase) -> None:
    runs = sorted(database.submit().id for _ in range(2))
    database.finish()
    database.clock.advance(100)
    assert database.app.purge(60) == 2
    with behind_its_back(database) as conn:
        (purge,) = conn.execute(select(purges)).mappings().all()
        assert (purge["rule"], purge["count"]) == ("purge: ended more than 60 s ago", 2)
        assert [purge["first_id"], purge["last_id"]] == runs
        assert verify(conn, keys=[]).unsealed == 3
    assert seal(database) is not None
    with behind_its_back(database) as conn:
        assert verify(conn).purged == 2
        conn.execute(delete(purges))
        assert place(conn)


def test_a_run_older_than_the_chain_is_counted_and_no_fault(database: TestDatabase) -> None:
    old = database.submit()
    database.finish(old)
    with behind_its_back(database) as conn:
        conn.execute(update(attempts).values(digest=None))
        conn.execute(delete(unsealed))
        conn.commit()
    if database.kind == "sqlite":
        database.write("CREATE TRIGGER semel_runs_guard BEFORE UPDATE ON semel_runs BEGIN SELECT 1; END")
        database.write("CREATE TRIGGER semel_attempts_guard BEFORE UPDATE ON semel_attempts BEGIN SELECT 1; END")
    database.finish(database.submit())
    seal(database)
    with behind_its_back(database) as conn:
        found = verify(conn)
        assert (found.unchained, found.rows) == (1, 2)
        conn.execute(update(attempts).where(attempts.c.run_id == old.id).values(ended_us=attempts.c.ended_us + 10**12))
        assert "it has no digest, though it ended after the chain began" in place(conn)


def test_every_attempt_is_in_one_seal_however_many_seal_at_once(database: TestDatabase) -> None:
    runs = [database.submit() for _ in range(20)]
    for each in database.lease(20):
        database.end(each)
    stores = [database.open_app()._engine.store for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(
            threads.map(lambda s: [run_sync(s.write(sealing.seal, KEY, s.statement_context)) for _ in range(5)], stores)
        )
    with behind_its_back(database) as conn:
        found = verify(conn)
        assert (found.rows, found.unsealed) == (40, 0)
        assert {sealing.sealing_of(conn, run.id).number is None for run in runs} == {False}


def test_a_proof_of_a_run_verifies_on_its_own(database: TestDatabase) -> None:
    history(database)
    with behind_its_back(database) as conn:
        head = sealing.head(conn)
        assert head is not None
        run_id = first_row(conn, attempts)["run_id"]
        proof = [json.dumps(line) for line in sealing.prove(conn, run_id)]
        assert audit.verify(proof, keys=[PUBLIC], head=head.digest).rows == 4
        for line in range(1, len(proof)):
            for old, new in (('"worker": "worker-1"', '"worker": "worker-2"'), ('"count": ', '"count": 1')):
                forged = [*proof[:line], proof[line].replace(old, new), *proof[line + 1 :]]
                assert forged != proof
                with pytest.raises(NotAsSealed):
                    audit.verify(forged)
        with pytest.raises(CannotVerify, match="kept head: make it with --chain"):
            audit.verify(proof, head="00" * 32)
        assert sealing.prove(conn, new_id()) == []


def test_a_proof_is_of_the_run_that_it_names_and_of_all_its_attempts(database: TestDatabase) -> None:
    history(database)
    with behind_its_back(database) as conn:
        run_id = first_row(conn, attempts)["run_id"]
        begin, first, second = (json.dumps(line) for line in sealing.prove(conn, run_id))
        assert audit.verify([begin, first, second]).run == run_id
        assert audit.verify([begin, first]).rows == 2, "attempts that came later cannot be missed"
        for cut_off in ([begin], [begin, second], [begin, second, first], [begin, first, first, second]):
            with pytest.raises(NotAsSealed, match="the proof: "):
                audit.verify(cut_off)
        with pytest.raises(NotAsSealed, match=f"it is one of run {run_id}, too"):
            audit.verify([json.dumps({"proof": f"semel run {new_id()}", "version": 1}), first, second])


def test_a_proof_ends_before_the_first_attempt_that_is_not_sealed(database: TestDatabase) -> None:
    run = database.submit()
    (attempt,) = database.lease()
    assert database.end(attempt, "retry", reason="once")
    seal(database)
    database.clock.advance(100)
    (attempt,) = database.lease()
    assert database.end(attempt)
    with behind_its_back(database) as conn:
        assert audit.verify(map(json.dumps, sealing.prove(conn, run.id))).rows == 2
    seal(database)
    with behind_its_back(database) as conn:
        assert audit.verify(map(json.dumps, sealing.prove(conn, run.id))).rows == 4


def test_a_proof_does_not_leave_out_an_attempt_that_is_sealed_later_than_the_next(database: TestDatabase) -> None:
    run = database.submit()
    (attempt,) = database.lease()
    assert database.end(attempt, "retry", reason="once")
    database.write("DELETE FROM semel_unsealed")  # as if the sealer had not come to it
    database.clock.advance(100)
    (attempt,) = database.lease()
    assert database.end(attempt)
    assert seal(database) is not None
    with behind_its_back(database) as conn:
        assert sealing.prove(conn, run.id) == []


def test_a_leaf_outside_of_a_seal_is_noticed(databases: Databases) -> None:
    with databases.empty("sqlite") as database:
        database.app.begin_sealing()
        database.finish(database.submit())
        seal(database)
        database.finish(database.submit())
        with behind_its_back(database) as conn:
            lines = list(sealing.export(conn))
    leaf = next(line for line in lines if "key" in line)
    row_id = "ffffffff-ffff-7fff-bfff-ffffffffffff"
    run, attempt = leaf["run"] | {"id": row_id}, leaf["attempt"] | {"run_id": row_id}
    digest = audit.chained(audit.ZEROS, FORMS["attempt"].of(attempt))
    attempt["digest"] = digest.hex()
    content = audit.content_hash(audit.sha256(FORMS["run"].of(run)).digest(), digest)
    key = audit.key_of(row_id, attempt["version"])
    forged = {"key": key.hex(), "content": content.hex(), "run": run, "attempt": attempt}
    assert "open" in lines[-2]
    with pytest.raises(NotAsSealed, match="it stands outside of a seal"):
        audit.verify(map(json.dumps, [*lines[:-1], forged, lines[-1]]), keys=[PUBLIC])


def test_an_attempt_without_a_digest_cannot_come_after_one_that_has_it(database: TestDatabase) -> None:
    database.finish(database.submit())
    seal(database)
    with behind_its_back(database) as conn:
        row = dict(conn.execute(select(attempts)).mappings().one())
        added = {"version": 4, "fence": 2, "status": "PENDING", "step": "retried", "digest": None}
        added |= {"result": None, "result_digest": None, "result_size": None}
        conn.execute(insert(attempts), row | added)
        assert place(conn).startswith(f"run {row['run_id']}, version 4: the row was inserted")


def test_digits_in_upper_case_are_a_change(databases: Databases) -> None:
    with databases.empty("sqlite") as database:
        database.app.begin_sealing()
        database.finish(database.submit())
        seal(database)
        for table, column in (("runs", "payload_hash"), ("attempts", "digest"), ("seals", "root")):
            with behind_its_back(database) as conn:
                conn.execute(text(f"UPDATE semel_{table} SET {column} = upper({column})"))
                assert place(conn), f"{table}.{column}"


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [""],
        ["{}"],
        ["[]"],
        ["[" * 100_000],
        [b"\xff\xfe"],
        ['{"export": 1, "version": 2}'],
        ['{"export": 1}', "null"],
        ['{"export": 1}', '{"other": 1}'],
    ],
)
def test_what_is_no_export_cannot_be_verified(lines: list[str | bytes]) -> None:
    with pytest.raises(CannotVerify):
        audit.verify(lines)


@pytest.mark.parametrize("first", ['{"export": 1}', '{"proof": "semel run x"}'])
@pytest.mark.parametrize(
    "line",
    [
        '{"seal": 5}',
        '{"seal": {}}',
        '{"seal": {"number": 1e400}}',
        '{"seal": null, "key": []}',
        '{"key": 1}',
        '{"open": "zz"}',
        '{"unchained": 7}',
        '{"end": {}}',
    ],
)
def test_a_line_that_semel_does_not_write_is_no_traceback(first: str, line: str) -> None:
    with pytest.raises((NotAsSealed, CannotVerify)):
        audit.verify([first, line])


def test_a_head_is_64_digits() -> None:
    with pytest.raises(CannotVerify, match="64 hexadecimal digits"):
        audit.verify(['{"export": 1}', '{"end": {"seals": 0}}'], head="5f0c…")


def seal_times(database: TestDatabase, count: int, key: SigningKey | None = KEY) -> list[str]:
    """Make so many seals, of a cancelled run and what has ended besides; returns their digests."""
    made = []
    for _ in range(count):
        database.app.cancel(database.submit().id)
        sealed = seal(database, key)
        assert sealed is not None
        made.append(sealed.digest)
    return made


def proof_of(database: TestDatabase, run_id: str, *, chain: bool = False) -> list[str]:
    with behind_its_back(database) as conn:
        return [json.dumps(line) for line in sealing.prove(conn, run_id, chain=chain)]


def sealed_twice(database: TestDatabase) -> tuple[list[str], list[str]]:
    """The proof, with its chain, of a run whose attempts are in the seals 2 and 4 of six; and the seals' digests."""
    heads = seal_times(database, 1)
    run = database.submit()
    (attempt,) = database.lease()
    assert database.end(attempt, "retry", reason="once")
    heads += seal_times(database, 2)
    (attempt,) = database.lease()
    assert database.end(attempt)
    heads += seal_times(database, 3)
    return proof_of(database, run.id, chain=True), heads


def test_a_proof_with_the_later_seals_leads_to_every_head_kept_since(database: TestDatabase) -> None:
    before = seal_times(database, 1)
    run = database.submit()
    database.finish(run)
    kept = seal_times(database, 4)
    alone, whole = (proof_of(database, run.id, chain=chain) for chain in (False, True))
    for head in kept:
        found = audit.verify(whole, head=head, keys=[PUBLIC])
        assert (found.rows, found.seals, found.head) == (2, 4, kept[-1])
    assert audit.verify(alone, head=kept[0]).seals == 1
    for head in kept[1:]:
        with pytest.raises(CannotVerify, match="no seals up to the kept head: make it with --chain"):
            audit.verify(alone, head=head)
    for head in (*before, "00" * 32):
        with pytest.raises(CannotVerify, match="the kept head is none of the proof's seals 2 to 5"):
            audit.verify(whole, head=head)


def test_a_head_verifies_a_proof_only_if_it_is_as_new_as_all_its_attempts(databases: Databases) -> None:
    with databases.empty("sqlite") as database:
        database.app.begin_sealing()
        proof, heads = sealed_twice(database)
    for head in heads[3:]:
        assert audit.verify(proof, head=head).rows == 4
    for head in heads[1:3]:
        with pytest.raises(CannotVerify, match="the kept head is older than seal 4, which has an attempt of the run"):
            audit.verify(proof, head=head)
    for missing in (3, 5):
        gap = [line for line in proof if json.loads(line).get("seal", {}).get("number") != missing]
        assert len(gap) == len(proof) - 1
        with pytest.raises(CannotVerify, match=f"the proof does not have seal {missing}: make it with --chain"):
            audit.verify(gap, head=heads[3])


def altered(value: Any) -> Iterator[Any]:
    """The JSON value with one change, once for each number and text in it, and without each of its fields."""
    match value:
        case dict():
            for name, each in value.items():
                yield {other: value[other] for other in value if other != name}
                yield from (value | {name: changed} for changed in altered(each))
        case list():
            for at, each in enumerate(value):
                yield value[:at] + value[at + 1 :]
                yield from ([*value[:at], changed, *value[at + 1 :]] for changed in altered(each))
        case str():
            yield f"{value[:-1]}{'1' if value.endswith('0') else '0'}"
        case _:
            yield value + 1


def test_a_proof_in_which_anything_was_altered_does_not_verify_against_an_older_head(databases: Databases) -> None:
    with databases.empty("sqlite") as database:
        database.app.begin_sealing()
        proof, heads = sealed_twice(database)
    proof[0] = proof[0].replace(', "version": 1', "")  # it is usual
    assert audit.verify(proof, head=heads[4]).seals == 5
    tried = 0
    for at, line in enumerate(proof):
        for changed in altered(json.loads(line)):
            forged = [*proof[:at], json.dumps(changed), *proof[at + 1 :]]
            assert not verifies(forged, heads[4]), f"{changed} instead of {line}"
            tried += 1
    assert tried > 200


def verifies(proof: list[str], head: str) -> bool:
    try:
        audit.verify(proof, head=head)
    except (NotAsSealed, CannotVerify):
        return False
    return True


def made_anew(seal: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The seal with other fields, and the digest of these."""
    made = {name: value for name, value in seal.items() if name not in {"public_key", "signature"}} | changes
    return made | {"digest": audit.seal_digest(made).hex()}


def test_a_seal_made_anew_in_a_proof_is_noticed_with_and_without_a_head(databases: Databases) -> None:
    with databases.empty("sqlite") as database:
        database.app.begin_sealing()
        proof, heads = sealed_twice(database)
    lines = [json.loads(line) for line in proof]
    for at, line in enumerate(lines[1:], 1):
        forged = [*lines[:at], line | {"seal": made_anew(line["seal"], at_us=1)}, *lines[at + 1 :]]
        with pytest.raises(NotAsSealed, match="it is not signed"):
            audit.verify(map(json.dumps, forged), head=heads[3], keys=[PUBLIC])
        if line["seal"]["number"] == 6:
            continue  # without the key, nothing vouches for the newest
        for head in (None, *heads[3:]):
            with pytest.raises(NotAsSealed, match="it does not follow the seal before it"):
                audit.verify(map(json.dumps, forged), head=head)
    for changes in ({"number": 5}, {"number": 6}, {"number": 9, "previous": "00" * 32}):
        added = [*lines, {"seal": made_anew(lines[-1]["seal"], **changes)}]
        with pytest.raises((NotAsSealed, CannotVerify)):
            audit.verify(map(json.dumps, added), head=heads[4])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 31])
def test_every_leaf_of_a_tree_has_a_proof(count: int) -> None:
    leaves = [bytes([each]) * 32 for each in range(count)]
    root = audit.root_of(leaves)
    for index, leaf in enumerate(leaves):
        path = audit.path_of(leaves, index)
        assert audit.root_by_path(leaf, index, count, path) == root
        assert audit.root_by_path(leaf, index, count, [*path, leaf]) is None
        if path:
            assert audit.root_by_path(leaf, index, count, path[:-1]) is None


def test_a_value_that_is_not_of_its_columns_kind_stops_no_seal_and_is_noticed(databases: Databases) -> None:
    with databases.empty("sqlite") as database:
        database.app.begin_sealing()
        run = database.submit()
        database.write("DROP TRIGGER semel_runs_guard")
        database.write("UPDATE semel_runs SET payload_hash = 'no digest'")
        for each in database.lease():
            assert database.end(each)
        database.write("CREATE TRIGGER semel_runs_guard BEFORE UPDATE ON semel_runs BEGIN SELECT 1; END")
        assert seal(database) is not None
        with behind_its_back(database) as conn:
            assert f"run {run.id}, version 3, in seal 1: a value of the run is not of its column's kind" in place(conn)


def test_a_seal_that_was_made_anew_is_noticed_by_the_one_after_it(database: TestDatabase) -> None:
    for _ in range(2):
        database.finish(database.submit())
        seal(database)
    with behind_its_back(database) as conn:
        row = dict(conn.execute(select(seals).where(seals.c.number == 1)).mappings().one())
        row["at_us"] += 1
        digest = audit.seal_digest(row)
        row |= {"digest": digest.hex(), "signature": KEY.sign(digest).hex()}
        conn.execute(update(seals).where(seals.c.number == 1).values(row))
        assert "seal 2: it does not follow the seal before it" in place(conn)


def test_a_forged_attempt_beside_a_purge_that_is_sealed_does_not_verify(databases: Databases) -> None:
    with databases.empty("sqlite") as database:
        database.app.begin_sealing()
        database.finish(database.submit())
        database.clock.advance(100)
        assert database.app.purge(50) == 1
        assert seal(database) is not None
        with behind_its_back(database) as conn:
            lines = list(sealing.export(conn))
    sealed = next(line["seal"] for line in lines if "seal" in line)
    leaves = [line for line in lines if "content" in line]
    at = next(at for at, line in enumerate(leaves) if "purge" in line)
    hashes = [audit.leaf_hash(*(bytes.fromhex(line[name]) for name in ("key", "content"))) for line in leaves]
    run_id = new_id()
    attempt = {"run_id": run_id, "version": 3, "status": "SUCCEEDED", "result": "1", "digest": "00" * 32}
    forged = {"key": leaves[at]["key"], "seal": sealed, "index": at, "purge": leaves[at]["purge"]}
    forged |= {"path": [each.hex() for each in audit.path_of(hashes, at)], "run": {"id": run_id}, "attempt": attempt}
    with pytest.raises(NotAsSealed):
        audit.verify(map(json.dumps, [{"proof": f"semel run {run_id}", "version": 1}, forged]), keys=[PUBLIC])
    shown = [line | {"attempt": attempt} if "purge" in line and "key" in line else line for line in lines]
    with pytest.raises(NotAsSealed, match="beside the purge is an attempt"):
        audit.verify(map(json.dumps, shown), keys=[PUBLIC])


def test_a_proof_from_before_there_was_a_key_leads_to_a_seal_that_is_signed(database: TestDatabase) -> None:
    database.finish(old := database.submit())
    heads = seal_times(database, 4, key=None)
    database.finish(new := database.submit())
    heads += seal_times(database, 2)
    whole, alone = proof_of(database, old.id, chain=True), proof_of(database, old.id)
    for head in (None, *heads):
        assert audit.verify(whole, head=head, keys=[PUBLIC], signed_from=5).signed == 2
    assert audit.verify(proof_of(database, new.id), keys=[PUBLIC], signed_from=5).signed == 1
    for head in (None, heads[0]):
        with pytest.raises(CannotVerify, match="seal 1 is not signed, and the proof does not lead to it from a signed"):
            audit.verify(alone, head=head, keys=[PUBLIC], signed_from=5)
    for signed_from in (1, 4):
        with pytest.raises(NotAsSealed, match=r"seal \d: it is not signed"):
            audit.verify(whole, keys=[PUBLIC], signed_from=signed_from)
    with pytest.raises(NotAsSealed, match="seal 5: it is signed with another key"):
        audit.verify(whole, keys=[bytes(32)], signed_from=5)


def test_seals_made_anew_before_the_first_that_is_signed_do_not_verify_a_proof(databases: Databases) -> None:
    with databases.empty("sqlite") as database:
        database.app.begin_sealing()
        database.finish(run := database.submit())
        seal_times(database, 2, key=None)
        seal_times(database, 1)
        lines = [json.loads(line) for line in proof_of(database, run.id, chain=True)]
    assert audit.verify(map(json.dumps, lines), keys=[PUBLIC], signed_from=3).signed == 1
    first = made_anew(lines[1]["seal"], at_us=1)
    second = made_anew(lines[2]["seal"], previous=first["digest"])
    begin, attempt, _, signed = lines
    forged = [begin, attempt | {"seal": first}, {"seal": second}]
    with pytest.raises(NotAsSealed, match="seal 3: it does not follow the seal before it"):
        audit.verify(map(json.dumps, [*forged, signed]), keys=[PUBLIC], signed_from=3)
    apart = [begin, attempt | {"seal": first}, signed]
    for file in (forged, apart):
        with pytest.raises(CannotVerify, match="seal 1 is not signed"):
            audit.verify(map(json.dumps, file), keys=[PUBLIC], signed_from=3)


MALFORMED = {
    "postgres": ["'\\x00'", "''", "'\\x" + "00" * 53 + "'"],
    "sqlite": ["x'00'", "x''", "'text'", "CAST(x'ff' AS TEXT)", "7", "zeroblob(53)"],
}
"""Values that semel never writes into the queue, or as the leaves of a seal."""


def test_a_malformed_row_of_the_queue_stays_there_and_the_others_are_sealed(database: TestDatabase) -> None:
    for value in MALFORMED[database.kind]:
        database.finish(database.submit())
        database.write(f"INSERT INTO semel_unsealed VALUES ({value})")  # type: ignore[arg-type]
        database.finish(database.submit())
        assert (made := seal(database)) is not None, value
        assert made.count == 2, value
        assert len(database.ask(sealing.malformed)) == database.count("semel_unsealed") == 1, value
        with behind_its_back(database) as conn:
            assert place(conn).endswith(" of the queue semel_unsealed: the row is malformed, semel did not write it so")
            conn.execute(text("DELETE FROM semel_unsealed"))
            assert verify(conn).unsealed == 0
            conn.commit()


def test_the_place_of_a_malformed_row_finds_it(database: TestDatabase) -> None:
    database.finish(database.submit())
    database.write(f"INSERT INTO semel_unsealed VALUES ({MALFORMED[database.kind][0]})")  # type: ignore[arg-type]
    (found,) = database.ask(sealing.malformed)
    column, place = found.split()
    with behind_its_back(database) as conn:
        assert conn.execute(text(f"DELETE FROM semel_unsealed WHERE {column} = '{place}'")).rowcount == 1
        assert verify(conn, keys=[]).unsealed == 1


def test_malformed_leaves_name_their_seal(database: TestDatabase) -> None:
    run = database.submit()
    database.finish(run)
    seal(database)
    for value in MALFORMED[database.kind]:
        if value in {"''", "x''"}:
            continue  # none is too few, which is another message
        with behind_its_back(database) as conn:
            conn.execute(text(f"UPDATE semel_seal_leaves SET leaves = {value}"))
            assert place(conn) == "seal 1: its leaves are malformed, semel did not write them so", value
    with behind_its_back(database) as conn:
        before = "CAST('\\x00' AS bytea) || leaves" if database.kind == "postgres" else "CAST('0' || leaves AS BLOB)"
        conn.execute(text(f"UPDATE semel_seal_leaves SET leaves = {before}"))
        with pytest.raises(SemelError, match="seal 1: its leaves are malformed"):
            sealing.prove(conn, run.id)


def test_a_row_that_cannot_have_a_key_is_noticed(database: TestDatabase) -> None:
    database.finish(database.submit())
    seal(database)
    with behind_its_back(database) as conn:
        row = dict(conn.execute(select(attempts)).mappings().one())
        row |= {"run_id": new_id(), "version": -1}
        conn.execute(insert(attempts), row)
        assert place(conn) == f"run {row['run_id']}, version -1: the row was inserted: no seal has it, and none is due"


def test_text_that_is_not_utf_8_stops_no_seal(databases: Databases) -> None:
    with databases.empty("sqlite") as database:
        database.app.begin_sealing()
        damaged, other_run = database.submit(), database.submit()
        database.finish(damaged, other_run)
        database.write("DROP TRIGGER semel_runs_guard")
        database.write(f"UPDATE semel_runs SET model = CAST(x'ff' AS TEXT) WHERE id = '{damaged.id}'")  # type: ignore[arg-type]
        database.write("CREATE TRIGGER semel_runs_guard BEFORE UPDATE ON semel_runs BEGIN SELECT 1; END")
        assert (made := seal(database)) is not None
        assert made.count == 2
        with behind_its_back(database) as conn:
            conn.execute(text("UPDATE semel_runs SET model = 'train'"))
            assert f"run {damaged.id}, version 3, in seal 1: what was submitted differs" in place(conn)


def test_a_malformed_seal_is_named_by_what_cannot_follow_it(databases: Databases) -> None:
    with databases.empty("sqlite") as database:
        database.app.begin_sealing()
        for change in ("digest = 'zz'", "number = 'x'"):
            database.finish(database.submit())
            database.write("DELETE FROM semel_seals")
            seal(database)
            database.write(f"UPDATE semel_seals SET {change}")  # type: ignore[arg-type]
            database.finish(database.submit())
            with pytest.raises(SemelError, match=r"the newest seal, .*, is malformed: nothing can be sealed after it"):
                seal(database)
            assert database.count("semel_unsealed") == 1, "it is not lost"
            database.write("DELETE FROM semel_seals")
            database.write("DELETE FROM semel_seal_leaves")
            database.write("DELETE FROM semel_unsealed")


def test_text_that_is_not_utf_8_is_a_damaged_value_and_no_database_out_of_reach(databases: Databases) -> None:
    with databases.empty("sqlite") as database:
        database.finish(database.submit())
        with behind_its_back(database) as conn:
            conn.execute(text("UPDATE semel_attempts SET worker = CAST(x'ff' AS TEXT) || ' does not exist'"))
            damaged = "a value in the column worker is damaged: it is text that is not UTF-8"
            with pytest.raises(SemelError, match=damaged) as found, translate_errors():
                conn.execute(select(attempts)).all()
        assert not isinstance(found.value, StoreUnavailable), "or it would be tried again"
