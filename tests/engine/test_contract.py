"""What every engine does, whatever is behind it: the Engine protocol, and the HTTP of its app."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
import pytest
from enginetest import ALIAS, BLOCK_SIZE, KV_BLOCKS, MODEL_ID, WINDOW, Served
from tests.waiting import until

from penstock.engine import Delta
from penstock.errors import BadRequest, PromptTooLong
from penstock.request_context import TimingProbe, timing_probe

pytestmark = pytest.mark.asyncio(loop_scope="session")

QUESTION = "What is Penstock?"
CHAT = {"model": MODEL_ID, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
COMPLETION = {"model": MODEL_ID, "prompt": QUESTION, "temperature": 0, "max_tokens": 12}
LONG = {"max_tokens": WINDOW - 64, "ignore_eos": True, "temperature": 0}
TOO_LONG = "word " * 4 * WINDOW
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
        },
    },
}
NO_SEEDS = {"sglang": "SGLang obeys seeds with attention kernels for GPUs only; it refuses them elsewhere"}


async def ask(served: Served, path: str, **body: Any) -> dict[str, Any]:
    answer = await served.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def stream(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream that ended well."""
    async with served.http.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def generate(served: Served, prompt: Any, **params: Any) -> list[Delta]:
    return [delta async for delta in served.engine.generate(prompt, {"temperature": 0} | params)]


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@pytest.mark.parity("X22")
async def test_an_alias_is_answered_under_the_name_that_was_asked_for(under_test: Served):
    engine: Any = under_test.engine
    config = engine._config
    config.add_aliases([ALIAS, "late"])  # as a gateway's link does
    for name in (ALIAS, "late", MODEL_ID):
        answer = await ask(under_test, "/v1/chat/completions", **CHAT | {"model": name, "max_tokens": 2})
        assert answer["model"] == name
        events = await stream(under_test, "/v1/completions", **COMPLETION | {"model": name})
        assert {event["model"] for event in events} == {name}
        tokens = await ask(under_test, "/tokenize", model=name, prompt=QUESTION)
        assert tokens["count"] > 1
    config.aliases.remove("late")
    for name in ("gpt-4o", "late"):
        refused = await under_test.http.post("/v1/chat/completions", json=CHAT | {"model": name})
        assert refused.status_code == 404


async def until_idle(served: Served) -> None:
    await until(lambda: served.engine.load().running + served.engine.load().waiting == 0)


async def running_inside(served: Served) -> float:
    return await served.counted("num_requests_running")


# -- answers over HTTP


async def test_chat_streams_what_it_answers_at_once(under_test: Served):
    whole = await ask(under_test, "/v1/chat/completions", **CHAT)
    events = await stream(under_test, "/v1/chat/completions", **CHAT)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0]["role"] == "assistant"
    assert (
        "".join(delta.get("content") or "" for delta in deltas) == whole["choices"][0]["message"]["content"]
    )
    assert events[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "stop"


async def test_completions_stream_what_they_answer_at_once(under_test: Served):
    whole = await ask(under_test, "/v1/completions", **COMPLETION)
    events = await stream(under_test, "/v1/completions", **COMPLETION)
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]


