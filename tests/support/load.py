"""Processes that do nothing but compute, beside the tests: ``SEMEL_TEST_LOAD=8 ./dev test``."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

COMPUTE = """
import os
parent = os.getppid()
while os.getppid() == parent:
    sum(range(1_000_000))
"""


@contextmanager
def load(processes: int) -> Iterator[None]:
    """That many processes until the end of the block; they end by themselves if this process is killed."""
    with ExitStack() as stack:
        for _ in range(processes):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-S", "-c", COMPUTE]))
            stack.callback(process.kill)
        yield
