"""Stores of large results and artifacts: a folder here, object stores in `object_store`.

All files of an attempt are under ``{run_id}/{fence}/``, so that a zombie never overwrites its successor's; they become
visible only when the attempt finishes the run under its fence.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from hashlib import file_digest, sha256
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from semel.errors import Fatal, InvalidRequest, ResultStoreError
from semel.runs import strict_json
from semel.runs.types import Artifact, Attempt, AttemptResult

__all__ = ["FileResults", "ResultStore", "check_ref", "open_results", "place", "publish"]

INLINE_BYTES = 16 << 10
"""Results up to this size are stored in the row of their run."""

MAX_BYTES = 100 * 1000 * 1000
"""The largest result that is stored."""

FLAT = "?layout=flat"
"""The end of the URL of a folder in which every result is the file ``{run_id}.json``."""

MOST_WARNINGS = 10
"""The most numbers that get a warning each."""

CHUNK = 1 << 20
LONGEST = 200
"""Characters that the name of an artifact may have."""

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
_FORBIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl"})


@runtime_checkable
class ResultStore(Protocol):
    """Stores bytes under refs. Methods block, and raise `ResultStoreError` if the store is full or unavailable."""

    @property
    def url(self) -> str:
        """The URL with which `open_results` opens the same store in another process."""

    def put(self, ref: str, data: bytes) -> None:
        """Store the data durably before returning. After a crash the ref has all of the data, or none."""

    def put_file(self, ref: str, path: Path) -> None:
        """As `put`, with the content of a file."""

    def get(self, ref: str) -> bytes:
        """Return the data of the ref."""

    def open(self, ref: str) -> Iterator[bytes]:
        """Return the data of the ref in chunks, for downloads."""

    def size(self, ref: str) -> int:
        """Return how many bytes the ref has."""

    def remove(self, prefix: str) -> None:
        """Remove everything of a run (``{run_id}``) or of one attempt (``{run_id}/{fence}``), if there is anything."""


def open_results(target: str | Path | ResultStore) -> ResultStore:
    """Return the store of a folder (``./artifacts``, ``file:///…``) or of a URL (``s3://bucket/prefix``, gs, az)."""
    if isinstance(target, Path):
        return FileResults(target)
    if not isinstance(target, str):
        if isinstance(target, ResultStore):
            return target
        raise InvalidRequest(f"a result store is a folder, a URL or an object with put and get, not {target!r:.80}")
    scheme, found, _ = target.partition("://")
    if not found:
        return FileResults(Path(target))
    if scheme == "file":
        return FileResults(path_of(target), flat=target.endswith(FLAT))
    if scheme in _OBJECT_STORES:
        from semel.runs.results.object_store import ObjectResults

        return ObjectResults(target)
    raise InvalidRequest(f"results can be stored in file://, s3://, gs:// or az://, not in {scheme}://")


def place(run_id: str, fence: int, name: object) -> str:
    """Return the ref of an attempt's file; raise `InvalidRequest` if the name could lead elsewhere."""
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"the name of a result is text that is not empty, not {name!r:.80}")
    if len(name) > LONGEST:
        raise InvalidRequest(f"the name of a result may have {LONGEST} characters, and {name[:40]!r}… has {len(name)}")
    return check_ref(f"{run_id}/{fence}/{name}")


def check_ref(ref: str) -> str:
    """Return the ref if it stays in its folder: no ``..``, no root, no other spelling of a folder; else raise."""
    if "\\" in ref or _FORBIDDEN.search(ref):
        raise InvalidRequest(f"{ref!r:.300} holds a backslash or a control character, which no result's name may")
    for step in ref.split("/"):
        if step in {"", ".", ".."}:
            raise InvalidRequest(f"{ref!r:.300} is not a valid ref of a result: one of its parts is {step!r}")
        if len(step.encode()) > 255:
            raise InvalidRequest(f"{ref!r:.300} has a part of more than 255 bytes, which file systems refuse")
    return ref


