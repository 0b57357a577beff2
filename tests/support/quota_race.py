"""Programs that take slots at the same time, each in a process of its own."""

import os
import signal
import textwrap
from contextlib import ExitStack
from typing import Any

from support.programs import Program

RACE = """
from contextvars import copy_context

from support.databases import open_app
from semel import JobStore, QuotaExceeded

app, jobs = open_app(url), JobStore(url)
app.usage(0), jobs.check_idempotency_key("warm up")  # connections take time, and all are to start together


def reserve(user, number):
    return jobs.reserve_job_slot(user, limit)


def submit(user, number):
    try:
        return app.submit("train", {"number": number}, user=user, dedupe=False).id
    except QuotaExceeded:
        return None


def reserve_and_submit(user, number):
    reservation = jobs.reserve_job_slot(user, limit)
    return reservation and app.submit("train", {"number": number}, user=user, reservation=reservation).id


tell("ready")
hear()
take = [globals()[name] for name in ways]


def apart(user, number):  # as one of many callers: what a caller submits takes the slot that the same caller reserved
    return copy_context().run(take[number % len(take)], user, number)


tell([(user, (apart if alone else take[number % len(take)])(user, number)) for user in users for number in numbers])
app.close(), jobs.close()
"""


def race(
    url: str,
    ways: list[tuple[str, ...]],
    *,
    tries: int,
    limit: int,
    users: tuple[int, ...] = (42,),
    alone: bool = True,
) -> Any:
    """Start one process for each of the ``ways`` at the same time; returns every granted slot, as (user, id).

    ``alone``: each try has another caller; otherwise all tries of a process have the same caller.
    """
    with ExitStack() as stack:
        programs = []
        for place, way in enumerate(ways):
            numbers = range(place * tries, (place + 1) * tries)
            given: dict[str, Any] = {"url": url, "ways": way, "limit": limit, "users": users, "numbers": numbers}
            given["alone"] = alone
            programs.append(stack.enter_context(Program(RACE, **given)))
        assert [program.hear() for program in programs] == ["ready"] * len(ways)
        for program in programs:
            program.tell("go")
        answers = [answer for program in programs for answer in program.hear()]
    assert len(answers) == len(ways) * tries * len(users)
    return [(user, granted) for user, granted in answers if granted is not None]


def last_words(source: str, **given: Any) -> Any:
    """Run a program, and kill it once it has sent an object, which is returned."""
    with Program("import os; tell(os.getpid())\n" + textwrap.dedent(source), **given) as program:
        pid = program.hear()
        said = program.hear()
        os.kill(pid, signal.SIGKILL)
    return said


def killed(source: str, **given: Any) -> None:
    """Run a program that kills itself."""
    with Program(source, **given) as program:
        program._process.join(60)
        assert program._process.exitcode == -signal.SIGKILL
