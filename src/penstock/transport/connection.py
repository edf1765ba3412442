"""One HTTP/1.1 connection from a gateway to a replica's listener; it carries one exchange at a time.

It sits between the relay, which reads from it, and the socket. Per piece it only moves bytes: the parser
finds where the body is, nothing looks inside. It knows neither tables nor clients.

To `read` costs a future and a task's step for each piece; `pour` hands it on in the socket's own callback.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import httptools

from penstock.transport.address import Address

_HIGH_WATER_BYTES = 64 * 1024  # unread; above it the socket is not read, so a slow client costs no memory
_CONNECT_S = 3.0
# A peer node that vanished without a word is noticed by the kernel: probes after 5 s, gone after 20 s.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
_USER_TIMEOUT_MS = 20_000

STREAM = b"x-penstock-stream"
"""On a request: the number under which its stream may come on the trunk. On the answer: it comes there."""

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of an answer; names are in lower case."""

    status: int
    headers: Headers

    def header(self, name: bytes) -> bytes | None:
        """The first value under `name`."""
        return next((value for key, value in self.headers if key == name), None)


class Connection(asyncio.Protocol):
    """Ask with `request`, then `await head()`, then `await read()` until it gives nothing.

    Raises: ConnectionError from `head` and `read` when the replica ends it, or does not speak HTTP.
    """

    def __init__(self, lost: Callable[[Connection], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._tell_lost = lost
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._broken: ConnectionError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[bytes], bool] | None = None
        self._pieces: list[bytes] = []
        self._unread_bytes = 0
        self._paused = False
        self._headers: Headers = []
        self._head: Head | None = None
        self._open = False  # an exchange is under way
        self._hold: Callable[[int, bool], None] | None = None
        self._held = False
        self._riding = False  # the answer's body comes on the trunk
        self._ridden = False  # ... and has come
        self._own_ended = False
        self._stranded = False
        self.rides = 0
        self.finished = False
        self.exchanges = 0
        self.idle_since = 0.0

    # -- for the relay

    def request(self, head: bytes, body: bytes | bytearray = b"") -> None:
        """Sends a request; the one before it must have finished."""
        assert self._transport is not None
        self._headers, self._head = [], None
        self._open, self.finished = True, False
        self._riding = self._ridden = self._own_ended = False
        self.exchanges += 1
        self._transport.writelines([head, body] if body else [head])

    async def head(self) -> Head:
        """The answer's status and headers."""
        while self._head is None:
            await self._news()
        return self._head

    async def read(self) -> bytes:
        """All body bytes that are here, at least one; nothing when the answer has ended."""
        while not self._pieces and not self.finished:
            await self._news()
        piece = self._unread()
        self.go_on()
        return piece

    async def pour(self, sink: Callable[[bytes], bool]) -> None:
        """Calls `sink` with body bytes as they come, until the answer has ended; the last are for `read`.

        When `sink` gives False, nothing more is read from the replica until `go_on`.
        """
        self._sink = sink
        try:
            if self._pieces and not self.finished:
                self._spill()
            while not self.finished:
                await self._news()
        finally:
            self._sink = None

    def go_on(self) -> None:
        """Reads from the replica again."""
        if self._held and self._hold is not None:
            self._held = False
            self._hold(self.rides, False)
        if self._paused:
            self._paused = False
            if self._transport is not None and self._broken is None:
                self._transport.resume_reading()

    @property
    def heard(self) -> bool:
        """Whether an answer to the request has begun."""
        return self._head is not None

    @property
    def exhausted(self) -> bool:
        """Whether the answer has ended and all of it was read."""
        return self.finished and not self._pieces

    @property
    def reusable(self) -> bool:
        """Whether another request may follow: what is left unread would be taken for its answer."""
        return (
            self.exhausted
            and self._broken is None
            and self._transport is not None
            and not self._transport.is_closing()
            and self._transport.get_write_buffer_size() == 0
        )

    @property
    def paused(self) -> bool:
        """Whether the replica is held back because the reader is behind."""
        return self._paused or self._held

    @property
    def unread_bytes(self) -> int:
        """Body bytes held for the reader."""
        return self._unread_bytes

    def say(self, piece: bytes) -> None:
        """Sends more of a request whose body has no end yet."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(piece)

    def abort(self) -> None:
        """Ends it at once; the replica takes an unfinished request for abandoned."""
        if self._transport is not None:
            self._transport.abort()

    # -- for the trunk

    def ride(self, number: int, hold: Callable[[int, bool], None]) -> None:
        """The next answer's body may come by `take`. hold: told `number`, and whether it is to pause."""
        self.rides, self._hold, self._held, self._stranded = number, hold, False, False

    def take(self, piece: bytes, last: bool) -> None:
        """A piece of the answer's body that came on the trunk."""
        if last:
            self._ridden = True
            self._finish()
        if piece:
            self.on_body(piece)
        if self._sink is not None and not self.finished:
            if self._pieces:
                self._spill()
            return
        if self._unread_bytes > _HIGH_WATER_BYTES:
            self._hold_back()
        self._wake()

    def strand(self) -> None:
        """The trunk has ended: a body that comes on it is lost."""
        self._stranded = True
        if self._riding and not self._ridden:
            self._fail("the replica's trunk has ended")

    async def _news(self) -> None:
        if self._broken is not None:
            raise self._broken
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _unread(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        self._unread_bytes = 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _spill(self) -> None:
        assert self._sink is not None
        if self._sink(self._unread()):
            self.go_on()
        elif self._riding:
            self._hold_back()
        else:
            self._pause()

    def _pause(self) -> None:
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def _hold_back(self) -> None:
        if not self._held and self._hold is not None:
            self._held = True
            self._hold(self.rides, True)

    def _finish(self) -> None:
        if self._own_ended and (self._ridden or not self._riding):
            self._open, self.finished = False, True

    # -- for the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the replica does not speak HTTP: {error}")
            return
        if self._sink is not None and not self.finished:
            if self._pieces:
                self._spill()
            return
        if self._unread_bytes > _HIGH_WATER_BYTES:
            self._pause()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._broken is None:
            self._broken = ConnectionResetError(str(exc) if exc else "the replica closed the connection")
        self._wake()
        self._tell_lost(self)

    def _fail(self, reason: str) -> None:
        self._broken = ConnectionAbortedError(reason)
        self.abort()
        self._wake()

    # -- for the parser

    def on_message_begin(self) -> None:
        if not self._open:
            raise ConnectionAbortedError("an answer without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._head = Head(self._parser.get_status_code(), self._headers)
        self._riding = self._hold is not None and self._head.header(STREAM) is not None
        if self._riding and self._stranded:
            self._fail("the replica's trunk has ended")

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._unread_bytes += len(body)

    def on_message_complete(self) -> None:
        self._own_ended = True
        self._finish()
        if not self._parser.should_keep_alive():
            self._broken = ConnectionAbortedError("the replica keeps this connection no longer")


async def connect(address: Address, node_id: str, lost: Callable[[Connection], None]) -> Connection:
    """Opens a connection: by Unix socket on the same node, else over the network.

    Raises: OSError (ConnectionRefusedError: nobody listens there), TimeoutError.
    """
    loop = asyncio.get_running_loop()
    if address.unix is not None and address.node_id == node_id:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(
                address.unix
            )  # never waits on Linux: connected, refused, or BlockingIOError when full
            return (await loop.create_unix_connection(lambda: Connection(lost), sock=sock))[1]
        except BaseException:
            sock.close()
            raise
    if address.host is None or address.port is None:
        raise ConnectionRefusedError(f"replica {address.replica_id} publishes no network address")
    async with asyncio.timeout(_CONNECT_S):
        transport, connection = await loop.create_connection(
            lambda: Connection(lost), address.host, address.port
        )
    _notice_lost_nodes(transport.get_extra_info("socket"))
    return connection


def _notice_lost_nodes(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
