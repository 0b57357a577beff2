"""``semel result`` and ``semel logs``: what came of a run, and what it said meanwhile."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semel.cli import options, printing
from semel.cli.remote import connected, run_id
from semel.cli.runs import RUN
from semel.errors import InvalidRequest
from semel.redaction import printable

if TYPE_CHECKING:
    from semel.client.views import RemoteLogLine


def add_to(commands: options.Commands) -> None:
    """Add the commands."""
    result = options.command(
        commands,
        "result",
        help="what a run returned, and the files that it left",
        description="Print what a run returned, as JSON; or one of the files that it left, which semel show lists. "
        "Ends with 1 unless the run has succeeded.",
        example="semel result 0e8c77\nsemel result 0e8c77 --artifact plot.png -o plot.png",
    )
    result.add_argument("run", metavar="RUN", help=RUN)
    result.add_argument("--artifact", metavar="NAME", help="a file that it left, instead of what it returned")
    result.add_argument("-o", "--output", metavar="FILE", help="write it there (default: to the standard output)")
    options.server_options(result)
    result.set_defaults(do=_result)
    logs = options.command(
        commands,
        "logs",
        help="what a run logs; --follow until its end",
        description="Print what a run logged, oldest first; with --follow also what it logs until it is over.",
        example="semel logs 0e8c77 --follow",
    )
    logs.add_argument("run", metavar="RUN", help=RUN)
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the run is over")
    options.server_options(logs)
    logs.set_defaults(do=_logs)


def _is_text(content: bytes) -> bool:
    try:
        return all(letter.isprintable() or letter in "\r\n\t" for letter in content.decode())
    except UnicodeDecodeError:
        return False


def _result(chosen: argparse.Namespace) -> int:
    output = None if chosen.output == "-" else chosen.output
    with connected(chosen) as client:
        known = run_id(client, chosen.run)
        if not chosen.artifact:
            _give(client.result(known), output)
            for warning in client.get(known).warnings:
                printing.say(f"semel: warning: {warning}")
        elif output is None:
            content = client.artifact(known, chosen.artifact)
            if chosen.output is None and printing.is_terminal() and not _is_text(content):
                raise InvalidRequest("the file is no text that a terminal can show; write it with -o FILE (or -o -)")
            sys.stdout.buffer.write(content)
            sys.stdout.buffer.flush()
        else:
            _say_written(client.save_artifact(known, chosen.artifact, output))
    return 0


def _give(value: Any, output: str | None) -> None:
    if output is None:
        printing.print_json(value)
        return
    target = Path(output)
    target.write_text(json.dumps(printing.finite(value), ensure_ascii=False, indent=2) + "\n", "utf-8")
    _say_written(target)


def _say_written(target: Path) -> None:
    printing.say(f"{target}: {printing.size(target.stat().st_size)}")


def _logs(chosen: argparse.Namespace) -> int:
    with connected(chosen) as client:
        known = run_id(client, chosen.run)
        try:
            for line in client.logs(known, follow=chosen.follow):
                _print(line, as_json=chosen.json)
        except KeyboardInterrupt:
            if not chosen.follow:
                raise
            printing.say("semel: interrupted; the run goes on")
            return options.INTERRUPTED
    return 0


def _print(line: RemoteLogLine, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(printing.plain(line), ensure_ascii=False), flush=True)
        return
    print(printable(f"{line.at.astimezone():%Y-%m-%d %H:%M:%S} {line.level:<7} {line.text}"), flush=True)
