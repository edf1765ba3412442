"""What differs between processors: the backend, its resources, how rows become requests and outcomes columns.

Made from a config where the pipeline is built; its parts are pickled to where they run. `make_backend` runs
in the engine stage's actor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from penstock.config import LLMConfig
from penstock.config.derive.accelerators import Nodes
from penstock.config.derive.placement import gang_size, resolved, spans_nodes
from penstock.data.backends.engine_config import engine_identity, with_runner
from penstock.data.backends.in_process import in_process_engine, single_actor_options
from penstock.data.backends.openai_service import OpenAIService
from penstock.data.backends.protocol import Backend
from penstock.data.backends.serve_deployment import ServeDeployment
from penstock.data.execution.window import Window
from penstock.data.pipeline import row_mapping
from penstock.data.pipeline.configs import (
    EngineProcessorConfig,
    HttpRequestProcessorConfig,
    ProcessorConfig,
    ServeDeploymentProcessorConfig,
)
from penstock.data.pipeline.model_configs import (
    ModelProcessorConfig,
    SGLangEngineProcessorConfig,
    llm_config,
)
from penstock.data.pipeline.row_program import Program, program_columns, program_schema, run_program
from penstock.data.results.columns import result_columns, result_schema
from penstock.data.results.outcome import Outcome
from penstock.data.results.responses import checked
from penstock.data.rows.input_columns import request_columns
from penstock.data.rows.request import RowRequest, Task
from penstock.errors import ConfigError, Unsupported

Fields = Mapping[str, Any]

_DEFAULT_CONCURRENCY, _DEPLOYMENT_CONCURRENCY = 256, 1024
"""Where no config says: at least vLLM's own default; and that of some replicas."""


async def _run_request(window: Window, request: RowRequest) -> Outcome:
    return checked(request.path, await window.run(request))


@dataclass(frozen=True, slots=True)
class StageSpec:
    """name: Ray's name of its stage, where it has one.
    build_request: from what preprocessing returned and the row, what the engine stage runs.

    columns: from an outcome and what preprocessing returned, the result columns.
    request_fields: the names in what preprocessing returned that belong to the request.
    exclusive: whether the backend is used by this pipeline alone, see `Window`.
    run_row: through the window, what `build_request` made for one row.
    concurrent_requests: rows that the engine, or all replicas, run at a time.
    identity: of the model or service; a journal returns its answers only for the same one.
    """

    name: str
    task: Task
    make_backend: Callable[[], Backend]
    build_request: Callable[[Fields, Fields], Any]
    columns: Callable[[Outcome, Fields], dict[str, Any]]
    request_fields: Callable[[Fields], set[str]]
    schema: Any
    resources: Callable[[], dict[str, Any]]
    exclusive: bool = True
    concurrent_requests: int = _DEPLOYMENT_CONCURRENCY
    max_in_flight: int | None = None
    run_row: Callable[[Window, Any], Coroutine[Any, Any, Outcome]] = _run_request
    identity: bytes = b""


def stage_spec(config: ProcessorConfig, program: Program | None = None) -> StageSpec:
    """Raises: ConfigError."""
    spec = _for_backend(config)
    if program is None:
        return spec
    defaults = config.row_defaults if isinstance(config, ModelProcessorConfig) else None

    def own_row(fields: Fields, row: Fields) -> Fields:
        return fields

    async def run_row(window: Window, row: Fields) -> Outcome:
        return await run_program(program, row, window.run, spec.task, defaults)

    def columns(outcome: Outcome, fields: Fields) -> dict[str, Any]:
        output, results = program_columns(outcome)
        return output | results

    def no_fields(fields: Fields) -> set[str]:
        return set()

    return replace(
        spec,
        build_request=own_row,
        columns=columns,
        request_fields=no_fields,
        schema=program_schema(),
        run_row=run_row,
        identity=spec.identity + _source(program),
    )


def _for_backend(config: ProcessorConfig) -> StageSpec:
    if isinstance(config, EngineProcessorConfig):
        return _in_process(config, "EngineStage", row_mapping.model_request)
    if isinstance(config, ModelProcessorConfig):
        name = "SGLangEngineStage" if isinstance(config, SGLangEngineProcessorConfig) else "vLLMEngineStage"
        request = row_mapping.model_request if config.applies_chat_template else row_mapping.prompt_request
        return replace(
            _in_process(config, name, partial(request, defaults=config.row_defaults)),
            max_in_flight=config.max_pending_requests,
        )
    if isinstance(config, ServeDeploymentProcessorConfig):
        return _serve_deployment(config)
    if isinstance(config, HttpRequestProcessorConfig):
        return _http(config)
    raise ConfigError(
        f"{type(config).__name__} is not the config of a processor; there are vLLMEngineProcessorConfig, "
        "SGLangEngineProcessorConfig, EngineProcessorConfig, ServeDeploymentProcessorConfig and "
        "HttpRequestProcessorConfig."
    )


