"""An ASGI app on a bound socket: serves both the gateway's public port and a replica's listener."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import time
from collections.abc import Generator
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.engine import ASGIApp
from penstock.errors import ConfigError, Unavailable
from penstock.serve.outlet import EXTENSION, Outlet
from penstock.serve.sharing import Family, Mark, claim

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""How long an idle connection is kept; whoever reuses connections to us must let go of them earlier."""

_BACKLOG = 2048
_FEW_FILES, _MANY_FILES = 4096, 65_536
_MOST_HEAD_BYTES = 64 * 1024
_UNSENT_BYTES = (
    64 * 1024
)  # in the kernel, for one connection; by itself it takes up to 4 MiB for a slow client


_LOOK_S = 0.05


class _Config(uvicorn.Config):
    draining = False


class _Protocol(HttpToolsProtocol):
    """Bounds what a client may send before its request's head is complete: the parser itself does not.

    Gives each answer its `Outlet`. While the port closes, an answer that begins is its connection's last one.
    """

    _head_bytes: int | None = None  # of the head that is being read
    _outlets: tuple[Outlet, ...] = ()  # of the answer under way, and of those that are due after it

    @property
    def is_answering(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        return cycle is not None and not cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNSENT_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for outlet in self._outlets:
            outlet.lost()

    def resume_writing(self) -> None:
        super().resume_writing()
        for outlet in self._outlets:
            outlet.resume()

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        super().on_headers_complete()
        if cast(_Config, self.config).draining:
            self.cycle.keep_alive = False
        outlet = Outlet(self.cycle, self.loop)
        self.cycle.transport = cast(asyncio.Transport, outlet)
        self.scope["extensions"] = {EXTENSION: outlet}  # pyright: ignore[reportGeneralTypeIssues]
        waiting = tuple(outlet for outlet in self._outlets if not outlet.over) if self.pipeline else ()
        self._outlets = (*waiting, outlet)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The request's headers are larger than {_MOST_HEAD_BYTES} bytes.")


class _Uvicorn(uvicorn.Server):
    """Leaves signals to whoever runs the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class Port:
    """A listening socket with an app behind it, on the running event loop."""

    def __init__(self, config: _Config, sock: socket.socket, mark: Mark | None) -> None:
        self._config = config
        self._server = server = _Uvicorn(config)
        self._mark = mark
        self._name = sock.getsockname()
        self._task = asyncio.create_task(server.serve(sockets=[sock]))

    @classmethod
    async def open(cls, app: ASGIApp, sock: socket.socket, mark: Mark | None = None) -> Port:
        """Listens on the bound `sock` and owns it from now on, with the mark of those who share it.

        interface="asgi3" is said because uvicorn takes a bound method for an ASGI 2 app.
        """
        config = _Config(
            cast(Any, app),
            loop="none",
            http=_Protocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            backlog=_BACKLOG,
        )
        sock.listen(_BACKLOG)  # connections wait in the backlog from here on, none is refused
        port = cls(config, sock, mark)
        while not port._server.started:
            port.check()
            await asyncio.sleep(0)
        return port

    @property
    def number(self) -> int:
        """The TCP port, also when 0 was asked for."""
        return self._name[1]

    def check(self) -> None:
        """Raises: Unavailable when nothing listens any more."""
        if self._task.done():
            raise Unavailable("The listening socket is closed.")

    async def close(self, grace_s: float = 20.0, linger_s: float = 0.0) -> None:
        """Stops accepting, lets open requests finish within `grace_s`, cuts the rest.

        linger_s: connections without a request are kept for so long after the last answer. A client that just
        sends its next one is answered, and told with it to ask elsewhere.
        """
        deadline = time.monotonic() + grace_s
        for server in self._server.servers:
            server.close()
        if self._mark is not None:
            self._mark.close()
        self._config.draining = True
        await self._linger(linger_s, deadline)
        self._config.timeout_graceful_shutdown = cast(int, max(0.0, deadline - time.monotonic()))
        self._server.should_exit = True
        await self._task

    async def _linger(self, linger_s: float, deadline: float) -> None:
        connections = cast("set[_Protocol]", self._server.server_state.connections)
        until = time.monotonic() + linger_s
        while connections and (now := time.monotonic()) < min(until, deadline):
            if any(connection.is_answering for connection in connections):
                until = now + linger_s
            await asyncio.sleep(_LOOK_S)


async def serve_on(app: ASGIApp, host: str, port: int, *, family: Family | None = None) -> Port:
    """Opens the public port.

    family: gateways that give the same one share the port, and hand it on to each other. Linux would let
    strangers share it, too, in silence; here they are refused.
    Raises: ConfigError when the port is taken or the host is not one of this machine's.
    """
    _take_files()
    if family is None:
        return await Port.open(app, bind(host, port))
    sock, mark = await claim(port, family, lambda shared: bind(host, port, reuse_port=shared))
    return await Port.open(app, sock, mark)


def _take_files() -> None:
    """As many open files as this process may have: an open request takes one, and one to its replica."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < _FEW_FILES:
        log.warning(
            "The limit on open files is %d: at most %d requests can be open at once. Raise it: ulimit -n %d.",
            hard,
            hard // 2,
            _MANY_FILES,
        )


def check_free(host: str, port: int) -> None:
    """Raises: ConfigError when something listens on the port, whatever its socket options."""
    bind(host, port).close()


def bind(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A TCP socket bound to `host` and `port`, not listening yet.

    Raises: ConfigError that says what is wrong with them.
    """
    try:
        family, kind, protocol, _, name = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on host {host!r}: {error}. Give an address of this machine."
        ) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _bound_unsent(sock)
        sock.bind(name)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {error.strerror}. "
            "Stop the program that uses it, or choose another port."
        ) from error
    return sock


def _bound_unsent(sock: socket.socket) -> None:
    """For every connection that `sock` will accept. It does not bound what is on its way to a fast client."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # Linux, macOS
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
