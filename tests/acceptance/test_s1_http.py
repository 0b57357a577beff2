"""S1, POST idempotency, through both HTTP doors: what a client of the Data Intake service meets, word for word."""

import asyncio
import hashlib
import logging
import string
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from email.utils import format_datetime, parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import create_engine, text

from acceptance.exchanges import (
    DOORS,
    ITEMS,
    SCOPE,
    Answer,
    Answering,
    Asked,
    DoorKind,
    Doorway,
    Intake,
    Service,
    SlowIntake,
    doorway,
)
from acceptance.spaces import Space
from acceptance.together import PATIENCE, in_threads
from semel import App, Event, NotMigrated, Policy, Response
from semel.http.refusals import DIALECTS, PROTOCOL_VERSION, REFUSALS
from semel.once.stats import Counts
from semel.service import asgi
from semel.testing import FaultyStore

KEY = "new-key-123"
ITEM = {"sku": "ITEM-001", "title": "Sample Item"}
OTHER = {"sku": "ITEM-002", "title": "Different Item"}
HOUR, MINUTE = 3600, 60


def invalid(shown: str) -> dict[str, str]:
    return {
        "detail": "Invalid idempotency key format. Key must be 1-255 characters long and contain only letters, "
        "numbers, hyphens, and underscores",
        "error_code": "INVALID_IDEMPOTENCY_KEY",
        "idempotency_key": shown,
    }


def conflict(key: str = KEY) -> dict[str, str]:
    return {
        "detail": "Idempotency key already used with different request body",
        "error_code": "IDEMPOTENCY_KEY_CONFLICT",
        "idempotency_key": key,
    }


def processing(key: str = KEY) -> dict[str, str]:
    return {
        "detail": "Request with this idempotency key is already being processed",
        "error_code": "IDEMPOTENCY_KEY_PROCESSING",
        "idempotency_key": key,
    }


@pytest.fixture(params=DOORS)
def site(request: pytest.FixtureRequest, shared_space: Space) -> Iterator[Doorway]:
    """Each door over each store that processes share."""
    with doorway(request.param, shared_space) as site:
        yield site


@pytest.fixture
def intake() -> Intake:
    return Intake()


@pytest.fixture
def service(site: Doorway, intake: Intake) -> Service:
    """The Data Intake service behind the door, with nothing but the defaults."""
    return site.serve(intake)


def is_replay(response: httpx.Response) -> bool:
    return response.headers.get("idempotent-replayed") == "true"


def counts(service: Service) -> Counts:
    found: Counts = service.ask("stats").doors["http", "http"]
    return found


# -- the header --------------------------------------------------------------------------------------------------------


def test_s1_1_the_header_is_optional(service: Service, intake: Intake) -> None:
    """And, as every header, it is the same in capitals."""
    assert service.post(ITEM).status_code == 201
    assert service.post(ITEM, key=KEY).json() == {"id": 2, **ITEM}
    assert service.post(ITEM, headers=[("IDEMPOTENCY-KEY", KEY)]).json() == {"id": 2, **ITEM}
    assert len(intake.items) == 2


def test_s1_2_a_key_has_1_to_255_characters(service: Service, intake: Intake) -> None:
    for key in ("a", "k" * 255):
        assert [service.post(ITEM, key=key).status_code for _ in range(2)] == [201, 201]
    assert len(intake.items) == 2
    assert service.post(ITEM, key="").status_code == 400
    assert service.post(ITEM, key="k" * 256).status_code == 400
    assert len(intake.items) == 2


def test_s1_3_valid_keys_pass(service: Service, intake: Intake) -> None:
    """Those of the document, and every character that it allows."""
    keys = [
        "client-request-123",
        "user-456-session-789",
        "2024-01-15-10-30-00-abc123",
        string.ascii_letters + string.digits + "-_",
    ]
    for key in keys:
        assert not is_replay(service.post(ITEM, key=key))
        assert is_replay(service.post(ITEM, key=key))
    assert len(intake.items) == len(keys)


