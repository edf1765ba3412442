"""What of a model's `lora_config` its replicas take over while they run.

Control is given it, and passes it on; the version of the model's deployment leaves it out.
"""

from __future__ import annotations

from typing import Any

from penstock.config.messages.redact import masked
from penstock.config.schema.model import LLMConfig
from penstock.config.schema.sections import LoraConfig

LIVE = tuple(name for name in LoraConfig.model_fields if name != "max_num_adapters_per_replica")
"""These fields of it. The other one says how much memory an engine takes."""


def live_adapters(config: LLMConfig) -> dict[str, Any] | None:
    """The fields as plain values. None for a model without adapters, and where a source contains a login or a
    signature: they are passed on where Ray Serve shows them.
    """
    lora = config.lora_config
    if lora is None:
        return None
    sources = [lora.dynamic_lora_loading_path, *lora.adapters.values()]
    return lora.model_dump(include=set(LIVE)) if masked(sources) == sources else None


def without_live_adapters(config: LLMConfig) -> LLMConfig:
    """The same config for all replicas that differ in these fields only."""
    if config.lora_config is None or live_adapters(config) is None:
        return config
    lora = LoraConfig(max_num_adapters_per_replica=config.lora_config.max_num_adapters_per_replica)
    return config.model_copy(update={"lora_config": lora})
