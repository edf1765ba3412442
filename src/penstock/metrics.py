"""Every counter and histogram of the gateway, with its unit.

Labels are looked up once per model and route, not once per request: a look-up costs as much as a routing
decision. Histograms are lists of counts, written on one event loop: an observation costs a fifth of the
client library's, which locks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


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
# fmt: on


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

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Cumulative, as Prometheus defines buckets."""
        ends = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        family.add_metric(labels, list(zip(ends, accumulate(self._counts), strict=True)), self._sum)


class RouteMetrics:
    """Counts of one model's requests on one route."""

    def __init__(self, model: ModelMetrics, route: str) -> None:
        self.model_id = model.model_id
        self.route = route
        self.ended = model.ended
        self.request = Buckets(REQUEST)
        self.first_token = Buckets(FIRST_TOKEN)
        self.inter_token = Buckets(INTER_TOKEN)
        self.overhead = Buckets(OVERHEAD)


class ModelMetrics:
    """Counts of one model's requests."""

    def __init__(self, requests: Counter, picks: Counter, model_id: str) -> None:
        self.model_id = model_id
        self._requests = requests
        self._picks = picks
        self._by_status: dict[str, Counter] = {}
        self._by_outcome: dict[str, Counter] = {}
        self.routes: dict[str, RouteMetrics] = {}

    def on(self, route: str) -> RouteMetrics:
        """route: a path from the table of routes, of which there are few."""
        if route not in self.routes:
            self.routes[route] = RouteMetrics(self, route)
        return self.routes[route]

    def ended(self, status: str) -> None:
        """Counts a request that has ended with `status`."""
        if status not in self._by_status:
            self._by_status[status] = self._requests.labels(self.model_id, status)
        self._by_status[status].inc()

    def picked(self, outcome: str) -> None:
        """Counts a replica that was chosen."""
        if outcome not in self._by_outcome:
            self._by_outcome[outcome] = self._picks.labels(self.model_id, outcome)
        self._by_outcome[outcome].inc()


class GatewayMetrics:
    """One gateway's metrics, in a separate registry: a process may have several gateways."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self._models: dict[str, ModelMetrics] = {}
        self.requests = Counter(
            "penstock_requests",
            "Requests by how they ended: HTTP status, 'cut' after the first byte, or 'gone' (the client).",
            ["model", "status"],
            registry=registry,
        )
        self.failovers = Counter(
            "penstock_failovers",
            "Requests sent to another replica because one failed before the first byte.",
            ["model"],
            registry=registry,
        )
        self.fallbacks = Counter(
            "penstock_fallbacks",
            "Requests for a model that were sent to another one because it could not answer.",
            ["model", "to"],
            registry=registry,
        )
        self.picks = Counter(
            "penstock_picks",
            "Replicas picked, by reason.",
            ["model", "outcome"],
            registry=registry,
        )
        self.open = Gauge("penstock_open_requests", "Requests at replicas.", ["model"], registry=registry)
        self.queued = Gauge(
            "penstock_queued_requests", "Requests that wait for a replica.", ["model"], registry=registry
        )
        self.ready = Gauge(
            "penstock_ready_replicas", "Replicas that may be picked.", ["model"], registry=registry
        )
        self.adapters = Gauge(
            "penstock_adapters_loaded",
            "Adapters loaded, in all replicas.",
            ["model"],
            registry=registry,
        )
        self.adapter_loads = Counter(
            "penstock_adapter_loads", "Times that a replica loaded an adapter.", ["model"], registry=registry
        )
        self.connections = Gauge(
            "penstock_connections",
            "Client connections: 'active' while an accepted request is open, else 'waiting'.",
            ["state"],
            registry=registry,
        )
        self.closed = Counter(
            "penstock_connections_closed",
            "Connections that the gateway closed, by reason.",
            ["reason"],
            registry=registry,
        )
        registry.register(_Latencies(self._models))

    def model(self, model_id: str) -> ModelMetrics:
        """Counts of a model's requests; "" for those that name no served model."""
        if model_id not in self._models:
            self._models[model_id] = ModelMetrics(self.requests, self.picks, model_id)
        return self._models[model_id]

    def text(self) -> bytes:
        """All metrics, in Prometheus' text format."""
        return generate_latest(self._registry)


class _Latencies(Collector):
    """The histograms of all models and routes."""

    def __init__(self, models: dict[str, ModelMetrics]) -> None:
        self._models = models

    def collect(self) -> Iterable[HistogramMetricFamily]:
        routes = [route for model in self._models.values() for route in model.routes.values()]
        for latency, buckets in (
            (REQUEST, [route.request for route in routes]),
            (FIRST_TOKEN, [route.first_token for route in routes]),
            (INTER_TOKEN, [route.inter_token for route in routes]),
            (OVERHEAD, [route.overhead for route in routes]),
        ):
            family = HistogramMetricFamily(latency.name, latency.help, labels=["model", "route"])
            for route, counted in zip(routes, buckets, strict=True):
                counted.add_to(family, [route.model_id, route.route])
            yield family
