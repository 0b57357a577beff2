"""The dispatcher delivers events to subscriptions. Every process of a server has one.

Each subscription is delivered by a task of its own: a slow or dead receiver delays no other. The events of one run are
sent in order, those of several runs concurrently.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec

from semel._concurrency.periodic import repeat
from semel._concurrency.retry import Backoff, jittered
from semel.errors import MissingExtra, SemelError, StoreUnavailable
from semel.runs.store.quotas import read_clock
from semel.runs.types import new_id
from semel.service.webhooks import deliveries, subscriptions
from semel.service.webhooks.deliveries import Delivery, DeliveryResult, Ping, SendResult
from semel.service.webhooks.subscriptions import STREAM, Subscription
from semel.types import moment

if TYPE_CHECKING:
    from semel.service.settings import Settings
    from semel.service.state import ServiceState
    from semel.service.webhooks.redis_stream import RedisStream
    from semel.service.webhooks.sender import WebhookSender

POLL, IDLE_POLL = 0.5, 2.0
"""Seconds between two polls for events, with and without subscriptions."""
AT_ONCE = 16
"""Concurrent requests to one webhook."""
STREAM_BATCH = 200
LEASE = 10.0
"""Seconds after which another server takes over the deliveries of a dead one."""
RENEW_EVERY = LEASE / 4
DELAYS = (5.0, 30.0, 120.0, 600.0, 3600.0, 21600.0, 86400.0)
"""Seconds between the attempts of a delivery; after the last of them it is dead."""
GONE = 410
"""The status with which a receiver ends its subscription."""
STREAM_BACKOFF = Backoff(2.0, 60.0)
GRACE = 2.0
"""Seconds for deliveries in progress to finish when the server stops."""
TIDY_EVERY = 3600.0
CLOCK_TOLERANCE = 1.0
"""Seconds by which the database's clock may fall behind ours between two polls; more is a step back."""

_log = logging.getLogger("semel.service")


