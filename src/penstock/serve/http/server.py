"""An ASGI app on a bound socket: serves both the gateway's public port and a replica's listener."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from email.utils import formatdate
from typing import Any, cast

from uvicorn.server import ServerState

from penstock.asgi import ASGIApp
from penstock.errors import Unavailable
from penstock.serve.http import limits
from penstock.serve.http.connection_limits import Connections, WorkLimiter
from penstock.serve.http.listener import SocketListener
from penstock.serve.http.protocol import BoundedProtocol, Config
from penstock.serve.http.sockets import BACKLOG, PortClaim, bind, claim, raise_file_limit
from penstock.serve.http.tls import Certificate
from penstock.transport.address import KEEP_ALIVE_S

log = logging.getLogger(__name__)

_TICK_S = 1.0  # the `Date` of responses is in whole seconds
_POLL_S = 0.05


class Port:
    """A listening socket with an app behind it, on the running event loop."""

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        claim: PortClaim | None = None,
        connections: Connections | None = None,
        certificate: Certificate | None = None,
        requests_at_once: int | None = None,
        is_shared: bool = False,
        is_own: bool = False,
    ) -> None:
        """Listens on the bound `sock` and owns it from now on, with the claim of one that shares it.

        connections: bounds those of clients; the app accepts requests through their `DirectWriter`. Without
        it clients are trusted. certificate: for HTTPS. requests_at_once: new requests that are read in one
        iteration of the event loop, in place of `limits.REQUESTS_AT_ONCE`. is_shared: several processes
        listen to `sock`. is_own: gateways send their clients' heads there, with fields of their own.
        """
        self._config = config = Config(
            cast(Any, app),
            ws="none",
            interface="asgi3",  # a bound method would be taken for an ASGI 2 app
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        config.load()
        config.connections, config.certificate = connections, certificate
        config.work = WorkLimiter(requests_at_once or limits.REQUESTS_AT_ONCE)
        config.is_shared = is_shared
        if is_own:
            config.head_bytes += limits.ADDED_BYTES
            config.fields += limits.ADDED_FIELDS
        self._state = ServerState()
        self._claim = claim
        self._name = sock.getsockname()
        sock.listen(BACKLOG)  # connections wait in the backlog from here on, none is refused
        self._listener = SocketListener(sock, lambda: BoundedProtocol(config, self._state, {}), config)
        self._ticking = asyncio.create_task(self._tick())

    @property
    def number(self) -> int:
        """The TCP port, also when 0 was asked for."""
        return self._name[1]

    def check(self) -> None:
        """Raises: Unavailable when nothing listens any more."""
        if self._listener.is_closed:
            raise Unavailable("The listening socket is closed.")

    async def close(self, grace_s: float = 20.0, linger_s: float = 0.0) -> None:
        """Stops accepting, lets open requests finish within `grace_s`, cuts the rest.

        linger_s: connections without a request stay open for so long after the last answer. A client that
        sends its next request just then is answered, with `Connection: close`.
        """
        deadline, state = time.monotonic() + grace_s, self._state
        connections = cast("set[BoundedProtocol]", state.connections)
        self._listener.close()
        if self._claim is not None:
            self._claim.close()
        self._config.draining = True
        await self._linger(linger_s, deadline)
        for connection in list(connections):
            connection.shutdown()
        await asyncio.sleep(_POLL_S)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                while connections or state.tasks:
                    for connection in list(connections):
                        connection.end_if_received()
                    await asyncio.sleep(_POLL_S)
                await self._listener.wait_closed()
        except TimeoutError:
            log.error("%d requests are cut: their time to end is over.", len(state.tasks))
            for task in state.tasks:
                task.cancel()
        finally:
            self._ticking.cancel()

    async def _tick(self) -> None:
        is_public = self._config.connections is not None or self._config.certificate is not None
        while True:
            self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
            if self._config.certificate is not None:
                self._config.certificate.refresh()
            if is_public:
                self._cut_late()
            await asyncio.sleep(_TICK_S)

    def _cut_late(self) -> None:
        """Not in `_tick`, whose variables would hold the last connection and its request until the next."""
        before = asyncio.get_running_loop().time() - limits.HEAD_S
        for connection in list(cast("set[BoundedProtocol]", self._state.connections)):
            if connection.since <= before:
                connection.cut("timeout")

    async def _linger(self, linger_s: float, deadline: float) -> None:
        connections = cast("set[BoundedProtocol]", self._state.connections)
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

    connections, certificate: see `Port`.
    group: gateways of the same group, with the same `host`, listen to the same socket. is_shared: at the same
    time, not only while one succeeds another.
    Raises: ConfigError when the port is taken or the host is not one of this machine's.
    """
    raise_file_limit()
    if group is None:
        return Port(app, bind(host, port), connections=connections, certificate=certificate)
    sock, held = await claim(host, port, group)
    return Port(app, sock, held, connections, certificate, is_shared=is_shared)
