"""What can never work is refused before anything is sent to a store, by an error that says what to do."""

import asyncio
import os
import pwd
import re
import sqlite3
import stat
import subprocess
import sys
import tempfile
import textwrap
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from functools import partial
from itertools import count
from math import inf, nan
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from sqlalchemy import NullPool, create_engine, event, make_url
from sqlalchemy.engine import Engine as SqlEngine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from semel import (
    AsyncOnce,
    Claim,
    Granted,
    IdempotentProcessor,
    InvalidRequest,
    NotMigrated,
    Once,
    OutcomeGone,
    Policy,
    Replay,
    SemelError,
    StoreBroken,
    StoreUnavailable,
    Unencodable,
    Unfingerprintable,
)
from semel.cli import main as semel_command
from semel.once.stores.memory import MemoryStore
from semel.types import Verdict
from support import servers
from support.databases import KINDS, SHARED_KINDS, StoreUrls, store_urls

names = count()


class WatchedStore(MemoryStore):
    """Notes whether anything reached it."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = 0

    async def claim(self, requests: Any) -> list[Verdict]:
        self.reached += 1
        return await super().claim(requests)

    async def get(self, refs: Any) -> Any:
        self.reached += 1
        return await super().get(refs)

    def mark(self, *args: Any) -> Any:
        self.reached += 1
        return super().mark(*args)


@pytest.fixture(scope="module")
def urls(request: pytest.FixtureRequest) -> Iterator[StoreUrls]:
    with store_urls(request) as urls:
        yield urls


@pytest.fixture
def store() -> WatchedStore:
    return WatchedStore()


@pytest.fixture
def once(store: WatchedStore) -> Iterator[Once]:
    with Once(store) as once:
        yield once


BAD_NAMES = {
    "empty": "",
    "256 characters": "x" * 256,
    "NUL": "a\0b",
    "newline": "a\nb",
    "escape": "\x1b[2J",
    "delete": "a\x7f",
    "C1 control": "a\x85b",
    "separator of notifications": "a\x1fb",
    "half a surrogate pair": "a\ud800",
    "None": None,
    "bytes": b"key",
    "list": ["key"],
    "float": 1.5,
}
BAD_NAME = pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES.keys())

VERBS: dict[str, Callable[[Once, Any, Any], Any]] = {
    "claim": lambda once, scope, key: once.claim(key, scope=scope),
    "get": lambda once, scope, key: once.get(key, scope=scope),
    "resolve": lambda once, scope, key: once.resolve(key, scope=scope, done=True),
    "check_and_mark": lambda once, scope, key: once.check_and_mark(scope, key),
    "call": lambda once, scope, key: once.call(key, int, scope=scope),
    "consumer": lambda once, scope, key: once.consumer(scope, key=lambda _: key)(lambda _: 1)({}),
}
EVERY_VERB = pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS.keys())


@EVERY_VERB
@BAD_NAME
def test_a_key_that_cannot_be_one_is_refused(once: Once, store: WatchedStore, verb: Any, name: Any) -> None:
    with pytest.raises(InvalidRequest, match="key"):
        verb(once, "scope", name)
    assert store.reached == 0


@EVERY_VERB
@BAD_NAME
def test_a_scope_that_cannot_be_one_is_refused(once: Once, store: WatchedStore, verb: Any, name: Any) -> None:
    with pytest.raises(InvalidRequest, match="scope"):
        verb(once, name, "key")
    assert store.reached == 0


@pytest.mark.parametrize("name", [7, uuid.UUID(int=7)])
def test_where_a_function_makes_the_key_numbers_and_uuids_are_written_out(once: Once, name: Any) -> None:
    assert once.guard(scope="scope", key=lambda: name)(plain_seven)() == 7
    record = once.get(str(name), scope="scope")
    assert record is not None
    assert record.status == "completed"
    for ask in (once.claim, once.get):
        with pytest.raises(InvalidRequest, match="the key must be a text"):
            ask(name)


@pytest.mark.parametrize("scope", ["", "x" * 256, "a\0b", 7, ["scope"]])
def test_a_scope_to_guard_in_is_checked_when_the_function_is_decorated(once: Once, scope: Any) -> None:
    with pytest.raises(InvalidRequest, match="scope"):
        once.guard(scope=scope)(plain_seven)


def plain_seven() -> int:
    return 7


def test_a_text_of_another_type_is_a_name_too(once: Once) -> None:
    class Text(str):
        __slots__ = ()

    assert isinstance(once.claim(Text("key"), scope=Text("scope")), Granted)
    assert once.get("key", scope="scope") is not None


ODD_NAMES = [
    "𝄞" * 255,
    "x" * 255,
    "a b",
    "a:b:{c}*?[d]\\",
    "'; DROP TABLE semel_keys; --",
    "%s$1:p",
    "ключ",
    "\u202e",
    "NULL",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("awaited", [False, True], ids=["blocking", "async"])
def test_every_other_text_is_a_name(urls: StoreUrls, kind: str, awaited: bool) -> None:
    """Up to 255 characters, whatever they mean to a shell, a pattern or a database."""

    async def claim_each(once: AsyncOnce) -> None:
        async with once:
            for name in ODD_NAMES:
                scope = f"{name[:200]}{int(awaited)}"
                verdict = await once.claim(name, scope=scope, fingerprint=name[:200])
                assert isinstance(verdict, Granted)
                await once.complete(verdict.claim, name)
                replay = await once.claim(name, scope=scope, fingerprint=name[:200])
                assert isinstance(replay, Replay)
                assert replay.outcome.value == name
                record = await once.get(name, scope=scope)
                assert record is not None
                assert (record.scope, record.key, record.fingerprint) == (scope, name, name[:200])

    if awaited:
        asyncio.run(claim_each(AsyncOnce(urls[kind])))
        return
    with Once(urls[kind]) as once:
        for name in ODD_NAMES:
            scope = f"{name[:200]}{int(awaited)}"
            assert once.call(name, partial(str, name), scope=scope, fingerprint=name[:200]).replayed is False
            assert once.call(name, lambda: "again", scope=scope, fingerprint=name[:200]).value == name


@pytest.mark.parametrize("fingerprint", ["x" * 201, "a\0b", "a\nb", "\udfff", None, b"1:a", 5, ["1:a"]])
def test_a_fingerprint_that_cannot_be_one_is_refused(once: Once, store: WatchedStore, fingerprint: Any) -> None:
    with pytest.raises(InvalidRequest, match="fingerprint"):
        once.claim("key", fingerprint=fingerprint)
    with pytest.raises(InvalidRequest):
        once.guard(fingerprint=lambda: fingerprint)(lambda: 1)()
    assert store.reached == 0


BAD_TIMES = {
    "negative": -1,
    "zero": 0,
    "less than a microsecond": 1e-9,
    "NaN": nan,
    "infinite": inf,
    "minus infinity": -inf,
    "bool": True,
    "text": "60",
    "timedelta": timedelta(seconds=60),
    "300 years": 1e10 + 1,
    "an int beyond all floats": 10**400,
}
BAD_TIME = pytest.mark.parametrize("time", BAD_TIMES.values(), ids=BAD_TIMES.keys())


@BAD_TIME
@pytest.mark.parametrize("what", ["lease", "ttl"])
def test_a_time_that_cannot_be_one_is_refused(once: Once, store: WatchedStore, what: str, time: Any) -> None:
    with pytest.raises(InvalidRequest, match=what):
        once.claim("key", **{what: time})
    with pytest.raises(InvalidRequest, match=what):
        once.call("key", int, **{what: time})
    assert store.reached == 0


@pytest.mark.parametrize("time", [-1, nan, inf, True, "60", 10**400])
def test_a_wait_that_cannot_be_one_is_refused(once: Once, store: WatchedStore, time: Any) -> None:
    with pytest.raises(InvalidRequest, match="wait"):
        once.claim("key", wait=time)
    with pytest.raises(InvalidRequest, match="wait"):
        once.call("key", int, wait=time)
    assert store.reached == 0


def test_not_to_wait_at_all_is_fine(once: Once) -> None:
    assert isinstance(once.claim("key", wait=0), Granted)
    assert once.call("other", int, wait=0).value == 0


@BAD_TIME
def test_a_policy_with_such_a_time_is_refused(time: Any) -> None:
    for what in ("ttl", "lease", "value_ttl", "purge_every"):
        with pytest.raises(InvalidRequest, match=what):
            Policy(**{what: time})
        with pytest.raises(InvalidRequest, match=what):
            Policy().but(**{what: time})


@BAD_TIME
def test_a_value_time_that_cannot_be_one_leaves_the_claim_as_it_is(once: Once, time: Any) -> None:
    """The caller still holds the key, and completes it with a better one."""
    claim = granted(once.claim("key"))
    with pytest.raises(InvalidRequest, match="value_ttl"):
        once.complete(claim, 7, value_ttl=time)
    once.complete(claim, 7, value_ttl=60)
    assert isinstance(once.claim("key"), Replay)


@BAD_TIME
def test_a_renewal_for_such_a_time_is_refused(once: Once, time: Any) -> None:
    claim = granted(once.claim("key", lease=30))
    with pytest.raises(InvalidRequest, match="lease"):
        once.renew(claim, lease=time)
    record = once.get("key")
    assert record is not None
    assert record.lease_until_us == claim.lease_until_us


@BAD_TIME
def test_a_mark_for_such_a_time_is_refused(once: Once, store: WatchedStore, time: Any) -> None:
    with pytest.raises(InvalidRequest, match="ttl"):
        once.check_and_mark("type", "message", ttl=time)
    assert store.reached == 0


@pytest.mark.parametrize("retry_for", [-1, nan, inf, "5", True])
def test_a_patience_that_cannot_be_one_is_refused(retry_for: Any) -> None:
    with pytest.raises(InvalidRequest, match="retry_for"):
        Once("memory://", retry_for=retry_for)


@pytest.mark.parametrize("field", ["in_flight", "on_error", "on_crash", "store_failure"])
@pytest.mark.parametrize("word", ["Wait", "", 1, True, ["wait"]])
def test_a_policy_knows_its_words(field: str, word: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"{field} must be one of '"):
        Policy(**{field: word})


@pytest.mark.parametrize("most", [-1, 1.5, "10MB", True])
def test_a_policy_with_such_a_size_is_refused(most: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"max_response_bytes must be a number of bytes, or None"):
        Policy(max_response_bytes=most)


def test_a_policy_has_no_other_fields(once: Once) -> None:
    with pytest.raises(InvalidRequest, match=r"no retries; it has .*lease"):
        Policy().but(retries=3)
    with pytest.raises(InvalidRequest, match="no retries"):
        once.guard(retries=3)


def test_a_policy_is_a_policy() -> None:
    with pytest.raises(InvalidRequest, match="Policy"):
        Once("memory://", policy={"ttl": 60})  # type: ignore[arg-type]


def granted(verdict: object) -> Claim:
    assert isinstance(verdict, Granted)
    return verdict.claim


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_cannot_be_kept_leaves_the_key_done(urls: StoreUrls, kind: str) -> None:
    """The work happened: nobody does it again, and its value is gone."""
    with Once(urls[kind]) as once:
        claim = granted(once.claim("key", scope="unencodable"))
        with pytest.raises(Unencodable, match="object"):
            once.complete(claim, {"a": [object()]})
        verdict = once.claim("key", scope="unencodable")
        assert isinstance(verdict, Replay)
        assert verdict.outcome.gone
        with pytest.raises(OutcomeGone, match=r"could not be stored: a value of type object"):
            _ = verdict.outcome.value

        ran: list[object] = [object(), 7]
        guarded = once.guard(scope="unencodable calls")(lambda: ran.pop(0))
        with pytest.raises(Unencodable):
            guarded()
        with pytest.raises(OutcomeGone):
            guarded()
        assert ran == [7]


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_cannot_be_kept_leaves_the_key_done_in_a_loop_too(urls: StoreUrls, kind: str) -> None:
    async def scenario() -> None:
        ran: list[object] = [object(), 7]

        async def work() -> object:
            return ran.pop(0)

        async with AsyncOnce(urls[kind]) as once:
            guarded = once.guard(scope="unencodable async calls")(work)
            with pytest.raises(Unencodable):
                await guarded()
            with pytest.raises(OutcomeGone):
                await guarded()
            assert ran == [7]

    asyncio.run(scenario())


def test_audit_data_that_cannot_be_kept_marks_nothing(once: Once) -> None:
    with pytest.raises(Unencodable):
        once.check_and_mark("type", "message", object())
    assert once.check_and_mark("type", "message") == "not_seen"


def test_a_value_to_resolve_with_is_checked_first(once: Once) -> None:
    granted(once.claim("key", lease=0.000001, on_crash="unknown"))
    with pytest.raises(Unencodable):
        once.resolve("key", done=True, value=object())
    record = once.get("key")
    assert record is not None
    assert record.status == "unknown"


def test_a_verdict_is_not_a_claim(once: Once) -> None:
    """The likeliest slip: what was granted is in its `claim`."""
    verdict: Any = once.claim("key")
    verbs: list[Callable[[Any], object]] = [once.complete, once.release, once.renew]
    for verb in verbs:
        for wrong in (verdict, None, "key"):
            hint = "pass its .claim" if wrong is verdict else "a Granted verdict has it as .claim"
            with pytest.raises(InvalidRequest, match=rf"a claim is needed here, not \w+; {re.escape(hint)}"):
                verb(wrong)
    once.complete(verdict.claim)


def test_there_must_be_something_to_resolve(once: Once) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="nothing to resolve"):
            once.resolve("key", done=True)
        once.call("key", int)


@pytest.mark.parametrize(
    "url",
    ["", "semel.db", "foo://x", "mysql://host/name", "http://host", "://", " sqlite:///x", "SQLITE:///x"],
)
def test_a_url_of_no_known_kind_names_those_that_are(url: str) -> None:
    for once_class in (Once, AsyncOnce):
        with pytest.raises(InvalidRequest, match=r"memory://, sqlite:///"):
            once_class(url)


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite:///file::memory:?cache=shared&uri=true",
        "sqlite:///file:x?mode=memory&uri=true",
    ],
)
def test_sqlite_needs_a_file(url: str) -> None:
    """An in-memory database is another one for each connection; memory:// is what was meant."""
    for once_class in (Once, AsyncOnce):
        with pytest.raises(InvalidRequest, match="memory://"):
            once_class(url)


