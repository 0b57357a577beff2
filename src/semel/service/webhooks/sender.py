"""Webhooks: an event as a signed POST, as Standard Webhooks (standardwebhooks.com) specifies.

``webhook-id`` is the event's, the same at every attempt; ``webhook-signature`` is ``v1,`` and the base64 of the
HMAC-SHA256 of ``id.timestamp.body`` with the subscription's secret.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import time
from contextlib import suppress
from functools import cache
from ssl import SSLContext
from types import TracebackType
from typing import Self

import httpx

from semel.service.api.problems import ApiError
from semel.service.webhooks.deliveries import TIMEOUT, SendResult
from semel.service.webhooks.egress import addresses_of, host_of, target_of
from semel.service.webhooks.subscriptions import Subscription, key_of

MAX_READ = 4096
"""Bytes of the response that are read, for the connection to be reused; only the status matters."""
DRAIN_TIMEOUT = 1.0


def signature(secret: str, event_id: str, timestamp: int, body: bytes) -> str:
    """The value of ``webhook-signature``."""
    signed = b"%s.%d.%s" % (event_id.encode(), timestamp, body)
    return "v1," + base64.b64encode(hmac.digest(key_of(secret), signed, "sha256")).decode()


class WebhookSender:
    """Sends to one receiver, and reuses its connections."""

    def __init__(self, subscription: Subscription, *, private: bool) -> None:
        self._subscription = subscription
        self._private = private
        # No proxy of the environment: the connection goes to the address that was checked.
        self._client = httpx.AsyncClient(verify=_trust(), trust_env=False, follow_redirects=False, timeout=TIMEOUT)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def send(self, event_id: str, body: str) -> SendResult:
        """Send once; an error is returned as a result, never raised."""
        try:
            async with asyncio.timeout(TIMEOUT):
                return await self._send(event_id, body.encode())
        except TimeoutError:
            return SendResult(None, f"no answer within {TIMEOUT:g} seconds")
        except ApiError as error:
            return SendResult(None, f"refused: {error}")
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError, ValueError) as error:
            return SendResult(None, f"{type(error).__name__}: {error}"[:500])

    async def _send(self, event_id: str, body: bytes) -> SendResult:
        target = target_of(self._subscription.target)
        addresses = await addresses_of(target, private=self._private)
        for address in addresses[:-1]:
            with suppress(httpx.ConnectError, httpx.ConnectTimeout):
                return await self._post(target, address, event_id, body)
        return await self._post(target, addresses[-1], event_id, body)

    async def _post(self, target: httpx.URL, address: str, event_id: str, body: bytes) -> SendResult:
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
        with suppress(httpx.HTTPError, httpx.StreamError, TimeoutError):  # the status is known
            try:
                async with asyncio.timeout(DRAIN_TIMEOUT):
                    await _drain(response)
            finally:
                await response.aclose()
        status = response.status_code
        return SendResult(status, None if 200 <= status < 300 else f"answered {status}")


async def _drain(response: httpx.Response) -> None:
    read = 0
    async for part in response.aiter_raw():
        read += len(part)
        if read > MAX_READ:
            return


@cache
def _trust() -> SSLContext:
    return httpx.create_ssl_context()
