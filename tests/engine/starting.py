"""Starts of engines that do not succeed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.config import LLMConfig
from penstock.engines.vllm.engine import VLLMEngine
from penstock.errors import EngineStartFailed


def engine(source: Path | str = "demo", **engine_kwargs: Any) -> VLLMEngine:
    return VLLMEngine(
        LLMConfig(
            model_loading_config={"model_id": "m", "model_source": str(source)},
            accelerator_config={"kind": "cpu"},
            engine_kwargs=engine_kwargs,
        )
    )


async def a_folder_without_weights_is_named(folder: Path, executor: str) -> None:
    shutil.copytree(
        penstock.demo_model(), folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors")
    )
    with pytest.raises(EngineStartFailed, match="Cannot find any model weights"):
        await engine(folder, distributed_executor_backend=executor).start()
