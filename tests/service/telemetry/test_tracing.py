"""A trace leads from the request that submits a run to the attempt that does it, in whichever process that is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs import outcome

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

_PROGRAM = """
import os
from pathlib import Path
os.environ["SEMEL_DB"] = url
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

kept = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(kept))
trace.set_tracer_provider(provider)

from support.apps.serve_app import app
from support.service import serve

app.place(artifacts=folder)
with serve(app) as service, app.working(processes=1), service.client() as client:
    answers = {}
    for model in ("add", "traced"):
        body = {"model": model, "parameters": {"a": 1} if model == "add" else {}}
        run = client.post("/runs", json=body, headers={"traceparent": caller}).json()
        app.wait(run["run_id"], timeout=60)
        answers[model] = (run["run_id"], app.result(run["run_id"]))
app.close()
tell((answers, [
    {
        "name": span.name,
        "trace": f"{span.context.trace_id:032x}",
        "id": f"{span.context.span_id:016x}",
        "parent": span.parent and f"{span.parent.span_id:016x}",
        "told": dict(span.attributes),
    }
    for span in kept.get_finished_spans()
]))
"""


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_run_goes_on_in_the_trace_of_the_request_that_submitted_it(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url: str = request.getfixturevalue(f"migrated_{kind}_url")
    answers, spans = outcome(_PROGRAM, url=url, folder=str(tmp_path), caller=CALLER)
    _, trace_id, caller_id, _ = CALLER.split("-")
    for model, (run_id, result) in answers.items():
        (attempt,) = [span for span in spans if span["told"].get("semel.run_id") == run_id]
        assert (attempt["name"], attempt["trace"]) == (f"run {model}", trace_id)
        assert (attempt["told"]["semel.attempt"], attempt["told"]["semel.end"]) == (1, "succeeded")
        (submitted,) = [span for span in spans if span["id"] == attempt["parent"]]
        assert (submitted["name"], submitted["trace"], submitted["parent"]) == ("POST /runs", trace_id, caller_id)
        if model == "traced":  # in a process of its own
            assert result == f"00-{trace_id}-{attempt['id']}-01"


_WITHOUT = """
import sys
sys.modules["opentelemetry"] = None
from semel import App
from semel.runs import tracing
from semel.service import asgi
from semel.service.telemetry import tracing as requests

app = App("sqlite:///without.db")
@app.model("add", isolation="thread")
def add(a: int) -> str | None:
    return tracing.current()
asgi(app)
with app.working():
    assert app.wait(app.submit("add", {"a": 1}).id, timeout=60).status == "SUCCEEDED"
assert not tracing.INSTALLED and not requests.INSTALLED
print("worked")
"""


def test_without_opentelemetry_nothing_is_traced_and_everything_works(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT], cwd=tmp_path, capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.stdout == "worked\n", done.stderr[-2000:]
