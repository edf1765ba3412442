"""Every engine is started once for the session, on the event loop that Serve's replicas run."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import uvloop

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode lets no test import its neighbour
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: engines would fight for the cores

from enginetest import CONFIGS, Served, serve, vllm_config
from models import model


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, object]:
    return {"uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=list(CONFIGS))
async def under_test(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    async with serve(CONFIGS[request.param]()) as served:
        yield served


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def assistant() -> AsyncIterator[Served]:
    """The model that thinks and calls tools, in a real vLLM."""
    config = vllm_config(
        str(model("assistant")),
        reasoning_parser="deepseek_r1",
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        enable_tokenizer_info_endpoint=True,
        enable_prompt_tokens_details=True,
        kv_cache_memory_bytes=1 << 26,
    )
    async with serve(config) as served:
        yield served
