"""LoRA slots: engine arguments that follow from `lora_config`, and user arguments that contradict it.

Imports nothing of vLLM: configs are checked where it is not installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.config import LLMConfig

_MAX_RANK = 32
"""Most adapters have 8 to 32. Each slot costs memory by it, full or not: 0.2 GB for a model of 8 B."""


def arguments(given: Mapping[str, Any], adapters: int, cpu: bool) -> dict[str, Any]:
    """vLLM's arguments for this many adapters at a time; the user's own win."""
    in_batch = slots(adapters, cpu) if cpu else adapters
    in_memory = max(slots(adapters, cpu), given.get("max_loras") or in_batch)
    return {
        "enable_lora": True,
        "max_loras": min(in_batch, given.get("max_cpu_loras") or in_batch),
        "max_cpu_loras": in_memory,
        "max_lora_rank": _MAX_RANK,
    }


def raised(given: Mapping[str, Any], adapters: int, cpu: bool) -> dict[str, int]:
    """The user's own sizes, raised where a CPU needs more: configs for a GPU run there, too."""
    least = slots(adapters, cpu)
    sizes = {name: given.get(name) for name in ("max_loras", "max_cpu_loras") if cpu}
    return {name: least for name, size in sizes.items() if isinstance(size, int) and size < least}


def slots(adapters: int, cpu: bool) -> int:
    """Slots that the engine needs: the adapters, and one being replaced while requests still use it.

    On CPU one more that stays empty: in a batch with adapters vLLM 0.32 gives requests for the base model
    what is in the last slot. Remove when a later version does not.
    """
    return adapters + 1 + cpu


def faults(config: LLMConfig) -> list[str]:
    """What in `engine_kwargs` contradicts `lora_config`, each with its place."""
    if config.lora_config is None:
        return []
    kwargs, location, found = config.engine_kwargs, config.location / "engine_kwargs", list[str]()
    if kwargs.get("enable_lora") is False:
        where = location / "enable_lora"
        found.append(where.says("is false, but lora_config asks for adapters; leave out one of them."))
    adapters = config.lora_config.max_num_adapters_per_replica
    least, size = slots(adapters, cpu=False), kwargs.get("max_cpu_loras")
    if isinstance(size, int) and size < least:
        why = f"lora_config.max_num_adapters_per_replica ({adapters}) needs at least {least}"
        text = f"is {size}, but {why}: one to replace another. Leave it out, or lower the other."
        found.append((location / "max_cpu_loras").says(text))
    return found
