"""Verify a history of runs that semel exported, or the proof of one run: offline, with this file and Python alone.

    python audit.py history.jsonl --head 5f0c… --key seal.pub

It reads the lines of ``semel audit export`` or ``semel audit prove``, computes every digest again, and reports the
first place where the history is not what was sealed. Signatures need the package ``cryptography``; nothing else of
semel or of a database is needed. docs/audit.md describes every byte that is hashed.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.append(sys.path.pop(0))  # the script's folder: semel's has a types.py, as the standard library does

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

# -- the canonical form of a row -------------------------------------------------------------------------------------

Columns: TypeAlias = tuple[tuple[str, str], ...]
"""The names of columns, and the kind of each."""

RUN: Columns = (
    ("id", "id"),
    ("created_us", "int8"),
    ("max_attempts", "int4"),
    ("max_lost", "int4"),
    ("tenant", "text"),
    ("user_id", "text"),
    ("model", "text"),
    ("queue", "text"),
    ("payload_hash", "hex"),
    ("parameters", "text"),
    ("idempotency_key", "text"),
)
RUN_RARE: Columns = (
    ("lease_us", "int8"),
    ("asked_cost", "int8"),
    ("stall_us", "int8"),
    ("priority", "int4"),
    ("facet", "text"),
    ("retry_of", "id"),
    ("data_ref", "text"),
    ("trace", "text"),
    ("seed", "int8"),
    ("rerun_of", "id"),
)
"""What was submitted: the table ``semel_runs``. Most rows have nothing in the rare columns."""
ATTEMPT: Columns = (
    ("run_id", "id"),
    ("fence", "int8"),
    ("ended_us", "int8"),
    ("version", "int4"),
    ("tenant", "text"),
    ("status", "text"),
    ("began_us", "int8"),
    ("worker", "text"),
    ("result", "text"),
)
ATTEMPT_RARE: Columns = (
    ("due_us", "int8"),
    ("attempts", "int4"),
    ("errors", "int4"),
    ("losts", "int4"),
    ("step", "text"),
    ("started_us", "int8"),
    ("heartbeat_us", "int8"),
    ("cancel_us", "int8"),
    ("progress_us", "int8"),
    ("cost", "int8"),
    ("result_size", "int8"),
    ("progress", "float"),
    ("note", "text"),
    ("cancel_note", "text"),
    ("progress_note", "text"),
    ("last_error", "text"),
    ("traceback", "text"),
    ("result_digest", "hex"),
    ("result_ref", "text"),
    ("result_exact", "text"),
    ("artifacts", "text"),
    ("warnings", "text"),
    ("data_ref", "text"),
)
"""An attempt that ended: the table ``semel_attempts``, without its column ``digest``."""
PURGE: Columns = (
    ("id", "id"),
    ("at_us", "int8"),
    ("rule", "text"),
    ("count", "int8"),
    ("first_id", "id"),
    ("last_id", "id"),
    ("ids", "hex"),
)
"""Runs that were removed: the table ``semel_purges``."""
SEAL: Columns = (
    ("number", "int8"),
    ("at_us", "int8"),
    ("count", "int4"),
    ("first_id", "id"),
    ("last_id", "id"),
    ("root", "hex"),
    ("previous", "hex"),
    ("public_key", "hex"),
)
"""A seal: the table ``semel_seals``, without its columns ``digest`` and ``signature``."""

_header = Struct(">II").pack
_int8, _int4, _float = Struct(">IIq").pack, Struct(">IIi").pack, Struct(">IId").pack


def _of_text(value: str) -> bytes:
    encoded = value.encode()
    return _header(17, len(encoded)) + encoded


def hex_bytes(value: str) -> bytes:
    """The bytes of these digits. Only lower-case ones, without spaces: the same bytes are always the same text."""
    decoded = bytes.fromhex(value)
    if decoded.hex() != value:
        raise ValueError(f"{value[:80]!r} is not in lower-case hexadecimal digits")
    return decoded


def _of_hex(value: str) -> bytes:
    decoded = hex_bytes(value)
    return _header(17, len(decoded)) + decoded


_is_id = re.compile("[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}").fullmatch


def id_bytes(value: str) -> bytes:
    """The 16 bytes of an id."""
    if not _is_id(value):
        raise ValueError(f"{value!r} is not an id")
    return bytes.fromhex(value.replace("-", ""))


_PACK: dict[str, Callable[[Any], bytes]] = {
    "int8": lambda value: _int8(20, 8, value),
    "int4": lambda value: _int4(23, 4, value),
    "float": lambda value: _float(701, 8, value),
    "text": _of_text,
    "hex": _of_hex,
    "id": lambda value: _header(2950, 16) + id_bytes(value),
}
_NULL = 0xFFFFFFFF
_CODES = {"int8": 20, "int4": 23, "float": 701, "text": 17, "hex": 17, "id": 2950}


class Form:
    """Turns the values of a row into the bytes that are hashed, as PostgreSQL's ``record_send`` does.

    The rare columns are a row in the last column, which is NULL where all of them are: few bytes are hashed quickly.
    """

    def __init__(self, columns: Columns, rare: Columns = ()) -> None:
        self.columns, self.rare = columns, rare
        self.names = [name for name, _ in columns + rare]
        self._size = len(columns)
        self._count = Struct(">I").pack(len(columns) + bool(rare))
        self._parts = [(_PACK[kind], _header(_CODES[kind], _NULL)) for _, kind in columns]
        self._rare = Form(rare) if rare else None

    def encode(self, values: Sequence[Any]) -> bytes:
        """The bytes of a row whose values are in the order of the columns, the rare ones behind the others."""
        parts = [self._count]
        for (pack, null), value in zip(self._parts, values[: self._size], strict=True):
            parts.append(null if value is None else pack(value))
        if self._rare is not None:
            parts.append(self._rare.nested(values[self._size :]))
        return b"".join(parts)

    def nested(self, values: Sequence[Any]) -> bytes:
        """The bytes of a row in a column: NULL if all its values are."""
        if values.count(None) == len(values) == self._size:
            return _header(_CODES["hex"], _NULL)
        encoded = self.encode(values)
        return _header(_CODES["hex"], len(encoded)) + encoded

    def of(self, row: Mapping[str, Any]) -> bytes:
        """The bytes of a row that is given by name; what is not given is NULL."""
        get = row.get
        return self.encode([get(name) for name in self.names])


FORMS = {
    "run": Form(RUN, RUN_RARE),
    "attempt": Form(ATTEMPT, ATTEMPT_RARE),
    "purge": Form(PURGE),
    "seal": Form(SEAL),
}

# -- digests, leaves and the tree ------------------------------------------------------------------------------------

ZEROS = bytes(32)
"""Before the first digest of a chain, and for a row that is not there."""
KEY_SIZE, LEAF_SIZE = 20, 52
"""The bytes of a leaf's key (an id and a version), and of a key with the hash of what the leaf covers."""


