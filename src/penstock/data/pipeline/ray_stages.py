"""The stages of `ray.data.llm` as options of a processor, and which of them have an effect here.

There each stage is a separate operator. Here the engine does their work row by row, so a chat template is an
engine argument, and sizes of stages have no effect.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field

from penstock.config.schema.strict import StrictModel

_EFFECTIVE = {
    "enabled",
    "model_source",
    "chat_template",
    "chat_template_kwargs",
    "chat_template_content_format",
}


class Stage(StrictModel):
    """Options that every stage has."""

    _may_be_off: ClassVar[bool] = False
    enabled: bool = True
    batch_size: int | None = Field(None, ge=1)
    concurrency: int | tuple[int, int] | None = None
    runtime_env: dict[str, Any] | None = None
    num_cpus: float | None = Field(None, ge=0)
    memory: float | None = Field(None, ge=0)

    @classmethod
    def of(cls, given: object) -> object:
        """Ray accepts a bool, a dict, or its own object."""
        if isinstance(given, bool):
            return cls.model_validate({"enabled": given})
        return given.model_dump(exclude_unset=True) if isinstance(given, BaseModel) else given

    def without_effect(self, stage: str) -> list[str]:
        """Options of this stage that are set without effect."""
        idle = sorted(f"{stage}.{name}" for name in self.model_fields_set - _EFFECTIVE)
        return idle if self.enabled or self._may_be_off else [f"{stage}.enabled", *idle]


class ModelStage(Stage):
    """A stage with the model's tokenizer."""

    model_source: str | None = None


class ChatTemplateStage(ModelStage):
    """How messages become a prompt. Not enabled: rows bring prompts."""

    _may_be_off = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MultimodalStage(Stage):
    """How images and other media are read from messages."""

    model_config_kwargs: dict[str, Any] | None = None
    chat_template_content_format: Literal["auto", "string", "openai"] | None = None
    apply_sys_msg_formatting: bool | None = None


TextStage = Annotated[ModelStage, BeforeValidator(ModelStage.of)]
TemplateStage = Annotated[ChatTemplateStage, BeforeValidator(ChatTemplateStage.of)]
MediaStage = Annotated[MultimodalStage, BeforeValidator(MultimodalStage.of)]
PlainStage = Annotated[Stage, BeforeValidator(Stage.of)]


def engine_arguments(template: ChatTemplateStage | None, media: MultimodalStage | None) -> dict[str, Any]:
    """The stages' options as vLLM arguments."""
    arguments = {
        "chat_template": template and template.chat_template,
        "default_chat_template_kwargs": template and template.chat_template_kwargs,
        "chat_template_content_format": media and media.chat_template_content_format,
    }
    return {name: value for name, value in arguments.items() if value is not None}
