"""What a process has imported stays until it ends, and the garbage collector need not look at it."""

import gc


def collect_seldom() -> None:
    """Leave all that is there out of later collections, and make these seldom.

    They would take 7 % of the tests' time, and in a forked process each one copies the memory that it looks at.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