def test_s1_4_invalid_keys_are_refused(service: Service, intake: Intake) -> None:
    """Those of the document, and every other printable character; nothing is carried out, nothing is kept."""
    allowed = set(string.ascii_letters + string.digits + "-_")
    others = [f"a{character}b" for character in map(chr, range(32, 127)) if character not in allowed]
    for key in ("@invalid-key#123", "", "very-long-key-" * 20, "ключ".encode(), *others):
        response = service.post(ITEM, key=key)
        assert (response.status_code, response.json()["error_code"]) == (400, "INVALID_IDEMPOTENCY_KEY"), key
    twice = service.post(ITEM, headers=[("Idempotency-Key", "one"), ("Idempotency-Key", "other")])
    assert twice.status_code == 400
    assert intake.items == []
    assert service.ask("stats").held.live == 0


def test_s1_5_the_refusal_of_an_invalid_key(service: Service) -> None:
    response = service.post(ITEM, key="invalid@key#123")
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {
        "detail": "Invalid idempotency key format. Key must be 1-255 characters long and contain only letters, "
        "numbers, hyphens, and underscores",
        "error_code": "INVALID_IDEMPOTENCY_KEY",
        "idempotency_key": "invalid@key#123",
    }
    assert service.post(ITEM, key="").json() == invalid("")


# -- the life of a key -------------------------------------------------------------------------------------------------


def test_s1_6_the_request_hash_is_the_sha_256_of_the_body(site: Doorway, service: Service, intake: Intake) -> None:
    body = b'{"sku": "ITEM-001", "title": "Sample Item"}'
    service.post(body, key=KEY)
    record = site.record(KEY)
    assert record is not None
    assert record.fingerprint == "0:1c3d574b4624cfb63a3a6f327ab054e9f374fa8df090594da0ba9e94c1bdc39c"
    assert record.fingerprint == f"0:{hashlib.sha256(body).hexdigest()}"
    assert is_replay(service.post(body, key=KEY))
    for other in (body + b"\n", body.replace(b": ", b":"), b""):
        assert service.post(other, key=KEY).json() == conflict()
    assert len(intake.items) == 1


def test_s1_7_a_new_key_is_processing(site: Doorway) -> None:
    slow = SlowIntake()
    service = site.serve(slow)
    with service.under_way(slow, ITEM, key=KEY):
        record = site.record(KEY)
        assert record is not None
        assert (record.status, record.outcome) == ("in_flight", None)


def test_s1_8_success_completes_the_key_with_the_response(site: Doorway, service: Service) -> None:
    first = service.post(ITEM, key=KEY)
    record = site.record(KEY)
    assert record is not None
    assert record.status == "completed"
    assert record.outcome is not None
    saved = record.outcome.value
    assert isinstance(saved, Response)
    assert (saved.status, saved.body) == (201, first.content)
    assert saved.headers == [(b"content-type", b"application/json"), (b"location", b"/api/v1/items/1")]


class WarehouseAway(Exception):
    pass


def test_s1_9_an_error_deletes_the_record(site: Doorway) -> None:
    """An exception, and every response that says that it was not carried out."""
    once = site.open()
    for failure in (*(Answer(status, b"?") for status in (400, 404, 422, 500, 503)), WarehouseAway()):
        handler = Answering(failure, Answer(201, {"id": 1}))
        service = site.serve(handler, once)
        key = f"failing-{getattr(failure, 'status', 'hard')}"
        if isinstance(failure, Answer):
            response = service.post(ITEM, key=key)
            assert (response.status_code, response.content) == (failure.status, b"?")
        else:
            with pytest.raises(WarehouseAway):
                service.post(ITEM, key=key)
        assert site.record(key) is None
        again = service.post(OTHER, key=key)
        assert (again.status_code, is_replay(again)) == (201, False)
        assert service.post(ITEM, key=key).json() == conflict(key)
        assert handler.times == 2


def test_s1_10_an_expired_key_is_deleted_and_allows_a_new_request(
    site: Doorway, service: Service, intake: Intake
) -> None:
    service.post(ITEM, key=KEY)
    site.clock.advance(HOUR)
    assert is_replay(service.post(ITEM, key=KEY))
    site.clock.advance(0.000001)
    assert site.record(KEY) is None
    new = service.post(OTHER, key=KEY)
    assert (new.status_code, new.json()) == (201, {"id": 2, **OTHER})
    assert service.post(ITEM, key=KEY).json() == conflict()
    assert intake.items == [ITEM, OTHER]


