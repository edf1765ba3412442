"""Prefill by replicas of its own: what users say of them, and the two configs that follow from it.

The model itself is the half that clients reach and that decodes. Both halves load the same weights; the KV
cache of a long prompt goes from one to the other by a connector of the engine's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, field_validator

from penstock.config.derive.serve_options import deployment_name
from penstock.config.schema.deployment import DeploymentOptions, RuntimeEnv
from penstock.config.schema.root import Root
from penstock.config.schema.sections import AcceleratorConfig, EngineSizes, PlacementGroupConfig
from penstock.config.schema.strict import Shape

if TYPE_CHECKING:
    from penstock.config.schema.model import LLMConfig

KV_TRANSFER = "kv_transfer_config"

CONNECTOR: dict[str, Any] = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    # vLLM's "fail" would end requests whose prefill replica dies while its cache is read.
    "kv_load_failure_policy": "recompute",
}
"""Where the user names no `kv_transfer_config` of their own."""


class PrefillConfig(Root):
    """Prefill by replicas of its own. Each field given here stands in the place of the model's own."""

    min_prompt_tokens: int = Field(
        default=512,
        ge=1,
        description="Shorter prompts are computed where they are decoded: the transfer would cost more. "
        "Counted from the request's size, at four bytes a token.",
    )
    engine_kwargs: Annotated[dict[str, Any], Shape(EngineSizes)] = Field(
        default={}, description="Arguments of the prefill engines, all of them."
    )
    accelerator_type: str | None = Field(
        default=None, min_length=1, description="Ray's name of the GPU type."
    )
    accelerator_config: AcceleratorConfig | None = Field(default=None, description="CPU or GPU.")
    deployment_config: Annotated[dict[str, Any], Shape(DeploymentOptions)] = Field(
        default={}, description="Options of Ray Serve's deployment, such as `num_replicas`."
    )
    placement_group_config: PlacementGroupConfig | None = Field(
        default=None, description="Workers' resources."
    )
    runtime_env: Annotated[dict[str, Any], Shape(RuntimeEnv)] | None = Field(
        default=None, description="Ray's runtime environment of the replicas."
    )

    @field_validator("deployment_config")
    @classmethod
    def _never_none(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Nobody would start the first: requests do not wait for prefill replicas."""
        scaling: Any = options.get("autoscaling_config") or {}
        least = scaling.get("min_replicas") if isinstance(scaling, dict) else scaling.min_replicas
        if least == 0:
            raise ValueError(
                "autoscaling_config.min_replicas must be at least 1: no request waits for prefill."
            )
        return options

    @classmethod
    def of(cls, half: LLMConfig) -> Self:
        """Prefill by replicas of this config."""
        given = cls(**{name: getattr(half, name) for name in OVERRIDES})
        given._place = half.place
        return given


OVERRIDES = tuple(name for name in PrefillConfig.model_fields if name != "min_prompt_tokens")
"""Fields that a model and its prefill replicas both have."""


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
    where = given.place if str(given.place) else config.place / "prefill"
    return config, config.model_copy(update={"engine_kwargs": given.engine_kwargs}).at(where)


def with_connector(config: LLMConfig) -> LLMConfig:
    """The same with a KV connector, if it names none."""
    arguments = {KV_TRANSFER: CONNECTOR, **config.engine_kwargs}
    return config.model_copy(update={"engine_kwargs": arguments})
