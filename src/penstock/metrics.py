"""Every counter and histogram of the gateway, with its unit.

Labels are looked up once per model and route, not once per request: a look-up costs as much as a routing
decision. Histograms are lists of counts, written on one event loop: an observation costs a fifth of the
client library's, which locks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Metric, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


@dataclass(frozen=True, slots=True)
class Latency:
    """One family of histograms. bounds: upper ends of its buckets, in seconds."""

    name: str
    help: str
    bounds: tuple[float, ...]


# Neighbouring bounds differ by a factor of two at most, and so does a quantile that Prometheus interpolates
# from the true one; where promises are made (TTFT of 0.1 to 0.5 s, ITL of 10 to 50 ms) they lie closer.
# fmt: off
REQUEST = Latency(
    "penstock_request_seconds",
    "From a request's arrival to the end of its response.",
    (0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120,
     240, 480, 960),
)
FIRST_TOKEN = Latency(
    "penstock_time_to_first_token_seconds",
    "From a request's arrival to the first byte of its stream, which engines send with the first token.",
    (0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1, 1.5, 2, 3, 5,
     7.5, 10, 20, 40, 80),
)
INTER_TOKEN = Latency(
    "penstock_inter_token_latency_seconds",
    "Between two pieces of a stream; those within half a millisecond count as one.",
    (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2,
     0.3, 0.5, 1, 2, 4),
)
OVERHEAD = Latency(
    "penstock_gateway_overhead_seconds",
    "The gateway's part of the time to the first byte: without waiting for clients, queues and replicas.",
    (0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.02, 0.04, 0.08,
     0.16, 0.32, 0.64),
)
PAUSE = Latency(
    "penstock_stream_pause_seconds",
    "From the failure of a stream's replica to the first piece from the one that continues it.",
    (0.01, 0.02, 0.035, 0.05, 0.1, 0.15, 0.2, 0.35, 0.5, 0.75, 1, 2, 4, 8, 15, 30, 60, 120),
)
# fmt: on

LATENCIES = (REQUEST, FIRST_TOKEN, INTER_TOKEN, OVERHEAD, PAUSE)

Key = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name, and its labels."""


class GatewayFigures(msgspec.Struct):
    """What a gateway has counted, by the names of families: as another process can read it, and add it to its
    own.

    latencies: by model and route the count of each bucket, then the sum in seconds.
    """

    counters: dict[str, dict[Key, float]] = {}
    gauges: dict[str, dict[Key, float]] = {}
    latencies: dict[str, dict[tuple[str, str], list[float]]] = {}

    def add(self, other: GatewayFigures) -> None:
        """Counts those of `other`, too. A series began when the first of the two did."""
        for mine, theirs in ((self.counters, other.counters), (self.gauges, other.gauges)):
            for family, samples in theirs.items():
                known = mine.setdefault(family, {})
                for key, value in samples.items():
                    if key[0].endswith("_created"):
                        known[key] = min(known.get(key, value), value)
                    else:
                        known[key] = known.get(key, 0.0) + value
        for family, histograms in other.latencies.items():
            known = self.latencies.setdefault(family, {})
            for key, numbers in histograms.items():
                before = known.get(key, [0.0] * len(numbers))
                known[key] = [mine + theirs for mine, theirs in zip(before, numbers, strict=True)]


class Buckets:
    """One histogram's counts."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, latency: Latency) -> None:
        self._bounds = latency.bounds
        self._counts = [0] * (len(latency.bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def numbers(self) -> list[float]:
        """The count of each bucket, and the sum of what was observed in seconds."""
        return [*self._counts, self._sum]


class RouteMetrics:
    """Counts of one model's requests on one route."""

    def __init__(self, model: ModelMetrics, route: str) -> None:
        self.model_id = model.model_id
        self.route = route
        self.ended = model.ended
        self.histograms = {latency.name: Buckets(latency) for latency in LATENCIES}
        self.request = self.histograms[REQUEST.name]
        self.first_token = self.histograms[FIRST_TOKEN.name]
        self.inter_token = self.histograms[INTER_TOKEN.name]
        self.overhead = self.histograms[OVERHEAD.name]
        self.pause = self.histograms[PAUSE.name]


