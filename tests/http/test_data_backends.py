"""The backends of batch that need no Ray: an engine in this process, and a service by its URL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from email.utils import formatdate
from time import monotonic, time
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from backend_contract import (
    CHAT,
    COMPLETIONS,
    FACTS,
    OPTIONS,
    REQUESTS,
    Running,
    config,
    expected,
    meaning,
    row,
)
from served import Served

from penstock.data.backends.in_process import InProcessEngine
from penstock.data.backends.openai_service import OpenAIService
from penstock.data.backends.protocol import Backend
from penstock.data.execution.retry import RetryPolicy
from penstock.data.execution.window import Window
from penstock.data.pipeline.configs import HttpRequestProcessorConfig
from penstock.data.pipeline.stage_spec import http_service, stage_spec
from penstock.data.rows.request import RowRequest
from penstock.engines.sim.engine import SimEngine
from penstock.errors import ConfigError, EngineDead, Unavailable
from penstock.layers.stack import stacked
from penstock.openai.errors import envelope, headers

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def service(handler: Handler, path: str = "/{any:.*}") -> AsyncIterator[str]:
    """A service of the test's own; gives its URL."""
    app = web.Application()
    app.router.add_route("*", path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@asynccontextmanager
async def started(backend: Any) -> AsyncIterator[Any]:
    await backend.start()
    try:
        yield backend
    finally:
        await backend.stop()


@pytest.fixture(params=["own", "url"])
async def backend(request: pytest.FixtureRequest, served: Served) -> AsyncIterator[tuple[Backend, Running]]:
    """One of them, and how many requests its engine has."""
    if request.param == "own":
        async with started(InProcessEngine(config())) as own:
            yield own, lambda: own.load().running
        return
    engine = SimEngine(config())
    await engine.start()
    await served.gateway("m")
    app = stacked(engine, config(), adapters=None, preprocessor=None, postprocessor=None)
    await served.app(app, load=engine.load)
    async with started(OpenAIService(served.url)) as url:
        yield url, lambda: engine.load().running
    await engine.stop()


@pytest.mark.parity("D3")
@pytest.mark.parametrize("fact", FACTS)
async def test_of_every_backend(backend: tuple[Backend, Running], fact: str):
    await FACTS[fact](*backend)


@pytest.mark.parity("D3", "D11")
@pytest.mark.parametrize("name", REQUESTS)
async def test_every_backend_answers_as_an_own_engine(backend: tuple[Backend, Running], name: str):
    request = REQUESTS[name]
    assert meaning(await backend[0].send(request)) == await expected(request, config())


# -- a service by its URL


@pytest.fixture
async def url(served: Served) -> str:
    await served.gateway("m")
    await served.replica("m", **OPTIONS)
    return served.url


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/", CHAT])
async def test_a_url_may_be_written_in_any_usual_way(url: str, suffix: str):
    async with started(OpenAIService(url + suffix)) as service:
        assert (await service.send(REQUESTS["a chat"])).status == 200


async def test_a_raw_url_gets_the_body_as_it_is():
    async def echo(request: web.Request) -> web.Response:
        assert request.method == "POST"
        return web.Response(body=request.path_qs.encode() + b" " + await request.read())

    async with (
        service(echo) as base,
        started(OpenAIService(f"{base}/any/where?x=1", finds_model=False)) as raw,
    ):
        answer = await raw.send(RowRequest(path="", body=b'{"a":   1.50}', model="not sent"))
        assert answer.body == b'/any/where?x=1 {"a":   1.50}'


async def test_a_payload_with_a_file_is_sent_as_a_form_each_time():
    found: list[Any] = []

    async def transcribe(request: web.Request) -> web.Response:
        fields = await request.post()
        sound = fields["file"]
        assert isinstance(sound, web.FileField)
        found.append((sound.filename, sound.content_type, sound.file.read()))
        return web.json_response(
            {"model": fields["model"], "n": fields["n"]}, status=500 if len(found) == 1 else 200
        )

    payload = {
        "model": "whisper",
        "n": [1, 2],
        "file": {"content": b"sound", "filename": "a.wav", "content_type": "audio/wav"},
    }
    async with service(transcribe) as base:
        config = HttpRequestProcessorConfig(url=base, headers={"Content-Type": "application/json"})
        request = stage_spec(config).build_request({"payload": payload}, {})
        async with started(http_service(config)) as raw:
            outcome = await Window(raw, RetryPolicy(initial_backoff_s=0.01)).run(request)
    assert bytes(outcome.body) == b'{"model": "whisper", "n": "[1,2]"}'
    assert found == [("a.wav", "audio/wav", b"sound")] * 2


async def test_a_session_of_ones_own_has_its_own_limits_and_is_closed():
    async def late(request: web.Request) -> web.Response:
        await asyncio.sleep(1 if request.headers["x-team"] == "blue" else 0)
        return web.Response()

    made: list[aiohttp.ClientSession] = []

    def session() -> aiohttp.ClientSession:
        made.append(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.1), headers={"x-team": "blue"})
        )
        return made[-1]

    async with service(late) as base:
        config = HttpRequestProcessorConfig(url=base, session_factory=session)
        async with started(http_service(config)) as raw:
            assert (await raw.send(RowRequest(path="", body=b"{}"))).status == 504
    assert made[0].closed


