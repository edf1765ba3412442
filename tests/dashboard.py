"""The queries of deploy/grafana and of the alerts in deploy/prometheus, and which series they read."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

DEPLOY = Path(__file__).parents[1] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "penstock.json"
RULES = DEPLOY / "prometheus" / "rules.yml"
_VARIABLES = {"$__rate_interval": "5m", "$model": ".*"}


def queries() -> list[str]:
    """PromQL, as Grafana sends it when all models are chosen."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    for name, value in _VARIABLES.items():
        found = [query.replace(name, value) for query in found]
    return found


def alerts() -> dict[str, str]:
    """Each alert's PromQL, by its name; for refused requests instead of failed ones: tests make those."""
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule["expr"].replace("5..|cut", "4..") for rule in group["rules"]}


def without_series(metrics: str) -> list[str]:
    """Selectors of the dashboard and of the alerts that no series of `metrics` (Prometheus' text) fits, and
    labels by which a query groups that its series do not have.
    """
    from tests.promql import fits, selected  # here: what only reads the queries needs no parser

    series = [
        (sample.name, sample.labels)
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
    ]
    return [
        f"{selector} of {query}"
        for query in (*queries(), *alerts().values())
        for selector, labels in selected(query)
        if selector.name != "up"  # Prometheus' own
        if not any(fits(selector, labels, *each) for each in series)
    ]
