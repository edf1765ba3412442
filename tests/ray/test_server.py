"""The replica: in plain Python, and by handle and HTTP under Serve."""

import pytest
from openai import OpenAI
from ray import serve

from penstock.errors import EngineStartFailed
from penstock.serve import LLMConfig, LLMServer, VLLMService
from penstock.serve.openai_api_models import ChatCompletionRequest, ErrorResponse

HELLO = [{"role": "user", "content": "Hello there"}]


def sim(model_id: str = "sim", **options) -> LLMConfig:
    return LLMConfig(model_loading_config={"model_id": model_id}, llm_engine="sim", **options)


async def test_awaited_constructor_gives_a_started_server():
    server = await LLMServer(sim())
    (answer,) = [item async for item in await server.chat({"messages": HELLO})]
    assert answer.choices[0].message.content
    await server.stop()


async def test_sync_init_gives_a_server_to_start():
    server = LLMServer.sync_init(sim())
    await server.start()
    await server.check_health()
    assert (await server.llm_config()).model_id == "sim"
    await server.stop()


async def test_a_stream_is_lists_of_ready_events():
    server = await LLMServer(sim())
    request = ChatCompletionRequest(messages=HELLO, stream=True, max_tokens=5)
    batches = [batch async for batch in await server.chat(request)]
    events = [event for batch in batches for event in batch]
    assert all(event.startswith("data: ") and event.endswith("\n\n") for event in events)
    assert events[-1] == "data: [DONE]\n\n"
    await server.stop()


async def test_an_interval_joins_events_into_fewer_batches():
    slow = sim(experimental_configs={"stream_batching_interval_ms": 60_000})
    server = await LLMServer(slow)
    request = {"messages": HELLO, "stream": True, "max_tokens": 20, "ignore_eos": True}
    batches = [batch async for batch in await server.chat(request)]
    assert len(batches) == 2
    await server.stop()


async def test_an_error_is_yielded():
    server = await LLMServer(sim())
    (answer,) = [item async for item in await server.chat({"messages": "not a list"})]
    assert isinstance(answer, ErrorResponse)
    assert answer.error.type == "invalid_request_error"
    await server.stop()


async def test_every_handle_method_answers():
    server = await LLMServer(sim())
    (tokens,) = [item async for item in await server.tokenize({"prompt": "one two three"})]
    (text,) = [item async for item in await server.detokenize({"tokens": tokens.tokens})]
    assert text.prompt == "one two three"
    (completion,) = [item async for item in await server.completions({"prompt": "one two", "max_tokens": 4})]
    assert completion.choices[0].text
    (embedding,) = [item async for item in await server.embeddings({"input": "one"})]
    assert len(embedding.data[0].embedding) > 0
    deltas = [delta async for delta in await server.generate("one two", {"max_tokens": 4})]
    assert deltas[-1].finish_reason is not None
    await server.stop()


async def test_a_time_limit_on_the_start_is_kept():
    late = sim(engine_kwargs={"start_delay_s": 60}, engine_start_timeout_s=0.05)
    with pytest.raises(EngineStartFailed, match=r"not ready after 0.05 s"):
        await LLMServer(late)


def test_a_service_alone_answers_by_handle_and_over_http(serve_url):
    handle = serve.run(VLLMService.as_deployment().bind(sim()), name="alone", route_prefix="/alone")
    try:
        answers = list(handle.options(stream=True).chat.remote({"messages": HELLO}))
        assert answers[0].choices[0].message.content
        client = OpenAI(base_url=f"{serve_url}/alone/v1", api_key="fake-key")
        answer = client.chat.completions.create(model="sim", messages=HELLO)
        assert answer.choices[0].message.content == answers[0].choices[0].message.content
        parts = client.chat.completions.create(model="sim", messages=HELLO, stream=True)
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert text == answer.choices[0].message.content
    finally:
        serve.delete("alone")
