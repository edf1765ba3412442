"""Pictures and videos in a real vLLM, by a model that names what it sees: `recipes/vision`.

Read by vLLM, and read by the preprocessor of examples/vision_preprocessing.py.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web
from enginetest import MODEL_ID, Served, listening, vllm_config
from examples.vision_preprocessing import VisionInfo
from models import model
from PIL import Image
from seeing import BLUE_SQUARE, RED_CIRCLE, TOKEN, asked, clip, filmed, refused, said, shown
from tests.pictures import data_url, encoded

from penstock.asgi_client import call
from penstock.data.backends.protocol import Response
from penstock.data.execution.retry import classify_response
from penstock.data.results.columns import result_columns
from penstock.data.rows.builder import build_request
from penstock.data.rows.request import Task
from penstock.errors import BadRequest
from penstock.hooks.hook import PREPROCESSOR, Hook
from penstock.layers.generation import PATH as GENERATE
from penstock.layers.generation import Generation
from penstock.layers.preprocessing import GENERATING, Preprocessing
from penstock.request_context import PreparedPrompt
from penstock.request_context import prepared_prompt as prompt_of_task
from recipes.vision.lessons import TOOL
from recipes.vision.pictures import draw

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.parity("S23"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def site() -> AsyncIterator[int]:
    """The port of a web server on a private address."""

    async def picture(request: web.Request) -> web.Response:
        return web.Response(body=encoded(RED_CIRCLE), content_type="image/png")

    app = web.Application()
    app.add_routes([web.get("/red.png", picture)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "localhost", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
async def test_picture_in_a_data_url_is_seen(vision: Served, kind: str):
    url = data_url(encoded(draw("green", "triangle"), kind), f"image/{kind.lower()}")
    assert await said(vision, shown(url), "What is this?") == "a green triangle"


async def test_picture_of_an_allowed_host_is_fetched_though_its_address_is_private(vision: Served, site: int):
    assert await said(vision, shown(f"http://localhost:{site}/red.png"), "What is this?") == "a red circle"


async def test_private_address_that_nobody_allowed_is_400(vision: Served, site: int):
    said = await refused(vision, shown(f"http://127.0.0.1:{site}/red.png"), "What is this?")
    assert "allowed domains: ['localhost']" in said


async def test_picture_that_its_host_does_not_have_is_400(vision: Served, site: int):
    assert "404" in await refused(vision, shown(f"http://localhost:{site}/none.png"), "What is this?")


async def test_file_below_the_allowed_folder_is_seen(vision: Served, pictures: Path):
    assert await said(vision, shown(f"file://{pictures}/red.png"), "What is this?") == "a red circle"


@pytest.mark.parametrize("path", ["{}/../secret.png", "{}/none.png", "/etc/hostname"])
async def test_file_outside_of_it_or_not_there_is_400(vision: Served, pictures: Path, path: str):
    await refused(vision, shown(f"file://{path.format(pictures)}"), "What is this?")


async def test_more_pictures_than_the_limit_are_400(vision: Served):
    said = await refused(vision, *[shown(RED_CIRCLE)] * 3, "Name them all.")
    assert "2" in said
    assert "image" in said


@pytest.mark.parametrize(
    "content", [b"no picture", encoded(RED_CIRCLE)[:50], b""], ids=["text", "cut", "empty"]
)
async def test_broken_picture_is_400(vision: Served, content: bytes):
    said = await refused(vision, shown(data_url(content)), "What is this?")
    assert "data URL" in said
    assert "0x" not in said


async def test_a_small_file_that_is_a_huge_picture_is_400(vision: Served):
    """20 kB that would be 300 MB in memory."""
    said = await refused(vision, shown(data_url(Image.new("1", (17_000, 17_000)))), "What is this?")
    assert "pixels" in said


async def test_what_is_no_url_is_400(vision: Served):
    await refused(vision, shown("red.png"), "What is this?")


async def test_video_is_seen(vision: Served):
    url = data_url(clip(draw("purple", "cross")), "video/mp4")
    assert await said(vision, filmed(url), "What is in the video?") == "a purple cross"


async def test_second_video_is_over_the_limit(vision: Served):
    url = data_url(clip(RED_CIRCLE), "video/mp4")
    assert "video" in await refused(vision, filmed(url), filmed(url), "What is in the video?")


async def test_a_request_may_not_raise_its_own_pixels(vision: Served):
    assert "mm_processor_kwargs" in await refused(
        vision, shown(RED_CIRCLE), "What is this?", mm_processor_kwargs={"max_pixels": 1 << 20}
    )


async def test_generate_takes_pictures_and_frames_as_they_are(vision: Served):
    import numpy

    async def generated(kind: str, data: Any, question: str) -> str:
        pad = f"<|vision_start|><|{kind}_pad|><|vision_end|>"
        prompt = f"<|im_start|>user\n{pad}{question}<|im_end|>\n<|im_start|>assistant\n"
        deltas = vision.engine.generate(
            {"prompt": prompt, "multi_modal_data": {kind: data}}, {"temperature": 0, "max_tokens": 20}
        )
        return "".join([delta.text async for delta in deltas])

    assert await generated("image", [RED_CIRCLE], "What is this?") == "a red circle"
    frames = numpy.stack([numpy.asarray(BLUE_SQUARE)] * 4)
    assert await generated("video", frames, "What is in the video?") == "a blue square"


async def test_a_prompt_without_a_place_for_its_picture_is_refused(vision: Served):
    prompt = {"prompt": "What is this?", "multi_modal_data": {"image": [RED_CIRCLE]}}
    with pytest.raises(BadRequest, match="no placeholder for image 1"):
        await anext(vision.engine.generate(prompt, {}))


@pytest.mark.parity("X13")
@pytest.mark.parametrize("path", sorted(GENERATING.keys() - {"/v1/responses/input_tokens"}))
@pytest.mark.parametrize(("places", "missing"), [(0, 1), (1, 2)])
async def test_a_preprocessors_prompt_without_a_place_is_400_on_every_endpoint(
    vision: Served, path: str, places: int, missing: int
):
    prompt = {
        "prompt": "<|vision_start|><|image_pad|><|vision_end|>" * places + "What is this?",
        "multi_modal_data": {"image": [RED_CIRCLE, BLUE_SQUARE]},
    }
    config = vllm_config(str(model("vision"))).model_copy(update={"preprocessor": lambda request: prompt})
    engine = Generation(vision.engine.app(), vision.engine)
    async with listening(Preprocessing(engine, Hook(config, PREPROCESSOR), config)) as client:
        for stream in ({}, {"stream": True}):
            body = {"model": MODEL_ID, "max_tokens": 5, GENERATING[path]: "a", **stream}
            if path == GENERATE:
                body = {"prompt": "a", **stream}
            response = await client.post(path, json=body)
            assert response.status_code == 400, response.text
            assert f"no placeholder for image {missing}" in response.json()["error"]["message"]


def prepared(vision: Served, **arguments: Any) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    """A client of the model with the example's preprocessor."""
    config = vllm_config(str(model("vision"))).model_copy(
        update={"preprocessor": VisionInfo, "preprocessor_options": {"arguments": arguments}}
    )
    return listening(Preprocessing(vision.engine.app(), Hook(config, PREPROCESSOR), config))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def own(vision: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with prepared(vision) as client:
        yield client


QUESTION = {"type": "text", "text": "What is this?"}
SQUARE = base64.b64encode(encoded(BLUE_SQUARE)).decode()
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"content": [shown(BLUE_SQUARE), QUESTION]}], "max_tokens": 20},
    "/v1/messages": {
        "messages": [
            {
                "content": [
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": SQUARE},
                    },
                    QUESTION,
                ]
            }
        ],
        "max_tokens": 20,
    },
    "/v1/responses": {
        "input": [
            {
                "content": [
                    {"type": "input_image", "image_url": f"data:image/png;base64,{SQUARE}", "detail": "auto"},
                    {"type": "input_text", "text": "What is this?"},
                ]
            }
        ],
    },
}
for _body in ASKED.values():
    _body.update(model=MODEL_ID, temperature=0)
    (_body.get("messages") or _body["input"])[0]["role"] = "user"


