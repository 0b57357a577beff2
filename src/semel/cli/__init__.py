"""The ``semel`` command.

Here is only what every command shares; each has a module of its own, and loads what it needs when it is carried out:
``semel --help`` waits for no web stack and no database driver.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Sequence

from semel import __version__
from semel.cli import (
    collecting,
    completion,
    configs,
    doctor,
    jobs,
    keys,
    looking,
    migrating,
    quotas,
    results,
    runs,
    serve,
    tokens,
    worker,
)
from semel.cli.options import INTERRUPTED
from semel.cli.parsing import Parser
from semel.cli.printing import say
from semel.errors import SemelError
from semel.redaction import TextFormatter

GROUPS = {
    "Serve and work": ("serve", "worker", "sweep"),
    "Runs, through a server": ("submit", "runs", "show", "wait", "logs", "result", "cancel", "retry"),
    "Jobs, through a server": ("job", "jobs"),
    "What there is, through a server": ("models", "workers", "summary"),
    "Manage, on the database": ("token", "quota", "keys", "config"),
    "Keep in order, on the database": ("migrate", "gc", "doctor"),
    "Your shell": ("completion",),
}
_FOOT = """\
Commands that go through a server find it by --server or $SEMEL_SERVER (http://127.0.0.1:8001), and you by --token,
$SEMEL_TOKEN or $SEMEL_TOKEN_FILE. Those on the database find it by --db or $SEMEL_DB (sqlite:///semel.db).

  semel serve                                            begin, with the demo's models
  semel submit baseline_forecast_v1 seconds=3 --wait     and in another terminal, use it
  semel COMMAND --help                                   all about a command
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 when it worked, 1 when it did not, 2 for a mistake in its use, 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what it cannot write must not stop the rest
            stream.reconfigure(errors="backslashreplace")
    if not (sys.argv[1:] if arguments is None else arguments):
        print(parser().format_help(), file=sys.stderr)
        return 2
    if logging.lastResort is not None:  # what is logged before there is a log
        logging.lastResort.setFormatter(TextFormatter())
    chosen = _chosen(arguments)
    try:
        code = int(chosen.do(chosen))
        sys.stdout.flush()
    except SemelError as error:
        say(f"semel: {error}")
        return 1
    except BrokenPipeError:  # whoever read our output has had enough, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        say(f"semel: {error}")
        return 1
    except UnicodeEncodeError as error:  # a word of the command line that is no text comes to us as surrogates
        print(f"semel: {error.object!r:.200} is not text in UTF-8", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("semel: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


def _chosen(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for. Of a command that takes several words, some may come after its options."""
    whole = parser()
    chosen, left = whole.parse_known_args(arguments)
    name, read = getattr(chosen, "more", ("", str))
    if left and not name:
        whole.error(f"unrecognized arguments: {' '.join(left)}")
    try:
        words = [read(word) for word in left]
    except argparse.ArgumentTypeError as error:
        whole.error(str(error))
    if words:
        setattr(chosen, name, [*getattr(chosen, name), *words])
    return chosen


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    whole = _Whole(prog="semel", description="semel makes work happen once.")
    whole.add_argument("--version", action="version", version=f"semel {__version__}")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for module in (
        serve,
        worker,
        runs,
        results,
        jobs,
        looking,
        tokens,
        quotas,
        keys,
        configs,
        migrating,
        collecting,
        doctor,
    ):
        module.add_to(commands)
    completion.add_to(commands, parser)
    return whole


class _Whole(Parser):
    """Shows the commands by what they are for."""

    def format_help(self) -> str:
        """The page of ``semel --help``."""
        (actions,) = (each for each in self._actions if isinstance(each, argparse._SubParsersAction))
        said = {each.dest: each.help for each in actions._get_subactions()}
        lines = [f"usage: {self.prog} COMMAND ...", "", str(self.description)]
        for group, names in GROUPS.items():
            lines += ["", f"{group}:", *(f"  {name:<12}{said[name]}" for name in names)]
        lines += ["", "Options:", "  -h, --help  show this help", "  --version   show the version", "", _FOOT]
        return "\n".join(lines)
