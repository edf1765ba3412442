"""`penstock doctor`: the machine, what is installed and what runs on it, and what of it will be trouble.

Reads package metadata, /proc and nvidia-smi; imports no engine and prints no secret.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from penstock.cli.models.options import Json
from penstock.cli.version import show, versions

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED_BYTES, _LEAST_FILES, _LEAST_FREE_BYTES = 1 << 30, 4096, 20 * 10**9
_DRIVERS = {"12": 525, "13": 580}
"""The oldest NVIDIA driver that runs CUDA of each version (CUDA's release notes, table of minor versions)."""
_KEYS = ("PENSTOCK_API_KEY", "PENSTOCK_ADMIN_KEY", "VLLM_API_KEY", "HF_TOKEN", "RAY_ADDRESS")


def doctor(as_json: Json = False) -> int:
    """Look at this machine: versions, GPUs, memory, limits, services. Exits with 1 when something is wrong.

    What a bug report needs; whether a model fits is told by `penstock check`.
    """
    from penstock.cli.serve.started import running

    found = versions() | _machine() | {"services": [str(one) for one in running()]}
    wrong = list(troubles(found))
    if as_json:
        print(json.dumps({**found, "wrong": wrong}, indent=2))
        return int(bool(wrong))
    show(found)
    print("\n".join(f"\n{text}" for text in wrong or ["Nothing is wrong."]))
    return int(bool(wrong))


def _machine() -> dict[str, Any]:
    import psutil

    from penstock.config import Settings

    memory, cache = psutil.virtual_memory(), Settings.read().cache_folder()
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    there = next(path for path in (cache, *cache.parents) if path.exists())
    return {
        "cpus": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_bytes": memory.total,
        "memory_free_bytes": memory.available,
        "shared_memory_bytes": shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.is_dir() else 0,
        "open_files": f"{files} of {most}",
        "cache": str(cache),
        "disk_free_bytes": shutil.disk_usage(there).free,
        "set": [name for name in _KEYS if os.environ.get(name)],
    }


def troubles(found: dict[str, Any]) -> Iterator[str]:
    """Sentences about what keeps engines from starting or from running well, each with what to do."""
    gpus, cuda, vllm = found["gpus"], found["cuda"], found["vllm"]
    if sys.platform != "linux":
        yield f"Engines run on Linux, and this is {platform.system()}. Use a container or another machine."
    if not (vllm or found["sglang"]):
        yield "No engine is installed: pip install 'penstock[vllm]', or [cpu] where there is no GPU."
    if vllm and cuda and not gpus:
        yield (
            "vLLM's build for GPUs is installed, and nvidia-smi shows no GPU. Install the driver, give the "
            "container the GPUs (docker run --gpus all), or install 'penstock[cpu]'."
        )
    if vllm and gpus and not cuda:
        yield "There is a GPU, and vLLM's build for CPUs is installed: pip install 'penstock[vllm]'."
    least = _DRIVERS.get(str(cuda).partition(".")[0], 0)
    for driver in {gpu.rpartition(" ")[2] for gpu in gpus}:
        if driver.partition(".")[0].isdigit() and int(driver.partition(".")[0]) < least:
            yield f"The driver {driver} is too old for CUDA {cuda}: install {least} or newer."
    if (shared := found["shared_memory_bytes"]) < _LEAST_SHARED_BYTES:
        yield f"/dev/shm has only {decimal(shared)}; several GPUs need more: docker run --shm-size 8g."
    if int(found["open_files"].split()[0]) < _LEAST_FILES:
        yield f"This shell may open {found['open_files']} files; many clients need more: ulimit -n 65536."
    if (free := found["disk_free_bytes"]) < _LEAST_FREE_BYTES:
        yield (
            f"The disk of {found['cache']} has {decimal(free)} free, too little for most models. Free some "
            "(`penstock cache`), or set PENSTOCK_CACHE and HF_HOME to another disk."
        )
    yield from (f"Off, as it does not fit the installed vLLM: {text}." for text in found["vllm_off"])
