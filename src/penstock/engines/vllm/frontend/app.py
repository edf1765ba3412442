"""vLLM's front-end in the replica's process: its configuration, AsyncLLM, and its OpenAI app.

Importing this file imports vLLM, which takes seconds: `engine` does it in a thread, after starting the core.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import zmq
from fastapi import FastAPI
from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.transformers_utils.config import maybe_register_config_serialize_by_value
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import Executor

from penstock.engines.vllm.arguments.schema import cli_args
from penstock.engines.vllm.capabilities.state import Capabilities
from penstock.engines.vllm.core import kv_transfer
from penstock.engines.vllm.core.imports import uncollected
from penstock.engines.vllm.core.launch import Core
from penstock.engines.vllm.frontend import additions
from penstock.engines.vllm.frontend.gated_llm import GatedLLM
from penstock.engines.vllm.tokenizing.first_texts import check
from penstock.errors import EngineStartFailed

if TYPE_CHECKING:
    from penstock.engines.vllm.frontend.stats import SchedulerLogger


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be served, validated by vLLM; nothing is loaded yet."""

    engine_args: AsyncEngineArgs
    frontend_args: cli_args.FrontendArgs
    vllm_config: VllmConfig
    executor_class: type[Executor]


def plan(engine_arguments: Mapping[str, Any], frontend_arguments: Mapping[str, Any]) -> Plan:
    """Raises: what vLLM raises for arguments and models that it rejects."""
    envs.disable_envs_cache()  # of an earlier engine in this process
    engine_args = AsyncEngineArgs(**engine_arguments)
    frontend_args = cli_args.FrontendArgs(**frontend_arguments)
    cli_args.validate_parsed_serve_args(_namespace(engine_args, frontend_args))
    vllm_config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    maybe_register_config_serialize_by_value()  # else classes from the model's own code do not reach the core
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size > 1 and not parallel.data_parallel_external_lb:
        raise EngineStartFailed(
            f"data_parallel_size {parallel.data_parallel_size} is for as many replicas that Ray Serve starts "
            "together; one engine by itself has none. Leave it out here."
        )
    kv_transfer.check(vllm_config)
    return Plan(engine_args, frontend_args, vllm_config, Executor.get_class(vllm_config))


def download(plan: Plan) -> None:
    """Downloads the weights unless they are local. The core would do it, too, silently while it loads."""
    from vllm.model_executor.model_loader import get_model_loader

    get_model_loader(plan.vllm_config.load_config).download_model(plan.vllm_config.model_config)


@uncollected()
def import_rest(plan: Plan, capabilities: Capabilities) -> None:
    """Imports what the front-end needs once the core is ready, and loads the tokenizer, while the core loads
    the model. Raises: ValueError for a tokenizer or chat template that does not work.
    """
    import_module("vllm.entrypoints.launchers.api_server.app_state")
    import_module("vllm.entrypoints.launchers.app")
    if capabilities.has("media_rules"):
        import_module("penstock.engines.vllm.media.connector")  # registers itself
    model = plan.vllm_config.model_config
    if not model.skip_tokenizer_init:
        check(cached_tokenizer_from_config(model), model.tokenizer, plan.frontend_args.chat_template)


def connect(plan: Plan, capabilities: Capabilities, logger: SchedulerLogger | None, core: Core) -> GatedLLM:
    """AsyncLLM over the core, which is ready. logger: hears the scheduler's numbers."""

    def known(config: VllmConfig, index: int) -> Any:
        return logger

    more: dict[str, Any] = {"stat_loggers": [known]} if logger is not None else {}
    llm = GatedLLM(
        plan.vllm_config,
        plan.executor_class,
        log_stats=not plan.engine_args.disable_log_stats,
        log_requests=plan.engine_args.enable_log_requests,
        usage_context=UsageContext.OPENAI_API_SERVER,
        timed=capabilities.has("request_timings"),
        client_addresses={"input_address": core.address("input"), "output_address": core.address("output")},
        **more,
    )
    if capabilities.has("continued_streams"):
        from penstock.engines.vllm.continued.journal import Continued
        from penstock.engines.vllm.continued.rules import Rules

        rules = Rules(plan.vllm_config, capabilities)
        llm.continued = Continued(rules, llm.output_processor, llm.engine_core)
    llm.engine_core.input_socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # for a replacement core
    if capabilities.has("waiting_outputs"):
        from penstock.engines.vllm.core.waiting_outputs import WaitingOutputs

        WaitingOutputs(llm.engine_core.outputs_queue)
    return llm


async def build_app(llm: AsyncLLM, plan: Plan, capabilities: Capabilities) -> FastAPI:
    """vLLM's OpenAI application with all of its endpoints."""
    from vllm.entrypoints.launchers import app as vllm_app
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state

    args = _namespace(plan.engine_args, plan.frontend_args)
    args.api_key = [""]  # None would be VLLM_API_KEY, the gateway's key, which replicas are not sent
    args.structured_outputs_config = plan.vllm_config.structured_outputs_config
    if capabilities.has("request_models"):
        from penstock.engines.vllm.frontend.request_models import fail_at_first_item

        fail_at_first_item()
    tasks = await llm.get_supported_tasks()
    app = vllm_app.build_app(args, tasks, llm.model_config)
    await init_app_state(llm, app.state, args, tasks)
    additions.add(capabilities, app, llm)
    envs.enable_envs_cache()  # else each request reads the environment dozens of times; the core does it, too
    app.state.server = SimpleNamespace(should_exit=False)  # vLLM's dead-engine handlers set it
    return app


def _namespace(engine_args: AsyncEngineArgs, frontend_args: cli_args.FrontendArgs) -> Namespace:
    """The namespace that vLLM's command line would pass to its server."""
    command = {"headless": False, "api_server_count": 1, "grpc": False}
    return Namespace(**{**command, **vars(frontend_args), **vars(engine_args)})
