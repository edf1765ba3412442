"""What keys, limits, usage, prices and turns of tenants add to a request in the gateway: `python -m
benchmarks.tenants`.

Two gateways in one process, one with a single key, one with 10,000 keys of 1,000 tenants, take turns: blocks
of requests, each with a random key. Everything is the gateway's own but the socket to the replica, which has
answered before it is asked. CPU time of the thread, so that a busy machine disturbs less; still, compare
within one run. `least more`: between the quickest blocks of each. Bytecodes are what the interpreter ran.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

from benchmarks.table import markdown
from penstock.config import GatewayConfig
from penstock.config.schema.tenants import KeyConfig, hashed
from penstock.serve.fleet.table import Table
from penstock.serve.gateway.app import Gateway
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.tenancy.limits import Periods
from penstock.serve.tenancy.usage import Settlement, Totals
from penstock.transport.address import Address
from penstock.transport.connection import Head
from penstock.transport.link import Hello, LoadReport

KEYS, TENANTS = 10_000, 1_000
BLOCK, COUNTED = 200, 30  # requests
PIECES = 20
_LIMITS = {
    "requests_per_minute": 10**6,
    "tokens_per_minute": 10**9,
    "open_requests": 10**4,
    "tokens_per_month": 10**12,
}
_PROMPT = "What is said here is about a kilobyte of a question. " * 20
_USAGE = (
    b'"usage":{"prompt_tokens":270,"total_tokens":290,"completion_tokens":20,'
    b'"prompt_tokens_details":{"cached_tokens":128}}'
)
_WHOLE = [
    b'{"id":"chatcmpl-1","choices":[{"index":0,"message":{"role":"assistant","content":"Yes."}}],'
    + _USAGE
    + b"}"
]
_EVENT = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":" yes"}}]}\n\n'
_STREAM = [
    *[_EVENT] * PIECES,
    b'data: {"id":"chatcmpl-1","choices":[],' + _USAGE + b"}\n\n",
    b"data: [DONE]\n\n",
]


class _Connection:
    """A replica's, in place of `ReplicaConnection`."""

    exchanges, heard, stream_ended = 1, True, True

    def request(self, head: bytes, *body: bytes | bytearray) -> None:
        streams = b'"stream":true' in body[0]
        self._pieces = list(reversed(_STREAM if streams else _WHOLE))
        kind = b"text/event-stream" if streams else b"application/json"
        self._head = Head(200, [(b"content-type", kind)])

    async def head(self) -> Head:
        return self._head

    async def read(self) -> bytes:
        return self._pieces.pop() if self._pieces else b""

    @property
    def exhausted(self) -> bool:
        return not self._pieces


class _Pool:
    """Its one connection, and no multiplexer."""

    def __init__(self) -> None:
        self.multiplexer, self._connection = self, _Connection()

    async def acquire(self) -> _Connection:
        return self._connection

    def attach(self, connection: _Connection, record: object) -> bytes:
        return b""

    def detach(self, connection: _Connection) -> None:
        pass

    release = detach


def _key(number: int) -> str:
    return f"pk_a-key-of-this-benchmark-{number}"


def _config(*, tenants: bool) -> GatewayConfig:
    if not tenants:
        return GatewayConfig(api_key=_key(0), admin_key=None)
    keys = [
        KeyConfig(tenant=f"t{i % TENANTS}", name=f"k{i}", hash=hashed(_key(i)), limits=_LIMITS)
        for i in range(KEYS)
    ]
    limits = {**_LIMITS, "cost_per_month": 1e6}
    of_tenants = {f"t{i}": {"limits": limits} for i in range(TENANTS)}
    prices = {"m": {"input": 0.15, "cached_input": 0.075, "output": 0.6}}
    return GatewayConfig(api_key=None, admin_key=None, keys=keys, tenants=of_tenants, prices=prices)


async def _settle(settlement: Settlement) -> Totals:
    return Totals(Periods.at(time.time()), {})


