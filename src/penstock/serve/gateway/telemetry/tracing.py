"""Tracing is on when OpenTelemetry's own environment variables name an endpoint.

Read when the gateway starts. Without them nothing is imported or computed for it.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.serve.gateway.telemetry.spans import Tracing

log = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")  # the first one set counts


def tracing() -> Tracing | None:
    """Tracing to the configured exporters; None without one. Logs a missing package."""
    names = configured()
    if not names:
        return None
    try:
        from penstock.serve.gateway.telemetry.spans import Tracing

        return Tracing([_load(name) for name in names])
    except ImportError as error:
        log.warning(
            "Requests are not traced, although OTEL_* variables ask for it: %s. Install penstock[otel].",
            error,
        )
        return None


def configured() -> list[str]:
    """Names of exporters, as registered by packages.

    Source: OpenTelemetry's specification of environment variables, except that without an endpoint there is
    no default exporter.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return []
    default = "otlp" if any(os.environ.get(name) for name in _ENDPOINTS) else "none"
    asked = os.environ.get("OTEL_TRACES_EXPORTER") or default
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), "http/protobuf")
    otlp = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    names = [name.strip() for name in asked.split(",")]
    return [otlp if name == "otlp" else name for name in names if name != "none"]


def _load(name: str) -> Any:
    found = list(entry_points(group="opentelemetry_traces_exporter", name=name))
    if not found:
        raise ImportError(f"no installed package brings the trace exporter '{name}'")
    return found[0].load()()
