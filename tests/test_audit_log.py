"""The chain of the audit log by itself: the documented bytes, and everything that is found when rows are altered."""

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.audit_log import FIELDS, START, canonical, digest_of, verify_log

DOCS = Path(__file__).parents[1] / "docs" / "audit.md"
ROW: dict[str, Any] = {
    "previous": START,
    "seq": 1,
    "at_us": 1_767_225_600_000_000,
    "tenant": "",
    "user": "zoë",
    "role": "admin",
    "user_tenant": "",
    "token": "3f9a1c5b7e2d4680",
    "address": "192.0.2.7",
    "entrance": "api",
    "action": "quota.removed",
    "target": "alice",
    "before": '{"per_day":10}',
    "after": None,
}
BYTES = (
    b"semel audit 1\n"
    b"64:0000000000000000000000000000000000000000000000000000000000000000,"
    b"1:1,16:1767225600000000,0:,4:zo\xc3\xab,5:admin,0:,16:3f9a1c5b7e2d4680,9:192.0.2.7,3:api,13:quota.removed,"
    b'5:alice,14:{"per_day":10},-,'
)
DIGEST = "9d9371fdbe8d14143959da5ca478f8a3c0d6fa8b97f0f68dcee206b7573e05c6"
Rows = list[dict[str, Any]]


def chain(tenant: str = "", count: int = 5) -> Rows:
    rows: Rows = []
    for seq in range(1, count + 1):
        row = {**ROW, "tenant": tenant, "seq": seq, "previous": rows[-1]["digest"] if rows else START}
        rows.append({**row, "digest": digest_of(row)})
    return rows


def test_the_bytes_and_the_digest_of_the_documented_example() -> None:
    assert canonical(ROW) == BYTES
    assert digest_of(ROW) == DIGEST
    assert DIGEST in DOCS.read_text(), "the document has the same example"


def test_whole_logs_hold_and_their_heads_are_those_of_the_last_rows() -> None:
    rows = [*chain(), *chain("acme", 3)]
    found = verify_log(rows)
    assert found == (8, {"": rows[4]["digest"], "acme": rows[7]["digest"]}, None)
    assert verify_log([]).problem is None


@pytest.mark.parametrize("name", [*FIELDS, "digest"])
def test_a_change_of_any_field_is_found_at_its_row(name: str) -> None:
    rows = chain()
    value = rows[2][name]
    rows[2][name] = value + 1 if isinstance(value, int) else f"{value or ''}x"
    found = verify_log(rows)
    assert found.problem is not None
    assert found.rows == 2


@pytest.mark.parametrize("name", [each for each in FIELDS if each not in ("seq", "previous", "tenant")])
def test_a_change_with_a_digest_made_to_fit_is_found_at_the_next_row(name: str) -> None:
    rows = chain()
    rows[2][name] = rows[2][name] + 1 if isinstance(rows[2][name], int) else "other"
    rows[2]["digest"] = digest_of(rows[2])
    found = verify_log(rows)
    assert found.rows == 3
    assert "row 4 does not follow" in str(found.problem)


def _delete(rows: Rows) -> None:
    del rows[2]


def _insert(rows: Rows) -> None:
    made = {**rows[2], "seq": 3, "action": "token.created"}
    rows.insert(2, {**made, "digest": digest_of(made)})


def _renumbered(rows: Rows) -> None:
    """A row is added, and all later ones get the next number, but not the digests."""
    _insert(rows)
    for number, row in enumerate(rows, 1):
        row["seq"] = number


def _swap(rows: Rows) -> None:
    rows[1], rows[2] = rows[2], rows[1]


def _swapped_contents(rows: Rows) -> None:
    for name in ("action", "user", "at_us", "digest"):
        rows[1][name], rows[2][name] = rows[2][name], rows[1][name]


def _first(rows: Rows) -> None:
    del rows[0]


@pytest.mark.parametrize("alter", [_delete, _insert, _renumbered, _swap, _swapped_contents, _first])
def test_rows_that_are_deleted_added_or_swapped_are_found(alter: Callable[[Rows], None]) -> None:
    rows = chain()
    rows[2]["user"] = "other"  # so that contents differ
    rows[2]["digest"] = digest_of(rows[2])
    for before, row in pairwise(rows[2:]):
        row["previous"] = before["digest"]
        row["digest"] = digest_of(row)
    assert verify_log(rows).problem is None
    alter(rows)
    assert verify_log(rows).problem is not None


def test_a_log_that_was_cut_off_is_found_by_a_head_that_was_kept() -> None:
    rows = [*chain(), *chain("acme")]
    heads = list(verify_log(rows).heads.values())
    longer = [*chain(count=7), *chain("acme")]
    assert verify_log(longer, heads).problem is None, "a log may grow"
    for cut in (rows[:-1], [*rows[:4], *rows[5:]], rows[:5], []):
        assert verify_log(cut).problem is None
        assert "no row has the kept head" in str(verify_log(cut, heads).problem)


texts = st.text(max_size=5) | st.sampled_from(["", "1:a,", "-,", "0:,"])


@given(st.lists(texts | st.none(), min_size=14, max_size=14), st.lists(texts | st.none(), min_size=14, max_size=14))
def test_two_different_rows_never_have_the_same_bytes(one: list[str | None], other: list[str | None]) -> None:
    same = canonical(dict(zip(FIELDS, one, strict=True))) == canonical(dict(zip(FIELDS, other, strict=True)))
    assert same == (one == other)


def test_verifying_changes_no_row() -> None:
    rows = chain()
    before = copy.deepcopy(rows)
    verify_log(rows)
    assert rows == before
