"""Bytes of KV cache per token and per request on one GPU, as vLLM 0.32 lays it out.

Layers that keep the same are groups. A block of the pool holds some tokens of one group, so all groups are
made equally large, and smaller pages are stretched or padded to the largest.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from penstock.preflight.model import DTYPE_BYTES, ModelLayer, ModelSize, NotKnown
from penstock.preflight.sizes import Sizes


@dataclass(frozen=True, slots=True)
class Group:
    """Layers with one table of blocks. A request has `fixed` ones, or those of its last `bound` tokens."""

    block: int = 1
    bound: float = math.inf
    extra: int = 0
    fixed: int = 0

    def blocks(self, tokens: int) -> int:
        """Blocks of one request with so many tokens."""
        return self.fixed or math.ceil(min(tokens, self.bound) / self.block) + self.extra


@dataclass(frozen=True, slots=True)
class CachePool:
    """token_bytes: of one more token while no window is full. state_bytes: of a request at any length."""

    block_bytes: int
    groups: tuple[Group, ...]
    token_bytes: int
    state_bytes: int

    def request_bytes(self, tokens: int) -> int:
        """Bytes of one request with so many tokens."""
        return self.block_bytes * sum(group.blocks(tokens) for group in self.groups)

    def requests(self, available_bytes: int, tokens: int) -> float:
        """How many requests of so many tokens fit at once."""
        return available_bytes // self.block_bytes * self.block_bytes / self.request_bytes(tokens)

    def longest(self, available_bytes: int, limit: int) -> int:
        """The longest request that fits, in tokens; 0 where none does."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.request_bytes(middle) <= available_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


def pool(model: ModelSize, sizes: Sizes, dtype: str, batched: int) -> CachePool | None:
    """None where no layer keeps anything. batched: tokens of a step.

    Raises: NotKnown for a cache whose size is not known.
    """
    layers = list(model.layers)
    if sizes.disable_hybrid_kv_cache_manager:
        layers = [replace(layer, kind="full", bound=0) if layer.bound else layer for layer in layers]
    if not layers:
        return None
    item, counts, stages = _item_bytes(model, sizes, dtype), Counter(layers), sizes.pipeline_parallel_size
    heads = {layer: max(1, layer.heads // sizes.tensor_parallel_size) for layer in counts}
    tokens = {layer: heads[layer] * layer.width * item for layer in counts if layer.state is None}
    states = {layer: _state_bytes(layer, sizes, dtype) for layer in counts if layer.state}
    block, page = sizes.block_size, max(states.values(), default=0)
    if tokens and states:  # a page of tokens must hold a state
        block *= math.ceil(page / (block * max(tokens.values())))
    page = max(page, *(block * size for size in tokens.values())) if tokens else page
    in_flight = batched * (1 + sizes.async_scheduling if stages == 1 else stages)

    def group(layer: ModelLayer) -> Group:
        if layer.state:  # with older states, at which another request may begin
            kept = 3 if layer.state.groups else 2
            return Group(fixed=kept if tokens and sizes.enable_prefix_caching else 1)
        fills = page % (tokens[layer] * block) == 0
        one = Group(page // tokens[layer] if fills else block)
        if layer.kind == "cross":
            return replace(one, fixed=math.ceil(batched / one.block))
        if layer.kind == "window":
            return replace(one, bound=layer.bound - 1 + in_flight, extra=1)
        return replace(one, bound=layer.bound + in_flight) if layer.kind == "chunk" else one

    least, most = min(counts.values()), max(counts.values())
    size = most if most < 1.5 * least else least
    groups = [group(layer) for layer, count in counts.items() for _ in range(math.ceil(count / size))]
    held = size * page
    if len({(layer.kind, layer.bound) for layer in layers}) == 1:  # one table for all, of whatever width
        groups, held = (
            [group(layers[0])],
            sum(block * tokens[one] if one in tokens else page for one in layers),
        )
    grown = sum(tokens[layer] for layer in layers if layer.kind not in ("cross", "state"))
    fixed = sum(states[layer] for layer in layers if layer in states)
    return CachePool(
        math.ceil(held / stages), tuple(groups), math.ceil(grown / stages), math.ceil(fixed / stages)
    )


def _item_bytes(model: ModelSize, sizes: Sizes, dtype: str) -> int:
    scheme: Any = model.quantisation.get("kv_cache_scheme") or {}
    kind = "fp8" if sizes.kv_cache_dtype == "auto" and scheme.get("num_bits") == 8 else sizes.kv_cache_dtype
    item = (
        1 if kind in ("fp8", "fp8_e4m3", "fp8_e5m2") else DTYPE_BYTES.get(dtype if kind == "auto" else kind)
    )
    if item is None:
        raise NotKnown(f"what a KV cache of {kind} takes")
    return item


def _state_bytes(layer: ModelLayer, sizes: Sizes, dtype: str) -> int:
    state, tensor = layer.state, sizes.tensor_parallel_size
    assert state is not None
    recurrent = (
        state.recurrent_dtype if sizes.mamba_ssm_cache_dtype == "auto" else sizes.mamba_ssm_cache_dtype
    )
    convolution = state.rows_on(tensor) * (state.kernel - 1) * DTYPE_BYTES[dtype]
    return convolution + state.recurrent // tensor * DTYPE_BYTES[recurrent or dtype]
