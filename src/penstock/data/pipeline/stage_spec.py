"""What differs between processors: who answers, what a row may ask of it, and which columns come of that.

Made of a config where the pipeline is built; its parts travel to where they are used. `make` runs inside the
engine's actor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import msgspec

from penstock.config.derive.accelerators import Nodes
from penstock.config.derive.placement import gang_size, spans_nodes
from penstock.data.backends.build import in_process_engine, single_actor_options
from penstock.data.backends.engine_config import engine_identity, with_runner
from penstock.data.backends.openai_service import PAYLOAD, OpenAIService
from penstock.data.backends.protocol import Backend
from penstock.data.backends.serve_deployment import ServeDeployment
from penstock.data.backends.serve_handle import method_call
from penstock.data.execution.window import Window
from penstock.data.pipeline.configs import (
    EngineProcessorConfig,
    HttpRequestProcessorConfig,
    ProcessorConfig,
    ServeDeploymentProcessorConfig,
    llm_config,
    vLLMEngineProcessorConfig,
)
from penstock.data.pipeline.engine_stage import Run, asked
from penstock.data.pipeline.row_program import Program, program_columns, program_schema
from penstock.data.pipeline.row_program import run as run_row
from penstock.data.results.columns import common_columns, result_columns, result_schema
from penstock.data.results.outcome import Outcome
from penstock.data.rows.builder import build_request
from penstock.data.rows.coerce import to_json
from penstock.data.rows.input_columns import is_batch_line, request_columns
from penstock.data.rows.request import RowRequest, Task
from penstock.errors import BadRequest, ConfigError, Unsupported

Fields = Mapping[str, Any]

_SEATS, _SEATS_OF_A_FLEET = 256, 1024
"""Where nobody says: vLLM's own default, at least; and some replicas of that."""


@dataclass(frozen=True, slots=True)
class Station:
    """ask: of what preprocessing returned and of the row, what crosses to the engine. Raises: BadRequest.

    columns: of the outcome and of what preprocessing returned. fields: names of the request among those.
    seats: rows that the engine, or the fleet, runs at a time.
    identity: of what answers; a journal holds its answers for nobody else.
    """

    task: Task
    make: Callable[[], Backend]
    ask: Callable[[Fields, Fields], Any]
    columns: Callable[[Outcome, Fields], dict[str, Any]]
    fields: Callable[[Fields], set[str]]
    schema: Any
    resources: Callable[[], dict[str, Any]]
    alone: bool = True
    seats: int = _SEATS_OF_A_FLEET
    most: int | None = None
    run: Run = asked
    identity: bytes = b""


def station(config: ProcessorConfig, program: Program | None = None) -> Station:
    """Raises: ConfigError."""
    found = _station(config)
    if program is None:
        return found
    return replace(
        found,
        ask=the_row,
        columns=ran,
        fields=none_of_them,
        schema=program_schema(),
        run=partial(run_program, program, found.task),
        identity=found.identity + _source(program),
    )


def _station(config: ProcessorConfig) -> Station:
    if isinstance(config, EngineProcessorConfig | vLLMEngineProcessorConfig):
        return _engine(config)
    if isinstance(config, ServeDeploymentProcessorConfig):
        return _served(config)
    if isinstance(config, HttpRequestProcessorConfig):
        return _http(config)
    raise ConfigError(f"{type(config).__name__} is no processor's config.")


def _engine(config: EngineProcessorConfig | vLLMEngineProcessorConfig) -> Station:
    model = with_runner(llm_config(config), config.task_type)
    task = Task(config.task_type, model=model.model_id, alone=True, read_files=config.read_files)
    return Station(
        task=task,
        make=partial(in_process_engine, model),
        ask=partial(request_of_prompt if _has_prompts(config) else request, task),
        columns=partial(answered, task),
        fields=partial(request_columns, task=task),
        schema=result_schema(task),
        resources=partial(engine_resources, model),
        seats=int(model.engine_kwargs.get("max_num_seqs") or _SEATS),
        most=config.max_pending_requests if isinstance(config, vLLMEngineProcessorConfig) else None,
        identity=_identity("engine", config.task_type, engine_identity(model)),
    )


def _served(config: ServeDeploymentProcessorConfig) -> Station:
    task = Task(config.task_type, read_files=config.read_files)
    return Station(
        task=task,
        make=partial(
            ServeDeployment,
            config.app_name,
            config.deployment_name,
            dtypes=config.dtype_mapping,
            max_concurrency=config.max_in_flight,
        ),
        ask=partial(call_or_request, task),
        columns=partial(result_or_columns, task),
        fields=partial(fields_or_call, task),
        schema=result_schema(task),
        resources=small,
        alone=False,
        identity=_identity("served", config.task_type, config.app_name, config.deployment_name),
    )


def call_or_request(task: Task, fields: Fields, row: Fields) -> RowRequest:
    """A row that names a method is a call of it. Raises: BadRequest."""
    if not is_call(fields):
        return request(task, fields, row)
    kwargs = fields.get("request_kwargs")
    if not isinstance(kwargs, Mapping):
        raise BadRequest("A row with a `method` needs `request_kwargs`, a dict.", param="request_kwargs")
    return method_call(str(fields["method"]), cast("Fields", kwargs), fields.get("dtype"))


