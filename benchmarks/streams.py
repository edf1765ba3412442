"""Streams over replicas that are killed all the time: what their clients see, and what it costs the gateway.

    python -m benchmarks.streams [--streams 2000] [--seconds 60] [--kill-every 2] [--replicas 4]
        [--gateways 1] [--json FILE]

Gateways, simulated replicas and the clients in processes of their own. Every client asks for one stream
after the other and compares each with the answer that it must be. A killed replica has a successor at once.
A stream that two kills hit ends with an error, as intended; every other one must be whole. Exit code 1 when
one is not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.command import say
from benchmarks.fleet import NODE, Child, Replica
from benchmarks.table import markdown
from benchmarks.workload import MODEL_ID
from penstock.config import GatewayConfig
from penstock.serve.fleet.table import Table
from penstock.serve.gateway import app
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.http.server import serve_on
from penstock.transport.address import Address

_PROMPT = "streams "
_SIZE = re.compile(rb"content-length: (\d+)")
_TEXT = re.compile(rb'"content":"([^"]*)"')


class Clients(Child):
    """So many clients in a process; `outcomes` waits for their end."""

    module = "benchmarks.streams"

    def outcomes(self) -> dict[str, int]:
        return json.loads(self.line())


class Gateway(Child):
    """One that is told which replicas there are."""

    module = "benchmarks.streams"

    def set_members(self, replicas: Collection[Replica]) -> None:
        """Returns once it has them in its table."""
        self.write(json.dumps([replica.said for replica in replicas]))
        self.line()

    def figures(self) -> dict[str, Any]:
        self.write("null")
        return json.loads(self.line())


async def _serve(streams: int) -> None:
    """Prints its port, then answers lines: a list of replicas by a line, null by its figures."""
    logging.getLogger("penstock").setLevel(logging.CRITICAL)  # a line for each stream that two kills hit
    table, model = Table(NODE), ServedModel(MODEL_ID, 1, max_ongoing_requests=10**6)
    gateway = app.Gateway(GatewayConfig(max_connections_per_address=2 * streams), [model], table)
    await gateway.start()
    port = await serve_on(gateway, "127.0.0.1", 0, connections=gateway.connections)
    print(json.dumps({"port": port.number}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        said: list[dict[str, Any]] | None = json.loads(line)
        if said is None:
            print(json.dumps(_figures(gateway)), flush=True)
        else:
            members = map(Address.from_metadata, said)
            table.set_members(MODEL_ID, {address.replica_id: address for address in members})
            print(json.dumps({}), flush=True)


def _figures(gateway: app.Gateway) -> dict[str, Any]:
    figures = gateway._figures()
    counted = {key: value for family in figures.counters.values() for key, value in family.items() if value}
    return {
        "streams": {
            " ".join([name.removeprefix("penstock_").removesuffix("_total"), *dict(labels).values()]): value
            for (name, labels), value in counted.items()
            if "stream" in name and not name.endswith("_created")
        },
        "ready": len(gateway._table.ready(MODEL_ID)),
        "reserved": gateway._dispatch._records.reserved,
        "closed": dict(gateway.connections.counts),
        "pauses": [list(counts) for counts in figures.latencies["penstock_stream_pause_seconds"].values()],
    }


async def _ask(ports: list[int], streams: int, tokens: int, seconds: float) -> None:
    """Prints a line when it begins, and one with the counts of outcomes."""
    print(json.dumps({}), flush=True)
    body = {"model": MODEL_ID, "messages": [{"role": "user", "content": _PROMPT * 4}]}
    content = json.dumps(body | {"stream": True, "ignore_eos": True, "max_tokens": tokens}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content)
    outcomes, whole, until = Counter[str](), set[bytes](), time.monotonic() + seconds

    async def client(number: int) -> None:
        try:
            await asks(number)
        except (OSError, asyncio.IncompleteReadError) as error:
            outcomes[type(error).__name__] += 1

    async def asks(number: int) -> None:
        await asyncio.sleep(number / 500)  # connections a second
        port = ports[number % len(ports)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
        while time.monotonic() < until:
            writer.write(head + content)
            answer = await reader.readuntil(b"\r\n\r\n")
            if size := _SIZE.search(answer):  # it failed before its first byte
                answer = await reader.readexactly(int(size[1]))
            else:
                answer = await reader.readuntil(b"\r\n0\r\n\r\n")
            if b"[DONE]" in answer:
                text = b"".join(_TEXT.findall(answer))
                whole.add(text)
                outcomes["whole"] += 1
            else:
                outcomes["two kills" if b"replicas failed while" in answer else "error"] += 1
        writer.close()

    await asyncio.gather(*map(client, range(streams)))
    outcomes["different texts"] = len(whole)
    print(json.dumps(outcomes), flush=True)


async def _run(options: argparse.Namespace) -> dict[str, Any]:
    chance = random.Random(0)
    sizes = {"max_num_seqs": options.streams, "max_model_len": 1024, "kv_tokens": 1024 * options.streams}
    speed = {"step_base_ms": options.step_ms, "step_per_request_ms": 0, "enable_prefix_caching": False}
    members = [await _replica(**sizes, **speed) for _ in range(options.replicas)]
    gateways = [Gateway("gateway", streams=options.streams) for _ in range(options.gateways)]

    def tell() -> None:
        for gateway in gateways:
            gateway.set_members(members)

    tell()
    while any(one.figures()["ready"] < len(members) for one in gateways):  # noqa: ASYNC110 - not here
        await asyncio.sleep(0.01)
    asked = {"streams": options.streams, "tokens": options.tokens, "seconds": options.seconds}
    ports = [gateway.said["port"] for gateway in gateways]
    clients = await asyncio.to_thread(Clients, "clients", ports=ports, **asked)
    kills, memory, began = 0, list[int](), time.monotonic()
    ending, starts = asyncio.create_task(asyncio.to_thread(clients.outcomes)), set[asyncio.Task[None]]()
    telling = asyncio.Lock()

    async def replace(killed: Replica) -> None:
        killed.stop()
        successor = await _replica(**sizes, **speed)
        members[members.index(killed)] = successor
        async with telling:
            await asyncio.to_thread(tell)

    while not ending.done():
        await asyncio.wait({ending}, timeout=options.kill_every)
        memory.append(max(gateway.spent().memory for gateway in gateways) >> 20)
        if time.monotonic() - began < options.seconds:
            living = [replica for replica in members if psutil.pid_exists(replica.pid)]
            if len(living) > 1 and len(starts) < len(members) - 1:
                kills += 1
                task = asyncio.create_task(replace(chance.choice(living)))
                starts.add(task)
                task.add_done_callback(starts.discard)
    spent = sum(gateway.spent().cpu_s for gateway in gateways)
    await asyncio.gather(*starts)
    figures = [gateway.figures() for gateway in gateways]
    for child in (clients, *gateways, *members):
        child.stop()
    return {
        "streams at a time": options.streams,
        "kills": kills,
        **(await ending),
        **sum((Counter(each["streams"]) for each in figures), Counter[str]()),
        "memory of the largest gateway, MiB (first, most, last)": [memory[0], max(memory), memory[-1]],
        "reserved for records at the end, bytes": [each["reserved"] for each in figures],
        "connections that gateways closed": [each["closed"] for each in figures],
        "CPU of gateways, s": round(spent, 1),
        "pause, p50 and p99 at most, s": _quantiles(
            [counts for each in figures for counts in each["pauses"]]
        ),
    }


async def _replica(**options: Any) -> Replica:
    return await asyncio.to_thread(Replica, "sim", **options)


def _quantiles(histograms: list[list[float]]) -> list[float]:
    from penstock.metrics import PAUSE

    *counts, _ = map(sum, zip(*histograms, strict=True)) if histograms else [0.0]
    ends, total = [*PAUSE.bounds, float("inf")], sum(counts)
    return [
        next((end for i, end in enumerate(ends) if sum(counts[: i + 1]) >= share * total), 0.0)
        for share in (0.5, 0.99)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--streams", type=int, default=2000, help="open at a time")
    add("--seconds", type=float, default=60.0)
    add("--kill-every", type=float, default=2.0, help="seconds")
    add("--replicas", type=int, default=4)
    add("--gateways", type=int, default=1)
    add("--tokens", type=int, default=8, help="of each stream")
    add("--step-ms", type=float, default=500.0, help="time of each token")
    add("--json", type=Path, default=None, metavar="FILE", help="write everything to this file")
    options = parser.parse_args()
    found = uvloop.run(_run(options))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    print(markdown(["what", "figure"], [[name, str(value)] for name, value in found.items()]))
    errors = ("error", "ConnectionResetError", "IncompleteReadError")
    failed = any(found.get(name) for name in errors) or found["different texts"] != 1
    if failed:
        say("Streams ended with an error, or with different texts.")
    return int(bool(failed))


if __name__ == "__main__":
    if (run := {"clients": _ask, "gateway": _serve}.get(sys.argv[1] if sys.argv[1:] else "")) is not None:
        from penstock.processes import lifeline

        lifeline.tie_to(os.getppid())
        uvloop.run(run(**json.loads(sys.argv[2])))
    else:
        sys.exit(main())
