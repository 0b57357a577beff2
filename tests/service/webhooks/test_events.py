"""Events to those who subscribed to them: signed webhooks and a stream, over real HTTP and Redis, on both databases."""

import logging
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis as redis_client
from sqlalchemy import Connection, Engine, create_engine, make_url, text

from semel import App
from semel._concurrency.sync import run_sync
from semel.runs.store.transitions import telling
from semel.service import Settings
from semel.service.webhooks import dispatcher, sender
from semel.service.webhooks.deliveries import Delivery, lease, renew, tidy
from semel.service.webhooks.dispatcher import AT_ONCE, DELAYS, LEASE
from semel.testing import FakeClock
from support.databases import TestDatabase
from support.programs import Program
from support.service import TestServer, issue_token, serve
from support.waiting import eventually
from support.webhooks import PATIENCE, Receiver, receiving

LEASE_US = round(LEASE * 1_000_000)
OPEN = Settings(private_webhooks=True)


@pytest.fixture(autouse=True)
def _briskly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "POLL", 0.02)
    monkeypatch.setattr(dispatcher, "IDLE_POLL", 0.02)


class House:
    """A database, its app, and the service around it."""

    def __init__(self, url: str, folder: Path, closing: ExitStack) -> None:
        self.url = url
        self.folder = folder
        self.clock = FakeClock(time.time())
        self._closing = closing
        self.app = self.another_app(clock=self.clock)
        parts = make_url(url)
        driver = "postgresql+psycopg" if parts.get_backend_name() == "postgresql" else "sqlite"
        self.engine: Engine = create_engine(parts.set(drivername=driver))
        closing.callback(self.engine.dispose)

    def another_app(self, **options: Any) -> App:
        app = App(self.url, artifacts=self.folder / "artifacts", dedupe_window=0, **options)
        self._closing.callback(app.close)

        @app.model("add")
        async def add(a: int, b: int = 0) -> int:
            return a + b

        return app

    def serve(self, settings: Settings = OPEN, app: App | None = None) -> TestServer:
        return self._closing.enter_context(serve(app or self.app, settings))

    def client(self, service: TestServer, token: str | None = None) -> httpx.Client:
        return self._closing.enter_context(service.client(token))

    def receiver(self, *behaviours: Any) -> Receiver:
        return self._closing.enter_context(receiving(*behaviours))

    def sql(self, query: str) -> list[tuple[Any, ...]]:
        with self.engine.connect() as conn:
            return [tuple(row) for row in conn.execute(text(query))]

    def write(self, statement: str) -> None:
        with self.engine.begin() as conn:
            conn.execute(text(statement))

    def unsent(self) -> int:
        return int(self.sql("SELECT count(*) FROM semel_outbox WHERE unsent")[0][0])

    def states(self) -> Counter[str]:
        return Counter(row[0] for row in self.sql("SELECT state FROM semel_deliveries"))


@pytest.fixture
def house(database: TestDatabase, tmp_path: Path) -> Iterator[House]:
    with ExitStack() as closing:
        house = House(database.url, tmp_path, closing)
        for table in ("subscriptions", "deliveries", "tokens"):
            house.write(f"DELETE FROM semel_{table}")
        yield house


@pytest.fixture
def client(house: House) -> httpx.Client:
    return house.client(house.serve())


def subscribe(client: httpx.Client, url: str, *events: str, **more: Any) -> dict[str, Any]:
    wanted = {"events": list(events)} if events else {}
    answer = client.post("/admin/subscriptions", json={"url": url, **wanted, **more})
    assert answer.status_code == 201, answer.text
    assert answer.headers["cache-control"] == "no-store"
    made: dict[str, Any] = answer.json()
    return made


def deliveries(client: httpx.Client, **wanted: Any) -> list[dict[str, Any]]:
    answer = client.get("/admin/deliveries", params=wanted)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["deliveries"]
    return found


def arrived(client: httpx.Client, count: int) -> Callable[[], bool]:
    return lambda: len(deliveries(client, state="delivered")) >= count


# -- what is told ----------------------------------------------------------------------------------------------------


