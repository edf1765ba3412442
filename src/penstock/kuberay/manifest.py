"""All documents of one service: its volume, its fleet's file, its RayService, its PodDisruptionBudget.

Each pod that is always there runs a gateway on the port of KubeRay's Service, and Ray Serve's own proxy is
off: a token takes no hop more than with `penstock serve`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import yaml

from penstock.config import GatewayConfig, LLMConfig, LLMServingArgs, Settings
from penstock.config.derive.placement import resolved
from penstock.config.fleet.document import document, refuse_in_pods
from penstock.kuberay import secrets
from penstock.kuberay.options import CPU_IMAGE, GPU_IMAGE, Site
from penstock.kuberay.template import part
from penstock.kuberay.worker_groups import WorkerGroup, worker_groups

DEFAULT_PORT = 8000
_HEAD = "node:__internal_head__"  # Ray's resource of the head's node
_ON_HEAD = {"num_cpus": 0, "resources": {_HEAD: 0.001}}
_PATHS = ("/", "./", "../", "~")
_SOURCES = ("model_source", "tokenizer_source", "lora_config")  # or hub ids, or URLs
_DATA = "/data"  # where the volume is mounted
_FLEET = "/etc/penstock"  # where the fleet's file is, in the head's pod

_HEAD_CPUS, _HEAD_MEMORY = 2, "8Gi"
_CPUS_BESIDE = 1  # of a worker pod: its gateway, and Ray's own processes
_GIB = 1 << 30
_MEMORY_BESIDE_GIB, _MEMORY_OF_GPU_GIB = 8, 24  # a worker's without --memory: weights pass through it


def manifest(serving: LLMServingArgs, site: Site) -> str:
    """YAML of every document.

    serving: with `${NAME}` where a variable comes from a Secret, as `references_kept` leaves it.
    Raises: ConfigError for a secret in it, or what cannot be placed.
    """
    secrets.refuse_values(serving, site.secret)
    groups = worker_groups(serving.llm_configs, site.gpus_per_node)
    site.refuse_unused(group.accelerator_type for group in groups)
    service = _ray_service(serving, site, groups)
    name = f"fleet-{_digest(service['spec']['rayClusterConfig'])}.yaml"
    port = serving.gateway.port or DEFAULT_PORT
    service["spec"]["serveConfigV2"] = _yaml(_serve_config(f"{_FLEET}/{name}", port))
    file = _yaml(_fleet(serving, site, 1 + sum(group.least for group in groups)))
    documents = [part("fleet", name=site.name, component="fleet", files={name: file}), service]
    budget = partial(part, "disruption_budget", name=site.name)  # least: pods that must stay
    if site.volume:
        volume = {"storage": site.volume, "storage_class": site.storage_class}
        documents.insert(0, part("volume", name=site.name, component="data", **volume))
    if site.redis is None:  # else a head may be evicted: what runs goes on without it
        documents.append(budget(component="head", budget=f"{site.name}-head", least=1))
    if (base := sum(group.least for group in groups)) > 1:
        documents.append(budget(component="worker", budget=site.name, least=base - 1))
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)


def _ray_service(serving: LLMServingArgs, site: Site, groups: Sequence[WorkerGroup]) -> dict[str, Any]:
    port, log_format = serving.gateway.port or DEFAULT_PORT, serving.gateway.log_format
    environment = part(
        "environment",
        accelerator="cpu" if Settings.read().accelerator == "cpu" else None,
        log_format=log_format if log_format != "text" else None,
    )
    environment += secrets.variables_of_pods(
        secrets.referenced(serving.llm_configs), serving.gateway, site.secret
    )
    # Ray's nodes must have one Python and one Ray.
    image = site.image or (GPU_IMAGE if any(group.gpus for group in groups) else CPU_IMAGE)
    shared: dict[str, Any] = {"image": image, "env": environment, "port": port}
    return part(
        "service",
        name=site.name,
        component="service",
        serve_config="",  # names the file, whose name depends on the rest
        ray_version=site.ray_version or version("ray"),
        redis=site.redis,
        scales=any(group.most > group.least for group in groups) or None,
        head=_pod(site, "head", cpus=_HEAD_CPUS, memory=_HEAD_MEMORY, selector=None, **shared),
        workers=[_workers(site, group, shared) for group in groups],
    )


def _workers(site: Site, group: WorkerGroup, shared: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of KubeRay's `workerGroupSpecs`. shared: values of all pods: `image`, `env`, `port`."""
    kind = group.accelerator_type
    selector = (site.labels(kind) if group.gpus else {}) or None
    brings = json.dumps(json.dumps({f"accelerator_type:{kind}": 1})) if kind and selector else None
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
        brings=brings,
        template=pod,
    )


def _pod(site: Site, component: str, *, cpus: int, gpus: int = 0, **values: Any) -> dict[str, Any]:
    return part(
        "pod",
        name=site.name,
        component=component,
        is_head=component == "head",
        readiness=part(f"{component}_readiness", port=values["port"]),
        cpus=str(cpus),
        gpus=str(gpus) if gpus else None,
        storage=site.volume,
        own_folder=None if site.volume else {},
        **values,
    )


