"""A provider from a package of the user's own is found by its entry point; the service outlives one that is broken."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from semel.service import Settings
from support.jobs import add_models, submit, write_config
from support.service import TestServer, make_app, serve
from support.waiting import eventually

PAGE = Path(__file__).parents[2] / "docs" / "jobs.md"
ENTRIES = """[semel.providers]
acme = acme:Acme
broken = not_installed_anywhere:Provider
local = acme:Acme
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of the page, installed as a package of its own."""
    found = re.search(r"```python\n(# acme.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / "acme.py").write_text(found[1])
    metadata = tmp_path / "acme-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def service(tmp_path: Path, package: None, caplog: pytest.LogCaptureFixture) -> Iterator[TestServer]:
    configs = tmp_path / "configs"
    write_config(configs, "train", parameters={"steps": 3}, providers={"acme": {"machine": "large"}})
    write_config(configs, "bare", parameters={})
    app = make_app(f"sqlite:///{tmp_path}/semel.db", tmp_path)
    add_models(app)
    with caplog.at_level(logging.ERROR, "semel.service"), serve(app, Settings(configs=str(configs))) as service:
        yield service
    app.close()


def test_a_job_goes_to_a_provider_from_another_package(service: TestServer, caplog: pytest.LogCaptureFixture) -> None:
    with service.client() as client:
        said = submit(client, "train", provider="acme")
        assert said["success"] is True
        run = eventually(lambda: client.get(f"/runs/{said['job_id']}").json())
        assert (run["model"], run["status"]) == ("acme_train", "PENDING")
        refused = submit(client, "bare", provider="acme")
        assert refused["success"] is False
        assert "the config 'bare' needs providers.acme.machine" in refused["error"]
        assert submit(client, "train", provider="broken")["error"].startswith("Unknown provider: broken")
    told = [record.getMessage() for record in caplog.get_records("setup") if record.name == "semel.service"]
    assert any("the provider 'broken' of not_installed_anywhere:Provider cannot be loaded" in line for line in told)
    assert "the provider 'local' of acme:Acme is not used: its class has another name" in told
