"""Webhooks: an event as a signed POST, by the rules of Standard Webhooks (standardwebhooks.com).

``webhook-id`` is the event's and the same at every try; ``webhook-signature`` is ``v1,`` and the base64 of the
HMAC-SHA256 of ``id.timestamp.body`` with the subscription's secret.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from ssl import SSLContext
from types import TracebackType
from typing import Self

import httpx

from semel.service.api.problems import ApiError
from semel.service.webhooks.deliveries import TIMEOUT, Answered
from semel.service.webhooks.egress import addresses_of, host_of, target_of
from semel.service.webhooks.subscriptions import Subscription, key_of

MOST_READ = 4096
"""Bytes that are read of an answer; only its status matters."""
DRAINED_FOR = 1.0
"""Seconds for which they are waited for."""


def signature(secret: str, event_id: str, timestamp: int, body: bytes) -> str:
    """What ``webhook-signature`` says."""
    signed = b"%s.%d.%s" % (event_id.encode(), timestamp, body)
    return "v1," + base64.b64encode(hmac.digest(key_of(secret), signed, "sha256")).decode()


class WebhookSender:
    """Sends to one receiver; connections are kept while it is open."""

    def __init__(self, subscription: Subscription, *, private: bool) -> None:
        self._subscription = subscription
        self._private = private
        # No proxy of the environment: the address that was judged is the one that is connected to.
        self._client = httpx.AsyncClient(verify=_trust(), trust_env=False, follow_redirects=False, timeout=TIMEOUT)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def send(self, event_id: str, body: str) -> Answered:
        """Try once. Whatever goes wrong is an answer, not an error."""
        try:
            async with asyncio.timeout(TIMEOUT):
                return await self._send(event_id, body.encode())
        except TimeoutError:
            return Answered(None, f"no answer within {TIMEOUT:g} seconds")
        except ApiError as error:
            return Answered(None, f"refused: {error}")
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError, ValueError) as error:
            return Answered(None, f"{type(error).__name__}: {error}"[:500])

    async def _send(self, event_id: str, body: bytes) -> Answered:
        target = target_of(self._subscription.target)
        addresses = await addresses_of(target, private=self._private)
        for last, address in _with_last(addresses):
            try:
                return await self._post(target, address, event_id, body)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if last:
                    raise
        raise AssertionError("unreachable")

    async def _post(self, target: httpx.URL, address: str, event_id: str, body: bytes) -> Answered:
        now = int(time.time())
        headers = {
            "host": target.netloc.decode(),
            "content-type": "application/json",
            "accept-encoding": "identity",
            "user-agent": "semel",
            "webhook-id": event_id,
            "webhook-timestamp": str(now),
            "webhook-signature": signature(self._subscription.secret or "", event_id, now, body),
        }
        request = self._client.build_request(
            "POST",
            target.copy_with(host=address, fragment=None),
            content=body,
            headers=headers,
            extensions={"sni_hostname": host_of(target)},
        )
        response = await self._client.send(request, stream=True)
        with suppress(httpx.HTTPError, httpx.StreamError, TimeoutError):  # the status has said it all
            try:
                async with asyncio.timeout(DRAINED_FOR):
                    await _drain(response)
            finally:
                await response.aclose()
        status = response.status_code
        return Answered(status, None if 200 <= status < 300 else f"answered {status}")


async def _drain(response: httpx.Response) -> None:
    """Read so much that a small answer is complete, and its connection can be used again."""
    read = 0
    async for part in response.aiter_raw():
        read += len(part)
        if read > MOST_READ:
            return


def _with_last(addresses: Sequence[str]) -> list[tuple[bool, str]]:
    return [(place == len(addresses), address) for place, address in enumerate(addresses, 1)]


@cache
def _trust() -> SSLContext:
    return httpx.create_ssl_context()
