"""Providers, which execute jobs: our own workers, or a cloud.

A provider turns a config into the run of a model. That of a cloud has a model of its own (whose name begins with
``semel.``, in the queue of :mod:`semel.service.jobs.internal_worker`), which the service executes: it calls the cloud
once, and waits. A provider is a class, instantiated once for each service. Installed packages register theirs in the
entry point group ``semel.providers``, under the provider's name.

A config whose settings for a provider say ``{"simulate": true}`` runs on our own workers instead: the demo's configs,
and tests of pipelines, need no account.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from semel.errors import InvalidRequest
from semel.runs.types import INTERNAL_PREFIX, INTERNAL_QUEUE

if TYPE_CHECKING:
    from litestar.types import ControllerRouterHandler

    from semel.service.jobs.configs import Config
    from semel.service.state import ServiceState

GROUP = "semel.providers"
_log = logging.getLogger("semel.service")


class RunSpec(Struct, frozen=True, kw_only=True):
    """The run of a job."""

    model: str
    parameters: dict[str, Any]
    queue: str | None = None
    priority: int | None = None
    cost: float | None = None


class Provider(Protocol):
    """What every provider implements."""

    name: str

    def order(self, config: Config) -> RunSpec:
        """The run for a config; raises ``InvalidRequest`` if something is missing, such as a token."""

    def install(self, service: ServiceState) -> None:
        """Register the models that the provider needs with ``service.app``; called once, before the server starts.

        A job's data is not unpacked for models whose names begin with ``semel.``: they have ``ctx.data_ref``, under
        which ``service.app.results`` has it as a tar.gz, or None.
        """


class LocalProvider:
    """The provider ``local``: a job becomes a run of the config's model, for whichever worker serves its queue."""

    name = "local"

    def order(self, config: Config) -> RunSpec:
        if config.model is None:
            raise InvalidRequest(f"the config {config.name!r} has no model, which the provider 'local' requires")
        if config.model.startswith(INTERNAL_PREFIX) or config.queue == INTERNAL_QUEUE:
            raise InvalidRequest(
                f"the config {config.name!r} names a model or a queue that is reserved for the service"
            )
        return RunSpec(
            model=config.model,
            parameters=config.parameters,
            queue=config.queue,
            priority=config.priority,
            cost=config.cost,
        )

    def install(self, service: ServiceState) -> None:
        """Nothing to do: the app's models are registered already."""


def load_providers() -> dict[str, Provider]:
    """The provider ``local`` and every installed one, by name."""
    found: list[Provider] = [*(kind() for kind in _installed()), LocalProvider()]
    return {provider.name: provider for provider in found}


def handlers_of(providers: Iterable[Provider]) -> Sequence[ControllerRouterHandler]:
    """The routes that providers add to the service, such as one for webhooks: their ``handlers()``."""
    return [handler for each in providers if hasattr(each, "handlers") for handler in each.handlers()]


def _installed() -> Iterator[Any]:
    for entry in entry_points(group=GROUP):
        if (kind := _load(entry)) is not None:
            yield kind


def _load(entry: EntryPoint) -> Any:
    try:
        kind = entry.load()
    except Exception as error:  # noqa: BLE001 -- whatever a provider's package raises, the service starts without it
        _log.error("the provider %r of %s cannot be loaded: %s", entry.name, entry.value, error)
        return None
    if getattr(kind, "name", None) != entry.name:
        _log.error("the provider %r of %s is not used: its class has another name", entry.name, entry.value)
        return None
    return kind
