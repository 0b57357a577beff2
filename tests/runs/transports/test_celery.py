"""What is Celery's own: its messages, its task, its connections, and what its extra brings."""

import base64
import json
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from celery import Celery, current_app
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from redis import Redis

from semel.runs import celery as semel_celery
from semel.runs.app import App
from support.programs import outcome
from support.transports import Ground


def test_a_message_holds_the_run_and_where_its_app_is_and_no_secret(tmp_path: Path, redis_url: str) -> None:
    url = f"sqlite:///{tmp_path / 'semel.db'}"
    with Ground(tmp_path, transport="celery", redis=redis_url, urls={"sqlite": url}, sweep_every=3600) as ground:
        run = ground.app("sqlite").submit("add", {"a": 1, "b": 1})
    sent = Redis.from_url(redis_url).lrange("semel", 0, -1)
    assert sent
    for raw in sent:  # on a slow machine it may be announced twice
        message = json.loads(raw)
        (run_id, where), _, _ = json.loads(base64.b64decode(message["body"]))
        assert (message["headers"]["task"], run_id) == ("semel.run", run.id)
        assert where["references"] == [["transport_app:sqlite_app", None]]
        assert url not in raw.decode() + json.dumps(where)


def test_the_users_own_celery_app_stays_the_current_one() -> None:
    assert current_app.main != "semel"
    assert semel_celery.worker_app is not current_app._get_current_object()


def test_the_task_is_acknowledged_late_and_neither_retried_nor_kept(sqlite_url: str) -> None:
    celery_app = Celery(set_as_current=False)
    semel_celery.install(celery_app, App(sqlite_url))
    for each in (celery_app, semel_celery.worker_app):
        task = each.tasks["semel.run"]
        assert (task.acks_late, task.ignore_result, task.max_retries) == (True, True, 0)


def test_a_forked_process_gets_a_connection_of_its_own(sqlite_url: str, redis_url: str) -> None:
    connections, messages = outcome(
        """
        import os
        from redis import Redis
        from semel.runs.app import App
        from semel.runs.types import new_id
        app = App(sqlite_url, transport="celery", redis=redis_url)
        redis = Redis.from_url(redis_url)
        def connections():
            return {each["id"] for each in redis.client_list() if each["db"] == redis_url.rpartition("/")[2]}
        assert app.transport.announce([(new_id(), "default")])
        before = connections()
        child = os.fork()
        if not child:
            done = app.transport.announce([(new_id(), "default")]) and len(connections() - before) >= 1
            os._exit(0 if done else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert app.transport.announce([(new_id(), "default")])
        tell((before <= connections(), redis.llen("semel")))
        app.close()
        """,
        sqlite_url=sqlite_url,
        redis_url=redis_url,
    )
    assert connections
    assert messages == 3


def test_the_extra_brings_what_celery_needs_for_redis() -> None:
    """Celery's transport is imported with nothing but what the extra asks for, and what that asks for."""
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    brought: set[str] = set()
    asked = [Requirement(each) for each in [*extras["celery"], *extras["redis"]]]
    while asked:
        wanted = asked.pop()
        name = canonicalize_name(wanted.name)
        if name == "semel" or (wanted.marker and not wanted.marker.evaluate()):
            continue
        with suppress(PackageNotFoundError):
            needs = [Requirement(each) for each in requires(name) or []]
            plain = [each for each in needs if each.marker is None or each.marker.evaluate({"extra": ""})]
            more = [each for each in needs if each.marker and not each.marker.evaluate({"extra": ""})]
            more = [each for each in more if any(each.marker.evaluate({"extra": extra}) for extra in wanted.extras)]
            asked += [Requirement(str(each).partition(";")[0]) for each in more]
            asked += [] if name in brought else plain
            brought.add(name)
    lacking = [
        module
        for module, owners in packages_distributions().items()
        if not {canonicalize_name(owner) for owner in owners} & brought
    ]
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS.format(lacking=set(lacking))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


_IMPORTS = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {lacking!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
import kombu.transport.redis, celery.backends.redis
assert kombu.transport.redis.redis is not None
"""
