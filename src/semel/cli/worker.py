"""``semel worker module:app``: work on the runs of an app."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from typing import Any

from semel.errors import InvalidRequest


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "worker",
        help="work on the runs of an app",
        description="Work on the runs of an app until SIGTERM or Ctrl-C: then begin nothing new, finish what is "
        "begun, and give back what is not done in time. A second signal gives it back at once.",
    )
    parser.add_argument("app", metavar="MODULE:APP", help="where the semel.App is, such as myproject.runs:app")
    parser.add_argument(
        "-q", "--queue", action="append", metavar="NAME", help="a queue to serve; may be given again (default: default)"
    )
    parser.add_argument("--name", help="how the worker calls itself (default: the host's name)")
    parser.add_argument("--concurrency", type=int, default=100, metavar="N", help="async runs at a time (default: 100)")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="child processes for blocking models (default: CPUs)"
    )
    parser.add_argument("--threads", type=int, default=8, metavar="N", help="runs in threads at a time (default: 8)")
    parser.add_argument(
        "--drain",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long to wait for runs at the end (default: 30)",
    )
    parser.add_argument("--quiet", action="store_true", help="log warnings only")
    parser.set_defaults(do=_work)


def _work(chosen: argparse.Namespace) -> int:
    from semel.runs.worker import Worker

    logging.basicConfig(
        level=logging.WARNING if chosen.quiet else logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    logging.getLogger("alembic").setLevel(logging.WARNING)
    app = load_app(chosen.app)
    worker = Worker(
        app,
        queues=chosen.queue or ["default"],
        name=chosen.name,
        concurrency=chosen.concurrency,
        processes=chosen.processes,
        threads=chosen.threads,
        drain=chosen.drain,
    )
    worker.run()
    return 0


def load_app(place: str) -> Any:
    """The app at ``module:name``, or a clear error. Modules of the working directory are found, too."""
    from semel.runs.app import App

    module_name, separator, attribute = place.partition(":")
    if not separator or not module_name or not attribute:
        raise InvalidRequest(f"{place!r} is not a place of an app; it looks like myproject.runs:app")
    if os.getcwd() not in sys.path:  # noqa: PTH109 -- sys.path holds text
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        found = importlib.import_module(module_name)
    except ImportError as error:
        raise InvalidRequest(f"cannot import {module_name!r}: {error}") from error
    for name in attribute.split("."):
        found = getattr(found, name, None)  # type: ignore[assignment]
    if not isinstance(found, App):
        raise InvalidRequest(f"{place!r} is no semel.App but {type(found).__name__}")
    return found
