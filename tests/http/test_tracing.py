"""Spans of requests, as a real collector receives them over OTLP/HTTP."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from served import Served, chat

from penstock.serve.gateway.telemetry import tracing

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=1"}


class Collector:
    """What has arrived: spans by name, once the gateway has closed."""

    def __init__(self) -> None:
        self.services: set[str] = set()
        self._spans: list[Any] = []

    async def receive(self, request: web.Request) -> web.Response:
        export = ExportTraceServiceRequest.FromString(await request.read())
        for resource in export.resource_spans:
            self.services |= {
                a.value.string_value for a in resource.resource.attributes if a.key == "service.name"
            }
            self._spans += [span for scope in resource.scope_spans for span in scope.spans]
        return web.Response(content_type="application/x-protobuf")

    def named(self, name: str) -> Any:
        (span,) = [span for span in self._spans if span.name == name]
        return span

    @property
    def names(self) -> list[str]:
        return [span.name for span in self._spans]

    def below(self, parent: Any) -> list[Any]:
        """In the order of their beginnings."""
        found = [span for span in self._spans if span.parent_span_id == parent.span_id]
        return sorted(found, key=lambda span: span.start_time_unix_nano)


def said(span: Any) -> dict[str, Any]:
    """Its attributes."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in tracing.os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.receive)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    yield collector
    await runner.cleanup()


async def echoed(scope: Any, receive: Any, send: Any) -> None:
    """A replica that answers with what it was told of the trace."""
    told = [value for name, value in scope["headers"] if name in (b"traceparent", b"tracestate")]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"\n".join(told)})


async def test_a_stream_is_a_span_with_its_parts_below_it(served: Served, collector: Collector):
    gateway = await served.gateway("m")
    await served.replica(prefill_tokens_per_s=1000)
    async with served.http() as http:
        await http.post("/v1/chat/completions", json=chat(stream=True), headers=PARENT)
    await gateway.close()
    request = collector.named("POST /v1/chat/completions")
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, CALLER)
    assert [part.name for part in collector.below(request)] == [
        "receive",
        "pick",
        "connect",
        "replica",
        "stream",
    ]
    inside = collector.below(collector.named("replica"))
    assert [part.name for part in inside] == ["front", "engine-queue", "prefill"]
    assert collector.services == {"penstock-gateway"}


USAGE = ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens")


@pytest.mark.parametrize("more", [{}, {"stream": True, "stream_options": {"include_usage": True}}])
async def test_the_span_has_the_usage_that_the_answer_has(
    served: Served, collector: Collector, more: dict[str, Any]
):
    gateway = await served.gateway("m")
    await served.replica()
    async with served.http() as http:
        answer = await http.post("/v1/chat/completions", json=chat(max_tokens=9, **more))
    await gateway.close()
    last = answer.text.split("data: ")[-2] if more else answer.text
    usage = json.loads(last)["usage"]
    found = said(collector.named("POST /v1/chat/completions"))
    assert [found[name] for name in USAGE] == [usage["prompt_tokens"], usage["completion_tokens"]]


async def test_text_that_looks_like_usage_is_none(served: Served, collector: Collector):
    text = json.dumps({"completion_tokens": 7})
    answer = json.dumps({"choices": [{"text": text}], "usage": {"prompt_tokens": 3}}).encode()

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer})

    gateway = await served.gateway("m")
    await served.app(engine, "m")
    async with served.http() as http:
        await http.post("/v1/completions", json={"prompt": "x"})
    await gateway.close()
    found = said(collector.named("POST /v1/completions"))
    assert [found.get(name) for name in USAGE] == [3, None]


async def test_parts_follow_one_another_within_the_request(served: Served, collector: Collector):
    gateway = await served.gateway("m")
    await served.replica(prefill_tokens_per_s=1000)
    async with served.http() as http:
        await http.post("/v1/chat/completions", json=chat(stream=True))
    await gateway.close()
    request = collector.named("POST /v1/chat/completions")
    instants = [request.start_time_unix_nano]
    for part in collector.below(request):
        instants += [part.start_time_unix_nano, part.end_time_unix_nano]
    assert sorted(instants) == instants
    assert instants[-1] == request.end_time_unix_nano


