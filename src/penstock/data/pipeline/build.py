"""`build_processor`: from a config and the user's functions to a processor, with Ray Data's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.data.pipeline.configs import ProcessorConfig
from penstock.data.pipeline.model_configs import ModelProcessorConfig
from penstock.data.pipeline.processor import Processor, UserStep
from penstock.data.pipeline.row_program import Program
from penstock.errors import ConfigError


def build_processor(
    config: ProcessorConfig,
    preprocess: UserStep | None = None,
    postprocess: UserStep | None = None,
    preprocess_map_kwargs: Mapping[str, Any] | None = None,
    postprocess_map_kwargs: Mapping[str, Any] | None = None,
    builder_kwargs: Mapping[str, Any] | None = None,
    *,
    program: Program | None = None,
) -> Processor:
    """A function of datasets.

    preprocess: row -> request fields; without it, the row itself is the request.
    postprocess: row with the result columns -> output row; without it, all columns are the output.
    program: `async def program(row, llm)` makes many requests for one row and returns its output.
    *_map_kwargs: Ray Data's options of these stages (`num_cpus`, `concurrency`, `memory`, ...).
    builder_kwargs: `chat_template_kwargs`, variables of the chat template, for vLLM and SGLang.
    Raises: ConfigError.
    """
    return Processor(
        _with_builder_kwargs(config, builder_kwargs or {}),
        preprocess,
        postprocess,
        program,
        preprocess_map_kwargs,
        postprocess_map_kwargs,
    )


build_llm_processor = build_processor
"""The older name."""


def _with_builder_kwargs(config: ProcessorConfig, kwargs: Mapping[str, Any]) -> ProcessorConfig:
    """Raises: ConfigError for what is not `chat_template_kwargs` of an engine."""
    if not kwargs:
        return config
    if not isinstance(config, ModelProcessorConfig):
        raise ConfigError(
            f"builder_kwargs: {', '.join(kwargs)}: without effect with {type(config).__name__}; leave it out."
        )
    if unknown := sorted(kwargs.keys() - {"chat_template_kwargs"}):
        raise ConfigError(
            f"builder_kwargs: {', '.join(unknown)} is not known; it takes `chat_template_kwargs`. Functions "
            "and their options are arguments of build_processor itself."
        )
    return config.with_template_kwargs(dict(kwargs["chat_template_kwargs"]))
