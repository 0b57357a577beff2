"""Metrics of how readable the structure of the code is: `./dev house`. They are indicators; nothing fails by them."""

from __future__ import annotations

import ast
import asyncio
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import quantiles
from types import FrameType
from typing import Any, Self, TypeAlias

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
FIELD_WORDS = {"testing", "tracing", "batching", "templating", "streaming"}
"""Words that end in -ing and are established technical terms."""
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> dict[str, ast.Module]:
    """Every module of the package, parsed, by its dotted name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if "versions" not in path.parts:
            name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def lines(folder: str) -> int:
    """The number of lines in the Python files of a folder."""
    return sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))


def functions(tree: ast.Module) -> Iterator[Function]:
    """Every function and method."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def imports(name: str, tree: ast.Module, known: set[str]) -> set[str]:
    """The modules of the package that a module imports when it is loaded."""
    found: set[str] = set()
    for node in _at_load(tree.body):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names if each.name in known}
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            inner = {f"{node.module}.{each.name}" for each in node.names}
            found |= (inner & known) or {node.module}
    return found - {name}


def _at_load(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _at_load(node.body)


def longest_chain(graph: dict[str, set[str]]) -> int:
    """The number of modules in the longest chain of imports. A cycle counts once."""

    @cache
    def depth(name: str, above: frozenset[str] = frozenset()) -> int:
        return 1 + max((depth(each) for each in graph[name] if each not in above), default=0)

    sys.setrecursionlimit(10_000)
    return max(depth(name) for name in graph)


def forwards(function: Function) -> bool:
    """Whether a function only passes its own parameters to one call."""
    body = [node for node in function.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr) or function.decorator_list:
        return False
    call = body[0].value
    call = call.value if isinstance(call, ast.Await) else call
    if not isinstance(call, ast.Call):
        return False
    given = [*call.args, *(each.value for each in call.keywords)]
    own = {each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}
    return all(isinstance(each, ast.Name | ast.Starred | ast.Attribute) for each in given) and bool(
        own - {"self", "cls"}
    )


class CallPath:
    """Counts the functions of the package that are called in the block, and their files."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()

    def __enter__(self) -> Self:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event == "call" and str(SOURCE) in code.co_filename and not code.co_name.startswith("<"):
            self._seen.add((code.co_filename, code.co_qualname if hasattr(code, "co_qualname") else code.co_name))

    def __str__(self) -> str:
        return f"{len(self._seen)} / {len({file for file, _ in self._seen})}"


def guarded_call(url: str) -> str:
    """The functions and files on the path of ``once.call``."""
    from semel import Once

    once = Once(url, collect=False)
    once.call("warm", lambda: 1)
    with CallPath() as path:
        once.call("measured", lambda: 1)
    once.close()
    return str(path)


def leased_run(url: str) -> str:
    """The functions and files on the path of one async run, from its lease to its end."""
    from semel import App, Worker

    app = App(url)
    ended = asyncio.Event()

    @app.model("noop")
    async def noop(n: int) -> int:
        if n:
            ended.set()
        return n

    async def work() -> str:
        worker = Worker(app, processes=0)
        task = asyncio.create_task(worker.serve())
        await asyncio.to_thread(app.submit, "noop", {"n": 0})
        await asyncio.sleep(1)  # the worker's start is not measured
        with CallPath() as path:
            await asyncio.to_thread(app.submit, "noop", {"n": 1})  # in a thread, which is not profiled
            await ended.wait()
            await asyncio.sleep(0.5)  # until its end is stored
        worker.stop()
        await task
        return str(path)

    return asyncio.run(work())


def on_postgres(measure: Callable[[str], str]) -> str:
    """Measure on a private PostgreSQL server."""
    from semel.cli import main
    from support import servers

    with servers.postgres() as server:
        url = server.database()
        main(["migrate", "--db", url])
        return measure(url)


def main() -> None:
    """Print the table."""
    trees = modules()
    graph = {name: imports(name, tree, set(trees)) for name, tree in trees.items()}
    rooms = Counter(name.rpartition(".")[0] for name in trees)
    every = [node for tree in trees.values() for node in functions(tree)]
    sizes = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in every]
    classes: dict[str, int] = defaultdict(int)
    for tree in trees.values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] += 1
    stems = [name.rpartition(".")[2] for name in trees]
    gerunds = sorted({stem for stem in stems if re.search(r"(ing|ed)$", stem) and stem not in FIELD_WORDS})
    forwarders = sum(map(forwards, every))
    shared = sorted(name for name, number in classes.items() if number > 1)
    rows = {
        "source lines": f"{lines('src'):,}",
        "test lines": f"{lines('tests'):,}",
        "files in one folder": ", ".join(f"{room} {number}" for room, number in rooms.most_common(3)),
        "longest chain of imports": longest_chain(graph),
        "imports per module": f"{sum(map(len, graph.values())) / len(graph):.1f}",
        "functions that only forward a call": forwarders,
        "class names that mean two or more things": f"{len(shared)} ({', '.join(shared)})" if shared else 0,
        "modules named by a gerund": f"{len(gerunds)} ({', '.join(gerunds)})" if gerunds else 0,
        "function lines, p90 / longest": f"{quantiles(sizes, n=10)[-1]:.0f} / {max(sizes)}",
        "functions / files of once.call on PostgreSQL": on_postgres(guarded_call),
        "functions / files of an async run on PostgreSQL": on_postgres(leased_run),
    }
    width = max(map(len, rows))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows.items()))


if __name__ == "__main__":
    main()
