"""``semel serve [MODULE:APP]``: the server, and a worker beside it."""

from __future__ import annotations

import argparse
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

from semel.cli import options
from semel.scratch import scratch

if TYPE_CHECKING:
    from semel.service.settings import Settings

_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_COUNTERS = 32 << 20
"""Bytes that the counters of some processes may take."""

_EPILOG = """every option may be a variable of the environment instead: --db is SEMEL_DB, --log-format is
SEMEL_LOG_FORMAT, --no-worker is SEMEL_WORKER=false, and so on; an option wins over its variable

examples:
  semel serve                                     the demo's models, on ./semel.db and port 8001
  semel serve myproject.runs:app --port 9000      your own
  semel serve myproject.runs:app --db postgresql://user@host/name --processes 4 --no-worker
"""

_TRY = """
These are the models of the demo. In another terminal, submit a run and get it at once; send it again, and it is found:

  curl -s -w '\\n' {url}/runs -H 'Content-Type: application/json' -H 'Idempotency-Key: try-1' \\
    -d '{{"model": "baseline_forecast_v1", "parameters": {{"scenario": "high_inflation", "seconds": 5}}}}'

See what has become of it, or submit another and wait for it:

  curl -s -w '\\n' {url}/runs
  {semel} submit baseline_forecast_v1 scenario=low --wait --server {url}

Or watch it in a browser: {url}/
What else can be asked is at {url}/schema/openapi.json, and how it is doing at {url}/metrics.
Ctrl-C here ends it; the runs stay in the database.
"""


class _Help(argparse.HelpFormatter):
    """Keeps the lines of the epilog, and fills those of the rest."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text == _EPILOG else super()._fill_text(text, width, indent)


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "serve",
        help="serve runs, jobs and quotas over HTTP, with a worker beside",
        description="Serve an app over HTTP until SIGTERM or Ctrl-C, with a worker in a process of its own beside it. "
        "Then no connection is taken any more, requests and runs that are under way may end, and the rest is given "
        "back; a second signal ends everything at once.",
        epilog=_EPILOG,
        formatter_class=_Help,
    )
    parser.add_argument(
        "app",
        nargs="?",
        metavar="MODULE:APP",
        help="where the semel.App is, such as myproject.runs:app (default: the demo's, semel.demo:app)",
    )
    _say_where(parser.add_argument_group("where things are"))
    _say_how(parser.add_argument_group("the server"))
    _say_worker(parser.add_argument_group("the worker"))
    _say_log(parser.add_argument_group("what it tells"))
    parser.set_defaults(do=_serve)


def _say_where(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--db", metavar="URL", help="postgresql://user@host/name, sqlite:///file.db (default: the app's)"
    )
    group.add_argument(
        "--transport", choices=["database", "rq", "celery"], help="how workers hear of runs (default: the app's)"
    )
    group.add_argument("--redis", metavar="URL", help="the Redis of rq and celery: redis://host/0")
    group.add_argument("--artifacts", metavar="WHERE", help="large results and files: a folder, s3://bucket/prefix, …")
    group.add_argument("--configs", metavar="FOLDER", help="named configs of jobs, one file each")
    options.wait_option(group)


def _say_how(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host", metavar="ADDRESS", help="where to listen; beyond this machine only with tokens (default: 127.0.0.1)"
    )
    group.add_argument(
        "--port", type=options.port, metavar="N", help="0 takes any that is free and prints it (default: 8001)"
    )
    group.add_argument(
        "--processes", type=options.whole, metavar="N", help="processes that answer requests (default: 1)"
    )
    group.add_argument("--public-url", metavar="URL", help="how the outside calls this server, for those who call back")
    group.add_argument(
        "--max-body", type=options.whole, metavar="BYTES", help="the largest body of a request (default: 1048576)"
    )
    group.add_argument(
        "--rate",
        type=options.amount,
        metavar="N",
        help="requests a second of one token, in each process; 0: no limit (default: 0)",
    )
    group.add_argument(
        "--drain",
        type=options.amount,
        metavar="SECONDS",
        help="for requests and runs under way when it is told to end (default: 30)",
    )
    group.add_argument("--events", metavar="URL", help="a Redis to whose stream semel:events every event goes")
    group.add_argument(
        "--private-webhooks", action="store_const", const=True, help="webhooks may go to private addresses"
    )


def _say_worker(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--no-worker", dest="worker", action="store_const", const=False, help="only answer; workers run elsewhere"
    )
    options.queue_option(group)
    group.add_argument("--concurrency", type=options.count, metavar="N", help="async runs at a time (default: 100)")
    group.add_argument(
        "--worker-processes",
        type=options.count,
        metavar="N",
        help="child processes for blocking models (default: CPUs)",
    )
    group.add_argument("--threads", type=options.count, metavar="N", help="runs in threads at a time (default: 8)")


def _say_log(group: argparse._ArgumentGroup) -> None:
    options.log_option(group)
    group.add_argument("--log-level", choices=["debug", "info", "warning", "error"], help="default: info")


def _serve(chosen: argparse.Namespace) -> int:
    from semel.service.ports import claim_port
    from semel.service.settings import Settings, from_environment

    given = {name: value for name, value in vars(chosen).items() if name in Settings.__struct_fields__}
    given["queues"] = ",".join(chosen.queues) if chosen.queues else None
    held, settings = claim_port(from_environment(os.environ, **given))
    with held, _place_to_count():
        with _without_collecting():
            from semel.cli.worker import DEMO, load_app
            from semel.service.serving import serve

        def say(said: str) -> None:
            for warning in _warnings(settings):
                logging.getLogger("semel.serve").warning(warning)
            print(said if settings.app != DEMO else f"{said}\n{_what_to_try(settings)}", flush=True)

        return serve(settings, load_app, say)


def _warnings(settings: Settings) -> Iterator[str]:
    """What would only be noticed when a job or a result needs it."""
    if settings.configs is not None and not Path(settings.configs).is_dir():
        yield f"there is no folder {settings.configs} (--configs): no config of it is known until there is"
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
    """Lines that work when they are pasted into another terminal."""
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host  # noqa: S104 -- what was asked for
    url = f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
    return _TRY.format(url=url, semel=_program())


def _program() -> str:
    """How this command is called here: by its path, where it is not on the PATH."""
    called = sys.argv[0]
    return called if Path(called).name == "semel" and shutil.which("semel") != called else "semel"


@contextmanager
def _without_collecting() -> Iterator[None]:
    """While code is loaded nothing dies, and looking for what has costs a tenth of the start.

    What is loaded then stays as it is, so that the processes which are forked from this one share its memory.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _place_to_count() -> Iterator[None]:
    """A folder in which the processes count for /metrics: prometheus-client wants it named before it is imported.

    It maps its files into memory, and dies of a disk that is full then; so they lie in memory, where that is to be had.
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