def text_of(path: str, answer: dict[str, Any]) -> str:
    if path == "/v1/responses":
        return answer["output"][-1]["content"][0]["text"]
    return (
        answer["content"][-1]["text"]
        if path == "/v1/messages"
        else answer["choices"][0]["message"]["content"]
    )


@pytest.mark.parity("X13")
@pytest.mark.parametrize("path", ASKED)
async def test_own_preprocessing_shows_the_model_the_same_at_the_same_cost(
    vision: Served, own: httpx.AsyncClient, path: str
):
    by_vllm = (await vision.http.post(path, json=ASKED[path])).json()
    response = await own.post(path, json=ASKED[path])
    assert response.status_code == 200, response.text
    assert text_of(path, response.json()) == "a blue square"
    assert response.json()["usage"] == by_vllm["usage"]


@pytest.mark.parity("X13")
@pytest.mark.parametrize("path", ASKED)
async def test_own_preprocessing_streams(own: httpx.AsyncClient, path: str):
    response = await own.post(path, json={**ASKED[path], "stream": True})
    assert response.status_code == 200, response.text
    assert streamed(response.text) == "a blue square"


def streamed(text: str) -> str:
    """All text in the events of any of the kinds of stream."""
    found = ""
    for line in text.splitlines():
        event = json.loads(line[6:]) if line.startswith("data: {") else {}
        if event.get("type") == "response.output_text.delta":
            found += event["delta"]
        elif event.get("type") == "content_block_delta":
            found += event["delta"]["text"]
        elif event.get("choices"):
            found += event["choices"][0]["delta"].get("content") or ""
    return found


