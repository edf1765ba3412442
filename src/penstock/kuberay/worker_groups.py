"""From configs to groups of equal pods: how large one is, and how many there are.

A replica gets a pod of its own, or several where its engine spans nodes. Replicas that take a part of a GPU
share pods, all of one GPU type, as models that take turns on one GPU must.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.config import LLMConfig
from penstock.config.derive.placement import Bundle, add
from penstock.config.derive.prefill import halves
from penstock.config.derive.serve_options import replica_range, reserved
from penstock.config.schema.processing import own_deployment

_SPREAD = ("SPREAD", "STRICT_SPREAD")
_LONGEST = 40  # characters of a group's name: pods are named after it


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Pods of one shape. cpus, gpus: of one pod. least, most: pods. memory: bytes that replicas reserve."""

    name: str
    cpus: int
    gpus: int
    least: int
    most: int
    accelerator_type: str | None = None
    memory: int = 0


@dataclass(frozen=True, slots=True)
class _Replicas:
    """One deployment: what each replica needs in each pod that it takes, and how many replicas there are."""

    name: str
    pods: Sequence[Bundle]
    least: int
    most: int
    accelerator_type: str | None = None


def worker_groups(configs: Sequence[LLMConfig], gpus_per_node: int) -> list[WorkerGroup]:
    """All workers of `configs`, on nodes of so many GPUs.

    Raises: ConfigError when a placement cannot work.
    """
    deployed = [each for config in configs for each in _deployments(config, gpus_per_node)]
    parts = [each for each in deployed if 0 < each.pods[0].get("GPU", 0) < 1]
    whole = [_group(each) for each in deployed if each not in parts]
    types = dict.fromkeys(each.accelerator_type for each in parts)
    shared = [_shared([each for each in parts if each.accelerator_type == kind], kind) for kind in types]
    return list(_renamed([*whole, *shared]))


def _deployments(config: LLMConfig, gpus_per_node: int) -> Iterator[_Replicas]:
    nodes = [{"GPU": gpus_per_node}]
    for suffix, half in zip(("", "-prefill"), halves(config), strict=False):
        options = half.get_serve_options(nodes=nodes)
        pods = _packed(reserved(options), options.get("placement_group_strategy", "PACK"), gpus_per_node)
        _refuse_larger(half, pods, gpus_per_node)
        yield _Replicas(config.model_id + suffix, pods, *replica_range(options), half.accelerator_type)
    if (options := own_deployment(config.preprocessor_options)) is not None:
        yield _Replicas(f"{config.model_id}-preprocessor", reserved(options), *replica_range(options))


def _packed(bundles: Sequence[Bundle], strategy: str, gpus_per_node: int) -> list[Bundle]:
    """Bundles of one replica, as pods: as many in each as its node has GPUs for, or one."""
    pods: list[Bundle] = []
    for bundle in bundles:
        joined = add(pods[-1], bundle) if pods else bundle
        if not pods or strategy in _SPREAD or joined.get("GPU", 0) > gpus_per_node:
            pods.append(dict(bundle))
        else:
            pods[-1] = joined
    return pods


def _refuse_larger(config: LLMConfig, pods: Iterable[Bundle], gpus_per_node: int) -> None:
    gpus = max(pod.get("GPU", 0) for pod in pods)
    if gpus > gpus_per_node:
        raise config.location.fault(
            f"needs {gpus:g} GPUs of one node, and nodes have {gpus_per_node} (--gpus-per-node). Set "
            "engine_kwargs.distributed_executor_backend to 'ray' to let it span nodes."
        )


def _group(each: _Replicas) -> WorkerGroup:
    number = len(each.pods)
    cpus, gpus, memory = (max(pod.get(kind, 0) for pod in each.pods) for kind in ("CPU", "GPU", "memory"))
    return WorkerGroup(
        each.name,
        max(1, math.ceil(cpus)),
        math.ceil(gpus),
        each.least * number,
        each.most * number,
        each.accelerator_type,
        int(memory),
    )


def _shared(parts: Sequence[_Replicas], kind: str | None) -> WorkerGroup:
    """Pods of one GPU for replicas that take a part of one."""
    least = _filled([each.pods[0] for each in parts for _ in range(each.least)])
    most = _filled([each.pods[0] for each in parts for _ in range(each.most)])
    cpus, memory = (max(pod.get(name, 0) for pod in most) for name in ("CPU", "memory"))
    name = parts[0].name if len(parts) == 1 else f"shared-{kind or 'gpu'}"
    return WorkerGroup(name, max(1, math.ceil(cpus)), 1, len(least), len(most), kind, int(memory))


def _filled(bundles: Sequence[Bundle]) -> list[Bundle]:
    """Pods of one GPU: the largest part first, each in the first pod that has room."""
    pods: list[Bundle] = []
    for bundle in sorted(bundles, key=lambda each: -each["GPU"]):
        room = next((i for i, pod in enumerate(pods) if pod["GPU"] + bundle["GPU"] <= 1 + 1e-9), None)
        if room is None:
            pods.append(dict(bundle))
        else:
            pods[room] = add(pods[room], bundle)
    return pods


def _renamed(groups: Sequence[WorkerGroup]) -> Iterator[WorkerGroup]:
    """The same with names that Kubernetes takes, all different."""
    seen: dict[str, int] = {}
    for group in groups:
        name = re.sub(r"[^a-z0-9]+", "-", group.name.lower()).strip("-")[:_LONGEST].strip("-") or "model"
        seen[name] = seen.get(name, 0) + 1
        number = f"-{seen[name]}" if seen[name] > 1 else ""
        yield replace(group, name=name + number)
