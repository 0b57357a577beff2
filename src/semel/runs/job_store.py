"""Quota reservations and job keys on their own, for jobs that semel does not run: reserve, then consume or release."""

from __future__ import annotations

from contextvars import ContextVar

from semel._concurrency.sync import async_method, sync_method
from semel._validation import TEN_YEARS, checked_int, checked_name, checked_number, checked_retention, checked_run_key
from semel.once.store import Clock
from semel.runs.store import RunStore, quotas, run_keys
from semel.runs.store.quotas import Reserve
from semel.runs.store.run_keys import KeyEntry, StoreKey
from semel.runs.types import MICRO, RETRY_FOR, checked_user, new_id

_MOST_OPEN = 100

_open: ContextVar[tuple[tuple[str, str, str], ...]] = ContextVar("semel_open_reservations", default=())
"""The unused reservations of this thread or task, as (tenant, user, reservation), newest last."""


def open_reservations(tenant: str, user: str) -> list[str]:
    """The user's reservations of this thread or task that have no job yet, newest first.

    A run that is submitted between reserve and consume is their job: it takes the slot instead of a second one.
    """
    return [reservation for *person, reservation in reversed(_open.get()) if person == [tenant, user]]


def close_reservation(reservation: str) -> None:
    """Forget a reservation of this thread or task: it has its job, or was released."""
    _open.set(tuple(each for each in _open.get() if each[2] != reservation))


class Jobs:
    """The operations that :class:`JobStore` and :class:`AsyncJobStore` share."""

    def __init__(self, store: RunStore, tenant: str) -> None:
        self._store = store
        self._tenant = tenant

    async def reserve_job_slot(self, user_id: str | int, max_concurrent: int, ttl_seconds: float = 300) -> str | None:
        """Reserve a slot. Returns the reservation's id, or None if active jobs and reservations fill the user's limit.

        The reservation holds its slot until it is consumed or released, or ``ttl_seconds`` have passed.
        """
        user = checked_user("user_id", user_id, empty=False)
        request = Reserve(
            id=new_id(),
            tenant=self._tenant,
            user=user,
            max_concurrent=checked_int("max_concurrent", max_concurrent),
            ttl_us=round(checked_number("ttl_seconds", ttl_seconds, 0, TEN_YEARS) * MICRO),
        )
        reservation = await self._store.reserve(request)
        if reservation is not None:
            _open.set((*_open.get(), (self._tenant, user, reservation))[-_MOST_OPEN:])
        return reservation

    async def consume_reservation(
        self, reservation_id: str, *, job_id: str | None = None, user_id: str | int | None = None
    ) -> bool:
        """Give the slot to the job that was created; the reservation no longer counts.

        Returns True also for a reservation that expired meanwhile, if its slot is still free. Returns False if another
        job has the slot, or if the reservation was released, used for another job, or is not this user's. The job
        exists in any case, so none of this raises.
        """
        job = None if job_id is None else checked_name("job_id", job_id, empty=False)
        reservation = checked_name("reservation_id", reservation_id)
        consumed = await self._store.write(
            quotas.consume_after, reservation, self._person(user_id), job, self._store.statement_context
        )
        close_reservation(reservation)
        return consumed

    async def release_reservation(self, reservation_id: str, *, user_id: str | int | None = None) -> bool:
        """Free the slot at once, for a job that was not created. Returns False if there was nothing left to free."""
        reservation = checked_name("reservation_id", reservation_id)
        close_reservation(reservation)
        return await self._store.write(quotas.release, reservation, self._person(user_id))

    async def store_idempotency_key(
        self, key: str, job_id: str, user_id: str | int | None = None, ttl_hours: float = 24
    ) -> str:
        """Let the key name the job for ``ttl_hours``. Returns the job that it names: an earlier one if it is taken."""
        request = StoreKey(
            tenant=self._tenant,
            user="" if user_id is None else checked_user("user_id", user_id),
            key=checked_run_key("key", key),
            job_id=checked_name("job_id", job_id, empty=False),
            ttl_us=round(checked_retention("ttl_hours", ttl_hours, unit=3600) * 3600 * MICRO),
        )
        return await self._store.write(run_keys.store_key, request, self._store.statement_context)

    async def check_idempotency_key(self, key: str, user_id: str | int | None = None) -> str | None:
        """The job that the key names, or None if the key was never stored, or expired (and is now removed)."""
        entry = await self.get_idempotency_key(key, user_id)
        return None if entry is None else entry.job_id

    async def get_idempotency_key(self, key: str, user_id: str | int | None = None) -> KeyEntry | None:
        """The key with its job, user and times, or None."""
        return await self._store.write(
            run_keys.check_key, self._person(user_id), checked_run_key("key", key), self._store.statement_context
        )

    def _person(self, user_id: str | int | None) -> tuple[str, str | None]:
        return self._tenant, None if user_id is None else checked_name("user_id", user_id)

    async def close(self) -> None:
        """Close the connections."""
        await self._store.close()


class JobStore:
    """Reservations and keys for blocking code: ``JobStore("sqlite:///jobs.db")``, ``JobStore("postgresql://…")``.

    ``retry_for`` and ``pool`` are those of :class:`~semel.runs.app.App`.
    """

    def __init__(
        self,
        url: str,
        *,
        tenant: str = "",
        clock: Clock | None = None,
        retry_for: float = RETRY_FOR,
        pool: int | None = None,
    ) -> None:
        store = RunStore(url, awaited=False, clock=clock, retry_for=retry_for, pool=pool)
        self._engine = Jobs(store, checked_name("tenant", tenant))

    reserve_job_slot = sync_method(Jobs.reserve_job_slot)
    consume_reservation = sync_method(Jobs.consume_reservation)
    release_reservation = sync_method(Jobs.release_reservation)
    store_idempotency_key = sync_method(Jobs.store_idempotency_key)
    check_idempotency_key = sync_method(Jobs.check_idempotency_key)
    get_idempotency_key = sync_method(Jobs.get_idempotency_key)
    close = sync_method(Jobs.close)


class AsyncJobStore:
    """As :class:`JobStore`, for async code."""

    def __init__(
        self,
        url: str,
        *,
        tenant: str = "",
        clock: Clock | None = None,
        retry_for: float = RETRY_FOR,
        pool: int | None = None,
    ) -> None:
        store = RunStore(url, awaited=True, clock=clock, retry_for=retry_for, pool=pool)
        self._engine = Jobs(store, checked_name("tenant", tenant))

    reserve_job_slot = async_method(Jobs.reserve_job_slot)
    consume_reservation = async_method(Jobs.consume_reservation)
    release_reservation = async_method(Jobs.release_reservation)
    store_idempotency_key = async_method(Jobs.store_idempotency_key)
    check_idempotency_key = async_method(Jobs.check_idempotency_key)
    get_idempotency_key = async_method(Jobs.get_idempotency_key)
    close = async_method(Jobs.close)
