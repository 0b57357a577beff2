"""``semel completion``: what a shell needs to complete the command's words."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from semel.cli import options
from semel.errors import MissingExtra


def add_to(commands: options.Commands, parser_of: Callable[[], argparse.ArgumentParser]) -> None:
    """Add the command; ``parser_of`` makes the parser that is to be completed."""
    parser = options.command(
        commands,
        "completion",
        help="print what a shell needs to complete semel's words",
        description="Print a script for a shell that completes commands and options.",
        example='eval "$(semel completion bash)"                          # in ~/.bashrc\n'
        "semel completion zsh > ~/.zfunc/_semel                    # a folder of your fpath\n"
        "semel completion tcsh > ~/.semel.csh; source ~/.semel.csh",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell")
    parser.set_defaults(do=lambda chosen: _complete(chosen, parser_of()))


def _complete(chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{error}; this needs an extra: pip install 'semel[service]'") from error
    print(shtab.complete(parser, shell=chosen.shell))
    return 0
