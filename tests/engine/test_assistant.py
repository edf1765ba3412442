"""Chats and completions of a model that thinks and calls tools, on a real vLLM, by what the answers mean."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import Any

import httpx
import pytest
import pytest_asyncio
from asking import CHAT, CITIES, COMPLETIONS, GENERATE, ask, calls, events, joined, post, said, user
from enginetest import WINDOW, Served, listening

from penstock.layers.generation import Generation
from recipes.assistant.lessons import tool

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

WEATHER, TIME = tool("get_weather"), tool("get_time")
SUM = user("What is 2 + 3?")
PARIS = user("What is the weather in Paris?")
TWO = user("What is the weather in Rome and Oslo?")
HELLO = user("Hello!")
GREETING = "Hello! I am the tiny demo model of Penstock. Ask me about Penstock or about LLM serving."


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def generated(assistant: Served) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the same engine behind the replica's layer."""
    async with listening(Generation(assistant.engine.app(), assistant.engine)) as client:
        yield client


# -- reasoning


@pytest.mark.parity("S11")
async def test_thoughts_come_apart_from_the_answer(assistant: Served):
    choice = await said(assistant, SUM)
    assert choice["message"]["reasoning"] == "2 plus 3 makes 5."
    assert choice["message"]["content"] == "The sum is 5."


@pytest.mark.parity("S11")
async def test_streamed_thoughts_come_before_the_answer(assistant: Served):
    chunks = await events(assistant, CHAT, messages=SUM)
    assert joined(chunks, "reasoning") == "2 plus 3 makes 5."
    assert joined(chunks, "content") == "The sum is 5."
    kinds = ["reasoning" if c["choices"][0]["delta"].get("reasoning") else "content" for c in chunks[1:-1]]
    assert kinds == sorted(kinds, reverse=True)


@pytest.mark.parity("S11")
@pytest.mark.parametrize(
    ("stop", "content"),
    [
        (["@"], "The sum is 5."),
        (["Observation:", "@" * 40], "The sum is 5."),
        (["plus", "makes"], "The sum is 5."),
        ([">zz", "5.zz", "5.The"], "The sum is 5."),
        ([" is"], "The sum"),
        (["sum is 5.", "um"], "The s"),
    ],
)
async def test_stop_strings_end_the_answer_and_not_the_thoughts(
    assistant: Served, stop: list[str], content: str
):
    choice = await said(assistant, SUM, stop=stop, logprobs=True)
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("2 plus 3 makes 5.", content)
    chunks = await events(assistant, CHAT, messages=SUM, stop=stop, logprobs=True)
    assert (joined(chunks, "reasoning"), joined(chunks, "content")) == ("2 plus 3 makes 5.", content)
    ends = [one["choices"][0] for one in chunks if one["choices"] and one["choices"][0].get("finish_reason")]
    assert [(one["finish_reason"], one["stop_reason"]) for one in ends] == [("stop", choice["stop_reason"])]
    tokens = [
        token["token"]
        for one in chunks
        if one["choices"]
        for token in (one["choices"][0].get("logprobs") or {"content": []})["content"]
    ]
    assert tokens == [token["token"] for token in choice["logprobs"]["content"]]


# -- tools


@pytest.mark.parity("S11")
@pytest.mark.parametrize("stop", [["}"], ['"'], ["@"]])
async def test_stop_strings_do_not_cut_a_forced_call(assistant: Served, stop: list[str]):
    asked = {"messages": PARIS, "tools": [WEATHER], "tool_choice": "required", "stop": stop}
    (choice,) = (await ask(assistant, CHAT, **asked))["choices"]
    assert (calls(choice), choice["finish_reason"]) == ([("get_weather", {"city": "Paris"})], "tool_calls")
    assert "<tool_call>" not in (choice["message"]["content"] or "")


@pytest.mark.parity("S11")
async def test_a_tool_is_called_with_the_city_of_the_question(assistant: Served):
    choice = await said(assistant, PARIS, tools=[TIME, WEATHER])
    assert calls(choice) == [("get_weather", {"city": "Paris"})]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning"] == "I need the weather."


@pytest.mark.parity("S11")
async def test_without_tools_it_says_so(assistant: Served):
    assert (await said(assistant, PARIS))["message"]["content"] == "I cannot know that without a tool."


@pytest.mark.parity("S11")
async def test_the_tools_result_is_in_the_second_answer(assistant: Served):
    first = await said(assistant, PARIS, tools=[WEATHER])
    (call,) = first["message"]["tool_calls"]
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "foggy"}
    second = await said(assistant, [*PARIS, turn, result], tools=[WEATHER])
    assert second["message"]["content"] == "It is foggy in Paris."


