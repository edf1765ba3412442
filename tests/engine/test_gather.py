"""Answers that nobody reads along come from the core in few pieces, and are the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from asking import CHAT, COMPLETIONS, ask, events, user
from enginetest import Served, until
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import Request

from penstock.engines.vllm.core.token_buffer import TokenBuffer

pytestmark = pytest.mark.asyncio(loop_scope="session")

TRIES = 20
LONG: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True}
FEW = 10
"""Pieces of so long an answer."""


@contextmanager
def told(served: Served) -> Iterator[list[int]]:
    """Tokens of each output that the front gets."""
    processor: Any = served.engine._llm.output_processor  # pyright: ignore[reportAttributeAccessIssue]
    process, pieces = processor.process_outputs, list[int]()

    def watched(outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        pieces.extend(len(output.new_token_ids) for output in outputs)
        return process(outputs, *args, **kwargs)

    processor.process_outputs = watched
    try:
        yield pieces
    finally:
        del processor.process_outputs


async def test_a_whole_answer_comes_in_few_pieces_and_is_the_streams(assistant: Served) -> None:
    with told(assistant) as pieces:
        whole = await ask(assistant, CHAT, messages=user("Hello"), **LONG)
    assert sum(pieces) == whole["usage"]["completion_tokens"] == 100
    assert len(pieces) <= FEW
    with told(assistant) as pieces:
        chunks = await events(assistant, COMPLETIONS, prompt="Hello", **LONG)
    assert pieces == [1] * 100
    streamed = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert streamed == (await ask(assistant, COMPLETIONS, prompt="Hello", **LONG))["choices"][0]["text"]


@pytest.mark.parametrize("fields", [{"stop": ["never said"]}, {"logprobs": 1}])
async def test_what_the_front_must_see_comes_token_by_token(
    assistant: Served, fields: dict[str, Any]
) -> None:
    with told(assistant) as pieces:
        await ask(assistant, COMPLETIONS, prompt="Hello", **LONG, **fields)
    assert pieces == [1] * 100


async def test_several_outputs_of_one_request_are_gathered_apart(assistant: Served) -> None:
    with told(assistant) as pieces:
        whole = await ask(assistant, COMPLETIONS, prompt="Hello", n=3, temperature=1, seed=5, **LONG)
    assert sum(pieces) == 300
    assert len(pieces) <= 3 * FEW
    texts = {choice["text"] for choice in whole["choices"]}
    assert len(texts) == 3
    assert whole["usage"]["completion_tokens"] == 300


async def test_an_answer_that_is_cut_off_has_all_its_tokens(assistant: Served) -> None:
    """Without what the core still held, the count would be one and a multiple of a piece, each time.

    With it, one time in some sixteen.
    """
    llm: Any = assistant.engine._llm  # pyright: ignore[reportAttributeAccessIssue]
    for _ in range(TRIES):
        body = {"messages": user("Hello"), "max_tokens": 1500, "ignore_eos": True}
        with told(assistant) as pieces:
            asking = asyncio.create_task(ask(assistant, CHAT, **body))
            await until(lambda pieces=pieces: sum(pieces) > 40)
            await llm.pause_generation(mode="abort")
            answer = await asking
            await llm.resume_generation()
        assert answer["choices"][0]["finish_reason"] == "abort"
        count = answer["usage"]["completion_tokens"]
        assert count == sum(pieces)
        if any(piece not in (1, max(pieces)) for piece in pieces):
            return
    pytest.fail("Each time the count is one and a multiple of a piece.")


async def test_a_pause_that_keeps_requests_tells_what_there_is(assistant: Served) -> None:
    llm: Any = assistant.engine._llm  # pyright: ignore[reportAttributeAccessIssue]
    with told(assistant) as pieces:
        asking = asyncio.create_task(ask(assistant, CHAT, messages=user("Hello"), **LONG))
        await until(lambda: sum(pieces) > 16)
        await llm.pause_generation(mode="keep", clear_cache=False)
        await llm.resume_generation()
        answer = await asking
    assert sum(pieces) == answer["usage"]["completion_tokens"] == 100
    assert (
        answer["choices"][0]["message"]
        == ((await ask(assistant, CHAT, messages=user("Hello"), **LONG))["choices"][0]["message"])
    )


def request(name: str, stream_interval: int | None = None) -> Request:
    kind = RequestOutputKind.FINAL_ONLY
    params = SamplingParams(max_tokens=100, output_kind=kind, stream_interval=stream_interval)
    return Request(name, [1, 2, 3], params, None)


async def test_what_is_held_goes_with_the_next_output_or_the_last() -> None:
    buffer = TokenBuffer()
    buffer.open(request("a"))
    for token in range(15):
        assert buffer.passing([EngineCoreOutput("a", [token])]) == []
    (piece,) = buffer.passing([EngineCoreOutput("a", [15])])
    assert piece.new_token_ids == list(range(16))
    assert buffer.passing([EngineCoreOutput("a", [16])]) == []
    (last,) = buffer.passing([EngineCoreOutput("a", [17], finish_reason=FinishReason.STOP)])
    assert (last.new_token_ids, last.finish_reason) == ([16, 17], FinishReason.STOP)
    stranger = EngineCoreOutput("a", [18])
    assert buffer.passing([stranger]) == [stranger]
    assert stranger.new_token_ids == [18]


@pytest.mark.parametrize(("asked", "piece"), [(40, 40), (4, 16)])
async def test_a_request_may_ask_for_larger_pieces(asked: int, piece: int) -> None:
    buffer = TokenBuffer()
    buffer.open(request("a", stream_interval=asked))
    for token in range(piece - 1):
        assert buffer.passing([EngineCoreOutput("a", [token])]) == []
    (whole,) = buffer.passing([EngineCoreOutput("a", [0])])
    assert len(whole.new_token_ids) == piece


async def test_nothing_is_kept_of_a_request_whose_caller_is_gone() -> None:
    buffer = TokenBuffer()
    for name in ("a", "b"):
        buffer.open(request(name))
        assert buffer.passing([EngineCoreOutput(name, [1])]) == []
    buffer.drop(["a", "unknown"])
    assert [(one.request_id, one.new_token_ids) for one in buffer.rest()] == [("b", [1])]
    assert buffer.rest() == []
