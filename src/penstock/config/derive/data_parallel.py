"""Options of Ray Serve for a model whose replicas come in gangs of `data_parallel_size`, one engine each.

Serve counts replicas; the user counts gangs. Models without experts need none: `serve_options.independent`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.config.derive.placement import gang_size
from penstock.config.messages.problems import config_error
from penstock.config.schema.model import LLMConfig

AUTO = {"min_replicas": 1, "max_replicas": 100}
SCALED = {"min_replicas": 1, "max_replicas": 1}
"""Serve's own limits, where the user gives none."""

_SPREAD = "Serve places whole gangs. Set deployment_config.gang_scheduling_config.gang_placement_strategy."


def in_gangs(config: LLMConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that replace some of `options`, whose numbers of replicas count gangs.

    Raises: ConfigError for what does not go with gangs.
    """
    size = gang_size(config)
    if size == 1:
        return {}
    if problems := list(_problems(config, size)):
        raise config_error(problems)
    gang: Mapping[str, Any] = options.get("gang_scheduling_config") or {}
    # Ray packs a gang on as few nodes as it can, unless it is to have fewer replicas on each.
    per_node = config.experimental_configs.get("dp_size_per_node") or size
    spread = {"gang_placement_strategy": "SPREAD"} if per_node < size else {}
    found: dict[str, Any] = {"gang_scheduling_config": {**spread, **gang, "gang_size": size}}
    return found | multiplied(options, size)


def multiplied(options: Mapping[str, Any], size: int) -> dict[str, Any]:
    """The numbers of replicas among `options`, times `size`."""
    scaling: Mapping[str, Any] | None = options.get("autoscaling_config")
    if scaling is None:
        return {"num_replicas": size * (options.get("num_replicas") or 1)}
    counts = {**(AUTO if options.get("num_replicas") == "auto" else SCALED), **scaling}
    names = ("min_replicas", "initial_replicas", "max_replicas")
    scaled = {name: size * counts[name] for name in names if counts.get(name) is not None}
    return {"autoscaling_config": {**scaling, **scaled}}


def _problems(config: LLMConfig, size: int) -> Iterator[str]:
    given, location = config.deployment_config, config.location
    gang: Mapping[str, Any] = given.get("gang_scheduling_config") or {}
    if gang.get("gang_size", size) != size:
        where = location / "deployment_config" / "gang_scheduling_config" / "gang_size"
        yield where.says(f"is {gang['gang_size']}, but data_parallel_size is {size}; make them the same.")
    per_node = config.experimental_configs.get("dp_size_per_node") or size
    if size % per_node:
        where = location / "experimental_configs" / "dp_size_per_node"
        yield where.says(f"is {per_node}, of which data_parallel_size, {size}, is no multiple; change one.")
    if given.get("max_replicas_per_node") is not None:
        where = location / "deployment_config" / "max_replicas_per_node"
        yield where.says(f"does not go with data_parallel_size. {_SPREAD}")
    if (config.placement_group_config or {}).get("strategy", "PACK") != "PACK":
        where = location / "placement_group_config" / "strategy"
        yield where.says(f"does not go with data_parallel_size. {_SPREAD}")
    if config.on_demand is not None:
        yield (location / "on_demand").says("does not go with data_parallel_size: a gang does not sleep.")
