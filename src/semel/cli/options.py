"""What many commands take: the server, the database, JSON; and how values are read."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias

from semel.errors import InvalidRequest
from semel.model import time_in

SERVER = "http://127.0.0.1:8001"
DATABASE = "sqlite:///semel.db"
INTERRUPTED = 130
"""How a command ends after Ctrl-C, as shells have it."""
_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")

Commands = Any
"""What add_subparsers gives."""
Parsing: TypeAlias = "argparse.ArgumentParser | argparse._ArgumentGroup"
"""What takes options."""


def command(
    commands: Commands,
    name: str,
    *,
    help: str,  # noqa: A002 -- argparse's word
    description: str,
    example: str,
) -> argparse.ArgumentParser:
    """A command with a page of help, which ends with an example."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog="examples:\n" + "\n".join(f"  {line}" for line in example.splitlines()),
        formatter_class=Help,
    )
    return parser


class Help(argparse.HelpFormatter):
    """Keeps the lines of the examples, and fills those of the rest."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:\n"):
            return text
        return super()._fill_text(text, width, indent)


def family(commands: Commands, name: str, *, help: str, description: str) -> Commands:  # noqa: A002 -- see command
    """A command that is one of several verbs."""
    parser = commands.add_parser(name, help=help, description=description, formatter_class=Help)
    return parser.add_subparsers(dest="verb", required=True, metavar="VERB", title="verbs")


def json_option(parser: argparse.ArgumentParser) -> None:
    """``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def server_options(parser: argparse.ArgumentParser) -> None:
    """``--server`` and ``--token``, and ``--json``."""
    group = parser.add_argument_group("server")
    group.add_argument("--server", metavar="URL", help=f"the server (default: $SEMEL_SERVER, or {SERVER})")
    group.add_argument(
        "--token", metavar="TOKEN", help="your token (default: $SEMEL_TOKEN, or what is in the file $SEMEL_TOKEN_FILE)"
    )
    json_option(parser)


def db_option(parser: argparse.ArgumentParser) -> None:
    """``--db`` and ``--json``."""
    parser.add_argument("--db", metavar="URL", help=f"the database (default: $SEMEL_DB, or {DATABASE})")
    json_option(parser)


def tenant_option(parser: argparse.ArgumentParser) -> None:
    """``--tenant``."""
    parser.add_argument("--tenant", default="", metavar="TENANT", help="whose it is, where there are tenants")


def server(chosen: argparse.Namespace) -> str:
    """The server's address."""
    given: str = chosen.server or os.environ.get("SEMEL_SERVER") or SERVER
    return given if "://" in given else f"http://{given}"


def token(chosen: argparse.Namespace) -> str | None:
    """The token to send, if any."""
    given = chosen.token or os.environ.get("SEMEL_TOKEN")
    path = os.environ.get("SEMEL_TOKEN_FILE")
    if given or not path:
        return given or None
    try:
        return Path(path).read_text().strip() or None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the token cannot be read from SEMEL_TOKEN_FILE ({path}): {error}") from None


def database(chosen: argparse.Namespace) -> str:
    """The database's URL."""
    return chosen.db or os.environ.get("SEMEL_DB") or DATABASE


def span(text: str) -> float:
    """Seconds of ``90``, ``90s``, ``15m``, ``12h``, ``30d``, ``2w``."""
    found = _SPAN.fullmatch(text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no span of time; it looks like 90s, 15m, 12h, 30d or 2w")
    return float(found[1]) * _UNITS[found[2]]


def age(text: str) -> float:
    """A span with its unit: where something is removed for good, seconds are not guessed."""
    if text.strip().replace(".", "", 1).isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} has no unit; days are written as {text.strip()}d")
    return span(text)


def time_of(text: str) -> datetime:
    """A time: ISO 8601, here where no zone is given; or a span before now."""
    if not text.strip().replace(".", "", 1).isdecimal() and _SPAN.fullmatch(text.strip().lower()):
        return datetime.now(UTC) - timedelta(seconds=span(text))
    try:
        return time_in(text).astimezone()
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time; it looks like 2030-01-31, 2030-01-31T12:00 or 2h (before now)"
        ) from None


def whole(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def count(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


def port(text: str) -> int:
    """A port to listen on."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port, which is a number from 0 to 65535")
    return int(text)


def amount(text: str) -> float:
    """A number from 0 on."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")
    return number


def cost(text: str) -> float:
    """What a run may cost."""
    from semel.runs.records import MAX_COST

    number = amount(text)
    if number > MAX_COST:
        raise argparse.ArgumentTypeError(f"{text!r} is too much: a run costs at most {MAX_COST:,}")
    return number


def priority(text: str) -> int:
    """A whole number, such as a database keeps."""
    try:
        number = int(text)
    except ValueError:
        number = 2**31
    if not -(2**31) <= number < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from -2147483648 to 2147483647")
    return number


def names(text: str) -> list[str]:
    """One name, or several with commas between them."""
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is no name, nor names with commas between them")
    return found


def queue_option(parser: Parsing, name: str = "queues") -> None:
    """``--queues``, once with commas or again and again; ``--queue`` is the same."""
    about = "the queues to serve in their order, with commas, or again for more (default: default)"
    parser.add_argument("-q", "--queues", dest=name, type=names, action="extend", metavar="NAMES", help=about)
    parser.add_argument("--queue", dest=name, type=names, action="extend", help=argparse.SUPPRESS)


WAIT_FOR_DATABASE = 60.0


def wait_option(parser: Parsing) -> None:
    """``--wait-for-database``."""
    parser.add_argument(
        "--wait-for-database",
        type=amount,
        metavar="SECONDS",
        help=f"to wait at the start for a database that is unavailable; 0: not (default: {WAIT_FOR_DATABASE:g})",
    )


def log_option(parser: Parsing) -> None:
    """``--log-format``; ``--log`` is the same, and ``text`` another word for ``pretty``."""
    kinds = ["pretty", "json"]
    parser.add_argument("--log-format", type=_log_format, choices=kinds, help="how to log (default: pretty)")
    parser.add_argument("--log", dest="log_format", type=_log_format, choices=kinds, help=argparse.SUPPRESS)


def _log_format(text: str) -> str:
    return "pretty" if text == "text" else text


def parameter(text: str) -> tuple[str, Any]:
    """``name=value``: JSON where it is JSON, else text."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is no parameter; it looks like name=value")
    try:
        return name, _strict(value)
    except ValueError:
        return name, value


def json_object(text: str) -> dict[str, Any]:
    """A JSON object, or ``@file`` with one."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise argparse.ArgumentTypeError(f"the file cannot be read: {error}") from None
    try:
        found = _strict(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"this is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError('this is no JSON object; it looks like {"name": "value"}')
    return found


def json_value(text: str) -> Any:
    """Any JSON."""
    try:
        return _strict(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}; a text needs quotes") from None


def _strict(text: str) -> Any:
    """JSON without what only Python takes for it: NaN and the infinities."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no number of JSON")

    def finite(text: str) -> float:
        number = float(text)
        return refuse(text) if math.isinf(number) else number

    try:
        return json.loads(text, parse_constant=refuse, parse_float=finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
