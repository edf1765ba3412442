"""The engine's arguments that decide what fits, under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

_TEXTS = ("kv_cache_dtype", "dtype", "mamba_ssm_cache_dtype", "quantization")


@dataclass(frozen=True, slots=True)
class Sizes:
    """max_model_len: None for the model's own, -1 for what fits."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_dtype: str = "auto"
    kv_cache_memory_bytes: int | None = None
    dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    quantization: str | None = None
    block_size: int = 16
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_loras: int = 1
    max_lora_rank: int = 16
    enable_lora: bool = False
    enforce_eager: bool = False
    async_scheduling: bool = True
    enable_prefix_caching: bool = True
    enable_expert_parallel: bool = False
    disable_hybrid_kv_cache_manager: bool = False
    cpu_offload_gb: float = 0
    offload_group_size: int = 0

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Those among the engine's arguments, but for values of another type, which the engine refuses."""
        given = ((name, arguments[name]) for name in cls.__slots__ if arguments.get(name) is not None)
        return cls(**{name: value for name, value in given if isinstance(value, str) == (name in _TEXTS)})

    @property
    def gpus(self) -> int:
        """GPUs of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