def test_every_step_of_a_run_is_told_once_in_order_and_signed(house: House, client: httpx.Client) -> None:
    """Also by a worker that began before anybody had subscribed."""
    receiver = house.receiver()
    with house.app.working(processes=0):
        made = subscribe(client, receiver.url)
        run = house.app.submit("add", {"a": 1}, user=42)
        received = receiver.wait_for(3)
        eventually(arrived(client, 3), "they are marked")
    assert receiver.names == ["RunCreated", "RunStarted", "RunCompleted"]
    assert receiver.ids == [f"{run.id}/{version}" for version in (1, 2, 3)]
    assert all(each.is_signed_with(made["secret"]) for each in received)
    event = received[2].event
    assert event.pop("at").endswith("Z")
    assert event == {
        "id": f"{run.id}/3",
        "name": "RunCompleted",
        "run_id": run.id,
        "version": 3,
        "model": "add",
        "tenant": "",
        "user": "42",
        "status": "SUCCEEDED",
        "step": "succeeded",
        "fence": 1,
        "note": None,
    }


def test_only_what_is_wanted_is_told_and_kept_for_telling(house: House, client: httpx.Client) -> None:
    receiver = house.receiver()
    subscribe(client, receiver.url, "RunCompleted")
    run = house.app.submit("add", {"a": 1})
    house.app.cancel(run.id)
    receiver.wait_for(1)
    eventually(arrived(client, 1), "it is marked")
    assert (receiver.names, receiver.ids) == (["RunCompleted"], [f"{run.id}/2"])
    assert receiver.received[0].event["status"] == "CANCELLED"
    assert house.states() == {"delivered": 1}


def test_what_nobody_wants_is_not_kept_for_telling(house: House) -> None:
    """The statement that writes the step decides it, by what there is at that moment."""

    def kept() -> list[Any]:
        return [row[0] for row in house.sql("SELECT step FROM semel_outbox WHERE unsent ORDER BY at_us, version")]

    first = house.app.submit("add", {"a": 1})
    house.app.cancel(first.id)
    assert kept() == []
    insert = """INSERT INTO semel_subscriptions (id, tenant, kind, target, events, created_us, disabled_us)
                VALUES ('{}', 'another', 'webhook', '-', '{}', 0, {})"""
    house.write(insert.format("asleep", "*", 1))
    house.clock.advance(1)
    house.app.submit("add", {"a": 2})
    assert kept() == []
    house.write(insert.format("ends", "RunCompleted", "NULL"))
    house.clock.advance(1)
    house.app.cancel(house.app.submit("add", {"a": 3}).id)
    assert kept() == ["cancelled"]
    house.write(insert.format("some", "RunCreated RunStarted", "NULL"))
    house.clock.advance(1)
    house.app.submit("add", {"a": 4})
    assert kept() == ["cancelled", "created"]
    house.write("DELETE FROM semel_subscriptions")
    house.clock.advance(1)
    house.app.submit("add", {"a": 5})
    assert kept() == ["cancelled", "created"]


def test_whether_anybody_wants_it_is_asked_once_a_statement_and_not_once_a_run(house: House) -> None:
    """By the plan of the statement that notes steps: the question does not depend on the row."""
    postgres = house.url.startswith("postgres")
    told = telling("semel_run_steps", "false")
    plan = "\n".join(str(row[-1]) for row in house.sql(("EXPLAIN " if postgres else "EXPLAIN QUERY PLAN ") + told))
    assert ("InitPlan" if postgres else "SCALAR SUBQUERY") in plan
    assert ("SubPlan" if postgres else "CORRELATED") not in plan


def test_events_of_another_tenant_are_not_told(house: House, client: httpx.Client) -> None:
    receiver, other = house.receiver(), house.receiver()
    subscribe(client, receiver.url, tenant="acme")
    subscribe(client, other.url)
    theirs = house.app.submit("add", {"a": 1}, tenant="acme")
    ours = house.app.submit("add", {"a": 2})
    receiver.wait_for(1)
    other.wait_for(1)
    eventually(lambda: house.states() == {"delivered": 2}, "both are marked")
    assert (receiver.ids, other.ids) == ([f"{theirs.id}/1"], [f"{ours.id}/1"])


