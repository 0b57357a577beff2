"""Every example of the README and of docs/ is run, page by page, from top to bottom, in an empty directory.

How an example is written, so that it is checked:

* The ``python`` blocks of a page share one namespace. What is not to be run is a ``text`` block; code for other
  libraries is a ``py`` block.
* A ``python`` block that begins with ``# name.py`` is that file, for others to import.
* ``value  # → 5`` compares the value's repr; ``print(value)  # → 5`` what is printed; ``…`` stands for anything.
* ``charge(order)  # raises KeyReused`` expects the error, ``# raises KeyReused: … other content`` its message, too.
* In ``sh`` blocks, ``semel …`` is run; ``pip install`` must name extras, and ``./dev`` commands, that exist. A worker
  is started, works until the end of the page, and must then stop in good order.
* While a page runs, the URLs in ``SERVERS``, spelt exactly so, are those of the tests' own servers.
"""

import ast
import asyncio
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import time
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from sqlalchemy import Engine, make_url

import semel
from semel import App, AsyncOnce, Context, IdempotentProcessor, JobStore, Once, Policy, Quota, Usage, Worker
from semel.cli import main
from semel.errors import SemelError
from semel.http.middleware import MiddlewareCore
from semel.http.options import MiddlewareOptions
from semel.http.refusals import REFUSALS
from semel.metrics.names import RUN_MEANINGS
from semel.runs.app import apps
from semel.runs.models.model import _OPTIONS as MODEL_OPTIONS
from semel.runs.store.transitions import END_STEPS
from semel.service.api import problems
from support.warm_python import WarmPython, run

ROOT = Path(__file__).parents[2]
PAGES = {str(page.relative_to(ROOT)): page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}

Fixture = Callable[[str], str]
SERVERS: dict[str, Callable[[Fixture], str]] = {
    "redis://localhost/0": lambda fixture: fixture("redis_url"),
    "redis+cluster://localhost:7000": lambda fixture: fixture("redis_cluster_url").replace("redis:", "redis+cluster:"),
    "postgresql://localhost/app?pool_mode=transaction": lambda fixture: _pooled(fixture("postgres_url")),
    "postgresql://localhost/app": lambda fixture: fixture("postgres_url"),
    "postgresql+psycopg://localhost/app": lambda fixture: fixture("postgres_url").replace(":", "+psycopg:", 1),
    "postgresql+asyncpg://localhost/app": lambda fixture: fixture("postgres_url").replace(":", "+asyncpg:", 1),
}


def _pooled(url: str) -> str:
    return make_url(url).update_query_dict({"pool_mode": "transaction"}).render_as_string(hide_password=False)


_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"#\s*(→|raises)\s+(.+)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FILE = re.compile(r"# (\w+\.py)\n")

WORKS = {"semel": "worker started on", "rq": "Listening on", "celery": " ready."}
"""What a worker says when it has begun."""
NOT_RUN = {"text", "py", "sql", "ini", "yaml"}
PATIENCE = 60.0


class Block(NamedTuple):
    """A fenced block; its code begins at ``line`` of the page."""

    language: str
    code: str
    line: int


class Mark(NamedTuple):
    """What a comment promises."""

    sign: str
    text: str

    def is_kept_by(self, found: str) -> bool:
        pattern = ".*".join(re.escape(part) for part in self.text.strip().split("…"))
        return re.fullmatch(pattern, found, re.DOTALL) is not None


