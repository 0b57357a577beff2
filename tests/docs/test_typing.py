"""The examples of the docs type-check under ``mypy --strict`` as they stand, page by page: users copy them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {str(page.relative_to(ROOT)): page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
NOT_YET = {
    "README.md",
    *(f"docs/{name}.md" for name in ("client", "deploy", "guide", "how-it-works", "http", "messages", "metrics")),
    *(f"docs/{name}.md" for name in ("quotas", "runs", "testing-a-store")),
}
"""Pages whose examples have functions without annotations."""

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\w+\.py)\n")
STRICT = (
    *("--strict", "--config-file=", "--disable-error-code=import-untyped"),  # not every library has types
    *("--allow-redefinition-new", "--local-partial-types"),  # the examples of a page use the same names
)


@pytest.mark.parametrize("name", sorted(PAGES.keys() - NOT_YET))
def test_the_examples_of_the_page_type_check(name: str, tmp_path: Path) -> None:
    text = PAGES[name].read_text()
    lines = [""] * (text.count("\n") + 1)
    for block in _BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))  # so that an error names the line of the page
        if file := _FILE.match(block[1]):
            (tmp_path / file[1]).write_text("\n" * first + block[1])
        else:
            lines[first : first + block[1].count("\n")] = block[1].splitlines()
    (tmp_path / "page.py").write_text("\n".join(lines))
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *STRICT, f"--cache-dir={ROOT / '.mypy_cache' / 'docs'}", *tmp_path.glob("*.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
