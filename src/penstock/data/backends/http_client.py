"""HTTP to a service: bytes out, a response back, or how far the request came.

Uses the environment's proxies. A service may close an idle connection at the moment it is used again.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import aiohttp

from penstock.data.backends.protocol import Response
from penstock.errors import ConfigError

_CONNECT_S = 10.0
# TCP keep-alive, so that the kernel notices a host that vanished or a router that lost the connection.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
_CONNECT_ERRORS = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, BlockingIOError)
_LOST_ERRORS = (aiohttp.ClientError, ConnectionError)


Body = bytes | Callable[[], aiohttp.FormData]
"""JSON, or what makes a form for each try."""


class ConnectFailed(Exception):
    """No connection: the request was not sent. str: the reason."""


class ConnectionLost(Exception):
    """The connection broke after the request had been sent. str: the reason."""


class HttpClient:
    """A pool of connections to one service. Made on a running loop; the caller closes it."""

    def __init__(
        self,
        headers: Mapping[str, str],
        timeout_s: float | None,
        session_factory: Callable[[], aiohttp.ClientSession] | None,
    ) -> None:
        """headers: of every request. timeout_s: for one request. session_factory: makes a session with
        limits and connections of its own, which is closed with this client.

        Raises: ConfigError when session_factory makes something else.
        """
        given = {name.lower(): value for name, value in headers.items()}
        self._headers = {"content-type": "application/json", **given}
        self._session = _session(timeout_s) if session_factory is None else _made_by(session_factory)
        tracer = _reuse_tracer()
        tracer.freeze()
        self._session.trace_configs.append(tracer)

    async def close(self) -> None:
        await self._session.close()

    async def send(self, method: str, url: str, body: Body | None = None) -> Response:
        """Raises: ConnectFailed, ConnectionLost; TimeoutError after `timeout_s`."""
        was_lost = False
        while True:
            trace = SimpleNamespace(reused=False)
            try:
                return await self._try(method, url, body, trace)
            except _CONNECT_ERRORS as error:
                raise (ConnectionLost if was_lost else ConnectFailed)(_why(error)) from error
            except _LOST_ERRORS as error:
                if not trace.reused:
                    raise ConnectionLost(_why(error)) from error
                was_lost = True  # maybe closed while idle: try other connections, until one is new

    async def _try(self, method: str, url: str, body: Body | None, trace: SimpleNamespace) -> Response:
        form = body() if callable(body) else None
        own = {name: self._headers[name] for name in self._headers if form is None or name != "content-type"}
        request = self._session.request(
            method,
            url,
            data=body if form is None else form,
            headers=own,
            allow_redirects=False,
            trace_request_ctx=trace,
        )
        async with request as answer:
            trace.reused = False  # the service has answered
            return Response(answer.status, await answer.read(), answer.headers)


def _session(timeout_s: float | None) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, socket_factory=_keepalive_socket),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S),
        trust_env=True,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def _made_by(factory: Callable[[], object]) -> aiohttp.ClientSession:
    made = factory()
    if not isinstance(made, aiohttp.ClientSession):
        raise ConfigError(
            f"session_factory returned a {type(made).__name__}; it must return an aiohttp.ClientSession."
        )
    return made


def _keepalive_socket(info: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_ = info
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


def _reuse_tracer() -> aiohttp.TraceConfig:
    async def reused(_session: object, context: Any, _params: object) -> None:
        context.trace_request_ctx.reused = True

    config = aiohttp.TraceConfig()
    config.on_connection_reuseconn.append(reused)
    return config


def _why(error: BaseException) -> str:
    """The reason in a few words, without secrets of the URL."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "there is no such host"
    if isinstance(error, (aiohttp.ClientSSLError, aiohttp.ClientConnectorCertificateError)):
        return "its certificate is not trusted"
    if isinstance(error, asyncio.TimeoutError):
        return f"no connection within {_CONNECT_S:g} s"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the connection was closed"
    if isinstance(error, aiohttp.ClientResponseError):
        return "its answer is not HTTP"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return type(error).__name__
