"""The models of an app, by name."""

from __future__ import annotations

from collections.abc import Iterator

from semel._validation import nearest
from semel.errors import InvalidRequest, UnknownModel
from semel.runs.models.model import Model
from semel.runs.types import INTERNAL_PREFIX


class Registry:
    """Holds what was registered; asking for what was not is a clear error."""

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
        """All of them, in the order of the alphabet."""
        return sorted(self._models)


def _advice(name: object, known: list[str]) -> str:
    known = [each for each in known if not each.startswith(INTERNAL_PREFIX)]
    names = ", ".join(sorted(known)) or "none"
    if callable(name):
        return f"a run is submitted by its model's name, not by a function; there are: {names}"
    return f"unknown model {name!r}; {nearest(name, known)}"
