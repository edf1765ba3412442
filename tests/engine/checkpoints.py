"""Tiny checkpoints of many kinds of model, by the classes of Transformers: `python checkpoints.py FOLDER`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as tf

TEXT: dict[str, Any] = {
    "vocab_size": 1000,  # not a multiple of 64
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {**TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SMALL: dict[str, Any] = {"vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 3}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_n_groups": 1}
MLA: dict[str, Any] = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
}
DELTA: dict[str, Any] = {
    **EXPERTS,
    "head_dim": 32,
    "shared_expert_intermediate_size": 48,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
SPEECH: dict[str, Any] = {
    "vocab_size": 1000,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "num_mel_bins": 80,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
SEEN = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64}


def configs() -> Iterator[tuple[Any, Any]]:
    """Configs and classes; models of experts first, for vLLM makes their group with the first model."""
    yield tf.MixtralConfig(**TEXT, num_local_experts=4), tf.MixtralForCausalLM
    yield tf.DeepseekV3Config(**MLA), tf.DeepseekV3ForCausalLM
    yield tf.Qwen3MoeConfig(**EXPERTS, head_dim=32), tf.Qwen3MoeForCausalLM
    yield tf.Qwen3NextConfig(**DELTA), tf.Qwen3NextForCausalLM
    chunks = {
        "head_dim": 32,
        "intermediate_size_mlp": 112,
        "num_local_experts": 4,
        "attention_chunk_size": 64,
    }
    yield tf.Llama4TextConfig(**TEXT, **chunks), tf.Llama4ForCausalLM
    hybrid = {"attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 4, "mamba_d_state": 16}
    yield tf.JambaConfig(**TEXT, **hybrid), tf.JambaForCausalLM
    kinds = ["mamba", "mamba", "attention", "mamba"]
    granite = {"layer_types": kinds, "shared_intermediate_size": 96, "num_local_experts": 0, **MAMBA}
    yield tf.GraniteMoeHybridConfig(**TEXT, **granite), tf.GraniteMoeHybridForCausalLM
    yield tf.FalconH1Config(**TEXT, mamba_d_ssm=128, **MAMBA), tf.FalconH1ForCausalLM
    yield tf.MambaConfig(**SMALL, state_size=16), tf.MambaForCausalLM
    yield tf.Mamba2Config(**SMALL, state_size=16, num_heads=8, head_dim=16, n_groups=2), tf.Mamba2ForCausalLM
    yield tf.LlamaConfig(**TEXT), tf.LlamaForCausalLM
    yield tf.Qwen2Config(**TEXT, tie_word_embeddings=True), tf.Qwen2ForCausalLM
    yield tf.Qwen3Config(**TEXT, head_dim=32), tf.Qwen3ForCausalLM
    yield tf.MistralConfig(**TEXT, sliding_window=32), tf.MistralForCausalLM
    yield tf.Gemma2Config(**TEXT, head_dim=16, sliding_window=32), tf.Gemma2ForCausalLM
    seven = {**TEXT, "num_hidden_layers": 7}
    yield tf.Gemma3TextConfig(**seven, head_dim=32, sliding_window=32), tf.Gemma3ForCausalLM
    yield tf.Cohere2Config(**TEXT, head_dim=16, sliding_window=32), tf.Cohere2ForCausalLM
    yield tf.Phi3Config(**TEXT, sliding_window=None), tf.Phi3ForCausalLM
    yield tf.GPT2Config(vocab_size=1000, n_positions=256, n_embd=64, n_layer=3, n_head=4), tf.GPT2LMHeadModel
    sizes = {"ffn_dim": 128, "word_embed_proj_dim": 64, "num_attention_heads": 4}
    yield tf.OPTConfig(**SMALL, **sizes, max_position_embeddings=256), tf.OPTForCausalLM
    yield tf.WhisperConfig(**SPEECH), tf.WhisperForConditionalGeneration
    yield tf.BertConfig(**SMALL, num_attention_heads=4, intermediate_size=112), tf.BertModel
    tokens = {"image_token_id": 900, "video_token_id": 901, "vision_start_token_id": 902}
    sees = {"text_config": {**TEXT, "rope_parameters": ROPE}, "vision_config": SEEN, **tokens}
    yield tf.Qwen2_5_VLConfig(**sees, vision_end_token_id=903), tf.Qwen2_5_VLForConditionalGeneration


def main(base: Path) -> None:
    for config, made_by in configs():
        made_by(config).to(torch.bfloat16).save_pretrained(base / config.model_type)
        print(base / config.model_type)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