@pytest.mark.parametrize(
    "url", ["redis://host:port/0", "postgresql://user:hunter2@host:port/name", "sqlite", "redis", "postgresql"]
)
def test_a_url_that_cannot_be_read_is_refused_without_its_password(url: str) -> None:
    for once_class in (Once, AsyncOnce):
        with pytest.raises(InvalidRequest, match="URL") as refused:
            once_class(url)
        assert "hunter2" not in str(refused.value)


class Half:
    """It has some verbs of a store, and not the others."""

    def claim(self) -> None: ...


@pytest.mark.parametrize("target", [None, 5, b"sqlite:///x", object(), Path("semel.db"), sqlite3, Half()])
def test_what_is_no_store_is_refused(target: Any) -> None:
    for once_class in (Once, AsyncOnce):
        with pytest.raises(InvalidRequest, match=r"opened by a URL"):
            once_class(target)


def test_an_option_that_a_store_does_not_have_is_refused(redis_url: str) -> None:
    for url in ("memory://", "sqlite:///x.db", "postgresql://host/name", redis_url):
        with pytest.raises(TypeError, match="pool_size"):
            Once(url, pool_size=5)  # type: ignore[call-arg]
    for url in ("memory://", "sqlite:///x.db", "postgresql://host/name", create_engine("sqlite://"), MemoryStore()):
        with pytest.raises(InvalidRequest, match="prefix= is for a store in Redis"):
            Once(url, prefix="x")
    with pytest.raises(InvalidRequest, match="pool"):
        Once("memory://", pool=0)


