"""Keys in Redis: shared by every host that reaches it, on the server's clock; as durable as the server is configured.

Each verb is one Lua script over a whole batch. A claim writes records that do not exist. Existing records are judged
here by the rules, and, if they may be taken, written by the same script as a compare-and-set on what was read.

A key's record is a hash ``prefix:{bucket}:<length of scope>:<scope>:<key>``. All names in a bucket share a hash tag,
and so a cluster slot, with the bucket's fence counter. The server removes records a minute after their end. The counter
stays, and is never behind the clock, so fences grow even if the server lost its data.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from functools import cache
from inspect import isawaitable
from threading import Event
from typing import Any, cast
from zlib import crc32

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.retry
from msgspec import Struct, msgpack
from redis import exceptions
from redis.backoff import NoBackoff

from semel._concurrency.fork import survive_fork
from semel._concurrency.listener import Listener, Subscribe
from semel._concurrency.sync import PerLoop, close_all
from semel._validation import checked_text
from semel.db.database import abandoned_connections
from semel.errors import InvalidRequest, StoreBroken, StoreUnavailable
from semel.once.rules import fingerprint_for, gone, granted, judge
from semel.once.store import (
    ClaimRequest,
    Clock,
    Complete,
    Forget,
    ForgetScope,
    KeyRef,
    OnReleased,
    OutcomeData,
    Owned,
    Release,
    Renew,
)
from semel.types import Held, Reason, Record, State, Verdict

_log = logging.getLogger("semel.listener")

BUCKETS = 256
SEPARATOR = "\x1f"
_ROUNDS = 20
_encoder = msgpack.Encoder()
_WILD, _ESCAPED = re.compile(r"([*?\[\]\\])"), r"\\\1"

# Every script takes the records' names as KEYS; as ARGV the time (in tests), the channel, the batch in MessagePack, and
# then the outcomes' values, since Redis' MessagePack has no bytes. It returns the time, then one answer per request.
_START = """
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000000 + tonumber(time[2])
end
local asked = cmsgpack.unpack(ARGV[3])
local function int(number) return string.format('%.0f', number) end
local answers = {int(now)}
local function last(state, created, lease, expires)  -- see end_of in the rules
  if state == 'claimed' and lease > expires then return lease + expires - created end
  return expires
end
local function owner(key)  -- fence, state, awaited, expires, lease, created; nothing when the record is gone
  local r = redis.call('HMGET', key, 'fence', 'state', 'awaited', 'expires_us', 'lease_until_us', 'created_us')
  if not r[1] then return {} end
  for i = 4, 6 do r[i] = tonumber(r[i]) end
  if now > last(r[2], r[6], r[5], r[4]) then return {} end
  return r
end
local function keep(key, ends)  -- a minute longer than needed, so that "expired" can be told from "absent"
  redis.call('PEXPIRE', key, int(math.ceil((ends - now) / 1000) + 60000))
end
local function finish(key, done, data)
  redis.call('HSET', key, 'state', 'completed', 'completed_us', int(now), 'kind', done.kind, 'data', data)
  if done.value_ttl_us then redis.call('HSET', key, 'value_until_us', int(now + done.value_ttl_us)) end
end
local function ring(awaited, request)
  if awaited then redis.call('PUBLISH', ARGV[2], request.scope .. '\\31' .. request.key) end
end
"""
_CLAIM = (
    _START
    + """