# -- the four scenarios ------------------------------------------------------------------------------------------------


def test_s1_11_the_same_request_gets_the_same_response(service: Service, intake: Intake) -> None:
    first = service.post(ITEM, key=KEY)
    assert (first.status_code, first.json()) == (201, {"id": 1, **ITEM})
    assert "idempotent-replayed" not in first.headers
    for _ in range(3):
        again = service.post(ITEM, key=KEY)
        assert (again.status_code, again.content) == (first.status_code, first.content)
        told = dict(again.headers)
        assert told.pop("idempotent-replayed") == "true"
        assert told == dict(first.headers)
    assert intake.items == [ITEM]


def test_s1_12_a_different_body_is_a_conflict(service: Service, intake: Intake) -> None:
    service.post(ITEM, key=KEY)
    response = service.post(OTHER, key=KEY)
    assert response.status_code == 409
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {
        "detail": "Idempotency key already used with different request body",
        "error_code": "IDEMPOTENCY_KEY_CONFLICT",
        "idempotency_key": "new-key-123",
    }
    assert "retry-after" not in response.headers, "the document: do not repeat the request"
    assert is_replay(service.post(ITEM, key=KEY)), "the first request is not harmed"
    assert intake.items == [ITEM]


def test_s1_13_a_request_in_progress_is_a_conflict_with_retry_after(site: Doorway) -> None:
    slow = SlowIntake()
    service = site.serve(slow)
    with service.under_way(slow, ITEM, key="client-key-123"):
        site.clock.advance(0.3)
        response = service.post(ITEM, key="client-key-123")
        assert response.status_code == 409
        assert response.headers["content-type"] == "application/json"
        assert response.headers["retry-after"] == "1"
        assert response.json() == {
            "detail": "Request with this idempotency key is already being processed",
            "error_code": "IDEMPOTENCY_KEY_PROCESSING",
            "idempotency_key": "client-key-123",
        }
        other = service.post(OTHER, key="client-key-123")
        assert (other.status_code, other.json()) == (409, conflict("client-key-123")), "another body comes first"
    assert slow.items == [ITEM]


def test_s1_13_by_the_letter_of_the_document_a_request_is_in_progress_for_an_hour(site: Doorway) -> None:
    """Its own table: Processing, 1 hour. The default leases for a minute and renews while the handler runs."""
    slow = SlowIntake()
    service = site.serve(slow, policy=Policy.intake().but(lease=HOUR))
    with service.under_way(slow, ITEM, key=KEY) as first:
        for advance, said in ((600, 600), (1500, HOUR - 2100), (1499, 1)):
            site.clock.advance(advance)
            response = service.post(ITEM, key=KEY)
            assert (response.json(), response.headers["retry-after"]) == (processing(), str(said))
        slow.gate.set()
        assert first.result(PATIENCE).status_code == 201
    assert slow.items == [ITEM]


def test_s1_14_of_a_race_one_is_created_and_the_others_conflict(site: Doorway) -> None:
    """Six at the same moment; whoever is first is held until the other five have their answer."""
    answered = threading.Semaphore(0)

    class Race(Intake):
        def __call__(self, asked: Asked) -> Answer:
            for _ in range(5):
                assert answered.acquire(timeout=PATIENCE)
            return super().__call__(asked)

    race = Race()
    service = site.serve(race)

    def send(_: int) -> httpx.Response:
        response = service.post(ITEM, key="race-key")
        answered.release()
        return response

    responses = in_threads(6, send)
    assert sorted(response.status_code for response in responses) == [201, 409, 409, 409, 409, 409]
    assert [each.json() for each in responses if each.status_code == 409] == [processing("race-key")] * 5
    assert race.items == [ITEM]
    again = service.post(ITEM, key="race-key")
    assert (again.status_code, again.json()) == (201, {"id": 1, **ITEM})


# -- time and garbage collection ---------------------------------------------------------------------------------------


