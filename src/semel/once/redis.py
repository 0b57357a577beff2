"""Keys in Redis: shared by every host that reaches it, on the server's clock; as durable as the server is configured.

Each verb is one Lua script over a whole batch. A claim writes where nothing is; what met a record is judged here by
the rules, and, where it may be had, written by the same script as a compare-and-set on what was read.

A key's record is a hash ``prefix:{bucket}:<length of scope>:<scope>:<key>``. All names in a bucket share a hash tag,
and so a cluster slot, with the bucket's fence counter. The server drops records a minute after their end; the counter
stays, and never falls behind the clock, so fences grow even over a server that lost its data.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import cache
from inspect import isawaitable
from threading import Event
from typing import Any, TypeVar, cast
from zlib import crc32

import redis
import redis.asyncio
from redis import exceptions

from semel.bridge import HomeLoop
from semel.errors import InvalidRequest, StoreBroken, StoreUnavailable
from semel.model import Held, Reason, Record, State, Verdict
from semel.once.listener import Hear, Listener
from semel.once.rules import fingerprint_for, gone, granted, judge
from semel.once.store import ClaimRequest, Clock, Complete, Owned, Ref, Release, Renew, Ring

T = TypeVar("T")

BUCKETS = 256
SEPARATOR = "\x1f"
_ROUNDS = 20

_START = """
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000000 + tonumber(time[2])
end
local function int(number) return string.format('%.0f', number) end
local answers = {int(now)}
local function gone(key)
  local r = redis.call('HMGET', key, 'state', 'expires_us', 'lease_until_us')
  return not r[1] or (now > tonumber(r[2]) and not (r[1] == 'claimed' and now < tonumber(r[3])))
end
local function keep(key, ends)  -- a minute longer than needed, so that "expired" can be told from "absent"
  redis.call('PEXPIRE', key, int(math.ceil((ends - now) / 1000) + 60000))
end
local function ring(key, name)
  if redis.call('HGET', key, 'awaited') then redis.call('PUBLISH', ARGV[2], name) end
end
"""
_CLAIM = (
    _START
    + """
for i = 1, #KEYS / 2 do
  local key, counter, a = KEYS[2 * i - 1], KEYS[2 * i], 3 + (i - 1) * 15
  local seen = redis.call('HMGET', key, 'fence', 'state', 'lease_until_us')
  if not seen[1] or (seen[1] == ARGV[a + 12] and seen[2] == ARGV[a + 13] and seen[3] == ARGV[a + 14]) then
    local fence = math.max(tonumber(redis.call('GET', counter) or 0) + 1, now)
    redis.call('SET', counter, int(fence))
    local lease, ttl, done = tonumber(ARGV[a + 5]), tonumber(ARGV[a + 6]), ARGV[a + 7] == 'completed'
    redis.call('DEL', key)
    redis.call('HSET', key, 'scope', ARGV[a], 'key', ARGV[a + 1], 'fingerprint', ARGV[a + 2], 'attempt', ARGV[a + 3],
      'unknown', ARGV[a + 4], 'state', ARGV[a + 7], 'fence', int(fence), 'created_us', int(now),
      'lease_us', ARGV[a + 5], 'lease_until_us', int(now + lease), 'expires_us', int(now + ttl))
    if done then
      redis.call('HSET', key, 'completed_us', int(now), 'kind', ARGV[a + 8], 'data', ARGV[a + 9])
      if ARGV[a + 10] ~= '' then redis.call('HSET', key, 'value_until_us', int(now + tonumber(ARGV[a + 10]))) end
    end
    keep(key, now + math.max(lease, ttl))
    answers[i + 1] = int(fence)
  else
    if ARGV[a + 11] == '1' and seen[2] == 'claimed' then redis.call('HSET', key, 'awaited', '1') end
    answers[i + 1] = redis.call('HGETALL', key)
  end
end
return answers
"""
)
_COMPLETE = (
    _START
    + """
