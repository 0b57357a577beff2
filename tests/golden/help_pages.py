"""Reads help pages: the commands, their options and their arguments, whatever library prints the pages.

It understands the plain pages of argparse and of Click, and those that Rich draws in boxes. If a page is laid out in
another way, change this module and not the golden file.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

_BOX = re.compile(r"[│┃|]")
_FLAG = re.compile(r"--?[A-Za-z][\w-]*")
_CANDIDATE = re.compile(r"([a-z][a-z0-9-]*)(?:\s{2,}\S|$)")
_USAGE = re.compile(r"usage:\s*", re.IGNORECASE)
_TOKEN = re.compile(r"\([^()]*\)(?:\.\.\.)?|\[(?:[^\[\]]|\[[^\[\]]*\])*\](?:\.\.\.)?\w*|\{[^{}]*\}|\S+")


class Option(NamedTuple):
    """The flags of an option and its value: empty if it takes none, VALUE, [VALUE] if it may be left out, choices."""

    flags: tuple[str, ...]
    value: str

    def __str__(self) -> str:
        return f"{', '.join(self.flags)} {self.value}".rstrip()


def candidates(page: str) -> list[str]:
    """The words of a page that may name commands: what begins a line, and has its meaning beside it."""
    found = [_CANDIDATE.match(_unboxed(line).strip()) for line in page.splitlines() if line.strip()]
    return sorted({each[1] for each in found if each})


def usage(page: str) -> str:
    """The usage of a page on one line, without its first word."""
    text = "\n".join(_unboxed(line).rstrip() for line in page.splitlines())
    found = _USAGE.search(text)
    assert found, f"a page without usage: {page[:200]}"
    return " ".join(text[found.end() :].split("\n\n", 1)[0].split())


def arguments(page: str, command: str) -> list[str]:
    """The arguments besides options, in their order: NAME, [NAME], NAME ..., [NAME ...], or choices."""
    tokens = _TOKEN.findall(usage(page).removeprefix(command))
    found: list[str] = []
    takes_value = False
    for token in tokens:
        inner = token.strip("[]().")
        if token.startswith("-"):
            takes_value = True  # a required option; its value comes next
        elif inner.startswith("-") or inner.upper() in ("OPTIONS", "") or takes_value:
            takes_value = False
        else:
            found.append(_argument(token))
    return _joined(found)


def _argument(token: str) -> str:
    repeated = "..." in token
    optional = token.startswith("[")
    name = token.replace("...", "").strip("[] ")
    choices = re.search(r"\{([^{}]*)\}", name)
    name = _choices(choices[1]) if choices else name.upper()
    name = f"{name} ..." if repeated else name
    return f"[{name}]" if optional else name


def _joined(found: list[str]) -> list[str]:
    """``RUN [RUN ...]`` is ``RUN ...``; a command's ``VERB ...`` is left to the subcommands."""
    joined: list[str] = []
    for each in found:
        if (joined and each == f"[{joined[-1]} ...]") or (each == " ..." and joined):
            joined[-1] = f"{joined[-1]} ..."
        else:
            joined.append(each)
    return joined


def options(page: str) -> list[Option]:
    """The options that the page explains, sorted."""
    return sorted({option for line in page.splitlines() for option in _options_in(line)})


def _options_in(line: str) -> Iterator[Option]:
    boxed = bool(_BOX.match(line.strip()))
    cells = [cell for cell in re.split(r"\s{2,}", _unboxed(line).strip()) if cell not in ("", "*")]
    if not cells or not _FLAG.match(cells[0]):
        return
    flags: list[str] = []
    value = ""
    for cell in cells:
        rest = cell
        while found := _FLAG.match(rest):
            flags.append(found[0])
            rest = rest[found.end() :].lstrip(" ,/")
            if rest and not rest.startswith("-") and not boxed:  # argparse: the value of this flag, then the next
                word, _, rest = rest.partition(", -")
                value, rest = word, rest and f"-{rest}"
        if rest:
            if boxed and not value and _is_value(rest):
                value = rest
            break
        if not boxed:
            break
    kept = [flag for flag in flags if not flag.startswith("--no-")] or flags
    yield Option(tuple(kept), _value(value))
    yield from (Option((flag,), "") for flag in flags if flag not in kept)


def _is_value(cell: str) -> bool:
    return cell == cell.upper() or cell[0] in "[<{"


def _value(text: str) -> str:
    if not text:
        return ""
    choices = re.fullmatch(r"\{(.*)\}|\[(.*\|.*)\]", text)
    if choices:
        return _choices(choices[1] or choices[2])
    return "[VALUE]" if re.fullmatch(r"\[[^\[\]]*\]", text) else "VALUE"


def _choices(text: str) -> str:
    return "{" + ",".join(sorted(re.split(r"[,|]", text))) + "}"


def _unboxed(line: str) -> str:
    return re.sub(r"^(\s*)[│┃]|[│┃]\s*$", r"\1 ", line)
