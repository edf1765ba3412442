"""One request's response over all replicas that give it: what is kept so that another one can go on with it.

`dispatch` makes one for each request and asks it what may follow a failure; `relay` fills it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass, field

from penstock.errors import EngineDead
from penstock.metrics import GatewayMetrics
from penstock.serve.fleet.replica import Lease, Replica, Tried
from penstock.serve.gateway.admission import AdmissionQueue
from penstock.serve.gateway.body import RequestBody
from penstock.serve.gateway.response import ClientResponse
from penstock.serve.routing.policy import RoutingRequest
from penstock.tiers import Tier
from penstock.transport.connection import ReplicaConnection
from penstock.transport.continuation import StreamRecord

log = logging.getLogger(__name__)

MOST_DEATHS = 2
"""Crashes after which a request gives up: beyond this, the request itself is the likely cause."""

_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_MOST_HELD_BYTES = 1 << 20


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
    """One response. is_stored: one replica alone can give it. tried: those that failed it.

    connection: to the replica that gives it. lease: of the replica to which it moves.
    """

    id: str
    model_id: str
    body: RequestBody
    reply: ClientResponse
    record: StreamRecord
    metrics: GatewayMetrics
    is_stored: bool = False
    deaths: int = 0
    tried: Tried = field(default_factory=Tried)
    events: Events = field(default_factory=Events)
    connection: ReplicaConnection | None = None
    lease: Lease | None = None
    _tokens: int = 0

    @property
    def lost(self) -> str:
        """Why it cannot go on at another replica after its first byte; "" while it can."""
        if self.deaths >= MOST_DEATHS:
            return "deaths"
        return (
            self.record.lost or ("stored" if self.is_stored else "") or ("" if self.body.taken else "memory")
        )

    def fail(self, replica: Replica, why: Exception, *, died: bool, refused: bool) -> None:
        """The replica has not finished the response; another one may be asked when this returns.

        Raises: EngineDead.
        """
        self.deaths += died
        self.tried.add(replica, refused)
        if not self.reply.started:
            if self.deaths >= MOST_DEATHS:
                raise self.end("deaths", why) from why
            return
        if not self.reply.streaming or self.lost:
            raise self.end(self.lost, why) from why
        self.reply.timing.pause()
        self.body.need()
        self.tried.serves = self.record.serves
        self._tokens = self.record.tokens()

    def end(self, lost: str, why: Exception) -> EngineDead:
        """The error that ends it, counted by its reason."""
        if self.reply.streaming:
            self.metrics.streams_cut.labels(self.model_id, lost).inc()
            log.info("the stream of request %s does not go on (%s): %s", self.id, lost, why)
        if lost == "deaths":
            return EngineDead(
                f"{self.deaths} replicas failed while they worked on this request; it is not tried again. Do "
                "not send it again: it may be what ends them.",
                should_retry="false",
            )
        return EngineDead(
            "The replica that was answering has failed; the answer is incomplete. Send the request again."
        )

    def resumed(self) -> None:
        """The next replica goes on with it."""
        pause_s = self.reply.timing.resume()
        self.body.spare()
        self.metrics.streams_continued.labels(self.model_id).inc()
        self.metrics.tokens_replayed.labels(self.model_id).inc(self._tokens)
        if self.reply.pauses is not None:
            self.reply.pauses.observe(pause_s)
        log.info(
            "the stream of request %s goes on after %.3f s, with %d tokens again",
            *(self.id, pause_s, self._tokens),
        )


class OpenStreams:
    """Those of one gateway, by the replica that gives them."""

    def __init__(self) -> None:
        self._at: defaultdict[Replica, dict[OpenStream, tuple[RoutingRequest, Tier]]] = defaultdict(dict)

    def add(self, replica: Replica, stream: OpenStream, asked: RoutingRequest, tier: Tier) -> None:
        self._at[replica][stream] = asked, tier

    def discard(self, replica: Replica, stream: OpenStream) -> None:
        del self._at[replica][stream]
        if not self._at[replica]:
            del self._at[replica]

    def move(self, replica: Replica, queue: AdmissionQueue) -> None:
        """Has streams of a replica that drains go on elsewhere, as far as others have room at once."""
        for stream, (asked, tier) in list(self._at.get(replica, {}).items()):
            if stream.lease or stream.connection is None or not stream.reply.streaming or stream.lost:
                continue
            stream.tried.add(replica)
            stream.tried.serves = stream.record.serves
            stream.lease = queue.at_once(asked, stream.tried, tier)
            if stream.lease is not None:
                stream.connection.fail("it drains, and the stream moves")
