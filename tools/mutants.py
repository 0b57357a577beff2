"""Changes the code by machine, and lists the changes that no test notices: `./dev mutants [path …]`.

Each mutant is one change of one file: a comparison, a condition, a number, a return, a statement left out, or a word of
an SQL statement. The tests run in a copy of the checkout, so that the checkout is never changed. A first run without a
change records which tests execute which lines; a mutant is then tried with the tests that execute its line: those of
the file that mirrors the changed one first, then the fastest. Which mutants are tried is chosen by a seed, which is
printed, until the time is over.

Own code, because mutmut changes only the bodies of functions and cosmic-ray knows no SQL: half of what the stores
decide is in the statements at the top of their modules.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = Path("src/semel")
JUDGED = Path(__file__).with_name("mutants_judged.txt")
MOST_LEFT_OUT = 5
"""Tests that may fail without a change, as one does at times on a busy machine: mutants are tried without them."""
COPIED = ("src", "tests", "examples", "docs", "pyproject.toml", "README.md", "CHANGELOG.md")

_KIT, _BAD_INPUT = "tests/conformance/test_stores.py", "tests/once/test_bad_input.py"
_TRANSACTIONS, _WAITING = "tests/db/test_transactions.py", "tests/once/test_waiting.py"
_CLIENT, _PROCESSOR = "tests/once/test_client.py", "tests/acceptance/test_s4_processor.py"
_SILENCE = "tests/db/test_deadlines.py::test_a_listener_whose_server_fell_silent_says_so_and_listens_anew"
_AUDIT_LOG = "tests/acceptance/test_b27_audit_log.py"
_SEALS = ["tests/runs/store/test_seals.py", "tests/runs/store/test_partitions.py",
          "tests/acceptance/test_b11_history.py", "tests/service/api/test_proofs.py"]  # fmt: skip
_MEMORY = [f"{_KIT}::TestMemory", "tests/once/test_engine.py", "tests/once/test_maintenance.py",
           "tests/once/stores/test_memory.py", _CLIENT, "-k", "not redis and not postgres"]  # fmt: skip
TESTS = {
    "once": ["tests/once", _PROCESSOR, "--ignore=tests/once/stores",
             "--ignore=tests/once/test_crash.py", "-k", "not redis and not postgres and not processes and not extra"],
    "once/rules.py": ["tests/protocol", _KIT, "tests/once/test_engine.py", "-k", "protocol or Memory or test_engine"],
    "once/stats.py": ["tests/once/test_stats.py", "tests/metrics/test_metrics.py", "-k",
                      "not redis and not postgres and not process and not without and not imported"],
    "once/stores/__init__.py": [_BAD_INPUT, "tests/db/test_connections.py", "tests/once/test_guard.py",
                                "tests/once/stores/test_redis.py", "tests/once/stores/test_postgres.py"],
    "once/store.py": _MEMORY,
    "once/stores/memory.py": _MEMORY,
    "once/stores/postgres.py": [f"{_KIT}::TestPostgres", _TRANSACTIONS, _WAITING, "tests/once/stores/test_faults.py",
                                "tests/once/stores/test_postgres.py", _CLIENT, _SILENCE, "-k",
                                "not redis and not sqlite and not memory and not processes and not stopped"],
    "once/stores/redis.py": [f"{_KIT}::TestRedis", f"{_KIT}::TestAsyncRedis", f"{_KIT}::TestRedisCluster",
                             "tests/once/stores/test_redis.py", _CLIENT, _BAD_INPUT, "tests/db/test_connections.py",
                             "-k", "edis and not processes and not password"],
    "once/stores/sqlite.py": [f"{_KIT}::TestSqlite", _TRANSACTIONS, "tests/once/stores/test_together.py",
                              "tests/once/stores/test_sqlite.py", _CLIENT, _PROCESSOR, "-k",
                              "(Sqlite or sqlite or together or transactions) and not postgres and not processes"],
    "http": ["tests/http", "-k", "not test_servers and not test_faults and not test_bad_input"],
    "http/protocol.py": ["tests/http/test_protocol.py", "tests/http/test_bad_input.py"],
    "runs/store": ["tests/runs/store", "tests/runs/test_listing.py", "tests/runs/worker/test_clock_steps.py",
                   "tests/acceptance/test_b_runs.py", "tests/acceptance/test_b28_pauses.py",
                   "-k", "not quota and not anywhere and not b12 and not b9 and not rq and not command"],
    "runs/store/audit_log.py": ["tests/runs/store/test_audit_log.py", _AUDIT_LOG],
    "runs/store/digests.py": _SEALS,
    "runs/store/key_actions.py": ["tests/runs/store/test_key_actions.py", _AUDIT_LOG, "tests/service/api/test_admin.py",
                                  "tests/dashboard/test_keys.py", "-k", "key or commands"],
    "runs/store/manifests.py": ["tests/acceptance/test_b10_manifest.py", "tests/acceptance/test_b26_rerun.py",
                                "tests/service/api/test_manifests.py"],
    "runs/store/pauses.py": ["tests/acceptance/test_b28_pauses.py", "tests/runs/store/test_lease.py", _AUDIT_LOG, "-k",
                             "pause and not rq"],
    "runs/store/seals.py": _SEALS,
    "runs/store/submit.py": ["tests/runs/store/test_submit.py", "tests/runs/store/test_quotas.py",
                             "tests/runs/store/test_quota_slots.py", "tests/runs/store/test_quota_locks.py",
                             "tests/runs/test_dedupe.py",
                             "-k", "not b4 and not 200 and not share and not processes"],
    "runs/store/quotas.py": ["tests/runs/store/test_quotas.py", "tests/runs/store/test_quota_locks.py",
                             "tests/runs/store/test_quota_slots.py", "tests/runs/store/test_purge.py",
                             "tests/acceptance/test_s0_jobs.py", "tests/service/api/test_admin.py"],
}  # fmt: skip
"""The arguments of pytest for a file: those of the longest matching path."""

SWAPS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"), ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*"),
}  # fmt: skip
SQL = re.compile(r"\b(SELECT|INSERT|UPDATE|DELETE|WHERE|FROM)\b")
SQL_SWAPS = (
    (r" AND ", " OR "), (r"(?<![<>=]) < ", " <= "), (r" <= ", " < "), (r"(?<![<>=-]) > ", " >= "), (r" >= ", " > "),
    (r" <> ", " = "), (r"\bNOT ", ""), (r"\btrue\b", "false"), (r"\bfalse\b", "true"), (r" \+ ", " - "),
    (r" IS NULL", " IS NOT NULL"), (r" DESC\b", ""),
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change: the bytes from ``start`` to ``end`` of a file become ``new``."""

    path: Path
    line: int
    last: int
    start: int
    end: int
    new: str
    at_load: bool = False
    """Whether it is evaluated when the module is loaded, or once for a process, and not by the test that notices it."""
    uses: frozenset[int] = frozenset()
    """The lines that use what the changed statement of the module defines."""

    def applied(self, source: bytes) -> bytes:
        """The file with the change."""
        return source[: self.start] + self.new.encode() + source[self.end :]

    def shown(self, source: bytes) -> str:
        """The lines of the change, with the change marked as ``[-old-]{+new+}``, in one line."""
        begin = source.rfind(b"\n", 0, self.start) + 1
        over = source.find(b"\n", self.end)
        old = source[self.start : self.end].decode()
        before, after = source[begin : self.start].decode(), source[self.end : over].decode()
        return " ".join(f"{before}[-{old}-]{{+{self.new}+}}{after}".split())


