"""A worker that stops dead in the middle of its work: it claims, says so, and waits to be killed.

Run as ``python vanishing.py URL KEY ON_CRASH``, on the same fake time as the test that starts it.
"""

import sys
import threading

from semel import Once, Policy, current_claim
from semel.testing import FakeClock


def main(url: str, key: str, on_crash: str) -> None:
    once = Once(url, clock=FakeClock(), policy=Policy().but(on_crash=on_crash))

    def work() -> None:
        print(current_claim().fence, flush=True)  # noqa: T201 -- the test reads it
        threading.Event().wait()

    once.call(key, work)


if __name__ == "__main__":
    main(*sys.argv[1:])
