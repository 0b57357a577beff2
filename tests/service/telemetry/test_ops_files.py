"""The dashboard and the alert rules ask only for what the service tells."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from semel import App, Once
from semel.metrics.prometheus import PrometheusMetrics
from support.service import make_app, serve

OPS = Path(__file__).parents[3] / "ops"
DASHBOARD = json.loads((OPS / "grafana-dashboard.json").read_text())
ALERTS = yaml.safe_load((OPS / "alerts.yml").read_text())

FUNCTIONS = {"sum", "min", "max", "rate", "increase", "histogram_quantile", "label_values"}
WORDS = {"by", "and", "or", "unless", "on", "ignoring", "without", "bool", "offset"}
ADDED = {"up"}
"""What Prometheus itself says of a server that it scrapes."""
LABELS_ADDED = {"job", "instance", "le"}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Every series that /metrics can show, and those of a service with keys of its own, with their labels."""
    folder = tmp_path_factory.mktemp("families")
    app: App = make_app(f"sqlite:///{folder / 'semel.db'}", folder)

    @app.model("seen")
    async def seen() -> None: ...

    with serve(app) as service, service.client() as client:
        client.post("/runs", json={"model": "seen"})
        shown = client.get("/metrics").text
    app.close()
    keys = CollectorRegistry()
    with Once("memory://", on_event=PrometheusMetrics(keys)) as once:
        for _ in range(2):
            once.call("key", int)
    shown += generate_latest(keys).decode()
    found: dict[str, set[str]] = {}
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", shown, re.MULTILINE):
        for suffix in ("_bucket", "_sum", "_count") if kind == "histogram" else ("",):
            found[name + suffix] = set()
    for name, labels in re.findall(r"^(\w+)\{(.*)\} ", shown, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r"(\w+)=\"", labels))
    return found


def expressions() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def parts(expression: str) -> tuple[set[str], set[str]]:
    """The names of series and of labels in an expression; whatever else is in it must be PromQL."""
    assert expression.count("(") == expression.count(")"), expression
    labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression))
    for listed in re.findall(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", expression):
        labels |= set(re.findall(r"\w+", listed))
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|on|without|ignoring)\s*\([^)]*\)", " ", expression)
    assert not re.search(r"[^\w\s()+\-*/<>=!.,]", bare), bare
    called = set(re.findall(r"([a-z]\w*)\s*\(", bare))
    assert called <= FUNCTIONS | WORDS, called
    names = set(re.findall(r"\b[a-z_]\w*\b", bare)) - called - WORDS
    return names, labels


@pytest.mark.parametrize(("title", "expression"), list(expressions()), ids=lambda value: str(value)[:30])
def test_every_expression_asks_for_what_is_told(title: str, expression: str, families: dict[str, set[str]]) -> None:
    names, labels = parts(expression)
    assert names, f"{title} asks for nothing"
    assert names <= families.keys() | ADDED
    known = set.union(*families.values()) | LABELS_ADDED | {"model", "status"}
    assert labels <= known
    assert "job" in labels, f"{title} would mix the numbers of others in"


def test_what_is_not_told_is_noticed(families: dict[str, set[str]]) -> None:
    names, labels = parts('sum by (colour) (rate(runs_invented_total{job="semel",shape!="round"}[5m])) > 1')
    assert names == {"runs_invented_total"}
    assert labels == {"colour", "job", "shape"}
    assert not names <= families.keys()


def test_every_metric_of_the_document_is_told(families: dict[str, set[str]]) -> None:
    wanted = {
        "runs_created_total",
        "runs_succeeded_total",
        "runs_failed_total",
        "run_duration_seconds_bucket",
        "queue_lag_seconds_bucket",
        "stuck_runs_detected_total",
    }
    assert wanted <= families.keys()


def test_a_low_hit_rate_of_requests_is_alerted() -> None:
    (rule,) = [rule for group in ALERTS["groups"] for rule in group["rules"] if rule["alert"] == "SemelLowHitRate"]
    assert "idempotency_hit_total" in rule["expr"]
    assert "< 0.5" in rule["expr"]
    assert "> 100" in rule["expr"], "a few requests say nothing"


def test_every_alert_says_what_it_means_and_what_to_do() -> None:
    rules: list[dict[str, Any]] = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 5
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["annotations"]["action"].endswith(".")
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))


def test_the_dashboards_panels_have_room_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