class Mutator(ast.NodeVisitor):
    """Finds the mutants of a file."""

    def __init__(self, path: Path, source: bytes) -> None:
        self.found: list[Mutant] = []
        self._path = path
        self._source = source
        self._starts = [0, *(match.end() for match in re.finditer(rb"\n", source))]
        self._depth = 0
        self._uses: frozenset[int] = frozenset()

    def _span(self, node: ast.AST) -> tuple[int, int]:
        place: Any = node
        return (
            self._starts[place.lineno - 1] + place.col_offset,
            self._starts[place.end_lineno - 1] + place.end_col_offset,
        )

    def _add(self, node: ast.AST, span: tuple[int, int], new: str, *, at_load: bool = False) -> None:
        line, last = (self._source.count(b"\n", 0, each) + 1 for each in span)
        place: Any = node
        at_load = at_load or not self._depth
        self.found.append(Mutant(self._path, line, max(last, place.lineno), *span, new, at_load, self._uses))

    def visit_Module(self, node: ast.Module) -> None:
        """Each statement, together with the lines of functions that use what it defines."""
        references: dict[str, list[ast.stmt | int]] = {}
        for statement in node.body:
            for each in ast.walk(statement):
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load):
                    user = each.lineno if isinstance(statement, _DEFINITIONS) else statement
                    references.setdefault(each.id, []).append(user)
        for statement in node.body:
            self._uses = frozenset(_lines_that_use(statement, references))
            self.visit(statement)

    def _swap(self, node: ast.AST, left: ast.AST, right: ast.AST, operator: type[ast.AST]) -> None:
        """Change the operator between two operands."""
        if operator not in SWAPS:
            return
        old, new = SWAPS[operator]
        start, end = self._span(left)[1], self._span(right)[0]
        pattern = r"\s+".join(map(re.escape, old.split()))
        found = re.search(pattern.encode(), self._source[start:end])
        if found is not None:
            self._add(node, (start + found.start(), start + found.end()), new)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        self._depth += 1
        for each in node.body:
            self.visit(each)
        self._depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 -- ast's name

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Only the body: whether a struct is frozen is for mypy to check."""
        for each in node.body:
            self.visit(each)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """An assert tells reader and mypy an invariant."""

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self._negate(node.test)
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        if not isinstance(test, ast.Compare | ast.UnaryOp):  # those have mutants of their own
            start, end = self._span(test)
            self._add(test, (start, end), f"not ({self._source[start:end].decode()})")

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, right, operator in zip(operands, operands[1:], node.ops, strict=False):
            self._swap(node, left, right, type(operator))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._swap(node, left, right, type(node.op))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._swap(node, node.left, node.right, type(node.op))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start, _ = self._span(node)
            self._add(node, (start, start + len("not ")), "")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        plain = isinstance(node.value, ast.Constant) and node.value.value in (None, True, False)
        if node.value is not None and not plain:
            self._add(node, self._span(node), "return None")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring
        if self._depth:
            self._add(node, self._span(node), "pass")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add(node, self._span(node), "pass")  # its message is not changed

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._mutate_sql(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, self._span(node), str(not node.value))
        elif isinstance(node.value, int):
            self._add(node, self._span(node), str(node.value + 1))
        elif isinstance(node.value, str):
            self._mutate_sql(node)

    def _mutate_sql(self, node: ast.expr) -> None:
        start, end = self._span(node)
        text = self._source[start:end].decode()
        if not SQL.search(text):
            return
        for pattern, new in SQL_SWAPS:
            for found in re.finditer(pattern, text):
                if not _in_braces(text, found.start()):
                    at = start + len(text[: found.start()].encode())
                    self._add(node, (at, at + len(found.group().encode())), new, at_load=True)


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _lines_that_use(statement: ast.stmt, references: dict[str, list[ast.stmt | int]]) -> Iterator[int]:
    """The lines of functions that use what the statement defines, by itself or through other constants."""
    left, seen = [statement], {statement}
    while left:
        defined = left.pop()
        stored = (each for each in ast.walk(defined) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
        names = [each.id for each in stored]
        if isinstance(defined, ast.ClassDef):
            return  # whoever uses its objects
        if isinstance(defined, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [defined.name]
            yield from range(defined.lineno, (defined.end_lineno or defined.lineno) + 1)
        for user in (user for name in names for user in references.get(name, ())):
            if isinstance(user, int):
                yield user
            elif user not in seen:
                seen.add(user)
                left.append(user)


def _in_braces(text: str, place: int) -> bool:
    return text.count("{", 0, place) > text.count("}", 0, place)


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant of a file."""
    source = (ROOT / path).read_bytes()
    mutator = Mutator(path, source)
    mutator.visit(ast.parse(source))
    return mutator.found


