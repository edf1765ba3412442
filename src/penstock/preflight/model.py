"""What a model's config.json says about its size, as far as the rules of vLLM 0.32 for it are known here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_MAMBA = ("mamba_n_groups", "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_d_conv")
_MAMBA2 = {
    "granitemoehybrid": _MAMBA,
    "falcon_h1": _MAMBA,
    "mamba2": ("n_groups", "num_heads", "head_dim", "state_size", "conv_kernel"),
    "nemotron_h": ("n_groups", "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "conv_kernel"),
    "zamba2": ("mamba_ngroups", "n_mamba_heads", "mamba_headdim", "mamba_d_state", "mamba_d_conv"),
}
_MAMBA1 = {"jamba": ("mamba_d_state", "mamba_d_conv"), "mamba": ("state_size", "conv_kernel")}
_DELTA = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
_RECURRENT = {*_MAMBA2, *_MAMBA1, *_DELTA}
_MLA = {"deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "pangu_ultra_moe", "axk1"}
_ENCODERS = "bert roberta xlm-roberta modernbert distilbert nomic_bert new gte mpnet"
_PLAIN = (
    "llama llama4_text qwen2 qwen2_moe qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen3 qwen3_moe "
    "phi qwen3_vl_text qwen3_vl_moe_text mistral mixtral gemma gemma2 gemma3 gemma3_text cohere cohere2 "
    "phi3 gpt2 gpt_neox gptj gpt_oss opt bloom falcon starcoder2 olmo olmo2 olmo3 olmoe granite granitemoe "
    "exaone4 glm glm4 glm4_moe smollm3 stablelm ernie4_5 ernie4_5_moe seed_oss arcee internlm2 internlm3 "
    "minicpm nemotron"
)
"""Types whose layers keep what is said here, by a comparison with vLLM or by reading; as are those above."""

_POSITIONS = (
    "max_position_embeddings n_positions max_seq_len seq_length model_max_length max_target_positions "
    "max_sequence_length max_seq_length seq_len"
)
_SCALED_ALREADY = "su longrope llama3 yarn deepseek_yarn deepseek_llama_scaling"
_TYING = ("gemma", "cohere", "whisper", "gpt2", "falcon", "opt", "bloom")
"""Types whose input and output embeddings are one where config.json does not say."""

NO_LENGTH_KEY = "vLLM's default"
_DEFAULT_LENGTH = 2048


class NotKnown(ValueError):
    """What the rules here say nothing of, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class State:
    """Of a recurrent layer: `rows` of a convolution, and `recurrent` elements; on all GPUs together.

    groups of `group` further rows are copied where there are fewer groups than GPUs.
    """

    rows: int
    kernel: int
    recurrent: int
    group: int = 0
    groups: int = 0
    recurrent_dtype: str | None = None

    def rows_on(self, gpus: int) -> int:
        """Rows of the convolution on each of so many GPUs."""
        copied = gpus - self.groups if self.groups % gpus else 0
        return (self.rows + self.group * (self.groups + copied)) // gpus


@dataclass(frozen=True, slots=True)
class ModelLayer:
    """What a layer keeps: all tokens (`full`), the last `bound` (`window`, `chunk`), those of the encoder
    (`cross`), or a fixed amount (`state`). width: elements per token and KV head.
    """

    kind: Literal["full", "window", "chunk", "state", "cross"]
    heads: int = 0
    width: int = 0
    bound: int = 0
    state: State | None = None


