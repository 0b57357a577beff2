"""Results in S3 and compatible stores, and in Google's and Azure's storage, through the package ``obstore``.

Credentials and endpoints come from the environment, as for every tool (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``,
``AWS_ALLOW_HTTP``, …), or from the URL's query, whose names are obstore's: ``s3://bucket/prefix?region=eu-west-1``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.parse import parse_qsl, urlsplit

from semel.errors import InvalidRequest, MissingExtra, ResultStoreError
from semel.runs.results import CHUNK, check_ref

try:
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import ObjectStore, from_url
except ImportError as error:
    raise MissingExtra(f"{error}; results in object stores need an extra: pip install 'semel[s3]'") from error

__all__ = ["ObjectResults"]

P = ParamSpec("P")
T = TypeVar("T")

_RETRY = {
    "max_retries": 5,
    "retry_timeout": timedelta(seconds=8),  # with 5 s to connect: an unreachable store is reported within about 10 s
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
}

_ENVIRONMENT = {"s3": "AWS", "s3a": "AWS", "gs": "GOOGLE"}  # and AZURE for all the others

_CLIENT = {
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "default_content_type",
    "http1_only",
    "http2_only",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "proxy_url",
    "proxy_ca_certificate",
    "proxy_excludes",
    "randomize_addresses",
    "read_timeout",
    "root_certificate",
    "timeout",
    "user_agent",
}
"""Options of obstore's HTTP client, not of the store; in the wrong place they make it panic."""

_used_in: int | None = None
"""The process whose threads obstore uses; a forked child does not have them, and every call there would hang."""


class ObjectResults:
    """A bucket, or a prefix in one. Puts of any size are atomic: an object that was sent in part does not exist."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._bucket = _bucket(url)

    def __repr__(self) -> str:
        scheme, _, rest = self._url.partition("?")[0].partition("://")
        return f"ObjectResults({scheme + '://' + rest.rpartition('@')[2]!r})"  # the rest may hold a secret

    @property
    def url(self) -> str:
        return self._url

    def put(self, ref: str, data: bytes) -> None:
        self._ask("write", ref, obstore.put, self._bucket, ref, data)

    def put_file(self, ref: str, path: Path) -> None:
        with path.open("rb") as file:  # a missing file is the caller's error, not the store's
            self._ask("write", ref, obstore.put, self._bucket, ref, file)

    def get(self, ref: str) -> bytes:
        return self._ask("read", ref, lambda: bytes(obstore.get(self._bucket, ref).bytes()))

    def open(self, ref: str) -> Iterator[bytes]:
        stream = self._ask("read", ref, lambda: iter(obstore.get(self._bucket, ref).stream(min_chunk_size=CHUNK)))
        while chunk := self._ask("read", ref, next, stream, b""):
            yield bytes(chunk)

    def size(self, ref: str) -> int:
        return self._ask("read", ref, obstore.head, self._bucket, ref)["size"]

    def remove(self, prefix: str) -> None:
        self._ask("remove", prefix, self._remove, prefix)

    def _remove(self, prefix: str) -> None:
        for page in obstore.list(self._bucket, prefix=prefix, chunk_size=1000):
            obstore.delete(self._bucket, [found["path"] for found in page])

    def _ask(self, verb: str, ref: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        check_ref(ref)
        global _used_in  # noqa: PLW0603 (as global as obstore's threads)
        if _used_in is None:
            _used_in = os.getpid()
        if _used_in != os.getpid():
            raise ResultStoreError(
                f"cannot {verb} {ref} in {self!r}: the process was forked after its parent had used the object store,"
                " which does not survive that; start processes with spawn or forkserver"
            )
        try:
            return call(*args, **kwargs)
        except (BaseError, OSError, ValueError) as error:
            raise ResultStoreError(f"cannot {verb} {ref} in {self!r}: {_reason(error)}") from error


def _bucket(url: str) -> ObjectStore:
    parts = urlsplit(url)
    asked = dict(parse_qsl(parts.query, keep_blank_values=True))
    prefix = _ENVIRONMENT.get(parts.scheme, "AZURE")
    # obstore ignores the client options of the environment as soon as it is given one
    client: dict[str, Any] = {n: v for n in _CLIENT if (v := os.environ.get(f"{prefix}_{n.upper()}"))}
    client.update({name: value for name, value in asked.items() if name in _CLIENT})
    config: Any = {name: value for name, value in asked.items() if name not in _CLIENT}
    retry: Any = _RETRY
    options: Any = client
    try:
        return from_url(
            parts._replace(query="").geturl(), config=config, client_options=options or None, retry_config=retry
        )
    except (BaseError, ValueError) as error:
        raise InvalidRequest(f"results cannot be stored in {url.partition('?')[0]!r}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The message of an error, without the dump of data structures that obstore adds to it."""
    return " ".join(str(error).partition("\n\nDebug source:")[0].split())
