"""One connection from a batch job to a replica that carries all rows between them, both ways.

An HTTP request for each row costs both sides a head, its parsing and a write. Here rows and cancellations are
frames in the body of one request, and responses are frames in the body of its response; what is ready at the
same time leaves in one write. Before its response, the tokens of a long row come now and then, see
`continuation`. The end of the connection means that the rows on it were interrupted. Here are the frames and
the job's side; the replica's is `serve.replica.inbound.rows`.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import msgspec

from penstock.transport import link
from penstock.transport.connection import ReplicaConnection
from penstock.transport.continuation import RESUMABLE, Made, StreamRecord

PATH = "/_penstock/rows"
UNFINISHED = 102
"""Status of a `RowResponse` that is not the row's last one."""
RESUMABLE_NAME = RESUMABLE.decode()

_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode


class RowCall(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """A POST of the JSON `body`. number: its own on this connection. adapter: "" for the base model.

    made: what to go on with; None from a job that keeps no tokens.
    """

    number: int
    path: str
    body: bytes
    adapter: str = ""
    made: Made | None = None


class RowCancel(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """The row with this number is not wanted any more, and gets no response."""

    number: int


class RowResponse(msgspec.Struct, array_like=True, frozen=True):
    """headers: those that say whether and when to send the row again, with names in lower case.

    body: of an unfinished one, or one with `RESUMABLE`, tokens for `StreamRecord`.
    """

    number: int
    status: int
    body: bytes
    headers: Mapping[str, str] = {}


Frame = RowCall | RowCancel
_Message = TypeVar("_Message", Frame, RowResponse)
decode_frame = msgspec.msgpack.Decoder(Frame).decode
_decode_response = msgspec.msgpack.Decoder(RowResponse).decode


def framed(message: Frame | RowResponse) -> bytes:
    """The message with its length before it."""
    encoded = _encode(message)
    return _LENGTH.pack(len(encoded)) + encoded


def messages(data: bytearray, piece: bytes, decode: Callable[[bytes], _Message]) -> Iterator[_Message]:
    """The messages that `piece` completes. data: what came before it and is not complete, for the next call.

    A frame of many pieces is copied twice, however many they are. Raises: msgspec.DecodeError.
    """
    data += piece
    found, at = list[bytes](), 0
    with memoryview(data) as view:
        while at + _LENGTH.size <= len(view):
            begin = at + _LENGTH.size
            end = begin + _LENGTH.unpack_from(view, at)[0]
            if end > len(view):
                break
            found.append(bytes(view[begin:end]))
            at = end
    del data[:at]
    return map(decode, found)


class RowSender:
    """The rows on `carrier`, a new connection. lost: called when it has ended."""

    def __init__(self, carrier: ReplicaConnection, lost: Callable[[], None]) -> None:
        self._carrier = carrier
        self._lost = lost
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[asyncio.Future[RowResponse], StreamRecord | None]] = {}
        self._frames: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._reading: asyncio.Task[None] | None = None
        self._ended: ConnectionError | None = None

    async def open(self, secret: str, sender: str) -> None:
        """Raises: ConnectionError."""
        self._carrier.request(link.request_head("POST", PATH, secret, sender, link.CHUNKED))
        head = await self._carrier.head()
        if head.status != 200:
            raise ConnectionAbortedError(f"it answered {head.status} to the connection for rows")
        self._reading = asyncio.create_task(self._read())

    async def send(
        self, path: str, body: bytes, adapter: str, record: StreamRecord | None = None
    ) -> RowResponse:
        """Cancelling it cancels the row in the replica.

        record: what the row goes on with; gets what the replica makes. None to keep nothing.
        Raises: ConnectionRefusedError when the connection had ended before; ConnectionError when it ends.
        """
        if self._ended is not None:
            raise ConnectionRefusedError(str(self._ended))
        number = next(self._numbers)
        response: asyncio.Future[RowResponse] = self._loop.create_future()
        self._waiting[number] = response, record
        made = record.made() if record is not None else None
        self._push(RowCall(number, path, body, adapter, made))
        try:
            return await response
        finally:
            del self._waiting[number]
            if response.cancelled():
                self._push(RowCancel(number))

    def close(self) -> None:
        """Ends it, and the rows on it."""
        if self._reading is not None:
            self._reading.cancel()
        self._carrier.abort()

    def _push(self, message: Frame) -> None:
        if not self._frames:
            self._loop.call_soon(self._flush)
        self._frames.append(framed(message))

    def _flush(self) -> None:
        frames = b"".join(self._frames)
        self._frames.clear()
        self._carrier.write(b"%x\r\n%b\r\n" % (len(frames), frames))

    async def _read(self) -> None:
        why = ConnectionResetError("the replica ended the connection for rows")
        data = bytearray()
        try:
            while piece := await self._carrier.read():
                for response in messages(data, piece, _decode_response):
                    if response.number in self._waiting:  # else it was cancelled
                        self._take(response, *self._waiting[response.number])
        except (OSError, msgspec.DecodeError) as error:
            why = ConnectionResetError(str(error))
        finally:
            self._ended = why
            self._lost()
            self._carrier.abort()
            for waiting, _ in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(why)

    def _take(
        self, response: RowResponse, waiting: asyncio.Future[RowResponse], record: StreamRecord | None
    ) -> None:
        origin = response.headers.get(RESUMABLE_NAME, "").encode()
        if response.status != UNFINISHED:
            if not waiting.done():
                waiting.set_result(response)
            if origin and record is not None:
                record.take_over(origin, response.body)
        elif record is not None:
            record.add_made(origin, response.body)
