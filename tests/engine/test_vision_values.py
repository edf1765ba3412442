"""What a model that sees says of pictures in a real vLLM, by each endpoint, and what they cost."""

from __future__ import annotations

import base64
import json
from importlib.util import find_spec

import pytest
from enginetest import MODEL_ID, Served
from seeing import BLUE_SQUARE, RED_CIRCLE, TOKEN, answer, asked, said, shown
from tests.pictures import data_url, encoded

from recipes.vision.lessons import TOOL
from recipes.vision.pictures import draw

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.parity("S23"),
]


@pytest.mark.parametrize(("which", "seen"), [("first", "a red circle"), ("second", "a blue square")])
async def test_each_of_two_pictures_is_told_from_the_other(vision: Served, which: str, seen: str):
    question = f"What is in the {which} picture?"
    assert await said(vision, shown(RED_CIRCLE), shown(BLUE_SQUARE), question) == seen


async def test_pictures_are_named_in_their_order(vision: Served):
    both = shown(BLUE_SQUARE), shown(RED_CIRCLE)
    assert await said(vision, *both, "Name them all.") == "a blue square, a red circle"


async def test_usage_counts_a_token_for_each_square_of_pixels(vision: Served):
    small, large = (
        draw("red", "circle", (2 * TOKEN, 2 * TOKEN)),
        draw("red", "circle", (3 * TOKEN, 3 * TOKEN)),
    )
    counts = [
        (await answer(vision, shown(picture), "What is this?"))["usage"]["prompt_tokens"]
        for picture in (small, large)
    ]
    assert counts[1] - counts[0] == 3 * 3 - 2 * 2


async def test_a_stream_says_the_same(vision: Served):
    body = asked(shown(RED_CIRCLE), "What is this?", stream=True)
    lines = (await vision.http.post("/v1/chat/completions", json=body)).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == "a red circle"


async def test_a_tool_is_called_with_what_is_seen(vision: Served):
    message = (await answer(vision, shown(BLUE_SQUARE), "What is this?", tools=[TOOL]))["choices"][0][
        "message"
    ]
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"color": "blue", "shape": "square"}


async def test_responses_sees_its_pictures(vision: Served):
    content = [
        {"type": "input_image", "image_url": data_url(encoded(BLUE_SQUARE)), "detail": "auto"},
        {"type": "input_text", "text": "What is this?"},
    ]
    body = {"model": MODEL_ID, "input": [{"role": "user", "content": content}], "temperature": 0}
    response = await vision.http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["output"][-1]["content"][0]["text"] == "a blue square"


async def test_messages_sees_its_pictures(vision: Served):
    source = {
        "type": "base64",
        "media_type": "image/png",
        "data": base64.b64encode(encoded(BLUE_SQUARE)).decode(),
    }
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}]
    body = {
        "model": MODEL_ID,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 40,
    }
    response = await vision.http.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["content"][-1]["text"] == "a blue square"
    assert response.json()["usage"]["input_tokens"] > 9
