"""The transport over Celery: stock workers run semel's runs.

The usual way, with your own Celery app, whatever its broker:

    runs = semel.App("postgresql://…")
    celery = Celery("myproject", broker="redis://localhost/0")
    semel.runs.celery.install(celery, runs)

    $ celery -A myproject:celery worker -Q semel    # the queue "default"; a queue named "gpu" is "semel-gpu"

Or without one, ``semel.App("postgresql://…", transport="celery", redis="redis://localhost/0")`` and

    $ celery -A semel.runs.celery -b redis://localhost/0 worker -Q semel

whose worker imports the module that a message names: whoever can write to that Redis can run code in the worker.

Messages are acknowledged late, and never retried by Celery. If a run takes longer than the broker's visibility timeout
(an hour, with Redis), its message is delivered a second time, finds the run leased, and is dropped. Pools of processes,
threads and ``solo`` work; green threads do not. A ``task_time_limit`` of the Celery app kills longer runs, which are
then executed again: leave it out and give models a ``timeout``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from celery import Celery  # type: ignore[import-untyped]
from celery.signals import worker_ready  # type: ignore[import-untyped]

from semel import typed_json
from semel.db.database import abandoned_connections
from semel.runs.app import App
from semel.runs.transports.broker import SWEEP_EVERY, TELL_AGAIN, AppLocation, BrokerTransport, choose, find, perform

TASK = "semel.run"
PATIENCE = 2.0
"""Seconds to wait for the broker, to connect and for each reply: the longest that an outage delays a submitter."""

_REDIS_PATIENCE = {"socket_timeout": PATIENCE, "socket_connect_timeout": PATIENCE, "max_retries": 0}
_OPTIONS = {"acks_late": True, "ignore_result": True, "max_retries": 0, "shared": False}

_installed: WeakKeyDictionary[Celery, list[App]] = WeakKeyDictionary()


class CeleryTransport(BrokerTransport):
    """Announces runs to Celery workers, over one connection of its own. See BrokerTransport for the times."""

    def __init__(
        self, broker: str | Celery, app: App, *, sweep_every: float = SWEEP_EVERY, tell_again: float = TELL_AGAIN
    ) -> None:
        self._celery = Celery("semel", broker=broker, set_as_current=False) if isinstance(broker, str) else broker
        self._producer: Any = None
        super().__init__(app, sweep_every=sweep_every, tell_again=tell_again)

    @property
    def broker(self) -> str:  # type: ignore[override]  # known once the Celery app is configured
        url = str(self._celery.conf.broker_write_url or self._celery.conf.broker_url or "")
        return "redis" if url.startswith(("redis", "sentinel")) else "broker"

    def after_fork(self) -> None:
        """Leave the parent's connection to the parent."""
        super().after_fork()
        abandoned_connections.append(self._producer)
        self._producer = None
        self._sending = threading.RLock()

    def send(self, queues: Mapping[str, Sequence[str]], location: AppLocation) -> None:
        where = msgspec.to_builtins(location)
        with self._sending:
            try:
                for queue, ids in queues.items():
                    for run_id in ids:
                        self._send(queue, run_id, where)
            except BaseException:
                self.disconnect()
                raise

    def _send(self, queue: str, run_id: str, where: Any) -> None:
        self._celery.send_task(
            TASK,
            args=(run_id, where),
            queue=queue,
            producer=self._connected(),
            retry=False,
            ignore_result=True,
            add_to_parent=False,
        )

    def _connected(self) -> Any:
        if self._producer is None:
            options = self._celery.conf.broker_transport_options
            connection = self._celery.connection_for_write(
                connect_timeout=PATIENCE, transport_options={**_REDIS_PATIENCE, **options}
            )
            self._producer = self._celery.amqp.Producer(connection, auto_declare=False)
        return self._producer

    def length(self, queue: str) -> int:
        """Does not count messages that workers have prefetched."""
        with self._sending:
            try:
                return self._length(self._connected(), queue)
            except BaseException:
                self.disconnect()
                raise

    def _length(self, producer: Any, queue: str) -> int:
        try:
            return int(producer.channel.queue_declare(queue, passive=True).message_count)
        except producer.connection.channel_errors:
            return 0  # there is no such queue yet

    def disconnect(self) -> None:
        with self._sending:
            producer, self._producer = self._producer, None
            if producer is not None:
                producer.connection.release()


def install(celery_app: Celery, app: App, *, sweep_every: float = SWEEP_EVERY, tell_again: float = TELL_AGAIN) -> None:
    """Let the workers of a Celery app execute the runs of ``app``, which announces its runs through it."""
    app.transport = CeleryTransport(celery_app, app, sweep_every=sweep_every, tell_again=tell_again)
    if celery_app in _installed:
        _installed[celery_app].append(app)
        return
    ours = _installed[celery_app] = [app]

    def look(run_id: str, where: Any) -> None:
        perform(choose(ours, typed_json.convert(where, AppLocation)), run_id)

    celery_app.task(look, name=TASK, **_OPTIONS)


@worker_ready.connect  # type: ignore[untyped-decorator]
def _sweep(sender: Any, **_: Any) -> None:
    """Sweep for the installed apps from the worker's start, so that no submitter need be alive for that."""
    for app in _installed.get(sender.app, []):
        _sweep_for(app)


def _sweep_for(app: App) -> None:
    if isinstance(app.transport, BrokerTransport):
        app.transport.sweep()


worker_app = Celery("semel", set_as_current=False)
"""The Celery app of ``celery -A semel.runs.celery``."""


@worker_app.task(name=TASK, **_OPTIONS)  # type: ignore[untyped-decorator]
def _look(run_id: str, where: Any) -> None:
    here = str(Path.cwd())
    if here not in sys.path:  # as ``celery -A`` does for a project
        sys.path.append(here)
    app = find(typed_json.convert(where, AppLocation))
    perform(app, run_id)
    _sweep_for(app)
