"""What one client can do to others: gaps in a stream beside it, short requests that wait, memory it takes.

    python -m benchmarks.attacks [--engine sim,vllm] [--only NAME,NAME] [--seconds 8] [--json FILE]

`penstock serve` runs with one replica and a key. A stream and short requests go on, while another process
sends one kind of request as fast as it is taken. "nothing" and "a busy core" are controls. Gaps are those
that a client sees; "added" is the longest gap less the longest of the control "nothing", which is to stay
below 50 ms without a key and below 250 ms with one; "machine late" is how late a process that only sleeps was
woken at worst; memory is the gateway's, at most, beyond what it had.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import re
import resource
import socket
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml

from benchmarks import processes
from benchmarks.command import add_common, choices, cleaned_up, refuse_strangers, say
from benchmarks.contestants import Contestant, Running, penstock_serve
from benchmarks.table import markdown
from benchmarks.workload import MODEL_ID, Workload

KEY = "fake-key"
ENGINES = ("sim", "vllm")
_GATEWAY = re.compile(r"ray::ServeReplica:.*:LLMRouter")
_CHAT = "/v1/chat/completions"
_STEP_MS = 20.0
_EACH_S, _LOOK_S, _AFTERWARDS_S = 0.25, 0.05, 1.0
_NAP_S = 0.002
_MANY = 3000
_LIMIT_S = 120.0

Send = Callable[[int], None]
"""Sends something once to the port."""


@dataclass
class Seen:
    """gaps_s: between pieces of the stream. late_s: a process that only sleeps was woken so late, at worst.
    waits_s: of short requests. memory_mib: of the gateway.
    """

    gaps_s: list[float] = field(default_factory=list[float])
    late_s: float = 0.0
    waits_s: list[float] = field(default_factory=list[float])
    failed: list[str] = field(default_factory=list[str])
    memory_mib: float = 0.0


def _sleep(late: Connection, over: Event) -> None:
    """In a process of its own: tells how late it was woken at worst."""
    worst_s = 0.0
    while not over.is_set():
        due = time.monotonic() + _NAP_S
        time.sleep(_NAP_S)
        worst_s = max(worst_s, time.monotonic() - due)
    late.send(worst_s)


def _raw(*parts: bytes, hold: bool = True) -> Send:
    """One connection; what comes back is read to its end when it is held."""

    def send(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection, suppress(OSError):
            for part in parts:
                connection.sendall(part)
            while hold and connection.recv(1 << 20):
                pass

    return send


def _open(count: int, begin: bytes) -> Send:
    """Many connections that stay open, and say no more than that."""

    def send(port: int) -> None:
        opened: list[socket.socket] = []
        for _ in range(count):
            with suppress(OSError):
                opened.append(socket.create_connection(("127.0.0.1", port), timeout=5))
                opened[-1].sendall(begin)
        time.sleep(1)
        for connection in opened:
            connection.close()

    return send


def _post(path: str, body: bytes, kind: str = "application/json", key: str = KEY) -> Send:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: {kind}\r\n"
    return _raw(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode(), body)


def _ask(path: str = _CHAT, **fields: Any) -> Send:
    says = {"messages": _SAYS} if "chat" in path else {}
    return _post(path, json.dumps({"model": MODEL_ID, "max_tokens": 4, **says, **fields}).encode())


def _schema(count: int) -> Send:
    schema = {"properties": {f"a{number}": {"type": "string"} for number in range(count)}}
    return _ask(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
_CHUNKED = _HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n"
_ANNOUNCED = _HEAD + b"authorization: Bearer fake-key\r\ncontent-length: 67108864\r\n\r\n"
_COLONS = f"GET /v1/models/{':' * 60_000} HTTP/1.1\r\nauthorization: Bearer {KEY}\r\n\r\n".encode()
_SAYS = [{"role": "user", "content": "Hello"}]
_ONE_BYTE_CHUNKS = b"1\r\n \r\n"
_SMALL_CHUNKS = _HEAD + b"transfer-encoding: chunked\r\n\r\n" + _ONE_BYTE_CHUNKS * 43_000
_KEY_CHUNKS = _HEAD + b"authorization: Bearer fake-key\r\ntransfer-encoding: chunked\r\n\r\n"
_UPLOAD = (
    b"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer fake-key\r\n"
    b"content-type: multipart/form-data; boundary=B\r\ncontent-length: 400000000\r\n\r\n"
)
_EMPTY_PART = b'--B\r\ncontent-disposition: form-data; name="%b"\r\n\r\n\r\n' % (b"x" * 3900)


WITHOUT_KEY: dict[str, Callable[[], Send]] = {
    "trailers without end": lambda: _raw(_CHUNKED, b"a: b\r\n" * (10 << 20)),
    "requests sent ahead": lambda: _raw(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 14_000),
    "heads of 60 KB": lambda: _raw((b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * 60_000 + b"\r\n\r\n") * 100),
    "heads of many fields": lambda: _raw(b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 10_000_000),
    "3000 idle connections": lambda: _open(_MANY, b""),
    "3000 half heads of 50 KB": lambda: _open(_MANY, b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * 50_000),
    "bodies of 60 MB": lambda: _post(_CHAT, b"x" * (60 << 20), key="wrong"),
    "256 heads with chunks of a byte": lambda: _open(256, _SMALL_CHUNKS),
    "3000 requests at once": lambda: _open(_MANY, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"),
}
WITH_KEY: dict[str, Callable[[], Send]] = {
    "a name of colons": lambda: _raw(_COLONS, hold=False),
    "64 announced bodies": lambda: _open(64, _ANNOUNCED),
    "8 million chunks of a byte": lambda: _raw(_KEY_CHUNKS, *[_ONE_BYTE_CHUNKS * 100_000] * 80),
    "an upload of empty parts": lambda: _raw(_UPLOAD, *[_EMPTY_PART * 1_000] * 100),
    "a form of boundaries": lambda: _post(_CHAT, b"--a" * (20 << 20), "multipart/form-data; boundary=a"),
    "60 MB of numbers": lambda: _post(_CHAT, b'{"messages": [' + b"1," * (30 << 20) + b"1]}"),
    "7 MB of numbers": lambda: _post(_CHAT, b'{"messages": [' + b"1," * 3_500_000 + b"1]}"),
    "deep JSON": lambda: _post(_CHAT, b'{"messages": ' + b"[" * (20 << 20)),
    "6 MB to truncate": lambda: _ask("/v1/completions", prompt="ab " * (2 << 20), truncate_prompt_tokens=9),
    "50 MB to tokenize": lambda: _ask("/tokenize", prompt="Hello " * 8_000_000),
    "1 MB to tokenize": lambda: _ask("/tokenize", prompt="Hello " * 170_000),
    "20000 properties": lambda: _schema(20_000),
    "2000 properties": lambda: _schema(2_000),
    "100000 choices": lambda: _ask(structured_outputs={"choice": [f"a {n}" for n in range(100_000)]}),
    "5000 choices": lambda: _ask(structured_outputs={"choice": [f"a {n}" for n in range(5_000)]}),
    "n = 16384": lambda: _ask("/v1/completions", prompt="Hello", n=16_384),
    "n = 512": lambda: _ask("/v1/completions", prompt="Hello", n=512),
    "2000 chats in one": lambda: _ask("/v1/chat/completions/batch", messages=[_SAYS] * 2_000),
    "500 chats in one": lambda: _ask("/v1/chat/completions/batch", messages=[_SAYS] * 500),
}


def _nothing(port: int) -> None:
    time.sleep(1)


def _busy(port: int) -> None:
    end = time.monotonic() + 1
    while time.monotonic() < end:
        pass


KINDS: dict[str, Callable[[], Send]] = {
    "nothing": lambda: _nothing,
    "a busy core": lambda: _busy,
    **WITHOUT_KEY,
    **WITH_KEY,
}


def _attack(name: str, port: int, seconds: float) -> None:
    """In a process of its own."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    send, until = KINDS[name](), time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(OSError):
            send(port)


