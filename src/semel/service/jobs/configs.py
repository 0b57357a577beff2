"""Named configs: what a job runs, with which parameters and data, and each provider's settings for it.

They come from files (``NAME.json`` or ``NAME.toml`` in the folder of the settings), from rows of the database, and
from the demo. A row wins over a file, and a file over the demo's. A broken file affects no other config.
"""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct
from sqlalchemy import Connection, delete, select

from semel import typed_json
from semel._validation import with_valid_values
from semel.api_types import Name
from semel.db.dialect import Statement, StatementContext
from semel.db.schema import configs
from semel.runs import strict_json
from semel.runs.store import audit_log
from semel.runs.store.audit_log import Change
from semel.runs.types import MAX_COST
from semel.service.api.problems import ApiError
from semel.types import moment

if TYPE_CHECKING:
    from semel.runs.store import RunStore
    from semel.service.auth.middleware import Principal

DEMO = Path(__file__).parents[2] / "demo_configs"
MAX_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SUFFIXES = (".json", ".toml")
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")

Source: TypeAlias = Literal["file", "row", "demo"]


class ConfigBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A config as it is written down. ``data`` names a folder, ``providers`` has the settings of each provider."""

    model: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    parameters: dict[str, Any] = {}
    data: Annotated[str, Meta(min_length=1, max_length=1000)] | None = None
    queue: Name | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    cost: Annotated[float, Meta(ge=0, le=MAX_COST)] | None = None
    providers: dict[str, dict[str, Any]] = {}


class Config(Struct, frozen=True, kw_only=True):
    """What a job is made of. ``providers`` has the settings of each provider, which that provider validates."""

    name: str
    model: str | None = None
    parameters: dict[str, Any] = {}
    data: str | None = None
    """The job's input data: an absolute path of a folder on this server."""
    queue: str | None = None
    priority: int | None = None
    cost: float | None = None
    source: Source = "row"
    providers: dict[str, dict[str, Any]] = {}
    updated_at: datetime | None = None
    updated_by: str | None = None


class ConfigEntry(Struct, frozen=True, kw_only=True):
    """A config in the list; a broken one has an error instead."""

    name: str
    source: Source
    config: Config | None = None
    error: str | None = None


class UnknownConfig(ApiError):
    """There is no config of that name."""

    def __init__(self, name: str) -> None:
        super().__init__(404, "NOT_FOUND", f"Unknown config: {name[:200]}")


class BrokenConfig(ApiError):
    """The config exists and cannot be used."""

    def __init__(self, message: str) -> None:
        super().__init__(422, "CONFIG_BROKEN", message)


