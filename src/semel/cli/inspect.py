"""``semel models``, ``workers`` and ``summary``, through a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from semel.cli._client import through_server
from semel.cli._options import command, examples, option
from semel.cli._output import format_ago, format_span, print_list

if TYPE_CHECKING:
    from semel.api_types import RemoteModel, RemoteWorker
    from semel.client import Client

STATUSES = ("PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED")


@command
@examples("semel models", "semel models --json")
@through_server
def models(client: Client, as_json: bool) -> None:
    """List the models with their parameters; * marks required ones."""
    found = client.models()
    print_list(
        as_json,
        {"models": found},
        ["model", "parameters", "queue", "about"],
        ([each.name, _parameters(each), each.queue, (each.description or "").partition("\n")[0]] for each in found),
        empty="there are no models",
    )


def _parameters(model: RemoteModel) -> str:
    schema: dict[str, Any] = model.parameters
    required = schema.get("required", [])
    return " ".join(f"{name}{'*' if name in required else ''}" for name in schema.get("properties", {}))


@command
@examples("semel workers")
@through_server
def workers(client: Client, as_json: bool) -> None:
    """List the workers that are alive or were recently.

    RQ and Celery workers are listed only while they execute a run.
    """
    found = client.workers()
    print_list(
        as_json,
        {"workers": found},
        ["worker", "state", "pid", "queues", "slots", "holds", "started", "seen"],
        map(_worker_row, found),
        empty="there are no workers; semel worker MODULE:APP starts one",
    )


def _worker_row(worker: RemoteWorker) -> list[object]:
    state = ("stopping" if worker.draining else "alive") if worker.alive else "silent"
    slots = " ".join(f"{where}:{number}" for where, number in worker.slots.items() if number)
    holds = " ".join(f"{model}:{number}" for model, number in (worker.holds or {}).items())
    seen = [format_ago(worker.started_at), format_ago(worker.seen_at)]
    return [worker.id, state, worker.pid, ",".join(worker.queues), slots, holds, *seen]


@command
@examples("semel summary --grouped")
@option("--grouped", is_flag=True, help="Group also by the parameter that a model is summarised by.")
@through_server
def summary(client: Client, grouped: bool, as_json: bool) -> None:
    """Count the runs of each model by status, with the mean duration of successful runs."""
    found = client.summary(grouped=grouped)
    rows = []
    for each in found:
        mean = None if each.mean_seconds is None else format_span(each.mean_seconds)
        counts = [each.counts.get(status, 0) for status in STATUSES]
        rows.append([each.model, *([each.group] if grouped else []), *counts, mean])
    headings = ["model", *(["group"] if grouped else []), *(status.lower() for status in STATUSES), "mean"]
    print_list(as_json, {"summary": found}, headings, rows, empty="there are no runs yet")