def main() -> int:
    options = _options()
    found: dict[str, dict[str, Seen]] = {}
    with cleaned_up():
        for engine in options.engine:
            refuse_strangers(options.shared)
            found[engine] = _measured(engine, options)
    for engine, seen in found.items():
        quiet = max(seen["nothing"].gaps_s, default=0.0) if "nothing" in seen else 0.0
        rows = [_row(name, one, quiet) for name, one in seen.items()]
        print(f"### {engine}\n\n{markdown(_TITLES, rows)}\n")
    if options.json:
        told = {engine: {name: asdict(one) for name, one in seen.items()} for engine, seen in found.items()}
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


_TITLES = [
    "what is sent",
    "key",
    "gap p50 ms",
    "longest ms",
    "machine late ms",
    "added",
    "longest wait ms",
    "failed",
    "memory MiB",
]


def _row(name: str, seen: Seen, quiet_s: float = 0.0) -> list[str]:
    added_ms = 1000 * (max(seen.gaps_s) - quiet_s) if seen.gaps_s else 0.0
    too_long = added_ms > (250 if name in WITH_KEY else 50)
    return [
        name,
        "yes" if name in WITH_KEY else "no",
        f"{1000 * statistics.median(seen.gaps_s):.0f}" if seen.gaps_s else "-",
        f"{1000 * max(seen.gaps_s):.0f}" if seen.gaps_s else "-",
        f"{1000 * seen.late_s:.0f}",
        f"{max(0.0, added_ms):.0f}{' (too long)' if too_long else ''}",
        f"{1000 * max(seen.waits_s):.0f}" if seen.waits_s else "-",
        f"{len(seen.failed)} of {len(seen.failed) + len(seen.waits_s)}",
        f"{seen.memory_mib:.0f}",
    ]


