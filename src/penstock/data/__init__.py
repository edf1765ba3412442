"""Batch inference: every engine busy, no row lost. `job` and `pipeline` stand on the same folders below them.

In the order of a row: table, job or pipeline, storage, rows, journal, execution, backends, results. The
names here are those of Ray Data's LLM processors, and `batch`; each is imported when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.config import LLMConfig as LLMConfig
    from penstock.data.job.api import batch as batch
    from penstock.data.pipeline.configs import EngineProcessorConfig as EngineProcessorConfig
    from penstock.data.pipeline.configs import HttpRequestProcessorConfig as HttpRequestProcessorConfig
    from penstock.data.pipeline.configs import ProcessorConfig as ProcessorConfig
    from penstock.data.pipeline.configs import (
        ServeDeploymentProcessorConfig as ServeDeploymentProcessorConfig,
    )
    from penstock.data.pipeline.model_configs import (
        SGLangEngineProcessorConfig as SGLangEngineProcessorConfig,
    )
    from penstock.data.pipeline.model_configs import vLLMEngineProcessorConfig as vLLMEngineProcessorConfig
    from penstock.data.pipeline.processor import Processor as Processor
    from penstock.data.pipeline.processor import build_llm_processor as build_llm_processor
    from penstock.data.pipeline.processor import build_processor as build_processor
    from penstock.data.pipeline.ray_stages import ChatTemplateStageConfig as ChatTemplateStageConfig
    from penstock.data.pipeline.ray_stages import DetokenizeStageConfig as DetokenizeStageConfig
    from penstock.data.pipeline.ray_stages import HttpRequestStageConfig as HttpRequestStageConfig
    from penstock.data.pipeline.ray_stages import PrepareMultimodalStageConfig as PrepareMultimodalStageConfig
    from penstock.data.pipeline.ray_stages import TokenizerStageConfig as TokenizerStageConfig
    from penstock.data.pipeline.shared_engine import shared_engine as shared_engine
    from penstock.data.pipeline.user_function import batched as batched

_NAMES = {
    "job.api": "batch",
    "pipeline.configs": "EngineProcessorConfig HttpRequestProcessorConfig LLMConfig ProcessorConfig "
    "ServeDeploymentProcessorConfig",
    "pipeline.model_configs": "SGLangEngineProcessorConfig vLLMEngineProcessorConfig",
    "pipeline.processor": "Processor build_llm_processor build_processor",
    "pipeline.ray_stages": "ChatTemplateStageConfig DetokenizeStageConfig HttpRequestStageConfig "
    "PrepareMultimodalStageConfig TokenizerStageConfig",
    "pipeline.shared_engine": "shared_engine",
    "pipeline.user_function": "batched",
}
_WHERE = {name: f"penstock.data.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_WHERE)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'penstock.data' has no attribute '{name}'")
    return getattr(import_module(_WHERE[name]), name)
