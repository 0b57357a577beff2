"""The sealer: seals what ended since the last seal, signs each seal, and hands out the newest head.

``SEMEL_SEAL_KEY`` names a file with the private key (Ed25519, PEM); without it, seals are not signed. With
``SEMEL_SEAL_HEADS``, the newest head is appended to that file, or posted to that URL, to be kept where whoever writes
to the database cannot change it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, unquote_plus, urlsplit

from semel.audit import SIGNED
from semel.errors import InvalidRequest, MissingExtra
from semel.redaction import HIDDEN, without_secrets
from semel.runs.store import RunStore, seals
from semel.runs.store.seals import Seal, SigningKey
from semel.runs.types import MICRO

SEAL_FOR = 5.0
"""Seconds that one turn may spend on sealing; the next turn seals the rest."""
POST_FOR = 5.0
"""Seconds that a receiver of heads has to take one, however slowly it responds: the sweeper waits for it."""
AGAIN = 60.0
"""Seconds until a head that could not be handed out is tried again."""
_SECRET = 4
"""The fewest characters of a part of a URL that are hidden in a log line wherever they stand."""

_log = logging.getLogger("semel.sealer")


def read_signing_key(path: str) -> SigningKey:
    """The key of this file. Raises :class:`InvalidRequest` if it has none of Ed25519."""
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as error:
        raise MissingExtra(f"{error}; SEMEL_SEAL_KEY needs an extra: pip install 'semel[audit]'") from error
    try:
        key: Any = load_pem_private_key(Path(path).read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidRequest(f"SEMEL_SEAL_KEY: {path} has no private key: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidRequest(f"SEMEL_SEAL_KEY: {path} has a key of another kind; make one with: semel audit key {path}")
    return SigningKey(key.public_key().public_bytes_raw().hex(), lambda digest: key.sign(SIGNED + digest))


class Sealer:
    """Seals what is in the queue. Two at a time do no harm: one of them finds that the other is sealing."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        path = os.environ.get("SEMEL_SEAL_KEY")
        self._key = read_signing_key(path) if path else None
        place = os.environ.get("SEMEL_SEAL_HEADS")
        self._keep = None if not place else _keeper(place)
        self._hands_out_at = 0.0
        self._sending: Thread | None = None
        self._last: Seal | None = None
        self._malformed: set[str] = set()

    async def seal(self) -> int:
        """Seal what there is. Returns how many rows are sealed now that were not before."""
        total, ends_at = 0, time.monotonic() + SEAL_FOR
        while time.monotonic() < ends_at:
            made = await self._store.write(seals.seal, self._key, self._store.statement_context)
            if made is None:
                await self._look_for_malformed()
                break
            self._compare(made)
            total += made.count
            self._hands_out_at = 0.0
        return total

    async def _look_for_malformed(self) -> None:
        """Complain once about each row of the queue that cannot be sealed."""
        for place in await self._store.read(seals.malformed):
            if place not in self._malformed:
                self._malformed.add(place)
                _log.error(
                    "%s of the queue semel_unsealed is malformed, semel did not write it so: "
                    "it names no run, so nothing of it can be sealed, and it stays there",
                    place,
                )

    def _compare(self, made: Seal) -> None:
        """Complain if the seal that this process made before is not the one before it: somebody removed or replaced it,
        and has this one sign what was put in its place.
        """
        last, self._last = self._last, made
        if last is not None and made.number <= last.number + 1 and made.previous != last.digest:
            _log.error(
                "seal %d does not follow seal %d, whose head was %s: seals were removed or replaced",
                made.number,
                last.number,
                last.digest,
            )

    async def hand_out(self) -> None:
        """Hand out the newest head, if there may be one that was not, also by a process that died before it could."""
        if self._keep is None or time.monotonic() < self._hands_out_at:
            return
        self._hands_out_at = time.monotonic() + AGAIN
        newest = await self._store.read(seals.head)
        if newest is None or await self._kept(newest, self._keep):
            self._hands_out_at = math.inf

    async def _kept(self, seal: Seal, keep: Callable[[str], None]) -> bool:
        """Whether the head was handed out, which is waited for :data:`POST_FOR` seconds.

        The thread of an attempt that takes longer is left to end by itself, and there is no other before it ends.
        """
        reasons: list[str | None] = []
        if self._sending is not None and self._sending.is_alive():
            reasons.append("the attempt before has not ended yet")
        else:
            done = self._store.runtime.signal()

            def send() -> None:
                reasons.append(_hand_out(seal, keep))
                done.set()

            self._sending = Thread(target=send, name="semel-heads", daemon=True)
            self._sending.start()
            await done.wait(POST_FOR)
        reason = reasons[0] if reasons else f"it took longer than {POST_FOR:g} seconds"
        if reason is not None:
            _log.warning("the head of seal %d could not be handed to SEMEL_SEAL_HEADS: %s", seal.number, reason)
        return reason is None


