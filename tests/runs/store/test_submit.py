"""A key is recognised by a read before the transaction, if the last batch had repeats, and in it: both judge alike."""

import pytest

from semel import App, KeyReused
from support.databases import TestDatabase


def warmed(database: TestDatabase) -> App:
    """An app that reads the keys first, because its last submission was a repeat."""
    app = database.app
    _, again = (app.submit("train", {"number": 0}, idempotency_key="warm", user=42) for _ in range(2))
    assert again.replayed
    return app


def test_a_key_with_another_payload_is_refused_on_the_fast_path(database: TestDatabase) -> None:
    app = warmed(database)
    with pytest.raises(KeyReused, match="warm"):
        app.submit("train", {"number": 1}, idempotency_key="warm", user=42)
    assert database.count("semel_runs") == 1


def test_a_key_with_another_payload_is_refused_on_the_slow_path(database: TestDatabase) -> None:
    warmed(database)
    with pytest.raises(KeyReused, match="warm"):
        database.open_app().submit("train", {"number": 1}, idempotency_key="warm", user=42)
    assert database.count("semel_runs") == 1


@pytest.mark.parametrize("how", [{"idempotency_key": "k"}, {"idempotency_key": "k", "dedupe": True}, {}], ids=str)
@pytest.mark.parametrize("other", [{"tenant": "acme"}, {"user": 43}], ids=str)
@pytest.mark.parametrize("path", ["fast", "slow"])
def test_a_key_and_a_payload_find_no_run_of_another_tenant_or_user(
    database: TestDatabase, how: dict[str, object], other: dict[str, object], path: str
) -> None:
    app = warmed(database) if path == "fast" else database.app
    theirs = {"user": 42, **other}
    mine = app.submit("train", {"number": 1}, **{"user": 42, **how})  # type: ignore[arg-type]
    if path == "fast":
        warmed(database)
    foreign = app.submit("train", {"number": 1}, **theirs, **how)  # type: ignore[arg-type]
    assert (foreign.replayed, foreign.id != mine.id) == (False, True)
    again = app.submit("train", {"number": 1}, **theirs, **how)  # type: ignore[arg-type]
    assert (again.id, again.replayed, again.tenant) == (foreign.id, True, other.get("tenant", ""))
