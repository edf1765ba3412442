"""Configs that name one model and its engine's arguments, as Ray Data's do: for vLLM and for SGLang.

What Ray's configs know and has no effect here is accepted with a warning.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import model_validator

from penstock.config import LLMConfig
from penstock.config.messages.problems import warn_once
from penstock.config.schema.sections import PlacementGroup
from penstock.config.schema.strict import optional, setting
from penstock.data.pipeline.configs import EngineProcessorConfig, ProcessorConfig
from penstock.data.pipeline.ray_stages import (
    ChatTemplateStageConfig,
    PrepareMultimodalStageConfig,
    StageConfig,
    TokenizerStageConfig,
    engine_arguments,
)

_ROW_BY_ROW = "Without effect: rows go into the engine one by one, and their fields say what is to be done."
_SIZES = ("max_concurrent_batches", "max_tasks_in_flight_per_actor")
_IN_ENGINE = "True or false, the engine does it; sizes have no effect."


class ModelProcessorConfig(ProcessorConfig):
    """Fields of both. Use one of its subclasses."""

    model_source: str = setting("", "Hub id, folder, bucket or URL; `demo` is the embedded model.")
    model: str = setting("", "Another name of `model_source`.")
    engine_kwargs: dict[str, Any] = setting({}, "The engine's arguments, under its own names.")
    runtime_env: dict[str, Any] | None = optional("Ray's runtime environment of the engines.")
    placement_group_config: PlacementGroup | None = optional("An engine's resources.")
    resources_per_bundle: dict[str, float] | None = optional(
        "Older form of `placement_group_config: {bundle_per_worker: ...}`."
    )
    max_pending_requests: int | None = optional("Maximum rows in one engine at a time.", ge=1)
    max_concurrent_batches: int | None = optional(_ROW_BY_ROW, ge=1)
    max_tasks_in_flight_per_actor: int | None = optional(_ROW_BY_ROW, ge=1)
    chat_template_stage: ChatTemplateStageConfig | None = optional(
        "`chat_template` and `chat_template_kwargs` of all rows. False: a `prompt` wins over "
        "`messages` beside it."
    )
    tokenize_stage: TokenizerStageConfig | None = optional(_IN_ENGINE)
    detokenize_stage: TokenizerStageConfig | None = optional(_IN_ENGINE)
    prepare_multimodal_stage: PrepareMultimodalStageConfig | None = optional(
        "`chat_template_content_format` and `model_config_kwargs` of the engine; the rest has no effect."
    )
    apply_chat_template: bool | None = optional("Older form of `chat_template_stage`, true or false.")
    tokenize: bool | None = optional(_IN_ENGINE)
    detokenize: bool | None = optional(_IN_ENGINE)

    @property
    def source(self) -> str:
        return self.model or self.model_source

    @property
    def applies_chat_template(self) -> bool:
        """False: rows bring prompts, and any messages are what the prompts were made of."""
        stage = self.chat_template_stage
        return self.apply_chat_template is not False and (stage is None or stage.enabled)

    @property
    def stage_arguments(self) -> dict[str, Any]:
        """Arguments of the engine that its stages say."""
        return engine_arguments(self.chat_template_stage, self.prepare_multimodal_stage)

    @property
    def row_defaults(self) -> dict[str, Any]:
        """Fields of each row's request, for what the engine has no argument for."""
        return {}

    def with_template_kwargs(self, kwargs: dict[str, Any]) -> Self:
        """The config with these variables of its chat template, unless its stage has some.

        Raises: ConfigError.
        """
        stage = self.chat_template_stage
        if stage is not None and stage.chat_template_kwargs is not None:
            return self
        values: dict[str, Any] = {name: getattr(self, name) for name in self.model_fields_set}
        own = {} if stage is None else stage.model_dump(exclude_unset=True)
        return self.parse(values | {"chat_template_stage": {**own, "chat_template_kwargs": kwargs}})

    @property
    def _stages(self) -> dict[str, StageConfig]:
        values = {name: getattr(self, name) for name in type(self).model_fields if name.endswith("_stage")}
        return {name: value for name, value in values.items() if value is not None}

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if bool(self.model) == bool(self.model_source):
            raise ValueError("name one model, as model_source (or, the same, as model)")
        if self.resources_per_bundle and self.placement_group_config:
            raise ValueError("resources_per_bundle and placement_group_config say the same; keep the latter")
        for name, stage in self._stages.items():
            other = stage.model_source if isinstance(stage, TokenizerStageConfig) else None
            if other not in (None, self.source):
                raise ValueError(
                    f"{name}.model_source is {other!r}, but the engine uses its own tokenizer and chat "
                    "template. Leave it out; another tokenizer is `tokenizer_source` of an "
                    "EngineProcessorConfig."
                )
        if twice := self.stage_arguments.keys() & self.engine_kwargs.keys():
            raise ValueError(f"{', '.join(sorted(twice))}: in engine_kwargs and in a stage; keep the former.")
        return self

    @model_validator(mode="after")
    def _warn_without_effect(self) -> Self:
        """Warns of options of Ray's processors that have no effect here."""
        idle = [name for name in _SIZES if getattr(self, name) is not None]
        for name, stage in self._stages.items():
            idle += stage.without_effect(name)
        if idle:
            warn_once(f"{type(self).__name__}: {', '.join(idle)}: {_ROW_BY_ROW[0].lower()}{_ROW_BY_ROW[1:]}")
        return self


