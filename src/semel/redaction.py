"""What may be logged or printed: no secret, nothing that a terminal would obey or that looks like another line."""

from __future__ import annotations

import logging
import re
from types import TracebackType
from typing import TypeAlias

ExceptionInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

_SECRETS = re.compile(
    r"(?P<begin>\bsemel_[0-9a-f]{8,64}_|\bwhsec_|\br8_)[\w+/=-]+"
    r"|(?P<scheme>\b[Bb]earer\s{1,10})[\w.~+/=-]+"
    r"|(?P<user>://[^\s:/@]{0,200}:)(?:[^\s/]{1,500}|[^\s\"'<>,;]{1,500})(?=@)"
    r"|(?P<field>(?:password|passwd|secret|token|api_key)=[\"']?)[^\s&\"']+"
)
"""A token of ours or of a provider's, whatever follows Bearer, the password of a URL, and what is named as one.

Every part begins with something that is rare, and none looks far: a line of megabytes takes no longer for it.
"""
_SIGNS = ("semel_", "whsec_", "r8_", "earer", "://", "password=", "passwd=", "secret=", "token=", "api_key=")


def without_secrets(text: str) -> str:
    """The text with every secret that looks like one hidden."""
    if not any(sign in text for sign in _SIGNS):
        return text
    return _SECRETS.sub(_hidden, text)


def _hidden(found: re.Match[str]) -> str:
    return f"{found['begin'] or found['scheme'] or found['user'] or found['field']}***"


def printable(text: str, but: str = "\n\t") -> str:
    """The text with nothing in it that a terminal would obey: what is printed was often written by others."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in but else repr(each)[1:-1] for each in text)


def one_line(text: str) -> str:
    """The same on one line: what looks like a second one would be taken for another message."""
    return printable(text, "\t")


def indented(text: str) -> str:
    """The same of a text that has lines, such as a traceback: none of them begins as a message does."""
    return "\n".join(f"  {line}" for line in printable(text).split("\n"))


class TextFormatter(logging.Formatter):
    """Lines of text for a handler of the standard library."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 -- the library's name
        return one_line(without_secrets(super().formatMessage(record)))

    def formatException(self, ei: ExceptionInfo) -> str:  # noqa: N802 -- the library's name
        return indented(without_secrets(super().formatException(ei)))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 -- the library's name
        return indented(without_secrets(super().formatStack(stack_info)))


class Redacting(logging.Formatter):
    """Somebody else's formatter, without secrets and control characters."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    @classmethod
    def over(cls, inner: logging.Formatter | None) -> logging.Formatter:
        """The formatter, or the one that a handler without any has; once is enough."""
        return inner if isinstance(inner, cls | TextFormatter) else cls(inner or logging.Formatter())

    def format(self, record: logging.LogRecord) -> str:
        return printable(without_secrets(self._inner.format(record)))
