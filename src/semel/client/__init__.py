"""Requests that are safe to retry, for httpx: give a client one of these transports."""

from semel.sql.engines import missing

try:
    from semel.client.transport import AsyncIdempotentTransport, IdempotentTransport
except ModuleNotFoundError as error:
    raise missing("client", error) from error

__all__ = ["AsyncIdempotentTransport", "IdempotentTransport"]
