"""Stores and replays values as the types that a function's return annotation names.

Supported are dataclasses, msgspec structs, pydantic models, enums, named tuples, and containers and unions of them,
besides all that can be stored without an annotation. Objects are stored field by field, and made again from their
fields without validation: what is replayed is what was returned. An annotation that can never be stored is refused.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from enum import Enum
from functools import cached_property, partial
from pathlib import PurePath
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin
from weakref import WeakKeyDictionary

import msgspec

from semel import typed_json
from semel.codec import PLAIN, PLAIN_TYPES, Codec, Shape
from semel.errors import InvalidRequest, OutcomeGone, Unencodable


class ReturnType(Codec):
    """The codec of one function's values."""

    def __init__(self, hint: Any, shapes: Iterable[Shape]) -> None:
        super().__init__(shapes)
        self._hint = hint

    def fitted(self, value: Any) -> Any:
        """Plain data, given to ``resolve`` for a vanished owner, converted to the function's return type."""
        try:
            if any(_is_pydantic(kind) for kind in self._shapes):
                return sys.modules["pydantic"].TypeAdapter(self._hint).validate_python(value)
            return typed_json.convert(value, self._hint, strict=False, dec_hook=_unconverted)
        except Exception as error:  # a user's class may raise anything while it is made
            raise OutcomeGone(
                "this work was done and will not be done again, but the value that it was resolved with does not fit "
                f"what the function returns ({error}); forget the key, or catch this"
            ) from error


def _unconverted(kind: type, value: Any) -> Any:
    if issubclass(kind, PurePath):
        return kind(value)
    raise NotImplementedError(f"a {kind.__qualname__} cannot be made of plain data")


_known: WeakKeyDictionary[Any, Codec] = WeakKeyDictionary()


def codec_of(function: Callable[..., Any]) -> Codec | None:
    """The codec for the function's return value; None if its annotation names something that is not defined (yet).

    Raises :class:`InvalidRequest` for an annotation that can never be stored.
    """
    function = _function(function)
    if "return" not in _annotations(function):
        return PLAIN
    found = _known.get(function)
    if found is None:
        try:
            hint = _resolved(function)
        except NameError:
            return None
        reader = _Reader(_closure(function))
        reader.read(hint, f"what {function.__qualname__} returns")
        found = _known[function] = ReturnType(hint, reader.shapes.values()) if reader.shapes else PLAIN
    return found


def _function(function: Any) -> Any:
    """The Python function in a partial, a method, a callable object or a decorated function."""
    while True:
        if isinstance(function, partial):
            function = function.func
        elif inspect.ismethod(function):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif not isinstance(function, type) and inspect.isfunction(call := getattr(type(function), "__call__", None)):  # noqa: B004 -- it is called
            function = call
        else:
            return function


def _annotations(function: Any) -> Mapping[str, Any]:
    if not inspect.isfunction(function):
        return {}
    try:
        return function.__annotations__
    except NameError:  # evaluated lazily, from Python 3.14 on
        return {"return": "not_defined_yet"}


def _resolved(function: Any) -> Any:
    """The return annotation alone: the parameters' types may be known to type checkers only."""

    def returns() -> None: ...

    returns.__annotations__ = {"return": _annotations(function)["return"]}
    return typing.get_type_hints(returns, function.__globals__, _closure(function), include_extras=True)["return"]


def _closure(function: Any) -> dict[str, Any]:
    """The variables of the function's closure: a class that it returns may be one of them."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return found


class _Reader:
    """Collects the classes that an annotation names, and those of their fields."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.shapes: dict[type, Shape] = {}
        self._names = names
        self._seen: set[type] = set(PLAIN_TYPES)

    def read(self, hint: Any, where: str, *, by_pydantic: bool = False) -> None:
        for kind in _classes(hint):
            if kind not in self._seen:
                self._seen.add(kind)
                self._note(kind, where, by_pydantic=by_pydantic)

    def _note(self, kind: type, where: str, *, by_pydantic: bool) -> None:
        way = _way(kind)
        if way is not None:
            self._add(kind, *way)
        if way is not None or typing.is_typeddict(kind):
            for name, hint in self._fields(kind):
                self.read(hint, f"{kind.__qualname__}.{name}", by_pydantic=_is_pydantic(kind))
        elif _may_be_plain(kind):
            return
        elif by_pydantic and (adapted := _adapted(kind)) is not None:
            self._add(kind, *adapted)
        else:
            raise InvalidRequest(
                f"{where} is annotated with {kind.__qualname__}, which can never be stored, so no later caller could "
                "get it; return plain data, a dataclass, a msgspec struct, a pydantic model, an enum or a named tuple, "
                "or leave the annotation out if it says more than what is really returned"
            )

    def _add(self, kind: type, parts: Callable[[Any], list[Any]], make: Callable[..., Any]) -> None:
        name = kind.__qualname__
        if any(shape.name == name for shape in self.shapes.values()):
            name = f"{kind.__module__}.{name}"
        self.shapes[kind] = Shape(kind, name, parts, make)

    def _fields(self, kind: Any) -> Iterable[tuple[str, Any]]:
        if issubclass(kind, Enum):
            return [(member.name, type(member.value)) for member in kind]
        if _is_pydantic(kind):
            return [(name, field.annotation) for name, field in kind.model_fields.items()]
        try:
            hints = typing.get_type_hints(kind, localns=self._names)
        except (NameError, TypeError):  # known to type checkers only: the values are checked when they are stored
            return []
        own = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else hints.keys()
        return [(name, hint) for name, hint in hints.items() if name in own and get_origin(hint) is not ClassVar]


