"""Scenarios of runs that stock RQ and Celery workers execute, while the broker is flushed or killed."""

import socket
import time
from collections import Counter

import redis as redis_client
from sqlalchemy import make_url

from chaos.stage import Account, Stage
from semel import App, Run
from support.transports import BROKERS, Ground

RATE = 4.0
"""Submissions a second, half of what two RQ workers can do on two cores: they fork a process for each run."""


def play_broker(stage: Stage, name: str, *, kill: bool, account: Account) -> None:
    """Submit at an even pace in three phases, with the fault in the second; then wait for every run."""
    assert stage.redis is not None
    broker_url = stage.redis.database()
    with Ground(stage.folder, transport=name, redis=broker_url, urls={"postgres": stage.url}) as ground:
        app = ground.app("postgres")
        BROKERS[name].start_all(ground)
        first = submitted(app, -1)
        ground.wait_ended(app, first)
        marks = [time.time()]
        runs = [first, *_phase(app, stage.seconds, "before")]
        marks.append(time.time())
        if kill:
            stage.redis.stop(crash=True)
            stage.struck += refuses(broker_url)
        else:
            with redis_client.Redis.from_url(broker_url) as client:
                stage.struck += client.dbsize()
                client.flushdb()
        runs += _phase(app, stage.seconds, "during")
        if kill:
            stage.redis.start()
            BROKERS[name].start_all(ground)  # RQ's workers end with their broker, and a supervisor starts new ones
        marks.append(time.time())
        runs += _phase(app, stage.seconds, "after")
        marks.append(time.time())
        ended = [ground.wait_ended(app, run) for run in runs]
        _judge(ground, account, ended, marks)


def refuses(url: str) -> int:
    """1 if nothing listens at the URL of a Redis, else 0."""
    server = make_url(url)
    try:
        socket.create_connection((server.host, server.port)).close()
    except ConnectionRefusedError:
        return 1
    return 0


def _phase(app: App, seconds: float, name: str) -> list[Run]:
    start = time.monotonic()
    runs = []
    for number in range(max(3, int(seconds * RATE))):
        time.sleep(max(0.0, start + number / RATE - time.monotonic()))
        runs.append(submitted(app, number, name))
    return runs


def submitted(app: App, number: int, phase: str = "first") -> Run:
    """Submit a run; a broker that is down costs the caller nothing."""
    return app.submit("add_in_loop", {"a": number, "b": 0}, idempotency_key=f"{phase}-{number}", user="chaos")


def _judge(ground: Ground, account: Account, ended: list[Run], marks: list[float]) -> None:
    account.submitted = account.acknowledged = len(ended)
    account.finished = sum(run.status == "SUCCEEDED" for run in ended)
    account.lost = account.submitted - account.finished
    for run in ended:
        fences = Counter(fence for _, fence, _ in ground.notes(run.id))
        account.doubled += any(many > 1 for many in fences.values())
        account.lost += fences[run.fence] == 0
    finished = [run.finished_at.timestamp() for run in ended if run.finished_at is not None]

    def rate(start: float, end: float) -> float:
        return sum(start <= at < end for at in finished) / (end - start)

    account.before = rate(marks[0], marks[1])
    usual = max(account.before, 1.0)
    account.during, account.after = (rate(*marks[at : at + 2]) / usual for at in (1, 2))
