"""What every contestant is given alike: the engine's arguments, the environment, the request.

Nothing here is a contestant's own; `contestants.py` turns it into command lines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MODEL_ID = "bench"
EXECUTORS = ("mp", "uni")
"""vLLM's executors. "mp" puts the worker into a process of its own; Ray Serve LLM always takes it on CPU."""

PLACES, RANK, KV_BYTES = 4, 8, 32 << 20
"""Where adapters are measured: those in a replica at a time, their rank, and a cache that is soon full."""

DEVICE = "gpu" if os.environ.get("PENSTOCK_ACCELERATOR") == "gpu" else "cpu"
"""What contestants run on. On a GPU two of them, started side by side, fit on it."""

_ON_DEVICE: dict[str, Any] = {
    "cpu": {"enforce_eager": True, "kv_cache_memory_bytes": 256 * 2**20},
    "gpu": {"gpu_memory_utilization": 0.4, "kv_cache_memory_bytes": 8 * 2**30},
}

_ENGINE = {
    "max_model_len": 1024,
    # vLLM's defaults for these two depend on who starts it (server or library), so they are said.
    "max_num_seqs": 256,
    "max_num_batched_tokens": 4096,
    **_ON_DEVICE[DEVICE],
}

_CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else "mp" pins its worker to a core and "uni" does not
    "TORCH_COMPILE_DISABLE": "1",
}

_GPU_ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # it compiles itself at its first start

_ENVIRONMENT = {
    **(_CPU_ENVIRONMENT if DEVICE == "cpu" else _GPU_ENVIRONMENT),
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_worker_niceness": "0",  # 15 by default, which costs 15-20 % of the tokens
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

_NOT_INHERITED = ("RAY_", "VLLM_", "OMP_", "PENSTOCK_", "PYTHONDONTWRITEBYTECODE")
"""Prefixes: what a shell happens to have set must not favour anyone, nor make processes compile for 20 s."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One model under one executor, and what each request asks of it."""

    model: Path
    executor: str
    tokens: int = 64
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def engine_kwargs(self) -> dict[str, Any]:
        """Arguments of the engine by vLLM's names; `more` are of one measurement alone."""
        return {**_ENGINE, "distributed_executor_backend": self.executor, **self.more}

    def engine_flags(self) -> list[str]:
        """The same for a command line."""
        flags: list[str] = []
        for name, value in self.engine_kwargs().items():
            flag = "--" + name.replace("_", "-")
            flags += [flag] if value is True else [flag, str(value)]
        return flags

    def environment(self, folder: Path) -> dict[str, str]:
        """Environment of a contestant whose Ray, if it has one, keeps its files in `folder`."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_INHERITED)}
        # On CPU "uni" stays "uni" only with 0. The engine core has a process of its own either way.
        multiprocessing = "0" if self.executor == "uni" else "1"
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": multiprocessing, "RAY_TMPDIR": str(folder)}
        return inherited | _ENVIRONMENT | own

    def body(self, *, stream: bool = True) -> dict[str, Any]:
        """A chat request that always takes `tokens` tokens."""
        return {
            "model": MODEL_ID,
            "messages": [{"role": "user", "content": "def foo(x):"}],
            "max_tokens": self.tokens,
            "stream": stream,
            "ignore_eos": True,
            "temperature": 0.8,
        }

    def describe(self) -> Mapping[str, Any]:
        """For the record of a run."""
        return {
            "model": str(self.model.name),
            "engine_kwargs": self.engine_kwargs(),
            "environment": _ENVIRONMENT,
            "body": json.loads(json.dumps(self.body())),
        }
