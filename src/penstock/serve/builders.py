"""`build_openai_app`: configs in, one Serve application out. The import path of YAML deployments.

applications:
- import_path: penstock.serve.builders:build_openai_app
  args: {llm_configs: [models/a.yaml, {model_loading_config: {model_id: b}}]}
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve import Application

from penstock import ray_version
from penstock.config import GatewayConfig, LLMConfig, LLMServingArgs, check_accelerator
from penstock.config.derive.serve_options import deployment_name
from penstock.config.derive.server_class import imported_class, server_class
from penstock.config.messages.problems import config_error
from penstock.config.schema.deployment import checked_options
from penstock.config.schema.env_vars import layered
from penstock.engines import callback
from penstock.engines.check import check_arguments
from penstock.hooks import hook
from penstock.json_logs import LOG_FORMAT
from penstock.serve.control import application
from penstock.serve.deployments import LLMRouter, LLMServer
from penstock.serve.replica import environment, version
from penstock.serve.routing import registry

log = logging.getLogger(__name__)


def build_llm_deployment(
    llm_config: LLMConfig | Mapping[str, Any],
    *,
    name_prefix: str | None = None,
    bind_kwargs: Mapping[str, Any] | None = None,
    override_serve_options: Mapping[str, Any] | None = None,
    deployment_cls: type[LLMServer] | None = None,
) -> Application:
    """One model: an application by itself, or a part of a larger one.

    name_prefix: of the deployment's name, in place of `LLMServer:`. bind_kwargs: more arguments of the server
    class. override_serve_options: options of `serve.deployment`, over those of the config; its `name` is the
    whole name. deployment_cls: in place of the config's `server_cls`.
    Raises: ConfigError.
    """
    llm_config = LLMConfig.from_argument(llm_config, "llm_config")
    server = deployment_cls or server_class(llm_config, LLMServer)
    given = checked_options(override_serve_options or {}, "override_serve_options")
    if name_prefix is not None:
        own = llm_config.deployment_config.get("name") or deployment_name(llm_config.model_id, "")
        given = {"name": f"{name_prefix}{own}", **given}
    return server.as_deployment(given).bind(llm_config, **(bind_kwargs or {}))


def build_openai_app(llm_serving_args: Mapping[str, Any] | LLMServingArgs) -> Application:
    """All models of `llm_serving_args` behind one OpenAI-compatible gateway.

    Engine arguments are checked by the engine's own rules, in another process: this one imports no engine.
    Raises: ConfigError with every fault at once; also when no node has the accelerator that a model needs.
    """
    given = llm_serving_args
    serving = given if isinstance(given, LLMServingArgs) else LLMServingArgs.parse(given)
    _check(serving.llm_configs)
    ingress = serving.ingress_cls_config
    own = imported_class(ingress.ingress_cls, serving.location / "ingress_cls_config")
    behind: dict[str, Any] = {"gateway": None}  # replicas behind a router do not get the gateway's keys
    with application.turn:
        models = [
            build_llm_deployment(_logging(config, serving.gateway), bind_kwargs=behind)
            for config in serving.llm_configs
        ]
        if own is None:
            router = LLMRouter.as_deployment(serving.ingress_deployment_config)
        else:
            router = own.as_deployment(serving.ingress_deployment_config, **ingress.ingress_extra_kwargs)
        return router.bind(models, serving.gateway, serving.jobs)


def versions(serving: LLMServingArgs) -> dict[str, str | None]:
    """Of the deployments of `build_openai_app`, by name; None for those that restart each time."""
    with version.built() as found:
        build_openai_app(serving)
    return found


def _logging(config: LLMConfig, gateway: GatewayConfig) -> LLMConfig:
    """The config, with a replica that writes its log as the gateway does; its own environment wins."""
    if gateway.log_format == "text":
        return config
    environment = layered({"env_vars": {LOG_FORMAT: gateway.log_format}}, config.runtime_env)
    return config.model_copy(update={"runtime_env": environment})


def build_pd_openai_app(pd_serving_args: Mapping[str, Any]) -> Application:
    """`build_openai_app` of one model in two halves: {"prefill_config": ..., "decode_config": ...}."""
    return build_openai_app(pd_serving_args)


def build_dp_openai_app(dp_serving_args: Mapping[str, Any]) -> Application:
    """`build_openai_app` of one model: `{llm_config: ...}`, and its other arguments."""
    return build_openai_app(dp_serving_args)


build_dp_deployment = build_llm_deployment
"""Under the name for a model with `data_parallel_size`."""


def _check(configs: Sequence[LLMConfig]) -> None:
    ray_version.check()
    nodes = environment.nodes()
    findings = check_arguments(configs)
    for notice in findings.notices:
        log.warning(notice)
    problems = [
        *findings.problems,
        *registry.problems(configs),
        *(text for config in configs for text in (*hook.problems(config), *callback.problems(config))),
        *(problem for config in configs if (problem := check_accelerator(config, nodes))),
    ]
    if problems:
        raise config_error(problems)