class ModelMetrics:
    """Counts of one model's requests.

    ended: by status. asked: by class of work. picked: replicas, by why they were chosen.
    """

    def __init__(self, requests: Counter, picks: Counter, tiers: Counter, model_id: str) -> None:
        self.model_id = model_id
        self.ended = _counting(requests, model_id)
        self.asked = _counting(tiers, model_id)
        self.picked = _counting(picks, model_id)
        self.routes: dict[str, RouteMetrics] = {}

    def numbers(self, latency: Latency) -> list[float]:
        """Of all routes together, as `Buckets.numbers`."""
        found = [route.histograms[latency.name].numbers() for route in self.routes.values()]
        return [sum(column) for column in zip(*found, [0.0] * (len(latency.bounds) + 2), strict=True)]

    def on(self, route: str) -> RouteMetrics:
        """route: a path from the table of routes, of which there are few."""
        if route not in self.routes:
            self.routes[route] = RouteMetrics(self, route)
        return self.routes[route]


def _counting(counter: Counter, model_id: str) -> Callable[[str], None]:
    """Adds one to a model's counter with the label that it is called with."""
    labelled = cache(partial(counter.labels, model_id))
    return lambda label: labelled(label).inc()


class GatewayMetrics:
    """One gateway's metrics, in a separate registry: a process may have several gateways."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._models: dict[str, ModelMetrics] = {}
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, labelnames=["model"], registry=registry)
        self.requests = counter(
            "penstock_requests",
            "Requests by how they ended: HTTP status, 'cut' after the first byte, or 'gone' (the client).",
            ["model", "status"],
        )
        self.tiers = counter(
            "penstock_tier_requests",
            "Requests to models by their class: 'priority', 'default' or 'flex' (batch).",
            ["model", "tier"],
        )
        self.failovers = counter(
            "penstock_failovers",
            "Requests sent to another replica because one failed before the first byte.",
            ["model"],
        )
        self.streams_continued = counter(
            "penstock_streams_continued",
            "Answers with which another replica went on because theirs failed or drained.",
            ["model"],
        )
        self.streams_cut = counter(
            "penstock_streams_cut",
            "Streams that ended with an error because their replica failed, by why none could continue them.",
            ["model", "reason"],
        )
        self.tokens_replayed = counter(
            "penstock_stream_tokens_replayed",
            "Tokens of continued answers that were there, and that another replica has read again.",
            ["model"],
        )
        self.fallbacks = counter(
            "penstock_fallbacks",
            "Requests for a model that were sent to another one because it could not answer.",
            ["model", "to"],
        )
        self.shadows = counter(
            "penstock_shadow_requests",
            "Requests that a version answered unseen: 'ok', 'failed', or 'skipped' where too many are open.",
            ["model", "outcome"],
        )
        self.tenant_requests = counter(
            "penstock_tenant_requests", "Requests of tenants that have ended.", ["tenant"]
        )
        self.tenant_tokens = counter(
            "penstock_tenant_tokens",
            "Tokens of tenants: 'prompt', 'cached' (of the prompt's) and 'output'.",
            ["tenant", "kind"],
        )
        self.tenant_refusals = counter(
            "penstock_tenant_refusals", "Requests that a limit of the key or tenant has refused.", ["tenant"]
        )
        self.picks = counter("penstock_picks", "Replicas picked, by reason.", ["model", "outcome"])
        self.open = gauge("penstock_open_requests", "Requests at replicas.")
        self.queued = gauge("penstock_queued_requests", "Requests that wait for a replica.")
        self.batch_queued = gauge(
            "penstock_batch_queued_requests", "Batch requests among those that wait for a replica."
        )
        self.batch = gauge("penstock_batch_requests", "Batch requests in replicas.")
        self.batch_limit = gauge(
            "penstock_batch_limit",
            "Batch requests that may run in the ready replicas now, as each of them decides.",
        )
        self.batch_requeued = gauge(
            "penstock_batch_requeued_requests",
            "Batch requests that ready replicas have aborted for online ones; they go on later.",
        )
        self.ready = gauge("penstock_ready_replicas", "Replicas that may be picked.")
        self.wanted = gauge("penstock_wanted_replicas", "Replicas that Ray Serve should run.")
        self.share = gauge("penstock_version_share", "Of its model's requests, what a version gets: 0 to 1.")
        self.adapters = gauge("penstock_adapters_loaded", "Adapters loaded, in all replicas.")
        self.adapter_loads = counter(
            "penstock_adapter_loads", "Times that a replica loaded an adapter.", ["model"]
        )
        self.connections = gauge(
            "penstock_connections",
            "Client connections: 'active' while an accepted request is open, else 'waiting'.",
            labelnames=["state"],
        )
        self.closed = counter(
            "penstock_connections_closed", "Connections that the gateway closed, by reason.", ["reason"]
        )

    def model(self, model_id: str) -> ModelMetrics:
        """Counts of a model's requests; "" for those that name no served model."""
        if model_id not in self._models:
            self._models[model_id] = ModelMetrics(self.requests, self.picks, self.tiers, model_id)
        return self._models[model_id]

    def forget(self, model_id: str) -> None:
        """Shows the state of a model no longer. What was counted of it stays."""
        for gauge in (
            *(self.open, self.queued, self.batch_queued, self.batch, self.batch_limit, self.batch_requeued),
            *(self.ready, self.wanted, self.adapters),
        ):
            gauge.remove(model_id)
        with suppress(KeyError):
            self.share.remove(model_id)

    def figures(self) -> GatewayFigures:
        """What this gateway alone knows: all but what it sees of replicas, as every gateway does."""
        found = GatewayFigures()
        for family in self._registry.collect():
            if family.name not in _OF_REPLICAS:
                kind = found.gauges if family.type == "gauge" else found.counters
                kind[family.name] = {_key(sample): sample.value for sample in family.samples}
        routes = [route for model in self._models.values() for route in model.routes.values()]
        for latency in LATENCIES:
            found.latencies[latency.name] = {
                (route.model_id, route.route): route.histograms[latency.name].numbers() for route in routes
            }
        return found

    def text(self, figures: GatewayFigures | None = None) -> bytes:
        """All metrics, in Prometheus' text format. figures: this gateway's with those of others added."""
        return generate_latest(_Shown(self._registry, figures or self.figures()))