class WebhookDispatcher:
    """Delivers events while the server is up."""

    def __init__(self, service: ServiceState) -> None:
        self._service = service
        self._store = service.store
        self._stream: RedisStream | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._deliveries: dict[str, asyncio.Task[None]] = {}
        self._held: dict[tuple[str, str], Delivery] = {}
        self._stream_paused_until = 0.0
        self._tidied = 0.0
        self._elapsed = -math.inf
        self._closing = False

    async def open(self) -> None:
        """Start."""
        self._closing = False
        self._stream = open_stream(self._service.settings)
        await self._store.write(subscriptions.keep_stream, self._stream is not None, self._store.statement_context)
        self._tasks = [
            asyncio.create_task(repeat(self._dispatch, "the dispatch of events", IDLE_POLL)),
            asyncio.create_task(repeat(self._renew, "the renewal of deliveries", RENEW_EVERY)),
        ]

    async def close(self) -> None:
        """Stop: deliveries in progress get a moment to finish, the others are given back."""
        self._closing = True
        await _finish(list(self._deliveries.values()), GRACE)
        await _finish(self._tasks, 0.0)
        try:
            if self._held:
                await self._store.write(deliveries.give_back, list(self._held.values()), self._store.statement_context)
        except SemelError as error:
            _log.warning("deliveries could not be released and will be retried later: %s", error)
        self._held.clear()
        if self._stream is not None:
            await self._stream.close()

    async def _dispatch(self) -> float:
        pending = await self._store.read(deliveries.read_pending, self._store.statement_context)
        if self._clock_went_back(pending.now_us):
            await self._store.write(deliveries.shorten_waits, self._store.statement_context)
            pending = await self._store.read(deliveries.read_pending, self._store.statement_context)
        if pending.events:
            while await self._store.write(deliveries.fan_out, self._store.statement_context):
                pass
            pending = await self._store.read(deliveries.read_pending, self._store.statement_context)
        for each in pending.due:
            self._start(each)
        if time.monotonic() - self._tidied > TIDY_EVERY:
            self._tidied = time.monotonic()
            while await self._store.write(deliveries.tidy, self._store.statement_context):
                pass
        return POLL if pending.subscribed else IDLE_POLL

    def _clock_went_back(self, now_us: int) -> bool:
        """Whether the database's clock was set back since the last poll, compared to our monotonic one."""
        elapsed = time.monotonic() - now_us / 1e6
        went_back = elapsed > self._elapsed + CLOCK_TOLERANCE
        self._elapsed = elapsed
        return went_back

    def _start(self, subscription: Subscription) -> None:
        """Deliver what is due for the subscription, unless that is in progress."""
        if subscription.id not in self._deliveries and not self._closing:
            task = self._deliveries[subscription.id] = asyncio.create_task(self._deliver(subscription))
            task.add_done_callback(lambda _: self._deliveries.pop(subscription.id, None))

    async def _deliver(self, subscription: Subscription) -> None:
        try:
            if subscription.kind == "webhook":
                await self._post_all(subscription)
            else:
                await self._add_all(subscription)
        except StoreUnavailable:
            pass  # the store has logged it
        except Exception:  # noqa: BLE001 -- whatever it is, the next try may succeed
            _log.exception("events for %s could not be sent and will be retried", subscription.id)

    async def _lease(self, subscription: Subscription, most: int) -> list[Delivery]:
        if self._closing:
            return []
        leased = await self._store.write(deliveries.lease, subscription.id, most, LEASE, self._store.statement_context)
        self._held |= {(each.subscription_id, each.event_id): each for each in leased}
        return leased

    async def _settle(self, settled: Sequence[DeliveryResult]) -> None:
        try:
            await self._store.write(deliveries.settle, settled, self._store.statement_context)
        except SemelError as error:
            if not isinstance(error, StoreUnavailable):  # which the store has logged
                _log.warning("the results of deliveries could not be stored; the events will be sent again: %s", error)
        for each in settled:
            self._held.pop((each.delivery.subscription_id, each.delivery.event_id), None)

    async def _renew(self) -> float:
        if self._held:
            renewed = await self._store.write(
                deliveries.renew, list(self._held.values()), LEASE, self._store.statement_context
            )
            for key, due_us in renewed.items():
                if key in self._held:
                    self._held[key] = msgspec.structs.replace(self._held[key], due_us=due_us)
        return RENEW_EVERY

    async def _post_all(self, subscription: Subscription) -> None:
        """Post what is due, ``AT_ONCE`` at a time, until nothing is due or in progress."""
        sending: set[asyncio.Task[None]] = set()
        async with await sender_to(subscription, self._service.settings) as sender:
            try:
                while True:
                    room = AT_ONCE - len(sending)
                    leased = await self._lease(subscription, room) if room else []
                    sending |= {asyncio.create_task(self._post(sender, each)) for each in leased}
                    if not sending:
                        return
                    _, sending = await asyncio.wait(sending, timeout=POLL, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _finish(list(sending), 0.0)

    async def _post(self, sender: WebhookSender, delivery: Delivery) -> None:
        try:
            answered = await sender.send(delivery.event_id, delivery.body)
        except Exception as error:  # noqa: BLE001 -- as in _deliver
            _log.exception("event %s for %s could not be sent", delivery.event_id, delivery.subscription_id)
            answered = SendResult(None, f"{type(error).__name__}: {error}"[:500])
        await self._settle([next_state(delivery, answered)])

    async def _add_all(self, subscription: Subscription) -> None:
        while self._stream is not None and time.monotonic() >= self._stream_paused_until:
            leased = await self._lease(subscription, STREAM_BATCH)
            if not leased:
                return
            error = await self._stream.add([(each.event_id, _name_of(each), each.body) for each in leased])
            if error is None:
                await self._settle([DeliveryResult(delivery=each, state="delivered", forget=True) for each in leased])
                continue
            delay = STREAM_BACKOFF.after(leased[0].attempts)
            self._stream_paused_until = time.monotonic() + delay
            _log.warning("events could not be added to the stream and will be retried: %s", error)
            await self._settle(
                [DeliveryResult(delivery=each, state="waiting", delay=delay, error=error) for each in leased]
            )


def next_state(delivery: Delivery, answered: SendResult) -> DeliveryResult:
    """The state of the delivery after an attempt."""
    if answered.good:
        return DeliveryResult(delivery=delivery, state="delivered", status=answered.status)
    given_up = answered.status == GONE or delivery.attempts > len(DELAYS)
    delay = 0.0 if given_up else jittered(DELAYS[delivery.attempts - 1], 0.9, 1.3)
    if given_up:
        _log.warning("giving up on event %s for %s: %s", delivery.event_id, delivery.subscription_id, answered.error)
    return DeliveryResult(
        delivery=delivery,
        state="dead" if given_up else "waiting",
        delay=delay,
        status=answered.status,
        error=answered.error,
        disable=answered.status == GONE,
    )


async def ping(service: ServiceState, subscription: Subscription) -> tuple[str, SendResult]:
    """Send a Ping event once; returns its id and the result."""
    event_id = f"ping/{new_id()}"
    now = await service.store.read(read_clock, service.store.statement_context)
    body = msgspec.json.encode(Ping(id=event_id, tenant=subscription.tenant, at=moment(now))).decode()
    if subscription.kind == "webhook":
        async with await sender_to(subscription, service.settings) as sender:
            return event_id, await sender.send(event_id, body)
    stream = open_stream(service.settings)
    if stream is None:
        return event_id, SendResult(None, "this server has no SEMEL_EVENTS")
    try:
        error = await stream.add([(event_id, "Ping", body)])
    finally:
        await stream.close()
    return event_id, SendResult(200 if error is None else None, error)


async def sender_to(subscription: Subscription, settings: Settings) -> WebhookSender:
    """A sender to the receiver. Its imports are slow: they are done in a thread, when first needed."""
    await asyncio.to_thread(import_module, "semel.service.webhooks.sender")
    from semel.service.webhooks.sender import WebhookSender

    return WebhookSender(subscription, private=settings.private_webhooks)


async def check_target(url: str, settings: Settings) -> None:
    """Refuse a URL that no webhook may be sent to."""
    await asyncio.to_thread(import_module, "semel.service.webhooks.egress")
    from semel.service.webhooks.egress import addresses_of, target_of

    await addresses_of(target_of(url), private=settings.private_webhooks)


def open_stream(settings: Settings) -> RedisStream | None:
    """The Redis stream of the settings, if there is one."""
    if settings.events is None:
        return None
    try:
        from semel.service.webhooks.redis_stream import RedisStream
    except ImportError as error:
        raise MissingExtra("SEMEL_EVENTS needs a driver: pip install 'semel[redis]'") from error
    return RedisStream(settings.events, STREAM)


def _name_of(delivery: Delivery) -> str:
    name: str = msgspec.json.decode(delivery.body)["name"]
    return name


async def _finish(tasks: Sequence[asyncio.Task[None]], grace: float) -> None:
    """Let the tasks finish within the grace period, then cancel them."""
    if tasks and grace:
        await asyncio.wait(tasks, timeout=grace)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
