"""An ASGI app on a bound socket: serves both the gateway's public port and a replica's listener."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Generator
from typing import Any, cast

import uvicorn

from penstock.asgi import ASGIApp
from penstock.errors import Unavailable
from penstock.serve.http import limits
from penstock.serve.http.connection_limits import Connections, WorkLimiter
from penstock.serve.http.listener import SocketListener
from penstock.serve.http.port_sharing import PortClaim, claim
from penstock.serve.http.protocol import BoundedProtocol, Config
from penstock.serve.http.sockets import BACKLOG, bind, raise_file_limit
from penstock.serve.http.tls import Certificate
from penstock.transport.address import KEEP_ALIVE_S

_DATE_S = 1.0  # the `Date` of responses is in whole seconds
_POLL_S = 0.05
_SWEEP_S = 1.0


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the process that embeds it, and accepting to `SocketListener`."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()

    def end(self) -> None:
        """`serve` returns once open requests have ended, or the config's time for them is over."""
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        """uvicorn's own looks ten times a second whether to end."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), _DATE_S)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        listeners = [SocketListener(s, self._protocol, cast(Config, self.config)) for s in sockets or ()]
        self.servers = cast(Any, listeners)

    def _protocol(self) -> BoundedProtocol:
        return BoundedProtocol(self.config, self.server_state, self.lifespan.state)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class Port:
    """A listening socket with an app behind it, on the running event loop."""

    def __init__(self, config: Config, sock: socket.socket, claim: PortClaim | None) -> None:
        self._config = config
        self._server = server = _Uvicorn(config)
        self._claim = claim
        self._name = sock.getsockname()
        self._task = asyncio.create_task(server.serve(sockets=[sock]))
        public = config.connections is not None or config.certificate is not None
        self._sweeps = asyncio.create_task(self._sweep()) if public else None

    @classmethod
    async def open(
        cls,
        app: ASGIApp,
        sock: socket.socket,
        claim: PortClaim | None = None,
        connections: Connections | None = None,
        certificate: Certificate | None = None,
        requests_per_turn: int | None = None,
        is_shared: bool = False,
    ) -> Port:
        """Listens on the bound `sock` and owns it from now on, with the claim of one that shares it.

        connections: bounds those of clients; the app accepts requests through their `DirectWriter`. Without
        it clients are trusted. certificate: for HTTPS. requests_per_turn: new requests that are read in one
        turn of the event loop, in place of `limits.REQUESTS_PER_TURN`. is_shared: several processes listen to
        `sock`.
        """
        config = Config(
            cast(Any, app),
            loop="none",
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",  # a bound method would be taken for an ASGI 2 app
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            backlog=BACKLOG,
        )
        config.connections, config.certificate = connections, certificate
        config.work = WorkLimiter(requests_per_turn or limits.REQUESTS_PER_TURN)
        config.is_shared = is_shared
        sock.listen(BACKLOG)  # connections wait in the backlog from here on, none is refused
        port = cls(config, sock, claim)
        try:
            while not port._server.started:
                port.check()
                await asyncio.sleep(0)
        except BaseException:  # also when cancelled
            port._task.cancel()
            port._end_sweeps()
            raise
        return port

    @property
    def number(self) -> int:
        """The TCP port, also when 0 was asked for."""
        return self._name[1]

    def check(self) -> None:
        """Raises: Unavailable when nothing listens any more."""
        if self._task.done():
            raise Unavailable("The listening socket is closed.") from self._task.exception()

    async def close(self, grace_s: float = 20.0, linger_s: float = 0.0) -> None:
        """Stops accepting, lets open requests finish within `grace_s`, cuts the rest.

        linger_s: connections without a request stay open for so long after the last answer. A client that
        sends its next request just then is answered, with `Connection: close`.
        """
        deadline = time.monotonic() + grace_s
        for server in self._server.servers:
            server.close()
        if self._claim is not None:
            self._claim.close()
        self._config.draining = True
        await self._linger(linger_s, deadline)
        self._config.timeout_graceful_shutdown = cast(int, max(0.0, deadline - time.monotonic()))
        self._server.end()
        try:
            await self._task
        finally:
            self._end_sweeps()

    def _end_sweeps(self) -> None:
        if self._sweeps is not None:
            self._sweeps.cancel()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            if self._config.certificate is not None:
                self._config.certificate.refresh()
            self._cut_late()

    def _cut_late(self) -> None:
        """Not in `_sweep`, whose variables would hold the last connection and its request until the next."""
        before = asyncio.get_running_loop().time() - limits.HEAD_S
        for connection in list(cast("set[BoundedProtocol]", self._server.server_state.connections)):
            if connection.since <= before:
                connection.cut("timeout")

    async def _linger(self, linger_s: float, deadline: float) -> None:
        connections = cast("set[BoundedProtocol]", self._server.server_state.connections)
        until = time.monotonic() + linger_s
        await asyncio.sleep(min(_POLL_S, linger_s))  # until those accepted last are among them
        while connections and (now := time.monotonic()) < min(until, deadline):
            if any(connection.is_answering for connection in connections):
                until = now + linger_s
            await asyncio.sleep(_POLL_S)


async def serve_on(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    group: str | None = None,
    is_shared: bool = True,
    connections: Connections | None = None,
    certificate: Certificate | None = None,
) -> Port:
    """Opens the public port.

    connections, certificate: see `Port.open`.
    group: gateways of the same group, with the same `host`, listen to the same socket. is_shared: at the same
    time, not only while one succeeds another.
    Raises: ConfigError when the port is taken or the host is not one of this machine's.
    """
    raise_file_limit()
    if group is None:
        return await Port.open(app, bind(host, port), connections=connections, certificate=certificate)
    sock, held = await claim(host, port, group)
    return await Port.open(app, sock, held, connections, certificate, is_shared=is_shared)
