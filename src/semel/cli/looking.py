"""``semel models``, ``workers``, ``summary``: what there is on a server."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from semel.cli import options, printing
from semel.cli.remote import connected

if TYPE_CHECKING:
    from semel.client.views import RemoteModel, RemoteWorker


def add_to(commands: options.Commands) -> None:
    """Add the commands."""
    models = options.command(
        commands,
        "models",
        help="the models that can be submitted, and their parameters",
        description="The models that can be submitted, with the parameters that they take; * marks those they need.",
        example="semel models\nsemel models --json",
    )
    workers = options.command(
        commands,
        "workers",
        help="who works on runs",
        description="Workers that are alive or were until lately; of RQ's and Celery's only those at work.",
        example="semel workers",
    )
    summary = options.command(
        commands,
        "summary",
        help="how many runs of each model are in which state",
        description="How many runs of each model are in which state, and how long those that succeeded took.",
        example="semel summary --grouped",
    )
    summary.add_argument("--grouped", action="store_true", help="also by the parameter that a model is summarised by")
    for parser, do in ((models, _models), (workers, _workers), (summary, _summary)):
        options.server_options(parser)
        parser.set_defaults(do=do)


def _models(chosen: argparse.Namespace) -> int:
    with connected(chosen) as client:
        found = client.models()
    if chosen.json:
        printing.print_json({"models": found})
        return 0
    printing.print_table(
        ["model", "parameters", "queue", "about"],
        [[each.name, _parameters(each), each.queue, (each.description or "").partition("\n")[0]] for each in found],
        nothing="there are no models",
    )
    return 0


def _parameters(model: RemoteModel) -> str:
    schema: dict[str, Any] = model.parameters
    needed = schema.get("required", [])
    return " ".join(f"{name}{'*' if name in needed else ''}" for name in schema.get("properties", {}))


def _workers(chosen: argparse.Namespace) -> int:
    with connected(chosen) as client:
        found = client.workers()
    if chosen.json:
        printing.print_json({"workers": found})
        return 0
    printing.print_table(
        ["worker", "state", "pid", "queues", "slots", "holds", "started", "seen"],
        [_row(each) for each in found],
        nothing="there are no workers; semel worker MODULE:APP starts one",
    )
    return 0


def _row(worker: RemoteWorker) -> list[object]:
    state = ("stopping" if worker.draining else "alive") if worker.alive else "silent"
    slots = " ".join(f"{where}:{number}" for where, number in worker.slots.items() if number)
    holds = " ".join(f"{model}:{number}" for model, number in (worker.holds or {}).items())
    seen = [printing.ago(worker.started_at), printing.ago(worker.seen_at)]
    return [worker.id, state, worker.pid, ",".join(worker.queues), slots, holds, *seen]


def _summary(chosen: argparse.Namespace) -> int:
    with connected(chosen) as client:
        found = client.summary(grouped=chosen.grouped)
    if chosen.json:
        printing.print_json({"summary": found})
        return 0
    states = ("PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED")
    groups = ["group"] if chosen.grouped else []
    printing.print_table(
        ["model", *groups, *(state.lower() for state in states), "mean"],
        [
            [
                each.model,
                *([each.group] if chosen.grouped else []),
                *(each.counts.get(state, 0) for state in states),
                None if each.mean_seconds is None else printing.lasting(each.mean_seconds),
            ]
            for each in found
        ],
        nothing="there are no runs yet",
    )
    return 0