@dataclass
class Baseline:
    """Which tests execute which lines of a file, and how many seconds each takes."""

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, set[int]] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)
    """What they import of others."""

    def tests_for(self, mutant: Mutant, most: float) -> list[str]:
        """The tests that try the mutant, of ``most`` seconds together."""
        chosen: list[str] = []
        total = 0.0
        for test in self.candidates(mutant):
            total += self.seconds[test]
            if total > most and chosen:
                break
            chosen.append(test)
        return chosen

    def candidates(self, mutant: Mutant) -> list[str]:
        """The tests that may notice the mutant: its file's own, then the fastest.

        Those that execute its line; for what is evaluated when the module is loaded, those that use it; or else all.
        """
        place = mutant.uses if mutant.at_load else set(range(mutant.line, mutant.last + 1))
        for lines in (place, mutant.uses):
            if found := [test for test, hit in self.lines.items() if hit & lines]:
                break
        else:
            found = [test for test, hit in self.lines.items() if hit] or list(self.lines)
        own = own_tests(mutant.path)
        return sorted(found, key=lambda test: (not test.startswith(own), self.seconds[test]))


def own_tests(path: Path) -> str:
    """The file of tests that mirrors a file of the package."""
    name = path.parent.name if path.stem == "__init__" else path.stem
    return (Path("tests") / path.parent.relative_to(SOURCE) / f"test_{name}.py").as_posix()


