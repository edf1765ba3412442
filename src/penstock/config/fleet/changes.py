"""What a change of each field costs, as data, which the reference page of the configuration shows.

`docs/operate/fleet-file.md` says what each cost means. A test compares them with the versions of deployments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from penstock.config.derive.adapters import LIVE
from penstock.config.derive.serve_options import OF_GATEWAYS, OF_REPLICAS
from penstock.config.loading.versions import SHARED
from penstock.config.schema.gateway import GatewayConfig
from penstock.config.schema.model import LLMConfig

Cost = Literal["live", "scale", "jobs", "gateway", "roll", "new"]

MODEL: Mapping[str, Cost] = {
    **dict.fromkeys(LLMConfig.model_fields, "roll"),
    **dict.fromkeys((*OF_GATEWAYS, *SHARED), "live"),
    "deployment_config": "scale",
}
"""Fields of `LLMConfig`. Parts that cost something else are in `PARTS`."""

ADAPTERS = tuple(f"lora_config.{name}" for name in LIVE)

PARTS: Mapping[str, Cost] = {
    "model_loading_config.model_id": "new",
    "batch.max_queued_requests": "live",
    **dict.fromkeys(ADAPTERS, "live"),
    "experimental_configs.num_ingress_replicas": "gateway",
    "deployment_config.name": "new",
    "deployment_config.max_ongoing_requests": "live",
    "deployment_config.max_queued_requests": "live",
    "deployment_config.request_router_config": "live",
    **{f"deployment_config.{name}": "roll" for name in OF_REPLICAS},
    "deployment_config.placement_group_bundle_label_selector": "roll",
}

GATEWAY: Mapping[str, Cost] = {
    **dict.fromkeys(GatewayConfig.model_fields, "live"),
    **dict.fromkeys(("host", "port", "tls", "processes", "api_key", "admin_key"), "gateway"),
    "log_format": "roll",
}
"""Fields of `GatewayConfig`."""

SERVING: Mapping[str, Cost] = dict.fromkeys(
    ("ingress_deployment_config", "jobs", "ingress_cls_config"), "gateway"
)
"""The other fields of `LLMServingArgs`."""

IN_PLACE: Mapping[str, Cost] = {
    "processes": "scale",
    "experimental_configs.num_ingress_replicas": "scale",
    "jobs": "jobs",
}
"""What those of `gateway` cost while gateways have the same version; others are `live` then."""


_COUNTS = {"deployment_config.num_replicas", "deployment_config.autoscaling_config"}
_ROUTING = ("routing_policy", "routing_config", "log_engine_metrics")


def cost_of(path: str, *, decodes: bool = False, autoscales: bool = False) -> Cost:
    """Of a field of a model, such as `aliases` or `deployment_config.num_replicas`.

    decodes: whether the model has prefill replicas. Its own ones are then gateways to these, and what a
    gateway reads restarts them. autoscales: whether autoscaling begins or ends.
    """
    field = path.partition(".")[0]
    cost = PARTS.get(path, MODEL[field])
    if autoscales and path in _COUNTS:
        return "roll"
    if decodes and cost != "new" and path != "deployment_config.num_replicas":
        return "roll" if field in (*_ROUTING, "deployment_config") else cost
    return cost
