"""Nothing outlives its owner, and nobody waits for the dead."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import msgspec
import psutil
import pytest
from backend_contract import CHAT, row
from dying import FOUND_S, LONG
from enginetest import MODEL_ID, SEATS, Served, listening, vllm_config
from tests.waiting import until

from penstock.data.backends.in_process import InProcessEngine
from penstock.data.backends.protocol import RowInterrupted
from penstock.data.rows.request import RowRequest
from penstock.engine import Engine
from penstock.engines.vllm.engine import VLLMEngine
from penstock.errors import BadRequest, EngineDead
from penstock.transport import continuation

ROWS = 20
BODY = {"model": MODEL_ID, "prompt": "water", "stream": True} | LONG


@pytest.mark.parity("D2")
async def test_a_killed_core_ends_streams_and_rows_and_batch_starts_another():
    """An engine of its own, which it kills, for all facts: batch's, which starts another one after it."""
    others = set(psutil.Process().children())
    own = InProcessEngine(vllm_config(max_num_seqs=SEATS, kv_cache_memory_bytes=1 << 27))
    try:
        await own.start()
        (core,) = set(psutil.Process().children()) - others
        assert own._started is not None
        async with listening(own._started.engine.app()) as http:
            doomed = Served(own._started.engine, http)
            interrupted = await lose(core, doomed, own)
            await refuses(doomed)
        await own.start()
        await goes_on(interrupted, own)
        answer = await own.send(row(CHAT, messages=[{"role": "user", "content": "What is Penstock?"}]))
        assert answer.status == 200
        assert json.loads(answer.body)["usage"]["prompt_tokens_details"] is not None, "batch asks for them"
        await deafen(own._started.engine)
    finally:
        await own.stop()


async def lose(core: psutil.Process, doomed: Served, own: InProcessEngine) -> RowRequest:
    """Kills it under rows, a stream of each kind and an answer that is not streamed, as by handle.

    All end with the reason, and not an older one. Returns a row with its tokens.
    """
    with pytest.raises(BadRequest, match="no_such_method"):
        await doomed.engine.control.collective_rpc("no_such_method")
    more = {"logprobs": True, "return_token_ids": True, "temperature": 2.0}
    by_app = row(CHAT, messages=[{"role": "user", "content": "water"}], **more, **LONG)
    asked = [row(prompt="water", **LONG), by_app] * (ROWS // 2)
    rows = [asyncio.create_task(own.send(one)) for one in asked]
    await until(lambda: own.load().running - own.load().unseen == ROWS)
    *_, last = own._requests  # by the application
    async with (
        aclosing(doomed.engine.generate("water", LONG)) as deltas,
        doomed.http.stream("POST", "/v1/completions", json=BODY) as answer,
    ):
        await anext(deltas)
        lines = answer.aiter_lines()
        await anext(lines)
        whole = asyncio.create_task(doomed.http.post("/v1/completions", json=BODY | {"stream": False}))
        await until(lambda: own.load().running == ROWS + 3)
        await until(lambda: own._requests[last].since(17))
        core.kill()
        assert "SIGKILL" in await doomed.engine.wait_dead()
        with pytest.raises(EngineDead):
            _ = [delta async for delta in deltas]
        events = [line async for line in lines if line]
    assert '"engine_dead"' in events[-1]
    assert ((await whole).status_code, whole.result().json()["error"]["code"]) == (503, "engine_dead")
    ended = await asyncio.gather(*rows, return_exceptions=True)
    assert {type(end) for end in ended} == {RowInterrupted}
    made = ended[-1].made  # pyright: ignore[reportAttributeAccessIssue]
    return msgspec.structs.replace(by_app, made=made)


async def goes_on(interrupted: RowRequest, own: InProcessEngine) -> None:
    """In the next engine. Drawn anew, the tokens would be others."""
    assert interrupted.made is not None
    groups = continuation.tokens_of(interrupted.made)
    made = [token for group in groups for one in group for token in one.token_ids]
    assert len(made) > 16
    shorter = interrupted.body.replace(b'"max_tokens": 1900', b'"max_tokens": %d' % (len(made) + 5))
    answer = await own.send(msgspec.structs.replace(interrupted, body=shorter))
    body = json.loads(answer.body)
    assert (answer.status, body["usage"]["completion_tokens"]) == (200, len(made) + 5)
    assert body["choices"][0]["token_ids"][: len(made)] == made


async def deafen(engine: Engine) -> None:
    """What no front sends ends the thread that takes requests, and with it the core, at once."""
    assert isinstance(engine, VLLMEngine)
    assert engine._llm is not None
    client = engine._llm.engine_core
    await client._send_input_message((b"no kind of request",), client.core_engine)
    died = await asyncio.wait_for(engine.wait_dead(), FOUND_S)
    assert "takes requests" in died


async def refuses(doomed: Served) -> None:
    with pytest.raises(EngineDead):
        await doomed.engine.check_health()
    with pytest.raises(EngineDead):
        await anext(doomed.engine.generate("water", {}))
    refused = await doomed.http.post("/v1/completions", json=BODY)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_dead"
    assert (await doomed.http.get("/health")).status_code == 503
