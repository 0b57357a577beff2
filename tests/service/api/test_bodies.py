"""One request's body never holds up the others: it is bounded before it is decoded, and large ones are read apart."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel import App
from semel.api_types import RunRequest
from semel.runs import strict_json
from semel.service.api import request
from semel.service.api.problems import ApiError
from semel.service.jobs import configs as config_files
from support.service import PATIENCE, TestServer, make_app, serve

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab"\\[]{},:é\x00', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\[]{},:', max_size=4), inner, max_size=4),
    max_leaves=40,
)


class Slow:
    """A parameter whose check lasts until the test lets it end."""

    begun = threading.Event()
    go_on = threading.Event()

    @classmethod
    def model_validate(cls, value: Any) -> Any:
        if value == "wait":
            cls.begun.set()
            assert cls.go_on.wait(PATIENCE), "nobody else was answered meanwhile"
        return cls()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestServer]:
    folder = tmp_path_factory.mktemp("bodies")
    app = make_app(f"sqlite:///{folder}/semel.db", folder)

    @app.model("slow", isolation="thread")
    def slow(how: Slow, more: Any = None) -> None:
        """Never run here."""

    with serve(app) as server:
        yield server


def real_depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(real_depth, inner), default=0)


def real_count(value: Any) -> int:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return 1 + sum(map(real_count, inner))


@given(JSON, st.sampled_from([None, 1]), st.booleans())
def test_the_shape_of_a_text_is_found_without_decoding_it(value: Any, indent: int | None, ascii_only: bool) -> None:
    many = [value, [[]] * strict_json.MAX_DEPTH]  # of few brackets the number is taken for the depth
    text = json.dumps(many, indent=indent, ensure_ascii=ascii_only).encode()
    assert strict_json.depth(text) == real_depth(many)
    wide = [value, [0] * 1000]  # as well
    text = json.dumps(wide, indent=indent, ensure_ascii=ascii_only).encode()
    assert real_count(wide) <= strict_json.count(text) <= 2 * real_count(wide)


HOSTILE = {
    "empty lists": b"[" + b"[]," * 340_000 + b"[]]",
    "empty objects": b"[" + b"{}," * 340_000 + b"{}]",
    "numbers": b"[" + b"1," * 500_000 + b"1]",
    "deep": b"[" * 150_000 + b"]" * 150_000,
    "just too deep": (b"[" * 111 + b"]" * 111 + b",") * 1700,
    "never closed": b"[" * 1_000_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_is_refused_at_a_fraction_of_what_decoding_it_costs(name: str) -> None:
    body = b'{"model": "add", "parameters": {"a": ' + HOSTILE[name] + b"}}"

    def refused() -> None:
        with pytest.raises(ApiError) as caught:
            request.decoded(body, RunRequest)
        assert caught.value.status in (400, 413)

    assert min(cost(refused) for _ in range(3)) < what_decoding_costs()


@cache
def what_decoding_costs() -> float:
    return min(cost(lambda: msgspec.json.decode(HOSTILE["empty lists"])) for _ in range(2))


def cost(work: Callable[[], object]) -> float:
    """The CPU time of this thread."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def test_a_body_of_the_most_values_is_taken_and_one_more_is_not() -> None:
    most = request.MOST_VALUES
    assert len(request.decoded(b"[" + b"0," * (most - 3) + b"0]")) == most - 2
    with pytest.raises(ApiError, match=f"{most:,} values"):
        request.decoded(b"[" + b"0," * most + b"0]")
    assert len(request.decoded(b"[" + b"[]," * (most - 3) + b"{}]")) == most - 2
    text = json.dumps(",[{" * most).encode()
    assert request.decoded(text) == ",[{" * most


def test_others_are_answered_while_large_parameters_are_checked(server: TestServer) -> None:
    """On the event loop the check would wait for the other answer for ever, and the other answer for the check."""
    asked = {"model": "slow", "parameters": {"how": "wait", "more": "x" * request.LARGE}}
    for path, body in (("/runs", asked), ("/runs/bulk", [asked])):
        Slow.begun.clear()
        Slow.go_on.clear()
        with server.client() as client, server.client() as other, ThreadPoolExecutor(1) as threads:
            answer = threads.submit(client.post, path, json=body, headers={"Idempotency-Key": path})
            assert Slow.begun.wait(PATIENCE)
            assert other.get("/runs").status_code == 200
            Slow.go_on.set()
            assert answer.result().status_code in (200, 201)


@pytest.mark.parametrize(("size", "apart"), [(100, False), (request.LARGE + 1, True)])
def test_large_bodies_are_decoded_in_a_thread(
    server: TestServer, monkeypatch: pytest.MonkeyPatch, size: int, apart: bool
) -> None:
    seen: list[str] = []
    decoded = request.decoded

    def noting(*given: Any) -> Any:
        seen.append(threading.current_thread().name)
        return decoded(*given)

    monkeypatch.setattr(request, "decoded", noting)
    with server.client() as client:
        answer = client.post("/runs", json={"model": "slow", "parameters": {"how": "x" * size}})
    assert answer.status_code == 201
    assert len(seen) == 1
    assert seen[0].startswith("asyncio_") == apart


def test_a_config_is_checked_in_a_thread(server: TestServer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    body_of = config_files.checked_body

    def noting(given: Any) -> Any:
        seen.append(threading.current_thread().name)
        return body_of(given)

    monkeypatch.setattr(config_files, "checked_body", noting)
    with server.client() as client:
        answer = client.put(
            "/api/cloud/configs/large", json={"model": "slow", "parameters": {"how": "x" * request.LARGE}}
        )
    assert answer.status_code == 200
    assert [name.startswith("asyncio_") for name in seen] == [True]


def test_an_app_in_an_event_loop_checks_large_parameters_apart(tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path}/semel.db", artifacts=tmp_path)

    @app.model("slow", isolation="thread")
    def slow(how: Slow, more: Any = None) -> None:
        """Never run here."""

    async def both() -> None:
        Slow.begun.clear()
        Slow.go_on.clear()
        large = asyncio.create_task(app.aio.submit("slow", {"how": "wait", "more": "x" * 100_000}))
        await asyncio.to_thread(Slow.begun.wait, PATIENCE)
        assert (await app.aio.runs()).runs == []
        Slow.go_on.set()
        assert (await large).status == "PENDING"
        await app.aio.close()

    asyncio.run(both())
