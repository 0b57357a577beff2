"""What the processes of the service log: one line a thing, for people or as JSON, with no secret in it."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any

import msgspec
import structlog

from semel.service.settings import Settings

_SECRETS = re.compile(
    r"(?P<begin>\bsemel_[0-9a-f]{8,64}_|\bwhsec_|\br8_)[\w+/=-]+"
    r"|(?P<scheme>\b[Bb]earer\s{1,10})[\w.~+/=-]+"
    r"|(?P<user>://[^\s:/@]{0,200}:)[^\s/]{1,500}(?=@)"
    r"|(?P<field>\b(?:password|passwd|secret|token|api_key)=)[^\s&\"']+"
)
"""A token of ours or of a provider's, whatever follows Bearer, the password of a URL, and what is named as one.

Every part begins with something that is rare, and none looks far: a line of megabytes takes no longer for it.
"""
_SIGNS = ("semel_", "whsec_", "r8_", "earer", "://", "password=", "passwd=", "secret=", "token=", "api_key=")
_NOISY = {"alembic": logging.WARNING, "httpx": logging.WARNING, "_granian": logging.WARNING}

Line = MutableMapping[str, Any]


def set_up(settings: Settings) -> None:
    """Let everything that this process logs, whoever says it, go to stderr in one form."""
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
    shown += [structlog.processors.format_exc_info, hide_secrets]
    if how == "json":
        shown.append(structlog.processors.JSONRenderer(_json))
    else:
        plain = structlog.dev.plain_traceback
        renderer = structlog.dev.ConsoleRenderer(
            colors=colors, exception_formatter=plain, pad_event_to=0, sort_keys=False
        )
        shown += [_without_nothing, renderer]
    return structlog.stdlib.ProcessorFormatter(processors=shown)


def _plain_event(_logger: Any, _name: str, line: Line) -> Line:
    """The worker says its fields in the text, too, for those who log text: here they are fields already."""
    line.pop("message", None)  # left by another formatter
    if "payload_hash" in line:
        line["event"] = line["event"].rpartition(" model=")[0] or line["event"]
    return line


def _without_nothing(_logger: Any, _name: str, line: Line) -> Line:
    """People need not read what is not there."""
    return {name: value for name, value in line.items() if value is not None}


def hide_secrets(_logger: Any, _name: str, line: Line) -> Line:
    """Whoever logs a token or an address with a password by mistake has not told it."""
    for name, value in line.items():
        if isinstance(value, str):
            line[name] = without_secrets(value)
    return line


def without_secrets(text: str) -> str:
    """The text with every secret that looks like one hidden."""
    if not any(sign in text for sign in _SIGNS):
        return text
    return _SECRETS.sub(_hidden, text)


def _hidden(found: re.Match[str]) -> str:
    return f"{found['begin'] or found['scheme'] or found['user'] or found['field']}***"


def _json(line: Any, **_: Any) -> str:
    return msgspec.json.encode(line, enc_hook=repr).decode()
