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
from penstock.config.problems import config_error
from penstock.errors import ConfigError
from penstock.serve import cluster
from penstock.serve.cards import ModelCard
from penstock.serve.ingress import LLMRouter
from penstock.serve.membership import FleetRouter
from penstock.serve.routing import policies
from penstock.serve.server import LLMServer

__all__ = ["LLMRouter", "LLMServer", "ModelDeployment", "RouterDeployment", "VLLMService"]

_configs: weakref.WeakKeyDictionary[Application, LLMConfig] = weakref.WeakKeyDictionary()
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
        """An application that serves this model, by handle, over HTTP, or behind an `LLMRouter`."""
        router = {
            "request_router_class": FleetRouter,
            "request_router_kwargs": {"model_id": llm_config.model_id},
        }
        options = {
            **self.server.get_deployment_options(llm_config),
            **self.given,
            "request_router_config": router,
        }
        application = _deployment(self.server, options).bind(
            llm_config.resolved(cluster.nodes()), **arguments
        )
        _configs[application] = llm_config
        return application


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
        configs = [_config(application) for application in applications]
        _refuse_duplicates([config.model_id for config in configs])
        if problems := policies.problems(configs):
            raise config_error(problems)
        front = gateway or GatewayConfig()
        scaling = self.given.get("autoscaling_config") or {}
        if isinstance(most := self.given.get("num_replicas") or scaling.get("max_replicas"), int):
            front = front.model_copy(update={"processes": most})
        options = {
            "name": "LLMRouter",
            **({} if "autoscaling_config" in self.given else {"num_replicas": front.processes}),
            "max_ongoing_requests": _MANY,
            "ray_actor_options": {"num_cpus": 0},
            "health_check_period_s": 1.0,
            "graceful_shutdown_timeout_s": 30.0,
            "graceful_shutdown_wait_loop_s": 0.2,
            **self.given,
        }
        cards = [ModelCard.of(config) for config in configs]
        return _deployment(serve.ingress()(self.router), options).bind(applications, cards, front)


def _deployment(server: Any, options: Mapping[str, Any]) -> Deployment:
    return cast(Deployment, serve.deployment(server)).options(**options)


def _application(model: Application | LLMConfig) -> Application:
    if isinstance(model, LLMConfig):
        return model.server_class(LLMServer).as_deployment().bind(model)
    return model


def _config(application: Application) -> LLMConfig:
    if application not in _configs:
        raise ConfigError(
            "LLMRouter was given an application that is not a model. "
            "Bind models with LLMServer.as_deployment().bind(llm_config), or give their LLMConfigs."
        )
    return _configs[application]


def _refuse_duplicates(ids: Sequence[str]) -> None:
    twice = sorted({model_id for model_id in ids if ids.count(model_id) > 1})
    if twice:
        raise ConfigError(f"Model ids must differ; {', '.join(map(repr, twice))} is used more than once.")