class Sandbox:
    """A copy of the checkout, with an interpreter that imports it instead of the checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, folder / name)
        venv.create(folder / "venv", symlinks=True)
        self.python = folder / "venv/bin/python"
        packages = next((folder / "venv").glob("lib/python*/site-packages"))
        (own,) = (ROOT / ".venv").glob("lib/python*/site-packages")
        paths = [folder / "src", own]  # the .pth of the checkout in ``own`` is not followed from here
        (packages / "sandbox.pth").write_text("".join(f"{path}\n" for path in paths))

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start this file in the sandbox."""
        return subprocess.Popen(  # noqa: S603 -- our own tests
            [self.python, __file__, *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT / "tools"), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def baselines(self, paths: list[Path], arguments: list[str]) -> dict[Path, Baseline]:
        """Run the tests that these files share, without a change."""
        report = self.folder / "baseline.json"
        files = os.pathsep.join(str(self.folder / path) for path in paths)
        with self.start("--serve", SEMEL_MUTANTS_FILES=files, SEMEL_MUTANTS_REPORT=str(report)) as server:
            code = _ask(server, [], ["-p", "mutants", f"--maxfail={MOST_LEFT_OUT + 1}", *arguments], 1e6)
        told = json.loads(report.read_text())
        failed = told["failed"]
        if code not in (0, 1) or len(failed) > MOST_LEFT_OUT:
            sys.exit(f"the tests of {paths[0]} fail without any change (exit code {code}): {' '.join(failed)}")
        for test in failed:
            print(f"left out, since it failed without any change: {test}", flush=True)
        return {
            path: Baseline(
                told["seconds"],
                {
                    test: set(hit.get(str(self.folder / path), ()))
                    for test, hit in told["lines"].items()
                    if test not in failed
                },
                told["modules"],
            )
            for path in paths
        }

    @contextmanager
    def server(self, baseline: Baseline, path: Path) -> Iterator[subprocess.Popen[str]]:
        """Starts pytest for each mutant, without importing again what is not ours."""
        for compiled in (self.folder / path).parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()  # a mutant of the same size and second would be taken for it
        with self.start("--serve", PYTHONDONTWRITEBYTECODE="1") as server:
            _ask(server, baseline.modules, ["--version"], 600)
            yield server

    def survives(self, server: subprocess.Popen[str], mutant: Mutant, tests: list[str], timeout: float) -> bool:
        """Whether all of these tests pass with the change. Few are tried first: many take pytest long to find."""
        file = self.folder / mutant.path
        source = file.read_bytes()
        names = self.folder / "tests.txt"
        own = [test for test in tests if test.startswith(own_tests(mutant.path))]
        file.write_bytes(mutant.applied(source))
        try:
            for some in (own, tests[len(own) :]):
                names.write_text("\n".join(some))
                if some and _ask(server, [], [f"@{names}"], timeout) != 0:
                    return False
            return True
        finally:
            file.write_bytes(source)


def _ask(server: subprocess.Popen[str], modules: list[str], arguments: list[str], timeout: float) -> int | None:
    """Run pytest in the server; returns its exit code, or None if it took too long."""
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps([modules, arguments, timeout]) + "\n")
    server.stdin.flush()
    code: int | None = json.loads(server.stdout.readline())
    return code


