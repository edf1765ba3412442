"""A model as a Serve deployment. Its options follow from its config, so they are known when that is bound.

It binds the server class that it is given, and imports none. Nothing is started here.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray.serve import Application

from penstock.config import GatewayConfig, LLMConfig
from penstock.config.derive.adapters import without_live_adapters
from penstock.config.derive.placement import resolved
from penstock.config.derive.prefill import halves, prefill_name
from penstock.config.derive.serve_options import for_replicas, runtime_env, without_secrets
from penstock.config.schema.request_router import is_ours, router_class, router_options
from penstock.engines.check import with_independent_engines
from penstock.errors import ConfigError
from penstock.serve.fleet.membership import is_published, router_config
from penstock.serve.replica import environment, preprocessor, version


@dataclass(frozen=True)
class Model:
    """What an application was bound with. server: its class. deployment: its name. prefill: its prefill
    replicas, if it has any.
    """

    config: LLMConfig
    server: type[Any]
    deployment: str
    prefill: Application | None = None


_models: weakref.WeakKeyDictionary[Application, Model] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ModelDeployment:
    """A server class with options, to be bound to a config."""

    server: type[Any]
    given: Mapping[str, Any] = field(default_factory=dict)

    def options(self, **options: Any) -> ModelDeployment:
        """A copy with these options of `serve.deployment` added."""
        return ModelDeployment(self.server, {**self.given, **options})

    def bind(self, llm_config: LLMConfig, **arguments: Any) -> Application:
        """An application that serves this model, by handle, over HTTP, or behind an `LLMRouter`.

        gateway: a `GatewayConfig` for its HTTP; by default one from this process's environment, which
        replicas may not have. None for a model behind an `LLMRouter`: replicas then get nothing that only
        gateways use, and live on when it changes.
        """
        arguments.setdefault("gateway", GatewayConfig())
        llm_config, given = _with_options(llm_config, self.given)
        if (own := preprocessor.application(llm_config)) is not None:
            arguments = {**arguments, "preprocessor": own}
        decode, *rest = halves(llm_config)
        for prefill in rest:
            published = prefill_name(prefill.model_id)
            half, _ = self._bind(prefill, published, {**arguments, "role": "prefill"}, name=published)
            arguments = {**arguments, "prefill": half}
        application, name = self._bind(decode, decode.model_id, arguments, **given)
        _models[application] = Model(llm_config, self.server, name, arguments.get("prefill"))
        return application

    def _bind(
        self, config: LLMConfig, published: str, arguments: Mapping[str, Any], **given: Any
    ) -> tuple[Application, str]:
        """With the deployment's name. published: the name under which gateways know its replicas."""
        config = with_independent_engines(config)
        options = {**self.server.get_deployment_options(config), **given}
        router = options.get("request_router_config")
        if is_published(router):  # under the model's own id
            router = config.deployment_config.get("request_router_config")
        options["request_router_config"] = membership_router(published, router)
        actor = dict(options.get("ray_actor_options") or {})
        shown, own_secrets = without_secrets(actor.get("runtime_env") or {})  # Serve's state would show them
        options["ray_actor_options"] = actor | ({"runtime_env": shown} if "runtime_env" in actor else {})
        secrets = {**without_secrets(runtime_env(config, environment.runtime_env()))[1], **own_secrets}
        bound = resolved(config, environment.nodes()).with_secrets(secrets)
        # Ray Serve has replicas report their load from their start, or never.
        scaled = options.get("autoscaling_config") is not None
        made_of = [self.server, scaled, bound, version.named_code(bound)]
        if arguments["gateway"] is None:
            bound = for_replicas(bound)
            made_of[2] = without_live_adapters(bound).model_copy(update={"aliases": []})  # it is told of them
        handles = {"preprocessor", "prefill"} & arguments.keys()
        made_of += [sorted(handles), {name: arguments[name] for name in arguments.keys() - handles}]
        made = version.deployment(self.server, options, made_of)
        return made.bind(bound, **arguments), made.name


def _with_options(config: LLMConfig, given: Mapping[str, Any]) -> tuple[LLMConfig, dict[str, Any]]:
    """The config with options that a deployment was given, and those that no config may hold.

    All that follows from a config follows from these, too: placement, autoscaling, the gateway's limits.
    Secrets of the config stay: options that were made of it (`get_serve_options`) have lost them.
    """
    replaced = (given.get("ray_actor_options") or {}).get("runtime_env") or {}
    _, secrets = without_secrets(runtime_env(config))
    kept = {name: secrets[name] for name in secrets.keys() - replaced.get("env_vars", {}).keys()}
    raw = {name: value for name, value in given.items() if name.startswith("placement_group_")}
    merged = {**config.deployment_config, **{name: given[name] for name in given.keys() - raw.keys()}}
    return config.model_copy(update={"deployment_config": merged}).with_secrets(kept), raw


def membership_router(published: str, given: Any) -> Any:
    """Serve's `request_router_config` of a model's replicas, by which gateways learn of them.

    given: the user's. Raises: ConfigError.
    """
    options, router = router_options(given), router_class(given)
    if router is not None and is_ours(router):  # it stands for a policy, whose arguments the gateway has
        router = None
        options.pop("request_router_kwargs", None)
    return router_config(published, router, options)


def model_of(application: Application) -> Model:
    """What an application was bound with. Raises: ConfigError when it does not serve a model."""
    if application not in _models:
        raise ConfigError(
            "LLMRouter was given an application that is not a model. "
            "Bind models with LLMServer.as_deployment().bind(llm_config), or give their LLMConfigs."
        )
    return _models[application]
