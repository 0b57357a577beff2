"""Runs the tests in several processes, forked when the tests have been collected: ``./dev test --processes 6``.

To collect the tests takes ten seconds of a core, and half a minute in a fresh clone; here it is done once. Each process
takes the next share of the tests from a queue, and reports to the one that forked it, which alone prints. A process
that dies fails the test that it was at, and another one runs what it left. One process begins with the tests that wait.
"""

import mmap
import os
import struct
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, groupby, islice
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest

NUMBER = struct.Struct("<I")
LARGEST_SHARE = 100
"""Tests of one module that a process takes at a time: what they share, such as a server, is started for each share."""


class Parallel:
    """A plugin of pytest: its loop over the tests, in that many processes."""

    def __init__(self, processes: int, alone: set[Path], waiting: set[Path]) -> None:
        self._count = processes
        self._alone = alone
        """Folders whose tests are handed out one by one, and first: each of them takes seconds or minutes."""
        self._waiting = waiting
        """Files whose tests mostly wait: one process begins with them, the others with those that compute."""
        self._is_stopped = mmap.mmap(-1, 1)
        """One byte that all processes see: not zero if no further test is to begin."""

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest says so itself
        left = dict(enumerate(session.items))
        while left:
            self._run(session, left)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
        return True

    def _shares(self, items: dict[int, pytest.Item]) -> Iterator[list[int]]:
        """The numbers of the tests as they are handed out: first the long ones, then by module.

        Modules with few tests come first: their tests take longer than those of one with hundreds, which fill the end.
        The long ones of one folder, such as those that start many processes, are spread among those of the others.
        """
        rooms = [[n for n, item in items.items() if room in item.path.parents] for room in self._alone]
        alone = sorted((place / len(room), number) for room in rooms for place, number in enumerate(room))
        yield from ([number] for _, number in alone)
        others = items.keys() - {number for _, number in alone}
        modules = [[*numbers] for _, numbers in groupby(sorted(others), lambda number: items[number].path)]
        for module in sorted(modules, key=len):
            numbers = iter(module)
            while share := [*islice(numbers, LARGEST_SHARE)]:
                yield share

    def _run(self, session: pytest.Session, left: dict[int, pytest.Item]) -> None:
        """Run these tests, and take those that have ended out of ``left``."""
        waits = [number for number, item in left.items() if item.path in self._waiting]
        computes = {number: item for number, item in left.items() if item.path not in self._waiting}
        waiting, computing = Queue([[number] for number in waits]), Queue([*self._shares(computes)])
        current: dict[Connection, int | None] = {}
        pids = {}
        for place in range(min(self._count, len(waiting.shares) + len(computing.shares))):
            reports, theirs = Pipe(duplex=False)
            if (pid := os.fork()) == 0:
                reports.close()
                queues = (waiting, computing) if place == 0 else (computing, waiting)
                Process(session, theirs, self._is_stopped).run(queues)
            theirs.close()
            current[reports], pids[reports] = None, pid
        waiting.close()
        computing.close()
        try:
            while current:
                for reports in wait([*current]):
                    assert isinstance(reports, Connection)
                    self._receive(session, reports, current, left)
        finally:
            self._is_stopped[0] = 1
            for reports, pid in pids.items():
                reports.close()  # who still has something to report ends
                os.waitpid(pid, 0)
            self._is_stopped[0] = 0

    def _receive(
        self,
        session: pytest.Session,
        reports: Connection,
        current: dict[Connection, int | None],
        left: dict[int, pytest.Item],
    ) -> None:
        hook = session.config.hook
        try:
            kind, content = reports.recv()
        except EOFError:
            kind, content = "died", None
        if kind == "report":
            report = hook.pytest_report_from_serializable(config=session.config, data=content)
            hook.pytest_runtest_logreport(report=report)
        elif kind == "begin":
            current[reports] = content
        elif kind == "end":
            item = left.pop(content)
            current[reports] = None
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        elif kind == "done":
            del current[reports]
        elif kind == "error":
            raise RuntimeError(f"a process of the tests failed:\n{content}")
        elif kind == "interrupted":
            raise KeyboardInterrupt(content)
        else:
            number = current.pop(reports)
            assert number is not None, "a process of the tests died between two tests"
            item = left.pop(number)
            text = "the process that ran this test died"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
            hook.pytest_runtest_logreport(report=report)
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if session.shouldfail or session.shouldstop:
            self._is_stopped[0] = 1


class Process:
    """A process that runs tests."""

    def __init__(self, session: pytest.Session, reports: Connection, is_stopped: mmap.mmap) -> None:
        self._session = session
        self._config = session.config
        self._reports = reports
        self._is_stopped = is_stopped

    def run(self, queues: Iterable["Queue"]) -> NoReturn:
        """Run tests until the queues are empty, one after the other; the process ends with them."""
        with suppress(BrokenPipeError):  # who forked this process has ended
            try:
                self._prepare()
                self._run_all(chain.from_iterable(queue.take() for queue in queues))
                self._reports.send(("done", None))
            except (KeyboardInterrupt, pytest.exit.Exception) as error:
                self._reports.send(("interrupted", str(error)))
            except BrokenPipeError:
                raise
            except BaseException:  # noqa: BLE001 -- the session ends with it
                self._reports.send(("error", traceback.format_exc()))
        os._exit(0)

    def _prepare(self) -> None:
        """Capture what this process writes in files of its own, and print nothing."""
        plugins = self._config.pluginmanager
        if capture := plugins.get_plugin("capturemanager"):
            capture.stop_global_capturing()
            capture.start_global_capturing()
        self._config.get_terminal_writer()._file = Path(os.devnull).open("w")  # noqa: SIM115 -- until the process ends
        plugins.register(self, "process of tests")

    def _run_all(self, numbers: Iterator[int]) -> None:
        items = self._session.items
        number = next(numbers, None)
        while number is not None and not self._is_stopped[0]:
            self._reports.send(("begin", number))
            following = next(numbers, None)
            nextitem = None if following is None else items[following]
            self._config.hook.pytest_runtest_protocol(item=items[number], nextitem=nextitem)
            self._reports.send(("end", number))
            number = following

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        content: Any = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._reports.send(("report", content))


class Queue:
    """Shares of tests. Processes that are forked after it was made each take the next share."""

    def __init__(self, shares: list[list[int]]) -> None:
        self.shares = shares
        self._numbers, source = os.pipe()
        os.write(source, b"".join(map(NUMBER.pack, range(len(shares)))))
        os.close(source)

    def take(self) -> Iterator[int]:
        """The tests of one share after another, until no share is left."""
        while record := os.read(self._numbers, NUMBER.size):
            (number,) = NUMBER.unpack(record)
            yield from self.shares[number]

    def close(self) -> None:
        os.close(self._numbers)
