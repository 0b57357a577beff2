"""A misspelt option is found by type checkers, before the program runs."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from semel.policy import Policy, PolicyOptions

ROOT = Path(__file__).parents[2]

PROGRAM = """\
from semel import App, AsyncOnce, Once, Policy
from semel.http.asgi import IdempotencyMiddleware

once, later, app = Once("memory://"), AsyncOnce("memory://"), App("sqlite://")

@once.guard(scope="prices", ttl=60, in_flight="conflict", on_crash="unknown", wait=None)
def price(order: int) -> float:
    return order / 3

@once.guard
def name(order: int) -> str:
    return str(order)

@later.guard(lease=5)
async def fetch(order: int) -> bytes:
    return bytes(order)

@once.consumer("ack_id", key=str, store_failure="open")
def on_ack(message: dict[str, str]) -> None: ...

a: float = price(3)
b: str = name.call(3).value
policy = Policy.ietf().but(ttl=5, tombstone="conflict")

async def fetched() -> bytes:
    return await fetch(3)

a = name(3)  # wrong
b = price(3)  # wrong
price("three")  # wrong
once.guard(scop="prices")  # wrong
once.guard(on_crash="unknwn")  # wrong
once.guard(ttl="60")  # wrong
once.consumer("ack_id", key=str, leese=5)  # wrong
once.call("key", list, in_flight="wiat")  # wrong
once.claim("key", on_crash="unknwn")  # wrong
once.claim("key", tll=5)  # wrong
later.guard(scop="prices")  # wrong
later.guard(on_error="kep")  # wrong
later.consumer("ack_id", key=str, leese=5)  # wrong
policy.but(tll=5)  # wrong
policy.but(dialect="strpe")  # wrong
Policy(on_crash="unknwn")  # wrong
Once("redis://localhost/0", prefx="shop")  # wrong
Once("memory://", policy="intake")  # wrong
IdempotencyMiddleware(print, "memory://", metods=["POST"])  # type: ignore[arg-type]  # wrong
app.model("forecast", max_attemps=3)  # wrong
app.model("forecast", isolation="fork")  # wrong
app.submit("forecast", {}, queu="gpu")  # wrong
"""
WRONG = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}


def test_the_options_are_the_fields_of_a_policy_or_none() -> None:
    kinds = get_type_hints(Policy)
    options = {name: kind | None for name, kind in kinds.items()}
    assert get_type_hints(PolicyOptions) == options
    assert [*PolicyOptions.__annotations__] == [field.name for field in fields(Policy)]


def test_mypy_finds_every_wrong_line_and_no_other(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(program)],  # in the checkout, for the cache of ./dev check
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert set(_lines(r"program\.py:(\d+): error", checked.stdout)) == WRONG, checked.stdout + checked.stderr


def _lines(pattern: str, text: str) -> list[int]:
    return [int(found) for found in re.findall(pattern, text)]


def test_pyright_finds_every_wrong_line_and_no_other(tmp_path: Path) -> None:
    known = os.environ.get("SEMEL_TEST_PYRIGHT") or shutil.which("pyright") or shutil.which("basedpyright")
    if known is None:
        pytest.skip("no pyright: install one, or name it with SEMEL_TEST_PYRIGHT")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard", "enableTypeIgnoreComments": false}')
    checked = subprocess.run(
        [known, "--pythonpath", sys.executable, "--project", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert set(_lines(r"program\.py:(\d+):\d+ - error", checked.stdout)) == WRONG, checked.stdout + checked.stderr
