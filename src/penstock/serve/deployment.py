"""Server classes, under the module path of `ray.serve.llm`. Our own path is `penstock.serve.deployments`."""

from __future__ import annotations

from typing import NoReturn

from penstock.serve.replica.server import LLMServer

__all__ = ["DPServer", "LLMServer"]

_PREFILL = (
    "penstock.serve has no {}: a prefill replica is an LLMServer, and its model's deployment holds both "
    "halves. Write build_pd_openai_app({{'prefill_config': ..., 'decode_config': ...}}), or "
    "LLMServer.as_deployment().bind(config) with `prefill` in the config."
)
_ELSEWHERE = {name: _PREFILL.format(name) for name in ("PDDecodeServer", "PDPrefillServer", "PDProxyServer")}


class DPServer(LLMServer):
    """`LLMServer` under the name for a model with `data_parallel_size`, which each of them can serve."""


def __getattr__(name: str) -> NoReturn:
    if name in _ELSEWHERE:
        raise ImportError(_ELSEWHERE[name])
    raise AttributeError(f"module 'penstock.serve.deployment' has no attribute '{name}'")
