"""The parameters of a function, compiled once into a msgspec type, so that a check takes microseconds."""

from __future__ import annotations

import difflib
import inspect
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec

from semel.runs import strict_json

__all__ = ["MAX_BYTES", "Signature"]

MAX_BYTES = 1 << 20
"""The most bytes that the JSON of the parameters may have."""

_NAMED = frozenset({inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY})

_EXACT = 2.0**53  # beyond it a float's shortest digits are not its value any more, and the hash is over the digits


class Signature:
    """The parameters of a function, by name. Its methods raise `ValueError`, whose text continues "model X"."""

    def __init__(self, function: Callable[..., Any]) -> None:
        given = _parameters(function)
        hints = {parameter.name: _hint(function, parameter) for parameter in given}
        self.wants_context = _is_context(given, hints)
        own = given[1:] if self.wants_context else given
        self._context_name = given[0].name if self.wants_context else None
        self.takes_extra = bool(own) and own[-1].kind is inspect.Parameter.VAR_KEYWORD
        self._extra_hint: Any = hints[own[-1].name] if self.takes_extra else Any
        named = own[:-1] if self.takes_extra else own
        for parameter in named:
            _refuse_unnamed(parameter)
        self.parameters = tuple(parameter.name for parameter in named)
        self._hints = {name: hints[name] for name in self.parameters}
        self._required = frozenset(p.name for p in named if p.default is inspect.Parameter.empty)
        self._defaults = {p.name: p.default for p in named if p.name not in self._required}
        self._decoder = msgspec.json.Decoder(_struct(named, self._hints), dec_hook=_validated)

    def check(self, parameters: Mapping[str, Any]) -> str:
        """Return the parameters as compact JSON that `bind` takes."""
        if not parameters and not self._required and type(parameters) is dict:
            return "{}"
        data = self.written(parameters)
        self._refuse_names(parameters)
        return self._read(data)[1].decode()

    def bind(self, text: str) -> dict[str, Any]:
        """Return the arguments by name, of the annotated types; what was not given is left to its default."""
        if text == "{}" and not self._required:
            return {}
        data = text.encode()
        try:
            given = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError as error:
            raise ValueError(f"takes a JSON object of parameters: {error}") from error
        self._refuse_names(given)
        struct, data = self._read(data)
        values = zip(self.parameters, msgspec.structs.astuple(struct), strict=True)
        arguments = {name: value for name, value in values if value is not msgspec.UNSET}
        if len(given) > len(arguments):
            arguments.update(self._extra(data))
        return arguments

    def written(self, parameters: Mapping[str, Any]) -> bytes:
        """Return the parameters as JSON that every store can keep; their names and types are not checked."""
        if not isinstance(parameters, Mapping):
            raise ValueError(f"takes a mapping of parameters, not {type(parameters).__qualname__}")  # noqa: TRY004
        for name in parameters:
            if not isinstance(name, str):
                raise ValueError(f"takes parameters by name, and {name!r:.80} is not text")  # noqa: TRY004
        try:
            data = strict_json.write(parameters, ordered=True)
        except ValueError as error:
            raise ValueError(f"cannot store its parameters as JSON: {error}") from error
        _refuse_oddities(parameters, data)
        return data

    def schema(self) -> dict[str, Any]:
        """The parameters as JSON Schema, as far as their types are known; an unknown type allows anything."""
        hints = [self._hints[name] for name in self.parameters]
        types, classes = msgspec.json.schema_components(hints, schema_hook=_schema_of, ref_template="#/$defs/{name}")
        properties = {name: dict(kind) for name, kind in zip(self.parameters, types, strict=True)}
        for name, default in self._defaults.items():
            with suppress(Exception):  # a default may be anything; what has no JSON form is left out
                properties[name]["default"] = msgspec.json.decode(strict_json.write(default))
        required = [name for name in self.parameters if name in self._required]
        schema = {"type": "object", "properties": properties, "required": required}
        return schema | {"additionalProperties": self.takes_extra} | ({"$defs": classes} if classes else {})

    def _refuse_names(self, given: Mapping[str, Any]) -> None:
        for name in given:
            if name not in self._hints and (not self.takes_extra or name == self._context_name):
                raise ValueError(self._unknown(name))
        missing = self._required - given.keys()
        if missing:
            names = [repr(name) for name in self.parameters if name in missing]
            raise ValueError(f"lacks the parameter{'s' * (len(names) > 1)} {', '.join(names)}")

    def _unknown(self, name: str) -> str:
        if name == self._context_name:
            return f"takes no parameter {name!r}: the context is given by the worker"
        near = difflib.get_close_matches(name, self.parameters, n=1)
        if near:
            return f"takes no parameter {name!r:.200}; did you mean {near[0]!r}?"
        return f"takes no parameter {name!r:.200}; it takes {', '.join(self.parameters) or 'none'}"

    def _read(self, data: bytes) -> tuple[msgspec.Struct, bytes]:
        """Return the values in their types, and the JSON with 24.0 written as 24 where a whole number is wanted."""
        try:
            return self._typed(data), data
        except msgspec.ValidationError:
            whole = self._with_whole_numbers(data)
            return self._typed(whole), whole

    def _typed(self, data: bytes) -> msgspec.Struct:
        struct: msgspec.Struct = self._decoder.decode(data)
        if self._extra_hint is not Any:
            self._extra(data)
        return struct

    def _extra(self, data: bytes) -> dict[str, Any]:
        """The values of the names that only ``**kwargs`` takes."""
        values = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        names = [name for name in values if name not in self._hints]
        return {name: _converted(values[name], self._extra_hint) for name in names}

    def _with_whole_numbers(self, data: bytes) -> bytes:
        values = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        for name, value in values.items():
            hint = self._hints.get(name, self._extra_hint)
            try:
                _converted(value, hint)
            except msgspec.ValidationError as error:
                whole = msgspec.json.encode(_whole(msgspec.json.decode(value)))
                try:
                    _converted(whole, hint)
                except msgspec.ValidationError:
                    raise ValueError(_parameter_error(name, str(error))) from error
                values[name] = msgspec.Raw(whole)
        return msgspec.json.encode(values)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    lazily: dict[str, Any] = {}
    if sys.version_info >= (3, 14):  # where annotations may name what does not exist at run time
        import annotationlib

        lazily = {"annotation_format": annotationlib.Format.FORWARDREF}
    try:
        return list(inspect.signature(function, **lazily).parameters.values())
    except TypeError as error:
        raise ValueError(f"the signature of its function cannot be read: {error}") from error


