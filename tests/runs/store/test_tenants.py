"""No statement crosses tenants, but the sweeper's: everything works where PostgreSQL shows only one tenant's rows.

Row-level security hides the rows of other tenants from a role, and refuses rows that it would write for them. So what a
tenant does needs nothing of another one, and each tenant could be in a database of its own.
"""

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import make_url

from semel import App, JobStore, Quota, QuotaExceeded
from support.databases import open_app

OURS, OTHER = "acme", "globex"
DEPLOY = Path(__file__).parents[3] / "docs" / "deploy.md"
STORES = DEPLOY.with_name("stores.md")
OF_A_TENANT = (
    *("runs", "active", "attempts", "run_counts", "run_totals", "costs", "quotas", "reservations", "jobs"),
    *("subscriptions", "audit", "run_hours"),
)
OF_A_RUN = ("outbox", "deliveries", "run_logs")


def grants() -> str:
    """What docs/stores.md and docs/deploy.md say that a role needs."""
    statements = [
        each for page in (STORES, DEPLOY) for each in re.findall(r"^GRANT [^;]*;", page.read_text(), re.MULTILINE)
    ]
    assert len(statements) >= 6
    return " ".join(statements)


def confine(operator: psycopg.Connection[tuple[object]], role: str) -> None:
    """Make a role that sees and writes the rows of one tenant, and has no privilege that the documents do not name."""
    operator.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
    operator.execute(re.sub(r"\bTO app\b", f'TO "{role}"', grants()).encode())
    rules = dict.fromkeys(OF_A_TENANT, f"tenant = '{OURS}'")
    rules |= dict.fromkeys(OF_A_RUN, "run_id IN (SELECT id FROM semel_runs)")
    rules["keys"] = f"scope LIKE '{OURS} %'"
    for table, rule in rules.items():
        name = sql.Identifier(f"semel_{table}")
        operator.execute(sql.SQL("ALTER TABLE {} ENABLE ROW LEVEL SECURITY").format(name))
        operator.execute(
            sql.SQL("CREATE POLICY tenants ON {} TO {} USING ({})").format(
                name,
                sql.Identifier(role),
                sql.SQL(rule),  # type: ignore[arg-type] -- composed above
            )
        )
    for view in ("semel_run_states", "semel_run_steps", "model_runs", "idempotency_keys", "job_reservations"):
        operator.execute(sql.SQL("ALTER VIEW {} SET (security_invoker = true)").format(sql.Identifier(view)))


@pytest.fixture
def confined(migrated_postgres_url: str) -> Iterator[str]:
    """The URL of a database for a role that is confined to a tenant, beside runs and keys of another."""
    role = f"tenant_{uuid4().hex}"
    with closing(open_app(migrated_postgres_url)) as app:
        app.set_quota("42", Quota(max_concurrent=3), tenant=OTHER)
        for number in range(3):
            app.submit("train", {"number": number}, user="42", tenant=OTHER, idempotency_key=f"key-{number}")
    with psycopg.connect(migrated_postgres_url, autocommit=True) as operator:
        confine(operator, role)
        try:
            yield make_url(migrated_postgres_url).set(username=role).render_as_string(hide_password=False)
            others = "SELECT status, count(*) FROM semel_run_states WHERE tenant <> %s GROUP BY status"
            assert operator.execute(others, [OURS]).fetchall() == [("PENDING", 3)]
        finally:
            operator.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(role)))


@pytest.fixture
def app(confined: str) -> Iterator[App]:
    with closing(open_app(confined)) as app:
        yield app


def test_a_role_sees_no_row_of_another_tenant(confined: str) -> None:
    """Else the tests below would prove nothing."""
    with psycopg.connect(confined) as connection:
        for relation in ("semel_runs", "semel_active", "semel_quotas", "semel_keys", "semel_run_states", "model_runs"):
            found = connection.execute(sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(relation))).fetchone()
            assert found == (0,), relation


def test_runs_are_submitted_found_cancelled_and_retried(app: App) -> None:
    run = app.submit("train", {"number": 0}, user="42", tenant=OURS, idempotency_key="key-0")
    again = app.submit("train", {"number": 0}, user="42", tenant=OURS, idempotency_key="key-0")
    assert (again.id, again.replayed) == (run.id, True)
    unkeyed = app.submit("train", {"number": 1}, user="42", tenant=OURS)
    assert app.submit("train", {"number": 1}, user="42", tenant=OURS).id == unkeyed.id
    many = app.submit_many([{"model": "train", "parameters": {"number": n}, "tenant": OURS} for n in range(100, 200)])
    assert len({each.id for each in many}) == 100
    assert len(app.runs(tenant=OURS, limit=200).runs) == 102
    assert app.cancel(run.id, tenant=OURS).status == "CANCELLED"
    retried = app.retry(run.id, tenant=OURS)
    assert app.get(retried.id, tenant=OURS).retry_of == run.id
    assert [step.step for step in app.timeline(run.id, tenant=OURS)] == ["created", "cancelled"]
    assert app.waiting(unkeyed.id, tenant=OURS) is not None


def test_quotas_and_reservations_hold(app: App, confined: str) -> None:
    app.set_quota("42", Quota(max_concurrent=2), tenant=OURS)
    assert list(app.quotas(tenant=OURS)) == ["42"]
    app.submit("train", {"number": 0}, user="42", tenant=OURS)
    with closing(JobStore(confined, tenant=OURS)) as jobs:
        reservation = jobs.reserve_job_slot("42", 2)
        assert reservation is not None
        assert jobs.reserve_job_slot("42", 2) is None
        app.submit("train", {"number": 1}, user="42", tenant=OURS, reservation=reservation)
    with pytest.raises(QuotaExceeded):
        app.submit("train", {"number": 2}, user="42", tenant=OURS)
    assert app.usage("42", tenant=OURS).concurrent == 2


def test_a_worker_executes_the_runs_of_the_tenant(app: App) -> None:
    runs = app.submit_many([{"model": "train", "parameters": {"number": n}, "tenant": OURS} for n in range(20)])
    with app.working(processes=0):
        assert {app.wait(run.id, timeout=60).status for run in runs} == {"SUCCEEDED"}
    assert [(each.model, each.counts) for each in app.summary(tenant=OURS)] == [("train", {"SUCCEEDED": 20})]
    assert app.purge(0) == 20
