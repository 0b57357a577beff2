"""The message router of the examples, as its users run it: a process, its input, its output, its death."""

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from acceptance.router import exec_ack, exec_result

ROOT = Path(__file__).parents[2]
PATIENCE = 60


def started(folder: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "message_router"), *options],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def routed(folder: Path, messages: list[Any], *options: str) -> tuple[int, list[dict[str, Any]], list[str], str]:
    """The exit code, the effects, the other lines, and what it complained of."""
    router = started(folder, *options)
    out, complaints = router.communicate("".join(json.dumps(each) + "\n" for each in messages), PATIENCE)
    lines = out.splitlines()
    effects = [json.loads(line) for line in lines if line.startswith("{")]
    return router.returncode, effects, [line for line in lines if line and not line.startswith("{")], complaints


def named(effects: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    return Counter((each["effect"], each.get("usage_id") or each.get("assignment_id") or "") for each in effects)


EVERYTHING = Counter({("result", "a-1"): 1, ("usage", "usage-a-1"): 1, ("ack", "a-1"): 1})


def test_what_comes_again_is_skipped_in_this_process_and_in_the_next(tmp_path: Path) -> None:
    messages = [exec_result("a-1"), exec_ack("a-1")] * 5
    code, effects, metrics, _ = routed(tmp_path, messages, "--metrics")
    assert (code, named(effects)) == (0, EVERYTHING)
    assert 'router_idempotency_hit_total{key_type="assignment_id"} 4.0' in metrics
    assert 'router_idempotency_miss_total{key_type="usage_id",reason="absent"} 1.0' in metrics
    code, effects, metrics, _ = routed(tmp_path, messages, "--metrics")
    assert (code, effects) == (0, [])
    assert 'router_idempotency_hit_total{key_type="ack_id"} 5.0' in metrics


def test_after_the_ttl_a_message_is_new(tmp_path: Path) -> None:
    brief = ("--idempotency-ttl-seconds", "0.001")
    assert [named(routed(tmp_path, [exec_ack("a-1")], *brief)[1]) for _ in range(2)] == [{("ack", "a-1"): 1}] * 2


def test_a_message_that_fails_is_tried_again_and_left_unseen(tmp_path: Path) -> None:
    """This one lacks its provider: it is complained of, the others go on, and its repaired twin is handled."""
    broken = {name: value for name, value in exec_result("a-1").items() if name != "provider_id"}
    code, effects, _, complaints = routed(tmp_path, [broken, exec_ack("a-1")])
    assert (code, named(effects)) == (1, {("result", "a-1"): 3, ("ack", "a-1"): 1})
    assert "failed again and again" in complaints
    code, effects, _, _ = routed(tmp_path, [exec_result("a-1")])
    assert (code, named(effects)) == (0, {("result", "a-1"): 1, ("usage", "usage-a-1"): 1})


def test_a_router_that_is_killed_loses_and_repeats_nothing_that_it_had_done(tmp_path: Path) -> None:
    router = started(tmp_path, "--consumers", "1")
    assert router.stdin is not None
    assert router.stdout is not None
    router.stdin.write(json.dumps(exec_ack("a-1")) + "\n" + json.dumps(exec_ack("a-2")) + "\n")
    router.stdin.flush()
    said = [json.loads(router.stdout.readline()) for _ in range(2)]  # a-1 is marked before a-2 is begun
    router.send_signal(signal.SIGKILL)
    router.communicate()
    assert named(said) == {("ack", "a-1"): 1, ("ack", "a-2"): 1}
    _, effects, _, _ = routed(tmp_path, [exec_ack("a-1"), exec_ack("a-3")])
    assert named(effects) == {("ack", "a-3"): 1}


def test_a_store_that_cannot_be_reached_is_an_error_before_any_message(tmp_path: Path) -> None:
    code, effects, _, complaints = routed(tmp_path, [exec_ack("a-1")], "--store", "sqlite:///nowhere/keys.db")
    assert (code, effects) == (1, [])
    assert "StoreBroken" in complaints


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), "an hour"])
def test_a_ttl_that_is_none_is_refused_by_its_name(seconds: Any) -> None:
    from semel import InvalidRequest, Policy

    with pytest.raises(InvalidRequest, match="idempotency_ttl_seconds"):
        Policy.router(idempotency_ttl_seconds=seconds)