def test_s1_15_the_ttl_is_an_hour_by_default(site: Doorway, intake: Intake) -> None:
    """Nothing but a URL is given, and the clock is the store's own."""
    service = site.serve_url(intake)
    first = service.post(ITEM, key=KEY)
    expires = parsedate_to_datetime(first.headers["idempotency-expires"]).timestamp()
    assert expires == pytest.approx(time.time() + HOUR, abs=60)
    record = service.ask("get", KEY, scope=SCOPE)
    assert record.expires_at - record.created_at == timedelta(hours=1)
    assert is_replay(service.post(ITEM, key=KEY))
    assert intake.items == [ITEM]


def test_s1_16_the_ttl_is_a_parameter_of_the_middleware(site: Doorway) -> None:
    service = site.serve(Intake(), ttl=120)
    service.post(ITEM, key=KEY)
    site.clock.advance(120)
    assert is_replay(service.post(ITEM, key=KEY))
    site.clock.advance(1)
    assert not is_replay(service.post(ITEM, key=KEY))


def test_s1_17_expires_at_is_created_at_plus_ttl_and_repeats_do_not_extend_it(
    site: Doorway, service: Service, intake: Intake
) -> None:
    first = service.post(ITEM, key=KEY)
    record = site.record(KEY)
    assert record is not None
    assert record.expires_at == record.created_at + timedelta(hours=1)
    for minutes in (10, 20, 29):
        site.clock.advance(minutes * MINUTE)
        again = service.post(ITEM, key=KEY)
        assert is_replay(again)
        assert again.headers["idempotency-expires"] == first.headers["idempotency-expires"]
        assert again.headers["idempotency-expires"] == format_datetime(record.expires_at, usegmt=True)
    site.clock.advance(2 * MINUTE)
    assert not is_replay(service.post(ITEM, key=KEY))
    assert len(intake.items) == 2


def test_s1_18_expired_keys_are_deleted_and_their_number_is_logged(
    site: Doorway, intake: Intake, caplog: pytest.LogCaptureFixture
) -> None:
    """Here every 50 ms. A Redis server drops keys by itself: there, by hand."""
    caplog.set_level(logging.DEBUG, "semel")
    service = site.serve(intake, site.open(policy=Policy.intake().but(purge_every=0.05)))
    for number in range(5):
        service.post(ITEM, key=f"key-{number}")
    site.clock.advance(HOUR + 1)
    service.post(ITEM, key="young")
    if site.space.kind == "redis":
        assert service.ask("purge") == 5
    wait_until(lambda: service.ask("stats").purged == 5)
    wait_until(lambda: sum(getattr(record, "purged", 0) for record in caplog.records) == 5)
    logged = [record for record in caplog.records if hasattr(record, "purged")]
    assert all(record.getMessage() == f"purged {record.purged} expired keys" for record in logged)  # type: ignore[attr-defined]
    held = service.ask("stats").held
    assert (held.completed, held.expired) == (1, 0)
    assert is_replay(service.post(ITEM, key="young"))


def test_s1_18_expired_keys_are_collected_every_ten_minutes(site: Doorway, intake: Intake) -> None:
    """By default: how the collector keeps time is shown in test_s1_engine."""
    service = site.serve_url(intake)
    assert service.once._engine.policy.collect_interval == 600


def test_s1_19_a_live_record_in_progress_is_never_collected(site: Doorway) -> None:
    """Its lease is renewed while the handler works, past the TTL."""
    slow = SlowIntake()
    service = site.serve(slow, policy=Policy.intake(ttl=0.5).but(lease=0.3))
    with service.under_way(slow, ITEM, key="slow") as first:
        for _ in range(4):
            ends = lease_until(site, "slow")
            site.clock.advance(0.2)
            wait_until(lambda ends=ends: lease_until(site, "slow") > ends)
        assert service.ask("purge") == 0, "it is past its TTL, but alive"
        assert service.post(ITEM, key="slow").json() == processing("slow")
        slow.gate.set()
        assert first.result(PATIENCE).status_code == 201
    site.clock.advance(1)
    assert service.ask("purge") == 1, "done, and past its TTL"
    assert slow.items == [ITEM]


def lease_until(site: Doorway, key: str) -> int:
    record = site.record(key)
    assert record is not None
    return record.lease_until_us


