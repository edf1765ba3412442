"""What is told of a request that vLLM's core ends with an error before its first token."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

from penstock.engines.vllm.frontend.gated_llm import GatedLLM

TEXT, PICTURE = {"type": "token"}, {"type": "multimodal"}


async def outcome(monkeypatch: pytest.MonkeyPatch, prompt: Any, tokens: int = 0, **config: Any) -> str:
    """How an iteration ends whose one output is an error."""

    async def ended(*args: Any) -> AsyncGenerator[Any]:
        yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason="error", token_ids=[1] * tokens)])

    monkeypatch.setattr(AsyncLLM, "generate", ended)
    llm: Any = object.__new__(GatedLLM)
    llm.cut = None
    llm.vllm_config = SimpleNamespace(**{"kv_transfer_config": None, "ec_transfer_config": None} | config)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    try:
        return "".join(
            [output.outputs[0].finish_reason async for output in llm.generate(prompt, params, "id")]
        )
    except VLLMValidationError as error:
        return str(error)


async def test_a_form_that_does_not_compile_is_the_clients_error(monkeypatch: pytest.MonkeyPatch):
    assert "does not compile" in await outcome(monkeypatch, TEXT)


@pytest.mark.parametrize(
    ("prompt", "more"),
    [
        (PICTURE, {}),
        (TEXT, {"tokens": 1}),
        (TEXT, {"kv_transfer_config": "some"}),
        (TEXT, {"ec_transfer_config": "some"}),
    ],
)
async def test_an_error_that_may_be_the_engines_stays_its_own(
    monkeypatch: pytest.MonkeyPatch, prompt: Any, more: dict[str, Any]
):
    assert await outcome(monkeypatch, prompt, **more) == "error"
