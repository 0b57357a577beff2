"""A worker whose database falls silent keeps its leases, as long as any lease could be kept."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from semel import App
from semel.cli import main as semel_command
from support.proxies import SilentProxy, silent_proxy
from support.waiting import eventually

PATIENCE = 60.0


@pytest.fixture
def line(postgres_url: str) -> Iterator[tuple[SilentProxy, str]]:
    assert semel_command(["migrate", postgres_url]) == 0
    with silent_proxy(postgres_url) as line:
        yield line


@pytest.mark.parametrize(("lease", "outage"), [(12.0, 0.0), (16.0, 0.5)])
def test_a_lease_outlives_connections_that_fell_silent(
    line: tuple[SilentProxy, str], postgres_url: str, tmp_path: Path, lease: float, outage: float
) -> None:
    """``outage`` is the part of a lease for which new connections are silent, too. The promise of 0.9 is proven on an
    injected clock (test_lease_outages): what is left of a lease then is too short for a test on a busy machine.
    """
    proxy, url = line
    here = App(url, artifacts=tmp_path, dedupe_window=0)
    there = App(postgres_url, artifacts=tmp_path, dedupe_window=0)  # on a line of its own
    over = threading.Event()

    async def work() -> str:
        await asyncio.to_thread(over.wait, PATIENCE)
        return "done"

    for app in (here, there):
        app.model("work", lease=lease)(work)
    runs = [there.submit("work") for _ in range(8)]
    with here.working(concurrency=8, processes=0, threads=0, sweep_every=0.2):
        eventually(lambda: all(there.get(run.id).status == "RUNNING" for run in runs))
        proxy.silence(new=outage > 0)
        time.sleep(outage * lease)  # the outage itself
        proxy.speak()
        time.sleep((1.1 - outage) * lease)  # by now a lease that was not renewed would be over, and swept
        over.set()
        ended = [there.wait(run.id, timeout=PATIENCE) for run in runs]
    here.close()
    there.close()
    assert [(run.status, run.losts, run.attempts) for run in ended] == [("SUCCEEDED", 0, 1)] * 8
