"""``semel serve [MODULE:APP]``: the server, and a worker beside it."""

from __future__ import annotations

import functools
import gc
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import click

from semel.cli._options import (
    AMOUNT,
    APP,
    COUNT,
    PORT,
    POSITIVE,
    TRANSPORTS,
    argument,
    command,
    examples,
    log_format_option,
    needs_extra,
    option,
    queues_option,
    wait_for_database_option,
)
from semel.runs.execution.scratch import scratch

if TYPE_CHECKING:
    from semel.service.settings import Settings

_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_COUNTERS = 32 << 20
"""Bytes of shared memory that the counters of the processes may need."""

_TRY = """
This server runs the models of the demo. In another terminal, submit a run; sent twice, the request creates one run:

  curl -s -w '\\n' {url}/runs -H 'Content-Type: application/json' -H 'Idempotency-Key: try-1' \\
    -d '{{"model": "baseline_forecast_v1", "parameters": {{"scenario": "high_inflation", "seconds": 5}}}}'

List the runs, or submit another and wait for its result:

  curl -s -w '\\n' {url}/runs
  {semel} submit baseline_forecast_v1 scenario=low --wait --server {url}

The dashboard: {url}/
The HTTP API: {url}/schema/openapi.json
Metrics for Prometheus: {url}/metrics

Ctrl-C stops the server; the runs stay in the database.
"""

_place = functools.partial(option, section="Storage and transport")
_server = functools.partial(option, section="The server")
_worker = functools.partial(option, section="The worker")


@command
@examples(
    "semel serve",
    "semel serve myproject.runs:app --port 9000",
    "semel serve myproject.runs:app --db postgresql://user@host/name --processes 4 --no-worker",
)
@argument("app", required=False, metavar="[MODULE:APP]", help=f"{APP}  [default: semel.demo:app]")
@_place("--db", metavar="URL", help="postgresql://user@host/name or sqlite:///file.db.  [default: the app's]")
@_place("--transport", type=click.Choice(TRANSPORTS), help="How workers are notified of runs.  [default: the app's]")
@_place("--redis", metavar="URL", help="The Redis for rq and celery: redis://host/0.")
@_place(
    "--artifacts", metavar="PLACE", help="Where large results and artifacts are stored: a folder, s3://bucket/prefix, …"
)
@_place("--configs", metavar="FOLDER", help="The folder of config files.")
@wait_for_database_option("Storage and transport")
@_server(
    "--host",
    metavar="ADDRESS",
    help="The address to listen on; other than loopback requires tokens.  [default: 127.0.0.1]",
)
@_server("--port", type=PORT, help="The port; 0 for any free port, which is printed.  [default: 8001]")
@_server("--processes", type=POSITIVE, help="Processes that serve requests.  [default: 1]")
@_server("--public-url", metavar="URL", help="The public address of this server, for callbacks of providers.")
@_server("--max-body", type=POSITIVE, metavar="BYTES", help="The maximum size of a request body.  [default: 1048576]")
@_server(
    "--rate",
    type=AMOUNT,
    metavar="N",
    help="Requests per second and token, in each process; 0 for no limit.  [default: 0]",
)
@_server("--drain", type=AMOUNT, help="How long to wait for active requests and runs at shutdown.  [default: 30]")
@_server("--events", metavar="URL", help="A Redis whose stream semel:events gets every event.")
@_server("--private-webhooks", is_flag=True, flag_value=True, default=None, help="Allow webhooks to private addresses.")
@_worker(
    "--no-worker", "worker", type=bool, is_flag=True, flag_value=False, default=None, help="Do not start a worker."
)
@queues_option("The worker")
@_worker("--concurrency", type=COUNT, help="Async runs at the same time.  [default: 100]")
@_worker("--worker-processes", type=COUNT, help="Child processes for blocking models.  [default: CPUs]")
@_worker("--threads", type=COUNT, help="Runs in threads at the same time.  [default: 8]")
@log_format_option("The log")
@option(
    "--log-level", section="The log", type=click.Choice(["debug", "info", "warning", "error"]), help="[default: info]"
)
def serve(queues: list[str] | None, **options: Any) -> int:
    """Serve an app over HTTP until SIGTERM or Ctrl-C, with a worker in a process of its own.

    At shutdown the server accepts no more connections and waits for active requests and runs; runs that do not end in
    time are returned. A second signal ends everything at once.

    Every option can be set by an environment variable: --db is SEMEL_DB, --log-format is SEMEL_LOG_FORMAT, --no-worker
    is SEMEL_WORKER=false, and so on. An option takes precedence over its variable.
    """
    from semel.service.server import claim_port
    from semel.service.settings import from_environment

    held, settings = claim_port(from_environment(os.environ, queues=",".join(queues) if queues else None, **options))
    with held, _metrics_folder():
        with needs_extra("service"), _without_collecting():
            from semel.cli._app import DEMO, load_app
            from semel.service.server.serve import serve as serve_processes

        def announce(text: str) -> None:
            for warning in _warnings(settings):
                logging.getLogger("semel.serve").warning(warning)
            print(text if settings.app != DEMO else f"{text}\n{_what_to_try(settings)}", flush=True)

        return serve_processes(settings, load_app, announce)


def _warnings(settings: Settings) -> Iterator[str]:
    """Problems that would otherwise show only when a job or a result needs the folder."""
    if settings.configs is not None and not Path(settings.configs).is_dir():
        yield f"there is no folder {settings.configs} (--configs): its configs are unknown until it exists"
    place = settings.artifacts
    if place is not None and "://" not in place:
        try:
            Path(place).mkdir(0o700, parents=True, exist_ok=True)
            with TemporaryFile(dir=place):
                pass
        except OSError as error:
            why = error.strerror or error
            yield f"{place} (--artifacts) cannot be written ({why}): runs with large results or files will fail"


def _what_to_try(settings: Settings) -> str:
    """Commands to paste into another terminal."""
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host  # noqa: S104 -- a comparison
    url = f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
    return _TRY.format(url=url, semel=_program())


def _program() -> str:
    """What to type for this command: what ``SEMEL_PROGRAM`` says, its name, or its path if it is not on the PATH."""
    called = sys.argv[0]
    if given := os.environ.get("SEMEL_PROGRAM"):
        return given
    return called if Path(called).name == "semel" and shutil.which("semel") != called else "semel"


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Import without garbage collection, which costs a tenth of the start; then freeze, so that forked processes share
    the memory.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _metrics_folder() -> Iterator[None]:
    """Set the folder of the processes' metrics, which prometheus-client reads when it is imported.

    It crashes on a full disk, because it maps its files into memory: so they are in /dev/shm if possible.
    """
    if os.environ.get(_FOLDER):
        yield
        return
    memory = Path("/dev/shm")  # noqa: S108 -- a folder of our own is made in it
    place = memory if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > _COUNTERS else None
    with scratch("metrics", place) as folder:
        os.environ[_FOLDER] = str(folder)
        try:
            yield
        finally:
            del os.environ[_FOLDER]
