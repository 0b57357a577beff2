"""The ``semel`` command.

``GROUPS`` lists the commands. A command's module is imported when the command is used, and imports what it needs when
it runs, so that ``semel --help`` loads no web stack and no database driver.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import cast

import click

from semel import __version__
from semel.cli._options import INTERRUPTED, Group, argument, examples
from semel.cli._output import note
from semel.errors import SemelError
from semel.redaction import TextFormatter

GROUPS = {
    "Serve and work": {
        "serve": ("serve", "Serve runs, jobs and quotas over HTTP, with a worker"),
        "worker": ("worker", "Work on the runs of an app"),
        "sweep": ("worker", "Recover lost runs without working on any"),
    },
    "Runs, through a server": {
        "submit": ("runs", "Submit a run; --wait waits until it has ended"),
        "runs": ("runs", "List runs"),
        "show": ("runs", "Show a run, its timeline, and why it is pending"),
        "wait": ("runs", "Wait until a run has ended"),
        "logs": ("runs", "Print the log of a run; --follow until it has ended"),
        "result": ("runs", "Print the result of a run, or one of its artifacts"),
        "cancel": ("runs", "Cancel runs"),
        "retry": ("runs", "Submit failed or cancelled runs again"),
        "priority": ("runs", "Change the priority of pending runs"),
        "pause": ("pauses", "Pause a queue or a model: nothing new starts"),
        "resume": ("pauses", "Resume a queue or a model"),
        "rerun": ("manifest", "Run a run again, and say what changed since"),
    },
    "Jobs, through a server": {
        "job": ("jobs", "Submit, show and cancel jobs of named configs"),
        "jobs": ("jobs", "List jobs"),
    },
    "Inspect, through a server": {
        "models": ("inspect", "List the models and their parameters"),
        "workers": ("inspect", "List the workers"),
        "diff": ("manifest", "Show how two runs differ: code, data, parameters, packages"),
        "manifest": ("manifest", "Show what an attempt was made of: code, packages, data, machine"),
        "summary": ("inspect", "Count the runs of each model by status"),
    },
    "Manage, on the database": {
        "token": ("tokens", "Create, list, rotate and revoke tokens for the server"),
        "quota": ("quotas", "Limit how much users may run and spend"),
        "keys": ("keys", "Show keys, resolve unknown outcomes, delete keys"),
        "config": ("config", "Manage the named configs of jobs"),
        "audit": ("audit", "Show what people did; export, verify and prove the history of runs"),
    },
    "Maintain, on the database": {
        "migrate": ("migrate", "Create or update semel's tables in a database"),
        "gc": ("gc", "Remove old runs with their files, and expired keys"),
        "doctor": ("doctor", "Check the database, Redis, clock, migrations, disk and workers"),
    },
    "Your shell": {"completion": ("", "Print a completion script for a shell")},
}
"""The commands by heading of the help: module and summary."""
COMPLETE = "_SEMEL_COMPLETE"
"""The environment variable with which a shell requests completions."""


class _Commands(Group):
    """Imports a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 -- click's
        return [name for names in GROUPS.values() for name in names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = next((names[cmd_name][0] for names in GROUPS.values() if cmd_name in names), None)
        if not module:
            return super().get_command(ctx, cmd_name)
        return cast("click.Command", getattr(importlib.import_module(f"semel.cli.{module}"), cmd_name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 -- click's
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                rows = [(f"{name:<10}", summary) for name, (_, summary) in names.items()]  # one column in all sections
                formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 -- click's
        formatter.write(f"\n{self.epilog}")


cli = _Commands(
    name="semel",
    help="semel makes work happen once.",
    epilog="""\
Commands through a server connect to --server or $SEMEL_SERVER (default: http://127.0.0.1:8001), with --token,
$SEMEL_TOKEN or $SEMEL_TOKEN_FILE. Commands on the database open --db or $SEMEL_DB (default: sqlite:///semel.db).

  semel serve                                            start a server with the demo's models
  semel submit baseline_forecast_v1 seconds=3 --wait     submit a run, in another terminal
  semel COMMAND --help                                   show the options of a command
""",
    options_metavar="",
    subcommand_metavar="COMMAND ...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120, "show_default": True},
)
cli = click.version_option(__version__, prog_name="semel", message="%(prog)s %(version)s")(cli)


@cli.command()
@examples(
    'eval "$(semel completion bash)"                               # in ~/.bashrc',
    "semel completion zsh > ~/.zfunc/_semel                        # a folder of your fpath",
    "semel completion fish > ~/.config/fish/completions/semel.fish",
)
@argument("shell", type=click.Choice(["bash", "zsh", "fish"]), help="The shell.")
def completion(shell: str) -> None:
    """Print a script that completes commands, options and their values in a shell."""
    from click.shell_completion import get_completion_class

    script = get_completion_class(shell)
    assert script is not None
    print(script(cli, {}, "semel", COMPLETE).source())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0 on success, 1 on failure, 2 for wrong usage, 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # do not fail for a character that it cannot encode
            stream.reconfigure(errors="backslashreplace")
    if logging.lastResort is not None:  # for records before logging is set up
        logging.lastResort.setFormatter(TextFormatter())
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # stdout was closed by its reader, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (SemelError, OSError) as error:
        note(f"semel: {error}")
        return 1
    except UnicodeEncodeError as error:  # Python passes an argument that is not UTF-8 as surrogates
        print(f"semel: {error.object!r:.200} is not text in UTF-8", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("semel: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


def _run(arguments: list[str]) -> int:
    if COMPLETE in os.environ:
        from click.shell_completion import shell_complete

        return shell_complete(cli, {}, "semel", COMPLETE, os.environ[COMPLETE])
    try:
        with cli.make_context("semel", list(arguments)) as context:
            return int(cli.invoke(context) or 0)
    except click.exceptions.Exit as end:  # after --help and --version
        code = end.exit_code
    except click.UsageError as error:
        print(_usage_message(error), file=sys.stderr)
        code = error.exit_code
    if arguments:
        raise SystemExit(code)
    return code


def _usage_message(error: click.UsageError) -> str:
    """The usage and the mistake; the help of a group that was called without a verb."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return error.format_message()
    context = error.ctx or click.Context(cli, info_name="semel")
    return f"{context.get_usage()}\n{context.command_path}: error: {_reason(error)}"


def _reason(error: click.UsageError) -> str:
    match error:
        case click.NoSuchOption():
            meant = f"; is it {error.possibilities[0]}?" if error.possibilities else ""
            return f"unknown option: {error.option_name}{meant}"
        case click.MissingParameter(param=click.Argument() as param):
            return f"missing argument: {param.human_readable_name}"
        case click.MissingParameter(param=click.Option() as param):
            return f"missing option: {param.opts[-1]}"
        case click.BadParameter(param=click.Option() as param):
            return f"{'/'.join(param.opts)}: {error.message}"
        case _:
            return error.format_message()
