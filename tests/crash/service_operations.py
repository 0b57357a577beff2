"""What servers and workers do in the background, and what must hold whenever their process dies.

Their loops send statements now and then, so the n-th statement is not the same one at each try: a try is one of the
moments at which the process may die. A process ends by itself when its work is done, or when it cannot go on before a
lease ends, which never happens by the clock of the try.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import psycopg

import semel.providers.replicate.api
import semel.service.webhooks.sender  # noqa: F401 -- imported before processes are forked, as the one above
from crash.ledger import Ledger
from crash.points import Ended, Place
from crash.run_operations import Connected, opened
from crash.wire import FAULTS, FaultKind
from semel import App, Context, StoreUnavailable, Worker
from semel.providers.replicate import MODEL, Replicate
from semel.runs.hooks import RunEvent
from semel.runs.store.submit import JobDetails
from semel.runs.submission import SubmitOptions
from semel.service import Settings, jobs
from semel.service.app import build
from semel.service.auth import tokens
from semel.service.auth.middleware import Principal
from semel.service.auth.tokens import NewToken
from semel.service.jobs import JobSubmission, internal_worker, uploads
from semel.service.jobs.internal_worker import QUEUE
from semel.service.state import ServiceState
from semel.service.webhooks import deliveries
from semel.service.webhooks.deliveries import DeliveryResult
from semel.service.webhooks.dispatcher import WebhookDispatcher
from support.jobs import SUBMIT, write_config
from support.programs import PATIENCE
from support.replicate import PACE
from support.replicate_server import TOKEN, VERSION, ReplicateServer
from support.webhooks import Received

LEASE = 4.0
"""Seconds; a heartbeat comes every twentieth of it."""
LATER = 1000.0
"""Seconds after which every lease of a lost process has ended, and every pause before a next attempt."""
LONGEST = 20.0
"""Seconds after which a process ends that cannot go on; on a busy machine, one that can is done by then."""
OVER = ("SUCCEEDED", "FAILED", "CANCELLED")


class Site:
    """An app with its service in this process, without a port. Only what is asked for is opened."""

    def __init__(self, place: Place, later: float = 0.0, **settings: Any) -> None:
        self.app = App(
            place.url, clock=place.later(later), artifacts=place.folder / "artifacts", dedupe_window=0, retry_for=30
        )
        self._register(place)
        self.served: Any = None
        self.state = ServiceState(
            self.app, Settings(configs=str(place.folder / "configs"), private_webhooks=True, **settings)
        )

    def _register(self, place: Place) -> None:
        @self.app.model("work", lease=LEASE, max_lost=10)
        async def work(ctx: Context) -> dict[str, int]:
            """Record the fence, and store it as an artifact and as the result; takes long enough for a heartbeat."""
            place.record(ctx.fence)
            ctx.artifact("fence").write_text(str(ctx.fence))
            await asyncio.sleep(LEASE / 16)
            return {"fence": ctx.fence}

        @self.app.model("read", isolation="thread", max_lost=10)
        def read(ctx: Context) -> str:
            assert ctx.data is not None
            return (ctx.data / "name").read_text()

    async def execute(self, run_id: str) -> None:
        """Execute the run, as another worker does."""
        await Worker(self.app, processes=0, threads=1).perform(run_id)

    async def close(self) -> None:
        """Close what every site opens; its other parts are closed by whoever opened them."""
        await self.state.once.close()
        await self.state.engine.close()


class InLoop:
    """An operation in an event loop, which its process opens before it begins."""

    kinds = FAULTS
    stride = 5
    in_turn = True
    misses = 2
    survives_lost_replies = False
    """A process that cannot even start may refuse; what has started goes on, which ``check`` sees."""

    def warm_up(self, place: Place) -> None:
        global _runner  # noqa: PLW0603 -- one for each process
        _runner = asyncio.Runner()

    def act(self, place: Place, given: Any) -> Any:
        assert _runner is not None
        return _runner.run(self.work(place, given))

    async def work(self, place: Place, given: Any) -> Any:
        """The work; returns False if it was not done in time."""
        raise NotImplementedError


_runner: asyncio.Runner | None = None


async def until(holds: Callable[[], Any], seconds: float = LONGEST) -> bool:
    """Wait until it holds; False if it takes longer."""
    for _ in range(round(seconds / 0.02)):
        if holds():
            return True
        await asyncio.sleep(0.02)  # nobody tells: what is waited for is read from the database
    return False


@contextmanager
def looking(place: Place) -> Iterator[Callable[..., list[Any]]]:
    """Queries on a connection of its own, whose statements are not counted."""
    if place.kind == "postgres":
        with psycopg.connect(place.direct, autocommit=True) as conn:
            yield lambda query, *values: conn.execute(query.replace("?", "%s"), values).fetchall()
        return
    file = sqlite3.Connection(place.direct.removeprefix("sqlite:///"), isolation_level=None)
    try:
        yield lambda query, *values: file.execute(query, values).fetchall()
    finally:
        file.close()


class Work(InLoop):
    """A worker that leases a run, renews its lease, executes it, and writes its result and its artifact."""

    stride = 3

    def prepare(self, place: Place) -> str:
        site = Site(place)
        try:
            return site.app.submit("work", user=place.name).id
        finally:
            site.app.close()

    async def work(self, place: Place, given: str) -> bool:
        site = Site(place)
        worker = Worker(site.app, processes=0, threads=0, concurrency=1, poll=0.2, drain=0, sweep_every=None)
        ended: list[RunEvent] = []

        def stop(event: RunEvent) -> None:
            if event.kind == "ended":
                ended.append(event)
                worker.stop()

        site.app.on_event(stop)
        asyncio.get_running_loop().call_later(LONGEST, worker.stop)
        await worker.serve()
        return bool(ended)

    def check(self, place: Place, given: str, ended: Ended) -> None:
        (before,) = Ledger(place, place.name).check().runs
        effects = place.effects
        assert len(set(effects)) == len(effects), "one attempt was executed twice"
        assert before.status in ("PENDING", "RUNNING", "SUCCEEDED")
        if ended.how == "refused":
            assert (before.status, effects) == ("PENDING", []), "a worker that had begun gave up"
        with opened(place, LATER) as database:
            database.lose_expired()
        result, artifact = asyncio.run(self._go_on(place, given))
        ledger = Ledger(place, place.name)
        ledger.check_ended()
        (run,) = ledger.runs
        assert run.status == "SUCCEEDED"
        assert result == {"fence": run.fence}
        assert artifact == str(run.fence).encode()
        assert place.effects[-1] == str(run.fence)
        if before.status == "SUCCEEDED":
            assert (run, place.effects) == (before, effects), "executed again after its end"

    async def _go_on(self, place: Place, run_id: str) -> tuple[Any, bytes]:
        site = Site(place, LATER)
        try:
            await site.execute(run_id)
            result = await site.state.engine.result(run_id)
            return result, b"".join(await site.state.engine.artifact(run_id, "fence"))
        finally:
            await site.close()


def submission(place: Place) -> JobSubmission:
    """A job of the try's own config, with a key."""
    return JobSubmission(provider="local", config=place.name, key=place.name)


