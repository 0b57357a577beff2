"""B, beyond the documents, for runs: fences, slots that come back once, zombies' files, liveness, budgets, waiting."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from semel import App, InvalidRequest, Quota, QuotaExceeded
from semel.runs.execution import execute
from semel.runs.results import publish
from semel.runs.store import lease, transitions
from semel.runs.store.lease import Leased, LeaseRenewal
from semel.runs.types import Artifact
from semel.runs.worker.active_runs import ActiveRun
from support.databases import DATABASES as KINDS
from support.databases import Databases as Grounds
from support.runs_harness import ManualWorker as Hand
from support.runs_harness import RunsHarness as Workshop
from support.runs_harness import effects, touch
from support.waiting import eventually as until

MOMENT = 0.000001
LEASE = 60


@pytest.fixture(scope="module")
def grounds(request: pytest.FixtureRequest) -> Iterator[Grounds]:
    with ExitStack() as stack:
        yield Grounds(request, stack)


@pytest.fixture(params=KINDS)
def shop(request: pytest.FixtureRequest, grounds: Grounds, tmp_path: Path) -> Iterator[Workshop]:
    """An empty SQLite file, then an empty PostgreSQL database."""
    with grounds.empty(request.param) as ground, Workshop(ground.kind, ground.url, tmp_path) as shop:
        yield shop


@pytest.fixture
def app(shop: Workshop) -> App:
    """An app on the clock that the test moves."""
    return shop.timeless


@pytest.fixture
def hand(shop: Workshop) -> Hand:
    return shop.hand()


def taken_over(app: App, hand: Hand, shop: Workshop, model: str = "add") -> tuple[Leased, Leased]:
    """A run whose lease ended under one worker and was taken by the next: what each of them holds."""
    run = app.submit(model, {"a": 1}, user=42)
    zombie = hand.lease_this(run)
    shop.clock.advance(LEASE + MOMENT)
    heir = hand.lease_this(run)
    assert zombie is not None
    assert heir is not None
    return zombie, heir


# -- B1 ------------------------------------------------------------------------------------------------------------


def test_b1_every_lease_of_a_run_has_a_greater_fence_however_the_last_one_ended(
    app: App, hand: Hand, shop: Workshop
) -> None:
    run = app.submit("add", {"a": 1})
    fences = []
    for kind in ("retry", "snooze", "lost", "returned", "expired"):
        leased = hand.lease_this(run)
        assert leased is not None
        fences.append(leased.fence)
        if kind == "expired":
            shop.clock.advance(LEASE + MOMENT)
        elif kind == "returned":
            hand.end(leased, "lost", returned=True)
        else:
            hand.end(leased, kind)
    last = hand.lease_this(run)
    assert last is not None
    assert [*fences, last.fence] == sorted({*fences, last.fence})
    assert (last.fence, last.attempts) == (6, 4), "what was snoozed or given back costs a fence, and no attempt"


def test_b1_the_fence_is_handed_to_the_model(app: App, shop: Workshop) -> None:
    folder = shop.place("fences")
    run = app.submit("note", {"folder": folder})
    shop.hand(name="dead").lease_this(run)
    shop.clock.advance(LEASE + MOMENT)
    with shop.working(app, sweep_every=0.05):
        app.wait(run.id, timeout=60)
    assert app.result(run.id)["fence"] == 2
    assert [line[1] for line in effects(folder)] == ["2"]


def test_b1_every_write_of_a_passed_fence_changes_nothing(app: App, hand: Hand, shop: Workshop) -> None:
    """Renew, progress, result, artifact, cost: the zombie is told that it has lost, and the row stays as it was."""
    zombie, heir = taken_over(app, hand, shop)
    before = app.get(heir.id)
    assert (
        hand.do(
            hand.ledger.write_once(
                lease.renew,
                [LeaseRenewal(zombie.id, zombie.fence, 0.9, "from the grave")],
                hand.ledger.statement_context,
            )
        )
        == {}
    )
    assert hand.do(hand.ledger.read_once(lease.watch, [(zombie.id, zombie.fence)])) == {}
    for kind in ("succeeded", "retry", "fatal", "lost", "snooze", "cancelled"):
        artifacts = [Artifact("report.txt", "zombie", 1, "d")]
        assert not hand.end(zombie, kind, reason="from the grave", cost=99.0, artifacts=artifacts)
    assert not hand.end(zombie, "lost", returned=True)
    assert app.get(heir.id) == before
    assert hand.do(
        hand.ledger.write_once(
            lease.renew, [LeaseRenewal(heir.id, heir.fence, 0.5, "alive")], hand.ledger.statement_context
        )
    ) == {heir.id: False}
    assert hand.end(heir, result='"of the heir"')
    assert app.result(heir.id) == "of the heir"
    assert not hand.end(zombie, "fatal")


def test_b1_leases_are_judged_by_the_databases_clock(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose clock is a day ahead leases for a minute of PostgreSQL's time, and takes nobody's lease away.

    SQLite has no clock but the host's, or the injected one that all who share the file go by.
    """
    app = shop.app if shop.kind == "postgres" else shop.timeless
    run = app.submit("add", {"a": 1})
    leased = shop.hand(app, "punctual").lease()[0]
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 86400 * 10**9)
    early = shop.hand(app, "early")
    assert early.do(early.ledger.write(transitions.lose_expired, early.ledger.statement_context)) == []
    assert early.lease_this(run) is None
    assert early.do(
        early.ledger.write_once(lease.renew, [LeaseRenewal(leased.id, leased.fence)], early.ledger.statement_context)
    ) == {run.id: False}
    held = app.get(run.id)
    assert held.lease_until_us is not None
    assert held.heartbeat_us is not None
    assert held.lease_until_us - held.heartbeat_us == LEASE * 1e6
    clock = now // 1000 if shop.kind == "postgres" else shop.clock.us
    assert abs(held.heartbeat_us - clock) < 60e6