@pytest.mark.parametrize("prefix", ["", "a{b}", "a*", "a b", "a\nb", 5, b"x"])
def test_a_prefix_that_redis_would_misread_is_refused(redis_url: str, prefix: Any) -> None:
    with pytest.raises(InvalidRequest, match="prefix"):
        Once(redis_url, prefix=prefix)


def test_each_face_wants_an_engine_of_its_kind(postgres_url: str) -> None:
    url = make_url(postgres_url)
    blocking = create_engine(url.set(drivername="postgresql+psycopg"))
    awaited = create_async_engine(url.set(drivername="postgresql+asyncpg"))
    with pytest.raises(InvalidRequest, match="blocking engine"):
        Once(awaited)
    with pytest.raises(InvalidRequest, match="async one"):
        AsyncOnce(blocking)


def test_each_face_wants_a_redis_client_of_its_kind(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client, pytest.raises(InvalidRequest, match="async one"):
        AsyncOnce(client)
    with pytest.raises(InvalidRequest, match="blocking client"):
        Once(redis.asyncio.Redis.from_url(redis_url))
    with (
        redis.Redis.from_url(redis_url, decode_responses=True) as client,
        pytest.raises(InvalidRequest, match="decode_responses"),
    ):
        Once(client)


# -- guarding --------------------------------------------------------------------------------------------------------


def plain(order: object = None) -> int:
    return 1


async def awaited(order: object = None) -> int:
    return 1


def test_each_face_guards_functions_of_its_kind(once: Once) -> None:
    with pytest.raises(InvalidRequest, match=r"awaited is async.*AsyncOnce"):
        once.guard()(awaited)
    with pytest.raises(InvalidRequest, match="awaited is async"):
        once.consumer("type", key=str)(awaited)
    with pytest.raises(InvalidRequest, match="awaited is async"):
        once.call("key", awaited)

    other = AsyncOnce("memory://")
    with pytest.raises(InvalidRequest, match="plain is a plain def"):
        other.guard()(plain)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="plain is a plain def"):
        other.consumer("type", key=str)(plain)  # type: ignore[arg-type]


