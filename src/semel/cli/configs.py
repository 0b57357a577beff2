"""``semel config``: what jobs are made of, by name."""

from __future__ import annotations

import argparse
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from semel.cli import database, options, printing
from semel.cli.worker import DEMO
from semel.errors import InvalidRequest, MissingExtra

if TYPE_CHECKING:
    from semel.runs.ledger import Ledger
    from semel.service.configs import Config, Entry
    from semel.service.settings import Settings
    from semel.service.site import Site


def add_to(commands: options.Commands) -> None:
    """Add the commands."""
    verbs = options.family(
        commands,
        "config",
        help="what jobs are made of, by name",
        description="Named configs say what a job runs, with which parameters and data. They are rows of the database, "
        "or files in the folder that the server's --configs names; a row wins over a file. The demo has some of its "
        "own, which only its server knows: they are left out where $SEMEL_APP names another app.",
    )
    listing = options.command(
        verbs,
        "list",
        help="list configs",
        description="Every config in the database, in the folder and of the demo; FROM says row, file or demo.",
        example="semel config list --configs ./configs",
    )
    showing = options.command(
        verbs,
        "show",
        help="a config",
        description="A config as jobs get it.",
        example="semel config show production-lora --json",
    )
    setting = options.command(
        verbs,
        "set",
        help="write a config",
        description="Write a config to the database: model, parameters, data, queue, priority, cost, providers. What "
        "was there under the name is replaced.",
        example='semel config set nightly \'{"model": "baseline_forecast_v1", "parameters": {"horizon_months": 24}}\'\n'
        "semel config set nightly @nightly.toml",
    )
    deleting = options.command(
        verbs,
        "delete",
        help="remove a config",
        description="Remove a config from the database. A file in the folder stays.",
        example="semel config delete nightly",
    )
    for parser, do in ((listing, _list), (showing, _show), (setting, _set), (deleting, _delete)):
        if parser is not listing:
            parser.add_argument("name", metavar="NAME", help="the config's name")
        if parser is setting:
            parser.add_argument("body", type=_body, metavar="JSON|@FILE", help="what it holds; a file is JSON or TOML")
        parser.add_argument("--configs", metavar="FOLDER", help="the folder of configs (default: $SEMEL_CONFIGS)")
        options.tenant_option(parser)
        options.db_option(parser)
        parser.set_defaults(do=do)


def _body(text: str) -> dict[str, Any]:
    import tomllib

    if not text.startswith("@") or not text.endswith(".toml"):
        return options.json_object(text)
    try:
        return tomllib.loads(Path(text[1:]).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"the file cannot be read: {error}") from None


class _Model(NamedTuple):
    """What configs need of a model: whether it is the demo's."""

    reference: str


class _App(NamedTuple):
    """What configs need of an app; it is not loaded for that, as it may be on another machine."""

    registry: tuple[_Model, ...]


class _Place(NamedTuple):
    """What configs need of a site."""

    ledger: Ledger
    settings: Settings
    app: _App


def _ask(chosen: argparse.Namespace, question: Callable[[Any, Site], Awaitable[Any]], *, make: bool = False) -> Any:
    """Ask :mod:`semel.service.configs`, as a server would."""
    import asyncio

    from semel.runs.ledger import Ledger

    try:
        from semel.service import configs
        from semel.service.settings import Settings
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{error}; this needs an extra: pip install 'semel[service]'") from error
    url = options.database(chosen)
    if not make:
        database.require(url)
    folder = chosen.configs or os.environ.get("SEMEL_CONFIGS") or None
    if folder is not None and not Path(folder).is_dir():
        printing.say(f"semel: there is no folder {folder} (--configs)")
    settings = Settings(configs=folder)
    app = _App((_Model(os.environ.get("SEMEL_APP") or DEMO),))

    async def asked() -> Any:
        ledger = Ledger(url, awaited=True)
        site = cast("Site", _Place(ledger, settings, app))
        try:
            return await question(configs, site)
        except configs.UnknownConfig as error:
            raise InvalidRequest(f"{error}; {_known(await configs.list_all(site, chosen.tenant))}") from None
        finally:
            await ledger.close()

    return asyncio.run(asked())


def _known(entries: list[Entry]) -> str:
    if not entries:
        return "there are none; write one with: semel config set"
    return f"there are: {', '.join(each.name for each in entries)}; --configs FOLDER would add those of a folder"


def _list(chosen: argparse.Namespace) -> int:
    found: list[Entry] = _ask(chosen, lambda configs, site: configs.list_all(site, chosen.tenant))
    if chosen.json:
        printing.print_json({"configs": found})
        return 0
    printing.print_table(
        ["config", "from", "model", "parameters", "changed", "note"],
        [_row(each) for each in found],
        nothing="there are no configs; write one with: semel config set",
    )
    if any(each.source == "demo" for each in found) and not chosen.json:
        printing.say("the demo's are known to a server of the demo only")
    return 0


def _row(entry: Entry) -> list[object]:
    config = entry.config
    if config is None:
        return [entry.name, entry.source, None, None, None, entry.error]
    changed = printing.when(config.updated_at) + (f" by {config.updated_by}" if config.updated_by else "")
    return [entry.name, entry.source, config.model, " ".join(config.parameters), changed, None]


def _show(chosen: argparse.Namespace) -> int:
    return _print(_ask(chosen, lambda configs, site: configs.look_up(site, chosen.tenant, chosen.name)), chosen)


def _print(config: Config, chosen: argparse.Namespace) -> int:
    import json

    if chosen.json:
        printing.print_json(config)
        return 0
    printing.print_fields(
        {
            "config": config.name,
            "from": config.source,
            "model": config.model,
            "parameters": json.dumps(config.parameters, ensure_ascii=False),
            "data": config.data,
            "queue": config.queue,
            "priority": config.priority,
            "cost": config.cost,
            "providers": json.dumps(config.providers, ensure_ascii=False) if config.providers else None,
            "changed": printing.when(config.updated_at) if config.updated_at else None,
            "by": config.updated_by,
        }
    )
    return 0


def _set(chosen: argparse.Namespace) -> int:
    def put(configs: Any, site: Site) -> Any:
        from semel.service.config_files import body_of
        from semel.service.gate import Caller

        try:
            body = body_of(chosen.body)
        except ValueError as error:
            raise InvalidRequest(f"this is no config: {error}") from None
        caller = Caller(user=_me(), role="admin", tenant=chosen.tenant)
        return configs.put(site, caller, chosen.name, body)

    return _print(_ask(chosen, put, make=True), chosen)


def _me() -> str:
    """Who is at the terminal, for those who wonder later who wrote it."""
    import getpass

    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "cli"


def _delete(chosen: argparse.Namespace) -> int:
    _ask(chosen, lambda configs, site: configs.remove(site, chosen.tenant, chosen.name))
    if chosen.json:
        printing.print_json({"removed": chosen.name})
    else:
        print(f"removed {chosen.name}")
    return 0
