"""Methods of an LLMServer subclass that answer paths: the gateway knows which models have them."""

import httpx
import openai
import pytest
from jobs_served import JobsServed, create, ended, found, line
from pydantic import BaseModel
from recording import server
from served import chat, until
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse

from penstock.config import LLMConfig
from penstock.config.schema.jobs import JobsConfig
from penstock.data.storage.paths import LocalPath
from penstock.engine import Load
from penstock.jobs.validation import check_input
from penstock.layers.generation import Generation
from penstock.serve import LLMServer, endpoint
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.jobs.deployment import own_endpoints
from penstock.serve.replica.inbound.custom_endpoints import batch_paths, paths

pytestmark = pytest.mark.parity("S4")

ends: list[str] = []


class Answer(BaseModel):
    text: str


class Summaries(LLMServer):
    @endpoint("/v1/summarize")
    async def summarize(self, request: dict) -> dict:
        (answer,) = [a async for a in await self.chat(chat(request["text"]))]
        return {"summary": answer.choices[0].message.content[:3]}

    @endpoint("/v1/count", batch=True)
    async def count(self, request: dict) -> dict:
        if not request["word"]:
            raise ValueError("The word must not be empty.")
        return {"letters": len(request["word"])}

    @endpoint("/v1/spell")
    async def spell(self, request: dict):
        for letter in request["text"]:
            if letter == "!":
                raise RuntimeError("secret")
            yield {"letter": letter}

    @endpoint("/v1/endless")
    async def endless(self, request: dict):
        try:
            while True:
                yield "tick"
        finally:
            ends.append("endless")

    @endpoint("/v1/lines")
    async def lines(self, request: dict):
        yield "one\ntwo"

    @endpoint("/v1/raw")
    async def raw(self, request: Request) -> PlainTextResponse:
        return PlainTextResponse(f"{len(await request.body())} bytes", status_code=202)

    @endpoint("/v1/table")
    async def table(self, request: Request) -> StreamingResponse:
        async def rows():
            yield b'{"row": 1}\n'
            raise RuntimeError("secret")

        return StreamingResponse(rows(), media_type="application/x-ndjson")

    @endpoint("/v1/plain")
    def plain(self, request: dict, context) -> Answer:
        return Answer(text=f"{context.config.model_id} {context.request_id}")

    @endpoint("/v1/picky")
    async def picky(self, request: dict) -> dict:
        raise ValueError("Text must not be empty.")

    @endpoint("/v1/broken")
    async def broken(self, request: dict) -> dict:
        raise KeyError("secret")


def card(kind: type[LLMServer] = Summaries, model_id: str = "m") -> ServedModel:
    config = LLMConfig(model_loading_config={"model_id": model_id})
    return ServedModel.of(config, paths=tuple(paths(kind)), batch_paths=batch_paths(kind))


@pytest.fixture
async def summaries(served):
    async with server(Summaries) as made:
        await served.gateway(card())
        await served.app(made._app())
        yield served


async def test_a_dict_in_gives_a_dict_out(summaries):
    answer = await summaries.http().post(
        "/v1/summarize", json={"text": "a long text"}, headers={"x-request-id": "s-1"}
    )
    assert answer.status_code == 200
    assert answer.json() == {"summary": "a l"}
    assert answer.headers["x-request-id"] == "s-1"


async def test_an_async_generator_is_a_stream(summaries):
    answer = await summaries.http().post("/v1/spell", json={"text": "hi"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text == 'data: {"letter":"h"}\n\ndata: {"letter":"i"}\n\ndata: [DONE]\n\n'


async def test_a_text_of_two_lines_is_one_event(summaries):
    answer = await summaries.http().post("/v1/lines", json={})
    assert answer.text == "data: one\ndata: two\n\ndata: [DONE]\n\n"


async def test_a_stream_that_fails_has_a_status_first_and_an_error_event_later(summaries):
    early = await summaries.http().post("/v1/spell", json={"text": "!"})
    assert early.status_code == 500
    late = await summaries.http().post("/v1/spell", json={"text": "a!"})
    assert late.status_code == 200
    assert '"letter":"a"' in late.text
    assert late.text.rstrip().endswith('"code":"own_code_failed"}}')
    assert "secret" not in early.text + late.text


async def test_an_answer_that_is_no_stream_of_events_and_fails_is_not_whole(summaries):
    with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
        await summaries.http().post("/v1/table", json={})


async def test_a_starlette_request_and_response_are_passed_through(summaries):
    answer = await summaries.http().post("/v1/raw", content=b"12345", headers={"content-type": "text/plain"})
    assert (answer.status_code, answer.text) == (202, "5 bytes")


async def test_plain_methods_and_models_and_the_context(summaries):
    answer = await summaries.http().post("/v1/plain", json={}, headers={"x-request-id": "p-1"})
    assert answer.json() == {"text": "m p-1"}


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/v1/picky", 400, "Text must not be empty."),
        ("/v1/broken", 500, "The endpoint /v1/broken failed"),
        ("/v1/nothing", 404, "/v1/nothing"),
    ],
)
async def test_errors_are_in_the_envelope(summaries, path, status, says):
    answer = await summaries.http().post(path, json={})
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]
    assert "secret" not in answer.text


