"""Every extra alone, in an environment that has what it brings and nothing else, does its first example.

An environment is a new ``venv`` into which the files of the distributions that the extra names are linked, and of those
that these name in turn: what ``pip install 'semel[extra]'`` would install, in a second and without a network.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path
from textwrap import dedent

import httpx
import pytest
from moto.server import ThreadedMotoServer
from packaging.requirements import Requirement

import semel
from support.servers import free_port

ROOT = Path(__file__).parents[1]
SEMEL = Path(semel.__file__).parent
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
PATIENCE = 120


class Environment:
    """A Python that has semel with some extras."""

    def __init__(self, folder: Path, *extras: str) -> None:
        self.folder = folder
        self._bin = folder / ".venv" / "bin"
        venv.create(folder / ".venv", symlinks=True)
        packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder / ".venv")}))
        for each in closure("semel", frozenset(extras)).values():
            link(each, packages)
        if not (packages / "semel").exists():  # an editable install names a folder
            (packages / "semel").symlink_to(SEMEL)

    def popen(self, *arguments: str) -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SEMEL_", "PYTHON"))}
        return subprocess.Popen(
            [self._bin / "python", *arguments],
            cwd=self.folder,
            env=kept,
            text=True,
            stdout=-1,
            stderr=subprocess.STDOUT,
        )

    def python(self, *arguments: str) -> str:
        with self.popen(*arguments) as process:
            said, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, said
        return said.strip()

    def run(self, code: str, **values: str) -> str:
        """Run a program in which the words of ``values`` are replaced, and return its last line."""
        for name, value in values.items():
            code = code.replace(name, repr(value))
        return self.python("-W", "error::ImportWarning", "-c", dedent(code)).splitlines()[-1]


def closure(name: str, extras: frozenset[str], found: dict[str, Distribution] | None = None) -> dict[str, Distribution]:
    """A distribution and all that it needs, with these extras."""
    found = {} if found is None else found
    seen = re.sub(r"[-_.]+", "-", name).lower()
    this = found[seen] = distribution(name)
    for requirement in map(Requirement, this.requires or ()):
        wanted = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in (extras or {""})
        )
        other = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if wanted and (other not in found or requirement.extras):
            closure(requirement.name, frozenset(requirement.extras), found)
    return found


def link(installed: Distribution, packages: Path) -> None:
    """Link every file of a distribution, so that packages which share a folder stay apart."""
    for file in installed.files or ():
        if file.parts[0] == ".." or file.suffix in (".pyc", ".pth"):
            continue
        target = packages / file
        source = Path(str(installed.locate_file(file)))
        for name in (source, *source.parent.glob(f"__pycache__/{source.stem}.{sys.implementation.cache_tag}.pyc")):
            linked = target.parent / name.relative_to(source.parent)
            linked.parent.mkdir(parents=True, exist_ok=True)
            if not linked.exists():
                linked.symlink_to(name)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """A server in the environment of ``service``."""
    folder = tmp_path / "server"
    folder.mkdir()
    port = free_port()
    environment = Environment(folder, "service")
    with environment.popen("-m", "semel.cli", "serve", "--port", str(port)) as process:
        try:
            assert process.stdout is not None
            assert any("semel serves" in line for line in process.stdout), "it ended"
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.communicate(timeout=PATIENCE)


GUARDED = """
    from semel import Once

    with Once(URL) as once:

        @once.guard(scope="charge", key=lambda order: order)
        def charge(order):
            return f"R-{order}"

        charge("17")
        print(charge.call("17").value, charge.call("17").replayed)
"""


def test_without_an_extra_keys_and_runs_work_on_sqlite(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    assert environment.run(GUARDED, URL="sqlite:///semel.db") == "R-17 True"
    assert environment.python("-m", "semel.cli", "--version").startswith("semel ")
    (tmp_path / "work.py").write_text(WORK.replace("APP", "'sqlite:///runs.db'"))
    assert environment.run("from work import app\nwith app.working():\n    done(app)".replace("done(app)", DONE)) == "7"


WORK = """
from semel import App

app = App(APP)


@app.model("add")
def add(a: int, b: int):
    return a + b


@app.model("write")
def write(ctx):
    ctx.artifact("note.txt").write_text("kept")
