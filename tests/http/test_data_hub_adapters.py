"""Rows that name their adapters by hub ids, as Ray's example of batches with adapters does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from hub import Hub, hub_server

from penstock.data import vLLMEngineProcessorConfig
from penstock.data.backends.in_process import InProcessEngine
from penstock.data.pipeline.model_configs import llm_config
from penstock.data.pipeline.stage_spec import stage_spec

pytestmark = pytest.mark.parity("D7")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with hub_server({"org/first-1.0": folder, "org/second": folder}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


async def said(engine: InProcessEngine, ask: Any, model: str) -> tuple[int, str]:
    answer = await engine.send(ask({"prompt": "hello", "model": model}, {}))
    body = json.loads(answer.body)
    return answer.status, body["choices"][0]["text"] if "choices" in body else body["error"]["message"]


async def test_a_row_names_its_adapter_by_its_id_on_the_hub(hub: Hub):
    config = vLLMEngineProcessorConfig(
        model_source="base", engine_kwargs={"enable_lora": True, "max_lora_rank": 32, "max_loras": 1}
    )
    ask = stage_spec(config).build_request
    simulated = {"llm_engine": "sim", "engine_kwargs": {"step_base_ms": 1.0}}
    engine = InProcessEngine(llm_config(config).model_copy(update=simulated))
    await engine.start()
    try:
        assert (await said(engine, ask, "org/first-1.0"))[1].startswith("[org--first-1.0@")
        assert (await said(engine, ask, "org/second"))[1].startswith("[org--second@")
        assert await said(engine, ask, "base") == (200, "hello")
        status, why = await said(engine, ask, "org/missing")
        assert (status, "org--missing" in why) == (404, True)
        assert (await said(engine, ask, "../secrets"))[0] == 404
    finally:
        await engine.stop()
