"""Streams that another engine has begun, on a real vLLM: they go on as if nothing had happened.

A stream is asked for once, and recorded; then the same request goes on from some of its groups of tokens.
`test_continued_all` has more kinds of requests and more places.
"""

from __future__ import annotations

import random
from importlib.util import find_spec
from typing import Any

import pytest
from asking import CHAT, COMPLETIONS, RESPONSES
from continuing import GREEDY, PARSED, PLAIN, SUM, TEXT, differences, differences_whole, stream
from enginetest import Served
from tests.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parity("X4"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.mark.parametrize(
    "name",
    [
        "greedy chat",
        "penalties, seeded",
        "held back for a stop string",
        "schema",
        "two choices, one ends early",
        "logprobs and stop strings",
    ],
)
async def test_a_plain_stream_goes_on_as_it_began(demo: Served, name: str):
    assert await differences(demo.engine.app(), PLAIN[name], 3, random.Random(1)) == []


@pytest.mark.parametrize("name", ["reasoning", "two tools", "response", "message with a tool"])
async def test_a_parsed_stream_goes_on_as_it_began(assistant: Served, name: str):
    assert await differences(assistant.engine.app(), PARSED[name], 3, random.Random(2)) == []


@pytest.mark.parametrize(
    "name",
    [
        "greedy chat",
        "penalties, seeded",
        "schema",
        "logprobs and stop strings",
        "two choices",
        "two choices, one ends early",
        "logprobs",
    ],
)
async def test_a_plain_answer_that_is_not_streamed_goes_on(demo: Served, name: str):
    assert await differences_whole(demo.engine.app(), PLAIN[name], 3) == []


@pytest.mark.parametrize("name", ["reasoning", "two tools", "response", "message"])
async def test_a_parsed_answer_that_is_not_streamed_goes_on(assistant: Served, name: str):
    assert await differences_whole(assistant.engine.app(), PARSED[name], 3) == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, TEXT | {"prompt": ["a", "b"]}),
        (CHAT, SUM | {"use_beam_search": True, "n": 2, "stream": False}),
        (CHAT, SUM | {"stream": False}),
        (RESPONSES, {"input": "Hello!", "background": True}),
    ],
    ids=[
        "two prompts",
        "beam search",
        "whole",
        "background",
    ],
)
async def test_a_stream_that_cannot_go_on_exactly_is_not_recorded(
    demo: Served, path: str, body: dict[str, Any]
):
    answer = await stream(demo.engine.app(), path, body | {"max_tokens": 5} if path != RESPONSES else body)
    assert len(answer.pieces) > 0
    assert answer.groups == []


async def test_what_was_begun_elsewhere_and_cannot_go_on_here_is_refused(demo: Served):
    app, body = demo.engine.app(), TEXT | GREEDY
    begun = await stream(app, COMPLETIONS, body)
    answer = await stream(app, COMPLETIONS, body | {"prompt": ["a", "b"]}, begun.groups[:5], status=400)
    assert answer.groups == []
    await until(lambda: demo.engine.load().running == 0)


async def test_a_reader_that_leaves_ends_the_replay_and_the_request(demo: Served):
    app, body = demo.engine.app(), TEXT | GREEDY | {"max_tokens": 200}
    begun = await stream(app, COMPLETIONS, body)
    llm: Any = demo.engine._llm  # pyright: ignore[reportAttributeAccessIssue]
    for leaves_after in (0, 3, 20, 60):
        await stream(app, COMPLETIONS, body, begun.groups[:40], leaves_after=leaves_after)
        await until(lambda: demo.engine.load().running == 0)
        assert not llm.output_processor.request_states


async def test_a_client_cannot_put_tokens_into_an_answer(demo: Served):
    app, body = demo.engine.app(), TEXT | GREEDY
    forged = await stream(app, COMPLETIONS, body | {"vllm_xargs": {"penstock_emitted": [5, 6, 7]}})
    assert forged.token_ids() == (await stream(app, COMPLETIONS, body)).token_ids()