for i, request in ipairs(asked) do
  local key, counter, was = KEYS[2 * i - 1], KEYS[2 * i], request.was
  local seen = redis.call('HMGET', key, 'fence', 'state', 'lease_until_us', 'lease_us')
  if not seen[1] or (was and seen[1] == int(was.fence) and seen[2] == was.state and seen[3] == int(was.until_us)) then
    local fence = math.max(tonumber(redis.call('GET', counter) or 0) + 1, now)
    redis.call('SET', counter, int(fence))
    if seen[1] then redis.call('DEL', key) end
    redis.call('HSET', key, 'scope', request.scope, 'key', request.key, 'fingerprint', request.fingerprint,
      'attempt', request.attempt, 'unknown', request.unknown and 1 or 0, 'state', 'claimed', 'fence', int(fence),
      'created_us', int(now), 'lease_us', int(request.lease_us), 'lease_until_us', int(now + request.lease_us),
      'expires_us', int(now + request.ttl_us))
    if request.done then finish(key, request.done, ARGV[3 + i]) end
    keep(key, last('claimed', now, now + request.lease_us, now + request.ttl_us))
    answers[i + 1] = int(fence)
  else
    if request.waiting and seen[2] == 'claimed' then redis.call('HSET', key, 'awaited', '1') end
    if seen[2] == 'claimed' and tonumber(seen[3]) > now + tonumber(seen[4]) then  -- the clock went back
      redis.call('HSET', key, 'lease_until_us', int(now + tonumber(seen[4])))
    end
    answers[i + 1] = redis.call('HGETALL', key)
  end
end
return answers
"""
)
_COMPLETE = (
    _START
    + """
for i, request in ipairs(asked) do
  local r = owner(KEYS[i])
  local ours = r[1] == int(request.fence)
  if ours and r[2] == 'claimed' then
    finish(KEYS[i], request.done, ARGV[3 + i])
    if now < r[6] or now > r[4] then  -- no outcome is born expired
      redis.call('HSET', KEYS[i], 'expires_us', int(now + r[4] - r[6]))
      keep(KEYS[i], now + r[4] - r[6])
    end
    ring(r[3], request)
  end
  answers[i + 1] = ours and 1 or 0
end
return answers
"""
)
_RELEASE = (
    _START
    + """
for i, request in ipairs(asked) do
  local r = owner(KEYS[i])
  local ours = r[1] == int(request.fence)
  if ours and r[2] == 'claimed' then
    redis.call('DEL', KEYS[i])
    ring(r[3], request)
  end
  answers[i + 1] = (ours or not r[1]) and 1 or 0
end
return answers
"""
)
_RENEW = (
    _START
    + """
for i, request in ipairs(asked) do
  local r = owner(KEYS[i])
  answers[i + 1] = false
  if r[1] == int(request.fence) and r[2] == 'claimed' then
    local ends = now + request.lease_us
    redis.call('HSET', KEYS[i], 'lease_us', int(request.lease_us), 'lease_until_us', int(ends))
    keep(KEYS[i], last('claimed', r[6], ends, r[4]))
    answers[i + 1] = int(ends)
  end
end
return answers
"""
)
_FORGET = (
    _START
    + """
for i, request in ipairs(asked) do
  local r = owner(KEYS[i])
  local ours = r[1] and (request.fence == 0 or r[1] == int(request.fence))  -- 0: whoever's
  answers[i + 1] = r[1] and 0 or 1
  if ours and (request.force or r[2] ~= 'claimed' or now >= r[5]) then
    redis.call('DEL', KEYS[i])
    ring(r[3], request)
    answers[i + 1] = 2
  end
end
return answers
"""
)
_GET = (
    _START
    + """
for i, key in ipairs(KEYS) do answers[i + 1] = redis.call('HGETALL', key) end
return answers
"""
)
_PURGE = (
    _START
    + """
for i, key in ipairs(KEYS) do
  answers[i + 1] = 0
  local fades = redis.call('HGET', key, 'value_until_us')
  if not owner(key)[1] then
    answers[i + 1] = redis.call('DEL', key)
  elseif fades and now > tonumber(fades) then
    answers[i + 1] = redis.call('HDEL', key, 'data')
  end
