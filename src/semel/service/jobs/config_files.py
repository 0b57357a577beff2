"""Configs that are files: ``NAME.json`` or ``NAME.toml`` in a folder. A broken one spoils no other."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from semel._validation import with_valid_values
from semel.api_types import Name
from semel.runs import strict_json
from semel.runs.types import MAX_COST
from semel.service.api.problems import ApiError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SUFFIXES = (".json", ".toml")
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
MAX_BYTES = 1 << 20


class ConfigBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A config as it is written down. ``data`` names a folder, ``providers`` has the settings of each provider."""

    model: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    parameters: dict[str, Any] = {}
    data: Annotated[str, Meta(min_length=1, max_length=1000)] | None = None
    queue: Name | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    cost: Annotated[float, Meta(ge=0, le=MAX_COST)] | None = None
    providers: dict[str, dict[str, Any]] = {}


class BrokenConfig(ApiError):
    """There is a config of that name, and it cannot be used."""

    def __init__(self, said: str) -> None:
        super().__init__(422, "CONFIG_BROKEN", said)


def is_name(name: str) -> bool:
    """Whether a config can be called so: it is the name of a file, and leads nowhere else."""
    return _NAME.fullmatch(name) is not None


def read(folder: Path, name: str) -> ConfigBody | None:
    """The config of that name in the folder; None when there is no such file."""
    if not is_name(name):
        return None
    found = [path for suffix in _SUFFIXES if (path := folder / f"{name}{suffix}").is_file()]
    if len(found) > 1:
        raise BrokenConfig(f"the config {name!r} is there twice: as {found[0].name} and as {found[1].name}")
    return _parsed(found[0]) if found else None


def names(folder: Path) -> list[str]:
    """Of all that are there, broken or not."""
    try:
        found = {path.stem for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file()}
    except OSError:
        return []
    return sorted(name for name in found if is_name(name))


def body_of(value: Any) -> ConfigBody:
    """What is written there as a config; raises ``ValueError``."""
    try:
        body = msgspec.convert(value, ConfigBody)
    except msgspec.ValidationError as error:
        raise ValueError(with_valid_values(str(error), ConfigBody)) from error
    data = strict_json.write([body.parameters, body.providers])  # what could not be kept is found now
    if strict_json.has_nul(data):
        raise ValueError("a text in it holds the character NUL")
    if strict_json.depth(data) > strict_json.MAX_DEPTH:
        raise ValueError(f"it is nested more than {strict_json.MAX_DEPTH} levels deep")
    return body


def _parsed(path: Path) -> ConfigBody:
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
        return body_of(_decoded(path, text))
    except json.JSONDecodeError as error:
        raise BrokenConfig(f"{path.name}, line {error.lineno}: {error.msg}") from None
    except tomllib.TOMLDecodeError as error:
        raise BrokenConfig(f"{path.name}, line {_toml_line(str(error), text)}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise BrokenConfig(f"{path.name}, line {_line_of(str(error), text)}: {error}") from None


def _decoded(path: Path, text: str) -> Any:
    return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)


def _toml_line(said: str, text: str) -> int:
    found = re.search(r"at line (\d+)", said)
    return int(found[1]) if found else text.count("\n") + 1


def _line_of(said: str, text: str) -> int:
    """The line of the field that an error is about, as far as it can be found; else the first."""
    unknown = re.search(r"unknown field `([^`]+)`", said)
    path = _PATH.search(said)
    named = unknown[1] if unknown else path["path"] if path else ""
    name = re.sub(r"\[.*?\]", "", named).split(".")[-1]
    if name:
        place = re.search(rf'(?m)^\s*(\[[\w."-]*)?["\']?{re.escape(name)}["\']?\s*[\]=:]|"{re.escape(name)}"\s*:', text)
        if place:
            return text.count("\n", 0, place.end()) + 1
    return 1