def test_what_happened_while_no_server_was_up_is_told_by_the_next(house: House) -> None:
    receiver = house.receiver()
    with serve(house.app, OPEN) as service, service.client() as client:
        subscribe(client, receiver.url)
    run = house.app.submit("add", {"a": 1})
    assert house.unsent() == 1
    client = house.client(house.serve())
    receiver.wait_for(1)
    eventually(arrived(client, 1), "it is marked")
    assert (receiver.ids, house.unsent()) == ([f"{run.id}/1"], 0)


def test_the_hook_of_the_app_is_told_as_before(house: House) -> None:
    """A hook that fails holds up itself, not the webhooks."""
    told: list[str] = []

    def publish(event: Any) -> None:
        told.append(event.name)
        if len(told) == 1:
            raise ConnectionError("the other side is away")

    app = house.another_app(publish=publish, clock=house.clock)
    client = house.client(house.serve(app=app))
    receiver = house.receiver()
    subscribe(client, receiver.url)
    with app.working(processes=0, sweep_every=0.05):
        app.submit("add", {"a": 1})
        receiver.wait_for(3)
        eventually(lambda: "RunCompleted" in told, "the hook was told of everything")
    assert receiver.names == ["RunCreated", "RunStarted", "RunCompleted"]
    assert told == ["RunCreated", "RunCreated", "RunStarted", "RunCompleted"]


def test_the_receiver_of_the_docs_takes_what_is_genuine_and_refuses_what_is_not(
    house: House, client: httpx.Client
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "events.md").read_text()
    namespace: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0], namespace)
    is_genuine = namespace["is_genuine"]
    receiver = house.receiver()
    secret = subscribe(client, receiver.url)["secret"]
    house.app.submit("add", {"a": 1})
    (received,) = receiver.wait_for(1)
    assert is_genuine(secret, received.headers, received.body)
    assert not is_genuine(secret, received.headers, received.body + b" ")
    assert not is_genuine("whsec_" + "A" * 40, received.headers, received.body)
    assert not is_genuine(secret, {**received.headers, "webhook-id": "another"}, received.body)
    old = str(int(received.headers["webhook-timestamp"]) - 3600)
    assert not is_genuine(secret, {**received.headers, "webhook-timestamp": old}, received.body)
    assert not is_genuine(secret, {}, received.body)


# -- receivers that fail ---------------------------------------------------------------------------------------------


def test_a_receiver_that_fails_is_tried_again_with_growing_pauses_and_then_given_up(
    house: House, client: httpx.Client
) -> None:
    receiver = house.receiver(500)
    made = subscribe(client, receiver.url)
    run = house.app.submit("add", {"a": 1})
    for tries, delay in enumerate(DELAYS, 1):
        eventually(lambda tries=tries: _noted(house, tries), f"try {tries}")
        (waiting,) = deliveries(client, state="waiting")
        assert (waiting["last_status"], waiting["last_error"]) == (500, "answered 500")
        house.clock.advance(0.8 * delay)
        time.sleep(0.06)  # some turns, in which nothing may happen
        assert len(receiver.received) == tries
        house.clock.advance(0.6 * delay)
    eventually(lambda: deliveries(client, state="dead"), "it is given up")
    assert receiver.ids == [f"{run.id}/1"] * (len(DELAYS) + 1)
    assert len({each.body for each in receiver.received}) == 1
    assert all(each.is_signed_with(made["secret"]) for each in receiver.received)

    receiver.behaviours = [204]
    sent = client.post(f"/admin/deliveries/{made['subscription']['id']}/{run.id}/1/resend")
    assert (sent.status_code, sent.json()["state"]) == (202, "waiting")
    eventually(arrived(client, 1), "it arrives after all")
    assert receiver.ids == [f"{run.id}/1"] * (len(DELAYS) + 2)


