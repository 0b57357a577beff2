"""A process is killed between any two steps of a guarded call: the next caller sees what the policy promises."""

from collections.abc import Iterator
from itertools import count

import pytest

from semel import InProgress, NotDone, Once, OutcomeUnknown, Policy, current_claim
from semel.testing import FakeClock
from support import crash_child
from support.crash_child import (
    AFTER_CLAIM,
    AFTER_COMPLETE,
    BEFORE_CLAIM,
    BEFORE_COMPLETE,
    CLAIM_UNCOMMITTED,
    COMPLETE_UNCOMMITTED,
    INSIDE,
    LEASE,
    POINTS,
    SCOPE,
    START,
    TTL,
    Victim,
)
from support.databases import SHARED_KINDS, StoreUrls
from support.programs import PATIENCE, processes

RETAKE = Policy(lease=LEASE, ttl=TTL, in_flight="conflict")
UNKNOWN = RETAKE.but(on_crash="unknown")
names = count()


class Case:
    """A key of its own, its next callers, and the children that die on it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.clock = FakeClock(START)
        self.once = Once(url, clock=self.clock, collect=False)
        self.key = f"key {next(names)}"
        self.ran: list[int] = []

    def killed(self, point: str, policy: Policy, *, awaited: bool = False) -> int | None:
        """Kill a child when it has reached the point; the fence under which its function ran, if it did."""
        ours, theirs = processes.Pipe()
        child = processes.Process(
            target=crash_child.work_until_killed,
            args=(Victim(self.url, awaited, point, policy, self.key, self.clock.us / 1e6), theirs),
        )
        child.start()
        theirs.close()
        fence = None
        with ours:
            assert ours.poll(PATIENCE)
            while (said := ours.recv()) != point:
                assert isinstance(said, int), said
                fence = said
        child.kill()
        child.join()
        assert child.exitcode == -9
        child.close()
        return fence

    def work(self) -> dict[str, str]:
        self.ran.append(current_claim().fence)
        return {"by": "the next caller"}

    def call(self, policy: Policy) -> tuple[dict[str, str], bool]:
        result = self.once.call(self.key, self.work, scope=SCOPE, policy=policy)
        return result.value, result.replayed

    def fence(self) -> int:
        record = self.once.get(self.key, scope=SCOPE)
        assert record is not None
        return record.fence


@pytest.fixture
def case(request: pytest.FixtureRequest, urls: StoreUrls) -> Iterator[Case]:
    case = Case(urls[request.param])
    yield case
    case.once.close()


ON_EVERY_STORE = pytest.mark.parametrize("case", SHARED_KINDS, indirect=True)
BOTH_FORMS = pytest.mark.parametrize("awaited", [False, True], ids=["blocking", "async"])
BOTH_POLICIES = pytest.mark.parametrize("policy", [RETAKE, UNKNOWN], ids=["retake", "unknown"])


@ON_EVERY_STORE
@BOTH_FORMS
@BOTH_POLICIES
@pytest.mark.parametrize("point", [AFTER_CLAIM, INSIDE, BEFORE_COMPLETE])
def test_a_claim_without_an_outcome_is_in_flight_until_its_lease_ends(
    case: Case, awaited: bool, policy: Policy, point: str
) -> None:
    """Then, and not before, the next caller works under a higher fence, or learns that the outcome is unknown."""
    fence = case.killed(point, policy, awaited=awaited)
    assert (fence is None) == (point == AFTER_CLAIM)
    lost = case.fence()
    assert fence in (None, lost)

    case.clock.advance(LEASE - 1)
    with pytest.raises(InProgress) as refused:
        case.call(policy)
    assert refused.value.retry_after == 1

    case.clock.advance(1)
    if policy is UNKNOWN:
        for _ in range(2):
            with pytest.raises(OutcomeUnknown):
                case.call(policy)
        assert case.ran == []
        assert case.fence() == lost
    else:
        assert case.call(policy) == ({"by": "the next caller"}, False)
        assert case.call(policy) == ({"by": "the next caller"}, True)
        assert len(case.ran) == 1
        assert case.ran[0] > lost


@ON_EVERY_STORE
@BOTH_FORMS
@BOTH_POLICIES
def test_a_call_that_died_before_its_claim_left_nothing(case: Case, awaited: bool, policy: Policy) -> None:
    assert case.killed(BEFORE_CLAIM, policy, awaited=awaited) is None
    assert case.once.get(case.key, scope=SCOPE) is None
    assert case.call(policy) == ({"by": "the next caller"}, False)
    assert len(case.ran) == 1


@ON_EVERY_STORE
@BOTH_FORMS
@BOTH_POLICIES
def test_a_call_that_died_after_its_completion_is_replayed(case: Case, awaited: bool, policy: Policy) -> None:
    """The caller never heard that it succeeded, yet it did, and nobody does it again: not after the lease either."""
    assert case.killed(AFTER_COMPLETE, policy, awaited=awaited) is not None
    assert case.call(policy) == ({"by": "the child"}, True)
    case.clock.advance(LEASE + 1)
    assert case.call(policy) == ({"by": "the child"}, True)
    assert case.ran == []


@pytest.mark.parametrize("case", ["sqlite"], indirect=True)
@BOTH_FORMS
@pytest.mark.parametrize("point", [CLAIM_UNCOMMITTED, COMPLETE_UNCOMMITTED])
def test_what_a_file_was_not_told_to_commit_did_not_happen(case: Case, awaited: bool, point: str) -> None:
    """SQLite writes in transactions: killed just before the commit is killed before the write."""
    case.killed(point, RETAKE, awaited=awaited)
    if point == CLAIM_UNCOMMITTED:
        assert case.once.get(case.key, scope=SCOPE) is None
    else:
        with pytest.raises(InProgress):
            case.call(RETAKE)
        case.clock.advance(LEASE)
    assert case.call(RETAKE) == ({"by": "the next caller"}, False)


@ON_EVERY_STORE
def test_each_owner_that_dies_leaves_the_key_to_the_next_under_a_higher_fence(case: Case) -> None:
    fences = []
    for point in POINTS[1:4]:
        case.killed(point, RETAKE)
        fences.append(case.fence())
        case.clock.advance(LEASE)
    assert case.call(RETAKE) == ({"by": "the next caller"}, False)
    fences += case.ran
    assert fences == sorted(set(fences))


@ON_EVERY_STORE
def test_unknown_work_that_was_done_is_replayed_with_the_value_that_was_found(case: Case) -> None:
    case.killed(INSIDE, UNKNOWN)
    case.clock.advance(LEASE)
    case.once.resolve(case.key, scope=SCOPE, done=True, value={"by": "a person who looked"})
    assert case.call(UNKNOWN) == ({"by": "a person who looked"}, True)
    assert case.ran == []


@ON_EVERY_STORE
def test_unknown_work_that_was_not_done_is_done_by_the_next_caller(case: Case) -> None:
    lost = case.killed(BEFORE_COMPLETE, UNKNOWN)
    assert lost is not None
    case.clock.advance(LEASE)
    case.once.resolve(case.key, scope=SCOPE, done=False)
    assert case.call(UNKNOWN) == ({"by": "the next caller"}, False)
    assert len(case.ran) == 1
    assert case.ran[0] > lost


@ON_EVERY_STORE
def test_the_reconcile_hook_tells_what_became_of_the_lost_work(case: Case) -> None:
    """It is asked under a claim of its own, once; what it says is the outcome from then on."""
    asked: list[int] = []

    def look() -> dict[str, str]:
        asked.append(current_claim().fence)
        return {"by": "the hook"}

    guarded = case.once.guard(scope=SCOPE, key=lambda: case.key, fingerprint=False, reconcile=look, policy=UNKNOWN)(
        case.work
    )
    lost = case.killed(INSIDE, UNKNOWN)
    assert lost is not None
    with pytest.raises(InProgress):
        guarded()
    case.clock.advance(LEASE)
    result = guarded.call()
    assert (result.value, result.replayed) == ({"by": "the hook"}, True)
    assert guarded.call().value == {"by": "the hook"}
    assert case.ran == []
    assert len(asked) == 1
    assert asked[0] > lost


@ON_EVERY_STORE
def test_a_hook_that_says_not_done_lets_the_function_run(case: Case) -> None:
    def look() -> dict[str, str]:
        raise NotDone

    guarded = case.once.guard(scope=SCOPE, key=lambda: case.key, fingerprint=False, reconcile=look, policy=UNKNOWN)(
        case.work
    )
    case.killed(BEFORE_COMPLETE, UNKNOWN)
    case.clock.advance(LEASE)
    result = guarded.call()
    assert (result.value, result.replayed) == ({"by": "the next caller"}, False)
    assert case.ran == [result.fence]
    assert guarded.call().replayed


@ON_EVERY_STORE
def test_a_hook_that_fails_leaves_the_outcome_unknown(case: Case) -> None:
    failures = [ConnectionError("the bank does not answer")]

    def look() -> dict[str, str]:
        if failures:
            raise failures.pop()
        return {"by": "the hook, later"}

    guarded = case.once.guard(scope=SCOPE, key=lambda: case.key, fingerprint=False, reconcile=look, policy=UNKNOWN)(
        case.work
    )
    case.killed(INSIDE, UNKNOWN)
    case.clock.advance(LEASE)
    with pytest.raises(ConnectionError):
        guarded()
    case.clock.advance(LEASE)
    with pytest.raises(OutcomeUnknown):
        case.call(UNKNOWN)
    assert guarded() == {"by": "the hook, later"}
    assert case.ran == []
