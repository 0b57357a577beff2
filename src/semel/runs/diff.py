"""What differs between two attempts, sorted by what most likely explains different results; and how results differ.

Nothing here reads or writes: it compares manifests and JSON values.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from semel.errors import Drifted
from semel.runs.types import Manifest, Run

MAX_DIFFERENCES = 200
"""Differences of a section that are listed."""
MAX_VALUE = 300
"""Characters of a value that are shown."""
MAX_LINES = 400
"""Lines of two patches that are shown."""
MAX_COMPARED_LINES = 2000
"""Lines of a patch that is compared with another line by line: with more, similar lines would take many seconds."""
MISSING = object()

Kind: TypeAlias = Literal["changed", "only in A", "only in B"]
Verdict: TypeAlias = Literal["same", "differs", "unknown"]
SECTIONS = ("code", "data", "parameters", "packages", "seed", "python", "host")
"""What is compared, the most likely explanation of a difference first; the rest comes last, and is folded."""
DRIFTS = ("code", "data", "packages", "python")
"""What may change between a run and its rerun although nobody asked for it."""
IMPORTED = (".py", ".pyx", ".so", ".pyd")
"""How untracked files end that are code. Others are data, such as a SQLite file, which changes with every run."""
REST = "details"


class Difference(Struct, frozen=True):
    """A path at which two values differ; ``a`` or ``b`` is None where there is no value."""

    path: str
    kind: Kind
    a: str | None
    b: str | None


class Section(Struct, frozen=True, kw_only=True):
    """What differs of one kind."""

    name: str
    differences: list[Difference] = []
    more: bool = False
    """Whether there are more differences than are listed."""
    lines: list[str] = []
    """For code: the lines in which the uncommitted changes differ, as a unified diff."""
    unknown: str | None = None
    """Why it could not be compared."""
    folded: bool = False
    """Whether it explains nothing: ids, times and hashes."""


class ResultComparison(Struct, frozen=True, kw_only=True):
    """Whether two results are the same. For numbers that differ: the largest relative difference, and where it is."""

    verdict: Verdict
    message: str
    differences: list[Difference] = []
    more: bool = False
    largest_relative_difference: float | None = None
    where: str | None = None


class Drift(Struct, frozen=True, kw_only=True):
    """What changed since a run's last attempt, of what a rerun takes from its worker."""

    compared_with: str
    """The worker whose newest manifest it was compared with, or this process if no worker has the model."""
    sections: list[Section]

    @property
    def any(self) -> bool:
        """Whether something changed, or could not be compared."""
        return bool(self.sections)

    def __str__(self) -> str:
        return "; ".join(map(describe, self.sections)) or "nothing changed"


class Rerun(Struct, frozen=True):
    """A run that was submitted again, and what had changed before it was stored."""

    run: Run
    drift: Drift


def refused(run_id: str, drift: Drift) -> Drifted:
    """The error of a strict rerun."""
    return Drifted(f"run {run_id} was not submitted again: {drift}", drift)


def describe(section: Section, most: int = 5) -> str:
    """The differences of a section in one line."""
    if section.unknown is not None:
        return f"{section.name}: unknown: {section.unknown}"
    shown = [f"{each.path} {_short(each.a)} → {_short(each.b)}" for each in section.differences[:most]]
    more = ["…"] if len(section.differences) > most or section.more else []
    return f"{section.name}: {', '.join(shown + more)}"


def _short(text: str | None) -> str:
    if text is None:
        return "none"
    plain = text.strip('"')
    return f"{plain[:12]}…" if len(plain) > 40 else plain


class RunDiff(Struct, frozen=True, kw_only=True):
    """How two attempts differ: the sections that do, in the order of what most likely explains it, and the results."""

    a: str
    b: str
    sections: list[Section]
    result: ResultComparison


def compare(a: Manifest, b: Manifest, result: ResultComparison) -> RunDiff:
    """Compare two manifests. Sections without a difference are left out."""
    found = [_section(name, a, b) for name in SECTIONS]
    found.append(_listed(REST, _rest(a), _rest(b), folded=True))
    shown = [each for each in found if each.differences or each.lines or each.unknown]
    return RunDiff(a=a.run_id, b=b.run_id, sections=shown, result=result)