"""
S3 = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}
DONE = "run = app.wait(app.submit('add', {'a': 3, 'b': 4}).id, timeout=60); print(app.result(run.id))"


def test_an_environment_has_nothing_else(tmp_path: Path) -> None:
    """The tests below would prove nothing if it had."""
    environment = Environment(tmp_path)
    others = ["redis", "psycopg", "httpx", "litestar", "rq", "celery", "obstore", "prometheus_client", "pytest"]
    find = "from importlib.util import find_spec\nprint([name for name in OTHERS if find_spec(name)])"
    assert environment.run(find.replace("OTHERS", repr(others))) == "[]"
    assert "MissingExtra" in environment.run(
        "from semel import Once\ntry:\n    Once('redis://localhost')\nexcept ImportError as e: print(type(e).__name__)"
    )


def test_redis(tmp_path: Path, redis_url: str) -> None:
    assert Environment(tmp_path, "redis").run(GUARDED, URL=redis_url) == "R-17 True"


def test_postgres(tmp_path: Path, postgres_url: str) -> None:
    environment = Environment(tmp_path, "postgres")
    environment.python("-m", "semel.cli", "migrate", postgres_url)
    assert environment.run(GUARDED, URL=postgres_url) == "R-17 True"
    awaited = """
        import asyncio
        from semel import AsyncOnce

        async def main():
            async with AsyncOnce(URL) as once:
                print((await once.get("17", scope="charge")).outcome.value)

        asyncio.run(main())
    """
    assert environment.run(awaited, URL=postgres_url) == "R-17"


def test_service_and_client(tmp_path: Path, served: str) -> None:
    environment = Environment(tmp_path, "client")
    code = """
        import semel

        with semel.Client(URL) as client:
            run = client.submit("baseline_forecast_v1", {"scenario": "low", "seconds": 0})
            print(client.wait(run.run_id).status)
    """
    assert environment.run(code, URL=served) == "SUCCEEDED"
    submit = ("submit", "baseline_forecast_v1", "seconds=0", "--wait", "--server", served)
    assert "SUCCEEDED" in environment.python("-m", "semel.cli", *submit)


BROKERED = "APP, transport='{}', redis=REDIS"


def test_rq(tmp_path: Path, redis_url: str) -> None:
    environment = Environment(tmp_path, "rq")
    made = WORK.replace("APP", BROKERED.format("rq")).replace("APP", "'sqlite:///runs.db'")
    (tmp_path / "work.py").write_text(made.replace("REDIS", repr(redis_url)))
    submit = "from work import app\nrun = app.submit('add', {'a': 3, 'b': 4}, idempotency_key='once')\n"
    assert environment.run(f"{submit}print(run.status)") == "PENDING"
    environment.python("-m", "rq.cli", "worker", "semel", "--url", redis_url, "--burst")
    assert environment.run(f"{submit}print(app.result(run.id))") == "7"


def test_celery(tmp_path: Path, redis_url: str) -> None:
    environment = Environment(tmp_path, "celery")
    made = WORK.replace("APP", BROKERED.format("celery")).replace("APP", "'sqlite:///runs.db'")
    (tmp_path / "work.py").write_text(made.replace("REDIS", repr(redis_url)))
    worker = ("-m", "celery", "-A", "semel.runs.celery", "-b", redis_url, "worker", "-Q", "semel", "--pool", "solo")
    with environment.popen(*worker) as process:
        try:
            assert environment.run(f"from work import app\n{DONE}") == "7"
        finally:
            process.terminate()
            process.communicate(timeout=PATIENCE)


def test_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in S3.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        httpx.put(f"http://{host}:{port}/bucket").raise_for_status()
        (tmp_path / "work.py").write_text(WORK.replace("APP", "'sqlite:///runs.db', artifacts='s3://bucket/runs'"))
        code = "from work import app\nwith app.working():\n    run = app.wait(app.submit('write').id, timeout=60)\n"
        done = f"{code}print(b''.join(app.artifact(run.id, 'note.txt')).decode())"
        assert Environment(tmp_path, "s3").run(done) == "kept"
    finally:
        server.stop()


def test_prometheus(tmp_path: Path) -> None:
    code = """
        from prometheus_client import REGISTRY
        from semel import Once
        from semel.metrics.prometheus import PrometheusMetrics

        with Once("memory://", on_event=PrometheusMetrics()) as once:
            for _ in range(4):
                once.call("order-1", int, scope="orders")
        print(REGISTRY.get_sample_value("idempotency_hit_total", {"door": "function", "scope": "orders"}))
    """
    assert Environment(tmp_path, "prometheus").run(code) == "3.0"


def test_opentelemetry(tmp_path: Path) -> None:
    code = """
        from semel import Once
        from semel.metrics.opentelemetry import OpenTelemetryMetrics

        with Once("memory://", on_event=OpenTelemetryMetrics()) as once:
            print(once.call("order-1", lambda: 7).value)
    """
    assert Environment(tmp_path, "opentelemetry").run(code) == "7"


def test_audit(tmp_path: Path) -> None:
    environment = Environment(tmp_path, "audit")
    public = environment.python("-m", "semel.cli", "audit", "key", "seal.key").strip()
    assert len(bytes.fromhex(public)) == 32


def test_every_extra_has_a_test() -> None:
    tested = {word for name in globals() if name.startswith("test_") for word in name.split("_")}
    assert EXTRAS - {"all", "dev"} <= tested
