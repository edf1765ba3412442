"""One replica, reached at its own listener: its load, its requests from here, and whether it lives.

Its link reports its load ten times a second, and its death at once. Above it: the replica set, which chooses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from urllib.parse import quote

import msgspec

from penstock.data.backends.http_client import ConnectFailed, ConnectionLost, HttpResponse
from penstock.data.backends.queue_depth import QueueDepth
from penstock.engine import Load
from penstock.transport import link
from penstock.transport.address import Address
from penstock.transport.connection import ReplicaConnection, connect

log = logging.getLogger(__name__)

_IDLE_S = 60.0  # less than a replica keeps an idle connection
_PATH = "/-_.~:@!$&'()*+,;=?"
"""Characters of a path that need no quoting."""


class ReplicaClient:
    """A replica from its discovery until it is lost, which is final."""

    def __init__(self, address: Address, node_id: str, sender: str, changed: Callable[[], None]) -> None:
        """node_id: of this process. sender: its name. changed: called when it is ready, draining, or lost."""
        self.id = address.replica_id
        self.hello: link.Hello | None = None
        self.takes_adapters = False
        self.in_flight = 0
        self.lost = False
        self._address, self._node_id, self._sender = address, node_id, sender
        self._changed = changed
        self._report: link.LoadReport | None = None
        self._reported = 0
        """Requests from here in it, at its last report."""
        self._queue_depth = QueueDepth()
        self._idle: list[ReplicaConnection] = []
        self._link = asyncio.create_task(self._follow_link())

    @property
    def ready(self) -> bool:
        """Whether new requests may go to it."""
        return not self.lost and self._report is not None and self._report.state == "ready"

    @property
    def busy(self) -> int:
        """Requests in it, from all senders, as far as known."""
        return (self._report.elsewhere if self._report else 0) + self.in_flight

    def load(self) -> Load:
        """As last reported."""
        report = self._report or link.LoadReport()
        return Load(report.running, report.waiting, report.waiting_tokens, report.kv_usage)

    def available_slots(self) -> int:
        """How many more requests to send now."""
        if not self.ready:
            return 0
        load = self.load()
        sent_since = self.in_flight - self._reported
        return self._queue_depth.available_slots(load, load.running + load.waiting + sent_since)

    async def send(self, path: str, body: bytes, adapter: str | None) -> HttpResponse:
        """Raises: ConnectFailed when it was not sent; ConnectionLost when the replica died with it."""
        self.in_flight += 1
        try:
            connection = await self._connection()
            try:
                response = await _exchange(connection, self._head(path, len(body), adapter), body)
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            finally:
                self._release(connection)
        finally:
            self.in_flight -= 1
        self._queue_depth.on_response(self.load())
        return response

    async def close(self) -> None:
        """Closes the link and the idle connections."""
        self.lost = True
        self._link.cancel()
        await asyncio.wait({self._link})
        for connection in self._idle:
            connection.abort()

    async def _connection(self) -> ReplicaConnection:
        """Raises: ConnectFailed."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if now - connection.idle_since < _IDLE_S and connection.reusable:
                return connection
            connection.abort()
        return await self._connect()

    async def _connect(self) -> ReplicaConnection:
        try:
            return await connect(self._address, self._node_id, _ignore)
        except (OSError, TimeoutError) as error:
            raise ConnectFailed(str(error) or "no connection in time") from error

    def _release(self, connection: ReplicaConnection) -> None:
        """Keeps the connection for the next request, or closes it, which aborts an unfinished request."""
        if connection.reusable and not self.lost:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()

    def _head(self, path: str, body_bytes: int, adapter: str | None) -> bytes:
        fields = [
            b"POST %b HTTP/1.1" % quote(path, safe=_PATH).encode(),
            b"host: replica",
            b"content-type: application/json",
            b"content-length: %d" % body_bytes,
            b"%b: %b" % (link.SECRET, self._address.secret.encode()),
            b"%b: %b" % (link.GATEWAY, self._sender.encode()),
        ]
        if adapter:
            fields.append(b"%b: %b" % (link.ADAPTER, quote(adapter, safe="").encode()))
        return b"\r\n".join(fields) + b"\r\n\r\n"

    async def _follow_link(self) -> None:
        try:
            connection = await self._connect()
            try:
                await link.listen(connection, self._address.secret, self._sender, self._on_message)
            finally:
                connection.abort()
        except (ConnectFailed, OSError, TimeoutError, msgspec.DecodeError) as error:
            log.info("Replica %s is lost: %s", self.id, error)
        finally:
            self.lost = True
            self._changed()

    def _on_message(self, message: link.Message) -> None:
        was_ready = self.ready
        if isinstance(message, link.LoadReport):
            self._report, self._reported = message, self.in_flight
        elif isinstance(message, link.AdapterReport):
            self.takes_adapters = True
        else:
            self.hello = message
        if self.ready != was_ready:
            self._changed()


async def _exchange(connection: ReplicaConnection, head: bytes, body: bytes) -> HttpResponse:
    """Raises: ConnectionError."""
    connection.request(head, body)
    answer = await connection.head()
    pieces: list[bytes] = []
    while piece := await connection.read():
        pieces.append(piece)
    fields = {name.decode("latin-1"): value.decode("latin-1") for name, value in answer.headers}
    return HttpResponse(answer.status, b"".join(pieces), fields)


def _ignore(_connection: ReplicaConnection) -> None:
    """The next use of a lost connection notices."""