def test_a_processor_wants_a_face_of_its_functions_kind(once: Once) -> None:
    with pytest.raises(InvalidRequest):
        IdempotentProcessor(awaited, once)
    with pytest.raises(InvalidRequest):
        IdempotentProcessor(plain, AsyncOnce("memory://"))


@pytest.mark.parametrize("key", [None, True, 1.5, b"key", ("a", "b"), object()])
def test_a_key_function_must_give_a_key(once: Once, store: WatchedStore, key: Any) -> None:
    for guarded in (once.guard(key=lambda _: key)(plain), once.consumer("type", key=lambda _: key)(plain)):
        with pytest.raises(InvalidRequest, match="key= returned"):
            guarded({})
    assert store.reached == 0


@pytest.mark.parametrize("wrong", ["id", 5, ["id"]])
def test_what_makes_a_key_is_a_function(once: Once, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="key="):
        once.guard(key=wrong)(plain)
    with pytest.raises(InvalidRequest, match="key="):
        once.consumer("type", key=wrong)(plain)
    with pytest.raises(InvalidRequest, match="data="):
        once.consumer("type", key=str, data=wrong)(plain)
    with pytest.raises(InvalidRequest, match="reconcile="):
        once.guard(reconcile=wrong)(plain)
    with pytest.raises(InvalidRequest, match="fingerprint="):
        once.guard(fingerprint=wrong)(plain)