def serve() -> int:
    """For each request, import modules, and run pytest in a process that is forked from here."""
    import pytest

    for line in sys.stdin:
        modules, arguments, timeout = json.loads(line)
        for name in modules:
            with suppress(Exception):
                importlib.import_module(name)
        options = ["-q", "-x", "--tb=no", "--assert=plain", "-p", "no:cacheprovider", *arguments]
        pid = os.fork()
        if not pid:
            os.setsid()
            nowhere = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(nowhere, number)
            os._exit(int(pytest.main(options)))
        print(json.dumps(_waited(pid, timeout)), flush=True)
    return 0


def _waited(pid: int, timeout: float) -> int | None:
    """The exit code of a process, which leads a session of its own; what it leaves behind is ended."""
    ends = time.monotonic() + timeout
    done, status = os.waitpid(pid, os.WNOHANG)
    while not done and time.monotonic() < ends:
        time.sleep(0.02)  # there is no wait with a timeout
        done, status = os.waitpid(pid, os.WNOHANG)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not done:
        os.waitpid(pid, 0)
        return None
    return os.waitstatus_to_exitcode(status)


def tests_of(path: Path) -> list[str]:
    """The arguments of pytest for a file of the package."""
    name = path.relative_to(SOURCE).as_posix()
    matching = [prefix for prefix in TESTS if name == prefix or name.startswith(f"{prefix}/")]
    if not matching:
        sys.exit(f"no tests are known for {path}: name them with --tests, or add them to TESTS of tools/mutants.py")
    return TESTS[max(matching, key=len)]


def judged() -> dict[str, str]:
    """The survivors that were judged: what is shown of each, and why no test is to notice it."""
    if not JUDGED.exists():
        return {}
    lines = [line for line in JUDGED.read_text().splitlines() if line and not line.startswith("#")]
    return {change.strip(): why.strip() for change, _, why in (line.rpartition(" | ") for line in lines)}


@dataclass
class Result:
    """What became of the mutants that were tried."""

    killed: int = 0
    survivors: list[str] = field(default_factory=list)
    known: int = 0

    def __str__(self) -> str:
        tried = self.killed + len(self.survivors) + self.known
        rate = f"{100 * self.killed / tried:.0f} %" if tried else "none"
        return f"{tried} tried, {self.killed} killed ({rate}), {len(self.survivors)} survived, {self.known} judged"


def try_file(
    sandbox: Sandbox, path: Path, baseline: Baseline, options: argparse.Namespace, rng: random.Random
) -> Result:
    """Try mutants of a file until the time is over."""
    mutants = mutants_of(path)
    rng.shuffle(mutants)
    print(f"{path}: {len(mutants)} mutants, {len(baseline.lines)} tests", flush=True)
    result, known, source = Result(), judged(), (ROOT / path).read_bytes()
    name = path.relative_to(SOURCE).as_posix()
    changes = {mutant: f"{name}: {mutant.shown(source)}" for mutant in mutants}
    with sandbox.server(baseline, path) as server:
        ends = time.monotonic() + options.minutes * 60
        for mutant, shown in changes.items():
            if time.monotonic() > ends:
                break
            tests = baseline.tests_for(mutant, options.seconds)
            if not sandbox.survives(server, mutant, tests, options.seconds * 4 + 30):
                result.killed += 1
            elif shown in known:
                result.known += 1
            else:
                result.survivors.append(shown)
                count = f"{len(tests)} of {len(baseline.candidates(mutant))} tests"
                print(f"  survived {count}, line {mutant.line}: {shown}", flush=True)
    for gone in sorted(known.keys() - changes.values()):
        if gone.startswith(f"{name}: "):
            print(f"  judged, but there is no such change any more: {gone}", flush=True)
    print(f"{path}: {result}\n", flush=True)
    return result


