"""The gateway as a Serve deployment, with the control that belongs to it.

It binds the router class that it is given, and imports none. Nothing is started here.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ray import serve
from ray.serve import Application

from penstock.config import GatewayConfig, LLMConfig
from penstock.config.derive import names
from penstock.config.derive.adapters import live_adapters
from penstock.config.derive.serve_options import ROUTER
from penstock.config.derive.server_class import server_class
from penstock.config.messages.problems import config_error
from penstock.config.schema.jobs import JobsConfig
from penstock.errors import ConfigError
from penstock.serve.control.deployment import LLMControl
from penstock.serve.control.state import NAME
from penstock.serve.gateway.catalogue import FIXED, Catalogue, LiveState, ServedModel
from penstock.serve.jobs.deployment import HEALTH_CHECKS, LLMJobs
from penstock.serve.jobs.deployment import OPTIONS as JOBS_OPTIONS
from penstock.serve.replica import version
from penstock.serve.replica.deployment import model_of
from penstock.serve.replica.inbound.custom_endpoints import batch_paths, paths
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
_CAN_SURGE = has_option("max_surge_percent")  # since Ray 2.60
_SURGE = {"max_surge_percent": 100} if _CAN_SURGE else {}
"""In an update the new gateway opens the port before the old one leaves it."""
_AT_ONCE = {"rolling_update_percentage": 1.0} if _CAN_SURGE else {}
"""What is taken over in place, all gateways take at once. `Deployment.options` does not take this one."""

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
        options: dict[str, Any] = {
            **_AT_ONCE,
            **gateway_options(configs, gateway.processes, self.given),
        }
        scaling = options.get("autoscaling_config") or {}
        if isinstance(most := options.get("num_replicas") or scaling.get("max_replicas"), int):
            gateway = gateway.model_copy(update={"processes": most})
        prefill = {m.config.model_id: m.prefill for m in known if m.prefill is not None}
        live = LiveState(
            tuple(
                ServedModel.of(_revised(m.config), tuple(paths(m.server)), batch_paths(m.server))
                for m in known
            ),
            gateway,
            {model.config.model_id: model.deployment for model in known},
            tuple(sorted(prefill)),
            {config.model_id: _router(config) for config in configs if config.serve_router is not None},
            max(0.0, options["graceful_shutdown_timeout_s"] - _CLOSING_S),
        )
        Catalogue(live.cards, gateway.default_model)  # a gateway that runs could only log its error
        known_names = {*ids, *(card.name for card in live.cards)}
        if unknown := [one for one in gateway.prices if not {one, one.partition(":")[0]} & known_names]:
            raise ConfigError(f"gateway.prices names '{unknown[0]}'; the models' ids are {', '.join(ids)}.")
        # Where it is set, the class has its own use for it.
        told = live.dump() if options.get("user_config") is None else None
        changing, made_of = ({"user_config": told}, []) if told is not None else ({}, [live])
        policies = {version.source(config.routing_policy) for config in configs}
        made_of += [sorted(policies), gateway.port, gateway.log_format]
        adapters = {model.model_id: found for model in configs if (found := live_adapters(model)) is not None}
        control = {**_CONTROL, "user_config": adapters}
        bound: dict[str, Any] = {
            "servers": applications,
            "live": live,
            "control": deployment(LLMControl, control, [gateway.port]).bind(gateway.port),
            "prefill": prefill,
        }
        if jobs is not None:
            actor = {"num_cpus": 0, **(options.get("ray_actor_options") or {})}
            of_jobs = {**JOBS_OPTIONS, **changing, "ray_actor_options": actor}
            made = deployment(LLMJobs, of_jobs, [*made_of, jobs])
            bound["jobs"] = (jobs, made.bind(jobs, live))
        made_of += [self.router, self.ingress, self.extra, gateway.processes > 1, jobs is not None]
        made_of += [getattr(gateway, name) for name in FIXED if name != "processes"]
        if self.ingress is None:
            return deployment(serve.ingress()(self.router), {**options, **changing}, made_of).bind(**bound)
        lora_paths = {
            config.model_id: config.lora_config.dynamic_lora_loading_path
            for config in configs
            if config.lora_config is not None
        }
        return deployment(self.ingress, options, [*made_of, live, lora_paths]).bind(
            llm_deployments=dict(zip(ids, applications, strict=True)),
            model_cards={card.id: card for card in live.cards},
            lora_paths=lora_paths,
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
        "name": ROUTER,
        **({} if "autoscaling_config" in given else {"num_replicas": most}),
        "max_ongoing_requests": _UNLIMITED,
        "ray_actor_options": {"num_cpus": 0},
        **HEALTH_CHECKS,
        "graceful_shutdown_timeout_s": 20.0 + _CLOSING_S,
        "graceful_shutdown_wait_loop_s": 0.2,
        **_SURGE,
        **given,
    }


def _router(config: LLMConfig) -> str:
    """Another text for another request router: handles keep the one that they were made with."""
    try:
        return version.hashed([config.deployment_config.get("request_router_config")])
    except TypeError:
        return uuid.uuid4().hex


def _revised(config: LLMConfig) -> LLMConfig:
    """A canary by which gateways and control can tell whether it is another one."""
    if config.version is None or config.version.canary is None:
        return config
    revised = config.version.model_copy(update={"revision": version.of_answers(config)})
    return config.model_copy(update={"version": revised})


def _application(model: Application | LLMConfig) -> Application:
    if isinstance(model, LLMConfig):
        return server_class(model, LLMServer).as_deployment().bind(model, gateway=None)
    return model
