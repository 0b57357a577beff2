"""The client that commands through a server use."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semel.cli._options import SERVER, json_option, option
from semel.errors import InvalidRequest, RunNotFound, Unauthenticated

if TYPE_CHECKING:
    from semel.client import Client

BACKOFF = 0.25
"""Seconds before the first retry; short, because a user is waiting."""
LEAST = 6
_PART = re.compile(r"[0-9a-f-]+")


def through_server(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Add ``--server``, ``--token`` and ``--json``, and call the function with a client of that server."""

    @option("--server", section="Server", envvar="SEMEL_SERVER", default=SERVER, metavar="URL", help="The server.")
    @option(
        "--token",
        section="Server",
        envvar="SEMEL_TOKEN",
        help="The token; by default also read from $SEMEL_TOKEN_FILE.",
    )
    @json_option
    @functools.wraps(function)
    def connected(*, server: str, token: str | None, **options: Any) -> int | None:
        with _client(server, token) as client:
            return function(client, **options)

    return connected


@contextmanager
def _client(server: str, token: str | None) -> Iterator[Client]:
    from semel.client import Client

    url = server if "://" in server else f"http://{server}"
    with Client(url, token=token or _token_of_file(), backoff=BACKOFF) as client:
        try:
            yield client
        except Unauthenticated as error:
            how = "give one by --token, $SEMEL_TOKEN or $SEMEL_TOKEN_FILE; semel token create makes one"
            why = error.detail.partition(": Authorization")[0]
            raise Unauthenticated(error.status, error.code, f"{why}: {how}") from error


def _token_of_file() -> str | None:
    path = os.environ.get("SEMEL_TOKEN_FILE")
    if not path:
        return None
    try:
        return Path(path).read_text().strip() or None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the token cannot be read from SEMEL_TOKEN_FILE ({path}): {error}") from None


def find_run_id(client: Client, text: str) -> str:
    """The run id for a complete id, or for the beginning or end of one."""
    from semel.runs.types import checked_id

    wanted = text.strip().lower()
    if (known := checked_id(wanted)) is not None:
        return known
    if not _PART.fullmatch(wanted) or len(wanted.replace("-", "")) < LEAST:
        raise RunNotFound(f"{text!r} is not a run id, nor at least six characters from the beginning or end of one")
    found = [run.run_id for run in client.runs(id_part=wanted, limit=2)]
    if not found or not all(_matches(each, wanted) for each in found):  # an older server ignores the filter
        raise RunNotFound(f"no run begins or ends with {text!r}")
    if len(found) > 1:
        raise RunNotFound(f"several runs begin or end with {text!r}, such as {found[0]} and {found[1]}")
    return found[0]


def _matches(run_id: str, part: str) -> bool:
    plain, short = run_id.replace("-", ""), part.replace("-", "")
    return plain.startswith(short) or plain.endswith(short)
