"""The deliverer hands events on to those who subscribed to them. Every process of a server has one.

Each subscription has its own pace: a receiver that is slow or dead delays no other. The events of a run are sent one
after the other, those of several runs at once, and a place that becomes free is filled while the others are still busy.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec

from semel.errors import MissingExtra, SemelError, StoreUnavailable
from semel.runs.store.quotas import read_clock
from semel.runs.types import new_id
from semel.service.webhooks import deliveries, subscriptions
from semel.service.webhooks.deliveries import Answered, Delivery, DeliveryResult, Ping
from semel.service.webhooks.subscriptions import STREAM, Subscription
from semel.types import moment

if TYPE_CHECKING:
    from semel.service.settings import Settings
    from semel.service.state import ServiceState
    from semel.service.webhooks.redis_stream import Stream
    from semel.service.webhooks.sender import WebhookSender

TURN = 0.5
"""Seconds between two looks while there are subscriptions."""
IDLE_TURN = 2.0
"""And while there are none."""
AT_ONCE = 16
"""Requests of one webhook that are under way at the same time."""
STREAM_BATCH = 200
LEASE = 10.0
"""Seconds after which another server may send what a dead one has begun."""
RENEW_EVERY = LEASE / 4
"""Seconds between two renewals of what is being sent."""
DELAYS = (5.0, 30.0, 120.0, 600.0, 3600.0, 21600.0, 86400.0)
"""Seconds between the tries of a webhook; after the last of them it is dead."""
GONE = 410
"""The answer of a receiver that wants no more."""
LONGEST_STREAM_DELAY = 60.0
"""Redis is tried again and again."""
GRACE = 2.0
"""Seconds that tries under way have when the server stops."""
TIDY_EVERY = 3600.0
CLOCK_TOLERANCE = 1.0
"""Seconds by which the database's clock may fall behind ours between two turns before that counts as a step."""

_log = logging.getLogger("semel.service")