async def test_attributes_have_their_conventional_names(served: Served, collector: Collector):
    gateway = await served.gateway("m")
    await served.replica(max_model_len=4)
    async with served.http() as http:
        await http.post("/v1/completions", json={"model": "m", "prompt": "a", "max_tokens": 1})
        await http.post("/tokenize", json={"model": "unknown"}, headers={"x-request-id": "7"})
    await gateway.close()
    good, bad = said(collector.named("POST /v1/completions")), said(collector.named("POST /tokenize"))
    assert good["gen_ai.operation.name"] == "text_completion"
    assert good["gen_ai.provider.name"] == "penstock"
    assert (good["gen_ai.request.model"], good["http.response.status_code"]) == ("m", 200)
    assert (bad["http.route"], bad["http.response.status_code"]) == ("/tokenize", 404)
    assert (bad["error.type"], bad["penstock.request.id"]) == ("model_not_found", "7")


async def test_the_environment_names_the_service(
    served: Served, collector: Collector, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=front-door")
    gateway = await served.gateway("m")
    async with served.http() as http:
        await http.post("/v1/completions", json={"model": "unknown"})
    await gateway.close()
    assert collector.services == {"front-door"}


async def test_the_replica_is_told_of_our_span(served: Served, collector: Collector):
    gateway = await served.gateway("m")
    await served.app(echoed)
    async with served.http() as http:
        answer = await http.post("/v1/completions", json={"model": "m"}, headers=PARENT)
    await gateway.close()
    ours = collector.named("POST /v1/completions").span_id.hex()
    assert answer.text.split() == [f"00-{TRACE}-{ours}-01", "vendor=1"]


async def test_a_request_that_no_caller_wants_traced_is_not(served: Served, collector: Collector):
    gateway = await served.gateway("m")
    await served.app(echoed)
    async with served.http() as http:
        unwanted = {"traceparent": f"00-{TRACE}-{CALLER}-00"}
        answer = await http.post("/v1/completions", json={"model": "m"}, headers=unwanted)
    await gateway.close()
    assert answer.text.endswith("-00")
    assert collector.names == []


async def test_a_failure_of_ours_is_an_error_and_a_refused_request_is_none(
    served: Served, collector: Collector
):
    gateway = await served.gateway("m", wait_for_replica_s=0.01)
    async with served.http() as http:
        await http.post("/v1/completions", json={"model": "m"})
        await http.post("/v1/embeddings", json={"model": "unknown"})
    await gateway.close()
    failed, refused = collector.named("POST /v1/completions"), collector.named("POST /v1/embeddings")
    assert failed.status.code == failed.status.STATUS_CODE_ERROR
    assert refused.status.code == refused.status.STATUS_CODE_UNSET


async def test_without_an_exporter_the_clients_own_context_reaches_the_replica(served: Served):
    await served.gateway("m")
    await served.app(echoed)
    async with served.http() as http:
        answer = await http.post("/v1/completions", json={"model": "m"}, headers=PARENT)
    assert answer.text.split() == [PARENT["traceparent"], PARENT["tracestate"]]


IMPORTED = """
import sys, penstock.serve.gateway.app
from penstock.serve.gateway.telemetry import tracing
before = set(sys.modules)
assert tracing.tracing() is None
print([name for name in set(sys.modules) - before if "opentelemetry" in name or "spans" in name])
"""


def test_without_an_exporter_nothing_more_is_imported():
    """Ray Serve itself imports OpenTelemetry's SDK, so that the gateway's process has that anyway."""
    process = subprocess.run([sys.executable, "-c", IMPORTED], stdout=subprocess.PIPE, check=True)
    assert process.stdout.strip() == b"[]"


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({}, []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, ["otlp_proto_http"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, ["otlp_proto_http"]),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ["otlp_proto_grpc"]),
        ({"OTEL_TRACES_EXPORTER": "console,otlp"}, ["console", "otlp_proto_http"]),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, []),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, []),
    ],
)
def test_exporters_are_configured_by_the_standards_variables(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], asked: list[str]
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert tracing.configured() == asked


def test_an_exporter_that_is_not_installed_is_named_and_requests_are_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "carrier-pigeon")
    with caplog.at_level(logging.WARNING, logger=tracing.__name__):
        assert tracing.tracing() is None
    assert "'carrier-pigeon'" in caplog.text
    assert "penstock[otel]" in caplog.text


def test_durations_are_read_in_any_form_that_an_endpoint_of_the_user_may_give_them():
    from penstock.serve.gateway.telemetry.spans import durations

    said = b'db;desc="x";dur=53;other=1,cache; dur=2.5, miss, attempts;desc="2", bad;dur=soon, total;dur=123'
    assert list(durations(said)) == [("db", 0.053), ("cache", 0.0025), ("total", 0.123)]
