"""Contestants that are Ray Serve applications.

    python -m benchmarks.serve_apps ray-llm|ray-llm-adapters|penstock PORT MODEL EXECUTOR

The same Ray and the same Serve around either. Ends on SIGTERM. Imports Ray's LLM package, as the peer alone.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import serve

from benchmarks.workload import DEVICE, KV_BYTES, MODEL_ID, PLACES, RANK, Workload


def ray_serve_llm(workload: Workload) -> serve.Application:
    """Ray Serve LLM as its documents set it up on CPU; without engine metrics, to its advantage."""
    from ray.serve.llm import LLMConfig, build_openai_app

    config = LLMConfig.model_validate(
        {
            **_model(workload),
            "placement_group_config": {"bundles": [{"CPU": 1}]},
            "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
            "log_engine_metrics": False,
        }
    )
    return build_openai_app({"llm_configs": [config]})


def ray_serve_llm_adapters(workload: Workload) -> serve.Application:
    """The same with adapters from `s3://adapters`; what Penstock derives for the engine is said."""
    from ray.serve.llm import LLMConfig, build_openai_app

    config = _model(workload)
    room = {"enable_lora": True, "max_loras": PLACES + 2, "max_cpu_loras": PLACES + 2, "max_lora_rank": RANK}
    config["engine_kwargs"] |= {**room, "kv_cache_memory_bytes": KV_BYTES}
    lora = {"dynamic_lora_loading_path": "s3://adapters", "max_num_adapters_per_replica": PLACES}
    rest = {
        "placement_group_config": {"bundles": [{"CPU": 1}]},
        "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
        "log_engine_metrics": False,
    }
    app_config = LLMConfig.model_validate({**config, **rest, "lora_config": lora})
    return build_openai_app({"llm_configs": [app_config]})


def penstock(workload: Workload) -> serve.Application:
    """Penstock behind Serve's own HTTP."""
    from penstock.serve import build_openai_app

    return build_openai_app({"llm_configs": [_model(workload)]})


def _model(workload: Workload) -> dict[str, Any]:
    """What an `LLMConfig` of either side says alike."""
    return {
        "model_loading_config": {"model_id": MODEL_ID, "model_source": str(workload.model)},
        "accelerator_type": None,
        "accelerator_config": {"kind": DEVICE},
        "engine_kwargs": workload.engine_kwargs(),
    }


APPS: dict[str, Callable[[Workload], Any]] = {
    "ray-llm": ray_serve_llm,
    "ray-llm-adapters": ray_serve_llm_adapters,
    "penstock": penstock,
}


def main() -> None:
    """Serves until SIGTERM."""
    name, port, model, executor = sys.argv[1:]
    stopped = threading.Event()

    def stop(signum: int, frame: object) -> None:
        stopped.set()

    try:
        # Logical CPUs: Ray counts what is asked for, and the machine's real cores stay shared.
        ray.init(
            "local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20
        )
        serve.start(
            http_options={"host": "127.0.0.1", "port": int(port)}, logging_config={"enable_access_log": False}
        )
        serve.run(APPS[name](Workload(Path(model), executor)), blocking=False)
        for signum in (signal.SIGTERM, signal.SIGINT):  # now, for Ray sets its own
            signal.signal(signum, stop)
        stopped.wait()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
