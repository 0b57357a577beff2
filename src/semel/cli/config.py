"""``semel config``: the named configs of jobs."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from semel.cli._app import DEMO
from semel.cli._database import require
from semel.cli._options import (
    Value,
    argument,
    db_options,
    examples,
    group,
    json_object,
    needs_extra,
    option,
    tenant_option,
)
from semel.cli._output import format_time, note, print_fields, print_json, print_list, print_result
from semel.errors import InvalidRequest

if TYPE_CHECKING:
    from semel.service.auth.middleware import Principal
    from semel.service.jobs.configs import Config, ConfigEntry, Configs


class Place(NamedTuple):
    """Where configs are: --db, --configs and --tenant."""

    db: str
    folder: str | None
    tenant: str


def _at_place(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options, and call the function with their :class:`Place`."""

    @option("--configs", envvar="SEMEL_CONFIGS", metavar="FOLDER", help="The folder of config files.")
    @tenant_option
    @db_options
    @functools.wraps(function)
    def placed(*, db: str, configs: str | None, tenant: str, **options: Any) -> None:
        function(Place(db, configs, tenant), **options)

    return placed


def _body(text: str) -> dict[str, Any]:
    import tomllib

    if not text.startswith("@") or not text.endswith(".toml"):
        return json_object(text)
    try:
        return tomllib.loads(Path(text[1:]).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"the file cannot be read: {error}") from None


@group
def config() -> None:
    """Manage the named configs of jobs.

    A config defines the model, parameters and data of a job. Configs are stored in the database, or as files in the
    server's --configs folder; the database takes precedence. The demo has configs of its own, which are omitted if
    $SEMEL_APP names another app.
    """


@config.command("list")
@examples("semel config list --configs ./configs")
@_at_place
def list_configs(place: Place, as_json: bool) -> None:
    """List configs; FROM is row (the database), file or demo."""
    found: list[ConfigEntry] = _call(place, lambda configs: configs.list_all(place.tenant))
    print_list(
        as_json,
        {"configs": found},
        ["config", "from", "model", "parameters", "changed", "note"],
        map(_row, found),
        empty="there are no configs; create one with: semel config set",
    )
    if any(each.source == "demo" for each in found) and not as_json:
        note("the demo's configs exist only on a server that serves the demo")


def _row(entry: ConfigEntry) -> list[object]:
    config = entry.config
    if config is None:
        return [entry.name, entry.source, None, None, None, entry.error]
    changed = format_time(config.updated_at) + (f" by {config.updated_by}" if config.updated_by else "")
    return [entry.name, entry.source, config.model, " ".join(config.parameters), changed, None]


@config.command()
@examples("semel config show production-lora --json")
@argument("name", help="The config's name.")
@_at_place
def show(place: Place, name: str, as_json: bool) -> None:
    """Show a config."""
    _print(_call(place, lambda configs: configs.find(place.tenant, name)), as_json)


def _print(config: Config, as_json: bool) -> None:
    if as_json:
        print_json(config)
        return
    print_fields(
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
            "changed": format_time(config.updated_at) if config.updated_at else None,
            "by": config.updated_by,
        }
    )


@config.command("set")
@examples(
    'semel config set nightly \'{"model": "baseline_forecast_v1", "parameters": {"horizon_months": 24}}\'',
    "semel config set nightly @nightly.toml",
)
@argument("name", help="The config's name.")
@argument("body", type=Value("JSON", _body), metavar="JSON|@FILE", help="The config, or a file of JSON or TOML.")
@_at_place
def set_config(place: Place, name: str, body: dict[str, Any], as_json: bool) -> None:
    """Store a config in the database, from JSON or a file of JSON or TOML.

    It has a model, parameters, data, queue, priority, cost and providers. A config of the same name is replaced.
    """

    def put(configs: Configs) -> Any:
        from semel.service.jobs.configs import checked_body

        try:
            checked = checked_body(body)
        except ValueError as error:
            raise InvalidRequest(f"this is not a config: {error}") from None
        return configs.put(_author(place), name, checked)

    _print(_call(place, put, create=True), as_json)


def _author(place: Place) -> Principal:
    """The author of the config: the user of this command, who may do everything."""
    from semel.service.auth.middleware import Principal
    from semel.types import actor_here

    here = actor_here("cli")
    return Principal(user=here.user, role="admin", tenant=place.tenant, address=here.address, entrance="cli")


@config.command()
@examples("semel config delete nightly")
@argument("name", help="The config's name.")
@_at_place
def delete(place: Place, name: str, as_json: bool) -> None:
    """Delete a config from the database. Files are kept."""
    _call(place, lambda configs: configs.remove(_author(place), name))
    print_result(as_json, {"removed": name}, f"removed {name}")


def _call(place: Place, function: Callable[[Configs], Awaitable[Any]], *, create: bool = False) -> Any:
    """Call a method of the configs, as a server does."""
    import asyncio

    from semel.runs.store import RunStore

    with needs_extra("service"):
        from semel.service.jobs.configs import Configs, UnknownConfig
    if not create:
        require(place.db)
    if place.folder is not None and not Path(place.folder).is_dir():
        note(f"semel: there is no folder {place.folder} (--configs)")
    has_demo = (os.environ.get("SEMEL_APP") or DEMO).startswith("semel.demo:")

    async def call() -> Any:
        store = RunStore(place.db, awaited=True)
        configs = Configs(store, place.folder, lambda: has_demo)
        try:
            return await function(configs)
        except UnknownConfig as error:
            raise InvalidRequest(f"{error}; {_known(await configs.list_all(place.tenant))}") from None
        finally:
            await store.close()

    return asyncio.run(call())


def _known(entries: list[ConfigEntry]) -> str:
    if not entries:
        return "there are none; create one with: semel config set"
    return f"there are: {', '.join(each.name for each in entries)}; --configs FOLDER adds those of a folder"
