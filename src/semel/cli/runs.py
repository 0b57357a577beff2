"""``semel submit``, ``runs``, ``show``, ``wait``, ``cancel``, ``retry``: runs, through a server."""

from __future__ import annotations

import argparse
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from semel.cli import options, printing
from semel.cli.progress import Progress
from semel.cli.remote import connected, run_id
from semel.errors import SemelError
from semel.redaction import printable

if TYPE_CHECKING:
    from semel.client import Client
    from semel.client.views import RemoteRun, RemoteWaiting

STATUSES = ("PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED")
RUN = "the run's id, or six or more characters of its beginning or end"


def add_to(commands: options.Commands) -> None:
    """Add the commands."""
    _add_submit(commands)
    _add_runs(commands)
    showing = options.command(
        commands,
        "show",
        help="a run with its timeline, and why it waits",
        description="A run as it stands: what was asked, how far it is, every step of its life, and while it is "
        "pending what it waits for.",
        example="semel show 019a8b2c-7d10-7c3e-9f51-2b6a4d0e8c77\nsemel show 0e8c77",
    )
    showing.add_argument("run", metavar="RUN", help=RUN)
    waiting = options.command(
        commands,
        "wait",
        help="wait for the end of a run",
        description="Wait for the end of a run, with its progress. Ends with 0 when it succeeded, with 1 otherwise. "
        "Ctrl-C ends the wait and not the run.",
        example="semel wait 0e8c77\nsemel wait 0e8c77 --timeout 10m",
    )
    waiting.add_argument("run", metavar="RUN", help=RUN)
    waiting.add_argument("--timeout", type=options.span, metavar="TIME", help="how long (default: for ever)")
    cancelling = options.command(
        commands,
        "cancel",
        help="end runs, or ask for their end",
        description="End runs that are pending; those that are running are asked to end, and get time to clean up.",
        example="semel cancel 019a8b2c-7d10-7c3e-9f51-2b6a4d0e8c77 --why 'the data was wrong'",
    )
    cancelling.add_argument("runs", metavar="RUN", nargs="+", help=RUN)
    cancelling.add_argument("--why", metavar="TEXT", help="kept in the timeline")
    retrying = options.command(
        commands,
        "retry",
        help="submit failed or cancelled runs again",
        description="Submit runs that failed or were cancelled again, each as a new run, and print the new ids. What "
        "happened stays as it was. Asked twice, it is one retry.",
        example="semel retry 019a8b2c-7d10-7c3e-9f51-2b6a4d0e8c77",
    )
    retrying.add_argument("runs", metavar="RUN", nargs="+", help=RUN)
    for parser, do in ((showing, _show), (waiting, _wait_for), (cancelling, _cancel), (retrying, _retry)):
        options.server_options(parser)
        parser.set_defaults(do=do)
    for parser in (cancelling, retrying):
        parser.set_defaults(more=("runs", str))


def _add_submit(commands: options.Commands) -> None:
    parser = options.command(
        commands,
        "submit",
        help="submit a run; --wait for its end",
        description="Submit a run of a model and print its id. A value is JSON where it is JSON, and text otherwise: "
        "n=3 is a number, name=abc a text, 'name=\"3\"' a text, too. Under the same --key the same run is found again.",
        example="semel submit baseline_forecast_v1 scenario=high_inflation horizon_months=24 --wait\n"
        "semel submit baseline_forecast_v1 --params @inputs.json --key ci-42",
    )
    parser.add_argument("model", metavar="MODEL", help="the model; semel models lists them")
    parser.add_argument(
        "parameters", metavar="name=value", nargs="*", type=options.parameter, default=[], help="a parameter"
    )
    parser.add_argument(
        "--params", type=options.json_object, default={}, metavar="JSON|@FILE", help="parameters as a JSON object"
    )
    parser.add_argument("--key", metavar="KEY", help="names the run: submitted again, it is found (default: a new one)")
    parser.add_argument(
        "--dedupe",
        action=argparse.BooleanOptionalAction,
        help="find the same run while it is under way (default: without a --key)",
    )
    parser.add_argument("--user", metavar="USER", help="whose run it is; for operators (default: you)")
    parser.add_argument("--queue", metavar="QUEUE", help="the queue (default: the model's)")
    parser.add_argument("--priority", type=options.priority, metavar="N", help="higher first (default: the model's)")
    parser.add_argument("--delay", type=options.span, metavar="TIME", help="it starts so much later, as 10m")
    parser.add_argument(
        "--cost", type=options.cost, metavar="X", help="what it is taken to cost (default: the model's)"
    )
    parser.add_argument("--wait", action="store_true", help="wait for its end; ends with 1 unless it succeeds")
    parser.add_argument("--timeout", type=options.span, metavar="TIME", help="how long to --wait (default: for ever)")
    options.server_options(parser)
    parser.set_defaults(do=_submit, more=("parameters", options.parameter))


