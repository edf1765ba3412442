"""Options of Ray Serve's deployment that follow from an `LLMConfig`. Users' own values always win.

Our defaults differ from Serve's where an LLM differs from a small function; each says why.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from os.path import expanduser
from pathlib import Path
from typing import Any

from penstock.autoscaling import TARGET_ONGOING_REQUESTS
from penstock.config.derive.data_parallel import AUTO, SCALED, in_gangs, multiplied
from penstock.config.derive.placement import Bundle, gang_size, place
from penstock.config.messages.redact import parted
from penstock.config.schema.env_vars import layered
from penstock.config.schema.model import LLMConfig
from penstock.config.schema.sections import BatchConfig, Nodes

DEFAULTS: Mapping[str, Any] = {
    # An engine batches hundreds of requests itself (vLLM: 256 to 1,024); Serve's 5 would leave it idle.
    # More wait better at the gateway, where another replica may take them, than inside one engine.
    "max_ongoing_requests": 1024,
    # Serve notices a killed replica at the next check: within 1 s, instead of the 6 to 8 s of its own 10 s.
    "health_check_period_s": 1.0,
    # One engine step over a long prompt may take seconds; Serve's 30 s would leave a hung engine in place.
    "health_check_timeout_s": 10.0,
    # Serve's own value, named because streams end by it and the command's exit relies on it.
    "graceful_shutdown_timeout_s": 20.0,
    # Serve looks this often whether its own calls have ended; 2 s would be added to every stop.
    "graceful_shutdown_wait_loop_s": 0.2,
    # An engine that cannot start fails the same way each time, and each try loads the weights again.
    "max_constructor_retry_count": 3,
}

AUTOSCALING: Mapping[str, Any] = {
    "policy": {"policy_function": "penstock.autoscaling:policy"},
    "target_ongoing_requests": TARGET_ONGOING_REQUESTS,
    # Serve's 10 s would be added to every decision; a report costs a call to the controller.
    "metrics_interval_s": 2.0,
}

_FULL = 0.8  # of max_ongoing_requests: some of a full replica's requests are not in its engine

NAME_PREFIX = "LLMServer:"
ROUTER = "LLMRouter"
"""Name of the gateways' deployment."""

OF_GATEWAYS = ("fallbacks", "version", "routing_policy", "routing_config", "log_engine_metrics")
OF_REPLICAS = (
    *("ray_actor_options", "max_replicas_per_node", "gang_scheduling_config", "deployment_actors"),
    "graceful_shutdown_timeout_s",  # by which a replica plans its end
)
"""Options of the deployment that replicas read, or that need new ones. Serve changes the others in place."""


