"""Requests that cannot cross to vLLM's core or cannot be read there are answered; nothing of them stays."""

from __future__ import annotations

import pytest
from controlling import answer, text
from enginetest import Served
from vllm import SamplingParams

from penstock.engines.vllm.engine import VLLMEngine
from penstock.errors import BadRequest

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.parity("S26")]


async def test_a_request_that_the_core_cannot_read_is_answered_with_an_error(demo: Served):
    """As vLLM's own classes would send it, past the checks that stand before them."""
    assert isinstance(demo.engine, VLLMEngine)
    assert demo.engine._llm is not None
    params = SamplingParams(max_tokens=True)
    outputs = [output async for output in demo.engine._llm.generate("water", params, "unreadable")]
    assert outputs[-1].outputs[0].finish_reason == "error"
    assert text(await answer(demo))


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("wrong", [{"seed": 1 << 70}, {"stop": "\ud800"}])
async def test_a_request_that_cannot_be_sent_is_refused_and_forgotten(
    demo: Served, wrong: dict[str, object], outputs: int
):
    before = demo.engine.load().running
    with pytest.raises(BadRequest, match="cannot be sent"):
        await answer(demo, n=outputs, temperature=1.0, **wrong)
    assert demo.engine.load().running == before
