"""One replica of a fleet as batch asks it: at its own listener, by Unix socket and over the network."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from served import NODE, Replica, Served, until

from penstock.data.backends.http_client import ConnectFailed, ConnectionLost
from penstock.data.backends.replica import ReplicaClient
from penstock.transport import link

SHORT = b'{"model": "m", "prompt": "hello", "max_tokens": 3}'
LONG = b'{"model": "m", "prompt": "hello", "max_tokens": 4000, "ignore_eos": true}'
PATH = "/v1/completions"


@asynccontextmanager
async def member(
    replica: Replica, node: str = NODE, changed: Callable[[], None] = bool
) -> AsyncIterator[ReplicaClient]:
    made = ReplicaClient(replica.address, node, "batch-1", changed)
    try:
        await until(lambda: made.ready or made.lost)
        yield made
    finally:
        await made.close()


async def test_a_replica_is_asked_by_its_unix_socket(served: Served):
    async with member(await served.replica(join=False)) as asked:
        assert asked.hello.model_id == "m"
        assert (await asked.send(PATH, SHORT, None)).status == 200


async def test_a_replica_on_another_node_is_asked_over_the_network(served: Served):
    replica = await served.replica(join=False)
    await replica.listener.sockets.listen_on_network()
    async with member(replica, node="another") as asked:
        assert (await asked.send(PATH, SHORT, None)).status == 200


async def test_a_replica_that_does_not_listen_there_is_lost_at_once(served: Served):
    async with member(await served.replica(join=False), node="another") as asked:
        assert asked.lost
        with pytest.raises(ConnectFailed):
            await asked.send(PATH, SHORT, None)


async def test_an_adapter_is_asked_for_by_name(served: Served, tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    lora = {"dynamic_lora_loading_path": str(tmp_path)}
    async with member(await served.replica(join=False, lora=lora)) as asked:
        assert asked.takes_adapters
        heard = await asked.send(PATH, SHORT, "a")
        assert b"[a@" in heard.body


async def test_its_load_and_what_was_sent_since_decide_how_much_it_wants(served: Served):
    replica = await served.replica(join=False, step_base_ms=5.0)
    async with member(replica) as asked:
        assert asked.available_slots() == 16
        asking = [asyncio.create_task(asked.send(PATH, LONG, None)) for _ in range(16)]
        await asyncio.sleep(0)
        assert asked.available_slots() == 0
        await until(lambda: asked.load().running == 16)
        assert asked.available_slots() == 16
        for task in asking:
            task.cancel()
        await until(lambda: replica.engine.load().running == 0)


async def test_what_others_run_there_is_seen(served: Served):
    replica = await served.replica(join=False, step_base_ms=5.0)
    async with member(replica) as one, member(replica) as two:
        asking = asyncio.create_task(one.send(PATH, LONG, None))
        await until(lambda: two.load().running == 1)
        asking.cancel()


async def test_a_killed_process_cuts_what_is_in_it_and_is_lost(served: Served):
    told: list[bool] = []
    process = await served.process(join=False, step_base_ms=5.0)
    async with member(process, changed=lambda: told.append(True)) as asked:
        await asked.send(PATH, SHORT, None)
        asking = [asyncio.create_task(asked.send(PATH, LONG, None)) for _ in range(50)]
        await until(lambda: asked.load().running == 50)
        process.kill()
        await asyncio.wait(asking, timeout=10)
        assert {type(task.exception()) for task in asking} == {ConnectionLost}
        await until(lambda: asked.lost)
        assert told
        assert asked.available_slots() == 0


async def test_a_silent_replica_loses_its_rows_and_gets_none_until_it_speaks_again(
    served: Served, monkeypatch
):
    monkeypatch.setattr(link, "SILENCE_S", 1.5)
    process = await served.process(join=False, step_base_ms=5.0)
    async with member(process) as asked:
        asking = asyncio.create_task(asked.send(PATH, LONG, None))
        await until(lambda: asked.load().running == 1)
        os.kill(process.process.pid, signal.SIGSTOP)
        with pytest.raises(ConnectionLost):
            await asking
        assert not asked.ready
        os.kill(process.process.pid, signal.SIGCONT)
        await until(lambda: asked.ready)
        assert not asked.lost
        assert (await asked.send(PATH, SHORT, None)).status == 200


async def test_a_dead_engine_says_that_its_rows_were_interrupted(served: Served):
    replica = await served.replica(join=False, step_base_ms=5.0)
    async with member(replica) as asked:
        asking = asyncio.create_task(asked.send(PATH, LONG, None))
        await until(lambda: asked.load().running == 1)
        replica.engine.die()
        heard = await asking
        assert (heard.status, heard.headers["x-penstock-retry"]) == (503, "interrupted")
        await until(lambda: asked.lost)


async def test_a_draining_replica_wants_nothing_and_finishes_what_it_has(served: Served):
    replica = await served.replica(join=False, step_base_ms=5.0)
    async with member(replica) as asked:
        some = json.dumps({"model": "m", "prompt": "x", "max_tokens": 200, "ignore_eos": True}).encode()
        asking = asyncio.create_task(asked.send(PATH, some, None))
        await until(lambda: asked.load().running == 1)
        draining = asyncio.create_task(replica.listener.drain(20))
        await until(lambda: not asked.ready)
        assert (asked.lost, asked.available_slots()) == (False, 0)
        assert (await asking).status == 200
        await draining
        assert (await asked.send(PATH, SHORT, None)).headers["x-penstock-retry"] == "untouched"