def _add_runs(commands: options.Commands) -> None:
    parser = options.command(
        commands,
        "runs",
        help="list runs",
        description="Runs, newest first. A submitter sees their own, an operator everybody's.",
        example="semel runs --status FAILED --since 2h\nsemel runs --model baseline_forecast_v1 --watch",
    )
    parser.add_argument(
        "--status", action="append", type=str.upper, choices=STATUSES, help="only these; may be given again"
    )
    parser.add_argument("--model", metavar="MODEL", help="only this model's")
    parser.add_argument("--user", metavar="USER", help="only this user's")
    parser.add_argument("--queue", metavar="QUEUE", help="only this queue's")
    parser.add_argument("--key", metavar="KEY", help="only what was submitted with this key")
    parser.add_argument("--stalled", action="store_true", help="only what runs without any progress")
    parser.add_argument("--since", type=options.time_of, metavar="TIME", help="submitted from then on: 2h, 2030-01-31")
    parser.add_argument("--until", type=options.time_of, metavar="TIME", help="submitted before then")
    parser.add_argument("--limit", type=options.whole, default=20, metavar="N", help="how many (default: 20)")
    parser.add_argument("--parameters", action="store_true", help="with --json: their parameters, too")
    parser.add_argument(
        "--watch",
        type=options.span,
        nargs="?",
        const=2.0,
        metavar="TIME",
        help="again and again (every 2s), until Ctrl-C",
    )
    options.server_options(parser)
    parser.set_defaults(do=_runs)


def _submit(chosen: argparse.Namespace) -> int:
    key = f"cli-{uuid.uuid4()}" if chosen.key is None else chosen.key
    with connected(chosen) as client:
        try:
            run = client.submit(
                chosen.model,
                {**chosen.params, **dict(chosen.parameters)},
                idempotency_key=key,
                user=chosen.user,
                queue=chosen.queue,
                priority=chosen.priority,
                delay=chosen.delay,
                cost=chosen.cost,
                dedupe=chosen.key is None if chosen.dedupe is None else chosen.dedupe,
            )
        except KeyboardInterrupt:
            printing.say(f"semel: interrupted; perhaps it was submitted: the same again with --key {key} finds it")
            return options.INTERRUPTED
        except SemelError as error:
            if chosen.parameters and "expected `str`" in str(error):
                printing.say("semel: n=3 is the number 3; the text is written as 'n=\"3\"'")
            raise
        _say_submitted(run)
        if not chosen.wait:
            if chosen.json:
                printing.print_json(run)
            else:
                print(run.run_id, flush=True)
            _say_unserved(client, run)
            return 0
        return _wait(client, run, chosen)


def _say_submitted(run: RemoteRun) -> None:
    for warning in (*run.quota_warnings, run.cost_limit_warning):
        if warning:
            printing.say(f"semel: {warning}")
    if run.replayed:
        printing.say(f"it was there already ({run.status}), submitted {printing.when(run.created_at)}")


