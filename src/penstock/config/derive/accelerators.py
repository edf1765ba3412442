"""CPU or GPU: what a config runs on, and whether a cluster has what it asks for.

Nodes are given as Ray's resource mappings (`{"CPU": 8.0, "GPU": 1.0, "accelerator_type:L4": 1.0}`);
this file asks neither Ray nor a driver.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.config.messages.problems import nearest
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

    PENSTOCK_ACCELERATOR=cpu; accelerator_config.kind; the simulator (cpu); PENSTOCK_ACCELERATOR=gpu;
    accelerator_type (gpu); GPUs in ray_actor_options or placement_group_config; whether `nodes` have a GPU;
    without `nodes`, whether this machine has one.
    """
    setting = Settings.read().accelerator
    if setting == "cpu":
        return "cpu"
    if config.accelerator_config is not None and config.accelerator_config.kind is not None:
        return config.accelerator_config.kind
    if config.engine_name == "sim":
        return "cpu"
    if setting == "gpu" or config.accelerator_type is not None:
        return "gpu"
    named = _names_gpus(config)
    if named is not None:
        return "gpu" if named else "cpu"
    return "gpu" if _gpu_present(nodes) else "cpu"


def _names_gpus(config: LLMConfig) -> bool | None:
    """Whether the config names GPUs as a resource; None when it names no resources."""
    actor: Mapping[str, Any] = config.deployment_config.get("ray_actor_options") or {}
    if actor.get("num_gpus"):
        return True
    group = config.placement_group_config
    if group is None:
        return None
    return any(bundle.get("GPU", 0) > 0 for bundle in group.bundles or [group.bundle_per_worker or {}])


def _gpu_present(nodes: Nodes | None) -> bool:
    if nodes is not None:
        return any(node.get("GPU", 0) > 0 for node in nodes)
    return _any_device(_DEVICES)


def _any_device(patterns: Sequence[str]) -> bool:
    return any(next(Path("/dev").glob(pattern), None) is not None for pattern in patterns)


def check_accelerator(config: LLMConfig, nodes: Nodes) -> str | None:
    """A sentence when no node has the `accelerator_type` of `config`, or no GPU where it needs one."""
    if accelerator_kind(config, nodes) == "cpu":
        return None
    if not _gpu_present(nodes):
        return _missing(config, "a GPU", nodes)
    wanted = config.accelerator_type
    if wanted is None or any(node.get(TYPE_PREFIX + wanted, 0) > 0 for node in nodes):
        return None
    return _missing(config, repr(wanted), nodes)


def missing_here(config: LLMConfig) -> str | None:
    """A sentence when `config` needs a GPU and this machine, alone, has certainly none."""
    if accelerator_kind(config) == "cpu" or _any_device((*_DEVICES, *_OTHER_DEVICES)):
        return None
    return _missing(config, "a GPU", [{"CPU": os.cpu_count() or 1}])


def _missing(config: LLMConfig, what: str, nodes: Nodes) -> str:
    counts = {kind: int(sum(node.get(kind, 0) for node in nodes)) for kind in ("GPU", "CPU")}
    types = sorted(
        {name.removeprefix(TYPE_PREFIX) for node in nodes for name in node if name.startswith(TYPE_PREFIX)}
    )
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
