"""From a config to an engine in a Ray actor: the actor's options, and the backend made inside it.

The same for jobs and pipelines, so that neither shows a secret or forgets a resource.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.config.derive.accelerators import Nodes, accelerator_kind
from penstock.config.derive.placement import Placement, place
from penstock.config.derive.serve_options import runtime_env, without_secrets
from penstock.data.backends.in_process import InProcessEngine

if TYPE_CHECKING:
    from penstock.config import LLMConfig


def in_process_engine(config: LLMConfig) -> InProcessEngine:
    """Call it in the actor's process: sets the secret variables that the actor's options must not show."""
    _, secrets = without_secrets(runtime_env(config))
    os.environ.update(secrets)
    return InProcessEngine(config)


def actor_options(config: LLMConfig, placement: Placement) -> dict[str, Any]:
    """Ray options of the actor itself, without its placement group."""
    options = {name: value for name, value in placement.actor.items() if value not in (None, {}, [])}
    environment, _ = without_secrets(runtime_env(config))
    return {**options, "runtime_env": environment} if environment else options


def single_actor_options(config: LLMConfig, nodes: Nodes | None) -> dict[str, Any]:
    """Ray options of an actor without a placement group, for an engine on one node.

    An engine on CPU reserves no CPUs, unless the config says how many.
    """
    placement = place(config, nodes)
    options = actor_options(config, placement)
    given: Mapping[str, Any] = config.deployment_config.get("ray_actor_options") or {}
    if placement.bundles:
        whole = dict(placement.bundles[0])
        options |= {"num_gpus": whole.pop("GPU", 0), "num_cpus": whole.pop("CPU", 0)}
        if memory := whole.pop("memory", None):
            options["memory"] = memory
        if whole:
            options["resources"] = whole
    elif accelerator_kind(config, nodes) == "cpu" and given.get("num_cpus") is None:
        options["num_cpus"] = 0
    return {"num_gpus": 0, "num_cpus": 0, **options}