def _hand_out(seal: Seal, keep: Callable[[str], None]) -> str | None:
    """Why the head could not be handed out; None if it was."""
    at = datetime.fromtimestamp(seal.at_us / MICRO, UTC).isoformat()
    head = json.dumps({"number": seal.number, "sealed_at": at, "head": seal.digest, "signature": seal.signature})
    try:
        keep(head)
    except Exception as error:  # noqa: BLE001 -- whatever it is, it is tried again
        return without_secrets(str(error) or type(error).__name__)
    return None


def _keeper(place: str) -> Callable[[str], None]:
    """Keeps a head: in this file, or at this URL. Raises :class:`InvalidRequest` for what cannot be a URL."""
    if "://" not in place and not place.lower().startswith(("http:", "https:")):
        return partial(_append, Path(place))
    headers = {"Content-Type": "application/json"}
    try:
        url = urlsplit(place)
        valid = url.hostname is not None and url.port != 0
    except ValueError:  # its text may have the password
        url, valid = urlsplit(""), False
    valid = valid and url.scheme in {"http", "https"} and place.isprintable() and " " not in place
    if not valid:
        raise InvalidRequest("SEMEL_SEAL_HEADS: this is not a URL; example: https://example.org/heads")
    if url.username:
        pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
        headers["Authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
    user, _, host = url.netloc.rpartition("@")
    keep = partial(_post, url._replace(netloc=host, fragment="").geturl(), headers)
    return partial(_hiding, _secrets_of(user, url.query), keep)


def _secrets_of(user: str, query: str) -> list[str]:
    """What no log line may have of a URL with this user and query: the longest first, as one may contain another."""
    parts = [*user.split(":", 1), *(each.partition("=")[2] for each in query.split("&"))]
    parts = [user, query, *(each for each in parts if len(each) >= _SECRET)]
    found = {*parts, *map(unquote, parts), *map(unquote_plus, parts)} - {""}
    return sorted(found, key=len, reverse=True)


def _hiding(secrets: Sequence[str], keep: Callable[[str], None], head: str) -> None:
    """Keep a head. The text of an error has no secret."""
    try:
        keep(head)
    except Exception as error:  # noqa: BLE001 -- the text of any may have them
        reason = str(error) or type(error).__name__
        for each in secrets:
            reason = reason.replace(each, HIDDEN)
        raise OSError(reason) from None


def _append(file: Path, head: str) -> None:
    with file.open("a") as out:
        out.write(f"{head}\n")


def _post(url: str, headers: dict[str, str], head: str) -> None:
    from http.client import HTTPException  # few need it, and it takes long to import
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class NoRedirect(HTTPRedirectHandler):
        """A POST that is redirected would arrive as a GET, without the head."""

        def redirect_request(self, *_: Any) -> None:
            return None

    request = Request(url, head.encode(), headers)  # noqa: S310 -- the operator's own URL
    try:
        build_opener(NoRedirect).open(request, timeout=POST_FOR).close()
    except HTTPException as error:
        raise OSError(str(error)) from error
