"""What Kubernetes sets in every pod of a namespace for a Service."""

from __future__ import annotations


def service_variables(prefix: str) -> dict[str, str]:
    """Of one with two ports. prefix: the Service's name, with capital letters and underscores."""
    port = f"{prefix}_PORT_8000_TCP"
    return {
        f"{prefix}_SERVICE_HOST": "10.0.0.1",
        f"{prefix}_SERVICE_PORT": "8000",
        f"{prefix}_SERVICE_PORT_HTTP": "8000",
        f"{prefix}_SERVICE_PORT_HTTP_METRICS": "8001",
        f"{prefix}_PORT": "tcp://10.0.0.1:8000",
        port: "tcp://10.0.0.1:8000",
        f"{port}_PROTO": "tcp",
        f"{port}_PORT": "8000",
        f"{port}_ADDR": "10.0.0.1",
    }


SERVICE_VARIABLES = service_variables("PENSTOCK") | service_variables("RAY") | service_variables("VLLM")
"""Services of the names that someone gives them: `penstock`, `ray` and `vllm`."""
