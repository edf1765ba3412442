"""What is SGLang's own: parameters in its words, tools, control, its process. A real SGLang, on a CPU."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from asking import CHAT, COMPLETIONS, ask, calls, events, joined, post, said, user
from enginetest import MODEL_ID, SGLANG, Served, serve, sglang_config
from models import model
from safetensors.torch import load_file, save_file
from tests.waiting import until

from penstock.config.schema.sections import LoraConfig
from penstock.engine import Delta
from penstock.engines import engine_class
from penstock.errors import (
    AdapterBroken,
    BadRequest,
    ConfigError,
    Conflict,
    EngineDead,
    EngineStartFailed,
    ModelNotFound,
    Unsupported,
)
from penstock.request_context import PreparedPrompt, prepared_prompt
from recipes.adapters.answers import ANSWERS, BASE_ANSWERS
from recipes.assistant.lessons import tool

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parity("S27"),
    pytest.mark.full,
    pytest.mark.skipif(not (SGLANG / "ready").exists(), reason="made by `make sglang`"),
]

PROMPT = "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n<think></think>"
ANSWER = "The sum is 5."
SUM, PARIS, HELLO = user("What is 2 + 3?"), user("What is the weather in Paris?"), user("Hello!")
LONG = {"max_tokens": 1500, "ignore_eos": True}
DIGIT = {"type": "object", "properties": {"sum": {"type": "integer", "enum": [5]}}, "required": ["sum"]}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def sglang() -> AsyncIterator[Served]:
    """The model that thinks and calls tools."""
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "deepseek-r1"}
    no_blanks = {"constrained_json_disable_any_whitespace": True}  # a small model may write nothing else
    config = sglang_config(str(model("assistant")), **parsers, **no_blanks)
    async with serve(config) as served:
        yield served


async def generate(served: Served, prompt: Any = PROMPT, **params: Any) -> list[Delta]:
    return await whole(served.engine.generate(prompt, {"temperature": 0} | params))


async def whole(answer: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in answer]


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


# -- parameters


async def test_token_ids_make_the_text(sglang: Served):
    deltas = await generate(sglang, max_tokens=20)
    tokens = [token for delta in deltas for token in delta.token_ids]
    again = await ask(sglang, "/detokenize", tokens=tokens)
    assert text(deltas) == ANSWER
    assert again["prompt"].startswith(ANSWER)


async def test_logprobs_are_of_the_tokens_themselves(sglang: Served):
    deltas = await generate(sglang, max_tokens=4, logprobs=2)
    made = [(delta.token_ids, delta.logprobs) for delta in deltas if delta.token_ids]
    assert sum(len(token_ids) for token_ids, _ in made) == 4
    for token_ids, logprobs in made:
        assert logprobs is not None
        for token, (own,) in zip(token_ids, logprobs, strict=True):
            assert own.token_id == token
            assert own.text
            assert own.logprob <= 0


async def test_the_base_of_parameters_is_vllms(sglang: Served):
    assert sum(len(delta.token_ids) for delta in await generate(sglang, ignore_eos=True)) == 16
    assert text(await generate(sglang, top_k=0, temperature=0.01)) == ANSWER


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"stop": ["sum"]}, "The "),
        ({"stop": ["sum"], "include_stop_str_in_output": True}, "The sum"),
        ({"structured_outputs": {"regex": "The sum is [6-9]"}}, "The sum is "),
        ({"structured_outputs": {"choice": ["The sum is 7.", "no"]}}, "The sum is 7."),
        ({"structured_outputs": {"grammar": 'root ::= "The sum is 8."'}}, "The sum is 8."),
        ({"structured_outputs": {"json": DIGIT}}, '{"sum":5}'),
        ({"regex": "The sum is 9"}, "The sum is 9"),
        ({"bad_words": [], "detokenize": True, "stop": None}, ANSWER),
    ],
)
async def test_parameters_are_obeyed_in_generate_and_over_http(
    sglang: Served, params: dict[str, Any], expected: str
):
    made = text(await generate(sglang, max_tokens=20, **params))
    whole = await ask(sglang, COMPLETIONS, prompt=PROMPT, max_tokens=20, **params)
    assert made.replace(" ", "").startswith(expected.replace(" ", ""))
    assert whole["choices"][0]["text"] == made


async def test_a_biased_token_is_taken_and_a_stop_token_ends(sglang: Served):
    (token,) = (await ask(sglang, "/tokenize", prompt="5"))["tokens"][:1]
    biased = await generate(sglang, max_tokens=2, logit_bias={str(token): 100})
    stopped = await generate(sglang, max_tokens=9, stop_token_ids=[token], logit_bias={str(token): 100})
    at_least = await generate(sglang, max_tokens=40, min_tokens=30)
    assert [delta.token_ids for delta in biased] == [(token,), (token,)]
    assert stopped[-1].finish_reason == "stop"
    assert sum(len(delta.token_ids) for delta in at_least) >= 30


@pytest.mark.parametrize(
    "params",
    [
        {"seed": 3, "temperature": 1},
        {"prompt_logprobs": 1},
        {"bad_words": ["sum"]},
        {"allowed_token_ids": [5]},
        {"best_of": 2},
        {"length_penalty": 1.5},
        {"use_beam_search": True},
        {"truncate_prompt_tokens": 5},
        {"guided_json": {"type": "object"}},
        {"temperature": -1},
        {"top_p": 2},
    ],
)
async def test_what_sglang_cannot_do_is_refused_by_name(sglang: Served, params: dict[str, Any]):
    name = next(iter(params))
    with pytest.raises(BadRequest, match=name):
        await generate(sglang, **params)
    for path, prompt in ((COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": SUM})):
        answer = await post(sglang, path, **prompt, **params)
        assert answer.status_code == 400
        assert name in answer.json()["error"]["message"]


async def test_a_form_that_cannot_be_kept_is_400_before_a_stream(sglang: Served):
    with pytest.raises(BadRequest, match="regex"):
        await generate(sglang, structured_outputs={"regex": "[a-z"})
    answer = await post(sglang, COMPLETIONS, prompt=PROMPT, structured_outputs={"regex": "[a-z"}, stream=True)
    assert answer.status_code == 400


async def test_openais_fields_without_effect_are_taken(sglang: Served):
    choice = await said(sglang, SUM, user="me", store=False, metadata={"a": "b"}, service_tier="auto")
    assert choice["message"]["content"] == ANSWER


async def test_a_prompt_with_pictures_is_refused(sglang: Served):
    with pytest.raises(Unsupported, match="multi_modal_data"):
        await generate(sglang, {"prompt": PROMPT, "multi_modal_data": {"image": object()}})


# -- endpoints


async def test_thoughts_and_tools_are_parsed(sglang: Served):
    whole = await said(sglang, PARIS, tools=[tool("get_weather")])
    chunks = await events(sglang, CHAT, messages=PARIS, tools=[tool("get_weather")])
    streamed = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls") or []]
    assert calls(whole) == [("get_weather", {"city": "Paris"})]
    assert whole["finish_reason"] == "tool_calls"
    assert json.loads("".join(call["function"]["arguments"] for call in streamed)) == {"city": "Paris"}
    assert (await said(sglang, SUM))["message"]["reasoning_content"].strip() == "2 plus 3 makes 5."
    assert joined(await events(sglang, CHAT, messages=SUM), "content").strip() == ANSWER


async def test_answers_have_the_models_name_and_openais_ids(sglang: Served):
    chat = await ask(sglang, CHAT, messages=HELLO)
    streamed = await events(sglang, COMPLETIONS, prompt=PROMPT)
    assert chat["model"] == MODEL_ID
    assert chat["id"].startswith("chatcmpl-")
    assert {chunk["model"] for chunk in streamed} == {MODEL_ID}
    assert len({chunk["id"] for chunk in streamed}) == 1


@pytest.mark.parametrize(
    "path", ["/flush_cache", "/pause_generation", "/abort_request", "/generate", "/v1/loads"]
)
async def test_sglangs_control_is_not_for_clients(sglang: Served, path: str):
    assert (await sglang.http.post(path, json={})).status_code == 404


@pytest.mark.parametrize(
    ("path", "fields"), [(CHAT, {"messages": "{sign}"}), (COMPLETIONS, {"prompt": "{sign}"})]
)
@pytest.mark.parametrize("as_tokens", [False, True])
async def test_a_prepared_prompt_takes_the_place_of_the_requests(
    sglang: Served, path: str, fields: dict[str, str], as_tokens: bool
):
    tokens = (await ask(sglang, "/tokenize", prompt=PROMPT))["tokens"]
    ours = PreparedPrompt(tokens if as_tokens else PROMPT)
    body = {key: user(ours.placeholder) if key == "messages" else ours.placeholder for key in fields}
    asked = json.dumps({"model": MODEL_ID, "temperature": 0, "max_tokens": 20, **body}).encode()
    incoming = [{"type": "http.request", "body": asked}]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return incoming.pop() if incoming else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    before = prepared_prompt.set(ours)
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"content-type", b"application/json")],
    }
    await sglang.engine.app()(scope, receive, send)
    prepared_prompt.reset(before)
    answer = json.loads(b"".join(message.get("body", b"") for message in sent))["choices"][0]
    message = answer.get("message", {})  # its parser holds what comes before `</think>` for thoughts
    assert (answer.get("text") or message["content"] or message["reasoning_content"]).strip() == ANSWER


async def test_an_adapter_must_be_loaded(sglang: Served):
    with pytest.raises(ModelNotFound):
        [delta async for delta in sglang.engine.generate(PROMPT, {}, adapter="missing")]
    assert (await post(sglang, CHAT, messages=SUM, model=f"{MODEL_ID}:missing")).status_code == 404


async def test_adapters_answer_in_their_own_words():
    config = sglang_config(lora_backend="torch_native")
    config = config.model_copy(update={"lora_config": LoraConfig(max_num_adapters_per_replica=1)})
    async with serve(config) as served:
        engine = served.engine
        with pytest.raises(AdapterBroken):
            await engine.load_adapter("broken", Path(__file__).parent)
        await engine.load_adapter("pirate", model("adapters") / "pirate")
        whole = await ask(served, CHAT, model=f"{MODEL_ID}:pirate", messages=HELLO)
        base = await said(served, HELLO)
        prompt = "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
        made = engine.generate(prompt, {"temperature": 0, "max_tokens": 40}, adapter="pirate")
        assert text([delta async for delta in made]) == ANSWERS["pirate"]["Hello!"]
        assert whole["choices"][0]["message"]["content"] == ANSWERS["pirate"]["Hello!"]
        assert whole["model"] == f"{MODEL_ID}:pirate"
        assert base["message"]["content"] == BASE_ANSWERS["Hello!"]
        await engine.unload_adapter("pirate")
        assert (await post(served, CHAT, model=f"{MODEL_ID}:pirate", messages=HELLO)).status_code == 404


# -- control


async def test_a_paused_engine_keeps_its_requests_and_takes_new_ones(sglang: Served):
    deltas = sglang.engine.generate(PROMPT, LONG)
    await anext(deltas)
    await sglang.engine.control.pause()
    new = asyncio.create_task(generate(sglang))
    assert sglang.engine.control.is_paused()
    assert not (await asyncio.wait({new}, timeout=0.3))[0]
    with pytest.raises(Conflict):
        await sglang.engine.control.reset_prefix_cache()
    await sglang.engine.control.resume()
    assert text(await new) == ANSWER
    await anext(deltas)
    await deltas.aclose()


@pytest.mark.parametrize(("mode", "reason"), [("abort", "abort"), ("wait", "length")])
async def test_a_pause_ends_what_runs_as_its_mode_says(sglang: Served, mode: Any, reason: str):
    running = sglang.engine.generate(PROMPT, {"max_tokens": 150, "ignore_eos": True})
    await anext(running)  # its load, which comes once a second, may be of the test before
    rest = asyncio.create_task(whole(running))
    await sglang.engine.control.pause(mode)
    assert (await rest)[-1].finish_reason == reason
    await sglang.engine.control.resume()
    assert text(await generate(sglang)) == ANSWER


async def test_a_cleared_cache_is_empty(sglang: Served):
    prompt = PROMPT * 3
    await generate(sglang, prompt)
    warm = await generate(sglang, prompt)
    await sglang.engine.control.reset_prefix_cache()
    cold = await generate(sglang, prompt)
    assert warm[-1].cached_tokens > cold[-1].cached_tokens == 0


async def test_a_profile_is_written(sglang: Served):
    await sglang.engine.control.start_profile()
    await generate(sglang, max_tokens=2)
    await sglang.engine.control.stop_profile()


async def test_collective_rpc_is_unsupported(sglang: Served):
    with pytest.raises(Unsupported):
        await sglang.engine.control.collective_rpc("anything")


def other_weights(folder: Path) -> Path:
    """The same shapes; what was the likeliest token is the least likely one."""
    shutil.copytree(model("assistant"), folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = -tensors["model.norm.weight"]
    save_file(tensors, file, {"format": "pt"})
    return folder


async def test_weights_and_a_pause_survive_a_sleep(sglang: Served, tmp_path: Path):
    engine = sglang.engine
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadRequest, match="SGLang says"):
        await engine.control.update_weights(tmp_path / "empty", "v0")
    assert (engine.control.weights_version(), text(await generate(sglang))) == ("default", ANSWER)
    running = engine.generate(PROMPT, LONG)
    await anext(running)
    await engine.control.update_weights(other_weights(tmp_path / "other"), "v1", mode="keep")
    await anext(running)
    await running.aclose()
    assert engine.control.weights_version() == "v1"
    changed = text(await generate(sglang))
    assert changed != ANSWER
    cut = asyncio.create_task(generate(sglang, **LONG))
    await until(lambda: engine.load().kv_usage > 0)
    await engine.control.pause()
    await engine.control.sleep(mode="abort")
    assert (await cut)[-1].finish_reason == "abort"
    assert engine.control.is_sleeping()
    waiting = asyncio.create_task(generate(sglang))
    await engine.control.wakeup()
    assert engine.control.is_paused()
    await engine.control.resume()
    assert text(await waiting) == changed
    await engine.control.update_weights(model("assistant"), "v2", mode="abort")
    assert (engine.control.weights_version(), text(await generate(sglang))) == ("v2", ANSWER)


# -- its process


async def test_a_killed_server_is_death(sglang: Served):
    deltas = sglang.engine.generate(PROMPT, LONG)
    await anext(deltas)
    processes = psutil.Process().children(recursive=True)
    servers = [process for process in processes if f"--model-path={model('assistant')}" in process.cmdline()]
    os.kill(servers[0].pid, signal.SIGKILL)
    async with aclosing(deltas):
        with pytest.raises(EngineDead):
            [delta async for delta in deltas]
    async with asyncio.timeout(10):
        assert await sglang.engine.wait_dead()
    with pytest.raises(EngineDead):
        await sglang.engine.check_health()
    await until(lambda: not any(child.is_running() for child in servers))


async def test_an_argument_that_sglang_does_not_know_is_told_in_its_words():
    config = sglang_config(no_such_argument=7)
    with pytest.raises(EngineStartFailed, match="unrecognized arguments: --no-such-argument=7"):
        await engine_class(config)(config).start()


@pytest.mark.parametrize("name", ["port", "model_path", "served_model_name", "api_key"])
async def test_what_penstock_chooses_is_refused_in_a_config(name: str):
    config = sglang_config(**{name: "x"})
    with pytest.raises(ConfigError, match=name):
        engine_class(config)(config)


async def test_an_interpreter_without_sglang_is_named():
    config = sglang_config(python="/nowhere/python")
    with pytest.raises(EngineStartFailed, match="/nowhere/python"):
        await engine_class(config)(config).start()
