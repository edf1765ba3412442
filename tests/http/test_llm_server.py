"""The replica in plain Python: constructors, streams, every method of a handle, adapters."""

from pathlib import Path
from typing import Any

import pytest

from penstock.asgi_client import post_scope
from penstock.errors import BadRequest, ConfigError, EngineDead, EngineStartFailed
from penstock.serve import LLMConfig, LLMServer
from penstock.serve.openai_api_models import ChatCompletionRequest, ErrorResponse
from penstock.serve.replica import server as replica_server
from penstock.serve.replica.inbound.listener import Listener
from penstock.serve.replica.inbound.status_link import StatusSource
from penstock.transport import link

pytestmark = pytest.mark.parity("S33")

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


async def test_a_server_ends_although_its_gateway_could_not_open(patched):
    server = await LLMServer(sim())
    source = StatusSource(load=server.engine.load, hello=lambda: link.Hello("sim"))
    server._listener = await Listener.open(server._serve, source, node_id="n", node_host=None)

    async def failing(*_: object) -> None:
        raise ConfigError("The file of keys cannot be read.")

    patched(replica_server, "open_gateway", failing)
    with pytest.raises(ConfigError, match="file of keys"):
        await server(object())
    await server.stop()
    with pytest.raises(EngineDead):
        await server.check_health()


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


@pytest.mark.parametrize(
    ("said", "message", "code"),
    [
        (b'{"error": {"message": "no sound", "type": "x", "code": "mute"}}', "no sound", "mute"),
        (b'{"detail": "no sound"}', '{"detail": "no sound"}', "status_400"),
        (b"no \xff sound", "no \ufffd sound", "status_400"),
        (b"", "The engine answered 400.", "status_400"),
    ],
)
async def test_an_error_is_one_whatever_its_content_type_and_format(
    patched, said: bytes, message: str, code: str
):
    server = await LLMServer(sim())

    async def app(scope, receive, send):
        fields = [(b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 400, "headers": fields})
        await send({"type": "http.response.body", "body": said})

    patched(server, "_app", lambda: app)
    (answer,) = [item async for item in await server.chat({"messages": HELLO})]
    assert isinstance(answer, ErrorResponse)
    assert (answer.error.message, answer.error.code) == (message, code)
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


async def test_a_scrape_of_metrics_is_no_use_of_the_model(patched):
    server, asked = await LLMServer(sim()), []
    patched(server.reconciler, "request_arrived", lambda: asked.append(method))
    for method, path in [("GET", "/metrics"), ("POST", "/tokenize")]:
        scope = {**post_scope(path, 2, {}), "method": method}
        messages = iter([{"type": "http.request", "body": b"{}"}])
        sent = []

        async def receive(messages=messages):
            return next(messages, {"type": "http.disconnect"})

        async def send(message, sent=sent):
            sent.append(message)

        await server._serve(scope, receive, send)
        assert sent
    assert asked == ["POST"]
    await server.stop()


async def test_a_time_limit_on_the_start_is_kept():
    late = sim(engine_kwargs={"start_delay_s": 60}, engine_start_timeout_s=0.05)
    with pytest.raises(EngineStartFailed, match=r"not ready after 0.05 s"):
        await LLMServer(late)


# -- adapters


def with_adapters(folder: Path, names: str, **lora: object) -> LLMConfig:
    for name in names:
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").write_text("{}")
    return sim(lora_config={"dynamic_lora_loading_path": str(folder)} | lora)


async def said(server: LLMServer, **request: object) -> Any:
    (answer,) = [item async for item in await server.chat({"messages": HELLO} | request)]
    return answer


@pytest.mark.parity("S21")
async def test_a_replica_answers_by_the_adapter_that_the_model_names(tmp_path: Path):
    server = await LLMServer(with_adapters(tmp_path, "ab", pinned=["b"]))
    assert await server.adapters() == ["b"]
    answer = await said(server, model="sim:a")
    assert answer.model == "sim:a"
    assert answer.choices[0].message.content == "[a@2] Hello there"
    assert (await said(server, model="sim")).choices[0].message.content == "Hello there"
    await server.unload_adapter("a")
    await server.load_adapter("b", pin=True)
    assert await server.adapters() == ["b"]
    unknown = await said(server, model="sim:nobody")
    assert (unknown.error.code, unknown.error.param) == ("model_not_found", "model")
    assert "There are: 'a', 'b'" in unknown.error.message
    await server.stop()


@pytest.mark.parity("X22")
async def test_a_call_may_use_an_alias_with_an_adapter_or_without(tmp_path: Path):
    config = with_adapters(tmp_path, "a").model_copy(update={"aliases": ["gpt-4o-mini"]})
    server = await LLMServer(config)
    plain = await said(server, model="gpt-4o-mini")
    assert (plain.model, plain.choices[0].message.content) == ("gpt-4o-mini", "Hello there")
    assert (await said(server, model="gpt-4o-mini:a")).choices[0].message.content == "[a@1] Hello there"
    assert (await said(server, model="gpt-4o")).error.code == "model_not_found"
    await server.stop()


@pytest.mark.parity("S21")
async def test_a_replica_without_lora_config_says_so():
    server = await LLMServer(sim())
    assert "its config has no lora_config" in (await said(server, model="sim:a")).error.message
    with pytest.raises(BadRequest, match="no lora_config"):
        await server.load_adapter("a")
    await server.stop()


async def test_a_pinned_adapter_that_is_missing_stops_the_start(tmp_path: Path):
    with pytest.raises(EngineStartFailed, match=r"with its pinned adapters: .*no adapter 'nobody'"):
        await LLMServer(with_adapters(tmp_path, "a", pinned=["nobody"]))
