"""Relays a replica's response to the client; per piece, it only moves bytes.

For the client the response begins with its first body byte, not with its headers: until then another replica
can still take over. A stream is relayed in whole events, so that it can be ended properly when it breaks off.
"""

from __future__ import annotations

from penstock.errors import Error, OwnCodeFailed
from penstock.serve.gateway.body import RequestBody
from penstock.serve.gateway.response import ClientResponse
from penstock.serve.gateway.telemetry import timing
from penstock.transport import link
from penstock.transport.connection import ReplicaConnection
from penstock.transport.headers import to_client
from penstock.transport.pool import Pool

_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_MOST_HELD_BYTES = 1 << 20
_LOGGED_BYTES = 2048

_CANNOT_NOW = (429, 502, 503, 504)
"""Of an engine that has a queue, a limit or a service of its own behind it."""

_OWN_CODE = f'"code":"{OwnCodeFailed.code}"'.encode()
"""In the body of a 500 whose message is meant for clients."""


class ReplicaFailed(Exception):
    """The replica did not finish its response. worked: it may have started on the request."""

    def __init__(self, reason: str, worked: bool) -> None:
        super().__init__(reason)
        self.worked = worked


class EngineFailed(Error):
    """The engine answered 500, or that it cannot now and another model may. The message is for clients, its
    cause for the log.
    """


async def ask(pool: Pool, head: bytes, body: RequestBody, reply: ClientResponse) -> None:
    """Sends a request to the pool's replica and relays its response. Leaving early aborts the request there.

    Raises: ReplicaFailed; when `reply` has not started, another replica may be asked.
    """
    sent = False
    while True:
        reply.timing.begin(timing.CONNECT)
        try:
            connection = await (pool.connect() if sent else pool.acquire())
        except OSError as error:
            busy = isinstance(error, TimeoutError)  # it lives
            raise ReplicaFailed(f"cannot be reached: {error}", worked=sent and not busy) from error
        reply.timing.begin(timing.REPLICA)
        try:
            stream = pool.multiplexer.attach(connection)  # one more header line, or none
            connection.request(head[:-2] + stream + b"\r\n", body.content)
            return await _pass_on(connection, reply)
        except ConnectionError as error:
            stale = isinstance(error, ConnectionResetError) and connection.exchanges > 1
            if sent or connection.heard or not stale:
                raise ReplicaFailed(str(error), worked=True) from error
            sent = True  # on a stale connection, or the replica died of it: a new connection tells
        finally:
            pool.multiplexer.detach(connection)
            pool.release(connection)


async def _pass_on(connection: ReplicaConnection, reply: ClientResponse) -> None:
    head = await connection.head()
    piece = await connection.read()
    reply.timing.begin(timing.GATEWAY)
    if retry := head.header(link.RETRY):
        raise ReplicaFailed(f"turned the request away ({retry.decode()})", worked=retry != link.UNTOUCHED)
    if head.status == 500 and _OWN_CODE not in piece:
        raise EngineFailed(
            "The engine failed on this request. The server's log says why, under this request's id."
        ) from RuntimeError(f"the engine answered {head.status}: {piece[:_LOGGED_BYTES]!r}")
    if reply.has_fallback and head.status in _CANNOT_NOW:
        raise EngineFailed(f"The engine answered {head.status}.")
    await reply.start(head.status, to_client(head.headers))
    events = Events()
    while not connection.exhausted:
        if whole := events.of(piece) if reply.streaming else piece:
            await reply.piece(whole)
        if reply.streaming and reply.writer is not None and reply.writer.takes_chunks:
            await _pour(connection, reply, events)
        piece = await connection.read()
    await reply.piece(events.rest + piece, more=False)


async def _pour(connection: ReplicaConnection, reply: ClientResponse, events: Events) -> None:
    """Relays all but the end of a stream from one socket's callback to the other socket, without waking this
    task.
    """
    writer = reply.writer
    assert writer is not None

    def sink(piece: bytes) -> bool:
        whole = events.of(piece)
        return reply.event_now(whole) if whole else True

    writer.drained = connection.resume
    try:
        await connection.read_into(sink)
    finally:
        writer.drained = None


class Events:
    """Splits a stream into whole events. rest: the start of the next one."""

    __slots__ = ("rest",)

    def __init__(self) -> None:
        self.rest = b""

    def of(self, piece: bytes) -> bytes:
        """Those that are complete with `piece`. What is too large to buffer passes through."""
        if not self.rest and piece.endswith(_EVENT_ENDS):
            return piece
        stream, self.rest = self.rest + piece, b""
        if len(stream) > _MOST_HELD_BYTES:
            return stream
        end = max(stream.rfind(mark) + len(mark) if mark in stream else 0 for mark in _EVENT_ENDS)
        self.rest = stream[end:]
        return stream[:end]
