"""The load generator of the benchmarks: what it counts, and that no bad answer passes for a good one."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from benchmarks.load import Generator, Load
from benchmarks.workload import Workload
from served import until

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not shutil.which("cc"), reason="the load generator needs a C compiler"),
]

OPENING = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def chunked(*parts: bytes) -> bytes:
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks


def sized(body: bytes) -> bytes:
    return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


GOOD = chunked(OPENING, TOKEN, TOKEN, TOKEN, DONE) + b"0\r\n\r\n"


@asynccontextmanager
async def serving(write: Callable[[asyncio.StreamWriter], object], *, close: bool) -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                result = write(writer)
                if asyncio.iscoroutine(result):
                    await result
                await writer.drain()
                if close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def load(port: int, streams: int = 2) -> Load:
    run = Generator(port, Workload(Path("x"), "uni", 3), streams=streams, warmup_s=0.0, seconds=0.3)
    return await asyncio.to_thread(run.result)


async def test_good_streams_count_by_their_tokens() -> None:
    async with serving(lambda writer: writer.write(GOOD), close=False) as port:
        seen = await load(port)
    assert not seen.failures
    assert seen.figures["requests_all"] > 2
    assert seen.figures["good_events_all"] == 3 * seen.figures["requests_all"]
    assert seen.tokens_per_event == 1


async def test_events_that_come_in_pieces_count_once() -> None:
    async def in_pieces(writer: asyncio.StreamWriter) -> None:
        for at in range(0, len(GOOD), 7):
            writer.write(GOOD[at : at + 7])
            await writer.drain()
            await asyncio.sleep(0)

    async with serving(in_pieces, close=False) as port:
        seen = await load(port)
    assert not seen.failures
    assert seen.figures["good_events_all"] == 3 * seen.figures["requests_all"] > 0


async def test_merged_events_are_reckoned_by_the_tokens_asked_for() -> None:
    merged = sized(OPENING + TOKEN + DONE)
    async with serving(lambda writer: writer.write(merged), close=False) as port:
        seen = await load(port)
    assert not seen.failures
    assert seen.tokens_per_event == 3


async def test_a_server_that_closes_after_each_answer_is_good() -> None:
    body = HEAD + b"connection: close\r\n\r\n" + OPENING + TOKEN + DONE
    async with serving(lambda writer: writer.write(body), close=True) as port:
        seen = await load(port)
    assert not seen.failures
    assert seen.figures["requests_all"] > 2


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (chunked(OPENING, TOKEN) + b"0\r\n\r\n", "truncated"),
        (chunked(OPENING, TOKEN), "truncated"),
        (chunked(TOKEN, b'data: {"error":{"message":"x"}}\n\n', DONE) + b"0\r\n\r\n", "error_event"),
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\n{}", "status"),
        (b"HTTP/1.1 200 OK\r\ncontent-le", "closed"),
    ],
)
async def test_a_bad_answer_is_a_failed_request(answer: bytes, failure: str) -> None:
    async with serving(lambda writer: writer.write(answer), close=True) as port:
        seen = await load(port)
    assert list(seen.failures) == [failure]
    assert seen.figures["requests_all"] == 0


async def test_nobody_listening_is_a_failed_request(free_port: int) -> None:
    seen = await load(free_port)
    assert list(seen.failures) == ["refused"]


async def test_stopped_early_it_tells_what_it_saw() -> None:
    asked = []

    def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(GOOD)
        asked.append(writer)

    async with serving(answer, close=False) as port:
        run = Generator(port, Workload(Path("x"), "uni", 3), streams=1, warmup_s=0.0, seconds=60.0)
        await until(lambda: len(asked) > 3)
        run.stop()
        seen = await asyncio.to_thread(run.result)
    assert seen.figures["requests_all"] > 0
    assert seen.figures["seconds"] < 60