end
return answers
"""
)


class _Was(Struct):
    """The state that a record must still have for a claim to replace it."""

    fence: int
    state: State
    until_us: int


class _Done(Struct):
    """An outcome without its value, which is a separate argument."""

    kind: str
    value_ttl_us: int | None


class _Claim(Struct):
    """A claim as its script reads it."""

    scope: str
    key: str
    fingerprint: str
    attempt: str
    lease_us: int
    ttl_us: int
    unknown: bool
    waiting: bool
    done: _Done | None
    was: _Was | None


class _Complete(Struct):
    """A completion as its script reads it."""

    scope: str
    key: str
    fence: int
    done: _Done


HEARTBEAT = 5.0
"""Seconds without a message after which the listener sends a PING; the server has as long to reply."""


def subscriber(client: Any) -> Subscribe:
    """SUBSCRIBE, for the listener's thread. The client connects when that starts."""

    def subscribe(channel: str, stopped: Event) -> Iterator[str | None]:
        with client.pubsub() as subscription:
            subscription.subscribe(channel)
            last_received = pinged = time.monotonic()
            while not stopped.is_set():
                message = subscription.get_message(timeout=0.5)
                now = time.monotonic()
                if message is not None:
                    last_received = now
                elif now - last_received > 2 * HEARTBEAT:
                    _log.warning(
                        "Redis has sent nothing for %.0f s on the listening connection, and does not reply to a PING: "
                        "reconnecting. Messages since then are lost; polling finds what they announced",
                        now - last_received,
                    )
                    raise exceptions.ConnectionError(f"Redis has been silent for {now - last_received:.0f} seconds")
                elif now - max(last_received, pinged) > HEARTBEAT:
                    subscription.ping()
                    pinged = now
                is_notification = message is not None and message["type"] == "message"
                yield message["data"].decode() if is_notification else None

    return subscribe


