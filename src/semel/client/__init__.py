"""Clients of a semel server, and transports for httpx that make requests to others safe to retry."""

from semel.errors import MissingExtra

try:
    from semel.api_types import (
        RemoteAction,
        RemoteArtifact,
        RemoteConfig,
        RemoteCosts,
        RemoteEvent,
        RemoteJob,
        RemoteLogLine,
        RemoteModel,
        RemoteRerun,
        RemoteRun,
        RemoteStep,
        RemoteSummary,
        RemoteWaiting,
        RemoteWorker,
    )
    from semel.client.client import AsyncClient, Client
    from semel.client.jobs import SubmitResult, SubmittedJob, submit_cloud_job
    from semel.client.transport import AsyncIdempotentTransport, IdempotentTransport
except ModuleNotFoundError as error:
    raise MissingExtra(f"{error}; this needs an extra: pip install 'semel[client]'") from error

__all__ = [
    "AsyncClient",
    "AsyncIdempotentTransport",
    "Client",
    "IdempotentTransport",
    "RemoteAction",
    "RemoteArtifact",
    "RemoteConfig",
    "RemoteCosts",
    "RemoteEvent",
    "RemoteJob",
    "RemoteLogLine",
    "RemoteModel",
    "RemoteRerun",
    "RemoteRun",
    "RemoteStep",
    "RemoteSummary",
    "RemoteWaiting",
    "RemoteWorker",
    "SubmitResult",
    "SubmittedJob",
    "submit_cloud_job",
]