def publish(
    store: ResultStore,
    attempt: Attempt,
    value: Any,
    files: Mapping[str, Path],
    *,
    inline_bytes: int = INLINE_BYTES,
    max_bytes: int = MAX_BYTES,
    cost: float | None = None,
) -> AttemptResult:
    """Store what an attempt returned and the files that it wrote; none of it is visible before the fenced finish.

    Raises `Fatal` for what can never be stored, and `ResultStoreError` if a retry may help.
    """
    data, exact = _written(value, max_bytes)
    artifacts = []
    if files:
        refs = _artifact_refs(attempt, files)
        artifacts = [_artifact(store, name, ref, files[name]) for name, ref in refs.items()]
    ref = None
    flat = isinstance(store, FileResults) and store.flat
    if flat or len(data) > inline_bytes or strict_json.has_nul(data):  # jsonb refuses NUL, a file does not
        ref = place(attempt.run_id, attempt.fence, "result.json")
        store.put(ref, data)
        ref = flat_ref(attempt.run_id) if flat else ref
    return AttemptResult(
        kind="succeeded",
        result=data.decode() if ref is None else None,
        result_ref=ref,
        result_digest=_digest(data),
        result_size=len(data),
        artifacts=artifacts,
        result_exact=None if exact is None else _kept_exactly(store, attempt, exact, inline=ref is None),
        warnings=[] if exact is None else _warnings(exact),
        cost=cost,
    )


SMALL = 64
"""Up to so many bytes, the digest of a result is remembered: many runs end with the same few words."""


def _digest(data: bytes) -> str:
    return _small_digest(data) if len(data) <= SMALL else sha256(data).hexdigest()


@lru_cache(1024)
def _small_digest(data: bytes) -> str:
    return sha256(data).hexdigest()


def flat_ref(run_id: str) -> str:
    """Return the ref of a run's result in a flat folder."""
    return f"{run_id}.json"


def _kept_exactly(store: ResultStore, attempt: Attempt, exact: bytes, *, inline: bool) -> str:
    """The exact text of a small result, or the ref of a large one's."""
    if inline:
        return exact.decode()
    ref = place(attempt.run_id, attempt.fence, "result.exact.json")
    store.put(ref, exact)
    return ref


def _warnings(exact: bytes) -> list[str]:
    """A warning for each of the first numbers that are not finite, and one for the rest."""
    found = strict_json.non_finite(strict_json.read_exact(exact))
    warnings = [
        f"{where[:200]} is {number}, for which JSON has no number: it is null in JSON, and exact in Python"
        for where, number in islice(found, MOST_WARNINGS)
    ]
    more = sum(1 for _ in found)
    return [*warnings, f"{more:,} more numbers of the result are not finite"] if more else warnings


class FileResults:
    """A folder of results, created when the first one is written.

    ``flat``: every result, however small, becomes the file ``{run_id}.json``. An attempt writes it under its fence as
    usual; it is renamed after the fenced finish (`give_name`), so that a zombie's file never gets that name.
    """

    def __init__(self, folder: Path, *, flat: bool = False) -> None:
        self.flat = flat
        self._root = folder.expanduser().absolute()  # a model may change the working directory
        if self._root.exists() and not self._root.is_dir():
            raise InvalidRequest(f"results are stored in a folder, and {self._root} is not a folder")

    def __repr__(self) -> str:
        return f"FileResults({str(self._root)!r})"

    @property
    def url(self) -> str:
        return self._root.as_uri() + (FLAT if self.flat else "")

    def put(self, ref: str, data: bytes) -> None:
        self._write(ref, lambda file: file.write(data))

    def put_file(self, ref: str, path: Path) -> None:
        with path.open("rb") as source:
            self._write(ref, lambda file: shutil.copyfileobj(source, file, CHUNK))

    def get(self, ref: str) -> bytes:
        try:
            return self._path(ref).read_bytes()
        except OSError as error:
            raise _failed("read", ref, error) from error

    def open(self, ref: str) -> Iterator[bytes]:
        try:
            with self._path(ref).open("rb") as file:
                while chunk := file.read(CHUNK):
                    yield chunk
        except OSError as error:
            raise _failed("read", ref, error) from error

    def size(self, ref: str) -> int:
        try:
            return self._path(ref).stat().st_size
        except OSError as error:
            raise _failed("read", ref, error) from error

    def remove(self, prefix: str) -> None:
        try:
            if self.flat and "/" not in prefix:
                self._path(flat_ref(prefix)).unlink(missing_ok=True)
            shutil.rmtree(self._path(prefix))
        except FileNotFoundError:
            return
        except OSError as error:
            raise _failed("remove", prefix, error) from error

    def give_name(self, run_id: str, fence: int) -> None:
        """Rename the result of the attempt that finished the run to ``{run_id}.json``; a repeat changes nothing."""
        written, named = self._path(place(run_id, fence, "result.json")), self._path(flat_ref(run_id))
        try:
            written.replace(named)
        except FileNotFoundError:
            return  # it has its name already
        except OSError as error:
            raise _failed("write", flat_ref(run_id), error) from error
        _sync_folder(self._root)

    def _path(self, ref: str) -> Path:
        path = self._root / check_ref(ref)
        if not path.is_relative_to(self._root):  # C:name, on Windows
            raise InvalidRequest(f"{ref!r} leads out of the folder of results")
        return path

    def _write(self, ref: str, fill: Callable[[IO[bytes]], object]) -> None:
        """Write to a temporary file, then rename it: the ref has the whole file, or does not exist."""
        path = self._path(ref)
        unfinished = path.with_name(f".{uuid4().hex}.part")
        try:
            self._make_folder(path.parent)
            try:
                with os.fdopen(os.open(unfinished, _NEW, 0o600), "wb") as file:
                    fill(file)
                    file.flush()
                    os.fsync(file.fileno())
                unfinished.replace(path)
                _sync_folder(path.parent)
            finally:
                with suppress(OSError):
                    unfinished.unlink(missing_ok=True)
        except OSError as error:
            raise _failed("write", ref, error) from error

    def _make_folder(self, folder: Path) -> None:
        """Make the folder durable: every new folder is an entry in its parent, which is synced."""
        new = []
        while not folder.exists():
            new.append(folder)
            folder = folder.parent
        for folder in reversed(new):
            folder.mkdir(0o700, exist_ok=True)
            _sync_folder(folder.parent)


