"""Policies behind a real gateway: where requests really go."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from served import Served, chat, until

from penstock.asgi import Receive, Scope, Send
from penstock.serve.gateway.catalogue import ServedModel

pytestmark = pytest.mark.parity("S20")

LONG = "It was a dark and stormy night. " * 100


class Named:
    """A replica that answers with its name, once it is let."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked = 0
        self.open = asyncio.Event()
        self.open.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked += 1
        await self.open.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self.name.encode()})


async def fleet(served: Served, policy: str, count: int = 4, **card) -> list[Named]:
    await served.gateway(ServedModel("m", 1, routing_policy=policy, **card))
    replicas = [Named(f"replica-{i}") for i in range(count)]
    for replica in replicas:
        await served.app(replica)
    return replicas


async def post(http: httpx.AsyncClient, said: dict, **headers: str) -> str:
    answer = await http.post("/v1/chat/completions", json=said, headers=headers)
    assert answer.status_code == 200
    return answer.text


def talk(name: str, turns: int) -> dict:
    """The so-many-th request of a conversation."""
    messages = [{"role": "user", "content": f"I am {name}. {LONG}"}]
    for i in range(turns):
        messages += [
            {"role": "assistant", "content": f"Answer {i}."},
            {"role": "user", "content": f"And {i}?"},
        ]
    return {"model": "m", "messages": messages}


def picks(text: str) -> dict[str, float]:
    """Outcome by outcome, from the text of /metrics."""
    lines = [line for line in text.splitlines() if line.startswith("penstock_picks_total{")]
    return {line.split('outcome="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


async def test_a_conversations_turns_go_to_the_same_replica_by_default(served: Served):
    await fleet(served, ServedModel("m", 1).routing_policy)
    async with served.http() as http:
        for name in ("Ann", "Bob", "Eve"):
            assert len({await post(http, talk(name, turn)) for turn in range(8)}) == 1
        assert picks((await http.get("/metrics")).text) == {"balance": 3, "affinity": 21}


async def test_real_prefix_caches_are_hit_by_every_turn_but_the_first(served: Served):
    await served.gateway("m")
    for _ in range(4):
        await served.replica(enable_prompt_tokens_details=True, reply="Yes.")
    client = served.openai()
    cached = []
    for turn in range(4):
        answer = await client.chat.completions.create(**talk("Ann", turn))
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    await client.close()
    assert cached[0] == 0
    assert min(cached[1:]) > 700


async def test_a_conversation_goes_on_elsewhere_when_its_replica_leaves(served: Served):
    replicas = await fleet(served, "prefix_affinity", 2)
    async with served.http() as http:
        first = await post(http, talk("Ann", 0))
        address = list(served.members["m"].values())[[r.name for r in replicas].index(first)]
        served.remove("m", address)
        assert await post(http, talk("Ann", 1)) != first


async def test_a_conversation_stays_where_it_went_when_its_replica_was_killed(served: Served):
    await served.gateway("m")
    replicas = [await served.process(reply=reply) for reply in ("one", "two")]
    client = served.openai()

    async def ask(turn: int) -> str | None:
        return (await client.chat.completions.create(**talk("Ann", turn))).choices[0].message.content

    first = await ask(0)
    replicas[0 if first == "one" else 1].kill()
    went_on = [await ask(turn) for turn in (1, 2, 3)]
    await client.close()
    assert went_on == 3 * ["two" if first == "one" else "one"]


async def test_a_session_is_kept_by_header_or_user(served: Served):
    await fleet(served, "session_affinity", session_header="x-chat")
    async with served.http() as http:
        by_header = {await post(http, chat(f"{i}"), **{"x-chat": "talk-7"}) for i in range(8)}
        by_user = {await post(http, chat(f"{i}", user="ann")) for i in range(8)}
        others = {await post(http, chat("x", user=f"user {i}")) for i in range(40)}
    assert len(by_header) == len(by_user) == 1
    assert len(others) == 4


async def test_an_adapter_keeps_to_its_replica(served: Served):
    await fleet(served, "adapter_affinity", adapter_slots=4)
    async with served.http() as http:
        where = {
            adapter: {await post(http, chat(f"{i}") | {"model": f"m:{adapter}"}) for i in range(5)}
            for adapter in map(str, range(16))  # of six, one in 32 times all had one home
        }
    assert all(len(replicas) == 1 for replicas in where.values())
    assert len({next(iter(replicas)) for replicas in where.values()}) > 1


async def test_who_waits_goes_to_the_first_replica_that_has_room_wherever_its_prefix_lies(served: Served):
    replicas = await fleet(served, "prefix_affinity", 2, max_ongoing_requests=1)
    async with served.http() as http:
        ann = await post(http, talk("Ann", 0))
        for replica in replicas:
            replica.open.clear()
        held = [asyncio.create_task(post(http, talk(name, 0))) for name in ("Bob", "Eve")]
        await until(lambda: all(replica.asked for replica in replicas))
        waiting = asyncio.create_task(post(http, talk("Ann", 1)))
        await until(lambda: len(served.line("m")) == 1)
        freed = next(replica for replica in replicas if replica.name != ann)
        freed.open.set()
        assert await waiting == freed.name
        for replica in replicas:
            replica.open.set()
        await asyncio.gather(*held)
        assert picks((await http.get("/metrics")).text)["queue"] == 1
