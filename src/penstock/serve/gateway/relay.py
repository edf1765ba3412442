"""Relays a replica's response to the client; per piece, it only moves bytes.

For the client the response begins with its first body byte, not with its headers: until then another replica
can still take over. A stream is relayed in whole events, so that it can be ended properly when it breaks off,
and some go on at another replica then, see `open_stream`.
"""

from __future__ import annotations

from penstock.errors import Error, OwnCodeFailed
from penstock.serve.gateway.open_stream import Events, OpenStream
from penstock.serve.gateway.response import ClientResponse
from penstock.serve.gateway.telemetry import timing
from penstock.transport import link
from penstock.transport.connection import Head, ReplicaConnection
from penstock.transport.continuation import RESUMABLE
from penstock.transport.headers import to_client
from penstock.transport.pool import Pool

_LOGGED_BYTES = 2048

_CANNOT_NOW = (429, 502, 503, 504)
"""Of an engine that has a queue, a limit or a service of its own behind it."""

_OWN_CODE = f'"code":"{OwnCodeFailed.code}"'.encode()
"""In the body of a 500 whose message is meant for clients."""


class ReplicaFailed(Exception):
    """The replica did not finish its response. worked: it may have started on the request. refused: it cannot
    continue this stream.
    """

    def __init__(self, reason: str, worked: bool, refused: bool = False) -> None:
        super().__init__(reason)
        self.worked = worked
        self.refused = refused


class EngineFailed(Error):
    """The engine answered 500, or that it cannot now and another model may. The message is for clients, its
    cause for the log.
    """


async def ask(pool: Pool, head: bytes, stream: OpenStream) -> None:
    """Sends a request to the pool's replica and relays its response. Leaving early aborts the request there.

    When the response has started, the replica is asked to continue it.
    Raises: ReplicaFailed.
    """
    reply, body = stream.reply, stream.body
    sent = False
    while True:
        if not reply.started:
            stream.record.restart()
        reply.timing.begin(timing.CONNECT)
        try:
            fresh = sent or reply.started
            connection = await (pool.connect() if fresh else pool.acquire())
        except OSError as error:
            busy = isinstance(error, TimeoutError)  # it lives
            raise ReplicaFailed(f"cannot be reached: {error}", worked=sent and not busy) from error
        reply.timing.begin(timing.REPLICA)
        try:
            line = pool.multiplexer.attach(connection, stream.record)  # one more header line, or none
            connection.request(head[:-2] + line + b"\r\n", body.content, bytes(stream.record.data))
            stream.connection = connection
            return await _pass_on(connection, stream)
        except ConnectionError as error:
            if reply.streaming:
                pool.multiplexer.detach(connection)  # nothing more may come from there
                if await _sent_all(connection, reply, stream.events):
                    return None
            stale = isinstance(error, ConnectionResetError) and connection.exchanges > 1
            if sent or connection.heard or not stale:
                raise ReplicaFailed(str(error), worked=True) from error
            sent = True  # on a stale connection, or the replica died of it: a new connection tells
        finally:
            stream.connection = None
            pool.multiplexer.detach(connection)
            pool.release(connection)


async def _pass_on(connection: ReplicaConnection, stream: OpenStream) -> None:
    reply = stream.reply
    head = await connection.head()
    piece = await connection.read()
    reply.timing.begin(timing.GATEWAY)
    if retry := head.header(link.RETRY):
        worked = retry not in (link.UNTOUCHED, link.REFUSED)
        reason = f"turned the request away ({retry.decode()})"
        raise ReplicaFailed(reason, worked, refused=retry == link.REFUSED)
    if reply.started:
        if head.status != 200:
            raise ReplicaFailed(f"answered {head.status} to go on", worked=True)
        stream.resumed()
    else:
        await _start(head, piece, stream)
    if head.header(RESUMABLE) is None:
        stream.record.lose("engine")
    await _relay(connection, piece, reply, stream.events)


async def _start(head: Head, piece: bytes, stream: OpenStream) -> None:
    """Sends the head. piece: the first one of the body."""
    reply = stream.reply
    if head.status == 500 and _OWN_CODE not in piece:
        raise EngineFailed(
            "The engine failed on this request. The server's log says why, under this request's id."
        ) from RuntimeError(f"the engine answered {head.status}: {piece[:_LOGGED_BYTES]!r}")
    if reply.has_fallback and head.status in _CANNOT_NOW:
        raise EngineFailed(f"The engine answered {head.status}.")
    stream.record.origin = head.header(RESUMABLE) or b""
    (stream.body.spare if stream.record.origin else stream.body.drop)()
    await reply.start(head.status, to_client(head.headers))


async def _relay(connection: ReplicaConnection, piece: bytes, reply: ClientResponse, events: Events) -> None:
    while not connection.exhausted:
        if whole := events.of(piece) if reply.streaming else piece:
            await reply.piece(whole)
        if reply.streaming and reply.writer is not None and reply.writer.takes_chunks:
            await _pour(connection, reply, events)
        piece = await connection.read()
    await reply.piece(events.rest + piece, more=False)


async def _sent_all(connection: ReplicaConnection, reply: ClientResponse, events: Events) -> bool:
    """Sends what has come from a connection that is lost; returns whether that is all of the stream."""
    piece = connection.unread()
    if connection.complete:
        await reply.piece(events.rest + piece, more=False)
    elif whole := events.of(piece):
        await reply.piece(whole)
    return connection.complete


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
