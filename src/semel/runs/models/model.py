"""A registered model: its name, its parameters, how it is retried, and the hash of a payload.

Parameters are checked when a run is submitted, against the signature of the function, so that a typo raises at once
instead of failing three attempts. They are stored as JSON, and decoded into the annotated types.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, get_args

import msgspec

from semel._validation import MAX_INT, checked_choice, checked_int, checked_name, checked_number, checked_text, nearest
from semel.errors import InvalidParameters, InvalidRequest, Unfingerprintable, UnknownModel
from semel.fingerprint import canonical
from semel.runs.models.parameters import Signature
from semel.runs.types import INTERNAL_PREFIX, checked_cost

__all__ = ["MAIN", "Isolation", "Model", "home", "load", "make_model"]

Isolation: TypeAlias = Literal["process", "thread", "loop"]
"""Where a model runs: in a child process, in a thread, or in the event loop of the worker."""

MAIN = "__semel_main__"
"""The module name of the program's main file in a child process, so that what is under ``__main__`` does not run."""


@dataclass(frozen=True)
class Model:
    """A function with a name and the rules for running it. `make_model` checks them; `Model` itself does not."""

    name: str
    function: Callable[..., Any]
    isolation: Isolation
    signature: Signature = field(repr=False, compare=False)
    reference: str
    """``module:qualname``, which `load` finds in another process; empty if it cannot be found there."""
    main_path: str | None = None
    """The program's main file, if it defines the function."""
    max_attempts: int = 3
    """How many attempts may end with an error of the model before the run fails."""
    max_lost: int = 3
    """How many attempts may lose their worker before the run fails."""
    backoff: tuple[float, ...] = (5, 20, 60)
    """Seconds to wait after the first, second, … error; the last one repeats."""
    lease: float = 60
    timeout: float | None = None
    stall_after: float | None = None
    """Seconds without progress after which a run whose worker is alive is shown as stalled; None: never."""
    queue: str = "default"
    priority: int = 0
    cost: float = 0.0
    fatal: tuple[type[BaseException], ...] = ()
    """Errors after which a run is not retried."""
    exclude: frozenset[str] = frozenset()
    """Parameters that are not hashed, because they do not matter, such as the time of sending."""
    summary: str | None = None
    """The parameter that runs of this model are grouped by in summaries."""
    seeded: bool = False
    """Whether ``random``, NumPy and torch are seeded with ``ctx.seed`` before the function is called."""
    grace: float = 10.0
    """Seconds between the polite request to stop and the forced end."""

    def check(self, parameters: Mapping[str, Any]) -> str:
        """Return the parameters as compact JSON; raise `InvalidParameters` if the function does not take them."""
        try:
            return self.signature.check(parameters)
        except ValueError as error:
            raise InvalidParameters(f"model {self.name!r} {error}") from error.__cause__

    def bind(self, parameters_json: str) -> dict[str, Any]:
        """Return the arguments to call the function with, by name and of the annotated types."""
        try:
            return self.signature.bind(parameters_json)
        except ValueError as error:
            raise InvalidParameters(f"model {self.name!r} {error}") from error.__cause__

    def payload_hash(self, parameters: Mapping[str, Any] | str, seed: int | None = None) -> str:
        """Return 64 hex digits: the same for the same parameters, whether given as Python objects or as their JSON.

        A seed that is given belongs to what was asked: with another one, it is another payload.
        """
        try:
            if isinstance(parameters, str):
                asked = msgspec.json.decode(parameters)
            else:
                asked = msgspec.json.decode(self.signature.written(parameters))
            if self.exclude:
                asked = {name: value for name, value in asked.items() if name not in self.exclude}
            given = {} if seed is None else {"seed": seed}
            return sha256(canonical({"model": self.name, "parameters": asked, **given})).hexdigest()
        except (ValueError, Unfingerprintable) as error:
            raise InvalidParameters(f"model {self.name!r} {error}") from error

    def delay(self, attempt_error_count: int, chance: float) -> float:
        """Return how long to wait after that many errors; `chance` (0 to 1) spreads runs that failed together."""
        return self.backoff[min(max(attempt_error_count, 1), len(self.backoff)) - 1] * (1 + 0.1 * chance)


class ModelOptions(TypedDict, total=False):
    """The options of a model, which :class:`Model` explains."""

    max_attempts: int
    max_lost: int
    backoff: Sequence[float]
    lease: float
    timeout: float | None
    stall_after: float | None
    queue: str
    priority: int
    isolation: Isolation | None
    cost: float
    fatal: type[BaseException] | Sequence[type[BaseException]]
    exclude: Sequence[str]
    summary: str | None
    seeded: bool
    grace: float


