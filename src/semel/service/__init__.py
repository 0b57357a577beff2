"""The server around semel: runs, jobs, quotas and keys over HTTP."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from semel.service.settings import Settings

if TYPE_CHECKING:
    from semel.service.app import asgi
    from semel.service.server.wsgi import wsgi

__all__ = ["Settings", "asgi", "wsgi"]

_HOMES = {"asgi": "semel.service.app", "wsgi": "semel.service.server.wsgi"}


def __getattr__(name: str) -> Any:
    """Import the web stack when it is first needed: commands that only use the database start fast."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from semel.db.database import missing

    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        raise missing("service", error) from error
