"""B20: without a tenant, the same key with other credentials is refused: nothing is shown, nothing runs twice."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest

from acceptance.exchanges import DOORS, ITEMS, Answer, Asked, Doorway, Intake, Service, SlowIntake, doorway
from acceptance.spaces import Space
from semel import InvalidRequest

KEY = "order-1"
ITEM = {"sku": "ITEM-001", "title": "Sample Item"}
OTHER = {"sku": "ITEM-002", "title": "Different Item"}
CONFLICT = {"intake": 409, "ietf": 422, "stripe": 400}
ANN, BOB = [("Authorization", "Bearer ann")], [("Authorization", "Bearer bob")]
Headers = Sequence[tuple[str, str | bytes]]


@pytest.fixture(params=DOORS)
def site(request: pytest.FixtureRequest, shared_space: Space) -> Iterator[Doorway]:
    """Each door over each store that processes share."""
    with doorway(request.param, shared_space) as site:
        yield site


@pytest.fixture(params=DOORS)
def entrance(request: pytest.FixtureRequest, space_of: Callable[[str], Space]) -> Iterator[Doorway]:
    """Each door over SQLite, for what is the same whatever the store."""
    with doorway(request.param, space_of("sqlite")) as entrance:
        yield entrance


def is_replay(response: httpx.Response) -> bool:
    return response.headers.get("idempotent-replayed") == "true"


@pytest.mark.parametrize("policy", CONFLICT)
def test_b20_the_same_key_with_other_credentials_is_refused(site: Doorway, policy: Any) -> None:
    """In the words of any other conflict: whoever tries out bodies does not learn which was the right one."""
    intake = Intake()
    service = site.serve(intake, policy=policy)
    mine = service.post(ITEM, key=KEY, headers=ANN)
    assert (mine.status_code, is_replay(mine)) == (201, False)
    words = service.post(OTHER, key=KEY, headers=ANN).content
    others: list[Headers] = [BOB, [], [("Authorization", "")], [*ANN, *BOB], [("Authorization", "Basic ann")]]
    for headers in others:
        refused = service.post(ITEM, key=KEY, headers=headers)
        assert (refused.status_code, refused.content) == (CONFLICT[policy], words), headers
        assert not is_replay(refused)
        assert "location" not in refused.headers
    again = service.post(ITEM, key=KEY, headers=ANN)
    assert (again.content, is_replay(again)) == (mine.content, True)
    assert intake.items == [ITEM]


def test_b20_credentials_do_not_help_with_the_key_of_someone_who_had_none(site: Doorway) -> None:
    intake = Intake()
    service = site.serve(intake)
    assert service.post(ITEM, key=KEY).status_code == 201
    assert service.post(ITEM, key=KEY, headers=ANN).status_code == 409
    assert is_replay(service.post(ITEM, key=KEY))
    record = site.record(KEY)
    assert record is not None
    assert len(record.fingerprint) == 66, "without credentials it is the body's hash"
    assert intake.items == [ITEM]


def test_b20_a_request_under_way_is_refused_to_others_and_taken_over_by_none_of_them(site: Doorway) -> None:
    slow = SlowIntake()
    service = site.serve(slow)
    with service.under_way(slow, ITEM, key=KEY, headers=ANN):
        codes = [service.post(ITEM, key=KEY, headers=who).json()["error_code"] for who in (ANN, BOB)]
        assert codes == ["IDEMPOTENCY_KEY_PROCESSING", "IDEMPOTENCY_KEY_CONFLICT"]
        site.clock.advance(60)
        assert service.post(ITEM, key=KEY, headers=BOB).status_code == 409, "its lease is over, and its owner is not"
        assert service.post(ITEM, key=KEY, headers=ANN).status_code == 201
    assert len(slow.items) == 2


def test_b20_no_credentials_are_stored_and_no_two_keys_show_the_same(site: Doorway) -> None:
    service = site.serve(Intake())
    prints = set()
    for key in ("one", "two"):
        service.post(ITEM, key=key, headers=ANN)
        record = site.record(key)
        assert record is not None
        _, _, mark = record.fingerprint.partition("+")
        prints.add(mark)
        assert len(mark) == 32
        assert hashlib.sha256(b"Bearer ann").hexdigest()[:32] != mark
        assert b"ann" not in (record.data or b"")
    assert len(prints) == 2


@pytest.mark.parametrize("fingerprint", ["json", lambda context, body: "the same", lambda context, body: ""])
def test_b20_credentials_count_however_requests_are_compared(entrance: Doorway, fingerprint: Any) -> None:
    intake = Intake()
    service = entrance.serve(intake, fingerprint=fingerprint)
    assert service.post(ITEM, key=KEY, headers=ANN).status_code == 201
    assert service.post(ITEM, key=KEY, headers=BOB).status_code == 409
    assert is_replay(service.post(ITEM, key=KEY, headers=ANN))
    assert intake.items == [ITEM]


@pytest.mark.parametrize(
    ("credentials", "same", "other"),
    [
        ("X-Api-Key", [("x-api-key", "1"), *ANN], [("X-Api-Key", "2"), *ANN]),
        ("X-Api-Key", [("x-api-key", "1"), *ANN], []),
        ("cookie:session", [("Cookie", "theme=dark; session=1")], [("Cookie", "theme=dark; session=2")]),
        ("cookie:session", [("Cookie", "session=1")], [("Cookie", "Session=1")]),
        (["Authorization", "cookie:session"], [*ANN, ("Cookie", "session=1")], [*ANN, ("Cookie", "session=2")]),
        (["Authorization", "cookie:session"], [*ANN, ("Cookie", "session=1")], [*BOB, ("Cookie", "session=1")]),
    ],
)
def test_b20_what_counts_as_credentials_is_a_choice(
    entrance: Doorway, credentials: Any, same: Headers, other: Headers
) -> None:
    intake = Intake()
    service = entrance.serve(intake, credentials=credentials)
    assert service.post(ITEM, key=KEY, headers=same).status_code == 201
    assert service.post(ITEM, key=KEY, headers=other).status_code == 409
    cookies = [(name, f"visits=7; {value!s}" if name == "Cookie" else value) for name, value in same]
    harmless: Headers = [("User-Agent", "another"), *cookies, ("X-Trace", "2")]
    assert is_replay(service.post(ITEM, key=KEY, headers=harmless))
    assert intake.items == [ITEM]


def test_b20_credentials_that_change_between_retries_can_be_left_out(entrance: Doorway) -> None:
    intake = Intake()
    service = entrance.serve(intake, credentials=None)
    service.post(ITEM, key=KEY, headers=ANN)
    assert all(is_replay(service.post(ITEM, key=KEY, headers=who)) for who in (BOB, ()))
    assert intake.items == [ITEM]


def customer(context: Any) -> str | None:
    """Of a token ``Bearer customer.number``, the customer."""
    headers = dict(context["headers"]) if "headers" in context else {}
    token = context.get("HTTP_AUTHORIZATION") or headers.get(b"authorization", b"").decode()
    return str(token).removeprefix("Bearer ").partition(".")[0] if "." in token else None


def test_b20_where_there_is_a_tenant_the_tenant_decides(site: Doorway) -> None:
    """A new token of the same customer is the same caller; whoever has no tenant is known by the credentials."""
    intake = Intake()
    service = site.serve(intake, tenant=customer)

    def post(token: str) -> httpx.Response:
        return service.post(ITEM, key=KEY, headers=[("Authorization", f"Bearer {token}")])

    assert post("acme.1").status_code == 201
    assert is_replay(post("acme.2"))
    assert not is_replay(post("other.1")), "keys of its own"
    assert post("nobody").status_code == 201
    assert is_replay(post("nobody"))
    assert post("nobody-else").status_code == 409
    assert len(intake.items) == 3


def test_b20_a_tenant_and_credentials_can_both_be_asked_for(entrance: Doorway) -> None:
    intake = Intake()
    service = entrance.serve(intake, tenant=customer, credentials="Authorization")
    codes = [
        service.post(ITEM, key=KEY, headers=[("Authorization", f"Bearer {token}")]).status_code
        for token in ("acme.1", "acme.1", "acme.2", "other.1")
    ]
    assert codes == [201, 201, 409, 201]
    assert len(intake.items) == 2


def test_b20_a_tenant_without_a_name_is_refused(entrance: Doorway) -> None:
    intake = Intake()
    service = entrance.serve(intake, tenant=lambda context: "")
    with pytest.raises(InvalidRequest, match=r"tenant= returned an empty text, .* return None"):
        service.post(ITEM, key=KEY)
    assert intake.items == []
    assert service.post(ITEM).status_code == 201, "without a key nobody is asked"


def test_b20_the_state_of_a_key_is_told_to_its_own_caller_only(entrance: Doorway) -> None:
    service = entrance.serve(Intake(), status_path="/keys")
    service.post(ITEM, key=KEY, headers=ANN)
    service.post(ITEM, key="public")
    url = f"/keys/POST{ITEMS}?key="

    def status(key: str, who: Headers) -> str:
        return str(service.request("GET", url + key, headers=who).json()["status"])

    assert [status(KEY, who) for who in (ANN, BOB, ())] == ["completed", "absent", "absent"]
    assert [status("public", who) for who in (ANN, ())] == ["completed", "completed"]


def test_b20_the_log_says_why_and_nothing_else(entrance: Doorway, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "semel")
    service = entrance.serve(Intake())
    service.post(ITEM, key=KEY, headers=ANN)
    service.post(OTHER, key=KEY, headers=ANN)
    assert "credentials" not in caplog.text
    service.post(ITEM, key=KEY, headers=BOB)
    assert "the key 'order-1' was first used with other credentials (see the option credentials=)" in caplog.text
    assert "Bearer" not in caplog.text


def test_b20_both_doors_see_the_same_credentials(space_of: Callable[[str], Space]) -> None:
    """A key that came in by one middleware is the same at the other, whatever the server makes of headers."""
    space = space_of("sqlite")
    handled: list[bytes] = []

    def handler(asked: Asked) -> Answer:
        handled.append(asked.body)
        return Answer(201, {"id": len(handled)})

    with doorway("asgi", space) as first, doorway("wsgi", space) as second:
        services: list[Service] = [
            door.serve(handler, credentials=["Authorization", "X-Key", "cookie:a"]) for door in (first, second)
        ]
        headers = [*ANN, ("X-Key", "1"), ("X-Key", "2"), ("Cookie", "b=1; a=2"), ("Authorization", " Basic x")]
        for key in ("one", "two"):
            answers = [service.post(ITEM, key=key, headers=headers) for service in services]
            assert [is_replay(answer) for answer in answers] == [False, True]
            services.reverse()
    assert len(handled) == 2
