"""Requests as OpenTelemetry spans: the only file that knows OpenTelemetry, imported only to be used.

A request's server span is opened before it is passed on, so that what the replica traces hangs below it; all
else is made of its `Timing` when it has ended: nothing is done per token. Export has a thread of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock.errors import Error
from penstock.serve.gateway.telemetry.timing import GATEWAY, REPLICA, STREAM
from penstock.transport.connection import Headers

if TYPE_CHECKING:
    from penstock.serve.gateway.request import Request

_CONTEXT = (b"traceparent", b"tracestate")
_FAREWELL_S = 1.5  # an exporter tries again for some ten seconds
_W3C = TraceContextTextMapPropagator()

# Names by OpenTelemetry's semantic conventions for HTTP and for generative AI, where they have one.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


class Tracing:
    """Where the spans of one gateway go."""

    def __init__(self, exporters: Sequence[SpanExporter]) -> None:
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._exporters = exporters
        for exporter in exporters:
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("penstock")

    def begin(self, request: Request) -> Trace:
        """The span of a request to a model, below the client's own when it sent one."""
        return Trace(self._tracer, request)

    def close(self) -> None:
        """Sends what is left, if the collector takes it in time. Blocks."""
        enough = threading.Timer(_FAREWELL_S, self._stop_trying)
        enough.start()
        self._provider.shutdown()
        enough.cancel()

    def _stop_trying(self) -> None:
        for exporter in self._exporters:
            exporter.shutdown()


class Trace:
    """One request's spans."""

    def __init__(self, tracer: Tracer, request: Request) -> None:
        assert request.route is not None
        route = request.route.path
        self._tracer = tracer
        self._timing = request.timing
        self._epoch_ns = time.time_ns() - int(self._timing.now() * 1e9)
        given = {
            name.decode(): request.fields[name].decode("latin-1") for name in _CONTEXT & request.fields.keys()
        }
        self._span = tracer.start_span(
            f"{request.method} {route}",
            context=_W3C.extract(given),
            kind=SpanKind.SERVER,
            start_time=self._at(self._timing.started_at),
            attributes={
                "http.request.method": request.method,
                "http.route": route,
                "url.path": request.path,
                "penstock.request.id": request.id,
                **({"gen_ai.operation.name": _OPERATIONS[route]} if route in _OPERATIONS else {}),
            },
        )

    def passed_on(self, headers: Headers) -> Headers:
        """The client's headers with our span in the place of its own."""
        carried: dict[str, str] = {}
        _W3C.inject(carried, set_span_in_context(self._span))
        ours = [(name.encode(), value.encode()) for name, value in carried.items()]
        return [field for field in headers if field[0] not in _CONTEXT] + ours

    def end(self, model_id: str, status: str, streamed: bool, error: Error | None) -> None:
        """Called once, when the request has ended, in whatever way. status: as `metrics` counts it."""
        ended_at = self._timing.now()
        if self._span.is_recording():
            self._say_how_it_went(model_id, status, error)
            if streamed and self._timing.first_byte_s is not None:
                self._span.set_attribute("gen_ai.response.time_to_first_chunk", self._timing.first_byte_s)
            self._add_parts(ended_at, {GATEWAY} if streamed else {GATEWAY, STREAM})
        self._span.end(self._at(ended_at))

    def _say_how_it_went(self, model_id: str, status: str, error: Error | None) -> None:
        span = self._span
        span.set_attribute("gen_ai.request.model", model_id)
        span.set_attribute("penstock.attempts", self._timing.failures + 1)
        if status.isdigit():
            span.set_attribute("http.response.status_code", int(status))
        if error is not None or not status.isdigit():
            span.set_attribute("error.type", error.code if error else status)
        if (error.status if error else 0) >= 500:
            span.set_status(Status(StatusCode.ERROR, str(error)))

    def _add_parts(self, ended_at: float, left_out: set[str]) -> None:
        laps = [*self._timing.laps, ("", ended_at)]
        for (part, begun_at), (_, done_at) in pairwise(laps):
            if part not in left_out:
                child = self._child(self._span, part, begun_at, done_at)
                if part == REPLICA:
                    self._add_engines_parts(child, begun_at)

    def _add_engines_parts(self, replica: Span, begun_at: float) -> None:
        """How long each took is the engine's word; that one follows another without a gap is our drawing."""
        for part, seconds in durations(self._timing.replica or b""):
            self._child(replica, part, begun_at, begun_at + seconds)
            begun_at += seconds

    def _child(self, parent: Span, name: str, begun_at: float, ended_at: float) -> Span:
        span = self._tracer.start_span(name, set_span_in_context(parent), start_time=self._at(begun_at))
        span.end(self._at(ended_at))
        return span

    def _at(self, instant: float) -> int:
        """Nanoseconds since the epoch."""
        return self._epoch_ns + int(instant * 1e9)


def _resource() -> Resource:
    """Of the environment; what that leaves unnamed has our name."""
    found = Resource.create()
    unnamed = str(found.attributes[SERVICE_NAME]).startswith("unknown_service")
    return found.merge(Resource({SERVICE_NAME: "penstock-gateway"})) if unnamed else found


def durations(server_timing: bytes) -> Iterator[tuple[str, float]]:
    """Parts and their seconds, of a header that `guard` wrote."""
    for metric in server_timing.decode("latin-1").split(", "):
        part, found, milliseconds = metric.partition(";dur=")
        if found:
            yield part, float(milliseconds) / 1e3