async def test_usage_comes_last_in_a_stream_that_asks_for_it(under_test: Served):
    whole = await ask(under_test, "/v1/chat/completions", **CHAT)
    events = await stream(under_test, "/v1/chat/completions", **CHAT, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert events[-1]["usage"][count] == whole["usage"][count] > 0


@pytest.mark.parity("S11")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_forced_call_has_an_object_that_fits_the_tools_schema(
    under_test: Served, choice: Any, request: pytest.FixtureRequest
):
    """Clients parse the arguments as an object; the tool does not say `strict`."""
    if request.node.callspec.params["under_test"] == "vllm":
        pytest.skip("needs a tool parser, beside which vLLM's streams are not fast: see test_forced_tools")
    body = CHAT | {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 120}
    whole = await ask(under_test, "/v1/chat/completions", **body)
    deltas = [
        choice["delta"]
        for event in await stream(under_test, "/v1/chat/completions", **body)
        for choice in event["choices"]
    ]
    streamed = [call["function"] for delta in deltas for call in delta.get("tool_calls") or []]
    (call, *_) = whole["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
    assert streamed[0]["name"] == "get_weather"
    assert "".join(part.get("arguments") or "" for part in streamed).startswith(call["function"]["arguments"])


async def test_n_outputs_have_indices_of_their_own(under_test: Served, request: pytest.FixtureRequest):
    """Pieces of a stream joined by their indices are the answers that come at once."""
    obeyed = request.node.callspec.params["under_test"] not in NO_SEEDS
    body = CHAT | {"n": 2, "temperature": 0.5, "max_tokens": 12} | ({"seed": 1} if obeyed else {})
    whole = await ask(under_test, "/v1/chat/completions", **body)
    at_once = {choice["index"]: choice["message"]["content"] for choice in whole["choices"]}
    joined = {0: "", 1: ""}
    for event in await stream(under_test, "/v1/chat/completions", **body):
        for choice in event["choices"]:
            joined[choice["index"]] += choice["delta"].get("content") or ""
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert all(joined.values())
    if obeyed:
        assert joined == at_once


async def test_a_seed_gives_the_same_answer_again(under_test: Served, request: pytest.FixtureRequest):
    if why := NO_SEEDS.get(request.node.callspec.params["under_test"]):
        pytest.skip(why)
    body = CHAT | {"temperature": 2.0, "seed": 1, "max_tokens": 30}
    said = [await ask(under_test, "/v1/chat/completions", **body) for _ in range(3)]
    assert len({one["choices"][0]["message"]["content"] for one in said}) == 1


async def test_max_tokens_ends_with_length(under_test: Served):
    whole = await ask(under_test, "/v1/chat/completions", **CHAT, max_tokens=3)
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 3


async def test_ignore_eos_goes_on_to_the_limit(under_test: Served):
    whole = await ask(under_test, "/v1/chat/completions", **CHAT, max_tokens=200, ignore_eos=True)
    assert whole["usage"]["completion_tokens"] == 200


async def test_a_stop_string_ends_the_answer_before_it(under_test: Served):
    full = (await ask(under_test, "/v1/chat/completions", **CHAT))["choices"][0]["message"]["content"]
    stop = full[4:7]
    cut = await ask(under_test, "/v1/chat/completions", **CHAT, stop=[stop])
    assert cut["choices"][0]["message"]["content"] == full[: full.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"


async def test_tokens_give_back_their_text(under_test: Served):
    said = "Water turns turbines; tokens turn heads."
    tokens = (await ask(under_test, "/tokenize", model=MODEL_ID, prompt=said))["tokens"]
    assert (await ask(under_test, "/detokenize", model=MODEL_ID, tokens=tokens))["prompt"] == said


async def test_a_chat_counts_the_tokens_that_it_is_tokenized_to(under_test: Served):
    counted = await ask(under_test, "/tokenize", model=MODEL_ID, messages=CHAT["messages"])
    whole = await ask(under_test, "/v1/chat/completions", **CHAT)
    assert counted["count"] == whole["usage"]["prompt_tokens"]
    assert counted["max_model_len"] == WINDOW


async def test_the_model_is_listed_with_its_window(under_test: Served):
    listed = (await under_test.http.get("/v1/models")).json()["data"]
    assert (listed[0]["id"], listed[0]["max_model_len"]) == (MODEL_ID, WINDOW)
    assert {card["id"] for card in listed[1:]} <= {ALIAS}  # some engines list their aliases, too


async def test_metrics_carry_vllms_names_and_the_model(under_test: Served):
    metrics = (await under_test.http.get("/metrics")).text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f"vllm:{name}{{" in metrics
    assert f'model_name="{MODEL_ID}"' in metrics


async def test_metrics_count_what_the_prefix_cache_was_asked_and_gave(under_test: Served):
    tokens = (await ask(under_test, "/tokenize", model=MODEL_ID, prompt="wheel " * 100))["tokens"]
    prompt = {"prompt": tokens, "max_tokens": 1}
    await ask(under_test, "/v1/completions", **COMPLETION | prompt)
    names = ("prefix_cache_queries_total", "prefix_cache_hits_total")
    before = [await under_test.counted(name) for name in names]
    await ask(under_test, "/v1/completions", **COMPLETION | prompt)
    after = [await under_test.counted(name) for name in names]
    hits = (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert [new - old for new, old in zip(after, before, strict=True)] == [len(tokens), hits]


async def test_health_is_ok_while_it_works_and_when_a_client_has_left(under_test: Served):
    async with under_test.http.stream(
        "POST", "/v1/completions", json=COMPLETION | LONG | {"stream": True}
    ) as answer:
        await anext(answer.aiter_lines())
        assert (await under_test.http.get("/health")).status_code == 200
        await under_test.engine.check_health()
    await until_idle(under_test)
    assert (await under_test.http.get("/health")).status_code == 200


# -- errors over HTTP


def error(answer: httpx.Response) -> dict[str, Any]:
    """The envelope, checked for its form and for what must not be in it."""
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["code"], str)
    for internal in ("Traceback", "pydantic", ".py", "input_value", "'input':", "0x"):
        assert internal not in body["error"]["message"]
    assert "\n" not in body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", "{not json"),
        ("/v1/chat/completions", {"model": MODEL_ID}),
        ("/v1/chat/completions", {"model": MODEL_ID, "messages": "hello"}),
        ("/v1/chat/completions", CHAT | {"max_tokens": "many"}),
        ("/v1/chat/completions", CHAT | {"max_tokens": 0}),
        ("/v1/chat/completions", CHAT | {"n": 0}),
        ("/v1/completions", {"model": MODEL_ID}),
        ("/v1/completions", COMPLETION | {"stop": 7}),
        ("/detokenize", {"model": MODEL_ID, "tokens": ["x"]}),
    ],
)
async def test_a_bad_request_is_400_in_the_envelope(under_test: Served, path: str, body: Any):
    content = body if isinstance(body, str) else json.dumps(body)
    headers = {"content-type": "application/json"}
    answer = await under_test.http.post(path, content=content, headers=headers)
    assert answer.status_code == 400
    assert error(answer)["code"] == "invalid_request"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TOO_LONG}]}),
        ("/v1/completions", {"prompt": TOO_LONG}),
    ],
)
async def test_a_prompt_over_the_window_is_named(under_test: Served, path: str, prompt: Any, stream: bool):
    answer = await under_test.http.post(path, json={"model": MODEL_ID, "stream": stream} | prompt)
    assert answer.status_code == 400
    assert error(answer)["code"] == "context_length_exceeded"


