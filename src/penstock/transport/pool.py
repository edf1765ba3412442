"""A pool of connections to one replica."""

from __future__ import annotations

import asyncio

from penstock.transport.address import KEEP_ALIVE_S, Address
from penstock.transport.connection import ReplicaConnection, connect
from penstock.transport.multiplexer import StreamReceiver

_IDLE_S = KEEP_ALIVE_S - 15  # shorter than the replica's own limit


class Pool:
    """Closing it does not end open exchanges; their connections are not reused."""

    def __init__(self, address: Address, node_id: str) -> None:
        self._address = address
        self._node_id = node_id
        self._idle: dict[ReplicaConnection, None] = {}  # last in, first out, so that others can expire
        self._closed = False
        self.multiplexer = StreamReceiver()

    async def acquire(self) -> ReplicaConnection:
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

    async def connect(self) -> ReplicaConnection:
        """A new connection."""
        return await connect(self._address, self._node_id, self._forget)

    def release(self, connection: ReplicaConnection) -> None:
        """Keeps it for the next request, or closes it; that aborts an unfinished exchange."""
        if connection.reusable and not self._closed:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle[connection] = None
        else:
            connection.abort()

    def close(self) -> None:
        """Closes idle connections; those in use are closed when they are released."""
        self._closed = True
        self.multiplexer.close()
        for connection in list(self._idle):
            connection.abort()

    def _forget(self, connection: ReplicaConnection) -> None:
        self._idle.pop(connection, None)
