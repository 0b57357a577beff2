"""``semel manifest``, ``diff`` and ``rerun``, through a server: what a run was made of, and to run it again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from semel.cli._client import find_run_id, through_server
from semel.cli._options import PARAMETER, POSITIVE, SEED, SPAN, argument, command, examples, option, run_argument
from semel.cli._output import (
    format_size,
    format_time,
    is_terminal,
    note,
    print_fields,
    print_json,
    print_result,
    print_table,
)
from semel.cli.runs import wait_for_end
from semel.redaction import printable

if TYPE_CHECKING:
    from semel.client import Client
    from semel.runs.diff import Drift, Section
    from semel.runs.types import Manifest


@command
@examples("semel manifest 0e8c77", "semel manifest 0e8c77 --patch | git apply", "semel manifest 0e8c77 --json")
@run_argument
@option("--attempt", type=POSITIVE, help="Which attempt, from 1.  [default: the last]")
@option("--packages", is_flag=True, help="List the packages.")
@option("--patch", is_flag=True, help="Print only the changes of the code that were not committed.")
@through_server
def manifest(
    client: Client, run: str, *, attempt: int | None, packages: bool, patch: bool, as_json: bool
) -> int | None:
    """Show what an attempt of a run was made of: parameters, seed, data, code, packages, machine.

    With --patch the exit code is 1 if there were no such changes, or if not all of them were stored.
    """
    found = client.manifest(find_run_id(client, run), attempt=attempt)
    if as_json:
        print_json(found)
        return None
    git = (found.code or {}).get("git")
    if patch:
        return _print_patch(git if isinstance(git, dict) else {})
    print_fields({**_asked(found), **_code(found.code or {}), **_environment(found)})
    if packages and found.environment is not None:
        print()
        versions = found.environment.get("packages", {})
        print_table(["package", "version"], list(versions.items()), empty="there are no packages")
    return None


def _print_patch(git: dict[str, Any]) -> int:
    text = git.get("patch") or ""
    print(printable(text) if is_terminal() else text, end="")
    return 0 if text and not git.get("patch_truncated") and not git.get("patch_redacted") else 1


def _asked(found: Manifest) -> dict[str, object]:
    took = None if found.began_at is None else format_time(found.began_at)
    return {
        "run": found.run_id,
        "model": found.model,
        "attempt": f"{found.attempt} of {found.attempts}, {found.step}" if found.attempt else None,
        "note": found.missing,
        "parameters": json.dumps(found.parameters, ensure_ascii=False),
        "payload": found.payload_hash,
        "seed": found.seed,
        "data": found.data_ref,
        "began": took,
        "ended": None if found.ended_at is None else format_time(found.ended_at),
        "worker": found.worker,
        "result": found.result_digest,
    }


def _code(code: dict[str, Any]) -> dict[str, object]:
    git = code.get("git")
    state: dict[str, object] = {"git": git}
    if isinstance(git, dict):
        changed = "with uncommitted changes" if git.get("dirty") else "clean"
        state = {"commit": git.get("commit"), "branch": f"{git.get('branch')}, {changed}"}
        if git.get("untracked"):
            state["untracked"] = "\n".join(git["untracked"])
    source = {"code": code.get("reference"), "function": code.get("function"), "module": code.get("module")}
    return {**source, "file": code.get("file"), **state} if code else {}


def _environment(found: Manifest) -> dict[str, object]:
    about = found.environment
    if about is None:
        return {}
    python, cpu, gpus, memory = (about.get(name) for name in ("python", "cpu", "gpus", "memory_bytes"))
    return {
        "python": f"{python['implementation']} {python['version']}" if isinstance(python, dict) else python,
        "packages": f"{len(about.get('packages', {}))}; --packages lists them",
        "platform": about.get("platform"),
        "cpu": f"{cpu['model']}, {cpu['usable']} of {cpu['count']}" if isinstance(cpu, dict) else cpu,
        "memory": format_size(memory) if isinstance(memory, int) else memory,
        "gpus": "\n".join(gpus) if isinstance(gpus, list) and gpus else gpus or None,
        "image": about.get("image"),
        "variables": "\n".join(f"{name}={value}" for name, value in (about.get("variables") or {}).items()) or None,
        "host": found.host,
    }


@command
@examples("semel diff 0e8c77 5f2d6a", "semel diff 0e8c77 5f2d6a --all")
@argument("a", help="A run's id, or at least six characters from its beginning or end.")
@argument("b", help="Another run's.")
@option("--all", "whole", is_flag=True, help="Show ids, times and hashes, too.")
@through_server
def diff(client: Client, a: str, b: str, *, whole: bool, as_json: bool) -> int:
    """Show how two runs differ, what most likely explains different results first.

    Code, data, parameters, packages, seed, Python, host. The exit code is 0 if the results are the same, else 1.
    """
    found = client.diff(find_run_id(client, a), find_run_id(client, b))
    if as_json:
        print_json(found)
    else:
        for section in found.sections:
            if whole or not section.folded:
                _print_section(section)
        print(f"result: {found.result.message}")
        _print_differences(found.result.differences)
    return 0 if found.result.verdict == "same" else 1


def _print_section(section: Section) -> None:
    print(f"{section.name}: {section.unknown or ''}".rstrip().removesuffix(":") if section.unknown else section.name)
    _print_differences(section.differences)
    if section.more:
        print("there are more differences")
    for line in section.lines:
        print(f"  {printable(line)}")
    print()


def _print_differences(differences: Any) -> None:
    if differences:
        rows = [[f"  {each.path}", each.a, each.b] for each in differences]
        print_table(["", "A", "B"], rows, empty="")


@command
@examples("semel rerun 0e8c77 --wait", "semel rerun 0e8c77 --set horizon_months=36", "semel rerun 0e8c77 --strict")
@run_argument
@option("--set", "changes", type=PARAMETER, multiple=True, metavar="NAME=VALUE", help="Replace a parameter.")
@option("--seed", type=SEED, help="Another seed.  [default: that of the run]")
@option("--strict", is_flag=True, help="Refuse if code, data, packages or Python changed since.")
@option("--key", metavar="KEY", help="The idempotency key; the same key returns the same new run.")
@option("--wait", is_flag=True, help="Wait until the new run has ended, and compare the results.")
@option("--timeout", type=SPAN, help="How long to --wait.  [default: no limit]")
@through_server
def rerun(
    client: Client,
    run: str,
    *,
    changes: tuple[tuple[str, Any], ...],
    wait: bool,
    timeout: float | None,
    key: str | None,
    as_json: bool,
    **options: Any,
) -> int | None:
    """Submit a run that has ended again, also one that succeeded, and print the new id.

    What changed since is printed first. With --wait the exit code is 0 if the new run succeeded with the same result.
    """
    run_id = find_run_id(client, run)
    _note_drift(client.drift(run_id))
    again = client.rerun(run_id, parameters=dict(changes), idempotency_key=key, **options).run
    if not wait:
        print_result(as_json, again, again.run_id)
        return None
    code = wait_for_end(client, again, timeout, as_json)
    if code:
        return code
    result = client.diff(run_id, again.run_id).result
    note(f"semel: {result.message}, compared with {run_id}")
    return 0 if result.verdict == "same" else 1


def _note_drift(drift: Drift) -> None:
    from semel.runs.diff import describe

    if not drift.any:
        note(f"semel: nothing changed since, compared with {drift.compared_with}")
        return
    note(f"semel: changed since, compared with {drift.compared_with}:")
    for section in drift.sections:
        note(f"  {describe(section)}")
