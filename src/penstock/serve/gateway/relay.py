"""Relays a replica's response to the client; per piece, it only moves bytes.

For the client the response begins with its first body byte, not with its headers: until then another replica
can still take over. A stream is relayed in whole events, so that it can be ended properly when it breaks off,
and some go on at another replica then: `OpenStream` is what is kept for that.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from dataclasses import dataclass, field

from penstock.errors import EngineDead, Error, OwnCodeFailed
from penstock.metrics import GatewayMetrics
from penstock.serve.fleet.replica import Lease, Replica, Tried
from penstock.serve.gateway.admission import AdmissionQueue
from penstock.serve.gateway.request import UpstreamRequest
from penstock.serve.gateway.response import ClientResponse
from penstock.serve.gateway.telemetry import timing
from penstock.serve.routing.policy import RoutingRequest
from penstock.transport import link
from penstock.transport.connection import Head, ReplicaConnection
from penstock.transport.continuation import CONTINUED, RESUMABLE, StreamRecord
from penstock.transport.headers import to_client
from penstock.transport.pool import Pool

log = logging.getLogger(__name__)

MOST_DEATHS = 2
"""Crashes after which a request gives up: beyond this, the request itself is the likely cause."""

TOGETHER_S = 1.5
"""Replicas that fail within this time have one cause, such as their node, and once that is not
the request. The links of a node fall silent within the time between two reports.
"""

_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_MOST_HELD_BYTES = 1 << 20
_LOGGED_BYTES = 2048

_CANNOT_NOW = (429, 502, 503, 504)
"""Of an engine that has a queue, a limit or a service of its own behind it."""

_NOT_NOW_S = 1.0  # after such an answer to a stream that has to go on

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


@dataclass(eq=False, slots=True)
class OpenStream:
    """One response. asked: what replicas are picked by. tried: those that failed it.

    connection: to the replica that gives it. lease: of the replica to which it moves. given: the tokens with
    which that replica has to go on. deaths: replicas that failed while they worked on it; once, two that did
    so together are one. hold_s: how long to wait before the next one is picked.
    """

    request: UpstreamRequest
    model_id: str
    asked: RoutingRequest
    reply: ClientResponse
    record: StreamRecord
    metrics: GatewayMetrics
    deaths: int = 0
    hold_s: float = 0.0
    tried: Tried = field(default_factory=Tried)
    events: Events = field(default_factory=Events)
    connection: ReplicaConnection | None = None
    lease: Lease | None = None
    given: bytes = b""
    _tokens: int = 0
    _died_at: float | None = None
    _spared: bool = False

    @property
    def lost(self) -> str:
        """Why it cannot go on at another replica after its first byte; "" while it can."""
        if self.deaths >= MOST_DEATHS:
            return "deaths"
        if self.record.lost or self.request.keeper:
            return self.record.lost or "stored"
        return "" if self.request.body.taken else "memory"

    def fail(self, replica: Replica, why: Exception, *, died: bool, refused: bool) -> None:
        """The replica has not finished the response; another one may be asked when this returns.

        Raises: EngineDead.
        """
        if died:
            self._count_death(time.monotonic())
        self.tried.add(replica, refused and self.reply.started)
        if not self.reply.started:
            self._tokens = self.record.tokens() if self.record.is_handed_over else 0
            if refused:
                self.record.restart()
            if self.deaths >= MOST_DEATHS:
                raise self.end("deaths", why) from why
            return
        if not self.reply.streaming or self.lost:
            raise self.end(self.lost, why) from why
        self.reply.timing.pause()
        self.request.body.need()
        self.tried.serves = self.record.serves
        self._tokens = self.record.tokens()

    def _count_death(self, now: float) -> None:
        before, self._died_at = self._died_at, now
        if before is None or self._spared or now - before >= TOGETHER_S:
            self.deaths += 1
        else:  # whatever else died of it is known a little later
            self._spared, self.hold_s = True, TOGETHER_S

    def end(self, lost: str, why: Exception) -> EngineDead:
        """The error that ends it, counted by its reason."""
        if self.reply.streaming:
            self.metrics.streams_cut.labels(self.model_id, lost).inc()
            log.info("the stream of request %s does not go on (%s): %s", self.request.id, lost, why)
        if lost == "deaths":
            return EngineDead(
                f"{self.deaths + self._spared} replicas failed while they worked on this request; it is not "
                "tried again. It may be what ends them: look into their logs before you send it again.",
                should_retry="false",
            )
        return EngineDead(
            "The replica that was answering has failed; the answer is incomplete. Send the request again."
        )

    def count(self, after: str = "") -> None:
        """Another replica goes on with it. after: how long it paused, for the log."""
        self.metrics.streams_continued.labels(self.model_id).inc()
        self.metrics.tokens_replayed.labels(self.model_id).inc(self._tokens)
        said = "the answer to request %s goes on%s, with %d tokens again"
        log.info(said, self.request.id, after, self._tokens)

    def resumed(self) -> None:
        """The next replica goes on with a stream."""
        pause_s = self.reply.timing.resume()
        self.request.body.spare()
        self.count(f" after {pause_s:.3f} s")
        if self.reply.metrics is not None:
            self.reply.metrics.pause.observe(pause_s)


class OpenStreams:
    """Those of one gateway, by the replica that gives them."""

    def __init__(self) -> None:
        self._at: defaultdict[Replica, dict[OpenStream, None]] = defaultdict(dict)  # in order of begin

    def add(self, replica: Replica, stream: OpenStream) -> None:
        self._at[replica][stream] = None

    def discard(self, replica: Replica, stream: OpenStream) -> None:
        del self._at[replica][stream]
        if not self._at[replica]:
            del self._at[replica]

    def replicas(self, model_id: str) -> list[Replica]:
        """Those that give some."""
        return [replica for replica in self._at if replica.model_id == model_id]

    def move(self, replica: Replica, queue: AdmissionQueue) -> None:
        """Has streams of a replica that leaves go on elsewhere, as far as others have room at once."""
        for stream in list(self._at.get(replica, ())):
            if stream.lease or stream.connection is None or not stream.reply.streaming or stream.lost:
                continue
            stream.tried.add(replica)
            stream.tried.serves = stream.record.serves
            stream.lease = queue.at_once(stream.asked, stream.tried, stream.request.tier)
            if stream.lease is not None:
                stream.connection.fail("it drains, and the stream moves")


async def ask(pool: Pool, head: bytes, stream: OpenStream) -> None:
    """Sends a request to the pool's replica and relays its response. Leaving early aborts the request there.

    When the response has started, the replica is asked to continue it.
    Raises: ReplicaFailed.
    """
    reply, body = stream.reply, stream.request.body
    sent = False
    while True:
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
            connection.request(head[:-2] + line + b"\r\n", body.content, stream.given)
            stream.connection = connection
            return await _relay_response(connection, stream)
        except ConnectionError as error:
            if reply.streaming:
                pool.multiplexer.detach(connection)  # nothing more may come from there
                body.need()  # while a slow client reads what has come, others take what is spare
                if await _sent_all(connection, reply, stream.events):
                    return None
            stale = isinstance(error, ConnectionResetError) and connection.exchanges > 1
            if sent or connection.heard or not stale or len(stream.record.data) > len(stream.given):
                raise ReplicaFailed(str(error), worked=True) from error
            sent = True  # on a stale connection, or the replica died of it: a new connection tells
        finally:
            stream.connection = None
            pool.multiplexer.detach(connection)
            pool.release(connection)


async def _relay_response(connection: ReplicaConnection, stream: OpenStream) -> None:
    reply = stream.reply
    head = await connection.head()
    piece = await connection.read()
    reply.timing.begin(timing.GATEWAY)
    if retry := head.header(link.RETRY):
        worked = retry not in (link.UNTOUCHED, link.REFUSED)
        if (origin := head.header(RESUMABLE)) is not None and not reply.started:
            while more := await connection.read():
                piece += more
            stream.record.take_over(origin, piece)
        reason = f"turned the request away ({retry.decode()})"
        raise ReplicaFailed(reason, worked, refused=retry == link.REFUSED)
    if reply.started:
        if head.status != 200:
            if cannot_now := head.status in _CANNOT_NOW:
                stream.hold_s = _NOT_NOW_S
            raise ReplicaFailed(f"answered {head.status} to go on", worked=not cannot_now)
        stream.resumed()
    else:
        await _start_response(head, piece, stream)
    if head.header(RESUMABLE) is None:
        stream.record.lose("engine")
    await _relay_body(connection, piece, reply, stream.events)


async def _start_response(head: Head, piece: bytes, stream: OpenStream) -> None:
    """Sends the head. piece: the first one of the body."""
    reply = stream.reply
    if head.status == 500 and _OWN_CODE not in piece:
        raise EngineFailed(
            "The engine failed on this request. The server's log says why, under this request's id."
        ) from RuntimeError(f"the engine answered {head.status}: {piece[:_LOGGED_BYTES]!r}")
    if reply.has_fallback and head.status in _CANNOT_NOW:
        raise EngineFailed(f"The engine answered {head.status}.")
    if (goes_on := head.header(CONTINUED)) is not None and head.status == 200:
        stream.count()
        reply.more = [*reply.more, (CONTINUED, goes_on)]  # of a stream it would come too late
    stream.record.origin = head.header(RESUMABLE) or b""
    (stream.request.body.spare if stream.record.origin else stream.request.body.drop)()
    await reply.start(head.status, to_client(head.headers))


async def _relay_body(
    connection: ReplicaConnection, piece: bytes, reply: ClientResponse, events: Events
) -> None:
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
    if connection.stream_ended:
        await reply.piece(events.rest + piece, more=False)
    elif whole := events.of(piece):
        await reply.piece(whole)
    return connection.stream_ended


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
