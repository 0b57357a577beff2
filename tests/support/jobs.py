"""Small models, configs as files, and jobs submitted over HTTP."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from semel import App, Context
from semel.runs.results import FileResults
from support.service import PATIENCE, TestServer
from support.waiting import eventually

SUBMIT = "/api/cloud/jobs/submit"


def add_models(app: App) -> None:
    """Add models that run in a thread or in the event loop, so that a test's worker starts no child processes."""

    @app.model("add")
    async def add(a: int = 1, b: int = 2) -> int:
        return a + b

    @app.model("fails", max_attempts=1)
    async def fails() -> int:
        raise ValueError("it never works")

    @app.model("read", isolation="thread")
    def read(ctx: Context) -> dict[str, str] | None:
        """The files of the run's data."""
        if ctx.data is None:
            return None
        files = (path for path in sorted(ctx.data.rglob("*")) if path.is_file())
        return {path.relative_to(ctx.data).as_posix(): path.read_text() for path in files}

    @app.model("read_in_loop")
    async def read_in_loop(ctx: Context) -> list[str] | None:
        return None if ctx.data is None else sorted(path.name for path in ctx.data.iterdir())


def write_config(folder: Path, name: str, **body: Any) -> None:
    """Write a config as a file."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(body))


def submit(client: httpx.Client, config: str, key: str | None = None, **more: Any) -> dict[str, Any]:
    """Submit a job; returns the body of the response, whose status is always 200."""
    params = {"provider": more.pop("provider")} if "provider" in more else {}
    body = {"config_name_to_load": config, **({} if key is None else {"idempotency_key": key}), **more}
    answer = client.post(SUBMIT, params=params, json=body)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


def job(client: httpx.Client, job_id: str) -> dict[str, Any]:
    """The job in its present state."""
    answer = client.get(f"/api/cloud/jobs/{job_id}")
    assert answer.status_code == 200, answer.text
    view: dict[str, Any] = answer.json()
    return view


def job_in(client: httpx.Client, job_id: str, *statuses: str) -> dict[str, Any]:
    """The job, once it is in one of these states."""

    def there() -> dict[str, Any] | None:
        view = job(client, job_id)
        return view if view["status"] in statuses else None

    found: dict[str, Any] = eventually(there)
    return found


def runs_of(server: TestServer, queue: str | None = None) -> list[dict[str, Any]]:
    """The runs that the server lists."""
    with server.client() as client:
        found: list[dict[str, Any]] = client.get("/runs", params={} if queue is None else {"queue": queue}).json()[
            "runs"
        ]
    return found


class SlowStore(FileResults):
    """A result store in a folder that stores no file before the test allows it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.began = threading.Event()
        self.go_on = threading.Event()

    def put_file(self, ref: str, path: Path) -> None:
        self.began.set()
        assert self.go_on.wait(PATIENCE), "nobody let it go on"
        super().put_file(ref, path)

    def kept(self) -> Iterator[Path]:
        """Every stored file."""
        return (path for path in self._root.rglob("*") if path.is_file())