async def test_what_is_no_session_is_refused():
    config = HttpRequestProcessorConfig(url="http://host", session_factory=dict)
    with pytest.raises(ConfigError, match="returned a dict; it must return an aiohttp"):
        await http_service(config).start()


async def test_headers_and_key_are_sent():
    async def echo(request: web.Request) -> web.Response:
        return web.json_response([request.headers["authorization"], request.headers["x-team"]])

    async with (
        service(echo) as base,
        started(OpenAIService(base, api_key="k", headers={"X-Team": "blue"}, model="m")) as asked,
    ):
        assert json.loads((await asked.send(row())).body) == ["Bearer k", "blue"]


@pytest.mark.parametrize("model", [None, "m"])
async def test_a_refused_key_is_told_at_the_start(model: str | None):
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=401)

    async with service(refuse) as base:
        with pytest.raises(ConfigError, match="refuses the API key"):
            await OpenAIService(base, api_key="wrong", model=model).start()


async def test_a_model_that_the_service_does_not_have_is_told_at_the_start(served: Served):
    await served.replica("qwen")
    await served.replica("llama")
    await served.gateway("qwen", "llama")
    with pytest.raises(ConfigError, match=r"unknown model 'quen'; did you mean 'qwen'\? Known: llama, qwen"):
        await OpenAIService(served.url, model="quen").start()


@pytest.mark.parametrize("one", [web.Response(status=404), web.json_response({"id": "n"})])
async def test_a_model_that_is_not_listed_may_be_there_all_the_same(one: web.Response):
    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]}) if request.path == "/v1/models" else one

    async with service(models) as base, started(OpenAIService(base, model="n")):
        pass


async def test_of_several_models_none_is_chosen():
    async def models(request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "a"}, {"id": "b"}]})
        return web.Response(body=await request.read())

    async with service(models) as base, started(OpenAIService(base)) as asked:
        assert (await asked.send(RowRequest(path=COMPLETIONS, body=b"{}"))).body == b"{}"
        assert json.loads((await asked.send(RowRequest(path=COMPLETIONS, body=b"{}", model="b"))).body) == {
            "model": "b"
        }


async def test_a_service_that_wants_one_of_several_models_named_ends_the_job_with_their_names():
    async def models(request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "a"}, {"id": "b"}]})
        return web.Response(status=200 if b"model" in await request.read() else 404)

    async with service(models) as base, started(OpenAIService(base)) as asked:
        with pytest.raises(ConfigError, match=r"serves 'a', 'b'.*--model"):
            await asked.send(RowRequest(path=COMPLETIONS, body=b"{}"))
        await asked.send(RowRequest(path=COMPLETIONS, body=b"{}", model="b"))
        alone = await asked.send(RowRequest(path=COMPLETIONS, body=b"{}"))  # other rows name theirs
        assert alone.status == 404


@pytest.mark.parametrize("kinds", [("",), ("", COMPLETIONS)])
async def test_the_actors_of_a_pipeline_share_its_requests_per_second(kinds: tuple[str, ...]):
    async def ok(request: web.Request) -> web.Response:
        return web.Response(body=b"{}")

    async with service(ok) as base:
        config = HttpRequestProcessorConfig(url=base, model="m", qps=40, concurrency=(1, 2))
        async with started(http_service(config)) as actor:
            began = monotonic()
            await asyncio.gather(*(actor.send(RowRequest(path=path, body=b"{}")) for path in kinds * 6))
            assert monotonic() - began >= (6 * len(kinds) - 1) / 20


