"""Replicas that die: the table forgets them at once, requests go on elsewhere, no half answer looks whole.

Streams that can be continued are in `test_streams_continued`; those here are of a version that is not known.
"""

import asyncio
import json

import httpx
import openai
import pytest
from served import Served, chat, until

HELD = {"prefill_tokens_per_s": 4}  # no first byte for a second and more
SLOW = {"step_base_ms": 50, "prefill_tokens_per_s": float("inf")}
LONG = {"max_tokens": 400, "ignore_eos": True}


def events(text: str) -> list[str]:
    return [event.removeprefix("data: ") for event in text.split("\n\n") if event]


async def test_a_killed_replica_leaves_the_table_by_its_link_alone(served: Served):
    await served.gateway("m")
    replica = await served.process()
    replica.kill()
    await until(lambda: not served.table.ready("m"))
    assert len(served.table.members("m")) == 1


async def test_no_request_fails_when_one_of_two_replicas_is_killed_before_their_first_byte(served: Served):
    await served.gateway("m")
    doomed = await served.process(reply="fine", **HELD)
    await served.process(reply="fine", **SLOW)
    async with served.http() as http:
        requests = [asyncio.create_task(http.post("/v1/chat/completions", json=chat())) for _ in range(20)]
        await until(lambda: sum(r.in_flight for r in served.table.ready("m")) == 20)
        assert all(replica.in_flight for replica in served.table.ready("m"))
        doomed.kill()
        answers = await asyncio.gather(*requests)
        metrics = (await http.get("/metrics")).text
    assert {answer.status_code for answer in answers} == {200}
    assert 'penstock_failovers_total{model="m"} 0.0' not in metrics


async def test_the_only_replica_killed_the_request_waits_for_its_successor(served: Served):
    await served.gateway("m")
    doomed = await served.process(reply="fine", **HELD)
    async with served.http() as http:
        request = asyncio.create_task(http.post("/v1/chat/completions", json=chat()))
        await until(lambda: sum(r.in_flight for r in served.table.ready("m")) == 1)
        doomed.kill()
        await until(lambda: len(served.line("m")) == 1)
        served.remove("m", doomed.address)
        await served.replica(reply="risen")
        answer = await request
    assert answer.json()["choices"][0]["message"]["content"] == "risen"


async def test_a_stream_cut_after_its_first_byte_ends_with_an_error_event_and_without_done(served: Served):
    await served.gateway("m")
    doomed = await served.process(version="", **SLOW)
    async with (
        served.http() as http,
        http.stream("POST", "/v1/chat/completions", json=chat(stream=True, **LONG)) as answer,
    ):
        pieces = answer.aiter_text()
        text = await anext(pieces)
        doomed.kill()
        text += "".join([piece async for piece in pieces])
    assert answer.status_code == 200
    assert "[DONE]" not in text
    assert all(json.loads(event) for event in events(text))
    assert json.loads(events(text)[-1])["error"]["code"] == "engine_dead"


async def test_the_official_client_raises_on_a_cut_stream(served: Served):
    await served.gateway("m")
    doomed = await served.process(version="", **SLOW)
    stream = await served.openai().chat.completions.create(**chat(stream=True), extra_body=LONG)
    await anext(stream)
    doomed.kill()
    with pytest.raises(openai.APIError, match="has failed"):
        async for _ in stream:
            pass


async def test_half_a_plain_answer_is_cut_off(served: Served):
    await served.gateway("m")

    async def app(scope, receive, send):
        length = [(b"content-length", b"10"), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": b'{"a"', "more_body": True})

    await served.app(app)
    async with served.http() as http:
        with pytest.raises(httpx.RemoteProtocolError):
            await http.post("/v1/chat/completions", json=chat())


async def test_an_engine_that_dies_before_the_first_byte_hands_its_requests_over(served: Served):
    await served.gateway("m")
    doomed = await served.replica(**HELD)
    async with served.http() as http:
        requests = [
            asyncio.create_task(http.post("/v1/chat/completions", json=chat(stream=stream)))
            for stream in (False, True)
        ]
        await until(lambda: doomed.engine.load().running + doomed.engine.load().waiting == 2)
        doomed.engine.die("killed")
        await served.replica(reply="fine")
        answers = await asyncio.gather(*requests)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert all("fine" in answer.text for answer in answers)


async def test_an_engine_that_dies_after_the_first_byte_ends_its_streams_without_done(served: Served):
    await served.gateway("m")
    doomed = await served.replica(version="", **SLOW)
    async with (
        served.http() as http,
        http.stream("POST", "/v1/chat/completions", json=chat(stream=True, **LONG)) as answer,
    ):
        pieces = answer.aiter_text()
        text = await anext(pieces)
        doomed.engine.die("killed: /srv/secret")
        text += "".join([piece async for piece in pieces])
    assert "[DONE]" not in text
    assert "secret" not in text
    assert json.loads(events(text)[-1])["error"]["code"] == "engine_dead"


async def test_a_request_that_kills_replicas_is_given_up_after_three_in_a_row(served: Served):
    await served.gateway("m")
    for _ in range(5):
        await served.replica(die_after_tokens=1)
    async with served.openai().with_options(max_retries=2) as client:
        with pytest.raises(openai.InternalServerError) as failed:
            await client.chat.completions.create(**chat(max_tokens=400), extra_body={"ignore_eos": True})
    assert (failed.value.status_code, failed.value.code) == (503, "engine_dead")
    await until(lambda: len(served.table.ready("m")) == 2)
