"""Every counter and histogram, named once, with its unit. Ground level: imports nothing of ours.

Children are looked up once per model, not once per request: a label lookup costs as much as a decision.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class GatewayMetrics:
    """One gateway's numbers, in a registry of its own: several gateways may live in one process."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self.requests = Counter(
            "penstock_requests",
            "Requests by how they ended: HTTP status, 'cut' after the first byte, or 'gone' (the client).",
            ["model", "status"],
            registry=registry,
        )
        self.failovers = Counter(
            "penstock_failovers",
            "Times that a request left a replica that failed before its first byte.",
            ["model"],
            registry=registry,
        )
        self.seconds = Histogram(
            "penstock_request_seconds",
            "From a request's arrival to the end of its answer.",
            ["model"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_byte_seconds = Histogram(
            "penstock_first_byte_seconds",
            "From a request's arrival to the first byte of its answer.",
            ["model"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.open = Gauge("penstock_open_requests", "Requests at replicas.", ["model"], registry=registry)
        self.queued = Gauge(
            "penstock_queued_requests", "Requests that wait for a replica.", ["model"], registry=registry
        )
        self.ready = Gauge(
            "penstock_ready_replicas", "Replicas that may be picked.", ["model"], registry=registry
        )

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self._registry)


class ModelMetrics:
    """Where the requests of one model are counted."""

    def __init__(self, gateway: GatewayMetrics, model_id: str) -> None:
        self.model_id = model_id
        self._requests = gateway.requests
        self._by_status: dict[str, Counter] = {}
        self._seconds = gateway.seconds.labels(model_id)
        self.first_byte_seconds = gateway.first_byte_seconds.labels(model_id)

    def ended(self, status: str, seconds: float) -> None:
        """Counts a request that has ended with `status`."""
        if status not in self._by_status:
            self._by_status[status] = self._requests.labels(self.model_id, status)
        self._by_status[status].inc()
        self._seconds.observe(seconds)