async def test_another_model_is_404(under_test: Served):
    answer = await under_test.http.post("/v1/chat/completions", json=CHAT | {"model": "other"})
    assert answer.status_code == 404
    assert error(answer)["code"] == "model_not_found"


async def test_an_unknown_path_is_404(under_test: Served):
    answer = await under_test.http.post("/v1/nothing/here", json={})
    assert answer.status_code == 404
    assert error(answer)["code"] == "not_found"


async def test_a_wrong_method_is_405(under_test: Served):
    answer = await under_test.http.get("/v1/chat/completions")
    assert answer.status_code == 405
    assert error(answer)["code"] == "method_not_allowed"


# -- the protocol


async def test_starting_it_again_does_nothing(under_test: Served):
    phases: list[str] = []
    await under_test.engine.start(phases.append)
    assert phases == []
    await under_test.engine.check_health()


async def test_it_knows_its_window(under_test: Served):
    assert under_test.engine.max_model_len() == WINDOW


async def test_it_knows_the_size_of_its_cache(under_test: Served):
    tokens = under_test.engine.kv_tokens()
    assert tokens is not None
    assert abs(tokens - KV_BLOCKS * BLOCK_SIZE) <= BLOCK_SIZE  # vLLM counts the block that it keeps


async def test_generate_says_what_the_endpoint_answers(under_test: Served):
    whole = await ask(under_test, "/v1/completions", **COMPLETION)
    deltas = await generate(under_test, QUESTION, max_tokens=12)
    assert text(deltas) == whole["choices"][0]["text"]
    assert sum(len(delta.token_ids) for delta in deltas) == whole["usage"]["completion_tokens"]
    assert deltas[0].prompt_tokens == whole["usage"]["prompt_tokens"]
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == whole["choices"][0]["finish_reason"]


@pytest.mark.parametrize("n", [1, 2])
async def test_it_tells_where_its_time_went_to_whoever_watches(under_test: Served, n: int):
    if under_test.foreign:
        pytest.skip("No answer of an OpenAI server says when its request left the queue.")
    seen = TimingProbe()
    before = timing_probe.set(seen)
    deltas = under_test.engine.generate(
        QUESTION, {"temperature": 1, "max_tokens": 5, "n": n, "ignore_eos": True}
    )
    async with aclosing(deltas):
        await anext(deltas)
        assert seen.ask is not None
        first = seen.ask()
        async for _ in deltas:
            pass
    timing_probe.reset(before)
    assert first.queue_s is not None
    assert first.queue_s >= 0
    assert first.prefill_s is not None
    assert first.prefill_s > 0
    assert first.decode_s is not None
    assert 0 <= first.decode_s < (seen.ask().decode_s or 0)


async def test_generate_takes_token_ids_and_dicts(under_test: Served):
    tokens = (await ask(under_test, "/tokenize", model=MODEL_ID, prompt=QUESTION))["tokens"]
    prompts = (QUESTION, tokens, {"prompt": QUESTION}, {"prompt_token_ids": tokens})
    said = [text(await generate(under_test, prompt, max_tokens=8)) for prompt in prompts]
    assert said == [said[0]] * len(prompts)


async def test_generate_ends_with_length_or_stop(under_test: Served):
    limited = await generate(under_test, QUESTION, max_tokens=2)
    stop = text(await generate(under_test, QUESTION, max_tokens=12))[3:6]
    stopped = await generate(under_test, QUESTION, max_tokens=12, stop=[stop])
    assert limited[-1].finish_reason == "length"
    assert stopped[-1].finish_reason == "stop"
    assert stop not in text(stopped)