def _say_unserved(client: Client, run: RemoteRun) -> None:
    """A run in a queue that nobody serves would wait for ever: better said now. It is there, whatever comes of this."""
    if run.status != "PENDING":
        return
    with suppress(SemelError):
        waiting = client.waiting(run.run_id)
        if waiting is not None and waiting.reason.startswith("no live worker"):
            printing.say(f"semel: {waiting.reason}; it waits until one does")


def _wait_for(chosen: argparse.Namespace) -> int:
    with connected(chosen) as client:
        return _wait(client, client.get(run_id(client, chosen.run)), chosen)


def _wait(client: Client, run: RemoteRun, chosen: argparse.Namespace) -> int:
    if not chosen.json:
        print(run.run_id, flush=True)
    progress = Progress()
    try:
        _say_unserved(client, run)
        run = client.wait(run.run_id, timeout=chosen.timeout, progress=progress)
    except (KeyboardInterrupt, TimeoutError) as stopped:
        progress.end()
        if chosen.json:
            printing.print_json(run)
        interrupted = isinstance(stopped, KeyboardInterrupt)
        why = "interrupted" if interrupted else f"it has not ended in {printing.lasting(chosen.timeout)}"
        printing.say(f"semel: {why}; the run goes on: semel wait {run.run_id} (or show, logs, result, cancel)")
        return options.INTERRUPTED if interrupted else 1
    progress.end()
    if chosen.json:
        printing.print_json(run)
    _say_ended(run)
    return 0 if run.status == "SUCCEEDED" else 1


def _say_ended(run: RemoteRun) -> None:
    took = ""
    if run.started_at and run.finished_at:
        took = f" after {printing.lasting((run.finished_at - run.started_at).total_seconds())}"
    why = f": {run.error}" if run.error and run.status != "SUCCEEDED" else ""
    how = f"; semel result {run.run_id} shows what came of it" if run.status == "SUCCEEDED" else ""
    printing.say(f"{run.status}{took}{why}{how}")


def _runs(chosen: argparse.Namespace) -> int:
    with connected(chosen) as client:
        if chosen.watch is None:
            _list(client, chosen)
            return 0
        try:
            while True:
                if printing.is_terminal() and not chosen.json:
                    print("\x1b[H\x1b[2J", end="")
                _list(client, chosen)
                time.sleep(max(0.1, chosen.watch))
        except KeyboardInterrupt:
            return options.INTERRUPTED


def _list(client: Client, chosen: argparse.Namespace) -> None:
    filters: dict[str, Any] = {
        "status": chosen.status,
        "model": chosen.model,
        "user": chosen.user,
        "queue": chosen.queue,
        "idempotency_key": chosen.key,
        "since": chosen.since,
        "until": chosen.until,
        "parameters": chosen.parameters and chosen.json,
        "stalled": chosen.stalled,
    }
    found = list(client.runs(**filters, limit=chosen.limit + 1))
    more = len(found) > chosen.limit
    found = found[: chosen.limit]
    if chosen.json:
        printing.print_json({"runs": found, "more": more})
        return
    printing.print_table(
        ["run", "status", "model", "user", "submitted", "took", "note"],
        [_row(run) for run in found],
        nothing="there are no such runs",
    )
    if more:
        printing.say(f"and there are more; --limit {chosen.limit * 5} shows more of them")


def _row(run: RemoteRun) -> list[object]:
    took = None
    if run.started_at and run.finished_at:
        took = printing.lasting((run.finished_at - run.started_at).total_seconds())
    elif run.progress is not None and run.status == "RUNNING":
        took = f"{run.progress:.0%}"
    note = None
    if run.status in ("FAILED", "CANCELLED"):
        note = run.error
    elif run.stalled_since is not None:
        note = f"stalled: no progress since {printing.when(run.stalled_since)}"
    elif run.status == "RUNNING":
        note = run.progress_note
    return [run.run_id, run.status, run.model, run.user, printing.ago(run.created_at), took, note]


