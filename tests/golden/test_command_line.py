"""The command line: which commands there are, their options and arguments, and the help of each.

The structure may not change. The words of the help pages may: ``help.txt`` shows what they were, and only its list of
commands is compared.
"""

import re

import pytest

from golden.commands import run_each
from golden.comparing import DATA, compare, writing
from golden.help_pages import Option, arguments, candidates, options, usage

HEADING = "#### "


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Every command with its help page."""
    folder = tmp_path_factory.mktemp("help")
    found: dict[str, str] = {}
    level: list[tuple[str, ...]] = [()]
    while level:
        ended = run_each([[*path, "--help"] for path in level], folder)
        names = [" ".join(("semel", *path)) for path in level]
        here = {
            path: each.out
            for path, name, each in zip(level, names, ended, strict=True)
            if each.code == 0 and not each.err and f"{usage(each.out)} ".startswith(f"{name} ")
        }
        found |= {" ".join(("semel", *path)): page for path, page in here.items()}
        level = [(*path, word) for path, page in here.items() for word in candidates(page)]
    return found


def test_the_commands_their_options_and_their_arguments_stay(pages: dict[str, str]) -> None:
    lines: list[str] = []
    for command, page in sorted(pages.items()):
        subcommands = any(other.startswith(f"{command} ") for other in pages)
        words = ["COMMAND"] if subcommands else arguments(page, command)
        lines += [" ".join([command, *words]), *(f"  {option}" for option in options(page)), ""]
    compare("command-line.txt", "\n".join(lines))


def test_every_command_has_its_help(pages: dict[str, str]) -> None:
    path = DATA / "help.txt"
    if writing():
        text = "".join(f"{HEADING}{command}\n{page.rstrip()}\n\n" for command, page in sorted(pages.items()))
        path.write_text(text, encoding="utf-8")
    headings = re.findall(f"^{HEADING}(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(pages) == headings


BOXED = """
 Usage: semel submit [OPTIONS] MODEL [NAME=VALUE]...

╭─ Arguments ──────────────────────────────────────────────╮
│ *    model           MODEL            The model [required] │
│      parameters      [NAME=VALUE]...  Parameters           │
╰──────────────────────────────────────────────────────────╯
╭─ Options ────────────────────────────────────────────────╮
│ --queues    -q                NAMES          The queues    │
│ --dedupe        --no-dedupe                  Find it again │
│ --format                      [pretty|json]  How to log    │
│ --json                                       Print JSON    │
│ --help      -h                               Show this     │
╰──────────────────────────────────────────────────────────╯
"""


def test_pages_in_boxes_can_be_read_as_well() -> None:
    assert arguments(BOXED, "semel submit") == ["MODEL", "[NAME=VALUE ...]"]
    assert set(options(BOXED)) == {
        Option(("--queues", "-q"), "VALUE"),
        Option(("--dedupe",), ""),
        Option(("--no-dedupe",), ""),
        Option(("--format",), "{json,pretty}"),
        Option(("--json",), ""),
        Option(("--help", "-h"), ""),
    }
