"""Named configs: what a job runs, with which parameters and data, and what each provider needs to know for it.

They come from files (``NAME.json`` or ``NAME.toml`` in the folder of the settings), from rows of the database, and
from the demo. A row wins over a file, and a file over the demo's.
"""

from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Struct
from sqlalchemy import Connection, delete, select

from semel.db.dialect import Statement, StatementContext
from semel.db.schema import configs
from semel.service.api.problems import ApiError
from semel.service.jobs import config_files
from semel.service.jobs.config_files import BrokenConfig, ConfigBody
from semel.types import moment

if TYPE_CHECKING:
    from semel.service.auth.middleware import Principal
    from semel.service.state import ServiceState

DEMO = Path(__file__).parents[2] / "demo_configs"


class Config(Struct, frozen=True, kw_only=True):
    """What a job is made of. ``providers`` has settings of each provider, as that provider reads them."""

    name: str
    model: str | None = None
    parameters: dict[str, Any] = {}
    data: str | None = None
    """A folder of this server, absolute, which the job is to have."""
    queue: str | None = None
    priority: int | None = None
    cost: float | None = None
    source: Literal["file", "row", "demo"] = "row"
    providers: dict[str, dict[str, Any]] = {}
    updated_at: datetime | None = None
    updated_by: str | None = None


class ConfigEntry(Struct, frozen=True, kw_only=True):
    """A config in the list: one that cannot be used has an error instead."""

    name: str
    source: Literal["file", "row", "demo"]
    config: Config | None = None
    error: str | None = None


class UnknownConfig(ApiError):
    """There is no config of that name."""

    def __init__(self, name: str) -> None:
        super().__init__(404, "NOT_FOUND", f"Unknown config: {name[:200]}")


async def look_up(service: ServiceState, tenant: str, name: str) -> Config:
    """The config of that name as this tenant sees it, or :class:`UnknownConfig`; or why it cannot be used."""
    if not config_files.is_name(name):
        raise UnknownConfig(name)
    row = await service.store.read(_find, tenant, name)
    if row is not None:
        return await asyncio.to_thread(_of_row, service, row)
    found = await asyncio.to_thread(_of_file, service, name)
    if found is None:
        raise UnknownConfig(name)
    return found


async def list_all(service: ServiceState, tenant: str) -> list[ConfigEntry]:
    """Every config that the tenant can name, in the order of the alphabet."""
    rows = await service.store.read(_rows, tenant)
    return await asyncio.to_thread(_entries, service, rows)


async def put(service: ServiceState, caller: Principal, name: str, body: ConfigBody) -> Config:
    """Write a row. Data is for admins, and only from the folder of configs: nobody reads other files of the server."""
    if not config_files.is_name(name):
        raise ApiError(400, "INVALID_REQUEST", "a config's name has letters, digits, '.', '_' and '-', up to 100")
    if body.data is not None and not caller.may("admin"):
        raise ApiError(403, "FORBIDDEN", "only an admin says which folder of the server is a config's data")
    text = await asyncio.to_thread(_checked, service, name, body)
    await service.store.write(_write, service.store.terms, tenant=caller.tenant, name=name, body=text, user=caller.user)
    return await look_up(service, caller.tenant, name)


def _checked(service: ServiceState, name: str, body: ConfigBody) -> str:
    """The body as it is stored. It may be large, so it is looked at in a thread."""
    try:
        body = config_files.body_of(msgspec.to_builtins(body))
        _row_data(service, name, body.data)
    except (ValueError, BrokenConfig) as error:
        raise ApiError(400, "INVALID_REQUEST", str(error)) from None
    return msgspec.json.encode(body).decode()


async def remove(service: ServiceState, tenant: str, name: str) -> None:
    """Remove a row. What is a file is not removed here."""
    if config_files.is_name(name) and await service.store.write(_remove, tenant, name):
        return
    there = await look_up(service, tenant, name)
    said = f"the config {name!r} is a file of this server" if there.source == "file" else f"{name!r} is the demo's"
    raise ApiError(409, "CONFIG_NOT_REMOVABLE", f"{said}; only what was put here can be removed here")


