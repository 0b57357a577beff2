"""Options and arguments: how they are parsed and shown, and those that many commands share."""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import click

from semel._validation import age_in, is_span, span_in
from semel.cli._app import DATABASE, url_of
from semel.errors import MissingExtra

SERVER = "http://127.0.0.1:8001"
APP = "The semel.App to load, such as myproject.runs:app."
WAIT_FOR_DATABASE = 60.0
TRANSPORTS = ("database", "rq", "celery")
INTERRUPTED = 130
"""The exit code after Ctrl-C."""

Function = TypeVar("Function", bound=Callable[..., Any])


class Option(click.Option):
    """An option that belongs to a section of the help, and may have an alias that the help omits.

    With an environment variable, an empty value counts as not given: ``--token "$UNSET"`` does no harm.
    """

    def __init__(self, names: Sequence[str], section: str = "Options", alias: str = "", **settings: Any) -> None:
        super().__init__([*names, *filter(None, [alias])], **{"show_envvar": "envvar" in settings, **settings})
        self.section = section
        self._alias = alias

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        if record is None or not self._alias:
            return record
        return re.sub(rf", {self._alias}\b(?!-)", "", record[0]), record[1]

    def consume_value(self, ctx: click.Context, opts: Any) -> Any:
        if self.envvar and opts.get(self.name) == "":
            del opts[self.name]
        return super().consume_value(ctx, opts)


class Argument(click.Argument):
    """An argument with help, which Click supports only from 8.5 on."""

    section = "Arguments"

    def __init__(self, *names: Any, help: str, **settings: Any) -> None:  # noqa: A002 -- click's word
        super().__init__(*names, **settings)
        self.about = help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.make_metavar(ctx), self.about


class Command(click.Command):
    """A command that accepts unambiguous prefixes of options, and shows its options in sections."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)}
        end = args.index("--") if "--" in args else len(args)
        return super().parse_args(ctx, [*(_expanded(word, known) for word in args[:end]), *args[end:]])

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, " ".join(self.collect_usage_pieces(ctx)), prefix="usage: ")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(param, "section", "Options"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class Group(click.Group):
    """A command with subcommands, such as ``semel token``."""

    command_class = Command

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, " ".join(self.collect_usage_pieces(ctx)), prefix="usage: ")

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            meant = get_close_matches(args[0], self.list_commands(ctx), n=1)
            ctx.fail(f"unknown command: {args[0]}" + (f"; is it {meant[0]}?" if meant else ""))
        return super().resolve_command(ctx, args)


def command(function: Callable[..., Any]) -> click.Command:
    """Make a command of a function; its docstring is the help."""
    return click.command(cls=Command)(function)


def group(function: Callable[..., Any]) -> click.Group:
    """Make a group, to which ``@group.command()`` adds subcommands."""
    return click.group(cls=Group, options_metavar="", subcommand_metavar="VERB ...")(function)


def examples(*lines: str) -> Callable[[Function], Function]:
    """Add examples to the help of a command."""

    def add(function: Function) -> Function:
        shown = "\n".join(f"  {line}" for line in lines)
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n\b\nexamples:\n{shown}"
        return function

    return add


option = functools.partial(click.option, cls=Option)
argument = functools.partial(click.argument, cls=Argument)


def _expanded(word: str, known: Iterable[str]) -> str:
    """The only option with this prefix (``--status`` for ``--stat``); the word itself unless there is exactly one."""
    name, equals, value = word.partition("=")
    meant = [each for each in known if each.startswith(name)] if name.startswith("--") else []
    return f"{meant[0]}{equals}{value}" if len(meant) == 1 else word


class Value(click.ParamType):  # type: ignore[type-arg]  # older Clicks have it without arguments
    """Parses an option with a function that raises ValueError with a message for the user."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):  # a default
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def time_of(text: str) -> datetime:
    """Parse a time in ISO 8601, local unless it has a zone; or a span before now."""
    from semel.types import time_in

    if is_span(text):
        return datetime.now(UTC) - timedelta(seconds=span_in(text))
    try:
        return time_in(text).astimezone()
    except ValueError:
        raise ValueError(f"{text!r} is not a time, such as 2030-01-31, 2030-01-31T12:00 or 2h (before now)") from None


def whole_number(least: int, most: float = math.inf) -> Callable[[str], int]:
    """A parser of whole numbers within these bounds."""
    wanted = f"{least} or greater" if most == math.inf else f"from {least} to {most}"

    def parse(text: str) -> int:
        if not re.fullmatch(r"-?\d+", text, re.ASCII) or not least <= int(text) <= most:
            raise ValueError(f"{text!r} must be a whole number, {wanted}")
        return int(text)

    return parse


