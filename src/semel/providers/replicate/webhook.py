"""Receives Replicate's webhooks: a prediction has started, or has ended.

The sender has no token of ours. A webhook is accepted if its signature over the body is valid, it is recent, and it was
not received before. It only wakes up the run: the outcome of the prediction is read from Replicate's API.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import time
from typing import Annotated, Any, Literal

import msgspec
from litestar import Request, post
from litestar.params import FromPath
from msgspec import Struct

from semel import typed_json
from semel.providers.replicate import Replicate
from semel.providers.replicate import store as rows
from semel.providers.replicate.service import HOOK, ReplicateService
from semel.service.api.problems import ApiError
from semel.service.api.responses import refusals
from semel.service.state import CurrentState

RECENT = 300.0
"""Seconds by which a webhook's time may differ from ours."""
REMEMBERED = 86400.0
"""Seconds for which a webhook's id is remembered, to ignore repeats."""
SCOPE = "semel.replicate.webhook"


class Received(Struct, frozen=True):
    """What became of a webhook: ``heard``, or ``ignored`` because it came before, or is about nothing of ours."""

    status: Literal["heard", "ignored"]


class WebhookBody(Struct, frozen=True, kw_only=True):
    """The fields of a webhook that are read."""

    id: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,100}$")]
    status: str = "starting"


def signed(secret: str, webhook_id: str, timestamp: str, body: bytes) -> str:
    """The signature of a webhook, as in the header ``webhook-signature``."""
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not key:
        raise ApiError(503, "WEBHOOK_SECRET_UNUSABLE", "SEMEL_REPLICATE_WEBHOOK_SECRET must have the form whsec_…")
    content = f"{webhook_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key, content, "sha256")).decode()


def is_genuine(secret: str, headers: dict[str, str], body: bytes, now: float) -> bool:
    """Whether Replicate sent it recently. Every signature is compared, in constant time."""
    webhook_id, timestamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not webhook_id or len(webhook_id) > 200 or not timestamp.isascii() or not timestamp.isdigit():
        return False
    if len(timestamp) > 15 or abs(now - int(timestamp)) > RECENT:
        return False
    right = signed(secret, webhook_id, timestamp, body).encode()
    sent = headers.get("webhook-signature", "").encode("utf-8", "replace").split(b" ")[:20]
    return any([hmac.compare_digest(each, right) for each in sent])  # noqa: C419 -- all of them, not up to the first


@post(
    HOOK + "{token:str}",
    status_code=200,
    tags=["jobs"],
    operation_id="hearFromReplicate",
    summary="Receive a webhook from Replicate",
    responses=refusals(400, 404, body=True),
    security=[{}],
)
async def receive_webhook(token: FromPath[str], service: CurrentState, request: Request[Any, Any, Any]) -> Received:
    """Receive a webhook from Replicate, signed with the account's secret."""
    provider, secret = service.providers.get("replicate"), service.settings.replicate_webhook_secret
    replicate = provider.service if isinstance(provider, Replicate) else None
    if replicate is None or not secret or not replicate.webhooks:
        raise ApiError(404, "NOT_FOUND", "this server does not accept webhooks from Replicate")
    body = await request.body()
    headers = {name: value for name, value in request.headers.items() if name.startswith("webhook-")}
    if not is_genuine(secret, headers, body, time.time()):
        raise ApiError(403, "FORBIDDEN", "the webhook's signature or timestamp is not valid")
    try:
        sent = typed_json.decode(body, WebhookBody)
    except msgspec.MsgspecError:
        raise ApiError(400, "INVALID_REQUEST", "the webhook's body is not a prediction") from None
    if await replicate.seen.check_and_mark(SCOPE, headers["webhook-id"], ttl=REMEMBERED) == "seen":
        return Received("ignored")
    return await _accept(replicate, token, sent)


async def _accept(replicate: ReplicateService, token: str, body: WebhookBody) -> Received:
    """The signed body names the token's prediction, so it is found even if the response to its creation was lost."""
    store = replicate.store
    known = await store.read(rows.find_by_token, token, store.statement_context)
    if known is None or body.id in known.past:
        return Received("ignored")
    if known.id is None:
        try:
            await store.write(rows.record, token, body.id, "starting", store.statement_context)
        except rows.AlreadyClaimed:
            return Received("ignored")
    elif known.id != body.id:
        replicate.spawn(replicate.cancel_duplicate(body.id, known.run_id))
        return Received("heard")
    replicate.notify(token, await store.write(rows.mark_heard, token, store.statement_context))
    return Received("heard")


HANDLERS: tuple[Any, ...] = (receive_webhook,)
