"""Answers that nobody reads along come from the core in few pieces, and are the same."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from asking import CHAT, COMPLETIONS, ask, events, user
from enginetest import Served
from tests.waiting import until
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request

from penstock.engines.vllm.core.token_buffer import TokenBuffer
from penstock.engines.vllm.core.waiting_outputs import WaitingOutputs

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
    assert sum(pieces) == 100  # one by one, unless this process was busy
    streamed = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert streamed == (await ask(assistant, COMPLETIONS, prompt="Hello", **LONG))["choices"][0]["text"]


async def test_what_the_front_must_see_comes_token_by_token(assistant: Served) -> None:
    with told(assistant) as pieces:
        await ask(assistant, COMPLETIONS, prompt="Hello", **LONG, logprobs=1)
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


def _message(*outputs: EngineCoreOutput, version: str | None = None) -> EngineCoreOutputs:
    return EngineCoreOutputs(outputs=list(outputs), weight_version=version)


def _one(request_id: str, *token_ids: int, **more: Any) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, list(token_ids), **more)


async def _waited(*messages: EngineCoreOutputs) -> list[list[tuple[str, list[int]]]]:
    """What the front-end takes when all of them came while it was busy."""
    queue = asyncio.Queue[Any]()
    WaitingOutputs(queue)
    for message in messages:
        queue.put_nowait(message)
    taken = [queue.get_nowait() for _ in messages]
    return [[(output.request_id, output.new_token_ids) for output in message.outputs] for message in taken]


async def test_tokens_that_wait_are_joined_at_the_first() -> None:
    taken = await _waited(
        _message(_one("a", 1), _one("b", 11)), _message(_one("a", 2)), _message(_one("b", 12), _one("a", 3))
    )
    assert taken == [[("a", [1, 2, 3]), ("b", [11, 12])], [], []]


async def test_what_holds_more_than_tokens_is_joined_with_nothing() -> None:
    """First and last outputs, logprobs; what follows them stays behind them."""
    first = _one("a", 1, events=[])
    last = _one("a", 4, finish_reason=FinishReason.LENGTH)
    assert await _waited(_message(first), _message(_one("a", 2)), _message(_one("a", 3)), _message(last)) == [
        [("a", [1])],
        [("a", [2, 3])],
        [],
        [("a", [4])],
    ]
    middle = _one("a", 2, num_nans_in_logits=1)
    taken = await _waited(_message(_one("a", 1)), _message(middle), _message(_one("a", 3)))
    assert taken == [[("a", [1])], [("a", [2])], [("a", [3])]]


async def test_two_versions_of_weights_are_not_joined() -> None:
    taken = await _waited(_message(_one("a", 1), version="1"), _message(_one("a", 2), version="2"))
    assert taken == [[("a", [1])], [("a", [2])]]


async def test_no_token_is_added_to_a_message_that_was_taken() -> None:
    """A front-end that is in the middle of one message, while others wait."""
    queue = asyncio.Queue[Any]()
    WaitingOutputs(queue)
    queue.put_nowait(_message(_one("a", 1)))
    queue.put_nowait(_message(_one("b", 11)))
    first = queue.get_nowait()
    queue.put_nowait(_message(_one("a", 2), _one("b", 12)))
    queue.put_nowait(_message(_one("a", 3)))
    assert first.outputs == [_one("a", 1)]
    rest = [queue.get_nowait().outputs for _ in range(3)]
    assert rest == [[_one("b", 11, 12)], [_one("a", 2, 3)], []]


async def test_300_random_runs_lose_no_token_and_keep_their_order() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        queue = asyncio.Queue[Any]()
        WaitingOutputs(queue)
        sent, taken = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
        for number in range(60):
            if draw.random() < 0.6:
                outputs = [_one(name, number) for name in ("a", "b", "c") if draw.random() < 0.7]
                for output in outputs:
                    sent[output.request_id].append(number)
                    output.events = draw.choice([None, None, None, []])
                queue.put_nowait(_message(*outputs, version=draw.choice("1112")))
            while not queue.empty() and (draw.random() < 0.3 or number == 59):
                for output in queue.get_nowait().outputs:
                    taken[output.request_id] += output.new_token_ids
        assert taken == sent


async def test_a_message_that_finds_none_waiting_passes_as_it_is() -> None:
    queue = asyncio.Queue[Any]()
    WaitingOutputs(queue)
    for n in range(3):
        message = _message(_one("a", n))
        queue.put_nowait(message)
        assert queue.get_nowait() is message
        assert message.outputs == [_one("a", n)]


async def test_a_front_that_is_behind_streams_the_same_text_and_usage(demo: Served) -> None:
    body = LONG | {"temperature": 0, "stream_options": {"include_usage": True}}
    quick = await events(demo, CHAT, messages=user("hi"), **body)
    with told(demo) as pieces, busy(demo):
        slow = await asyncio.gather(*(events(demo, CHAT, messages=user("hi"), **body) for _ in range(4)))
    assert max(pieces) > 1
    for chunks in slow:
        assert len(chunks) < len(quick)
        assert _text_of(chunks) == _text_of(quick)
        assert chunks[-1]["usage"] == quick[-1]["usage"]


@contextmanager
def busy(served: Served) -> Iterator[None]:
    """A front that takes longer for each of the core's messages than the core for a step."""
    processor: Any = served.engine._llm.output_processor  # pyright: ignore[reportAttributeAccessIssue]
    process = processor.process_outputs

    def slowly(outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.05 if outputs else 0)
        return process(outputs, *args, **kwargs)

    processor.process_outputs = slowly
    try:
        yield
    finally:
        processor.process_outputs = process


def _text_of(chunks: list[Any]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)