class Marks(ast.NodeTransformer):
    """Makes checks of the marked statements of a piece of code, and notes which of them ran."""

    def __init__(self, code: str) -> None:
        tokens = tokenize.generate_tokens(io.StringIO(code).readline)
        comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
        self.all = {line: Mark(*found.groups()) for line, text in comments.items() if (found := _MARK.match(text))}
        self.ran: set[int] = set()

    @property
    def names(self) -> dict[str, Any]:
        return {"_check_shows": self._shows, "_check_prints": self._prints, "_check_raises": self._raises}

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        mark = self.all.get(node.end_lineno or 0)
        if mark is None:
            return node
        line = ast.Constant(node.end_lineno)
        checked: ast.stmt
        match mark.sign, node.value:
            case "raises", _:
                check = ast.Call(ast.Name("_check_raises", ast.Load()), [line], [])
                checked = ast.With([ast.withitem(check)], [node])
            case _, ast.Call(ast.Name("print"), arguments, []):
                checked = ast.Expr(ast.Call(ast.Name("_check_prints", ast.Load()), [line, *arguments], []))
            case _, value:
                checked = ast.Expr(ast.Call(ast.Name("_check_shows", ast.Load()), [line, value], []))
        return ast.fix_missing_locations(ast.copy_location(checked, node))

    def _shows(self, line: int, value: object) -> None:
        self._keep(line, repr(value))

    def _prints(self, line: int, *values: object) -> None:
        self._keep(line, " ".join(map(str, values)))

    @contextmanager
    def _raises(self, line: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 -- whichever it is, it is compared
            said = f": {error}" if ":" in self.all[line].text else ""
            self._keep(line, f"{type(error).__name__}{said}")
        else:
            pytest.fail(f"line {line}: nothing is raised, promised is {self.all[line].text}")

    def _keep(self, line: int, found: str) -> None:
        self.ran.add(line)
        assert self.all[line].is_kept_by(found), f"line {line}: promised {self.all[line].text!r}, found {found!r}"


def blocks_of(text: str) -> list[Block]:
    return [Block(found[1], found[2], text.count("\n", 0, found.start(2)) + 1) for found in _BLOCK.finditer(text)]


def run_python(block: Block, name: str, namespace: dict[str, Any]) -> None:
    code = "\n" * (block.line - 1) + block.code  # so that a traceback names the line of the page
    marks = Marks(code)
    namespace |= marks.names
    exec(compile(marks.visit(ast.parse(code, name)), name, "exec"), namespace)
    idle = sorted(marks.all.keys() - marks.ran)
    assert not idle, f"{name}: what the comments in lines {idle} promise is never run, or not a statement by itself"


def write_file(block: Block, name: str) -> None:
    """Such a block is not run here, so it may not promise anything."""
    assert not Marks(block.code).all, f"{name}, line {block.line}: nobody checks what a file promises"
    Path(block.code.split()[1]).write_text(block.code)


class Workers:
    """The workers that a page starts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[tuple[str, subprocess.Popen[bytes], Path]] = []

    def start(self, words: list[str], place: str) -> None:
        said = self._folder / f".worker-{len(self._started)}.log"
        with said.open("wb") as output:
            process = WarmPython(installed(words), stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        self._started.append((place, process, said))
        deadline = time.monotonic() + PATIENCE
        while WORKS[words[0]] not in said.read_text():
            assert process.poll() is None, f"{place}: it ended: {said.read_text()}"
            assert time.monotonic() < deadline, f"{place}: it does not begin: {said.read_text()}"
            time.sleep(0.02)  # another program, which only its output tells of

    def stop(self) -> None:
        for _, process, _ in self._started:
            process.terminate()
        for place, process, said in self._started:
            try:
                code = process.wait(PATIENCE)
            finally:
                process.kill()
            assert code == 0, f"{place}: it stopped with {code}: {said.read_text()}"


def installed(words: list[str]) -> list[str]:
    """A command, as Python finds it beside itself."""
    return [sys.executable, str(Path(sys.executable).with_name(words[0])), *words[1:]]


def run_shell(block: Block, name: str, workers: Workers) -> None:
    for number, line in enumerate(block.code.splitlines(), block.line):
        place = f"{name}, line {number}"
        match shlex.split(line, comments=True):
            case []:
                pass
            case ["semel" | "rq", "worker", *_] | ["celery", "-A", _, "worker", *_] as words:
                workers.start(words, place)
            case ["semel", *arguments]:
                check_command(line, arguments, place)
            case ["pip", "install", package]:
                extras = re.findall(r"[\w-]+", package.partition("[")[2])
                assert set(extras) <= declared_extras(), f"{place}: an extra that does not exist"
            case ["./dev", command, *_]:
                said = subprocess.run([ROOT / "dev", "help"], capture_output=True, text=True, check=True).stdout
                assert re.search(rf"^  {command}\b", said, re.MULTILINE), f"{place}: ./dev has no {command}"
            case words:
                pytest.fail(f"{place}: how should {words[0]!r} be checked?")


def check_command(line: str, arguments: list[str], place: str) -> None:
    finished = run(installed(["semel", *arguments]), timeout=PATIENCE)
    assert finished.returncode == 0, f"{place}: {finished.stderr}"
    if found := _MARK.search(line):
        assert Mark(*found.groups()).is_kept_by(finished.stdout.strip()), f"{place}: it printed {finished.stdout!r}"


def declared_extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


@contextmanager
def closed_at_the_end() -> Iterator[dict[str, Any]]:
    """A namespace; what a program's end would close is closed."""
    page = sys.modules["page"] = ModuleType("page")  # a module, so that frameworks find what it names by its name
    namespace = vars(page)
    yield namespace
    del sys.modules["page"]
    for value in namespace.values():
        if isinstance(value, IdempotentProcessor) and isinstance(getattr(value, "once", None), Once):
            value.once.close()
        elif isinstance(value, Once | JobStore):
            value.close()
        elif isinstance(value, AsyncOnce):
            asyncio.run(value.close())
        elif isinstance(value, Engine):
            value.dispose()


@pytest.fixture
def closed_doors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the end of a server's process would close is closed: the stores that middleware opened by a URL."""
    made: list[MiddlewareCore[Any]] = []
    make = MiddlewareCore.__init__

    def note(door: MiddlewareCore[Any], *given: Any) -> None:
        make(door, *given)
        made.append(door)

    monkeypatch.setattr(MiddlewareCore, "__init__", note)
    yield
    for door in made:
        if door.owned and isinstance(door.once, Once):
            door.once.close()
        elif door.owned:
            asyncio.run(door.once.close())


@pytest.mark.usefixtures("closed_doors")
@pytest.mark.parametrize("name", [name for name in PAGES if name != "docs/tutorial.md"])  # see test_tutorial
def test_every_example_of_the_page_runs_and_shows_what_it_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    text = PAGES[name].read_text()
    for url, server in SERVERS.items():
        if url in text:
            text = text.replace(url, server(request.getfixturevalue))
    monkeypatch.chdir(tmp_path)
    with closed_at_the_end() as namespace, files_and_workers(tmp_path, monkeypatch) as workers:
        for block in blocks_of(text):
            match block.language:
                case "python" if _FILE.match(block.code):
                    write_file(block, name)
                case "python":
                    run_python(block, name, namespace)
                case "sh":
                    run_shell(block, name, workers)
                case other:
                    assert other in {"text", "py", "sql", "ini", "yaml"}, (
                        f"{name}, line {block.line}: a block without a language"
                    )


@contextmanager
def files_and_workers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    """What the page writes can be imported, here and in processes; what it starts is stopped."""
    monkeypatch.syspath_prepend(folder)
    known = set(sys.modules)
    others = apps()
    workers = Workers(folder)
    try:
        yield workers
    finally:
        for module in [name for name in sys.modules if name not in known and (folder / f"{name}.py").exists()]:
            del sys.modules[module]
        for app in apps():
            if app not in others:
                app.close()
        workers.stop()


@pytest.mark.parametrize("name", PAGES)
def test_every_link_of_the_page_leads_somewhere(name: str) -> None:
    page = PAGES[name]
    for link in _LINK.findall(page.read_text()):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{name} links to {link}"
        if anchor:
            assert anchor in anchors_of(target.read_text()), f"{name} links to {link}"


def anchors_of(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", _BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


INTERNAL = {"after_fork", "engine", "ledger"}
"""Of an app, for semel's own parts."""

REFERENCE = (ROOT / "docs" / "reference.md").read_text()


def test_every_public_name_is_in_the_reference() -> None:
    missing = [name for name in semel.__all__ if not re.search(rf"`{name}\b", REFERENCE)]
    assert missing == []


def test_every_field_and_preset_of_a_policy_is_in_the_reference() -> None:
    presets = [name for name, value in vars(Policy).items() if isinstance(value, classmethod)]
    wanted = [f"`{field.name}`" for field in fields(Policy)] + [f"`Policy.{name}()`" for name in presets]
    assert [word for word in wanted if word not in REFERENCE] == []


def test_every_option_and_every_answer_of_the_http_door_is_on_its_page() -> None:
    page = (ROOT / "docs" / "http.md").read_text()
    wanted = [f"| `{option}` |" for option in ("once", *MiddlewareOptions.__annotations__)]
    wanted += [f"`{refusal.code}`" for refusal in REFUSALS.values()]
    assert [word for word in wanted if word not in page] == []


def codes_in_the_source() -> set[str]:
    """Every code that a response can have: the second argument of an ApiError, and those of the tables."""
    made = r'(?:ApiError|super\(\).__init__)\(\s*\d{3},\s*"([A-Z_]+)"'
    files = (ROOT / "src" / "semel").rglob("*.py")
    return {
        *(code for file in files for code in re.findall(made, file.read_text())),
        *(refusal.code for refusal in REFUSALS.values()),
        *(code for _, _, code in problems._KNOWN),
        *problems._BY_STATUS.values(),
        "INTERNAL_ERROR",
    }


def test_every_error_has_its_place_in_troubleshooting() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    codes = codes_in_the_source()
    assert len(codes) > 40
    assert {code for code in codes if code.lower() not in anchors_of(page)} == set()
    assert set(re.findall(r"^### ([A-Z_]+)$", page, re.MULTILINE)) == codes
    raised = {
        name for name, kind in vars(semel.errors).items() if inspect.isclass(kind) and issubclass(kind, SemelError)
    }
    assert raised - rows_of("troubleshooting.md", "## Exceptions") == {"SemelError"}


def parameters_of(function: Callable[..., object]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in {"self", "options"}]


def public(kind: type) -> list[str]:
    return [name for name in vars(kind) if not name.startswith("_")]


def rows_of(page: str, heading: str) -> set[str]:
    """What stands first in the rows of the table under a heading."""
    _, _, rest = (ROOT / "docs" / page).read_text().partition(f"\n{heading}\n")
    section = re.split(r"^#", rest, maxsplit=1, flags=re.MULTILINE)[0]
    return {name for row in re.findall(r"^\| (`.+?) \|", section, re.MULTILINE) for name in re.findall(r"`(.+?)`", row)}


OPTIONS = {
    "### Of a model": list(MODEL_OPTIONS),
    "### Of an app": parameters_of(App.__init__),
    "### Of a submission": parameters_of(App.submit),
    "### Of a worker": parameters_of(Worker.__init__),
    "## The context": [f"ctx.{name}" for name in public(Context)],
}


@pytest.mark.parametrize("heading", OPTIONS)
def test_every_option_of_a_run_has_its_row(heading: str) -> None:
    found = {name.partition("(")[0] for name in rows_of("runs.md", heading)}
    assert found == set(OPTIONS[heading])


def test_every_field_of_a_quota_and_of_its_use_has_its_row() -> None:
    assert rows_of("quotas.md", "## Limits") == set(Quota.__struct_fields__)
    assert rows_of("quotas.md", "## Usage") == set(Usage.__struct_fields__)


def test_every_step_of_a_run_has_its_row() -> None:
    assert rows_of("runs.md", "## The life of a run") == {
        "created",
        "uploaded",
        "leased",
        "cancel_requested",
        "succeeded",
        *END_STEPS.values(),
    }


def test_every_metric_of_runs_has_its_row() -> None:
    counted = {name if name.endswith("_seconds") else f"{name}_total" for name in RUN_MEANINGS}
    assert rows_of("metrics.md", "## Runs") >= counted


def test_every_option_of_the_worker_command_is_in_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["worker", "--help"])
    said = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert said <= {name.partition(" ")[0] for name in rows_of("deploy.md", "### The command")}


def signatures() -> Iterator[str]:
    """Every call that users make, without annotations."""
    for kind in (Once, IdempotentProcessor, App, Worker, JobStore):
        yield signature(kind.__name__, kind.__init__)
    yield signature("fingerprint", semel.fingerprint)
    for kind in (Once, App, JobStore):
        for name in public(kind):
            if inspect.isfunction(getattr(kind, name)) and name not in INTERNAL:
                yield signature(name, getattr(kind, name))


def signature(name: str, function: Callable[..., object]) -> str:
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "self"
    ]
    said = f"{name}{inspect.Signature(plain)}".replace("'", '"').replace("/, ", "")
    return re.sub(r"\.0(?=[,)])", "", said)