async def test_wrong_methods_and_bodies_are_refused(summaries):
    assert (await summaries.http().get("/v1/summarize")).status_code == 405
    assert (await summaries.http().post("/v1/summarize", content=b"[1]")).status_code == 400


async def test_the_key_guards_them_and_the_metrics_name_them(served):
    async with server(Summaries) as made:
        await served.gateway(card(), api_key="k")
        await served.app(made._app())
        assert (await served.http().post("/v1/summarize", json={"text": "t"})).status_code == 401
        keyed = served.http(headers={"authorization": "Bearer k"})
        assert (await keyed.post("/v1/summarize", json={"text": "t"})).status_code == 200
        assert 'route="/v1/summarize"' in (await keyed.get("/metrics")).text


async def test_a_client_that_leaves_ends_the_stream(summaries):
    ends.clear()
    async with summaries.http() as http, http.stream("POST", "/v1/endless", json={}) as answer:
        async for _ in answer.aiter_raw():
            break
    await until(lambda: ends == ["endless"])


async def test_the_same_path_of_two_models_is_told_apart_by_model(served):
    class Other(LLMServer):
        @endpoint("/v1/summarize")
        async def summarize(self, request: dict) -> dict:
            return {"summary": "other"}

    async with server(Summaries) as one, server(Other) as two, server() as three:
        await served.gateway(card(), card(Other, "o"), card(LLMServer, "plain"))
        for made, model_id in ((one, "m"), (two, "o"), (three, "plain")):
            await served.app(made._app(), model_id, load=Load)
        http = served.http()
        assert (await http.post("/v1/summarize", json={"model": "o"})).json() == {"summary": "other"}
        assert (await http.post("/v1/summarize", json={"model": "m", "text": "abcd"})).json() == {
            "summary": "abc"
        }
        assert (await http.post("/v1/summarize", json={})).status_code == 400
        wrong = await http.post("/v1/summarize", json={"model": "plain"})
        assert wrong.status_code == 404
        assert "'m', 'o'" in wrong.json()["error"]["message"]
        alone = await http.post("/v1/spell", json={"text": "x"})  # only one model has it
        assert '"letter":"x"' in alone.text


@pytest.mark.parametrize("path", ["summarize", "/metrics", "/v1/{name}", "/v1/résumé", "/a%20b", "/a\n"])
def test_paths_that_cannot_be_ones_own_are_refused(path):
    with pytest.raises(ValueError, match="reserved or not a valid path"):
        endpoint(path)


async def test_a_server_without_own_paths_has_no_layer():
    async with server() as made:
        assert type(made._app()._app) is Generation


async def test_lines_of_a_batch_may_ask_an_endpoint_that_says_so(summaries, tmp_path):
    jobs = JobsServed(summaries, tmp_path / "jobs", {}, own_endpoints([card(), card(LLMServer, "other")]))
    await jobs.start()
    try:
        rows = [line("a", url="/v1/count", word="one"), line("b", url="/v1/count", word="")]
        batch = await ended(jobs, (await create(jobs, rows, endpoint="/v1/count")).id)
        assert batch.status == "completed", batch
        (answer,) = await found(jobs, batch.output_file_id)
        assert (answer["custom_id"], answer["response"]["body"]) == ("a", {"letters": 3})
        (refused,) = await found(jobs, batch.error_file_id)
        assert (refused["custom_id"], refused["response"]["status_code"]) == ("b", 400)
        with pytest.raises(openai.BadRequestError, match=r"batches may use .*/v1/count"):
            await create(jobs, rows, endpoint="/v1/summarize")
    finally:
        await jobs.stop()


def test_only_models_that_have_the_endpoint_answer_its_lines(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(f"{line('a', url='/v1/count')}\n{line('b', url='/v1/count', model='other')}\n")
    checked = check_input(
        LocalPath(path),
        "/v1/count",
        lambda name, body: (name or "m", ""),
        JobsConfig(),
        1 << 20,
        own_endpoints([card(), card(LLMServer, "other")])["/v1/count"],
    )
    assert [(one.line, one.code) for one in checked.faults] == [(2, "endpoint_not_supported")]
