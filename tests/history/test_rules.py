"""The checker alone, on histories written by hand: it accepts what may happen, and names the rule that is broken."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import semel.testing.history
from history.written import (
    KEY,
    LEASE,
    back,
    call,
    cancel,
    claim,
    complete,
    finish,
    get,
    gone,
    judged,
    lease,
    lose,
    operation,
    owner,
    reserve,
    rules,
    run,
    seen,
    submit,
    usage,
)
from semel.testing.history import History, Operation, check, effect, linearize
from semel.testing.history.keys import KeyModel, KeyState
from semel.testing.history.linearize import IllegalStep, Search
from semel.testing.history.operations import FOREVER

GOOD_KEYS: dict[str, list[Operation]] = {
    "nothing happened": [],
    "claimed, completed, replayed": [
        claim(0, 1, "a", fence=1),
        complete(2, 3, 1),
        claim(4, 5, "b", "replay", 1, "x"),
        get(6, 7, "completed", 1, "x"),
    ],
    "two claim at once, and one is told to wait": [
        claim(0, 5, "a", fence=1),
        claim(1, 4, "b", "in_flight", 1),
        complete(6, 7, 1),
    ],
    "the answer comes late, and another saw the effect before": [
        claim(0, 1, "a", fence=1),
        complete(2, 9, 1),
        claim(3, 4, "b", "replay", 1, "x"),
    ],
    "a lost claim may have happened": [claim(0, None, "a"), claim(1, 2, "b", "in_flight", 1)],
    "or not": [claim(0, None, "a"), claim(1, 2, "b", fence=1)],
    "a lost claim happens late": [
        claim(0, None, "a"),
        get(1, 2, "absent"),
        claim(3, 4, "b", "in_flight", 1),
        get(5, 6, "claimed", 1),
    ],
    "the same attempt is granted again": [claim(0, None, "a"), claim(1, 2, "a", fence=1), complete(3, 4, 1)],
    "a lost completion may have happened": [
        claim(0, 1, "a", fence=1),
        complete(2, None, 1),
        claim(3, 4, "b", "replay", 1, "x"),
    ],
    "the lease ended, and another took over": [
        claim(0, 1, "a", fence=1),
        claim(10.5, 11, "b", fence=2),
        complete(12, 13, 1, "late", accepted=False),
        complete(14, 15, 2),
    ],
    "the owner is late, and nobody took over": [claim(0, 1, "a", fence=1), complete(50, 51, 1)],
    "renewed, and taken over later": [
        claim(0, 1, "a", fence=1),
        owner("renew", 8, 9, 1),
        claim(10, 11, "b", "in_flight", 1),
        claim(18.5, 19, "b", fence=2),
        owner("renew", 20, 21, 1, accepted=False),
    ],
    "released, and claimed again": [
        claim(0, 1, "a", fence=1),
        owner("release", 2, 3, 1),
        owner("release", 4, 5, 1),
        claim(6, 7, "b", fence=2),
        owner("release", 8, 9, 1, accepted=False),
    ],
    "a release that took effect late": [
        owner("release", 0, 3, 1),
        claim(1, 2, "a", fence=1),
        claim(4, 5, "a", fence=2),
    ],
    "completed twice by its owner": [claim(0, 1, "a", fence=1), complete(2, 3, 1), complete(4, 5, 1, "other")],
    "retention ended": [claim(0, 1, "a", fence=1, ttl=20), complete(2, 3, 1), claim(21, 22, "b", fence=2)],
    "its value is kept for a shorter time": [
        claim(0, 1, "a", fence=1),
        complete(2, 3, 1, value_ttl_us=10_000_000),
        claim(4, 5, "b", "replay", 1, "x"),
        claim(11.9, 12.1, "b", "replay", 1, ""),
        get(13, 14, "completed", 1, ""),
    ],
    "its value is kept for a shorter time, and the completion's answer is lost": [
        claim(0, 1, "a", fence=1),
        complete(2, None, 1, value_ttl_us=10_000_000),
        claim(13, 14, "b", "replay", 1, ""),
    ],
    "the value of a mark is kept for a shorter time": [
        claim(0, 1, "a", fence=1, outcome="seen", value_ttl_us=10_000_000),
        claim(2, 3, "b", "replay", 1, "seen"),
        claim(10, 11, "b", "replay", 1, ""),
    ],
    "a call whose value is kept for a shorter time": [
        call(0, 1, 1, "x", replayed=False, value_ttl_us=10_000_000),
        gone(9, 11),
        effect("key", KEY, 1),
    ],
    "forgotten on request": [
        claim(0, 1, "a", fence=1),
        complete(2, 3, 1),
        owner("forget", 4, 5, 1),
        get(6, 7, "absent"),
        claim(8, 9, "b", fence=2),
    ],
    "its scope was forgotten": [
        claim(0, 1, "a", fence=1),
        complete(2, 3, 1),
        operation("key", "forgotten", KEY[:1], (4, 5), {"count": 1}),
        claim(8, 9, "b", fence=2),
    ],
    "marked and seen": [claim(0, 1, "a", fence=1, outcome="seen"), claim(2, 3, "b", "replay", 1, "seen")],
    "unknown, and resolved": [
        claim(0, 1, "a", fence=1, unknown=True),
        claim(11, 12, "b", "unknown", 1),
        claim(13, 14, "c", fence=2, resolving=True),
    ],
    "taken by force": [claim(0, 1, "a", fence=1), claim(2, 3, "b", fence=2, force=True)],
    "called, and replayed": [call(0, 5, 1, "x", replayed=False), call(1, 6, 1, "x", replayed=True)],
    "an effect under a granted fence": [claim(0, 1, "a", fence=1), effect("key", KEY, 1), complete(2, 3, 1)],
    "two effects of two owners": [
        claim(0, 1, "a", fence=1),
        effect("key", KEY, 1),
        claim(11, 12, "b", fence=2),
        effect("key", KEY, 2),
    ],
}

BAD_KEYS: dict[str, tuple[str, list[Operation]]] = {
    "two owners with one fence": ("one-owner-per-fence", [claim(0, 1, "a", fence=1), claim(20, 21, "b", fence=1)]),
    "a fence is smaller after a release": (
        "fences-grow",
        [claim(0, 1, "a", fence=5), owner("release", 2, 3, 5), claim(4, 5, "b", fence=4)],
    ),
    "a fence starts again after retention": (
        "fences-grow",
        [claim(0, 1, "a", fence=5, ttl=20), complete(2, 3, 5), claim(30, 31, "b", fence=1)],
    ),
    "taken over while the lease lasts": ("two-owners", [claim(0, 1, "a", fence=1), claim(5, 6, "b", fence=2)]),
    "taken over although it was renewed": (
        "two-owners",
        [claim(0, 1, "a", fence=1), owner("renew", 8, 9, 1), claim(11, 12, "b", fence=2)],
    ),
    "granted to both of two at once": ("two-owners", [claim(0, 2, "a", fence=1), claim(1, 3, "b", fence=2)]),
    "a stale completion is accepted": (
        "stale-write",
        [claim(0, 1, "a", fence=1), claim(11, 12, "b", fence=2), complete(13, 14, 1)],
    ),
    "a stale renewal is accepted": (
        "stale-write",
        [claim(0, 1, "a", fence=1), claim(11, 12, "b", fence=2), owner("renew", 13, 14, 1)],
    ),
    "a stale release is accepted": (
        "stale-write",
        [claim(0, 1, "a", fence=1), claim(11, 12, "b", fence=2), owner("release", 13, 14, 1)],
    ),
    "a stale release releases, without saying so": (
        "claim-forgotten",
        [
            claim(0, 1, "a", fence=1),
            claim(11, 12, "b", fence=2),
            owner("release", 13, 14, 1, accepted=False),
            get(15, 16, "absent"),
        ],
    ),
    "a released key is completed": (
        "stale-write",
        [claim(0, 1, "a", fence=1), owner("release", 2, 3, 1), complete(4, 5, 1)],
    ),
    "an outcome is overwritten": (
        "outcome-changed",
        [claim(0, 1, "a", fence=1), complete(2, 3, 1), complete(4, 5, 1, "y"), get(6, 7, "completed", 1, "y")],
    ),
    "two callers get two outcomes": (
        "outcome-changed",
        [
            claim(0, 1, "a", fence=1),
            complete(2, 3, 1),
            claim(4, 5, "b", "replay", 1, "x"),
            claim(6, 7, "c", "replay", 1, "y"),
        ],
    ),
    "an outcome is forgotten, and granted again": (
        "outcome-forgotten",
        [claim(0, 1, "a", fence=1), complete(2, 3, 1), claim(20, 21, "b", fence=2)],
    ),
    "an outcome is not there when it is read": (
        "outcome-forgotten",
        [claim(0, 1, "a", fence=1), complete(2, 3, 1), get(20, 21, "absent")],
    ),
    "a value is forgotten": (
        "value-forgotten",
        [claim(0, 1, "a", fence=1), complete(2, 3, 1), claim(20, 21, "b", "replay", 1, "")],
    ),
    "a value is forgotten early": (
        "value-forgotten",
        [
            claim(0, 1, "a", fence=1),
            complete(2, 3, 1, value_ttl_us=10_000_000),
            claim(4, 5, "b", "replay", 1, "x"),
            get(10, 11, "completed", 1, ""),
        ],
    ),
    "the value of a mark is forgotten early": (
        "value-forgotten",
        [
            claim(0, 1, "a", fence=1, outcome="seen", value_ttl_us=10_000_000),
            claim(8, 9, "b", "replay", 1, ""),
        ],
    ),
    "a call whose value is forgotten early": (
        "value-forgotten",
        [call(0, 1, 1, "x", replayed=False, value_ttl_us=10_000_000), gone(8, 9)],
    ),
    "a call whose value is forgotten": ("value-forgotten", [call(0, 1, 1, "x", replayed=False), gone(8, 9)]),
    "an outcome is lost: the key is in flight again": (
        "outcome-lost",
        [claim(0, 1, "a", fence=1), complete(2, 3, 1), claim(4, 5, "b", "in_flight", 1)],
    ),
    "a claim is forgotten": ("claim-forgotten", [claim(0, 1, "a", fence=1), get(2, 3, "absent")]),
    "forgotten although it is worked on": (
        "two-owners",
        [claim(0, 1, "a", fence=1), owner("forget", 2, 3, 1), get(4, 5, "absent")],
    ),
    "its owner may not complete": ("owner-refused", [claim(0, 1, "a", fence=1), complete(2, 3, 1, accepted=False)]),
    "its owner may not renew": (
        "owner-refused",
        [claim(0, 1, "a", fence=1), owner("renew", 2, 3, 1, accepted=False)],
    ),
    "a replay of nothing": ("unfounded-answer", [claim(0, 1, "a", "replay", 1, "x")]),
    "in flight, and nobody ever claimed it": ("unfounded-answer", [claim(0, 1, "a", "in_flight", 1)]),
    "a mismatch with nothing": ("unfounded-answer", [claim(0, 1, "a", "mismatch")]),
    "unknown while the lease lasts": (
        "unfounded-answer",
        [claim(0, 1, "a", fence=1, unknown=True), claim(2, 3, "b", "unknown", 1)],
    ),
    "unknown work is granted again": (
        "unknown-repeated",
        [claim(0, 1, "a", fence=1, unknown=True), claim(11, 12, "b", fence=2)],
    ),
    "done twice": ("done-twice", [call(0, 5, 1, "x", replayed=False), call(1, 6, 2, "y", replayed=False)]),
    "replayed with another value": (
        "outcome-changed",
        [call(0, 1, 1, "x", replayed=False), call(2, 3, 1, "y", replayed=True)],
    ),
    "two effects under one fence": (
        "effect-twice",
        [claim(0, 1, "a", fence=1), effect("key", KEY, 1), effect("key", KEY, 1)],
    ),
    "an effect under a fence that nobody has": (
        "effect-without-claim",
        [claim(0, 1, "a", fence=1), effect("key", KEY, 2)],
    ),
    "an outcome without an effect": (
        "effect-missing",
        [call(0, 1, 2, "x", replayed=False), claim(0, None, "a"), effect("key", KEY, 1)],
    ),
}

SUBMITTED = submit(0, 1)
GOOD_RUNS: dict[str, list[Operation]] = {
    "submitted, leased, finished": [SUBMITTED, lease(2, 3, 1), finish(4, 5, 1), seen(6, "SUCCEEDED", 1, "x")],
    "finished twice by its own worker": [
        SUBMITTED,
        lease(2, 3, 1),
        finish(4, None, 1),
        finish(5, 6, 1),
        seen(7, "SUCCEEDED"),
    ],
    "lost and run again; the first comes back": [
        SUBMITTED,
        lease(2, 3, 1),
        lose(13, 14, 1),
        lease(15, 16, 2),
        finish(17, 18, 1, None),
        finish(19, 20, 2),
        seen(21, "SUCCEEDED", 2, "x"),
    ],
    "taken back by a sweeper that nobody recorded": [
        SUBMITTED,
        lease(2, 3, 1),
        lease(14, 15, 2),
        finish(16, 17, 2, "FAILED"),
        seen(18, "FAILED", 2),
    ],
    "retried": [
        SUBMITTED,
        lease(2, 3, 1),
        finish(4, 5, 1, "PENDING"),
        lease(6, 7, 2),
        finish(8, 9, 2),
        seen(10, "SUCCEEDED", 2),
    ],
    "cancelled": [SUBMITTED, run("cancel", 2, 3, {"status": "CANCELLED"}), seen(4, "CANCELLED", 0)],
    "too late to cancel": [
        SUBMITTED,
        lease(2, 3, 1),
        finish(4, 9, 1),
        run("cancel", 5, 6, {"refused": True}),
        seen(10, "SUCCEEDED"),
    ],
    "cancelled while it runs, and it succeeds before it notices": [
        SUBMITTED,
        lease(2, 3, 1),
        cancel(4, 5, "RUNNING"),
        finish(6, 7, 1),
        seen(8, "SUCCEEDED", 1, "x"),
    ],
    "cancelled while it runs, and it stops": [
        SUBMITTED,
        lease(2, 3, 1),
        cancel(4, 5, "RUNNING"),
        cancel(6, 7, "RUNNING"),
        finish(8, 9, 1, "CANCELLED"),
        seen(10, "CANCELLED", 1, ""),
    ],
    "cancelled while it runs, and its worker is lost": [
        SUBMITTED,
        lease(2, 3, 1),
        cancel(4, 5, "RUNNING"),
        lose(13, 14, 1, "CANCELLED"),
        finish(15, 16, 1, None),
        seen(17, "CANCELLED"),
    ],
    "cancelled while it runs, and lost to a sweeper that nobody recorded": [
        SUBMITTED,
        lease(2, 3, 1),
        cancel(4, 5, "RUNNING"),
        seen(17, "CANCELLED"),
    ],
    "a cancellation whose answer was lost": [
        SUBMITTED,
        lease(2, 3, 1),
        cancel(4, None, None),
        lose(13, 14, 1),
        lease(15, 16, 2),
        finish(17, 18, 2),
        seen(19, "SUCCEEDED", 2),
    ],
    "a cancellation whose answer was lost, and which happened": [
        SUBMITTED,
        lease(2, 3, 1),
        cancel(4, None, None),
        seen(17, "CANCELLED"),
    ],
    "cancelled after it was retried": [
        SUBMITTED,
        lease(2, 3, 1),
        finish(4, 9, 1, "PENDING"),
        cancel(5, 8, "CANCELLED"),
        seen(10, "CANCELLED"),
    ],
    "cancelled while workers run that were not recorded": [
        SUBMITTED,
        run("attempt", 2, 3, fence=1),
        run("attempt", 4, 9, fence=2),
        cancel(5, 6, "RUNNING", 2),
        seen(10, "SUCCEEDED", 2, "x"),
    ],
    "a lease whose answer was lost": [
        SUBMITTED,
        lease(2, None, 1),
        seen(3, "RUNNING", 1),
        lose(14, 15, 1),
        lease(16, 17, 2),
        finish(18, 19, 2),
        seen(20, "SUCCEEDED", 2),
    ],
    "submitted twice with one key": [
        submit(0, 1, key="k"),
        submit(2, 3, created=False, key="k"),
        lease(4, 5, 1),
        finish(6, 7, 1),
        seen(8, "SUCCEEDED"),
    ],
    "only a repeat was acknowledged": [
        submit(0, None, key="k"),
        submit(2, 3, created=False, key="k"),
        submit(4, 5, created=False, key="k"),
        lease(6, 7, 1),
        finish(8, 9, 1),
        seen(10, "SUCCEEDED"),
    ],
    "workers that were not recorded": [SUBMITTED, run("attempt", 2, 3, fence=1), seen(4, "SUCCEEDED", 1, "x")],
}

BAD_RUNS: dict[str, tuple[str, list[Operation]]] = {
    "two workers with one fence": (
        "one-worker-per-fence",
        [SUBMITTED, lease(2, 3, 1), lease(4, 5, 1), finish(6, 7, 1), seen(8, "SUCCEEDED")],
    ),
    "two workers at once": (
        "two-workers",
        [SUBMITTED, lease(2, 3, 1), lease(4, 5, 2), finish(6, 7, 2), seen(8, "SUCCEEDED", 2)],
    ),
    "given up while its lease lasts": (
        "two-workers",
        [SUBMITTED, lease(2, 3, 1), lose(4, 5, 1), lease(6, 7, 2), finish(8, 9, 2), seen(10, "SUCCEEDED", 2)],
    ),
    "given up although it was renewed": (
        "two-workers",
        [
            SUBMITTED,
            lease(2, 3, 1),
            run("renew", 10, 11, {"accepted": True}, fence=1, lease_us=10_000_000),
            lose(13, 14, 1),
            lease(15, 16, 2),
            finish(17, 18, 2),
            seen(19, "SUCCEEDED", 2),
        ],
    ),
    "a late finish is accepted": (
        "stale-write",
        [SUBMITTED, lease(2, 3, 1), lose(13, 14, 1), lease(15, 16, 2), finish(17, 18, 1), seen(21, "SUCCEEDED", 1)],
    ),
    "two ends": (
        "two-ends",
        [
            SUBMITTED,
            lease(2, 3, 1),
            lose(13, 14, 1),
            lease(15, 16, 2),
            finish(17, 18, 2),
            finish(19, 20, 1, "FAILED"),
            seen(21, "SUCCEEDED", 2),
        ],
    ),
    "one worker, two results": (
        "two-ends",
        [SUBMITTED, lease(2, 3, 1), finish(4, 5, 1), finish(6, 7, 1, value="y"), seen(8, "SUCCEEDED")],
    ),
    "a fence is smaller": (
        "fences-grow",
        [SUBMITTED, lease(2, 3, 5), lose(13, 14, 5), lease(15, 16, 2), finish(17, 18, 2), seen(19, "SUCCEEDED", 2)],
    ),
    "leased after its end": (
        "run-after-its-end",
        [SUBMITTED, lease(2, 3, 1), finish(4, 5, 1), lease(6, 7, 2), seen(8, "SUCCEEDED", 1)],
    ),
    "leased although it was cancelled": (
        "run-after-its-end",
        [SUBMITTED, run("cancel", 2, 3, {"status": "CANCELLED"}), lease(4, 5, 1), seen(6, "CANCELLED", 1)],
    ),
    "lost and leased again although it was cancelled": (
        "cancel-ignored",
        [
            SUBMITTED,
            lease(2, 3, 1),
            cancel(4, 5, "RUNNING"),
            lose(13, 14, 1),
            lease(15, 16, 2),
            finish(17, 18, 2),
            seen(19, "SUCCEEDED", 2),
        ],
    ),
    "leased again although it was cancelled, after a sweeper that nobody recorded": (
        "cancel-ignored",
        [
            SUBMITTED,
            lease(2, 3, 1),
            cancel(4, 5, "RUNNING"),
            lease(15, 16, 2),
            finish(17, 18, 2),
            seen(19, "SUCCEEDED", 2),
        ],
    ),
    "retried although it was cancelled": (
        "cancel-ignored",
        [
            SUBMITTED,
            lease(2, 3, 1),
            cancel(4, 5, "RUNNING"),
            finish(6, 7, 1, "PENDING"),
            lease(8, 9, 2),
            finish(10, 11, 2),
            seen(12, "SUCCEEDED", 2),
        ],
    ),
    "executed again although it was cancelled": (
        "cancel-ignored",
        [
            SUBMITTED,
            run("attempt", 2, None, fence=1),
            cancel(4, 5, "RUNNING"),
            run("attempt", 15, 16, fence=2),
            seen(17, "SUCCEEDED", 2),
        ],
    ),
    "its end has another fence than its worker": (
        "end-changed",
        [SUBMITTED, lease(2, 3, 1), finish(4, 5, 1), seen(6, "SUCCEEDED", 2, "x")],
    ),
    "its result is gone": ("end-changed", [SUBMITTED, lease(2, 3, 1), finish(4, 5, 1), seen(6, "SUCCEEDED", 1, "")]),
    "its result is gone, and no worker was recorded": (
        "end-changed",
        [SUBMITTED, seen(6, "SUCCEEDED", 1, "x"), seen(7, "SUCCEEDED", 1, "")],
    ),
    "the fence of its end changes, and no worker was recorded": (
        "end-changed",
        [SUBMITTED, seen(6, "SUCCEEDED", 1, "x"), seen(7, "SUCCEEDED", 2, "x")],
    ),
    "its end changes": (
        "end-changed",
        [SUBMITTED, lease(2, 3, 1), finish(4, 5, 1), seen(6, "SUCCEEDED"), seen(7, "CANCELLED")],
    ),
    "its end changes, and no worker was recorded": (
        "end-changed",
        [SUBMITTED, seen(6, "SUCCEEDED", 1, "x"), seen(7, "SUCCEEDED", 1, "y")],
    ),
    "its result changes": ("end-changed", [SUBMITTED, lease(2, 3, 1), finish(4, 5, 1), seen(6, "SUCCEEDED", 1, "y")]),
    "a worker may not finish": (
        "owner-refused",
        [
            SUBMITTED,
            lease(2, 3, 1),
            finish(4, 5, 1, None),
            seen(6, "RUNNING"),
            lose(14, 15, 1, "FAILED"),
            seen(16, "FAILED"),
        ],
    ),
    "executed twice under one fence": (
        "two-attempts-under-one-fence",
        [SUBMITTED, run("attempt", 2, 3, fence=1), run("attempt", 4, 5, fence=1), seen(6, "SUCCEEDED")],
    ),
    "two effects under one fence": (
        "effect-twice",
        [SUBMITTED, effect("run", ("r",), 1), effect("run", ("r",), 1), seen(6, "SUCCEEDED")],
    ),
    "it has succeeded without an effect": (
        "effect-missing",
        [SUBMITTED, effect("run", ("r",), 1), seen(6, "SUCCEEDED", 2)],
    ),
    "never executed": ("submission-without-end", [SUBMITTED, seen(100, "PENDING", 0)]),
    "never executed, and only a repeat was acknowledged": (
        "submission-without-end",
        [submit(0, None, key="k"), submit(2, 3, created=False, key="k"), seen(100, "PENDING", 0)],
    ),
    "nobody looked": ("submission-without-end", [SUBMITTED]),
    "it is gone": ("run-lost", [SUBMITTED, lease(2, 3, 1), finish(4, 5, 1), seen(6, "absent"), seen(7, "SUCCEEDED")]),
    "one key, two runs": (
        "two-runs-of-one-key",
        [
            submit(0, 1, key="k"),
            submit(2, 3, "r2", key="k"),
            seen(4, "FAILED"),
            run("get", 5, 6, {"status": "FAILED"}, "r2"),
        ],
    ),
}

ENDED = [lease(8, 9, 1), finish(10, 11, 1), seen(12, "SUCCEEDED")]
SECOND = [
    run("lease", 20, 21, {"runs": [["r2", 1, LEASE * 1_000_000]]}, "worker"),
    run("finish", 22, 23, {"status": "FAILED", "accepted": True}, "r2", fence=1),
    run("get", 24, 25, {"status": "FAILED"}, "r2"),
]
"""How the run ``r2`` ends."""
GOOD_QUOTAS: dict[str, list[Operation]] = {
    "reserved, released, reserved": [
        reserve(0, 1, "a"),
        reserve(2, 3, None),
        back("release", 4, 5, "a"),
        reserve(6, 7, "b"),
        back("consume", 8, 9, "b"),
        usage(10, 11, 0),
    ],
    "released and reserved at the same time": [
        reserve(0, 1, "a"),
        back("release", 2, 9, "a"),
        reserve(3, 4, "b"),
        usage(5, 6, 1),
        back("release", 10, 11, "b"),
    ],
    "expired": [reserve(0, 1, "a", ttl=10), reserve(12, 13, "b")],
    "a lost reservation may hold a slot": [
        reserve(0, None, None),
        reserve(2, 3, None),
        usage(4, 5, 1),
        usage(1010, 1011, 0),
    ],
    "a lost submission may hold a slot": [
        submit(0, None, key="k", limit=1),
        submit(2, 3, None, key="other", limit=1),
        usage(4, 5, 1),
        submit(6, 7, created=False, key="k", limit=1),
        *ENDED,
        usage(20, 21, 0),
    ],
    "a lost submission may create another run when its key is forgotten": [
        submit(0, None, key="k", limit=1, ttl_us=12_000_000),
        submit(6, 7, key="k", limit=1, ttl_us=12_000_000),
        *ENDED,
        usage(13.5, 14, 1),
        submit(15, 16, None, key="other", limit=1),
        usage(20, 21, 0),
    ],
    "a run that is retried keeps its slot": [
        submit(0, 1, limit=1),
        lease(2, 3, 1),
        finish(4, 5, 1, "PENDING"),
        submit(5.1, 5.2, None, limit=1),
        usage(5.3, 5.4, 1),
        lease(6, 7, 2),
        finish(8, 9, 2),
        submit(8.5, 9.5, "r2", limit=1),
        seen(10, "SUCCEEDED", 2),
        *SECOND,
    ],
    "a run that a sweeper may have ended which nobody recorded": [
        submit(0, 1, limit=1),
        lease(2, 3, 1),
        submit(13, 14, "r2", limit=1),
        seen(15, "FAILED"),
        *SECOND,
    ],
    "runs of workers that nobody recorded": [
        submit(0, 1, limit=1),
        submit(13, 14, "r2", limit=1),
        seen(15, "SUCCEEDED"),
        *SECOND,
    ],
    "cancelled while it runs, and cancelled again": [
        submit(0, 1, limit=1),
        lease(2, 3, 1),
        cancel(4, 5, "RUNNING"),
        usage(6, 7, 1),
        finish(8, 9, 1, "CANCELLED"),
        submit(10, 11, "r2", limit=1),
        cancel(12, 13, "CANCELLED"),
        seen(14, "CANCELLED"),
        *SECOND,
    ],
    "a run takes the slot": [
        reserve(0, 1, "a"),
        submit(2, 3, reservation="a", limit=1),
        submit(3.5, 3.6, None, limit=1),
        lease(4, 5, 1),
        usage(5.1, 5.2, 1),
        finish(6, 7, 1),
        seen(8, "SUCCEEDED"),
        usage(9, 10, 0),
    ],
    "consumed twice for one job": [
        reserve(0, 1, "a"),
        back("consume", 2, 3, "a", job="j"),
        back("consume", 4, 5, "a", job="j"),
    ],
}

BAD_QUOTAS: dict[str, tuple[str, list[Operation]]] = {
    "over the limit": ("over-the-limit", [reserve(0, 2, "a"), reserve(1, 3, "b")]),
    "over the limit by a run": (
        "over-the-limit",
        [reserve(0, 1, "a"), submit(2, 3, limit=1), lease(6, 7, 1), finish(8, 9, 1), seen(10, "SUCCEEDED")],
    ),
    "a slot is free before its run has ended": (
        "over-the-limit",
        [
            submit(0, 1, limit=1),
            submit(2, 3, "r2", limit=1),
            lease(6, 7, 1),
            finish(8, 9, 1),
            seen(10, "SUCCEEDED"),
            run("finish", 11, 12, {"status": "FAILED", "accepted": True}, "r2", fence=1),
            run("get", 13, 14, {"status": "FAILED"}, "r2"),
        ],
    ),
    "a slot is free while its run is retried": (
        "over-the-limit",
        [
            submit(0, 1, limit=1),
            lease(2, 3, 1),
            finish(4, 5, 1, "PENDING"),
            submit(6, 7, "r2", limit=1),
            lease(8, 9, 2),
            finish(10, 11, 2),
            seen(12, "SUCCEEDED", 2),
            *SECOND,
        ],
    ),
    "a slot is free after a finish that was refused": (
        "over-the-limit",
        [
            submit(0, 1, limit=1),
            lease(2, 3, 1),
            lose(13, 14, 1),
            finish(15, 16, 1, None),
            submit(17, 18, "r2", limit=1),
            lease(18.1, 18.2, 2),
            finish(19, 19.5, 2),
            seen(19.6, "SUCCEEDED", 2),
            *SECOND,
        ],
    ),
    "a slot is free although the run is only asked to stop": (
        "over-the-limit",
        [
            submit(0, 1, limit=1),
            lease(2, 3, 1),
            cancel(4, 5, "RUNNING"),
            submit(6, 7, "r2", limit=1),
            finish(8, 9, 1, "CANCELLED"),
            seen(10, "CANCELLED"),
            *SECOND,
        ],
    ),
    "a slot leaked after a lost reply": (
        "slot-lost",
        [
            submit(0, None, key="k", limit=1),
            submit(6, 7, created=False, key="k", limit=1),
            *ENDED,
            submit(15, 16, None, key="other", limit=1),
        ],
    ),
    "a slot is counted after a lost reply": (
        "usage-wrong",
        [
            submit(0, None, key="k", limit=1),
            submit(6, 7, created=False, key="k", limit=1),
            *ENDED,
            usage(15, 16, 1),
        ],
    ),
    "a lost reservation holds its slot at the end": ("slots-left", [reserve(0, None, None), usage(4, 5, 1)]),
    "a lost submission holds its slot at the end": ("slots-left", [submit(0, None, key="k", limit=1), usage(4, 5, 1)]),
    "given back twice": (
        "given-back-twice",
        [reserve(0, 1, "a"), back("release", 2, 3, "a"), back("release", 4, 5, "a")],
    ),
    "released and consumed": (
        "given-back-twice",
        [reserve(0, 1, "a"), back("release", 2, 3, "a"), back("consume", 4, 5, "a", job="j")],
    ),
    "consumed for two jobs": (
        "given-back-twice",
        [reserve(0, 1, "a"), back("consume", 2, 3, "a", job="j"), back("consume", 4, 5, "a", job="k")],
    ),
    "a slot leaked": ("slot-lost", [reserve(0, 1, "a"), back("release", 2, 3, "a"), reserve(4, 5, None)]),
    "not back to zero": ("usage-wrong", [reserve(0, 1, "a"), back("release", 2, 3, "a"), usage(4, 5, 1)]),
    "not counted": ("usage-wrong", [reserve(0, 1, "a"), usage(4, 5, 0)]),
}

GOOD = GOOD_KEYS | GOOD_RUNS | GOOD_QUOTAS
BAD = BAD_KEYS | BAD_RUNS | BAD_QUOTAS


@pytest.mark.parametrize("history", GOOD.values(), ids=GOOD)
def test_what_may_happen_is_accepted(history: list[Operation]) -> None:
    assert judged(*history) == []


@pytest.mark.parametrize(("rule", "history"), BAD.values(), ids=BAD)
def test_what_must_not_happen_is_named(rule: str, history: list[Operation]) -> None:
    assert rules(*history) == [rule]


def test_every_rule_has_a_history_that_breaks_it() -> None:
    """A rule that nothing breaks proves nothing."""
    folder = Path(semel.testing.history.__file__).parent
    text = "".join((folder / name).read_text() for name in ("keys.py", "runs.py", "quotas.py"))
    named = set(re.findall(r'(?:IllegalStep|Violation)\(\s*"([a-z-]+)"', text))
    others = {"outcome-forgotten", "claim-forgotten", "two-ends", "stale-write"}  # named by an expression
    assert named | others == {rule for rule, _ in BAD.values()} | {"undecided"}


def test_a_violation_says_what_is_wrong_and_shows_the_operations_that_prove_it() -> None:
    history = [claim(0, 1, "a", fence=1), claim(11, 12, "b", fence=2), complete(13, 14, 1, "late")]
    (violation,) = judged(*history)
    assert str(violation).splitlines() == [
        "stale-write: key orders/17: complete under fence 1 was accepted, although fence 2 holds it",
        "  [11.000000 to 12.000000] p: claim orders/17 (attempt='b', lease_us=10000000, ttl_us=1000000000): verdict='granted', fence=2",  # noqa: E501
        "  [13.000000 to 14.000000] p: complete orders/17 (fence=1, value='late'): accepted=True",
    ]
    assert repr(violation) == str(violation)


def test_an_operation_without_an_answer_is_shown_as_such() -> None:
    lost = replace(complete(2, None, 1), error="StoreUnavailable: away")
    assert str(lost) == (
        "[2.000000 to never] p: complete orders/17 (fence=1, value='x'): no answer StoreUnavailable: away"
    )


def test_other_keys_do_not_matter() -> None:
    mine = claim(0, 1, "a", fence=1)
    theirs = [each.about("orders", "18", answer=each.answer) for each in (claim(2, 3, "b", fence=1), complete(4, 5, 1))]
    assert judged(mine, *theirs) == []


def test_time_is_judged_with_as_much_slack_as_the_clock_moved() -> None:
    """The store's clock is the wall clock: if that was set by a second, a lease may end a second early."""
    history = History([claim(0, 1, "a", fence=1), claim(8.5, 9.5, "b", fence=2)])
    assert [each.rule for each in check(history)] == ["two-owners"]
    assert check(replace(history, slack_us=1_000_000)) == []


