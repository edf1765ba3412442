"""The stage configs of `ray.data.llm`, and which of their options have an effect here.

There each stage is a separate operator. Here the engine does the work of all but the HTTP stage row by row,
so a chat template is an engine argument, and sizes of those stages have no effect.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, model_validator

from penstock.config.schema.strict import RootConfig, optional, setting


def _in_order(value: int | tuple[int, int]) -> int | tuple[int, int]:
    least, most = value if isinstance(value, tuple) else (value, value)
    if not 1 <= least <= most:
        raise ValueError(f"{value} is no size of a pool: give n, or (m, n) with 1 <= m <= n")
    return value


Concurrency = Annotated[int | tuple[int, int], AfterValidator(_in_order)]
"""Actors of a pool; `(m, n)`: from m to n."""


class StageConfig(RootConfig):
    """Options that every stage has."""

    _effective: ClassVar[frozenset[str]] = frozenset({"enabled", "model_source"})

    enabled: bool = setting(True, "Whether the stage is switched on.")
    batch_size: int | None = optional("Rows per batch.", ge=1)
    concurrency: Concurrency | None = optional("Actors; `(m, n)`: from m to n.")
    runtime_env: dict[str, Any] | None = optional("Ray's runtime environment of its actors.")
    num_cpus: float | None = optional("CPUs that one actor reserves.", ge=0)
    memory: float | None = optional("Bytes of heap memory that one actor reserves.", ge=0)

    @model_validator(mode="before")
    @classmethod
    def _values(cls, given: object) -> object:
        """Ray's configs accept a bool, a dict, or an object of a stage's class."""
        if isinstance(given, bool):
            return {"enabled": given}
        return given.model_dump(exclude_unset=True) if isinstance(given, BaseModel) else given

    def get(self, name: str, default: Any = None) -> Any:
        """The option by its name, as from the dict that a config may have been given."""
        return getattr(self, name, default)

    def without_effect(self, stage: str) -> list[str]:
        """Options of this stage that are set without effect."""
        return sorted(f"{stage}.{name}" for name in self.model_fields_set - self._effective)


class TokenizerStageConfig(StageConfig):
    """The engine tokenizes, with the tokenizer of its model."""

    model_source: str | None = optional("The processor's `model_source`, or nothing.")


class DetokenizeStageConfig(TokenizerStageConfig):
    """The engine detokenizes, with the tokenizer of its model."""


class ChatTemplateStageConfig(TokenizerStageConfig):
    """How messages become a prompt. Not enabled: rows bring prompts."""

    _effective = StageConfig._effective | {"chat_template", "chat_template_kwargs"}

    chat_template: str | None = optional("Jinja text, or the path of a file with it.")
    chat_template_kwargs: dict[str, Any] | None = optional("Variables of the template.")


class PrepareMultimodalStageConfig(StageConfig):
    """How images and other media are read from messages."""

    _effective = StageConfig._effective | {"chat_template_content_format", "model_config_kwargs"}

    model_config_kwargs: dict[str, Any] | None = optional("More arguments of the engine.")
    chat_template_content_format: Literal["auto", "string", "openai"] | None = optional(
        "How the template gets the content of a message."
    )
    apply_sys_msg_formatting: bool | None = optional(
        "Without effect: the engine gives system messages to the template as they are."
    )


class HttpRequestStageConfig(StageConfig):
    """The actors that send requests; what is not set here is as in the processor's config."""

    def resources(self) -> dict[str, Any]:
        """Ray's options of one actor."""
        return self.model_dump(include={"runtime_env", "num_cpus", "memory"}, exclude_none=True)


def engine_arguments(
    template: ChatTemplateStageConfig | None, media: PrepareMultimodalStageConfig | None
) -> dict[str, Any]:
    """The stages' options as vLLM arguments."""
    arguments = {
        **((media and media.model_config_kwargs) or {}),
        "chat_template": template and template.chat_template,
        "default_chat_template_kwargs": template and template.chat_template_kwargs,
        "chat_template_content_format": media and media.chat_template_content_format,
    }
    return {name: value for name, value in arguments.items() if value is not None}
