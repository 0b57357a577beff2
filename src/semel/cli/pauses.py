"""``semel pause`` and ``semel resume``, through a server: let no run of a queue or a model start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from semel.cli._client import through_server
from semel.cli._options import argument, command, examples, option
from semel.cli._output import format_time, note, print_list, print_result

if TYPE_CHECKING:
    from semel.api_types import RemotePause
    from semel.client import Client

KIND = click.Choice(["queue", "model"])


@command
@examples(
    "semel pause queue gpu --why 'the GPUs get a new driver'",
    "semel pause model baseline_forecast_v1",
    "semel pause                                              # lists what is paused",
)
@argument("kind", type=KIND, required=False, metavar="[queue|model]", help="What to pause.")
@argument("name", required=False, metavar="[NAME]", help="The name of the queue or model.")
@option("--why", default="", metavar="TEXT", help="The reason, shown with each run that waits.")
@through_server
def pause(client: Client, kind: str | None, name: str | None, why: str, as_json: bool) -> None:
    """Pause a queue or a model: what runs goes on, and nothing new starts until semel resume.

    Without arguments, lists what is paused.
    """
    if kind is None:
        _print_pauses(client.pauses(), as_json)
        return
    if name is None:
        raise click.UsageError(f"missing argument: the name of the {kind}")
    found = client.pause(**{kind: name}, why=why)
    since = format_time(found.since) + (f" by {found.by}" if found.by else "")
    waiting = "1 run is" if found.pending == 1 else f"{found.pending} runs are"
    print_result(as_json, found, f"the {kind} {name} is paused since {since}; {waiting} pending")


def _print_pauses(found: list[RemotePause], as_json: bool) -> None:
    rows = [[each.kind, each.name, format_time(each.since), each.by, each.why, each.pending] for each in found]
    headings = ["kind", "name", "since", "by", "why", "pending"]
    print_list(as_json, {"pauses": found}, headings, rows, empty="nothing is paused")


@command
@examples("semel resume queue gpu", "semel resume model baseline_forecast_v1")
@argument("kind", type=KIND, metavar="queue|model", help="What to resume.")
@argument("name", help="The name of the queue or model.")
@through_server
def resume(client: Client, kind: str, name: str, as_json: bool) -> int:
    """Resume a queue or a model: its runs start again. The exit code is 1 if it was not paused."""
    resumed = client.resume(**{kind: name})
    if resumed or as_json:
        print_result(as_json, {"kind": kind, "name": name, "resumed": resumed}, f"the {kind} {name} is resumed")
    else:
        note(f"semel: the {kind} {name} is not paused")
    return 0 if resumed else 1
