"""Every error is a status with OpenAI's envelope, and says nothing of what is inside."""

import asyncio
import json
import logging

import pytest
from served import Served, chat

pytestmark = pytest.mark.parity("S16")

FORBIDDEN = [
    "/_penstock/link",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/sleep",
    "/wake_up",
    "/collective_rpc",
    "/pause",
    "/resume",
    "/update_weights",
    "/reset_prefix_cache",
    "/abort_requests",
    "/inference/v1/abort_requests",
    "/shutdown_weight_transfer_engine",
    "/invocations",
    "/start_profile",
    "/stop_profile",
    "/scale_elastic_ep",
    "/server_info",
]


async def test_an_answer_without_content_has_no_length(served: Served):
    await served.gateway("m")
    async with served.http() as http:
        answer = await http.request("OPTIONS", "/v1/models")
    assert answer.status_code == 204
    assert "content-length" not in answer.headers


async def test_a_time_limit_inside_is_not_taken_for_that_of_the_request(served: Served, patched):
    gateway = await served.gateway("m", request_timeout_s=60)

    async def all_adapters() -> None:
        raise TimeoutError

    patched(gateway._listing, "all", all_adapters)
    async with served.http() as http:
        answer = await http.get("/v1/models")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")


async def test_unknown_path_is_404_in_the_envelope(served: Served):
    await served.gateway("m")
    async with served.http() as http:
        answer = await http.get("/v1/nothing")
    assert answer.status_code == 404
    assert answer.json()["error"] == {
        "message": "There is no path '/v1/nothing' here; the models served are listed under /v1/models.",
        "type": "invalid_request_error",
        "param": None,
        "code": "not_found",
    }


async def test_what_controls_an_engine_is_not_reached_from_outside(served: Served):
    await served.gateway("m")
    reached = []

    async def app(scope, receive, send):
        reached.append(scope["path"])

    await served.app(app)
    statuses = []
    async with served.http() as http:
        for path in FORBIDDEN:
            statuses.append((await http.get(path)).status_code)
            statuses.append((await http.post(path, json={"model": "m"})).status_code)
            statuses.append((await http.post("/v1/.." + path, json={"model": "m"})).status_code)
    assert set(statuses) == {404}
    assert reached == []


async def test_wrong_method_is_405_and_names_the_right_ones(served: Served):
    await served.gateway("m")
    async with served.http() as http:
        answers = [await http.get("/v1/chat/completions"), await http.delete("/v1/models")]
    assert [answer.status_code for answer in answers] == [405, 405]
    assert [answer.headers["allow"] for answer in answers] == ["POST, OPTIONS", "GET, HEAD, OPTIONS"]
    assert answers[0].json()["error"]["code"] == "method_not_allowed"


async def test_head_and_options_have_no_body(served: Served):
    await served.gateway("m")
    async with served.http() as http:
        head, options = await http.head("/v1/models"), await http.options("/v1/chat/completions")
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) > 0
    assert (options.status_code, options.content, options.headers["allow"]) == (204, b"", "POST, OPTIONS")


@pytest.mark.parametrize(
    ("body", "says", "param"),
    [
        (b"{", "not valid JSON", None),
        (b"[]", "Expected `object`, got `array`", None),
        (b'{"model": 7}', "Expected `str | null`, got `int` - at `$.model`", "model"),
        (b'{"model": "\xff"}', "not valid JSON", None),
    ],
)
async def test_a_body_that_cannot_be_routed_is_400(served: Served, body: bytes, says: str, param: str | None):
    await served.gateway("m")
    async with served.http() as http:
        answer = await http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == param


async def test_without_a_model_and_a_default_the_models_are_named(served: Served):
    await served.gateway("a", "b")
    async with served.http() as http:
        answer = await http.post("/v1/chat/completions", json={"messages": []})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "The request names no model; name one of 'a', 'b'."


async def test_declared_body_over_the_limit_is_413_before_it_is_read(served: Served):
    await served.gateway("m", max_body_bytes=1000)
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port.number)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    writer.close()


async def test_undeclared_body_over_the_limit_is_413_while_it_is_read(served: Served):
    await served.gateway("m", max_body_bytes=1000)
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port.number)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    writer.write(b"7d0\r\n" + 2000 * b"x" + b"\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    body = await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
    assert json.loads(body)["error"]["code"] == "body_too_large"
    writer.close()


async def test_an_inner_failure_is_500_without_its_text(served: Served, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)  # a vLLM that ran in this process before has raised the root's
    await served.gateway("m")

    async def app(scope, receive, send):
        body = b'{"error": {"message": "Traceback: /srv/secret/place.py"}}'
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 500, "headers": [length]})
        await send({"type": "http.response.body", "body": body})

    await served.app(app)
    async with served.http(headers={"x-request-id": "find-me"}) as http:
        answer = await http.post("/v1/chat/completions", json=chat())
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    [line] = [record for record in caplog.records if "find-me" in record.getMessage()]
    assert "secret" in line.getMessage()


async def test_every_error_carries_the_request_id(served: Served):
    await served.gateway("m", api_key="k")
    async with served.http(headers={"x-request-id": "mine"}) as http:
        ids = [(await http.get(path)).headers["x-request-id"] for path in ("/v1/models", "/nowhere")]
    assert ids == ["mine", "mine"]
