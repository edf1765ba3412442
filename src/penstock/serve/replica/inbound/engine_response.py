"""The response to one request, between the engine's app and the listener.

It holds the start back until the first body byte: then the engine knows where its time went, for the header
`Server-Timing`. Errors of an engine that is about to die do not get out. A stream's body goes over the
multiplexed connection, if there is one; its head and its end go directly. A response that continues another
drops the pieces that its client has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from penstock import tiers
from penstock.asgi import Message, Send
from penstock.engine_control import DEFAULT_WEIGHTS
from penstock.errors import Error, Unavailable
from penstock.openai.asgi_response import is_event_stream, send_error
from penstock.openai.errors import ERROR_EVENTS
from penstock.request_context import (
    EngineTimings,
    EventFrame,
    TimingProbe,
    TokensProbe,
    adapter_stamp,
    record_tokens,
    shortcut,
    timing_probe,
    tokens_so_far,
    using_adapter,
)
from penstock.transport import continuation, link
from penstock.transport.connection import STREAM
from penstock.transport.continuation import CONTINUED, RESUMABLE, Group, Origin
from penstock.transport.multiplexer import StreamSender

_DYING_S = 0.3  # errors raised within this time before the engine dies are attributed to its death


@dataclass(eq=False, slots=True)
class EngineResponse:
    """An ASGI `send` for the engine's app, and the engine's `Shortcut`.

    sender: of the multiplexed connection; None when the gateway wants no stream there. number: of the stream
    on it. path: of the request; tier: its class of work, which its response reports. first_token: called with
    the seconds that the first token took, where that is known. origin: of a stream that can be continued, if
    the engine can. sent: how many pieces the client has of a stream that this one continues. take: sends what
    was made of an answer that has not begun, the first time with the value of `RESUMABLE`. dropped: those
    pieces of `sent` that the app has made again. handed: how many tokens of an answer that has not begun the
    gateway, or the job, has.
    """

    direct: Send
    _sender: StreamSender | None
    _number: int
    _weights: Callable[[], str]
    _path: str
    _tier: str
    _first_token: Callable[[float], None] | None
    _origin: Origin | None = None
    _sent: int = 0
    _take: Callable[[bytes, Sequence[Group]], None] | None = None
    _dropped: int = 0
    handed: int = 0
    started: bool = False
    _continues: bool = False
    _void: bool = False
    _admitted_to: str = field(init=False)  # the version of the weights then
    _recorded: list[Group | None] = field(default_factory=list[Group | None])
    _start: Message | None = None
    _held: list[bytes] = field(default_factory=list[bytes])
    _arrived_at: float = field(default_factory=time.monotonic)
    _probe: TimingProbe = field(default_factory=TimingProbe)
    _tokens: TokensProbe = field(default_factory=TokensProbe)

    def __post_init__(self) -> None:
        self._admitted_to = self._weights()

    def accompany(self) -> None:
        """Puts what engines look for into the context of the running request."""
        timing_probe.set(self._probe)
        tokens_so_far.set(self._tokens)
        shortcut.set(self)
        if self._origin is not None and (self._sender is not None or self._sent):
            record_tokens.set(self._recorded.append)

    def continues(self, adapter: str, weights: str) -> None:
        """The tokens before were made with these."""
        self._continues = True
        self._tokens.adapter, self._tokens.weights = adapter, weights

    async def send(self, message: Message) -> None:
        """For the engine's app."""
        if self._void:
            return
        if message["type"] == "http.response.start":
            self._start = message
            return
        body: bytes = message.get("body", b"")
        if self._start is not None and self._start["status"] == 200 and tiers.is_reported(self._path):
            if message.get("more_body") and not is_event_stream(self._start):
                self._held.append(body)
                return
            message = {**message, "body": (body := self._reported(self._start, body))}
        start, self._start = self._start, None
        while start is not None and None in self._recorded:  # the request has begun anew since
            del self._recorded[: self._recorded.index(None) + 1]
        if start is not None and self._sent and start["status"] == 200 and not self._is_resumable():
            self._end()
            error = Unavailable("This replica cannot continue the stream.")
            await send_error(self.direct, error, self._path, link.turned_away(link.REFUSED))
            return
        if body.startswith(ERROR_EVENTS) or (start and start["status"] >= 500):
            await asyncio.sleep(_DYING_S)  # if the engine dies meanwhile, the listener cancels this
        if start is not None:
            self.started = True
            await self.direct({**start, "headers": [*start["headers"], *self._own_headers(start)]})
            if start["status"] != 200:  # in place of the rest: the client has nothing of it
                self._sent = 0
        if self._dropped < self._sent and not body.startswith(ERROR_EVENTS):
            self._dropped += 1
            if not message.get("more_body"):
                self._end()  # before the place where the client is: it is cut
        elif self._sender is None:
            await self.direct(message)
        else:
            await self._multiplex(self._sender, body, last=not message.get("more_body", False))

    def cut(self) -> None:
        """Drops whatever the app still sends: it may take the end of its task for that of its client."""
        self._void = True
        self._held.clear()
        self._tokens.ask()

    def hand_over(self) -> None:
        """Sends what has been made of an answer that has not begun, since the last call."""
        origin, adapter = self._known_origin(), self._tokens.adapter
        if self.started or self._take is None or origin is None or adapter is None:
            return
        if made := self._tokens.since(self.handed):
            self._take(b"" if self.handed else replace(origin, adapter=adapter).to_header(), made)
            self.handed += sum(len(one.token_ids) for group in made for one in group)

    async def turn_away(self, error: Error) -> None:
        """Answers in place of the app, for another replica, with what that can go on with."""
        away, made = link.turned_away(link.INTERRUPTED), self._tokens.ask()
        origin = self._known_origin()
        if origin is None or self._tokens.adapter is None or not made:
            await send_error(self.direct, error, self._path, away)
            return
        origin = replace(origin, adapter=self._tokens.adapter)
        fields = [*away, (RESUMABLE, origin.to_header())]
        await self.direct({"type": "http.response.start", "status": 503, "headers": fields})
        await self.direct({"type": "http.response.body", "body": continuation.handed(made)})

    def _end(self) -> None:
        """Whatever the app still sends is dropped."""
        self.close()
        self._void, self._sender, self.started = True, None, True

    def _reported(self, start: Message, body: bytes) -> bytes:
        """The first piece of the body, or the whole one of no stream, which reports the request's class."""
        if is_event_stream(start):
            return tiers.reported_event(body, self._tier, self._path)
        whole = tiers.reported(b"".join([*self._held, body]), self._tier, self._path)
        others = [field for field in start["headers"] if field[0].lower() != b"content-length"]
        self._held.clear()
        start["headers"] = [*others, (b"content-length", b"%d" % len(whole))]
        return whole

    def _own_headers(self, start: Message) -> list[tuple[bytes, bytes]]:
        fields = [(b"server-timing", self._timing(is_event_stream(start)))]
        if (version := self._weights()) != DEFAULT_WEIGHTS:
            fields.append((link.WEIGHTS, version.encode()))
        if self._continues and not self._tokens.forgotten:
            fields.append((CONTINUED, b"1"))
        if self._sender is not None and not self._sender.closed and is_event_stream(start):
            fields.append((STREAM, b"%d" % self._number))
            if self._origin is not None and self._is_resumable():
                fields.append((RESUMABLE, replace(self._origin, adapter=_stamp() or "").to_header()))
            self._sender.open(self._number, self._recorded)
        else:
            self._sender = None
        return fields

    def _is_resumable(self) -> bool:
        """Whether the engine has recorded what the first piece was made of, and what it serves is known."""
        stamp = _stamp()
        origin = self._known_origin()
        if not self._recorded or stamp is None or origin is None:
            return False
        return not self._sent or origin.adapter == stamp

    def _known_origin(self) -> Origin | None:
        """None where other weights may make the answer than its origin names: the request waited for them."""
        return self._origin if self._weights() == self._admitted_to else None

    async def _multiplex(self, sender: StreamSender, body: bytes, last: bool) -> None:
        await sender.room(self._number)
        sender.push(self._number, body, last)
        if last:
            await self.direct({"type": "http.response.body", "body": b""})

    def _timing(self, streamed: bool) -> bytes:
        """In milliseconds. front: all but the engine, such as chat template, tokenizer and JSON."""
        total_s = time.monotonic() - self._arrived_at
        spent = self._probe.ask() if self._probe.ask is not None else EngineTimings()
        if self._first_token is not None and not self._sent:
            if streamed:
                self._first_token(total_s)
            elif spent.queue_s is not None and spent.prefill_s is not None:
                self._first_token(spent.queue_s + spent.prefill_s)
        inside = {"engine-queue": spent.queue_s, "prefill": spent.prefill_s, "decode": spent.decode_s}
        known = {name: seconds for name, seconds in inside.items() if seconds is not None}
        parts = {"front": max(0.0, total_s - sum(known.values()))} | known
        return ", ".join(f"{name};dur={seconds * 1e3:.3f}" for name, seconds in parts.items()).encode()

    async def flush(self) -> None:
        """Sends what waits for the end of a response that the app has left unfinished."""
        if self._held and self._start is not None:
            self.started = True
            await self.direct(self._start)
            await self.direct({"type": "http.response.body", "body": b"".join(self._held), "more_body": True})

    def has_begun(self) -> bool:
        """Whether a response has started, or the engine says that it works on the request."""
        ask = self._probe.ask
        return self.started or (ask is not None and ask().queue_s is not None)

    def close(self) -> None:
        """The app has returned."""
        if self._sender is not None and self.started:
            self._sender.end(self._number)
        self._recorded.clear()

    # -- the engine's shortcut

    @property
    def open(self) -> bool:
        return self.started and self._sender is not None

    def push(self, frame: EventFrame, text: bytes) -> bool:
        if self._dropped < self._sent:
            self._dropped += 1
            return True
        return self._sender is None or self._sender.push_text(self._number, frame, text)

    async def room(self) -> None:
        if self._sender is not None:
            await self._sender.room(self._number)


def _stamp() -> str | None:
    """Of the request's adapter: "" without one, None when it is not known."""
    return adapter_stamp.get() if using_adapter.get() else ""