def caller_of(place: Place) -> Principal:
    return Principal(user=place.name, role="submitter")


def write_job(place: Place) -> None:
    """Write the try's own config, and its data."""
    data = place.folder / "data" / place.name
    data.mkdir(parents=True)
    (data / "name").write_text(place.name)
    write_config(place.folder / "configs", place.name, model="read", data=str(data))


async def submit_job(place: Place) -> Any:
    """Submit the try's job, as another server does that has the same key."""
    site = Site(place)
    uploads.install(site.app)
    try:
        return await jobs.submit(site.state, caller_of(place), submission(place))
    finally:
        await site.close()


class Upload(InLoop):
    """The upload of a job's data: the job's run is released once, and never before its data is stored."""

    stride = 4
    kinds: tuple[FaultKind, ...] = ("dies after",)
    """A file is stored between two statements: what must come after it is seen by whoever dies before it."""

    def prepare(self, place: Place) -> str:
        write_job(place)
        submitted: str = asyncio.run(submit_job(place)).job_id
        return submitted

    async def work(self, place: Place, given: str) -> bool:
        site = Site(place)
        uploads.install(site.app)
        with looking(place) as look:
            ((upload_id,),) = look("SELECT upload_id FROM semel_jobs WHERE run_id = ?", given)
        internal_worker._current.set(site.state.internal_worker)
        return await Worker(site.app, queues=[QUEUE], processes=0, threads=1, sweep_every=None).perform(str(upload_id))

    def check(self, place: Place, given: str, ended: Ended) -> None:
        (before,) = Ledger(place, place.name).check().runs
        with looking(place) as look:
            ((state, ref),) = look("SELECT data_state, data_ref FROM semel_jobs WHERE run_id = ?", given)
        assert state in ("uploading", "uploaded")
        assert before.status == "PENDING"
        assert before.data_ref == ref
        if state == "uploaded":
            assert is_stored(place, ref), "the run was released before its data was stored"
        assert asyncio.run(self._go_on(place, given)) == place.name
        ledger = Ledger(place, place.name)
        ledger.check_ended()
        assert ledger.statuses == ["SUCCEEDED"]
        with looking(place) as look:
            assert upload_status(look, given) == "SUCCEEDED"

    async def _go_on(self, place: Place, run_id: str) -> Any:
        with opened(place, LATER) as database:
            database.lose_expired()
        site = Site(place, LATER)
        try:
            with looking(place) as look:
                if upload_status(look, run_id) not in OVER:
                    await site.state.store.open()
                    await site.state.internal_worker.open()
                    assert await until(lambda: upload_status(look, run_id) in OVER, PATIENCE), "the upload hangs"
                    await site.state.internal_worker.close()
            await site.execute(run_id)
            return await site.state.engine.result(run_id)
        finally:
            await site.close()


