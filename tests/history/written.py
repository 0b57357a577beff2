"""Histories written by hand: each call is an operation from one second to another."""

from __future__ import annotations

from itertools import count
from typing import Any

from semel.testing.history import History, Operation, Violation, check
from semel.testing.history.operations import FOREVER, Kind

KEY = ("orders", "17")
LEASE, TTL = 10, 1000
_numbers = count(1)


def operation(
    kind: Kind, verb: str, subject: tuple[str, ...], at: tuple[float, float | None], answer: Any, **asked: Any
) -> Operation:
    """An operation from one second to another, or without an answer."""
    began, ended = at
    number = next(_numbers)
    end = FOREVER if ended is None else round(ended * 1e9)
    end_us = FOREVER if ended is None else round(ended * 1e6)
    told = None if ended is None else answer
    return Operation(
        str(number), "p", kind, verb, subject, asked, round(began * 1e9), round(began * 1e6), end, end_us, told
    )


def claim(  # noqa: PLR0917 -- read as a line of a history
    began: float,
    ended: float | None,
    by: str,
    verdict: str = "granted",
    fence: int = 0,
    value: str = "",
    *,
    lease: float = LEASE,
    ttl: float = TTL,
    **asked: Any,
) -> Operation:
    told = {"verdict": verdict, "fence": fence, "value": value}
    asked |= {"attempt": by, "lease_us": round(lease * 1e6), "ttl_us": round(ttl * 1e6)}
    return operation("key", "claim", KEY, (began, ended), told, **asked)


def owner(verb: str, began: float, ended: float | None, fence: int, accepted: bool = True, **asked: Any) -> Operation:
    """complete, release, renew or forget."""
    if verb == "renew":
        asked.setdefault("lease_us", LEASE * 1_000_000)
    return operation("key", verb, KEY, (began, ended), {"accepted": accepted}, fence=fence, **asked)


def complete(
    began: float, ended: float | None, fence: int, value: str = "x", accepted: bool = True, **asked: Any
) -> Operation:
    return owner("complete", began, ended, fence, accepted, value=value, **asked)


def get(began: float, ended: float | None, status: str, fence: int = 0, value: str = "") -> Operation:
    return operation("key", "get", KEY, (began, ended), {"status": status, "fence": fence, "value": value})


def call(
    began: float, ended: float | None, fence: int, value: str, *, replayed: bool, ttl: float = TTL, **asked: Any
) -> Operation:
    told = {"fence": fence, "value": value, "replayed": replayed}
    return operation("key", "call", KEY, (began, ended), told, ttl_us=round(ttl * 1e6), **asked)


def gone(began: float, ended: float) -> Operation:
    """A call that is told that the work was done, without its value."""
    return operation("key", "call", KEY, (began, ended), {"replayed": True, "gone": True}, ttl_us=TTL * 1_000_000)


def run(
    verb: str, began: float, ended: float | None, answer: Any = None, subject: str = "r", **asked: Any
) -> Operation:
    return operation("run", verb, (subject,), (began, ended), answer or {}, **asked)


def submit(
    began: float, ended: float | None, run_id: str | None = "r", *, created: bool = True, **asked: Any
) -> Operation:
    told = {"run": run_id, "created": created, "refused": run_id is None}
    return operation("run", "submit", ("u",), (began, ended), told, **asked)


def lease(began: float, ended: float | None, fence: int, seconds: float = LEASE, run_id: str = "r") -> Operation:
    told = {"runs": [[run_id, fence, round(seconds * 1e6)]]}
    return operation("run", "lease", ("worker",), (began, ended), told)


def lose(began: float, ended: float | None, fence: int, status: str = "PENDING") -> Operation:
    return operation("run", "lose", ("sweeper",), (began, ended), {"runs": [["r", fence, status]]})


def finish(
    began: float, ended: float | None, fence: int, status: str | None = "SUCCEEDED", value: str = "x"
) -> Operation:
    """Refused if the status is None."""
    return run("finish", began, ended, {"accepted": status is not None, "status": status}, fence=fence, value=value)


def seen(began: float, status: str, fence: int = 1, value: str | None = None) -> Operation:
    """Without a value, nobody looked at the result."""
    told = {"status": status, "fence": fence} | ({} if value is None else {"value": value})
    return run("get", began, began + 0.1, told)


def cancel(began: float, ended: float | None, status: str | None, fence: int = 1) -> Operation:
    """Refused if the status is None."""
    told = {"refused": True} if status is None else {"status": status, "fence": fence, "value": ""}
    return run("cancel", began, ended, told)


def reserve(began: float, ended: float | None, name: str | None, limit: int = 1, ttl: float = TTL) -> Operation:
    told = {"reservation": name}
    return operation("quota", "reserve", ("u",), (began, ended), told, limit=limit, ttl_us=round(ttl * 1e6))


def back(verb: str, began: float, ended: float | None, name: str, accepted: bool = True, **asked: Any) -> Operation:
    """consume or release."""
    return operation("quota", verb, ("u",), (began, ended), {"accepted": accepted}, reservation=name, **asked)


def usage(began: float, ended: float, concurrent: int) -> Operation:
    return operation("quota", "usage", ("u",), (began, ended), {"concurrent": concurrent})


def judged(*operations: Operation, complete: bool = True) -> list[Violation]:
    return check(History(sorted(operations, key=lambda each: each.began), complete=complete))


def rules(*operations: Operation, complete: bool = True) -> list[str]:
    """The rules that a history breaks."""
    return [each.rule for each in judged(*operations, complete=complete)]
