"""Classes of work, from a client's request to the engine and back to the client."""

import anthropic
import msgspec
import openai
import pytest
from served import NODE, Served, chat, until

from penstock import asgi
from penstock.data.backends.openai_service import OpenAIService
from penstock.data.backends.replica import ReplicaClient
from penstock.data.rows.request import RowRequest
from penstock.request_context import tier
from penstock.serve.gateway.catalogue import ServedModel

pytestmark = pytest.mark.parity("X1")


class Echo:
    """Answers with what it got: body, headers, class."""

    async def __call__(self, scope, receive, send) -> None:
        body = await asgi.read_body(receive)
        names = sorted(name.decode() for name, _ in scope["headers"])
        seen = {"body": body.decode(), "headers": names, "tier": tier.get()}
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"application/json")],
            }
        )
        await send({"type": "http.response.body", "body": msgspec.json.encode(seen)})


async def test_every_answer_says_what_was_given(served: Served):
    await served.replica("m")
    await served.gateway("m")
    ask = served.openai().chat.completions.create
    assert (await ask(**chat(), service_tier="flex")).service_tier == "flex"
    assert (await ask(**chat(), service_tier="auto")).service_tier == "default"
    assert (await ask(**chat())).service_tier == "default"
    chunks = [chunk async for chunk in await ask(**chat(stream=True), service_tier="flex")]
    assert chunks[0].service_tier == "flex"


async def test_priority_is_default_unless_the_config_turns_it_on(served: Served):
    await served.replica("m")
    gateway = await served.gateway("m")
    ask = served.openai().chat.completions.create
    assert (await ask(**chat(), service_tier="priority")).service_tier == "default"
    gateway._config = gateway._config.model_copy(update={"priority_tier": True})
    assert (await ask(**chat(), service_tier="priority")).service_tier == "priority"


async def test_a_word_that_is_none_is_refused_in_the_form_of_the_endpoint(served: Served):
    await served.replica("m")
    await served.gateway("m")
    with pytest.raises(openai.BadRequestError, match="'flex'") as refused:
        await served.openai().chat.completions.create(**chat(), extra_body={"service_tier": "batch"})
    assert refused.value.param == "service_tier"
    client = anthropic.AsyncAnthropic(base_url=served.url, api_key="key", max_retries=0)
    with pytest.raises(anthropic.BadRequestError, match="standard_only") as refused:
        await client.messages.create(
            model="m", max_tokens=4, messages=chat()["messages"], extra_body={"service_tier": "x"}
        )
    assert refused.value.body["type"] == "error"
    async with served.http() as http:
        answer = await http.post("/v1/completions", json=chat(), headers={"x-penstock-tier": "urgent"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "service_tier")


async def test_clients_choose_a_class_and_nothing_else(served: Served):
    await served.gateway(ServedModel("m", 1))
    await served.app(Echo())
    headers = {"x-vllm-priority": "-9", "x-penstock-tier": "flex", "x-penstock-secret": "x"}
    async with served.http() as http:
        answer = await http.post(
            "/pooling", json={"model": "m", "priority": -7, "input": "a"}, headers=headers
        )
    seen = answer.json()
    assert seen["tier"] == "flex"
    assert msgspec.json.decode(seen["body"]) == {"model": "m", "input": "a"}
    assert not [name for name in seen["headers"] if "priority" in name or name.startswith("x-penstock")]


async def test_responses_name_the_class_that_the_engine_repeats(served: Served):
    await served.gateway(ServedModel("m", 1))
    await served.app(Echo())
    async with served.http() as http:
        for asked, given in (("flex", "flex"), ("auto", "default"), ("priority", "default")):
            answer = await http.post(
                "/v1/responses", json={"model": "m", "input": "a", "service_tier": asked}
            )
            assert msgspec.json.decode(answer.json()["body"])["service_tier"] == given
        answer = await http.post("/v1/responses", json={"model": "m", "input": "a"})
        assert msgspec.json.decode(answer.json()["body"])["service_tier"] == "default"


async def test_rows_of_batch_are_flex_by_themselves(served: Served):
    await served.replica("m")
    await served.gateway("m")
    service = OpenAIService(f"{served.url}/v1")
    await service.start()
    try:
        body = msgspec.json.encode(chat())
        answer = await service.send(RowRequest(path="/v1/chat/completions", body=body))
    finally:
        await service.stop()
    assert msgspec.json.decode(answer.body)["service_tier"] == "flex"


async def test_rows_of_responses_name_their_class_to_the_engine(served: Served):
    listener = await served.app(Echo())
    client = ReplicaClient(listener.address, NODE, "batch", lambda: None)
    try:
        await until(lambda: client.ready)
        answer = await client.send("/v1/responses", b'{"model": "m", "input": "a"}', None)
    finally:
        await client.close()
    assert msgspec.json.decode(msgspec.json.decode(answer.body)["body"])["service_tier"] == "flex"
