"""vLLM's "ray" executor for CPUs, where vLLM itself refuses it: a worker takes a resource of the tests' own.

The workers import this module, too, and with it the name of that resource.
"""

import ray
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

RESOURCE = "worker"
CpuPlatform.ray_device_key = RESOURCE


class CPUWorker(RayWorkerProc):
    """One of the two halves of the model."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        return ray.get_runtime_context().get_node_id(), [0]  # Ray numbers accelerators only


class CPUExecutor(RayExecutorV2):
    """Named in `engine_kwargs` as `spread_executor.CPUExecutor`."""

    def _init_executor(self) -> None:
        ray_executor_v2.RayWorkerProc = CPUWorker
        super()._init_executor()