# -- B4 ------------------------------------------------------------------------------------------------------------


def test_b4_a_replay_costs_nothing(app: App, hand: Hand) -> None:
    """Even when the quota is used up, and whether the run is pending, running or over."""
    app.set_quota(42, Quota(max_concurrent=1, per_hour=1, cost_daily=5))
    run = app.submit("add", {"a": 1}, user=42, cost=5, idempotency_key="ci-42")
    for _ in range(3):
        assert app.submit("add", {"a": 1}, user=42, cost=5, idempotency_key="ci-42").id == run.id
    leased = hand.lease()[0]
    assert app.submit("add", {"a": 1}, user=42, idempotency_key="ci-42").replayed
    hand.end(leased)
    assert app.submit("add", {"a": 1}, user=42, idempotency_key="ci-42").replayed
    used = app.usage(42)
    assert (used.concurrent, used.last_hour, used.spent["daily"]) == (0, 1, 5)
    with pytest.raises(QuotaExceeded):
        app.submit("add", {"a": 2}, user=42)


ENDS = ("succeeded", "fatal", "cancelled", "attempts used up", "lost too often", "cancelled while pending")


@pytest.mark.parametrize("how", ENDS)
def test_b4_however_a_run_ends_its_slot_comes_back_exactly_once(app: App, hand: Hand, shop: Workshop, how: str) -> None:
    app.set_quota(42, Quota(max_concurrent=2))
    run, other = app.submit("add", {"a": 1}, user=42), app.submit("add", {"a": 2}, user=42, delay=9000)
    last = None
    if how == "cancelled while pending":
        app.cancel(run.id)
        app.cancel(run.id)
    for _ in range(3):
        if app.get(run.id).done:
            break
        assert app.usage(42).concurrent == 2
        with pytest.raises(QuotaExceeded):
            app.submit("add", {"a": 3}, user=42)
        last = hand.lease_this(run)
        assert last is not None
        if how == "lost too often":
            shop.clock.advance(LEASE + MOMENT)
            hand.do(hand.ledger.write(transitions.lose_expired, hand.ledger.statement_context))
        else:
            hand.end(last, {"attempts used up": "retry"}.get(how, how))
    assert app.get(run.id).done
    assert app.usage(42).concurrent == 1
    if last is not None:
        assert not hand.end(last, "fatal"), "a second end changes nothing"
        hand.do(hand.ledger.write(transitions.lose_expired, hand.ledger.statement_context))
    assert app.usage(42).concurrent == 1
    assert app.submit("add", {"a": 3}, user=42).status == "PENDING"
    assert (app.usage(42).concurrent, app.get(other.id).status) == (2, "PENDING")


