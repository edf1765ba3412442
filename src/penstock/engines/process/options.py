"""Options of a child process: `engine_kwargs` of an `llm_engine: process` model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Self

from pydantic import Field, model_validator

from penstock.config.messages.problems import unknown
from penstock.config.schema.strict import StrictModel, optional, setting

PLACEHOLDERS = ("api_key", "host", "model", "model_id", "port", "python")
"""Names in braces in `command` and `environment`, replaced when the child is started."""

_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
"""A bare word in braces; JSON in an argument has quotes there."""


class ProcessOptions(StrictModel):
    """How the child is run, and what it speaks.

    In `command` and `environment` are replaced: `{host}` and `{port}`, where it must listen; `{model}`, the
    model's source, a folder of this node where it was fetched; `{model_id}`, what clients call the model;
    `{python}`, the interpreter that runs Penstock; `{api_key}`, a secret drawn at each start, which every
    request to the child bears as `Authorization: Bearer ...`.
    """

    command: list[str] = Field(min_length=1, description="The program and its arguments; no shell.")
    environment: dict[str, str] = setting({}, "Variables beside those of the replica.")
    port: int | None = optional("Where it listens; without it, a free one.", ge=1, le=65535)
    ready_path: str = setting("/health", "Answers 200 while it can work.", pattern="^/")
    warm_up: bool = setting(
        True,
        "It is ready when a completion, a chat or an embedding was answered; `false` for one "
        "that has none of them.",
    )
    served_model_name: str | None = optional(
        "What it calls the model, where that is not `{model_id}`.", min_length=1
    )
    max_model_len: int | None = optional(
        "Context window, in tokens; without it, as its `/v1/models` says.", ge=1
    )
    metrics_path: str = setting(
        "/metrics", "Where its gauges are, of vLLM's, SGLang's or llama.cpp's names.", pattern="^/"
    )
    allowed_media_domains: list[str] = setting(
        [], "Hosts from which it may fetch what requests name by URL, or `*`."
    )
    stop_grace_s: float = setting(5.0, "Seconds from SIGTERM to SIGKILL.", ge=0)

    @property
    def wants_model(self) -> bool:
        """Whether the child needs the model's location."""
        return any("{model}" in text for text in (*self.command, *self.environment.values()))

    @model_validator(mode="after")
    def _known_placeholders(self) -> Self:
        for text in (*self.command, *self.environment.values()):
            for name in _PLACEHOLDER.findall(text):
                if name not in PLACEHOLDERS:
                    raise ValueError(f"{unknown('placeholder', name, PLACEHOLDERS)} It stands in {text!r}.")
        return self


def filled(text: str, values: Mapping[str, str]) -> str:
    """`text` with values in place of placeholders."""
    return _PLACEHOLDER.sub(lambda found: values[found[1]], text)
