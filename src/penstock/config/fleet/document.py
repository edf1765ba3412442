"""A fleet as a document: what was set of the arguments of `build_openai_app`, as plain values of JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, cast

from pydantic import BaseModel, SecretStr

from penstock.config.loading.load import load_applications
from penstock.config.loading.serving_args import LLMServingArgs
from penstock.config.messages.problems import config_error
from penstock.config.schema.env_vars import layered
from penstock.errors import ConfigError

Document = dict[str, Any]

_KEYS = ("api_key", "admin_key")
_OF_PODS = {
    "processes": "on Kubernetes each pod has one gateway; leave it out.",
    "tls": "KubeRay asks gateways by plain HTTP; let an Ingress end TLS instead.",
}
"""Fields of the gateway that its pods decide, and why."""
_SHARE = 0.001  # of Ray's unit resource of a node: ties an actor to it and limits nobody


def read(file: str) -> Document:
    """What the file says, with the faults that can be found here. Raises: ConfigError."""
    applications = load_applications(file)
    if len(applications) != 1:
        count = len(applications) or "no"
        raise ConfigError(f"{file} has {count} applications with models; a fleet is one such application.")
    (application,) = applications
    if application.serve_only:
        raise config_error(f"{text} Leave it out." for text in application.serve_only)
    return document(application.args)


@dataclass(frozen=True, slots=True)
class StartSettings:
    """What all fleets of one service have in common, whatever their files say.

    gateway: options of the command, which win over a file's. defaults: of the gateway, which a file's win
    over. node: Ray's resource of the gateway's node, "" for any. variables: in the environment of every
    process. environment: of the process that builds the application. in_pods: whether KubeRay has made the
    nodes.
    """

    gateway: Mapping[str, Any] = field(default_factory=dict[str, Any])
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    node: str = ""
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    in_pods: bool = False

    def applied(self, fleet: Document) -> LLMServingArgs:
        """The fleet as it is deployed. Raises: ConfigError."""
        given = fleet.get("gateway", {})
        if self.in_pods:
            refuse_in_pods(given)
        gateway = {**self.defaults, **given, **self.gateway}
        serving = LLMServingArgs.parse({**fleet, "gateway": gateway})
        return as_guest(serving, self.node, self.variables) if self.node else serving


def refuse_in_pods(gateway: Document) -> None:
    """Raises: ConfigError for what cannot be said of a gateway on Kubernetes."""
    faults = [f"gateway.{name}: {why}" for name, why in _OF_PODS.items() if gateway.get(name) is not None]
    if faults:
        raise config_error(faults)


def as_guest(serving: LLMServingArgs, node: str, variables: Mapping[str, str]) -> LLMServingArgs:
    """The same on a cluster that others started: the gateway where the resource `node` is, and variables in
    the environment of every process, which here they do not inherit.
    """
    ours = {"env_vars": dict(variables)}
    options = serving.ingress_deployment_config
    actor: dict[str, Any] = {"num_cpus": 0, **(options.get("ray_actor_options") or {})}
    actor["resources"] = {node: _SHARE, **(actor.get("resources") or {})}
    actor["runtime_env"] = layered(ours, actor.get("runtime_env"))
    models = [
        config.model_copy(update={"runtime_env": layered(ours, config.runtime_env)})
        for config in serving.llm_configs
    ]
    changes = {
        "llm_configs": models,
        "ingress_deployment_config": {**options, "ray_actor_options": actor},
    }
    return serving.model_copy(update=changes)


def keys_of_environment(gateway: BaseModel) -> dict[str, str]:
    """The gateway's keys that no config names."""
    keys = {name: getattr(gateway, name) for name in _KEYS if name not in gateway.model_fields_set}
    return {name: key.get_secret_value() for name, key in keys.items() if key is not None}


def document(value: Any, path: str = "", *, unset: bool = False) -> Any:
    """What was set of an `LLMServingArgs`, or of a part, as JSON has it. unset: with defaults.

    Raises: ConfigError for what JSON cannot say: infinite numbers, dates, objects of a program.
    """
    match value:
        case float() if not math.isfinite(value):
            raise ConfigError(f"{path} is {value}, a number that JSON does not have: leave it out.")
        case None | bool() | int() | float() | str():
            return value
        case SecretStr():
            return value.get_secret_value()
        case PurePath():
            return str(value)
        case BaseModel():
            names = [name for name in type(value).model_fields if unset or name in value.model_fields_set]
            return document({name: getattr(value, name) for name in names}, path, unset=unset)
        case Mapping():
            entries = {str(key): entry for key, entry in cast("Mapping[Any, Any]", value).items()}
            return {
                key: document(entry, f"{path}.{key}".strip("."), unset=unset)
                for key, entry in entries.items()
            }
        case list() | tuple():
            return [document(entry, path, unset=unset) for entry in cast("list[Any]", value)]
        case _:
            kind = type(value).__qualname__
            raise ConfigError(f"{path} is of the type {kind!r}, which JSON does not have: put it in quotes.")
