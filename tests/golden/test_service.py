"""The service as its callers meet it: its OpenAPI schema, a story of requests and answers, its metrics."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import httpx
import pytest

from golden.comparing import compare, compare_json
from golden.exposition import families
from golden.recording import Recorder
from golden.scenario import play
from golden.serving import serving

PROSE = ("description", "summary")


class Served(NamedTuple):
    """What a server was asked, and what it told of itself."""

    exchanges: list[dict[str, Any]]
    schema: dict[str, Any]
    metrics: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served")) as server:
        schema = httpx.get(f"{server.address}/schema/openapi.json", timeout=60).json()
        with closing(Recorder(server.address)) as recorder:
            play(recorder, server.url)
        metrics = httpx.get(
            f"{server.address}/metrics", headers={"Authorization": f"Bearer {recorder.token}"}, timeout=60
        )
        yield Served(recorder.exchanges(), schema, metrics.text)


def test_the_answers_stay(served: Served) -> None:
    compare_json("exchanges.json", served.exchanges)


def test_the_openapi_schema_stays(served: Served) -> None:
    """Its words may get better, so only their presence is compared; its version is the package's."""
    schema = _without_prose(served.schema)
    schema["info"]["version"] = "<version>"
    compare_json("openapi.json", schema)


def _without_prose(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: "…" if name in PROSE and isinstance(each, str) else _without_prose(each)
            for name, each in value.items()
        }
    return [_without_prose(each) for each in value] if isinstance(value, list) else value


def test_the_metrics_of_the_service_stay(served: Served) -> None:
    compare("metrics-service.txt", "\n".join(families(served.metrics)))
