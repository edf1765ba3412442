"""Streams opened and cut at random leave nothing behind: no descriptor, no task, no request, no object."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from served import Replica, Served, chat, until

from penstock.engines.sim.cache import Block
from penstock.serve.gateway.app import Gateway
from penstock.serve.http import server
from penstock.transport import pool

pytestmark = [pytest.mark.parity("X3"), pytest.mark.full]

STREAMS, CLIENTS = 10_000, 200
IDLE_S = 0.3  # of connections between gateway and replica, after which they end
LIMIT_S = 120.0
STEP = {"step_base_ms": 2, "step_per_request_ms": 0, "max_num_seqs": 128}
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset


@dataclass
class Client:
    """One connection to the gateway, and the chance that decides what becomes of it."""

    chance: random.Random
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def request(self, tokens: int, **more: object) -> bytes:
        body = json.dumps(chat(max_tokens=tokens, ignore_eos=True, **{"stream": True} | more)).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        return head % len(body) + body

    async def pause(self, most_s: float = 0.02) -> None:
        await asyncio.sleep(self.chance.uniform(0, most_s))

    async def cut_in_the_request(self) -> None:
        request = self.request(8)
        self.writer.write(request[: self.chance.randrange(len(request))])
        await self.pause()

    async def cut_before_the_head(self) -> None:
        self.writer.write(self.request(8, stream=self.chance.random() < 0.5))
        await self.pause(0.004)

    async def cut_in_the_stream(self) -> None:
        self.writer.write(self.request(400))
        for _ in range(self.chance.randrange(1, 12)):
            await self.reader.readuntil(b"\n\n")

    async def half_closed(self) -> None:
        self.writer.write(self.request(400))
        await self.pause()
        self.writer.write_eof()
        await self.reader.read()

    async def read_slowly(self) -> None:
        """More than buffers hold, and nothing is read for a while: the gateway stops the stream."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        transport: Any = self.writer.transport
        transport.pause_reading()
        self.writer.write(self.request(150, n=8))
        await self.pause(0.5)
        if self.chance.random() < 0.5:
            transport.resume_reading()
            await self.pause()

    async def sent_ahead(self) -> None:
        """Several requests at once; the first may be answered."""
        self.writer.write(self.request(4) * 3)
        await self.pause(0.05)

    async def finished(self) -> None:
        for _ in range(self.chance.randrange(1, 3)):
            self.writer.write(self.request(3))
            await self.reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")

    async def run(self) -> None:
        """Does one of these, then ends the connection, in order or by a reset."""
        ways: list[Callable[[], Awaitable[None]]] = [
            *(self.cut_in_the_request, self.cut_before_the_head, self.cut_in_the_stream),
            *(self.half_closed, self.read_slowly, self.sent_ahead, self.finished),
        ]
        try:
            await self.chance.choice(ways)()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # where the gateway ended it first
        finally:
            if self.chance.random() < 0.5 and not self.writer.is_closing():
                self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.writer.transport.abort()


async def cut_at_random(served: Served, streams: int, seed: int) -> None:
    """Opens so many connections, `CLIENTS` at a time, each for one way to be cut."""
    chances = iter([random.Random(f"{seed} {number}") for number in range(streams)])

    async def client() -> None:
        for chance in chances:
            await Client(chance, *await asyncio.open_connection("127.0.0.1", served.port.number)).run()

    async with asyncio.TaskGroup() as clients:
        for _ in range(CLIENTS):
            clients.create_task(client())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def objects() -> Counter[str]:
    """Of our own types, and what the event loop has to do."""
    gc.collect()
    found = Counter(type(one).__name__ for one in gc.get_objects() if _is_ours(type(one)))
    found["task"] = len(asyncio.all_tasks())
    return found


def _is_ours(kind: type) -> bool:
    """All but the simulator's prefix cache, which keeps prompts."""
    return str(kind.__module__).startswith(("penstock", "uvicorn", "uvloop")) and kind is not Block


def open_requests(gateway: Gateway, served: Served, *replicas: Replica) -> int:
    """In the gateway, the listeners and the engines, with bytes of bodies and clients' connections."""
    loads = [replica.engine.load() for replica in replicas]
    at_replicas = sum(replica.in_flight for replica in served.table.members("m"))
    in_listeners = sum(len(replica.listener.open_requests) for replica in replicas)
    held = gateway.connections.open + gateway._bodies.used + len(served.line("m"))
    return at_replicas + in_listeners + held + sum(load.running + load.waiting for load in loads)


async def test_ten_thousand_streams_cut_at_random_leave_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 2 * IDLE_S)
    monkeypatch.setattr(pool, "_IDLE_S", IDLE_S)
    gateway = await served.gateway("m")
    replicas = [await served.replica(**STEP) for _ in range(2)]
    await cut_at_random(served, CLIENTS, seed=0)  # what is made once is made now
    await until(lambda: not open_requests(gateway, served, *replicas), LIMIT_S)
    await asyncio.sleep(3 * IDLE_S)
    descriptors_before, objects_before = descriptors(), objects()
    await cut_at_random(served, STREAMS, seed=1)
    await until(lambda: not open_requests(gateway, served, *replicas), LIMIT_S)
    await until(lambda: descriptors() <= descriptors_before, LIMIT_S)
    with contextlib.suppress(AssertionError):
        await until(lambda: objects() <= objects_before, LIMIT_S)
    assert objects() - objects_before == Counter()
