"""``semel submit``, ``runs``, ``show``, ``wait``, ``cancel``, ``retry``: runs, through a server."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from semel.cli._client import find_run_id, through_server
from semel.cli._options import (
    COST,
    INTERRUPTED,
    JSON_OBJECT,
    PARAMETER,
    POSITIVE,
    PRIORITY,
    SPAN,
    TIME,
    argument,
    command,
    examples,
    option,
    run_argument,
    runs_argument,
)
from semel.cli._output import (
    Progress,
    format_ago,
    format_size,
    format_span,
    format_time,
    is_terminal,
    note,
    print_fields,
    print_json,
    print_list,
    print_result,
    print_table,
)
from semel.errors import SemelError
from semel.redaction import printable

if TYPE_CHECKING:
    from semel.api_types import RemoteRun, RemoteWaiting
    from semel.client import Client

STATUSES = ("PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED")
STATUS = click.Choice(STATUSES, case_sensitive=False)
CLEAR_SCREEN = "\x1b[H\x1b[2J"


@command
@examples(
    "semel submit baseline_forecast_v1 scenario=high_inflation horizon_months=24 --wait",
    "semel submit baseline_forecast_v1 --params @inputs.json --key ci-42",
)
@argument("model", help="The model; semel models lists them.")
@argument("parameters", nargs=-1, type=PARAMETER, metavar="[name=value]...", help="A parameter.")
@option("--params", type=JSON_OBJECT, metavar="JSON|@FILE", help="Parameters as a JSON object; words win over it.")
@option("--key", metavar="KEY", help="The idempotency key: submitted again, the run is found.  [default: a new one]")
@option(
    "--dedupe/--no-dedupe", default=None, help="Find the same run while it is under way.  [default: without a --key]"
)
@option("--user", metavar="USER", help="Whose run it is; for operators.  [default: you]")
@option("--queue", metavar="QUEUE", help="The queue.  [default: the model's]")
@option("--priority", type=PRIORITY, help="Higher runs first.  [default: the model's]")
@option("--delay", type=SPAN, help="Start so much later, such as 10m.")
@option("--cost", type=COST, help="What the run is expected to cost.  [default: the model's]")
@option("--wait", is_flag=True, help="Wait for the run's end; the exit code is 1 unless it succeeds.")
@option("--timeout", type=SPAN, help="How long to --wait.  [default: for ever]")
@through_server
def submit(client: Client, *, wait: bool, timeout: float | None, as_json: bool, **request: Any) -> int | None:
    """Submit a run of a model and print its id.

    A value is JSON where it is JSON, else text: n=3 is a number, name=abc and 'name="3"' are texts. The same --key
    finds the same run again.
    """
    key = f"cli-{uuid.uuid4()}" if request["key"] is None else request["key"]
    try:
        run = _submit(client, key, **request)
    except KeyboardInterrupt:
        return note_interrupted(key)
    if wait:
        return _wait(client, run, timeout, as_json, submitted=True)
    _note_submitted(run)
    print_result(as_json, run, run.run_id)
    _note_unserved(client, run)
    return None


def _submit(client: Client, idempotency_key: str, **request: Any) -> RemoteRun:
    words, params = dict(request.pop("parameters")), request.pop("params") or {}
    without_key = request.pop("key") is None
    if request["dedupe"] is None:
        request["dedupe"] = without_key
    try:
        return client.submit(request.pop("model"), {**params, **words}, idempotency_key=idempotency_key, **request)
    except SemelError as error:
        if words and "expected `str`" in str(error):
            note("semel: n=3 is the number 3; the text is written as 'n=\"3\"'")
        raise


def note_interrupted(key: str) -> int:
    """Report that a submission may have arrived; the exit code."""
    note(f"semel: interrupted; perhaps it was submitted: the same again with --key {key} finds it")
    return INTERRUPTED


def note_warnings(*warnings: str | None) -> None:
    """Report what the server warned of."""
    for warning in warnings:
        if warning:
            note(f"semel: {warning}")


def _note_submitted(run: RemoteRun) -> None:
    note_warnings(*run.quota_warnings, run.cost_limit_warning)
    if run.replayed:
        note(f"it was there already ({run.status}), submitted {format_time(run.created_at)}")


def _note_unserved(client: Client, run: RemoteRun) -> None:
    """Report a queue that nobody serves, where the run would wait for ever. It is submitted, whatever fails here."""
    if run.status != "PENDING":
        return
    with suppress(SemelError):
        waiting = client.waiting(run.run_id)
        if waiting is not None and waiting.reason.startswith("no live worker"):
            note(f"semel: {waiting.reason}; it waits until one does")


@command
@examples("semel wait 0e8c77", "semel wait 0e8c77 --timeout 10m")
@run_argument
@option("--timeout", type=SPAN, help="How long to wait.  [default: for ever]")
@through_server
def wait(client: Client, run: str, timeout: float | None, as_json: bool) -> int:
    """Wait for the end of a run, and show its progress.

    The exit code is 0 when the run succeeded, 1 otherwise. Ctrl-C ends the wait and not the run.
    """
    return _wait(client, client.get(find_run_id(client, run)), timeout, as_json)


def _wait(client: Client, run: RemoteRun, timeout: float | None, as_json: bool, *, submitted: bool = False) -> int:
    if not as_json:
        print(run.run_id, flush=True)
    why, code = "", 1
    try:
        if submitted:
            _note_submitted(run)
        _note_unserved(client, run)
        with Progress() as progress:
            run = client.wait(run.run_id, timeout=timeout, progress=progress)
    except KeyboardInterrupt:
        why, code = "interrupted", INTERRUPTED
    except TimeoutError:
        why = f"it has not ended in {format_span(timeout or 0.0)}"
    if as_json:
        print_json(run)
    if why:
        note(f"semel: {why}; the run goes on: semel wait {run.run_id} (or show, logs, result, cancel)")
        return code
    _note_ended(run)
    return 0 if run.status == "SUCCEEDED" else 1


def _note_ended(run: RemoteRun) -> None:
    took = f" after {_duration(run)}" if run.started_at and run.finished_at else ""
    why = f": {run.error}" if run.error and run.status != "SUCCEEDED" else ""
    how = f"; semel result {run.run_id} shows what came of it" if run.status == "SUCCEEDED" else ""
    note(f"{run.status}{took}{why}{how}")


def _duration(run: RemoteRun) -> str | None:
    if run.started_at and run.finished_at:
        return format_span((run.finished_at - run.started_at).total_seconds())
    return f"{run.progress:.0%}" if run.progress is not None and run.status == "RUNNING" else None


@command
@examples("semel runs --status FAILED --since 2h", "semel runs --model baseline_forecast_v1 --watch")
@option("--status", type=STATUS, metavar=f"[{'|'.join(STATUSES)}]", multiple=True, help="Only these; repeatable.")
@option("--model", metavar="MODEL", help="Only runs of this model.")
@option("--user", metavar="USER", help="Only this user's runs.")
@option("--queue", metavar="QUEUE", help="Only runs of this queue.")
@option("--key", "idempotency_key", metavar="KEY", help="Only what was submitted with this key.")
@option("--stalled", is_flag=True, help="Only what runs without any progress.")
@option("--since", type=TIME, help="Submitted from then on: 2h, 2030-01-31.")
@option("--until", type=TIME, help="Submitted before then.")
@option("--limit", type=POSITIVE, default=20, help="How many.")
@option("--parameters", is_flag=True, help="With --json: include the parameters.")
@option("--watch", type=SPAN, is_flag=False, flag_value="2s", metavar="[TIME]", help="Repeat (every 2s) until Ctrl-C.")
@through_server
def runs(client: Client, limit: int, watch: float | None, as_json: bool, **filters: Any) -> int | None:
    """List runs, newest first. A submitter sees their own, an operator everybody's."""
    filters |= {"status": list(filters["status"]) or None, "parameters": filters["parameters"] and as_json}
    if watch is None:
        _list(client, limit, as_json, filters)
        return None
    try:
        while True:
            if is_terminal() and not as_json:
                print(CLEAR_SCREEN, end="")
            _list(client, limit, as_json, filters)
            time.sleep(max(0.1, watch))
    except KeyboardInterrupt:
        return INTERRUPTED


