"""What the pages of runs are worked out with: differences of JSON, pictures of lives, texts that are cut."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from semel.dashboard.runs.detail import MAX_HTML, MAX_JSON, preview_json, truncate_head
from semel.dashboard.runs.timeline import LEFT, RIGHT, WIDTH, attempts_of, draw_timeline
from semel.runs.diff import MISSING, differences
from semel.runs.types import MICRO, Run, Step

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
STATUS = {"leased": "RUNNING", "cancel_requested": "RUNNING"}
ENDS = {"succeeded": "SUCCEEDED", "failed": "FAILED", "cancelled": "CANCELLED"}


def _run(*steps: str) -> tuple[Run, list[Step]]:
    """A run that has gone these steps, one in a second."""
    lived = [
        Step(n + 1, (n + 1) * MICRO, step, STATUS.get(step, ENDS.get(step, "PENDING")), 0, "w", None)  # type: ignore[arg-type]
        for n, step in enumerate(steps)
    ]
    last = lived[-1]
    over = last.status in ENDS.values()
    leases = steps.count("leased") - steps.count("returned") - steps.count("snoozed")
    known: dict[str, Any] = dict.fromkeys(Run.__struct_fields__)
    known |= {
        "id": "x",
        "status": last.status,
        "version": len(lived),
        "attempts": leases,
        "fence": steps.count("leased"),
        "created_us": MICRO,
    }
    known |= {"finished_us": last.at_us if over else None, "artifacts": [], "heartbeat_us": last.at_us}
    return Run(**known), lived


def _same(a: Any, b: Any) -> bool:
    """Whether two values are the same JSON; 1 and 1.0 are, 1 and true are not."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    return bool(a == b)


@given(JSON, JSON)
def test_values_differ_somewhere_exactly_if_they_are_not_the_same(a: Any, b: Any) -> None:
    found, more = differences(a, b, most=10_000)
    assert (found == []) == _same(a, b)
    assert not more
    assert len({each.path for each in found}) == len(found)
    back, _ = differences(b, a, most=10_000)
    assert sorted((each.path, each.b, each.a) for each in back if each.kind == "changed") == sorted(
        (each.path, each.a, each.b) for each in found if each.kind == "changed"
    )


def test_a_difference_names_its_path_and_says_on_which_side_something_is() -> None:
    a = {"x": {"y": [1, 2, 3]}, "odd name": 1, "only": True}
    b = {"x": {"y": [1, 5]}, "odd name": 1, "new": None}
    found, _ = differences(a, b)
    assert [(each.path, each.kind, each.a, each.b) for each in found] == [
        ("x.y[1]", "changed", "2", "5"),
        ("x.y[2]", "only in A", "3", None),
        ("only", "only in A", "true", None),
        ("new", "only in B", None, "null"),
    ]
    assert MISSING not in (each.a for each in found)


def test_values_that_are_nested_without_end_or_differ_everywhere_are_cut() -> None:
    deep: Any = 0
    for _ in range(5000):
        deep = [deep]
    found, _ = differences(deep, [1])
    assert len(found) == 1
    found, more = differences(list(range(1000)), list(range(1, 1001)))
    assert (len(found), more) == (200, True)


def test_steps_become_attempts_with_their_numbers_and_ends() -> None:
    run, steps = _run("created", "leased", "lost", "leased", "returned", "leased", "retried", "leased", "succeeded")
    found = attempts_of(steps, run)
    assert [(each.number, each.outcome) for each in found] == [
        (1, "lost"),
        (2, "returned"),
        (2, "retried"),
        (3, "succeeded"),
    ]
    assert [(each.waited_from, each.began, each.ended) for each in found][1] == (3 * MICRO, 4 * MICRO, 5 * MICRO)


def test_steps_that_are_known_only_in_part_keep_their_numbers() -> None:
    run, steps = _run("created", "leased", "retried", "leased", "retried", "leased", "failed")
    assert [each.number for each in attempts_of(steps[3:], run)] == [2, 3]
    assert [each.number for each in attempts_of([], run)] == [4]


@given(
    st.lists(st.sampled_from(["lost", "retried", "snoozed", "returned"]), max_size=30),
    st.sampled_from([None, "leased", "succeeded", "failed", "cancelled"]),
    st.integers(0, 10**15),
)
def test_a_picture_stays_within_its_frame_whatever_happened(middle: list[str], last: str | None, now: int) -> None:
    steps = ["created"]
    for end in middle:
        steps += ["leased", end]
    if last is not None:
        steps += ["leased"] if last == "leased" else ["leased", last]
    run, lived = _run(*steps)
    drawn = draw_timeline(run, lived, now)
    assert 1 <= len(drawn.lanes) <= 12
    assert 1 <= len(drawn.ticks) <= 7
    for lane in drawn.lanes:
        assert lane.outcome
        for bar in lane.bars:
            assert bar.width > 0
            assert bar.x >= LEFT
            assert bar.x + bar.width <= WIDTH - RIGHT + 0.2
        for mark in lane.marks:
            assert LEFT <= mark.x <= WIDTH - RIGHT
    for tick in drawn.ticks:
        assert LEFT <= tick.x <= WIDTH - RIGHT


def test_json_is_laid_out_while_there_is_room_and_else_left_to_a_download() -> None:
    assert preview_json('{"a":[1]}').text == '{\n  "a": [\n    1\n  ]\n}'
    assert preview_json(json.dumps(["<" * (MAX_HTML // 4)])).text is None  # each takes four letters in HTML
    large = preview_json(json.dumps("x" * MAX_JSON))
    assert (large.text, large.size) == (None, MAX_JSON + 2)


def test_of_a_long_text_the_end_is_kept() -> None:
    assert truncate_head("short") == "short"
    cut = truncate_head("x" * 100_000 + "the end", 1000)
    assert len(cut) <= 1000
    assert cut.endswith("the end")