def _hint(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """The annotation if msgspec can check it, else `Any`: an unknown class is no reason to refuse a model."""
    if parameter.annotation is inspect.Parameter.empty:
        return Any
    plain = inspect.unwrap(function)
    names = getattr(getattr(plain, "__func__", plain), "__globals__", {})
    annotated = SimpleNamespace(__annotations__={"it": parameter.annotation})
    try:
        hint = typing.get_type_hints(annotated, globalns=names, include_extras=True)["it"]
        info = msgspec.inspect.type_info(hint)
        msgspec.json.Decoder(hint)
    except Exception:  # noqa: BLE001 (an annotation may be anything, and fail in any way)
        return parameter.annotation if _is_context_type(parameter.annotation) else Any
    return hint if _is_context_type(hint) or all(map(_is_checkable, _inside(info, set()))) else Any


def _inside(info: Any, met: set[int]) -> Iterator[msgspec.inspect.CustomType]:
    """Every class within a type that msgspec does not know itself."""
    if id(info) in met:
        return
    met.add(id(info))
    if isinstance(info, msgspec.inspect.CustomType):
        yield info
    elif isinstance(info, msgspec.Struct):
        for part in msgspec.structs.astuple(info):
            yield from _inside(part, met)
    elif isinstance(info, tuple):
        for part in info:
            yield from _inside(part, met)


def _is_checkable(info: msgspec.inspect.CustomType) -> bool:
    return hasattr(info.cls, "model_validate")


def _validated(kind: Any, value: Any) -> Any:
    try:
        return kind.model_validate(value)
    except ValueError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _is_context(given: list[inspect.Parameter], hints: Mapping[str, Any]) -> bool:
    for parameter in given[1:]:
        if parameter.name == "ctx" or _is_context_type(hints[parameter.name]):
            raise ValueError(f"the context must be the first parameter of the function; {parameter.name!r} is not")
    if not given or (given[0].name != "ctx" and not _is_context_type(hints[given[0].name])):
        return False
    if given[0].kind not in {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY}:
        raise ValueError(f"the context is given by position, which {given[0].name!r} does not take")
    return True


def _is_context_type(hint: Any) -> bool:
    """Compared by name, since the annotation may be text, and the context need not be imported."""
    if isinstance(hint, str):
        return hint.rpartition(".")[2] == "Context"
    return (
        getattr(hint, "__module__", None) == "semel.runs.execution.context"
        and getattr(hint, "__name__", None) == "Context"
    )


def _refuse_unnamed(parameter: inspect.Parameter) -> None:
    if parameter.kind not in _NAMED:
        star = "*" * (parameter.kind is inspect.Parameter.VAR_POSITIONAL)
        raise ValueError(f"parameters are given by name, which {star + parameter.name!r} of its function does not take")


def _struct(named: list[inspect.Parameter], hints: Mapping[str, Any]) -> type[msgspec.Struct]:
    """A struct with a field for each parameter, under our own names, since a parameter may have any name."""
    columns: list[Any] = [
        (f"p{index}", hints[p.name])
        if p.default is inspect.Parameter.empty
        else (f"p{index}", hints[p.name], msgspec.UNSET)
        for index, p in enumerate(named)
    ]
    rename = {f"p{index}": parameter.name for index, parameter in enumerate(named)}
    return msgspec.defstruct("Parameters", columns, rename=rename, kw_only=True)


def _refuse_oddities(parameters: Mapping[str, Any], data: bytes) -> None:
    if len(data) > MAX_BYTES:
        raise ValueError(f"takes up to {MAX_BYTES:,} bytes of parameters as JSON, and these are {len(data):,}")
    if strict_json.has_nul(data):
        names = [name for name in parameters if strict_json.has_nul(strict_json.write({name: parameters[name]}))]
        raise ValueError(f"cannot keep the parameter {names[0]!r:.200}: it holds the character NUL (U+0000)")
    if strict_json.depth(data) > strict_json.MAX_DEPTH:
        raise ValueError(f"takes parameters of up to {strict_json.MAX_DEPTH} levels of nesting, and these have more")


def _converted(data: bytes | msgspec.Raw, hint: Any) -> Any:
    return msgspec.json.decode(data, type=hint, dec_hook=_validated)


def _schema_of(kind: Any) -> dict[str, Any]:
    """The schema of a class that validates itself: only its name."""
    return {"title": getattr(kind, "__name__", str(kind))}


def _parameter_error(name: str, message: str) -> str:
    """The message of msgspec in terms of parameters."""
    reason, _, path = message.partition(" - at `$")
    place = f" at {path[:-1]}" if path else ""
    return f"cannot take the parameter {name!r:.200}{place}: {reason[:1].lower()}{reason[1:]}"


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT:
        return int(value)
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list) else value
