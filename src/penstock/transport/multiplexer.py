"""The trunk: one long answer from a replica to each gateway, which carries the pieces of all its streams.

An engine's step makes a piece for every stream at once. On connections of their own each costs a write here
and a read there; on the trunk they leave in one write. A stream's request, its head and its end stay on a
connection of its own, whose end means what it always means; only the pieces between them are here. Frames go
one way; words that stop a slow client's stream, and let it go on, the other. `guard` holds the replica's
side, `fleet` the gateway's.
"""

from __future__ import annotations

import asyncio
import itertools
import struct

from penstock.asgi import Receive, Send
from penstock.transport import link
from penstock.transport.connection import STREAM, Connection

PATH = "/_penstock/trunk"

_FRAME = struct.Struct(
    "<QI"
)  # number of the stream; length of the piece, doubled, and 1 more for the last one
_STOP, _GO = b"stop", b"go"
_MOST_WAITING_BYTES = 256 * 1024  # on their way to a gateway; above it all its streams wait


class Sender:
    """The replica's side of one gateway's trunk."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._waiting_bytes = 0
        self._news = asyncio.Event()
        self._sent = asyncio.Event()
        self._may_go: dict[int, asyncio.Event] = {}
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the trunk has ended."""
        return self._closed

    def join(self, stream: int) -> None:
        """A stream's pieces will come here."""
        self._may_go[stream] = asyncio.Event()
        self._may_go[stream].set()

    def leave(self, stream: int) -> None:
        """No more of them."""
        self._may_go.pop(stream, None)

    def push(self, stream: int, piece: bytes, last: bool = False) -> bool:
        """Goes with all others of this turn of the loop. False when the next one must wait: see `room`.

        On a closed trunk it goes nowhere: the gateway ends the stream's own connection, too.
        """
        if self._closed:
            return True
        self._frames += (_FRAME.pack(stream, len(piece) << 1 | last), piece)
        self._waiting_bytes += len(piece)
        self._news.set()
        return self._waiting_bytes <= _MOST_WAITING_BYTES and self._may_go[stream].is_set()

    async def room(self, stream: int) -> None:
        """Returns when the gateway can take the stream's next piece."""
        while self._waiting_bytes > _MOST_WAITING_BYTES and not self._closed:
            self._sent.clear()
            await self._sent.wait()
        if not self._may_go[stream].is_set():
            await self._may_go[stream].wait()

    async def talk(self, receive: Receive, send: Send) -> None:
        """Answers the gateway's request for the trunk, until it is closed here or there."""
        listening = asyncio.create_task(self._listen(receive))
        try:
            kind = [(b"content-type", b"application/octet-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": kind})
            while not self._closed:
                await self._news.wait()
                self._news.clear()
                frames, self._frames, size = self._frames, [], self._waiting_bytes
                await send({"type": "http.response.body", "body": b"".join(frames), "more_body": True})
                self._waiting_bytes -= size
                self._sent.set()
            await send({"type": "http.response.body", "body": b""})
        finally:
            listening.cancel()
            self.close()

    async def _listen(self, receive: Receive) -> None:
        rest = b""
        while (message := await receive())["type"] == "http.request":
            *lines, rest = (rest + message.get("body", b"")).split(b"\n")
            for line in lines:
                word, number = line.split()
                self._obey(word, int(number))
        self.close()

    def _obey(self, word: bytes, stream: int) -> None:
        if stream not in self._may_go:
            return  # it has ended meanwhile
        if word == _STOP:
            self._may_go[stream].clear()
        else:
            self._may_go[stream].set()

    def close(self) -> None:
        """Ends the trunk. Whoever waits goes on."""
        self._closed = True
        for event in (self._news, self._sent, *self._may_go.values()):
            event.set()


class Receiver:
    """The gateway's side of one replica's trunk."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._streams: dict[int, Connection] = {}
        self._carrier: Connection | None = None
        self._closing = False

    def join(self, connection: Connection) -> bytes:
        """The header line for the next request on `connection`; empty while there is no trunk."""
        if self._carrier is None or self._closing:
            return b""
        number = next(self._numbers)
        self._streams[number] = connection
        connection.ride(number, self._hold)
        return b"%b: %d\r\n" % (STREAM, number)

    def leave(self, connection: Connection) -> None:
        """Its exchange has ended. What still comes for it is dropped."""
        self._streams.pop(connection.rides, None)
        if self._closing:
            self.close()

    def close(self) -> None:
        """Ends the trunk when its last stream has left."""
        self._closing = True
        if self._carrier is not None and not self._streams:
            self._carrier.abort()

    async def follow(self, carrier: Connection, secret: str, gateway_id: str) -> None:
        """Deals out what comes on `carrier`; it always ends by raising.

        Raises: ConnectionError.
        """
        fields = b"%b: %b\r\n%b: %b\r\n" % (link.SECRET, secret.encode(), link.GATEWAY, gateway_id.encode())
        fields += b"host: replica\r\ntransfer-encoding: chunked\r\n"
        carrier.request(b"POST %b HTTP/1.1\r\n%b\r\n" % (PATH.encode(), fields))
        head = await carrier.head()
        if head.status != 200:
            raise ConnectionAbortedError(f"the replica refused the trunk with status {head.status}")
        self._carrier = carrier
        if self._closing:
            self.close()
        try:
            rest = b""
            while piece := await carrier.read():
                rest = self._deal(rest + piece if rest else piece)
            raise ConnectionResetError("the replica ended the trunk")
        finally:
            self._carrier = None
            streams, self._streams = self._streams, {}
            for connection in streams.values():
                connection.strand()

    def _deal(self, frames: bytes) -> bytes:
        """Hands each piece to its stream; gives what is not complete yet."""
        at, size, head_bytes = 0, len(frames), _FRAME.size
        while at + head_bytes <= size:
            number, length = _FRAME.unpack_from(frames, at)
            begin, end = at + head_bytes, at + head_bytes + (length >> 1)
            if end > size:
                break
            if (connection := self._streams.get(number)) is not None:
                connection.take(frames[begin:end], last=bool(length & 1))
            at = end
        return frames[at:]

    def _hold(self, number: int, stop: bool) -> None:
        """Asks for a pause of one stream, or for its end."""
        if self._carrier is not None:
            line = b"%b %d\n" % (_STOP if stop else _GO, number)
            self._carrier.say(b"%x\r\n%b\r\n" % (len(line), line))
