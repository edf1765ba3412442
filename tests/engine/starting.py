"""Starts of engines that do not succeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.config import LLMConfig
from penstock.engines.vllm.engine import VLLMEngine


def engine(source: Path | str = "demo", **engine_kwargs: Any) -> VLLMEngine:
    return VLLMEngine(
        LLMConfig(
            model_loading_config={"model_id": "m", "model_source": str(source)},
            accelerator_config={"kind": "cpu"},
            engine_kwargs=engine_kwargs,
        )
    )