def test_arguments_without_a_fingerprint_are_named(once: Once, store: WatchedStore) -> None:
    with pytest.raises(Unfingerprintable, match=r"order.*exclude="):
        once.guard()(plain)({"when": object()})
    assert store.reached == 0
    assert once.guard(exclude=["order"])(plain)({"when": object()}) == 1


def test_a_guarded_function_keeps_to_its_signature(once: Once, store: WatchedStore) -> None:
    with pytest.raises(TypeError, match="argument"):
        once.guard()(plain)(1, 2)  # type: ignore[call-arg]
    assert store.reached == 0


# -- a user's own transaction ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [None, "session", object(), sqlite3.connect, 5])
def test_on_takes_a_session_or_a_connection(sqlite_url: str, wrong: Any) -> None:
    with Once(sqlite_url) as once, pytest.raises(InvalidRequest, match="SQLAlchemy connection or session"):
        once.on(wrong)


def test_on_does_not_take_an_engine(sqlite_url: str) -> None:
    with Once(sqlite_url) as once, pytest.raises(InvalidRequest, match="SQLAlchemy connection or session"):
        once.on(create_engine(sqlite_url))  # type: ignore[arg-type]


def test_on_takes_a_session_of_its_own_kind(sqlite_url: str) -> None:
    engine = create_engine(sqlite_url)
    async_engine = create_async_engine(sqlite_url.replace("sqlite:", "sqlite+aiosqlite:"))
    with Once(sqlite_url) as once, pytest.raises(InvalidRequest, match="blocking session"):
        once.on(AsyncSession(async_engine))  # type: ignore[arg-type]
    with Session(engine) as session, pytest.raises(InvalidRequest, match="blocking session"):
        AsyncOnce(sqlite_url).on(session)  # type: ignore[arg-type]


def test_on_takes_a_session_on_the_same_kind_of_database(urls: StoreUrls, sqlite_url: str) -> None:
    with Session(create_engine(sqlite_url, poolclass=NullPool)) as session:
        with Once(urls["postgres"]) as once, pytest.raises(InvalidRequest, match=r"session is on sqlite.*postgresql"):
            once.on(session)
        for url in ("memory://", urls["redis"]):
            with Once(url) as once, pytest.raises(InvalidRequest, match="shares a database"):
                once.on(session)


# -- missing extras --------------------------------------------------------------------------------------------------

WITHOUT = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
from semel import AsyncOnce, MissingExtra, Once
"""


def python(program: str, *, missing: tuple[str, ...] = ()) -> str:
    """Run a program in a Python of its own, where some packages are not installed; what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT.format(missing=missing) + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


DRIVERS = ("redis", "hiredis", "psycopg", "psycopg_binary", "asyncpg", "greenlet", "aiosqlite")