@pytest.mark.parametrize("call", list(signatures()))
def test_the_reference_gives_the_signature(call: str) -> None:
    assert f"`{call}`" in REFERENCE


def test_a_wrong_promise_is_found() -> None:
    """The checker itself: each of these pages is wrong in one way."""
    for code, complaint in (
        ("1 + 1  # → 3", "promised '3', found '2'"),
        ("print(1 + 1)  # → 3", "promised '3', found '2'"),
        ("len([])  # raises TypeError", "nothing is raised"),
        ("len(5)  # raises KeyError", "promised 'KeyError', found 'TypeError'"),
        ("len(5)  # raises TypeError: … of a text", "found"),
        ("if False:\n    len([])  # → 0", "never run"),
        ("x = 5  # → 5", "not a statement by itself"),
    ):
        with pytest.raises((AssertionError, pytest.fail.Exception), match=complaint):
            run_python(Block("python", code, 1), "page", {})


def test_a_worker_that_does_not_begin_is_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"it ended: semel: .*nowhere"):
        Workers(tmp_path).start(["semel", "worker", "nowhere:app"], "page")


def test_a_file_promises_nothing() -> None:
    with pytest.raises(AssertionError, match="nobody checks"):
        write_file(Block("python", "# some.py\n5  # → 5\n", 1), "page")


def test_what_runs_in_the_tests_is_what_the_page_shows() -> None:
    """A promise is checked in functions, in loops and after an await; the dots stand for anything."""
    code = dedent("""\
        import asyncio
        async def give(x): return x
        async def main():
            for word in ("ab", "ac"):
                await give(word)  # → 'a…'
                print(word, 5)  # → a… 5
            await give(len(5))  # raises TypeError: object of type 'int' …
        asyncio.run(main())
    """)
    namespace: dict[str, Any] = {}
    run_python(Block("python", code, 1), "page", namespace)
    assert "main" in namespace


def test_the_two_commands_of_the_readme_are_there_and_can_be_run() -> None:
    readme = PAGES["README.md"].read_text()
    for command in ("./dev up", "./dev test"):
        assert re.search(rf"^{re.escape(command)}\b", readme, re.MULTILINE)
    assert os.access(ROOT / "dev", os.X_OK)
