"""Bytes of the weights on one GPU, from the headers of safetensors files.

vLLM pads the vocabulary, loads floats in the model's dtype, leaves out what it does not run, and splits or
copies each tensor over the GPUs of a tensor parallel group. Its name says which of these applies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.engines.weights import Tensor
from penstock.preflight.model import DTYPE_BYTES, ModelSize

COMPARED = (
    "BertModel Cohere2ForCausalLM DeepseekV3ForCausalLM FalconH1ForCausalLM GPT2LMHeadModel "
    "Gemma2ForCausalLM Gemma3ForCausalLM GraniteMoeHybridForCausalLM JambaForCausalLM Llama4ForCausalLM "
    "LlamaForCausalLM Mamba2ForCausalLM MambaForCausalLM MistralForCausalLM MixtralForCausalLM "
    "OPTForCausalLM Phi3ForCausalLM Qwen2ForCausalLM Qwen2_5_VLForConditionalGeneration Qwen3ForCausalLM "
    "Qwen3MoeForCausalLM Qwen3NextForCausalLM WhisperForConditionalGeneration"
)
"""Architectures whose weights and cache a test compares with vLLM's."""

_FLOATS = ("F64", "F32", "F16", "BF16")
_PADDING = 64
"""vLLM rounds the vocabulary up to a multiple of it."""

_LEFT_OUT = re.compile(
    r"^pooler\.|(^|\.)(mtp\.|rotary_emb\.|position_ids$|masked_bias$|inv_freq$|attn\.bias$)"
)
_IN_FLOAT32 = re.compile(r"\.(A_log|e_score_correction_bias|expert_bias)$")
_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.")
_NOT_TEXT = re.compile(r"vis(ual|ion)|encoder\.")
_KEYS_AND_VALUES = re.compile(r"\.(k_proj|v_proj)\.(weight|bias)$")
_GROUPED = re.compile(r"\.(in_proj\.weight|conv1d\.(weight|bias))$")
_WHOLE = re.compile(  # the same on each GPU
    r"(?<!mamba\.)(?<!mixer\.)norm|ln_|\.(gate|router|shared_expert_gate|q_a_proj|kv_a_proj_with_mqa|conv1|conv2|"
    r"patch_embed\w*|embed_positions|wpe|class_embedding)(\.|$)|((o|down|out|c)_proj|fc2|output\.dense|attn\.proj|"
    r"mlp\.2|dense_4h_to_h)\.bias$",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """tensors: of all files; empty where only their size is known, total_bytes as loaded.

    exact: by rules that a test compares with vLLM.
    """

    tensors: Mapping[str, Tensor]
    total_bytes: int = 0
    exact: bool = False

    def on_one_gpu(
        self, model: ModelSize, dtype: str, tensor: int = 1, pipeline: int = 1, experts: int = 1
    ) -> int:
        """On the GPU that holds most. experts: GPUs that share whole experts, 1 where each is split."""
        if not self.tensors:
            return math.ceil(self.total_bytes / (tensor * pipeline))
        blocks = others = 0
        for name, one in self.tensors.items():
            held = _held_bytes(name, one, model, dtype, tensor, experts)
            blocks, others = (blocks + held, others) if _BLOCK.search(name) else (blocks, others + held)
        return math.ceil(blocks * math.ceil(model.blocks / pipeline) / model.blocks) + others

    def sides(self, model: ModelSize) -> int:
        """Of the matrices that an adapter may change: the sum of their rows and columns."""
        shapes = (one.shape for one in self.tensors.values() if len(one.shape) == 2)
        return sum(sum(shape) for shape in shapes if model.vocab not in shape)

    def quantised(self, model: ModelSize, dtype: str, method: str) -> ModelWeights:
        """Estimated: all but the embeddings in the bits that the method's name says, and scales."""
        part = 0.28 if "4" in method else 0.52 if "8" in method else 1
        whole = self.on_one_gpu(model, dtype)
        kept = sum(one.size_bytes for one in self.tensors.values() if model.vocab in one.shape)
        return ModelWeights({}, round(kept + (whole - kept) * part))


def _held_bytes(name: str, one: Tensor, model: ModelSize, dtype: str, tensor: int, experts: int) -> int:
    """Of one tensor on one GPU."""
    if _LEFT_OUT.search(name) or (model.tied and name.endswith(("lm_head.weight", "proj_out.weight"))):
        return 0
    block = _BLOCK.search(name)
    if block and int(block[1]) >= model.blocks and not _NOT_TEXT.search(name):
        return 0  # layers for speculative decoding, behind the model's own
    split = _split(name, one, model, tensor, experts)
    if model.quantisation or one.dtype not in _FLOATS:
        return math.ceil(one.size_bytes / split)
    items, rows = math.prod(one.shape), one.shape[0] if one.shape else 1
    if model.model_type == "whisper":  # pads no vocabulary, and gives each key a bias
        items += rows if name.endswith("k_proj.weight") else 0
    elif len(one.shape) == 2 and (rows == model.vocab or "token_type_embeddings" in name):
        items = math.ceil(rows / _PADDING) * _PADDING * one.shape[1]
    if ".qkv_proj." in name and tensor > model.kv_heads > 0:  # each GPU has a whole head of keys and values
        items = items * (model.heads // tensor + 2) // (model.heads + 2 * model.kv_heads)
    else:
        items = math.ceil(items / split)
    if model.state and split > 1 and _GROUPED.search(name):
        copied = model.state.rows_on(tensor) - model.state.rows_on(1) // tensor
        items += copied * math.prod(one.shape[1:])
    return items * (4 if _IN_FLOAT32.search(name) else DTYPE_BYTES[dtype])


def _split(name: str, one: Tensor, model: ModelSize, tensor: int, experts: int) -> int:
    """Over how many GPUs a tensor is split."""
    if ".experts." in name:
        return max(tensor, experts)
    if _WHOLE.search(name) or not one.shape or (model.model_type == "whisper" and "embed_tokens" in name):
        return 1
    return min(tensor, model.kv_heads or tensor) if _KEYS_AND_VALUES.search(name) else tensor
