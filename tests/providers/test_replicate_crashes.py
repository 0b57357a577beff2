"""Servers that are killed, stopped and overtaken, and runs that are cancelled meanwhile: one prediction each time."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Connection

from semel import App
from semel.db.dialect import StatementContext
from semel.errors import LeaseLost
from semel.providers.replicate import Replicate
from semel.providers.replicate import store as rows
from semel.service import Settings
from semel.service.state import ServiceState
from support.programs import Program
from support.replicate import PACE, begun, ended, in_database, paced, row_of, serving, submit, take_lease
from support.replicate_server import TOKEN, ReplicateServer
from support.waiting import eventually

CHILD = """
from support.replicate import serve_here
serve_here(url, folder, cloud_url, tell)
"""


def has_ended(pid: int) -> bool:
    """Whether the process is dead; its parent may not have buried it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_server_that_is_killed_leaves_one_prediction_of_each_job_which_the_next_one_takes_up(
    app: App, tmp_path: Path
) -> None:
    """Killed before a call, between a call and our write, and while it follows: three jobs at once."""
    cloud = ReplicateServer()
    cloud.faults.update({"before": ["429"] * 100_000, "between": ["hold"]})
    with Program(CHILD, url=app.url, folder=str(tmp_path), cloud_url=cloud.url) as first:
        pid = first.hear()
        Replicate(PACE).install(ServiceState(app, Settings(replicate_token=TOKEN)))
        runs = {prompt: submit(app, prompt) for prompt in ("before", "between", "after")}
        made = {prompt: begun(cloud, prompt) for prompt in ("between", "after")}
        eventually(lambda: row_of(app, runs["after"])["remote_id"] == made["after"]["id"])
        eventually(lambda: row_of(app, runs["before"])["remote_status"] == "asked")
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: has_ended(pid))
    assert row_of(app, runs["between"])["remote_id"] is None
    assert cloud.of("before") == []
    cloud.faults.clear()
    cloud.go_on.set()
    for run in runs.values():
        take_lease(app, run)
    with serving(app, cloud):
        for prompt, run in runs.items():
            begun(cloud, prompt)
            eventually(lambda run=run: row_of(app, run)["remote_id"])
            cloud.finish(prompt, f"output of {prompt}")
        for prompt, run in runs.items():
            over = ended(app, run)
            assert (over.status, over.attempts) == ("SUCCEEDED", 2)
            assert app.result(run.id)["output"] == f"output of {prompt}"
            assert [each["id"] for each in cloud.of(prompt)] == [app.result(run.id)["prediction_id"]]
    cloud.close()
    assert {prompt: cloud.of(prompt) for prompt in made} == {prompt: [each] for prompt, each in made.items()}


def test_a_server_that_stops_in_good_order_gives_the_run_to_the_next_one_uncharged(
    app: App, cloud: ReplicateServer, prompt: str
) -> None:
    with serving(app, cloud):
        run = submit(app, prompt)
        begun(cloud, prompt)
        eventually(lambda: row_of(app, run)["remote_id"])
    assert app.get(run.id).status == "PENDING"
    cloud.finish(prompt)
    with serving(app, cloud):
        over = ended(app, run)
    assert (over.status, over.attempts, len(cloud.of(prompt))) == ("SUCCEEDED", 1, 1)


def test_an_answer_that_comes_while_the_server_stops_is_written_down(app: App, prompt: str) -> None:
    cloud = ReplicateServer()
    cloud.faults[prompt] = ["hold"]

    def answer_when_given_back() -> None:
        eventually(lambda: app.get(run.id).status == "PENDING")
        cloud.go_on.set()

    with serving(app, cloud):
        run = submit(app, prompt)
        prediction = begun(cloud, prompt)
        answering = threading.Thread(target=answer_when_given_back)
        answering.start()
    answering.join()
    cloud.close()
    assert row_of(app, run)["remote_id"] == prediction["id"]


def test_the_answer_to_an_attempt_that_lost_its_lease_still_counts(app: App, prompt: str) -> None:
    """Two attempts, one call each at the most: whoever learns the prediction's id, it is the run's."""
    cloud = ReplicateServer()
    cloud.faults[prompt] = ["hold"]
    cloud.secretive.add(prompt)
    slow = paced(settle=60.0)
    with serving(app, cloud, slow):
        run = submit(app, prompt)
        prediction = begun(cloud, prompt)
        take_lease(app, run)
        eventually(lambda: app.get(run.id).attempts == 2)
        cloud.go_on.set()
        eventually(lambda: row_of(app, run)["remote_id"] == prediction["id"])
        cloud.finish(prompt)
        assert ended(app, run).status == "SUCCEEDED"
    cloud.close()
    assert cloud.of(prompt) == [prediction]


