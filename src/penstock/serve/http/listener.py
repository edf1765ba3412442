"""Accepts the connections of a listening socket, for HTTPS with their handshakes.

It stands between the socket, of which other processes may have copies, and `protocol`, which sees no
difference between HTTP and HTTPS. Under HTTPS a connection counts at its address from the moment it is
accepted, not only when its handshake is over. A handshake takes some 100 kB and a millisecond: it begins when
the client's first message is there, and few are under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import ssl
from collections.abc import Callable
from typing import Any

from penstock.serve.http import limits
from penstock.serve.http.connection_limits import Connections
from penstock.serve.http.protocol import Config

log = logging.getLogger(__name__)

_HANDSHAKE = 22  # the type of a record. RFC 8446, 5.1
_RECORD_BYTES = 5 + 2**14  # with its header
_AGAIN_S, _MOST_AGAIN_S = 0.01, 1.0  # between looks for the rest of the first message, and for a place
_LONG_S = 2.0  # after which a handshake may be cut for another one of its address
_NO_FILES_S = 0.2  # before the next try to accept a connection when this process has no files left


class SocketListener:
    """Accepts connections from its construction on, until `close`."""

    def __init__(self, sock: socket.socket, protocol: Callable[[], asyncio.Protocol], config: Config) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._protocol = protocol
        self._config = config
        self._connections = config.connections or Connections()  # counts handshakes, too
        self._under_way = Connections(limits.HANDSHAKES_PER_ADDRESS, limits.HANDSHAKES)
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._listen()

    @property
    def is_closed(self) -> bool:
        return self._socket.fileno() == -1

    def close(self) -> None:
        """Stops accepting. Safe to call twice."""
        if not self.is_closed:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    async def wait_closed(self) -> None:
        """Returns when no handshake is under way; those that are end here."""
        for connecting in self._connecting:
            connecting.cancel()
        if self._connecting:
            await asyncio.wait(self._connecting)

    def _listen(self) -> None:
        if not self.is_closed:
            self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        """Accepts one connection in an iteration of the event loop."""
        try:
            client, address = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # another process was faster, or the client has gone
        except OSError as error:
            log.warning("No connection can be accepted: %s", error)
            self._loop.remove_reader(self._socket)  # another process may have files left
            self._loop.call_later(_NO_FILES_S, self._listen)
            return
        client.setblocking(False)
        task = self._loop.create_task(self._connect(client, address))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        if self._config.is_shared:  # else the one that is awake takes a burst before others have woken up
            os.sched_yield()

    async def _connect(self, client: socket.socket, address: Any) -> None:
        with contextlib.suppress(OSError):  # the client has gone, as probes of load balancers do
            if self._config.certificate is None:
                await self._loop.connect_accepted_socket(self._protocol, client)
            else:
                await self._shake(client, address[0], self._config.certificate.context)

    async def _shake(self, client: socket.socket, address: str, context: ssl.SSLContext) -> None:
        task = asyncio.current_task()
        assert task is not None
        handshake = _Handshake(task, self._connections)
        peer = self._connections.join(address, handshake)
        try:
            try:
                async with asyncio.timeout(limits.HEAD_S):
                    await _first_message(client)
                    await self._config.work.room()
                    await self._place(address)
            except BaseException:
                client.close()
                raise
            await self._protect(client, address, handshake, context)
        except ssl.SSLError:
            self._connections.counts["tls"] += 1
        except (TimeoutError, ConnectionAbortedError):  # asyncio's, when the handshake's time is over
            self._connections.counts["timeout"] += 1
        finally:
            self._connections.leave(peer, handshake)

    async def _place(self, address: str) -> None:
        """Waits while this address has all of its handshakes under way, and none of them takes long."""
        again_s = _AGAIN_S
        while (oldest := self._under_way.oldest(address)) and oldest.since + _LONG_S > self._loop.time():
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, _MOST_AGAIN_S)

    async def _protect(
        self, client: socket.socket, address: str, handshake: _Handshake, context: ssl.SSLContext
    ) -> None:
        """Performs the handshake. Raises: OSError, ssl.SSLError among them."""
        handshake.since = self._loop.time()
        peer = self._under_way.join(address, handshake)
        try:
            await self._loop.connect_accepted_socket(
                self._protocol,
                client,
                ssl=context,
                ssl_handshake_timeout=limits.HEAD_S,
                ssl_shutdown_timeout=limits.HEAD_S,
            )
        finally:
            self._under_way.leave(peer, handshake)


class _Handshake:
    """A connection on which nothing has been asked yet, as its address is charged for it."""

    since = math.inf  # when it began; the event loop limits its time

    def __init__(self, task: asyncio.Task[None], connections: Connections) -> None:
        self._task = task
        self._connections = connections

    def cut(self, reason: str) -> None:
        self._connections.counts[reason] += 1
        self._task.cancel()


async def _first_message(client: socket.socket) -> None:
    """Returns when it is there, and stays to be read. Raises: OSError when the client has gone."""
    loop, again_s = asyncio.get_running_loop(), _AGAIN_S
    while True:
        readable = asyncio.Event()
        loop.add_reader(client, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(client)
        seen = client.recv(_RECORD_BYTES, socket.MSG_PEEK)
        if not seen:
            raise ConnectionResetError
        whole = 5 + int.from_bytes(seen[3:5]) if len(seen) >= 5 else _RECORD_BYTES
        if seen[0] != _HANDSHAKE or len(seen) >= min(whole, _RECORD_BYTES):
            return
        await asyncio.sleep(again_s)
        again_s = min(2 * again_s, _MOST_AGAIN_S)
