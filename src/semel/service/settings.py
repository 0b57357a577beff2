"""The settings of the service: every option of ``semel serve`` is also an environment variable."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Literal, get_type_hints

import msgspec
from msgspec import Struct, field

from semel._validation import checked_int, checked_number
from semel.errors import InvalidRequest

PREFIX = "SEMEL_"
MEBIBYTE = 1024 * 1024
_WEB_ADDRESS = re.compile(r"https?://[!-;=?-~]+")
_SECRETS = frozenset({"db", "redis", "artifacts", "events", "replicate_token", "replicate_webhook_secret"})
_SECRET = "'***'"  # noqa: S105 -- shown in place of a secret


class Settings(Struct, frozen=True, kw_only=True):
    """``db`` is ``SEMEL_DB`` in the environment and ``--db`` on the command line; other fields are named likewise."""

    app: str = "semel.demo:app"
    """The semel.App, as module:name; the demo by default."""
    db: str | None = None
    """The URL of the database; None for the app's own (the demo's is sqlite:///semel.db)."""
    transport: Literal["database", "rq", "celery"] | None = None
    redis: str | None = None
    artifacts: str | None = None
    wait_for_database: float = 60.0
    """Seconds for which a starting process waits for an unavailable database; 0 to fail at once."""
    configs: str | None = None
    """The folder of named configs, one file each."""
    host: str = "127.0.0.1"
    port: int = 8001
    processes: int = 1
    """Processes that serve requests."""
    worker: bool = True
    """Whether a worker runs beside the server."""
    queues: str = "default"
    """The queues that the worker serves, in order, separated by commas."""
    concurrency: int = 100
    """Async runs at a time."""
    worker_processes: int | None = None
    """Child processes of the worker for blocking models; None for one per CPU."""
    threads: int = 8
    """Runs in threads at a time."""
    drain: float = 30.0
    """Seconds for active requests and runs to end at shutdown."""
    public_url: str | None = None
    """The public URL of this server, which providers call back."""
    docs_url: str | None = None
    """Where the documentation is served: errors link to its page on troubleshooting. None for no links."""
    max_body: int = MEBIBYTE
    """The largest body of a request, in bytes."""
    body_timeout: float = 30.0
    """Seconds within which a request's body must have arrived."""
    header_timeout: float = 30.0
    """Seconds within which a request's head must have arrived; also how long a connection may be idle."""
    rate: float = 0.0
    """Requests a second that a token may send, in each process, with bursts of twice that; 0 for no limit."""
    max_waiting: int = 500
    """Requests of one caller that may wait for runs or stream their events at a time, in each process."""
    low_replay_rate: float | None = None
    """The share of replays among submissions, such as 0.5, below which the dashboard warns; None for never."""
    log_format: Literal["pretty", "json"] = "pretty"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    events: str | None = None
    """The URL of a Redis (redis://host/0) whose stream ``semel:events`` gets every event."""
    private_webhooks: bool = False
    """Whether webhooks may go to private addresses."""
    replicate_url: str = "https://api.replicate.com"
    replicate_token: str | None = field(default=None)
    replicate_webhook_secret: str | None = field(default=None)

    def __repr__(self) -> str:
        """Without secrets: URLs may contain passwords, too."""
        shown = (f"{name}={_SECRET if name in _SECRETS and value else repr(value)}" for name, value in _fields(self))
        return f"Settings({', '.join(shown)})"

    def environment(self) -> dict[str, str]:
        """The environment variables from which :func:`from_environment` returns the same settings."""
        return {PREFIX + name.upper(): _written(value) for name, value in _fields(self) if value is not None}


def from_environment(environ: Mapping[str, str] | None = None, **options: Any) -> Settings:
    """The settings of the environment; ``options`` that are not None override it."""
    environ = os.environ if environ is None else environ
    found: dict[str, Any] = {}
    for name in Settings.__struct_fields__:
        text = environ.get(PREFIX + name.upper())
        if text:
            found[name] = text
    found |= {name: value for name, value in options.items() if value is not None}
    found.setdefault("replicate_token", environ.get("REPLICATE_API_TOKEN") or None)
    types = get_type_hints(Settings)
    try:
        settings = Settings(
            **{name: msgspec.convert(value, types[name], strict=False) for name, value in found.items()}
        )
    except msgspec.ValidationError as error:
        wrong = next(name for name, value in found.items() if not _fits(value, types[name]))
        raise InvalidRequest(f"{PREFIX}{wrong.upper()} is {found[wrong]!r}: {error}") from None
    _check(settings)
    return settings


def _fields(settings: Settings) -> list[tuple[str, Any]]:
    return list(msgspec.structs.asdict(settings).items())


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        return False
    return True


def _check(settings: Settings) -> None:
    checked_int("port", settings.port, 0, 65535)
    for name in ("processes", "max_body", "max_waiting"):  # the worker checks its own
        checked_int(name, getattr(settings, name), 1, None)
    if settings.low_replay_rate is not None:
        checked_number("low_replay_rate", settings.low_replay_rate, 0, 1, above=True)
    for name in ("rate", "drain", "wait_for_database"):
        checked_number(name, getattr(settings, name))
    if settings.docs_url is not None and not _WEB_ADDRESS.fullmatch(settings.docs_url):
        raise InvalidRequest(
            f"SEMEL_DOCS_URL must be a URL such as https://docs.example.com, not {settings.docs_url!r}"
        )
    for name in ("body_timeout", "header_timeout"):
        checked_number(name, getattr(settings, name), above=True)


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