for i, key in ipairs(KEYS) do
  local a = 3 + (i - 1) * 5
  local r = redis.call('HMGET', key, 'fence', 'state')
  if r[1] ~= ARGV[a] or gone(key) then
    answers[i + 1] = 0
  else
    if r[2] == 'claimed' then
      redis.call('HSET', key, 'state', 'completed', 'completed_us', int(now), 'kind', ARGV[a + 1], 'data', ARGV[a + 2])
      if ARGV[a + 3] ~= '' then redis.call('HSET', key, 'value_until_us', int(now + tonumber(ARGV[a + 3]))) end
      ring(key, ARGV[a + 4])
    end
    answers[i + 1] = 1
  end
end
return answers
"""
)
_RELEASE = (
    _START
    + """
for i, key in ipairs(KEYS) do
  local a = 3 + (i - 1) * 2
  local r = redis.call('HMGET', key, 'fence', 'state')
  if not r[1] or gone(key) then
    answers[i + 1] = 1
  elseif r[1] ~= ARGV[a] then
    answers[i + 1] = 0
  else
    if r[2] == 'claimed' then
      ring(key, ARGV[a + 1])
      redis.call('DEL', key)
    end
    answers[i + 1] = 1
  end
end
return answers
"""
)
_RENEW = (
    _START
    + """
for i, key in ipairs(KEYS) do
  local a = 3 + (i - 1) * 2
  local r = redis.call('HMGET', key, 'fence', 'state', 'expires_us')
  if r[1] ~= ARGV[a] or r[2] ~= 'claimed' or gone(key) then
    answers[i + 1] = false
  else
    local ends = now + tonumber(ARGV[a + 1])
    redis.call('HSET', key, 'lease_us', ARGV[a + 1], 'lease_until_us', int(ends))
    keep(key, math.max(ends, tonumber(r[3])))
    answers[i + 1] = int(ends)
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
  if redis.call('EXISTS', key) == 1 then
    local fades = redis.call('HGET', key, 'value_until_us')
    if gone(key) then
      answers[i + 1] = redis.call('DEL', key)
    elseif fades and now > tonumber(fades) then
      answers[i + 1] = redis.call('HDEL', key, 'data')
    end
  end
end
return answers
"""
)


def hearing(client: Any) -> Hear:
    """SUBSCRIBE, for the listener's thread; the client connects when it begins."""

    def hear(channel: str, stopped: Event) -> Iterator[str]:
        with client.pubsub(ignore_subscribe_messages=True) as subscription:
            subscription.subscribe(channel)
            while not stopped.is_set():
                message = subscription.get_message(timeout=0.5)
                if message is not None:
                    yield message["data"].decode()

    return hear