def serve_options(
    config: LLMConfig,
    name_prefix: str | None = None,
    nodes: Nodes | None = None,
    default_runtime_env: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Keyword arguments for `serve.deployment(...).options(...)`."""
    if config.versions:
        raise config.location.fault("versions need a gateway: give the config to `build_openai_app`.")
    given = {name: value for name, value in config.deployment_config.items() if name != "ray_actor_options"}
    placement = place(config, nodes)
    environment, _ = without_secrets(runtime_env(config, default_runtime_env))
    options = {
        "name": deployment_name(config.model_id, name_prefix),
        **DEFAULTS,
        **given,
        **({"autoscaling_config": scaling} if (scaling := autoscaling(given)) is not None else {}),
        "ray_actor_options": {**placement.actor, **({"runtime_env": environment} if environment else {})},
    }
    options |= in_gangs(config, options)
    if placement.bundles:
        options["placement_group_bundles"] = [dict(bundle) for bundle in placement.bundles]
        if "gang_scheduling_config" not in options:  # which has a strategy of its own
            options["placement_group_strategy"] = placement.strategy
    return options


def independent(config: LLMConfig) -> LLMConfig:
    """The config with `data_parallel_size` times as many replicas in place of gangs."""
    options = {k: v for k, v in config.deployment_config.items() if k != "gang_scheduling_config"}
    if (scaling := autoscaling(options)) is not None:
        options["autoscaling_config"] = scaling
    options |= multiplied(options, gang_size(config))
    kwargs = {k: v for k, v in config.engine_kwargs.items() if k != "data_parallel_size"}
    return config.model_copy(update={"engine_kwargs": kwargs, "deployment_config": options})


def for_replicas(config: LLMConfig) -> LLMConfig:
    """The config without what only gateways and Serve read: to change that, no engine has to restart.

    A replica that sends prompts to prefill replicas is a gateway to them.
    """
    batch = config.batch and config.batch.model_copy(
        update={"max_queued_requests": BatchConfig().max_queued_requests}
    )
    experimental = {k: v for k, v in config.experimental_configs.items() if k != "num_ingress_replicas"}
    is_gateway, given = config.prefill is not None, config.deployment_config
    options = {k: v for k, v in given.items() if k in OF_REPLICAS or (is_gateway and k != "num_replicas")}
    names = OF_GATEWAYS[:2] if is_gateway else OF_GATEWAYS
    return config.model_copy(
        update={
            **{name: LLMConfig.model_fields[name].get_default(call_default_factory=True) for name in names},
            "batch": None if batch == BatchConfig() else batch,
            "deployment_config": options,
            "experimental_configs": experimental,
        }
    )


def own_resources(options: Mapping[str, Any]) -> Bundle:
    """What the actor of a replica of a deployment with these options reserves by itself."""
    actor: Mapping[str, Any] = options.get("ray_actor_options") or {}
    named: Mapping[str, float] = actor.get("resources") or {}
    memory = {"memory": actor["memory"]} if actor.get("memory") else {}
    return {"CPU": actor.get("num_cpus", 1), "GPU": actor.get("num_gpus", 0), **named, **memory}


def reserved(options: Mapping[str, Any]) -> list[Bundle]:
    """The same with its engine's workers: one entry for each bundle."""
    return options.get("placement_group_bundles") or [own_resources(options)]


def replica_range(options: Mapping[str, Any]) -> tuple[int, int]:
    """The least and the most replicas of such a deployment, by Serve's own limits where none are given."""
    scaling, is_auto = options.get("autoscaling_config"), options.get("num_replicas") == "auto"
    if scaling is None and not is_auto:
        return (count := options.get("num_replicas") or 1), count
    counts = {**(AUTO if is_auto else SCALED), **(scaling or {})}
    return counts["min_replicas"], counts["max_replicas"]


def most_replicas(options: Mapping[str, Any]) -> int:
    """Engines of a batch job with these options, which all start: the maximum of a range; 1 for `auto`."""
    scaling = options.get("autoscaling_config") or {}
    most = scaling.get("max_replicas") or options.get("num_replicas") or 1
    return most if isinstance(most, int) else 1


def autoscaling(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The autoscaling_config of a deployment_config, with our policy; None for a fixed number of replicas.

    Serve's own policy sees no request of the gateway, and would remove replicas. Ours sees no request that
    waits in a gateway, so a target that full replicas do not exceed is lowered: these ask for one more.
    """
    config = given.get("autoscaling_config")
    if config is None and given.get("num_replicas") != "auto":
        return None
    fields: Iterable[str] = config if isinstance(config, Mapping) else getattr(config, "model_fields_set", ())
    values = {name: config[name] if isinstance(config, Mapping) else getattr(config, name) for name in fields}
    target, most = values.get("target_ongoing_requests"), given.get("max_ongoing_requests")
    if most and "policy" not in values and (target is None or target >= most):
        values["target_ongoing_requests"] = min(target or TARGET_ONGOING_REQUESTS, _FULL * most)
    return {**AUTOSCALING, **values}


def deployment_name(model_id: str, prefix: str | None = None) -> str:
    """A name that Serve, its URLs and its metrics accept: `Qwen/Qwen2.5` is `Qwen--Qwen2_5`."""
    safe = model_id.replace("/", "--").replace(".", "_").replace("#", "_").replace(" ", "_")
    safe = re.sub(r"[^!-~]", lambda found: f"_{ord(found[0]):x}", safe)  # Ray's metrics take ASCII only
    return f"{NAME_PREFIX if prefix is None else prefix}{safe}"


def runtime_env(config: LLMConfig, default: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The default's, then ray_actor_options', then the LLMConfig's own; `env_vars` merged key by key."""
    actor: Mapping[str, Any] = config.deployment_config.get("ray_actor_options") or {}
    return with_uris(layered(default, actor.get("runtime_env"), config.runtime_env))


def with_uris(environment: Mapping[str, Any]) -> dict[str, Any]:
    """A runtime_env whose folders are URIs: Serve takes no paths; these mean the folders of each node."""
    folder, modules = environment.get("working_dir"), environment.get("py_modules")
    uris: dict[str, Any] = {"working_dir": _uri(folder)} if folder else {}
    if modules:
        uris["py_modules"] = [_uri(module) for module in modules]
    return {**environment, **uris}


def _uri(folder: Any) -> Any:
    if not isinstance(folder, str) or "://" in folder:
        return folder
    return f"local://{Path(expanduser(folder)).absolute()}"


def without_secrets(environment: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """A runtime_env as anyone may see it in Serve's and Ray's state, and its secret variables."""
    shown, hidden = parted(environment.get("env_vars") or {})
    rest = {name: value for name, value in environment.items() if name != "env_vars"}
    return {**rest, **({"env_vars": shown} if shown else {})}, hidden
