"""Prefill by replicas of its own: the two configs that follow from what users say.

The model itself is the half that clients reach and that decodes. Both halves load the same weights; the KV
cache of a long prompt goes from one to the other by a connector of the engine's.
"""

from __future__ import annotations

from typing import Any

from penstock.config.derive.serve_options import deployment_name
from penstock.config.schema.model import LLMConfig
from penstock.config.schema.prefill import OVERRIDES

KV_TRANSFER = "kv_transfer_config"

CONNECTOR: dict[str, Any] = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    # vLLM's "fail" would end requests whose prefill replica dies while its cache is read.
    "kv_load_failure_policy": "recompute",
}
"""Where the user names no `kv_transfer_config` of their own."""


def halves(config: LLMConfig) -> tuple[LLMConfig, ...]:
    """The config of each deployment: the model's, or that of decode and that of prefill."""
    half = prefill_half(config)
    return (config,) if half is None else (with_connector(config), half)


def prefill_half(config: LLMConfig) -> LLMConfig | None:
    """The config of its prefill replicas; None without."""
    given = config.prefill
    if given is None:
        return None
    own = {name: getattr(given, name) for name in OVERRIDES if name in given.model_fields_set}
    return with_connector(config.model_copy(update={**own, "prefill": None}))


def prefill_name(model_id: str) -> str:
    """The name of the prefill half, as Serve and gateways know it beside the model's own."""
    return deployment_name(model_id, "Prefill:")


def to_check(config: LLMConfig) -> tuple[LLMConfig, ...]:
    """The config, and the prefill half where it has engine arguments of its own: what users wrote."""
    given = config.prefill
    if given is None or "engine_kwargs" not in given.model_fields_set:
        return (config,)
    where = given.location if str(given.location) else config.location / "prefill"
    return config, config.model_copy(update={"engine_kwargs": given.engine_kwargs}).at(where)


def with_connector(config: LLMConfig) -> LLMConfig:
    """The same with a KV connector, if it names none."""
    arguments = {KV_TRANSFER: CONNECTOR, **config.engine_kwargs}
    return config.model_copy(update={"engine_kwargs": arguments})
