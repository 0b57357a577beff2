"""When a lease is renewed, and how long to wait for the answer: the same rule for the leases of keys and of runs."""

RENEW_AFTER = 0.05
"""The part of a lease after which it is renewed."""
TRY_AGAIN_AFTER = 0.01
"""The part of a lease after which a renewal that failed is tried again. Together: when a store was unavailable for nine
tenths of a lease, at least four hundredths of it are left for the renewal that succeeds."""
SHORTEST_TRY, LONGEST_TRY = 0.1, 10.0
"""Seconds that a renewal may take: a store that answers later than the first would not be noticed to be there, and
whose lease is short does not wait for long behind those whose are not."""


def time_for_renewal(left: float) -> float:
    """How long to wait for the answer to a renewal: a third of what is left of the shortest lease."""
    return min(max(left / 3, SHORTEST_TRY), LONGEST_TRY)