class vLLMEngineProcessorConfig(ModelProcessorConfig):
    """vLLM engines started by the pipeline."""

    dynamic_lora_loading_path: str | None = optional(
        "Folder or bucket with one adapter in each subfolder; rows name `base:adapter`. "
        "Without it, and with `enable_lora` in engine_kwargs, rows name ids on the hub."
    )
    log_engine_metrics: bool = setting(True, "Whether the engine records its metrics.")
    prepare_image_stage: StageConfig | None = optional(_IN_ENGINE)
    has_image: bool | None = optional(_IN_ENGINE)


class SGLangEngineProcessorConfig(ModelProcessorConfig):
    """SGLang engines started by the pipeline. `engine_kwargs` are its server's arguments.

    `python` among them is the interpreter of the environment that SGLang is installed in.
    """

    @property
    def stage_arguments(self) -> dict[str, Any]:
        template = self.chat_template_stage and self.chat_template_stage.chat_template
        return {"chat_template": template} if template else {}

    @property
    def row_defaults(self) -> dict[str, Any]:
        kwargs = self.chat_template_stage and self.chat_template_stage.chat_template_kwargs
        return {"chat_template_kwargs": kwargs} if kwargs else {}

    @model_validator(mode="after")
    def _sglangs_own(self) -> Self:
        if self.task_type != "generate":
            raise ValueError(f"task_type is {self.task_type!r}, but a processor of SGLang only generates")
        template = self.stage_arguments.get("chat_template", "")
        if "{" in template or "\n" in template:
            raise ValueError(
                "chat_template_stage.chat_template is the text of a template, but SGLang reads one from a "
                "file: give its path, or the name of one of SGLang's own"
            )
        if media := engine_arguments(None, self.prepare_multimodal_stage):
            raise ValueError(
                f"prepare_multimodal_stage.{min(media)} is an argument of vLLM's; those of SGLang go into "
                "engine_kwargs"
            )
        return self


def llm_config(config: EngineProcessorConfig | ModelProcessorConfig) -> LLMConfig:
    """The config of one engine. Raises: ConfigError."""
    if isinstance(config, EngineProcessorConfig):
        return config.llm_config
    group = config.placement_group_config
    if config.resources_per_bundle is not None:
        group = {"bundle_per_worker": config.resources_per_bundle}
    values: dict[str, Any] = {
        "model_loading_config": {"model_id": config.source, "model_source": config.source},
        "llm_engine": "sglang" if isinstance(config, SGLangEngineProcessorConfig) else None,
        "engine_kwargs": config.stage_arguments | config.engine_kwargs,
        "accelerator_type": config.accelerator_type,
        "runtime_env": config.runtime_env,
        "placement_group_config": group,
    }
    if isinstance(config, vLLMEngineProcessorConfig):
        values |= _vllms_own(config, values["engine_kwargs"])
    return LLMConfig(**{name: value for name, value in values.items() if value is not None})


def _vllms_own(config: vLLMEngineProcessorConfig, kwargs: dict[str, Any]) -> dict[str, Any]:
    if config.dynamic_lora_loading_path is None and not kwargs.get("enable_lora"):
        return {"log_engine_metrics": config.log_engine_metrics}
    lora: dict[str, Any] = {"dynamic_lora_loading_path": config.dynamic_lora_loading_path}
    if "max_loras" in kwargs:  # in Ray's programs the one way to say it; the engine needs room for more
        lora["max_num_adapters_per_replica"] = kwargs["max_loras"]
    kept = {name: value for name, value in kwargs.items() if name != "max_loras"}
    return {"log_engine_metrics": config.log_engine_metrics, "lora_config": lora, "engine_kwargs": kept}
