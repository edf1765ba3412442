"""A user's preprocessor: what it returns is what the engine's `generate` gets, object for object."""

import asyncio
import json

import numpy as np
import pytest
from recording import hooked, server
from served import chat

from penstock import asgi
from penstock.config import LLMConfig
from penstock.engines.sim import tokenizer
from penstock.errors import BadRequest
from penstock.hooks.hook import PREPROCESSOR, Hook
from penstock.layers.generation import Generation
from penstock.layers.preprocessing import GENERATING, Preprocessing
from penstock.openai.asgi_response import send_json
from penstock.openai.paths import ENGINE_PATHS
from penstock.serve.gateway.catalogue import ServedModel

pytestmark = pytest.mark.parity("X13")

PICTURE, FRAMES = object(), object()
HI = tokenizer.encode("hi")
NOT_MET = {
    "/tokenize",
    "/detokenize",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    *(path for path in ENGINE_PATHS if path.endswith("render")),
}
"""Uploads, and what shows how requests are read; no model answers there."""


async def received(receive):
    return asgi.parsed(await asgi.read_body(receive))


class Vision:
    """As the person of mission/0 wants it: everything that reaches `generate` is made here."""

    def __call__(self, request, context):
        text = request["messages"][-1]["content"] if "messages" in request else str(request)
        prompt = {
            "prompt": f"<picture>{text}",
            "multi_modal_data": {"image": [PICTURE], "video": FRAMES},
            "mm_processor_kwargs": {"fps": 2.0, "max_pixels": 784},
        }
        return prompt, {"max_tokens": 77}


async def test_the_engine_gets_the_very_objects(served):
    async with hooked(served, preprocessor=Vision) as made:
        answer = await served.openai().chat.completions.create(**chat("What is this?"))
        ((prompt, params),) = made.engine.got
        assert prompt["prompt"] == "<picture>What is this?"
        assert prompt["multi_modal_data"]["image"][0] is PICTURE
        assert prompt["multi_modal_data"]["video"] is FRAMES
        assert prompt["mm_processor_kwargs"] == {"fps": 2.0, "max_pixels": 784}
        assert params["max_tokens"] == 77
        assert answer.choices[0].message.content == "<picture>What is this?"


async def test_streams_and_completions_and_usage_are_as_ever(served):
    async with hooked(served, preprocessor=Vision):
        events = await served.openai().chat.completions.create(
            **chat("one two"), stream=True, stream_options={"include_usage": True}
        )
        parts = [event async for event in events]
        said = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert said == "<picture>one two"
        assert parts[-1].usage.prompt_tokens > 0
        text = await served.openai().completions.create(model="m", prompt="three", max_tokens=50)
        assert "'prompt': 'three'" in text.choices[0].text


async def test_generate_over_http_takes_the_prompt_and_the_sampling_parameters(served):
    async with hooked(served, preprocessor=Vision) as made:
        answer = await served.http().post("/v1/generate", json={"model": "m", "prompt": "four"})
        ((prompt, params),) = made.engine.got
        assert prompt["multi_modal_data"]["video"] is FRAMES
        assert params["max_tokens"] == 77
        assert "'prompt': 'four'" in answer.json()["outputs"][0]["text"]


async def test_an_edited_request_goes_on_as_usual(served):
    def shout(request):
        request["messages"][-1]["content"] = request["messages"][-1]["content"].upper()
        return request

    async with hooked(served, preprocessor=shout):
        answer = await served.openai().chat.completions.create(**chat("quietly"))
        assert answer.choices[0].message.content == "QUIETLY"


