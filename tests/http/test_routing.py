"""Which model a request means, and what of it reaches the replica."""

import json

import pytest
from served import Served, chat

from penstock.asgi import Receive, Scope, Send
from penstock.serve.gateway.catalogue import ServedModel


class Mirror:
    """A replica that answers with what it was asked."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        said = {"path": scope["path"], "query": scope["query_string"].decode(), "headers": headers}
        answer = json.dumps(said | {"method": scope["method"], "body": body.decode("latin-1")}).encode()
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"application/json")],
            }
        )
        await send({"type": "http.response.body", "body": answer})


async def test_an_adapter_goes_to_its_base_under_its_full_name(served: Served):
    await served.gateway(ServedModel("base", 1, adapter_slots=4), "base:v2")
    await served.app(Mirror(), "base")
    await served.replica("base:v2", join=False)
    async with served.http() as http:
        answer = await http.post("/v1/chat/completions", json=chat() | {"model": "base:a/poet 2"})
        metrics = await http.get("/metrics")
    assert json.loads(answer.json()["body"])["model"] == "base:a/poet 2"
    assert answer.json()["headers"]["x-penstock-adapter"] == "a%2Fpoet%202"
    assert 'penstock_requests_total{model="base",status="200"} 1.0' in metrics.text


@pytest.mark.parity("S21")
async def test_a_client_cannot_name_an_adapter_by_header(served: Served):
    await served.gateway(ServedModel("base", 1, adapter_slots=4))
    await served.app(Mirror(), "base")
    async with served.http(headers={"x-penstock-adapter": "poet"}) as http:
        answer = await http.post("/v1/chat/completions", json=chat() | {"model": "base"})
    assert "x-penstock-adapter" not in answer.json()["headers"]


async def test_a_body_without_model_goes_to_the_only_one_unchanged(served: Served):
    await served.gateway("m")
    await served.app(Mirror())
    body = b'{"messages" : [ ]}'
    async with served.http() as http:
        answer = await http.post("/v1/chat/completions", content=body)
    assert answer.json()["body"].encode() == body


@pytest.mark.parity("S17", "S18")
async def test_the_configured_default_takes_what_names_no_model(served: Served):
    await served.gateway("a", "b", default_model="b")
    await served.app(Mirror(), "b")
    async with served.http() as http:
        answers = [
            await http.post("/tokenize", json={"prompt": "x", "model": None}),
            await http.get("/tokenizer_info"),
        ]
    assert [answer.json()["path"] for answer in answers] == ["/tokenize", "/tokenizer_info"]


async def test_a_path_without_body_may_name_its_model_in_the_query(served: Served):
    await served.gateway("a", "b")
    await served.app(Mirror(), "b")
    async with served.http() as http:
        named, unnamed = await http.get("/tokenizer_info?model=b"), await http.get("/tokenizer_info")
    assert (named.status_code, named.json()["query"]) == (200, "model=b")
    assert unnamed.status_code == 400


async def test_an_upload_is_routed_by_its_form_field_and_passed_on_byte_for_byte(served: Served):
    await served.gateway("text", "speech")
    await served.app(Mirror(), "speech")
    sound = bytes(range(256)) * 5000
    async with served.http() as http:
        request = http.build_request(
            "POST", "/v1/audio/transcriptions", data={"model": "speech"}, files={"file": ("a.wav", sound)}
        )
        content = await request.aread()
        answer = await http.send(request)
    assert answer.json()["body"].encode("latin-1") == content
    assert answer.json()["headers"]["content-type"] == request.headers["content-type"]


@pytest.mark.parity("S17")
async def test_the_clients_request_id_is_passed_and_answered(served: Served):
    await served.gateway("m")
    await served.app(Mirror())
    async with served.http() as http:
        mine = await http.post("/v1/chat/completions", json=chat(), headers={"x-request-id": "a-1.b"})
        drawn = await http.post("/v1/chat/completions", json=chat(), headers={"x-request-id": 200 * "x"})
    assert mine.headers["x-request-id"] == mine.json()["headers"]["x-request-id"] == "a-1.b"
    assert drawn.headers["x-request-id"] == drawn.json()["headers"]["x-request-id"]
    assert len(drawn.headers["x-request-id"]) == 32


async def test_hop_by_hop_fields_stay_on_their_hop(served: Served):
    await served.gateway("m")
    await served.app(Mirror())
    headers = {"connection": "keep-alive, x-private", "x-private": "1", "te": "trailers", "x-public": "1"}
    async with served.http() as http:
        seen = (await http.post("/v1/chat/completions", json=chat(), headers=headers)).json()["headers"]
    assert "x-public" in seen
    assert {"connection", "x-private", "te", "transfer-encoding"}.isdisjoint(seen)


async def test_responses_are_read_and_cancelled_by_id(served: Served):
    await served.gateway("m")
    await served.app(Mirror())
    async with served.http() as http:
        read = await http.get("/v1/responses/resp_1a?stream=false")
        cancel = await http.post("/v1/responses/resp_1a/cancel")
        other = await http.post("/v1/responses/resp_1a/delete")
    assert (read.json()["method"], read.json()["path"]) == ("GET", "/v1/responses/resp_1a")
    assert cancel.json()["path"] == "/v1/responses/resp_1a/cancel"
    assert other.status_code == 404