def _in_process(
    config: EngineProcessorConfig | ModelProcessorConfig, name: str, request: Callable[..., Any]
) -> StageSpec:
    model = with_runner(llm_config(config), config.task_type)
    task = Task(config.task_type, model=model.model_id, alone=True, read_files=config.read_files)
    return StageSpec(
        name=name,
        task=task,
        make_backend=lambda: in_process_engine(resolved(model, _nodes())),
        build_request=partial(request, task),
        columns=lambda outcome, fields: result_columns(task, outcome),
        request_fields=partial(request_columns, task=task),
        schema=result_schema(task),
        resources=partial(_engine_resources, model),
        concurrent_requests=_concurrency(model),
        identity=_identity("engine", config.task_type, engine_identity(model)),
    )


def _concurrency(model: LLMConfig) -> int:
    name = "max_running_requests" if model.engine_name == "sglang" else "max_num_seqs"
    return int(model.engine_kwargs.get(name) or _DEFAULT_CONCURRENCY)


def _serve_deployment(config: ServeDeploymentProcessorConfig) -> StageSpec:
    task = Task(config.task_type, read_files=config.read_files)
    return StageSpec(
        name="ServeDeploymentStage",
        task=task,
        make_backend=partial(
            ServeDeployment,
            config.app_name,
            config.deployment_name,
            dtypes=config.dtype_mapping or {},
            max_concurrency=config.max_in_flight,
            timeout_s=config.request_timeout_s,
        ),
        build_request=partial(row_mapping.call_or_request, task),
        columns=partial(row_mapping.call_or_model_columns, task),
        request_fields=partial(row_mapping.call_or_request_fields, task),
        schema=result_schema(task),
        resources=partial(_client_resources, config),
        exclusive=False,
        identity=_identity("served", config.task_type, config.app_name, config.deployment_name),
    )


def _http(config: HttpRequestProcessorConfig) -> StageSpec:
    task = Task(config.task_type, token_ids=False, read_files=config.read_files)
    return StageSpec(
        name="HttpRequestStage",
        task=task,
        make_backend=partial(http_service, config),
        build_request=partial(row_mapping.payload_or_request, task),
        columns=partial(row_mapping.payload_or_model_columns, task),
        request_fields=partial(row_mapping.payload_or_request_fields, task),
        schema=result_schema(task),
        resources=partial(_client_resources, config),
        exclusive=False,
        identity=_identity("http", config.task_type, config.url, config.model),
    )


def http_service(config: HttpRequestProcessorConfig) -> OpenAIService:
    """One actor's client; the pipeline's actors share its requests per second."""
    return OpenAIService(
        config.url,
        headers=config.headers,
        api_key=config.api_key,
        model=config.model,
        requests_per_second=config.qps / config.get_concurrency()["max_size"] if config.qps else None,
        max_concurrency=config.max_in_flight,
        timeout_s=config.timeout_s,
        finds_model=False,
        session_factory=config.session_factory,
    )


def _identity(*parts: object) -> bytes:
    return msgspec.json.encode(parts, order="sorted")


def _source(program: Program) -> bytes:
    """The program's text: with another one, rows have another output."""
    try:
        return inspect.getsource(program).encode()
    except (OSError, TypeError):  # defined in a console, or an object
        return f"{program.__module__}.{getattr(program, '__qualname__', type(program).__qualname__)}".encode()


def _client_resources(config: ServeDeploymentProcessorConfig | HttpRequestProcessorConfig) -> dict[str, Any]:
    """Of an actor that only sends requests."""
    stage = config.http_request_stage if isinstance(config, HttpRequestProcessorConfig) else None
    placed = {"accelerator_type": config.accelerator_type} if config.accelerator_type else {}
    return {"num_cpus": 0, **placed, **(stage.resources() if stage is not None else {})}


def _engine_resources(config: LLMConfig) -> dict[str, Any]:
    """Ray's options of one actor with an engine of `config` on this cluster.

    Raises: Unsupported when the engine needs several nodes, or computes together with other engines.
    """
    nodes = _nodes()
    if gang_size(config) > 1:
        raise Unsupported(
            f"The engines of '{config.model_id}' compute together (data_parallel_size), which the engines of "
            "a pipeline cannot: serve it (penstock serve, serve.run), name it with "
            "ServeDeploymentProcessorConfig."
        )
    if spans_nodes(config, nodes):
        raise Unsupported(
            f"The engine of '{config.model_id}' needs several nodes, which an engine of a pipeline cannot "
            "have: serve it (penstock serve, serve.run) and name it with ServeDeploymentProcessorConfig."
        )
    return single_actor_options(config, nodes)


def _nodes() -> Nodes | None:
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else None
