"""The kit as a stranger meets it: by its page, by its public names, and without pytest."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import semel.testing
from semel._concurrency.sync import run_sync
from semel.errors import StoreBroken, StoreUnavailable
from semel.once.store import KeyRef
from semel.once.stores.memory import MemoryStore
from semel.testing import FaultyStore, SharedStoreSuite, StoreSuite
from semel.testing.harness import claim_request as ask
from semel.types import Granted

PAGE = Path(__file__).parents[2] / "docs" / "testing-a-store.md"
LOCK = "fcntl.flock(lock, fcntl.LOCK_EX)"
READ = "contents = self.read()"


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The page's store and its tests, in one file as the page says."""
    file = tmp_path / "test_filestore.py"
    file.write_text("\n\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)[:2]))
    return file


def run(file: Path, *options: str) -> dict[str, int]:
    """Run the file's tests as its author would; how many ended how."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", *options, str(file)]
    said = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, check=False).stdout
    found = re.findall(r"(\d+) (\w+)", said.strip().splitlines()[-1])
    return {word: int(number) for number, word in found if word != "deselected"}


def test_the_pages_store_keeps_every_rule(example: Path) -> None:
    assert run(example) == {"passed": len(rules_of(SharedStoreSuite))}


def test_without_its_lock_the_pages_store_is_caught_by_threads_and_by_processes(example: Path) -> None:
    """What only processes can break is noticed, too: eight of them, and no lock."""
    text = example.read_text()
    assert LOCK in text
    assert READ in text
    slowly = READ + "; time.sleep(0.001)"  # what needs the lock takes long enough to be met by others
    example.write_text(text.replace(LOCK, "pass").replace(READ, slowly))
    wanted = "of_64_callers_one_gets_each_of_many_keys or of_8_processes_one_gets_each_of_many_keys"
    assert run(example, "-k", wanted) == {"failed": 2}


def rules_of(suite: type[StoreSuite]) -> list[str]:
    return [name for name in dir(suite) if name.startswith("test_")]


def test_no_rule_hides_another() -> None:
    """The rules come from several classes: no two have the same name."""
    written = [name for kind in SharedStoreSuite.__mro__ for name in vars(kind) if name.startswith("test_")]
    assert sorted(written) == sorted(rules_of(SharedStoreSuite))


def test_every_rule_says_in_a_sentence_what_it_is_about() -> None:
    dumb = [name for name in rules_of(SharedStoreSuite) if not (getattr(SharedStoreSuite, name).__doc__ or "").strip()]
    assert dumb == []


def test_every_public_name_is_there() -> None:
    assert [name for name in semel.testing.__all__ if not getattr(semel.testing, name).__doc__] == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = semel.testing.nothing


def test_an_author_who_forgot_something_is_told() -> None:
    class Mine(StoreSuite):
        pass

    class Ours(SharedStoreSuite):
        pass

    with pytest.raises(NotImplementedError, match=r"Mine must say how to open its store: def open\(self, clock\)"):
        Mine().open(None)
    with pytest.raises(NotImplementedError, match=r"Ours must say how any process opens its store"):
        Ours().open(None)
    with pytest.raises(NotImplementedError, match=r"Ours must name a place without a store"):
        Ours().nowhere()


def test_pytest_is_not_imported_before_a_suite_is_wanted() -> None:
    said = python("import sys, semel; from semel.testing import FakeClock, FaultyStore; print(*sys.modules)")
    assert "semel.testing" in said.split()
    assert "pytest" not in said.split()


def test_without_pytest_a_suite_says_what_is_missing_and_the_rest_works() -> None:
    said = python(
        "import sys; sys.modules['pytest'] = None\n"
        "from semel.testing import FakeClock, FaultyStore\n"
        "try: from semel.testing import StoreSuite\n"
        "except ImportError as error: print(error)"
    )
    assert said == "semel.testing.StoreSuite runs in pytest, which is not installed: pip install pytest"


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_a_lost_request_changes_nothing_and_a_lost_reply_hides_what_changed() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner)
    store.lose_request("claim", 2)
    store.lose_reply("claim")
    for there in (None, None, "claimed"):
        with pytest.raises(StoreUnavailable, match="a fault was injected"):
            run_sync(store.claim([ask()]))
        (record,) = run_sync(inner.get([KeyRef("scope", "key")]))
        assert (record and record.state) == there
    assert store.calls == {"claim": 3}
    (verdict,) = run_sync(store.claim([ask("other")]))
    assert isinstance(verdict, Granted)


def test_a_store_that_is_away_fails_every_verb_until_it_is_back() -> None:
    store = FaultyStore(MemoryStore(), StoreBroken)
    store.away = True
    for verb in (store.open, store.stats, lambda: store.get([]), lambda: store.purge(1), lambda: store.claim([])):
        with pytest.raises(StoreBroken):
            run_sync(verb())
    store.away = False
    assert run_sync(store.purge(1)) == 0
    assert run_sync(store.stats()).live == 0
    run_sync(store.open())
    run_sync(store.close())
    assert store.calls == {"open": 2, "stats": 2, "get": 1, "purge": 2, "claim": 1}
