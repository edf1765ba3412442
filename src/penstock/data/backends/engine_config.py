"""What batch adds to an engine's config, and which part of it identifies the engine's answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.data.rows.request import Kind

if TYPE_CHECKING:
    from penstock.config import LLMConfig

_USAGE_DETAILS = "enable_prompt_tokens_details"
_WITH_USAGE_DETAILS = ("vllm", "sim")  # engines that have this argument

_RUNNERS: Mapping[Kind, Mapping[str, str]] = {
    "generate": {},
    "embed": {"runner": "pooling", "convert": "embed"},
    "classify": {"runner": "pooling", "convert": "classify"},
    "score": {"runner": "pooling"},
}
"""vLLM arguments; without them it runs a model that can generate as a generator only."""

_ADAPTERS = {"dynamic_lora_loading_path", "adapters"}
_HOOKS = ("preprocessor", "preprocessor_options", "postprocessor", "postprocessor_options")
SPEED_ONLY = frozenset(
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
"""Engine arguments that change how fast an engine answers, not what."""


def with_usage_details(config: LLMConfig) -> LLMConfig:
    """The config with cached tokens in each response's usage, unless the user says otherwise."""
    if config.engine_name not in _WITH_USAGE_DETAILS:
        return config
    return config.model_copy(update={"engine_kwargs": {_USAGE_DETAILS: True, **config.engine_kwargs}})


def with_runner(config: LLMConfig, kind: Kind) -> LLMConfig:
    """The config with the vLLM arguments that run the model for this task, unless the user gives them."""
    kwargs = config.engine_kwargs
    if config.engine_name != "vllm" or kwargs.keys() & {"runner", "convert"}:
        return config
    return config.model_copy(update={"engine_kwargs": {**_RUNNERS[kind], **kwargs}})


def engine_identity(config: LLMConfig) -> dict[str, object]:
    """The part of a config that its answers depend on, as JSON values: no sizes and no placement."""
    kwargs = config.engine_kwargs
    hooks = {name: getattr(config, name) for name in _HOOKS}
    return {
        "model": config.model_loading_config.model_dump(),
        "engine": config.engine_name,
        "adapters": config.lora_config and config.lora_config.model_dump(include=_ADAPTERS),
        "engine_kwargs": {name: str(value) for name, value in kwargs.items() if name not in SPEED_ONLY},
        **{name: str(getattr(hook, "__qualname__", hook)) for name, hook in hooks.items()},
    }
