"""Bundles: what a replica reserves, as pure functions of its config.

Two shapes. An engine that spans nodes (the "ray" executor) gets one bundle per worker, the first merged
with the replica's own resources. An engine that fits one node gets one bundle, and the replica's actor holds
all of its GPUs: Ray sets CUDA_VISIBLE_DEVICES by what the actor holds, and "uni" and "mp" workers are its
children.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config.derive.accelerators import TYPE_PREFIX, TYPE_SHARE, accelerator_kind
from penstock.config.schema.model import LLMConfig
from penstock.config.schema.sections import AcceleratorConfig, AcceleratorKind, Nodes

Bundle = dict[str, float]

WORKER_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")

_EXECUTORS = ("uni", "mp", "ray", "external_launcher")
"""Those that vLLM has names for."""

_SPREAD = ("SPREAD", "STRICT_SPREAD")
_SGLANGS = {
    "tensor_parallel_size": ("tp_size", "tp"),
    "pipeline_parallel_size": ("pp_size", "pp"),
    "data_parallel_size": ("dp_size", "dp"),
}
"""SGLang's own names; it takes vLLM's, too."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What Serve reserves for one replica. `bundles` is empty where the actor's own resources say all."""

    actor: Mapping[str, Any]
    bundles: Sequence[Bundle] = ()
    strategy: str = "PACK"


def merge_replica_actor_and_child_actor_bundles(
    child_actor_bundles: Sequence[Mapping[str, float]], replica_actor_bundle: Mapping[str, float]
) -> list[Bundle]:
    """The workers' bundles, the replica's own resources added to the first, where Serve puts the replica."""
    first, *others = child_actor_bundles or [{}]
    return [add(first, replica_actor_bundle), *(dict(bundle) for bundle in others)]


def add(*bundles: Mapping[str, float]) -> Bundle:
    """The sum of bundles, resource by resource; what names an accelerator type is not summed."""
    total: Bundle = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = TYPE_SHARE if name.startswith(TYPE_PREFIX) else total.get(name, 0) + amount
    return total


def workers(config: LLMConfig) -> int:
    """Processes that hold a piece of the model: TP x PP (x prefill context parallel) of one engine core."""
    return math.prod(_size(config, name) for name in WORKER_SIZES)


def spans_nodes(config: LLMConfig, nodes: Nodes | None = None) -> bool:
    """Whether the engine's workers are separate Ray actors, on any node.

    They are when the user says so (distributed_executor_backend "ray", or a SPREAD strategy over more
    than one bundle), or when no single one of `nodes` has the GPUs that all workers need. SGLang's never are.
    What an executor class of the user's own does is not known here: it is one of Ray's where the group is.
    """
    if config.engine_name == "sglang":
        return False
    backend = config.engine_kwargs.get("distributed_executor_backend")
    if backend in _EXECUTORS:
        return backend == "ray"
    kind = accelerator_kind(config, nodes)
    bundles = worker_bundles(config, kind)
    if _strategy(config) in _SPREAD and len(bundles) > 1:
        return True
    if kind == "cpu" or not nodes or len(bundles) == 1:
        return False
    largest = max(node.get("GPU", 0) for node in nodes)
    return 0 < largest < add(*bundles).get("GPU", 0)


def executor(config: LLMConfig, nodes: Nodes | None = None) -> Any:
    """vLLM's `distributed_executor_backend`. Always named: in a placement group vLLM would take "ray"."""
    backend = config.engine_kwargs.get("distributed_executor_backend")
    if backend is not None:
        return backend
    if spans_nodes(config, nodes):
        return "ray"
    return "uni" if workers(config) * _engines(config) == 1 else "mp"


def resolved(config: LLMConfig, nodes: Nodes | None = None) -> LLMConfig:
    """The same config with all decisions made that depend on the cluster: replicas then agree with it."""
    kwargs = config.engine_kwargs
    if config.engine_name == "vllm":
        kwargs = {**kwargs, "distributed_executor_backend": executor(config, nodes)}
    kind = AcceleratorConfig(kind=accelerator_kind(config, nodes))
    return config.model_copy(update={"accelerator_config": kind, "engine_kwargs": kwargs})


def worker_bundles(config: LLMConfig, kind: AcceleratorKind) -> list[Bundle]:
    """One bundle per worker: from placement_group_config, else one GPU (or none) and one CPU each."""
    group = config.placement_group_config
    count = workers(config) * _engines(config)
    if group is None:
        bundles: list[Bundle] = [{"GPU": 1, "CPU": 1} if kind == "gpu" else {"CPU": 1} for _ in range(count)]
    else:
        bundles = [dict(bundle) for bundle in group.get("bundles") or [group["bundle_per_worker"]] * count]
    return [_of_kind(bundle, kind, config.accelerator_type) for bundle in bundles]


def place(config: LLMConfig, nodes: Nodes | None = None) -> Placement:
    """What one replica of `config` reserves.

    Raises: ConfigError when placement_group_config gives fewer GPUs than there are workers, or a bundle of
    several to workers on several nodes.
    """
    kind = accelerator_kind(config, nodes)
    actor = replica_actor(config)
    if spans_nodes(config, nodes):
        # On CPU nothing may be left of a bundle of GPUs, and Ray takes no empty one.
        each = [bundle if any(bundle.values()) else {"CPU": 1} for bundle in worker_bundles(config, kind)]
        merged = merge_replica_actor_and_child_actor_bundles(each, _as_bundle(actor))
        if kind == "gpu":
            _one_each(config, [bundle["GPU"] for bundle in merged if bundle.get("GPU")])
        return Placement(actor, merged, _strategy(config))
    if kind == "cpu":
        return _on_cpu(config, actor)
    return _on_one_node(config, actor)