def result_or_columns(task: Task, outcome: Outcome, fields: Fields) -> dict[str, Any]:
    """Of a call: what it returned; of one of a model's endpoints the columns of such an answer, too."""
    if not is_call(fields):
        return result_columns(task, outcome)
    said = {} if outcome.body is None else msgspec.json.decode(outcome.body, type=dict[str, Any])
    if fields["method"] in ("chat", "completions") and "choices" in said:
        return {**said, **result_columns(task, outcome)}
    return {**said, **common_columns(outcome)}


def fields_or_call(task: Task, fields: Fields) -> set[str]:
    if not is_call(fields):
        return request_columns(fields, task)
    return {name for name in ("method", "dtype", "request_kwargs") if name in fields}


def is_call(fields: Fields) -> bool:
    return "method" in fields and not is_batch_line(fields)


def _http(config: HttpRequestProcessorConfig) -> Station:
    task = Task(config.task_type, token_ids=False, read_files=config.read_files)
    return Station(
        task=task,
        make=partial(service_of, config),
        ask=partial(payload_or_request, task),
        columns=partial(response_or_columns, task),
        fields=partial(fields_or_payload, task),
        schema=result_schema(task),
        resources=small,
        alone=False,
        identity=_identity("http", config.task_type, config.url, config.model),
    )


def service_of(config: HttpRequestProcessorConfig) -> OpenAIService:
    """One actor's client; the pipeline's actors share its requests per second."""
    return OpenAIService(
        config.url,
        headers=config.headers,
        api_key=config.api_key,
        model=config.model,
        requests_per_second=config.qps / config.most_actors if config.qps else None,
        max_concurrency=config.max_in_flight,
        timeout_s=config.timeout_s,
        finds_model=False,
    )


def _identity(*parts: object) -> bytes:
    return msgspec.json.encode(parts, order="sorted")


def _source(program: Program) -> bytes:
    """A program's text: another one's rows have another output."""
    try:
        return inspect.getsource(program).encode()
    except (OSError, TypeError):  # typed into a console, or an object
        return f"{program.__module__}.{getattr(program, '__qualname__', type(program).__qualname__)}".encode()


def payload_or_request(task: Task, fields: Fields, row: Fields) -> RowRequest:
    """A payload goes as it is. Raises: BadRequest."""
    if "payload" not in fields:
        return request(task, fields, row)
    body = msgspec.json.encode(to_json(fields["payload"], "payload"))
    return RowRequest(path=PAYLOAD, body=body)


def response_or_columns(task: Task, outcome: Outcome, fields: Fields) -> dict[str, Any]:
    if "payload" not in fields:
        return result_columns(task, outcome)
    said = None if outcome.body is None else msgspec.json.decode(outcome.body)
    return {"http_response": said, **common_columns(outcome)}


def fields_or_payload(task: Task, fields: Fields) -> set[str]:
    return {"payload"} if "payload" in fields else request_columns(fields, task)


def small() -> dict[str, Any]:
    """An actor that only asks others."""
    return {"num_cpus": 0}


def request(task: Task, fields: Fields, row: Fields) -> RowRequest:
    """The request in `fields`; columns that preprocessing only handed on are none of it.

    Raises: BadRequest.
    """
    ours = request_columns(fields, task)
    return build_request({name: fields[name] for name in fields if name in ours or name not in row}, task)


def request_of_prompt(task: Task, fields: Fields, row: Fields) -> RowRequest:
    """The same; where a prompt stands beside the messages that it was made of, it is the input."""
    if fields.get("prompt") is not None:
        fields = {name: value for name, value in fields.items() if name != "messages"}
    return request(task, fields, row)


def _has_prompts(config: ProcessorConfig) -> bool:
    """Whether the user applies the chat template."""
    return isinstance(config, vLLMEngineProcessorConfig) and not config.applies_chat_template


def answered(task: Task, outcome: Outcome, fields: Fields) -> dict[str, Any]:
    return result_columns(task, outcome)


def the_row(fields: Fields, row: Fields) -> Fields:
    """What a program gets: the row as preprocessing left it."""
    return fields


def none_of_them(fields: Fields) -> set[str]:
    return set()


def ran(outcome: Outcome, fields: Fields) -> dict[str, Any]:
    """What the program returned, and what it took."""
    output, found = program_columns(outcome)
    return {**output, **found}


async def run_program(program: Program, task: Task, row: Fields, window: Window) -> Outcome:
    return await run_row(program, row, window.run, task)


def engine_resources(config: Any) -> dict[str, Any]:
    """Ray's options of one actor with an engine of `config` on this cluster.

    Raises: Unsupported when the engine needs several nodes, or others beside it.
    """
    nodes = _nodes()
    if gang_size(config) > 1:
        raise Unsupported(
            f"The engines of '{config.model_id}' compute together (data_parallel_size), a pipeline's own "
            "do not: serve it (penstock serve, serve.run), name it with ServeDeploymentProcessorConfig."
        )
    if spans_nodes(config, nodes):
        raise Unsupported(
            f"The engine of '{config.model_id}' needs several nodes, which a pipeline's own cannot have: "
            "serve it (penstock serve, serve.run) and name it with ServeDeploymentProcessorConfig."
        )
    return single_actor_options(config, nodes)


def _nodes() -> Nodes | None:
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else None
