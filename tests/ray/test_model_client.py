"""A model by `ModelClient`, as a user's deployment asks it: answers survive the replica that gives them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

import pytest
from tests.ray.clients import events
from tests.ray.zoo import Zoo
from tests.waiting import until

from penstock.serve import ModelClient

pytestmark = pytest.mark.parity("S33", "X4")


def about(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


async def test_streams_go_on_when_their_replica_dies(zoo: Zoo, caplog: pytest.LogCaptureFixture):
    client, came = ModelClient(zoo.servers), Counter[str]()

    async def ask(text: str) -> str:
        groups: list[list[str]] = []
        async for group in client.chat(about(text, stream=True, max_tokens=400)):
            groups.append(group)
            came[text] += 1
        return "".join(one["choices"][0]["delta"].get("content") or "" for one in events(groups))

    texts = [" ".join(f"{number}-{word}" for word in range(200)) for number in range(8)]
    pids = await asyncio.to_thread(zoo.pids)
    try:
        with caplog.at_level(logging.INFO, "penstock.serve.gateway.relay"):
            asking = [asyncio.create_task(ask(text)) for text in texts]
            await until(lambda: len(came) == len(texts))
            table = (await client._opened()).gateway._table
            busy = next(replica.id for replica in table if replica.in_flight)
            zoo.kill(busy, pids[busy])
            assert await asyncio.gather(*asking) == texts
        assert "goes on after" in caplog.text
    finally:
        await client.close()
        await asyncio.to_thread(zoo.whole)


async def test_it_answers_as_handles_do(zoo: Zoo):
    client = ModelClient(zoo.servers.options(stream=True))
    try:
        answers = [one async for one in client.chat(about("hello there"))]
        assert answers[0].choices[0].message.content == "hello there"
        (refused,) = [one async for one in client.chat(about("hello", model="nobody"))]
        assert refused.error.code == "model_not_found"
        (many,) = [one async for one in client.completions({"prompt": "hi", "stream": True, "n": 0})]
        assert "n" in str(many[0].error.message)
        with pytest.raises(AttributeError, match="no 'sleep', only chat, "):
            client.sleep({})
    finally:
        await client.close()
        await client.close()
    (counted,) = [one async for one in client.tokenize({"prompt": "again"})]
    assert counted.count
    await client.close()