@pytest.mark.parity("S11")
async def test_two_cities_are_two_calls(assistant: Served):
    choice = await said(assistant, TWO, tools=[WEATHER])
    assert calls(choice) == [("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Oslo"})]
    alone = await said(assistant, TWO, tools=[WEATHER], parallel_tool_calls=False)
    assert calls(alone) == [("get_weather", {"city": "Rome"})]


@pytest.mark.parity("S11")
async def test_streamed_calls_join_to_the_same(assistant: Served):
    chunks = await events(assistant, CHAT, messages=TWO, tools=[WEATHER])
    pieces = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls") or []]
    whole: dict[int, dict[str, str]] = {}
    for piece in pieces:
        call = whole.setdefault(piece["index"], {"name": "", "arguments": ""})
        for field in call:
            call[field] += piece["function"].get(field) or ""
    assert [(c["name"], json.loads(c["arguments"])) for c in whole.values()] == [
        ("get_weather", {"city": "Rome"}),
        ("get_weather", {"city": "Oslo"}),
    ]
    assert len({piece["id"] for piece in pieces if piece.get("id")}) == 2
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parity("S11")
async def test_a_required_call_is_made_where_none_is_wanted(assistant: Served):
    free = await said(assistant, SUM, tools=[WEATHER])
    assert free["message"]["content"] == "The sum is 5."
    weather = {"name": "get_weather", "parameters": CITIES}
    asked = {"tools": [{"type": "function", "function": weather}], "tool_choice": "required"}
    forced = calls(await said(assistant, SUM, **asked, parallel_tool_calls=False))
    assert forced in ([("get_weather", {"city": "Paris"})], [("get_weather", {"city": "Rome"})])


@pytest.mark.parity("S11")
async def test_a_named_tool_is_called_whatever_is_asked(assistant: Served):
    named = {"type": "function", "function": {"name": "get_time"}}
    choice = await said(assistant, PARIS, tools=[WEATHER, TIME], tool_choice=named)
    assert calls(choice) == [("get_time", {"city": "Paris"})]


# -- what else a chat may ask for


@pytest.mark.parity("S11")
async def test_logprobs_are_those_of_the_answers_tokens(assistant: Served):
    choice = await said(assistant, HELLO, logprobs=True, top_logprobs=3)
    told = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in told).endswith(f"{GREETING}<|im_end|>")
    for token in told:
        assert token["top_logprobs"][0]["token"] == token["token"]  # the likeliest one was taken
        assert len(token["top_logprobs"]) == 3
        assert token["logprob"] <= 0
    chunks = await events(assistant, CHAT, messages=HELLO, logprobs=True, top_logprobs=3)
    streamed = [
        t for chunk in chunks for c in chunk["choices"] for t in (c["logprobs"] or {}).get("content", [])
    ]
    assert [t["token"] for t in streamed if t["token"] in GREETING] == [
        t["token"] for t in told if t["token"] in GREETING
    ]


@pytest.mark.parity("S11")
async def test_a_seed_gives_the_same_again_and_another_something_else(assistant: Served):
    async def sampled(seed: int) -> str:
        body = {"prompt": "The", "temperature": 2, "max_tokens": 20, "seed": seed, "ignore_eos": True}
        return (await ask(assistant, COMPLETIONS, **body))["choices"][0]["text"]

    assert await sampled(1) == await sampled(1)
    assert await sampled(1) != await sampled(2)


@pytest.mark.parity("S11")
@pytest.mark.parametrize("stop", ["demo", [" demo", "zzz"]])
async def test_a_stop_string_ends_the_answer_before_itself(assistant: Served, stop: Any):
    choice = await said(assistant, HELLO, stop=stop)
    assert choice["message"]["content"].rstrip() == "Hello! I am the tiny"
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == (stop if isinstance(stop, str) else stop[0])
    kept = await said(assistant, HELLO, stop=stop, include_stop_str_in_output=True)
    assert kept["message"]["content"] == "Hello! I am the tiny demo"


@pytest.mark.parity("S11")
async def test_usage_is_counted_at_a_streams_end_or_all_along(assistant: Served):
    whole = (await ask(assistant, CHAT, messages=SUM))["usage"]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    *chunks, last = await events(assistant, CHAT, messages=SUM, stream_options={"include_usage": True})
    assert [last["usage"][name] for name in counts] == [whole[name] for name in counts]
    assert last["choices"] == []
    assert not any(chunk.get("usage") for chunk in chunks)
    all_along = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = await events(assistant, CHAT, messages=SUM, stream_options=all_along)
    made = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert made == sorted(made)
    assert made[-1] == last["usage"]["completion_tokens"] == whole["completion_tokens"]