def test_b4_a_zombie_gives_no_slot_back_that_its_heir_holds(app: App, hand: Hand, shop: Workshop) -> None:
    app.set_quota(42, Quota(max_concurrent=1))
    zombie, heir = taken_over(app, hand, shop)
    assert not hand.end(zombie, "fatal")
    assert app.usage(42).concurrent == 1
    assert hand.end(heir)
    assert app.usage(42).concurrent == 0


# -- B9 ------------------------------------------------------------------------------------------------------------


def test_b9_a_zombies_file_never_becomes_the_result(app: App, hand: Hand, shop: Workshop) -> None:
    """Two attempts write the same artifact and a large result; the zombie is last to write, and the heir's count."""
    folder = shop.place("files")
    for fence in (1, 2):
        touch(folder, f"open-{fence}")
    small = shop.open(clock=shop.clock, inline_result_bytes=50)
    run = small.submit("publish_file", {"folder": folder, "text": "by"})
    zombie = hand.lease_this(run)
    shop.clock.advance(LEASE + MOMENT)
    heir = hand.lease_this(run)
    assert zombie is not None
    assert heir is not None
    ends = {}
    for leased in (heir, zombie):
        held = ActiveRun(leased, small.registry["publish_file"], "w", time.monotonic())
        ends[leased.fence] = execute(held.attempt, held.model, held, small.results, small.limits)
    assert hand.end(heir, **_published(ends[2]))
    assert not hand.end(zombie, **_published(ends[1]))
    ended = app.get(run.id)
    assert small.result(run.id).startswith("by 2")
    assert b"".join(small.artifact(run.id, "report.txt")) == b"by 2"
    assert ended.result_ref is not None
    assert ended.result_ref.startswith(f"{run.id}/2/")
    assert [each.ref.split("/")[1] for each in ended.artifacts] == ["2"]


def test_b9_in_a_flat_folder_too_a_zombies_file_never_becomes_the_result(hand: Hand, shop: Workshop) -> None:
    """Neither before the heir's end is written, nor after it; and the heir may die before it gave its file the name."""
    folder = shop.folder / "flat"
    flat = shop.open(clock=shop.clock, artifacts=f"{folder.as_uri()}?layout=flat")
    run = flat.submit("add", {"a": 1})
    named = folder / f"{run.id}.json"
    zombie = hand.lease_this(run)
    shop.clock.advance(LEASE + MOMENT)
    heir = hand.lease_this(run)
    assert zombie is not None
    assert heir is not None
    ends = {}
    for leased in (heir, zombie):
        held = ActiveRun(leased, flat.registry["add"], "w", time.monotonic())
        kept = publish(flat.results, held.attempt, f"by {leased.fence}", {})
        ends[leased.fence] = _published(kept)
    assert not named.exists()
    assert not hand.end(zombie, **ends[1])
    assert hand.end(heir, **ends[2])
    assert not hand.end(zombie, **ends[1])
    assert not named.exists(), "the heir died here"
    assert flat.result(run.id) == "by 2"
    assert named.read_text() == '"by 2"'
    assert flat.get(run.id).result_ref == named.name


def _published(ended: object) -> dict[str, object]:
    names = ("result", "result_ref", "result_digest", "result_size", "artifacts")
    return {name: getattr(ended, name) for name in names}


