"""The examples of the docs type-check under ``mypy --strict`` as they stand: users copy them.

mypy takes seconds to start, so it checks as many pages at once as do not write files of the same name. It uses the
settings and the cache of ``./dev check``.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {str(page.relative_to(ROOT)): page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\w+\.py)\n")


def files_of(name: str) -> dict[str, str]:
    """The page as a module whose lines have the numbers of the page's, and the files that its examples write."""
    text = PAGES[name].read_text()
    files, lines = {}, [""] * (text.count("\n") + 1)
    for block in _BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        if file := _FILE.match(block[1]):
            files[file[1]] = "\n" * first + block[1]
        else:
            lines[first : first + block[1].count("\n")] = block[1].splitlines()
    module = re.sub(r"\W", "_", name.removesuffix(".md"))
    return {**files, f"docs_pages/{module}.py": "\n".join(lines)}


def groups() -> list[dict[str, str]]:
    """The files of all pages, in as few groups as there are files of the same name."""
    found: list[dict[str, str]] = []
    for name in PAGES:
        files = files_of(name)
        group = next((each for each in found if not each.keys() & files.keys()), None)
        if group is None:
            found.append(files)
        else:
            group.update(files)
    return found


@pytest.mark.parametrize("group", groups(), ids=lambda group: f"{len(group)} files")
def test_the_examples_type_check(group: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "docs_pages").mkdir()
    for name, text in group.items():
        (tmp_path / name).write_text(text)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--explicit-package-bases", *(tmp_path / name for name in group)],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
