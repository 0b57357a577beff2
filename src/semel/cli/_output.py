"""Output: tables and progress by Rich, JSON for programs, and notes on stderr."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Self, TypeVar

from semel.redaction import printable, without_secrets

if TYPE_CHECKING:
    import rich.progress

    from semel.api_types import RemoteRun

T = TypeVar("T")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNLIMITED = 1_000_000
"""The width of a table outside a terminal, where nothing is truncated."""
_STYLES = {
    **dict.fromkeys(("SUCCEEDED", "completed", "alive"), "green"),
    **dict.fromkeys(("FAILED", "failed", "silent"), "red"),
    **dict.fromkeys(("CANCELLED", "cancelled", "stopping"), "yellow"),
    **dict.fromkeys(("RUNNING", "running", "uploading"), "cyan"),
}
_STEP = 0.1
"""How much progress prints another line outside a terminal."""


def note(text: str) -> None:
    """Print a note to stderr, without secrets; stdout is for output that programs read."""
    print(printable(without_secrets(text)), file=sys.stderr, flush=True)


def command_line(arguments: str) -> str:
    """A command to paste: ``semel`` with the arguments, or what ``SEMEL_PROGRAM`` says to type for it."""
    return f"{os.environ.get('SEMEL_PROGRAM') or 'semel'} {arguments}"


def is_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout.isatty()


def print_json(value: Any) -> None:
    """Print JSON: indented on a terminal, else on one line."""
    print(json.dumps(finite(plain(value)), ensure_ascii=False, indent=2 if is_terminal() else None), flush=True)


def finite(value: Any) -> Any:
    """Replace numbers that JSON cannot represent by None."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain(value: Any) -> Any:
    """Convert to types that JSON has."""
    import msgspec

    return msgspec.to_builtins(value, str_keys=True)


def with_iso_times(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Replace microseconds (``…_us``) by times in ISO 8601 (``…_at``)."""
    return dict(_with_iso_time(name, value) for name, value in fields.items())


def _with_iso_time(name: str, value: Any) -> tuple[str, Any]:
    if not name.endswith("_us"):
        return name, value
    return f"{name[:-3]}_at", None if value is None else _from_us(value).isoformat().replace("+00:00", "Z")


def _from_us(microseconds: int) -> datetime:
    return _EPOCH + timedelta(microseconds=microseconds)


def format_time(at: datetime | str | int | None, *, never: str = "-") -> str:
    """A local time, and how long ago it was. An int is microseconds, as in the database."""
    if at is None:
        return never
    if isinstance(at, int):
        at = _from_us(at)
    if isinstance(at, str):
        at = datetime.fromisoformat(at)
    return f"{at.astimezone():%Y-%m-%d %H:%M:%S} ({format_ago(at)})"


def format_ago(at: datetime) -> str:
    """How long ago a time was, or in how long it will be."""
    seconds = (at - datetime.now(UTC)).total_seconds()
    if abs(seconds) < 1:
        return "now"
    return f"in {format_span(seconds)}" if seconds > 0 else f"{format_span(-seconds)} ago"


def format_span(seconds: float) -> str:
    """A duration, in one or two units."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, length, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= length:
            rest = whole % length // part
            return f"{whole // length} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def format_size(number: int) -> str:
    amount = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """Print a table, or the note ``empty`` when there are no rows.

    On a terminal, cells are truncated to its width, those of the first column last. Elsewhere nothing is truncated or
    coloured.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    if cells:
        print("\n".join(_table_lines(headings, cells)), flush=True)
    else:
        note(empty)


def _cell(value: object) -> str:
    return "-" if value is None or value == "" else printable(" ".join(str(value).split()))


def _table_lines(headings: Sequence[str], cells: Iterable[Sequence[str]]) -> list[str]:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def line(text: str, style: str) -> Text:
        return Text(text, style, no_wrap=True, overflow="ellipsis")

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(line(heading.upper(), "bold"), no_wrap=heading == headings[0])
    for row in cells:
        table.add_row(*(line(cell, _STYLES.get(cell, "")) for cell in row))
    width = shutil.get_terminal_size().columns if is_terminal() else _UNLIMITED
    # Without a height, Rich takes a terminal with TERM=dumb to be 80 columns wide.
    console = Console(width=width, height=25, force_terminal=is_terminal())
    with console.capture() as printed:
        console.print(table)
    return [line.rstrip() for line in printed.get().splitlines()]


def print_list(
    as_json: bool, document: Any, headings: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str
) -> None:
    """Print the document as JSON, or the rows as a table."""
    if as_json:
        print_json(document)
    else:
        print_table(headings, rows, empty=empty)


def print_page(
    as_json: bool,
    name: str,
    found: list[T],
    limit: int,
    *,
    headings: Sequence[str],
    row: Callable[[T], Sequence[object]],
) -> None:
    """Print up to ``limit`` of what was found, and whether there is more."""
    shown, more = found[:limit], len(found) > limit
    print_list(as_json, {name: shown, "more": more}, headings, map(row, shown), empty=f"there are no such {name}")
    if more and not as_json:
        note(f"there are more; --limit {limit * 5} shows more of them")


def print_result(as_json: bool, document: Any, text: str) -> None:
    """Print the document as JSON, or the text."""
    if as_json:
        print_json(document)
    else:
        print(text, flush=True)


def print_fields(fields: Mapping[str, object]) -> None:
    """Print one field per line, without those that are None."""
    shown = {name: str(value).splitlines() or [""] for name, value in fields.items() if value is not None}
    longest = max(map(len, shown), default=0)
    for name, lines in shown.items():
        for label, line in zip([name, *[""] * len(lines)], lines, strict=False):
            print(f"{label:<{longest}}  {printable(line)}")


class Progress:
    """Shows the progress of a run on stderr: a bar on a terminal, else lines."""

    def __init__(self) -> None:
        self._bar: rich.progress.Progress | None = None
        self._shown: tuple[str, int] | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._bar = _bar()
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, run: RemoteRun) -> None:
        if self._bar is not None:
            (task,) = self._bar.task_ids
            self._bar.update(task, completed=run.progress or 0.0, state=printable(_state(run), ""))
            return
        step = (run.status, int((run.progress or 0.0) / _STEP + 1e-9))
        if step != self._shown and not run.done:
            self._shown = step
            note(_state(run))


def _bar() -> rich.progress.Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    text = TextColumn("{task.fields[state]}", markup=False)
    bar = Progress(BarColumn(30), text, console=Console(stderr=True), transient=True)
    bar.add_task("", total=1.0, state="")
    return bar


def _state(run: RemoteRun) -> str:
    from semel.runs.types import attempts_text

    parts: list[str] = [run.status]
    if run.status == "RUNNING" and run.progress is not None:
        parts.append(f"{run.progress:4.0%}")
    if run.status == "RUNNING" and run.attempts > 1:
        parts.append(attempts_text(run))
    if run.progress_note:
        parts.append(run.progress_note)
    return "  ".join(parts)