async def test_what_does_not_speak_http_is_not_reached():
    """As with http:// for https://, or the port of another program."""

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        writer.close()

    async with await asyncio.start_server(other, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(
            Unavailable, match=r"its answer is not HTTP\. Is it running, and is the URL right"
        ):
            await OpenAIService(url).start()
        async with started(OpenAIService(url, model="m", finds_model=False)) as asked:
            assert (await asked.send(row(prompt="one"))).status == 502


async def test_nobody_there_is_unavailable_with_the_url_and_no_secret(free_port: int):
    asked = OpenAIService(f"http://me:secret@127.0.0.1:{free_port}/v1?key=secret", model="m")
    with pytest.raises(Unavailable) as told:
        await asked.start()
    assert str(told.value).startswith(f"http://127.0.0.1:{free_port}/v1 cannot be reached: ")
    assert "secret" not in str(told.value)


async def test_nobody_there_is_told_at_the_start_where_the_model_is_not_known(free_port: int):
    with pytest.raises(Unavailable, match="Is it running"):
        await OpenAIService(f"http://127.0.0.1:{free_port}").start()


@pytest.mark.parametrize(
    ("header", "least_s", "most_s"),
    [
        (lambda: ("Retry-After", "7"), 7, 7),
        (lambda: ("Retry-After", formatdate(time() + 3600, usegmt=True)), 3000, 3600),
        (lambda: ("retry-after-ms", "250"), 0.25, 0.25),
    ],
)
async def test_retry_after_is_read_in_all_its_forms(
    header: Callable[[], tuple[str, str]], least_s: float, most_s: float
):
    async def busy(request: web.Request) -> web.Response:
        return web.Response(status=429, headers=dict([header()]), body=b"{}")

    async with service(busy) as base, started(OpenAIService(base, model="m")) as asked:
        answer = await asked.send(row())
        assert least_s <= answer.retry_after_s <= most_s
        assert asked.available_slots(0) == 0


async def test_a_refusal_leaves_room_for_half_as_many():
    async def busy(request: web.Request) -> web.Response:
        return web.Response(status=503, body=b"{}")

    async with service(busy) as base, started(OpenAIService(base, model="m", max_concurrency=10)) as asked:
        assert asked.available_slots(0) == 10
        await asked.send(row())
        assert (asked.available_slots(0), asked.available_slots(4), asked.available_slots(9)) == (5, 1, 0)


async def test_a_row_that_may_have_ended_engines_is_tried_again_alone():
    """As a row of an own engine: sent at once with others, it would end the engines under them, too."""
    alone: list[bool] = []
    running = 0

    async def chat(request: web.Request) -> web.Response:
        nonlocal running
        running += 1
        try:
            poisonous = b"poison" in await request.read()
            alone.extend([running == 1] * poisonous)
            await asyncio.sleep(0.05)
        finally:
            running -= 1
        if poisonous:
            dead = EngineDead("Two died.", should_retry="false")
            fields = {name.decode(): value.decode() for name, value in headers(dead, envelope(dead))}
            return web.Response(status=503, headers=fields, body=envelope(dead))
        return web.json_response({})

    rows = [row(prompt="poison" if number == 5 else "good") for number in range(20)]
    async with service(chat) as base, started(OpenAIService(base, model="m")) as asked:
        window = Window(asked, RetryPolicy(initial_backoff_s=0.01))
        outcomes = await asyncio.gather(*map(window.run, rows))
    assert [one.state for one in outcomes].count("ok") == 19
    assert outcomes[5].failure is not None
    assert (outcomes[5].failure.code, alone) == ("poison_row", [False, True, True])


async def test_an_answer_that_breaks_off_counts_as_an_answer():
    """A row that brings the service down each time must not be asked for ever."""

    async def cut(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with service(cut) as base, started(OpenAIService(base, model="m")) as asked:
        answer = await asked.send(row())
        assert answer.status == 502
        assert "broke the connection" in json.loads(answer.body)["error"]["message"]


async def test_a_connection_that_was_closed_for_its_idleness_costs_nothing():
    asked_on: list[object] = []

    async def once(request: web.Request) -> web.Response:
        assert request.transport is not None
        if request.transport in asked_on:
            request.transport.abort()
        asked_on.append(request.transport)
        return web.Response(body=b"{}")

    async with service(once) as base, started(OpenAIService(base, model="m")) as asked:
        assert [(await asked.send(row())).status for _ in range(3)] == [200, 200, 200]
        assert len(asked_on) > 3


async def test_no_answer_in_time_is_504():
    async def never(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with service(never) as base, started(OpenAIService(base, model="m", timeout_s=0.2)) as asked:
        answer = await asked.send(row())
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (504, "deadline_exceeded")


async def test_a_redirection_is_told_instead_of_followed():
    async def moved(request: web.Request) -> web.Response:
        raise web.HTTPPermanentRedirect("https://elsewhere.example/v1")

    async with service(moved) as base, started(OpenAIService(base, model="m")) as asked:
        answer = await asked.send(row())
        assert answer.status == 308
        assert "a redirection" in json.loads(answer.body)["error"]["message"]


async def test_a_prompt_for_the_engine_stays_in_its_process(url: str):
    async with started(OpenAIService(url)) as asked:
        answer = await asked.send(RowRequest(path=COMPLETIONS, body=b"{}", prompt=b"pickled"))
        assert answer.status == 400


async def test_a_window_gets_all_rows_answered_by_a_service_that_often_refuses():
    counted = 0

    async def moody(request: web.Request) -> web.Response:
        nonlocal counted
        counted += 1
        if counted % 3 == 0:
            return web.Response(status=429, headers={"retry-after-ms": "5"}, body=b"{}")
        return web.json_response({"n": counted})

    async with service(moody) as base, started(OpenAIService(base, model="m")) as asked:
        window = Window(asked, RetryPolicy(max_attempts=20, initial_backoff_s=0.01))
        outcomes = await asyncio.gather(*(window.run(row()) for _ in range(200)))
    assert {outcome.state for outcome in outcomes} == {"ok"}


async def test_a_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch):
    async def proxy(request: web.Request) -> web.Response:
        return web.json_response({"asked": str(request.url)})

    async with service(proxy) as base:
        monkeypatch.setenv("http_proxy", base)
        monkeypatch.setenv("no_proxy", "")
        async with started(OpenAIService("http://model.example/v1", model="m")) as asked:
            answer = await asked.send(row())
    assert "model.example" in json.loads(answer.body)["asked"]
