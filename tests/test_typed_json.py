"""Types are examined by one thread at a time."""

import subprocess
import sys

PROGRAM = """
import sys, threading
import msgspec
from semel import typed_json

sys.setswitchinterval(1e-6)


def define():
    class Inner(msgspec.Struct):
        number: int
        words: "list[str]" = []

    globals().update(Inner=Inner)

    class Outer(msgspec.Struct):
        inner: "Inner"
        more: "dict[str, Inner] | None" = None

    return Outer


def decode(kind, begin, values):
    begin.wait()
    values.append(typed_json.decode(b'{"inner": {"number": 1}}', kind).inner.number)
    values.append(typed_json.convert({"inner": {"number": 2}}, kind).inner.number)


for _ in range(200):
    kind, begin, values = define(), threading.Barrier(8), []
    threads = [threading.Thread(target=decode, args=(kind, begin, values)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(values) == [1] * 8 + [2] * 8, values
"""


def test_threads_that_use_a_type_for_the_first_time_do_not_crash_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
