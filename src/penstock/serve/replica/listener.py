"""The replica's own HTTP door: the sockets on which gateways reach its engine, from opening to draining.

In the flow it stands between a gateway's relay and the engine's app; `guard` is what it puts before that app.
It knows neither Ray nor the public side: who may ask and how much is the gateway's business.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
import time
from collections.abc import Awaitable, Callable

from penstock.asgi import ASGIApp
from penstock.errors import Unavailable
from penstock.serve.http.connection_limits import Connections
from penstock.serve.http.server import Port
from penstock.serve.http.sockets import bind
from penstock.serve.replica.guard import Facts, Guard
from penstock.transport.address import Address

_TURN_AWAY_S = 0.5  # draining: gateways know within milliseconds; what is on its way to us is still served


class Listener:
    """One replica's listener. Made by `open`; ended by `drain` and `close`."""

    def __init__(self, address: Address, guard: Guard, network: socket.socket | None) -> None:
        self.address = address
        self._guard = guard
        self._network = network
        self._ports: list[Port] = []
        self._watch: asyncio.Task[None] | None = None
        self._dead = False

    @classmethod
    async def open(
        cls,
        app: ASGIApp,
        facts: Facts,
        *,
        node_id: str,
        node_host: str | None,
        replica_id: str | None = None,
        wait_dead: Callable[[], Awaitable[str]] | None = None,
    ) -> Listener:
        """Listens on an abstract Unix socket; reserves a port on `node_host`, where nothing listens yet.

        wait_dead: returns once the engine has died. replica_id: drawn here, if it does not matter.
        """
        network = bind(node_host, 0) if node_host is not None else None
        address = Address(
            replica_id=replica_id or secrets.token_hex(8),
            node_id=node_id,
            unix=f"\0penstock-{secrets.token_hex(8)}" if sys.platform == "linux" else None,
            host=node_host,
            port=network.getsockname()[1] if network else None,
            secret=secrets.token_urlsafe(32),
        )
        listener = cls(address, Guard(app, facts, address), network)
        await listener._start()
        if wait_dead is not None:
            listener._watch = asyncio.create_task(listener._die_with(wait_dead))
        return listener

    async def _start(self) -> None:
        if self.address.unix is None:
            await self.listen_on_network()
        else:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.bind(self.address.unix)
            self._ports.append(await Port.open(self._guard, sock))

    async def listen_on_network(self) -> None:
        """Opens the reserved port to gateways on other nodes. Safe to call twice."""
        sock, self._network = self._network, None
        if sock is None:
            return
        try:
            self._ports.append(await Port.open(self._guard, sock, connections=Connections()))
        except BaseException:  # also cancelled: who asks next finds it as it was
            self._network = sock
            raise

    def tell(self) -> None:
        """Says at once on every link what has changed."""
        self._guard.tell_links()

    async def _die_with(self, wait_dead: Callable[[], Awaitable[str]]) -> None:
        reason = await wait_dead()
        self._dead = True
        self._guard.die(reason)

    async def drain(self, timeout_s: float) -> int:
        """Says so on every link, refuses new requests after a moment, waits for the open ones.

        Gives the number of requests that were still open after `timeout_s` and are cut. A dead engine is not
        waited for.
        """
        deadline = time.monotonic() + (0.0 if self._dead else timeout_s)
        self._guard.say_draining()
        await asyncio.sleep(min(_TURN_AWAY_S, _left_s(deadline)))
        self._guard.refuse(Unavailable("This replica is shutting down."))
        if self._guard.open:
            await asyncio.wait(list(self._guard.open), timeout=_left_s(deadline))
        return self._guard.cut()

    async def close(self) -> None:
        """Ends the links and what is open, and frees the sockets. Safe to call twice."""
        self._guard.refuse(Unavailable("This replica is shutting down."))
        self._guard.cut()
        self._guard.end_links()
        if self._watch is not None:
            self._watch.cancel()
        if self._network is not None:
            self._network.close()
        ports, self._ports = self._ports, []
        await asyncio.gather(*(port.close(grace_s=0.5) for port in ports))


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