async def gateway(*, tenants: bool) -> Gateway:
    """With one replica."""
    table = Table("node")
    made = Gateway(_config(tenants=tenants), [ServedModel("m", 1)], table, settle=_settle)
    table.set_members("m", {"a": Address("a", "node", None, None, None, "")})
    (replica,) = table.members("m")
    table.hello(replica, Hello("m", 32_768))
    table.report(replica, LoadReport())
    pool = _Pool()
    made._links.pool = lambda replica: pool  # type: ignore[method-assign]
    if made._tenants is not None:
        await made._tenants.start()
    return made


def _request(key: str, *, stream: bool) -> tuple[dict[str, Any], bytes]:
    body: dict[str, Any] = {
        "model": "m",
        "max_tokens": 100,
        "messages": [{"role": "user", "content": _PROMPT}],
    }
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    content = json.dumps(body, separators=(",", ":")).encode()
    headers = [(b"host", b"x"), (b"content-type", b"application/json"), (b"accept", b"*/*")]
    headers += [(b"authorization", b"Bearer " + key.encode()), (b"content-length", b"%d" % len(content))]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b""}
    return scope | {"headers": headers, "client": ("127.0.0.1", 9), "root_path": ""}, content


async def _ask(gateway: Gateway, scope: dict[str, Any], content: bytes) -> None:
    messages, statuses = [{"type": "http.request", "body": content}], list[int]()

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: dict[str, Any]) -> None:
        if "status" in message:
            statuses.append(message["status"])

    await gateway(scope, receive, send)
    assert statuses == [200]


def _drawn(keys: int, count: int, draw: random.Random, *, stream: bool) -> list[tuple[dict[str, Any], bytes]]:
    return [_request(_key(draw.randrange(keys)), stream=stream) for _ in range(count)]


async def _timed(gateway: Gateway, keys: int, draw: random.Random, *, stream: bool) -> float:
    """Microseconds of one request."""
    asked = _drawn(keys, BLOCK, draw, stream=stream)
    begun = time.thread_time()
    for one in asked:
        await _ask(gateway, *one)
    return (time.thread_time() - begun) / BLOCK * 1e6


async def _counted(gateway: Gateway, keys: int, *, stream: bool) -> Counter[str]:
    """Bytecodes of a request, by function."""
    found, asked = Counter[str](), _drawn(keys, COUNTED, random.Random(1), stream=stream)
    for one in asked:
        await _ask(gateway, *one)

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            found[f"{frame.f_code.co_filename.rpartition('/penstock/')[2]} {frame.f_code.co_name}"] += 1
        return trace

    sys.settrace(trace)
    for one in asked:
        await _ask(gateway, *one)
    sys.settrace(None)
    return Counter({name: round(count / COUNTED) for name, count in found.items()})


async def measure(rounds: int, functions: int) -> str:
    """A table. functions: of those that tenants make dearer, so many."""
    single, many = await gateway(tenants=False), await gateway(tenants=True)
    draw, lines = random.Random(1), list[tuple[str, ...]]()
    for name, stream, keys in (
        ("whole", False, KEYS),
        ("whole, one key", False, 1),
        (f"stream of {PIECES}", True, KEYS),
    ):
        pairs = [
            (
                await _timed(single, 1, draw, stream=stream),
                await _timed(many, keys, draw, stream=stream),
            )
            for _ in range(rounds + 1)
        ][1:]
        times = [statistics.median(column) for column in zip(*pairs, strict=True)]
        more = statistics.quantiles([two - one for one, two in pairs], n=4)
        least = min(two for _, two in pairs) - min(one for one, _ in pairs)
        codes = [await _counted(single, 1, stream=stream), await _counted(many, keys, stream=stream)]
        counts = (f"{sum(one.values()):,}" for one in codes)
        lines.append((name, *(f"{one:.0f}" for one in (*times, least, more[1], more[0], more[2])), *counts))
        for function, count in (codes[1] - codes[0]).most_common(functions):
            print(f"{count:>6}  {function}")
    for one in (single, many):
        await one.close()
    head = ("us a request", "single key", "tenants", "least more", "more", "25 %", "75 %", "bytecodes")
    return markdown((*head, "with tenants"), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--functions", type=int, default=0, help="print so many that tenants make dearer")
    options = parser.parse_args()
    print(asyncio.run(measure(options.rounds, options.functions)))


if __name__ == "__main__":
    main()
