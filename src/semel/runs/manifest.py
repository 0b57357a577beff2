"""What attempts run on and with: the environment of a process (Python, packages, hardware) and its code (git, models).

Collected once per process, and again when files changed. Nothing here raises: what cannot be found out is recorded as
``"unavailable: …"`` with the reason. Secrets are left out: values of variables that look like secrets, passwords in
URLs and in patches, and files that git ignores.
"""

from __future__ import annotations

import csv
import importlib.metadata
import inspect
import json
import linecache
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from semel._concurrency.fork import survive_fork
from semel.redaction import HIDDEN, KNOWN_TOKEN, SECRET_NAME, without_secrets
from semel.runs.models.model import Model

LOOK_EVERY = 5.0
"""Seconds after which the files are looked at again; doubled with each change found, up to ``LOOK_AT_LEAST_EVERY``."""
LOOK_AT_LEAST_EVERY = 600.0
PROGRAM_TIMEOUT = 5.0
"""Seconds that git or nvidia-smi may take."""
MAX_PATCH = 256 * 1024
"""Bytes of a patch that are stored; its digest is of all of it, up to ``MAX_READ``."""
MAX_READ = 1024 * 1024
MAX_LINE = 5000
"""Characters of a line of a patch that are searched for secrets; a longer line with the name of one is left out."""
MAX_REGISTRIES = 8
"""Apps of a process whose code is kept."""
MAX_UNTRACKED = 500
"""Untracked files that are listed."""
MAX_TRACKED = 20_000
"""Files of a repository that are looked at for changes; of those of a larger one only ``.py``."""
MAX_LISTED = 16 * 1024 * 1024
"""Bytes of the list of these files that are read."""
MAX_HASHED = 32 * 1024 * 1024
"""Bytes of untracked files that are hashed."""

DEFAULT_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "PYTHONHASHSEED",
)
"""The variables that are recorded unless ``SEMEL_MANIFEST_ENV`` names others: they change results."""
UNAVAILABLE = "unavailable: "

_SECRET_IN_CODE = re.compile(rf"{SECRET_NAME.pattern}|(?:^|_)PWD(?:$|_)", re.IGNORECASE)
"""Found in the name of a secret. In code, ``pwd`` is rather a password than a folder."""
_NAMED = re.compile(r"\b(?P<name>\w+)(?P<quote>[\"']?)\]?[ \t]*(?P<sign>=>|:=|\?=|=(?!=)|:(?![:=]))[ \t]*")
_ANNOTATION = re.compile(r"(?P<type>[\w.|&* \t]{1,80}(?:\[[^\]=]{0,80}\]{1,3}[\w.| \t]{0,80})?)=(?!=)[ \t]*(?=\S)")
_WORD = re.compile(r"[^\s\"'({\[$][^\s({\[]*(?=\s|$)")
"""The value of a variable of a shell, in capitals and without spaces: up to the next space."""
_BARE = re.compile(r"[^\s\"'({\[]+")
"""A word without quotes: a value if it ends its line, as in ``.env`` and in YAML; a comment may follow."""
_END = re.compile(r"(?:[ \t]+(?:#|//|;|--).*)?\Z")
_NO_SECRETS = frozenset(
    ("None", "True", "False", "null", "true", "false", "str", "bytes", "int", "float", "bool", "string", "Any")
)
_LITERAL = re.compile(r"[(\[ \t]*[bBrRuUfFL@$]{0,2}[\"']")
_PIECE = re.compile(
    r"(?P<text>\"{3}.*?\"{3}|'{3}.*?'{3}|\"[^\"\\]*(?:\\.[^\"\\]*)*\"|'[^'\\]*(?:\\.[^'\\]*)*'|[\"'].*)"
    r"|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<comma>[,;])|(?P<end>(?<=\s)#|(?<=\s)[\w.-]+=(?!=))|[^\s\"'()\[\]{},;#]+|."
)
"""A piece of an expression. A text that does not end on its line goes to the end of the line."""
_PLACE = re.compile(
    r"(?:\b(?!(?:str|bytes|bytearray|\w*(?:hash|encode|decode|crypt)\w*|(?:make|set)_\w+)\()(?:[a-z_]|Get|Lookup)\w*\("
    r"|[\w)\]]\[)\s*[a-zA-Z]{0,2}\Z"
)
"""Before a text that says where a secret is: the first that a function is called with, or what is in a subscript."""
_ARGUMENT = re.compile(r"(?P<name>\w+)[ \t]*=[ \t]*[a-zA-Z]{0,2}\Z")
"""Before a text that is passed by name."""
_BEFORE = 80
"""Characters before a text that are looked at."""
_MAY_NAME_SECRET = re.compile(rf"{SECRET_NAME.pattern}|(?:\b|_)(?:KEY|PASS|PWD)(?:\b|_)", re.IGNORECASE)
"""Found in every line that has the name of a secret somewhere."""
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_INSTALLED = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)\.dist-info")