def test_b9_files_of_an_attempt_that_failed_are_no_artifacts(shop: Workshop) -> None:
    @shop.app.model("writes_and_fails", isolation="thread", max_attempts=1)
    def writes_and_fails(ctx: object) -> None:
        ctx.artifact("report.txt").write_text("half")  # type: ignore[attr-defined]
        raise RuntimeError("after the file")

    run = shop.app.submit("writes_and_fails")
    with shop.working():
        ended = shop.app.wait(run.id, timeout=60)
    assert (ended.status, ended.artifacts) == ("FAILED", [])
    with pytest.raises(LookupError):
        shop.app.artifact(run.id, "report.txt")


# -- B12 -----------------------------------------------------------------------------------------------------------


def test_b12_the_heart_beats_while_a_model_holds_the_interpreters_lock(shop: Workshop) -> None:
    """For longer than two leases no line of Python runs in the child; another worker sweeps and finds nothing lost."""
    app = shop.open(models={"lease": 3})  # a busy machine may starve the parent for a second or two
    run = app.submit("hold_the_lock", {"seconds": 7.5})
    beats = set()
    with shop.working(app, sweep_every=0.1, processes=1), shop.working(shop.open(), sweep_every=0.1):
        while not (seen := app.get(run.id)).done:
            beats.add(seen.heartbeat_us)
            time.sleep(0.02)
    assert (seen.status, seen.attempts, seen.losts, seen.fence) == ("SUCCEEDED", 1, 0, 1)
    assert len(beats - {None}) >= 4


def test_b12_a_run_that_makes_no_progress_is_alive(app: App, hand: Hand, shop: Workshop) -> None:
    """Stalled is not dead: the lease goes on, and the progress says since when nothing came of it."""
    run = app.submit("add", {"a": 1})
    leased = hand.lease()[0]
    hand.do(
        hand.ledger.write_once(
            lease.renew, [LeaseRenewal(leased.id, leased.fence, 0.4, "fitting")], hand.ledger.statement_context
        )
    )
    for _ in range(10):
        shop.clock.advance(20)
        assert hand.do(
            hand.ledger.write_once(lease.renew, [LeaseRenewal(leased.id, leased.fence)], hand.ledger.statement_context)
        ) == {run.id: False}
        assert hand.do(hand.ledger.write(transitions.lose_expired, hand.ledger.statement_context)) == []
    seen = app.get(run.id)
    assert (seen.status, seen.progress, seen.progress_note) == ("RUNNING", 0.4, "fitting")
    assert seen.heartbeat_us == shop.clock.us


# -- B23 -----------------------------------------------------------------------------------------------------------


def test_b23_a_run_whose_progress_stands_still_is_stalled_since_it_last_moved(
    app: App, hand: Hand, shop: Workshop
) -> None:
    app.model("slow", stall_after=60, isolation="thread")(_nothing)
    run, other = app.submit("slow"), app.submit("add", {"a": 1})
    leased, plain = hand.lease_this(run), hand.lease_this(other)
    assert leased is not None
    assert plain is not None

    def beat(progress: float | None = None, note: str | None = None) -> int | None:
        """Twenty seconds later a heartbeat comes, perhaps with progress; since when the run is stalled then."""
        shop.clock.advance(20)
        beats = [LeaseRenewal(leased.id, leased.fence, progress, note), LeaseRenewal(plain.id, plain.fence)]
        assert set(hand.do(hand.ledger.write_once(lease.renew, beats, hand.ledger.statement_context))) == {
            run.id,
            other.id,
        }
        seen = app.get(run.id)
        stalled = [run.id] if seen.stalled_us is not None else []
        assert [each.id for each in app.runs(stalled=True).runs] == stalled
        assert app.backlog().stalled == len(stalled)
        assert hand.do(hand.ledger.write(transitions.lose_expired, hand.ledger.statement_context)) == [], (
            "stalled is not dead"
        )
        return seen.stalled_us

    began = shop.clock.us
    assert [beat(), beat(), beat(), beat()] == [None, None, began, began], "it never told of any progress"
    assert app.get(run.id).stalled_since is not None
    assert beat(0.4, "fitting") is None
    moved = shop.clock.us
    assert [beat(), beat(0.4, "fitting"), beat(0.4, "fitting")] == [None, None, moved], "to say the same is none"
    assert beat(0.4, "fitting, second round") is None
    assert [beat(), beat(), beat()] == [None, None, shop.clock.us - 60_000_000]
    assert app.get(other.id).stalled_us is None, "its model has no stall_after"