def upload_status(look: Callable[..., list[Any]], run_id: str) -> str:
    query = "SELECT r.status FROM semel_run_states AS r JOIN semel_jobs AS j ON r.id = j.upload_id WHERE j.run_id = ?"
    status: str = look(query, run_id)[0][0]
    return status


def is_stored(place: Place, ref: str) -> bool:
    return (place.folder / "artifacts" / ref).is_file()


class SubmitJob(Upload):
    """The submission of a job with config and data through the service's API, with a key."""

    stride = 11
    kinds = FAULTS
    survives_lost_replies = True

    def prepare(self, place: Place) -> str:
        write_job(place)
        return asyncio.run(token_for(place))

    def warm_up(self, place: Place) -> None:
        super().warm_up(place)
        global _site  # noqa: PLW0603 -- one for each process
        _site = Site(place)
        _site.served = build(_site.state)

    async def work(self, place: Place, given: str) -> Any:
        assert _site is not None
        transport = httpx.ASGITransport(_site.served)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"config_name_to_load": place.name, "idempotency_key": place.name}
            response = await client.post(SUBMIT, json=body, headers={"authorization": f"Bearer {given}"})
        if response.status_code == 503:
            raise StoreUnavailable(response.text)
        return response.status_code, response.json()

    def check(self, place: Place, given: str, ended: Ended) -> None:
        before = Ledger(place, place.name).check()
        assert len(before.runs) <= 1
        again = asyncio.run(submit_job(place))
        assert again.replayed == bool(before.runs)
        if ended.how == "returned":
            assert (ended.value[0], ended.value[1]["success"]) == (200, True), ended.value
            assert before.ids == [ended.value[1]["job_id"]] == [again.job_id]
        super().check(place, again.job_id, ended)


_site: Site | None = None


async def token_for(place: Place) -> str:
    """A token of the try's own user."""
    site = Site(place)
    store, request = site.state.store, NewToken(user=place.name)
    try:
        return (await store.write(tokens.issue, request, store.statement_context)).secret
    finally:
        await site.close()


@dataclass(frozen=True)
class Deliver(InLoop):
    """The delivery of a run's events to a webhook: each arrives, in order, and under one id if it arrives twice."""

    stride = 4
    kinds = ("dies after",)
    """An event is sent between two statements: what must come after it is seen by whoever dies before it."""
    received: Callable[[], list[Received]]

    def __getstate__(self) -> dict[str, Any]:
        return {}  # the receiver is the test's

    def prepare(self, place: Place) -> str:
        with opened(place) as database:
            run = database.submit(place.name)
            database.finish(run)
            return run.id

    async def work(self, place: Place, given: str) -> bool:
        site = Site(place)
        dispatcher = WebhookDispatcher(site.state)
        await dispatcher.open()
        with looking(place) as look:
            done = await until(lambda: delivered(look, given) == EVENTS)
        await dispatcher.close()
        return done

    def check(self, place: Place, given: str, ended: Ended) -> None:
        events = [f"{given}/{event.version}" for event in Ledger(place, place.name).check().events]
        assert len(events) == EVENTS
        with looking(place) as look:
            noted = look("SELECT version FROM semel_deliveries WHERE run_id = ? AND state = 'delivered'", given)
        ids = [each.id for each in self._of(given)]
        assert {f"{given}/{version}" for (version,) in noted} <= set(ids), "an event was noted as sent before it was"
        asyncio.run(self._go_on(place, given))
        received = self._of(given)
        assert list(dict.fromkeys(each.id for each in received)) == events, "an event was lost, or came too early"
        assert len({(each.id, each.body) for each in received}) == EVENTS, "an event was sent with two bodies"

    def _of(self, run_id: str) -> list[Received]:
        return [each for each in self.received() if each.event["run_id"] == run_id]

    async def _go_on(self, place: Place, run_id: str) -> None:
        site = Site(place, LATER)
        dispatcher = WebhookDispatcher(site.state)
        await dispatcher.open()
        try:
            with looking(place) as look:
                assert await until(lambda: delivered(look, run_id) == EVENTS, PATIENCE), "the deliveries do not end"
        finally:
            await dispatcher.close()
            await site.close()


