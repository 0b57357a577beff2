"""``semel worker module:app``: work on the runs of an app. ``semel sweep module:app``: only look after them."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import threading
import traceback
from types import ModuleType
from typing import TYPE_CHECKING, Any

from semel.cli import options
from semel.errors import InvalidRequest
from semel.redaction import Redacting, TextFormatter

if TYPE_CHECKING:
    from semel.runs.app import App

DEMO = "semel.demo:app"
TRANSPORTS = ("database", "rq", "celery")
_PLACES = ("db", "transport", "redis", "artifacts")


def add_to(commands: options.Commands) -> None:
    """Add the commands."""
    parser = options.command(
        commands,
        "worker",
        help="work on the runs of an app",
        description="Work on the runs of an app until SIGTERM or Ctrl-C: then begin nothing new, finish what is "
        "begun, and give back what is not done in time. A second signal gives it back at once.",
        example="semel worker myproject.runs:app --queues default,gpu --processes 4\n"
        "semel worker --db postgresql://user@host/name",
    )
    _add_app(parser)
    options.queue_option(parser)
    parser.add_argument("--name", help="the beginning of the worker's id, which every user sees (default: worker)")
    parser.add_argument(
        "--concurrency", type=options.count, default=100, metavar="N", help="async runs at a time (default: 100)"
    )
    parser.add_argument(
        "--processes", type=options.count, metavar="N", help="child processes for blocking models (default: CPUs)"
    )
    parser.add_argument(
        "--threads", type=options.count, default=8, metavar="N", help="runs in threads at a time (default: 8)"
    )
    parser.add_argument(
        "--drain",
        type=options.amount,
        default=30.0,
        metavar="SECONDS",
        help="how long to wait for runs at the end (default: 30)",
    )
    parser.add_argument(
        "--metrics",
        metavar="[HOST:]PORT",
        help="tell Prometheus there what this worker does, at /metrics (default host: 127.0.0.1)",
    )
    options.wait_option(parser)
    parser.add_argument("--quiet", action="store_true", help="log warnings only")
    options.log_option(parser)
    parser.set_defaults(do=_work)
    _add_sweep(commands)


def _add_sweep(commands: options.Commands) -> None:
    sweep = options.command(
        commands,
        "sweep",
        help="look after the runs of an app without working on any",
        description="Take back runs whose workers are lost, tell RQ or Celery of runs that nobody was told of, publish "
        "events, remove what expired; until SIGTERM or Ctrl-C. Every semel worker does so, too: this is for those who "
        "have only RQ's or Celery's. Several may run; one is elected.",
        example="semel sweep myproject.runs:app\nsemel sweep myproject.runs:app --once",
    )
    _add_app(sweep)
    sweep.add_argument(
        "--every", type=options.amount, default=5.0, metavar="SECONDS", help="between two turns (default: 5)"
    )
    sweep.add_argument("--once", action="store_true", help="one turn, whoever is elected, and end")
    options.wait_option(sweep)
    sweep.add_argument("--quiet", action="store_true", help="log warnings only")
    sweep.set_defaults(do=_sweep)


def _add_app(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "app",
        metavar="MODULE:APP",
        nargs="?",
        help=f"where the semel.App is, such as myproject.runs:app (default: $SEMEL_APP, or the demo's: {DEMO})",
    )
    group = parser.add_argument_group("where things are, instead of where the app says")
    group.add_argument("--db", metavar="URL", help="the database; also $SEMEL_DB")
    group.add_argument("--transport", choices=TRANSPORTS, help="how workers hear of runs; also $SEMEL_TRANSPORT")
    group.add_argument("--redis", metavar="URL", help="the Redis of rq and celery; also $SEMEL_REDIS")
    group.add_argument("--artifacts", metavar="PLACE", help="large results and files; also $SEMEL_ARTIFACTS")


def _placed(chosen: argparse.Namespace) -> App:
    """The app that was named, where it was said to be."""
    place = chosen.app or os.environ.get("SEMEL_APP")
    if not place:
        place = DEMO
        print(f"semel: no MODULE:APP was named, so this is the demo's app, {DEMO}", file=sys.stderr, flush=True)
    where = {name: getattr(chosen, name) or os.environ.get(f"SEMEL_{name.upper()}") or None for name in _PLACES}
    if where["transport"] not in (None, *TRANSPORTS):
        raise InvalidRequest(f"SEMEL_TRANSPORT is one of {', '.join(TRANSPORTS)}, not {where['transport']!r}")
    url = where.pop("db")
    return load_app(place).place(url=url, **where)  # type: ignore[arg-type]  # the transport was looked at above


def _log(chosen: argparse.Namespace) -> None:
    """Log to stderr, unless the app's module has set up a log of its own. Either way no secret is logged."""
    as_json = getattr(chosen, "log_format", None) == "json"
    shown: logging.Formatter = TextFormatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    if as_json:
        from semel.service.logs import formatter

        shown = formatter("json")
    root = logging.getLogger()
    for handler in root.handlers:
        handler.setFormatter(shown if as_json else Redacting.over(handler.formatter))
    if not root.handlers:
        own = logging.StreamHandler()
        own.setFormatter(shown)
        root.addHandler(own)
        root.setLevel(logging.WARNING if chosen.quiet else logging.INFO)
    logging.getLogger("alembic").setLevel(logging.WARNING)


