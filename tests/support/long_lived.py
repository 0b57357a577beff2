"""Keeps the garbage collector away from what a process has imported, which stays until the process ends."""

import gc


def collect_seldom() -> None:
    """Leave all objects that exist now out of later collections, and collect less often.

    Collections took 7 % of the tests' time, and in a forked process each one copies the memory that it looks at.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