@pytest.mark.parity("X13")
async def test_own_preprocessing_of_completions(own: httpx.AsyncClient):
    body = {"model": MODEL_ID, "prompt": "What is in the picture?", "temperature": 0, "max_tokens": 20}
    response = await own.post("/v1/completions", json=body)
    assert response.json()["choices"][0]["text"] == "There is no picture."


@pytest.mark.parity("X13")
async def test_own_preprocessing_of_two_pictures_and_a_video(own: httpx.AsyncClient):
    body = asked(shown(BLUE_SQUARE), shown(RED_CIRCLE), "Name them all.")
    both = (await own.post("/v1/chat/completions", json=body)).json()
    assert text_of("", both) == "a blue square, a red circle"
    body = asked(filmed(data_url(clip(draw("yellow", "cross")), "video/mp4")), "What is in the video?")
    response = await own.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert text_of("", response.json()) == "a yellow cross"


@pytest.mark.parity("X13")
async def test_tools_are_called_with_what_own_preprocessing_showed(own: httpx.AsyncClient):
    body = asked(shown(BLUE_SQUARE), "What is this?", tools=[TOOL])
    message = (await own.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"color": "blue", "shape": "square"}


@pytest.mark.parity("X13")
async def test_max_pixels_of_own_preprocessing_changes_what_a_picture_costs(
    vision: Served, own: httpx.AsyncClient
):
    body = asked(shown(RED_CIRCLE), "What is this?")
    usual = (await own.post("/v1/chat/completions", json=body)).json()
    async with prepared(vision, max_pixels=(2 * TOKEN) ** 2) as client:
        small = (await client.post("/v1/chat/completions", json=body)).json()
    assert text_of("", small) == text_of("", usual) == "a red circle"
    assert usual["usage"]["prompt_tokens"] - small["usage"]["prompt_tokens"] == 3 * 3 - 2 * 2


@pytest.mark.parity("X13")
async def test_own_preprocessing_is_held_to_the_limits_too(own: httpx.AsyncClient):
    body = asked(*[shown(RED_CIRCLE)] * 3, "Name them all.")
    response = await own.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    assert "image" in response.json()["error"]["message"]


@pytest.mark.parity("X13")
@pytest.mark.parametrize("url", ["http://127.0.0.1/red.png", "file:///etc/hostname", "red.png"])
async def test_own_preprocessing_reads_no_other_urls(own: httpx.AsyncClient, url: str):
    response = await own.post("/v1/chat/completions", json=asked(shown(url), "What is this?"))
    assert response.status_code == 400
    assert "data URLs" in response.json()["error"]["message"]


# -- rows of a batch


async def row(vision: Served, **fields: Any) -> str:
    """What is said to a row, asked as batch asks its own engine."""
    request = build_request(fields, Task(), {"temperature": 0, "max_tokens": 40})
    body = request.body
    if request.prompt is not None:
        ours = PreparedPrompt(pickle.loads(request.prompt))
        prompt_of_task.set(ours)
        body = msgspec.json.encode({**json.loads(body), "prompt": ours.placeholder})
    answer = await call(vision.engine.app(), request.path, body)
    found = result_columns(
        Task(), classify_response(Response(answer.status, await answer.read()), attempts=1)
    )
    assert found["error"] is None
    return found["generated_text"]


@pytest.mark.parity("D9")
async def test_rows_hold_pictures_and_videos_in_any_form(vision: Served, pictures: Path):
    for value in (RED_CIRCLE, encoded(RED_CIRCLE), np.asarray(RED_CIRCLE), pictures / "red.png"):
        asks = [{"type": "image", "image": value}, {"type": "text", "text": "What is in the picture?"}]
        assert await row(vision, messages=[{"role": "user", "content": asks}]) == "a red circle"
    for value in (clip(BLUE_SQUARE), [BLUE_SQUARE] * 4):
        asks = [{"type": "video", "video": value}, "What is in the video?"]
        assert "blue square" in await row(vision, messages=[{"role": "user", "content": asks}])


@pytest.mark.parity("D9")
async def test_rows_hold_the_engines_own_prompt(vision: Served):
    shown = "<|vision_start|><|image_pad|><|vision_end|>"
    text = f"<|im_start|>user\n{shown}What is in the picture?<|im_end|>\n<|im_start|>assistant\n"
    said = await row(vision, prompt=text, multimodal_data={"image": [RED_CIRCLE]})
    assert said == "a red circle"