async def test_the_hook_knows_path_headers_and_request_id(served):
    def tell(request, context):
        said = f"{context.path} {context.request_id} {context.headers['x-team']} {context.config.model_id}"
        assert "authorization" not in context.headers
        return {"prompt": said}

    async with hooked(served, preprocessor=tell):
        answer = await served.http().post(
            "/v1/chat/completions",
            json=chat(),
            headers={"x-request-id": "r-1", "x-team": "blue", "authorization": "Bearer secret"},
        )
        said = answer.json()["choices"][0]["message"]["content"]
        assert said == "/v1/chat/completions r-1 blue m"


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (ValueError("At most two pictures."), 400, "At most two pictures."),
        (BadRequest("No pictures.", param="messages"), 400, "No pictures."),
        (RuntimeError("the password is x"), 500, "The preprocessor of this model failed"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_its_errors_are_answers(served, error, status, says, stream):
    async def fail(request):
        raise error

    async with hooked(served, preprocessor=fail) as made:
        answer = await served.http().post("/v1/chat/completions", json=chat(stream=stream))
        assert answer.status_code == status
        assert says in answer.json()["error"]["message"]
        assert "password" not in answer.text
        assert made.engine.got == []


async def test_what_cannot_be_used_is_500_and_the_log_says_why(served, caplog):
    async with hooked(served, preprocessor=lambda request: None):
        answer = await served.http().post("/v1/chat/completions", json=chat())
        assert answer.status_code == 500
        assert "returned nothing" in caplog.text
        embedding = await served.http().post("/v1/embeddings", json={"model": "m", "input": "a"})
        assert embedding.status_code == 500


async def test_an_engine_prompt_for_embeddings_is_refused(served, caplog):
    async with hooked(served, preprocessor=lambda request: {"prompt": "x"}):
        answer = await served.http().post("/v1/embeddings", json={"model": "m", "input": "a"})
        assert answer.status_code == 500
        assert "/v1/embeddings, which takes none" in caplog.text


async def test_a_body_that_is_no_object_is_the_engines_to_refuse(served):
    async with hooked(served, preprocessor=Vision):
        answer = await served.http().post("/v1/chat/completions", content=b"{", headers={"x": "y"})
        assert answer.status_code == 400


async def test_a_refusal_on_messages_has_anthropics_form(served):
    def refuse(request):
        raise ValueError("No pictures.")

    async with hooked(served, preprocessor=refuse):
        answer = await served.http().post("/v1/messages", json=chat(max_tokens=5))
        assert answer.status_code == 400
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert answer.json()["error"]["message"] == "No pictures."


async def test_no_path_leads_past_it_to_an_answer(served):
    def refuse(request, context):
        raise ValueError(f"Refused on {context.path}.")

    async with hooked(served, preprocessor=refuse), served.http() as http:
        for path in set(ENGINE_PATHS) - NOT_MET:
            answer = await http.post(path, json={"model": "m"})
            assert answer.json()["error"]["message"] == f"Refused on {path}."


@pytest.mark.parametrize("path", GENERATING)
async def test_an_unknown_sampling_parameter_is_refused_on_every_endpoint(served, caplog, path):
    pair = {"prompt": "x"}, {"no_such": 1}
    async with hooked(served, preprocessor=lambda request: pair) as made:
        body = {"model": "m", "max_tokens": 5, GENERATING[path]: "a"}
        answer = await served.http().post(path, json=body)
        assert answer.status_code == 500
        assert "'no_such', which is not known" in caplog.text
        assert made.engine.got == []


async def test_what_is_no_json_is_an_error_of_the_operators(served, caplog):
    def strange(request):
        return {**request, "when": object()}

    async with hooked(served, preprocessor=strange):
        answer = await served.http().post("/v1/chat/completions", json=chat())
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "own_code_failed")
        assert "cannot be used" in caplog.text


async def test_a_hook_that_runs_out_of_an_iterator_is_a_failure_and_no_hang(served):
    def first_picture(request):
        return next(part for part in request["messages"] if part.get("type") == "image")

    async with hooked(served, preprocessor=first_picture):
        answer = await served.http().post("/v1/chat/completions", json=chat())
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "own_code_failed")


async def test_token_ids_of_any_tokenizer_reach_the_engine_as_a_list(served):
    async with hooked(served, preprocessor=lambda request: {"prompt_token_ids": np.array(HI)}) as made:
        answer = await served.openai().chat.completions.create(**chat())
        ((prompt, _),) = made.engine.got
        assert prompt["prompt_token_ids"] == HI
        assert answer.choices[0].message.content == "hi"


