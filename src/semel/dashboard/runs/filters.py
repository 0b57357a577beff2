"""What the page of runs was asked for: its filters and its place, as they stand in the address."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from msgspec import Struct

from semel._validation import checked_name
from semel.errors import InvalidRequest
from semel.runs.store.queries import Filter
from semel.runs.types import MICRO, STATUSES, checked_id
from semel.service.api.params import TheRequest
from semel.service.auth.middleware import Principal
from semel.types import time_in

SPANS = {"1h": timedelta(hours=1), "24h": timedelta(days=1), "7d": timedelta(days=7)}
"""The quick links: of the last hour, day and week."""
LONGEST = 1000
_SENT = ("status", "model", "user", "queue", "last", "since", "until", "q", "stalled")


class RunFilters(Struct, frozen=True, kw_only=True):
    """The question behind a page of runs. Texts are empty where nothing was asked."""

    status: list[str] = []
    model: str = ""
    user: str = ""
    queue: str = ""
    last: str = ""
    since: str = ""
    until: str = ""
    q: str = ""
    stalled: str = ""
    """``1``: only runs that make no progress though their workers live."""
    cursor: str | None = None
    newer: str | None = None

    @property
    def query(self) -> dict[str, Any]:
        """The filters as the query of an address, without the place."""
        return {name: value for name in _SENT if (value := getattr(self, name))}

    @property
    def filtered(self) -> bool:
        """Whether anything was asked for in particular."""
        return bool(self.query)

    def wanted(self, caller: Principal) -> Filter:
        """As the engine's filter: submitters have their own runs only."""
        since, until = _moment("since", self.since), _moment("until", self.until)
        if self.last:
            since = datetime.now(UTC) - SPANS[self.last]
        return Filter(
            tenant=caller.tenant,
            status=self.status or None,
            model=self.model or None,
            user=(self.user or None) if caller.visible_user is None else caller.visible_user,
            queue=self.queue or None,
            since_us=_us(since),
            until_us=_us(until),
            stalled=self.stalled == "1",
        )


def asked_of(request: TheRequest) -> RunFilters:
    """What the address asks for, or a clear error."""
    sent = request.query_params
    return read(sent.getall("status", []), {name: sent.get(name, "") for name in (*_SENT[1:], "cursor", "newer")})


def read(status: list[str], texts: dict[str, str]) -> RunFilters:
    """The same of fields, such as a form's."""
    for name, value in texts.items():
        checked_name(name, value, most=LONGEST)
    if unknown := [each for each in status if each not in STATUSES]:
        raise InvalidRequest(f"{unknown[0]!r} is not a status; there are {', '.join(STATUSES)}")
    if texts["last"] not in ("", *SPANS):
        raise InvalidRequest(f"last is one of {', '.join(SPANS)}")
    if texts["stalled"] not in ("", "1"):
        raise InvalidRequest("stalled is 1, or left out")
    for name in ("since", "until"):
        _moment(name, texts[name])
    plain = {name: texts[name].strip() for name in _SENT[1:]}
    cursor, newer = _place("cursor", texts["cursor"]), _place("newer", texts["newer"])
    return msgspec.convert(
        {"status": list(dict.fromkeys(status)), **plain, "cursor": cursor, "newer": newer}, RunFilters
    )


def _place(name: str, text: str) -> str | None:
    if not text:
        return None
    known = checked_id(text)
    if known is None:
        raise InvalidRequest(f"{name} is the id of a run, as the links of this page have it")
    return known


def _moment(name: str, text: str) -> datetime | None:
    """A time as a browser's field for it sends one. What names no zone is UTC, as all times of the pages are."""
    if not text:
        return None
    try:
        when = time_in(text)
        return when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
    except (ValueError, OverflowError):
        raise InvalidRequest(f"{name} is a time such as 2026-01-31T12:00") from None


def _us(when: datetime | None) -> int | None:
    return None if when is None else round(when.timestamp() * MICRO)
