"""``semel job`` and ``semel jobs``: runs of named configs, through a server."""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from semel.cli._client import find_run_id, through_server
from semel.cli._options import POSITIVE, SPAN, argument, command, examples, group, option
from semel.cli._output import (
    command_line,
    format_size,
    format_time,
    note,
    print_fields,
    print_json,
    print_page,
    print_result,
)
from semel.cli.runs import format_progress, note_interrupted, note_warnings
from semel.errors import InvalidRequest, SemelError, ServiceError

if TYPE_CHECKING:
    from semel.api_types import RemoteUpload
    from semel.client import Client, RemoteJob

STATUSES = click.Choice(["uploading", "queued", "running", "completed", "failed", "cancelled"])


@group
def job() -> None:
    """Submit, show and cancel jobs of named configs.

    A job is a run of a named config, on semel's workers or at a provider. Its id is also the id of a run, for semel
    logs and semel result.
    """


@job.command()
@examples("semel job submit my-training-config", 'semel job submit production --provider replicate --key "$BUILD_ID"')
@argument("config", help="The config's name.")
@option("--provider", metavar="NAME", default="local", help="The provider: local, replicate or one of your own.")
@option("--key", metavar="KEY", help="The idempotency key; the same key returns the same job.  [default: a new one]")
@option("--key-ttl", type=SPAN, help="How long to keep the key.  [default: 24h]")
@option("--run-name", metavar="NAME", help="The name of the run in an experiment tracker.")
@through_server
def submit(client: Client, config: str, key: str | None, key_ttl: float | None, as_json: bool, **options: Any) -> int:
    """Submit a job of a config, and print its id. The same --key returns the same job."""
    key = f"cli-{uuid.uuid4()}" if key is None else key
    options["tracker_run_name"] = options.pop("run_name")
    hours = None if key_ttl is None else key_ttl / 3600
    try:
        found = client.submit_job(config, idempotency_key=key, ttl_hours=hours, **options)
    except KeyboardInterrupt:
        return note_interrupted(key)
    except ServiceError as error:
        raise _refusal(client, config, error) from error
    note_warnings(*found.quota_warnings, found.cost_limit_warning)
    if found.idempotent_hit:
        note(f"the job existed already ({found.status})")
    print_result(as_json, found, found.job_id)
    return 0


def _refusal(client: Client, config: str, error: ServiceError) -> SemelError:
    """The error in terms of the config instead of HTTP."""
    if error.code != "JOB_REFUSED":
        return error
    if not error.detail.startswith("Unknown config"):
        return InvalidRequest(f"no job was created from the config {config!r}: {error.detail}")
    known = ""
    with suppress(SemelError):
        known = ", ".join(each.name for each in client.configs())
    return InvalidRequest(f"{error.detail}; there are: {known or 'none'}; create one with: semel config set")


@job.command()
@examples("semel job show 0e8c77")
@argument("job", help="The job's id, or at least six characters from its beginning or end.")
@through_server
def show(client: Client, job: str, as_json: bool) -> None:
    """Show a job: its provider, status, upload and progress."""
    print_job(client.job(find_run_id(client, job)), as_json)


@job.command()
@examples("semel job cancel 0e8c77")
@argument("job", help="The job's id, or at least six characters from its beginning or end.")
@through_server
def cancel(client: Client, job: str, as_json: bool) -> None:
    """Cancel a job. One that is queued or uploading ends at once; a running one is asked to stop."""
    print_job(client.cancel_job(find_run_id(client, job)), as_json)


def print_job(job: RemoteJob, as_json: bool) -> None:
    """Print a job as JSON, or its fields."""
    if as_json:
        print_json(job)
        return
    print_fields(
        {
            "job": job.job_id,
            "status": job.status + (", cancellation requested" if job.cancel_requested and not job.done else ""),
            "config": job.config_name,
            "provider": job.provider,
            "remote": f"{job.remote_id} ({job.remote_status})" if job.remote_id else None,
            "user": job.user or None,
            "model": job.model or None,
            "key": job.idempotency_key,
            "tracker": job.tracker_run_name,
            "data": None if job.upload is None else _format_upload(job.upload),
            "submitted": format_time(job.created_at),
            "started": format_time(job.started_at) if job.started_at else None,
            "finished": format_time(job.finished_at) if job.finished_at else None,
            "progress": format_progress(job.progress, job.progress_note),
            "cost": f"{job.cost:g}" if job.cost else None,
            "error": job.error,
            "result": command_line(f"result {job.job_id}") if job.status == "completed" else None,
            "log": command_line(f"logs {job.job_id}") if job.status in ("running", "failed") else None,
        }
    )


def _format_upload(upload: RemoteUpload) -> str:
    if upload.bytes is None and upload.total is None:
        return upload.state
    if upload.total is None or upload.bytes == upload.total:
        return f"{upload.state}, {format_size(upload.bytes or 0)}"
    return f"{upload.state}, {format_size(upload.bytes or 0)} of {format_size(upload.total)}"


@command
@examples("semel jobs --status failed --limit 5")
@option("--status", type=STATUSES, help="Only jobs with this status.")
@option("--config", metavar="CONFIG", help="Only jobs of this config.")
@option("--provider", metavar="NAME", help="Only jobs of this provider.")
@option("--user", metavar="USER", help="Only jobs of this user; for operators.")
@option("--limit", type=POSITIVE, default=20, help="How many to list.")
@through_server
def jobs(client: Client, limit: int, as_json: bool, **filters: Any) -> None:
    """List jobs, newest first. Submitters see their own jobs, operators all."""
    found = list(client.jobs(**filters, limit=limit + 1))
    headings = ["job", "status", "config", "provider", "user", "submitted", "note"]
    print_page(as_json, "jobs", found, limit, headings=headings, row=_row)


def _row(job: RemoteJob) -> list[object]:
    about = job.error or job.progress_note
    return [job.job_id, job.status, job.config_name, job.provider, job.user, format_time(job.created_at), about]
