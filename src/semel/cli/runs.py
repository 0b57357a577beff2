"""Commands on runs, through a server: submit, list, show, wait, logs, result, cancel, retry, priority."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
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
    SEED,
    SPAN,
    TIME,
    argument,
    command,
    examples,
    option,
    run_argument,
    runs_or_filters,
)
from semel.cli._output import (
    Progress,
    command_line,
    finite,
    format_ago,
    format_size,
    format_span,
    format_time,
    is_terminal,
    note,
    plain,
    print_fields,
    print_json,
    print_page,
    print_result,
    print_table,
)
from semel.errors import InvalidRequest, SemelError
from semel.redaction import printable

if TYPE_CHECKING:
    from semel.api_types import RemoteLogLine, RemoteRun, RemoteRunAction, RemoteWaiting
    from semel.client import Client
    from semel.runs.types import ActionKind

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
@option(
    "--params", type=JSON_OBJECT, metavar="JSON|@FILE", help="Parameters as a JSON object; name=value takes precedence."
)
@option("--key", metavar="KEY", help="The idempotency key; the same key returns the same run.  [default: a new one]")
@option(
    "--dedupe/--no-dedupe", default=None, help="Return an active run with the same payload.  [default: without a --key]"
)
@option("--user", metavar="USER", help="The owner of the run; for operators.  [default: you]")
@option("--queue", metavar="QUEUE", help="The queue.  [default: the model's]")
@option("--priority", type=PRIORITY, help="Higher priorities run first.  [default: the model's]")
@option("--delay", type=SPAN, help="How long to wait before the run may start, such as 10m.")
@option("--cost", type=COST, help="The expected cost.  [default: the model's]")
@option("--seed", type=SEED, help="The run's seed.  [default: derived from the payload]")
@option("--wait", is_flag=True, help="Wait until the run has ended; the exit code is 1 unless it succeeds.")
@option("--timeout", type=SPAN, help="How long to --wait.  [default: no limit]")
@through_server
def submit(client: Client, *, wait: bool, timeout: float | None, as_json: bool, **request: Any) -> int | None:
    """Submit a run of a model and print its id.

    A value is parsed as JSON if it is valid JSON, else it is text: n=3 is a number, name=abc and 'name="3"' are text.
    Submitting again with the same --key returns the same run.
    """
    key = f"cli-{uuid.uuid4()}" if request["key"] is None else request["key"]
    try:
        run = _submit(client, key, **request)
    except KeyboardInterrupt:
        return note_interrupted(key)
    if wait:
        return wait_for_end(client, run, timeout, as_json, submitted=True)
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
            note("semel: n=3 is the number 3; write the text as 'n=\"3\"'")
        raise


def note_interrupted(key: str) -> int:
    """Print how to find out whether a submission arrived; returns the exit code."""
    note(f"semel: interrupted; it may have been submitted: the same command with --key {key} finds it")
    return INTERRUPTED


def note_warnings(*warnings: str | None) -> None:
    """Print the warnings of the server."""
    for warning in warnings:
        if warning:
            note(f"semel: {warning}")


def _note_submitted(run: RemoteRun) -> None:
    note_warnings(*run.quota_warnings, run.cost_limit_warning)
    if run.replayed:
        note(f"the run existed already ({run.status}), submitted {format_time(run.created_at)}")


def _note_unserved(client: Client, run: RemoteRun) -> None:
    """Print a note if no worker serves the queue. Errors are ignored: the run is submitted."""
    if run.status != "PENDING":
        return
    with suppress(SemelError):
        waiting = client.waiting(run.run_id)
        if waiting is not None and waiting.reason.startswith("no live worker"):
            note(f"semel: {waiting.reason}; the run waits until one does")


@command
@examples("semel wait 0e8c77", "semel wait 0e8c77 --timeout 10m")
@run_argument
@option("--timeout", type=SPAN, help="How long to wait.  [default: no limit]")
@through_server
def wait(client: Client, run: str, timeout: float | None, as_json: bool) -> int:
    """Wait until a run has ended, and show its progress.

    The exit code is 0 if the run succeeded, else 1. Ctrl-C ends the wait, not the run.
    """
    return wait_for_end(client, client.get(find_run_id(client, run)), timeout, as_json)


def wait_for_end(
    client: Client, run: RemoteRun, timeout: float | None, as_json: bool, *, submitted: bool = False
) -> int:
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
        note(f"semel: {why}; the run goes on: {command_line(f'wait {run.run_id}')} (or show, logs, result, cancel)")
        return code
    _note_ended(run)
    return 0 if run.status == "SUCCEEDED" else 1


def _note_ended(run: RemoteRun) -> None:
    took = f" after {_duration(run)}" if run.started_at and run.finished_at else ""
    why = f": {run.error}" if run.error and run.status != "SUCCEEDED" else ""
    how = f"; {command_line(f'result {run.run_id}')} shows the result" if run.status == "SUCCEEDED" else ""
    note(f"{run.status}{took}{why}{how}")


def _duration(run: RemoteRun) -> str | None:
    if run.started_at and run.finished_at:
        return format_span((run.finished_at - run.started_at).total_seconds())
    return f"{run.progress:.0%}" if run.progress is not None and run.status == "RUNNING" else None


def run_filters(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose runs."""
    status = f"[{'|'.join(STATUSES)}]"
    about = "Only runs with this value of a parameter, parsed as semel submit does; may be repeated."
    for add in (
        option("--until", type=TIME, help="Only runs submitted before then."),
        option("--since", type=TIME, help="Only runs submitted since then: 2h, 2030-01-31."),
        option("--stalled", is_flag=True, help="Only runs that are stalled: running without progress."),
        option("--parameter", type=PARAMETER, multiple=True, metavar="name=value", help=about),
        option("--error", metavar="TEXT", help="Only runs whose last error contains this."),
        option("--worker", metavar="ID", help="Only runs that this worker has, or had last."),
        option("--queue", metavar="QUEUE", help="Only runs of this queue."),
        option("--user", metavar="USER", help="Only runs of this user."),
        option("--model", metavar="MODEL", help="Only runs of this model."),
        option(
            "--status",
            type=STATUS,
            metavar=status,
            multiple=True,
            help="Only runs with this status; may be repeated.",
        ),
    ):
        function = add(function)
    return function