class Configs:
    """The configs of a server: those of a database, of a folder, and the demo's if ``has_demo`` returns True."""

    def __init__(self, store: RunStore, folder: str | None, has_demo: Callable[[], bool]) -> None:
        self._store = store
        self._folder = folder
        self._has_demo = has_demo

    async def find(self, tenant: str, name: str) -> Config:
        """The tenant's config of that name; raises :class:`UnknownConfig` or :class:`BrokenConfig`."""
        if not _is_name(name):
            raise UnknownConfig(name)
        row = await self._store.read(_find, tenant, name)
        if row is not None:
            return await asyncio.to_thread(self._from_row, row)
        found = await asyncio.to_thread(self._from_file, name)
        if found is None:
            raise UnknownConfig(name)
        return found

    async def list_all(self, tenant: str) -> list[ConfigEntry]:
        """Every config that the tenant can name, in alphabetical order."""
        rows = await self._store.read(_rows, tenant)
        return await asyncio.to_thread(self._entries, rows)

    async def put(self, caller: Principal, name: str, body: ConfigBody) -> Config:
        """Write a row. Only admins set ``data``, and only to folders inside the folder of configs."""
        if not _is_name(name):
            raise ApiError(
                400, "INVALID_REQUEST", "a config's name must have 1 to 100 letters, digits, '.', '_' or '-'"
            )
        if body.data is not None and not caller.may("admin"):
            raise ApiError(403, "FORBIDDEN", "only admins may set a folder of the server as a config's data")
        text = await asyncio.to_thread(self._encode, name, body)
        row = {"tenant": caller.tenant, "name": name, "body": text, "user": caller.user}
        await self._store.write(_write, self._store.acting(caller.actor), **row)
        return await self.find(caller.tenant, name)

    async def remove(self, caller: Principal, name: str) -> None:
        """Remove a row; 409 for a file."""
        context = self._store.acting(caller.actor)
        if _is_name(name) and await self._store.write(_remove, caller.tenant, name, context):
            return
        there = await self.find(caller.tenant, name)
        message = (
            f"the config {name!r} is a file of this server" if there.source == "file" else f"{name!r} is the demo's"
        )
        raise ApiError(409, "CONFIG_NOT_REMOVABLE", f"{message}; only configs created through the API can be removed")

    def _encode(self, name: str, body: ConfigBody) -> str:
        """Check the body and encode it. It may be large: call this in a thread."""
        try:
            body = checked_body(msgspec.to_builtins(body))
            self._row_data(name, body.data)
        except (ValueError, BrokenConfig) as error:
            raise ApiError(400, "INVALID_REQUEST", str(error)) from None
        return msgspec.json.encode(body).decode()

    def _entries(self, rows: list[Any]) -> list[ConfigEntry]:
        found: dict[str, ConfigEntry] = {}
        for folder, source in reversed(self._folders()):
            for name in _names(folder):
                found[name] = _entry(name, source, self._from_file, name)
        for row in rows:
            found[row.name] = _entry(row.name, "row", self._from_row, row)
        return [found[name] for name in sorted(found)]

    def _folders(self) -> list[tuple[Path, Source]]:
        """The folders that are searched for files; the first match wins."""
        folders: list[tuple[Path, Source]] = []
        if self._folder is not None:
            folders.append((Path(self._folder).absolute(), "file"))
        if self._has_demo():
            folders.append((DEMO, "demo"))
        return folders

    def _from_file(self, name: str) -> Config | None:
        for folder, source in self._folders():
            body = read_file(folder, name)
            if body is not None:
                data = None if body.data is None else str((folder / body.data).resolve())
                return _config(name, body, source, data)
        return None

    def _from_row(self, row: Any) -> Config:
        try:
            body = typed_json.decode(row.body, ConfigBody)
        except msgspec.DecodeError as error:
            raise BrokenConfig(f"the row of the config {row.name!r} cannot be read: {error}") from None
        config = _config(row.name, body, "row", self._row_data(row.name, body.data))
        return msgspec.structs.replace(config, updated_at=moment(row.updated_us), updated_by=row.updated_by)

    def _row_data(self, name: str, data: str | None) -> str | None:
        """The folder of a row's data. It is checked at every use: a link in the path may have changed."""
        if data is None:
            return None
        if self._folder is None:
            raise BrokenConfig(f"the config {name!r} has data, and this server has no folder of configs (--configs)")
        root = Path(self._folder).resolve()
        try:
            folder = (root / data).resolve()
        except (OSError, ValueError, RuntimeError):  # a NUL character, or a loop of links
            folder = Path("/")
        if folder == root or not folder.is_relative_to(root):
            raise BrokenConfig(f"the data of the config {name!r} must be a folder inside of the folder of configs")
        return str(folder)


def _entry(name: str, source: Source, read: Callable[[Any], Config | None], what: Any) -> ConfigEntry:
    try:
        return ConfigEntry(name=name, source=source, config=read(what))
    except BrokenConfig as error:
        return ConfigEntry(name=name, source=source, error=str(error))


def _config(name: str, body: ConfigBody, source: Source, data: str | None) -> Config:
    fields = {each: getattr(body, each) for each in ConfigBody.__struct_fields__}
    return Config(**{**fields, "name": name, "source": source, "data": data})


def _is_name(name: str) -> bool:
    """Whether a config can have this name: it is also a file's name, and must not lead to another folder."""
    return _NAME.fullmatch(name) is not None