def _classes(hint: Any) -> Iterator[type]:
    """Every class that the annotation names."""
    origin, args = get_origin(hint), get_args(hint)
    outer = origin or hint
    if origin is Literal:
        args = tuple(map(type, args))
    elif origin is Annotated:
        args = args[:1]
    elif outer in _AWAITED:
        args = args[-1:]
    elif isinstance(outer, typing.NewType):
        args = (outer.__supertype__,)
    elif type(outer).__name__ == "TypeAliasType":  # type X = …, from Python 3.12 on
        args = (outer.__value__, *args)
    elif isinstance(outer, type) and outer not in (Union, UnionType):
        yield outer
    for each in args:
        yield from _classes(each)


_AWAITED = (Awaitable, Coroutine)


def _way(kind: Any) -> tuple[Callable[[Any], list[Any]], Callable[..., Any]] | None:
    """How objects of a class are taken apart and made again; None for a class that is not supported."""
    if issubclass(kind, Enum):
        return (lambda member: [member.value]), kind
    if _is_pydantic(kind):
        return _pydantic_parts, partial(_pydantic_made, kind)
    if issubclass(kind, msgspec.Struct):
        return _struct_parts, partial(_struct_made, kind)
    if dataclasses.is_dataclass(kind) and kind.__new__ is object.__new__:
        return _dataclass_parts, partial(_dataclass_made, kind)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return (lambda value: [tuple(value)]), kind._make
    return None


def _may_be_plain(kind: type) -> bool:
    """Whether a type that can be stored is a subclass of this one, as a list is of Sequence."""
    if kind in (Any, msgspec.UnsetType):
        return True
    try:
        return any(issubclass(plain, kind) for plain in PLAIN_TYPES)
    except TypeError:  # a protocol that does not support issubclass
        return True


def _is_pydantic(kind: type) -> bool:
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and issubclass(kind, pydantic.BaseModel)


def _adapted(kind: type) -> tuple[Callable[[Any], list[Any]], Callable[..., Any]] | None:
    """As :func:`_way`, for a class that only pydantic can convert, such as a URL."""
    try:
        adapter = sys.modules["pydantic"].TypeAdapter(kind)
    except Exception:  # noqa: BLE001 -- pydantic raises many types of errors here
        return None

    def parts(value: Any) -> list[Any]:
        plain = adapter.dump_python(value, mode="json")
        if adapter.validate_python(plain) != value:
            raise Unencodable(f"a {kind.__qualname__} does not show what is in it, so it cannot be stored")
        return [plain]

    return parts, adapter.validate_python


def _dataclass_parts(value: Any) -> list[Any]:
    fields = {field.name for field in dataclasses.fields(value)}
    extra = [name for name in getattr(value, "__dict__", ()) if name not in fields and not _is_cache(value, name)]
    if extra:
        raise Unencodable(f"a {type(value).__qualname__} has the attribute {extra[0]!r}, which is none of its fields")
    return [{field.name: getattr(value, field.name) for field in dataclasses.fields(value)}]


def _is_cache(value: Any, name: str) -> bool:
    return isinstance(inspect.getattr_static(type(value), name, None), cached_property)


def _dataclass_made(kind: Any, content: dict[str, Any]) -> Any:
    value = object.__new__(kind)
    for field in dataclasses.fields(kind):
        if field.name in content:
            item = content[field.name]
        elif field.default is not dataclasses.MISSING:
            item = field.default
        elif field.default_factory is not dataclasses.MISSING:
            item = field.default_factory()
        else:
            raise LookupError(f"it was stored without {field.name!r}")
        object.__setattr__(value, field.name, item)
    return value


def _struct_parts(value: Any) -> list[Any]:
    fields = {name: getattr(value, name) for name in value.__struct_fields__}
    return [{name: item for name, item in fields.items() if item is not msgspec.UNSET}]


def _struct_made(kind: Any, content: dict[str, Any]) -> Any:
    return kind(**{name: item for name, item in content.items() if name in kind.__struct_fields__})


def _pydantic_parts(value: Any) -> list[Any]:
    state = value.__getstate__()
    fields = {name: item for name, item in state["__dict__"].items() if name in type(value).model_fields}
    kept = state["__pydantic_fields_set__"]
    return [fields, sorted(kept), state.get("__pydantic_extra__"), state.get("__pydantic_private__")]


def _pydantic_made(kind: Any, content: dict[str, Any], kept: list[str], extra: Any, private: Any) -> Any:
    fields = {}
    for name, field in kind.model_fields.items():
        if name not in content and field.is_required():
            raise LookupError(f"it was stored without {name!r}")
        fields[name] = content[name] if name in content else field.get_default(call_default_factory=True)
    value = kind.__new__(kind)
    value.__setstate__(
        {
            "__dict__": fields,
            "__pydantic_fields_set__": set(kept),
            "__pydantic_extra__": extra,
            "__pydantic_private__": private,
        }
    )
    return value