def _chosen(filters: dict[str, Any]) -> dict[str, Any]:
    """The filters that were given, as the client takes them."""
    parameter = dict(filters["parameter"])
    if len(parameter) < len(filters["parameter"]):
        raise InvalidRequest("--parameter names the same parameter twice")
    chosen = {**filters, "status": list(filters["status"]), "parameter": parameter}
    return {name: value for name, value in chosen.items() if value not in (None, [], {}, False)}


@command
@examples(
    "semel runs --status FAILED --since 2h",
    "semel runs --error TimeoutError --parameter region=north",
    "semel runs --model baseline_forecast_v1 --watch",
)
@run_filters
@option("--key", "idempotency_key", metavar="KEY", help="Only runs submitted with this key.")
@option("--limit", type=POSITIVE, default=20, help="How many to list.")
@option("--parameters", is_flag=True, help="With --json: include the parameters.")
@option("--watch", type=SPAN, is_flag=False, flag_value="2s", metavar="[TIME]", help="Repeat (every 2s) until Ctrl-C.")
@through_server
def runs(client: Client, limit: int, watch: float | None, as_json: bool, **filters: Any) -> int | None:
    """List runs, newest first. Submitters see their own runs, operators all."""
    filters = {**_chosen(filters), "parameters": filters["parameters"] and as_json}
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
    headings = ["run", "status", "model", "user", "submitted", "took", "note"]
    print_page(as_json, "runs", found, limit, headings=headings, row=_row)


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
    """Show a run: its parameters, progress and timeline, and why it is pending."""
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
    from semel.runs.types import attempts_text

    failed = "error" if run.status in ("FAILED", "CANCELLED") else "last error"
    return {
        "run": run.run_id,
        "model": run.model,
        "status": run.status + (", cancellation requested" if run.cancel_requested and not run.done else ""),
        "user": run.user or None,
        "parameters": json.dumps(run.parameters, ensure_ascii=False),
        "key": run.idempotency_key,
        "queue": f"{run.queue}, priority {run.priority}",
        "attempts": attempts_text(run),
        "submitted": format_time(run.created_at),
        "due": format_time(run.due_at) if run.status == "PENDING" else None,
        "started": format_time(run.started_at) if run.started_at else None,
        "finished": format_time(run.finished_at) if run.finished_at else None,
        "progress": format_progress(run.progress, run.progress_note),
        "stalled": f"no progress since {format_time(run.stalled_since)}" if run.stalled_since else None,
        "worker": run.worker if run.status == "RUNNING" else None,
        "cost": f"{run.cost:g}" if run.cost else None,
        "seed": run.seed,
        "retry of": run.retry_of,
        "rerun of": run.rerun_of,
        failed: run.error,
        "result": None
        if run.result_size is None
        else f"{format_size(run.result_size)}: {command_line(f'result {run.run_id}')}",
        "warnings": "\n".join(run.warnings) or None,
        "artifacts": "\n".join(f"{each.name} ({format_size(each.size)})" for each in run.artifacts) or None,
    }


