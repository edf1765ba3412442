"""Reads a child's load from its /metrics, under the names of vLLM, SGLang and llama.cpp."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gauges:
    """Units: requests; kv_usage as a share from 0 to 1; kv_tokens and waiting_tokens in tokens, None and 0
    where they are not reported.
    """

    running: int
    waiting: int
    kv_usage: float = 0.0
    kv_tokens: int | None = None
    waiting_tokens: int = 0


def read(text: str) -> Gauges | None:
    """None when none of these names occur. Counts are summed over several samples of a gauge."""
    running = _values(_RUNNING, text)
    if not running:
        return None
    usage, tokens = _values(_USAGE, text), _values(_TOKENS, text)
    return Gauges(
        round(sum(running)),
        round(sum(_values(_WAITING, text))),
        min(1.0, max(usage, default=0.0)),
        round(sum(tokens)) if tokens else _in_blocks(text),
    )


def _gauge(*names: str) -> re.Pattern[str]:
    return re.compile(rf"^(?:{'|'.join(names)})(?:\{{.*\}})? ([\d.eE+-]+|NaN)(?: \d+)?$", re.MULTILINE)


_RUNNING = _gauge("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
_WAITING = _gauge("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
_USAGE = _gauge("vllm:kv_cache_usage_perc", "sglang:token_usage", "llamacpp:kv_cache_usage_ratio")
_TOKENS = _gauge("sglang:max_total_num_tokens")
_BLOCKS = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_LABEL = re.compile(r'(block_size|num_gpu_blocks)="(\d+)"')


def _values(pattern: re.Pattern[str], text: str) -> list[float]:
    return [number for value in pattern.findall(text) if math.isfinite(number := float(value))]


def _in_blocks(text: str) -> int | None:
    """vLLM reports its cache size as blocks, in labels."""
    found = [dict(_LABEL.findall(labels)) for labels in _BLOCKS.findall(text)]
    sizes = [int(one["block_size"]) * int(one["num_gpu_blocks"]) for one in found if len(one) == 2]
    return sum(sizes) or None