class RedisStore:
    """A store over a blocking client, an async one, or a cluster's."""

    coalesce = True
    expires_itself = True

    def __init__(
        self,
        client: Any,
        clock: Clock | None = None,
        *,
        prefix: str | None = None,
        listener: Listener | None = None,
        connect: Callable[[], Any] | None = None,
    ) -> None:
        """``connect`` makes another such client, for a child process or a new event loop."""
        prefix = "semel" if prefix is None else checked_text("prefix", prefix)
        if not prefix or any(character in prefix for character in "{}*?[]\\ \n"):
            raise InvalidRequest(f"the Redis prefix {prefix!r} must be text without braces, wildcards or spaces")
        if client.get_encoder().decode_responses:
            raise InvalidRequest("outcomes are bytes: give a Redis client without decode_responses=True")
        self._client = client
        self._clustered = isinstance(client, redis.RedisCluster | redis.asyncio.RedisCluster)
        self._clock = clock
        self._prefix = prefix
        self._channel = f"{prefix}:ended"
        self._listener = listener
        self._connect = connect
        self._clients: PerLoop[Any] | None = None
        if type(client).__module__.startswith("redis.asyncio"):
            self._clients = PerLoop(self._another, end=_disconnect, abandon=_abandon)
        self._given: Any = client
        self._stale = False
        survive_fork(self)

    def after_fork(self) -> None:
        """The connections belong to the parent, and a thread of the parent may have held a lock of their pool."""
        self._stale = True

    def _here(self) -> Any:
        """The client of this process and event loop."""
        if self._clients is not None:
            return self._clients.here()
        if self._stale:
            self._stale = False
            self._client = self._renewed()
        return self._client

    def _another(self) -> Any:
        """A client for a new event loop: first the one that was given, then others like it."""
        given, self._given = self._given, None
        return given if given is not None and not self._stale else self._renewed()

    def _renewed(self) -> Any:
        """A client like the given one, with its own connections; a cluster's client that a user gave is used itself."""
        if self._connect is not None:
            return self._connect()
        if self._clustered:
            return self._client
        pool = self._client.connection_pool
        own = type(pool)(connection_class=pool.connection_class, **pool.connection_kwargs)
        return type(self._client)(connection_pool=own)

    async def open(self) -> None:
        with translated():
            await self._answer(self._here().ping())

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        verdicts: dict[int, Verdict] = {}
        undecided = dict(enumerate(requests))
        found: dict[int, tuple[Record | None, Reason]] = dict.fromkeys(undecided, (None, "absent"))
        for _ in range(_ROUNDS):
            wanted = [_want(request, *found[at]) for at, request in undecided.items()]
            names = [self._claim_keys(request) for request in undecided.values()]
            dones = [request.done for request in undecided.values()]
            values = [b"" if done is None else done.data for done in dones] if any(dones) else ()
            answers = await self._run(_CLAIM, wanted, names, values)
            promised: set[tuple[str, str]] = set()
            for (at, request), (answer, now) in zip(list(undecided.items()), answers, strict=True):
                if not isinstance(answer, list):
                    verdicts[at] = granted(request, *found[at], int(answer), now)
                elif (request.scope, request.key) not in promised:
                    record = _record(answer, now)
                    verdict = judge(record, request, now)
                    if isinstance(verdict, str):
                        found[at] = (record, verdict)
                        promised.add((request.scope, request.key))  # later requests for it: in the next round
                    else:
                        verdicts[at] = verdict
            undecided = {at: request for at, request in undecided.items() if at not in verdicts}
            if not undecided:
                return [verdicts[at] for at in range(len(requests))]
        raise StoreUnavailable(f"a key changed hands {_ROUNDS} times while it was being claimed; try again")

    async def renew(self, requests: Sequence[Renew]) -> list[int | None]:
        answers = await self._run(_RENEW, requests, self._names(requests))
        return [None if answer is None else int(answer) for answer, _ in answers]

    async def complete(self, requests: Sequence[Complete]) -> list[bool]:
        batch = [_Complete(each.scope, each.key, each.fence, _done(each.done)) for each in requests]
        answers = await self._run(_COMPLETE, batch, self._names(requests), [each.done.data for each in requests])
        return [answer == 1 for answer, _ in answers]

    async def release(self, requests: Sequence[Release]) -> list[bool]:
        answers = await self._run(_RELEASE, requests, self._names(requests))
        return [answer == 1 for answer, _ in answers]

    async def forget(self, requests: Sequence[Forget]) -> list[bool]:
        answers = await self._run(_FORGET, requests, self._names(requests))
        return [answer > 0 for answer, _ in answers]

    async def forget_scope(self, request: ForgetScope) -> int:
        # Scans every key under the prefix.
        forgotten = 0
        async with aclosing(self._scan(500, request.scope)) as scan:
            async for found in scan:
                left = [Forget(ref.scope, ref.key, 0, request.force) for ref in found]
                while left and forgotten < request.limit:
                    some, left = left[: request.limit - forgotten], left[request.limit - forgotten :]
                    answers = await self._run(_FORGET, some, self._names(some))
                    forgotten += sum(answer == 2 for answer, _ in answers)
                if forgotten >= request.limit:
                    break
        return forgotten

    async def get(self, refs: Sequence[KeyRef]) -> list[Record | None]:
        answers = await self._run(_GET, (), self._names(refs))
        records = (_record(answer, now) if answer else None for answer, now in answers)
        return [None if record is None or gone(record, record.now_us) else record for record in records]

    async def purge(self, limit: int) -> int:
        # Redis removes most records by itself; this removes the rest.
        removed = 0
        async with aclosing(self._scan(limit)) as scan:
            async for found in scan:
                left = found
                while left and removed < limit:
                    some, left = left[: limit - removed], left[limit - removed :]
                    removed += sum(answer for answer, _ in await self._run(_PURGE, (), self._names(some)))
                if removed >= limit:
                    break
        return removed

    async def stats(self) -> Held:
        # Scans every key under the prefix.
        count = dict.fromkeys(Held.__struct_fields__, 0)
        async for refs in self._scan(500):
            for answer, now in await self._run(_GET, (), self._names(refs)):
                if answer:
                    record = _record(answer, now)
                    count["expired" if gone(record, now) else record.status] += 1
        return Held(**count)

    async def _scan(self, size: int, scope: str | None = None) -> AsyncGenerator[list[KeyRef], None]:
        """All keys under the prefix, or in this scope, in lists of at most ``size``."""
        place = "*:*" if scope is None else f"{len(scope)}:{_WILD.sub(_ESCAPED, scope)}:*"
        found: list[KeyRef] = []
        with translated():
            async for name in _each(self._here().scan_iter(match=f"{self._prefix}:{{*}}:{place}", count=500)):
                found.append(self._ref(name))
                if len(found) == size:
                    yield found
                    found = []
        if found:
            yield found

    def watch(self, ring: OnReleased) -> None:
        """SUBSCRIBE on a separate connection."""
        if self._listener is not None:
            self._listener.start(self._channel, lambda name: ring(*name.split(SEPARATOR, 1)))

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.stop()
        if self._clients is not None:
            await self._clients.end()
        else:
            self._client.close()

    async def _run(
        self,
        script: str,
        batch: Sequence[Struct],
        names: Sequence[tuple[str, ...]],
        values: Sequence[bytes] = (),
    ) -> list[tuple[Any, int]]:
        """Run a script over the batch: one call, or one per bucket in a cluster. Each answer comes with the time."""
        answers: list[tuple[Any, int]] = [(None, 0)] * len(names)
        now = "" if self._clock is None else self._clock()
        for group in self._groups(names):
            asked = _encoder.encode([batch[at] for at in group] if batch else ())
            keys = [name for at in group for name in names[at]]
            data = [values[at] for at in group] if values else ()
            with translated():
                reply = await self._eval(script, len(keys), *keys, now, self._channel, asked, *data)
            for at, answer in zip(group, reply[1:], strict=True):
                answers[at] = (answer, int(reply[0]))
        return answers

    def _groups(self, names: Sequence[tuple[str, ...]]) -> list[Sequence[int]]:
        """The positions that go into one call each: all in one; or, in a cluster, those that share a slot."""
        if not self._clustered:
            return [range(len(names))] if names else []
        groups = defaultdict(list)
        for at, own in enumerate(names):
            groups[own[0].split("}", 1)[0]].append(at)
        return list(groups.values())

    async def _eval(self, script: str, *arguments: Any) -> Any:
        client = self._here()
        try:
            return await self._answer(client.evalsha(_sha(script), *arguments))
        except exceptions.NoScriptError:
            return await self._answer(client.eval(script, *arguments))

    @staticmethod
    async def _answer(reply: Any) -> Any:
        return await reply if isawaitable(reply) else reply

    def _key(self, request: KeyRef | ClaimRequest | Owned) -> str:
        place = f"{len(request.scope)}:{request.scope}:{request.key}"
        return f"{self._prefix}:{{{crc32(place.encode()) % BUCKETS}}}:{place}"

    def _names(self, requests: Sequence[KeyRef | Owned]) -> list[tuple[str, ...]]:
        return [(self._key(request),) for request in requests]

    def _claim_keys(self, request: ClaimRequest) -> tuple[str, str]:
        name = self._key(request)
        return (name, name[: name.index("}") + 1] + ":fence")

    def _ref(self, name: bytes | str) -> KeyRef:
        text = name.decode() if isinstance(name, bytes) else name
        size, rest = text.split("}:", 1)[1].split(":", 1)
        return KeyRef(rest[: int(size)], rest[int(size) + 1 :])