def test_b23_only_a_run_that_runs_is_stalled_and_an_attempt_begins_afresh(app: App, hand: Hand, shop: Workshop) -> None:
    app.model("slow", stall_after=30, isolation="thread")(_nothing)
    run = app.submit("slow")
    shop.clock.advance(1000)
    assert app.get(run.id).stalled_us is None
    for kind in ("retry", "succeeded"):
        leased = hand.lease_this(run)
        assert leased is not None
        assert app.get(run.id).stalled_us is None
        shop.clock.advance(40)
        hand.do(
            hand.ledger.write_once(lease.renew, [LeaseRenewal(leased.id, leased.fence)], hand.ledger.statement_context)
        )
        assert app.get(run.id).stalled_us == shop.clock.us - 40_000_000
        assert hand.end(leased, kind)  # type: ignore[arg-type]
        assert app.get(run.id).stalled_us is None
        assert app.runs(stalled=True).runs == []


@pytest.mark.parametrize("wrong", [0, 0.5, -1, "a", True])
def test_b23_stall_after_is_a_time_of_a_second_or_more(app: App, wrong: object) -> None:
    with pytest.raises(InvalidRequest, match="stall_after"):
        app.model("slow", stall_after=wrong)(_nothing)  # type: ignore[arg-type]


# -- B13 -----------------------------------------------------------------------------------------------------------


def test_b13_errors_and_lost_workers_have_budgets_of_their_own(app: App, hand: Hand) -> None:
    """Two errors and two lost workers leave one of each; both are attempts."""
    run = app.submit("add", {"a": 1})
    for kind in ("retry", "lost", "retry", "lost"):
        leased = hand.lease_this(run)
        assert leased is not None
        assert hand.end(leased, kind, reason=kind)
    seen = app.get(run.id)
    assert (seen.status, seen.attempts, seen.errors, seen.losts) == ("PENDING", 4, 2, 2)
    leased = hand.lease_this(run)
    assert leased is not None
    assert hand.end(leased)
    assert app.get(run.id).status == "SUCCEEDED"


@pytest.mark.parametrize(("kind", "spent"), [("retry", (3, 2)), ("lost", (2, 3))])
def test_b13_either_budget_used_up_is_the_end(app: App, hand: Hand, kind: str, spent: tuple[int, int]) -> None:
    run = app.submit("add", {"a": 1})
    for each in ("retry", "lost", "retry", "lost", kind):
        leased = hand.lease_this(run)
        assert leased is not None
        assert hand.end(leased, each, reason=f"by {each}")  # type: ignore[arg-type]
    ended = app.get(run.id)
    assert (ended.status, ended.errors, ended.losts, ended.last_error) == ("FAILED", *spent, f"by {kind}")
    assert hand.lease_this(run) is None


def test_b13_the_budgets_are_the_models(app: App, hand: Hand) -> None:
    app.model("once", max_attempts=1, max_lost=5, isolation="thread")(_nothing)
    app.model("fragile", max_attempts=5, max_lost=1, isolation="thread")(_nothing)
    ends = {("once", "retry"): "FAILED", ("once", "lost"): "PENDING", ("fragile", "lost"): "FAILED"}
    ends |= {("fragile", "retry"): "PENDING"}
    for (model, kind), status in ends.items():
        run = app.submit(model, dedupe=False)
        leased = hand.lease_this(run)
        assert leased is not None
        assert hand.end(leased, kind, reason="why")  # type: ignore[arg-type]
        assert app.get(run.id).status == status, (model, kind)