def _list(client: Client, limit: int, as_json: bool, filters: dict[str, Any]) -> None:
    found = list(client.runs(**filters, limit=limit + 1))
    more = len(found) > limit
    headings = ["run", "status", "model", "user", "submitted", "took", "note"]
    document = {"runs": found[:limit], "more": more}
    print_list(as_json, document, headings, map(_row, found[:limit]), empty="there are no such runs")
    if more and not as_json:
        note_more(limit)


def note_more(limit: int) -> None:
    """Report that there is more than was listed."""
    note(f"and there are more; --limit {limit * 5} shows more of them")


def _row(run: RemoteRun) -> list[object]:
    about = None
    if run.status in ("FAILED", "CANCELLED"):
        about = run.error
    elif run.stalled_since is not None:
        about = f"stalled: no progress since {format_time(run.stalled_since)}"
    elif run.status == "RUNNING":
        about = run.progress_note
    return [run.run_id, run.status, run.model, run.user, format_ago(run.created_at), _duration(run), about]


@command
@examples("semel show 019a8b2c-7d10-7c3e-9f51-2b6a4d0e8c77", "semel show 0e8c77")
@run_argument
@through_server
def show(client: Client, run: str, as_json: bool) -> None:
    """Show a run: what was asked, how far it is, every step of its life, and what it waits for."""
    found = client.get(find_run_id(client, run))
    steps = client.timeline(found.run_id)
    waiting = client.waiting(found.run_id) if found.status == "PENDING" else None
    if as_json:
        print_json({"run": found, "timeline": steps, "waiting": waiting})
        return
    print_fields({**_fields(found), "waits": None if waiting is None else _reason(waiting)})
    print()
    rows = [[format_time(each.at), each.step, each.status, each.worker, each.note] for each in steps]
    print_table(["at", "step", "status", "worker", "note"], rows, empty="there is no timeline")
    if found.traceback and found.status != "SUCCEEDED":
        print(f"\n{printable(found.traceback.rstrip())}")


