"""Answers of a foreign application, as its edge lets them out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.asgi import Message, Receive, Scope, Send
from penstock.engines.edge import Edge

EVENT = b'data: {"choices":[{"delta":{"content":"{\\"error\\""}}]}\n\n'
DONE = b"data: [DONE]\n\n"
SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions"}


def error_event(code: int, message: str) -> bytes:
    said = {"error": {"message": message, "type": "x", "param": None, "code": code}}
    return b"data: " + json.dumps(said).encode() + b"\n\n"


class Application:
    """Answers with what it was given, piece by piece, and may fail in the end."""

    def __init__(
        self, status: int, *pieces: bytes, fails: bool = False, kind: bytes = b"text/event-stream"
    ) -> None:
        self.status, self.pieces, self.fails, self.kind = status, pieces, fails, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", self.kind), (b"x-request-id", b"7")]
        if self.status:
            await send({"type": "http.response.start", "status": self.status, "headers": headers})
        for piece in self.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if self.fails:
            raise RuntimeError("secret of the engine")
        await send({"type": "http.response.body", "body": b""})


async def let_out(app: Application, death: str | None = None) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nobody asks")

    await Edge(app, lambda: death)(SCOPE, receive, send)
    return sent


async def refusal(status: int, body: Any, death: str | None = None) -> tuple[int, dict[str, Any]]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    start, last = await let_out(Application(status, raw[:5], raw[5:]), death)
    return start["status"], json.loads(last["body"])["error"]


def vllm_says(message: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "param": param, "code": 400}}


async def test_a_good_answer_passes_untouched():
    sent = await let_out(Application(200, EVENT, DONE))
    assert [message.get("body") for message in sent] == [None, EVENT, DONE, b""]
    assert sent[0]["headers"] == [(b"content-type", b"text/event-stream"), (b"x-request-id", b"7")]


async def test_an_error_event_ends_the_stream_in_our_envelope():
    sent = await let_out(Application(200, EVENT, error_event(500, "CUDA at 0x7f"), DONE))
    assert [message.get("body") for message in sent[1:-1]] == [EVENT]
    assert not sent[-1].get("more_body")
    told = json.loads(sent[-1]["body"].removeprefix(b"data: "))["error"]
    assert (told["message"], told["code"]) == ("Internal error.", "internal_error")


async def test_an_error_event_of_a_dead_engine_says_so():
    sent = await let_out(Application(200, EVENT, error_event(500, "see stack trace")), death="It is gone.")
    assert json.loads(sent[-1]["body"][6:])["error"]["code"] == "engine_dead"


@pytest.mark.parametrize(
    ("status", "code"), [(400, "invalid_request"), (404, "not_found"), (501, "unsupported")]
)
async def test_a_clients_mistake_keeps_the_sentence_and_the_field(status: int, code: str):
    said, error = await refusal(status, vllm_says("temperature must be positive.", "temperature"))
    assert (said, error["code"], error["param"]) == (status, code, "temperature")
    assert error["message"] == "temperature must be positive."


async def test_a_prompt_over_the_window_has_a_code_of_its_own():
    said = "This model's maximum context length is 10 tokens. (parameter=input_tokens, value=11)"
    status, error = await refusal(400, vllm_says(said, "input_tokens"))
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert error["message"] == "This model's maximum context length is 10 tokens."


@pytest.mark.parametrize(
    ("dump", "param", "message"),
    [
        (
            "{'loc': 'body.x', 'msg': 'Field required', 'input': {'secret': 1}}",
            "body.x",
            "x: Field required.",
        ),
        (r"""{'msg': 'It\'s "odd"', 'input': 1}""", None, """The request: It's "odd"."""),
        ("{'type': 'dict_type', 'input': 1}", None, "The request is not valid."),
        ("{'type': 'dict_type', 'input': 1}", "body.x", "x is not valid."),
    ],
)
async def test_a_validators_dump_becomes_a_sentence(dump: str, param: str | None, message: str):
    _, error = await refusal(400, vllm_says(f"1 validation error:\n  {dump}", param))
    assert error["message"] == message


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (401, {"error": "Unauthorized"}, "invalid_api_key"),
        (404, {"detail": "Not Found"}, "not_found"),
        (404, vllm_says("The model `x` does not exist."), "model_not_found"),
        (405, {"detail": "Method Not Allowed"}, "method_not_allowed"),
        (413, {"error": "Payload Too Large"}, "body_too_large"),
        (422, vllm_says("The image cannot be fetched."), "invalid_request"),
        (429, {"error": {"message": "Slow down."}}, "overloaded"),
        (501, vllm_says("This model does not support that."), "unsupported"),
        (503, b"", "unavailable"),
        (500, b"Internal Server Error", "internal_error"),
    ],
)
async def test_every_status_has_its_code(status: int, body: Any, code: str):
    answered, error = await refusal(status, body)
    assert answered == (400 if status == 422 else status)
    assert error["code"] == code


async def test_a_failure_of_the_engine_keeps_its_words_inside(caplog: pytest.LogCaptureFixture):
    _, error = await refusal(500, vllm_says("KeyError: 'secret'"))
    assert error["message"] == "Internal error."
    assert "secret" in caplog.text


async def test_once_the_engine_is_dead_every_failure_is_that():
    status, error = await refusal(500, vllm_says("EngineCore encountered an issue."), death="It is gone.")
    assert (status, error["code"], error["message"]) == (503, "engine_dead", "It is gone.")


async def test_an_application_that_raises_before_its_answer_is_a_500():
    start, last = await let_out(Application(0, fails=True))
    assert start["status"] == 500
    assert "secret" not in last["body"].decode()


async def test_an_application_that_raises_in_a_stream_ends_it_with_an_error():
    sent = await let_out(Application(200, EVENT, fails=True))
    assert b"internal_error" in sent[-1]["body"]


async def test_an_application_that_raises_in_another_answer_leaves_it_without_an_end():
    sent = await let_out(Application(200, b'{"data": [', fails=True, kind=b"application/json"))
    assert [(message.get("body"), message.get("more_body")) for message in sent[1:]] == [
        (b'{"data": [', True)
    ]


async def test_a_refusal_keeps_the_request_id():
    start, _ = await let_out(Application(400, b"{}"))
    assert (b"x-request-id", b"7") in start["headers"]


@pytest.mark.parametrize(
    "error",
    [
        {"message": "x", "code": "context_length_exceeded"},  # OpenAI's code
        {"message": "The input (9 tokens) is longer than the model's context length (8 tokens)."},  # SGLang
        {"message": "the request exceeds the available context size, try increasing it"},  # llama.cpp
    ],
)
async def test_other_servers_words_for_a_prompt_over_the_window_are_known(error: dict[str, Any]):
    _, told = await refusal(400, {"error": error})
    assert told["code"] == "context_length_exceeded"


async def test_openais_code_for_an_unknown_model_is_known():
    _, told = await refusal(404, {"error": {"message": "No 'x' here.", "code": "model_not_found"}})
    assert (told["code"], told["message"]) == ("model_not_found", "No 'x' here.")


async def test_fastapis_list_of_faults_becomes_a_sentence_without_the_input():
    fault = {"loc": ["body", "max_tokens"], "msg": "Input should be an integer", "input": "secret"}
    status, told = await refusal(422, {"detail": [fault]})
    assert (status, told["param"]) == (400, "max_tokens")
    assert told["message"] == "max_tokens: Input should be an integer."
