"""What vLLM itself makes of checkpoints, for `test_preflight`: its parameters, and the layout of its cache.

    python planned.py RANK RANKS PORT AVAILABLE_BYTES KV_CACHE_DTYPE FOLDER...     # JSON for each folder

Builds each model by vLLM's own classes on the meta device, in a group of RANKS processes; reads no weights.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_DIST_IDENT": "planned", "OMP_NUM_THREADS": "1"}

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.core import kv_cache_utils


def main(rank: int, ranks: int, port: int, available_bytes: int, *words: str) -> None:
    kv_cache_dtype, *folders = words
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for folder in folders:
        (name,) = json.loads((Path(folder) / "config.json").read_text())["architectures"]
        if name in ModelRegistry.models:  # else vLLM asks a process of its own about each class
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            tensor_parallel_size=ranks,
            distributed_executor_backend="mp" if ranks > 1 else "uni",
            max_num_batched_tokens=512,
            kv_cache_dtype=kv_cache_dtype,
            mamba_ssm_cache_dtype="float32",
            enforce_eager=True,
        ).create_engine_config()
        with set_current_vllm_config(config):
            if folder == folders[0]:
                init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
                initialize_model_parallel(ranks, 1)
            print(
                json.dumps({"folder": folder, **measured(config, available_bytes)}), file=answer, flush=True
            )


def measured(config: VllmConfig, available_bytes: int) -> dict[str, Any]:
    with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
        model = initialize_model(config)
    current_platform.update_block_size_for_backend(config)
    layers = get_layers_from_vllm_config(config, AttentionLayerBase)  # type: ignore[type-abstract]
    found = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
    specs = {name: spec for name, spec in found.items() if spec is not None}
    layouts = get_supported_kv_cache_layouts(get_current_attn_backends(config))
    resolve_kv_cache_layout(config, [[layout.name for layout in layouts]], list(specs.values()))
    said = {
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "weights_bytes": sum(one.numel() * one.element_size() for one in model.parameters()),
        "context": config.model_config.max_model_len,
        "block": config.cache_config.block_size if config.model_config.use_mla else 128,
        "in_flight": config.max_in_flight_tokens,
        "prefix_caching": config.cache_config.enable_prefix_caching,
    }
    if groups := kv_cache_utils.get_kv_cache_groups(config, specs):
        cache = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, available_bytes)
        said["block_bytes"] = kv_cache_utils._pool_bytes_per_block(config, groups)
        said["request_bytes"] = kv_cache_utils._max_memory_usage_bytes_from_groups(config, groups)
        said["tokens"] = kv_cache_utils.get_kv_cache_capacity(config, cache)[0]
    return said


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]), *sys.argv[5:])
