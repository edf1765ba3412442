"""Streams that another engine has begun, on a real vLLM: every kind of request, from many of its tokens.

Beside `test_continued`: hundreds of places, readers that fall behind, pictures, adapters, requests that run
beside others, prompts computed in parts, and parsers of vLLM's second kind.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import Any

import pytest
import pytest_asyncio
from adapted import Adapted
from asking import CHAT, COMPLETIONS, user
from continuing import GREEDY, HOT, PARSED, PLAIN, SUM, TEXT, USAGE, Kind, differences, stream
from enginetest import MODEL_ID, Served, serve, vllm_config
from seeing import RED_CIRCLE, asked, shown
from tests.models import model

from penstock.layers.adapters import asking_for
from penstock.layers.generation import Generation

pytestmark = [
    pytest.mark.full,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parity("X4"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

CUTS, FEWER = 9, 4
XML = (
    "<tool_call>\n<function=look>\n<parameter=name>\n[a-z]{3,9}\n</parameter>\n"
    "<parameter=n>\n[0-9]{1,3}\n</parameter>\n</function>\n</tool_call>"
)
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
        },
    },
}
SECOND_KIND: dict[str, Kind] = {
    "reasoning": (CHAT, SUM | GREEDY | USAGE),
    "a tool's call in XML": (
        CHAT,
        SUM | HOT | {"seed": 3, "max_tokens": 150, "tools": [LOOK], "structured_outputs": {"regex": XML}},
    ),
    "a long prompt": (COMPLETIONS, TEXT | HOT | {"prompt": "Penstock is " * 40, "seed": 4, "max_tokens": 90}),
    "a long prompt, penalties": (
        COMPLETIONS,
        TEXT | GREEDY | {"prompt": "Penstock is " * 40, "frequency_penalty": 1.2, "max_tokens": 90},
    ),
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def second_kind() -> AsyncIterator[Served]:
    """Its parsers are of the kind that finds the parts of joined tokens itself. No other engine has so small
    steps, and no prefix cache.
    """
    config = vllm_config(
        str(model("assistant")),
        reasoning_parser="qwen3",
        enable_auto_tool_choice=True,
        tool_call_parser="qwen3_coder",
        enable_prefix_caching=False,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        kv_cache_memory_bytes=1 << 26,
    )
    async with serve(config) as served:
        yield served


@pytest.mark.parametrize("name", PLAIN)
async def test_a_plain_stream_goes_on_as_it_began(demo: Served, name: str):
    assert await differences(demo.engine.app(), PLAIN[name], CUTS, random.Random(1)) == []


@pytest.mark.parametrize("name", PLAIN)
async def test_also_for_a_reader_that_falls_behind(demo: Served, name: str):
    app, draw = demo.engine.app(), random.Random(3)
    assert await differences(app, PLAIN[name], FEWER, draw, slow=random.Random(4)) == []


@pytest.mark.parametrize("name", ["greedy chat", "held back for a stop string", "penalties, seeded"])
async def test_also_where_every_piece_comes_from_the_app(demo: Served, name: str):
    assert await differences(demo.engine.app(), PLAIN[name], FEWER, random.Random(5), short=False) == []


async def test_the_streams_are_such_that_groups_and_pieces_differ(demo: Served):
    app = demo.engine.app()
    slow = await stream(app, *PLAIN["greedy completion"], slow=random.Random(4))
    assert any(len(one.token_ids) > 1 for group in slow.groups for one in group), "no tokens came joined"
    assert slow.pushed > 3, "all came by the app"
    held = await stream(app, *PLAIN["held back for a stop string"])
    assert len(held.pieces) < len(held.groups), "nothing was held back"
    torn = await stream(app, *PLAIN["parts of characters"])
    assert any(b'"text":""' in piece for piece in torn.pieces), "no token was part of a character"
    path, body = PLAIN["two choices, one ends early"]
    for seed in range(33, 40):  # another CPU draws other tokens
        two = await stream(app, path, body | {"seed": seed})
        ends = [i for i, group in enumerate(two.groups) if any(one.finish_reason for one in group)]
        if ends[0] < len(two.groups) - 3:
            return
    raise AssertionError("none ended before the other")


@pytest.mark.parametrize("name", PARSED)
async def test_a_parsed_stream_goes_on_as_it_began(assistant: Served, name: str):
    app = Generation(assistant.engine.app(), assistant.engine)
    assert await differences(app, PARSED[name], CUTS, random.Random(2)) == []


@pytest.mark.parametrize("name", PARSED)
async def test_a_parsed_stream_also_for_a_reader_that_falls_behind(assistant: Served, name: str):
    app, slow = Generation(assistant.engine.app(), assistant.engine), random.Random(6)
    assert await differences(app, PARSED[name], FEWER, random.Random(7), slow=slow) == []


@pytest.mark.parametrize("name", SECOND_KIND)
async def test_other_parsers_and_prompts_in_parts(second_kind: Served, name: str):
    assert await differences(second_kind.engine.app(), SECOND_KIND[name], CUTS, random.Random(8)) == []


async def test_beside_each_other(demo: Served):
    """Their generators and grammars lie beside those of others, in places that change."""
    app, names = demo.engine.app(), [name for name in PLAIN if name != "echo"]
    found = await asyncio.gather(
        *(differences(app, PLAIN[name], FEWER, random.Random(9)) for name in names for _ in range(2))
    )
    assert [fault for faults in found for fault in faults] == []


@pytest.mark.parametrize("more", [GREEDY, HOT | {"seed": 5}], ids=["greedy", "seeded"])
async def test_a_picture_was_seen_before(vision: Served, more: dict[str, Any]):
    body = asked("What is this?", shown(RED_CIRCLE), **more)
    assert await differences(vision.engine.app(), (CHAT, body), CUTS, random.Random(10)) == []


@pytest.mark.parametrize("more", [GREEDY, HOT | {"seed": 5}], ids=["greedy", "seeded"])
async def test_an_adapter_goes_on(demo_lora: Adapted, more: dict[str, Any]):
    body = {"model": f"{MODEL_ID}:pirate", "messages": user("What is Penstock?")} | more
    app, headers = demo_lora.server._app(), asking_for("pirate")
    assert await differences(app, (CHAT, body), CUTS, random.Random(11), headers=headers) == []
