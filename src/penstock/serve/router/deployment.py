"""The gateway as a Serve deployment, with the control that belongs to it.

It binds the router class that it is given, and imports none. Nothing is started here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ray import serve
from ray.serve import Application

from penstock.config import GatewayConfig, LLMConfig
from penstock.config.derive import names
from penstock.config.derive.server_class import server_class
from penstock.config.messages.problems import config_error
from penstock.config.schema.jobs import JobsConfig
from penstock.errors import ConfigError
from penstock.serve.control.deployment import LLMControl
from penstock.serve.control.state import NAME
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.jobs.deployment import HEALTH_CHECKS, LLMJobs
from penstock.serve.jobs.deployment import OPTIONS as JOBS_OPTIONS
from penstock.serve.replica import version
from penstock.serve.replica.deployment import model_of
from penstock.serve.replica.frontend.custom_endpoints import batch_paths, paths
from penstock.serve.replica.server import LLMServer
from penstock.serve.replica.version import deployment, has_option
from penstock.serve.routing import registry

_CONTROL: Mapping[str, Any] = {
    "name": NAME,
    "num_replicas": 1,
    "max_ongoing_requests": 1_000_000,
    "ray_actor_options": {"num_cpus": 0},
    **HEALTH_CHECKS,
    "graceful_shutdown_wait_loop_s": 0.2,
    "graceful_shutdown_timeout_s": 1.0,
}
_SURGE = {"max_surge_percent": 100} if has_option("max_surge_percent") else {}  # since Ray 2.60
"""In an update the new gateway opens the port before the old one leaves it."""

_CLOSING_S = 5.0  # of a gateway's time to shut down: what remains after open requests have ended, or were cut
_UNLIMITED = 1_000_000  # open requests of one gateway process: the gateway itself admits by model


@dataclass(frozen=True)
class RouterDeployment:
    """A router class with options, to be bound to its models.

    ingress: a class of `make_fastapi_ingress`, bound in the router's place; extra: its further arguments.
    """

    router: type[Any]
    given: Mapping[str, Any] = field(default_factory=dict)
    ingress: type[Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def options(self, **options: Any) -> RouterDeployment:
        """A copy with these options of `serve.deployment` added."""
        return replace(self, given={**self.given, **options})

    def bind(
        self,
        models: Sequence[Application | LLMConfig],
        gateway: GatewayConfig | None = None,
        jobs: JobsConfig | None = None,
    ) -> Application:
        """An application that serves all `models`: applications from `as_deployment().bind(...)`, or configs.

        jobs: for the Files and Batches APIs, which it has not without.

        Raises: ConfigError for two models of one name, fallbacks that are unknown or go in a circle, an
        application that does not serve a model, a routing policy that cannot be loaded, or a certificate for
        Serve's HTTP.
        """
        applications = [_application(model) for model in models]
        known = [model_of(application) for application in applications]
        configs = [model.config for model in known]
        ids = [config.model_id for config in configs]
        if twice := sorted({model_id for model_id in ids if ids.count(model_id) > 1}):
            raise ConfigError(f"Model ids must differ; {', '.join(map(repr, twice))} is used more than once.")
        if problems := [*names.problems(configs), *registry.problems(configs)]:
            raise config_error(problems)
        gateway = gateway or GatewayConfig()
        if gateway.tls is not None and gateway.port is None:
            raise ConfigError(
                "gateway.tls needs a port of the gateway's own: set gateway.port, or end TLS in a proxy "
                "before Ray Serve's HTTP."
            )
        options = gateway_options(configs, gateway.processes, self.given)
        scaling = options.get("autoscaling_config") or {}
        if isinstance(most := options.get("num_replicas") or scaling.get("max_replicas"), int):
            gateway = gateway.model_copy(update={"processes": most})
        time_shared = sorted((config.model_id, config.on_demand is not None) for config in configs)
        bound: dict[str, Any] = {
            "servers": applications,
            "cards": [
                ServedModel.of(
                    model.config, paths=tuple(paths(model.server)), batch_paths=batch_paths(model.server)
                )
                for model in known
            ],
            "gateway": gateway,
            "control": deployment(LLMControl, _CONTROL, time_shared).bind(),
            "drain_s": max(0.0, options["graceful_shutdown_timeout_s"] - _CLOSING_S),
            "prefill": {m.config.model_id: m.prefill for m in known if m.prefill is not None},
        }
        made_of: list[Any] = [bound["cards"], gateway, jobs, [_reached(config) for config in configs]]
        if jobs is not None:
            actor = {"num_cpus": 0, **(options.get("ray_actor_options") or {})}
            made = deployment(LLMJobs, {**JOBS_OPTIONS, "ray_actor_options": actor}, made_of)
            bound["jobs"] = (jobs, made.bind(jobs, applications, bound["cards"], gateway))
        made_of += [self.router, self.ingress, self.extra, bound["drain_s"], sorted(bound["prefill"])]
        if self.ingress is None:
            return deployment(serve.ingress()(self.router), options, made_of).bind(**bound)
        return deployment(self.ingress, options, made_of).bind(
            llm_deployments=dict(zip(ids, applications, strict=True)),
            model_cards={card.id: card for card in bound["cards"]},
            lora_paths={
                config.model_id: config.lora_config.dynamic_lora_loading_path
                for config in configs
                if config.lora_config is not None
            },
            bound=bound,
            **self.extra,
        )


def gateway_options(
    configs: Sequence[LLMConfig], processes: int = 1, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Serve's options of a gateway to these models. given: the user's, which win.

    processes: gateways, unless the user's options or `num_ingress_replicas` of a model ask for more.
    """
    given = given or {}
    most = max([processes, *(config.ingress_replicas for config in configs)])
    return {
        "name": "LLMRouter",
        **({} if "autoscaling_config" in given else {"num_replicas": most}),
        "max_ongoing_requests": _UNLIMITED,
        "ray_actor_options": {"num_cpus": 0},
        **HEALTH_CHECKS,
        "graceful_shutdown_timeout_s": 20.0 + _CLOSING_S,
        "graceful_shutdown_wait_loop_s": 0.2,
        **_SURGE,
        **given,
    }


def _reached(config: LLMConfig) -> list[Any]:
    """What a gateway knows of a model beside its `ServedModel`: its deployment, and who picks a replica."""
    options, policy = config.deployment_config, config.routing_policy
    lora = config.lora_config and config.lora_config.dynamic_lora_loading_path
    return [options.get("name"), options.get("request_router_config"), version.source(policy), lora]


def _application(model: Application | LLMConfig) -> Application:
    if isinstance(model, LLMConfig):
        return server_class(model, LLMServer).as_deployment().bind(model, gateway=None)
    return model
