"""The server, for commands that go through one."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from semel.cli import options
from semel.errors import RunNotFound, Unauthenticated
from semel.runs.records import checked_id

if TYPE_CHECKING:
    from semel.client import Client

BACKOFF = 0.25
"""Seconds before the second try of a request: somebody sits and waits."""
LOOKED_AT = 1000
"""How many of the newest runs are looked at for a part of an id."""
_PART = re.compile(r"[0-9a-f-]{6,35}")


@contextmanager
def connected(chosen: argparse.Namespace) -> Iterator[Client]:
    """A client of the server that was named."""
    from semel.client import Client

    with Client(options.server(chosen), token=options.token(chosen), backoff=BACKOFF) as client:
        try:
            yield client
        except Unauthenticated as error:
            how = "give one by --token, $SEMEL_TOKEN or $SEMEL_TOKEN_FILE; semel token create makes one"
            said = error.detail.partition(": Authorization")[0]
            raise Unauthenticated(error.status, error.code, f"{said}: {how}") from error


def run_id(client: Client, text: str) -> str:
    """The id of the run that is meant: as it is, or the one that begins or ends so among the newest."""
    wanted = text.strip().lower()
    if (known := checked_id(wanted)) is not None:
        return known
    if not _PART.fullmatch(wanted):
        raise RunNotFound(f"{text!r} is no id of a run, nor six or more characters of its beginning or end")
    found = [run.run_id for run in client.runs(limit=LOOKED_AT) if _fits(run.run_id, wanted)]
    if not found:
        raise RunNotFound(f"none of the newest {LOOKED_AT} runs begins or ends with {text!r}; give the whole id")
    if len(found) > 1:
        raise RunNotFound(f"{len(found)} runs begin or end with {text!r}, such as {found[0]} and {found[1]}")
    return found[0]


def _fits(run_id: str, part: str) -> bool:
    plain, short = run_id.replace("-", ""), part.replace("-", "")
    return plain.startswith(short) or plain.endswith(short)
