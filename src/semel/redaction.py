"""Cleans text for logs and terminals: hides secrets, and escapes control characters and line breaks."""

from __future__ import annotations

import logging
import re
from types import TracebackType
from typing import Any, TypeAlias

ExceptionInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

_SECRETS = re.compile(
    r"(?P<begin>\bsemel_[0-9a-f]{8,64}_|\bwhsec_|\br8_)[\w+/=-]+"
    r"|(?P<scheme>\b[Bb]earer\s{1,10})[\w.~+/=-]+"
    r"|(?P<user>://[^\s:/@]{0,200}:)(?:[^\s/]{1,500}|[^\s\"'<>,;]{1,500})(?=@)"
    r"|(?P<field>(?:password|passwd|secret|token|api_key)=[\"']?)[^\s&\"']+"
)
"""Tokens of semel and of providers, bearer tokens, passwords in URLs, and fields with the name of a secret.

Each alternative begins with rare characters and looks a limited distance ahead, so long lines take linear time.
"""
SECRET_NAME = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|TOKEN|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIAL|AUTH|DSN"
    r"|(?:^|_)(?:KEY|PASS)(?:$|_)|_PWD(?:$|_)",
    re.IGNORECASE,
)
"""Found in the name of a variable or a field whose value may be a secret."""
KNOWN_TOKEN = re.compile(r"\b(?:AKIA[0-9A-Z]{16}|gh[pousr]_\w{20,}|xox[abp]-[\w-]{10,}|sk-[\w-]{20,}|hf_\w{20,})")
"""A token of a well-known service."""
HIDDEN = "***"
_SIGNS = ("semel_", "whsec_", "r8_", "earer", "://", "password=", "passwd=", "secret=", "token=", "api_key=")


def without_secrets(text: str) -> str:
    """The text with everything that looks like a secret replaced by ``***``."""
    if not any(sign in text for sign in _SIGNS):
        return text
    return _SECRETS.sub(_hidden, text)


def without_secret_values(value: Any) -> Any:
    """The value as JSON has it, with the values of fields that have the name of a secret, and all texts that look like
    one, replaced by ``***``.
    """
    match value:
        case dict():
            return {
                name: HIDDEN if SECRET_NAME.search(str(name)) and each is not None else without_secret_values(each)
                for name, each in value.items()
            }
        case list() | tuple():
            return [without_secret_values(each) for each in value]
        case str():
            return KNOWN_TOKEN.sub(HIDDEN, without_secrets(value))
    return value


def _hidden(found: re.Match[str]) -> str:
    return f"{found['begin'] or found['scheme'] or found['user'] or found['field']}***"


def printable(text: str, but: str = "\n\t") -> str:
    """The text with control characters escaped, as a terminal would obey them."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in but else repr(each)[1:-1] for each in text)


def one_line(text: str) -> str:
    """The same, with line breaks escaped too: a second line could pass for another message."""
    return printable(text, "\t")


def indented(text: str) -> str:
    """The same, with each line indented, so that no line of a traceback can pass for a message."""
    return "\n".join(f"  {line}" for line in printable(text).split("\n"))


class TextFormatter(logging.Formatter):
    """A formatter of text lines without secrets and control characters."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 -- the library's name
        return one_line(without_secrets(super().formatMessage(record)))

    def formatException(self, ei: ExceptionInfo) -> str:  # noqa: N802 -- the library's name
        return indented(without_secrets(super().formatException(ei)))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 -- the library's name
        return indented(without_secrets(super().formatStack(stack_info)))


class Redacting(logging.Formatter):
    """Wraps another formatter and cleans what it returns."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    @classmethod
    def over(cls, inner: logging.Formatter | None) -> logging.Formatter:
        """The wrapped formatter, or the default one; a formatter that is wrapped already is returned as it is."""
        return inner if isinstance(inner, cls | TextFormatter) else cls(inner or logging.Formatter())

    def format(self, record: logging.LogRecord) -> str:
        return printable(without_secrets(self._inner.format(record)))