def test_a_missing_driver_names_the_extra_to_install() -> None:
    """One Python for all of these: each start takes a while."""
    output = python(
        """
        import asyncio
        def says(once_class, url):
            try:
                once = once_class(url)
                asyncio.run(once.open()) if once_class is AsyncOnce else once.open()
            except MissingExtra as error:
                assert isinstance(error, ImportError)
                print(error)
        for once_class in (Once, AsyncOnce):
            for url in ("redis://localhost/0", "rediss://x", "redis+cluster://x", "postgresql://localhost/x"):
                says(once_class, url)
        """,
        missing=DRIVERS,
    )
    lines = output.splitlines()
    assert ["semel[redis]" in line for line in lines] == [True, True, True, False] * 2
    assert ["pip install 'semel[postgres]'" in line for line in lines] == [False, False, False, True] * 2


def test_greenlet_alone_may_be_missing() -> None:
    """SQLAlchemy needs it for its async engines only, and does not come with it."""
    output = python(
        """
        import asyncio
        async def main():
            try:
                await AsyncOnce("postgresql://localhost:1/x", retry_for=0).open()
            except MissingExtra as error:
                print(error)
        asyncio.run(main())
        """,
        missing=("greenlet",),
    )
    assert "pip install 'semel[postgres]'" in output


def test_memory_and_sqlite_need_no_extra(tmp_path: Path) -> None:
    output = python(
        f"""
        import asyncio
        for url in ("memory://", "sqlite:///{tmp_path / "semel.db"}"):
            with Once(url) as once:
                print(once.call("key", lambda: 7).value)
            async def main():
                async def work():
                    return 8
                async with AsyncOnce(url) as once:
                    print((await once.call("async key", work)).value)
            asyncio.run(main())
        """,
        missing=DRIVERS,
    )
    assert output.split() == ["7", "8", "7", "8"]


def test_the_command_names_the_extra_too() -> None:
    output = python(
        """
        import contextlib, io
        from semel.cli import main
        with contextlib.redirect_stderr(io.StringIO()) as said:
            print(main(["migrate", "postgresql://localhost/x"]), said.getvalue())
        """,
        missing=DRIVERS,
    )
    assert output.startswith("1 semel: ")
    assert "pip install 'semel[postgres]'" in output


# -- databases that cannot be used -----------------------------------------------------------------------------------


def async_opens(url: str, **options: Any) -> None:
    async def opens() -> None:
        once = AsyncOnce(url, **options)
        try:
            await once.open()
        finally:
            await once.close()

    asyncio.run(opens())


def blocking_opens(url: str, **options: Any) -> None:
    once = Once(url, **options)
    try:
        once.open()
    finally:
        once.close()


BOTH_OPEN = pytest.mark.parametrize("opens", [blocking_opens, async_opens], ids=["blocking", "async"])


@BOTH_OPEN
def test_a_database_that_is_not_migrated_is_refused(postgres_url: str, opens: Callable[..., None]) -> None:
    """On PostgreSQL a migration is the operator's decision; the message is the command to run."""
    with pytest.raises(NotMigrated, match=r"run: semel migrate 'postgresql://") as refused:
        opens(postgres_url)
    assert str(make_url(postgres_url).database) in str(refused.value)


def test_every_verb_says_so(postgres_url: str) -> None:
    with pytest.raises(NotMigrated), Once(postgres_url):
        pass
    once = Once(postgres_url, collect=False)
    for ask in (
        lambda: once.claim("key"),
        lambda: once.get("key"),
        lambda: once.check_and_mark("type", "message"),
        lambda: once.call("key", int),
        once.purge,
        once.stats,
    ):
        with pytest.raises(NotMigrated, match="semel migrate"):
            ask()
    once.close()


def test_tables_that_vanished_are_said_to_be_missing(postgres_url: str) -> None:
    assert semel_command(["migrate", postgres_url]) == 0
    with psycopg.connect(postgres_url) as connection:
        connection.execute("DROP TABLE semel_keys CASCADE")
    with Once(postgres_url, collect=False) as once, pytest.raises(NotMigrated, match="semel migrate"):
        once.claim("key")


def test_a_session_on_a_file_without_semels_tables_is_told_so(sqlite_url: str, tmp_path: Path) -> None:
    other = create_engine(f"sqlite:///{tmp_path / 'other.db'}", poolclass=NullPool)
    with Once(sqlite_url) as once, Session(other) as session, pytest.raises(NotMigrated, match="semel migrate"):
        once.on(session).claim("key")


@BOTH_OPEN
def test_a_directory_that_does_not_exist_is_said_at_once(tmp_path: Path, opens: Callable[..., None]) -> None:
    with pytest.raises(StoreBroken, match="unable to open"):
        opens(f"sqlite:///{tmp_path / 'missing' / 'semel.db'}")


