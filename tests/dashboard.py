"""The queries of deploy/grafana/penstock.json, and which series each of them reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
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
    series = [
        (sample.name, sample.labels)
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
    ]
    return [
        f"{selector} of {query}"
        for query in queries()
        for selector, labels in _selected(promql_parser.parse(query), frozenset())
        if not any(_fits(selector, labels, *each) for each in series)
    ]


def _selected(expr: Any, labels: frozenset[str]) -> Iterator[tuple[Any, frozenset[str]]]:
    """Each selector in a query, with the labels by which what it gives is grouped."""
    if isinstance(expr, promql_parser.VectorSelector):
        yield expr, labels
    elif isinstance(expr, promql_parser.MatrixSelector):
        yield expr.vector_selector, labels
    elif isinstance(expr, promql_parser.AggregateExpr):
        yield from _selected(expr.expr, labels | set(expr.modifier.labels if expr.modifier else ()))
    elif isinstance(expr, promql_parser.Call):
        for argument in expr.args:
            yield from _selected(argument, labels)
    elif isinstance(expr, promql_parser.BinaryExpr):
        yield from _selected(expr.lhs, labels)
        yield from _selected(expr.rhs, labels)
    elif isinstance(expr, promql_parser.ParenExpr):
        yield from _selected(expr.expr, labels)


def _fits(selector: Any, grouped: frozenset[str], name: str, labels: dict[str, str]) -> bool:
    if selector.name != name or not grouped <= labels.keys():
        return False
    return all(_matches(each, labels.get(each.name, "")) for each in selector.matchers.matchers)


def _matches(matcher: Any, value: str) -> bool:
    kind = promql_parser.MatchOp
    equal = matcher.value == value
    if matcher.op in (kind.Equal, kind.NotEqual):
        return equal == (matcher.op == kind.Equal)
    return bool(re.fullmatch(matcher.value, value)) == (matcher.op == kind.Re)
