"""A real PgBouncer in front of the tests' PostgreSQL, in transaction mode, with fewer sessions than tests use clients.

SEMEL_TEST_PGBOUNCER names the program; by default it is the one that Debian's package installs.
"""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from sqlalchemy import make_url

from support.servers import Postgres, Process, Server, ServerError, free_port

SESSIONS = 3
"""PostgreSQL's sessions for each database: fewer than the clients of every test."""


class PgBouncer(Server):
    """A PgBouncer; its configuration is the default one but for the pool's mode and size."""

    refusal = psycopg.OperationalError
    stop_signal = signal.SIGTERM
    crash_signal = signal.SIGKILL

    def database(self) -> str:
        raise NotImplementedError("PgBouncer has no databases of its own; see in_front_of")

    def in_front_of(self, url: str, **query: str) -> str:
        """The URL that reaches a database of the server through this PgBouncer."""
        own = make_url(self.url).set(database=make_url(url).database).update_query_dict(query)
        return own.render_as_string(hide_password=False)

    def _answers(self) -> bool:
        with psycopg.connect(self.url, prepare_threshold=None):
            return True


@contextmanager
def pgbouncer(server: Postgres, **more: object) -> Iterator[PgBouncer]:
    """PgBouncer on a free loopback port, with ``more`` settings."""
    program = os.environ.get("SEMEL_TEST_PGBOUNCER") or shutil.which(
        "pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin"
    )
    if program is None:
        raise ServerError(
            "no pgbouncer was found: install it (Debian: apt install pgbouncer), or set SEMEL_TEST_PGBOUNCER"
        )
    url = make_url(server.url)
    there = {
        "host": url.host or url.query["host"],
        "port": url.port or 5432,
        "user": url.username or "postgres",
        **({"password": url.password} if url.password else {}),
    }
    port = free_port()
    settings = {
        "listen_addr": "127.0.0.1",
        "listen_port": port,
        "unix_socket_dir": "",
        "auth_type": "any",
        "pool_mode": "transaction",
        "default_pool_size": SESSIONS,
        "max_client_conn": 500,
        **more,
    }
    with Process(last_signal=signal.SIGKILL, plain_user=True) as process:
        file = process.directory / "pgbouncer.ini"
        target = " ".join(f"{name}={value}" for name, value in there.items())
        lines = [
            "[databases]",
            f"* = {target}",
            "[pgbouncer]",
            *(f"{name} = {value}" for name, value in settings.items()),
        ]
        file.write_text("\n".join(lines) + "\n")
        if process.user_id is not None:
            os.chown(file, process.user_id, -1)
        file.chmod(0o600)
        bouncer = PgBouncer(f"postgresql://postgres@127.0.0.1:{port}/{url.database}", process, program, file)
        bouncer.start()
        yield bouncer
