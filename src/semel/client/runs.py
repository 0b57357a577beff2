"""The methods of the clients on runs: submit one or many, read, wait, cancel, retry; models, workers, usage, quotas."""

from __future__ import annotations

import io
import os
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from pathlib import Path
from typing import IO, Any, TypedDict, Unpack
from urllib.parse import quote
from uuid import uuid4

import httpx
import msgspec
from msgspec import Raw

from semel import typed_json
from semel._validation import nearest
from semel.api_types import (
    ActionPage,
    ActionRequest,
    BulkAnswer,
    LogPage,
    PauseRequest,
    RemoteAction,
    RemoteEvent,
    RemoteLogLine,
    RemoteModel,
    RemotePause,
    RemoteRerun,
    RemoteRun,
    RemoteRunAction,
    RemoteStep,
    RemoteSummary,
    RemoteUsage,
    RemoteWaiting,
    RemoteWorker,
    RunFilter,
    RunPage,
    WaitingAnswer,
)
from semel.client.errors import Answer, refusal, unexpected_response
from semel.client.http import HttpSession, automatic_key, to_json, without_none
from semel.client.streaming import Streams
from semel.client.waiting import Progress, RunWaiter
from semel.errors import InvalidRequest, RunNotFound, SemelError, ServerUnreachable, ServiceError
from semel.runs.diff import Drift, RunDiff
from semel.runs.types import ActionKind, Manifest, ParameterValue, Quota, RunFilters, checked_id
from semel.types import Entrance

PAGE = 200
"""Runs per page of a list."""
MAX_BATCH = 500
MAX_BATCH_BYTES = 256 * 1024
"""Limits of one bulk request: a server takes 1,000 submissions, and by default a mebibyte."""


class ClientSubmitOptions(TypedDict, total=False):
    """The options of ``Client.submit`` besides the model and its parameters."""

    idempotency_key: str | None
    user: str | int | None
    queue: str | None
    priority: int | None
    delay: float | None
    cost: float | None
    key_ttl: float | None
    dedupe: bool | None
    seed: int | None


_FIELDS = ("model", "parameters", *ClientSubmitOptions.__annotations__)


