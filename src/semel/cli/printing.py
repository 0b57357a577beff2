"""How commands print: tables that fit the terminal, times as people say them, JSON for programs."""

from __future__ import annotations

import json
import math
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from semel.redaction import printable, without_secrets

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LEAST = 8
"""Characters to which a column of a table may shrink."""
_GAP = "  "


def say(text: str) -> None:
    """A remark for the person at the terminal: what is to be used further goes to the standard output."""
    print(printable(without_secrets(text)), file=sys.stderr, flush=True)


def is_terminal() -> bool:
    """Whether somebody is looking at the output."""
    return sys.stdout.isatty()


def print_json(value: Any) -> None:
    """One document: on a line for programs, with indents for people."""
    print(json.dumps(finite(plain(value)), ensure_ascii=False, indent=2 if is_terminal() else None), flush=True)


def finite(value: Any) -> Any:
    """With null for the numbers that JSON has no form for."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain(value: Any) -> Any:
    """As JSON has it."""
    import msgspec

    return msgspec.to_builtins(value, str_keys=True)


def timed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the database for others to read: its times, ``…_us``, as ``…_at`` in ISO 8601 and UTC."""
    return dict(_field(name, value) for name, value in fields.items())


def _field(name: str, value: Any) -> tuple[str, Any]:
    if not name.endswith("_us"):
        return name, value
    return f"{name[:-3]}_at", None if value is None else moment(value).isoformat().replace("+00:00", "Z")


def moment(at_us: int) -> datetime:
    """The database's microseconds as a time."""
    return _EPOCH + timedelta(microseconds=at_us)


def when(at: datetime | str | int | None, *, never: str = "-") -> str:
    """A time here, and how long that is from now."""
    if at is None:
        return never
    if isinstance(at, int):
        at = moment(at)
    if isinstance(at, str):
        at = datetime.fromisoformat(at)
    return f"{at.astimezone():%Y-%m-%d %H:%M:%S} ({ago(at)})"


def ago(at: datetime) -> str:
    """How long that is from now, for a narrow column."""
    return _hint((at - datetime.now(UTC)).total_seconds())


def _hint(seconds: float) -> str:
    if abs(seconds) < 1:
        return "now"
    return f"in {lasting(seconds)}" if seconds > 0 else f"{lasting(-seconds)} ago"


def lasting(seconds: float) -> str:
    """A span of time, in the one or two units that matter."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, length, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= length:
            rest = whole % length // part
            return f"{whole // length} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def size(number: int) -> str:
    """Bytes."""
    amount = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]], *, nothing: str) -> None:
    """Rows under headings; on a terminal each on a line of its own. ``nothing`` is said when there are none."""
    cells = [[_cell(value) for value in row] for row in rows]
    if not cells:
        say(nothing)
        return
    lines = [[heading.upper() for heading in headings], *cells]
    widths = [max(_width(line[column]) for line in lines) for column in range(len(headings))]
    if is_terminal():
        widths = _fitted(widths, shutil.get_terminal_size().columns)
    for line in lines:
        print(_GAP.join(_padded(cell, width) for cell, width in zip(line, widths, strict=True)).rstrip())


def print_fields(fields: Mapping[str, object]) -> None:
    """A thing by its parts, one on a line; what is None is left out."""
    shown = {name: _lines(value) for name, value in fields.items() if value is not None}
    longest = max(map(len, shown), default=0)
    for name, (first, *rest) in shown.items():
        print(f"{name:<{longest}}  {first}")
        for line in rest:
            print(f"{'':<{longest}}  {line}")


def _lines(value: object) -> list[str]:
    return [printable(line) for line in str(value).splitlines()] or [""]


def _cell(value: object) -> str:
    return "-" if value is None or value == "" else printable(" ".join(str(value).split()))


def _fitted(widths: list[int], most: int) -> list[int]:
    """Shorten the widest columns until a line fits; the first, by which a thing is named, only after the others."""
    first, *rest = widths
    room = most - len(_GAP) * len(rest)
    while first + sum(rest) > room and max(rest, default=0) > _LEAST:
        rest[rest.index(max(rest))] -= 1
    return [min(first, max(room - sum(rest), _LEAST)), *rest]


def _padded(cell: str, width: int) -> str:
    if _width(cell) > width:
        kept = ""
        for character in cell:
            if _width(kept + character) > width - 1:
                break
            kept += character
        cell = f"{kept}…"
    return cell + " " * (width - _width(cell))


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(each) else 1 + (unicodedata.east_asian_width(each) in "WF") for each in text)
