"""What is told of a request that vLLM's core ends with an error before its first token, and what becomes of
one that waits at the gate.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.waiting import until
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

from penstock.engines.vllm.frontend.gated_llm import GatedLLM
from penstock.request_context import ChoiceTokens, TokensProbe, tokens_before, tokens_so_far

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


@pytest.mark.parametrize(("began_with", "later"), [("v1", "v2"), ("v1", "v1"), (None, "v2")])
async def test_a_request_goes_on_with_the_tokens_of_the_same_weights_alone(
    monkeypatch: pytest.MonkeyPatch, began_with: str | None, later: str
):
    begun: list[Any] = []

    async def add_request(*args: Any, **kwargs: Any) -> Any:
        begun.append(tokens_before.get())
        return SimpleNamespace(request_id="id")

    monkeypatch.setattr(AsyncLLM, "add_request", add_request)
    llm: Any = object.__new__(GatedLLM)
    llm.__dict__ |= {"gate": asyncio.Event(), "weights": "v1", "held": 0, "entering": 0, "continued": None}
    llm.__dict__ |= {"_by_class": False, "_timed": False}
    llm.output_processor = SimpleNamespace(request_states={})
    probe, tokens = TokensProbe(), [(ChoiceTokens([5]),)]
    probe.weights = began_with
    tokens_so_far.set(probe)
    tokens_before.set(tokens)
    waiting = asyncio.create_task(llm.add_request("id", TEXT, SamplingParams()))
    await until(lambda: llm.held)
    llm.weights = later  # as an update does while the gate is closed
    llm.gate.set()
    await waiting
    is_same = began_with in (None, later)
    assert (begun, probe.forgotten) == ([tokens if is_same else ()], not is_same)
