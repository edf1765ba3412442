"""Does it fit: weights, reserve and KV cache on each GPU, and what would fit where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from penstock.preflight.cache import CachePool, pool
from penstock.preflight.devices import GIB, Devices
from penstock.preflight.model import DTYPE_BYTES, ModelSize
from penstock.preflight.sizes import Sizes
from penstock.preflight.weights import ModelWeights

_GRAPHS_BYTES, _DRIVER_BYTES, _LINKS_BYTES = GIB // 2, GIB // 3, GIB // 2
"""Estimates: of CUDA graphs, of the driver, and of NCCL where an engine has several GPUs."""

_STEP = 256
_QUANTISED = {"fp8": "--quantization fp8", "4 bits": "a checkpoint in 4 bits (AWQ, GPTQ)"}


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """Bytes on each GPU. context: tokens of a full request. ways: what helps where it lacks, and its result.

    Without `devices` only what does not depend on them is meant.
    """

    sizes: Sizes
    devices: Devices | None
    dtype: str
    context: int
    weights_bytes: int
    exact: bool
    adapters_bytes: int
    reserve_bytes: int
    pool: CachePool | None
    ways: tuple[tuple[str, str], ...] = ()

    @property
    def budget_bytes(self) -> int:
        share = 1 if self.sizes.kv_cache_memory_bytes else self.sizes.gpu_memory_utilization
        return int(self.devices.memory_bytes * share) if self.devices else 0

    @property
    def cache_bytes(self) -> int:
        """What is left for the KV cache; negative where the rest does not fit."""
        taken = self.weights_bytes + self.adapters_bytes + self.reserve_bytes
        return self.sizes.kv_cache_memory_bytes or self.budget_bytes - taken

    @property
    def request_bytes(self) -> int:
        return self.pool.request_bytes(self.context) if self.pool else 0

    @property
    def requests(self) -> float:
        """Full requests at once."""
        return self.pool.requests(max(0, self.cache_bytes), self.context) if self.pool else 0.0

    @property
    def tokens(self) -> int:
        """Of all full requests together."""
        return int(self.requests * self.context)

    @property
    def lacking_bytes(self) -> int:
        """For one full request."""
        return max(0, self.request_bytes - self.cache_bytes)

    @property
    def certain(self) -> bool:
        """It lacks, whatever the estimates are worth."""
        known = self.exact and not (self.sizes.offload_group_size or self.sizes.cpu_offload_gb)
        return known and self.weights_bytes + self.request_bytes > self.budget_bytes

    @property
    def full(self) -> str:
        """How many full requests fit, in words."""
        return f"{self.requests:,.1f} requests of {self.context:,} tokens" if self.pool else "it fits"

    def longest(self) -> int:
        """The longest context that fits, in round numbers."""
        longest = self.pool.longest(max(0, self.cache_bytes), self.context) if self.pool else 0
        return longest // _STEP * _STEP


def dtype_of(model: ModelSize, sizes: Sizes, devices: Devices | None) -> str:
    """What vLLM's `auto` comes to: float32 is halved, and what the GPU cannot compute is replaced."""
    if sizes.dtype != "auto":
        return {"half": "float16", "float": "float32"}.get(sizes.dtype, sizes.dtype)
    has_bfloat16 = devices is None or devices.has_bfloat16
    if model.dtype == "float16" or (model.dtype == "bfloat16" and has_bfloat16):
        return model.dtype
    no_float16 = model.model_type in ("gemma2", "gemma3", "gemma3_text", "glm4")
    return "float16" if (model.pooling or not has_bfloat16) and not no_float16 else "bfloat16"


def fit(model: ModelSize, weights: ModelWeights, sizes: Sizes, devices: Devices | None) -> MemoryFit:
    """How the model stands on these GPUs. Raises: NotKnown for a cache whose size is not known."""
    found = _measured(model, weights, sizes, devices)
    return (
        replace(found, ways=tuple(_ways(model, weights, found))) if devices and found.lacking_bytes else found
    )


def _measured(model: ModelSize, weights: ModelWeights, sizes: Sizes, devices: Devices | None) -> MemoryFit:
    dtype, tensor = dtype_of(model, sizes, devices), sizes.tensor_parallel_size
    tokens, seqs = _batch(sizes, devices)
    asked = sizes.quantization if not model.quantisation else None
    weights = weights.quantised(model, dtype, asked) if asked else weights
    experts = tensor * sizes.data_parallel_size if sizes.enable_expert_parallel else 1
    held = weights.on_one_gpu(model, dtype, tensor, sizes.pipeline_parallel_size, experts)
    slots = sizes.max_loras * sizes.max_lora_rank * sizes.enable_lora // sizes.gpus
    activations = tokens * (6 * model.hidden + 3 * model.inner // tensor) * DTYPE_BYTES[dtype]
    logits = min(seqs, tokens) * model.vocab * (DTYPE_BYTES[dtype] + 8)
    fixed = _DRIVER_BYTES + _GRAPHS_BYTES * (not sizes.enforce_eager) + _LINKS_BYTES * (sizes.gpus > 1)
    found = MemoryFit(
        sizes=sizes,
        devices=devices,
        dtype=dtype,
        context=model.usual_length if sizes.max_model_len in (None, -1) else sizes.max_model_len,
        weights_bytes=max(0, held - int(sizes.cpu_offload_gb * GIB)),
        exact=weights.exact and not model.unknown and sizes.pipeline_parallel_size == 1,
        adapters_bytes=weights.sides(model) * slots * DTYPE_BYTES[dtype],
        reserve_bytes=activations + logits + fixed,
        pool=pool(model, sizes, dtype, tokens),
    )
    return replace(found, context=found.longest() or 1) if sizes.max_model_len == -1 and devices else found


def _batch(sizes: Sizes, devices: Devices | None) -> tuple[int, int]:
    """Tokens and requests of one step: vLLM's defaults depend on the GPU."""
    gib = devices.memory_bytes / GIB if devices else 0
    large = gib >= 70 and devices is not None and "A100" not in devices.name
    tokens = 16384 if gib >= 160 else 8192 if large else 2048
    return sizes.max_num_batched_tokens or tokens, sizes.max_num_seqs or (1024 if large else 256)


def _ways(model: ModelSize, weights: ModelWeights, found: MemoryFit) -> Iterator[tuple[str, str]]:
    """Each change with which one full request fits, by measuring again."""

    def tried(**changes: Any) -> MemoryFit:
        return _measured(model, weights, replace(found.sizes, **changes), found.devices)

    splits = [
        n for n in (2, 4, 8, 16, 32, 64) if n > found.sizes.tensor_parallel_size and not model.heads % n
    ]
    changes: list[dict[str, Any]] = [{"tensor_parallel_size": n} for n in splits]
    changes = [one for one in changes if not tried(**one).lacking_bytes][:1]
    if longest := found.longest():
        changes.append({"max_model_len": longest})
    if found.sizes.kv_cache_dtype == "auto" and found.pool:
        smaller = tried(kv_cache_dtype="fp8")
        shorter = {"max_model_len": smaller.longest()} if smaller.lacking_bytes else {}
        if not shorter or smaller.longest() > longest:
            changes.append({"kv_cache_dtype": "fp8", **shorter})
    for change in changes:
        words = (f"--{name.replace('_', '-')} {value}" for name, value in change.items())
        yield " ".join(words), tried(**change).full
    for method, words in _QUANTISED.items() if not (model.quantisation or found.sizes.quantization) else ():
        other = tried(quantization=method)
        if not other.lacking_bytes:
            yield words, f"about {other.weights_bytes / GIB:.1f} GiB of weights, {other.full}"