class DeliverInTurn(Connected):
    """The same without a server: events become deliveries, each is leased, sent, and then noted as sent."""

    kinds = FAULTS
    in_turn = True
    stride = 2

    def prepare(self, place: Place) -> tuple[str, str]:
        with opened(place) as database:
            run = database.submit(place.name)
            database.finish(run)
            ((subscription_id,),) = database.rows("SELECT id FROM semel_subscriptions")
            return run.id, subscription_id

    def _deliver(self, place: Place, subscription_id: str, later: float = 0.0) -> int:
        """Send what is due; returns how many events were sent."""
        sent = 0
        with opened(place, later) as database:
            while database.do(deliveries.fan_out):
                pass
            while leased := database.do(deliveries.lease, subscription_id, 10, LEASE):
                for each in leased:
                    place.record(each.event_id)
                sent += len(leased)
                database.do(deliveries.settle, [DeliveryResult(delivery=each, state="delivered") for each in leased])
        return sent

    def act(self, place: Place, given: tuple[str, str]) -> Any:
        return self._deliver(place, given[1])

    def check(self, place: Place, given: tuple[str, str], ended: Ended) -> None:
        events = [f"{given[0]}/{event.version}" for event in Ledger(place, place.name).check().events]
        noted = self._noted(place, given[0])
        assert noted <= set(place.effects), "an event was noted as sent before it was"
        if ended.value == EVENTS:  # what was leased when a reply was lost waits until the lease ends
            assert noted == set(events)
        self._deliver(place, given[1], LATER)
        assert list(dict.fromkeys(place.effects)) == events, "an event was lost, or came too early"
        assert self._noted(place, given[0]) == set(events)

    def _noted(self, place: Place, run_id: str) -> set[str]:
        query = "SELECT run_id, version FROM semel_deliveries WHERE state = 'delivered'"
        with opened(place) as database:
            return {f"{run}/{version}" for run, version in database.rows(query) if str(run) == run_id}


EVENTS = 3
"""Created, leased, succeeded."""


def delivered(look: Callable[..., list[Any]], run_id: str) -> int:
    return len(look("SELECT version FROM semel_deliveries WHERE run_id = ? AND state = 'delivered'", run_id))


@dataclass(frozen=True)
class Predict(InLoop):
    """A job for Replicate: one prediction at most is created for it, and the run ends with its output."""

    stride = 11
    url: str
    predictions: Callable[[str], list[dict[str, Any]]]

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url}  # the server is the test's

    def _site(self, place: Place, later: float = 0.0) -> Site:
        site = Site(place, later, replicate_url=self.url, replicate_token=TOKEN)
        provider = site.state.providers["replicate"] = Replicate(PACE)
        provider.install(site.state)
        return site

    def prepare(self, place: Place) -> str:
        return asyncio.run(self._submit(place))

    async def _submit(self, place: Place) -> str:
        site = self._site(place)
        given = {"config": "foxes", "version": VERSION, "input": {"prompt": place.name}}
        options, job = SubmitOptions(user=place.name, dedupe=False), JobDetails(provider="replicate", config="foxes")
        try:
            return (await site.state.engine.submit_run(MODEL, given, options, job=job)).id
        finally:
            await site.close()

    async def work(self, place: Place, given: str) -> bool:
        return await self._follow(self._site(place), place, given, LONGEST)

    async def _follow(self, site: Site, place: Place, run_id: str, seconds: float) -> bool:
        state = site.state
        parts = [state.components[0], state.internal_worker]  # the provider's own part, and the worker of its runs
        await state.store.open()
        for part in parts:
            await part.open()
        with looking(place) as look:
            ended = await until(
                lambda: look("SELECT status FROM semel_run_states WHERE id = ?", run_id)[0][0] in OVER, seconds
            )
        for part in reversed(parts):
            await part.close()
        return ended

    def check(self, place: Place, given: str, ended: Ended) -> None:
        (before,) = Ledger(place, place.name).check().runs
        made = [each["id"] for each in self.predictions(place.name)]
        assert len(made) <= 1
        result = asyncio.run(self._go_on(place, given))
        predictions = [each["id"] for each in self.predictions(place.name)]
        assert len(predictions) == 1, "two predictions were made for one run"
        assert result["prediction_id"] == predictions[0]
        ledger = Ledger(place, place.name)
        ledger.check_ended()
        assert ledger.statuses == ["SUCCEEDED"]
        if before.status == "SUCCEEDED":
            assert ledger.runs == [before]

    async def _go_on(self, place: Place, run_id: str) -> Any:
        with opened(place, LATER) as database:
            database.lose_expired()
        site = self._site(place, LATER)
        try:
            assert await self._follow(site, place, run_id, PATIENCE), "the run does not end"
            return await site.state.engine.result(run_id)
        finally:
            await site.close()


class QuickCloud(ReplicateServer):
    """Replicate's API, whose predictions end at once."""

    def add(self, body: dict[str, Any], model: str | None = None, **more: Any) -> dict[str, Any]:
        return super().add(body, model, status="succeeded", output="done", **more)