def _show(chosen: argparse.Namespace) -> int:
    with connected(chosen) as client:
        run = client.get(run_id(client, chosen.run))
        steps = client.timeline(run.run_id)
        waiting = client.waiting(run.run_id) if run.status == "PENDING" else None
    if chosen.json:
        printing.print_json({"run": run, "timeline": steps, "waiting": waiting})
        return 0
    printing.print_fields({**_fields(run), "waits": None if waiting is None else _reason(waiting)})
    print()
    printing.print_table(
        ["at", "step", "status", "worker", "note"],
        [[printing.when(each.at), each.step, each.status, each.worker, each.note] for each in steps],
        nothing="there is no timeline",
    )
    if run.traceback and run.status != "SUCCEEDED":
        print(f"\n{printable(run.traceback.rstrip())}")
    return 0


def _reason(waiting: RemoteWaiting) -> str:
    place = f" (place {waiting.place} in the queue)" if waiting.place is not None else ""
    return f"{waiting.reason}{place}, since {printing.when(waiting.since)}"


def _fields(run: RemoteRun) -> dict[str, object]:
    import json

    failed = "error" if run.status in ("FAILED", "CANCELLED") else "last error"
    percent = "" if run.progress is None else f"{run.progress:.0%} "
    return {
        "run": run.run_id,
        "model": run.model,
        "status": run.status + (", asked to end" if run.cancel_requested and not run.done else ""),
        "user": run.user or None,
        "parameters": json.dumps(run.parameters, ensure_ascii=False),
        "key": run.idempotency_key,
        "queue": f"{run.queue}, priority {run.priority}",
        "attempts": f"{run.attempts - run.losts} of {run.max_attempts}",
        "lost": f"{run.losts} of {run.max_lost} times, with a worker" if run.losts else None,
        "submitted": printing.when(run.created_at),
        "due": printing.when(run.due_at) if run.status == "PENDING" else None,
        "started": printing.when(run.started_at) if run.started_at else None,
        "finished": printing.when(run.finished_at) if run.finished_at else None,
        "progress": f"{percent}{run.progress_note or ''}".strip() or None,
        "stalled": f"no progress since {printing.when(run.stalled_since)}" if run.stalled_since else None,
        "worker": run.worker if run.status == "RUNNING" else None,
        "cost": f"{run.cost:g}" if run.cost else None,
        "retry of": run.retry_of,
        failed: run.error,
        "result": None if run.result_size is None else f"{printing.size(run.result_size)}: semel result {run.run_id}",
        "warnings": "\n".join(run.warnings) or None,
        "artifacts": "\n".join(f"{each.name} ({printing.size(each.size)})" for each in run.artifacts) or None,
    }


def _cancel(chosen: argparse.Namespace) -> int:
    why = {} if chosen.why is None else {"why": chosen.why}

    def ended(run: RemoteRun) -> str:
        return f"{run.run_id} {run.status if run.done else 'is asked to end'}"

    return _each(chosen, lambda client, one: client.cancel(one, **why), ended)


def _retry(chosen: argparse.Namespace) -> int:
    return _each(chosen, lambda client, one: client.retry(one), lambda run: run.run_id)


def _each(chosen: argparse.Namespace, act: Callable[[Client, str], RemoteRun], said: Callable[[RemoteRun], str]) -> int:
    """Do it to every run that was named; what fails for one is told, and the others go on."""
    done: list[RemoteRun] = []
    failed = False
    with connected(chosen) as client:
        for text in chosen.runs:
            try:
                run = act(client, run_id(client, text))
            except SemelError as error:
                printing.say(f"semel: {error}")
                failed = True
                continue
            done.append(run)
            if not chosen.json:
                print(said(run), flush=True)
    if chosen.json:
        printing.print_json({"runs": done})
    return 1 if failed else 0