Content: TypeAlias = dict[str, Any]


class Part(Struct, frozen=True):
    """A part of a manifest: canonical JSON, and its SHA-256 in hex."""

    digest: str
    body: str


class Parts(Struct, frozen=True):
    """What a process runs on and with."""

    environment: Part
    code: Part
    host: str


def make_part(content: Content) -> Part:
    """The part with this content: equal contents have equal digests."""
    body = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return Part(sha256(body.encode()).hexdigest(), body)


# -- the environment ---------------------------------------------------------------------------------------------------


def environment() -> Content:
    """Python, the installed packages, the machine, and the variables that are allowed."""
    packages, sources = _or_why(_packages, lambda why: ({"": why}, {}))
    return {
        "python": {"version": platform.python_version(), "implementation": platform.python_implementation()},
        "platform": _found(platform.platform),
        "packages": packages,
        "sources": sources,
        "cpu": _found(_cpu),
        "memory_bytes": _found(lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "gpus": _found(_gpus),
        "image": _clean(os.environ["SEMEL_IMAGE"]) if os.environ.get("SEMEL_IMAGE") else None,
        "variables": variables(os.environ),
    }


def variables(environ: Any) -> dict[str, str]:
    """The variables that ``SEMEL_MANIFEST_ENV`` names (separated by commas), without the values of secrets."""
    asked = environ.get("SEMEL_MANIFEST_ENV")
    names = DEFAULT_VARIABLES if asked is None else [name.strip() for name in asked.split(",")]
    there = {name: environ[name] for name in names if name and name in environ}
    return {name: HIDDEN if SECRET_NAME.search(name) else _clean(value) for name, value in sorted(there.items())}


def _clean(text: str) -> str:
    """The text without secrets, and with no character that UTF-8 does not have."""
    return KNOWN_TOKEN.sub(HIDDEN, without_secrets(text)).encode("utf-8", "backslashreplace").decode()


def _packages() -> tuple[dict[str, str], dict[str, str]]:
    """The version of every installed distribution, and where those came from that were not fetched from an index.

    Names and versions are those of the folders: to read every METADATA would take a hundred times as long.
    """
    found: dict[str, str] = {}
    sources: dict[str, str] = {}
    for entry in sys.path:
        folder = Path(entry or ".")
        for name, version, path in _installed_in(folder):
            if name in found:
                continue  # the first on the path is imported
            found[name] = version
            if path is not None and (source := _source(path)):
                sources[name] = source
    return dict(sorted(found.items())), dict(sorted(sources.items()))


def _installed_in(folder: Path) -> Iterator[tuple[str, str, Path | None]]:
    try:
        names = os.listdir(folder)  # noqa: PTH208 -- there may be thousands
    except OSError:
        return
    for each in names:
        if match := _INSTALLED.fullmatch(each):
            yield re.sub(r"[-_.]+", "-", match["name"]).lower(), match["version"], folder / each
    if any(each.endswith(".egg-info") for each in names):  # of old tools: their names say less
        for old in importlib.metadata.distributions(path=[str(folder)]):
            if old.metadata["Name"]:
                yield re.sub(r"[-_.]+", "-", old.metadata["Name"]).lower(), old.version, None


def _source(folder: Path) -> str | None:
    """Where a distribution came from, as PEP 610 records it: a repository with its commit, or a folder."""
    try:
        told = json.loads((folder / "direct_url.json").read_bytes())
        commit = told.get("vcs_info", {}).get("commit_id")
        if commit:
            return _clean(f"{told['url']}@{commit}")
        return "editable" if told.get("dir_info", {}).get("editable") else _clean(str(told["url"]))
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 -- whatever is in that file
        return _why(error)


def _cpu() -> Content:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") if Path("/proc/cpuinfo").exists() else open(os.devnull) as lines:  # noqa: PTH123
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return {"model": model, "count": os.cpu_count(), "usable": usable}


def _gpus() -> list[str]:
    """The GPUs by nvidia-smi, or of a torch that is imported already; CUDA is not started for it."""
    if program := shutil.which("nvidia-smi"):
        asked = "--query-gpu=name,memory.total,driver_version"
        text, _ = _run([program, asked, "--format=csv,noheader"], None)
        return [", ".join(cell.strip() for cell in row) for row in csv.reader(text.splitlines())]
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    if torch.cuda.is_initialized():
        return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return ["a GPU"] * torch.cuda.device_count()


# -- the code ----------------------------------------------------------------------------------------------------------


def code(models: Iterable[Model]) -> Content:
    """The source of every model, and the state of the repositories that it is in."""
    found: dict[str, Content] = {}
    repositories: dict[str, Any] = {}
    names: dict[Path, str] = {}
    for model in models:
        file = source_file(model)
        top = None if file is None else top_of(file)
        if top is not None and top not in names:
            names[top] = _name_of(top, repositories)
            repositories[names[top]] = _found(partial(repository, top))
        found[model.name] = {
            "reference": model.reference or getattr(model.function, "__qualname__", ""),
            "function": _found(partial(_function_digest, model)),
            "module": _found(partial(_file_digest, file)),
            "file": None if file is None else _clean(str(file.relative_to(top) if top else file.name)),
            "repository": None if top is None else names[top],
        }
    return {"models": found, "repositories": repositories}


def _name_of(top: Path, taken: Content) -> str:
    name, number = _clean(top.name), 1
    while name in taken:
        number += 1
        name = f"{_clean(top.name)} ({number})"
    return name


def source_file(model: Model) -> Path | None:
    """The file that defines the model's function; None if there is none."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(model.function))
        return None if file is None or not os.path.isfile(file) else Path(file).resolve()  # noqa: PTH113
    except (TypeError, ValueError, OSError):
        return None


def top_of(file: Path) -> Path | None:
    """The folder of the git repository that the file is in; None if there is none, or if the file is installed."""
    if not {"site-packages", "dist-packages"}.isdisjoint(file.parts):
        return None
    return next((each for each in file.parents if (each / ".git").exists()), None)


def _function_digest(model: Model) -> str:
    linecache.checkcache()
    return sha256(inspect.getsource(inspect.unwrap(model.function)).encode()).hexdigest()


def _file_digest(file: Path | None) -> str:
    if file is None:
        raise FileNotFoundError("its function is in no file")
    return sha256(file.read_bytes()).hexdigest()


def repository(top: Path) -> Content:
    """Commit, branch, and what differs from the commit: a bounded patch, and the untracked files by name and digest."""
    status, _ = _git(top, "status", "--porcelain=v2", "--branch", "-z", "--untracked-files=all", "--ignored=no")
    heads: dict[str, str] = {}
    changed, untracked = False, []
    entries = iter(status.split("\0"))
    for entry in entries:
        if entry.startswith("# branch."):
            name, _, value = entry.removeprefix("# branch.").partition(" ")
            heads[name] = value
        elif entry.startswith("? "):
            untracked.append(entry[2:])
        elif entry and not entry.startswith("# "):
            changed = True
            if entry.startswith("2 "):
                next(entries, None)  # a renamed file has its former name as well
    found: Content = {
        "commit": heads.get("oid"),
        "branch": _clean(heads["head"]) if "head" in heads else None,
        "dirty": changed or bool(untracked),
        "untracked": _untracked(top, untracked),
    }
    if len(untracked) > MAX_UNTRACKED:
        found["untracked_left_out"] = len(untracked) - MAX_UNTRACKED
    return found | (_found_patch(top, heads.get("oid")) if changed else {})


_SAME_DIFF = (
    *("-c", "diff.suppressBlankEmpty=false", "-c", "diff.ignoreSubmodules=untracked", "diff"),
    *("--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/", "--full-index"),
    *("-U3", "--inter-hunk-context=0", "--diff-algorithm=default", "--indent-heuristic", "--submodule=short"),
    *("--find-renames", "-l1000", "-O/dev/null"),
)
"""A diff that ``git apply`` takes, and that is the same whatever the user's git is configured to."""


def _found_patch(top: Path, commit: str | None) -> Content:
    base = "HEAD" if commit != "(initial)" else "4b825dc642cb6eb9a060e54bf8d69288fbee4904"  # the empty tree
    try:
        text, whole = _git(top, *_SAME_DIFF, base, "--")
    except Exception as error:  # noqa: BLE001 -- the rest is known
        return {"patch": _why(error)}
    patch = patch_without_secrets(text)
    kept = patch.encode("utf-8", "backslashreplace")[:MAX_PATCH].decode("utf-8", "ignore")
    found: Content = {
        "patch": kept,
        "patch_digest": sha256(patch.encode("utf-8", "backslashreplace")).hexdigest(),
    }
    if not whole or len(kept) < len(patch):
        found["patch_truncated"] = True
    if patch != text:
        found["patch_redacted"] = True
    return found


def patch_without_secrets(patch: str) -> str:
    """The patch with everything that looks like a secret replaced by ``***``."""
    patch = "\n".join(map(_line_without_secrets, _PRIVATE_KEY.sub(HIDDEN, patch).split("\n")))
    return KNOWN_TOKEN.sub(HIDDEN, without_secrets(patch))


def _line_without_secrets(line: str) -> str:
    """The line without values of secrets. A long one that may have some is left out: to search it could take long."""
    if not _MAY_NAME_SECRET.search(line):
        return line
    if len(line) > MAX_LINE:
        return f"{line[:1]}{HIDDEN}"
    text = line.rstrip()
    found, at = [], 0
    while named := _NAMED.search(text, at):
        begin, value, end = _value(text, named)
        found += [text[at:begin], value]
        at = end
    return "".join(found) + text[at:] + line[len(text) :]


def _value(line: str, named: re.Match[str]) -> tuple[int, str, int]:
    """Where the value of a name begins, what is stored for it, and where it ends."""
    begin, name, quoted, sign = named.end(), named["name"], bool(named["quote"]), named["sign"]
    is_secret = bool(_SECRET_IN_CODE.search(name))
    if is_secret and name.isupper() and named[0] == f"{name}=" and (word := _WORD.match(line, begin)):
        return begin, HIDDEN, word.end()
    if is_secret and (quoted or sign != "=>") and (bare := _bare_value(line, begin, in_list=quoted)):
        return (begin, *bare)
    if sign == ":" and not quoted and (annotated := _ANNOTATION.match(line, begin)):
        is_secret = is_secret or any(map(_SECRET_IN_CODE.search, re.findall(r"\w+", annotated["type"])))
        begin, sign = annotated.end(), "="
        if is_secret and (bare := _bare_value(line, begin, in_list=False)):
            return (begin, *bare)
    if is_secret and (quoted or sign not in (":", "=>") or _LITERAL.match(line, begin)):
        return (begin, *_without_texts(line, begin))
    return begin, "", begin


def _bare_value(line: str, begin: int, *, in_list: bool) -> tuple[str, int] | None:
    """What is stored for a word that ends the line, and where it ends; None if none does. In a list with a comma."""
    found = _BARE.match(line, begin)
    if found is None or not _END.match(line, found.end()):
        return None
    word = found[0].removesuffix(",") if in_list else found[0]
    if not word or word[-1] in ",;":
        return None
    return (word if word in _NO_SECRETS else HIDDEN), begin + len(word)


def _without_texts(line: str, begin: int) -> tuple[str, int]:
    """The expression that begins there without its texts, and where it ends: at a comma, a bracket or a comment.

    A dict is none: its names say which of its values are secrets.
    """
    found: list[str] = []
    depth, at = 0, begin
    while not line.startswith("{", begin) and (piece := _PIECE.match(line, at)):
        depth += bool(piece["open"]) - bool(piece["close"])
        if depth < 0 or (piece["comma"] and not depth) or (piece["end"] and (piece["end"] == "#" or not depth)):
            break
        text, at = piece["text"], piece.end()
        if text and not (depth and line.startswith((":", " :"), at)):
            text = _without_text(text, line[max(begin, piece.start() - _BEFORE) : piece.start()] if depth else "")
        found.append(text or piece[0])
    return "".join(found), at


def _without_text(text: str, before: str) -> str:
    """A text of an expression as it is stored, by what stands before it inside of brackets."""
    named = _ARGUMENT.search(before)
    is_other = named and named["name"] not in ("default", "value") and not _SECRET_IN_CODE.search(named["name"])
    if is_other or _PLACE.search(before) or not text.strip(text[0]):
        return text
    quote = text[:3] if text[:3] in ('"""', "'''") else text[0]
    return f"{quote}{HIDDEN}{quote if text.endswith(quote) else ''}"


def _untracked(top: Path, names: Sequence[str]) -> dict[str, str]:
    room, found = MAX_HASHED, {}
    for name in sorted(names)[:MAX_UNTRACKED]:
        try:
            size = (top / name).stat().st_size
            room -= size
            found[_clean(name)] = (
                sha256((top / name).read_bytes()).hexdigest()
                if room >= 0
                else f"{UNAVAILABLE}{size} bytes are too many"
            )
        except OSError as error:
            found[_clean(name)] = _why(error)
    return found


_QUIET = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}


