"""``semel job`` and ``semel jobs``: runs of named configs, here or at a provider, through a server."""

from __future__ import annotations

import argparse
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

from semel.cli import options, printing
from semel.cli.remote import connected, run_id
from semel.errors import InvalidRequest, SemelError, ServiceError

if TYPE_CHECKING:
    from semel.client import Client, RemoteJob
    from semel.client.views import RemoteUpload

PROVIDERS = ("local", "replicate")
STATUSES = ("uploading", "queued", "running", "completed", "failed", "cancelled")
JOB = "the job's id, or six or more characters of its beginning or end"


def add_to(commands: options.Commands) -> None:
    """Add the commands."""
    verbs = options.family(
        commands,
        "job",
        help="submit, show and cancel jobs of named configs",
        description="A job is a run of a named config: on our own workers, or at a provider. It is a run of the same "
        "id, too, so that semel logs and semel result know it.",
    )
    _add_submit(verbs)
    showing = options.command(
        verbs,
        "show",
        help="a job",
        description="A job as it stands: where it is, and how far its data and its work are.",
        example="semel job show 0e8c77",
    )
    cancelling = options.command(
        verbs,
        "cancel",
        help="cancel a job",
        description="End a job that waits or uploads, or ask one that runs to end, wherever that is.",
        example="semel job cancel 0e8c77",
    )
    for parser, do in ((showing, _show), (cancelling, _cancel)):
        parser.add_argument("job", metavar="JOB", help=JOB)
        options.server_options(parser)
        parser.set_defaults(do=do)
    _add_list(commands)


def _add_submit(verbs: options.Commands) -> None:
    parser = options.command(
        verbs,
        "submit",
        help="submit a job",
        description="Submit a job of a config and print its id. Under the same --key the same job is found again.",
        example="semel job submit my-training-config\n"
        'semel job submit production --provider replicate --key "$BUILD_ID"',
    )
    parser.add_argument("config", metavar="CONFIG", help="the config's name")
    parser.add_argument("--provider", choices=PROVIDERS, default="local", help="who does the work (default: local)")
    parser.add_argument("--key", metavar="KEY", help="names the job: submitted again, it is found (default: a new one)")
    parser.add_argument("--key-ttl", type=options.span, metavar="TIME", help="how long the key is kept (default: 24h)")
    parser.add_argument("--run-name", metavar="NAME", help="what a tracker is to call it")
    options.server_options(parser)
    parser.set_defaults(do=_submit)


def _add_list(commands: options.Commands) -> None:
    parser = options.command(
        commands,
        "jobs",
        help="list jobs",
        description="Jobs, newest first. A submitter sees their own, an operator everybody's.",
        example="semel jobs --status failed --limit 5",
    )
    parser.add_argument("--status", choices=STATUSES, help="only in this state")
    parser.add_argument("--config", metavar="CONFIG", help="only of this config")
    parser.add_argument("--provider", choices=PROVIDERS, help="only of this provider")
    parser.add_argument("--user", metavar="USER", help="only this user's; for operators")
    parser.add_argument("--limit", type=options.whole, default=20, metavar="N", help="how many (default: 20)")
    options.server_options(parser)
    parser.set_defaults(do=_list)


def _submit(chosen: argparse.Namespace) -> int:
    key = f"cli-{uuid.uuid4()}" if chosen.key is None else chosen.key
    with connected(chosen) as client:
        try:
            job = client.submit_job(
                chosen.config,
                provider=chosen.provider,
                idempotency_key=key,
                tracker_run_name=chosen.run_name,
                ttl_hours=None if chosen.key_ttl is None else chosen.key_ttl / 3600,
            )
        except KeyboardInterrupt:
            printing.say(f"semel: interrupted; perhaps it was submitted: the same again with --key {key} finds it")
            return options.INTERRUPTED
        except ServiceError as error:
            raise _refusal(client, chosen.config, error) from error
    for warning in (*job.quota_warnings, job.cost_limit_warning):
        if warning:
            printing.say(f"semel: {warning}")
    if job.idempotent_hit:
        printing.say(f"it was there already ({job.status})")
    if chosen.json:
        printing.print_json(job)
    else:
        print(job.job_id)
    return 0


def _refusal(client: Client, config: str, error: ServiceError) -> SemelError:
    """Why there is no job, in words for somebody who has a config and no HTTP."""
    if error.code != "JOB_REFUSED":
        return error
    if not error.detail.startswith("Unknown config"):
        return InvalidRequest(f"no job was made of the config {config!r}: {error.detail}")
    known = ""
    with suppress(SemelError):
        known = ", ".join(each.name for each in client.configs())
    return InvalidRequest(f"{error.detail}; there are: {known or 'none'}; semel config set NAME writes another")


def _show(chosen: argparse.Namespace) -> int:
    with connected(chosen) as client:
        return _print(client.job(run_id(client, chosen.job)), chosen)


def _cancel(chosen: argparse.Namespace) -> int:
    with connected(chosen) as client:
        return _print(client.cancel_job(run_id(client, chosen.job)), chosen)


def _print(job: RemoteJob, chosen: argparse.Namespace) -> int:
    if chosen.json:
        printing.print_json(job)
        return 0
    percent = "" if job.progress is None else f"{job.progress:.0%} "
    upload = job.upload
    printing.print_fields(
        {
            "job": job.job_id,
            "status": job.status + (", asked to end" if job.cancel_requested and not job.done else ""),
            "config": job.config_name,
            "provider": job.provider,
            "remote": f"{job.remote_id} ({job.remote_status})" if job.remote_id else None,
            "user": job.user or None,
            "model": job.model or None,
            "key": job.idempotency_key,
            "tracker": job.tracker_run_name,
            "data": None if upload is None else _sent(upload),
            "submitted": printing.when(job.created_at),
            "started": printing.when(job.started_at) if job.started_at else None,
            "finished": printing.when(job.finished_at) if job.finished_at else None,
            "progress": f"{percent}{job.progress_note or ''}".strip() or None,
            "cost": f"{job.cost:g}" if job.cost else None,
            "error": job.error,
            "result": f"semel result {job.job_id}" if job.status == "completed" else None,
            "log": f"semel logs {job.job_id}" if job.status in ("running", "failed") else None,
        }
    )
    return 0


def _sent(upload: RemoteUpload) -> str:
    """How far a job's data is."""
    if upload.bytes is None and upload.total is None:
        return upload.state
    if upload.total is None or upload.bytes == upload.total:
        return f"{upload.state}, {printing.size(upload.bytes or 0)}"
    return f"{upload.state}, {printing.size(upload.bytes or 0)} of {printing.size(upload.total)}"


def _list(chosen: argparse.Namespace) -> int:
    with connected(chosen) as client:
        found = list(
            client.jobs(
                status=chosen.status,
                config=chosen.config,
                provider=chosen.provider,
                user=chosen.user,
                limit=chosen.limit + 1,
            )
        )
    more = len(found) > chosen.limit
    found = found[: chosen.limit]
    if chosen.json:
        printing.print_json({"jobs": found, "more": more})
        return 0
    printing.print_table(
        ["job", "status", "config", "provider", "user", "submitted", "note"],
        [
            [
                each.job_id,
                each.status,
                each.config_name,
                each.provider,
                each.user,
                printing.when(each.created_at),
                each.error or each.progress_note,
            ]
            for each in found
        ],
        nothing="there are no such jobs",
    )
    if more:
        printing.say(f"and there are more; --limit {chosen.limit * 5} shows more of them")
    return 0