class RunMethods:
    """The methods on runs, models, workers and quotas."""

    session: HttpSession

    async def submit(
        self,
        model: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        idempotency_key: str | None = None,
        user: str | int | None = None,
        queue: str | None = None,
        priority: int | None = None,
        delay: float | None = None,
        cost: float | None = None,
        key_ttl: float | None = None,
        dedupe: bool | None = None,
        seed: int | None = None,
    ) -> RemoteRun:
        """Submit a run. ``run.replayed``: the run existed already, with the same key or, without one, as an active run
        with the same payload.

        All attempts carry the same key (``py-client-<uuid>`` by default), so a lost response never creates a second
        run. The options are those of :meth:`semel.App.submit`; only operators may submit for another ``user``.
        """
        key, dedupe = _key_and_dedupe(idempotency_key, dedupe)
        fields = {
            "model": model,
            "parameters": parameters or {},
            "idempotency_key": key,
            "user": None if user is None else str(user),
            "queue": queue,
            "priority": priority,
            "delay": delay,
            "cost": cost,
            "key_ttl": key_ttl,
            "dedupe": dedupe,
            "seed": seed,
        }
        answer = await self.session.request("POST", "/runs", body=without_none(fields), key=key)
        return self.session.decode(answer, RemoteRun, key=key)

    async def submit_many(self, submissions: Sequence[Mapping[str, Any]]) -> list[RemoteRun | SemelError]:
        """Submit many runs in few requests. Each submission is a mapping of the arguments of :meth:`submit`.

        Returns a run or an error for each submission, in the same order. Each submission has its own key.
        """
        return await _submit_many(self.session, submissions)

    async def submit_and_wait(
        self,
        model: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 -- also the blocking client's
        progress: Progress | None = None,
        **options: Unpack[ClientSubmitOptions],
    ) -> RemoteRun:
        """Submit a run as :meth:`submit` does, then wait for it as :meth:`wait` does."""
        run = await self.submit(model, parameters, **options)
        return await self.wait(run.run_id, timeout=timeout, progress=progress)

    async def get(self, run_id: str) -> RemoteRun:
        """Return the run."""
        return await self.session.get(_run_path(run_id), RemoteRun, about_run=True)

    async def wait(
        self,
        run_id: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 -- also the blocking client's
        progress: Progress | None = None,
    ) -> RemoteRun:
        """Wait until the run has ended, and return it; raises TimeoutError after ``timeout`` seconds.

        ``progress`` is called with the run whenever it changes. If the server becomes unavailable after the first
        response, the wait goes on; before that, only ``retries`` apply.
        """
        return await RunWaiter(self.session, _run_path(run_id), timeout, progress).wait()

    async def result(self, run_id: str) -> Any:
        """Return the run's result; raises :class:`~semel.errors.RunNotComplete` unless the run succeeded."""
        answer = await self.session.request(
            "GET", f"{_run_path(run_id)}/result", params={"exact": "true"}, about_run=True
        )
        return self.session.decode_exactly(answer)

    async def cancel(self, run_id: str, *, why: str | None = None) -> RemoteRun:
        """Cancel a pending run, or request cancellation of a running one, which gets time to clean up."""
        answer = await self.session.request(
            "POST", f"{_run_path(run_id)}/cancel", body=without_none({"why": why}), about_run=True
        )
        return self.session.decode(answer, RemoteRun)

    async def retry(self, run_id: str, *, idempotency_key: str | None = None) -> RemoteRun:
        """Submit a failed or cancelled run again, as a new run with ``retry_of``.

        ``run.replayed``: that new run existed already, active or, with a key, in any state. All attempts carry the
        same key (``py-client-<uuid>`` by default), so a lost response never creates a second run.
        """
        path, key = f"{_run_path(run_id)}/retry", automatic_key() if idempotency_key is None else idempotency_key
        answer = await self.session.request("POST", path, headers={"idempotency-key": key}, key=key, about_run=True)
        return self.session.decode(answer, RemoteRun, key=key)

    def runs(
        self,
        *,
        status: str | Sequence[str] | None = None,
        model: str | None = None,
        user: str | int | None = None,
        queue: str | None = None,
        worker: str | None = None,
        error: str | None = None,
        parameter: Mapping[str, ParameterValue] | None = None,
        idempotency_key: str | None = None,
        payload_hash: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        stalled: bool = False,
        id_part: str | None = None,
        limit: int | None = None,
        parameters: bool = False,
    ) -> AsyncGenerator[RemoteRun, None]:
        """Iterate over runs, newest first, up to ``limit``. ``parameters=True`` includes their parameters.

        ``worker``: the id of the worker that has a run, or had it last; ``error``: part of its last error;
        ``parameter={"region": "north"}``: a value of its parameters.
        ``stalled=True``: only runs whose worker is alive but whose progress has not changed for ``stall_after``.
        ``id_part``: only runs whose id begins or ends with these characters, at least six.
        """
        filters = {
            "status": status,
            "model": model,
            "user": user,
            "queue": queue,
            "worker": worker,
            "error": error,
            "parameter": None
            if parameter is None
            else [f"{name}={_as_json(value)}" for name, value in parameter.items()],
            "idempotency_key": idempotency_key,
            "payload_hash": payload_hash,
            "since": None if since is None else since.isoformat(),
            "until": None if until is None else until.isoformat(),
            "include": "parameters" if parameters else None,
            "stalled": "true" if stalled else None,
            "id": id_part,
        }
        return self.session.paginate(
            "/runs", RunPage, lambda page: page.runs, filters=filters, limit=limit, page_size=PAGE
        )

    async def act(
        self,
        action: ActionKind,
        *,
        priority: int | None = None,
        why: str | None = None,
        dry_run: bool = False,
        idempotency_key: str | None = None,
        **filters: Unpack[RunFilters],
    ) -> RemoteRunAction:
        """Cancel, retry or give a ``priority`` to all runs that match the filters, which are those of :meth:`runs`.

        The server does it in the background: :meth:`action` says how far it came. ``dry_run`` only counts the runs. All
        attempts carry the same key (``py-client-<uuid>`` by default), so a lost response never begins a second action.
        """
        status, user, parameter = filters.get("status"), filters.get("user"), filters.get("parameter")
        wanted: dict[str, Any] = {
            **filters,
            "status": [status] if isinstance(status, str) else status,
            "user": None if user is None else str(user),
            "parameters": None if parameter is None else dict(parameter),
        }
        wanted.pop("parameter", None)
        if unknown := wanted.keys() - set(RunFilter.__struct_fields__):
            raise InvalidRequest(
                f"there is no filter {min(unknown)!r}; {nearest(min(unknown), RunFilters.__annotations__)}"
            )
        body = ActionRequest(action=action, filter=RunFilter(**wanted), priority=priority, why=why, dry_run=dry_run)
        key = automatic_key() if idempotency_key is None else idempotency_key
        headers = {"idempotency-key": key}
        answer = await self.session.request("POST", "/runs/actions", body=body, headers=headers, key=key)
        return self.session.decode(answer, RemoteRunAction, key=key)

    async def action(self, action_id: str) -> RemoteRunAction:
        """Return how far an action on runs came."""
        return await self.session.get(f"/runs/actions/{_quoted('an action', action_id)}", RemoteRunAction)

    async def actions(self, *, limit: int = 50) -> list[RemoteRunAction]:
        """Return the actions on runs of the last month, newest first."""
        return await self.session.get("/runs/actions", list[RemoteRunAction], params={"limit": limit})

    async def timeline(self, run_id: str) -> list[RemoteStep]:
        """Return the run's state changes, oldest first."""
        return await self.session.get(f"{_run_path(run_id)}/timeline", list[RemoteStep], about_run=True)

    async def waiting(self, run_id: str) -> RemoteWaiting | None:
        """Return why the run is pending, since when, and its place in the queue; None if it is not pending."""
        answer = await self.session.get(f"{_run_path(run_id)}/waiting", WaitingAnswer, about_run=True)
        return answer.waiting

    async def manifest(self, run_id: str, *, attempt: int | None = None) -> Manifest:
        """Return what an attempt was made of: the last one, or the one of this number, from 1."""
        path, params = f"{_run_path(run_id)}/manifest", {"attempt": attempt}
        return await self.session.get(path, Manifest, params=params, about_run=True)

    async def diff(self, a: str, b: str) -> RunDiff:
        """Return how two runs differ, what most likely explains different results first."""
        path = f"{_run_path(a)}/diff/{_run_path(b).removeprefix('/runs/')}"
        return await self.session.get(path, RunDiff, about_run=True)

    async def drift(self, run_id: str) -> Drift:
        """Return what changed since the run, of what a rerun would run with."""
        return await self.session.get(f"{_run_path(run_id)}/drift", Drift, about_run=True)

    async def rerun(
        self,
        run_id: str,
        *,
        parameters: Mapping[str, Any] | None = None,
        seed: int | None = None,
        strict: bool = False,
        idempotency_key: str | None = None,
    ) -> RemoteRerun:
        """Submit a run that has ended again, as a new run with ``rerun_of``; ``parameters`` and ``seed`` replace its.

        ``rerun.drift`` is what had changed before it was stored; if there is anything, ``strict`` raises ``Drifted``.
        All attempts carry the same key (``py-client-<uuid>`` by default), so a lost response never creates a second
        run.
        """
        path, key = f"{_run_path(run_id)}/rerun", automatic_key() if idempotency_key is None else idempotency_key
        body = without_none({"parameters": dict(parameters or {}), "seed": seed, "strict": strict})
        headers = {"idempotency-key": key}
        answer = await self.session.request("POST", path, body=body, headers=headers, key=key, about_run=True)
        return self.session.decode(answer, RemoteRerun, key=key)

    async def logs(self, run_id: str, *, follow: bool = False) -> AsyncGenerator[RemoteLogLine, None]:
        """Iterate over the run's log lines, oldest first; ``follow=True`` goes on until the run has ended."""
        path = _run_path(run_id)
        if follow:
            async with aclosing(self.events(run_id)) as events:
                async for event in events:
                    if event.kind == "log":
                        yield typed_json.convert(event.data, RemoteLogLine)
            return
        after = None
        while True:
            page = await self.session.get(f"{path}/logs", LogPage, params={"after": after}, about_run=True)
            for line in page.lines:
                yield line
            if not page.lines:
                return
            after = page.next

    async def events(self, run_id: str) -> AsyncGenerator[RemoteEvent, None]:
        """Iterate over the run's events, from its creation until it has ended, as they happen.

        ``kind`` is ``state`` for a state change, ``progress``, or ``log`` for a log line. A lost connection is resumed
        after the last event: none is missed, and no state change or log line is repeated.
        """
        async with aclosing(Streams(self.session).events(f"{_run_path(run_id)}/events")) as events:
            async for event in events:
                yield event

    async def artifact(self, run_id: str, name: str) -> bytes:
        """Return an artifact of the run as bytes."""
        content = io.BytesIO()
        await self._download(run_id, name, content)
        return content.getvalue()

    async def save_artifact(self, run_id: str, name: str, path: str | os.PathLike[str]) -> Path:
        """Download an artifact of any size to ``path``; an existing file is replaced once the download is complete."""
        target = Path(path)
        part = target.with_name(f".{target.name}.{uuid4().hex}.part")
        try:
            with part.open("xb") as sink:
                await self._download(run_id, name, sink)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        return target

    async def _download(self, run_id: str, name: str, sink: IO[bytes]) -> None:
        path = f"{_run_path(run_id)}/artifacts/{_quoted('the name of an artifact', name)}"
        await Streams(self.session).download(path, sink)

    async def summary(self, *, grouped: bool = False) -> list[RemoteSummary]:
        """Return run counts by model and status; ``grouped`` also by the parameter each model is summarised by."""
        params = {"grouped": "true"} if grouped else {}
        return await self.session.get("/summary", list[RemoteSummary], params=params)

    async def models(self) -> list[RemoteModel]:
        """Return the models that can be submitted."""
        return await self.session.get("/models", list[RemoteModel])

    async def workers(self) -> list[RemoteWorker]:
        """Return the workers. Requires the operator role."""
        return await self.session.get("/workers", list[RemoteWorker])

    async def pauses(self) -> list[RemotePause]:
        """Return the queues and models that are paused. Requires the operator role."""
        return await self.session.get("/pauses", list[RemotePause])

    async def pause(self, *, queue: str | None = None, model: str | None = None, why: str = "") -> RemotePause:
        """Let no run of a queue or of a model start, until :meth:`resume`; what runs goes on.

        Requires the operator role, in the main tenant.
        """
        answer = await self.session.request("PUT", _pause_path(queue, model), body=PauseRequest(why=why))
        return self.session.decode(answer, RemotePause)

    async def resume(self, *, queue: str | None = None, model: str | None = None) -> bool:
        """Let runs of a queue or of a model start again. False if it was not paused."""
        try:
            await self.session.request("DELETE", _pause_path(queue, model))
        except ServiceError as error:
            if error.status != 404:
                raise
            return False
        return True

    async def usage(self, user: str | int | None = None) -> RemoteUsage:
        """Return the usage and quota of the caller; operators may name another ``user``."""
        path = "/usage" if user is None else f"/usage/{_quoted('a user', user)}"
        return await self.session.get(path, RemoteUsage)

    async def set_quota(self, user: str | int, quota: Quota | None) -> None:
        """Set a user's quota, or remove it with None; ``"*"`` is the default quota. Requires the admin role."""
        path = f"/admin/quotas/{_quoted('a user', user)}"
        if quota is not None:
            await self.session.request("PUT", path, body=quota)
            return
        try:
            await self.session.request("DELETE", path)
        except ServiceError as error:
            if error.status != 404:  # no quota to remove
                raise

    def audit_log(
        self,
        *,
        user: str | None = None,
        action: str | None = None,
        target: str | None = None,
        entrance: Entrance | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        tenant: str | None = None,
        limit: int | None = None,
    ) -> AsyncGenerator[RemoteAction, None]:
        """Iterate over what people did, newest first, up to ``limit``. Requires the admin role.

        ``action`` is one of them, such as ``"token.created"``, or a kind, such as ``"token"``; ``target`` is the id or
        name of what was changed. Admins of the main tenant who name no ``tenant`` get what was done to all of them.
        """
        filters = {
            "user": user,
            "action": action,
            "target": target,
            "entrance": entrance,
            "since": None if since is None else since.isoformat(),
            "until": None if until is None else until.isoformat(),
            "tenant": tenant,
        }
        return self.session.paginate(
            "/admin/audit", ActionPage, lambda page: page.actions, filters=filters, limit=limit, page_size=PAGE
        )