def _git(top: Path, *arguments: str, most: int = MAX_READ) -> tuple[str, bool]:
    """What git prints, and whether that is all. Nothing that the repository configures is run for it."""
    program = shutil.which("git")
    if program is None:
        raise FileNotFoundError("git is not installed")
    command = [program, "-C", str(top), "-c", "core.fsmonitor=false", "-c", "core.quotePath=false", *arguments]
    return _run(command, _QUIET, most)


def _run(command: Sequence[str], environ: dict[str, str] | None, most: int = MAX_READ) -> tuple[str, bool]:
    """What a program prints, up to so many bytes, and whether that is all. Raises if it fails or takes long."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    with subprocess.Popen(  # noqa: S603 -- git or nvidia-smi, with arguments of ours
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean | (environ or {}),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        timed_out = threading.Event()

        def end() -> None:
            timed_out.set()
            process.kill()

        late = threading.Timer(PROGRAM_TIMEOUT, end)
        late.daemon = True
        late.start()
        try:
            printed = process.stdout.read(most)
            more = bool(process.stdout.read(1))
            if more:
                process.kill()
            said = b"" if more else process.stderr.read(MAX_READ)
            status = process.wait()
        finally:
            late.cancel()
            process.kill()
    name = Path(command[0]).name
    if status and not more:
        raise OSError(
            f"{name} took longer than {PROGRAM_TIMEOUT:g} s"
            if timed_out.is_set()
            else f"{name}: {said.decode(errors='replace')}"
        )
    return printed.decode("utf-8", "surrogateescape").encode("utf-8", "backslashreplace").decode(), not more


def _found(find: Callable[[], Any]) -> Any:
    return _or_why(find, lambda why: why)


def _or_why(find: Callable[[], Any], otherwise: Callable[[str], Any]) -> Any:
    try:
        return find()
    except Exception as error:  # noqa: BLE001 -- a manifest never fails a run
        return otherwise(_why(error))


def _why(error: BaseException) -> str:
    text = " ".join(_clean(str(error)).split())[:300]
    return f"{UNAVAILABLE}{text or type(error).__name__}"


# -- once per process --------------------------------------------------------------------------------------------------


class _Kept(Struct):
    """What was collected for the models of an app."""

    files: Any
    parts: Parts
    looked_at: float
    pause: float = LOOK_EVERY

    @property
    def is_due(self) -> bool:
        """Whether the files are to be looked at again."""
        return time.monotonic() - self.looked_at >= self.pause


class Collector:
    """Collects the parts of this process, and keeps them while the files are as they were."""

    def __init__(self) -> None:
        self._kept: dict[Any, _Kept] = {}
        self._environment: tuple[Any, Part] | None = None
        self.after_fork()
        survive_fork(self)

    def after_fork(self) -> None:
        """A thread of the parent may hold the lock."""
        self._lock = threading.Lock()

    def parts(self, models: Iterable[Model]) -> Parts:
        """What this process runs on and with, and these models. Blocks: for git and, if files changed, for the rest."""
        ours = sorted(models, key=lambda each: each.name)
        which = tuple((model.name, model.function) for model in ours)
        with self._lock:
            kept = self._kept.get(which)
            if kept is None:
                self._keep(which, _Kept(_found(partial(_stamp, ours)), self._collect(ours), time.monotonic()))
            elif kept.is_due:
                self._look_again(kept, ours)
            return self._kept[which].parts

    def _keep(self, which: Any, kept: _Kept) -> None:
        self._kept[which] = kept
        while len(self._kept) > MAX_REGISTRIES:
            del self._kept[next(iter(self._kept))]

    def _look_again(self, kept: _Kept, models: Sequence[Model]) -> None:
        """Collect again if files changed: less and less often where they change all the time."""
        files = _found(partial(_stamp, models))
        kept.looked_at = time.monotonic()
        if files == kept.files:
            kept.pause = LOOK_EVERY
            return
        kept.files, kept.parts = files, self._collect(models)
        kept.pause = min(LOOK_AT_LEAST_EVERY, 2 * kept.pause)

    def _collect(self, models: Sequence[Model]) -> Parts:
        stamp = _stamp_of_path()
        if self._environment is None or self._environment[0] != stamp:
            self._environment = (stamp, make_part(environment()))
        return Parts(self._environment[1], make_part(code(models)), platform.node())


def _stamp_of_path() -> list[Any]:
    """Changes when a distribution is installed, removed or replaced."""
    return [_stat(entry) for entry in sys.path if "-packages" in entry]


def _stamp(models: Iterable[Model]) -> list[Any]:
    """Changes when a package or a file of the code does.

    Those are the files of the models, and in their repositories the modules that are imported here and the tracked
    files, which only a child process may import.
    """
    files = {str(file) for file in map(source_file, models) if file is not None}
    tops = {top for top in (top_of(Path(file)) for file in files) if top is not None}
    inside = tuple(f"{top}{os.sep}" for top in tops)
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.startswith(inside) and "-packages" not in file:
            files.add(file)
    for top in tops:
        git = _git_folder(top)
        files.update(str(git / name) for name in ("HEAD", "index", "logs/HEAD"))
        files.update(_tracked(top, _stat(git / "index")))
    return [*_stamp_of_path(), *map(_stat, sorted(files))]


def _git_folder(top: Path) -> Path:
    """Where git keeps the state of a repository: elsewhere for a linked worktree and a submodule."""
    try:
        return top / (top / ".git").read_text().removeprefix("gitdir:").strip()
    except (OSError, ValueError):
        return top / ".git"


@lru_cache(maxsize=MAX_REGISTRIES)
def _tracked(top: Path, _index: Any) -> tuple[str, ...]:
    """The files that git has in its index, listed again when that changes; none if git does not say."""
    try:
        text, whole = _git(top, "ls-files", "-z", most=MAX_LISTED)
        names = text.split("\0")[:-1]  # the last is empty or cut off
        if not whole or len(names) > MAX_TRACKED:
            text, _ = _git(top, "ls-files", "-z", "--", "*.py", most=MAX_LISTED)
            names = text.split("\0")[:MAX_TRACKED]
    except Exception:  # noqa: BLE001 -- the manifest says why, with the state of the repository
        return ()
    return tuple(f"{top}{os.sep}{name}" for name in names if name)


def _stat(path: str | Path) -> tuple[str, int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 -- a path's own takes longer
    except OSError:
        return None
    return (str(path), found.st_mtime_ns, found.st_size)


collector = Collector()
"""That of this process: a fork inherits what its parent collected."""


def content_of(body: str) -> Content:
    """The content of a stored part."""
    content: Content = msgspec.json.decode(body)
    return content


def code_of(content: Content, model: str) -> Content | None:
    """The code of one model, with the state of its repository; None if the worker did not have the model."""
    own = content.get("models", {}).get(model)
    if own is None:
        return None
    name = own.get("repository")
    state = content.get("repositories", {}).get(name, f"{UNAVAILABLE}the model is in no git repository")
    return {**own, "git": state}