def _sweep(chosen: argparse.Namespace) -> int:
    from semel.runs.sweeper import sweep_until_told

    if not 0.05 <= chosen.every <= 3600:
        raise InvalidRequest(f"--every is a number of seconds from 0.05 to 3600, not {chosen.every}")
    app = _placed(chosen)
    _log(chosen)
    _wait_for_database(app, chosen)
    lost = sweep_until_told(app, every=chosen.every, once=chosen.once)
    if chosen.once:
        print(f"{lost} lost runs were taken back")
    return 0


def _work(chosen: argparse.Namespace) -> int:
    from semel.runs.worker import Worker

    app = _placed(chosen)
    _log(chosen)
    if chosen.metrics is not None:
        from semel.metrics.prometheus import RunMetrics, expose

        app.on_event(RunMetrics())
        expose(chosen.metrics)
    worker = Worker(
        app,
        queues=chosen.queues or ["default"],
        name=chosen.name,
        concurrency=chosen.concurrency,
        processes=chosen.processes,
        threads=chosen.threads,
        drain=chosen.drain,
    )
    _wait_for_database(app, chosen)
    worker.run()
    _leave_threads_behind()
    return 0


def _wait_for_database(app: App, chosen: argparse.Namespace) -> None:
    from semel.runs.ledger import wait_for_database

    seconds = chosen.wait_for_database
    if seconds is None:
        try:
            seconds = options.amount(os.environ.get("SEMEL_WAIT_FOR_DATABASE") or str(options.WAIT_FOR_DATABASE))
        except argparse.ArgumentTypeError as error:
            raise InvalidRequest(f"SEMEL_WAIT_FOR_DATABASE: {error}") from None
    ledger = app.ledger(awaited=False)
    if ledger.file is not None and not ledger.file.exists():
        logging.getLogger("semel.worker").warning(
            "there is no database file at %s, so a new one is made: runs submitted to a server that uses another "
            "file are not seen here. Give --db the path of the server's file",
            ledger.file,
        )
    wait_for_database(ledger, seconds)


def _leave_threads_behind() -> None:
    """Python would wait for threads that a model left: their runs were given back, so there is nothing to wait for."""
    left = [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
    for thread in left:
        thread.join(0.5)
    if names := [thread.name for thread in left if thread.is_alive()]:
        logging.getLogger("semel.worker").warning("leaving threads behind that do not end: %s", ", ".join(names))
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)


def load_app(place: str) -> App:
    """The app at ``module:name``, or a clear error. Modules of the working directory are found, too."""
    from semel.runs.app import App

    module_name, separator, attribute = place.partition(":")
    if not separator or not attribute or not all(part.isidentifier() for part in module_name.split(".")):
        raise InvalidRequest(f"{place!r} is not a place of an app; it looks like myproject.runs:app")
    if module_name.endswith(".py"):
        raise InvalidRequest(f"give the module's name, not its file: {module_name[:-3]}:{attribute}")
    module = _module(module_name)
    found: Any = module
    for name in attribute.split("."):
        if not hasattr(found, name):
            apps = [each for each, value in vars(module).items() if isinstance(value, App)]
            there = f"there is {', '.join(apps)}" if apps else "there is no semel.App in it"
            raise InvalidRequest(f"the module {module_name!r} has no {attribute!r}; {there}")
        found = getattr(found, name)
    if not isinstance(found, App):
        raise InvalidRequest(
            f"{place!r} is a {type(found).__name__}, not a semel.App; make the app at the top of a module"
        )
    return found


def _module(name: str) -> ModuleType:
    here = os.getcwd()  # noqa: PTH109 -- sys.path holds text
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise InvalidRequest(f"there is no module {name!r} in {here} or elsewhere on the path") from error
        raise InvalidRequest(f"cannot import {name!r}\n{_told(error)}") from error
    except Exception as error:
        raise InvalidRequest(f"cannot import {name!r}\n{_told(error)}") from error


def _told(error: BaseException) -> str:
    """The traceback without our frames and the import machinery's."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and frame.filename != __file__
    ]
    said = traceback.TracebackException.from_exception(error)
    said.stack = traceback.StackSummary.from_list(frames)
    return "".join(said.format(chain=False)).rstrip()
