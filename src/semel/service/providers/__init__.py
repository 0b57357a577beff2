"""Who does the work of a job: our own workers, or somebody else's cloud.

A provider turns a config into an order: which model is run, with which parameters. A provider in a cloud brings a model
of its own (its name begins with ``semel.``, its queue is that of :mod:`semel.service.internal`), which the service
itself works on: it asks the cloud once, and waits. Each provider is a class in a module of its name, made as
``Local()``, once for a site.

A config whose settings for a provider say ``{"simulate": true}`` goes to our own workers instead, whatever cloud it is
submitted to: that is how the demo's configs, and tests of pipelines, need no account anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from semel.service.configs import Config
    from semel.service.site import Site


class Order(Struct, frozen=True, kw_only=True):
    """The run that a job becomes."""

    model: str
    parameters: dict[str, Any]
    queue: str | None = None
    priority: int | None = None
    cost: float | None = None


class Provider(Protocol):
    """One small contract for all."""

    name: str

    def order(self, config: Config) -> Order:
        """The run for a config, or an ``InvalidRequest`` that says what is missing, such as a token."""

    def install(self, site: Site) -> None:
        """Register the models that the provider needs with ``site.app``; called once, before the server starts.

        A job's data is not unpacked for models whose names begin with ``semel.``: they have ``ctx.data_ref``, under
        which ``site.app.results`` has it as a tar.gz, or None.
        """
