"""Compares what users see with the golden files in ``data/``.

``SEMEL_GOLDEN=write ./dev test tests/golden`` writes the files anew. Review the difference as a change of the product.
"""

import difflib
import json
import os
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
SHOWN = 60
"""Lines of a difference that a failing test prints."""
HINT = "if users should see this change: SEMEL_GOLDEN=write ./dev test tests/golden"


def compare(name: str, found: str) -> None:
    """Fail with a short difference unless the golden file has this text; with SEMEL_GOLDEN=write, write the file."""
    found = found.rstrip("\n") + "\n"
    path = DATA / name
    if writing():
        DATA.mkdir(exist_ok=True)
        path.write_text(found, encoding="utf-8")
        return
    assert path.exists(), f"there is no golden file {name}; {HINT}"
    wanted = path.read_text(encoding="utf-8")
    if found != wanted:
        raise AssertionError(f"{name} differs; {HINT}\n{_difference(name, wanted, found)}")


def compare_json(name: str, found: Any) -> None:
    """As compare, of pretty JSON with sorted keys."""
    compare(name, pretty(found))


def pretty(value: Any) -> str:
    """The value as JSON that a line-by-line difference explains well."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)


def writing() -> bool:
    """Whether golden files are written instead of compared."""
    return os.environ.get("SEMEL_GOLDEN") == "write"


def _difference(name: str, wanted: str, found: str) -> str:
    lines = list(
        difflib.unified_diff(
            wanted.splitlines(), found.splitlines(), f"data/{name}", "what users see now", n=2, lineterm=""
        )
    )
    left = len(lines) - SHOWN
    return "\n".join([*lines[:SHOWN], *([f"... and {left} more lines"] if left > 0 else [])])