@BOTH_OPEN
def test_a_directory_is_not_a_file(tmp_path: Path, opens: Callable[..., None]) -> None:
    with pytest.raises(StoreBroken, match="unable to open"):
        opens(f"sqlite:///{tmp_path}")


@BOTH_OPEN
def test_a_file_that_is_no_database_is_left_as_it_was(tmp_path: Path, opens: Callable[..., None]) -> None:
    letter = tmp_path / "letter.txt"
    letter.write_text("Dear reader, " * 1000)
    with pytest.raises(StoreBroken, match="not a database"):
        opens(f"sqlite:///{letter}")
    assert letter.read_text() == "Dear reader, " * 1000


@BOTH_OPEN
def test_a_database_opened_for_reading_only_grants_nothing(sqlite_url: str, opens: Callable[..., None]) -> None:
    with Once(sqlite_url) as once:
        once.call("key", lambda: 7)
    with closing(sqlite3.connect(make_url(sqlite_url).database or "")) as connection, connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    connection.close()
    with pytest.raises(StoreBroken, match="readonly"):
        opens(f"{sqlite_url.replace(':///', ':///file:')}?mode=ro&uri=true")


READ_ONLY = """
import os, sys
from pathlib import Path
folder, account = Path(sys.argv[1]), int(sys.argv[2])
url = f"sqlite:///{folder / 'semel.db'}"
with Once(url) as once:  # everything is imported: the account that runs the rest may not see this Python's files
    once.call("done", lambda: 7)
(folder / "semel.db").chmod(0o444)
folder.chmod(0o555)
if account:
    for path in (folder / "semel.db", folder):
        os.chown(path, account, account)
    os.setgroups([])
    os.setgid(account)
    os.setuid(account)
for ask in (lambda: once.claim("new"), lambda: once.call("new", lambda: print("worked"))):
    once = Once(url)
    try:
        print(ask())
    except StoreBroken as error:
        print(type(error).__name__, error)
    once.close()
"""


