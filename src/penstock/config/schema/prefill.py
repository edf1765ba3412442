"""What users say about prefill by replicas of its own."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator

from penstock.config.schema.deployment import Environment, ReplicaDeployment
from penstock.config.schema.sections import AcceleratorConfig, EngineArguments, PlacementGroup
from penstock.config.schema.strict import RootConfig, optional, setting


class PrefillConfig(RootConfig):
    """Prefill by replicas of its own. Each field given here replaces the model's own."""

    min_prompt_tokens: int = setting(
        512,
        "Shorter prompts are computed where they are decoded: the transfer would cost more. "
        "Counted from the request's size, at four bytes a token.",
        ge=1,
    )
    engine_kwargs: EngineArguments = setting({}, "Arguments of the prefill engines, all of them.")
    accelerator_type: str | None = optional("Ray's name of the GPU type.", min_length=1)
    accelerator_config: AcceleratorConfig | None = optional("CPU or GPU.")
    deployment_config: ReplicaDeployment = setting(
        {}, "Options of Ray Serve's deployment, such as `num_replicas`."
    )
    placement_group_config: PlacementGroup | None = optional("Workers' resources.")
    runtime_env: Environment | None = optional("Ray's runtime environment of the replicas.")

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


OVERRIDES = tuple(name for name in PrefillConfig.model_fields if name != "min_prompt_tokens")
"""Fields that a model and its prefill replicas both have."""