def _reason(waiting: RemoteWaiting) -> str:
    place = f" (place {waiting.place} in the queue)" if waiting.place is not None else ""
    return f"{waiting.reason}{place}, since {format_time(waiting.since)}"


def _fields(run: RemoteRun) -> dict[str, object]:
    failed = "error" if run.status in ("FAILED", "CANCELLED") else "last error"
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
        "submitted": format_time(run.created_at),
        "due": format_time(run.due_at) if run.status == "PENDING" else None,
        "started": format_time(run.started_at) if run.started_at else None,
        "finished": format_time(run.finished_at) if run.finished_at else None,
        "progress": format_progress(run.progress, run.progress_note),
        "stalled": f"no progress since {format_time(run.stalled_since)}" if run.stalled_since else None,
        "worker": run.worker if run.status == "RUNNING" else None,
        "cost": f"{run.cost:g}" if run.cost else None,
        "retry of": run.retry_of,
        failed: run.error,
        "result": None if run.result_size is None else f"{format_size(run.result_size)}: semel result {run.run_id}",
        "warnings": "\n".join(run.warnings) or None,
        "artifacts": "\n".join(f"{each.name} ({format_size(each.size)})" for each in run.artifacts) or None,
    }


def format_progress(progress: float | None, about: str | None) -> str | None:
    """The part of the way and the note, as far as they are known."""
    percent = "" if progress is None else f"{progress:.0%} "
    return f"{percent}{about or ''}".strip() or None


@command
@examples("semel cancel 019a8b2c-7d10-7c3e-9f51-2b6a4d0e8c77 --why 'the data was wrong'")
@runs_argument
@option("--why", metavar="TEXT", help="The reason, kept in the timeline.")
@through_server
def cancel(client: Client, runs: tuple[str, ...], why: str | None, as_json: bool) -> int:
    """Cancel runs: those that are pending end, those that are running are asked to end and get time to clean up."""
    reason = {} if why is None else {"why": why}

    def describe(run: RemoteRun) -> str:
        return f"{run.run_id} {run.status if run.done else 'is asked to end'}"

    return _each(client, runs, lambda run_id: client.cancel(run_id, **reason), describe, as_json)


@command
@examples("semel retry 019a8b2c-7d10-7c3e-9f51-2b6a4d0e8c77")
@runs_argument
@through_server
def retry(client: Client, runs: tuple[str, ...], as_json: bool) -> int:
    """Submit failed or cancelled runs again, each as a new run, and print the new ids.

    The old run stays as it is. Retried twice, a
    run has one new run.
    """
    return _each(client, runs, client.retry, lambda run: run.run_id, as_json)


def _each(
    client: Client,
    runs: tuple[str, ...],
    act: Callable[[str], RemoteRun],
    describe: Callable[[RemoteRun], str],
    as_json: bool,
) -> int:
    """Act on every run; a failure is reported, and the others go on."""
    done: list[RemoteRun] = []
    for text in runs:
        try:
            run = act(find_run_id(client, text))
        except SemelError as error:
            note(f"semel: {error}")
            continue
        done.append(run)
        if not as_json:
            print(describe(run), flush=True)
    if as_json:
        print_json({"runs": done})
    return 0 if len(done) == len(runs) else 1