def test_a_read_only_file_grants_nothing() -> None:
    """A real one, so the work is done by an account that permissions bind."""
    nobody = next(entry.pw_uid for entry in pwd.getpwall() if entry.pw_uid != 0)
    program = WITHOUT.format(missing=()) + "from semel import StoreBroken\n" + READ_ONLY
    with tempfile.TemporaryDirectory(dir=open_to_all()) as folder:
        done = subprocess.run(
            [sys.executable, "-c", program, folder, str(nobody if os.geteuid() == 0 else 0)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        Path(folder).chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("StoreBroken") == done.stdout.count("readonly") == 2, done.stdout
    assert done.stdout.count(f"the database file {folder}/semel.db cannot be used") == 2
    assert done.stdout.count("change the owner or the permissions of both") == 2
    assert "Granted" not in done.stdout
    assert "worked" not in done.stdout


def open_to_all() -> str:
    """A folder for temporary files that every account can enter; this account's own may be private."""
    places = (tempfile.gettempdir(), "/tmp", "/var/tmp")
    return next(
        place
        for place in places
        if all(each.stat().st_mode & stat.S_IXOTH for each in [Path(place), *Path(place).resolve().parents])
    )


def test_a_full_disk_grants_nothing_and_goes_on_when_there_is_room(sqlite_url: str) -> None:
    """The file may not grow; what it holds is still replayed, and nothing is lost."""
    with Once(sqlite_url) as once:
        once.call("before", lambda: 7)

    limits = [10**9]

    def limit(connection: sqlite3.Connection, _: object) -> None:
        connection.execute(f"PRAGMA max_page_count = {limits[0]}")

    event.listen(SqlEngine, "connect", limit)
    try:
        limits[0] = 1  # SQLite takes this as "the pages that it has"
        once = Once(sqlite_url, retry_for=30)
        done: list[str] = []

        def fill() -> None:
            for number in range(1000):
                once.complete(granted(once.claim(f"key {number}")), "x" * 100)
                done.append(f"key {number}")

        with pytest.raises(StoreBroken, match="full"):
            fill()
        assert once.call("before", int).value == 7
        once.close()

        limits[0] = 10**9
        with Once(sqlite_url) as roomy:
            assert all(isinstance(roomy.claim(key), Replay) for key in done)
            assert roomy.call("after", lambda: 8).value == 8
    finally:
        event.remove(SqlEngine, "connect", limit)


@pytest.fixture(scope="module")
def guarded_postgres() -> Iterator[str]:
    """The URL, with password, of a user whom the server asks for one; a server of our own, because of that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SEMEL_TEST_POSTGRES_URL", raising=False)
        with servers.postgres() as server:
            assert server._process is not None
            rules = server._process.directory / "data" / "pg_hba.conf"
            rules.write_text(f"local all keeper scram-sha-256\n{rules.read_text()}")
            with psycopg.connect(server.url, autocommit=True) as connection:
                connection.execute("CREATE USER keeper PASSWORD 'hunter2'")
                connection.execute("SELECT pg_reload_conf()")
            url = make_url(server.url).set(username="keeper", password="hunter2")
            server._process.wait_until(lambda: asks_for_a_password(url.set(password="wrong")))
            yield url.render_as_string(hide_password=False)


def asks_for_a_password(url: Any) -> bool:
    try:
        psycopg.connect(url.render_as_string(hide_password=False)).close()
    except psycopg.OperationalError:
        return True
    return False


@BOTH_OPEN
def test_a_wrong_password_is_said_at_once_and_not_repeated(guarded_postgres: str, opens: Callable[..., None]) -> None:
    """Waiting does not help, so nobody waits; and no message tells the password."""
    with pytest.raises(StoreBroken, match="password") as refused:
        opens(guarded_postgres.replace("hunter2", "hunter3"), retry_for=3600)
    assert "hunter" not in str(refused.value)


@BOTH_OPEN
def test_a_user_or_database_that_does_not_exist_is_said_at_once(
    postgres_server: servers.Postgres, opens: Callable[..., None]
) -> None:
    url = make_url(postgres_server.url)
    for wrong in (url.set(database="missing"), url.set(username="missing")):
        with pytest.raises(StoreBroken, match="missing"):
            opens(wrong.render_as_string(hide_password=False), retry_for=3600)


@BOTH_OPEN
def test_a_user_without_the_right_is_told_so(
    guarded_postgres: str, postgres_server: servers.Postgres, opens: Callable[..., None]
) -> None:
    """The tables are there, but not for this user."""
    owner = make_url(guarded_postgres).set(username="postgres", password=None).render_as_string(hide_password=False)
    assert semel_command(["migrate", owner]) == 0
    with pytest.raises(StoreBroken, match=r"permission denied|privilege"):
        opens(guarded_postgres, retry_for=3600)


@BOTH_OPEN
def test_a_redis_user_without_password_or_right_is_told_so(
    redis_server: servers.Redis, opens: Callable[..., None]
) -> None:
    name = f"keeper-{next(names)}"
    with redis.Redis.from_url(redis_server.url) as client:
        client.execute_command("ACL", "SETUSER", name, "on", ">hunter2", "~*", "-@all", "+select")
    address = redis_server.url.removeprefix("redis://")
    try:
        with pytest.raises(StoreBroken) as wrong:
            opens(f"redis://{name}:hunter3@{address}", retry_for=3600)
        assert "hunter" not in str(wrong.value)
        with pytest.raises(StoreBroken):
            opens(f"redis://{name}:hunter2@{address}", retry_for=3600)
    finally:
        with redis.Redis.from_url(redis_server.url) as client:
            client.execute_command("ACL", "DELUSER", name)


@BOTH_OPEN
@pytest.mark.parametrize("url", ["postgresql://user:hunter2@127.0.0.1:1/name", "redis://:hunter2@127.0.0.1:1/0"])
def test_a_server_that_is_not_there_is_unavailable(url: str, opens: Callable[..., None]) -> None:
    with pytest.raises(StoreUnavailable) as refused:
        opens(url, retry_for=0.1)
    assert not isinstance(refused.value, StoreBroken)
    assert "hunter2" not in str(refused.value)


def test_every_error_of_semel_is_one_tree() -> None:
    import semel

    errors = [found for found in vars(semel).values() if isinstance(found, type) and issubclass(found, BaseException)]
    assert len(errors) > 10
    assert all(issubclass(error, SemelError) for error in errors)


@pytest.mark.parametrize("kind", SHARED_KINDS)
def test_a_caller_with_bad_input_harms_nobody_in_its_batch(urls: StoreUrls, kind: str) -> None:
    """Calls leave together, so what one of them holds must have been checked before."""

    async def scenario() -> list[Any]:
        async with AsyncOnce(urls[kind]) as once:
            asked = [once.claim(f"innocent {number}", fingerprint="\ud800" * (number % 2)) for number in range(20)]
            return list(await asyncio.gather(*asked, return_exceptions=True))

    answers = asyncio.run(scenario())
    assert [type(answer) for answer in answers] == [Granted, InvalidRequest] * 10
