"""A service with tokens, models and a worker, in a thread, for tests with a browser."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from semel import App, Granted, Once, Unknown
from semel.dashboard.overview import feed
from semel.dashboard.runs import run_list
from semel.service import sse
from support.apps import dashboard_app
from support.browser import Visitor
from support.service import TestServer, TokenClient, TokenServer, make_app, serve
from support.waiting import eventually

Visit = Callable[..., Visitor]


class DashboardServer(TokenServer):
    """A server with tokens, the models of `dashboard_app` and a worker. Every test has users of its own."""

    def __init__(self, service: TestServer, client: Any, folder: Path) -> None:
        super().__init__(service, client)
        self._folder = folder
        self._numbers = itertools.count(1)

    def newcomer(self, role: str = "submitter", tenant: str = "") -> TokenClient:
        """A new user, whom no other test uses."""
        return self.admit(f"user{next(self._numbers)}", role, tenant)

    def name_of(self, person: TokenClient) -> str:
        """The name of the user."""
        name: str = person.get("/usage").json()["user"]
        return name

    def gate(self) -> Path:
        """The path of a file, not created yet, that the model ``hold`` can wait for."""
        return self._folder / f"gate{next(self._numbers)}"

    def submit(self, by: TokenClient, model: str, parameters: dict[str, Any] | None = None, **more: Any) -> str:
        """Submit a run; returns its id."""
        answer = by.post("/runs", json={"model": model, "parameters": parameters or {}, **more})
        assert answer.status_code == 201, answer.text
        run_id: str = answer.json()["run_id"]
        return run_id

    def ended(self, run_id: str) -> dict[str, Any]:
        """The run, once it has ended."""
        for _ in range(3):
            run: dict[str, Any] = self.root.get(f"/runs/{run_id}", params={"wait": 25}).json()
            if run["finished_at"] is not None:
                return run
        raise AssertionError(f"run {run_id} did not end")

    def leave_unknown(self, key: str, scope: str) -> None:
        """Claim a key and abandon it, so that its outcome is unknown."""
        once = Once(self.app.url, collect=False)
        try:
            assert isinstance(once.claim(key, scope=scope, lease=0.01, on_crash="unknown"), Granted)
            eventually(lambda: isinstance(once.claim(key, scope=scope, on_crash="unknown"), Unknown))
        finally:
            once.close()

    def enter(self, visit: Visit, person: TokenClient, **options: Any) -> Visitor:
        """A browser in which the user is signed in."""
        visitor = visit(self.address, **options)
        visitor.context.add_cookies([{"name": "semel_session", "value": person.secret, "url": self.address}])
        return visitor


@contextmanager
def dashboard_server(url: str, folder: Path, working: bool = True) -> Iterator[DashboardServer]:
    """The server on a database, until the end of the block."""
    app: App = make_app(url, folder, dedupe_window=0)
    dashboard_app.register(app)
    try:
        with (
            _frequent_updates(),
            serve(app) as service,
            service.client() as client,
            app.working(processes=0, poll=0.2, drain=0.0, name="scene") if working else nullcontext(),
        ):
            yield DashboardServer(service, client, folder)
    finally:
        app.close()


@contextmanager
def _frequent_updates() -> Iterator[None]:
    """Update open pages more often than usual, so that tests wait less."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed, "REFRESH_EVERY", 0.3)
        patch.setattr(sse, "CHECK_EVERY", 0.5)
        patch.setattr(run_list, "BUSY_PAUSE", 0.3)
        patch.setattr(run_list, "QUIET_PAUSE", 0.3)
        yield