def test_s1_20_the_timings_of_the_document(site: Doorway, service: Service, intake: Intake) -> None:
    """T+1m, T+10m and T+60m replay; T+61m is a new request."""
    first = service.post(ITEM, key=KEY)
    for minutes in (1, 9, 50):
        site.clock.advance(minutes * MINUTE)
        again = service.post(ITEM, key=KEY)
        assert (again.status_code, again.content, is_replay(again)) == (201, first.content, True)
    site.clock.advance(MINUTE)
    new = service.post(ITEM, key=KEY)
    assert (new.status_code, new.json(), is_replay(new)) == (201, {"id": 2, **ITEM}, False)
    assert len(intake.items) == 2


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_s1_21_hits_are_counted(service: Service) -> None:
    for _ in range(4):
        service.post(ITEM, key=KEY)
    assert counts(service).hits == 3


def test_s1_22_misses_are_counted_with_their_reason(site: Doorway, service: Service) -> None:
    service.post(ITEM, key=KEY)
    service.post(ITEM, key="another")
    site.clock.advance(HOUR + 1)
    service.post(ITEM, key=KEY)
    service.post(ITEM)
    service.post(ITEM, key="in valid")
    assert counts(service).misses == {"absent": 2, "expired": 1}


def test_s1_23_conflicts_are_counted(service: Service) -> None:
    service.post(ITEM, key=KEY)
    for _ in range(2):
        service.post(OTHER, key=KEY)
    found = counts(service)
    assert (found.conflicts, found.hits, found.collisions) == (2, 0, 0)


def test_s1_24_processing_collisions_are_counted(site: Doorway) -> None:
    slow = SlowIntake()
    service = site.serve(slow)
    with service.under_way(slow, ITEM, key=KEY):
        for _ in range(2):
            service.post(ITEM, key=KEY)
    found = counts(service)
    assert (found.collisions, found.conflicts, found.hits, found.misses) == (2, 0, 0, {"absent": 1})


def test_s1_25_what_was_cleaned_up_is_counted(site: Doorway, intake: Intake) -> None:
    events: list[Event] = []
    service = site.serve(intake, site.open(collect=False), on_event=events.append)
    for number in range(3):
        service.post(ITEM, key=f"key-{number}")
    site.clock.advance(HOUR + 1)
    service.ask("purge")
    assert service.ask("stats").purged == 3
    assert [event.value for event in events if event.name == "cleanup"] == [3]


def test_s1_26_the_hit_rate_is_shown_and_judged(site: Doorway, service: Service) -> None:
    """Good above 80 %, to be looked at below 50 %."""
    service.post(ITEM, key=KEY)
    assert (counts(service).hit_rate, counts(service).hit_rate_is) == (0.0, "to be looked at")
    service.post(ITEM, key=KEY)
    assert (counts(service).hit_rate, counts(service).hit_rate_is) == (0.5, "fair")
    for _ in range(3):
        service.post(ITEM, key=KEY)
    assert (counts(service).hit_rate, counts(service).hit_rate_is) == (0.8, "fair")
    service.post(ITEM, key=KEY)
    assert (counts(service).hit_rate, counts(service).hit_rate_is) == (5 / 6, "good")
    for number in range(200):
        service.post(ITEM, key=f"{KEY}-{number}")
    assert counts(service).hit_rate_is == "to be looked at"
    assert service.ask("stats").warnings == [], "it is shown, and no warning without a threshold"


def test_s1_26_a_hit_rate_below_50_percent_is_a_warning_where_that_is_asked_for(site: Doorway, intake: Intake) -> None:
    """A client that seldom retries is healthy: it is a warning only where the user calls such a rate low."""
    service = site.serve(intake, site.open(low_replay_rate=0.5))
    for number in range(60):
        service.post(ITEM, key=f"key-{number}")
    for number in range(40):
        service.post(ITEM, key=f"key-{number}")
    (warning,) = service.ask("stats").warnings
    assert warning.startswith("http: 40.0% of requests with a key were replays (below 50 %)")
    for number in range(20):
        service.post(ITEM, key=f"key-{number}")
    assert service.ask("stats").warnings == []


# -- what does not change ----------------------------------------------------------------------------------------------


