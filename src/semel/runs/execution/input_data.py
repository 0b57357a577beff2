"""The data of a run: a folder that was packed before the run started, and is unpacked for each of its attempts.

It is in the result store as a tar.gz under the digest of its content, once for all runs with the same data.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semel.errors import ResultStoreError
from semel.runs.results import ResultStore

if TYPE_CHECKING:
    from tarfile import TarFile, TarInfo

_REF = re.compile(r"data/([0-9a-f]{64})/data\.tar\.gz")


def ref_of(digest: str) -> str:
    """The ref of the archive with this SHA-256, in hex."""
    return f"data/{digest}/data.tar.gz"


def folder_of(ref: str) -> str:
    """The prefix to remove when no run needs the archive any more."""
    return ref.rpartition("/")[0]


def unpack(results: ResultStore, ref: str, folder: Path) -> Path:
    """Unpack the archive into a new folder, and return that; raise `ResultStoreError` if its digest differs.

    The whole archive is checked before the first file of it is written, and nothing is written outside of the folder.
    """
    import tarfile  # few runs need it, and every child process would load it

    named = _REF.fullmatch(ref)
    if named is None:
        raise ResultStoreError(f"{ref!r:.200} is not a ref of run data")
    folder.mkdir(parents=True)
    archive = folder.with_name(f"{folder.name}.tar.gz")
    try:
        if _fetch(results, ref, archive) != named[1]:
            raise ResultStoreError(f"the data {ref} was changed after it was stored: its digest differs")
        with tarfile.open(archive, "r:gz") as packed:
            _extract(packed, folder)
    except (OSError, EOFError, tarfile.TarError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise ResultStoreError(f"the data {ref} cannot be unpacked: {error}") from error
    finally:
        archive.unlink(missing_ok=True)
    return folder


def _extract(packed: TarFile, folder: Path) -> None:
    """Extract everything, or raise before the first file. Early releases of Python 3.11 have no filter."""
    import tarfile

    members = packed.getmembers()
    links = {member.name.rstrip("/") for member in members if member.issym()}
    for member in members:
        if not (member.isfile() or member.isdir() or member.issym()) or not _stays_inside(member, links):
            raise tarfile.ExtractError(f"{member.name!r:.200} leads out of the folder, or is not a file")
    safe: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    packed.extractall(folder, members, **safe)  # noqa: S202 -- checked just now


def _stays_inside(member: TarInfo, links: set[str]) -> bool:
    """Whether neither its name nor its link target leads out of the folder, or through another link."""
    names = [member.name]
    if member.issym():
        names.append(posixpath.join(posixpath.dirname(member.name), member.linkname))
    for name in names:
        plain = posixpath.normpath(name)
        if name.startswith("/") or "\\" in name or plain == ".." or plain.startswith("../"):
            return False
        steps = name.split("/")
        if any("/".join(steps[:depth]) in links for depth in range(1, len(steps))):
            return False
    return True


def _fetch(results: ResultStore, ref: str, target: Path) -> str:
    digest = sha256()
    with target.open("xb") as file:
        for chunk in results.open(ref):
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()
