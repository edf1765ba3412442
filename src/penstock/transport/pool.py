"""Connections to one replica that wait for their next request, and new ones when none does."""

from __future__ import annotations

import asyncio

from penstock.transport.address import KEEP_ALIVE_S, Address
from penstock.transport.connection import Connection, connect
from penstock.transport.multiplexer import Receiver

_IDLE_S = KEEP_ALIVE_S - 15  # let go of a connection well before the replica does


class Pool:
    """One replica's connections. Closing it leaves open exchanges alone; they are not kept afterwards."""

    def __init__(self, address: Address, node_id: str) -> None:
        self._address = address
        self._node_id = node_id
        self._idle: dict[Connection, None] = {}  # the last one in is the first one out: the rest can age
        self._closed = False
        self.trunk = Receiver()

    async def acquire(self) -> Connection:
        """An idle connection, or a new one.

        Raises: OSError, TimeoutError when the replica cannot be reached.
        """
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection, _ = self._idle.popitem()
            if now - connection.idle_since < _IDLE_S and connection.reusable:
                return connection
            connection.abort()
        return await self.connect()

    async def connect(self) -> Connection:
        """A new connection."""
        return await connect(self._address, self._node_id, self._forget)

    def release(self, connection: Connection) -> None:
        """Takes it back for the next request, or ends it: an unfinished exchange is thereby aborted."""
        if connection.reusable and not self._closed:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle[connection] = None
        else:
            connection.abort()

    def close(self) -> None:
        """Ends idle connections; those in use end when they are released."""
        self._closed = True
        self.trunk.close()
        for connection in list(self._idle):
            connection.abort()

    def _forget(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