def test_s1_27_only_post_is_idempotent_by_default(site: Doorway) -> None:
    once = site.open()
    for method in ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS"):
        handler = Answering(Answer(200), Answer(202))
        service = site.serve(handler, once)
        responses = [service.request(method, ITEMS, b"x", key=key) for key in (KEY, KEY, "not a key")]
        assert [response.status_code for response in responses] == [200, 202, 202]
        assert [asked.headers["idempotency-key"] for asked in handler.asked] == [KEY, KEY, "not a key"]
        assert not any("idempotency-expires" in response.headers for response in responses)
        assert site.record(KEY, f"{method} {ITEMS}") is None


def test_s1_28_without_the_header_nothing_changes(site: Doorway) -> None:
    answer = Answer(201, {"id": 1}, [("Set-Cookie", "a=1"), ("Set-Cookie", "b=2"), ("X-Trace", "7")])
    handler = Answering(answer, WarehouseAway())
    service = site.serve(handler)
    response = service.request("POST", f"{ITEMS}?dry=1", ITEM)
    assert (response.status_code, response.json()) == (201, {"id": 1})
    assert response.headers.multi_items() == [(name.lower(), value) for name, value in answer.all_headers]
    (asked,) = handler.asked
    assert (asked.method, asked.path, asked.query) == ("POST", ITEMS, "dry=1")
    with pytest.raises(WarehouseAway):
        service.post(ITEM)
    stats = service.ask("stats")
    assert (stats.held.live, stats.doors) == (0, {})


def test_s1_29_the_stored_response_has_no_limit(site: Doorway) -> None:
    content = bytes(range(256)) * 4096 * 3
    handler = Answering(Answer(200, content, [("Content-Type", "application/octet-stream")]))
    service = site.serve(handler)
    assert [service.post(ITEM, key=KEY).content == content for _ in range(2)] == [True, True]
    assert handler.times == 1


# -- privacy -----------------------------------------------------------------------------------------------------------

SECRET = "4929-0000-1111-2222"


def test_s1_30_no_log_line_contains_a_request_body(site: Doorway, caplog: pytest.LogCaptureFixture) -> None:
    """Everything that is logged anywhere, at every level, whatever goes wrong, with what formatters could use of it.

    The service even answers what it was told.
    """
    caplog.set_level(logging.DEBUG)
    store = FaultyStore(site.store())
    policy = Policy.intake().but(lease=60)
    service = site.serve(Echo(), site.open(store, retry_for=0, policy=policy), policy=policy)
    body = {"card": SECRET}
    assert service.post(body, key=KEY).json() == body
    assert is_replay(service.post(body, key=KEY))
    assert service.post({"card": SECRET, "more": 1}, key=KEY).status_code == 409
    assert service.post(body, key="in valid").status_code == 400
    assert service.post({"card": SECRET, "fail": True}, key="failing").status_code == 500
    with pytest.raises(WarehouseAway):
        service.post({"card": SECRET, "raise": True}, key="raising")
    store.lose_request("claim")
    assert service.post(body, key="unclaimed").status_code == 503
    store.lose_request("complete")
    assert service.post(body, key="unfinished").status_code == 503
    store.lose_request("release", 50)  # those who give back in the background lose some of them, too
    assert service.post({"card": SECRET, "fail": True}, key="unreleased").status_code == 500
    slow = SlowIntake()
    zombie = site.serve(slow, service.once, policy=policy)
    with zombie.under_way(slow, body, key="zombie") as first:
        assert zombie.post(body, key="zombie").json() == processing("zombie")
        site.clock.advance(60)
        assert zombie.post(body, key="zombie").status_code == 201, "its lease is over"
        slow.gate.set()
        assert first.result(PATIENCE).json() == processing("zombie"), "the other one's answer counts"
    events = {getattr(record, "event", None) for record in caplog.records}
    assert {"miss", "hit", "conflict", "collision"} <= events
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    for words in ("'unclaimed' was refused", "'unfinished' is withheld", "'unreleased'", "'zombie' is withheld"):
        assert any(words in warning for warning in warnings), words
    for record in caplog.records:
        assert SECRET not in written(record)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize("door", DOORS)