def _measured(engine: str, options: argparse.Namespace) -> dict[str, Seen]:
    """One life of `penstock serve`."""
    workload = Workload(options.model, "uni", options.tokens)
    key = {"PENSTOCK_API_KEY": KEY}
    running = Running.start(Contestant(engine, engine, _command(engine), environment=lambda _: key), workload)
    found: dict[str, Seen] = {}
    try:
        running.first_token(workload)
        (gateway,) = (p for p in running.processes() if _GATEWAY.search(processes.title(p)))
        for name in options.only or KINDS:
            found[name] = asyncio.run(_beside(name, running.port, gateway, options.seconds))
            say(f"    {engine}: {', '.join(_row(name, found[name]))} {found[name].failed[:1]}")
    finally:
        running.stop()
        running.forget()
    return found


def _command(engine: str) -> Callable[[Workload, int, Path], list[str]]:
    def command(workload: Workload, port: int, folder: Path) -> list[str]:
        words = penstock_serve(workload, port, folder)
        if engine == "sim":
            config = folder / "bench.yaml"
            one: dict[str, Any] = yaml.safe_load(config.read_text())
            config.write_text(yaml.safe_dump(one | {"llm_engine": "sim", "engine_kwargs": _SIM}))
        return words

    return command


_SIM = {"step_base_ms": _STEP_MS, "max_model_len": 100_000}


async def _beside(name: str, port: int, gateway: psutil.Process, seconds: float) -> Seen:
    seen, over = Seen(), asyncio.Event()
    spawn = multiprocessing.get_context("spawn")
    attacker = spawn.Process(target=_attack, args=(name, port, seconds))
    late, told = spawn.Pipe(duplex=False)
    awake = spawn.Event()
    sleeper = spawn.Process(target=_sleep, args=(told, awake))
    sleeper.start()
    headers = {"authorization": f"Bearer {KEY}"}
    before = gateway.memory_info().rss
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(_LIMIT_S)) as http:
        url = f"http://127.0.0.1:{port}/v1/completions"
        beside = [
            asyncio.create_task(work) for work in (_stream(http, url, seen), _short(http, url, seen, over))
        ]
        attacker.start()
        while attacker.is_alive():
            seen.memory_mib = max(seen.memory_mib, (gateway.memory_info().rss - before) / 2**20)
            await asyncio.sleep(_LOOK_S)
        await asyncio.sleep(_AFTERWARDS_S)
        over.set()
        beside[0].cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        awake.set()
        seen.late_s = await asyncio.to_thread(late.recv)
        sleeper.join()
    return seen


async def _stream(http: aiohttp.ClientSession, url: str, seen: Seen) -> None:
    body = {"model": MODEL_ID, "prompt": "Hello", "max_tokens": 900, "ignore_eos": True, "stream": True}
    while True:
        async with http.post(url, json=body) as answer:
            last: float | None = None
            async for _ in answer.content.iter_any():
                now = time.monotonic()
                if last is not None:
                    seen.gaps_s.append(now - last)
                last = now
            if answer.status != 200:
                seen.failed.append(f"stream {answer.status}")
                await asyncio.sleep(_EACH_S)


async def _short(http: aiohttp.ClientSession, url: str, seen: Seen, over: asyncio.Event) -> None:
    body = {"model": MODEL_ID, "prompt": "Hello", "max_tokens": 1}
    while not over.is_set():
        began = time.monotonic()
        try:
            async with http.post(url, json=body) as answer:
                said = await answer.text()
            if answer.status == 200:
                seen.waits_s.append(time.monotonic() - began)
            else:
                seen.failed.append(f"{answer.status} {said[:200]}")
        except (aiohttp.ClientError, TimeoutError) as error:
            seen.failed.append(repr(error))
        await asyncio.sleep(_EACH_S)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description=_FIRST_LINE)
    parser.add_argument("--engine", type=choices(ENGINES), default=list(ENGINES), help="sim, vllm, or both")
    parser.add_argument("--only", type=choices(list(KINDS)), default=None, help=", ".join(KINDS))
    parser.add_argument("--seconds", type=float, default=8.0, help="of each kind")
    add_common(parser)
    return parser.parse_args()


_FIRST_LINE = (__doc__ or "").partition("\n")[0]

if __name__ == "__main__":
    sys.exit(main())
