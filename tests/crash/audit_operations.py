"""What people do besides runs: the change and its row of the audit log are both there, or neither."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from crash.key_operations import connected
from crash.ledger import Ledger
from crash.points import Ended, Place
from crash.run_operations import Connected, opened
from semel import Actor, Once, Quota
from semel._concurrency.sync import run_sync
from semel.db import schema
from semel.runs.store import RunStore, key_actions, quotas
from semel.runs.types import new_id
from semel.service.auth import tokens
from semel.service.auth.tokens import NewToken
from semel.service.jobs import configs
from semel.service.webhooks import deliveries, subscriptions

ZOE = Actor(user="zoe", address="192.0.2.7", entrance="api")
URL = "http://127.0.0.1:9/"


@dataclass(frozen=True)
class ByHand(Connected):
    """A change of somebody. ``state`` has what it changes, by the name or id that the log has."""

    prepared: Callable[[RunStore, Place], Any]
    change: Callable[[RunStore, Place, Any], Any]
    state: Callable[[Place], dict[str, Any]]
    created: str
    removed: str

    def prepare(self, place: Place) -> Any:
        with opened(place) as database:
            return self.prepared(database.store, place)

    def act(self, place: Place, given: Any) -> Any:
        with opened(place) as database:
            return self.change(database.store, place, given)

    def check(self, place: Place, given: Any, ended: Ended) -> None:
        ledger = Ledger(place, place.name).check()
        there = self.state(place)
        log = [row for row in ledger.log if row["target"] in {*there, place.name, given}]
        by_log: dict[str, Any] = {}
        for row in log:
            if row["action"] == self.created:
                by_log[row["target"]] = row
            elif row["action"] == self.removed:
                assert by_log.pop(row["target"], None) is not None, "the log has a second removal"
        assert set(by_log) == set(there), "the log says other than the table"
        assert len([row for row in log if row["action"] == self.created]) <= 1, "it was done twice"
        if ended.how == "returned":
            assert ended.value in {None, True, *there}, "the answer is that of another try"
            assert log[-1]["user"] == "zoe"
            assert json.loads(log[-1]["after"] or log[-1]["before"])


def _nothing(_: RunStore, __: Place) -> None: ...


def _issued(place: Place) -> dict[str, Any]:
    with connected(place) as conn:
        return {row.id: row for row in conn.execute(select(schema.tokens).where(schema.tokens.c.user_id == place.name))}


def _issue(store: RunStore, place: Place, _: Any = None) -> str:
    request = NewToken(user=place.name)
    return run_sync(store.write(tokens.issue, request, store.acting(ZOE))).token.id


def _revoke(store: RunStore, _: Place, token_id: str) -> bool:
    return run_sync(store.write(tokens.revoke, token_id, None, store.acting(ZOE)))


def _limited(place: Place) -> dict[str, Any]:
    with connected(place) as conn:
        return {row.user_id: row for row in conn.execute(select(schema.quotas)) if row.user_id == place.name}


def _limit(store: RunStore, place: Place, _: Any = None) -> None:
    run_sync(store.write(quotas.set_quota, ("", place.name), Quota(per_day=1), store.acting(ZOE)))


def _unlimit(store: RunStore, place: Place, _: Any = None) -> None:
    run_sync(store.write(quotas.set_quota, ("", place.name), None, store.acting(ZOE)))


def _configured(place: Place) -> dict[str, Any]:
    with connected(place) as conn:
        return {row.name: row for row in conn.execute(select(schema.configs)) if row.name == place.name}


def _configure(store: RunStore, place: Place, _: Any = None) -> None:
    row = {"tenant": "", "name": place.name, "body": '{"model": "work"}', "user": "zoe"}
    run_sync(store.write(configs._write, store.acting(ZOE), **row))


def _unconfigure(store: RunStore, place: Place, _: Any = None) -> bool:
    return run_sync(store.write(configs._remove, "", place.name, store.acting(ZOE)))


def _subscribed(place: Place) -> dict[str, Any]:
    with connected(place) as conn:
        rows = conn.execute(select(schema.subscriptions).where(schema.subscriptions.c.target == f"{URL}{place.name}"))
        return {row.id: row for row in rows}


def _subscribe(store: RunStore, place: Place, _: Any = None) -> str:
    url = f"{URL}{place.name}"
    return run_sync(store.write(subscriptions.create, "", url, ["RunCompleted"], store.acting(ZOE))).id


def _unsubscribe(store: RunStore, _: Place, subscription_id: str) -> None:
    run_sync(store.write(subscriptions.remove, subscription_id, "", store.acting(ZOE)))


@dataclass(frozen=True)
class OfKey(Connected):
    """A key that is resolved or deleted: it is as it was, or changed and logged once."""

    action: str
    done: bool | None = None

    def prepare(self, place: Place) -> str:
        once = Once(place.url, clock=place.clock, collect=False)
        once.claim(place.name, scope="orders", lease=1, ttl=86400, on_crash="unknown")
        once.close()
        return place.name

    def act(self, place: Place, given: str) -> Any:
        with opened(place, 10) as database:
            store = database.store
            context, keys = store.acting(ZOE), store.key_store()
            if self.done is None:
                work = store.write(key_actions.delete, keys, "", "orders", given, force=True, context=context)
                return run_sync(work)
            how = {"done": self.done, "value": 7, "force": False}
            return run_sync(store.write(key_actions.resolve, keys, "", "orders", given, **how, context=context))

    def check(self, place: Place, given: str, ended: Ended) -> None:
        ledger = Ledger(place, place.name).check()
        once = Once(place.url, clock=place.later(10), collect=False)
        record = once.get(given, scope="orders")
        once.close()
        status = None if record is None else record.status
        changed = "completed" if self.done else None
        assert status in ("unknown", changed)
        assert len(ledger.logged(self.action, given)) == (status == changed), "the log says other than the key"
        if ended.how == "returned":
            assert status == changed
            assert ended.value is (True if self.done is None else None)


class Resend(Connected):
    """A delivery that somebody sends again: it is dead, or waits and the log says who did it."""

    def prepare(self, place: Place) -> tuple[str, str, int]:
        with opened(place) as database:
            subscription, run = _subscribe(database.store, place), new_id()
        row = {"subscription_id": subscription, "run_id": run, "version": 1, "state": "dead", "attempts": 9}
        with connected(place) as conn:
            conn.execute(schema.deliveries.insert().values(**row, due_us=place.now_us - 1, body="{}"))
            conn.commit()
        return subscription, run, 1

    def act(self, place: Place, given: tuple[str, str, int]) -> Any:
        with opened(place) as database:
            store = database.store
            return run_sync(store.write(deliveries.resend, "", given, store.acting(ZOE))).state

    def check(self, place: Place, given: tuple[str, str, int], ended: Ended) -> None:
        ledger = Ledger(place, place.name).check()
        with connected(place) as conn:
            this = schema.deliveries.c.subscription_id == given[0]
            state = conn.execute(select(schema.deliveries.c.state).where(this)).scalar_one()
        logged = ledger.logged("delivery.resent", f"{given[1]}/1")
        assert len(logged) == (state == "waiting"), "the log says other than the table"
        if ended.how == "returned":
            assert state == ended.value == "waiting"


OPERATIONS = {
    "create a token": ByHand(_nothing, _issue, _issued, "token.created", "token.revoked"),
    "revoke a token": ByHand(_issue, _revoke, _issued, "token.created", "token.revoked"),
    "set a quota": ByHand(_nothing, _limit, _limited, "quota.set", "quota.removed"),
    "remove a quota": ByHand(_limit, _unlimit, _limited, "quota.set", "quota.removed"),
    "write a config": ByHand(_nothing, _configure, _configured, "config.set", "config.removed"),
    "remove a config": ByHand(_configure, _unconfigure, _configured, "config.set", "config.removed"),
    "subscribe": ByHand(_nothing, _subscribe, _subscribed, "subscription.created", "subscription.deleted"),
    "unsubscribe": ByHand(_subscribe, _unsubscribe, _subscribed, "subscription.created", "subscription.deleted"),
    "send a delivery again": Resend(),
    "delete a key": OfKey("key.deleted"),
    "resolve a key as done": OfKey("key.resolved", done=True),
    "resolve a key as not done": OfKey("key.resolved", done=False),
}
