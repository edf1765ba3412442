"""One HTTP/1.1 connection from a gateway to a replica's listener; it carries one exchange at a time.

It sits between the relay, which reads from it, and the socket. It only moves bytes: the parser finds the
body, nothing looks inside. It knows neither tables nor clients.

`read` costs a future and a task's step for each piece; `read_into` passes it on in the socket's own callback.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import httptools

from penstock.transport.continuation import StreamRecord

_HIGH_WATER_BYTES = 64 * 1024  # unread; above it the socket is not read, so a slow client costs no memory

STREAM = b"x-penstock-stream"
"""Header of a request: the id under which its stream may be multiplexed. In the response: it is."""

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of a response; names are in lower case."""

    status: int
    headers: Headers

    def header(self, name: bytes) -> bytes | None:
        """The first value under `name`."""
        return next((value for key, value in self.headers if key == name), None)


class ReplicaConnection(asyncio.Protocol):
    """Call `request`, then `await head()`, then `await read()` until it returns nothing.

    Raises: ConnectionError from `head` and `read` when the replica ends it, or does not speak HTTP.
    """

    def __init__(self, lost: Callable[[ReplicaConnection], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_lost = lost
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport  # set before anyone gets the connection
        self._broken: ConnectionError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[bytes], bool] | None = None
        self._pieces: list[bytes] = []
        self._unread_bytes = 0
        self._paused = False
        self._full = False  # of bytes to send
        self._headers: Headers = []
        self._head: Head | None = None
        self._hold: Callable[[int, bool], None] | None = None
        self._held = False
        self._multiplexed = False  # the body comes over the multiplexed connection
        self.stream_ended = False  # ... and has come, also where this connection has not ended yet
        self._message_ended = False
        self._multiplexer_lost = False
        self.stream_id = 0
        self.record: StreamRecord  # of a stream that is multiplexed
        self.finished = False
        self.exchanges = 0
        self.idle_since = 0.0

    # -- for the relay

    def request(self, head: bytes, *body: bytes | bytearray) -> None:
        """Sends a request, its body in parts; the previous one must have finished."""
        self._headers, self._head = [], None
        self.finished = False
        self._multiplexed = self.stream_ended = self._message_ended = False
        self.exchanges += 1
        self._transport.writelines([head, *filter(None, body)])

    async def head(self) -> Head:
        """The response's status and headers."""
        while self._head is None:
            await self._event()
        return self._head

    async def read(self) -> bytes:
        """All body bytes that have arrived, at least one; nothing when the response has ended."""
        while not self._pieces and not self.finished:
            await self._event()
        piece = self.unread()
        self.resume()
        return piece

    async def whole(self, most_bytes: int = sys.maxsize) -> tuple[int, bytes]:
        """The response's status and body. Raises: ConnectionAbortedError when that is larger."""
        status, body = (await self.head()).status, b""
        while piece := await self.read():
            body += piece
            if len(body) > most_bytes:
                raise ConnectionAbortedError(f"its response is larger than {most_bytes} bytes")
        return status, body

    async def read_into(self, sink: Callable[[bytes], bool]) -> None:
        """Calls `sink` with body bytes as they arrive, until the end; the last ones are left for `read`.

        When `sink` returns False, nothing more is read from the replica until `resume`.
        """
        self._sink = sink
        try:
            if self._pieces and not self.finished:
                self._flush()
            while not self.finished:
                await self._event()
        finally:
            self._sink = None

    def resume(self) -> None:
        """Reads from the replica again."""
        if self._held and self._hold is not None:
            self._held = False
            self._hold(self.stream_id, False)
        if self._paused:
            self._paused = False
            if self._broken is None:
                self._transport.resume_reading()

    @property
    def heard(self) -> bool:
        """Whether the response has begun."""
        return self._head is not None

    @property
    def exhausted(self) -> bool:
        """Whether the response has ended and all of it was read."""
        return self.finished and not self._pieces

    @property
    def reusable(self) -> bool:
        """Whether another request may follow: unread bytes would be taken for its response."""
        return (
            self.exhausted
            and self._broken is None
            and not self._transport.is_closing()
            and self._transport.get_write_buffer_size() == 0
        )

    def write(self, piece: bytes) -> None:
        """Sends more of the body of a request that has not ended."""
        if not self._transport.is_closing():
            self._transport.write(piece)

    async def drain(self) -> None:
        """Waits while the socket takes no more of the body, unless the response has begun.

        Raises: ConnectionError.
        """
        while self._full and not self.heard:
            await self._event()

    def abort(self) -> None:
        """Closes it at once; the replica takes an unfinished request for abandoned."""
        self._transport.abort()

    def fail(self, reason: str) -> None:
        """Ends it and the exchange on it, for which `head` and `read` raise ConnectionAbortedError."""
        self._broken = ConnectionAbortedError(reason)
        self.abort()
        self._wake()

    # -- for the multiplexer

    def attach(self, number: int, hold: Callable[[int, bool], None], record: StreamRecord) -> None:
        """The next body may come by `feed`. hold: called with `number`, and whether the stream must pause.

        record: counts the pieces that come, and keeps what was recorded.
        """
        self.stream_id, self._hold, self._held, self._multiplexer_lost = number, hold, False, False
        self.record = record

    def feed(self, piece: bytes, last: bool) -> None:
        """A piece of the body that came over the multiplexed connection."""
        if self._sink is not None and not last and not self._pieces:
            if not self._sink(piece):
                self._hold_stream()
            elif self._held:
                self.resume()
            return
        if last:
            self.stream_ended = True
            self._finish()
        if piece:
            self.on_body(piece)
        if self._sink is not None and not self.finished:
            if self._pieces:
                self._flush()
            return
        if self._unread_bytes > _HIGH_WATER_BYTES:
            self._hold_stream()
        self._wake()

    def lose_multiplexer(self) -> None:
        """The multiplexed connection has ended: a body that it carries is lost."""
        self._multiplexer_lost = True
        if self._multiplexed and not self.stream_ended:
            self.fail("the replica's multiplexed connection has ended")

    async def _event(self) -> None:
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

    def unread(self) -> bytes:
        """Body bytes that have arrived and were not read."""
        pieces, self._pieces = self._pieces, []
        self._unread_bytes = 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _flush(self) -> None:
        assert self._sink is not None
        if self._sink(self.unread()):
            self.resume()
        elif self._multiplexed:
            self._hold_stream()
        else:
            self._pause()

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def _hold_stream(self) -> None:
        if not self._held and self._hold is not None:
            self._held = True
            self._hold(self.stream_id, True)

    def _finish(self) -> None:
        if self._message_ended and not self._is_rest_due:
            self.finished = True

    @property
    def _is_rest_due(self) -> bool:
        """Whether a multiplexed body has not ended. Once the message has, the connection may be closed."""
        return self._multiplexed and not self.stream_ended

    # -- for the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(f"the replica does not speak HTTP: {error}")
            return
        if self._sink is not None and not self.finished:
            if self._pieces:
                self._flush()
            return
        if self._unread_bytes > _HIGH_WATER_BYTES:
            self._pause()
        self._wake()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._broken is None and not (self._message_ended and self._is_rest_due):
            self._broken = ConnectionResetError(str(exc) if exc else "the replica closed the connection")
        self._wake()
        self._on_lost(self)

    # -- for the parser

    def on_message_begin(self) -> None:
        if self.finished or not self.exchanges:
            raise ConnectionAbortedError("a response without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._head = Head(self._parser.get_status_code(), self._headers)
        self._multiplexed = self._hold is not None and self._head.header(STREAM) is not None
        if self._multiplexed and self._multiplexer_lost:
            self.fail("the replica's multiplexed connection has ended")

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._unread_bytes += len(body)

    def on_message_complete(self) -> None:
        self._message_ended = True
        self._finish()
        if not self._parser.should_keep_alive() and not self._is_rest_due:
            self._broken = ConnectionAbortedError("the replica closes this connection")