def amount(text: str) -> float:
    """Parse a number, 0 or greater."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"{text!r} must be a number, 0 or greater")
    return number


def cost(text: str) -> float:
    """Parse the cost of a run."""
    from semel.runs.types import MAX_COST

    number = amount(text)
    if number > MAX_COST:
        raise ValueError(f"{text!r} is too much: a run costs at most {MAX_COST:,}")
    return number


def names(text: str) -> list[str]:
    """Parse names separated by commas."""
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise ValueError(f"{text!r} must be a name, or names with commas between them")
    return found


def parameter(text: str) -> tuple[str, Any]:
    """Parse ``name=value``, whose value is JSON if it is valid JSON, else text."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ValueError(f"{text!r} is not a parameter, such as name=value")
    try:
        return name, _strict_json(value)
    except ValueError:
        return name, value


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object, or the file of ``@file``."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the file cannot be read: {error}") from None
    try:
        found = _strict_json(text)
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError('must be a JSON object, such as {"name": "value"}')  # noqa: TRY004 -- see Value
    return found


def json_value(text: str) -> Any:
    """Parse any JSON."""
    try:
        return _strict_json(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not valid JSON: {error}; a text needs quotes") from None


def _strict_json(text: str) -> Any:
    """Parse JSON; unlike Python, refuse NaN and infinity."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not a valid number in JSON")

    def finite(text: str) -> float:
        number = float(text)
        return refuse(text) if math.isinf(number) else number

    try:
        return json.loads(text, parse_constant=refuse, parse_float=finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


SPAN, AGE, TIME = Value("TIME", span_in), Value("TIME", age_in), Value("TIME", time_of)
POSITIVE, COUNT = Value("N", whole_number(1)), Value("N", whole_number(0))
PORT, PRIORITY = Value("N", whole_number(0, 65535)), Value("N", whole_number(-(2**31), 2**31 - 1))
SEED = Value("N", whole_number(0, 2**32 - 1))
AMOUNT, COST = Value("SECONDS", amount), Value("X", cost)
NAMES = Value("NAMES", names)
PARAMETER, JSON_OBJECT, JSON_VALUE = (
    Value("name=value", parameter),
    Value("JSON", json_object),
    Value("JSON", json_value),
)

run_argument = argument("run", help="The run's id, or at least six characters from its beginning or end.")
runs_or_filters = argument(
    "runs",
    nargs=-1,
    metavar="[RUN...]",
    help="Ids of runs, or at least six characters from the beginning or end of one.",
)
json_option = option("--json", "as_json", is_flag=True, help="Print JSON.")
tenant_option = option("--tenant", default="", metavar="TENANT", help="The tenant, if the server has several.")


app_argument = argument(
    "app", required=False, envvar="SEMEL_APP", metavar="[MODULE:APP]", help=f"{APP}  [env var: SEMEL_APP]"
)


def db_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--app``, ``--db`` and ``--json``, and call the function with the URL of the database as ``db``."""

    @option("--app", envvar="SEMEL_APP", metavar="MODULE:APP", help="The semel.App whose database it is.")
    @option("--db", envvar="SEMEL_DB", metavar="URL", help=f"The database.  [default: the app's, or {DATABASE}]")
    @json_option
    @functools.wraps(function)
    def placed(*, app: str | None, db: str | None, **options: Any) -> Any:
        return function(db=url_of(app, db), **options)

    return placed


def place_options(section: str = "Options") -> Callable[[Function], Function]:
    """Add ``--db``, ``--transport``, ``--redis`` and ``--artifacts``."""
    setting = functools.partial(option, section=section)

    def add(function: Function) -> Function:
        for add_one in (
            setting(
                "--artifacts",
                envvar="SEMEL_ARTIFACTS",
                metavar="PLACE",
                help="Where large results and artifacts are stored.",
            ),
            setting("--redis", envvar="SEMEL_REDIS", metavar="URL", help="The Redis for rq and celery."),
            setting(
                "--transport",
                type=click.Choice(TRANSPORTS),
                help="How workers are notified of runs.  [env var: SEMEL_TRANSPORT]",
            ),
            setting("--db", envvar="SEMEL_DB", metavar="URL", help="The database."),
        ):
            function = add_one(function)
        return function

    return add


def queues_option(section: str = "Options") -> Callable[[Function], Function]:
    """Add ``--queues``; ``--queue`` is an alias."""
    return option(
        "-q",
        "--queues",
        "queues",
        alias="--queue",
        type=NAMES,
        multiple=True,
        section=section,
        callback=lambda _context, _option, value: [name for several in value for name in several] or None,
        help="The queues to serve, in order of precedence; separated by commas, or repeated.  [default: default]",
    )


def wait_for_database_option(section: str = "Options") -> Callable[[Function], Function]:
    about = f"How long to wait for the database at startup; 0 to fail at once.  [default: {WAIT_FOR_DATABASE:g}]"
    return option("--wait-for-database", type=AMOUNT, section=section, help=about)


def log_format_option(section: str = "Options") -> Callable[[Function], Function]:
    """Add ``--log-format``; ``--log`` is an alias, and ``text`` means ``pretty``."""
    return option(
        "--log-format",
        "log_format",
        alias="--log",
        type=click.Choice(["pretty", "json", "text"]),
        metavar="[pretty|json]",
        section=section,
        callback=lambda _context, _option, value: "pretty" if value == "text" else value,
        help="The format of the log.  [default: pretty]",
    )


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """Raise MissingExtra, with the name of the extra, for a module that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{error}; this needs an extra: pip install 'semel[{name}]'") from error
