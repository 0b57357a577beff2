"""The provider ``local``: our own workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.errors import InvalidRequest
from semel.runs.records import INTERNAL_PREFIX, INTERNAL_QUEUE
from semel.service.providers import Order

if TYPE_CHECKING:
    from semel.service.configs import Config
    from semel.service.site import Site


class Local:
    """A job becomes a run of the config's model, for whichever worker serves its queue."""

    name = "local"

    def order(self, config: Config) -> Order:
        """See :class:`~semel.service.providers.Provider`."""
        if config.model is None:
            raise InvalidRequest(f"the config {config.name!r} names no model, which the provider 'local' needs")
        if config.model.startswith(INTERNAL_PREFIX) or config.queue == INTERNAL_QUEUE:
            raise InvalidRequest(f"the config {config.name!r} names a model or a queue that is the service's own")
        return Order(
            model=config.model,
            parameters=config.parameters,
            queue=config.queue,
            priority=config.priority,
            cost=config.cost,
        )

    def install(self, site: Site) -> None:
        """See :class:`~semel.service.providers.Provider`: the app's models are there already."""