def test_a_prediction_that_cannot_be_seen_at_once_is_waited_for(app: App, prompt: str) -> None:
    cloud = ReplicateServer()
    cloud.faults[prompt] = ["cut"]
    cloud.late.add(prompt)
    with serving(app, cloud, paced(settle=600.0), hooks=True):
        run = submit(app, prompt)
        eventually(lambda: cloud.calls.count("GET /v1/predictions") > 1, "a second look")
        cloud.unlisted.clear()
        eventually(lambda: row_of(app, run)["remote_id"])
        cloud.finish(prompt)
        assert ended(app, run).status == "SUCCEEDED"
    cloud.close()
    assert len(cloud.of(prompt)) == 1


def test_an_attempt_that_lost_its_lease_can_write_no_intent_and_no_status(
    app: App, cloud: ReplicateServer, prompt: str
) -> None:
    with serving(app, cloud):
        run = submit(app, prompt)
        begun(cloud, prompt)
        eventually(lambda: row_of(app, run)["remote_id"])
        before, fence = row_of(app, run), app.get(run.id).fence
        take_lease(app, run)
        eventually(lambda: app.get(run.id).attempts == 2)
        intent = rows.Intent(run_id=run.id, fence=fence, token="0" * 32, tenant="", user="ada", config="foxes")
        hold = rows.LeaseRef(run.id, fence, before["remote_token"])
        terms = StatementContext(time.time_ns() // 1000)
        late: list[Callable[[Connection], object]] = [
            lambda conn: rows.intend(conn, intent, terms),
            lambda conn: rows.set_status(conn, hold, "failed", terms),
            lambda conn: rows.give_up(conn, hold, before["remote_id"], terms),
            lambda conn: rows.cancel_requested(conn, hold, terms),
        ]
        for write in late:
            with pytest.raises(LeaseLost):
                in_database(app, write)
        assert row_of(app, run) == before
        cloud.finish(prompt)
        assert ended(app, run).status == "SUCCEEDED"


def test_a_zombie_that_made_a_second_prediction_ends_it_and_the_run_keeps_the_first(
    app: App, prompt: str, caplog: pytest.LogCaptureFixture
) -> None:
    cloud = ReplicateServer()
    cloud.faults[prompt] = ["hold"]
    cloud.late.add(prompt)  # nobody can see what the call makes, until much later
    with serving(app, cloud):
        run = submit(app, prompt)
        zombies = begun(cloud, prompt)
        cloud.late.clear()
        take_lease(app, run)
        eventually(lambda: row_of(app, run)["remote_id"], "a prediction of the second attempt")
        cloud.unlisted.clear()
        cloud.go_on.set()
        eventually(lambda: zombies["status"] == "canceled", "the end of the second prediction")
        ours = next(each for each in cloud.of(prompt) if each is not zombies)
        ours.update(status="succeeded", output="first")
        assert ended(app, run).status == "SUCCEEDED"
    cloud.close()
    assert app.result(run.id)["prediction_id"] == ours["id"]
    assert f"has a second prediction at Replicate, {zombies['id']}" in caplog.text


def test_a_run_that_is_cancelled_while_the_call_is_under_way_leaves_no_prediction_at_work(
    app: App, prompt: str
) -> None:
    cloud = ReplicateServer()
    cloud.faults[prompt] = ["hold"]
    with serving(app, cloud):
        run = submit(app, prompt)
        begun(cloud, prompt)
        app.cancel(run.id)
        cloud.go_on.set()
        assert ended(app, run).status == "CANCELLED"
    cloud.close()
    assert [each["status"] for each in cloud.of(prompt)] == ["canceled"]


def test_a_run_that_is_cancelled_before_replicate_was_reached_asks_for_nothing(app: App, prompt: str) -> None:
    cloud = ReplicateServer()
    with serving(app, cloud), cloud.away():
        run = submit(app, prompt)
        eventually(lambda: any("cannot be reached" in each.text for each in app.logs(run.id)))
        app.cancel(run.id)
        assert ended(app, run).status == "CANCELLED"
    cloud.close()
    assert cloud.predictions == {}
    assert row_of(app, run)["remote_status"] == "absent"


@pytest.mark.parametrize("known", [True, False], ids=["with its id", "with the intent alone"])
def test_a_run_that_is_cancelled_while_no_server_is_up_is_cancelled_at_replicate_later(
    app: App, cloud: ReplicateServer, prompt: str, known: bool
) -> None:
    if not known:
        cloud.faults[prompt] = ["cut"]
        cloud.secretive.add(prompt)
    with serving(app, cloud, paced(settle=60.0)):
        run = submit(app, prompt)
        begun(cloud, prompt)
        eventually(lambda: bool(row_of(app, run)["remote_id"]) == known)
    assert app.get(run.id).status == "PENDING"
    app.cancel(run.id)
    assert app.get(run.id).status == "CANCELLED"
    with serving(app, cloud):
        eventually(lambda: row_of(app, run)["remote_status"] == "canceled")
    assert [each["status"] for each in cloud.of(prompt)] == ["canceled"]