def test_a_clock_that_is_put_back_lengthens_no_pause(house: House, client: httpx.Client) -> None:
    receiver = house.receiver(500, 204)
    subscribe(client, receiver.url)
    house.app.submit("add", {"a": 1})
    eventually(lambda: _noted(house, 1), "the first try")
    house.clock.advance(-7200)
    eventually(
        lambda: house.sql("SELECT due_us FROM semel_deliveries")[0][0] <= house.clock.us + 7_000_000, "a new pause"
    )
    house.clock.advance(1.3 * DELAYS[0])
    eventually(arrived(client, 1), "it arrives")
    house.app.submit("add", {"a": 2})
    house.clock.advance(-7200)
    eventually(arrived(client, 2), "what is due at once comes at once")


def test_what_is_old_is_forgotten_in_batches(house: House, client: httpx.Client) -> None:
    """The database ends a statement after 30 seconds, and what it cannot remove at once it must not keep for ever."""
    subscription = subscribe(client, house.receiver().url)["subscription"]["id"]
    made = [
        f"('{each}', '00000000-0000-7000-8000-{number:012x}', 1, '{state}', 1, {due}, '{{}}')"
        for each, state, due in (
            (subscription, "delivered", 0),
            ("gone", "waiting", 0),
            (subscription, "delivered", house.clock.us),
        )
        for number in range(25)
        if not (each == subscription and due and number)
    ]
    made[-1] = made[-1].replace("00000000-", "00000001-")
    columns = "subscription_id, run_id, version, state, attempts, due_us, body"
    ledger = house.app._engine.store

    def tidied(conn: Connection) -> list[bool]:
        """In one transaction, so that the server, which tidies, too, does not see the rows."""
        conn.execute(text(f"INSERT INTO semel_deliveries ({columns}) VALUES {', '.join(made)}"))
        return [tidy(conn, ledger.statement_context, 10) for _ in range(4)]

    assert run_sync(ledger.write(tidied)) == [True, True, False, False]
    assert house.states() == {"delivered": 1}


def _noted(house: House, tries: int) -> bool:
    """Whether that many tries were noted: while one is under way, its next time is the end of its lease."""
    ((attempts, due_us),) = house.sql("SELECT attempts, due_us FROM semel_deliveries") or [(0, 0)]
    return bool(attempts == tries and due_us != house.clock.us + LEASE * 1_000_000)


def test_a_receiver_that_hangs_up_first_gets_the_event_again(house: House, client: httpx.Client) -> None:
    receiver = house.receiver("close", 204)
    subscribe(client, receiver.url)
    house.app.submit("add", {"a": 1})
    eventually(lambda: any(each["last_error"] for each in deliveries(client)), "the first try was noted")
    house.clock.advance(10)
    eventually(arrived(client, 1), "it arrives")
    assert len(set(receiver.ids)) == 1
    assert len(receiver.received) == 2


def test_a_receiver_that_is_gone_is_told_nothing_more(house: House, client: httpx.Client) -> None:
    receiver = house.receiver(410)
    made = subscribe(client, receiver.url)["subscription"]
    run = house.app.submit("add", {"a": 1})
    eventually(lambda: deliveries(client, state="dead"), "it is given up")
    shown = client.get(f"/admin/subscriptions/{made['id']}").json()
    assert shown["disabled_at"] is not None
    house.app.submit("add", {"a": 2})
    assert (len(receiver.received), house.unsent()) == (1, 0)
    again = client.post(f"/admin/deliveries/{made['id']}/{run.id}/1/resend")
    assert (again.status_code, again.json()["error_code"]) == (409, "SUBSCRIPTION_DISABLED")


def test_what_waits_for_a_receiver_that_is_gone_is_dead_with_it(house: House, client: httpx.Client) -> None:
    receiver = house.receiver(500)
    subscribe(client, receiver.url)
    for number in range(3):
        house.app.submit("add", {"a": number})
    eventually(lambda: len([each for each in deliveries(client) if each["last_status"]]) == 3, "each was tried")
    receiver.behaviours = [410]
    house.app.submit("add", {"a": 3})
    eventually(lambda: house.states() == {"dead": 4}, "all are dead")
    assert Counter(each["last_error"] for each in deliveries(client)) == {
        "answered 410": 1,
        "the subscription was disabled": 3,
    }


