"""HTTP to one child: requests unchanged, responses as they arrive.

A client that disconnects, a closed stream and `close` end the connection, which ends the request in the
child.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from penstock.engines import foreign

Headers = Mapping[str, str] | Iterable[tuple[str, str]]

BROKEN = (aiohttp.ClientError, ConnectionError)
"""Raised when the child cannot be reached, or breaks off."""

_CONNECT_S = 10.0  # for a listener on this node whose queue is full
_IDLE_S = 1.0  # below servers' idle timeouts of 2 s and more: a request must not meet one
_HEADERS_BYTES = 1 << 16


class Wire:
    """Connections to a child that listens, or will, on `port`."""

    def __init__(self, host: str, port: int, api_key: str) -> None:
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open: set[aiohttp.ClientResponse] = set()
        self._origin = f"http://{host}:{port}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            headers={"authorization": f"Bearer {api_key}"},
            skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            max_line_size=_HEADERS_BYTES,
            max_field_size=_HEADERS_BYTES,
        )

    @asynccontextmanager
    async def request(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        headers: Headers = (),
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """The response, once its head has arrived. target: path and query, quoted as in a request.

        Raises: one of BROKEN, here and while the response is read.
        """
        answer = await self._head(method, self._origin + target, body, headers)
        self._open.add(answer)
        try:
            async with answer:
                yield answer
        except RuntimeError as error:  # aiohttp's, for what `close` has ended
            if not self._closed.done():
                raise
            raise _ended() from error
        finally:
            self._open.discard(answer)

    async def _head(self, method: str, url: str, body: bytes, headers: Headers) -> aiohttp.ClientResponse:
        """The response once its head is here. aiohttp's own `close` does not wake those who wait for one."""
        if self._closed.done():
            raise _ended()

        async def ask() -> aiohttp.ClientResponse:
            return await self._session.request(
                method, url, data=body or None, headers=headers, allow_redirects=False
            )

        asking = asyncio.ensure_future(ask())
        try:
            await asyncio.wait({asking, self._closed}, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            _drop(asking)
            raise
        if not asking.done():
            _drop(asking)
            raise _ended()
        return asking.result()

    async def get(self, path: str, limit_s: float) -> tuple[int, bytes]:
        """Status and body. Raises: one of BROKEN; TimeoutError after `limit_s`."""
        async with asyncio.timeout(limit_s), self.request("GET", path) as answer:
            return answer.status, await answer.read()

    async def post(self, path: str, value: Any) -> tuple[int, bytes]:
        """Status and body of the answer to `value` as JSON. Raises: one of BROKEN."""
        async with self.request("POST", path, msgspec.json.encode(value), JSON) as answer:
            return answer.status, await answer.read()

    async def events(self, path: str, value: Any, request_id: str) -> AsyncGenerator[bytes, None]:
        """Data of each event of the stream that answers `value`, without the final `[DONE]`.

        Raises: the Error that the child answered with; one of BROKEN.
        """
        headers = {**JSON, "x-request-id": request_id}
        async with self.request("POST", path, msgspec.json.encode(value), headers) as answer:
            if answer.status != 200:
                raise foreign.heard(await answer.read(), answer.status)
            async for piece in lines(answer):
                for line in piece.splitlines():
                    if line.startswith(b'data: {"error"'):
                        raise foreign.heard(line)
                    data = line[5:].strip() if line.startswith(b"data:") else b""
                    if data and data != b"[DONE]":
                        yield data

    async def close(self) -> None:
        """Ends every connection, and with it all open requests. Idempotent."""
        if not self._closed.done():
            self._closed.set_result(None)
        for answer in tuple(self._open):
            answer.close()
        await self._session.close()


JSON: Mapping[str, str] = {"content-type": "application/json"}


def _drop(asking: asyncio.Future[aiohttp.ClientResponse]) -> None:
    """Discards the response if it still arrives."""

    def close(asked: asyncio.Future[aiohttp.ClientResponse]) -> None:
        if not asked.cancelled() and asked.exception() is None:
            asked.result().close()

    asking.cancel()
    asking.add_done_callback(close)


def _ended() -> ConnectionResetError:
    return ConnectionResetError("the connections to the child were closed")


async def lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The body as it arrives, in pieces of whole lines."""
    rest: list[bytes] = []  # a line may be as long as an answer
    async for piece in answer.content.iter_any():
        if end := piece.rfind(b"\n") + 1:
            yield b"".join([*rest, piece[:end]])
            rest = []
        rest.append(piece[end:])
    if last := b"".join(rest):
        yield last
