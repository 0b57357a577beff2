"""A parser that names the word it does not know."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

_NEGATIVE = re.compile(r"-\.?\d")


class Parser(argparse.ArgumentParser):
    """Says which option is unknown, and which may be meant, where argparse would complain of what is missing for it."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See argparse. Words that are left may be meant for the command; options that are left are a mistake."""
        self._given = args or ()
        found, left = super().parse_known_args(args, namespace)
        if unknown := [word for word in left if word.startswith("-")]:
            self.error(self._about(unknown[0]))
        return found, left

    def error(self, message: str) -> NoReturn:
        """Show the usage and the mistake, and end with 2. A word that was misspelt is missing: tell of the word."""
        if message.startswith("the following arguments are required"):
            unknown = [word for word in self._options_given() if not self._knows(word)]
            message = self._about(unknown[0]) if unknown else message
        super().error(message)

    def _options_given(self) -> list[str]:
        words = list(self._given)
        if "--" in words:
            words = words[: words.index("--")]
        return [word for word in words if len(word) > 1 and word[0] == "-" and not _NEGATIVE.match(word)]

    def _knows(self, word: str) -> bool:
        name = word.partition("=")[0]
        if not name.startswith("--"):
            return name[:2] in self._option_string_actions
        return any(known.startswith(name) for known in self._option_string_actions)

    def _about(self, word: str) -> str:
        from difflib import get_close_matches

        name = word.partition("=")[0]
        meant = get_close_matches(name, list(self._option_string_actions), n=1)
        return f"unknown option: {name}" + (f"; is it {meant[0]}?" if meant else "")