_OF_REPLICAS = {
    *("penstock_ready_replicas", "penstock_wanted_replicas"),
    *("penstock_adapters_loaded", "penstock_adapter_loads", "penstock_version_share"),
}


def _key(sample: Sample) -> Key:
    return sample.name, tuple(sample.labels.items())


class _Shown(Collector):
    """The families of a registry, with the samples of `figures` where these have the family."""

    def __init__(self, registry: CollectorRegistry, figures: GatewayFigures) -> None:
        self._registry = registry
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        known = self._figures.counters | self._figures.gauges
        for family in self._registry.collect():
            if family.name in known:
                family.samples = [
                    Sample(name, dict(labels), value) for (name, labels), value in known[family.name].items()
                ]
            yield family
        for latency in LATENCIES:
            yield _histograms(latency, self._figures.latencies.get(latency.name, {}))


def _histograms(latency: Latency, found: Mapping[tuple[str, str], Sequence[float]]) -> HistogramMetricFamily:
    """Cumulative, as Prometheus defines buckets."""
    family = HistogramMetricFamily(latency.name, latency.help, labels=["model", "route"])
    ends = [*(str(float(bound)) for bound in latency.bounds), "+Inf"]
    for labels, (*counts, total) in found.items():
        family.add_metric(labels, list(zip(ends, accumulate(counts), strict=True)), total)
    return family
