"""The simulator's /metrics: the few vLLM series that routing and autoscaling use, under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.engine import Load
from penstock.engines.sim.scheduler import Counts

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


def exposition(model_id: str, load: Load, counts: Counts) -> bytes:
    """One engine's metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Series(model_id, load, counts))
    return generate_latest(registry)


class _Series(Collector):
    def __init__(self, model_id: str, load: Load, counts: Counts) -> None:
        self._labels = {"model_name": model_id, "engine": "0"}
        self._gauges = {
            "vllm:num_requests_running": ("Requests in the batch.", load.running),
            "vllm:num_requests_waiting": ("Requests waiting for a slot in the batch.", load.waiting),
            "vllm:kv_cache_usage_perc": ("Share of the KV cache in use, 0 to 1.", load.kv_usage),
        }
        cache = counts.cache
        self._counters = {
            "vllm:prompt_tokens": ("Prompt tokens prefilled.", counts.prompt_tokens),
            "vllm:generation_tokens": ("Tokens generated.", counts.made_tokens),
            "vllm:request_success": ("Outputs completed.", counts.finished),
            "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", cache.queries),
            "vllm:prefix_cache_hits": ("Prompt tokens found there.", cache.hits),
            "vllm:num_preemptions": ("Requests preempted and restarted.", cache.preemptions),
        }

    def collect(self) -> Iterator[Metric]:
        for name, (says, value) in self._gauges.items():
            gauge = GaugeMetricFamily(name, says, labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), value)
            yield gauge
        for name, (says, value) in self._counters.items():
            counter = CounterMetricFamily(name, says, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), value)
            yield counter
