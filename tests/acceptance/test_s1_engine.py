"""S1, POST idempotency, as far as the engine goes: the request's hash, the life of a key, its time, the collector."""

import hashlib
import logging
from datetime import timedelta

import pytest

from acceptance.pace import paced
from acceptance.spaces import Space
from semel import Granted, InFlight, InProgress, KeyReused, Mismatch, Once, Policy, Replay

HOUR = 3600
SCOPE = "POST /api/v1/items"
BODY = b'{"sku": "ITEM-001", "title": "Sample Item"}'
OTHER_BODY = b'{"sku": "ITEM-002", "title": "Different Item"}'
CREATED = {"status": 201, "headers": [["Content-Type", "application/json"]], "body": b'{"id": 1, "sku": "ITEM-001"}'}


def request_hash(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


@pytest.fixture
def intake(space: Space) -> Once:
    """The keys of the Data Intake Service on each of the four stores, to the letter: processing lasts for an hour, too.

    (By default the lease is a minute, and renewed while the handler runs.)
    """
    return space.open(policy=Policy.intake().but(lease=HOUR))


def begin(intake: Once, key: str = "new-key-123", body: bytes = BODY) -> Granted:
    """The first request with this key."""
    verdict = intake.claim(key, scope=SCOPE, fingerprint=request_hash(body))
    assert isinstance(verdict, Granted)
    return verdict


def test_s1_6_the_request_hash_is_the_sha_256_of_the_body(intake: Once) -> None:
    intake.complete(begin(intake).claim, CREATED)
    record = intake.get("new-key-123", scope=SCOPE)
    assert record is not None
    assert record.fingerprint == "1c3d574b4624cfb63a3a6f327ab054e9f374fa8df090594da0ba9e94c1bdc39c"
    assert isinstance(intake.claim("new-key-123", scope=SCOPE, fingerprint=request_hash(BODY)), Replay)
    for body in (OTHER_BODY, BODY + b"\n", b""):
        assert isinstance(intake.claim("new-key-123", scope=SCOPE, fingerprint=request_hash(body)), Mismatch)


def test_s1_7_a_new_key_is_processing(intake: Once) -> None:
    claim = begin(intake).claim
    record = intake.get("new-key-123", scope=SCOPE)
    assert record is not None
    assert (record.status, record.outcome) == ("in_flight", None)
    verdict = intake.claim("new-key-123", scope=SCOPE, fingerprint=request_hash(BODY))
    assert isinstance(verdict, InFlight)
    assert 0 < verdict.retry_after <= HOUR
    with pytest.raises(InProgress):
        intake.call("new-key-123", lambda: pytest.fail("run twice"), scope=SCOPE, fingerprint=request_hash(BODY))
    intake.release(claim)


def test_s1_8_success_completes_the_key_with_the_response(intake: Once) -> None:
    intake.complete(begin(intake).claim, CREATED)
    record = intake.get("new-key-123", scope=SCOPE)
    assert record is not None
    assert record.status == "completed"
    for _ in range(3):
        verdict = intake.claim("new-key-123", scope=SCOPE, fingerprint=request_hash(BODY))
        assert isinstance(verdict, Replay)
        assert verdict.outcome.value == CREATED
    assert isinstance(intake.claim("new-key-123", scope=SCOPE, fingerprint=request_hash(OTHER_BODY)), Mismatch)


def test_s1_9_an_error_deletes_the_record(intake: Once) -> None:
    def fail() -> None:
        raise ConnectionError("the warehouse does not answer")

    with pytest.raises(ConnectionError):
        intake.call("new-key-123", fail, scope=SCOPE, fingerprint=request_hash(BODY))
    assert intake.get("new-key-123", scope=SCOPE) is None
    again = intake.call("new-key-123", lambda: CREATED, scope=SCOPE, fingerprint=request_hash(OTHER_BODY))
    assert (again.value, again.replayed) == (CREATED, False)
    with pytest.raises(KeyReused):
        intake.call("new-key-123", lambda: CREATED, scope=SCOPE, fingerprint=request_hash(BODY))


def test_s1_10_an_expired_key_is_deleted_and_allows_a_new_request(intake: Once, space: Space) -> None:
    intake.complete(begin(intake).claim, CREATED)
    space.clock.advance(HOUR)
    assert isinstance(intake.claim("new-key-123", scope=SCOPE, fingerprint=request_hash(BODY)), Replay)
    space.clock.advance(0.000001)
    assert intake.get("new-key-123", scope=SCOPE) is None
    new = begin(intake, body=OTHER_BODY)
    assert new.reason == "expired"
    record = intake.get("new-key-123", scope=SCOPE)
    assert record is not None
    assert (record.status, record.fingerprint) == ("in_flight", request_hash(OTHER_BODY))


def test_s1_15_the_ttl_is_an_hour(intake: Once) -> None:
    assert (Policy.intake().ttl, Policy.intake().lease) == (3600, 60)
    claim = begin(intake).claim
    record = intake.get("new-key-123", scope=SCOPE)
    assert record is not None
    assert record.expires_at - record.created_at == timedelta(hours=1)
    assert claim.lease_until == claim.expires_at, "processing lasts as long: nobody else starts within the hour"


def test_s1_16_the_ttl_is_a_parameter(space: Space) -> None:
    intake = space.open(policy=Policy.intake(ttl=120))
    intake.complete(begin(intake).claim, CREATED)
    begin(intake, "abandoned")
    space.clock.advance(120)
    assert isinstance(intake.claim("new-key-123", scope=SCOPE, fingerprint=request_hash(BODY)), Replay)
    space.clock.advance(1)
    assert begin(intake).reason == "expired"
    assert begin(intake, "abandoned").reason == "expired"


def test_s1_17_expires_at_is_created_at_plus_ttl_and_repeats_do_not_extend_it(intake: Once, space: Space) -> None:
    claim = begin(intake).claim
    space.clock.advance(600)
    assert isinstance(intake.claim("new-key-123", scope=SCOPE, fingerprint=request_hash(BODY)), InFlight)
    intake.complete(claim, CREATED)
    for minutes in (10, 20, 9):
        space.clock.advance(minutes * 60)
        assert isinstance(intake.claim("new-key-123", scope=SCOPE, fingerprint=request_hash(BODY)), Replay)
        record = intake.get("new-key-123", scope=SCOPE)
        assert record is not None
        assert record.expires_at == record.created_at + timedelta(hours=1) == claim.expires_at
    space.clock.advance(12 * 60)
    assert begin(intake).reason == "expired"


def test_s1_18_expired_keys_are_deleted_every_ten_minutes_and_their_number_is_logged(
    space: Space, caplog: pytest.LogCaptureFixture
) -> None:
    """The collector sleeps ten minutes, give or take a tenth. A Redis server drops keys by itself: purge by hand."""
    assert Policy.intake().collect_interval == 600
    caplog.set_level(logging.DEBUG, "semel")
    intake, pace = paced(space, policy=Policy.intake())
    for number in range(5):
        intake.complete(begin(intake, f"key-{number}").claim, CREATED)
    space.clock.advance(HOUR + 1)
    intake.complete(begin(intake, "young").claim, CREATED)
    if space.kind == "redis":
        assert intake.purge() == 5
    else:
        assert pace.pause() == pytest.approx(600, rel=0.1)
        pace.wake()
        assert pace.pause() == pytest.approx(600, rel=0.1)
    assert [record.purged for record in caplog.records if hasattr(record, "purged")] == [5]
    assert "5" in next(record.getMessage() for record in caplog.records if hasattr(record, "purged"))
    assert {record.levelname for record in caplog.records if hasattr(record, "purged")} == {"INFO"}
    stats = intake.stats()
    assert (stats.held.completed, stats.held.expired, stats.purged) == (1, 0, 5)


def test_s1_19_a_live_record_in_progress_is_never_collected(intake: Once, space: Space) -> None:
    claim = begin(intake, "slow").claim
    intake.complete(begin(intake, "quick").claim, CREATED)
    space.clock.advance(HOUR - 1)
    claim = intake.renew(claim)
    space.clock.advance(HOUR - 1)
    assert intake.purge() == 1, "the completed one; the one in progress is past its TTL as well, but alive"
    verdict = intake.claim("slow", scope=SCOPE, fingerprint=request_hash(BODY))
    assert isinstance(verdict, InFlight)
    intake.complete(claim, CREATED)
    space.clock.advance(HOUR)
    assert intake.purge() == 0, "done after its TTL had ended, so it is kept for a TTL from then"
    space.clock.advance(1)
    assert intake.purge() == 1
