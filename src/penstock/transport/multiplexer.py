"""One connection from a replica to each gateway that carries the bodies of all streams between them.

An engine's step makes a piece for every stream at once. On separate connections each piece costs a write and
a read; multiplexed they leave in one write. A stream's request, its head and its end stay on a connection of
its own, so that they mean what they always mean. Frames go one way; lines that stop or continue a slow
client's stream go the other. Beside its pieces a frame carries what a stream's engine recorded, see
`continuation`. `serve.replica.inbound.listener` uses the replica's side, `fleet.links` the gateway's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import struct
from collections.abc import Sequence

from penstock.asgi import Receive, Send
from penstock.request_context import EventFrame
from penstock.transport import continuation, link
from penstock.transport.connection import STREAM, ReplicaConnection
from penstock.transport.continuation import Group, StreamRecord

log = logging.getLogger(__name__)

PATH = "/_penstock/trunk3"  # the number changes with the frames

_FRAME = struct.Struct("<QIIII")
"""Stream id; twice the length of the pieces, plus 1 for the last one; how many pieces; how many groups were
recorded, and their length. The groups follow, then the pieces. Of an answer that has not begun, the value of
`RESUMABLE` comes first, as bytes of no groups.
"""
_STOP, _GO = b"stop", b"go"
_MOST_WAITING_BYTES = 256 * 1024  # not sent to a gateway yet; above it all its streams wait


class StreamSender:
    """The replica's side, for one gateway."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._texts: dict[int, list[bytes]] = {}  # by stream: an event's head, its texts, its tail
        self._records: dict[int, list[Group | None]] = {}
        self._waiting_bytes = 0
        self._pending = asyncio.Event()
        self._sent = asyncio.Event()
        self._writable: dict[int, asyncio.Event] = {}
        self.closed = False

    def open(self, stream: int, recorded: list[Group | None]) -> None:
        """A stream's pieces will be sent here, with what is in `recorded` by then, which empties it."""
        self._records[stream] = recorded
        self._writable[stream] = asyncio.Event()
        self._writable[stream].set()

    def end(self, stream: int) -> None:
        """No more pieces of this stream. Texts that wait keep the tokens that they are made of."""
        if (texts := self._texts.pop(stream, None)) is not None:
            self._add_texts(stream, texts)
        self._writable.pop(stream, None)
        self._records.pop(stream, None)

    def push(self, stream: int, piece: bytes, last: bool = False) -> bool:
        """Sends it with all others of this iteration of the loop. False when the next one must await `room`.

        Does nothing once closed: the gateway ends the stream's own connection, too.
        """
        if self.closed:
            return True
        if stream in self._texts:
            self._add_texts(stream, self._texts.pop(stream))
        self._add(stream, len(piece) << 1 | last, 1)
        self._frames.append(piece)
        return self._pushed(stream, len(piece))

    def push_text(self, stream: int, frame: EventFrame, text: bytes) -> bool:
        """The same with an event around `text`. Texts that wait here leave in one event."""
        if self.closed:
            return True
        waiting = self._texts.get(stream)
        if waiting is None:
            self._texts[stream] = [frame.head, text, frame.tail]
            return self._pushed(stream, len(frame.head) + len(text) + len(frame.tail))
        waiting.insert(-1, text)
        return self._pushed(stream, len(text))

    def _pushed(self, stream: int, size: int) -> bool:
        self._waiting_bytes += size
        self._pending.set()
        return self._waiting_bytes <= _MOST_WAITING_BYTES and self._writable[stream].is_set()

    def _add_texts(self, stream: int, pieces: list[bytes]) -> None:
        self._add(stream, sum(map(len, pieces)) << 1, len(pieces) - 2)
        self._frames += pieces

    def _add(self, stream: int, size: int, pieces: int) -> None:
        """The head of a frame, and what was recorded."""
        recorded = self._records.get(stream)
        if not recorded:
            self._frames.append(_FRAME.pack(stream, size, pieces, 0, 0))
            return
        groups, data = continuation.encode(recorded)
        recorded.clear()
        self._frames += (_FRAME.pack(stream, size, pieces, groups, len(data)), data)

    def hand_over(self, stream: int, origin: bytes, made: Sequence[Group]) -> None:
        """Sends what was made of an answer that has not begun. origin: with the first of it."""
        groups, data = continuation.encode(made)
        frames = [_FRAME.pack(stream, 0, 0, groups, len(data)), data]
        if origin:
            frames[:0] = _FRAME.pack(stream, 0, 0, 0, len(origin)), origin
        if not self.closed:
            self._frames += frames
            self._waiting_bytes += len(data)
            self._pending.set()

    def _take(self) -> bytes:
        """Everything that waits. The order counts within a stream alone."""
        for stream, pieces in self._texts.items():
            self._add_texts(stream, pieces)
        frames, self._frames, self._texts = self._frames, [], {}
        return b"".join(frames)

    async def room(self, stream: int) -> None:
        """Returns when the gateway can take the stream's next piece."""
        while self._waiting_bytes > _MOST_WAITING_BYTES and not self.closed:
            self._sent.clear()
            await self._sent.wait()
        if not self._writable[stream].is_set():
            await self._writable[stream].wait()

    async def serve(self, receive: Receive, send: Send) -> None:
        """Answers the gateway's request for this connection, until either side closes it."""
        listening = asyncio.create_task(self._listen(receive))
        try:
            kind = [(b"content-type", b"application/octet-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": kind})
            while not self.closed or self._frames or self._texts:
                await self._pending.wait()
                self._pending.clear()
                size = self._waiting_bytes
                await send({"type": "http.response.body", "body": self._take(), "more_body": True})
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
                if (writable := self._writable.get(int(number))) is not None:  # else it has ended since
                    writable.clear() if word == _STOP else writable.set()
        self.close()

    def close(self) -> None:
        """Ends it. Streams that wait for `room` continue."""
        self.closed = True
        for event in (self._pending, self._sent, *self._writable.values()):
            event.set()


