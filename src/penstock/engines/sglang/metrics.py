"""SGLang's /metrics as a fleet reads it: with the model's own name, and vLLM's names beside SGLang's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_COUNTERS = {
    "sglang:prompt_tokens_total": ("vllm:prompt_tokens_total", "vllm:prefix_cache_queries_total"),
    "sglang:cached_tokens_total": ("vllm:prefix_cache_hits_total",),
    "sglang:generation_tokens_total": ("vllm:generation_tokens_total",),
    "sglang:num_requests_total": ("vllm:request_success_total",),
}
"""SGLang looks up every token of a prompt in its prefix cache."""


def exposition(text: str, childs: str, ours: str, gauges: Mapping[str, float]) -> str:
    """Prometheus text. gauges: by vLLM's names, as the scheduler has them now; SGLang's own lag by steps."""
    label = f'model_name="{_escaped(ours)}"'
    text = text.replace(f'model_name="{_escaped(childs)}"', label)
    return text.rstrip("\n") + "\n" + "\n".join([*_lines(text, label, gauges), ""])


def _lines(text: str, label: str, gauges: Mapping[str, float]) -> Iterator[str]:
    for name, value in gauges.items():
        yield f"# TYPE {name} gauge"
        yield f"{name}{{{label}}} {value}"
    for theirs, names in _COUNTERS.items():
        found = re.findall(rf"^{theirs}(?:\{{.*\}})? (\S+)", text, re.MULTILINE)
        for name in names:
            yield f"# TYPE {name} counter"
            yield f"{name}{{{label}}} {sum(float(value) for value in found)}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"")
