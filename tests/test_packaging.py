"""What is shipped: the archives, the locks, the container, the site."""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

import semel
from support.serve_command import ServeProcess, environment

ROOT = Path(__file__).parents[1]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


SHIPPED = {
    "docs/index.md": "share/doc/semel/index.md",
    "docs/images/overview.png": "share/doc/semel/images/overview.png",
    "ops/alerts.yml": "share/semel/ops/alerts.yml",
    "ops/grafana-dashboard.json": "share/semel/ops/grafana-dashboard.json",
}


def test_both_archives_have_the_documentation_and_what_operators_need(archives: Path) -> None:
    (wheel,), (sdist,) = archives.glob("*.whl"), archives.glob("*.tar.gz")
    in_wheel = zipfile.ZipFile(wheel).namelist()
    assert not [target for target in SHIPPED.values() if not any(name.endswith(f"/data/{target}") for name in in_wheel)]
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert {*SHIPPED, "dev", "Dockerfile", "compose.yaml", "requirements/up.txt", "mkdocs.yml"} <= in_sdist


def locked(name: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for package, version in re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements" / name).read_text(), re.MULTILINE):
        found.setdefault(package, set()).add(version)
    return found


@pytest.mark.parametrize("name", ["up.txt", "image.txt"])
def test_what_is_run_is_what_is_tested(name: str) -> None:
    tested = locked("dev.txt")
    assert {package: versions for package, versions in locked(name).items() if not versions <= tested[package]} == {}


def test_the_service_is_installed_without_the_tools_of_development() -> None:
    assert locked("up.txt").keys().isdisjoint({"pytest", "mypy", "ruff", "playwright", "moto", "psycopg", "redis"})
    assert {"litestar", "granian", "sqlalchemy", "hatchling"} <= locked("up.txt").keys()


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.name)
def test_a_lock_has_hashes_and_names_no_address(path: Path) -> None:
    text = path.read_text()
    pinned = re.findall(r"^[\w.-]+==.*$", text, re.MULTILINE)
    assert pinned
    assert all(line.endswith("\\") for line in pinned)
    assert "://" not in text


def test_every_name_in_the_compose_file_leads_somewhere() -> None:
    services, volumes = COMPOSE["services"], COMPOSE["volumes"]
    assert services.keys() == {"setup", "server", "worker", "postgres", "prometheus", "grafana"}
    for service in services.values():
        assert set(service.get("depends_on", ())) <= services.keys()
        for volume in service.get("volumes", ()):
            source, _, _ = re.sub(r"\$\{\w+:-(.+?)\}", r"\1", volume).partition(":")
            assert (ROOT / source).exists() if source.startswith(".") else source in volumes, volume
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), "open to others"
        assert not re.search(r"(^[^:]+|:latest)$", service["image"]) or service["image"] == "semel"
        assert not service.get("privileged")


def test_the_prometheus_of_the_compose_file_reads_what_is_mounted() -> None:
    config = yaml.safe_load((ROOT / "ops" / "prometheus.yml").read_text())
    mounted = [volume.split(":")[1] for volume in COMPOSE["services"]["prometheus"]["volumes"]]
    assert {f"/etc/prometheus/{name}" for name in config["rule_files"]} <= set(mounted)
    server, workers = config["scrape_configs"]
    assert Path(server["authorization"]["credentials_file"]).parent.as_posix() in mounted
    assert server["static_configs"][0]["targets"] == ["server:8001"]
    assert f"0.0.0.0:{workers['dns_sd_configs'][0]['port']}" in COMPOSE["services"]["worker"]["command"]


def test_the_image_runs_as_a_plain_user_and_copies_what_exists() -> None:
    last = DOCKERFILE.split("\nFROM ")[-1]
    assert re.search(r"^USER 10001$", last, re.MULTILINE)
    assert "RUN" not in last.partition("\nUSER")[2]
    allowed = (ROOT / ".dockerignore").read_text().split("\n")
    for line in re.findall(r"^COPY (?:--\S+ )*(.+)$", DOCKERFILE, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists()
            assert f"!{source.split('/')[0]}" in allowed


@pytest.fixture
def set_up(tmp_path: Path, postgres_url: str) -> dict[str, str]:
    """What the service ``setup`` does, in an empty folder, by a user without a home."""
    commands = Path(sys.executable).parent
    settings = environment(SEMEL_DB=postgres_url, SEMEL_TOKENS=str(tmp_path), PATH=f"{commands}:{os.environ['PATH']}")
    settings.pop("HOME", None)
    for _ in range(2):
        subprocess.run(["sh", ROOT / "ops" / "setup.sh"], cwd=tmp_path, env=settings, check=True, timeout=120)
    return {name: (tmp_path / name).read_text().strip() for name in ("admin", "prometheus")}


def test_the_server_of_the_compose_file_serves_prometheus(
    set_up: dict[str, str], tmp_path: Path, postgres_url: str
) -> None:
    settings = COMPOSE["services"]["server"]["environment"]
    given = {"SEMEL_DB": postgres_url, "SEMEL_WORKER": settings["SEMEL_WORKER"], "SEMEL_HOST": "0.0.0.0"}
    with ServeProcess(tmp_path, **given) as server:
        url = server.address.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/readyz").status_code == 200
        assert httpx.get(f"{url}/metrics").status_code == 401
        for token in set_up.values():
            headers = {"Authorization": f"Bearer {token}"}
            assert "runs_pending" in httpx.get(f"{url}/metrics", headers=headers).text
        assert (
            len(
                httpx.get(f"{url}/admin/tokens", headers={"Authorization": f"Bearer {set_up['admin']}"}).json()[
                    "tokens"
                ]
            )
            == 2
        )


def test_the_documentation_is_built_without_a_warning(tmp_path: Path) -> None:
    """Every link and anchor leads somewhere, and no page is left out of the navigation."""
    built = subprocess.run(
        [ROOT / "dev", "docs", "--site-dir", tmp_path / "site"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    version = ".".join(semel.__version__.split(".")[:2])
    site = tmp_path / "site" / version
    assert 'id="quota_exceeded"' in (site / "troubleshooting.html").read_text()
    assert 'id="semel.Once.claim"' in (site / "python-api.html").read_text()
    assert (site / "search" / "search_index.json").stat().st_size > 100_000
    assert [each["version"] for each in json.loads((tmp_path / "site" / "versions.json").read_text())] == [version]
    assert f"url={version}/index.html" in (tmp_path / "site" / "index.html").read_text()


@pytest.mark.skipif(Path(semel.__file__).parent != ROOT / "src" / "semel", reason="it would replace the tested wheel")
def test_the_command_of_the_checkout_works_where_the_caller_is(tmp_path: Path) -> None:
    command = [ROOT / "dev", "semel", "migrate", "sqlite:///here.db"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    assert (tmp_path / "here.db").exists()
