"""The jobs API for clients: submit with one key over all tries, look, cancel."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx
import msgspec
from msgspec import Struct

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
"""Seconds for one try: the data of a config may have to be uploaded meanwhile."""
TIMED_OUT = "Request timed out - job may have been created, check with same idempotency key"


class SubmittedJob(Struct, frozen=True, kw_only=True):
    """A job that the server has. ``idempotent_hit``: it was there already, under the same key."""

    job_id: str
    status: str
    data_uploaded: bool
    idempotent_hit: bool
    quota_warnings: list[str]
    cost_limit_warning: str | None
    idempotency_key: str


@dataclass(frozen=True)
class SubmitResult:
    """What came of :func:`submit_cloud_job`. ``idempotency_key`` is the one to ask with again."""

    success: bool
    job_id: str | None = None
    error: str | None = None
    was_duplicate: bool = False
    idempotency_key: str | None = field(default=None, compare=False)


JOBS = "/api/cloud/jobs"
SUBMIT = f"{JOBS}/submit"
PAGE = 200
"""Jobs that are asked for at once."""


def submission(config_name: str, key: str, tracker_run_name: str | None, ttl_hours: float | None) -> dict[str, Any]:
    """A job's submission as a body."""
    fields = {"config_name_to_load": config_name, "idempotency_key": key, "tracker_run_name": tracker_run_name or None}
    return without_none({**fields, "ttl_hours": ttl_hours})


class JobMethods:
    """The verbs on jobs."""

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
        """Submit a job of a named config; the job that is there already, when the key was used before.

        One key, ``py-client-<uuid>`` without one, goes with all tries; it names the job for ``ttl_hours``, a day when
        they are left out. ``timeout`` is for each of the tries. Raises
        ``QuotaExceeded`` and ``CostLimitExceeded`` at once: to try again would not help.
        """
        key = automatic_key() if idempotency_key is None else idempotency_key
        body = submission(config_name, key, tracker_run_name, ttl_hours)
        answer = await self.session.request(
            "POST", SUBMIT, body=body, key=key, timeout=timeout, params={"provider": provider}
        )
        said = self.session.decode(answer, JobAnswer, key=key)
        if not said.success or not said.job_id:
            raise denial(said.error or "Unknown error", key)
        return SubmittedJob(
            job_id=said.job_id,
            status=said.status or "",
            data_uploaded=bool(said.data_uploaded),
            idempotent_hit=bool(said.idempotent_hit),
            quota_warnings=said.quota_warnings or [],
            cost_limit_warning=said.cost_limit_warning or None,
            idempotency_key=key,
        )

    async def job(self, job_id: str) -> RemoteJob:
        """The job as it stands."""
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
        """Jobs, newest first, page after page: all of them, or up to ``limit``."""
        filters = {"status": status, "config": config, "provider": provider, "user": user}
        return self.session.paginate(
            JOBS, JobPage, lambda page: page.jobs, filters=filters, limit=limit, page_size=PAGE
        )

    async def cancel_job(self, job_id: str) -> RemoteJob:
        """End a job that waits or uploads, or ask one that runs to end. Again changes nothing."""
        answer = await self.session.request("POST", f"{_job_path(job_id)}/cancel", about_run=True)
        return self.session.decode(answer, RemoteJob)

    async def configs(self) -> list[RemoteConfig]:
        """Every config that a job can name."""
        return await self.session.get("/api/cloud/configs", list[RemoteConfig])

    async def costs(self, user: str | int | None = None) -> RemoteCosts:
        """What one has spent oneself, or, for operators, somebody else, against the limits of the quota."""
        return await self.session.get("/api/cloud/cost-limit/status", RemoteCosts, params={"user": user})


def _job_path(job_id: object) -> str:
    """Where the job is. What can be no id is no job."""
    known = checked_id(job_id)
    if known is None:
        raise RunNotFound(f"there is no job {str(job_id)!r:.200}")
    return f"{JOBS}/{known}"


def denial(error: str, key: str) -> SemelError:
    """The error behind an answer of ``success: false``."""
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
    timeout: float = 300.0,  # noqa: ASYNC109 -- part of the call as the document has it
) -> SubmitResult:
    """Submit a job once, with a key, and say what came of it; no error is raised for what the server or the network do.

    The key is ``py-client-<uuid>`` without one; the result names it, so that whoever got no answer can ask again with
    the same. ``timeout`` is for the whole of it.
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
    """The fields of a result."""
    if isinstance(answer, httpx.TimeoutException) and not isinstance(answer, httpx.ConnectTimeout):
        raise TimeoutError
    if isinstance(answer, httpx.TransportError):
        return {"success": False, "error": f"Connection error: {message_of(answer)}"}
    try:
        said = msgspec.json.decode(answer.content, type=JobAnswer)
    except (msgspec.DecodeError, RecursionError):
        return {"success": False, "error": str(refusal(answer))}
    if said.success and said.job_id:
        return {"success": True, "job_id": said.job_id, "was_duplicate": bool(said.idempotent_hit)}
    return {"success": False, "error": said.error or "Unknown error"}
