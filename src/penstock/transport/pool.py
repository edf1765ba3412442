"""Opens connections to one replica, and keeps them in a pool."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from weakref import WeakSet

from penstock.transport.address import KEEP_ALIVE_S, Address
from penstock.transport.connection import ReplicaConnection
from penstock.transport.multiplexer import StreamReceiver

_CONNECT_S = 3.0
_BACKLOG_FULL_S = 0.02  # between two attempts to connect to a replica that is too busy to accept
# The kernel notices a peer node that vanished: probes after 5 s, gone after 20 s.
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 5),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 20_000),  # milliseconds
)
_IDLE_S = KEEP_ALIVE_S - 15  # shorter than the replica's own limit


class Pool:
    """Closing it does not end open exchanges; their connections are not reused."""

    def __init__(self, address: Address, node_id: str) -> None:
        self._address = address
        self._node_id = node_id
        self._idle: dict[ReplicaConnection, None] = {}  # last in, first out, so that others can expire
        self._all: WeakSet[ReplicaConnection] = WeakSet()
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
        """A new connection. Raises: as `acquire`."""
        connection = await connect(self._address, self._node_id, self._forget)
        self._all.add(connection)
        return connection

    def release(self, connection: ReplicaConnection) -> None:
        """Keeps it for the next request, or closes it; that aborts an unfinished exchange."""
        if connection.reusable and not self._closed:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle[connection] = None
        else:
            connection.abort()

    def fail(self, reason: str) -> None:
        """Ends all connections and the exchanges on them: the replica answers no more."""
        for connection in list(self._all):
            connection.fail(reason)

    def close(self) -> None:
        """Closes idle connections; those in use are closed when they are released."""
        self._closed = True
        self.multiplexer.close()
        for connection in list(self._idle):
            connection.abort()

    def _forget(self, connection: ReplicaConnection) -> None:
        self._idle.pop(connection, None)


async def connect(
    address: Address, node_id: str, lost: Callable[[ReplicaConnection], None]
) -> ReplicaConnection:
    """Opens a connection: by Unix socket on the same node, else over the network.

    Raises: OSError (ConnectionRefusedError: nobody listens there), TimeoutError.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(_CONNECT_S):
        if address.unix is not None and address.is_local(node_id):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                await _connect_unix(sock, address.unix)
                return (await loop.create_unix_connection(lambda: ReplicaConnection(lost), sock=sock))[1]
            except BaseException:
                sock.close()
                raise
        if address.host is None or address.port is None:
            raise ConnectionRefusedError(f"replica {address.replica_id} publishes no network address")
        transport, connection = await loop.create_connection(
            lambda: ReplicaConnection(lost), address.host, address.port
        )
    sock = transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection


async def _connect_unix(sock: socket.socket, name: str) -> None:
    """Linux connects or refuses at once, and raises BlockingIOError while the backlog is full."""
    sock.setblocking(False)
    while True:
        with contextlib.suppress(BlockingIOError):
            return sock.connect(name)
        await asyncio.sleep(_BACKLOG_FULL_S)