async def _disconnect(client: Any) -> None:
    """Close the client when its event loop ends or the store is closed."""
    with suppress(OSError, exceptions.RedisError):
        await client.aclose()


def _abandon(client: Any) -> None:
    """Close the sockets of a client whose event loop is closed, so that nothing can be awaited any more."""
    for connection in _idle_connections(client):
        writer = getattr(connection, "_writer", None)
        if writer is not None:
            close_all(writer.transport)
            abandoned_connections.append(connection)  # its __del__ would warn without its loop
    if isinstance(client, redis.asyncio.RedisCluster):
        abandoned_connections.append(client)  # its nodes would warn, too
    else:
        client.connection_pool.reset()


def _idle_connections(client: Any) -> list[Any]:
    if isinstance(client, redis.asyncio.RedisCluster):
        return [each for node in client.get_nodes() for each in node._connections]
    return list(client.connection_pool._available_connections)


async def _each(names: Any) -> AsyncGenerator[bytes, None]:
    """The names, from a blocking or an async client."""
    if hasattr(names, "__aiter__"):
        async for name in names:
            yield name
    else:
        for name in names:
            yield name


@cache
def _sha(script: str) -> str:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


def _want(request: ClaimRequest, previous: Record | None, reason: Reason) -> _Claim:
    return _Claim(
        request.scope,
        request.key,
        fingerprint_for(request, previous, reason),
        request.attempt,
        request.lease_us,
        request.ttl_us,
        request.unknown,
        request.waiting,
        None if request.done is None else _done(request.done),
        None if previous is None else _Was(previous.fence, previous.state, previous.lease_until_us),
    )


