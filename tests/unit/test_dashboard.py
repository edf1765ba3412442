"""deploy/grafana and deploy/prometheus: what their files say, and that a wrong query would be found.

That every query reads a series of a real service is in tests/ray/test_served_demo.py.
"""

from __future__ import annotations

import json
import re

import pytest
import yaml
from scripts import grafana_dashboard
from tests.dashboard import DASHBOARD, DEPLOY, queries, without_series

METRICS = 'penstock_open_requests{model="m"} 1\n'

pytestmark = pytest.mark.parity("S28")


def test_the_dashboard_is_what_its_table_says():
    assert DASHBOARD.read_text() == grafana_dashboard.text()


def test_queries_are_promql_without_variables_left():
    from tests.promql import selected

    for query in queries():
        assert list(selected(query))
        assert "$" not in query


def test_a_series_that_is_not_there_is_found():
    missing = "\n".join(without_series(METRICS))
    assert "penstock_requests_total" in missing
    assert "penstock_open_requests" not in missing


def test_a_label_that_is_not_there_is_found():
    assert "penstock_open_requests" in "\n".join(without_series(METRICS.replace("model", "modell")))


def test_graphs_do_not_overlap():
    seen = [each["gridPos"] for each in json.loads(DASHBOARD.read_text())["panels"]]
    cells = [
        (x, y)
        for at in seen
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))


def test_the_pod_monitor_watches_the_pods_of_the_manifests():
    monitor = yaml.safe_load((DEPLOY / "prometheus" / "podmonitor.yaml").read_text())["spec"]
    text = (DEPLOY / "kuberay" / "one-gpu.yaml").read_text()
    service = next(each for each in yaml.safe_load_all(text) if each["kind"] == "RayService")
    spec = service["spec"]["rayClusterConfig"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        labels = group["template"]["metadata"]["labels"]
        assert monitor["selector"]["matchLabels"].items() <= labels.items()
        ports = {each["name"] for each in group["template"]["spec"]["containers"][0]["ports"]}
        assert {each["port"] for each in monitor["podMetricsEndpoints"]} <= ports
    key = monitor["podMetricsEndpoints"][0]["authorization"]["credentials"]
    assert re.search(rf"name: {key['name']}\s+key: {key['key']}", text)
