"""What waits for nobody in PostgreSQL, and how its listener knows that the server is there."""

import threading
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, make_url

from semel import Granted, InFlight, Once
from semel.db import migrate
from semel.db.psycopg_connection import BoundedConnection
from semel.once.stores import postgres


@pytest.mark.parametrize(("lease", "retry_after"), [(0.25, 0.25), (60, 1)])
def test_a_key_that_an_open_transaction_claims_is_in_flight_for_a_moment(
    postgres_url: str, lease: float, retry_after: float
) -> None:
    """When the transaction ends is not known: the caller looks again after a second, or after a shorter lease."""
    engine = create_engine(make_url(postgres_url).set(drivername="postgresql+psycopg"))
    with engine.begin() as connection:
        migrate.upgrade(connection)
    with Once(postgres_url, collect=False) as once, engine.begin() as connection:
        assert isinstance(once.on(connection).claim("key"), Granted)
        assert once.claim("key", lease=lease) == InFlight(retry_after)
    engine.dispose()


def test_a_listener_checks_its_connection_and_reports_how_long_it_was_silent(
    postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with BoundedConnection.connect(postgres_url, autocommit=True) as connection:
        postgres._check_connection(connection, 7.0)
        assert caplog.text == ""
    with pytest.raises(psycopg.OperationalError):
        postgres._check_connection(connection, 7.0)
    assert "PostgreSQL has sent nothing for 10 s on the listening connection" in caplog.text


def test_a_listener_connects_with_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(Exception):
        pass

    def connect(address: str, **_: Any) -> None:
        raise Reached(address)

    monkeypatch.setattr(BoundedConnection, "connect", connect)
    subscribe = postgres.subscriber(make_url("postgresql+asyncpg://user:secret@host/name"))
    with pytest.raises(Reached, match=r"^postgresql://user:secret@host/name$"):
        next(iter(subscribe("semel", threading.Event())))


def test_an_engine_of_the_users_is_used_and_left_open(postgres_url: str) -> None:
    engine = create_engine(make_url(postgres_url).set(drivername="postgresql+psycopg"))
    with engine.begin() as connection:
        migrate.upgrade(connection)
    pool = engine.pool
    with Once(engine, collect=False) as once:
        assert once.call("key", lambda: 7).value == 7
    assert engine.pool is pool
    engine.dispose()