def format_progress(progress: float | None, about: str | None) -> str | None:
    """Percent and note; None if there is neither."""
    percent = "" if progress is None else f"{progress:.0%} "
    return f"{percent}{about or ''}".strip() or None


def act_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of an action on all runs that match: the filters, ``--dry-run`` and ``--yes``."""
    for add in (
        option("--yes", "-y", is_flag=True, help="Do not ask for confirmation."),
        option("--dry-run", is_flag=True, help="Only print how many runs match."),
        run_filters,
    ):
        function = add(function)
    return function


@command
@examples(
    "semel cancel 019a8b2c-7d10-7c3e-9f51-2b6a4d0e8c77 --why 'the data was wrong'",
    "semel cancel --status PENDING --queue gpu",
)
@runs_or_filters
@option("--why", metavar="TEXT", help="The reason, recorded in the timeline.")
@act_options
@through_server
def cancel(client: Client, runs: tuple[str, ...], why: str | None, as_json: bool, **options: Any) -> int:
    """Cancel runs. A pending run ends at once; a running one is asked to stop, and gets time to clean up.

    Without ids, all runs that match the options: their number is shown first.
    """
    reason = {} if why is None else {"why": why}
    if not _is_by_id(runs, options):
        return _act(client, "cancel", options, as_json, why=why)

    def describe(run: RemoteRun) -> str:
        return f"{run.run_id} {run.status if run.done else 'will be cancelled'}"

    return _each(client, runs, lambda run_id: client.cancel(run_id, **reason), describe, as_json)


@command
@examples(
    "semel retry 019a8b2c-7d10-7c3e-9f51-2b6a4d0e8c77",
    "semel retry --status FAILED --model baseline_forecast_v1 --since 2h",
)
@runs_or_filters
@act_options
@through_server
def retry(client: Client, runs: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Submit failed or cancelled runs again, each as a new run, and print the new ids.

    The old run does not change. While the new run is pending or running, retrying the old one finds it.
    Without ids, all runs that match the options: their number is shown first.
    """
    if not _is_by_id(runs, options):
        return _act(client, "retry", options, as_json)
    return _each(client, runs, client.retry, lambda run: run.run_id, as_json)


@command
@examples("semel priority 10 --model baseline_forecast_v1 --user alice", "semel priority --queue gpu -- -5")
@argument("priority", type=PRIORITY, metavar="N", help="The new priority; higher ones run first.")
@act_options
@through_server
def priority(client: Client, priority: int, as_json: bool, **options: Any) -> int:
    """Change the priority of all pending runs that match the options. Their number is shown first."""
    return _act(client, "set_priority", options, as_json, priority=priority)


def _is_by_id(runs: tuple[str, ...], options: dict[str, Any]) -> bool:
    """Whether runs are named by their ids, and not by filters."""
    given = [name for name, value in options.items() if value not in (None, (), False) and name != "yes"]
    if runs and given:
        raise click.UsageError(f"give either ids of runs or filters, not both: --{given[0].replace('_', '-')}")
    if not runs and not given:
        raise click.UsageError("give ids of runs, or filters such as --status and --queue")
    return bool(runs)


_ACTED = {"cancel": "cancelled", "retry": "retried", "set_priority": "changed"}


def _act(client: Client, action: ActionKind, options: dict[str, Any], as_json: bool, **how: Any) -> int:
    """Act on all runs that match, after their number was shown and confirmed."""
    yes, dry_run = options.pop("yes"), options.pop("dry_run")
    filters = _chosen(options)
    if not filters:
        raise click.UsageError("give at least one filter, such as --status and --queue")
    tried = client.act(action, **how, **filters, dry_run=True)
    match = "1 run matches" if tried.matched == 1 else f"{tried.matched:,} runs match"
    if dry_run or not tried.matched:
        print_result(as_json, tried, match)
        return 0
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidRequest(f"{match}; add --yes to act on them without being asked")
        if not _confirmed(f"{match}; shall all of them be {_ACTED[action]}?"):
            note("nothing was changed")
            return 1
    key = f"cli-{uuid.uuid4()}"
    try:
        acted = _follow(client, client.act(action, **how, **filters, idempotency_key=key), quiet=as_json)
    except KeyboardInterrupt:
        note("semel: interrupted; if it had begun, the server goes on with it")
        return INTERRUPTED
    print_result(as_json, acted, _summary(acted))
    if acted.error and not as_json:
        note(f"semel: {acted.error}")
    return 1 if acted.failed else 0


