"""``semel result`` and ``semel logs``: what a run returned, and what it logged."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semel.cli._client import find_run_id, through_server
from semel.cli._options import INTERRUPTED, command, examples, option, run_argument
from semel.cli._output import finite, format_size, is_terminal, note, plain, print_json
from semel.errors import InvalidRequest
from semel.redaction import printable

if TYPE_CHECKING:
    from semel.api_types import RemoteLogLine
    from semel.client import Client


@command
@examples("semel result 0e8c77", "semel result 0e8c77 --artifact plot.png -o plot.png")
@run_argument
@option("--artifact", metavar="NAME", help="Print this file that the run left, instead of what it returned.")
@option("-o", "--output", metavar="FILE", help="Write to this file instead of the standard output.")
@through_server
def result(client: Client, run: str, artifact: str | None, output: str | None, as_json: bool) -> None:  # noqa: ARG001 -- it is JSON anyway
    """Print what a run returned, as JSON; or a file that it left, which semel show lists.

    The exit code is 1 unless the run has
    succeeded.
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
        raise InvalidRequest("the file is no text that a terminal can show; write it with -o FILE (or -o -)")
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
@option("-f", "--follow", is_flag=True, help="Go on until the run has ended.")
@through_server
def logs(client: Client, run: str, follow: bool, as_json: bool) -> int | None:
    """Print what a run logged, oldest first."""
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
