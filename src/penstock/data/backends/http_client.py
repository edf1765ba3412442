"""HTTP to somebody else's service: bytes out, an answer back, and how far a request came that got none.

The environment's proxies are used. The service may close an idle connection just when one is used.
"""

from __future__ import annotations

import asyncio
import email.utils
import math
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp

from penstock.data.backends.protocol import Response

_CONNECT_S = 10.0
# A host that vanished without a word, or a router that forgot us, is noticed by the kernel.
_WATCHED = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
_UNREACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, BlockingIOError)
_LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError)


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """An answer. headers: by names in lower case, if not in any."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    def to_response(self) -> Response:
        """For the window."""
        return Response(self.status, self.body, _retry_after_s(self.headers))


class ConnectFailed(Exception):
    """No connection: nobody has seen the request. str: why."""


class ConnectionLost(Exception):
    """The connection broke after the request had been sent. str: why."""


class HttpClient:
    """Kept-alive connections to one place. Made on a running loop; whoever has it closes it."""

    def __init__(self, headers: Mapping[str, str] | None = None, timeout_s: float | None = None) -> None:
        """headers: of every request. timeout_s: for one of them."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, socket_factory=_watched_socket),
            headers={"content-type": "application/json", **(headers or {})},
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S),
            trust_env=True,
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[_noting_reuse()],
        )

    async def get(self, url: str) -> HttpResponse:
        """Raises: NotReached, Cut, TimeoutError."""
        return await self._ask("GET", url, None, {})

    async def post(self, url: str, body: bytes, headers: Mapping[str, str] | None = None) -> HttpResponse:
        """Raises: NotReached; Cut; TimeoutError after `timeout_s`."""
        return await self._ask("POST", url, body, headers or {})

    async def close(self) -> None:
        await self._session.close()

    async def _ask(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]
    ) -> HttpResponse:
        cut = False
        while True:
            noted = SimpleNamespace(reused=False)
            try:
                return await self._try(method, url, body, headers, noted)
            except _UNREACHED as error:
                raise (ConnectionLost if cut else ConnectFailed)(_why(error)) from error
            except _LOST as error:
                if not noted.reused:
                    raise ConnectionLost(_why(error)) from error
                cut = True  # for its idleness, maybe. The next connection may be as old, at last one is new.

    async def _try(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], noted: SimpleNamespace
    ) -> HttpResponse:
        asking = self._session.request(
            method, url, data=body, headers=headers, allow_redirects=False, trace_request_ctx=noted
        )
        async with asking as answer:
            noted.reused = False  # it has been heard
            return HttpResponse(answer.status, await answer.read(), answer.headers)


def _watched_socket(info: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_ = info
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _WATCHED:
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


def _noting_reuse() -> aiohttp.TraceConfig:
    async def reused(_session: object, context: Any, _params: object) -> None:
        context.trace_request_ctx.reused = True

    config = aiohttp.TraceConfig()
    config.on_connection_reuseconn.append(reused)
    return config


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds, or a date, as HTTP has it; milliseconds, as OpenAI's services have it."""
    if (milliseconds := _number(headers.get("retry-after-ms"))) is not None:
        return milliseconds / 1e3
    given = headers.get("retry-after", "")
    if (seconds := _number(given)) is not None:
        return seconds
    try:
        return max(0.0, email.utils.parsedate_to_datetime(given).timestamp() - time.time())
    except (ValueError, TypeError):  # neither
        return None


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "none")
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def _why(error: BaseException) -> str:
    """In a few words, without what a URL may hold that is secret."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "there is no such host"
    if isinstance(error, (aiohttp.ClientSSLError, aiohttp.ClientConnectorCertificateError)):
        return "its certificate is not trusted"
    if isinstance(error, asyncio.TimeoutError):
        return f"no connection within {_CONNECT_S:g} s"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the connection was closed"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return type(error).__name__
