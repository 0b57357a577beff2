"""Reservations, keys, runs and quotas against a model of them in a few dictionaries, over many lives."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from semel import KeyReused, Quota, QuotaExceeded
from semel._concurrency.sync import run_sync
from semel.errors import ReservationLost
from semel.runs.store import lease
from semel.runs.store.quotas import EXPIRED_KEPT_US
from support.databases import Databases, TestDatabase

USERS = ("ann", "bob")
MICRO = 1_000_000
users = st.sampled_from(USERS)


class Slot:
    """A reservation as the model knows it. ``there``: its row has not been removed."""

    def __init__(self, user: str, until: int, limit: int) -> None:
        self.user = user
        self.until = until
        self.limit = limit
        self.consumed = False
        self.there = True


class Lives(RuleBasedStateMachine):
    """Every step is done twice, on the database and on the model, and both must say the same."""

    slots = Bundle("slots")
    active = Bundle("active")

    def __init__(self, opened: Callable[[], Any]) -> None:
        super().__init__()
        self._stack = ExitStack()
        self.ground: TestDatabase = self._stack.enter_context(opened())
        self.known: dict[str, Slot] = {}
        self.alive: dict[str, str] = {}
        self.created: list[tuple[str, int]] = []
        self.keys: dict[tuple[str, Any], tuple[str, int, int]] = {}
        self.limits: dict[str, int] = {}

    def teardown(self) -> None:
        self._stack.close()

    @property
    def now(self) -> int:
        return self.ground.clock.us

    def reserved(self, user: str) -> int:
        return sum(
            slot.there and not slot.consumed and slot.until >= self.now
            for slot in self.known.values()
            if slot.user == user
        )

    def concurrent(self, user: str) -> int:
        return self.reserved(user) + list(self.alive.values()).count(user)

    def clean(self, *whose: str) -> int:
        gone = self.now - EXPIRED_KEPT_US
        expired = [s for s in self.known.values() if s.there and s.user in whose and s.until < gone]
        for slot in expired:
            slot.there = False
        return len(expired)

    @rule(target=slots, user=users, limit=st.sampled_from([4, 3, 1, 0]), ttl=st.sampled_from([300, 10, 0]))
    def reserve(self, user: str, limit: int, ttl: int) -> Any:
        self.clean(user)
        granted = copy_context().run(self.ground.jobs.reserve_job_slot, user, limit, ttl)  # in a flow of its own
        assert (granted is not None) == (self.concurrent(user) < limit)
        if granted is None:
            return multiple()
        self.known[granted] = Slot(user, self.now + ttl * MICRO, limit)
        return granted

    @rule(slot=slots, who=st.sampled_from([None, "bob"]), late=st.booleans())
    def consume(self, slot: str, who: str | None, late: bool) -> None:
        model = self.known[slot]
        if late:
            self.ground.clock.us = max(self.now, model.until + 1)
        free = model.until >= self.now or self.concurrent(model.user) < model.limit
        fine = model.there and who in (None, model.user) and (model.consumed or free)
        assert self.ground.jobs.consume_reservation(slot, user_id=who) is fine
        model.consumed |= fine

    @rule(slot=slots, who=st.sampled_from([None, "bob"]))
    def release(self, slot: str, who: str | None) -> None:
        model = self.known[slot]
        freed = model.there and not model.consumed and who in (None, model.user)
        assert self.ground.jobs.release_reservation(slot, user_id=who) == freed
        if freed:
            model.there = False

    @rule(target=active, user=users, number=st.integers(0, 2), key=st.sampled_from([None, "a", "b"]))
    def submit(self, user: str, number: int, key: str | None) -> Any:
        return self._submit(user, number, key, None)

    @rule(target=active, user=users, number=st.integers(0, 2), key=st.sampled_from([None, "a", "b"]), slot=slots)
    def submit_with_reservation(self, user: str, number: int, key: str | None, slot: str) -> Any:
        return self._submit(user, number, key, slot)

    def _submit(self, user: str, number: int, key: str | None, slot: str | None) -> Any:
        name = (user, key or number)
        model = None if slot is None else self.known[slot]
        own = model is not None and model.there and not model.consumed and model.user == user
        found = self._found(name, by_key=key is not None)
        options: dict[str, Any] = {"number": number, "idempotency_key": key, "reservation": slot}
        if found is not None:
            with nothing() if found[1] == number else pytest.raises(KeyReused):
                run = self.ground.submit(user, **options)
                assert (run.id, run.replayed) == (found[0], True)
            if own and model is not None:
                model.there = False
            return multiple()
        error = self._refusal(user, model, usable=own and model is not None and model.until >= self.now)
        if error is not None:
            with pytest.raises(error):
                self.ground.submit(user, **options)
            return multiple()
        run = self.ground.submit(user, **options)
        assert not run.replayed
        if model is not None:
            model.consumed = True
        self.alive[run.id] = user
        self.created.append((user, self.now))
        self.keys[name] = (run.id, number, self.now + (86400 if key else 600) * MICRO)
        return run.id

    def _found(self, name: tuple[str, Any], *, by_key: bool) -> tuple[str, int, int] | None:
        found = self.keys.get(name)
        if found is None or found[2] < self.now or not (by_key or found[0] in self.alive):
            return None
        return found

    def _refusal(self, user: str, slot: Slot | None, *, usable: bool) -> type[Exception] | None:
        limit = self.limits.get(user, self.limits.get("*"))
        if limit is not None and self.concurrent(user) + (slot is None) > limit:
            return QuotaExceeded
        return ReservationLost if slot is not None and not usable else None

    @rule(run=consumes(active), kind=st.sampled_from(["succeeded", "fatal", "cancelled"]), twice=st.booleans())
    def end(self, run: str, kind: Any, twice: bool) -> None:
        if run not in self.alive:
            return
        (leased,) = run_sync(
            self.ground.app._engine.store.write(
                lease.lease_these, "worker-1", [run], self.ground.app._engine.store.statement_context
            )
        )
        assert self.ground.end(leased, kind)
        if twice:
            assert self.ground.end(leased, kind) == (kind == "succeeded")
        del self.alive[run]

    @rule(run=active)
    def lose(self, run: str) -> None:
        """Its worker vanishes, and the run waits for another one: it stays in use."""
        if run in self.alive and self.ground.app.get(run).losts < 2:
            run_sync(
                self.ground.app._engine.store.write(
                    lease.lease_these, "worker-1", [run], self.ground.app._engine.store.statement_context
                )
            )
            self.ground.clock.advance(61)
            assert self.ground.lose_expired() == 1

    @rule(run=consumes(active))
    def cancel(self, run: str) -> None:
        if run in self.alive:
            assert self.ground.app.cancel(run).status == "CANCELLED"
            del self.alive[run]

    @rule(user=st.sampled_from(["*", *USERS]), limit=st.sampled_from([3, None, 0, 1, 2]))
    def set_quota(self, user: str, limit: int | None) -> None:
        self.ground.app.set_quota(user, None if limit is None else Quota(max_concurrent=limit))
        self.limits.pop(user, None)
        if limit is not None:
            self.limits[user] = limit

    @rule(seconds=st.sampled_from([300.000001, 0.000001, 10, 300, 600, 3600, 86400]), tidy=st.booleans())
    def let_time_pass(self, seconds: float, tidy: bool) -> None:
        self.ground.clock.advance(seconds)
        if tidy:
            expired_keys = [name for name, (_, _, until) in self.keys.items() if until < self.now]
            of_clients = [name for name in expired_keys if isinstance(name[1], str)]
            assert self.ground.tidy() == self.clean(*USERS) + len(of_clients)
            for name in expired_keys:
                del self.keys[name]

    @invariant()
    def the_database_counts_as_the_model(self) -> None:
        for user in USERS:
            used = self.ground.app.usage(user)
            last_hour = sum(who == user and at > self.now - 3600 * MICRO for who, at in self.created)
            told = (self.concurrent(user), self.reserved(user), last_hour)
            assert (used.concurrent, used.reserved, used.last_hour) == told


@contextmanager
def nothing() -> Iterator[None]:
    """Where no error is due."""
    yield


def test_the_database_does_what_the_model_says(request: pytest.FixtureRequest) -> None:
    with ExitStack() as stack:
        databases = Databases(request, stack)
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            lambda: Lives(lambda: databases.empty("sqlite")),
            settings=settings(
                max_examples=25,
                stateful_step_count=40,
                derandomize=True,
                phases=[Phase.generate],  # to shrink takes minutes, and the steps of a failure are told anyway
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