def _strategy(config: LLMConfig) -> str:
    return (config.placement_group_config or {}).get("strategy", "PACK")


def gpu_share(config: LLMConfig) -> float:
    """The part of a GPU that each worker has; 1 for a whole one, and on CPU."""
    placed = place(config)
    given = [bundle.get("GPU", 0) for bundle in placed.bundles] or [placed.actor["num_gpus"]]
    return min((gpus for gpus in given if 0 < gpus < 1), default=1.0)


def replica_actor(config: LLMConfig) -> dict[str, Any]:
    """The replica's own actor as the user describes it: one CPU and no GPU by default; no runtime_env."""
    given: Mapping[str, Any] = config.deployment_config.get("ray_actor_options") or {}
    options = {name: value for name, value in given.items() if name != "runtime_env" and value is not None}
    return {"num_cpus": 1, "num_gpus": 0, **options}


def _on_cpu(config: LLMConfig, actor: dict[str, Any]) -> Placement:
    """Workers are the actor's children and share its CPUs; no group, unless the user describes one."""
    given: Mapping[str, Any] = config.deployment_config.get("ray_actor_options") or {}
    count = workers(config) * _engines(config)
    actor = {**actor, "num_gpus": 0}
    if config.placement_group_config is not None:
        return Placement(actor, [add(*worker_bundles(config, "cpu"), _as_bundle(actor))])
    if given.get("num_cpus") is None:
        actor["num_cpus"] = count
    return Placement(actor)


def _on_one_node(config: LLMConfig, actor: dict[str, Any]) -> Placement:
    bundles = worker_bundles(config, "gpu")
    own = _as_bundle(actor)
    if config.placement_group_config is None and actor["num_gpus"]:
        bundles = [{**bundle, "GPU": 0} for bundle in bundles]  # the user's number is the whole
    whole = add(*bundles, own)
    gpus = whole.get("GPU", 0)
    _enough(config, gpus)
    actor = {**actor, "num_gpus": gpus}
    if "max_replicas_per_node" in config.deployment_config:  # Serve allows no group beside it
        typed = {"accelerator_type": config.accelerator_type} if config.accelerator_type else {}
        return Placement({**actor, "num_cpus": whole["CPU"], **typed})
    return Placement(actor, [whole])


def _enough(config: LLMConfig, gpus: float) -> None:
    count = workers(config) * _engines(config)
    if gpus > 1 and gpus != int(gpus):
        raise _where(config).fault(f"{gpus:g} GPUs: above one, Ray gives whole GPUs only.")
    if count > 1 and gpus < count:
        raise _where(config).fault(
            f"{count} workers (tensor x pipeline x data parallel) need a GPU each, but the replica gets "
            f"{gpus:g}; give more GPUs or lower the parallel sizes in engine_kwargs."
        )


def _one_each(config: LLMConfig, gpus: Sequence[float]) -> None:
    """What vLLM's "ray" executor wants: a bundle with one GPU, or a part of one, for each worker."""
    if max(gpus, default=0) > 1:
        raise _where(config).fault(
            f"a bundle of {max(gpus):g} GPUs: workers on several nodes are Ray actors, each in a bundle "
            "of one GPU. Write one bundle per worker, as bundle_per_worker does."
        )
    if len(gpus) < workers(config):
        raise _where(config).fault(
            f"{workers(config)} workers need a bundle with a GPU each, not {len(gpus)}."
        )


def _where(config: LLMConfig) -> Any:
    part = "placement_group_config" if config.placement_group_config is not None else "deployment_config"
    return config.location / part


def _as_bundle(actor: Mapping[str, Any]) -> Bundle:
    bundle: Bundle = {"CPU": actor["num_cpus"], "GPU": actor["num_gpus"], **actor.get("resources", {})}
    if "memory" in actor:
        bundle["memory"] = actor["memory"]
    return bundle


def _of_kind(bundle: Bundle, kind: AcceleratorKind, accelerator_type: str | None) -> Bundle:
    if kind == "cpu":
        return {k: v for k, v in bundle.items() if k != "GPU" and not k.startswith(TYPE_PREFIX)}
    if accelerator_type and bundle.get("GPU", 0) > 0:
        return {**bundle, TYPE_PREFIX + accelerator_type: TYPE_SHARE}
    return bundle


def gang_size(config: LLMConfig) -> int:
    """Replicas that compute together, each with one engine of a data-parallel group; 1 for no gang."""
    return _size(config, "data_parallel_size") if config.engine_name == "vllm" else 1


def _engines(config: LLMConfig) -> int:
    """Engine cores of one replica on its node (data parallelism inside the engine)."""
    return _size(config, "data_parallel_size") if config.engine_name == "sglang" else 1


def _size(config: LLMConfig, name: str) -> int:
    kwargs = config.engine_kwargs
    if config.engine_name == "sglang" and name in _SGLANGS:
        if name == "data_parallel_size" and kwargs.get("enable_dp_attention"):
            return 1  # on the GPUs of tensor parallelism
        name = next((other for other in _SGLANGS[name] if kwargs.get(other)), name)
    return kwargs.get(name) or 1
