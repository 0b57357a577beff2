"""The log of the service's processes: for people or as JSON, without secrets."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from datetime import datetime
from typing import Any

import msgspec
import structlog

from semel.redaction import indented, one_line, printable, without_secrets
from semel.service.settings import Settings

_NOISY = {"alembic": logging.WARNING, "httpx": logging.WARNING, "_granian": logging.WARNING}

_MULTILINE = frozenset({"exception", "stack"})

Line = MutableMapping[str, Any]


def set_up(settings: Settings) -> None:
    """Send everything that this process logs to stderr, in one format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(settings.log_format, colors=sys.stderr.isatty()))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.upper())
    for name, level in _NOISY.items():
        logging.getLogger(name).setLevel(max(level, root.level))


def formatter(how: str, *, colors: bool = False) -> logging.Formatter:
    """A formatter for any handler: ``pretty`` or ``json``."""
    shown: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.ExtraAdder(),
        _plain_event,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
    ]
    shown.append(structlog.processors.format_exc_info)
    if how == "json":
        shown += [_safe_json, structlog.processors.JSONRenderer(_json)]
    else:
        plain = structlog.dev.plain_traceback
        renderer = structlog.dev.ConsoleRenderer(
            colors=colors, exception_formatter=plain, pad_event_to=0, sort_keys=False
        )
        shown += [_without_none, _safe_text, renderer]
    return structlog.stdlib.ProcessorFormatter(processors=shown)


def _plain_event(_logger: Any, _name: str, line: Line) -> Line:
    """Remove the fields from the worker's message, which repeats them for plain-text logs."""
    line.pop("message", None)  # set by another formatter
    if "payload_hash" in line:
        line["event"] = line["event"].rpartition(" model=")[0] or line["event"]
    return line


def _without_none(_logger: Any, _name: str, line: Line) -> Line:
    return {name: value for name, value in line.items() if value is not None}


def _safe(value: Any, *, lines: bool) -> Any:
    """The value without secrets and control characters."""
    if isinstance(value, str):
        masked = without_secrets(value)
        return printable(masked) if lines else one_line(masked)
    if value is None or isinstance(value, bool | int | float | datetime):
        return value
    if isinstance(value, dict):
        return {_safe(str(name), lines=lines): _safe(item, lines=lines) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_safe(item, lines=lines) for item in value]
    return _safe(repr(value), lines=lines)


def _safe_json(_logger: Any, _name: str, line: Line) -> Line:
    return {name: _safe(value, lines=True) for name, value in line.items()}


def _safe_text(_logger: Any, _name: str, line: Line) -> Line:
    """Indent the lines of a traceback, so that none looks like a message of its own."""
    safe = {name: _safe(value, lines=name in _MULTILINE) for name, value in line.items()}
    return {name: indented(value) if name in _MULTILINE else value for name, value in safe.items()}


def _json(line: Any, **_: Any) -> str:
    return msgspec.json.encode(line, enc_hook=repr).decode()
