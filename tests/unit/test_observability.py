"""Metrics, as code, documentation, alerts and the dashboard name them; log events, as the documentation does."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs/observability.md").read_text()
_FOREIGN = {"up", "process_start_time_seconds", "process_cpu_seconds_total", "process_resident_memory_bytes"}


def _defined() -> dict[str, tuple[str, ...]]:
    """Names and labels of all metrics that the services make."""
    found = {}
    for path in (ROOT / "services").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
                continue
            name = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
            if node.func.id in ("Counter", "Gauge", "Histogram") and str(name).startswith("stoker_"):
                found[str(name)] = tuple(ast.literal_eval(node.args[2])) if len(node.args) > 2 else ()
    return found


METRICS = _defined()


def _asked() -> Iterator[tuple[str, str]]:
    """Every expression of an alert or a panel, and whose it is."""
    for group in yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    board = json.loads((ROOT / "deploy/grafana/stoker.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def test_each_metric_is_documented_with_its_labels() -> None:
    documented = dict(re.findall(r"^\| `(stoker_\w+)(?:\{([\w,]+)\})?` \|", DOC, re.MULTILINE))
    assert documented == {name: ",".join(labels) for name, labels in METRICS.items()}, (
        "list new metrics in docs/observability.md, as `name{label,label}`, and take gone ones out"
    )


@pytest.mark.parametrize(("whose", "expression"), [pytest.param(*each, id=each[0]) for each in _asked()])
def test_what_is_asked_for_is_there(whose: str, expression: str) -> None:
    for name, selected in re.findall(r"\b(stoker_\w+|up|process_\w+)\b(?:\{([^}]*)\})?", expression):
        metric = re.sub(r"_(bucket|count|sum)$", "", name)
        if metric in _FOREIGN:
            continue
        assert metric in METRICS, f"{whose} asks for {metric}"
        known = {"instance", "job", *METRICS[metric]}
        assert set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selected)) <= known, f"{whose}: labels of {metric}"
    labels = {label for each in METRICS.values() for label in each} | {"instance", "le"}
    for by in re.findall(r"\bby \(([^)]*)\)", expression):
        assert set(re.split(r",\s*", by)) <= labels, f"{whose}: by ({by})"


def test_each_alert_is_documented_and_says_what_to_do() -> None:
    rules = [
        rule
        for group in yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]
    documented = dict(re.findall(r"^\| `(Stoker\w+)` \| (\w+) \|", DOC, re.MULTILINE))
    assert documented == {rule["alert"]: rule["labels"]["severity"] for rule in rules}
    assert {"StokerPrefixRoutingDegraded", "StokerTokenizersDiffer", "StokerRequestsWaitLong"} <= documented.keys()
    for rule in rules:
        assert {"summary", "action"} <= rule["annotations"].keys(), rule["alert"]


def test_the_log_events_named_are_logged() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "services").rglob("*.py"))
    table = DOC.partition("## Logs")[2].partition("## Alerts")[0]
    events = {
        event for line in table.splitlines() if line.startswith("| `") for event in re.findall(r"`([\w.]+)`", line)
    }
    assert len(events) > 15
    assert not {event for event in events if f'"{event}"' not in sources}


def test_the_dashboard_is_one() -> None:
    board: dict[str, Any] = json.loads((ROOT / "deploy/grafana/stoker.json").read_text())
    assert board["uid"]
    assert {each["name"] for each in board["templating"]["list"]} == {"datasource", "instance"}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["targets"], panel["title"]
