"""What batch adds to an engine's config, and which part of it identifies the engine's answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.data.rows.request import Kind

if TYPE_CHECKING:
    from penstock.config import LLMConfig

_TOLD = "enable_prompt_tokens_details"
_TELLING = ("vllm", "sim")  # engines that have that argument

_RUNNERS: Mapping[Kind, Mapping[str, str]] = {
    "generate": {},
    "embed": {"runner": "pooling", "convert": "embed"},
    "classify": {"runner": "pooling", "convert": "classify"},
    "score": {"runner": "pooling"},
}
"""vLLM's arguments; by itself it runs a model that can generate for that only."""

_ADAPTERS = {"dynamic_lora_loading_path", "adapters"}
_HOOKS = ("preprocessor", "preprocessor_options", "postprocessor", "postprocessor_options")
_SIZES = frozenset(
    {
        "block_size",
        "cpu_offload_gb",
        "data_parallel_size",
        "disable_log_stats",
        "distributed_executor_backend",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "max_num_batched_tokens",
        "max_num_seqs",
        "pipeline_parallel_size",
        "tensor_parallel_size",
    }
)
"""Engine arguments that say how fast an engine answers, not what."""


def with_usage_details(config: LLMConfig) -> LLMConfig:
    """The same config, with what batch wants to know of every answer, unless the user says otherwise."""
    if config.engine_name not in _TELLING:
        return config
    return config.model_copy(update={"engine_kwargs": {_TOLD: True, **config.engine_kwargs}})


def with_runner(config: LLMConfig, kind: Kind) -> LLMConfig:
    """The same config, so that vLLM runs the model for this task, unless the user says how."""
    kwargs = config.engine_kwargs
    if config.engine_name != "vllm" or kwargs.keys() & {"runner", "convert"}:
        return config
    return config.model_copy(update={"engine_kwargs": {**_RUNNERS[kind], **kwargs}})


def engine_identity(config: LLMConfig) -> dict[str, object]:
    """What of a config its answers depend on, as JSON can hold it: neither sizes nor places."""
    kwargs = config.engine_kwargs
    hooks = {name: getattr(config, name) for name in _HOOKS}
    return {
        "model": config.model_loading_config.model_dump(),
        "engine": config.engine_name,
        "adapters": config.lora_config and config.lora_config.model_dump(include=_ADAPTERS),
        "engine_kwargs": {name: str(value) for name, value in kwargs.items() if name not in _SIZES},
        **{name: str(getattr(hook, "__qualname__", hook)) for name, hook in hooks.items()},
    }
