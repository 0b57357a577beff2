"""S2.57 as the users of a server have it: `semel serve` in processes of its own, a webhook and a stream."""

from pathlib import Path

import httpx
import pytest
import redis as redis_client

from semel.cli import main as semel_command
from support.serve_command import ServeProcess as Serving
from support.waiting import eventually as until
from support.webhooks import Received, Receiver, receiving


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_s2_57_run_completed_is_told_to_a_webhook_and_a_stream_after_the_run_is_over(
    kind: str, request: pytest.FixtureRequest, redis_url: str, tmp_path: Path
) -> None:
    """Whoever is told finds the run over; and what was told comes under one id in both places."""
    url: str = request.getfixturevalue(f"{kind}_url")
    if kind == "postgres":
        assert semel_command(["migrate", url]) == 0
    more = {"SEMEL_EVENTS": redis_url, "SEMEL_PRIVATE_WEBHOOKS": "true"}
    found: list[str] = []
    with (
        receiving() as receiver,
        Serving(tmp_path, "support.apps.serve_app:app", "--db", url, "--processes", "2", **more) as serving,
        serving.client() as client,
    ):

        def look(received: Received) -> None:
            found.append(httpx.get(f"{serving.address}/runs/{received.event['run_id']}", timeout=60).json()["status"])

        receiver.on_receipt = look
        asked = {"url": receiver.url, "events": ["RunCompleted"]}
        secret = client.post("/admin/subscriptions", json=asked).json()["secret"]
        run = serving.submit("add", {"a": 1, "b": 2})
        (told,) = receiver.wait_for(1)
        until(lambda: _streamed(redis_url, run["run_id"])[-1:] == ["RunCompleted"], "it is in the stream")
        until(lambda: client.get("/admin/deliveries?state=delivered").json()["deliveries"], "it is noted")
    assert told.is_signed_with(secret)
    assert (told.event["name"], told.event["status"], told.event["run_id"]) == (
        "RunCompleted",
        "SUCCEEDED",
        run["run_id"],
    )
    assert (told.id, found) == (f"{run['run_id']}/3", ["SUCCEEDED"])
    assert _streamed(redis_url, run["run_id"]) == ["RunCreated", "RunStarted", "RunCompleted"]
    _once(receiver)


def _streamed(redis_url: str, run_id: str) -> list[str]:
    with redis_client.Redis.from_url(redis_url, decode_responses=True) as redis:
        entries = [fields for _, fields in redis.xrange("semel:events")]  # type: ignore[union-attr, misc]
    return [each["name"] for each in entries if each["id"].startswith(run_id)]


def _once(receiver: Receiver) -> None:
    assert len(receiver.received) == 1, "two processes, and one of them told it"
