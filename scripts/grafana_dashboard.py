"""deploy/grafana/penstock.json: the dashboard, from a table of panels.

    python -m scripts.grafana_dashboard

Gateways count their own requests, so sums over gateways are right for `penstock_*`. Each gateway gives the
engines' metrics of all replicas, so of those the largest for each replica is taken before anything is summed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "deploy" / "grafana" / "penstock.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
RATE = "$__rate_interval"
OURS = 'model=~"$model"'
WIDTH, HEIGHT, COLUMNS = 8, 8, 3


@dataclass(frozen=True)
class Panel:
    """A graph. unit: as Grafana names it. queries: PromQL, with the legend of each."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    help: str = ""


def _rate(metric: str, labels: str = OURS, by: str = "model") -> str:
    return f"sum by ({by}) (rate({metric}{{{labels}}}[{RATE}]))"


def _quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (
            f"histogram_quantile({q}, {_rate(f'{metric}_bucket', by='le, model')})",
            f"{{{{model}}}} p{q * 100:g}",
        )
        for q in (0.5, 0.95, 0.99)
    )


def _engine(metric: str, *, rate: bool = False) -> str:
    """By model and replica; vLLM and the simulator have these under the same names."""
    of = f'{metric}{{model_name=~"$model"}}'
    return f"max by (model_name, replica) ({f'rate({of}[{RATE}])' if rate else of})"


def _of_engines(metric: str, *, rate: bool = False) -> str:
    return f"sum by (model_name) ({_engine(metric, rate=rate)})"


PANELS: dict[str, tuple[Panel, ...]] = {
    "Requests": (
        Panel("Requests", "reqps", ((_rate("penstock_requests_total"), "{{model}}"),)),
        Panel(
            "Requests that failed",
            "reqps",
            (
                (
                    _rate("penstock_requests_total", 'status!~"2.."', by="model, status"),
                    "{{model}} {{status}}",
                ),
            ),
            "By HTTP status; 'cut' is a stream that broke after its first byte, 'gone' a client that left.",
        ),
        Panel("Duration", "s", _quantiles("penstock_request_seconds")),
        Panel(
            "Time to the first token",
            "s",
            _quantiles("penstock_time_to_first_token_seconds"),
            "Streams only.",
        ),
        Panel("Between two tokens", "s", _quantiles("penstock_inter_token_latency_seconds"), "Streams only."),
        Panel(
            "The gateway's own part",
            "s",
            _quantiles("penstock_gateway_overhead_seconds"),
            "Of the time to the first byte.",
        ),
    ),
    "Replicas": (
        Panel(
            "Ready replicas",
            "none",
            (
                (f"max by (model) (penstock_ready_replicas{{{OURS}}})", "{{model}}"),
                (f"max by (model) (penstock_wanted_replicas{{{OURS}}})", "{{model}}, wanted"),
            ),
        ),
        Panel(
            "Open and queued requests",
            "none",
            (
                (f"sum by (model) (penstock_open_requests{{{OURS}}})", "{{model}} open"),
                (f"sum by (model) (penstock_queued_requests{{{OURS}}})", "{{model}} queued"),
            ),
        ),
        Panel(
            "Picks and failovers",
            "reqps",
            (
                (_rate("penstock_picks_total", by="model, outcome"), "{{model}} {{outcome}}"),
                (_rate("penstock_failovers_total"), "{{model}} failover"),
            ),
            "Why a replica was picked; a failover is a request that went to another replica.",
        ),
    ),
    "Engines": (
        Panel(
            "Tokens",
            "none",
            (
                (_of_engines("vllm:prompt_tokens_total", rate=True), "{{model_name}} in"),
                (_of_engines("vllm:generation_tokens_total", rate=True), "{{model_name}} out"),
            ),
            "Each second.",
        ),
        Panel(
            "Running and waiting",
            "none",
            (
                (_engine("vllm:num_requests_running"), "{{replica}} running"),
                (_engine("vllm:num_requests_waiting"), "{{replica}} waiting"),
            ),
            "In each engine.",
        ),
        Panel("KV cache in use", "percentunit", ((_engine("vllm:kv_cache_usage_perc"), "{{replica}}"),)),
        Panel(
            "Prompt tokens found in the prefix cache",
            "percentunit",
            (
                (
                    f"{_of_engines('vllm:prefix_cache_hits_total', rate=True)} / "
                    f"{_of_engines('vllm:prefix_cache_queries_total', rate=True)}",
                    "{{model_name}}",
                ),
            ),
        ),
        Panel(
            "Preemptions",
            "none",
            ((_of_engines("vllm:num_preemptions_total", rate=True), "{{model_name}}"),),
            "Requests that lost their KV cache to others and start again; each second.",
        ),
        Panel(
            "Adapters",
            "none",
            (
                (f"max by (model) (penstock_adapters_loaded{{{OURS}}})", "{{model}} loaded"),
                (
                    f"max by (model) (increase(penstock_adapter_loads_total{{{OURS}}}[1h]))",
                    "{{model}} loads, 1 h",
                ),
            ),
        ),
    ),
    "Classes of work": (
        Panel(
            "Requests by class",
            "reqps",
            ((_rate("penstock_tier_requests_total", by="model, tier"), "{{model}} {{tier}}"),),
            "'flex' is batch: it runs in what online requests leave free.",
        ),
        Panel(
            "Batch in replicas",
            "none",
            (
                (f"max by (model) (penstock_batch_requests{{{OURS}}})", "{{model}} running"),
                (f"max by (model) (penstock_batch_limit{{{OURS}}})", "{{model}} limit"),
            ),
            "Replicas lower the limit while online requests miss their latency targets.",
        ),
        Panel(
            "Batch that waits",
            "none",
            ((f"sum by (model) (penstock_batch_queued_requests{{{OURS}}})", "{{model}}"),),
        ),
        Panel(
            "Batch preempted by online requests",
            "none",
            (
                (
                    f"max by (model) (increase(penstock_batch_requeued_requests{{{OURS}}}[{RATE}]))",
                    "{{model}}",
                ),
            ),
            "Batch requests that replicas aborted for online ones and run again.",
        ),
    ),
    "Clients": (Panel("Connections", "none", (("sum by (state) (penstock_connections)", "{{state}}"),)),),
}


def dashboard() -> dict[str, Any]:
    """What Grafana imports."""
    return {
        "title": "Penstock",
        "uid": "penstock",
        "tags": ["penstock", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource(), _model()]},
        "panels": list(_panels()),
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _model() -> dict[str, Any]:
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": SOURCE,
        "query": "label_values(penstock_ready_replicas, model)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    for title, panels in PANELS.items():
        number += 1
        yield {"id": number, "type": "row", "title": title, "gridPos": {"x": 0, "y": top, "w": 24, "h": 1}}
        for i, panel in enumerate(panels):
            number += 1
            row, column = divmod(i, COLUMNS)
            position = {"x": column * WIDTH, "y": top + 1 + row * HEIGHT, "w": WIDTH, "h": HEIGHT}
            yield {"id": number, "gridPos": position, **_graph(panel)}
        top += 1 + HEIGHT * -(-len(panels) // COLUMNS)


def _graph(panel: Panel) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for i, (query, legend) in enumerate(panel.queries)
        ],
    }


def text() -> str:
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text())
