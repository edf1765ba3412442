"""The queries of deploy/grafana/penstock.json, and which series each of them reads."""

from __future__ import annotations

import json
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

DEPLOY = Path(__file__).parents[1] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "penstock.json"
_VARIABLES = {"$__rate_interval": "5m", "$model": ".*"}


def queries() -> list[str]:
    """PromQL, as Grafana sends it when all models are chosen."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    for name, value in _VARIABLES.items():
        found = [query.replace(name, value) for query in found]
    return found


def without_series(metrics: str) -> list[str]:
    """Selectors of the dashboard that no series of `metrics` (Prometheus' text) fits, and labels by which a
    query groups that its series do not have.
    """
    from tests.promql import fits, selected  # here: what only reads the queries needs no parser

    series = [
        (sample.name, sample.labels)
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
    ]
    return [
        f"{selector} of {query}"
        for query in queries()
        for selector, labels in selected(query)
        if not any(fits(selector, labels, *each) for each in series)
    ]
