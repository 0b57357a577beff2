"""The app that MODULE:APP names, and where it keeps its runs."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from types import ModuleType
from typing import TYPE_CHECKING, Any

from semel.errors import InvalidRequest

if TYPE_CHECKING:
    from semel.runs.app import App, Location

DEMO = "semel.demo:app"
DATABASE = "sqlite:///semel.db"
ARTIFACTS = "./artifacts"


def location_of(app: str | None, **given: str | None) -> Location:
    """Where the app at ``app`` keeps its runs, or the defaults; what is given takes precedence."""
    from semel.runs.app import Location

    chosen = {name: value for name, value in given.items() if value is not None}
    known = Location(DATABASE, ARTIFACTS, "database", None) if app is None else load_app(app).location
    return known._replace(**chosen)


def url_of(app: str | None, db: str | None) -> str:
    """The database: ``--db``, else that of the app, else the default. The app is loaded only if its own is used."""
    return db or (DATABASE if app is None else load_app(app).url)


def load_app(place: str) -> App:
    """Load the app at ``module:name``; the working directory is on the path."""
    from semel.runs.app import App

    module_name, separator, attribute = place.partition(":")
    if not separator or not attribute or not all(part.isidentifier() for part in module_name.split(".")):
        raise InvalidRequest(f"{place!r} does not name an app; use MODULE:APP, such as myproject.runs:app")
    if module_name.endswith(".py"):
        raise InvalidRequest(f"use the module's name, not its file: {module_name[:-3]}:{attribute}")
    module = _module(module_name)
    found: Any = module
    for name in attribute.split("."):
        if not hasattr(found, name):
            apps = [each for each, value in vars(module).items() if isinstance(value, App)]
            there = f"there is {', '.join(apps)}" if apps else "there is no semel.App in it"
            raise InvalidRequest(f"the module {module_name!r} has no {attribute!r}; {there}")
        found = getattr(found, name)
    if not isinstance(found, App):
        raise InvalidRequest(
            f"{place!r} is a {type(found).__name__}, not a semel.App; create the app at the top level of a module"
        )
    return found


def _module(name: str) -> ModuleType:
    here = os.getcwd()  # noqa: PTH109 -- sys.path holds text
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise InvalidRequest(f"there is no module {name!r} in {here} or elsewhere on the path") from error
        raise InvalidRequest(f"cannot import {name!r}\n{_own_traceback(error)}") from error
    except Exception as error:
        raise InvalidRequest(f"cannot import {name!r}\n{_own_traceback(error)}") from error


def _own_traceback(error: BaseException) -> str:
    """The traceback without our frames and the import machinery's."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and frame.filename != __file__
    ]
    shown = traceback.TracebackException.from_exception(error)
    shown.stack = traceback.StackSummary.from_list(frames)
    return "".join(shown.format(chain=False)).rstrip()
