"""One model, divided over two workers, says what it says on one."""

from __future__ import annotations

import random

import pytest
from continuing import PLAIN, differences, stream
from demo_questions import QUESTIONS
from enginetest import MODEL_ID, serve, vllm_config

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.parity("S24"), pytest.mark.full]

QUESTION = "What is Penstock?"


@pytest.mark.parametrize("shape", ["tensor_parallel_size", "pipeline_parallel_size"])
async def test_two_workers_answer_as_one(shape: str):
    """An engine of its own: the others have one worker each."""
    async with serve(vllm_config(kv_cache_memory_bytes=1 << 26, **{shape: 2})) as served:
        assert len(await served.engine.control.collective_rpc("get_model_inspection")) == 2
        body = {"model": MODEL_ID, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        answer = await served.http.post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == QUESTIONS[QUESTION]
        app, kind = served.engine.app(), PLAIN["penalties, seeded"]
        if shape == "pipeline_parallel_size":
            assert (await stream(app, *kind)).groups == []  # nothing tells that it could go on exactly
        else:
            assert await differences(app, kind, 3, random.Random(1)) == []
