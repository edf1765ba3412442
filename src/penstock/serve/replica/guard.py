"""What stands before the engine's app on a replica's listener: secret, count, link, and the last word.

It sees to it that a gateway can tell a death from an answer: a request that the engine's death hit before its
first byte is marked for another replica, one that was hit later is cut off, whatever the engine's app says.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from penstock.asgi import TRUSTED, ASGIApp, Message, Receive, Scope, Send
from penstock.engine import Load
from penstock.engine_control import DEFAULT_WEIGHTS
from penstock.errors import EngineDead, Error, Unavailable
from penstock.openai.errors import envelope, headers
from penstock.request_context import EngineTimings, TimingProbe, current_replica, shortcut
from penstock.request_context import timing_probe as watching
from penstock.serve.http import direct_writer
from penstock.transport import link, multiplexer
from penstock.transport.address import Address
from penstock.transport.connection import STREAM
from penstock.transport.link import ADAPTER
from penstock.transport.multiplexer import Sender

log = logging.getLogger(__name__)

_DYING_S = 0.3  # an error this close before the engine's death is the death's
_FAILURES = (b'data: {"error"', b"event: error")


class Adapters(Protocol):
    """What a replica says of its adapters."""

    def loaded(self) -> Iterable[str]:
        """Names of those in the engine. Cheap: asked ten times a second."""
        ...

    async def listed(self) -> Sequence[str]:
        """Names of all that a request may name. Raises: Error when their place cannot be read."""
        ...


def _ready() -> link.State:
    return "ready"


def _default() -> str:
    return DEFAULT_WEIGHTS


@dataclass(frozen=True, slots=True)
class Facts:
    """How a replica is, asked anew each time.

    hello: `model_id`, `max_model_len`, `kv_tokens`. weights: their version. adapters: of a model that takes
    some; after a change of the loaded ones, and of `hello` and `state`, call `tell_links`.
    """

    load: Callable[[], Load]
    hello: Callable[[], link.Hello]
    state: Callable[[], link.State] = _ready
    weights: Callable[[], str] = _default
    adapters: Adapters | None = None


class Guard:
    """ASGI app around the engine's app."""

    def __init__(self, app: ASGIApp, facts: Facts, address: Address) -> None:
        self._app = app
        self._facts = facts
        self._adapters = facts.adapters
        self._secret = address.secret.encode()
        self._replica_id = address.replica_id
        self._draining = False
        self._refusal: Unavailable | None = None
        self._links_end = False
        self._changed = asyncio.Event()  # set, and replaced, when links have something to say at once
        self._by_gateway: Counter[bytes] = Counter()
        self._trunks: dict[bytes, Sender] = {}
        self.open: set[asyncio.Task[object]] = set()

    def say_draining(self) -> None:
        """Gateways send nothing new from now on."""
        self._draining = True
        self.tell_links()

    def refuse(self, why: Unavailable) -> None:
        """New requests are answered 503, marked for another replica."""
        self._refusal = self._refusal or why

    def end_links(self) -> None:
        """Every gateway takes this replica for dead."""
        self._links_end = True
        self.tell_links()
        for sender in self._trunks.values():
            sender.close()

    def die(self, reason: str) -> None:
        """The engine is dead: ends the links, and what is open."""
        log.error("The engine died (%s); %d open requests fail.", reason, len(self.open))
        self._refusal = EngineDead("The engine behind this replica died.")
        self.end_links()
        self.cut()

    def cut(self) -> int:
        """Ends every open request; gives their number."""
        tasks = list(self.open)
        for task in tasks:
            task.cancel()
        return len(tasks)

    def tell_links(self) -> None:
        """What has changed is said now, instead of within `COALESCE_S`."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = dict(scope["headers"])
        if not hmac.compare_digest(fields.get(link.SECRET, b""), self._secret):
            return await _refuse(send, 403, Unavailable("Only gateways may ask here."), [])
        if (way_out := direct_writer.of(scope)) is not None:
            way_out.accept()
        gateway = fields.get(link.GATEWAY, b"")
        if scope["path"] == link.PATH:
            return await self._talk(gateway, receive, send)
        if scope["path"] == multiplexer.PATH:
            return await self._carry(gateway, receive, send)
        if scope["path"] == link.ADAPTERS_PATH:
            return await _list(send, self._adapters)
        if self._refusal is not None:
            return await _turn_away(send, self._refusal, link.UNTOUCHED)
        scope["headers"] = [field for field in scope["headers"] if _for_app(field[0])]
        scope["extensions"] = {**scope.get("extensions", {}), TRUSTED: {}}
        current_replica.set(self._replica_id)
        trunk_to = self._trunks.get(gateway)
        answer = _Answer(send, trunk_to, int(fields.get(STREAM, 0)), self._facts.weights)
        return await self._pass(gateway, scope, receive, answer)

    async def _pass(self, gateway: bytes, scope: Scope, receive: Receive, answer: _Answer) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.open.add(task)
        self._by_gateway[gateway] += 1
        try:
            await self._app(scope, receive, answer.send)
        except asyncio.CancelledError:
            if self._refusal is None:
                raise
            task.uncancel()
        finally:
            self.open.discard(task)
            self._by_gateway[gateway] -= 1
            if not self._by_gateway[gateway]:
                del self._by_gateway[gateway]  # else those that have ended would stay
            answer.close()
        if self._refusal is not None and not answer.started:
            await _turn_away(answer.direct, self._refusal, link.INTERRUPTED)
        # What has started and not ended is cut by uvicorn as soon as we return.

    async def _carry(self, gateway: bytes, receive: Receive, send: Send) -> None:
        """The trunk, until it ends here or there."""
        sender = self._trunks[gateway] = Sender()
        try:
            await sender.talk(receive, send)
        finally:
            if self._trunks.get(gateway) is sender:
                del self._trunks[gateway]

    async def _talk(self, gateway: bytes, receive: Receive, send: Send) -> None:
        """The link: hello, then reports, until it is ended here or there."""
        gone = asyncio.create_task(_disconnect(receive))
        kind = [(b"content-type", b"application/x-ndjson")]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": kind})
            await self._report_to(gateway, send, gone)
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()

    async def _report_to(self, gateway: bytes, send: Send, gone: asyncio.Task[None]) -> None:
        last, beat_due, told, said = None, 0.0, None, None
        while not gone.done() and not self._links_end:
            changed = self._changed
            if (hello := self._facts.hello()) != said:
                await _say(send, link.line(hello))
                said = hello
            if self._adapters and (now := link.Adapters(tuple(sorted(self._adapters.loaded())))) != told:
                await _say(send, link.line(now))
                told = now
            report = self._report(gateway)
            if report != last or time.monotonic() >= beat_due:
                await _say(send, link.line(report))
                last, beat_due = report, time.monotonic() + link.BEAT_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), link.COALESCE_S)

    def _report(self, gateway: bytes) -> link.Report:
        load = self._facts.load()
        return link.Report(
            state="draining" if self._draining else self._facts.state(),
            running=load.running,
            waiting=load.waiting,
            waiting_tokens=load.waiting_tokens,
            kv_usage=round(load.kv_usage, 2),
            elsewhere=len(self.open) - self._by_gateway[gateway],
        )


class _Answer:
    """ASGI send that holds the start back until the first body byte, and no dying engine's error gets out.

    By then the engine knows where its time went: it stands in the answer's `Server-Timing`. The pieces of a
    stream go to the trunk, where there is one; its head and its end go directly.
    """

    __slots__ = ("_arrived_at", "_number", "_sender", "_start", "_watch", "_weights", "direct", "started")

    def __init__(self, direct: Send, sender: Sender | None, number: int, weights: Callable[[], str]) -> None:
        """number: of the stream on the trunk; 0 when the gateway wants nothing there."""
        self._weights = weights
        self._arrived_at = time.monotonic()
        self._watch = TimingProbe()
        watching.set(self._watch)
        shortcut.set(self)
        self.direct = direct
        self._sender = sender if number else None
        self._number = number
        self._start: Message | None = None
        self.started = False

    async def send(self, message: Message) -> None:
        """For the engine's app."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        start, self._start = self._start, None
        body: bytes = message.get("body", b"")
        if body.startswith(_FAILURES) or (start and start["status"] >= 500):
            await asyncio.sleep(_DYING_S)  # where it was a death, the guard cancels us here
        if start is not None:
            self.started = True
            await self.direct({**start, "headers": [*start["headers"], *self._own_headers(start)]})
        if self._sender is None:
            await self.direct(message)
        else:
            await self._carry(self._sender, body, last=not message.get("more_body", False))

    def _own_headers(self, start: Message) -> list[tuple[bytes, bytes]]:
        fields = [(b"server-timing", self._timing())]
        if (version := self._weights()) != DEFAULT_WEIGHTS:
            fields.append((link.WEIGHTS, version.encode()))
        kinds = [value for name, value in start["headers"] if name.lower() == b"content-type"]
        if (
            self._sender is not None
            and not self._sender.closed
            and kinds
            and kinds[0].startswith(b"text/event-stream")
        ):
            self._sender.join(self._number)
            fields.append((STREAM, b"%d" % self._number))
        else:
            self._sender = None
        return fields

    async def _carry(self, sender: Sender, body: bytes, last: bool) -> None:
        await sender.room(self._number)
        sender.push(self._number, body, last)
        if last:
            await self.direct({"type": "http.response.body", "body": b""})

    # -- the engine's shortcut

    @property
    def open(self) -> bool:
        return self.started and self._sender is not None

    def push(self, piece: bytes) -> bool:
        return self._sender is None or self._sender.push(self._number, piece)

    async def room(self) -> None:
        if self._sender is not None:
            await self._sender.room(self._number)

    def close(self) -> None:
        """The app has left."""
        if self._sender is not None and self.started:
            self._sender.leave(self._number)

    def _timing(self) -> bytes:
        """In milliseconds. front: all around the engine, such as chat template, tokens and JSON."""
        total_s = time.monotonic() - self._arrived_at
        spent = self._watch.ask() if self._watch.ask is not None else EngineTimings()
        inside = {"engine-queue": spent.queue_s, "prefill": spent.prefill_s, "decode": spent.decode_s}
        known = {name: seconds for name, seconds in inside.items() if seconds is not None}
        parts = {"front": max(0.0, total_s - sum(known.values()))} | known
        return ", ".join(f"{name};dur={seconds * 1e3:.3f}" for name, seconds in parts.items()).encode()


def _for_app(name: bytes) -> bool:
    return name == ADAPTER or not name.startswith(b"x-penstock-")


async def _say(send: Send, text: bytes) -> None:
    await send({"type": "http.response.body", "body": text, "more_body": True})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _list(send: Send, adapters: Adapters | None) -> None:
    try:
        body = msgspec.json.encode(list(await adapters.listed()) if adapters else [])
    except Error as error:
        log.warning("The adapters cannot be listed: %s", error, exc_info=error)
        await _refuse(send, error.status, error, [])
        return
    kind = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": kind})
    await send({"type": "http.response.body", "body": body})


async def _turn_away(send: Send, why: Unavailable, state: bytes) -> None:
    await _refuse(send, why.status, why, [(link.RETRY, state), (b"connection", b"close")])


async def _refuse(send: Send, status: int, why: Error, more: list[tuple[bytes, bytes]]) -> None:
    body = envelope(why)
    await send({"type": "http.response.start", "status": status, "headers": headers(why, body) + more})
    await send({"type": "http.response.body", "body": body})
