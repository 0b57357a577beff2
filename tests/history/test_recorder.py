"""The recorder: every process leaves whole lines, whenever it is killed, and the reader takes nothing for granted."""

from __future__ import annotations

import json
import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest

from semel.testing import FakeClock
from semel.testing.history import HistoryError, Operation, Recorder, check, read
from support.programs import Program

KEY = ("scope", "key")

SCRIBE = """
import os
from semel.testing.history import Recorder

recorder = Recorder(folder, "scribe")
recorder.begin("key", "get", ("scope", "key")).answer(status="absent")
recorder.begin("key", "claim", ("scope", "key"), attempt="a", lease_us=1, ttl_us=1)
tell(os.getpid())
hear()
"""


def test_a_killed_process_leaves_a_call_that_may_have_happened(tmp_path: Path) -> None:
    with Program(SCRIBE, folder=str(tmp_path)) as scribe:
        pid = scribe.hear()
        os.kill(pid, signal.SIGKILL)
    first, second = read(tmp_path).operations
    assert (first.verb, first.answer, first.process) == ("get", {"status": "absent"}, f"scribe-{pid}")
    assert (second.verb, second.answered, second.error) == ("claim", False, "")
    assert second.arguments == {"attempt": "a", "lease_us": 1, "ttl_us": 1}
    assert first.lines == (f"scribe-{pid}.jsonl:1", f"scribe-{pid}.jsonl:2")


def test_a_line_that_was_cut_off_was_no_call_yet(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.begin("key", "get", KEY).answer(status="absent")
    recorder.begin("key", "get", KEY)
    recorder.close()
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for length in range(whole.rindex(b"\n", 0, -1) + 1, len(whole)):
        file.write_bytes(whole[:length])
        assert [each.answered for each in read(tmp_path).operations] == [True]


def test_an_error_is_no_answer(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    with pytest.raises(ConnectionError), recorder.begin("key", "complete", KEY, fence=1):
        raise ConnectionError("reset")
    (operation,) = read(tmp_path).operations
    assert (operation.answered, operation.error) == (False, "ConnectionError: reset")


def test_an_answer_that_is_an_error_to_the_caller_is_an_answer(tmp_path: Path) -> None:
    pending = Recorder(tmp_path).begin("run", "submit", ("u",))
    pending.answer(run=None, refused=True)
    with pytest.raises(ValueError, match="refused"), pending:
        raise ValueError("refused")
    (operation,) = read(tmp_path).operations
    assert (operation.answered, operation.error) == (True, "")


def test_processes_have_files_of_their_own_and_one_clock(tmp_path: Path) -> None:
    """What one process did before another began comes before it, in microseconds of the same clock."""
    recorder = Recorder(tmp_path, "parent")
    recorder.begin("key", "get", KEY).answer(status="absent")
    child = os.fork()
    if child == 0:
        recorder.begin("key", "get", KEY).answer(status="absent")
        os._exit(0)
    os.waitpid(child, 0)
    recorder.begin("key", "get", KEY).answer(status="absent")
    operations = read(tmp_path).operations
    assert [each.process for each in operations] == [f"parent-{pid}" for pid in (os.getpid(), child, os.getpid())]
    assert all(one.ended < other.began for one, other in pairwise(operations))
    assert len(list(tmp_path.iterdir())) == 2


def test_times_are_those_of_the_stores_clock_if_a_test_replaces_it(tmp_path: Path) -> None:
    clock = FakeClock(1000)
    recorder = Recorder(tmp_path, clock=clock)
    pending = recorder.begin("key", "get", KEY)
    clock.advance(60)
    pending.answer(status="absent")
    (operation,) = read(tmp_path).operations
    assert (operation.began_us, operation.ended_us) == (1_000_000_000, 1_060_000_000)
    assert operation.ended - operation.began < 60e9


def test_the_slack_is_by_how_much_the_wall_clock_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path)
    recorder.begin("key", "get", KEY).answer(status="absent")
    assert read(tmp_path).slack_us < 1_000_000
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 3_600_000_000_000)
    recorder.begin("key", "get", KEY).answer(status="absent")
    assert 3_599_000_000 < read(tmp_path).slack_us < 3_601_000_000