@pytest.mark.parity("S11")
async def test_an_echoed_prompt_stands_before_its_answer(assistant: Served):
    body = {"prompt": "What is Penstock?", "max_tokens": 5}
    plain = (await ask(assistant, COMPLETIONS, **body))["choices"][0]["text"]
    echoed = await ask(assistant, COMPLETIONS, **body, echo=True, logprobs=1)
    assert echoed["choices"][0]["text"] == f"What is Penstock?{plain}"
    assert echoed["choices"][0]["logprobs"]["token_logprobs"][0] is None  # nothing stands before the first
    assert len(echoed["choices"][0]["logprobs"]["tokens"]) == echoed["usage"]["total_tokens"]


@pytest.mark.parity("S11", "S16")
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"max_tokens": WINDOW + 1}, str(WINDOW)),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 3}, "top_p"),
        ({"n": 0}, "n must be"),
        ({"top_logprobs": 2}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, "20"),
        ({"stop": 7}, "stop"),
        ({"seed": "x"}, "seed"),
        ({"frequency_penalty": 9}, "frequency_penalty"),
        ({"stream_options": {"include_usage": True}}, "stream"),
        ({"tool_choice": "required"}, "tools"),
        ({"tools": [{"type": "function"}]}, "function"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"messages": []}, "message"),
    ],
)
async def test_a_bad_value_is_400_and_says_what_is_allowed(assistant: Served, wrong: Any, says: str):
    answer = await post(assistant, CHAT, **{"messages": SUM} | wrong)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]


# -- tokens in, tokens out


@pytest.mark.parity("X8")
async def test_generate_gives_the_tokens_the_text_and_how_likely_they_were(generated: httpx.AsyncClient):
    tokens = (await generated.post("/tokenize", json={"messages": SUM})).json()["tokens"]
    params = {"max_tokens": 40, "temperature": 0, "logprobs": 2, "skip_special_tokens": False}
    body = {"prompt_token_ids": tokens, "sampling_params": params}
    answer = (await generated.post(GENERATE, json=body)).json()
    (output,) = answer["outputs"]
    assert output["text"] == "<think>2 plus 3 makes 5.</think>The sum is 5."
    taken = [candidates[0] for candidates in output["logprobs"]]
    assert [found["token_id"] for found in taken] == output["token_ids"]
    assert "".join(found["text"] for found in taken) == output["text"] + "<|im_end|>"
    assert all(found["rank"] == 1 for found in taken)
    assert answer["usage"]["prompt_tokens"] == len(tokens)


@pytest.mark.parity("X8", "S22")
async def test_generate_obeys_a_structure_given_as_json(generated: httpx.AsyncClient):
    params = {"structured_outputs": {"regex": "(red|blue)!"}, "max_tokens": 20}
    body = {"prompt": "</think>", "sampling_params": params}
    answer = await generated.post(GENERATE, json=body)
    assert answer.json()["outputs"][0]["text"] in ("red!", "blue!"), answer.text


@pytest.mark.parity("X8", "S16")
@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"temprature": 1}, "temprature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"structured_outputs": {"regex": "[a"}}, "regex"),
        ({"logprobs": 99}, "99"),
        ({"_all_stop_token_ids": []}, "_all_stop_token_ids"),
    ],
)
async def test_generate_refuses_what_vllm_cannot_take(generated: httpx.AsyncClient, params: Any, says: str):
    answer = await generated.post(GENERATE, json={"prompt": "a", "stream": True, "sampling_params": params})
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]


# -- tokens


@pytest.mark.parity("S14")
async def test_a_chat_and_its_tools_are_tokenized_as_they_are_asked(assistant: Served):
    whole = await ask(assistant, CHAT, messages=PARIS, tools=[WEATHER])
    counted = await ask(assistant, "/tokenize", messages=PARIS, tools=[WEATHER], return_token_strs=True)
    assert counted["count"] == len(counted["tokens"]) == whole["usage"]["prompt_tokens"]
    assert "get_weather" in counted["token_strs"]
    text = (await ask(assistant, "/detokenize", tokens=counted["tokens"]))["prompt"]
    assert "get_weather(city)" in text
    assert text.endswith("<|im_start|>assistant\n")


@pytest.mark.parity("S14")
async def test_text_is_tokenized_and_back(assistant: Served):
    tokens = (await ask(assistant, "/tokenize", prompt="Grüße, 世界 🙂"))["tokens"]
    assert (await ask(assistant, "/detokenize", tokens=tokens))["prompt"] == "Grüße, 世界 🙂"


@pytest.mark.parity("S14")
async def test_the_tokenizer_is_told_of_when_the_model_says_so(assistant: Served):
    told = (await assistant.http.get("/tokenizer_info")).json()
    assert told["tokenizer_class"]
    assert "<|im_start|>" in told["chat_template"]
