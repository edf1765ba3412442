"""Answers of a real vLLM behind a gateway whose engine core is killed: another replica gives the rest."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import Any

import httpx
import pytest
import pytest_asyncio
from continuing import PARSED, PLAIN, Kind, told
from enginetest import MODEL_ID, Served, serve, vllm_config
from served import NODE, until
from served import Served as Fleet
from tests.models import model

from penstock.layers.generation import Generation
from penstock.serve.replica.inbound.listener import Listener
from penstock.serve.replica.inbound.status_link import StatusSource
from penstock.tiers import HEADER
from penstock.transport import link

pytestmark = [
    pytest.mark.full,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parity("X4"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

LONG = {"max_tokens": 300}
OF_PLAIN = ("greedy completion", "seeded", "penalties, seeded", "held back for a stop string", "logprobs")
OF_PLAIN += ("logprobs and stop strings", "parts of characters")
KINDS: dict[str, Kind] = PARSED | {
    f"plain: {name}": (path, body | LONG) for name, (path, body) in PLAIN.items() if name in OF_PLAIN
}


@pytest_asyncio.fixture(loop_scope="session")
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet()
    await fleet.gateway(MODEL_ID)
    yield fleet
    await fleet.close()


async def join(fleet: Fleet, served: Served) -> Listener:
    """Has a replica with this engine."""
    engine = served.engine
    facts = StatusSource(
        load=engine.load,
        hello=lambda: link.Hello(MODEL_ID, engine.max_model_len(), engine.kv_tokens()),
        version="v",
    )
    app = Generation(engine.app(), engine)
    listener = await Listener.open(app, facts, node_id=NODE, node_host=None, wait_dead=engine.wait_dead)
    fleet._stops.append(listener.close)
    fleet.add(MODEL_ID, listener.address)
    await fleet.until_ready(MODEL_ID, listener.address)
    return listener


WHOLE = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "water"}]},
    "/v1/completions": {"prompt": "water"},
    "/v1/responses": {"input": "water", "max_output_tokens": 300},
    "/v1/messages": {"messages": [{"role": "user", "content": "water"}]},
    "/v1/generate": {"prompt": "water", "sampling_params": LONG | {"ignore_eos": True}},
}


async def whole_answer(http: httpx.AsyncClient, path: str, tier: str) -> tuple[int, bytes]:
    """Status and body of a request that is not streamed."""
    more = {} if "sampling_params" in WHOLE[path] else LONG | {"ignore_eos": True}
    asked = {"model": MODEL_ID} | more | WHOLE[path]
    answer = await http.post(path, json=asked, headers={HEADER: tier})
    return answer.status_code, answer.content


async def answer(http: httpx.AsyncClient, kind: Kind, came: list[int], number: int) -> Any:
    """What a stream says. came: how many pieces of each stream there are."""
    path, body = kind
    pieces: list[bytes] = []
    asked = {"model": MODEL_ID, "stream": True} | body
    async with http.stream("POST", path, json=asked, headers={"x-request-id": f"n{number}"}) as response:
        assert response.status_code == 200, await response.aread()
        async for piece in response.aiter_bytes():
            pieces.append(piece)
            came[number] += 1
    # One engine may have known the prompt from another test.
    cached = rb'("(?:cached|created_cache|cache_creation_input|cache_read_input)_tokens":)\d+'
    text = re.sub(cached, rb"\g<1>0", b"".join(pieces))
    for random in (
        rb'"created(?:_at)?":(\d+)',
        rb'"((?:resp|msg|fc|rs|call|chatcmpl-tool)[-_]\w+)"',
        rb'"signature":"(\w+)"',
    ):
        for found in set(re.findall(random, text)):
            text = text.replace(found, b"1")
    return told([text])


def unlike(again: dict[str, list[Any]], whole: dict[str, list[Any]]) -> dict[str, Any]:
    """What only one of them says, by choice; whole lists where only the order differs."""
    found: dict[str, Any] = {}
    for at in {**again, **whole}:
        one, other = again.get(at, []), whole.get(at, [])
        if one != other:
            alone = [item for item in one if item not in other], [item for item in other if item not in one]
            found[at] = alone if any(alone) else (one, other)
    return found


async def test_a_killed_core_changes_no_stream(assistant: Served, fleet: Fleet):
    """A second engine, to be killed."""
    config = vllm_config(
        str(model("assistant")),
        reasoning_parser="deepseek_r1",
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        enable_prompt_tokens_details=True,
        kv_cache_memory_bytes=1 << 26,
    )
    names = list(KINDS)
    steady = await join(fleet, assistant)
    async with fleet.http() as http, serve(config) as other:
        came = [0] * len(names)
        whole = [await answer(http, KINDS[name], came, i) for i, name in enumerate(names)]
        known = set(names)  # near ties of the others depend on what is computed beside them
        for _ in range(3):
            more = await asyncio.gather(*(answer(http, KINDS[name], came, i) for i, name in enumerate(names)))
            known -= {name for i, name in enumerate(names) if more[i] != whole[i]}
        assert len(known) > 12
        doomed = await join(fleet, other)
        fleet.remove(MODEL_ID, steady.address)
        came = [0] * len(names)
        asking = [asyncio.create_task(answer(http, KINDS[name], came, i)) for i, name in enumerate(names)]
        unread = [
            asyncio.create_task(whole_answer(http, path, tier))
            for path in WHOLE
            for tier in ("default", "flex")
        ]
        await until(lambda: min(came) > 0)
        await until(lambda: other.engine.load().running >= len(unread))
        then = came[:]  # one without a token would begin anew
        await until(lambda: max(now - before for now, before in zip(came, then, strict=True)) > 2)
        fleet.add(MODEL_ID, steady.address)
        await fleet.until_ready(MODEL_ID, steady.address)
        ended = sum(task.done() for task in (*asking, *unread))
        core: Any = other.engine._core  # pyright: ignore[reportAttributeAccessIssue]
        os.kill(core.pid, signal.SIGKILL)
        again = await asyncio.gather(*asking)
        assert [(status, body) for status, body in await asyncio.gather(*unread) if status != 200] == []
        figures = (await http.get("/metrics")).text
        fleet.remove(MODEL_ID, doomed.address)
    wrong = {
        name: (again[i], whole[i]) for i, name in enumerate(names) if again[i] != whole[i] and name in known
    }
    assert wrong == {}, {name: unlike(*both) for name, both in wrong.items()}
    continued = re.findall(r"^penstock_streams_continued_total\S* (\S+)", figures, re.M)
    assert sum(map(float, continued)) >= len(names) + len(unread) - ended - 2 > 12
