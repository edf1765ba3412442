"""`engine_kwargs` of an `llm_engine: sglang` model as the command line of SGLang's server.

They are SGLang's own server arguments under their own names (`mem_fraction_static`, `tp_size`), and a few of
ours. SGLang itself validates them, within seconds of its start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, model_validator

from penstock.config.derive.accelerators import accelerator_kind
from penstock.config.schema.strict import StrictModel, optional, setting

if TYPE_CHECKING:
    from penstock.config import LLMConfig

_MAX_RANK = 32  # as for vLLM
_ON_CPU = {"device": "cpu", "sleep_on_idle": True}
"""Without the second one its scheduler keeps a core busy while idle."""

_OURS = {
    "model_path": "model_loading_config.model_source",
    "model": "model_loading_config.model_source",
    "tokenizer_path": "model_loading_config.tokenizer_source",
    "served_model_name": "model_loading_config.model_id",
}
_REFUSED = frozenset(
    {"admin_api_key", "api_key", "config", "encoder_only", "fastapi_root_path", "grpc_mode", "host", "port"}
    | {"smg_grpc_mode", "ssl_certfile", "ssl_keyfile", "incremental_streaming_output", "tokenizer_worker_num"}
)
"""Set by Penstock, since the server and its replica depend on them; not for users."""

_NEEDS_VLLM = {
    "nnodes": "an engine on several nodes",
    "node_rank": "an engine on several nodes",
    "dist_init_addr": "an engine on several nodes",
    "disaggregation_mode": "prefill on other replicas",
}
"""What replicas that know nothing of each other cannot do."""

_NEGATED = frozenset(
    {"dcp_replicate_q_proj", "dllm_fdfo", "enable_decoder_swa_bounded_replay", "enable_dsa_fused_indexer"}
    | {"enable_fused_qk_norm_rope", "enable_tf32_matmul", "enable_tp_lm_head_all_to_all"}
    | {"experts_shared_outer_loras", "lora_strict_loading", "mm_enable_dp_encoder", "ple_offload_embedding"}
    | {"speculative_enable_w4a4_mxfp4_megamoe"}
)
"""Arguments passed as `--no-NAME` for `false`; for all others `false` is the default and is not passed."""


class SGLangOptions(StrictModel):
    """Our own options among them; all other names are SGLang's server arguments."""

    model_config = ConfigDict(extra="allow")

    python: str | None = optional(
        "The interpreter of the environment that SGLang is installed in; Penstock's by default.", min_length=1
    )
    environment: dict[str, str] = setting({}, "Variables for its process, beside those of the replica.")
    allowed_media_domains: list[str] = setting(
        [], "Hosts from which it may fetch what requests name by URL, or `*`."
    )

    @model_validator(mode="before")
    @classmethod
    def _not_ours(cls, given: Any) -> Any:
        for name, value in given.items() if isinstance(given, Mapping) else ():
            if name in _OURS:
                raise ValueError(f"{name} is said in {_OURS[name]}.")
            if name in _REFUSED:
                raise ValueError(f"{name} is Penstock's to choose.")
            if name in _NEEDS_VLLM and value not in (None, "null", 0, 1):
                raise ValueError(f"{name}: {_NEEDS_VLLM[name]} needs the engine 'vllm', not 'sglang'.")
        return given

    def arguments(self) -> Mapping[str, Any]:
        """Those that are SGLang's."""
        return self.__pydantic_extra__ or {}


def as_process(config: LLMConfig, options: SGLangOptions) -> LLMConfig:
    """The same model as `llm_engine: process`: SGLang's server as its command."""
    on_cpu = accelerator_kind(config) == "cpu"
    name = config.model_id.replace(":", "-")  # there, a colon is the mark of an adapter
    tokenizer = config.model_loading_config.tokenizer_source
    arguments = {
        "log_level_http": "warning",
        "load_snapshot_publish_interval": 1,  # steps; by default its load is reported 15 steps late
        **(_ON_CPU if on_cpu else {}),
        **(_room(config.lora_config.max_num_adapters_per_replica) if config.lora_config else {}),
        **options.arguments(),
        "model_path": "{model}",
        "tokenizer_path": tokenizer,
        "served_model_name": name,
        "host": "{host}",
        "port": "{port}",
        "api_key": "{api_key}",
        "enable_cache_report": True,
        "enable_metrics": True,
        "incremental_streaming_output": True,
    }
    process = {
        "command": [options.python or "{python}", "-m", "sglang.launch_server", *flags(arguments)],
        "environment": {**({"SGLANG_USE_CPU_ENGINE": "1"} if on_cpu else {}), **options.environment},
        "ready_path": "/ready",
        "allowed_media_domains": options.allowed_media_domains,
        "served_model_name": name,
    }
    return config.model_copy(update={"llm_engine": "process", "engine_kwargs": process})


def _room(adapters: int) -> Mapping[str, Any]:
    """Slots for this many adapters, and one being replaced while requests still use it."""
    return {
        "enable_lora": True,
        "max_loras_per_batch": adapters + 1,
        "max_loaded_loras": adapters + 1,
        "max_lora_rank": _MAX_RANK,
        "lora_target_modules": ["all"],
    }


def flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    """SGLang's command line for these server arguments."""
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        match value:
            case None:
                continue
            case True:
                yield flag
            case False:
                if name in _NEGATED:
                    yield f"--no-{name.replace('_', '-')}"
            case list() if all(isinstance(one, str | int | float) for one in value):
                yield flag
                yield from (str(one) for one in value)
            case dict() | list():
                yield f"{flag}={json.dumps(value)}"
            case _:
                yield f"{flag}={value}"
