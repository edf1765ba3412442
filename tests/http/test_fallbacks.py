"""Aliases, and models that answer for another one that cannot."""

from __future__ import annotations

import asyncio
import json

import pytest
from served import Served, chat, until

from penstock.serve.gateway.catalogue import ServedModel

pytestmark = pytest.mark.parity("X22")

HEADER = "x-penstock-model"


def card(model_id: str, *fallbacks: str, **more) -> ServedModel:
    return ServedModel(model_id, created=1, fallbacks=fallbacks, **more)


async def fallbacks(served: Served, model: str, other: str) -> float:
    async with served.http() as http:
        text = (await http.get("/metrics")).text
    (line,) = [
        line
        for line in text.splitlines()
        if line.startswith(f'penstock_fallbacks_total{{model="{model}",to="{other}"}}')
    ]
    return float(line.split()[-1])


def failing(status: int):
    """A replica whose engine answers so."""

    async def app(scope, receive, send):
        await receive()
        headers = [(b"retry-after", b"7")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"error": {"message": "it broke"}}'})

    return app


async def test_an_alias_is_listed_asked_for_and_named_in_the_answer(served: Served):
    await served.gateway(ServedModel("m", created=1, aliases=("gpt-4o-mini",)), "other")
    await served.replica("m", reply="yes")  # links tell it
    client = served.openai()
    assert [model.id async for model in client.models.list()] == ["m", "gpt-4o-mini", "other"]
    found = await client.models.retrieve("gpt-4o-mini")
    assert (found.id, found.model_extra["root"]) == ("gpt-4o-mini", "m")
    for name in ("m", "gpt-4o-mini"):
        answer = await client.chat.completions.create(**chat(model=name))
        assert (answer.model, answer.choices[0].message.content) == (name, "yes")
        stream = await client.chat.completions.create(**chat(model=name, stream=True))
        assert {event.model async for event in stream} == {name}


async def test_an_alias_may_be_the_default(served: Served):
    await served.gateway(ServedModel("m", created=1, aliases=("x",)), "other", default_model="x")
    await served.replica("m", reply="yes")
    async with served.http() as http:
        answer = await http.post("/v1/completions", json={"prompt": "hello"})
    assert answer.json()["model"] == "m"


async def test_another_model_answers_when_no_replica_is_there(served: Served):
    await served.gateway(card("m", "other"), "other")
    await served.replica("other", reply="from the other")
    async with served.http() as http:
        answer = await http.post("/v1/chat/completions", json=chat())
        stream = await http.post("/v1/chat/completions", json=chat(stream=True))
    assert answer.json()["choices"][0]["message"]["content"] == "from the other"
    assert answer.json()["model"] == answer.headers[HEADER] == stream.headers[HEADER] == "other"
    assert stream.text.endswith("data: [DONE]\n\n")
    assert await fallbacks(served, "m", "other") == 2


async def test_the_model_itself_answers_while_it_can(served: Served):
    await served.gateway(card("m", "other"), "other")
    await served.replica("m", reply="itself")
    await served.replica("other", reply="from the other")
    async with served.http() as http:
        answer = await http.post("/v1/chat/completions", json=chat())
    assert answer.json()["choices"][0]["message"]["content"] == "itself"
    assert HEADER not in answer.headers
    assert await fallbacks(served, "m", "other") == 0


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
async def test_an_engine_that_cannot_answer_is_stood_in_for(served: Served, status: int):
    await served.gateway(card("m", "other"), "other")
    await served.app(failing(status))
    await served.replica("other", reply="yes")
    async with served.http() as http:
        answer = await http.post("/v1/chat/completions", json=chat())
    assert (answer.status_code, answer.headers[HEADER]) == (200, "other")


@pytest.mark.parametrize("chain", [("m",), ("other", "m")], ids=["alone", "last of a chain"])
async def test_an_engines_own_429_is_the_answer_where_no_other_model_is_left(
    served: Served, chain: tuple[str, ...]
):
    first, *rest = chain
    await served.gateway(card(first, *rest), *rest)
    for name in chain:
        await served.app(failing(429), name)
    async with served.http() as http:
        answer = await http.post("/v1/chat/completions", json=chat() | {"model": first})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert answer.json() == {"error": {"message": "it broke"}}


async def test_a_replica_killed_before_its_first_byte_is_stood_in_for(served: Served):
    await served.gateway(card("m", "other"), "other")
    replica = await served.process("m", prefill_tokens_per_s=1)
    await served.replica("other", reply="yes")
    async with served.http() as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat()))
        await until(lambda: any(one.in_flight for one in served.table.members("m")))
        replica.kill()
        answer = await asking
    assert (answer.status_code, answer.headers[HEADER]) == (200, "other")


async def test_nothing_is_stood_in_for_after_the_first_byte(served: Served):
    await served.gateway(card("m", "other"), "other", wait_for_replica_s=0.3)
    replica = await served.process("m", reply="word " * 100, step_base_ms=50)
    await served.replica("other", reply="yes")
    async with (
        served.http() as http,
        http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as stream,
    ):
        lines = stream.aiter_lines()
        await anext(lines)
        replica.kill()
        rest = [line async for line in lines]
    assert HEADER not in stream.headers
    assert "[DONE]" not in rest
    assert '"engine_dead"' in rest[-2]


async def test_a_full_model_is_stood_in_for(served: Served):
    await served.gateway(card("m", "other", max_ongoing_requests=1, max_queued_requests=0), "other")
    gate = asyncio.Event()

    async def busy(scope, receive, send):
        await receive()
        await gate.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    await served.app(busy)
    await served.replica("other", reply="yes")
    async with served.http() as http:
        first = asyncio.create_task(http.post("/v1/chat/completions", json=chat()))
        await until(lambda: any(one.in_flight for one in served.table.members("m")))
        second = await http.post("/v1/chat/completions", json=chat())
        gate.set()
        assert (await first).headers.get(HEADER) is None
    assert (second.status_code, second.headers[HEADER]) == (200, "other")


async def test_a_refusal_of_the_request_is_the_answer(served: Served):
    await served.gateway(card("m", "other"), "other")
    await served.replica("m")
    await served.replica("other")
    async with served.http() as http:
        answer = await http.post("/v1/chat/completions", json={"model": "m"})
    assert answer.status_code == 400
    assert HEADER not in answer.headers


async def test_only_the_name_in_a_body_is_changed(served: Served):
    seen: list[bytes] = []

    async def app(scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        seen.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    await served.gateway(card("m", "other", paths=("/v1/own",)), card("other", paths=("/v1/own",)))
    await served.app(app, "other")
    sent = '{"a": 1.0, "model":"m", "text": "\\u00e9 m", "big": 123456789012345678901234567890}'
    async with served.http() as http:
        await http.post("/v1/own", content=sent, headers={"content-type": "application/json"})
        form = {"model": "m", "language": "m"}
        await http.post("/v1/audio/transcriptions", data=form, files={"file": b"\r\nmodel m\r\n"})
    assert json.loads(seen[0]) == json.loads(sent) | {"model": "other"}
    assert b'"\\u00e9 m"' in seen[0]
    assert b'name="model"\r\n\r\nother\r\n' in seen[1]
    assert b'name="language"\r\n\r\nm\r\n' in seen[1]
    assert b"\r\nmodel m\r\n" in seen[1]
