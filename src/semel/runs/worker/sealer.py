"""The sealer: seals what ended since the last seal, signs each seal, and hands out the newest head.

``SEMEL_SEAL_KEY`` names a file with the private key (Ed25519, PEM); without it, seals are not signed. With
``SEMEL_SEAL_HEADS``, the head of every new seal is appended to that file, or sent to that URL, to be kept where whoever
writes to the database cannot change it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from semel.audit import SIGNED
from semel.errors import InvalidRequest, MissingExtra
from semel.runs.store import RunStore, seals
from semel.runs.store.seals import Seal, SigningKey
from semel.runs.types import MICRO

SEAL_FOR = 5.0
"""Seconds that one turn may spend on sealing; the next turn seals the rest."""

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
        self._heads = os.environ.get("SEMEL_SEAL_HEADS")

    async def seal(self) -> int:
        """Seal what there is. Returns how many rows are sealed now that were not before."""
        total, ends_at = 0, time.monotonic() + SEAL_FOR
        last = None
        while time.monotonic() < ends_at:
            made = await self._store.write(seals.seal, self._key, self._store.statement_context)
            if made is None:
                break
            total, last = total + made.count, made
        if last is not None and self._heads:
            await self._store.run_blocking(self._hand_out, last, self._heads)
        return total

    def _hand_out(self, seal: Seal, place: str) -> None:
        at = datetime.fromtimestamp(seal.at_us / MICRO, UTC).isoformat()
        head = json.dumps({"number": seal.number, "sealed_at": at, "head": seal.digest, "signature": seal.signature})
        try:
            if place.startswith(("http://", "https://")):
                import urllib.request

                headers = {"Content-Type": "application/json"}
                request = urllib.request.Request(place, head.encode(), headers)  # noqa: S310 -- the operator's own URL
                urllib.request.urlopen(request, timeout=10).close()  # noqa: S310
            else:
                with Path(place).open("a") as file:
                    file.write(f"{head}\n")
        except OSError as error:
            _log.warning("the head of seal %d could not be handed to SEMEL_SEAL_HEADS: %s", seal.number, error)
