"""With SEMEL_DOCS_URL, every refusal links to its section on troubleshooting; without it, there is no link."""

from pathlib import Path

import httpx
import pytest

from semel import InvalidRequest
from semel.service import Settings
from semel.service.settings import from_environment
from support.service import make_app, serve

DOCS = "https://docs.example.com/semel"


def test_refusals_of_routes_and_of_the_middleware_link_to_the_documentation(sqlite_url: str, tmp_path: Path) -> None:
    app = make_app(sqlite_url, tmp_path)
    with serve(app, Settings(docs_url=f"{DOCS}/")) as server:
        unknown = httpx.post(f"{server.address}/runs", json={"model": "nothing"})
        away = httpx.get(f"{server.address}/runs", headers={"X-Forwarded-For": "192.0.2.1"})
    app.close()
    for refused, code in ((unknown, "unknown_model"), (away, "loopback_only")):
        address = f"{DOCS}/troubleshooting.html#{code}"
        assert refused.json()["type"] == address
        assert refused.headers["link"] == f'<{address}>; rel="help"'


def test_without_the_setting_a_refusal_has_its_name_alone(sqlite_url: str, tmp_path: Path) -> None:
    app = make_app(sqlite_url, tmp_path)
    with serve(app) as server:
        refused = httpx.post(f"{server.address}/runs", json={"model": "nothing"})
    app.close()
    assert refused.json()["type"] == "urn:semel:unknown-model"
    assert "link" not in refused.headers


@pytest.mark.parametrize(
    "wrong", ["docs", "javascript:1", "https://docs example", 'https://x/"><b>', "https://x\r\nA: b"]
)
def test_an_address_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidRequest, match="SEMEL_DOCS_URL must be a URL"):
        from_environment({"SEMEL_DOCS_URL": wrong})
