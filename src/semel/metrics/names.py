"""The names of the metrics and their descriptions, for every system."""

from __future__ import annotations

from semel._validation import checked_seconds
from semel.policy import MINUTE

SAMPLE_EVERY = MINUTE
"""Seconds between two samples of the store's size."""

COUNTED = {
    "hit": "hit",
    "miss": "miss",
    "conflict": "conflict",
    "collision": "processing_collision",
    "unknown": "unknown",
}
"""The counter of each event."""

MEANINGS = {
    "hit": "Calls that got the outcome of an earlier one",
    "miss": "Calls that were carried out, by reason: the key was absent, expired or abandoned by its owner",
    "conflict": "Calls whose key was used before with other content",
    "processing_collision": "Calls whose key was being worked on",
    "unknown": "Calls whose key's owner vanished, so that it is unknown whether its work happened",
    "cleanup": "Expired keys that were removed",
    "replay_ratio": "Hits among hits and misses, since the start",
    "store": "Seconds until the store replied, by verb",
    "keys_held": "Keys in the store, by state",
}

ROUTER_MEANINGS = {
    "hit": "Messages that were seen before, by key type",
    "miss": "New messages, by key type and reason: the key was absent, expired or abandoned by its owner",
}

RUN_MEANINGS = {
    "runs_created": "Runs that were submitted and stored, by model",
    "runs_replayed": "Submissions that found an existing run, by model",
    "runs_refused": "Submissions that a quota or a key refused, by model",
    "runs_succeeded": "Runs that ended with a result, by model",
    "runs_failed": "Runs that ended without a result: fatal errors, or no attempts left, by model",
    "runs_cancelled": "Runs that were cancelled while they ran, by model",
    "runs_retried": "Attempts that will be followed by another, by model",
    "run_duration_seconds": "Seconds from the start of the last attempt to the end of the run, by model and status",
    "queue_lag_seconds": "Seconds from the moment a run was due to the start of its attempt, by model",
    "stuck_runs_detected": "Runs whose worker was lost, found by the sweeper",
}

RUN_BUCKETS = (0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
"""Bounds of the histograms of runs, in seconds."""

BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bounds of the histogram of the store, in seconds: from a local file to a server that is restarting."""


def interval(sample_every: float | None) -> float | None:
    """The checked interval; None if the store is not sampled."""
    return None if sample_every is None else checked_seconds("sample_every", sample_every)