class WebhookDispatcher:
    """See the module."""

    def __init__(self, service: ServiceState) -> None:
        self._service = service
        self._store = service.store
        self._stream: Stream | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ways: dict[str, asyncio.Task[None]] = {}
        self._held: dict[tuple[str, str], Delivery] = {}
        self._rests_until = 0.0
        self._tidied = 0.0
        self._elapsed = -math.inf
        self._closing = False

    async def open(self) -> None:
        """Begin."""
        self._closing = False
        self._stream = open_stream(self._service.settings)
        await self._store.write(subscriptions.keep_stream, self._stream is not None, self._store.terms)
        self._tasks = [asyncio.create_task(self._serve()), asyncio.create_task(self._renew_forever())]

    async def close(self) -> None:
        """Stop: let what is under way come to an end, for a moment, and give the rest back."""
        self._closing = True
        await _ended(list(self._ways.values()), GRACE)
        await _ended(self._tasks, 0.0)
        try:
            if self._held:
                await self._store.write(deliveries.give_back, list(self._held.values()), self._store.terms)
        except SemelError as error:
            _log.warning("deliveries could not be given back, they are tried again later: %s", error)
        self._held.clear()
        if self._stream is not None:
            await self._stream.close()

    async def _serve(self) -> None:
        while True:
            pause = IDLE_TURN
            try:
                pause = await self._turn()
            except StoreUnavailable:
                pass  # the ledger has reported it
            except Exception:  # noqa: BLE001 -- whatever it is, the next turn may succeed
                _log.exception("events could not be handed on, this is tried again")
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311 -- jitter, not a secret

    async def _turn(self) -> float:
        agenda = await self._store.read(deliveries.agenda, self._store.terms)
        if self._clock_went_back(agenda.now_us):
            await self._store.write(deliveries.shorten_waits, self._store.terms)
            agenda = await self._store.read(deliveries.agenda, self._store.terms)
        if agenda.events:
            while await self._store.write(deliveries.fan_out, self._store.terms):
                pass
            agenda = await self._store.read(deliveries.agenda, self._store.terms)
        for each in agenda.due:
            self._set_out(each)
        if time.monotonic() - self._tidied > TIDY_EVERY:
            self._tidied = time.monotonic()
            while await self._store.write(deliveries.tidy, self._store.terms):
                pass
        return TURN if agenda.subscribed else IDLE_TURN

    def _clock_went_back(self, now_us: int) -> bool:
        """Whether the database's clock is behind ours, which cannot be put back. What was before us is not known."""
        elapsed = time.monotonic() - now_us / 1e6
        went_back = elapsed > self._elapsed + CLOCK_TOLERANCE
        self._elapsed = elapsed
        return went_back

    def _set_out(self, subscription: Subscription) -> None:
        """Send what is due for the subscription, unless that is under way."""
        if subscription.id not in self._ways and not self._closing:
            way = self._ways[subscription.id] = asyncio.create_task(self._way(subscription))
            way.add_done_callback(lambda _: self._ways.pop(subscription.id, None))

    async def _way(self, subscription: Subscription) -> None:
        try:
            if subscription.kind == "webhook":
                await self._post_all(subscription)
            else:
                await self._add_all(subscription)
        except StoreUnavailable:
            pass  # the ledger has reported it
        except Exception:  # noqa: BLE001 -- as in _serve
            _log.exception("events for %s could not be sent, this is tried again", subscription.id)

    async def _lease(self, subscription: Subscription, most: int) -> list[Delivery]:
        if self._closing:
            return []
        leased = await self._store.write(deliveries.lease, subscription.id, most, LEASE, self._store.terms)
        self._held |= {(each.subscription_id, each.event_id): each for each in leased}
        return leased

    async def _settle(self, settled: Sequence[DeliveryResult]) -> None:
        try:
            await self._store.write(deliveries.settle, settled, self._store.terms)
        except SemelError as error:
            if not isinstance(error, StoreUnavailable):  # which the ledger has reported
                _log.warning("that events were sent could not be noted, they are sent again: %s", error)
        for each in settled:
            self._held.pop((each.delivery.subscription_id, each.delivery.event_id), None)

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(RENEW_EVERY)
            if not self._held:
                continue
            try:
                renewed = await self._store.write(deliveries.renew, list(self._held.values()), LEASE, self._store.terms)
            except StoreUnavailable:
                continue  # the ledger has reported it
            except Exception:  # noqa: BLE001 -- as in _serve
                _log.exception("deliveries under way could not be renewed, they may be sent twice")
                continue
            for key, due_us in renewed.items():
                if key in self._held:
                    self._held[key] = msgspec.structs.replace(self._held[key], due_us=due_us)

    async def _post_all(self, subscription: Subscription) -> None:
        """Send what is due, ``AT_ONCE`` at a time, until nothing is due or under way."""
        sending: set[asyncio.Task[None]] = set()
        async with await sender_to(subscription, self._service.settings) as sender:
            try:
                while True:
                    room = AT_ONCE - len(sending)
                    leased = await self._lease(subscription, room) if room else []
                    sending |= {asyncio.create_task(self._post(sender, each)) for each in leased}
                    if not sending:
                        return
                    _, sending = await asyncio.wait(sending, timeout=TURN, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _ended(list(sending), 0.0)

    async def _post(self, sender: WebhookSender, delivery: Delivery) -> None:
        try:
            answered = await sender.send(delivery.event_id, delivery.body)
        except Exception as error:  # noqa: BLE001 -- as in _serve
            _log.exception("event %s for %s could not be sent", delivery.event_id, delivery.subscription_id)
            answered = Answered(None, f"{type(error).__name__}: {error}"[:500])
        await self._settle([judged(delivery, answered)])

    async def _add_all(self, subscription: Subscription) -> None:
        while self._stream is not None and time.monotonic() >= self._rests_until:
            leased = await self._lease(subscription, STREAM_BATCH)
            if not leased:
                return
            error = await self._stream.add([(each.event_id, _name_of(each), each.body) for each in leased])
            if error is None:
                await self._settle([DeliveryResult(delivery=each, state="delivered", forget=True) for each in leased])
                continue
            delay = min(LONGEST_STREAM_DELAY, 2.0 ** min(leased[0].attempts, 10))
            self._rests_until = time.monotonic() + delay
            _log.warning("events could not be added to the stream, this is tried again: %s", error)
            await self._settle(
                [DeliveryResult(delivery=each, state="waiting", delay=delay, error=error) for each in leased]
            )


def judged(delivery: Delivery, answered: Answered) -> DeliveryResult:
    """What follows from the answer to a webhook."""
    if answered.good:
        return DeliveryResult(delivery=delivery, state="delivered", status=answered.status)
    given_up = answered.status == GONE or delivery.attempts > len(DELAYS)
    delay = 0.0 if given_up else DELAYS[delivery.attempts - 1] * random.uniform(0.9, 1.3)  # noqa: S311 -- jitter
    if given_up:
        _log.warning("event %s for %s is given up: %s", delivery.event_id, delivery.subscription_id, answered.error)
    return DeliveryResult(
        delivery=delivery,
        state="dead" if given_up else "waiting",
        delay=delay,
        status=answered.status,
        error=answered.error,
        disable=answered.status == GONE,
    )


async def ping(service: ServiceState, subscription: Subscription) -> tuple[str, Answered]:
    """Send an event about nothing, once, and answer its id and what became of it."""
    event_id = f"ping/{new_id()}"
    now = await service.store.read(read_clock, service.store.terms)
    body = msgspec.json.encode(Ping(id=event_id, tenant=subscription.tenant, at=moment(now))).decode()
    if subscription.kind == "webhook":
        async with await sender_to(subscription, service.settings) as sender:
            return event_id, await sender.send(event_id, body)
    stream = open_stream(service.settings)
    if stream is None:
        return event_id, Answered(None, "this server has no SEMEL_EVENTS")
    try:
        error = await stream.add([(event_id, "Ping", body)])
    finally:
        await stream.close()
    return event_id, Answered(200 if error is None else None, error)


async def sender_to(subscription: Subscription, settings: Settings) -> WebhookSender:
    """Who posts to the receiver. What that needs takes long to import: when it is first needed, beside the loop."""
    await asyncio.to_thread(import_module, "semel.service.webhooks.sender")
    from semel.service.webhooks.sender import WebhookSender

    return WebhookSender(subscription, private=settings.private_webhooks)


async def check_target(url: str, settings: Settings) -> None:
    """Refuse a URL to which no webhook may go."""
    await asyncio.to_thread(import_module, "semel.service.webhooks.egress")
    from semel.service.webhooks.egress import addresses_of, target_of

    await addresses_of(target_of(url), private=settings.private_webhooks)


def open_stream(settings: Settings) -> Stream | None:
    """The stream of the settings, if there is one."""
    if settings.events is None:
        return None
    try:
        from semel.service.webhooks.redis_stream import Stream
    except ImportError as error:
        raise MissingExtra("SEMEL_EVENTS needs a driver: pip install 'semel[redis]'") from error
    return Stream(settings.events, STREAM)


def _name_of(delivery: Delivery) -> str:
    name: str = msgspec.json.decode(delivery.body)["name"]
    return name


async def _ended(tasks: Sequence[asyncio.Task[None]], grace: float) -> None:
    """Let them end, then end them."""
    if tasks and grace:
        await asyncio.wait(tasks, timeout=grace)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