def chained(previous: bytes, encoded: bytes) -> bytes:
    """The digest of an attempt's row: the one before is part of it."""
    return sha256(previous + encoded).digest()


def key_of(row_id: str, version: int) -> bytes:
    """The key of a leaf: the id of a run and the version of its row; of a purge, its id and 0."""
    return id_bytes(row_id) + version.to_bytes(4)


def content_hash(submitted: bytes, digest: bytes) -> bytes:
    """The hash of what a leaf covers: what was submitted, and the attempt with all attempts before it."""
    return sha256(submitted + digest).digest()


def leaf_hash(key: bytes, content: bytes) -> bytes:
    """The hash of a leaf. Its key is part of it, so that it also names its run when that was purged."""
    return sha256(b"\0" + key + content).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return sha256(b"\1" + left + right).digest()


def root_of(leaves: Sequence[bytes]) -> bytes:
    """The root of the Merkle tree over these hashes, as RFC 6962 defines it."""
    level = list(leaves)
    while len(level) > 1:
        pairs = [_node(left, right) for left, right in zip(level[::2], level[1::2], strict=False)]
        level = pairs if len(level) % 2 == 0 else [*pairs, level[-1]]
    return level[0] if level else sha256(b"").digest()


def path_of(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """The inclusion proof of a leaf: the hashes beside its way to the root."""
    path, level = [], list(leaves)
    while len(level) > 1:
        if (index ^ 1) < len(level):
            path.append(level[index ^ 1])
        pairs = [_node(left, right) for left, right in zip(level[::2], level[1::2], strict=False)]
        level = pairs if len(level) % 2 == 0 else [*pairs, level[-1]]
        index //= 2
    return path


def root_by_path(leaf: bytes, index: int, count: int, path: Iterable[bytes]) -> bytes | None:
    """The root that an inclusion proof leads to; None if the proof has too few or too many hashes, or no such index."""
    if not 0 <= index < count:
        return None
    beside = iter(path)
    while count > 1:
        if index % 2 or index + 1 < count:
            other = next(beside, None)
            if other is None:
                return None
            leaf = _node(other, leaf) if index % 2 else _node(leaf, other)
        index, count = index // 2, (count + 1) // 2
    return leaf if next(beside, None) is None else None


SIGNED = b"semel seal 1\n"
"""What stands before the digest of a seal where it is signed."""


def seal_digest(seal: Mapping[str, Any]) -> bytes:
    """The digest of a seal."""
    return sha256(FORMS["seal"].of(seal)).digest()


# -- verifying -------------------------------------------------------------------------------------------------------


class NotAsSealed(Exception):
    """The history is not what was sealed; says where."""


class CannotVerify(Exception):
    """The file is no export or proof, or the signatures cannot be checked."""


class Verified(NamedTuple):
    """What a file proves."""

    seals: int
    rows: int
    """Rows of runs and attempts whose digests are as they were sealed."""
    purged: int
    """Sealed attempts that are no more, each named by a purge."""
    unsealed: int
    """Attempts and purges that no seal covers yet."""
    unchained: int
    """Attempts that ended before the chain began."""
    signed: int
    head: str | None
    run: str | None = None
    """The run that a proof is of."""

    def __str__(self) -> str:
        return (
            f"verified: {self._of_run()}{self.rows} rows in {self.seals} seals ({self.signed} signed), "
            f"{self.purged} attempts purged, {self.unsealed} not yet sealed, {self.unchained} older than the chain\n"
            f"head: {self.head or 'none'}"
        )

    def _of_run(self) -> str:
        return "" if self.run is None else f"run {self.run}, "


GRACE_US = 86400 * 1_000_000
"""For so long after the first seal, workers of a release without seals may still have written rows."""
_FIELDS = {name: frozenset(form.names) for name, form in FORMS.items()}
_MORE = {"attempt": {"digest"}, "seal": {"digest", "signature"}}
_ALLOWED = {name: fields | _MORE.get(name, set()) for name, fields in _FIELDS.items()}


class Verifier:
    """Takes the lines of an export, one by one, in their order."""

    def __init__(self, *, head: str | None = None, keys: Sequence[bytes] = (), signed_from: int = 1) -> None:
        self._wanted, self._keys, self._signed_from = head, list(keys), signed_from
        self._signatures = Signatures()
        self._seal: dict[str, Any] | None = None
        self._leaves: list[bytes] | None = None
        self._last_key = b""
        self._missing: dict[bytes, str] = {}
        self._ranges: list[tuple[bytes, bytes]] = []
        self._first_us: int | None = None
        self._head_found = head is None
        self._latest_unchained: tuple[int, str] | None = None
        self.ended = False
        self.seals = self.rows = self.purged = self.unsealed = self.unchained = self.signed = 0

    def take(self, line: Mapping[str, Any]) -> None:
        """Check a line of an export."""
        if self.ended:
            raise NotAsSealed("there are lines behind the end of the export")
        if "seal" in line:
            self._take_seal(line["seal"])
        elif "key" in line:
            self._take_leaf(line)
        elif "open" in line:
            self._take_open(line)
        elif "unchained" in line:
            self._take_unchained(*line["unchained"])
        elif "stray" in line:
            raise NotAsSealed(f"{line['stray']}: the row was inserted: no seal has it, and none is due")
        elif "broken" in line:
            raise NotAsSealed(str(line["broken"]))
        elif "end" in line:
            self._take_end(line["end"])
        else:
            raise CannotVerify(f"a line is of no known kind: {', '.join(line)}")

    def _take_seal(self, seal: dict[str, Any]) -> None:
        self._close_seal()
        number = seal.get("number")
        where = f"seal {number}"
        before = self._seal
        if number != self.seals + 1:
            raise NotAsSealed(f"seal {self.seals + 1} is missing: the next one is {where}")
        previous = None if before is None else before["digest"]
        if seal.get("previous") != previous:
            raise NotAsSealed(f"{where}: it does not follow the seal before it, which is forged or was replaced")
        check_seal(seal)
        self._check_signature(seal)
        if self._first_us is None:
            self._first_us = seal["at_us"]
        self._head_found = self._head_found or seal["digest"] == self._wanted
        self.seals += 1
        self._seal, self._leaves, self._last_key = seal, [], b""

    def _check_signature(self, seal: dict[str, Any]) -> None:
        if seal.get("public_key") is not None:
            self.signed += self._signatures.check(seal, self._keys)
        elif self._keys and seal["number"] >= self._signed_from:
            raise NotAsSealed(f"seal {seal['number']} is not signed")

    def _take_leaf(self, line: Mapping[str, Any]) -> None:
        if self._seal is None or self._leaves is None:
            raise NotAsSealed(f"leaf {line['key']}: it stands outside of a seal")
        key, content = hex_bytes(line["key"]), hex_bytes(line["content"])
        where = f"{_name(key)}, in seal {self._seal['number']}"
        if key <= self._last_key:
            raise NotAsSealed(f"{where}: its leaves are out of order, or doubled")
        self._last_key = key
        self._leaves.append(leaf_hash(key, content))
        if not ("run" in line or "attempt" in line or "purge" in line):
            self._missing[key] = where
            return
        if content_hash(*digests_of(line, key, where)) != content:
            raise NotAsSealed(f"{where}: what was submitted differs from what was sealed, or its leaf was replaced")
        if "purge" in line:
            self._take_purge(line["purge"])
        self.rows += 1 if "purge" in line else 2

    def _take_purge(self, purge: Mapping[str, Any]) -> None:
        if purge.get("ids") is None:
            if purge.get("first_id") is not None:
                self._ranges.append((id_bytes(purge["first_id"]), id_bytes(purge["last_id"])))
            return
        named = bytes.fromhex(purge["ids"])
        self._ranges += [(named[at : at + 16], named[at : at + 16]) for at in range(0, len(named), 16)]

    def _take_open(self, line: Mapping[str, Any]) -> None:
        """An attempt or a purge that no seal covers: the queue has its digest."""
        self._close_seal()
        key = hex_bytes(line["open"])
        where = f"{_name(key)}, not yet sealed"
        self.unsealed += 1
        if not ("run" in line or "attempt" in line or "purge" in line):
            self._missing[key] = where
            return
        _, digest = digests_of(line, key, where)
        _require(digest.hex() == line["digest"], where, "it differs from its digest in the queue")
        if "purge" in line:
            self._take_purge(line["purge"])

    def _take_unchained(self, run: str, version: int, ended_us: int) -> None:
        self.unchained += 1
        if self._latest_unchained is None or ended_us > self._latest_unchained[0]:
            self._latest_unchained = ended_us, f"run {run}, version {version}"

    def _take_end(self, end: Mapping[str, Any]) -> None:
        self._close_seal()
        if end["seals"] != self.seals:
            raise NotAsSealed(f"the export has {self.seals} seals instead of {end['seals']}")
        self.ended = True

    def _close_seal(self) -> None:
        """Check the tree of the last seal, when all its leaves were taken."""
        seal, leaves = self._seal, self._leaves
        if seal is None or leaves is None:
            return
        self._leaves = None
        if len(leaves) != seal["count"]:
            raise NotAsSealed(f"seal {seal['number']}: it has {len(leaves)} leaves instead of {seal['count']}")
        if root_of(leaves).hex() != seal["root"]:
            raise NotAsSealed(f"seal {seal['number']}: its leaves are not those that were sealed")

    def result(self) -> Verified:
        """What is proved, once all lines were taken."""
        if not self.ended:
            raise NotAsSealed("the export is cut off: it has no end")
        purged = self._count_purged()
        last = self._latest_unchained
        if last is not None and self._first_us is not None and last[0] > self._first_us + GRACE_US:
            raise NotAsSealed(f"{last[1]}: it has no digest, though it ended after the chain began")
        if not self._head_found:
            raise NotAsSealed("the kept head is not in the chain: the end was cut off, or the chain was rewritten")
        if self._keys and not self.signed:
            raise NotAsSealed("no seal is signed")
        head = None if self._seal is None else self._seal["digest"]
        return Verified(self.seals, self.rows, purged, self.unsealed, self.unchained, self.signed, head)

    def _count_purged(self) -> int:
        ranges, at = _merged(self._ranges), 0
        for key, where in sorted(self._missing.items()):
            while at < len(ranges) and ranges[at][1] < key[:16]:
                at += 1
            if at == len(ranges) or key[:16] < ranges[at][0]:
                raise NotAsSealed(f"{where}: it was deleted, and no purge names it")
        return len(self._missing)


def _merged(ranges: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The ranges in order, without overlaps."""
    merged: list[tuple[bytes, bytes]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return merged


def _name(key: bytes) -> str:
    text = key[:16].hex()
    row_id = "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
    version = int.from_bytes(key[16:])
    return f"run {row_id}, version {version}" if version else f"purge {row_id}"


def _encoded(kind: str, row: Mapping[str, Any], where: str) -> bytes:
    if not row.keys() <= _ALLOWED[kind]:
        raise CannotVerify(f"{where}: unknown columns {sorted(row.keys() - _ALLOWED[kind])}; use a newer audit.py")
    try:
        return FORMS[kind].of(row)
    except Exception as error:
        raise NotAsSealed(f"{where}: a value of the {kind} is not of its column's kind: {error}") from error


def digests_of(line: Mapping[str, Any], key: bytes, where: str) -> tuple[bytes, bytes]:
    """The digests of what was submitted and of the attempt. Raises where the chain of the run is broken."""
    if "purge" in line:
        purge = line["purge"]
        _require(not {"run", "attempt"} & line.keys(), where, "beside the purge is an attempt, which no digest covers")
        _require(key == key_of(purge["id"], 0), where, "the purge has another id")
        return ZEROS, sha256(_encoded("purge", purge, where)).digest()
    run, attempt = line.get("run"), line.get("attempt")
    _require(run is not None, where, "what was submitted was deleted")
    _require(attempt is not None, where, "the attempt was deleted")
    assert run is not None and attempt is not None  # noqa: PT018 -- for the reader and mypy
    encoded = _encoded("attempt", attempt, where)
    _require(key == key_of(attempt["run_id"], attempt["version"]), where, "the attempt is another one's")
    _require(run["id"] == attempt["run_id"], where, "what was submitted is another run's")
    previous = hex_bytes(line.get("previous", ZEROS.hex()))
    _require(len(previous) == len(ZEROS), where, "the digest of the attempt before it is not one")
    digest = chained(previous, encoded)
    _require(digest.hex() == attempt.get("digest"), where, "the attempt differs from its digest")
    return sha256(_encoded("run", run, where)).digest(), digest


def _require(held: bool, where: str, otherwise: str) -> None:
    if not held:
        raise NotAsSealed(f"{where}: {otherwise}")


def check_seal(seal: Mapping[str, Any]) -> None:
    """Raise unless the digest of a seal is that of its fields."""
    where = f"seal {seal.get('number')}"
    digest = sha256(_encoded("seal", seal, where)).hexdigest()
    _require((seal.get("public_key") is None) == (seal.get("signature") is None), where, "its signature has no key")
    _require(digest == seal.get("digest"), where, "its fields differ from its digest")


class Signatures:
    """Checks the signatures of seals, if the package ``cryptography`` is installed."""

    def __init__(self) -> None:
        try:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        except ImportError:
            self._load = None
        else:
            self._load = Ed25519PublicKey.from_public_bytes

    def check(self, seal: Mapping[str, Any], keys: Sequence[bytes]) -> bool:
        """Whether the seal's signature was checked, and is right. Raises if it is wrong, or by none of these keys."""
        where = f"seal {seal['number']}"
        if self._load is None:
            if keys:
                raise CannotVerify("signatures need the package cryptography: pip install cryptography")
            return False
        public = bytes.fromhex(seal["public_key"])
        _require(not keys or public in keys, where, "it is signed with another key")
        try:
            self._load(public).verify(bytes.fromhex(seal["signature"] or ""), SIGNED + bytes.fromhex(seal["digest"]))
        except Exception as error:
            raise NotAsSealed(f"{where}: its signature is wrong") from error
        return True


Seals: TypeAlias = dict[str, Mapping[str, Any]]
"""The seals of a proof, by their digests."""


def _verify_proof(
    run: str, lines: Iterator[Mapping[str, Any]], head: str | None, keys: Sequence[bytes], signed_from: int
) -> Verified:
    """Verify the proof of a run: a line for each attempt that is sealed, and perhaps the seals after them."""
    signatures = Signatures()
    rows = signed = 0
    seals: Seals = {}
    own: set[str] = set()
    previous: str | None = None
    for line in lines:
        seal = line["seal"]
        check_seal(seal)
        if seal["digest"] not in seals and seal.get("public_key") is not None:
            signed += signatures.check(seal, keys)
        elif keys and seal.get("public_key") is None and seal["number"] >= signed_from:
            raise NotAsSealed(f"seal {seal['number']}: it is not signed")
        same = seals.setdefault(seal["digest"], seal)
        _require(same == seal, f"seal {seal['number']}", "it has two signatures")
        if "key" not in line:
            _require(line.keys() == {"seal"}, f"seal {seal['number']}", "beside it is an attempt without its key")
        else:
            _require("attempt" in line, "the proof", "it has a leaf that is none of an attempt")
            _check_path(line, seal)
            own.add(seal["digest"])
            _require(
                line["attempt"]["run_id"] == run, "the proof", f"it is one of run {line['attempt']['run_id']}, too"
            )
            _require(line.get("previous") == previous, "the proof", "it leaves out an attempt of the run")
            previous = line["attempt"]["digest"]
            rows += 2
    _require(rows > 0, "the proof", "it is cut off: it has no attempt")
    _check_order(seals)
    if head is not None:
        _check_reach(seals, own, head)
    if keys:
        _check_signed(seals)
    newest = max(seals.values(), key=lambda each: int(each["number"]))
    return Verified(len(seals), rows, 0, 0, 0, signed, newest["digest"], run)


def _check_path(line: Mapping[str, Any], seal: Mapping[str, Any]) -> None:
    key = hex_bytes(line["key"])
    where = f"{_name(key)}, in seal {seal['number']}"
    leaf = leaf_hash(key, content_hash(*digests_of(line, key, where)))
    root = root_by_path(leaf, line["index"], seal["count"], map(hex_bytes, line["path"]))
    _require(root is not None and root.hex() == seal["root"], where, "it does not lead to the root of the seal")


def _check_order(seals: Seals) -> None:
    """Raise if a seal does not follow the one before it; where that one is not in the proof, it cannot be told."""
    for before, seal in pairwise(_by_number(seals)):
        number, where = seal["number"], f"seal {seal['number']}"
        _require(number != before["number"], where, "the proof has two of this number")
        follows = number > before["number"] + 1 or seal.get("previous") == before["digest"]
        _require(follows, where, "it does not follow the seal before it, which is forged or was replaced")


def _check_reach(seals: Seals, own: set[str], head: str) -> None:
    """Raise unless the seals lead back from the newest one without a gap, past the kept head, to those of the run."""
    numbers = [int(seal["number"]) for seal in _by_number(seals)]
    if head not in seals and seals.keys() == own:
        raise CannotVerify("the proof has no seals up to the kept head: make it with --chain")
    if head not in seals:
        of = f"none of the proof's seals {numbers[0]} to {numbers[-1]}"
        raise CannotVerify(f"the kept head is {of}: it is of another seal, or the history was rewritten")
    last = max(int(seals[each]["number"]) for each in own)
    if last > seals[head]["number"]:
        raise CannotVerify(f"the kept head is older than seal {last}, which has an attempt of the run")
    missing = next((before + 1 for before, number in pairwise(numbers) if number > before + 1), None)
    if missing is not None:
        raise CannotVerify(f"the proof does not have seal {missing}: make it with --chain")
    _require(own <= _reached([head], seals), "the proof", "its seals do not lead to the kept head")


def _check_signed(seals: Seals) -> None:
    """Raise unless each seal is signed, or one of those before a signed one."""
    signed = [digest for digest, seal in seals.items() if seal.get("public_key") is not None]
    others = [int(seals[each]["number"]) for each in seals.keys() - _reached(signed, seals)]
    if others:
        of = f"seal {min(others)} is not signed, and the proof does not lead to it from a signed one"
        raise CannotVerify(f"{of}: make it with --chain, when there is one")


def _by_number(seals: Seals) -> list[Mapping[str, Any]]:
    return sorted(seals.values(), key=lambda seal: int(seal["number"]))


def _reached(digests: Iterable[str], seals: Seals) -> set[str]:
    """The seals with these digests, and all that are reached by going back from them."""
    reached: set[str] = set()
    for digest in digests:
        at: str | None = digest
        while at is not None and at in seals and at not in reached:
            reached.add(at)
            at = seals[at].get("previous")
    return reached


def check_head(head: str) -> None:
    """Raise unless this has the form of a head."""
    if not re.fullmatch("[0-9a-f]{64}", head):
        raise CannotVerify(f"the head {head!r} is not one: it has 64 hexadecimal digits")


def verify(
    lines: Iterable[str | bytes], *, head: str | None = None, keys: Sequence[bytes] = (), signed_from: int = 1
) -> Verified:
    """Verify the lines of an export or a proof. Raises :class:`NotAsSealed` with the first place that is wrong.

    With ``keys``, all seals must be signed with one of them, or those from the number ``signed_from`` on. A proof
    must then lead from a signed one to those before it.
    """
    if head is not None:
        check_head(head)
    parsed, at = _parsed(lines), 1
    first = next(parsed, None)

    def others() -> Iterator[dict[str, Any]]:
        nonlocal at
        for line in parsed:
            at += 1
            yield line

    if first is None or first.get("version", 1) != 1 or not {"export", "proof"} & first.keys():
        raise CannotVerify("this is neither an export nor a proof of semel")
    try:
        if "proof" in first:
            return _verify_proof(str(first["proof"]).removeprefix("semel run "), others(), head, keys, signed_from)
        verifier = Verifier(head=head, keys=keys, signed_from=signed_from)
        for line in others():
            verifier.take(line)
        return verifier.result()
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise NotAsSealed(f"line {at} is not as semel writes it: {type(error).__name__} {str(error)[:200]}") from error


def _parsed(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CannotVerify(f"line {number} is not JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise CannotVerify(f"line {number} is not a JSON object")
        yield parsed


def read_key(given: str) -> bytes:
    """A public key: 64 hexadecimal digits, or a file with these or with a PEM."""
    import base64

    try:
        text = given if re.fullmatch("[0-9a-fA-F]{64}", given) else Path(given).read_text().strip()
        if re.fullmatch("[0-9a-fA-F]{64}", text):
            return bytes.fromhex(text)
        body = "".join(line for line in text.splitlines() if "-----" not in line)
        decoded = base64.b64decode(body, validate=True)
    except ValueError as error:
        raise CannotVerify(f"{given} is not a public key of Ed25519") from error
    if len(decoded) != 44 or not decoded.startswith(bytes.fromhex("302a300506032b6570032100")):
        raise CannotVerify(f"{given} is not a public key of Ed25519")
    return decoded[12:]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: returns 0 if the history is what was sealed, 1 if not, 2 if that cannot be told."""
    import argparse

    parser = argparse.ArgumentParser(description="Verify a history of runs that semel exported.")
    parser.add_argument("file", nargs="?", default="-", help="An export or a proof; - reads standard input.")
    parser.add_argument("--head", help="A head that was kept elsewhere: it must be in the chain.")
    parser.add_argument("--key", action="append", default=[], help="The public key: hexadecimal digits, or a file.")
    parser.add_argument("--signed-from", type=int, help="The number of the first seal that is signed.")
    given = parser.parse_args(arguments)
    if given.signed_from is not None and not given.key:
        parser.error("--signed-from needs --key, or it checks nothing")
    with ExitStack() as stack:
        try:
            keys = [read_key(each) for each in given.key]
            lines = sys.stdin.buffer if given.file == "-" else stack.enter_context(Path(given.file).open("rb"))
            signed_from = 1 if given.signed_from is None else given.signed_from
            found = verify(lines, head=given.head and given.head.lower(), keys=keys, signed_from=signed_from)
            print(found)  # noqa: T201 -- a command
        except NotAsSealed as error:
            print(f"NOT AS SEALED: {error}", file=sys.stderr)  # noqa: T201
            return 1
        except (CannotVerify, OSError) as error:
            print(f"cannot verify: {error}", file=sys.stderr)  # noqa: T201
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
