"""The replica's listener: the sockets on which gateways reach its engine, from opening to draining.

It stands between a gateway's relay and the engine's app, with `guard` before that app. It knows neither Ray
nor clients: authentication and limits are the gateway's.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable

from penstock.asgi import ASGIApp
from penstock.errors import Unavailable
from penstock.serve.http.private_listener import PrivateListener
from penstock.serve.replica.frontend.guard import Guard
from penstock.serve.replica.frontend.status_link import StatusSource

_REQUESTS_PER_TURN = 4  # to prepare a request takes about a millisecond, while the tokens of all others wait
_DRAIN_S = 0.5  # gateways know within milliseconds; requests already on their way are still served


class Listener:
    """One replica's listener. Made by `open`; ended by `drain` and `close`."""

    def __init__(self, sockets: PrivateListener, guard: Guard) -> None:
        self.address = sockets.own_address
        self._sockets = sockets
        self._guard = guard
        self._watch: asyncio.Task[None] | None = None
        self._dead = False

    @classmethod
    async def open(
        cls,
        app: ASGIApp,
        source: StatusSource,
        *,
        node_id: str,
        node_host: str | None,
        replica_id: str | None = None,
        wait_dead: Callable[[], Awaitable[str]] | None = None,
    ) -> Listener:
        """Listens on an abstract Unix socket; reserves a port on `node_host`, without listening yet.

        wait_dead: returns once the engine has died. replica_id: random unless given.
        """
        sockets = PrivateListener(replica_id or secrets.token_hex(8), node_id, node_host)
        listener = cls(sockets, Guard(app, source, sockets.own_address))
        await sockets.listen(listener._guard, _REQUESTS_PER_TURN)
        if wait_dead is not None:
            listener._watch = asyncio.create_task(listener._die_with(wait_dead))
        return listener

    async def listen_on_network(self) -> None:
        """Listens on the reserved port, for gateways on other nodes. Safe to call twice."""
        await self._sockets.listen_on_network()

    def notify_links(self) -> None:
        """Reports changes on every link at once."""
        self._guard.links.notify()

    async def _die_with(self, wait_dead: Callable[[], Awaitable[str]]) -> None:
        reason = await wait_dead()
        self._dead = True
        self._guard.die(reason)

    async def drain(self, timeout_s: float) -> int:
        """Reports it on every link, refuses new requests after `_DRAIN_S`, waits for the open ones.

        Returns the number of requests that were still open after `timeout_s` and were cut. Does not wait
        for a dead engine.
        """
        deadline = time.monotonic() + (0.0 if self._dead else timeout_s)
        self._guard.links.drain()
        await asyncio.sleep(min(_DRAIN_S, _left_s(deadline)))
        self._guard.refuse(Unavailable("This replica is shutting down."))
        if self._guard.open:
            await asyncio.wait(list(self._guard.open), timeout=_left_s(deadline))
        return self._guard.cut()

    async def close(self) -> None:
        """Ends the links and open requests, and closes the sockets. Safe to call twice."""
        self._guard.refuse(Unavailable("This replica is shutting down."))
        self._guard.cut()
        self._guard.end_links()
        if self._watch is not None:
            self._watch.cancel()
        await self._sockets.close(grace_s=0.5)


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
