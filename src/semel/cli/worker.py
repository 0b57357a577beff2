"""``semel worker`` executes the runs of an app; ``semel sweep`` only recovers lost runs."""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from semel.cli._app import DEMO, load_app
from semel.cli._options import (
    AMOUNT,
    APP,
    COUNT,
    TRANSPORTS,
    WAIT_FOR_DATABASE,
    Function,
    amount,
    argument,
    command,
    examples,
    log_format_option,
    option,
    place_options,
    queues_option,
    wait_for_database_option,
)
from semel.errors import InvalidRequest
from semel.redaction import Redacting, TextFormatter

if TYPE_CHECKING:
    from semel.runs.app import App

quiet_option = option("--quiet", is_flag=True, help="Log warnings only.")


def _app_options(function: Function) -> Function:
    app = argument("app", required=False, metavar="[MODULE:APP]", help=f"{APP}  [default: $SEMEL_APP, or {DEMO}]")
    return app(place_options("Storage and transport, instead of the app's own")(function))


@command
@examples(
    "semel worker myproject.runs:app --queues default,gpu --processes 4",
    "semel worker --db postgresql://user@host/name",
)
@_app_options
@queues_option()
@option("--name", help="The prefix of the worker's id, which all users see.  [default: worker]")
@option("--concurrency", type=COUNT, default=100, help="Async runs at the same time.")
@option("--processes", type=COUNT, help="Child processes for blocking models.  [default: CPUs]")
@option("--threads", type=COUNT, default=8, help="Runs in threads at the same time.")
@option("--drain", type=AMOUNT, default=30.0, help="How long to wait for active runs at shutdown.")
@option(
    "--metrics",
    metavar="[HOST:]PORT",
    help="Serve Prometheus metrics at this address, at /metrics.  [default host: 127.0.0.1]",
)
@wait_for_database_option()
@quiet_option
@log_format_option()
def worker(
    queues: list[str] | None, metrics: str | None, wait_for_database: float | None, quiet: bool, **options: Any
) -> None:
    """Execute the runs of an app until SIGTERM or Ctrl-C.

    At shutdown the worker leases no more runs, finishes its active ones, and returns those that do not end in time. A
    second signal returns all of them at once.
    """
    from semel.runs.worker import Worker

    app = _place_app(options)
    _set_up_log(quiet, options.pop("log_format"))
    if metrics is not None:
        from semel.metrics.prometheus import RunMetrics, expose

        app.on_event(RunMetrics())
        expose(metrics)
    patience = _patience(wait_for_database)
    session = Worker(app, queues=queues or ["default"], wait_for_database=patience, **options)
    _wait_for_database(app, patience)
    session.run()
    _leave_threads_behind()


@command
@examples("semel sweep myproject.runs:app", "semel sweep myproject.runs:app --once")
@_app_options
@option("--every", type=AMOUNT, default=5.0, help="Seconds between two sweeps.")
@option("--once", is_flag=True, help="Sweep once, without an election, and exit.")
@wait_for_database_option()
@quiet_option
def sweep(every: float, once: bool, wait_for_database: float | None, quiet: bool, **options: Any) -> None:
    """Recover lost runs without executing any, until SIGTERM or Ctrl-C.

    Recovers runs whose worker is lost, re-enqueues runs that RQ or Celery lost, publishes events, and removes expired
    rows. Every semel worker does so too: this is for deployments with only RQ or Celery workers. Several may run; one
    is elected.
    """
    from semel._validation import checked_number
    from semel.runs.worker.sweeper import sweep_until_signalled

    checked_number("--every", every, 0.05, 3600)
    app = _place_app(options)
    _set_up_log(quiet)
    _wait_for_database(app, _patience(wait_for_database))
    lost = sweep_until_signalled(app, every=every, once=once)
    if once:
        print(f"{lost} lost runs were recovered")


def _place_app(options: dict[str, Any]) -> App:
    """Load the app that the options name, and pop those options."""
    from semel._validation import checked_choice
    from semel.runs.app import retention_by_environment

    place = options.pop("app") or os.environ.get("SEMEL_APP")
    if not place:
        place = DEMO
        print(f"semel: no MODULE:APP was given, so this uses the demo's app, {DEMO}", file=sys.stderr, flush=True)
    transport = options.pop("transport") or os.environ.get("SEMEL_TRANSPORT") or None
    if transport is not None:
        checked_choice("SEMEL_TRANSPORT", transport, TRANSPORTS)
    where = {name: options.pop(name) for name in ("redis", "artifacts")}
    kept = retention_by_environment()
    return load_app(place).place(url=options.pop("db"), transport=transport, retention=kept, **where)  # type: ignore[arg-type]  # checked above


def _set_up_log(quiet: bool, log_format: str | None = None) -> None:
    """Log to stderr, unless the app's module has set up logging; redact secrets in both cases."""
    as_json = log_format == "json"
    formatter: logging.Formatter = TextFormatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    if as_json:
        from semel.service.telemetry import logs

        formatter = logs.formatter("json")
    root = logging.getLogger()
    for handler in root.handlers:
        handler.setFormatter(formatter if as_json else Redacting.over(handler.formatter))
    if not root.handlers:
        own = logging.StreamHandler()
        own.setFormatter(formatter)
        root.addHandler(own)
        root.setLevel(logging.WARNING if quiet else logging.INFO)
    logging.getLogger("alembic").setLevel(logging.WARNING)


def _patience(given: float | None) -> float:
    """How long to wait for the database, by the option, the environment or the default."""
    if given is not None:
        return given
    try:
        return amount(os.environ.get("SEMEL_WAIT_FOR_DATABASE") or str(WAIT_FOR_DATABASE))
    except ValueError as error:
        raise InvalidRequest(f"SEMEL_WAIT_FOR_DATABASE: {error}") from None


def _wait_for_database(app: App, seconds: float) -> None:
    from semel.runs.store import wait_for_database

    store = app.ledger(awaited=False)
    if store.file is not None and not store.file.exists():
        logging.getLogger("semel.worker").warning(
            "there is no database file at %s, so a new one is created: runs submitted to a server that uses another "
            "file are not seen here. Set --db to the path of the server's file",
            store.file,
        )
    wait_for_database(store, seconds)


def _leave_threads_behind() -> None:
    """Exit without waiting for threads that a model left behind: their runs were returned."""
    left = [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
    for thread in left:
        thread.join(0.5)
    if names := [thread.name for thread in left if thread.is_alive()]:
        logging.getLogger("semel.worker").warning("leaving threads behind that do not end: %s", ", ".join(names))
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)
