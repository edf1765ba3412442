"""What batch adds to an engine's config and adapters, and what of it identifies the engine's answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.config.schema.sections import TASKS
from penstock.data.rows.request import Kind
from penstock.layers.adapters import AdapterDownloader

if TYPE_CHECKING:
    from penstock.config import LLMConfig
    from penstock.config.schema.sections import LoraConfig

_USAGE_DETAILS = "enable_prompt_tokens_details"
_WITH_USAGE_DETAILS = ("vllm", "sim")  # engines that have this argument

_ADAPTERS = {"dynamic_lora_loading_path", "adapters"}
_HOOKS = ("preprocessor", "preprocessor_options", "postprocessor", "postprocessor_options")
_SLASH = "--"
"""In place of an id's slash: an adapter's name is that of a folder."""

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
    """The config with the vLLM arguments that run the model for this task, unless the user gives them.

    Without them vLLM runs a model that can generate as a generator only.
    """
    kwargs = config.engine_kwargs
    if config.engine_name != "vllm" or kind == "generate" or kwargs.keys() & {"runner", "convert"}:
        return config
    return config.model_copy(update={"engine_kwargs": {**TASKS[kind], **kwargs}})


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


def adapter_name(given: str, lora: LoraConfig) -> str:
    """The name of an adapter; `org--name` for the id `org/name` on the hub."""
    return given if downloader(lora) is None else given.replace("/", _SLASH)


def downloader(lora: LoraConfig) -> type[AdapterDownloader] | None:
    """Downloads adapters that rows name by their ids on the hub; None where the config names their sources.

    Only in batch, whose rows are the user's: clients of a service could make it download anything.
    """
    return None if lora.dynamic_lora_loading_path or lora.adapters else HubDownloader


class HubDownloader(AdapterDownloader):
    """Takes an adapter's name for its id on the hub."""

    def load_model_from_config(self, lora_model_id: str, llm_config: LLMConfig) -> Any:
        return super().load_model_from_config(lora_model_id, _with_source(lora_model_id, llm_config))

    def stamp(self, lora_model_id: str, llm_config: LLMConfig) -> str:
        return super().stamp(lora_model_id, _with_source(lora_model_id, llm_config))


def _with_source(lora_model_id: str, config: LLMConfig) -> LLMConfig:
    assert config.lora_config is not None
    name = lora_model_id.removeprefix(f"{config.model_id}:")
    adapters = {name: f"hf://{name.replace(_SLASH, '/', 1)}"}
    return config.model_copy(
        update={"lora_config": config.lora_config.model_copy(update={"adapters": adapters})}
    )
