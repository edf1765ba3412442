"""Limits and queues: what waits, what is refused, in which order the waiting go."""

import asyncio
import time

import httpx
from served import Served, chat, until

from penstock.serve.gateway.catalogue import ServedModel


class Gate:
    """A replica that holds each request until it is let go."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.open = asyncio.Event()

    async def __call__(self, scope, receive, send) -> None:
        self.entered.append(dict(scope["headers"])[b"x-request-id"].decode())
        await self.open.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def post(http: httpx.AsyncClient, name: str = "r") -> asyncio.Task[httpx.Response]:
    request = http.post("/v1/chat/completions", json=chat(), headers={"x-request-id": name})
    return asyncio.create_task(request)


async def test_a_replica_never_holds_more_than_its_limit_and_the_rest_wait_in_order(served: Served):
    await served.gateway(ServedModel("m", 1, max_ongoing_requests=1))
    gate = Gate()
    await served.app(gate)
    async with served.http() as http:
        requests = []
        for name in ("a", "b", "c"):
            requests.append(post(http, name))
            await until(lambda: len(served.line("m")) + len(gate.entered) == len(requests))
        assert gate.entered == ["a"]
        gate.open.set()
        await asyncio.gather(*requests)
    assert gate.entered == ["a", "b", "c"]


async def test_over_the_queue_is_429_with_retry_after(served: Served):
    await served.gateway(ServedModel("m", 1, max_ongoing_requests=1, max_queued_requests=1))
    gate = Gate()
    await served.app(gate)
    async with served.http() as http:
        admitted = [post(http), post(http)]
        await until(lambda: len(served.line("m")) == 1 and gate.entered)
        refused = await post(http)
        gate.open.set()
        statuses = [(await request).status_code for request in admitted]
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "overloaded"
    assert statuses == [200, 200]


async def test_without_replica_a_request_waits_and_is_served(served: Served):
    await served.gateway("m")
    async with served.http() as http:
        request = post(http)
        await until(lambda: len(served.line("m")) == 1)
        await served.replica(reply="at last")
        answer = await request
    assert answer.json()["choices"][0]["message"]["content"] == "at last"


async def test_without_replica_for_too_long_is_503_with_retry_after(served: Served):
    await served.gateway("m", wait_for_replica_s=0.2)
    begun = time.monotonic()
    async with served.http() as http:
        answer = await post(http)
    assert time.monotonic() - begun >= 0.2
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "unavailable"


async def test_waiting_for_room_is_ended_by_the_deadline_not_by_the_replica_limit(served: Served):
    await served.gateway(
        ServedModel("m", 1, max_ongoing_requests=1), wait_for_replica_s=0.1, request_timeout_s=1.0
    )
    gate = Gate()
    await served.app(gate)
    async with served.http() as http:
        answers = await asyncio.gather(post(http), post(http))
    assert [answer.status_code for answer in answers] == [504, 504]


async def test_requests_of_another_gateway_count_towards_the_limit(served: Served):
    card = ServedModel("m", 1, max_ongoing_requests=1)
    await served.gateway(card)
    gate = Gate()
    listener = await served.app(gate)
    other = Served()
    try:
        await other.gateway(card)
        other.add("m", listener.address)
        await other.until_ready("m", listener.address)
        async with served.http() as http, other.http() as http_there:
            there = post(http_there, "there")
            await until(lambda: [r.elsewhere for r in served.table.ready("m")] == [1])
            here = post(http, "here")
            await until(lambda: len(served.line("m")) == 1)
            gate.open.set()
            await asyncio.gather(here, there)
    finally:
        await other.close()
    assert gate.entered == ["there", "here"]


async def test_two_replicas_share_the_load(served: Served):
    await served.gateway("m")
    first, second = Gate(), Gate()
    await served.app(first)
    await served.app(second)
    async with served.http() as http:
        requests = [post(http, str(i)) for i in range(20)]
        await until(lambda: len(first.entered) + len(second.entered) == 20)
        first.open.set()
        second.open.set()
        await asyncio.gather(*requests)
    assert min(len(first.entered), len(second.entered)) >= 8