def _done(done: OutcomeData) -> _Done:
    return _Done(done.kind, done.value_ttl_us)


def _record(flat: list[bytes], now: int) -> Record:
    has = dict(zip(flat[::2], flat[1::2], strict=True))
    fades = has.get(b"value_until_us")
    return Record(
        has[b"scope"].decode(),
        has[b"key"].decode(),
        has[b"fingerprint"].decode(),
        cast("State", has[b"state"].decode()),
        int(has[b"fence"]),
        has[b"attempt"].decode(),
        has[b"unknown"] == b"1",
        int(has[b"created_us"]),
        int(has[b"lease_us"]),
        int(has[b"lease_until_us"]),
        int(has[b"expires_us"]),
        int(has.get(b"completed_us", 0)),
        has.get(b"kind", b"").decode(),
        has.get(b"data"),
        None if fades is None else int(fades),
        now,
    )


@contextmanager
def translated() -> Iterator[None]:
    """Raise semel's errors instead of the client's."""
    try:
        yield
    except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
        raise StoreBroken(f"Redis refused the user or the password: {error}") from error
    except (exceptions.RedisError, exceptions.RedisClusterException, OSError) as error:
        raise StoreUnavailable(f"Redis is unavailable: {error}") from error


def open_url(
    url: str, is_async: bool, clock: Clock | None, *, timeout: float = 5.0, prefix: str | None = None
) -> RedisStore:
    """A store on ``redis://``, ``rediss://``, ``unix://`` or, for a cluster, ``redis+cluster://``.

    A server that is silent for ``timeout`` seconds counts as unavailable. The engine retries, not the client.
    """
    clustered = url.startswith(("redis+cluster:", "rediss+cluster:"))
    plain = url.replace("+cluster", "", 1) if clustered else url
    module: Any = redis.asyncio if is_async else redis
    client_class = module.RedisCluster if clustered else module.Redis
    options: dict[str, Any] = {"socket_timeout": timeout, "socket_connect_timeout": timeout, "socket_keepalive": True}
    if not clustered:  # a cluster's client must retry to find the node of a slot that moved
        options["retry"] = (redis.asyncio.retry if is_async else redis.retry).Retry(NoBackoff(), 0)

    def connect() -> Any:
        try:
            return client_class.from_url(plain, **options)
        except ValueError as error:
            raise InvalidRequest(f"this Redis URL cannot be used: {error}") from error

    with translated():  # a blocking cluster client connects at once
        client = connect()
    listener = Listener(subscriber(redis.Redis.from_url(plain, socket_connect_timeout=timeout, socket_keepalive=True)))
    return RedisStore(client, clock, prefix=prefix, listener=listener, connect=connect)
