"""How commands end: the exit code, which stream has output, and the keys of what ``--json`` prints."""

import json
import re
from pathlib import Path
from typing import Any

from golden.commands import Ended, run_each
from golden.comparing import compare
from golden.serving import serving

NOBODY = "http://127.0.0.1:9"
NO_ID = "00000000-0000-7000-8000-000000000000"
ALONE = (
    "",
    "--help",
    "--version",
    "nonsense",
    "--nonsense",
    "submit",
    "submit add --nonsense",
    "runs --limit many",
    "runs --status NONSENSE",
    "runs --since nonsense",
    f"runs --json --server {NOBODY}",
    "serve --port many",
    "serve --port 99999",
    "serve no_such_module:app",
    "serve served_app:nothing",
    "worker no_such_module:app",
    "sweep no_such_module:app --once",
    "keys",
    "keys show order-1",
    "migrate nonsense://nowhere",
    "migrate sqlite:////no/such/folder/semel.db",
    "migrate",
    "migrate --json",
    "keys show order-1 --json",
    "keys show",
    "keys resolve order-1",
    "keys resolve order-1 --done --not-done",
    "keys resolve order-1 --done",
    "keys delete order-1 --json",
    "keys delete",
    "token create",
    "token create --user mona --role king",
    "token create --user mona --json",
    "token list",
    "token list --json",
    "token rotate nonsense",
    "token revoke nonsense --json",
    "quota set mona --max-concurrent 2",
    "quota set mona --per-day 5 --json",
    "quota set mona --max-concurrent many",
    "quota set mona",
    "quota list --json",
    "quota show mona --json",
    "quota show nobody",
    "quota unset mona --json",
    "quota unset nobody",
    'config set sums {"model":"add","parameters":{"a":1}} --json',
    "config set sums nonsense",
    "config show sums --json",
    "config list --json",
    "config show none",
    "config delete sums --json",
    "gc --json",
    "gc --dry-run --older-than 30d --json",
    "gc --older-than nonsense",
    "doctor --json",
    "doctor --db sqlite:///missing.db",
    "completion bash",
    "completion nonsense",
)
"""Command lines that need no server; the database is the one that ``migrate`` makes on the way."""

SERVED = (
    "submit add a=1 b=2 --key first --wait",
    "submit add a=1 b=2 --key first --json",
    "submit add a=9 --key first",
    "submit add a=text",
    "submit add a",
    "submit nonsense",
    "submit fail --key failing --wait",
    "submit fail --key failing --wait --json",
    "submit wait --wait --timeout 0.1s",
    "runs",
    "runs --json",
    "runs --json --parameters --limit 1",
    "runs --model nobody",
    "show DONE --json",
    "show nonsense",
    f"show {NO_ID} --json",
    "wait DONE --json",
    "wait FAILED",
    "wait PENDING --timeout 0.1s",
    "result DONE",
    "result DONE --json",
    "result FAILED",
    "result DONE --artifact none",
    "logs DONE",
    "logs DONE --json",
    "models --json",
    "workers --json",
    "summary --json",
    "jobs --json",
    "cancel DONE",
    "cancel PENDING --json",
    "retry DONE --json",
    "retry FAILED --json",
    "job submit none",
    "job submit none --json",
    "job submit sums --provider local --key job-1 --json",
    f"job show {NO_ID}",
    "job cancel nonsense --json",
    "runs --token nonsense",
)
"""Command lines for a server. DONE, FAILED and PENDING stand for the ids of runs in these states."""


def test_how_commands_without_a_server_end_stays(tmp_path: Path) -> None:
    ended = run_each([line.split() for line in ALONE], tmp_path, SEMEL_DB=f"sqlite:///{tmp_path / 'semel.db'}")
    compare("exit-codes.txt", "\n".join(_told(line, each) for line, each in zip(ALONE, ended, strict=True)))


def test_how_commands_with_a_server_end_stays(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        settings = {"SEMEL_DB": server.url, "SEMEL_SERVER": server.address}
        config = 'config set sums {"model":"add","parameters":{"a":1}}'
        first = [config, *SERVED[: SERVED.index("runs")]]
        ended = run_each([line.split() for line in first], tmp_path, **settings)[1:]
        (listed,) = run_each([["runs", "--json"]], tmp_path, **settings)
        ids = _ids(listed.out)
        rest = [re.sub(r"DONE|FAILED|PENDING", lambda found: ids[found[0]], line) for line in SERVED[len(ended) :]]
        ended += run_each([line.split() for line in rest], tmp_path, **settings)
    compare("exit-codes-served.txt", "\n".join(_told(line, each) for line, each in zip(SERVED, ended, strict=True)))


def _ids(listed: str) -> dict[str, str]:
    runs = json.loads(listed)["runs"]
    found = {run["status"]: run["run_id"] for run in runs}
    return {"DONE": found["SUCCEEDED"], "FAILED": found["FAILED"], "PENDING": found["PENDING"]}


def _told(line: str, ended: Ended) -> str:
    streams = [name for name, text in (("stdout", ended.out), ("stderr", ended.err)) if text]
    said = f"{ended.code}  {'+'.join(streams) or 'silent':<13}  semel {line}"
    return f"{said}\n{' ' * 18}{_shape_of(ended.out)}" if "--json" in line and ended.out else said


def _shape_of(text: str) -> str:
    """The shape of one JSON value, or of one in every line."""
    try:
        return _shape(json.loads(text))
    except ValueError:
        shapes = {_shape(json.loads(line)) for line in text.splitlines()}
        return f"in each line {' or '.join(sorted(shapes))}"


def _shape(value: Any, depth: int = 0) -> str:
    if isinstance(value, dict):
        parts = [key if depth > 1 else f"{key}{_inner(each, depth)}" for key, each in sorted(value.items())]
        return f"{{{', '.join(parts)}}}"
    if isinstance(value, list):
        return f"[{' or '.join(sorted({_shape(each, depth) for each in value}))}]"
    return type(value).__name__


def _inner(value: Any, depth: int) -> str:
    return f": {_shape(value, depth + 1)}" if isinstance(value, dict | list) and value else ""