def _confirmed(question: str) -> bool:
    """The answer to the question; Ctrl-C and the end of the input are a no."""
    try:
        return click.confirm(question, err=True)
    except click.Abort:
        return False


def _follow(client: Client, acted: RemoteRunAction, *, quiet: bool) -> RemoteRunAction:
    """Wait until the action is finished, and print its progress."""
    pause, shown = 0.05, 0
    while acted.state == "running":
        time.sleep(pause)
        pause = min(1.0, pause * 1.5)
        acted = client.action(acted.action_id or "")
        count = acted.done + acted.failed + acted.skipped
        if count != shown and acted.state == "running" and not quiet:
            note(f"{count:,} of {acted.matched:,}")
            shown = count
    return acted


def _summary(acted: RemoteRunAction) -> str:
    parts = [f"{acted.done:,} {_ACTED[acted.action]}"]
    parts += [f"{acted.skipped:,} skipped"] if acted.skipped else []
    parts += [f"{acted.failed:,} failed"] if acted.failed else []
    return ", ".join(parts)


def _each(
    client: Client,
    runs: tuple[str, ...],
    act: Callable[[str], RemoteRun],
    describe: Callable[[RemoteRun], str],
    as_json: bool,
) -> int:
    """Apply ``act`` to every run; a failure is printed, and does not stop the others."""
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


@command
@examples("semel result 0e8c77", "semel result 0e8c77 --artifact plot.png -o plot.png")
@run_argument
@option("--artifact", metavar="NAME", help="Print this artifact instead of the result.")
@option("-o", "--output", metavar="FILE", help="Write to this file instead of stdout.")
@through_server
def result(client: Client, run: str, artifact: str | None, output: str | None, as_json: bool) -> None:  # noqa: ARG001 -- it is JSON anyway
    """Print the result of a run as JSON, or one of its artifacts, which semel show lists.

    The exit code is 1 unless the run has succeeded.
    """
    run_id = find_run_id(client, run)
    target = None if output in (None, "-") else output
    if not artifact:
        _write_result(client.result(run_id), target)
        for warning in client.get(run_id).warnings:
            note(f"semel: warning: {warning}")
    elif target is not None:
        _note_written(client.save_artifact(run_id, artifact, target))
    else:
        _print_artifact(client.artifact(run_id, artifact), asked=output == "-")


def _write_result(value: Any, output: str | None) -> None:
    if output is None:
        print_json(value)
        return
    target = Path(output)
    target.write_text(json.dumps(finite(value), ensure_ascii=False, indent=2) + "\n", "utf-8")
    _note_written(target)


def _print_artifact(content: bytes, *, asked: bool) -> None:
    if is_terminal() and not asked and not _is_text(content):
        raise InvalidRequest("the artifact is binary; write it to a file with -o FILE (or to the terminal with -o -)")
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


def _is_text(content: bytes) -> bool:
    try:
        return all(letter.isprintable() or letter in "\r\n\t" for letter in content.decode())
    except UnicodeDecodeError:
        return False


def _note_written(target: Path) -> None:
    note(f"{target}: {format_size(target.stat().st_size)}")


@command
@examples("semel logs 0e8c77 --follow")
@run_argument
@option("-f", "--follow", is_flag=True, help="Continue until the run has ended.")
@through_server
def logs(client: Client, run: str, follow: bool, as_json: bool) -> int | None:
    """Print the log lines of a run, oldest first."""
    try:
        for line in client.logs(find_run_id(client, run), follow=follow):
            _print_line(line, as_json=as_json)
    except KeyboardInterrupt:
        if not follow:
            raise
        note("semel: interrupted; the run goes on")
        return INTERRUPTED
    return None


def _print_line(line: RemoteLogLine, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(plain(line), ensure_ascii=False), flush=True)
        return
    print(printable(f"{line.at.astimezone():%Y-%m-%d %H:%M:%S} {line.level:<7} {line.text}"), flush=True)
