"""A model over several workers, and what it says."""

from __future__ import annotations

from demo_questions import QUESTIONS
from enginetest import MODEL_ID, serve, vllm_config

QUESTION = "What is Penstock?"


async def two_workers_answer_as_one(shape: str) -> None:
    """shape: the argument of vLLM that says how the model is divided."""
    async with serve(vllm_config(kv_cache_memory_bytes=1 << 26, **{shape: 2})) as served:
        assert len(await served.engine.control.collective_rpc("get_model_inspection")) == 2
        body = {"model": MODEL_ID, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        answer = await served.http.post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == QUESTIONS[QUESTION]
