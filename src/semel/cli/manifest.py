"""``semel manifest``: what an attempt of a run was made of, through a server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from semel.cli._client import find_run_id, through_server
from semel.cli._options import POSITIVE, command, examples, option, run_argument
from semel.cli._output import format_size, format_time, print_fields, print_json, print_table
from semel.redaction import printable

if TYPE_CHECKING:
    from semel.client import Client
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
    print(printable(text), end="")
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
