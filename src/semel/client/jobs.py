"""The methods of the clients on jobs, and ``submit_cloud_job``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx
import msgspec
from msgspec import Struct

from semel import typed_json
from semel.api_types import JobAnswer, JobPage, RemoteConfig, RemoteCosts, RemoteJob
from semel.client.errors import Answer, refusal
from semel.client.http import (
    AsyncClientBackend,
    HttpSession,
    automatic_key,
    httpx_options,
    json_body,
    message_of,
    server_url,
    without_none,
)
from semel.errors import CostLimitExceeded, QuotaExceeded, RunNotFound, SemelError, ServiceError
from semel.runs.types import checked_id

SUBMIT_TIMEOUT = 120.0
"""Seconds for one attempt, in which the server may have to upload the config's data."""
TIMED_OUT = "Request timed out - job may have been created, check with same idempotency key"


class SubmittedJob(Struct, frozen=True, kw_only=True):
    """A job that was submitted. ``idempotent_hit``: it existed already, with the same key."""

    job_id: str
    status: str
    data_uploaded: bool
    idempotent_hit: bool
    quota_warnings: list[str]
    cost_limit_warning: str | None
    idempotency_key: str


@dataclass(frozen=True)
class SubmitResult:
    """The result of :func:`submit_cloud_job`. Submit again with ``idempotency_key`` to get the same job."""

    success: bool
    job_id: str | None = None
    error: str | None = None
    was_duplicate: bool = False
    idempotency_key: str | None = field(default=None, compare=False)


JOBS = "/api/cloud/jobs"
SUBMIT = f"{JOBS}/submit"
PAGE = 200
"""Jobs per page of a list."""


def submission(config_name: str, key: str, tracker_run_name: str | None, ttl_hours: float | None) -> dict[str, Any]:
    """The body of a submission."""
    fields = {"config_name_to_load": config_name, "idempotency_key": key, "tracker_run_name": tracker_run_name or None}
    return without_none({**fields, "ttl_hours": ttl_hours})


class JobMethods:
    """The methods on jobs and configs."""

    session: HttpSession

    async def submit_job(
        self,
        config_name: str,
        *,
        provider: str = "replicate",
        idempotency_key: str | None = None,
        tracker_run_name: str | None = None,
        ttl_hours: float | None = None,
        timeout: float = SUBMIT_TIMEOUT,  # noqa: ASYNC109 -- also the blocking client's
    ) -> SubmittedJob:
        """Submit a job of a named config, or return the job that was submitted with the same key.

        All attempts carry the same key (``py-client-<uuid>`` by default), which is kept for ``ttl_hours`` (24 by
        default). ``timeout`` is for each attempt. ``QuotaExceeded`` and ``CostLimitExceeded`` are raised without a
        retry.
        """
        key = automatic_key() if idempotency_key is None else idempotency_key
        body = submission(config_name, key, tracker_run_name, ttl_hours)
        answer = await self.session.request(
            "POST", SUBMIT, body=body, key=key, timeout=timeout, params={"provider": provider}
        )
        decoded = self.session.decode(answer, JobAnswer, key=key)
        if not decoded.success or not decoded.job_id:
            raise _refused(decoded.error or "Unknown error", key)
        return SubmittedJob(
            job_id=decoded.job_id,
            status=decoded.status or "",
            data_uploaded=bool(decoded.data_uploaded),
            idempotent_hit=bool(decoded.idempotent_hit),
            quota_warnings=decoded.quota_warnings or [],
            cost_limit_warning=decoded.cost_limit_warning or None,
            idempotency_key=key,
        )

    async def job(self, job_id: str) -> RemoteJob:
        """Return the job."""
        return await self.session.get(_job_path(job_id), RemoteJob, about_run=True)

    def jobs(
        self,
        *,
        status: str | None = None,
        config: str | None = None,
        provider: str | None = None,
        user: str | int | None = None,
        limit: int | None = None,
    ) -> AsyncGenerator[RemoteJob, None]:
        """Iterate over jobs, newest first, up to ``limit``."""
        filters = {"status": status, "config": config, "provider": provider, "user": user}
        return self.session.paginate(
            JOBS, JobPage, lambda page: page.jobs, filters=filters, limit=limit, page_size=PAGE
        )

    async def cancel_job(self, job_id: str) -> RemoteJob:
        """Cancel a job that is queued or uploading, or request cancellation of a running one. Idempotent."""
        answer = await self.session.request("POST", f"{_job_path(job_id)}/cancel", about_run=True)
        return self.session.decode(answer, RemoteJob)

    async def configs(self) -> list[RemoteConfig]:
        """Return the configs."""
        return await self.session.get("/api/cloud/configs", list[RemoteConfig])

    async def costs(self, user: str | int | None = None) -> RemoteCosts:
        """Return the costs of the caller against the limits of their quota; operators may name another ``user``."""
        return await self.session.get("/api/cloud/cost-limit/status", RemoteCosts, params={"user": user})


def _job_path(job_id: object) -> str:
    known = checked_id(job_id)
    if known is None:
        raise RunNotFound(f"there is no job {str(job_id)!r:.200}")
    return f"{JOBS}/{known}"


def _refused(error: str, key: str) -> SemelError:
    if "Quota exceeded" in error:
        return QuotaExceeded(error)
    if "Cost limit" in error:
        return CostLimitExceeded(error)
    return ServiceError(200, "JOB_REFUSED", error, idempotency_key=key)


async def submit_cloud_job(
    base_url: str,
    config_name: str,
    idempotency_key: str | None = None,
    tracker_run_name: str | None = None,
    *,
    provider: str = "replicate",
    token: str | None = None,
    ttl_hours: float | None = None,
    timeout: float = 300.0,  # noqa: ASYNC109 -- part of the specified signature
) -> SubmitResult:
    """Submit a job in one attempt. Errors of the server and the network are returned, not raised.

    The result has the key (``py-client-<uuid>`` by default): after a timeout, submit again with the same key.
    ``timeout`` is for the whole call.
    """
    key = automatic_key() if idempotency_key is None else idempotency_key
    backend = AsyncClientBackend(**httpx_options(base_url, token, None))
    session = HttpSession(backend, str(server_url(base_url)), timeout=timeout, retries=0, backoff=0.0)
    try:
        with anyio.fail_after(timeout):
            body = json_body(submission(config_name, key, tracker_run_name, ttl_hours))
            answer = await session.try_once("POST", SUBMIT, timeout, params={"provider": provider}, **body)
        return SubmitResult(**_result(answer), idempotency_key=key)
    except TimeoutError:
        return SubmitResult(success=False, error=TIMED_OUT, idempotency_key=key)
    finally:
        with anyio.CancelScope(shield=True):
            await backend.close()


def _result(answer: Answer | httpx.TransportError) -> dict[str, Any]:
    if isinstance(answer, httpx.TimeoutException) and not isinstance(answer, httpx.ConnectTimeout):
        raise TimeoutError
    if isinstance(answer, httpx.TransportError):
        return {"success": False, "error": f"Connection error: {message_of(answer)}"}
    try:
        decoded = typed_json.decode(answer.content, JobAnswer)
    except (msgspec.DecodeError, RecursionError):
        return {"success": False, "error": str(refusal(answer))}
    if decoded.success and decoded.job_id:
        return {"success": True, "job_id": decoded.job_id, "was_duplicate": bool(decoded.idempotent_hit)}
    return {"success": False, "error": decoded.error or "Unknown error"}
