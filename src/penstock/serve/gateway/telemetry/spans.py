"""Requests as OpenTelemetry spans. The only file that imports OpenTelemetry, and only loaded when tracing is
on.

A request's server span opens before the request is passed on, so that the replica's spans become its
children; everything else is made from its `Timing` when it has ended. Nothing is done per token; a thread
exports.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock.errors import Error
from penstock.serve.gateway.telemetry.timing import GATEWAY, REPLICA, STREAM, Timing
from penstock.transport.connection import Headers

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
_USAGE = {
    "gen_ai.usage.input_tokens": re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d+)'),
    "gen_ai.usage.output_tokens": re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d+)'),
}
"""In the last bytes of an answer. Quotes in generated text are escaped there, so that it cannot match."""
_USAGE_BYTES = 4096
_DURATION = re.compile(r";\s*dur=(\d{1,12}(?:\.\d+)?)")  # a user's own endpoint may say more of a part


class Tracing:
    """The tracer of one gateway, and its exporters."""

    def __init__(self, exporters: Sequence[SpanExporter]) -> None:
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._exporters = exporters
        for exporter in exporters:
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("penstock")

    def begin(self, facts: Mapping[str, str], fields: Mapping[bytes, bytes], timing: Timing) -> Trace:
        """The span of a request to a model, below the client's own when it sent one.

        facts: its attributes, `http.route` and `http.request.method` among them.
        """
        return Trace(self._tracer, facts, fields, timing)

    def close(self) -> None:
        """Exports what is left, within a time limit. Blocks."""
        enough = threading.Timer(_FAREWELL_S, self._stop_trying)
        enough.start()
        self._provider.shutdown()
        enough.cancel()

    def _stop_trying(self) -> None:
        for exporter in self._exporters:
            exporter.shutdown()


class Trace:
    """One request's spans."""

    def __init__(
        self, tracer: Tracer, facts: Mapping[str, str], fields: Mapping[bytes, bytes], timing: Timing
    ) -> None:
        route = facts["http.route"]
        self._tracer = tracer
        self._timing = timing
        self._epoch_ns = time.time_ns() - int(self._timing.now() * 1e9)
        given = {name.decode(): fields[name].decode("latin-1") for name in _CONTEXT & fields.keys()}
        self._span = tracer.start_span(
            f"{facts['http.request.method']} {route}",
            context=_W3C.extract(given),
            kind=SpanKind.SERVER,
            start_time=self._at(self._timing.started_at),
            attributes={
                **facts,
                **(
                    {"gen_ai.operation.name": _OPERATIONS[route], "gen_ai.provider.name": "penstock"}
                    if route in _OPERATIONS
                    else {}
                ),
            },
        )

    def passed_on(self, headers: Headers) -> Headers:
        """The client's headers with our span in the place of its own."""
        carried: dict[str, str] = {}
        _W3C.inject(carried, set_span_in_context(self._span))
        ours = [(name.encode(), value.encode()) for name, value in carried.items()]
        return [field for field in headers if field[0] not in _CONTEXT] + ours

    def end(self, model_id: str, status: str, streamed: bool, error: Error | None, last: bytes) -> None:
        """Called once, when the request has ended, in whatever way. status: as `metrics` counts it. last: the
        end of the answer, which has the usage where the client gets it.
        """
        ended_at = self._timing.now()
        if self._span.is_recording():
            self._record_outcome(model_id, status, error)
            for name, pattern in _USAGE.items():
                if counts := pattern.findall(last[-_USAGE_BYTES:]):
                    self._span.set_attribute(name, int(counts[-1]))
            if streamed and self._timing.first_byte_s is not None:
                self._span.set_attribute("gen_ai.response.time_to_first_chunk", self._timing.first_byte_s)
            # The engine reports with its first byte: of a stream, it has decoded nothing by then.
            self._add_parts(ended_at, {GATEWAY, "decode" if streamed else STREAM})
        self._span.end(self._at(ended_at))

    def _record_outcome(self, model_id: str, status: str, error: Error | None) -> None:
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
                    self._add_engines_parts(child, begun_at, left_out)

    def _add_engines_parts(self, replica: Span, begun_at: float, left_out: set[str]) -> None:
        """The engine reports durations only; drawing them back to back is our choice."""
        for part, seconds in durations(self._timing.replica or b""):
            if part not in left_out:
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
    """From the environment; the service is named penstock-gateway where that names none."""
    found = Resource.create()
    unnamed = str(found.attributes[SERVICE_NAME]).startswith("unknown_service")
    return found.merge(Resource({SERVICE_NAME: "penstock-gateway"})) if unnamed else found


def durations(server_timing: bytes) -> Iterator[tuple[str, float]]:
    """Parts and their seconds, of a replica's `Server-Timing`."""
    for metric in server_timing.decode("latin-1").split(","):
        if found := _DURATION.search(metric):
            yield metric.partition(";")[0].strip(), float(found[1]) / 1e3
