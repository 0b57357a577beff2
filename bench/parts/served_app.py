"""The server that bench/service.py loads: the service around one model, and an endpoint that only parses and echoes.

python served_app.py PORT DATABASE
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from typing import Any

from litestar import Litestar, Response, post
from litestar.params import JSONBody

from semel import App
from semel.api_types import RunRequest
from semel.service import Settings
from semel.service.api import responses
from semel.service.app import build
from semel.service.server.granian import make_server
from semel.service.state import ServiceState


@post("/echo")
async def echo(data: JSONBody[RunRequest]) -> Response[Any]:
    """The body, decoded and encoded again."""
    return responses.json(data, 201)


def made_app(url: str) -> App:
    app = App(url, artifacts=tempfile.gettempdir(), dedupe_window=0)

    @app.model("baseline_forecast_v1")
    async def forecast(scenario: str, horizon_months: int, region: str) -> None:
        """Never run here."""

    return app


async def main(port: int, url: str) -> None:
    settings = Settings(port=port)
    site = ServiceState(made_app(url), settings)
    application = inner = build(site)
    while not isinstance(inner, Litestar):
        inner = inner._inner
    inner.register(echo)
    await site.ensure_open()
    await make_server(application, settings).serve()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
