"""Batch inference: every engine busy, no row lost. `job` and `pipeline` stand on the same folders below them.

In the order of a row: job or pipeline, storage, rows, journal, execution, backends, results. The names here
are those of Ray Data's LLM processors, and `batch`; each is imported when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.config import LLMConfig
    from penstock.data.job.api import batch
    from penstock.data.pipeline.configs import (
        EngineProcessorConfig,
        HttpRequestProcessorConfig,
        ProcessorConfig,
        ServeDeploymentProcessorConfig,
    )
    from penstock.data.pipeline.model_configs import SGLangEngineProcessorConfig, vLLMEngineProcessorConfig
    from penstock.data.pipeline.processor import Processor, build_llm_processor, build_processor
    from penstock.data.pipeline.ray_stages import (
        ChatTemplateStageConfig,
        DetokenizeStageConfig,
        HttpRequestStageConfig,
        PrepareMultimodalStageConfig,
        TokenizerStageConfig,
    )
    from penstock.data.pipeline.shared_engine import shared_engine
    from penstock.data.pipeline.user_function import batched

_MODULES = {
    "ChatTemplateStageConfig": "pipeline.ray_stages",
    "DetokenizeStageConfig": "pipeline.ray_stages",
    "EngineProcessorConfig": "pipeline.configs",
    "HttpRequestProcessorConfig": "pipeline.configs",
    "HttpRequestStageConfig": "pipeline.ray_stages",
    "LLMConfig": "pipeline.configs",
    "PrepareMultimodalStageConfig": "pipeline.ray_stages",
    "Processor": "pipeline.processor",
    "ProcessorConfig": "pipeline.configs",
    "SGLangEngineProcessorConfig": "pipeline.model_configs",
    "ServeDeploymentProcessorConfig": "pipeline.configs",
    "TokenizerStageConfig": "pipeline.ray_stages",
    "batch": "job.api",
    "batched": "pipeline.user_function",
    "build_llm_processor": "pipeline.processor",
    "build_processor": "pipeline.processor",
    "shared_engine": "pipeline.shared_engine",
    "vLLMEngineProcessorConfig": "pipeline.model_configs",
}

__all__ = [
    "ChatTemplateStageConfig",
    "DetokenizeStageConfig",
    "EngineProcessorConfig",
    "HttpRequestProcessorConfig",
    "HttpRequestStageConfig",
    "LLMConfig",
    "PrepareMultimodalStageConfig",
    "Processor",
    "ProcessorConfig",
    "SGLangEngineProcessorConfig",
    "ServeDeploymentProcessorConfig",
    "TokenizerStageConfig",
    "batch",
    "batched",
    "build_llm_processor",
    "build_processor",
    "shared_engine",
    "vLLMEngineProcessorConfig",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'penstock.data' has no attribute '{name}'")
    return getattr(import_module(f"penstock.data.{_MODULES[name]}"), name)
