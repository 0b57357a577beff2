"""The transport over RQ: stock workers run semel's runs.

    app = semel.App("postgresql://…", transport="rq", redis="redis://localhost/0")

    $ rq worker semel                  # the queue "default"; a queue named "gpu" is "semel-gpu"
    $ rq worker -c myproject semel     # the same, with the project imported once instead of anew for every run

Every message is an RQ job that leaves nothing behind. The model's timeout applies, RQ's does not. On SIGTERM a worker
finishes its run; the run of a worker that was killed is executed again when its lease has expired. To end a run, cancel
it in semel: ``rq`` can only stop the process, and the run would be executed again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

import msgspec
from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from rq import Queue

from semel import typed_json
from semel.errors import InvalidRequest
from semel.runs.app import App
from semel.runs.manifest import collector
from semel.runs.transports.broker import SWEEP_EVERY, TELL_AGAIN, AppLocation, BrokerTransport, find, perform

JOB = "semel.runs.rq.look"
PATIENCE = 2.0
"""Seconds to wait for Redis, to connect and for each reply: the most that a submitter waits while it is unavailable."""
KEEP_FAILURES = 600
"""Seconds for which RQ shows a message that failed, as when the app cannot be imported."""
BATCH = 500


class RqTransport(BrokerTransport):
    """Announces runs to RQ workers. RQ's jobs have random ids: with the run's id, RQ would drop the older message.

    See BrokerTransport for ``sweep_every`` and ``tell_again``.
    """

    def __init__(
        self, redis_url: str, app: App, *, sweep_every: float = SWEEP_EVERY, tell_again: float = TELL_AGAIN
    ) -> None:
        super().__init__(app, sweep_every=sweep_every, tell_again=tell_again)
        try:
            self._redis = Redis.from_url(
                redis_url,
                socket_timeout=PATIENCE,
                socket_connect_timeout=PATIENCE,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise InvalidRequest(f"this Redis URL cannot be used: {error}") from error
        self._queues: dict[str, Queue] = {}
        if "rq.cli" in sys.modules:
            app.ledger(awaited=True)  # a worker imports this before it forks: load here what every run would load
            os.register_at_fork(before=partial(_collect, ref(app)))

    def send(self, queues: Mapping[str, Sequence[str]], location: AppLocation) -> None:
        """Send a few hundred messages in one round trip."""
        where = msgspec.to_builtins(location)
        for queue, ids in queues.items():
            for start in range(0, len(ids), BATCH):
                self._queue(queue).enqueue_many([_job(run_id, where) for run_id in ids[start : start + BATCH]])

    def length(self, queue: str) -> int:
        return self._queue(queue).count

    def disconnect(self) -> None:
        self._redis.close()

    def _queue(self, name: str) -> Queue:
        if name not in self._queues:
            self._queues[name] = Queue(name, connection=self._redis)
        return self._queues[name]


def _collect(app: ref[App]) -> None:
    """Collect the manifest before a worker forks, so that not every run does: it forks for each."""
    if (found := app()) is not None:
        collector.parts(found.registry)


def _job(run_id: str, where: Any) -> Any:
    return Queue.prepare_data(
        JOB,
        args=(run_id, where),
        timeout=-1,
        result_ttl=0,
        failure_ttl=KEEP_FAILURES,
        description=f"semel run {run_id}",
    )


def look(run_id: str, where: Any) -> None:
    """Execute the run, if it can be leased. RQ workers call this."""
    perform(find(typed_json.convert(where, AppLocation)), run_id, sweeps=True)
