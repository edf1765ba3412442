"""The gateway behind Ray Serve's own HTTP: fewer and larger pieces, and no request id twice.

Serve spends some 300 us on each piece, whatever its size. What a stream makes within 10 ms leaves together,
within more where many streams are open; its first pieces, and with them the first token, leave at once. Serve
assigns an id to each request without one, so the gateway and Serve always use the same id.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.asgi import ASGIApp, Message, Receive, Scope, Send
from penstock.transport.headers import REQUEST_ID

_PIECES_PER_S = 1000
"""Upper bound over all streams; costs about a third of a core in Serve's proxy and ingress replica."""
_LEAST_S, _MOST_S = 0.01, 0.1
_MOST_HELD_BYTES = 64 * 1024  # of one stream, before its replica is held back
_AT_ONCE = 2
"""Pieces never held: a chat stream opens with an event without text, the second has the first token."""


@dataclass(eq=False)
class Coalesced:
    """ASGI around `app`."""

    _app: ASGIApp
    _streams: int = 0

    def interval_s(self) -> float:
        """How long a stream's pieces are held now."""
        return min(max(_LEAST_S, self._streams / _PIECES_PER_S), _MOST_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        response = _Response(send, self.interval_s)
        self._streams += 1
        try:
            await self._app(scope, receive, response.send)
        finally:
            self._streams -= 1
            response.close()
        return None


@dataclass(eq=False, slots=True)
class _Response:
    """One response. `send` is called by one task, as in ASGI."""

    _send: Send
    _interval_s: Callable[[], float]
    _passed: int = 0
    _held: list[bytes] = field(default_factory=list[bytes])
    _held_bytes: int = 0
    _now: asyncio.Event = field(default_factory=asyncio.Event)
    _flushing: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        if message["type"] != "http.response.body":
            await self._send(message)
        elif not message.get("more_body"):
            self._now.set()
            if self._flushing is not None:
                await asyncio.shield(self._flushing)  # raises what sending raised; an error event may follow
            await self._send(message)
        elif self._passed < _AT_ONCE:
            self._passed += 1
            await self._send(message)
        else:
            self._held.append(message.get("body", b""))
            self._held_bytes += len(self._held[-1])
            if self._flushing is None or self._flushing.done():
                if self._flushing is not None:
                    self._flushing.result()  # raises what sending raised
                self._flushing = asyncio.create_task(self._flush())
            if self._held_bytes > _MOST_HELD_BYTES:
                self._now.set()
                await asyncio.shield(self._flushing)

    async def _flush(self) -> None:
        while self._held:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s()):
                    await self._now.wait()
            self._now.clear()
            body, self._held, self._held_bytes = b"".join(self._held), [], 0
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    def close(self) -> None:
        """Discards what is held when the app ends before its response has."""
        if self._flushing is not None:
            self._flushing.cancel()


def without_request_id(app: ASGIApp) -> ASGIApp:
    """`app` without the request id in responses: Serve adds it, clients would read it twice."""

    async def proxied(scope: Scope, receive: Receive, send: Send) -> None:
        async def without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                fields = [field for field in message["headers"] if field[0] != REQUEST_ID]
                message = {**message, "headers": fields}
            await send(message)

        await app(scope, receive, without_id)

    return proxied


def behind_haproxy() -> bool:
    """Whether requests come through HAProxy instead of Serve's proxy: Ray's own switch for the cluster."""
    return os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"


def behind_serve(app: ASGIApp) -> ASGIApp:
    """`app` for Serve's HTTP."""
    proxied = without_request_id(app)
    return proxied if behind_haproxy() else Coalesced(proxied)