def _serve_config(file: str, port: int) -> dict[str, Any]:
    """The only application that KubeRay knows: see `penstock.serve.fleet_file`."""
    application = {
        "name": "fleet-file",
        "route_prefix": None,
        "import_path": "penstock.serve.fleet_file:build_fleet_file",
        "args": {"file": file, "gateway": {"host": "0.0.0.0", "port": port}},
        "deployments": [{"name": "FleetFile", "ray_actor_options": _ON_HEAD}],
    }
    return {"proxy_location": "Disabled", "applications": [application]}


def _digest(cluster: dict[str, Any]) -> str:
    """Of the pods. Where they change, KubeRay may start a second cluster: the file then has another name, so
    that the first one does not follow what is meant for other pods.
    """
    return hashlib.sha256(json.dumps(cluster, sort_keys=True).encode()).hexdigest()[:8]


def _fleet(serving: LLMServingArgs, site: Site, gateways: int) -> dict[str, Any]:
    args = {
        **document(serving),
        "llm_configs": [document(_model(config, site.gpus_per_node)) for config in serving.llm_configs],
        "gateway": _gateway(serving.gateway),
        "ingress_deployment_config": {**_on_each_pod(gateways), **serving.ingress_deployment_config},
    }
    if not args["gateway"]:
        args.pop("gateway")
    if serving.jobs is None:
        args["jobs"] = "off"
    return args


def _on_each_pod(gateways: int) -> dict[str, Any]:
    if gateways == 1:
        return {"num_replicas": 1, "ray_actor_options": _ON_HEAD}
    # With one on each node none has room for a successor beside it: they are replaced one after the other.
    return {"num_replicas": gateways, "max_replicas_per_node": 1, "max_surge_percent": 0}


def _gateway(gateway: GatewayConfig) -> dict[str, Any]:
    data = document(gateway)
    refuse_in_pods(data)
    for name in ("host", "port"):  # the pods' own
        data.pop(name, None)
    if gateway.log_format == "text":  # what it is anyway
        data.pop("log_format", None)
    return data


def _model(config: LLMConfig, gpus_per_node: int) -> LLMConfig:
    """With what depends on the nodes written down: KubeRay deploys before there are workers to look at."""
    nodes = [{"GPU": gpus_per_node}]
    half = config.prefill
    if half is not None and "engine_kwargs" in half.model_fields_set:
        alone = resolved(config.model_copy(update={"engine_kwargs": half.engine_kwargs}), nodes)
        half = half.model_copy(update={"engine_kwargs": alone.engine_kwargs})
        config = config.model_copy(update={"prefill": half})
    return resolved(config, nodes)


def _yaml(data: dict[str, Any]) -> str:
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """No aliases; texts of several lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def notes(serving: LLMServingArgs, site: Site) -> list[str]:
    """What a person must know or do before the manifest is applied, a sentence each."""
    names = dict.fromkeys([secrets.API_KEY, *secrets.referenced(serving.llm_configs)])
    if serving.gateway.webhook:
        names[secrets.WEBHOOK_SECRET] = None
    if site.redis:
        names[secrets.REDIS_PASSWORD] = None
    literals = " ".join(f"--from-literal={name}=..." for name in names)
    return [
        *_not_in_pods(serving),
        *_without_nodes(worker_groups(serving.llm_configs, site.gpus_per_node), site),
        f"First: kubectl create secret generic {site.secret} {literals}",
    ]


def _adapters(config: LLMConfig) -> list[str | None]:
    lora = config.lora_config
    return [] if lora is None else [lora.dynamic_lora_loading_path, *lora.adapters.values()]


def _without_nodes(groups: Sequence[WorkerGroup], site: Site) -> list[str]:
    types = dict.fromkeys(group.accelerator_type for group in groups if group.accelerator_type)
    return [
        f"Nothing says which nodes have {kind}; a pod that lands on others takes no replica. Name a label of "
        f"theirs: --node-selector {kind}:KEY=VALUE."
        for kind in types
        if not site.labels(kind)
    ]


def _not_in_pods(serving: LLMServingArgs) -> list[str]:
    """What is found on this machine, and in a pod only if someone puts it there."""
    named = [
        (f"{config.location}: {field}", value)
        for config in serving.llm_configs
        for field, value in (
            ("model_source", config.model_loading_config.model_source),
            ("tokenizer_source", config.model_loading_config.tokenizer_source),
            *(("lora_config", source) for source in _adapters(config)),
            ("preprocessor", config.preprocessor),
            ("postprocessor", config.postprocessor),
            ("server_cls", config.server_cls),
        )
        if isinstance(value, str) and (field not in _SOURCES or value.startswith(_PATHS))
    ]
    if serving.gateway.keys_file is not None:
        named.append(("gateway.keys_file", str(serving.gateway.keys_file)))
    return [
        f"{field} {value!r} must be in the image, or on the volume below {_DATA}."
        for field, value in named
        if not value.startswith(f"{_DATA}/")
    ]