def _written(value: Any, max_bytes: int) -> tuple[bytes, bytes | None]:
    """The result as JSON; and, if it has numbers that are not finite, the exact text with them."""
    try:
        data, exact = strict_json.write_exact(value)
    except ValueError as error:
        raise Fatal(f"the result of type {type(value).__qualname__} cannot be stored as JSON: {error}") from error
    if len(data) > max_bytes:
        raise Fatal(
            f"the result is {len(data):,} bytes of JSON, and {max_bytes:,} are allowed; write it to ctx.artifact(name)"
        )
    return data, exact


def _artifact_refs(attempt: Attempt, files: Mapping[str, Path]) -> dict[str, str]:
    try:
        refs = {name: place(attempt.run_id, attempt.fence, f"artifacts/{name}") for name in files}
    except InvalidRequest as error:
        raise Fatal(str(error)) from error
    for name in files:
        folders = {"/".join(name.split("/")[:depth]) for depth in range(1, name.count("/") + 1)}
        if clash := folders & files.keys():
            raise Fatal(f"the artifact {name!r} would lie inside the artifact {clash.pop()!r}; rename one of them")
    return refs


def _artifact(store: ResultStore, name: str, ref: str, path: Path) -> Artifact:
    if path.exists() and not path.is_file():  # a pipe would be read for ever
        raise Fatal(f"the artifact {name!r} was requested, but {path} is not a file")
    try:
        with path.open("rb") as file:
            digest = file_digest(file, "sha256").hexdigest()
            size = file.tell()
        store.put_file(ref, path)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise Fatal(f"the artifact {name!r} was requested, but {path} is not a file") from error
    except OSError as error:
        raise ResultStoreError(f"cannot read the artifact {name!r} to store it: {error}") from error
    return Artifact(name=name, ref=ref, size=size, digest=digest)


def path_of(url: str) -> Path:
    """The folder that a file URL names. Raises :class:`InvalidRequest` if it names none."""
    parts = urlsplit(url)
    if parts.query and f"?{parts.query}" != FLAT:
        raise InvalidRequest(f"a file URL may end with {FLAT}, not with {parts.query!r:.80}")
    if parts.netloc not in {"", "localhost"} or not parts.path:
        raise InvalidRequest(f"a file URL has three slashes and an absolute path, not {url!r:.200}")
    return Path(_local(parts.path))


def _local(path: str) -> str:
    """The path of a file URL, as this system writes it."""
    if os.name == "posix":
        return unquote(path)
    from urllib.request import url2pathname  # imports ssl and http.client

    return url2pathname(path)


def _failed(verb: str, ref: str, error: OSError) -> ResultStoreError:
    return ResultStoreError(f"cannot {verb} {ref}: {error.strerror or error}")


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":
        return  # Windows opens no folders, and journals its names by itself
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
