"""The filters and the position of the list of runs, as they are in its URL."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from semel._validation import checked_name
from semel.errors import InvalidRequest
from semel.runs.types import STATUSES, checked_id
from semel.runs.types import RunFilters as Options
from semel.service.api.params import parameters_in
from semel.service.auth.middleware import Principal
from semel.types import time_in

SPANS = {"1h": timedelta(hours=1), "24h": timedelta(days=1), "7d": timedelta(days=7)}
"""The quick links: the last hour, day and week."""
MAX_LENGTH = 1000
_TEXTS = ("model", "user", "queue", "worker", "error", "parameter", "last", "since", "until", "q", "stalled", "sort")


class RunFilters(Struct, frozen=True, kw_only=True):
    """What the list shows. An empty text does not filter."""

    status: list[str] = []
    model: str = ""
    user: str = ""
    queue: str = ""
    worker: str = ""
    error: str = ""
    """Part of the last error."""
    parameter: str = ""
    """``name=value``."""
    last: str = ""
    since: str = ""
    until: str = ""
    q: str = ""
    stalled: str = ""
    """``1``: only runs that make no progress although their workers are alive."""
    sort: str = ""
    """``oldest``: the oldest run first."""
    before: str | None = None
    """The list continues with the runs older than this id; newer ones if the oldest come first."""
    after: str | None = None
    """The list ends just above this id, with the runs newer than it."""

    @property
    def query(self) -> dict[str, Any]:
        """The filters as the query of an address, without the position."""
        return {name: value for name in ("status", *_TEXTS) if (value := getattr(self, name))}

    def without_time(self) -> dict[str, Any]:
        """The same without the filters by time."""
        return self._without("last", "since", "until")

    def without_sort(self) -> dict[str, Any]:
        """The same without the order; empty if the list shows all runs."""
        return self._without("sort")

    def _without(self, *names: str) -> dict[str, Any]:
        return {name: value for name, value in self.query.items() if name not in names}

    @property
    def oldest_first(self) -> bool:
        """Whether the oldest run comes first. What a search finds is always shown newest first."""
        return self.sort == "oldest" and not self.q

    def fixed(self) -> RunFilters:
        """The same runs at any later moment: since when, instead of for how long."""
        if not self.last:
            return self
        since = datetime.now(UTC) - SPANS[self.last]
        return replace(self, last="", since=since.isoformat(timespec="microseconds"))

    def options(self, caller: Principal) -> Options:
        """The filters as the engine takes them; submitters see their own runs only."""
        fixed = self.fixed()
        return Options(
            status=self.status or None,
            model=self.model or None,
            user=(self.user or None) if caller.visible_user is None else caller.visible_user,
            queue=self.queue or None,
            worker=self.worker or None,
            error=self.error or None,
            parameter=parameters_in([self.parameter]) if self.parameter else None,
            since=_parse_time("since", fixed.since),
            until=_parse_time("until", self.until),
            stalled=self.stalled == "1",
        )


def parse_filters(status: list[str], get: Callable[[str], str]) -> RunFilters:
    """The filters of an address or a form. Raises InvalidRequest where one is invalid."""
    texts = {name: checked_name(name, get(name), most=MAX_LENGTH) for name in (*_TEXTS, "cursor", "newer")}
    if unknown := [each for each in status if each not in STATUSES]:
        raise InvalidRequest(f"{unknown[0]!r} is not a status; statuses are {', '.join(STATUSES)}")
    if texts["last"] not in ("", *SPANS):
        raise InvalidRequest(f"last must be one of {', '.join(SPANS)}")
    if texts["stalled"] not in ("", "1"):
        raise InvalidRequest("stalled must be 1, or left out")
    if texts["sort"] not in ("", "oldest"):
        raise InvalidRequest("sort must be oldest, or left out")
    for name in ("since", "until"):
        _parse_time(name, texts[name])
    if texts["parameter"]:
        parameters_in([texts["parameter"]])
    before, after = _parse_id("cursor", texts["cursor"]), _parse_id("newer", texts["newer"])
    plain = {name: texts[name].strip() for name in _TEXTS}
    return RunFilters(status=list(dict.fromkeys(status)), **plain, before=before, after=after)


def _parse_id(name: str, text: str) -> str | None:
    if not text:
        return None
    known = checked_id(text)
    if known is None:
        raise InvalidRequest(f"{name} must be the id of a run")
    return known


def _parse_time(name: str, text: str) -> datetime | None:
    """A time as the browser's field sends it; without a zone it is UTC, as all times on the pages are."""
    if not text:
        return None
    try:
        when = time_in(text)
        return when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
    except (ValueError, OverflowError):
        raise InvalidRequest(f"{name} must be a time such as 2026-01-31T12:00") from None
