"""One pod: the head, which holds the cluster's own state, or a worker, which holds replicas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.kuberay.options import Site
from penstock.kuberay.worker_groups import WorkerGroup

DATA = "/data"
"""Where the volume is mounted: `cache`, `huggingface` and `jobs` lie in it."""
USER = 10001
"""The images' own user."""

_VOLUME = "data"
_AGENT_PORT = 52365
_HEAD_PORTS = {"gcs": 6379, "dashboard": 8265, "metrics": 8080}
_HEAD_CPUS, _HEAD_MEMORY = 2, "8Gi"
_CPUS_BESIDE = 1  # of a worker pod: its gateway, and Ray's own processes
_GIB = 1 << 30
_MEMORY_BESIDE_GIB, _MEMORY_OF_GPU_GIB = 8, 24  # a worker's without --memory: weights pass through it
_STOP_S = 60  # open streams have 20 s, then Serve and Ray


def labels(site: Site, component: str) -> dict[str, str]:
    """Kubernetes' recommended ones but for `name`: KubeRay's Service of the head finds its pod by its own."""
    return {
        "app.kubernetes.io/part-of": "penstock",
        "app.kubernetes.io/instance": site.name,
        "app.kubernetes.io/component": component,
    }


def environment(
    site: Site, secrets: Sequence[Mapping[str, Any]], *, log_format: str = "text"
) -> list[dict[str, Any]]:
    """Variables of every pod."""
    values = {
        "PENSTOCK_CACHE": f"{DATA}/cache",
        "HF_HOME": f"{DATA}/huggingface",
        "RAY_worker_niceness": "0",  # Ray's own 15 costs an engine tokens where CPUs are full
        "RAY_USAGE_STATS_ENABLED": "0",
        "PENSTOCK_CLUSTER": "growing",  # KubeRay deploys before workers are there
    }
    if site.accelerator == "cpu":
        values["PENSTOCK_ACCELERATOR"] = "cpu"
    if log_format != "text":
        values["PENSTOCK_LOG_FORMAT"] = log_format
    return [*({"name": name, "value": value} for name, value in values.items()), *map(dict, secrets)]


def head(site: Site, image: str, variables: Sequence[Mapping[str, Any]], port: int) -> dict[str, Any]:
    """KubeRay's `headGroupSpec`. It runs no replica."""
    container = {
        "name": "ray-head",
        **_container(image, variables, {**_HEAD_PORTS, "serve": port}),
        "resources": _resources(_HEAD_CPUS, _HEAD_MEMORY, 0),
        # KubeRay itself asks the gateway of this pod, and deploys only when this pod is ready.
        "readinessProbe": _probe("/api/healthz", _AGENT_PORT, failures=10),
    }
    return {
        "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0", "num-gpus": "0"},
        "template": _template(site, "head", container),
    }


def workers(
    site: Site, group: WorkerGroup, image: str, variables: Sequence[Mapping[str, Any]], port: int
) -> dict[str, Any]:
    """An entry of KubeRay's `workerGroupSpecs`."""
    container = {
        "name": "ray-worker",
        **_container(image, variables, {"metrics": _HEAD_PORTS["metrics"], "serve": port}),
        "resources": _resources(group.cpus + _CPUS_BESIDE, site.memory or _memory(group), group.gpus),
        # A pod without a gateway gets no requests; its replicas do, from the gateways of other pods.
        "readinessProbe": _probe("/-/healthz", port, failures=1, period_s=1),
    }
    selector = site.node_selector(group.accelerator_type) if group.gpus else {}
    start = {"num-cpus": str(group.cpus), "num-gpus": str(group.gpus)}
    if group.accelerator_type and selector:  # so that the autoscaler knows what a new pod brings
        start["resources"] = json.dumps(json.dumps({f"accelerator_type:{group.accelerator_type}": 1}))
    return {
        "groupName": group.name,
        "replicas": group.least,
        "minReplicas": group.least,
        "maxReplicas": group.most,
        "rayStartParams": start,
        "template": _template(site, "worker", container, selector, gpus=group.gpus),
    }


def _container(
    image: str, variables: Sequence[Mapping[str, Any]], ports: Mapping[str, int]
) -> dict[str, Any]:
    return {
        "image": image,
        "env": list(map(dict, variables)),
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "volumeMounts": [{"name": _VOLUME, "mountPath": DATA}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "livenessProbe": _probe("/api/healthz", _AGENT_PORT, failures=120, delay_s=30),
    }


def _template(
    site: Site,
    component: str,
    container: Mapping[str, Any],
    selector: Mapping[str, str] | None = None,
    *,
    gpus: int = 0,
) -> dict[str, Any]:
    claim: dict[str, Any] = {"persistentVolumeClaim": {"claimName": site.claim}}
    spec: dict[str, Any] = {
        "containers": [dict(container)],
        "volumes": [{"name": _VOLUME, **(claim if site.storage else {"emptyDir": {}})}],
        # Else Kubernetes sets variables for each Service of the namespace, some of them of our prefix.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _STOP_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if selector:
        spec["nodeSelector"] = dict(selector)
    if gpus:
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return {"metadata": {"labels": labels(site, component)}, "spec": spec}


def _resources(cpus: int, memory: str, gpus: int) -> dict[str, Any]:
    """No limit of CPUs: it would stop an engine within each period that is used up."""
    of_gpus = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    return {
        "requests": {"cpu": str(cpus), "memory": memory, **of_gpus},
        "limits": {"memory": memory, **of_gpus},
    }


def _memory(group: WorkerGroup) -> str:
    reserved = -(-group.memory // _GIB)
    return f"{_MEMORY_BESIDE_GIB + max(reserved, _MEMORY_OF_GPU_GIB * group.gpus)}Gi"


def _probe(path: str, port: int, *, failures: int, delay_s: int = 10, period_s: int = 5) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": port},
        "initialDelaySeconds": delay_s,
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
