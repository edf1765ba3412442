"""A gateway that stops: every client gets an answer that it can act on, in the form of the API."""

from __future__ import annotations

import asyncio

from served import Served, chat, until

CHAT = "/v1/chat/completions"
LONG = chat(max_tokens=4000, ignore_eos=True)


async def test_requests_that_wait_for_a_replica_are_told_at_once_to_come_again(served: Served):
    gateway = await served.gateway("m", wait_for_replica_s=3600)
    async with served.http() as http:
        waiting = [asyncio.create_task(http.post(CHAT, json=chat())) for _ in range(2)]
        await until(lambda: len(served.line("m")) == 2)
        gateway.drain()
        waiting.append(asyncio.create_task(http.post(CHAT, json=chat())))
        answers = await asyncio.gather(*waiting)
    for answer in answers:
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "unavailable"
    assert len(served.line("m")) == 0


async def test_requests_that_wait_for_room_go_on_while_it_drains(served: Served):
    gateway = await served.gateway("m", wait_for_replica_s=3600)
    served.table.limit("m", 1)
    await served.replica(step_base_ms=20)
    async with served.http() as http:
        asking = [asyncio.create_task(http.post(CHAT, json=chat(max_tokens=20))) for _ in range(3)]
        await until(lambda: len(served.line("m")) == 2)
        gateway.drain()
        assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * 3


async def test_requests_that_are_cut_at_the_end_of_the_time_for_them_end_as_errors(served: Served):
    gateway = await served.gateway("m")
    replica = await served.replica(step_base_ms=20)
    async with served.http() as http:
        plain = asyncio.create_task(http.post(CHAT, json=LONG))
        await until(lambda: replica.engine.load().running == 1)
        async with http.stream("POST", CHAT, json=LONG | {"stream": True}) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            gateway.drain()
            await served.port.close(grace_s=0.2)
            last = [line async for line in lines if line][-1]
        answer = await plain
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "unavailable"
    assert '"code":"unavailable"' in last
    await until(lambda: replica.engine.load().running == 0)
    assert served.table.leases("m") == 0
