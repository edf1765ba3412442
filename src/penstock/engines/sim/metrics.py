"""The simulator's /metrics: the few vLLM series that routing and autoscaling use, under vLLM's names."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.engine import Load
from penstock.engines.sim.batch import Counts

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


def exposition(model_id: str, load: Load, counts: Counts) -> bytes:
    """One engine's metrics in Prometheus' text format."""
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    found = _Metrics()
    for kind, name, says, value in (
        (gauge, "num_requests_running", "Requests in the batch.", load.running),
        (gauge, "num_requests_waiting", "Requests waiting for a slot in the batch.", load.waiting),
        (gauge, "kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", load.kv_usage),
        (counter, "prompt_tokens", "Prompt tokens prefilled.", counts.prompt_tokens),
        (counter, "generation_tokens", "Tokens generated.", counts.made_tokens),
        (counter, "request_success", "Outputs completed.", counts.finished),
        (counter, "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", counts.queries),
        (counter, "prefix_cache_hits", "Prompt tokens found there.", counts.hits),
        (counter, "num_preemptions", "Requests preempted and restarted.", counts.preemptions),
    ):
        family = kind(f"vllm:{name}", says, labels=("model_name", "engine"))
        family.add_metric((model_id, "0"), value)
        found.append(family)
    return generate_latest(found)


class _Metrics(list[Metric], Collector):
    def collect(self) -> list[Metric]:
        return self