async def test_sampling_parameters_go_by_each_endpoints_own_names(served):
    got = []

    async def app(scope, receive, send):
        got.append(await received(receive))
        await send_json(send, {})

    pair = {"prompt": "x"}, {"max_tokens": 7, "stop": ["."]}
    config = LLMConfig(model_loading_config={"model_id": "m"}, preprocessor=lambda request: pair)
    await served.gateway("m")
    await served.app(Preprocessing(app, Hook(config, PREPROCESSOR), config))
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/generate"):
        await served.http().post(path, json={"model": "m", "sampling_params": None})
    chats, responses, messages, generate = got
    assert (chats["max_tokens"], chats["stop"]) == (7, ["."])
    assert responses["max_output_tokens"] == 7
    assert (messages["max_tokens"], messages["stop_sequences"]) == (7, ["."])
    assert generate["sampling_params"] == pair[1]


async def test_it_reads_adapter_and_tools_and_its_prompt_runs_under_that_adapter(served, tmp_path):
    (tmp_path / "red").mkdir()
    (tmp_path / "red" / "adapter_config.json").write_text("{}")

    def tell(request):
        (tool,) = request["tools"]
        return {"prompt": f"{request['model']} may {tool['function']['name']}"}

    lora = {"dynamic_lora_loading_path": str(tmp_path)}
    async with server(preprocessor=tell, lora_config=lora) as made:
        await served.gateway(ServedModel.of(await made.llm_config()))
        await served.app(made._app(), adapters=made._adapters)
        tools = [{"type": "function", "function": {"name": "paint"}}]
        answer = await served.http().post(
            "/v1/chat/completions", json={**chat(tools=tools), "model": "m:red"}
        )
        assert answer.json()["choices"][0]["message"]["content"] == "[red@1] m:red may paint"


async def test_a_whole_prompt_and_a_previous_response_do_not_go_together(served):
    async with hooked(served, preprocessor=lambda request: {"prompt": "x"}):
        body = {"model": "m", "input": "and then?", "previous_response_id": "resp_1"}
        answer = await served.http().post("/v1/responses", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "previous_response_id"


async def test_other_paths_do_not_meet_it(served):
    async def fail(request):
        raise ValueError("never asked")

    async with hooked(served, preprocessor=fail):
        answer = await served.http().post("/tokenize", json={"model": "m", "prompt": "a b"})
        assert answer.status_code == 200


async def test_a_client_that_leaves_ends_a_waiting_preprocessor(served):
    began, ended = asyncio.Event(), asyncio.Event()

    async def wait(request):
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with hooked(served, preprocessor=wait):
        asking = asyncio.create_task(served.http().post("/v1/chat/completions", json=chat()))
        await began.wait()
        asking.cancel()
        await asyncio.wait_for(ended.wait(), 20)


async def test_a_blocking_preprocessor_does_not_hold_up_other_requests(served):
    loop = asyncio.get_running_loop()
    other_answered = asyncio.Event()

    def block(request):
        if request["messages"][-1]["content"] == "slow":
            asyncio.run_coroutine_threadsafe(other_answered.wait(), loop).result(20)
        return request

    async with hooked(served, preprocessor=block):
        slow = asyncio.create_task(served.openai().chat.completions.create(**chat("slow")))
        await served.openai().chat.completions.create(**chat("quick"))
        other_answered.set()
        assert (await slow).choices[0].message.content == "slow"


async def test_handle_methods_go_through_it_and_generate_does_not():
    async with server(preprocessor=Vision) as made:
        (answer,) = [item async for item in await made.chat(chat("hi"))]
        assert answer.choices[0].message.content == "<picture>hi"
        events = [event async for batch in await made.chat(chat("a b", stream=True)) for event in batch]
        assert events[-1] == "data: [DONE]\n\n"
        deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events[:-1]]
        assert "".join(delta.get("content") or "" for delta in deltas) == "<picture>a b"
        deltas = [delta async for delta in await made.generate({"prompt": "as it is"}, {"max_tokens": 9})]
        assert "".join(delta.text for delta in deltas) == "as it is"


async def test_a_model_without_one_has_no_layer():
    async with server() as made:
        assert type(made._app()._app) is Generation