def test_one_that_hangs_holds_up_no_other(house: House, client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although there is more for it than is sent at once, and it was first."""
    monkeypatch.setattr(sender, "TIMEOUT", 1000.0)
    hanging, good = house.receiver("hang"), house.receiver()
    subscribe(client, hanging.url)
    subscribe(client, good.url)
    count = 3 * AT_ONCE
    house.app.submit_many([{"model": "add", "parameters": {"a": number}} for number in range(count)])
    good.wait_for(count)
    assert len(good.ids) == len(set(good.ids)) == count
    assert len(hanging.wait_for(AT_ONCE)) == AT_ONCE


def test_an_event_without_an_answer_holds_up_no_other_of_its_subscription(
    house: House, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in ten is never answered; all others are told while these still hang."""
    monkeypatch.setattr(sender, "TIMEOUT", 1000.0)
    hung = AT_ONCE - 1
    receiver = house.receiver(*(["hang"] + [204] * 9) * hung, 204)
    subscribe(client, receiver.url)
    count = 10 * hung + 5
    house.app.submit_many([{"model": "add", "parameters": {"a": number}} for number in range(count)])
    receiver.wait_for(count)
    eventually(lambda: house.states() == {"delivered": count - hung, "waiting": hung}, "all but those are told")
    assert len(set(receiver.ids)) == len(receiver.ids) == count


def test_the_steps_of_a_run_wait_for_one_another_and_for_no_other_run(
    house: House, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of two servers sends them; a try that failed does not hold up those that follow."""
    monkeypatch.setattr(sender, "TIMEOUT", 1000.0)
    house.serve(app=house.another_app(clock=house.clock))
    answered = threading.Event()
    receiver = house.receiver()

    def hold(handler: BaseHTTPRequestHandler) -> None:
        answered.wait(PATIENCE)
        handler.send_response(500)
        handler.send_header("content-length", "0")
        handler.end_headers()

    receiver.behaviours = [hold, 204]
    subscribe(client, receiver.url)
    held = house.app.submit("add", {"a": 0})
    receiver.wait_for(1)
    house.app.cancel(held.id)
    others = [house.app.submit("add", {"a": number}) for number in range(1, 4)]
    receiver.wait_for(1 + len(others))
    time.sleep(0.1)  # some turns, in which nothing of the first run may be sent
    assert receiver.ids[0] == f"{held.id}/1"
    assert set(receiver.ids[1:]) == {f"{run.id}/1" for run in others}
    answered.set()
    receiver.wait_for(2 + len(others))
    assert receiver.ids[-1] == f"{held.id}/2"


def test_a_delivery_stays_with_its_server_for_as_long_as_it_is_sent(
    house: House, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease is short and renewed: another server that looks for work all the time does not send it again."""
    monkeypatch.setattr(sender, "TIMEOUT", 1000.0)
    monkeypatch.setattr(dispatcher, "RENEW_EVERY", 0.02)
    house.serve(app=house.another_app(clock=house.clock))
    receiver = house.receiver("hang")
    subscribe(client, receiver.url)
    house.app.submit("add", {"a": 1})
    receiver.wait_for(1)
    for _ in range(5):
        house.clock.advance(LEASE * 0.9)
        eventually(
            lambda: house.sql("SELECT due_us FROM semel_deliveries") == [(house.clock.us + LEASE_US,)], "a renewal"
        )
    assert (len(receiver.received), house.sql("SELECT attempts FROM semel_deliveries")) == (1, [(1,)])


def test_a_try_that_ended_is_not_renewed(house: House) -> None:
    """A renewal that was under way when its try was settled changes nothing."""
    receiver = house.receiver(500)
    with serve(house.app, OPEN) as service, service.client() as client:
        subscribe(client, receiver.url)
        house.app.submit("add", {"a": 1})
        eventually(lambda: _noted(house, 1), "the try was settled")
    before = house.sql("SELECT * FROM semel_deliveries")
    ledger = house.app.ledger(awaited=False)
    subscription_id, run_id, version = before[0][:3]
    stale = {"last_status": None, "last_error": None, "body": "", "state": "waiting", "attempts": 1}
    leased = Delivery(
        subscription_id=subscription_id,
        run_id=str(run_id),
        version=version,
        due_us=house.clock.us + LEASE_US,
        **stale,
    )
    try:
        assert run_sync(ledger.write(renew, [leased], LEASE, ledger.statement_context)) == {}
    finally:
        run_sync(ledger.close())
    assert house.sql("SELECT * FROM semel_deliveries") == before


def test_a_server_that_stops_gives_back_what_it_has_not_sent(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "GRACE", 0.05)
    receiver = house.receiver("hang")
    with serve(house.app, OPEN) as service, service.client() as client:
        subscribe(client, receiver.url)
        house.app.submit("add", {"a": 1})
        receiver.wait_for(1)
    assert house.sql("SELECT state, attempts, due_us FROM semel_deliveries") == [("waiting", 0, house.clock.us)]
    receiver.behaviours = [204]
    client = house.client(house.serve())
    eventually(arrived(client, 1), "the next server sends it")
    assert len(set(receiver.ids)) == 1


def test_a_private_address_is_refused_when_it_is_subscribed_and_when_it_is_sent_to(house: House) -> None:
    receiver = house.receiver()
    with serve(house.app, OPEN) as service, service.client() as client:
        subscribe(client, receiver.url)
    strict = house.client(house.serve(Settings()))
    refused = strict.post("/admin/subscriptions", json={"url": receiver.url})
    assert (refused.status_code, refused.json()["error_code"]) == (422, "WEBHOOK_REFUSED")
    assert "private address" in refused.json()["detail"]
    house.app.submit("add", {"a": 1})
    eventually(lambda: any(each["last_error"] for each in deliveries(strict)), "it was tried")
    (delivery,) = deliveries(strict)
    assert delivery["last_error"].startswith("refused: the host '127.0.0.1' has a private address")
    assert receiver.received == []


# -- processes -------------------------------------------------------------------------------------------------------

SERVER = """
import os
from semel import App
from semel.service import Settings
from semel.service.webhooks import dispatcher as deliverer
from support.service import serve
deliverer.POLL = deliverer.IDLE_POLL = 0.02
app = App(url, artifacts=folder, dedupe_window=0)
with serve(app, Settings(private_webhooks=True)) as service:
    tell((os.getpid(), service.address))
    hear()
app.close()
"""


def test_a_server_killed_between_sending_and_noting_is_followed_by_one_that_sends_again(house: House) -> None:
    """What was on its way comes twice under the same id, the rest once, and nothing is lost."""
    receiver = house.receiver("hang")
    app = house.another_app()
    with Program(SERVER, url=house.url, folder=str(house.folder)) as program:
        process, address = program.hear()
        with httpx.Client(base_url=address, timeout=60) as client:
            subscribe(client, receiver.url)
        answers = app.submit_many([{"model": "add", "parameters": {"a": number}} for number in range(30)])
        receiver.wait_for(AT_ONCE)
        os.kill(process, signal.SIGKILL)
    before = receiver.ids
    assert len(set(before)) == len(before) == AT_ONCE
    receiver.behaviours = [204]
    house.clock.us = time.time_ns() // 1000
    house.serve()
    receiver.wait_for(30)
    house.clock.advance(LEASE + 1)  # soon enough
    eventually(lambda: house.states() == {"delivered": 30}, "all are marked")
    all_of_them = [f"{run.id}/1" for run in answers]  # type: ignore[union-attr]
    assert Counter(receiver.ids) == Counter(all_of_them + before)


def test_two_servers_tell_each_event_once(house: House) -> None:
    receiver = house.receiver()
    app = house.another_app()
    with Program(SERVER, url=house.url, folder=str(house.folder)) as program:
        program.hear()
        subscribe(house.client(house.serve(app=app)), receiver.url, "RunCreated")
        answers = app.submit_many([{"model": "add", "parameters": {"a": number}} for number in range(100)])
        receiver.wait_for(100)
        eventually(lambda: house.states() == {"delivered": 100}, "all are marked")
        program.tell()
    assert Counter(receiver.ids) == Counter(f"{run.id}/1" for run in answers)  # type: ignore[union-attr]


# -- the stream ------------------------------------------------------------------------------------------------------


def entries(redis_url: str) -> list[dict[bytes, bytes]]:
    with redis_client.Redis.from_url(redis_url) as redis:
        return [fields for _, fields in redis.xrange("semel:events")]  # type: ignore[union-attr, misc]


def test_events_go_to_the_stream_of_the_settings(house: House, redis_url: str) -> None:
    client = house.client(house.serve(Settings(events=redis_url)))
    run = house.app.submit("add", {"a": 1}, tenant="acme")
    house.app.cancel(run.id)
    eventually(lambda: len(entries(redis_url)) == 2, "both are in the stream")
    found = entries(redis_url)
    assert [each[b"id"].decode() for each in found] == [f"{run.id}/1", f"{run.id}/2"]
    assert [each[b"name"] for each in found] == [b"RunCreated", b"RunCompleted"]
    assert b'"tenant":"acme"' in found[0][b"body"]
    eventually(lambda: house.states() == {}, "nothing of it is kept")
    (shown,) = client.get("/admin/subscriptions").json()
    assert (shown["id"], shown["kind"], shown["target"]) == ("stream", "stream", "semel:events")
    refused = client.delete("/admin/subscriptions/stream")
    assert (refused.status_code, refused.json()["error_code"]) == (409, "STREAM_IS_A_SETTING")
    pinged = client.post("/admin/subscriptions/stream/test").json()
    assert (pinged["delivered"], entries(redis_url)[-1][b"id"].decode()) == (True, pinged["id"])


def test_without_the_setting_nothing_is_kept_for_the_stream(house: House, redis_url: str) -> None:
    with serve(house.app, Settings(events=redis_url)):
        pass
    client = house.client(house.serve(Settings()))
    assert client.get("/admin/subscriptions/stream").json()["disabled_at"] is not None
    house.app.submit("add", {"a": 1})
    assert (house.unsent(), entries(redis_url)) == (0, [])


def test_events_wait_while_redis_is_away(house: House, redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    away = "redis://somebody:a-password@127.0.0.1:1/0"
    with serve(house.app, Settings(events=away)) as service, service.client() as client:
        run = house.app.submit("add", {"a": 1})
        eventually(lambda: any(each["last_error"] for each in deliveries(client)), "it was tried")
    assert "a-password" not in caplog.text + str(house.sql("SELECT * FROM semel_deliveries"))
    house.clock.advance(120)
    house.serve(Settings(events=redis_url))
    eventually(lambda: entries(redis_url), "it is in the stream")
    assert [each[b"id"].decode() for each in entries(redis_url)] == [f"{run.id}/1"]


# -- the API ---------------------------------------------------------------------------------------------------------


def test_the_secret_is_shown_once_and_logged_never(
    house: House, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    receiver = house.receiver(500)
    url = receiver.url + "?token=of-the-receiver"
    made = subscribe(client, url)
    shown = [
        client.get("/admin/subscriptions").text,
        client.get(f"/admin/subscriptions/{made['subscription']['id']}").text,
    ]
    house.app.submit("add", {"a": 1})
    receiver.wait_for(1)
    eventually(lambda: any(each["last_status"] for each in deliveries(client)), "the try was noted")
    said = client.get("/admin/deliveries").text
    key = made["secret"].removeprefix("whsec_")
    assert key not in "".join(shown) + said + caplog.text
    assert "of-the-receiver" not in said + "".join(
        record.getMessage() for record in caplog.records if record.name.startswith("semel")
    )


def test_a_ping_says_how_the_receiver_took_it(house: House, client: httpx.Client) -> None:
    receiver = house.receiver(204, 418)
    made = subscribe(client, receiver.url)
    place = f"/admin/subscriptions/{made['subscription']['id']}/test"
    good, bad = client.post(place).json(), client.post(place).json()
    assert good == {"id": receiver.ids[0], "delivered": True, "status": 204, "error": None}
    assert (bad["delivered"], bad["status"], bad["error"]) == (False, 418, "answered 418")
    assert receiver.names == ["Ping", "Ping"]
    assert receiver.received[0].is_signed_with(made["secret"])
    assert house.states() == {}


def test_a_subscription_that_was_ended_is_told_nothing_more(house: House, client: httpx.Client) -> None:
    receiver = house.receiver(500)
    made = subscribe(client, receiver.url)["subscription"]
    house.app.submit("add", {"a": 1})
    eventually(lambda: any(each["last_status"] for each in deliveries(client)), "the first was tried")
    assert client.delete(f"/admin/subscriptions/{made['id']}").status_code == 204
    assert client.delete(f"/admin/subscriptions/{made['id']}").status_code == 404
    house.app.submit("add", {"a": 2})
    assert (client.get("/admin/subscriptions").json(), house.states(), house.unsent()) == ([], {}, 0)


@pytest.mark.parametrize("end", ["DELETE FROM semel_subscriptions", "UPDATE semel_subscriptions SET disabled_us = 1"])
def test_what_still_waits_for_a_subscription_that_ended_is_not_taken_up(house: House, end: str) -> None:
    """Nor by a server that is in the middle of its deliveries."""
    receiver = house.receiver(500)
    with serve(house.app, OPEN) as service, service.client() as client:
        made = subscribe(client, receiver.url)["subscription"]
        house.app.submit("add", {"a": 1})
        eventually(lambda: _noted(house, 1), "the try was settled")
    house.clock.advance(DELAYS[0] * 2)
    ledger = house.app.ledger(awaited=False)
    try:
        house.write(end)
        assert run_sync(ledger.write(lease, made["id"], 10, LEASE, ledger.statement_context)) == []
        assert house.states() == {"waiting": 1}
    finally:
        run_sync(ledger.close())


def test_deliveries_are_listed_page_by_page(house: House, client: httpx.Client) -> None:
    receiver = house.receiver()
    made = subscribe(client, receiver.url)["subscription"]
    house.app.submit_many([{"model": "add", "parameters": {"a": number}} for number in range(7)])
    eventually(lambda: house.states() == {"delivered": 7}, "all are marked")
    seen, after = [], None
    for _ in range(3):
        params = {"limit": 3, "state": "delivered", "subscription": made["id"], **({"after": after} if after else {})}
        page = client.get("/admin/deliveries", params=params).json()
        seen += [each["event"]["id"] for each in page["deliveries"]]
        after = page["next"]
    assert (after, sorted(seen)) == (None, sorted(receiver.ids))
    assert deliveries(client, state="dead") == []


def test_only_admins_manage_and_only_their_own_tenants_subscriptions(house: House) -> None:
    service = house.serve()
    root = house.client(service, issue_token(house.app, "root", "admin"))
    receiver = house.receiver()
    made = subscribe(root, receiver.url)["subscription"]
    for user, role, tenant, status in (
        ("sub", "submitter", "", 403),
        ("op", "operator", "", 403),
        ("boss", "admin", "acme", 404),
    ):
        client = house.client(service, issue_token(house.app, user, role, tenant))
        place = f"/admin/subscriptions/{made['id']}"
        asked = [client.get(place), client.delete(place), client.post(f"{place}/test")]
        assert [answer.status_code for answer in asked] == [status] * 3
        listed = client.get("/admin/subscriptions")
        assert (listed.status_code, listed.json()) == (200, []) if status == 404 else listed.status_code == 403
    refused = client.post("/admin/subscriptions", json={"url": receiver.url, "tenant": ""})
    assert refused.status_code == 403
    assert root.get(f"/admin/subscriptions/{made['id']}").json() == made


def test_a_tenant_has_so_many_subscriptions_at_the_most(house: House, client: httpx.Client) -> None:
    receiver = house.receiver()
    rows = ", ".join(f"('{number}', '', 'webhook', '-', 'RunCompleted', 0)" for number in range(100))
    house.write(f"INSERT INTO semel_subscriptions (id, tenant, kind, target, events, created_us) VALUES {rows}")
    answer = client.post("/admin/subscriptions", json={"url": receiver.url})
    assert (answer.status_code, answer.json()["error_code"]) == (409, "TOO_MANY_SUBSCRIPTIONS")


def test_the_lease_of_a_delivery_is_short_and_renewed_well_before_it_ends() -> None:
    assert 2 * dispatcher.RENEW_EVERY < LEASE <= 15
