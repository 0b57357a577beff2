"""The provider ``replicate``: jobs as predictions in Replicate's cloud.

The config has under ``providers.replicate`` what to run::

    {"version": "…", "input": {"prompt": "a fox"}}              # or "model": "owner/name", for official models

The job becomes a run of the model ``semel.replicate``, which the server executes itself: it creates one prediction, and
follows it to its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from semel import typed_json
from semel.errors import InvalidRequest
from semel.providers.replicate import store as rows
from semel.providers.replicate.matching import PredictionQuery
from semel.providers.replicate.prediction_run import PredictionRun
from semel.providers.replicate.service import ReplicateService, Timing
from semel.runs.execution.context import Context
from semel.service.jobs.internal_worker import QUEUE
from semel.service.jobs.providers import RunSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from litestar.types import ControllerRouterHandler

    from semel.service.jobs.configs import Config
    from semel.service.settings import Settings
    from semel.service.state import ServiceState

MODEL = "semel.replicate"
MAX_LOST = 1000
"""How often a run may lose its server: the prediction continues without one."""

_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+$", max_length=200)]
_Version = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:/-]+$", max_length=300)]


class ReplicateOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a config for this provider."""

    version: _Version | None = None
    """As ``<id>`` or ``owner/name:<id>``."""
    model: _Name | None = None
    input: dict[str, Any] | None = None
    """By default the parameters of the config."""
    retry: bool = False
    """Whether a failed prediction is retried."""
    price_per_second: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    token_input: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    """An input of the model that takes any text: it is set to the job's token, which identifies its prediction."""


class Replicate:
    """A :class:`~semel.service.jobs.providers.Provider`."""

    name = "replicate"

    def __init__(self, timing: Timing | None = None) -> None:
        self._timing = timing or Timing()
        self._settings: Settings | None = None
        self.service: ReplicateService | None = None
        """Set when the provider is installed, if there is a token."""

    @staticmethod
    def handlers() -> Sequence[ControllerRouterHandler]:
        """The route for Replicate's webhooks."""
        from semel.providers.replicate.webhook import HANDLERS

        return HANDLERS

    def order(self, config: Config) -> RunSpec:
        if self._settings is None or not self._settings.replicate_token:
            raise InvalidRequest(
                "the provider 'replicate' needs a token: set REPLICATE_API_TOKEN (or SEMEL_REPLICATE_TOKEN) and start"
                " the server again"
            )
        options = _options(config)
        if config.data is not None:
            raise InvalidRequest(
                f"the config {config.name!r} has data, which Replicate cannot see: give it an address among the input"
            )
        parameters = {
            "config": config.name,
            "version": options.version,
            "model": options.model,
            "input": config.parameters if options.input is None else options.input,
            "retry": options.retry or None,
            "price_per_second": options.price_per_second,
            "token_input": options.token_input,
        }
        return RunSpec(
            model=MODEL,
            parameters={name: value for name, value in parameters.items() if value is not None},
            queue=QUEUE,
            priority=config.priority,
            cost=config.cost,
        )

    def install(self, service: ServiceState) -> None:
        self._settings = service.settings
        if not service.settings.replicate_token:
            return
        replicate = self.service = ReplicateService(service, service.settings.replicate_token, self._timing)
        service.components.insert(0, replicate)  # open before the worker whose runs need it, and closed after

        async def follow(  # noqa: PLR0917 -- a model's parameters, which are given by name
            ctx: Context,
            config: str = "",
            version: str | None = None,
            model: str | None = None,
            input: dict[str, Any] | None = None,  # noqa: A002 -- as Replicate calls it
            retry: bool = False,
            price_per_second: float | None = None,
            token_input: str | None = None,
        ) -> dict[str, Any]:
            query = PredictionQuery(version=version, model=model, input=input or {}, token_input=token_input)
            attempt = PredictionRun(replicate, ctx, query, retry=retry, price=price_per_second)
            return await attempt.result(rows.new_intent(ctx, config))

        service.app.model(
            MODEL,
            queue=QUEUE,
            lease=self._timing.lease,
            grace=self._timing.grace,
            timeout=None,
            max_lost=MAX_LOST,
        )(follow)


def _options(config: Config) -> ReplicateOptions:
    try:
        options = typed_json.convert(config.providers.get("replicate", {}), ReplicateOptions)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the config {config.name!r} does not fit the provider 'replicate': {error}") from None
    if (options.version is None) == (options.model is None):
        raise InvalidRequest(
            f"the config {config.name!r} needs providers.replicate.version, or .model for an official model, not both"
        )
    return options