def make_model(name: str, function: Callable[..., Any], **options: Unpack[ModelOptions]) -> Model:
    """Return the model; raise `InvalidRequest` for options or a function that could not work later."""
    _label("a model's name", name)
    about = f"model {name!r}"
    known = _OPTIONS
    for option in options:
        if option not in known:
            raise InvalidRequest(f"{about} has no option {option!r}; {nearest(option, known)}")
    if not callable(function):
        raise InvalidRequest(f"{about} needs a function, not {function!r:.80}")
    try:
        signature = Signature(function)
        checked = {option: known[option](option, value) for option, value in options.items()}
        isolation = _isolation(function, checked.pop("isolation", None))
        reference, main_path = _reference(function, needed=isolation == "process")
        _can_be_seeded(isolation, seeded=checked.get("seeded", False))
        for option in ("exclude", "summary"):
            _are_parameters(option, checked.get(option), signature)
    except ValueError as error:
        raise InvalidRequest(f"{about}: {error}") from None
    return Model(name, function, isolation, signature=signature, reference=reference, main_path=main_path, **checked)


class _Loading:
    """Whether a child process is loading the program's own modules, to find a model in them."""

    now = False


def is_loading() -> bool:
    """Whether a child process, or a broker's worker, imports a program's modules to find a model in them."""
    return _Loading.now


def refuse_while_loading(what: str) -> None:
    """Raise in a child that loads a model: a program that works on import would do so in every child, without end."""
    if _Loading.now:
        raise InvalidRequest(
            f"{what} while a child process loads this module to find a model:"
            ' put what the program does under if __name__ == "__main__":'
        )


def load(reference: str, main_path: str | None = None) -> Callable[..., Any]:
    """Return the function of a model's reference, in another process; raise `ImportError` with the reason."""
    module_name, _, qualname = reference.partition(":")
    _Loading.now = True
    try:
        found: Any = _main_module(main_path) if main_path else importlib.import_module(module_name)
        for step in qualname.split("."):
            found = getattr(found, step)
    except (Exception, SystemExit) as error:
        where = f" from {main_path}" if main_path else ""
        raise ImportError(f"cannot import model {reference!r}{where}: {type(error).__name__}: {error}") from error
    finally:
        _Loading.now = False
    function: Callable[..., Any] = found.function if isinstance(found, Model) else found
    return function


def home(reference: str) -> str | None:
    """The folder from which this process imported the function's top module: another process may need it, too."""
    top = sys.modules.get(reference.partition(":")[0].partition(".")[0])
    file = getattr(top, "__file__", None)
    if file is None:
        return None
    return str(Path(file).resolve().parent.parent if hasattr(top, "__path__") else Path(file).resolve().parent)


def _main_module(path: str) -> ModuleType:
    """Run the main file once under another name, as multiprocessing does, and keep it as a module."""
    loaded = sys.modules.get(MAIN)
    if loaded is not None and loaded.__file__ == path:
        return loaded
    spec = importlib.util.spec_from_file_location(MAIN, path, loader=importlib.machinery.SourceFileLoader(MAIN, path))
    assert spec is not None
    assert spec.loader is not None
    folder = str(Path(path).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as Python does for the main file: it imports its neighbours
    module = sys.modules[MAIN] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[MAIN]
        raise
    return module


def _reference(function: Callable[..., Any], *, needed: bool) -> tuple[str, str | None]:
    """Return where another process finds the function: `module:qualname` and, for the main file, its path."""
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    trouble = _unreachable(function, qualname)
    path = None
    if module in {"__main__", MAIN} and not trouble:
        main = sys.modules[module]
        name = getattr(main.__spec__, "name", None)
        if name not in {None, "__main__", MAIN}:  # python -m package.module
            return f"{name}:{qualname}", None
        file = getattr(main, "__file__", None)
        path = str(Path(file).resolve()) if file and Path(file).is_file() else None
        trouble = "" if path else "it was typed into an interactive session or given on the command line"
    if not trouble:
        return f"{module}:{qualname}", path
    if needed:
        raise ValueError(
            f"its function cannot be imported by a child process: {trouble}. Define it at the top of a module,"
            ' or pass isolation="thread"'
        )
    return "", None


def _unreachable(function: Callable[..., Any], qualname: str | None) -> str:
    if qualname is None or getattr(function, "__module__", None) is None:
        return f"it is a {type(function).__name__} without a name of its own"
    if "<lambda>" in qualname:
        return "it is a lambda"
    if "<locals>" in qualname:
        return f"{qualname} lies inside another function"
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, type | ModuleType):
        return f"{qualname} is bound to an object"
    return ""