def test_a_clock_that_a_test_sets_back_gives_slack_too(tmp_path: Path) -> None:
    """A store then shortens leases that would last too long."""
    clock = FakeClock(1000)
    recorder = Recorder(tmp_path, clock=clock)
    for seconds in (0, 60, -50, 10):
        clock.advance(seconds)
        recorder.begin("key", "get", KEY).answer(status="absent")
    assert 50_000_000 <= read(tmp_path).slack_us < 51_000_000


def change(folder: Path, line: int, **fields: object) -> None:
    (file,) = folder.glob("*.jsonl")
    lines = [json.loads(each) for each in file.read_text().splitlines()]
    lines[line] |= fields
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))


def test_two_machines_have_no_common_order(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.begin("key", "get", KEY)
    recorder.begin("key", "get", KEY)
    change(tmp_path, 1, machine="another")
    with pytest.raises(HistoryError, match="recorded on several machines"):
        read(tmp_path)


@pytest.mark.parametrize("fields", [{"id": "nobody"}, {"what": "nothing"}, {"at_ns": "now"}])
def test_a_line_that_makes_no_sense_is_told_with_its_place(tmp_path: Path, fields: dict[str, object]) -> None:
    recorder = Recorder(tmp_path, "odd")
    recorder.begin("key", "get", KEY).answer(status="absent")
    change(tmp_path, 1, **fields)
    with pytest.raises(HistoryError, match=rf"odd-{os.getpid()}.jsonl:2 is "):
        read(tmp_path)


def test_an_answer_is_given_once(tmp_path: Path) -> None:
    pending = Recorder(tmp_path, "odd").begin("key", "get", KEY)
    pending.answer(status="absent")
    pending.answer(status="claimed")
    with pytest.raises(HistoryError, match="has an answer already"):
        read(tmp_path)


def test_recorders_of_one_process_may_share_a_name(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path, tmp_path / "effects"):
        Recorder(folder, "same").begin("key", "get", KEY).answer(status="absent")
    assert len(read(tmp_path).operations) == 3


def test_a_call_that_is_there_twice_is_not_counted_once(tmp_path: Path) -> None:
    Recorder(tmp_path, "odd").begin("key", "get", KEY).answer(status="absent")
    (file,) = tmp_path.glob("*.jsonl")
    (tmp_path / "copy.jsonl").write_bytes(file.read_bytes())
    with pytest.raises(HistoryError, match=r"is a call that was recorded before, in copy\.jsonl:1"):
        read(tmp_path)


def test_an_empty_folder_is_no_clean_history(tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match=r"no file ends in \.jsonl"):
        read(tmp_path)


def test_a_full_disk_is_not_taken_for_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda _, data: len(data) - 1)
    with pytest.raises(HistoryError, match="is the disk full"):
        Recorder(tmp_path).begin("key", "get", KEY)


def test_effects_are_judged_with_the_rest(tmp_path: Path) -> None:
    """A recorder for effects only is an oracle of its own: here one effect too many."""
    recorder, effects = Recorder(tmp_path), Recorder(tmp_path / "effects")
    asked = {"attempt": "a", "lease_us": 60_000_000, "ttl_us": 60_000_000}
    recorder.begin("key", "claim", KEY, **asked).answer(verdict="granted", fence=1)
    effects.effect("key", KEY, 1)
    assert check(read(tmp_path)) == []
    effects.effect("key", KEY, 1)
    (violation,) = check(read(tmp_path))
    assert violation.rule == "effect-twice"
    assert [each.verb for each in violation.proof] == ["effect", "effect"]
    assert str(violation).count("recorded in process-") == 2
    assert isinstance(violation.proof[0], Operation)