def files_of(paths: list[str]) -> Iterator[Path]:
    """The Python files of these paths, which may leave out ``src/semel/``."""
    for name in paths:
        path = ROOT / name if (ROOT / name).exists() else ROOT / SOURCE / name
        if not path.exists():
            sys.exit(f"there is no {name}, nor {SOURCE / name}")
        found = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        yield from (each.relative_to(ROOT) for each in found)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./dev mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", default=["once", "http", "runs/store"], help="files or folders")
    parser.add_argument("--minutes", type=float, default=3.0, help="for the mutants of each file (default: 3)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of tests for each mutant (default: 20)")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6, help="chooses the mutants; it is printed")
    parser.add_argument("--tests", action="append", help="an argument of pytest, instead of the known tests")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Try the mutants of every file; returns 1 if one survived that was not judged."""
    from support import servers
    from support.memory import keep_files_in_memory

    options = parse(arguments)
    print(f"seed {options.seed}", flush=True)
    rng = random.Random(options.seed)  # noqa: S311 -- a seed that can be given again, not a secret
    with ExitStack() as stack:
        keep_files_in_memory()
        sandbox = Sandbox(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="semel-mutants-"))))
        if "SEMEL_TEST_POSTGRES_URL" not in os.environ:  # one server for all: to start one takes longer than most tests
            os.environ["SEMEL_TEST_POSTGRES_URL"] = stack.enter_context(servers.postgres()).database()
        groups: dict[tuple[str, ...], list[Path]] = {}
        for path in files_of(options.paths):
            if mutants_of(path):
                groups.setdefault(tuple(options.tests or tests_of(path)), []).append(path)
        results = [
            try_file(sandbox, path, baseline, options, rng)
            for tests, paths in groups.items()
            for path, baseline in sandbox.baselines(paths, list(tests)).items()
        ]
    total = Result(
        sum(each.killed for each in results),
        [shown for each in results for shown in each.survivors],
        sum(each.known for each in results),
    )
    print(f"in all: {total}")
    return 1 if total.survivors else 0


# -- the plugin of pytest for the first run --------------------------------------------------------------------------


class _Recorder:
    """Records which lines of some files each test executes, in all threads of the process."""

    def __init__(self, files: str, report: str) -> None:
        self._hit: dict[str, set[int]] = {file: set() for file in files.split(os.pathsep)}
        self._report = report
        self._rendered: set[Any] = set()
        self.told: dict[str, Any] = {"seconds": {}, "lines": {}, "failed": []}

    def start(self) -> None:
        self._note_statements()
        threading.settrace(self._on_call)
        sys.settrace(self._on_call)

    def _note_statements(self) -> None:
        """Note which statements are rendered, so that each test renders its own: else the first one would be the only
        test that executes the functions that word them.
        """
        from semel.db.dialect import Statement

        text = Statement.text

        def noted(statement: Any, conn: Any) -> Any:
            self._rendered.add(statement)
            return text(statement, conn)

        Statement.text = noted  # type: ignore[method-assign]

    def _on_call(self, frame: FrameType, event: str, argument: object) -> Any:  # as settrace calls it
        if frame.f_code.co_filename not in self._hit:
            return None
        return self._on_line(frame, event, argument)

    def _on_line(self, frame: FrameType, event: str, argument: object) -> Any:  # noqa: ARG002
        self._hit[frame.f_code.co_filename].add(frame.f_lineno)
        return self._on_line

    def pytest_runtest_logreport(self, report: Any) -> None:
        seconds = self.told["seconds"]
        seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.told["failed"].append(report.nodeid)
        if report.when == "teardown":
            self.told["lines"][report.nodeid] = {file: sorted(hit) for file, hit in self._hit.items() if hit}
            for hit in self._hit.values():
                hit.clear()
            for statement in list(self._rendered):  # other threads render, too
                statement._texts.clear()

    def pytest_sessionfinish(self) -> None:
        sys.settrace(None)
        foreign = [name for name, module in sys.modules.items() if "site-packages" in (_file_of(module) or "")]
        Path(self._report).write_text(json.dumps({**self.told, "modules": foreign}))


def _file_of(module: object) -> str | None:
    return getattr(module, "__file__", None)


def pytest_configure(config: Any) -> None:
    """As pytest calls a plugin."""
    recorder = _Recorder(os.environ["SEMEL_MUTANTS_FILES"], os.environ["SEMEL_MUTANTS_REPORT"])
    config.pluginmanager.register(recorder)
    recorder.start()


if __name__ == "__main__":
    sys.exit(serve() if sys.argv[1:] == ["--serve"] else main(sys.argv[1:]))
