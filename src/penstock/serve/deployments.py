"""From configs to Serve applications: what `as_deployment()` returns, and the classes users name.

A model's deployment options follow from its config, so they can be known only when the config is bound;
these two small classes wait for it. Nothing is started here.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ray import serve
from ray.serve import Application, Deployment

from penstock.config import GatewayConfig, LLMConfig
from penstock.config.derive.placement import resolved
from penstock.config.derive.prefill import halves, prefill_name
from penstock.config.derive.serve_options import runtime_env, without_secrets
from penstock.config.derive.server_class import server_class
from penstock.config.messages.problems import config_error
from penstock.config.schema.deployment import router_options
from penstock.errors import ConfigError
from penstock.serve.control import deployment as control
from penstock.serve.control.deployment import LLMControl
from penstock.serve.fleet.membership import FleetRouter
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.replica import preprocessor, ray_cluster
from penstock.serve.replica.custom_endpoints import paths
from penstock.serve.replica.server import LLMServer
from penstock.serve.router.router import LLMRouter
from penstock.serve.routing import registry

__all__ = ["LLMRouter", "LLMServer", "ModelDeployment", "RouterDeployment", "VLLMService"]


@dataclass(frozen=True)
class Model:
    """What is known of an application that serves a model. prefill: its other half, where it has one."""

    config: LLMConfig
    server: type[LLMServer]
    prefill: Application | None = None


_models: weakref.WeakKeyDictionary[Application, Model] = weakref.WeakKeyDictionary()
_CONTROL: Mapping[str, Any] = {
    "name": control.NAME,
    "num_replicas": 1,
    "max_ongoing_requests": 1_000_000,  # each replica has a question open
    "ray_actor_options": {"num_cpus": 0},
    "health_check_period_s": 1.0,
    "graceful_shutdown_wait_loop_s": 0.2,
    "graceful_shutdown_timeout_s": 1.0,
}
_CLOSING_S = 5.0  # of a gateway's time to shut down: what is left when open requests have ended, or are cut
_MANY = 1_000_000  # open requests of one gateway process: the gateway itself admits by model


class VLLMService(LLMServer):
    """The name under which the first documents know `LLMServer`."""


@dataclass(frozen=True)
class ModelDeployment:
    """A server class with options, waiting for its config."""

    server: type[LLMServer]
    given: Mapping[str, Any] = field(default_factory=dict)

    def options(self, **options: Any) -> ModelDeployment:
        """The same with these options of `serve.deployment` on top."""
        return ModelDeployment(self.server, {**self.given, **options})

    def bind(self, llm_config: LLMConfig, **arguments: Any) -> Application:
        """An application that serves this model, by handle, over HTTP, or behind an `LLMRouter`.

        gateway: a `GatewayConfig` for its HTTP, else one by this environment, which replicas may not have.
        """
        arguments.setdefault("gateway", GatewayConfig())
        if (own := preprocessor.application(llm_config)) is not None:
            arguments = {**arguments, "preprocessor": own}
        decode, *rest = halves(llm_config)
        for prefill in rest:
            published = prefill_name(prefill.model_id)
            half = self._bind(prefill, published, {**arguments, "role": "prefill"}, name=published)
            arguments = {**arguments, "prefill": half}
        application = self._bind(decode, decode.model_id, arguments, **self.given)
        _models[application] = Model(llm_config, self.server, arguments.get("prefill"))
        return application

    def _bind(
        self, config: LLMConfig, published: str, arguments: Mapping[str, Any], **given: Any
    ) -> Application:
        """published: the name under which gateways know its replicas."""
        options = {**self.server.get_deployment_options(config), **given}
        options |= {
            "request_router_config": {
                **router_options(options.get("request_router_config")),
                "request_router_class": FleetRouter,
                "request_router_kwargs": {"model_id": published},
            },
        }
        actor, own_secrets = _without_secrets(options.get("ray_actor_options") or {})
        secrets = {**without_secrets(runtime_env(config, ray_cluster.runtime_env()))[1], **own_secrets}
        bound = resolved(config, ray_cluster.nodes()).with_secrets(secrets)
        return _deployment(self.server, {**options, "ray_actor_options": actor}).bind(bound, **arguments)


@dataclass(frozen=True)
class RouterDeployment:
    """A router class with options, waiting for its models."""

    router: type[LLMRouter]
    given: Mapping[str, Any] = field(default_factory=dict)

    def options(self, **options: Any) -> RouterDeployment:
        """The same with these options of `serve.deployment` on top."""
        return RouterDeployment(self.router, {**self.given, **options})

    def bind(
        self, models: Sequence[Application | LLMConfig], gateway: GatewayConfig | None = None
    ) -> Application:
        """An application that serves all `models`: applications from `as_deployment().bind(...)`, or configs.

        Raises: ConfigError for two models of one id, an application that is no model of ours, or a routing
        policy that cannot be had.
        """
        applications = [_application(model) for model in models]
        known = [_known(application) for application in applications]
        configs = [model.config for model in known]
        _refuse_duplicates([config.model_id for config in configs])
        if problems := registry.problems(configs):
            raise config_error(problems)
        front = gateway or GatewayConfig()
        scaling = self.given.get("autoscaling_config") or {}
        if isinstance(most := self.given.get("num_replicas") or scaling.get("max_replicas"), int):
            front = front.model_copy(update={"processes": most})
        options: dict[str, Any] = {
            "name": "LLMRouter",
            **({} if "autoscaling_config" in self.given else {"num_replicas": front.processes}),
            "max_ongoing_requests": _MANY,
            "ray_actor_options": {"num_cpus": 0},
            "health_check_period_s": 1.0,
            "graceful_shutdown_timeout_s": 20.0 + _CLOSING_S,
            "graceful_shutdown_wait_loop_s": 0.2,
            # In an update the new gateway has the port before the old one leaves it.
            "max_surge_percent": 100,
            **self.given,
        }
        drain_s = max(0.0, options["graceful_shutdown_timeout_s"] - _CLOSING_S)
        cards = [ServedModel.of(model.config, paths=tuple(paths(model.server))) for model in known]
        prefill = {model.config.model_id: model.prefill for model in known if model.prefill is not None}
        control = _deployment(LLMControl, _CONTROL).bind()
        router = _deployment(serve.ingress()(self.router), options)
        return router.bind(applications, cards, front, control, drain_s, prefill)


def _deployment(server: Any, options: Mapping[str, Any]) -> Deployment:
    return cast(Deployment, serve.deployment(server)).options(**options)


def _without_secrets(actor: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Options of an actor without secret variables, which Serve's state would show; and those."""
    if "runtime_env" not in actor:
        return dict(actor), {}
    shown, secrets = without_secrets(actor["runtime_env"])
    return {**actor, "runtime_env": shown}, secrets


def _application(model: Application | LLMConfig) -> Application:
    if isinstance(model, LLMConfig):
        # None: its gateway is the router's, whose changes are no reason to start engines anew.
        return server_class(model, LLMServer).as_deployment().bind(model, gateway=None)
    return model


def _known(application: Application) -> Model:
    if application not in _models:
        raise ConfigError(
            "LLMRouter was given an application that is not a model. "
            "Bind models with LLMServer.as_deployment().bind(llm_config), or give their LLMConfigs."
        )
    return _models[application]


def _refuse_duplicates(ids: Sequence[str]) -> None:
    twice = sorted({model_id for model_id in ids if ids.count(model_id) > 1})
    if twice:
        raise ConfigError(f"Model ids must differ; {', '.join(map(repr, twice))} is used more than once.")
