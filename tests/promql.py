"""Which series a PromQL query reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import promql_parser


def selected(query: str) -> Iterator[tuple[Any, frozenset[str]]]:
    """Each selector of a query, with the labels by which what it gives is grouped."""
    return _selected(promql_parser.parse(query), frozenset())


def _selected(expr: Any, labels: frozenset[str]) -> Iterator[tuple[Any, frozenset[str]]]:
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
    elif isinstance(expr, promql_parser.ParenExpr | promql_parser.SubqueryExpr):
        yield from _selected(expr.expr, labels)


def fits(selector: Any, grouped: frozenset[str], name: str, labels: dict[str, str]) -> bool:
    """Whether a series, of this name and these labels, is one that the selector reads."""
    if selector.name != name or not grouped <= labels.keys():
        return False
    return all(_matches(each, labels.get(each.name, "")) for each in selector.matchers.matchers)


def _matches(matcher: Any, value: str) -> bool:
    kind = promql_parser.MatchOp
    equal = matcher.value == value
    if matcher.op in (kind.Equal, kind.NotEqual):
        return equal == (matcher.op == kind.Equal)
    return bool(re.fullmatch(matcher.value, value)) == (matcher.op == kind.Re)
