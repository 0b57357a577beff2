"""Pauses between tries."""

import random

from semel._concurrency.retry import Backoff, jittered


def test_jitter_leaves_the_shared_generator_to_the_user() -> None:
    random.seed(7)
    expected = [random.random() for _ in range(3)]
    random.seed(7)
    seen = []
    for _ in range(3):
        jittered(1.0)
        Backoff(1.0).after(1)
        seen.append(random.random())
    assert seen == expected


def test_jitter_spreads_a_pause_within_its_bounds() -> None:
    pauses = {jittered(10.0) for _ in range(50)}
    assert len(pauses) > 1
    assert all(8.0 <= pause <= 12.0 for pause in pauses)
