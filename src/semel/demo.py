"""Simulated models for trying things out: they sleep, return made-up numbers, and fail on request.

    semel worker semel.demo:app

runs them on ``./semel.db``, or on the database in ``SEMEL_DB``.
"""

from __future__ import annotations

import os
import random
import time
from typing import Annotated, Any

from msgspec import Meta

from semel.errors import Fatal
from semel.runs.app import App
from semel.runs.execution.context import Context

app = App(os.environ.get("SEMEL_DB", "sqlite:///semel.db"), artifacts=os.environ.get("SEMEL_ARTIFACTS", "./artifacts"))

_STEPS = 20


class SimulatedFailure(Exception):
    """A failure that a parameter asked for."""


@app.model("baseline_forecast_v1", summary="scenario")
def baseline_forecast(
    ctx: Context,
    *,
    scenario: str = "baseline",
    horizon_months: Annotated[int, Meta(ge=1, le=1200)] = 12,
    region: str = "AU",
    seconds: Annotated[float, Meta(ge=0, le=3600)] = 1.0,
    failure_rate: Annotated[float, Meta(ge=0, le=1)] = 0.0,
    fail_attempts: Annotated[int, Meta(ge=0)] = 0,
    fatal: bool = False,
) -> dict[str, Any]:
    """Sleep for ``seconds`` and make up a forecast.

    The first ``fail_attempts`` attempts fail, others with the probability ``failure_rate``; ``fatal`` fails for good.
    """
    started = time.monotonic()
    chance = random.Random(f"{ctx.run_id}/{ctx.attempt}")  # noqa: S311 -- a simulation
    ctx.log.info("forecasting %s for %d months", scenario, horizon_months)
    if fatal:
        raise Fatal("told to fail for good")
    for step in range(_STEPS):
        time.sleep(seconds / _STEPS)
        ctx.progress((step + 1) / _STEPS, f"month {(step + 1) * horizon_months // _STEPS} of {horizon_months}")
    if ctx.attempt <= fail_attempts or chance.random() < failure_rate:
        raise SimulatedFailure(f"told to fail in attempt {ctx.attempt}")
    return {
        "run_id": ctx.run_id,
        "inputs": {"scenario": scenario, "horizon_months": horizon_months, "region": region},
        "metrics": {"runtime_seconds": round(time.monotonic() - started, 3), "objective": round(chance.random(), 4)},
        "notes": "simulated",
    }


@app.model("train_lora_v1", summary="base")
def train_lora(
    ctx: Context,
    *,
    base: str = "flux",
    rank: Annotated[int, Meta(ge=1, le=1024)] = 16,
    steps: Annotated[int, Meta(ge=1, le=100_000)] = 100,
    seconds: Annotated[float, Meta(ge=0, le=3600)] = 1.0,
) -> dict[str, Any]:
    """Sleep for ``seconds`` and make up a training: what the configs of the jobs API run in the demo."""
    files = [] if ctx.data is None else sorted(path for path in ctx.data.rglob("*") if path.is_file())
    ctx.log.info("training on %s with %d files", base, len(files))
    loss = 1.0
    for step in range(_STEPS):
        time.sleep(seconds / _STEPS)
        loss *= 0.9
        ctx.progress((step + 1) / _STEPS, f"step {(step + 1) * steps // _STEPS} of {steps}, loss {loss:.3f}")
    ctx.artifact("weights.txt").write_text(f"{base}, rank {rank}, {steps} steps: simulated\n")
    return {"base": base, "rank": rank, "steps": steps, "files": len(files), "loss": round(loss, 4)}