async def test_generate_gives_every_output_its_index(under_test: Served):
    deltas = await generate(under_test, QUESTION, max_tokens=4, n=3, temperature=1.0, ignore_eos=True)
    assert {delta.index for delta in deltas if delta.finish_reason == "length"} == {0, 1, 2}
    assert sum(len(delta.token_ids) for delta in deltas) == 12


@pytest.mark.parametrize("params", [{"max_tokens": 0}, {"max_tokens": "many"}, {"n": 0}])
async def test_generate_refuses_bad_parameters(under_test: Served, params: dict[str, Any]):
    with pytest.raises(BadRequest):
        await generate(under_test, QUESTION, **params)


@pytest.mark.parametrize("under_test", ["sim", "vllm"], indirect=True)
@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        (QUESTION, {"max_tokens": True}),
        (QUESTION, {"n": True}),
        (QUESTION, {"stop": ["a", 5]}),
        ([True], {}),
        ({"prompt_token_ids": [1.0]}, {}),
    ],
)
async def test_generate_refuses_what_is_of_the_wrong_type(
    under_test: Served, prompt: Any, params: dict[str, Any]
):
    with pytest.raises(BadRequest):
        await generate(under_test, prompt, **params)
    assert text(await generate(under_test, QUESTION, max_tokens=2))


@pytest.mark.parametrize("under_test", ["sim", "vllm"], indirect=True)
@pytest.mark.parametrize("name", ["max_token", "max_completion_tokens", "response_format", "priority"])
async def test_generate_refuses_what_is_no_sampling_parameter(under_test: Served, name: str):
    with pytest.raises(BadRequest, match=name):
        await generate(under_test, QUESTION, **{name: None})


@pytest.mark.parametrize("under_test", ["vllm"], indirect=True)
async def test_what_vllm_refuses_by_a_plain_error_is_the_clients_fault(under_test: Served):
    with pytest.raises(BadRequest, match="non-empty list"):
        await generate(under_test, QUESTION, trace_decode_token_ids=[])


@pytest.mark.parametrize("prompt", [TOO_LONG, [0] * WINDOW])
async def test_generate_refuses_a_prompt_over_the_window(under_test: Served, prompt: Any):
    with pytest.raises(PromptTooLong, match=str(WINDOW)):
        await generate(under_test, prompt)


async def test_concurrent_streams_do_not_mix(under_test: Served):
    prompts = [f"{number} {QUESTION} {number}" for number in range(24)]
    alone = [text(await generate(under_test, prompt, max_tokens=6)) for prompt in prompts]
    together = await asyncio.gather(*(generate(under_test, prompt, max_tokens=6) for prompt in prompts))
    assert [text(deltas) for deltas in together] == alone


@asynccontextmanager
async def five_streams(served: Served) -> AsyncIterator[None]:
    """Five open streams, each with its first token."""
    await until_idle(served)
    open_streams = [served.engine.generate(QUESTION, LONG) for _ in range(5)]
    for deltas in open_streams:
        await anext(deltas)
    try:
        yield
    finally:
        for deltas in open_streams:
            await deltas.aclose()


async def test_load_counts_what_is_open(under_test: Served):
    async with five_streams(under_test):
        load = under_test.engine.load()
    assert load.running + load.waiting == 5


async def test_load_has_the_share_of_the_cache_in_use(under_test: Served):
    async with five_streams(under_test):
        if under_test.foreign:  # its gauges are read twice a second
            await until(lambda: under_test.engine.load().kv_usage > 0)
        usage = under_test.engine.load().kv_usage
    assert 0 < usage <= 1


async def test_closing_a_stream_aborts_the_request_in_the_engine(under_test: Served):
    await until_idle(under_test)
    async with aclosing(under_test.engine.generate(QUESTION, LONG)) as deltas:
        await anext(deltas)
    await until_idle(under_test)
    async with aclosing(under_test.engine.generate(QUESTION, LONG)) as deltas:
        await anext(deltas)
        await anext(deltas)
        assert await running_inside(under_test) == 1


async def test_a_client_that_goes_away_aborts_its_request(under_test: Served):
    await until_idle(under_test)
    body = COMPLETION | LONG | {"stream": True}
    async with under_test.http.stream("POST", "/v1/completions", json=body) as answer:
        await anext(answer.aiter_lines())
        assert under_test.engine.load().running == 1
    await until_idle(under_test)


async def test_a_client_that_gives_up_waiting_aborts_its_request(under_test: Served):
    await until_idle(under_test)
    waiting = asyncio.create_task(under_test.http.post("/v1/completions", json=COMPLETION | LONG))
    await until(lambda: under_test.engine.load().running == 1)
    waiting.cancel()
    await until_idle(under_test)
