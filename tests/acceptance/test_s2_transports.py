"""S2.1: PostgreSQL is the truth, Redis carries the work to stock RQ and Celery workers, the API mounts inside Flask."""

from collections.abc import Callable
from pathlib import Path

import pytest
from flask import Flask
from redis import Redis
from sqlalchemy import create_engine, make_url, text
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from semel.cli import main as semel_command
from semel.service import wsgi
from support.service import host_wsgi as hosted_wsgi
from support.transports import Ground, celery_worker, rq_worker, until


@pytest.mark.parametrize(
    "way",
    [("rq", "rq:queue:semel", rq_worker), ("celery", "semel", celery_worker)],
    ids=["rq", "celery"],
)
def test_s2_1_postgres_is_the_truth_redis_carries_the_work_and_flask_mounts_the_api(
    way: tuple[str, str, Callable[[Ground], object]],
    postgres_url: str,
    redis_url: str,
    tmp_path: Path,
) -> None:
    """A Flask app submits, a stock worker does it once; a doubled message changes nothing."""
    transport, queue, start = way
    assert semel_command(["migrate", postgres_url]) == 0
    flask = Flask("mine")
    with Ground(tmp_path, transport=transport, redis=redis_url, urls={"postgres": postgres_url}) as ground:
        service = wsgi(ground.app("postgres"))
        flask.wsgi_app = DispatcherMiddleware(flask.wsgi_app, {"/semel": service})  # type: ignore[method-assign]
        with hosted_wsgi(flask) as client, Redis.from_url(redis_url) as broker:
            run = client.post("/semel/runs", json={"model": "add", "parameters": {"a": 1, "b": 2}}).json()
            until(lambda: broker.llen(queue), "Redis carries it")
            assert client.get(run["links"]["self"]).json()["status"] == "PENDING"
            start(ground)
            for _ in range(2):
                ground.app("postgres").transport.announce([(run["run_id"], "default")])
            done = until(lambda: (found := client.get(run["links"]["self"]).json())["status"] == "SUCCEEDED" and found)
            until(lambda: not broker.llen(queue), "every message is taken")
            assert done["run_id"] == run["run_id"], ground.output()
            assert client.get(run["links"]["result"]).json() == 3
        service.close()
        assert len(ground.notes(run["run_id"])) == 1
    engine = create_engine(make_url(postgres_url).set(drivername="postgresql+psycopg"))
    with engine.connect() as connection:
        row = connection.execute(text("SELECT CAST(id AS text), status, attempt_count FROM model_runs")).one()
    engine.dispose()
    assert tuple(row) == (run["run_id"], "SUCCEEDED", 1)