class RedisStore:
    """Over a blocking client, an async one, or a cluster's."""

    coalesce = True
    expires_itself = True

    def __init__(
        self, client: Any, clock: Clock | None = None, *, prefix: Any = "semel", listener: Listener | None = None
    ) -> None:
        if not isinstance(prefix, str) or not prefix or any(character in prefix for character in "{}*?[]\\ \n"):
            raise InvalidRequest(f"the Redis prefix {prefix!r} must be some text without braces, wildcards or spaces")
        if client.get_encoder().decode_responses:
            raise InvalidRequest("outcomes are bytes: give a Redis client without decode_responses=True")
        self._client = client
        self._clustered = isinstance(client, redis.RedisCluster | redis.asyncio.RedisCluster)
        self._clock = clock
        self._prefix: str = prefix
        self._channel = f"{prefix}:ended"
        self._listener = listener
        asynchronous = type(client).__module__.startswith("redis.asyncio")
        self._home = HomeLoop(self._forget_connections) if asynchronous else None

    def _forget_connections(self) -> None:
        if not self._clustered:
            self._client.connection_pool.reset()

    async def open(self) -> None:
        """See the contract."""
        if self._home is not None:
            self._home.enter()
        with translated():
            await self._answer(self._client.ping())

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Verdict]:
        """See the contract."""
        verdicts: dict[int, Verdict] = {}
        undecided = dict(enumerate(requests))
        seen: dict[int, tuple[Record, Reason]] = {}
        for _ in range(_ROUNDS):
            wanted = [(request, *seen.get(at, (None, "absent"))) for at, request in undecided.items()]
            answers = await self._run(_CLAIM, wanted, self._claim_keys, _claim_args)
            for (at, request), (_, previous, reason), (answer, now) in zip(
                list(undecided.items()), wanted, answers, strict=True
            ):
                if not isinstance(answer, list):
                    fence = int(answer)
                    verdicts[at] = granted(request, previous, reason, fence, now)
                    continue
                record = _record(answer, now)
                verdict = judge(record, request, now)
                if isinstance(verdict, str):
                    seen[at] = (record, verdict)
                else:
                    verdicts[at] = verdict
            undecided = {at: request for at, request in undecided.items() if at not in verdicts}
            if not undecided:
                return [verdicts[at] for at in range(len(requests))]
        raise StoreUnavailable(f"a key changed hands {_ROUNDS} times while it was being claimed; try again")

    async def renew(self, requests: Sequence[Renew]) -> list[int | None]:
        """See the contract."""
        answers = await self._run(_RENEW, requests, self._key, lambda each: (each.fence, each.lease_us))
        return [None if answer is None else int(answer) for answer, _ in answers]

    async def complete(self, requests: Sequence[Complete]) -> list[bool]:
        """See the contract."""
        answers = await self._run(_COMPLETE, requests, self._key, _complete_args)
        return [answer == 1 for answer, _ in answers]

    async def release(self, requests: Sequence[Release]) -> list[bool]:
        """See the contract."""
        answers = await self._run(_RELEASE, requests, self._key, lambda each: (each.fence, _name(each)))
        return [answer == 1 for answer, _ in answers]

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        """See the contract."""
        answers = await self._run(_GET, refs, self._key, lambda _: ())
        records = (_record(answer, now) if answer else None for answer, now in answers)
        return [None if record is None or gone(record, record.now_us) else record for record in records]

    async def purge(self, limit: int) -> int:
        """See the contract. The server drops most records by itself; this finds what its clean-up has not."""
        removed = 0
        async with aclosing(self._scan(limit)) as scan:
            async for found in scan:
                left = found
                while left and removed < limit:
                    some, left = left[: limit - removed], left[limit - removed :]
                    removed += sum(answer for answer, _ in await self._run(_PURGE, some, self._key, lambda _: ()))
                if removed >= limit:
                    break
        return removed

    async def stats(self) -> Held:
        """See the contract. Walks over every key under the prefix."""
        count = dict.fromkeys(Held.__struct_fields__, 0)
        async for refs in self._scan(500):
            for answer, now in await self._run(_GET, refs, self._key, lambda _: ()):
                if answer:
                    record = _record(answer, now)
                    count["expired" if gone(record, now) else record.status] += 1
        return Held(**count)

    async def _scan(self, size: int) -> AsyncGenerator[list[Ref], None]:
        """Every record under the prefix, in lists of at most ``size``."""
        found: list[Ref] = []
        with translated():
            async for name in _each(self._client.scan_iter(match=f"{self._prefix}:{{*}}:*:*", count=500)):
                found.append(self._ref(name))
                if len(found) == size:
                    yield found
                    found = []
        if found:
            yield found

    def watch(self, ring: Ring) -> None:
        """Subscribe on a connection of its own."""
        if self._listener is not None:
            self._listener.start(self._channel, lambda name: ring(*name.split(SEPARATOR, 1)))

    async def close(self) -> None:
        """See the contract."""
        if self._listener is not None:
            self._listener.stop()
        await self._answer(self._client.aclose() if hasattr(self._client, "aclose") else self._client.close())

    async def _run(
        self,
        script: str,
        requests: Sequence[T],
        keys: Callable[[T], tuple[str, ...]],
        args: Callable[[T], tuple[str | bytes | int, ...]],
    ) -> list[tuple[Any, int]]:
        """Run a script over the batch: one call, or one for each bucket of a cluster. Answers carry the time."""
        answers: list[tuple[Any, int]] = [(None, 0)] * len(requests)
        for group in self._groups([keys(request) for request in requests]):
            names = [name for at, own in group for name in own]
            values = [value for at, _ in group for value in args(requests[at])]
            now = "" if self._clock is None else self._clock()
            with translated():
                reply = await self._eval(script, len(names), *names, now, self._channel, *values)
            for (at, _), answer in zip(group, reply[1:], strict=True):
                answers[at] = (answer, int(reply[0]))
        return answers

    def _groups(self, names: list[tuple[str, ...]]) -> list[list[tuple[int, tuple[str, ...]]]]:
        if not self._clustered:
            return [list(enumerate(names))] if names else []
        groups = defaultdict(list)
        for at, own in enumerate(names):
            groups[own[0].split("}", 1)[0]].append((at, own))
        return list(groups.values())

    async def _eval(self, script: str, *arguments: Any) -> Any:
        if self._home is not None:
            self._home.enter()
        try:
            return await self._answer(self._client.evalsha(_sha(script), *arguments))
        except exceptions.NoScriptError:
            return await self._answer(self._client.eval(script, *arguments))

    @staticmethod
    async def _answer(reply: Any) -> Any:
        return await reply if isawaitable(reply) else reply

    def _key(self, request: Ref | ClaimRequest | Owned) -> tuple[str, ...]:
        place = f"{len(request.scope)}:{request.scope}:{request.key}"
        return (f"{self._prefix}:{{{crc32(place.encode()) % BUCKETS}}}:{place}",)

    def _claim_keys(self, wanted: tuple[ClaimRequest, Record | None, Reason]) -> tuple[str, ...]:
        (name,) = self._key(wanted[0])
        return (name, name[: name.index("}") + 1] + ":fence")

    def _ref(self, name: bytes | str) -> Ref:
        text = name.decode() if isinstance(name, bytes) else name
        size, rest = text.split("}:", 1)[1].split(":", 1)
        return Ref(rest[: int(size)], rest[int(size) + 1 :])


