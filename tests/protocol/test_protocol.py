"""The protocol of claims and of runs keeps its promises in every interleaving; and every broken rule is found.

``./dev test tests/protocol -n 0 -s`` prints how many states were visited, and the shortest trace of each broken rule.
``SEMEL_PROTOCOL=full`` visits larger models, which takes minutes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol import broken_claims, broken_runs, claims, explorer, runs
from protocol.claims import Claims
from protocol.explorer import Broken, Model, explore, show
from protocol.key_store import KeyVerbs, ModelStore
from protocol.run_rules import Rules
from protocol.runs import Runs

BOTH = ("retry", "unknown")
DOCS = Path(__file__).parents[2] / "docs" / "how-it-works.md"

MODELS: dict[str, Callable[[], Model[Any]]] = {
    "claims, 3 owners, `on_crash` of both kinds": lambda: Claims(on_crash=BOTH),
    "claims, 3 owners, delayed requests": lambda: Claims(delays=True),
    "runs, 3 workers, 2 runs": Runs,
}
LARGE_MODELS: dict[str, Callable[[], Model[Any]]] = {
    "claims, 3 owners, delayed requests, `on_crash` of both kinds": lambda: Claims(on_crash=BOTH, delays=True),
    "runs, every repeated write told apart": lambda: Runs(exact=True),
    "runs, 4 workers, 2 runs": lambda: Runs(workers=4),
}
if os.environ.get("SEMEL_PROTOCOL") == "full":
    MODELS |= LARGE_MODELS


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MODELS)
def test_every_interleaving_keeps_the_promises(name: str) -> None:
    """Its size is the one that the documentation tells, so that a model cannot shrink unseen."""
    size = explore(MODELS[name]())
    show("", f"{name}: {size}")
    row = f"| {name} | {size.states:,} | {size.steps:,} | {size.depth} |"
    assert row in DOCS.read_text(), f"docs/how-it-works.md should have the line: {row}"


BROKEN_STORES: list[tuple[type[ModelStore], str, int]] = [
    (broken_claims.CompletesWithoutFence, claims.STALE, 6),
    (broken_claims.CompletesTwice, claims.CHANGED, 7),
    (broken_claims.RenewsWithoutFence, claims.TWO_OWNERS, 5),
    (broken_claims.ReleasesWithoutFence, claims.STALE, 5),
    (broken_claims.TakeoverKeepsFence, claims.FENCE, 4),
    (broken_claims.PurgeRestartsFences, claims.FENCE, 5),
    (broken_claims.CallersClock, claims.TWO_OWNERS, 4),
    (broken_claims.RetentionBeatsLease, claims.TWO_OWNERS, 7),
    (broken_claims.RetentionFromClaim, claims.FORGOTTEN, 8),
    (broken_claims.OutcomeEndsEarly, claims.FORGOTTEN, 7),
    (broken_claims.ReplaysForEver, claims.NO_OUTCOME, 8),
    (broken_claims.ForgetsAttempt, claims.OWN_REFUSED, 2),
    (broken_claims.LeaseNeverEnds, claims.LONG_WAIT, 4),
    (broken_claims.ForgetsUnknown, claims.TWICE, 6),
    (broken_claims.IgnoresUnknown, claims.TWICE, 6),
]
"""Each with the promise that it breaks, and the number of steps of the shortest way to that."""

BROKEN_RULES: list[tuple[type[Rules], str, int]] = [
    (broken_runs.FinishesWithoutFence, runs.STALE, 5),
    (broken_runs.RenewsWithoutFence, runs.STALE, 5),
    (broken_runs.FinishesAfterSweep, runs.STALE, 4),
    (broken_runs.LeaseKeepsFence, runs.FENCE, 4),
    (broken_runs.SweepsEarly, runs.TWO_ATTEMPTS, 5),
    (broken_runs.NeverSweeps, explorer.STUCK, 2),
    (broken_runs.SweepDrops, runs.LOST, 5),
    (broken_runs.SuccessBeatsCancel, runs.END_CHANGED, 7),
    (broken_runs.SweepForgetsCancel, runs.CANCEL_IGNORED, 4),
    (broken_runs.LeasesCancelled, runs.END_CHANGED, 3),
    (broken_runs.TriesForEver, runs.OVERSPENT, 6),
    (broken_runs.SubmitsTwice, runs.DOUBLED, 2),
    (broken_runs.ForgetsSuccess, runs.WRONG_REFUSAL, 4),
    (broken_runs.AnySuccessCounts, runs.WRONG_ACCEPT, 8),
]


def found(model: Model[Any], title: str) -> tuple[str, int]:
    """The promise that the model breaks, and the length of the shortest trace, which is printed."""
    with pytest.raises(Broken) as broken:
        explore(model)
    show("", title, broken.value)
    return broken.value.promise, len(broken.value.trace)


def _named(value: object) -> str | None:
    return value.__name__ if isinstance(value, type) else None


@pytest.mark.parametrize(("store", "promise", "length"), BROKEN_STORES, ids=_named)
def test_a_broken_store_of_keys_is_found(store: type[ModelStore], promise: str, length: int) -> None:
    model = Claims(KeyVerbs(store), on_crash=BOTH)
    assert found(model, store.__doc__ or "") == (promise, length)


def test_a_resolver_that_withdraws_its_claim_is_found() -> None:
    """This fault was in the product: a cancelled task gave back the claim by which it wanted to resolve a key."""
    model = Claims(on_crash=BOTH, withdraws=True)
    assert found(model, "A resolver without an answer releases the key.") == (claims.TWICE, 8)


@pytest.mark.parametrize(("rules", "promise", "length"), BROKEN_RULES, ids=_named)
def test_a_broken_rule_of_runs_is_found(rules: type[Rules], promise: str, length: int) -> None:
    model = Runs(rules(), workers=2, runs=1, exact=True)
    assert found(model, rules.__doc__ or "") == (promise, length)


def test_every_promise_is_broken_by_some_rule() -> None:
    """A promise that no broken rule breaks may be one that is not checked."""
    broken = {promise for _, promise, _ in [*BROKEN_STORES, *BROKEN_RULES]}
    assert broken == {*claims.PROMISES, *runs.PROMISES, explorer.STUCK}
