"""Fields of KubeRay's RayService (ray.io/v1, KubeRay 1.5.1 and newer) that a manifest may use, closed.

Written from KubeRay's API reference; no registry has its CRD. Pod templates are Kubernetes' own and checked
by its schema. `KUBERAY_CRD=.../ray.io_rayservices.yaml` has the tests use the CRD itself, too.
"""

from __future__ import annotations

from typing import Any


def _closed(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": properties,
    }


_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_COUNT = {"type": "integer", "minimum": 0}
_TEMPLATE = {"type": "object"}

_AUTOSCALER = _closed(
    version={"enum": ["v1", "v2"]},
    idleTimeoutSeconds=_COUNT,
    upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
)
_HEAD = _closed(("rayStartParams", "template"), rayStartParams=_TEXTS, template=_TEMPLATE)
_WORKERS = _closed(
    ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
    groupName={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
    replicas=_COUNT,
    minReplicas=_COUNT,
    maxReplicas=_COUNT,
    rayStartParams=_TEXTS,
    template=_TEMPLATE,
)
_CLUSTER = _closed(
    ("headGroupSpec",),
    rayVersion={"type": "string"},
    authOptions=_closed(mode={"enum": ["disabled", "token"]}, secretName={"type": "string"}),
    gcsFaultToleranceOptions=_closed(
        ("redisAddress",),
        redisAddress={"type": "string"},
        redisPassword=_closed(("valueFrom",), valueFrom={"type": "object"}),
    ),
    enableInTreeAutoscaling={"type": "boolean"},
    autoscalerOptions=_AUTOSCALER,
    headGroupSpec=_HEAD,
    workerGroupSpecs={"type": "array", "items": _WORKERS},
)
RAY_SERVICE = _closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=_closed(("name",), name={"type": "string", "maxLength": 47}, labels=_TEXTS),
    spec=_closed(("rayClusterConfig",), serveConfigV2={"type": "string"}, rayClusterConfig=_CLUSTER),
)
