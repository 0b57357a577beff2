"""`./dev mutants` finds the changes that matter, and each of them is still Python."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "tools" / "mutants.py"

SOURCE = '''
"""A docstring: 1 < 2."""
QUERY = "SELECT 1 FROM runs WHERE a = {a < 1} AND b < 2"
LIMIT = 3

def admit(counts: dict[str, int], most: int | None = None) -> bool:
    lock(counts)
    if not (most is None or counts["ä"] + 1 <= most):
        raise ValueError("2 > 1")
    return counts["ä"] > 0 and bool(most)
'''


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutants", module)
    spec.loader.exec_module(module)
    return module


def test_each_change_is_found_once_and_is_python(mutants: ModuleType) -> None:
    source = SOURCE.encode()
    mutator = mutants.Mutator(Path("example.py"), source)
    mutator.visit(ast.parse(source))
    for each in mutator.found:
        assert ast.dump(ast.parse(each.applied(source))) != ast.dump(ast.parse(source))
    shown = [(each.line, source[each.start : each.end].decode(), each.new) for each in mutator.found]
    assert sorted(shown) == sorted(
        [
            (3, " AND ", " OR "),
            (3, " < ", " <= "),
            (4, "3", "4"),
            (7, "lock(counts)", "pass"),
            (8, "not ", ""),
            (8, "is", "is not"),
            (8, "or", "and"),
            (8, "+", "-"),
            (8, "1", "2"),
            (8, "<=", "<"),
            (9, 'raise ValueError("2 > 1")', "pass"),
            (10, 'return counts["ä"] > 0 and bool(most)', "return None"),
            (10, ">", ">="),
            (10, "0", "1"),
            (10, "and", "or"),
        ]
    )


def test_a_mutant_is_tried_with_the_tests_that_execute_its_line_the_files_own_first_then_the_fastest(
    mutants: ModuleType,
) -> None:
    own = "tests/once/test_rules.py::test_judge"
    lines = {"slow": {7}, "quick": {7, 8}, "elsewhere": {10}, "none": set[int](), own: {7}}
    baseline = mutants.Baseline({"slow": 9.0, "quick": 0.1, "elsewhere": 1.0, "none": 0.0, own: 3.0}, lines)
    mutant = mutants.Mutant(Path("src/semel/once/rules.py"), 7, 7, 0, 0, "")
    at_load = mutants.Mutant(Path("src/semel/once/rules.py"), 3, 3, 0, 0, "", at_load=True)
    assert baseline.tests_for(mutant, 20) == [own, "quick", "slow"]
    assert baseline.tests_for(mutant, 5) == [own, "quick"]
    assert baseline.tests_for(at_load, 20) == [own, "quick", "elsewhere", "slow"]
    executed_by_none = mutants.Mutant(Path("src/semel/once/rules.py"), 99, 99, 0, 0, "")
    assert baseline.tests_for(executed_by_none, 20) == [own, "quick", "elsewhere", "slow"]
    used = mutants.Mutant(Path("src/semel/once/rules.py"), 7, 7, 0, 0, "", at_load=True, uses=frozenset({8, 10}))
    assert baseline.tests_for(used, 20) == ["quick", "elsewhere"]


def test_the_tests_of_a_file_are_where_the_file_is(mutants: ModuleType) -> None:
    assert mutants.own_tests(Path("src/semel/runs/store/lease.py")) == "tests/runs/store/test_lease.py"
    assert mutants.own_tests(Path("src/semel/runs/store/__init__.py")) == "tests/runs/store/test_store.py"


def test_who_uses_a_constant_is_found_through_other_constants_and_functions(mutants: ModuleType) -> None:
    source = b"""
LIMIT = 3
def double(number):
    return number * 2
LIMITS = double(LIMIT), 5
def admit(number):
    return number in LIMITS
"""
    mutator = mutants.Mutator(Path("example.py"), source)
    mutator.visit(ast.parse(source))
    uses = {each.line: sorted(each.uses) for each in mutator.found}
    assert uses == {2: [7], 4: [3, 4, 7], 5: [7], 7: [6, 7]}


def test_every_file_of_tests_that_is_named_is_there(mutants: ModuleType) -> None:
    named = {each.removeprefix("--ignore=").partition("::")[0] for tests in mutants.TESTS.values() for each in tests}
    assert not [each for each in sorted(named) if each.startswith("tests/") and not (mutants.ROOT / each).exists()]
    assert all((mutants.ROOT / mutants.SOURCE / path).exists() for path in mutants.TESTS)


def test_a_change_is_tried_in_a_copy_of_the_checkout(tmp_path: Path) -> None:
    """Nothing else executes all of it. It needs no server: these tests have none."""
    done = subprocess.run(
        [sys.executable, FILE, "http/refusals.py", "--tests=tests/http/test_refusals.py", "--minutes=0.01"],
        env={**os.environ, "PYTHONPATH": str(FILE.parents[1] / "tests"), "SEMEL_TEST_POSTGRES_URL": "none"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search(r"^in all: [1-9]\d* tried", done.stdout, re.MULTILINE), done.stdout + done.stderr
    assert "left out" not in done.stdout