def test_a_history_that_is_not_complete_may_leave_runs_under_way() -> None:
    assert rules(SUBMITTED, seen(2, "PENDING", 0), complete=False) == []


def test_a_history_that_is_not_complete_may_leave_slots_in_use() -> None:
    assert rules(reserve(0, 1, "a"), usage(2, 3, 1)) == ["slots-left"]
    assert rules(reserve(0, 1, "a"), usage(2, 3, 1), complete=False) == []


def test_slots_may_be_in_use_before_the_last_operation() -> None:
    assert rules(reserve(0, 1, "a"), usage(2, 3, 1), back("release", 4, 5, "a")) == []


def test_a_search_that_takes_too_long_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives up instead of saying that all is well."""
    monkeypatch.setattr(linearize, "MOST_STATES", 100)
    lost = [claim(0, None, f"lost {number}") for number in range(30)]
    seen_fences = [claim(1, 2, f"b{number}", "in_flight", number) for number in range(1, 12)]
    assert rules(*lost, *seen_fences) == ["undecided"]


def orders(operations: Sequence[Operation]) -> Iterator[tuple[Operation, ...]]:
    """Every order of the operations, with any of the lost ones left out, that keeps what came after what."""
    lost = [each for each in operations if not each.answered]
    answered = [each for each in operations if each.answered]
    for size in range(len(lost) + 1):
        for some in combinations(lost, size):
            for order in permutations([*answered, *some]):
                if all(one.began <= other.ended for one, other in combinations(order, 2)):
                    yield order


def explained(operations: Sequence[Operation]) -> bool:
    """The search, done without any thought: try everything."""
    model = KeyModel(operations)
    return any(_possible(model, [model.start()], order) for order in orders(operations))


def _possible(model: KeyModel, states: list[KeyState], order: Sequence[Operation]) -> bool:
    for each in order:
        after: list[KeyState] = []
        for state in states:
            found = model.step(state, each) if each.answered else model.guess(state, each)
            after += [] if isinstance(found, IllegalStep) else found
        states = after
    return bool(states)


TIMES = st.tuples(st.integers(0, 30), st.integers(0, 8) | st.none())
VALUES = st.sampled_from(["x", "y"])


@st.composite
def any_operation(draw: st.DrawFn) -> Operation:
    began, lasts = draw(TIMES)
    ended = None if lasts is None else began + lasts
    fence = draw(st.integers(1, 3))
    match draw(st.sampled_from(["claim", "complete", "release", "renew", "get"])):
        case "claim":
            verdict = draw(st.sampled_from(["granted", "replay", "in_flight"]))
            value = draw(VALUES) if verdict == "replay" else ""
            return claim(began, ended, draw(st.sampled_from("abc")), verdict, fence, value, ttl=20)
        case "complete":
            return complete(began, ended, fence, draw(VALUES), draw(st.booleans()))
        case "get":
            return get(began, ended, draw(st.sampled_from(["absent", "claimed", "completed"])), fence, draw(VALUES))
        case verb:
            return owner(verb, began, ended, fence, draw(st.booleans()))


@settings(max_examples=150, deadline=None)
@given(st.lists(any_operation(), max_size=4))
def test_the_search_finds_an_order_exactly_if_there_is_one(operations: list[Operation]) -> None:
    assert (Search(operations, KeyModel(operations)).run() is None) == explained(operations)


class Register:
    """A key as simple as can be, which is right: it is asked one by one, at growing times."""

    def __init__(self) -> None:
        self.owner, self.fence, self.until, self.value = "", 0, 0.0, ""
        self.done = False

    def claim(self, by: str, now: float) -> dict[str, Any]:
        if self.done and self.owner == by:
            return {"verdict": "granted", "fence": self.fence}
        if self.done:
            return {"verdict": "replay", "fence": self.fence, "value": self.value}
        if self.owner and self.owner != by and now < self.until:
            return {"verdict": "in_flight", "fence": self.fence}
        if self.owner != by or now >= self.until:
            self.fence += 1
            self.owner, self.until = by, now + LEASE
        return {"verdict": "granted", "fence": self.fence}

    def complete(self, fence: int, value: str) -> dict[str, Any]:
        if not self.owner or fence != self.fence:
            return {"accepted": False}
        if not self.done:
            self.done, self.value = True, value
        return {"accepted": True}

    def release(self, fence: int) -> dict[str, Any]:
        free = not self.owner
        if not free and fence == self.fence and not self.done:
            self.owner = ""
        return {"accepted": free or fence == self.fence}


@st.composite
def right_history(draw: st.DrawFn) -> list[Operation]:
    """What a right register answers at growing moments, each somewhere between its call and its answer."""
    register = Register()
    history = []
    moments = sorted(draw(st.lists(st.integers(0, 60), min_size=1, max_size=14)))
    for number, moment in enumerate(moments):
        now = moment + number * 1e-3
        began, ended = now - draw(st.floats(0, 6)), now + draw(st.floats(0, 6))
        lost = draw(st.integers(0, 9)) == 0
        by, fence, value = draw(st.sampled_from("abc")), draw(st.integers(1, 4)), draw(VALUES)
        match draw(st.sampled_from(["claim", "claim", "complete", "release"])):
            case "claim":
                written = claim(began, ended, by)
                told = register.claim(by, now)
            case "complete":
                written = complete(began, ended, fence, value)
                told = register.complete(fence, value)
            case _:
                written = owner("release", began, ended, fence)
                told = register.release(fence)
        written = replace(written, answer=told)
        history.append(replace(written, answer=None, ended=FOREVER, ended_us=FOREVER) if lost else written)
    return history


@settings(max_examples=60, deadline=None)
@given(right_history())
def test_whatever_a_right_register_answers_is_accepted(history: list[Operation]) -> None:
    note("\n".join(map(str, history)))
    assert judged(*history) == []