def test_s1_30_nor_does_the_traceback_of_a_statement_that_failed(
    kind: str, door: DoorKind, space_of: Callable[[str], Space]
) -> None:
    """Servers log what a middleware raises, with all that it was raised from: here the table vanished meanwhile."""
    space = space_of(kind)
    with doorway(door, space) as site:
        engine = create_engine(space.url.replace("postgresql:", "postgresql+psycopg:"))

        def rename(name: str, new: str) -> None:
            with engine.begin() as connection:
                connection.execute(text(f"ALTER TABLE {name} RENAME TO {new}"))

        def handler(asked: Asked) -> Answer:
            rename("semel_keys", "mislaid")
            return Answer(201, asked.body)

        service = site.serve(handler)
        with pytest.raises(NotMigrated) as raised:
            service.post({"card": SECRET}, key=KEY)
        rename("mislaid", "semel_keys")
        engine.dispose()
    told = "".join(traceback.format_exception(raised.value))
    assert "UPDATE" in told, "the statement is there"
    assert SECRET not in told


class Echo:
    """Answers what it was told, or fails as it is told."""

    def __call__(self, asked: Asked) -> Answer:
        if b"raise" in asked.body:
            raise WarehouseAway
        return Answer(500 if b"fail" in asked.body else 201, asked.body)


def written(record: logging.LogRecord) -> str:
    """All that a formatter could make of it, with the text of its exception."""
    return logging.Formatter().format(record) + repr(vars(record))


# -- what can be observed ----------------------------------------------------------------------------------------------


def test_s1_34_table_size_conflicts_and_hit_rate_are_observable(site: Doorway) -> None:
    slow = SlowIntake()
    service = site.serve(slow, site.open(collect=False))
    with service.under_way(slow, ITEM, key="slow"):
        for number in range(4):
            service.post(ITEM, key=f"key-{number}")
        service.post(OTHER, key="key-0")
        for _ in range(5):
            service.post(ITEM, key="key-1")
        stats = service.ask("stats")
        assert (stats.held.in_flight, stats.held.completed, stats.held.live) == (1, 4, 5)
        found = stats.doors["http", "http"]
        assert (found.conflicts, found.hits, found.misses, found.hit_rate) == (1, 5, {"absent": 5}, 0.5)
    site.clock.advance(HOUR + 1)
    held = service.ask("stats").held
    assert (held.live, held.expired) == (0, 5)


def wait_until(condition: Callable[[], Any]) -> None:
    """What must come sooner or later."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- S1.33: versions -----------------------------------------------------------------------------------------------

VERSIONS = {"1.0": "d3bac5b858dea62d"}
"""Each version of the protocol, and the hash of the keys that it takes and of how it refuses."""


def protocol_hash() -> str:
    """What clients meet, as one number: change a pattern, a status or a code, and it is another."""
    keys = [(each.name, each.keys.pattern, each.bare.pattern, each.parameters) for each in DIALECTS.values()]
    refusals = [
        (each.name, reason, each.statuses.get(reason, refusal.status), refusal.code, refusal.retryable)
        for each in DIALECTS.values()
        for reason, refusal in sorted(REFUSALS.items())
    ]
    return hashlib.sha256(repr((keys, refusals)).encode()).hexdigest()[:16]


def test_s1_33_a_change_of_keys_or_refusals_needs_a_new_version() -> None:
    assert protocol_hash() == VERSIONS[PROTOCOL_VERSION], "clients meet something else: give the protocol a new version"


async def schema_of(app: App) -> Any:
    """The OpenAPI schema that a service of this app has."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(asgi(app)), base_url="http://127.0.0.1") as client:
        answer = await client.get("/schema/openapi.json")
    await app.aio.close()
    return answer.json()


def test_s1_33_the_version_is_named_in_the_documentation_and_in_the_schema(tmp_path: Path) -> None:
    docs = Path(__file__).parents[2] / "docs"
    for page in ("http.md", "api.md"):
        assert f"version {PROTOCOL_VERSION} of the protocol" in (docs / page).read_text()
    posted = asyncio.run(schema_of(App(f"sqlite:///{tmp_path / 'semel.db'}")))["paths"]["/runs"]["post"]
    described = [each["description"] for each in posted["parameters"] if each["name"] == "Idempotency-Key"]
    assert [f"Version {PROTOCOL_VERSION} of the protocol" in each for each in described] == [True]
