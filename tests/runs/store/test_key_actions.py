"""What operators do to keys while others use them."""

from typing import Any

from sqlalchemy import Connection

from semel import Actor, Granted, Once
from semel.db.dialect import transaction
from semel.runs.store import key_actions
from support.databases import Databases, behind


def test_the_log_has_the_key_as_it_was_when_it_was_deleted(databases: Databases) -> None:
    """It is completed by somebody who was faster: that is what the operator has deleted."""
    with databases.empty("postgres") as database:
        store = database.store
        once = Once(database.url, clock=database.clock, collect=False)
        claimed = once.claim("order-1", scope="orders")
        assert isinstance(claimed, Granted)

        def delete(conn: Connection) -> bool:
            with transaction(conn):
                how: dict[str, Any] = {"force": True, "context": store.acting(Actor(user="zoe"))}
                return key_actions.delete(conn, store.key_store(), "", "orders", "order-1", **how)

        assert behind(database, lambda conn: once.on(conn).complete(claimed.claim, 7), delete)
        once.close()
        (entry,) = database.app.audit_log(action="key.deleted").entries
        assert entry.before is not None
        assert entry.before["state"] == "completed"
