"""Configs of processors: which engines, how many, which limits. Pure description.

Field names are those of Ray Data's LLM processors; those without effect here are accepted with a warning.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from penstock.config import LLMConfig
from penstock.config.messages.notices import warn_once
from penstock.config.schema.sections import PlacementGroupConfig
from penstock.config.schema.strict import RootConfig
from penstock.data.execution.retry import RetryPolicy
from penstock.data.pipeline.ray_stages import (
    MediaStage,
    ModelStage,
    PlainStage,
    Stage,
    TemplateStage,
    TextStage,
    engine_arguments,
)

TaskName = Literal["generate", "embed", "classify", "score"]
_ROW_BY_ROW = "Without effect: rows go into the engine one by one, and their fields say what is to be done."
_SIZES = ("max_concurrent_batches", "max_tasks_in_flight_per_actor")
_SWITCHES = ("tokenize", "detokenize", "has_image")


class ProcessorConfig(RootConfig):
    """Fields of all processors."""

    batch_size: int = Field(
        64, ge=1, description="Rows per batch of Ray Data. The engine takes them one by one."
    )
    concurrency: int | tuple[int, int] = Field(
        1, description="Engines, all started at once; `(m, n)`: from m to n of them, by demand."
    )
    task_type: TaskName = Field("generate", description="`generate`, `embed`, `classify` or `score`.")
    should_continue_on_error: bool = Field(
        True, description="Failed rows pass through with `error` set. False: the first one ends the pipeline."
    )
    max_attempts: int = Field(3, ge=1, description="Responses 429 and 5xx until a row fails.")
    max_deaths: int = Field(3, ge=2, description="Engine deaths while they ran a row, until the row fails.")
    row_deadline_s: float | None = Field(None, gt=0, description="For one row, over all its tries.")
    outage_s: float = Field(300.0, gt=0, description="Without a reachable engine, until the pipeline ends.")
    read_files: bool = Field(
        True,
        description="Whether media that rows name by path or bucket are read here. Set False for untrusted "
        "rows, which could otherwise read this cluster's files.",
    )
    journal: str | None = Field(
        None,
        description="Folder or bucket URL where each answer is stored as it arrives. The same pipeline, run "
        "again, reuses them.",
    )

    @field_validator("concurrency")
    @classmethod
    def _in_order(cls, value: int | tuple[int, int]) -> int | tuple[int, int]:
        least, most = value if isinstance(value, tuple) else (value, value)
        if not 1 <= least <= most:
            raise ValueError(f"{value} engines: give n, or (m, n) with 1 <= m <= n")
        return value

    @property
    def most_actors(self) -> int:
        """Maximum size of the pool."""
        return self.concurrency[1] if isinstance(self.concurrency, tuple) else self.concurrency

    @property
    def retry_policy(self) -> RetryPolicy:
        return RetryPolicy(self.max_attempts, self.max_deaths, self.row_deadline_s, self.outage_s)


class EngineProcessorConfig(ProcessorConfig):
    """Engines started by the pipeline, from the same config as for serving: vLLM, or the simulator."""

    llm_config: LLMConfig = Field(description="Model, engine and its resources.")


class vLLMEngineProcessorConfig(ProcessorConfig):
    """vLLM engines started by the pipeline."""

    model_source: str = Field("", description="Hub id, folder, bucket or URL; `demo` is the embedded model.")
    model: str = Field("", description="Another name of `model_source`.")
    engine_kwargs: dict[str, Any] = Field({}, description="vLLM's arguments, under its own names.")
    runtime_env: dict[str, Any] | None = Field(None, description="Ray's runtime environment of the engines.")
    accelerator_type: str | None = Field(
        None, description="Ray's name of the GPU type (A10G, L4, H100, ...)."
    )
    placement_group_config: PlacementGroupConfig | None = Field(None, description="An engine's resources.")
    resources_per_bundle: dict[str, float] | None = Field(
        None, description="Older form of `placement_group_config: {bundle_per_worker: ...}`."
    )
    dynamic_lora_loading_path: str | None = Field(
        None, description="Folder or bucket with one adapter in each subfolder; rows name `base:adapter`."
    )
    log_engine_metrics: bool = Field(True, description="Whether the engine records its metrics.")
    max_pending_requests: int | None = Field(None, ge=1, description="Maximum rows in one engine at a time.")
    max_concurrent_batches: int | None = Field(None, ge=1, description=_ROW_BY_ROW)
    max_tasks_in_flight_per_actor: int | None = Field(None, ge=1, description=_ROW_BY_ROW)
    chat_template_stage: TemplateStage | None = Field(
        None,
        description="`chat_template` and `chat_template_kwargs` of all rows. False: a `prompt` wins over "
        "`messages` beside it.",
    )
    tokenize_stage: TextStage | None = Field(None, description=_ROW_BY_ROW)
    detokenize_stage: TextStage | None = Field(None, description=_ROW_BY_ROW)
    prepare_multimodal_stage: MediaStage | None = Field(
        None, description="`chat_template_content_format` of the engine; the rest has no effect."
    )
    prepare_image_stage: PlainStage | None = Field(None, description=_ROW_BY_ROW)
    apply_chat_template: bool | None = Field(
        None, description="Older form of `chat_template_stage`, true or false."
    )
    tokenize: bool | None = Field(None, description=_ROW_BY_ROW)
    detokenize: bool | None = Field(None, description=_ROW_BY_ROW)
    has_image: bool | None = Field(None, description=_ROW_BY_ROW)

    @property
    def _stages(self) -> dict[str, Stage]:
        values = {name: getattr(self, name) for name in type(self).model_fields if name.endswith("_stage")}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def applies_chat_template(self) -> bool:
        """False: rows bring prompts, and any messages are what the prompts were made of."""
        stage = self.chat_template_stage
        return self.apply_chat_template is not False and (stage is None or stage.enabled)

    @model_validator(mode="after")
    def _same_model(self) -> Self:
        for name, stage in self._stages.items():
            other = stage.model_source if isinstance(stage, ModelStage) else None
            if other not in (None, self.source):
                raise ValueError(
                    f"{name}.model_source is {other!r}, but the engine uses its own tokenizer and chat "
                    "template. Leave it out; another tokenizer is `tokenizer_source` of an "
                    "EngineProcessorConfig."
                )
        if twice := engine_arguments(self.chat_template_stage, self.prepare_multimodal_stage).keys() & (
            self.engine_kwargs.keys()
        ):
            raise ValueError(f"{', '.join(sorted(twice))}: in engine_kwargs and in a stage; keep the former.")
        return self

    @model_validator(mode="after")
    def _warn_without_effect(self) -> Self:
        """Warns of options of Ray's processors that have no effect here."""
        idle = [name for name in _SIZES if getattr(self, name) is not None]
        idle += [name for name in _SWITCHES if getattr(self, name) is False]
        for name, stage in self._stages.items():
            idle += stage.without_effect(name)
        if idle:
            warn_once(
                f"vLLMEngineProcessorConfig: {', '.join(idle)}: {_ROW_BY_ROW[0].lower()}{_ROW_BY_ROW[1:]}"
            )
        return self

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if bool(self.model) == bool(self.model_source):
            raise ValueError("name one model, as model_source (or, the same, as model)")
        if self.resources_per_bundle and self.placement_group_config:
            raise ValueError("resources_per_bundle and placement_group_config say the same; keep the latter")
        return self

    @property
    def source(self) -> str:
        return self.model or self.model_source


