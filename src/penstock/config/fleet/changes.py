"""What a change of each field costs, as data, which the reference page of the configuration shows.

`docs/operate/fleet-file.md` says what each cost means. A test compares them with the versions of deployments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from penstock.config.derive.adapters import LIVE

Cost = Literal["live", "scale", "jobs", "gateway", "roll", "new"]

MODEL: Mapping[str, Cost] = {
    "model_loading_config": "roll",
    "aliases": "live",
    "fallbacks": "live",
    "versions": "live",
    "sticky": "live",
    "canary": "live",
    "shadow": "live",
    "version": "live",
    "llm_engine": "roll",
    "engine_kwargs": "roll",
    "accelerator_type": "roll",
    "accelerator_config": "roll",
    "deployment_config": "scale",
    "routing_policy": "live",
    "routing_config": "live",
    "slo": "roll",
    "batch": "roll",
    "lora_config": "roll",
    "on_demand": "roll",
    "prefill": "roll",
    "placement_group_config": "roll",
    "runtime_env": "roll",
    "log_engine_metrics": "live",
    "server_cls": "roll",
    "preprocessor": "roll",
    "preprocessor_options": "roll",
    "postprocessor": "roll",
    "postprocessor_options": "roll",
    "callback_config": "roll",
    "experimental_configs": "roll",
    "engine_start_timeout_s": "roll",
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
    "deployment_config.ray_actor_options": "roll",
    "deployment_config.max_replicas_per_node": "roll",
    "deployment_config.gang_scheduling_config": "roll",
    "deployment_config.deployment_actors": "roll",
    "deployment_config.graceful_shutdown_timeout_s": "roll",
    "deployment_config.placement_group_bundle_label_selector": "roll",
}

GATEWAY: Mapping[str, Cost] = {
    "host": "gateway",
    "port": "gateway",
    "tls": "gateway",
    "cors": "live",
    "processes": "gateway",
    "api_key": "gateway",
    "admin_key": "gateway",
    "keys": "live",
    "keys_file": "live",
    "oidc": "live",
    "tenants": "live",
    "prices": "live",
    "webhook": "live",
    "isolate_cache": "live",
    "default_model": "live",
    "priority_tier": "live",
    "request_timeout_s": "live",
    "max_body_bytes": "live",
    "max_bodies_bytes": "live",
    "max_connections_per_address": "live",
    "wait_for_replica_s": "live",
    "log_format": "roll",
}
"""Fields of `GatewayConfig`."""

SERVING: Mapping[str, Cost] = {
    "ingress_deployment_config": "gateway",
    "jobs": "gateway",
    "ingress_cls_config": "gateway",
}
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