def read_file(folder: Path, name: str) -> ConfigBody | None:
    """The config of that name in the folder; None if there is no such file."""
    found = [path for suffix in _SUFFIXES if (path := folder / f"{name}{suffix}").is_file()] if _is_name(name) else []
    if len(found) > 1:
        raise BrokenConfig(f"the config {name!r} is there twice: as {found[0].name} and as {found[1].name}")
    return _parse_file(found[0]) if found else None


def _names(folder: Path) -> list[str]:
    try:
        found = {path.stem for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file()}
    except OSError:
        return []
    return sorted(name for name in found if _is_name(name))


def checked_body(value: Any) -> ConfigBody:
    """The value as a config; raises ``ValueError``."""
    try:
        body = typed_json.convert(value, ConfigBody)
    except msgspec.ValidationError as error:
        raise ValueError(with_valid_values(str(error), ConfigBody)) from error
    data = strict_json.write([body.parameters, body.providers])  # raises for what could not be stored
    if strict_json.has_nul(data):
        raise ValueError("a text in it contains the character NUL")
    if strict_json.depth(data) > strict_json.MAX_DEPTH:
        raise ValueError(f"it is nested more than {strict_json.MAX_DEPTH} levels deep")
    return body


def _parse_file(path: Path) -> ConfigBody:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BrokenConfig(f"{path.name} has more than {MAX_BYTES:,} bytes, which is no config")
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise BrokenConfig(f"{path.name}, line {line}: it is not UTF-8") from None
    except OSError as error:
        raise BrokenConfig(f"{path.name} cannot be read: {error.strerror}") from None
    try:
        return checked_body(json.loads(text) if path.suffix == ".json" else tomllib.loads(text))
    except json.JSONDecodeError as error:
        raise BrokenConfig(f"{path.name}, line {error.lineno}: {error.msg}") from None
    except tomllib.TOMLDecodeError as error:
        raise BrokenConfig(f"{path.name}, line {_toml_line(str(error), text)}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise BrokenConfig(f"{path.name}, line {_line_of(str(error), text)}: {error}") from None


def _toml_line(message: str, text: str) -> int:
    found = re.search(r"at line (\d+)", message)
    return int(found[1]) if found else text.count("\n") + 1


def _line_of(message: str, text: str) -> int:
    """The line of the field that an error names, if it can be found; else the first."""
    unknown = re.search(r"unknown field `([^`]+)`", message)
    path = _PATH.search(message)
    named = unknown[1] if unknown else path["path"] if path else ""
    name = re.sub(r"\[.*?\]", "", named).split(".")[-1]
    if name:
        place = re.search(rf'(?m)^\s*(\[[\w."-]*)?["\']?{re.escape(name)}["\']?\s*[\]=:]|"{re.escape(name)}"\s*:', text)
        if place:
            return text.count("\n", 0, place.end()) + 1
    return 1


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
    # Of two who create it at a time, one replaces the other's, and the log says so.
    audit_log.lock(conn, row["tenant"], terms)
    before = _find(conn, row["tenant"], row["name"])
    _PUT.count(conn, now=terms.now, **row)
    change = Change(
        name="config.set",
        tenant=row["tenant"],
        target=row["name"],
        before=None if before is None else _logged(before.body),
        after=_logged(row["body"]),
    )
    audit_log.record(conn, terms, change)


def _remove(conn: Connection, tenant: str, name: str, terms: StatementContext) -> bool:
    query = delete(configs).where(configs.c.tenant == tenant, configs.c.name == name).returning(configs.c.body)
    row = conn.execute(query).one_or_none()
    if row is None:
        return False
    change = Change(name="config.removed", tenant=tenant, target=name, before=_logged(row.body))
    audit_log.record(conn, terms, change)
    return True


def _logged(body: str) -> dict[str, Any]:
    """What the audit log has of a config; one that cannot be read is a text."""
    try:
        value = json.loads(body)
    except ValueError:
        value = body
    return {"config": value}
