"""Checkpoints without content: files of safetensors with a true header, and holes in place of the numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

_BYTES = {"BF16": 2, "F32": 4, "I32": 4, "F8_E4M3": 1}

Shapes = Mapping[str, tuple[int, ...]]


def write_safetensors(file: Path, tensors: Shapes, dtype: str = "BF16") -> None:
    at, header = 0, dict[str, Any]()
    for name, shape in tensors.items():
        size = _BYTES[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + at)


def write_llama(folder: Path, dtype: str = "BF16", **changes: Any) -> Path:
    """A checkpoint of Llama's form; by default of the size of Llama 3.1 8B."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    } | changes
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (hidden, hidden)),
        **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (keys, hidden)),
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, hidden)),
        "mlp.down_proj": (hidden, inner),
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,)),
    }
    tensors: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("model.embed_tokens.weight", "lm_head.weight"), (vocab, hidden)
    )
    tensors["model.norm.weight"] = (hidden,)
    for i in range(config["num_hidden_layers"]):
        tensors |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    write_safetensors(folder / "model.safetensors", tensors, dtype)
    return folder