def _isolation(function: Callable[..., Any], asked: Isolation | None) -> Isolation:
    call = getattr(type(function), "__call__", None)  # noqa: B004 (the method is looked at, not looked for)
    if any(inspect.isgeneratorfunction(f) or inspect.isasyncgenfunction(f) for f in (function, call)):
        raise ValueError("a function that yields has no result; return one, and report with ctx.progress")
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
    if is_async and asked in {"process", "thread"}:
        raise ValueError(f'an async function runs in the event loop; leave out isolation="{asked}" or make it sync')
    if not is_async and asked == "loop":
        raise ValueError('a sync function would stop the event loop; make it async, or pass isolation="thread"')
    return asked or ("loop" if is_async else "process")


def _can_be_seeded(isolation: Isolation, *, seeded: bool) -> None:
    if seeded and isolation != "process":
        raise ValueError("seeded is for models in a process of their own; others share the generators: use ctx.seed")


def _are_parameters(option: str, given: Any, signature: Signature) -> None:
    for name in {given} if isinstance(given, str) else given or ():
        if name not in signature.parameters and not signature.takes_extra:
            raise ValueError(f"{option} names {name!r}, which is not a parameter of the function")


def _label(what: str, value: Any) -> str:
    name = checked_name(what, checked_text(what, value))
    if not name.isprintable():  # such as a line separator, which is not a control character
        raise InvalidRequest(f"{what} has a character that cannot be printed: {name!r}")
    return name


def _waits(option: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{option} must be a tuple of seconds such as (5, 20, 60), not {value!r:.80}")
    return tuple(checked_number(option, seconds) for seconds in value)


def _errors(option: str, value: Any) -> tuple[type[BaseException], ...]:
    kinds = value if isinstance(value, list | tuple) else (value,)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise ValueError(f"{option} takes types of errors, not {kind!r:.80}")  # noqa: TRY004 (as all the others)
    return tuple(kinds)


def _names(option: str, value: Any) -> frozenset[str]:
    names = {value} if isinstance(value, str) else value
    if not isinstance(names, set | frozenset | list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{option} takes names of parameters, not {value!r:.80}")
    return frozenset(names)


def _parameter_name(option: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{option} takes the name of a parameter, not {value!r:.80}")
    return value


def _flag(option: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{option} is True or False, not {value!r:.80}")  # noqa: TRY004 (as all the others)
    return value


_OPTIONS: dict[str, Callable[[str, Any], Any]] = {
    "max_attempts": lambda option, value: checked_int(option, value, 1),
    "max_lost": checked_int,
    "backoff": _waits,
    "lease": lambda option, value: checked_number(option, value, 0, above=True),
    "timeout": lambda option, value: None if value is None else checked_number(option, value, 0, above=True),
    "stall_after": lambda option, value: None if value is None else checked_number(option, value, 1),
    "queue": _label,
    "priority": lambda option, value: checked_int(option, value, -MAX_INT - 1),
    "isolation": lambda option, value: None if value is None else checked_choice(option, value, get_args(Isolation)),
    "cost": checked_cost,
    "fatal": _errors,
    "exclude": _names,
    "summary": _parameter_name,
    "seeded": _flag,
    "grace": checked_number,
}
assert set(_OPTIONS) == set(ModelOptions.__annotations__) <= {option.name for option in fields(Model)}


class Registry:
    """The registered models, by name; an unknown name raises ``UnknownModel``."""

    def __init__(self) -> None:
        self._models: dict[str, Model] = {}

    def add(self, model: Model) -> None:
        """Register a model. The same function may be registered again, as when a module is loaded twice."""
        there = self._models.get(model.name)
        if there is not None and there.reference != model.reference:
            raise InvalidRequest(f"the name {model.name!r} is taken by another model, {there.reference}")
        self._models[model.name] = model

    def __getitem__(self, name: str) -> Model:
        try:
            return self._models[name]
        except (KeyError, TypeError):
            raise UnknownModel(_advice(name, list(self._models))) from None

    def __contains__(self, name: object) -> bool:
        return name in self._models

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    @property
    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._models)


def _advice(name: object, known: list[str]) -> str:
    known = [each for each in known if not each.startswith(INTERNAL_PREFIX)]
    names = ", ".join(sorted(known)) or "none"
    if callable(name):
        return f"a run is submitted by its model's name, not by a function; there are: {names}"
    return f"unknown model {name!r}; {nearest(name, known)}"
