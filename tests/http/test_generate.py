"""`POST /v1/generate`: an engine's own `generate` through the gateway, here the simulator's."""

import json

import httpx
import pytest
from served import Served, sim_config, until

from penstock.engines.sim.engine import SimEngine
from penstock.layers.generation import Generation

pytestmark = pytest.mark.parity("X8")


async def generating(served: Served, **options) -> SimEngine:
    engine = SimEngine(sim_config("m", **options))
    await engine.start()
    served._stops.append(engine.stop)
    await served.app(Generation(engine.app(), engine), load=engine.load)
    await served.gateway("m")
    return engine


async def ask(served: Served, **body) -> httpx.Response:
    async with served.http() as http:
        return await http.post("/v1/generate", json=body)


def events(answer: httpx.Response) -> list[dict]:
    *pieces, end = answer.text.strip().split("\n\n")
    assert end == "data: [DONE]"
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces]


async def test_text_and_its_tokens_give_the_same_answer(served: Served):
    await generating(served)
    async with served.http() as http:
        tokens = (await http.post("/tokenize", json={"prompt": "one two three"})).json()["tokens"]
        by_text = (await http.post("/v1/generate", json={"prompt": "one two three"})).json()
        by_ids = (await http.post("/v1/generate", json={"model": "m", "prompt_token_ids": tokens})).json()
    assert by_text["outputs"] == by_ids["outputs"]
    (output,) = by_text["outputs"]
    assert output["text"] == "one two three"
    assert output["finish_reason"] == "stop"
    assert by_text["usage"]["prompt_tokens"] == len(tokens)
    assert by_text["usage"]["completion_tokens"] == len(output["token_ids"])


async def test_a_stream_gives_a_piece_a_step_and_then_the_counts(served: Served):
    await generating(served)
    answer = await ask(served, prompt="one two three", stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *pieces, end = events(answer)
    assert "".join(piece["text"] for piece in pieces) == "one two three"
    assert [piece["finish_reason"] for piece in pieces][-2:] == [None, "stop"]
    made = sum(len(piece["token_ids"]) for piece in pieces)
    assert end["usage"]["completion_tokens"] == made
    assert end["id"] == f"gen-{answer.headers['x-request-id']}"
    assert end["outputs"] == []


async def test_every_output_has_its_index(served: Served):
    await generating(served)
    params = {"n": 3, "max_tokens": 4, "ignore_eos": True}
    whole = (await ask(served, prompt="a b", sampling_params=params)).json()
    assert [(output["index"], len(output["token_ids"])) for output in whole["outputs"]] == [
        (0, 4),
        (1, 4),
        (2, 4),
    ]
    *pieces, _ = events(await ask(served, prompt="a b", sampling_params=params, stream=True))
    assert {piece["index"] for piece in pieces} == {0, 1, 2}


async def test_a_prompt_asked_again_is_told_to_be_cached(served: Served):
    await generating(served, block_size=4)
    await ask(served, prompt="word " * 40, sampling_params={"max_tokens": 1})
    again = (await ask(served, prompt="word " * 40, sampling_params={"max_tokens": 1})).json()
    assert again["usage"]["cached_tokens"] >= 32


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt"),
        ({"prompt_token_ids": ["a"]}, None),
        ({"prompt": "a", "max_tokens": 3}, "max_tokens"),
        ({"prompt": "a", "sampling_params": {"max_tokens": 0}}, None),
        ({"prompt": "a", "sampling_params": {"prompt_logprobs": 1}}, "sampling_params.prompt_logprobs"),
    ],
)
async def test_a_bad_request_is_400_and_names_the_field(served: Served, body, param):
    await generating(served)
    answer = await ask(served, **body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "invalid_request"
    assert param is None or error["param"] == param


async def test_a_prompt_over_the_window_is_told_before_a_stream_begins(served: Served):
    await generating(served, max_model_len=8)
    answer = await ask(served, prompt="word " * 20, stream=True)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_an_error_in_the_middle_is_the_streams_last_event(served: Served):
    await generating(served, fail_after_tokens=2)
    answer = await ask(served, prompt="one two three four", stream=True)
    assert answer.status_code == 200
    assert "[DONE]" not in answer.text
    last = answer.text.strip().rpartition("\n\n")[2]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"


async def test_a_client_that_leaves_ends_its_request(served: Served):
    engine = await generating(served, step_base_ms=2)
    body = {"prompt": "a", "stream": True, "sampling_params": {"max_tokens": 4000, "ignore_eos": True}}
    async with served.http() as http, http.stream("POST", "/v1/generate", json=body) as answer:
        await anext(answer.aiter_bytes())
        assert engine.load().running == 1
    await until(lambda: engine.load().running == 0)


async def test_another_model_and_another_method_are_refused_as_everywhere(served: Served):
    await generating(served)
    assert (await ask(served, model="other", prompt="a")).json()["error"]["code"] == "model_not_found"
    async with served.http() as http:
        assert (await http.get("/v1/generate")).status_code == 405