def _as_json(value: ParameterValue) -> str:
    return msgspec.json.encode(value).decode()


def _pause_path(queue: str | None, model: str | None) -> str:
    if (queue is None) == (model is None):
        raise InvalidRequest("either a queue or a model is paused: pause(queue='gpu') or pause(model='forecast')")
    kind, name = ("model", model) if queue is None else ("queue", queue)
    return f"/pauses/{kind}/{_quoted(f'a {kind}', name)}"


def _run_path(run_id: object) -> str:
    known = checked_id(run_id)
    if known is None:
        raise RunNotFound(f"there is no run {str(run_id)!r:.200}")
    return f"/runs/{known}"


def _quoted(what: str, name: object) -> str:
    """A name, which may have slashes, as the end of a path."""
    text = str(name)
    if any(part in ("", ".", "..") for part in text.split("/")):
        raise InvalidRequest(f"{what} cannot be {text!r:.200}")
    return quote(text.encode(errors="replace"))


def _key_and_dedupe(key: str | None, dedupe: bool | None) -> tuple[str, bool | None]:
    """The key of all attempts of a submission, and whether the server also looks for a run with the same payload.

    It does so when the caller gave no key: the automatic one only identifies repeated attempts.
    """
    return (automatic_key(), dedupe is not False) if key is None else (key, dedupe)


