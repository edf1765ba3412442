"""Online first: batch requests in the gateway's line and in the replica, over real sockets."""

import asyncio
from pathlib import Path

import httpx
import pytest
from served import Served, chat, until
from test_adapters_served import folder_of

from penstock.serve.gateway.catalogue import ServedModel

pytestmark = pytest.mark.parity("X1")


class Gate:
    """A replica that holds each request until it is let go."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.places = asyncio.Semaphore(0)

    async def __call__(self, scope, receive, send) -> None:
        self.entered.append(dict(scope["headers"])[b"x-request-id"].decode())
        await self.places.acquire()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def post(http: httpx.AsyncClient, name: str, tier: str = "default", **more) -> asyncio.Task[httpx.Response]:
    body = chat(service_tier=tier, **more)
    request = http.post("/v1/chat/completions", json=body, headers={"x-request-id": name})
    return asyncio.create_task(request)


async def test_in_the_gateways_line_online_goes_before_batch_and_priority_before_both(served: Served):
    await served.gateway(ServedModel("m", 1, max_ongoing_requests=1), priority_tier=True)
    gate = Gate()
    await served.app(gate)
    async with served.http() as http:
        requests = []
        names = ("first", "default"), ("b1", "flex"), ("b2", "flex"), ("o1", "default"), ("p1", "priority")
        for name, tier in names:
            requests.append(post(http, name, tier))
            await until(lambda: len(served.line("m")) + len(gate.entered) == len(requests))
        for _ in requests:
            gate.places.release()
        await asyncio.gather(*requests)
    assert gate.entered == ["first", "p1", "o1", "b1", "b2"]


async def test_the_line_of_batch_is_bounded_and_online_still_waits(served: Served):
    await served.gateway(ServedModel("m", 1, max_ongoing_requests=1, max_queued_batch=1))
    gate = Gate()
    await served.app(gate)
    async with served.http() as http:
        admitted = [post(http, "a"), post(http, "b", "flex")]
        await until(lambda: len(served.line("m")) == 1 and gate.entered)
        refused = await post(http, "c", "flex")
        admitted.append(post(http, "d"))
        await until(lambda: len(served.line("m")) == 2)
        for _ in admitted:
            gate.places.release()
        assert [(await one).status_code for one in admitted] == [200] * 3
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "batch.max_queued_requests is 1" in refused.json()["error"]["message"]


async def test_batch_leaves_slots_of_a_replica_to_online(served: Served):
    await served.gateway(ServedModel("m", 1, max_ongoing_requests=8))
    gate = Gate()
    await served.app(gate)
    async with served.http() as http:
        rows = [post(http, f"b{number}", "flex") for number in range(10)]
        await until(lambda: len(gate.entered) == 7)
        online = post(http, "o")
        await until(lambda: "o" in gate.entered)
        for _ in range(11):
            gate.places.release()
        assert [(await one).status_code for one in [*rows, online]] == [200] * 11


async def test_rows_over_the_limit_wait_in_the_replica_and_all_are_answered(served: Served):
    replica = await served.replica("m", max_num_seqs=2, step_base_ms=2, reply="a b c d")
    await served.gateway("m")
    async with served.http() as http:
        rows = [post(http, f"b{number}", "flex") for number in range(40)]
        answers = [await row for row in rows]
    assert {answer.json()["service_tier"] for answer in answers} == {"flex"}
    assert replica.share.idle
    assert replica.share.limit <= 4


async def test_a_row_that_gives_way_goes_on_and_its_client_sees_one_answer(served: Served):
    replica = await served.replica("m", step_base_ms=5, reply="word " * 40)
    await served.gateway("m")
    share = replica.share
    async with served.http() as http:
        row = post(http, "b", "flex")
        for times in (1, 2):
            await until(lambda least=5 * times: replica.engine.counts().made_tokens > least)
            share._done_s = 1000.0  # so that its work may be lost
            share._abort(1)
            assert share.requeued == times
        answer = await row
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == "word " * 40
    again = replica.engine.counts().made_tokens - answer.json()["usage"]["completion_tokens"]
    assert again <= 2  # each time the token of the step that ran
    assert share.idle


@pytest.mark.parametrize("changed", ["weights", "adapter", "nothing"])
async def test_a_row_that_gives_way_to_other_weights_or_another_adapter_begins_anew(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
):
    lora = folder_of(tmp_path, "a")
    replica = await served.replica("m", step_base_ms=5, reply="word " * 40, lora=lora)
    await served.gateway(ServedModel("m", 1, adapter_slots=4))
    assert replica.adapters is not None
    if changed == "nothing":  # as a downloader tells that knows no versions
        monkeypatch.setattr(replica.adapters, "stamp", lambda name, key: None)
    async with served.http() as http:
        row = post(http, "b", "flex", model="m:a")
        await until(lambda: replica.engine.counts().made_tokens > 5)
        replica.share._done_s = 1000.0  # so that its work may be lost
        replica.share._abort(1)
        if changed == "weights":
            monkeypatch.setattr(replica.engine, "_weights", "v2")  # `update_weights` would wait for the row
        elif changed == "adapter":
            (tmp_path / "a" / "adapter_config.json").write_text('{"r": 8}')
            await replica.adapters.unload_adapter("a")
        answer = await row
    name = "a@2" if changed == "adapter" else "a@1"
    assert answer.json()["choices"][0]["message"]["content"] == f"[{name}] " + "word " * 40
    again = replica.engine.counts().made_tokens - answer.json()["usage"]["completion_tokens"]
    assert again <= 2 if changed == "nothing" else again > 5
    assert replica.share.idle


async def test_a_stream_that_has_begun_never_gives_way(served: Served):
    replica = await served.replica("m", step_base_ms=5, reply="word " * 40)
    await served.gateway("m")
    client = served.openai()
    stream = await client.chat.completions.create(**chat(stream=True), service_tier="flex")
    chunks = [await anext(stream)]
    replica.share._done_s = 1000.0
    replica.share._abort(1)
    chunks += [chunk async for chunk in stream]
    assert replica.share.requeued == 0
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "word " * 40


async def test_a_client_that_goes_leaves_the_replicas_queue(served: Served):
    replica = await served.replica("m", step_base_ms=20, reply="word " * 200)
    await served.gateway("m")
    share = replica.share
    async with served.http() as http:
        rows = [post(http, f"b{number}", "flex") for number in range(6)]
        await until(lambda: share.running + share.waiting == 6)
        for row in rows:
            row.cancel()
        await until(lambda: share.idle)
    await until(lambda: not replica.engine.load().running)
