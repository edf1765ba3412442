"""Values of one pod: the head, which holds the cluster's own state, or a worker, which holds replicas."""

from __future__ import annotations

import json
from typing import Any

from penstock.kuberay.options import Site
from penstock.kuberay.template import part
from penstock.kuberay.worker_groups import WorkerGroup

DATA = "/data"
"""Where the volume is mounted."""

_HEAD_CPUS, _HEAD_MEMORY = 2, "8Gi"
_CPUS_BESIDE = 1  # of a worker pod: its gateway, and Ray's own processes
_GIB = 1 << 30
_MEMORY_BESIDE_GIB, _MEMORY_OF_GPU_GIB = 8, 24  # a worker's without --memory: weights pass through it


def head(site: Site, **shared: Any) -> dict[str, Any]:
    """The head's pod. shared: values of all pods: `image`, `env`, `port`."""
    return _pod(site, "head", cpus=_HEAD_CPUS, memory=_HEAD_MEMORY, **shared)


def workers(site: Site, group: WorkerGroup, **shared: Any) -> dict[str, Any]:
    """An entry of KubeRay's `workerGroupSpecs`. shared: as for `head`."""
    selector = site.labels(group.accelerator_type) if group.gpus else {}
    brings = (
        {f"accelerator_type:{group.accelerator_type}": 1} if group.accelerator_type and selector else None
    )
    reserved = max(-(-group.memory // _GIB), _MEMORY_OF_GPU_GIB * group.gpus)
    pod = _pod(
        site,
        "worker",
        cpus=group.cpus + _CPUS_BESIDE,
        memory=site.memory or f"{_MEMORY_BESIDE_GIB + reserved}Gi",
        gpus=group.gpus,
        selector=selector,
        **shared,
    )
    return part(
        "workers",
        group=group.name,
        least=group.least,
        most=group.most,
        ray_cpus=str(group.cpus),
        ray_gpus=str(group.gpus),
        brings=json.dumps(json.dumps(brings)) if brings else None,
        template=pod,
    )


def _pod(
    site: Site,
    component: str,
    *,
    cpus: int,
    gpus: int = 0,
    selector: dict[str, str] | None = None,
    **values: Any,
) -> dict[str, Any]:
    return part(
        "pod",
        name=site.name,
        component=component,
        is_head=component == "head",
        readiness=part(f"{component}_readiness", port=values["port"]),
        cpus=str(cpus),
        gpus=str(gpus) if gpus else None,
        selector=selector or None,
        storage=site.volume,
        own_folder=None if site.volume else {},
        **values,
    )