async def _submit_many(session: HttpSession, submissions: Sequence[Mapping[str, Any]]) -> list[RemoteRun | SemelError]:
    """If a later batch fails, its error is returned for every submission that is left."""
    if isinstance(submissions, str | Mapping):
        raise InvalidRequest("submit_many takes a list of mappings, each with the arguments of submit")
    prepared = [_fields_of(place, each) for place, each in enumerate(submissions)]
    results: list[RemoteRun | SemelError] = []
    for batch in _batches([to_json(each) for each in prepared]):
        try:
            results += await _send_batch(session, batch)
        except SemelError as error:
            if not results:
                raise
            results += [_with_key(error, each["idempotency_key"]) for each in prepared[len(results) :]]
            break
    return results


def _fields_of(place: int, submission: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(submission)
    for name in fields:
        if name not in _FIELDS:
            raise InvalidRequest(f"submission {place}: a submission has no {name!r}; {nearest(name, _FIELDS)}")
    if "model" not in fields:
        raise InvalidRequest(
            f"submission {place}: it is a mapping with 'model' and any of {', '.join(_FIELDS[1:])}; "
            f"got {', '.join(map(repr, fields)) or 'nothing'}"
        )
    fields["idempotency_key"], fields["dedupe"] = _key_and_dedupe(fields.get("idempotency_key"), fields.get("dedupe"))
    if fields.get("user") is not None:
        fields["user"] = str(fields["user"])
    return without_none(fields)


def _batches(submissions: list[bytes]) -> Iterator[list[bytes]]:
    """Split into batches that fit into one request each."""
    batch: list[bytes] = []
    size = 0
    for each in submissions:
        if batch and (len(batch) == MAX_BATCH or size + len(each) > MAX_BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(each)
        size += len(each)
    if batch:
        yield batch


async def _send_batch(session: HttpSession, batch: list[bytes]) -> list[RemoteRun | SemelError]:
    answer = await session.request("POST", "/runs/bulk", body=[Raw(each) for each in batch])
    results = session.decode(answer, list[BulkAnswer])
    if len(results) != len(batch):
        raise unexpected_response(answer, session.url)
    return [_run_or_error(each) for each in results]


def _run_or_error(result: BulkAnswer) -> RemoteRun | SemelError:
    if result.run is not None:
        return result.run
    return refusal(Answer(result.status, httpx.Headers(), msgspec.json.encode(result.problem)))


def _with_key(error: SemelError, key: str) -> SemelError:
    return ServerUnreachable(str(error), idempotency_key=key) if isinstance(error, ServerUnreachable) else error
