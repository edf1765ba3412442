"""SGLang's /metrics as a fleet reads it: with the model's own name, and vLLM's names beside SGLang's."""

from __future__ import annotations

import re

from penstock.engines.process.gauges import Gauges
from penstock.engines.process.relay import ModelNames

_COUNTERS = {
    "vllm:prompt_tokens_total": "sglang:prompt_tokens_total",
    "vllm:prefix_cache_queries_total": "sglang:prompt_tokens_total",  # it looks up every token of a prompt
    "vllm:prefix_cache_hits_total": "sglang:cached_tokens_total",
    "vllm:generation_tokens_total": "sglang:generation_tokens_total",
    "vllm:request_success_total": "sglang:num_requests_total",
}


def exposition(text: str, names: ModelNames, seen: Gauges) -> str:
    """Prometheus text. seen: its schedulers' numbers now; those in `text` lag by some steps."""
    label = f'model_name="{_escaped(names.ours)}"'
    text = text.replace(f'model_name="{_escaped(names.childs)}"', label)
    values: dict[str, float] = {
        "vllm:num_requests_running": seen.running,
        "vllm:num_requests_waiting": seen.waiting,
        "vllm:kv_cache_usage_perc": seen.kv_usage,
    }
    for name, theirs in _COUNTERS.items():
        found = re.findall(rf"^{theirs}(?:\{{.*\}})? (\S+)", text, re.MULTILINE)
        values[name] = sum(float(value) for value in found)
    kinds = {name: "counter" if name in _COUNTERS else "gauge" for name in values}
    lines = [f"# TYPE {name} {kinds[name]}\n{name}{{{label}}} {value}" for name, value in values.items()]
    return "\n".join([text.rstrip("\n"), *lines, ""])


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"")
