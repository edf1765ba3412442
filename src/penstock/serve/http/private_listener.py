"""A listener for Penstock's own processes alone, and how they find and reach it.

It knows neither Ray nor clients.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from typing import Any

from penstock.asgi import ASGIApp, Receive, Scope, Send
from penstock.errors import Unavailable
from penstock.openai.asgi_response import send_error
from penstock.serve.http import direct_writer
from penstock.serve.http.connection_limits import Connections
from penstock.serve.http.server import Port
from penstock.serve.http.sockets import bind
from penstock.transport import link, pool
from penstock.transport.address import Address
from penstock.transport.connection import ReplicaConnection

_PAUSE_S = 0.2


class PrivateListener:
    """A Unix socket, and a network port once another node asks. `listen` begins, `close` ends it."""

    def __init__(self, name: str, node_id: str, node_host: str | None) -> None:
        """node_host: the node's own address; None for no network."""
        self._network = bind(node_host, 0) if node_host is not None else None
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._unix.bind(f"\0penstock-{secrets.token_hex(8)}")
        self._ports: list[Port] = []
        self.own_address = Address(
            replica_id=name,
            node_id=node_id,
            unix=self._unix.getsockname().decode(),
            host=node_host,
            port=self._network.getsockname()[1] if self._network else None,
            secret=secrets.token_urlsafe(32),
        )

    @classmethod
    async def open(cls, app: ASGIApp, name: str, node_id: str, node_host: str) -> PrivateListener:
        """Passes `app` the requests that carry the address's secret."""
        listener = cls(name, node_id, node_host)
        secret = listener.own_address.secret.encode()

        async def checked(scope: Scope, receive: Receive, send: Send) -> None:
            if not hmac.compare_digest(dict(scope["headers"]).get(link.SECRET, b""), secret):
                await send_error(send, Unavailable("Only Penstock itself may ask here."), scope["path"])
                return
            if (writer := direct_writer.of(scope)) is not None:
                writer.accept()
            await app(scope, receive, send)

        await listener.listen(checked)
        return listener

    async def listen(self, app: ASGIApp, requests_at_once: int | None = None) -> None:
        """app: must refuse requests without the address's secret. requests_at_once: as for `Port`."""
        self._app, self._requests_at_once = app, requests_at_once
        self._ports.append(Port(app, self._unix, requests_at_once=requests_at_once, is_own=True))

    async def listen_on_network(self) -> None:
        """For processes on other nodes. Safe to call twice."""
        if self._network is not None:
            connections, at_once = Connections(), self._requests_at_once
            port = Port(
                self._app, self._network, connections=connections, requests_at_once=at_once, is_own=True
            )
            self._ports.append(port)
            self._network = None

    async def address(self, node_id: str) -> dict[str, str | int | None]:
        """The address, for a process on `node_id`: the network port listens only if that is another node."""
        if not self.own_address.is_local(node_id):
            await self.listen_on_network()
        return self.own_address.to_metadata()

    def check(self) -> None:
        """Raises: Unavailable when a socket does not listen any more."""
        for port in self._ports:
            port.check()

    async def close(self, grace_s: float) -> None:
        """Lets open requests finish within `grace_s`, and closes the sockets. Safe to call twice."""
        if self._network is not None:
            self._network.close()
        ports, self._ports = self._ports, []
        await asyncio.gather(*(port.close(grace_s) for port in ports))


class ListenerClient:
    """Reaches another process's `PrivateListener`; asks for its address again when it has ended or moved."""

    def __init__(self, handle: Any, node_id: str) -> None:
        """handle: to its deployment, whose `address` is the listener's. node_id: of this process."""
        self._handle, self._node_id = handle, node_id
        self._address: Address | None = None

    def forget(self) -> None:
        """Has the next connection ask for the address: a stranger may have answered at this one."""
        self._address = None

    async def find(self) -> Address:
        """Raises: Unavailable."""
        try:
            return Address.from_metadata(await self._handle.address.remote(self._node_id))
        except Exception as error:  # of many kinds, as Serve and Ray raise them
            raise Unavailable(f"It cannot be asked for its address: {error}") from error

    async def connect(self, limit_s: float) -> tuple[Address, ReplicaConnection]:
        """A new connection. Tries for `limit_s`. Raises: TimeoutError, from the last failure."""
        cause: Exception | None = None
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        address = self._address = self._address or await self.find()
                        return address, await pool.connect(address, self._node_id, lambda lost: None)
                    except (OSError, Unavailable) as error:
                        cause, self._address = error, None
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            self.forget()
            raise TimeoutError(str(cause or "no answer")) from cause