@dataclass(frozen=True, slots=True)
class ModelSize:
    """dtype: as config.json says, None where it does not. max_length: in tokens, by the key `length_key`;
    usual_length: where none is asked for. inner: the widest that one token gets inside a layer, in elements.
    unknown: what is not known of it.
    """

    architecture: str
    model_type: str
    dtype: str | None
    layers: tuple[ModelLayer, ...]
    blocks: int
    heads: int
    kv_heads: int
    hidden: int
    inner: int
    vocab: int
    max_length: int
    length_key: str
    usual_length: int
    tied: bool
    pooling: bool
    quantisation: Mapping[str, Any]
    unknown: tuple[str, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any], *, pooling: bool | None = None) -> ModelSize:
        """Raises: NotKnown, and any error for a config.json that lacks what its type needs."""
        text = _text(config)
        architecture = str((config.get("architectures") or ["?"])[0])
        model_type = str(config.get("model_type") or text.get("model_type") or "?")
        heads = _first(text, "num_attention_heads", "n_head", "decoder_attention_heads", default=0)
        layers, unknown = _layers(text, str(text.get("model_type") or model_type), heads)
        length, key, usual = _length(text, model_type)
        hidden = _first(text, "hidden_size", "n_embd", "d_model")
        inner = _first(text, "intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", default=4 * hidden)
        chosen = _first(text, "num_experts_per_tok", "num_experts_per_token", "moe_topk", default=1)
        generates = architecture.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel"))
        either = {**text, **config}
        return cls(
            architecture,
            model_type,
            _dtype(config, text),
            tuple(layers),
            blocks=_first(text, "num_hidden_layers", "n_layer", "num_layers", "decoder_layers"),
            heads=heads,
            kv_heads=_kv_heads(text, heads),
            hidden=hidden,
            inner=max(inner, chosen * _first(text, "moe_intermediate_size", default=inner)),
            vocab=_first(text, "vocab_size", default=config.get("vocab_size") or 0),
            max_length=length,
            length_key=key,
            usual_length=usual,
            tied=bool(either.get("tie_word_embeddings", model_type.startswith(_TYING))),
            pooling=not generates if pooling is None else pooling,
            quantisation=either.get("quantization_config") or either.get("compression_config") or {},
            unknown=tuple(unknown),
        )

    @property
    def state(self) -> State | None:
        """That of its recurrent layers."""
        return next((layer.state for layer in self.layers if layer.state), None)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part about the language model."""
    if isinstance(inner := config.get("thinker_config"), Mapping):
        return _text(inner)
    parts = (config.get(name) for name in ("text_config", "llm_config", "language_config"))
    return next((part for part in parts if isinstance(part, Mapping) and part), config)


def _first(values: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    found = next((values[name] for name in names if values.get(name) is not None), default)
    if found is None:
        raise KeyError(names[0])
    if int(found) < 0:
        raise NotKnown(f"what a {names[0]} of {found} means")
    return int(found)


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str | None:
    parts = [config, text, config.get("vision_config") or {}]
    named = (part.get(name) for part in parts for name in ("dtype", "torch_dtype"))
    return next((str(one).removeprefix("torch.") for one in named if one), None)


def _kv_heads(text: Mapping[str, Any], heads: int) -> int:
    if text.get("model_type") == "falcon" and not text.get("new_decoder_architecture"):
        return 1 if text.get("multi_query", True) else heads
    chatglm, step = "multi_query_group_num", "num_attention_groups"
    return _first(text, "n_head_kv", "num_kv_heads", "num_key_value_heads", chatglm, step, default=heads)


def _length(text: Mapping[str, Any], model_type: str) -> tuple[int, str, int]:
    """The longest context in tokens, what says so, and the usual one."""
    given = [(int(text[name]), name) for name in _POSITIONS.split() if (text.get(name) or 0) > 0]
    length, key = min(given, default=(_DEFAULT_LENGTH, NO_LENGTH_KEY))
    scaling: Any = text.get("rope_parameters") or text.get("rope_scaling") or {}
    for one in [one for one in scaling.values() if isinstance(one, Mapping)] or [scaling]:
        kind = one.get("rope_type", one.get("type", "default"))
        if kind == "longrope":
            return length, key, _first(text, "original_max_position_embeddings", default=length)
        if kind not in _SCALED_ALREADY.split() and one.get("factor") and "gemma3" not in model_type:
            length, key = int(length * one["factor"]), f"{key} x rope's factor"
            break
    return length, key, length


def _layers(text: Mapping[str, Any], model_type: str, heads: int) -> tuple[list[ModelLayer], list[str]]:
    """What each layer keeps, and what is not known of it."""
    if model_type in _ENCODERS.split() or text.get("is_causal") is False:
        return [], []
    size = text.get("head_dim") or text.get("attention_head_dim")
    size = size or (_first(text, "hidden_size", "n_embd", "d_model") // heads if heads else 0)
    full = ModelLayer("full", _kv_heads(text, heads), 2 * size)
    if model_type == "whisper":
        return [full, ModelLayer("cross", full.heads, full.width)] * _first(text, "decoder_layers"), []
    if model_type in _MLA and text.get("kv_lora_rank"):
        full = ModelLayer("full", 1, text["kv_lora_rank"] + text["qk_rope_head_dim"])
    unknown: list[str] = []
    if model_type not in {*_PLAIN.split(), *_MLA, *_RECURRENT}:
        unknown.append(f"what a model of type {model_type!r} keeps per token; counted like that of others")
    kept: list[ModelLayer] = []
    for kind in _kinds(text, model_type)[: -(text.get("num_kv_shared_layers") or 0) or None]:
        if kind in ("full_attention", "attention", "both", "hybrid"):
            kept.append(full)
        elif kind == "sliding_attention":  # Cohere's windows look one token further back
            bound = text["sliding_window"] + (model_type == "cohere2")
            kept.append(ModelLayer("window", full.heads, full.width, bound))
        elif kind == "chunked_attention":
            kept.append(ModelLayer("chunk", full.heads, full.width, text["attention_chunk_size"]))
        elif kind not in ("mlp", "moe") and model_type not in _RECURRENT:
            unknown.append(f"what layers of kind {kind!r} keep; not counted")
        if kind in ("mamba", "linear_attention", "both", "hybrid") and model_type in _RECURRENT:
            kept.append(ModelLayer("state", state=_state(text, model_type)))
    return kept, list(dict.fromkeys(unknown))


def _kinds(text: Mapping[str, Any], model_type: str) -> list[str]:
    """The kind of each layer, in the words of `layer_types`; older files say it in other ways."""
    count = _first(text, "num_hidden_layers", "n_layer", "num_layers")
    slides, stays, recurs = "sliding_attention", "full_attention", "linear_attention"
    if model_type in ("falcon_h1", "mamba", "mamba2"):
        return ["both" if model_type == "falcon_h1" else "mamba"] * count
    if given := text.get("layer_types") or text.get("layers_block_type"):
        return list(given)
    if pattern := text.get("hybrid_override_pattern"):
        return [{"M": "mamba", "*": "attention"}.get(letter, "mlp") for letter in pattern]
    if period := text.get("attn_layer_period"):
        offset = text.get("attn_layer_offset", 0)
        return ["attention" if i % period == offset else "mamba" for i in range(count)]
    if model_type in _DELTA:
        return [recurs if (i + 1) % text.get("full_attention_interval", 4) else stays for i in range(count)]
    if text.get("attention_chunk_size") and (rotary := text.get("no_rope_layers")):
        return ["chunked_attention" if one else stays for one in rotary]
    if not text.get("sliding_window"):
        return [stays] * count
    every = text.get("sliding_window_pattern") or {"gemma3_text": 6, "cohere2": 4}.get(model_type)
    if isinstance(every, int):
        return [slides if (i + 1) % every else stays for i in range(count)]
    if model_type in ("gemma2", "gpt_oss"):
        return [stays if i % 2 else slides for i in range(count)]
    if model_type.startswith("qwen"):
        first = text.get("max_window_layers", 0) if text.get("use_sliding_window") else count
        return [slides if i >= first else stays for i in range(count)]
    return [slides] * count


def _state(text: Mapping[str, Any], model_type: str) -> State:
    dtype = text.get("mamba_ssm_dtype") or text.get("mamba_ssm_cache_dtype")
    if model_type in _MAMBA2:
        groups, heads, size, state, kernel = (int(text[name]) for name in _MAMBA2[model_type])
        dtype = dtype or ("float32" if model_type == "nemotron_h" else None)
        return State(heads * size, kernel, heads * size * state, 2 * state, groups, dtype)
    if model_type in _MAMBA1:
        state, kernel = (int(text[name]) for name in _MAMBA1[model_type])
        inner = text.get("mamba_expand", 0) * text["hidden_size"] or text["intermediate_size"]
        return State(inner, kernel, inner * state)
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
    kernel, recurrent = text["linear_conv_kernel_dim"], values * text["linear_key_head_dim"]
    return State(2 * keys + values, kernel, recurrent, recurrent_dtype=dtype)