def _entries(service: ServiceState, rows: list[Any]) -> list[ConfigEntry]:
    found: dict[str, ConfigEntry] = {}
    for folder, source in reversed(_folders(service)):
        for name in config_files.names(folder):
            found[name] = _entry(name, source, lambda name=name: _of_file(service, name))
    for row in rows:
        found[row.name] = _entry(row.name, "row", lambda row=row: _of_row(service, row))
    return [found[name] for name in sorted(found)]


def _entry(name: str, source: Any, read: Any) -> ConfigEntry:
    try:
        return ConfigEntry(name=name, source=source, config=read())
    except BrokenConfig as error:
        return ConfigEntry(name=name, source=source, error=str(error))


def _folders(service: ServiceState) -> list[tuple[Path, Literal["file", "demo"]]]:
    """Where files are looked for; the first wins. The demo's are there when its models are."""
    folders: list[tuple[Path, Literal["file", "demo"]]] = []
    if service.settings.configs is not None:
        folders.append((Path(service.settings.configs).absolute(), "file"))
    if any(model.reference.startswith("semel.demo:") for model in service.app.registry):
        folders.append((DEMO, "demo"))
    return folders


def _of_file(service: ServiceState, name: str) -> Config | None:
    for folder, source in _folders(service):
        body = config_files.read(folder, name)
        if body is not None:
            data = None if body.data is None else str((folder / body.data).resolve())
            return _config(name, body, source, data)
    return None


def _of_row(service: ServiceState, row: Any) -> Config:
    try:
        body = msgspec.json.decode(row.body, type=ConfigBody)
    except msgspec.DecodeError as error:
        raise BrokenConfig(f"the row of the config {row.name!r} cannot be read: {error}") from None
    config = _config(row.name, body, "row", _row_data(service, row.name, body.data))
    return msgspec.structs.replace(config, updated_at=moment(row.updated_us), updated_by=row.updated_by)


def _row_data(service: ServiceState, name: str, data: str | None) -> str | None:
    """The folder of a row's data. It is looked at whenever it is used: a link may lead elsewhere by then."""
    if data is None:
        return None
    if service.settings.configs is None:
        raise BrokenConfig(f"the config {name!r} has data, and this server has no folder of configs (--configs)")
    root = Path(service.settings.configs).resolve()
    try:
        folder = (root / data).resolve()
    except (OSError, ValueError, RuntimeError):  # a NUL, a ring of links
        folder = Path("/")
    if folder == root or not folder.is_relative_to(root):
        raise BrokenConfig(f"the data of the config {name!r} must be a folder inside of the folder of configs")
    return str(folder)


def _config(name: str, body: ConfigBody, source: Literal["file", "row", "demo"], data: str | None) -> Config:
    return Config(
        name=name,
        model=body.model,
        parameters=body.parameters,
        data=data,
        queue=body.queue,
        priority=body.priority,
        cost=body.cost,
        source=source,
        providers=body.providers,
    )


def _find(conn: Connection, tenant: str, name: str) -> Any:
    return conn.execute(select(configs).where(configs.c.tenant == tenant, configs.c.name == name)).one_or_none()


def _rows(conn: Connection, tenant: str) -> list[Any]:
    return list(conn.execute(select(configs).where(configs.c.tenant == tenant)))


_PUT = Statement(
    lambda w: (
        f"""
INSERT INTO semel_configs (tenant, name, body, updated_us, updated_by) VALUES (:tenant, :name, :body, {w.now}, :user)
ON CONFLICT (tenant, name) DO UPDATE
SET body = excluded.body, updated_us = excluded.updated_us, updated_by = excluded.updated_by
"""
    )
)


def _write(conn: Connection, terms: StatementContext, /, **row: str) -> None:
    _PUT.count(conn, now=terms.now, **row)


def _remove(conn: Connection, tenant: str, name: str) -> bool:
    return bool(conn.execute(delete(configs).where(configs.c.tenant == tenant, configs.c.name == name)).rowcount)