async def _each(names: Any) -> AsyncGenerator[bytes, None]:
    """The names, whether the client is blocking or not."""
    if hasattr(names, "__aiter__"):
        async for name in names:
            yield name
    else:
        for name in names:
            yield name


@cache
def _sha(script: str) -> str:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


def _claim_args(wanted: tuple[ClaimRequest, Record | None, Reason]) -> tuple[str | bytes | int, ...]:
    request, previous, reason = wanted
    done = request.done
    return (
        request.scope,
        request.key,
        fingerprint_for(request, previous, reason),
        request.attempt,
        int(request.unknown),
        request.lease_us,
        request.ttl_us,
        "claimed" if done is None else "completed",
        "" if done is None else done.kind,
        b"" if done is None else done.data,
        "" if done is None or done.value_ttl_us is None else done.value_ttl_us,
        int(request.waiting),
        *(("", "", "") if previous is None else (previous.fence, previous.state, previous.lease_until_us)),
    )


def _complete_args(request: Complete) -> tuple[str | bytes | int, ...]:
    done = request.done
    fades = "" if done.value_ttl_us is None else done.value_ttl_us
    return (request.fence, done.kind, done.data, fades, _name(request))


def _name(request: Owned) -> str:
    return f"{request.scope}{SEPARATOR}{request.key}"


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
    """Raise semel's errors for the client's."""
    try:
        yield
    except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
        raise StoreBroken(f"Redis refused the user or the password: {error}") from error
    except (exceptions.RedisError, exceptions.RedisClusterException, OSError) as error:
        raise StoreUnavailable(f"Redis cannot be used at the moment: {error}") from error


def open_url(url: str, awaited: bool, clock: Clock | None, *, prefix: Any = "semel") -> RedisStore:
    """A store on ``redis://``, ``rediss://``, ``unix://`` or, for a cluster, ``redis+cluster://``."""
    clustered = url.startswith(("redis+cluster:", "rediss+cluster:"))
    plain = url.replace("+cluster", "", 1) if clustered else url
    world: Any = redis.asyncio if awaited else redis
    try:
        client = (world.RedisCluster if clustered else world.Redis).from_url(
            plain, socket_timeout=5, socket_connect_timeout=5
        )
    except exceptions.AuthenticationError as error:
        raise StoreBroken(f"Redis refused the user or the password: {error}") from error
    except (exceptions.RedisError, exceptions.RedisClusterException, OSError) as error:  # a cluster client connects now
        raise StoreUnavailable(f"the Redis cluster cannot be reached: {error}") from error
    except ValueError as error:
        raise InvalidRequest(f"this Redis URL cannot be used: {error}") from error
    return RedisStore(client, clock, prefix=prefix, listener=Listener(hearing(redis.Redis.from_url(plain))))