class StreamReceiver:
    """The gateway's side, for one replica."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._streams: dict[int, ReplicaConnection] = {}
        self._carrier: ReplicaConnection | None = None
        self._closing = False
        self.settled = asyncio.Event()
        """Set once the replica has taken or refused the connection for the first time."""

    def attach(self, connection: ReplicaConnection, record: StreamRecord) -> bytes:
        """The header line for the next request on `connection`; empty while nothing is multiplexed."""
        if self._carrier is None or self._closing:
            return b""
        number = next(self._numbers)
        self._streams[number] = connection
        connection.attach(number, self._hold, record)
        return b"%b: %d\r\n" % (STREAM, number)

    def detach(self, connection: ReplicaConnection) -> None:
        """Its exchange has ended, or goes on elsewhere; later pieces are dropped."""
        self._streams.pop(connection.stream_id, None)
        if self._closing:
            self.close()

    def close(self) -> None:
        """Ends it when its last stream has ended."""
        self._closing = True
        if self._carrier is not None and not self._streams:
            self._carrier.abort()

    async def follow(self, carrier: ReplicaConnection, secret: str, gateway_id: str) -> None:
        """Passes frames from `carrier` to their streams; it always ends by raising.

        Raises: ConnectionError.
        """
        carrier.request(link.request_head("POST", PATH, secret, gateway_id, link.CHUNKED))
        head = await carrier.head()
        if head.status == 200:
            self._carrier = carrier
        self.settled.set()
        if head.status != 200:
            raise ConnectionAbortedError(f"the replica refused to multiplex with status {head.status}")
        if self._closing:
            self.close()
        try:
            rest = b""
            while piece := await carrier.read():
                rest = self._demultiplex(rest + piece if rest else piece)
            raise ConnectionResetError("the replica ended the multiplexed connection")
        finally:
            self._carrier = None
            streams, self._streams = self._streams, {}
            for connection in streams.values():
                connection.lose_multiplexer()

    def _demultiplex(self, frames: bytes) -> bytes:
        """Passes its pieces to each stream, those that came together at once; returns an incomplete frame."""
        at, size, head_bytes, streams = 0, len(frames), _FRAME.size, self._streams
        pieces: dict[int, list[bytes]] = {}
        ended: set[int] = set()
        while at + head_bytes <= size:
            number, length, count, groups, recorded = _FRAME.unpack_from(frames, at)
            begin = at + head_bytes + recorded
            end = begin + (length >> 1)
            if end > size:
                break
            if (connection := streams.get(number)) is not None:
                data = frames[begin - recorded : begin]
                if data and not groups:
                    connection.record.origin = data
                else:
                    connection.record.add(count, groups, data)
                if count:
                    pieces.setdefault(number, []).append(frames[begin:end])
            if length & 1:
                ended.add(number)
            at = end
        for number, some in pieces.items():
            if (connection := streams.get(number)) is not None:
                try:
                    connection.feed(some[0] if len(some) == 1 else b"".join(some), number in ended)
                except Exception as error:  # of one client: the streams of all others go on
                    log.exception("A client's stream failed.")
                    connection.record.lose("client")
                    connection.fail(repr(error))
        return frames[at:]

    def _hold(self, number: int, stop: bool) -> None:
        """Asks the replica to stop one stream, or to continue it."""
        if self._carrier is not None:
            line = b"%b %d\n" % (_STOP if stop else _GO, number)
            self._carrier.write(b"%x\r\n%b\r\n" % (len(line), line))