def _nothing() -> None: ...


# -- B14 -----------------------------------------------------------------------------------------------------------


def test_b14_every_pending_run_says_why_it_waits_its_place_and_since_when(app: App, hand: Hand, shop: Workshop) -> None:
    nobody = app.submit("add", {"a": 1})
    waiting = app.waiting(nobody.id)
    assert waiting is not None
    assert waiting.reason == "no live worker serves the queue 'default'"
    assert (waiting.place, waiting.since_us, waiting.workers) == (1, nobody.created_us, 0)
    later = app.submit("add", {"a": 2}, delay=100)
    waiting = app.waiting(later.id)
    assert waiting is not None
    assert (waiting.reason, waiting.place) == ("scheduled: it is due in 100 s", None)
    assert waiting.due_us == shop.clock.us + 100_000_000
    hand.end(hand.lease()[0], "retry", delay=5, reason="the sea is rough")
    shop.clock.advance(2)
    waiting = app.waiting(nobody.id)
    assert waiting is not None
    assert waiting.reason == "backing off for 3 s more after an error (1 of 3): the sea is rough"
    assert waiting.since_us == shop.clock.us - 2_000_000
    shop.clock.advance(3)
    hand.end(hand.lease()[0], "snooze", delay=45, reason="nothing to do yet")
    waiting = app.waiting(nobody.id)
    assert waiting is not None
    assert waiting.reason == "snoozed for 45 s more: nothing to do yet"


def test_b14_places_follow_priority_then_age_within_a_queue(app: App, shop: Workshop) -> None:
    low = app.submit("add", {"a": 1}, priority=-1)
    first = app.submit("add", {"a": 2})
    shop.clock.advance(1)
    second = app.submit("add", {"a": 3})
    urgent = app.submit("add", {"a": 4}, priority=5)
    elsewhere = app.submit("add", {"a": 5}, queue="other")
    later = app.submit("add", {"a": 6}, priority=9, delay=5)
    places = {}
    for run in (urgent, first, second, low, elsewhere, later):
        waiting = app.waiting(run.id)
        assert waiting is not None
        places[run.id] = waiting.place
    assert list(places.values()) == [1, 2, 3, 4, 1, None]


def test_b14_a_live_worker_changes_the_reason(shop: Workshop) -> None:
    """All slots are busy; it is next; nobody knows the model; it is not pending any more."""
    folder = shop.place("busy")
    strange = shop.open()

    @strange.model("strange", isolation="thread")
    def unknown() -> None: ...

    with shop.working(concurrency=1, threads=0):
        busy = shop.app.submit("await_politely", {"folder": folder})
        until(lambda: effects(folder))
        assert shop.app.waiting(busy.id) is None
        behind, last = (shop.app.submit("note", {"folder": folder, "number": number}) for number in (1, 2))
        assert _reason(shop.app, behind.id) == "all slots are busy (1 on 1 worker); it is next"
        assert _reason(shop.app, last.id) == "all slots are busy (1 on 1 worker); 1 run is ahead"
        run = strange.submit("strange")
        reason = _reason(shop.app, run.id)
        assert "knows the model 'strange'" in reason
        touch(folder)
        shop.app.wait(last.id, timeout=60)
        assert shop.app.waiting(last.id) is None
        assert shop.app.get(run.id).status == "PENDING"


def _reason(app: App, run_id: str) -> str:
    waiting = app.waiting(run_id)
    assert waiting is not None
    return waiting.reason


def test_b14_the_same_is_told_to_those_who_await(shop: Workshop) -> None:
    async def ask() -> str:
        run = await shop.app.aio.submit("add", {"a": 1})
        waiting = await shop.app.aio.waiting(run.id)
        await shop.app.aio.close()
        assert waiting is not None
        return waiting.reason

    assert asyncio.run(ask()) == "no live worker serves the queue 'default'"