class ServeDeploymentProcessorConfig(ProcessorConfig):
    """A running Ray Serve deployment, shared with its other clients.

    Rows name a method (`method`, `request_kwargs`, `dtype`); for a Penstock model they may also be requests.
    """

    app_name: str = Field("default", description="Ray Serve's application.")
    deployment_name: str | None = Field(None, description="Its deployment; required if it has several.")
    dtype_mapping: dict[str, Any] = Field(
        {}, description="Classes by the name in a row's `dtype`; its `request_kwargs` are their arguments."
    )
    max_in_flight: int = Field(256, ge=1, description="Maximum parallel calls per actor of the pipeline.")


class HttpRequestProcessorConfig(ProcessorConfig):
    """Any OpenAI-compatible URL.

    A row with `payload` is posted as it is to exactly this URL, and gets `http_response`. Other rows are
    requests, as for engines, and the URL is the base of the service (`https://host/v1`).
    """

    url: str = Field(min_length=1, description="Whole URL for payloads, base URL for requests.")
    model: str | None = Field(None, description="For requests without a model.")
    headers: dict[str, str] = Field({}, description="Sent with every request.")
    api_key: str | None = Field(None, description="Sent as a bearer token.")
    qps: float | None = Field(
        None,
        gt=0,
        description="Maximum requests per second of the whole pipeline, divided among its actors "
        "(`concurrency`).",
    )
    max_retries: int | None = Field(None, ge=0, description="Older form of max_attempts, minus 1.")
    base_retry_wait_time_in_s: float = Field(1.0, gt=0, description="Seconds before the second try.")
    timeout_s: float = Field(600.0, gt=0, description="For one try.")
    max_in_flight: int = Field(64, ge=1, description="Maximum parallel requests per actor of the pipeline.")

    @property
    def retry_policy(self) -> RetryPolicy:
        attempts = self.max_attempts if self.max_retries is None else self.max_retries + 1
        pause_s = self.base_retry_wait_time_in_s
        return RetryPolicy(attempts, self.max_deaths, self.row_deadline_s, self.outage_s, pause_s)


def llm_config(config: EngineProcessorConfig | vLLMEngineProcessorConfig) -> LLMConfig:
    """The config of one engine. Raises: ConfigError."""
    if isinstance(config, EngineProcessorConfig):
        return config.llm_config
    group = config.placement_group_config
    if config.resources_per_bundle is not None:
        group = PlacementGroupConfig(bundle_per_worker=config.resources_per_bundle)
    values: dict[str, Any] = {
        "model_loading_config": {"model_id": config.source, "model_source": config.source},
        "engine_kwargs": engine_arguments(config.chat_template_stage, config.prepare_multimodal_stage)
        | config.engine_kwargs,
        "log_engine_metrics": config.log_engine_metrics,
        "accelerator_type": config.accelerator_type,
        "runtime_env": config.runtime_env,
        "placement_group_config": group,
    }
    if config.dynamic_lora_loading_path is not None:
        lora: dict[str, Any] = {"dynamic_lora_loading_path": config.dynamic_lora_loading_path}
        kwargs = dict(values["engine_kwargs"])
        if "max_loras" in kwargs:  # in Ray's programs the one way to say it; the engine needs room for more
            lora["max_num_adapters_per_replica"] = kwargs.pop("max_loras")
        values |= {"lora_config": lora, "engine_kwargs": kwargs}
    return LLMConfig(**{name: value for name, value in values.items() if value is not None})