def drift(before: Manifest, now: Manifest) -> list[Section]:
    """What changed since an attempt, of what a rerun takes from its worker; a section that is unknown counts."""
    found = (_section(name, before, now) for name in DRIFTS)
    return [each for each in found if each.differences or each.lines or each.unknown]


def _section(name: str, a: Manifest, b: Manifest) -> Section:
    if name == "code":
        return _code(a, b)
    if name == "data":
        return _listed(name, {"data": a.data_ref}, {"data": b.data_ref})
    if name == "parameters":
        return _listed(name, a.parameters, b.parameters)
    if name == "seed":
        if not a.seed_given and not b.seed_given:
            return Section(name=name)  # where they differ, the parameters do
        return _listed(name, {"seed": a.seed}, {"seed": b.seed})
    if a.environment is None or b.environment is None:
        return Section(name=name, unknown=_why_unknown(a, b, a.environment is None, b.environment is None))
    return _listed(name, _about(name, a, a.environment), _about(name, b, b.environment))


def _about(name: str, manifest: Manifest, environment: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the environment says of packages, Python or the host."""
    if name == "packages":
        sources = {f"{package} (source)": source for package, source in environment.get("sources", {}).items()}
        return {**environment.get("packages", {}), **sources}
    if name == "python":
        return _mapping(environment.get("python"))
    told = {key: environment.get(key) for key in ("image", "platform", "cpu", "memory_bytes", "gpus", "variables")}
    return {**told, "host": manifest.host}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {"": value}


def _why_unknown(a: Manifest, b: Manifest, *lacks: bool) -> str:
    sides = [(name, each) for (name, each), lack in zip((("A", a), ("B", b)), lacks, strict=True) if lack]
    return "; ".join(f"{name}: {each.missing or 'it was not recorded'}" for name, each in sides)


def _code(a: Manifest, b: Manifest) -> Section:
    if a.code is None or b.code is None:
        return Section(name="code", unknown=_why_unknown(a, b, a.code is None, b.code is None))
    one, other = _code_facts(a), _code_facts(b)
    lines = _patch_lines(_patch(a.code), _patch(b.code))
    section = _listed("code", one, other)
    return Section(name="code", differences=section.differences, more=section.more, lines=lines)


def _code_facts(manifest: Manifest) -> dict[str, Any]:
    """What identifies the code: the branch does not, nor does an untracked file that Python does not import."""
    code = manifest.code or {}
    facts = {name: code.get(name) for name in ("function", "module", "reference")}
    git = code.get("git")
    if not isinstance(git, Mapping):
        return {**facts, "git": git}
    untracked = {name: digest for name, digest in _untracked(git).items() if name.endswith(IMPORTED)}
    return {**facts, "commit": git.get("commit"), "patch_digest": git.get("patch_digest"), "untracked": untracked}


def _untracked(git: Any) -> Mapping[str, str]:
    return git.get("untracked", {}) if isinstance(git, Mapping) else {}


def _patch(code: Mapping[str, Any]) -> str:
    git = code.get("git")
    return str(git.get("patch") or "") if isinstance(git, Mapping) else ""


def _patch_lines(a: str, b: str) -> list[str]:
    """The lines in which two patches differ."""
    if a == b:
        return []
    if max(a.count("\n"), b.count("\n")) > MAX_COMPARED_LINES:
        return [f"the patches differ; one has more than {MAX_COMPARED_LINES:,} lines, too many to compare"]
    found = difflib.unified_diff(a.splitlines(), b.splitlines(), "uncommitted in A", "uncommitted in B", "", "", 2, "")
    lines = [line for line, _ in zip(found, range(MAX_LINES + 1), strict=False)]
    return [*lines[:MAX_LINES], "…"] if len(lines) > MAX_LINES else lines


def _rest(manifest: Manifest) -> dict[str, Any]:
    git = (manifest.code or {}).get("git")
    return {
        "branch": git.get("branch") if isinstance(git, Mapping) else None,
        "untracked": {name: digest for name, digest in _untracked(git).items() if not name.endswith(IMPORTED)},
        "model": manifest.model,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "worker": manifest.worker,
        "began_at": None if manifest.began_at is None else manifest.began_at.isoformat(),
        "ended_at": None if manifest.ended_at is None else manifest.ended_at.isoformat(),
        "run_id": manifest.run_id,
        "fence": manifest.fence,
        "payload_hash": manifest.payload_hash,
        "seed": None if manifest.seed_given else manifest.seed,
        "result_digest": manifest.result_digest,
        "environment_digest": manifest.environment_digest,
        "code_digest": manifest.code_digest,
    }


def _listed(name: str, a: Mapping[str, Any], b: Mapping[str, Any], *, folded: bool = False) -> Section:
    found: list[Difference] = []
    more = False
    for key in sorted({*a, *b}):
        some, rest = differences(a.get(key, MISSING), b.get(key, MISSING), MAX_DIFFERENCES - len(found), key)
        found, more = found + some, more or rest
    return Section(name=name, differences=found, more=more, folded=folded)


# -- JSON values -------------------------------------------------------------------------------------------------------


def compare_results(one: str | bytes, other: str | bytes) -> ResultComparison:
    """Compare two results, as JSON."""
    try:
        a, b = json.loads(one), json.loads(other)
        found, more = differences(a, b)
        largest, where = largest_relative_difference(a, b)
    except (ValueError, RecursionError):
        verdict: Verdict = "same" if one == other else "differs"
        return ResultComparison(verdict=verdict, message=f"{_SAID[verdict]}; nested too deeply to say where")
    verdict = "differs" if found else "same"
    message = _SAID[verdict]
    if largest is not None:
        message += f"; numbers by up to {largest:.3g} of their size, at {where}"
    return ResultComparison(
        verdict=verdict,
        message=message,
        differences=found,
        more=more,
        largest_relative_difference=largest,
        where=where,
    )


_SAID = {"same": "same result", "differs": "the results differ", "unknown": "unknown"}


def largest_relative_difference(a: Any, b: Any) -> tuple[float | None, str | None]:
    """Of the numbers at the same places, the largest |a - b| / max(|a|, |b|), and where; None if none differ."""
    largest, where = None, None
    for path, one, other in _differing_paths(a, b):
        if not (_is_number(one) and _is_number(other)):
            continue
        relative = _relative(one, other)
        if largest is None or relative > largest:
            largest, where = relative, path or WHOLE
    return largest, where


def _relative(one: float, other: float) -> float:
    try:
        return min(2.0, abs(one - other) / max(abs(one), abs(other)))
    except OverflowError:  # an integer that no float can hold
        return 2.0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


WHOLE = "(the whole value)"


def differences(a: Any, b: Any, most: int = MAX_DIFFERENCES, path: str = "") -> tuple[list[Difference], bool]:
    """The first differences of two JSON values, and whether there are more. ``path`` is where the values are."""
    found: list[Difference] = []
    for place, one, other in _differing_paths(a, b, path):
        if len(found) >= most:
            return found, True
        kind: Kind = "only in B" if one is MISSING else "only in A" if other is MISSING else "changed"
        found.append(Difference(place or WHOLE, kind, _json_text(one), _json_text(other)))
    return found, False


def _differing_paths(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The paths at which they differ. Without recursion, because values can be nested to any depth."""
    stack: list[tuple[str, Any, Any]] = [(path, a, b)]
    while stack:
        path, one, other = stack.pop()
        if isinstance(one, dict) and isinstance(other, dict):
            names: Iterable[str] = [*one, *(name for name in other if name not in one)]
            inner = [(_member(path, name), one.get(name, MISSING), other.get(name, MISSING)) for name in names]
        elif isinstance(one, list) and isinstance(other, list):
            inner = [(f"{path}[{n}]", _item(one, n), _item(other, n)) for n in range(max(len(one), len(other)))]
        else:
            if not _equal(one, other):
                yield path, one, other
            continue
        stack += reversed(inner)


def _item(values: list[Any], place: int) -> Any:
    return values[place] if place < len(values) else MISSING


def _member(path: str, name: str) -> str:
    if name.isidentifier():
        return f"{path}.{name}" if path else name
    return f"{path}[{json.dumps(name, ensure_ascii=False)}]"


def _equal(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: true is not equal to 1, but 1.0 is."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict | list) or isinstance(other, dict | list):
        return False
    return bool(one == other)


def _json_text(value: Any) -> str | None:
    if value is MISSING:
        return None
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        text = "(nested too deeply to show)"
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}…"
