"""Default engine arguments where the user sets none, and why; LoRA slots follow from `lora_config`.

Imports nothing of vLLM: configs are checked where it is not installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil

from penstock.config.derive.accelerators import accelerator_kind
from penstock.config.derive.placement import gpu_share, workers

if TYPE_CHECKING:
    from penstock.config import LLMConfig

_MIB = 1 << 20

_TINY_BYTES = 64 * _MIB
"""Up to this size of the weights, a step computes for less time than its fixed costs take."""


_TINY_KV_BYTES = 256 * _MIB
"""Zero-filled at the start, 1.8 s per GiB."""

_STRUCTURES = {"backend": "xgrammar"}
"""vLLM's "auto" picks a library per request, but its core keeps the one that the first request picked: a
format checked for another one then fails in it, or is not enforced.
"""

_NO_DOMAIN = "none.invalid"
"""vLLM's own client would fetch from anywhere, unless a list of domains is given."""

_KV_SIZES = {"kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override"}
"""A user who sets one of these has chosen the size."""


_GPU_MEMORY = 0.92
"""The part of a GPU's memory that vLLM takes by default. Engines that share a GPU share it."""

_MAX_LORA_RANK = 32
"""Most adapters have 8 to 32. Each slot costs memory by it, full or not: 0.2 GB for a model of 8 B."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What our defaults depend on.

    tiny: the weights are a toy model's, such as Penstock's own. adapters: at a time, 0 for none.
    media_rules: whether our own rules decide which media may be fetched. gpu_share: as `gpu_share`.
    """

    cpu: bool
    tiny: bool
    workers: int
    adapters: int = 0
    media_rules: bool = True
    gpu_share: float = 1.0
    memory_share: float = 1.0

    @classmethod
    def of(cls, config: LLMConfig) -> Self:
        adapters = config.lora_config.max_num_adapters_per_replica if config.lora_config else 0
        share, sharing = gpu_share(config), config.on_demand
        return cls(
            accelerator_kind(config) == "cpu",
            _is_tiny(config.model_source),
            workers(config),
            adapters,
            gpu_share=share,
            memory_share=max(share, 1 / sharing.awake) if sharing else share,
        )


def _is_tiny(model_source: str) -> bool:
    files = [file for kind in ("*.safetensors", "*.bin") for file in Path(model_source).glob(kind)]
    return 0 < sum(file.stat().st_size for file in files) <= _TINY_BYTES


def with_defaults(given: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """The user's engine arguments and ours, under vLLM's names.

    The executor is always set: inside a placement group vLLM would choose "ray" and spread over its bundles.
    """
    defaults: dict[str, Any] = {"distributed_executor_backend": "uni" if shape.workers == 1 else "mp"}
    defaults["use_tqdm_on_load"] = False  # a log file is not a terminal
    structures: Any = given.get("structured_outputs_config", {})
    if isinstance(structures, Mapping):
        given = {**given, "structured_outputs_config": {**_STRUCTURES, **structures}}
    if shape.cpu and not given.keys() & _KV_SIZES:
        defaults["kv_cache_memory_bytes"] = _TINY_KV_BYTES if shape.tiny else _cpu_kv_bytes()
    if shape.memory_share < 1 and not given.keys() & _KV_SIZES:
        defaults["gpu_memory_utilization"] = _GPU_MEMORY * shape.memory_share
    if shape.cpu and shape.tiny:
        defaults["enforce_eager"] = True  # compiling takes longer than the model will ever run
        defaults["block_size"] = 32  # vLLM's 128 on CPU finds no shared prefix in short prompts
    if shape.cpu and given.get("pipeline_parallel_size", 1) > 1:
        defaults["worker_cls"] = "penstock.engines.vllm.core.cpu_workers.StageWorker"
    if shape.cpu and given.get("data_parallel_size", 1) > 1:
        defaults["worker_cls"] = "penstock.engines.vllm.core.cpu_workers.ExpertWorker"
    if not shape.media_rules:
        defaults["allowed_media_domains"] = [_NO_DOMAIN]
    if shape.adapters:
        given = {**given, **_raised(given, shape.adapters, shape.cpu)}
        defaults |= lora_arguments(given, shape.adapters, shape.cpu)
    return {**defaults, **given}


def _cpu_kv_bytes() -> int:
    """A quarter of the free memory, at most 4 GiB.

    vLLM would take 92 % of the machine's memory, and Ray kills workers at 95 %.
    """
    return min(4096 * _MIB, psutil.virtual_memory().available // 4)


def lora_arguments(given: Mapping[str, Any], adapters: int, cpu: bool) -> dict[str, Any]:
    """vLLM's arguments for this many adapters at a time; the user's own win."""
    in_batch = lora_slots(adapters, cpu) if cpu else adapters
    in_memory = max(lora_slots(adapters, cpu), given.get("max_loras") or in_batch)
    return {
        "enable_lora": True,
        "max_loras": min(in_batch, given.get("max_cpu_loras") or in_batch),
        "max_cpu_loras": in_memory,
        "max_lora_rank": _MAX_LORA_RANK,
    }


def _raised(given: Mapping[str, Any], adapters: int, cpu: bool) -> dict[str, int]:
    """The user's own sizes, raised where a CPU needs more: configs for a GPU run there, too."""
    least = lora_slots(adapters, cpu)
    sizes = {name: given.get(name) for name in ("max_loras", "max_cpu_loras") if cpu}
    return {name: least for name, size in sizes.items() if isinstance(size, int) and size < least}


def lora_slots(adapters: int, cpu: bool) -> int:
    """Slots that the engine needs: the adapters, and one being replaced while requests still use it.

    On CPU one more that stays empty: in a batch with adapters vLLM 0.32 gives requests for the base model
    what is in the last slot. Remove when a later version does not.
    """
    return adapters + 1 + cpu


def lora_faults(config: LLMConfig) -> list[str]:
    """What in `engine_kwargs` contradicts `lora_config`, each with its place."""
    if config.lora_config is None:
        return []
    kwargs, location, found = config.engine_kwargs, config.location / "engine_kwargs", list[str]()
    if kwargs.get("enable_lora") is False:
        where = location / "enable_lora"
        found.append(where.says("is false, but lora_config asks for adapters; leave out one of them."))
    adapters = config.lora_config.max_num_adapters_per_replica
    least, size = lora_slots(adapters, cpu=False), kwargs.get("max_cpu_loras")
    if isinstance(size, int) and size < least:
        why = f"lora_config.max_num_adapters_per_replica ({adapters}) needs at least {least}"
        text = f"is {size}, but {why}: one to replace another. Leave it out, or lower the other."
        found.append((location / "max_cpu_loras").says(text))
    return found
