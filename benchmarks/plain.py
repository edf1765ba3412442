"""The least that a replica can do, where the simulator would be the bottleneck or cannot follow.

It reads the request and answers with a short JSON, or, when asked for a stream, with ready-made events at a
fixed pace, all streams in one timer. It counts nothing and looks into nothing but one word.
"""

from __future__ import annotations

import asyncio
import json

from penstock.asgi import Message, Receive, Scope, Send

_JSON = [(b"content-type", b"application/json")]
_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]


def _event(content: str, size: int) -> bytes:
    """An event of `size` bytes in the form of a chat chunk."""
    chunk = {
        "id": "",
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": {"content": content}}],
    }
    spare = size - len(f"data: {json.dumps(chunk)}\n\n")
    return f"data: {json.dumps({**chunk, 'id': 'x' * max(0, spare)})}\n\n".encode()


class Plain:
    """ASGI app. Units: events of one answer; seconds between two of them, 0: as fast as they are taken."""

    def __init__(self, events: int = 64, every_s: float = 0.0, event_bytes: int = 220) -> None:
        self._events, self._every_s = events, every_s
        self._event = _event("token", event_bytes)
        self._body = json.dumps({"object": "chat.completion", "choices": [], "id": "x" * 200}).encode()
        self._tick: asyncio.Event | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await self._wants_stream(receive):
            await self._stream(send)
        else:
            length = (b"content-length", b"%d" % len(self._body))
            await send({"type": "http.response.start", "status": 200, "headers": [*_JSON, length]})
            await send({"type": "http.response.body", "body": self._body})

    async def _wants_stream(self, receive: Receive) -> bool:
        stream = False
        while True:
            message: Message = await receive()
            stream = stream or b'"stream": true' in message.get("body", b"")
            if not message.get("more_body"):
                return stream

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
        piece: Message = {"type": "http.response.body", "body": self._event, "more_body": True}
        for _ in range(self._events):
            await (self._next_tick() if self._every_s else asyncio.sleep(0))
            await send(piece)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _next_tick(self) -> None:
        if self._tick is None:
            self._tick = asyncio.Event()
            asyncio.get_running_loop().call_later(self._every_s, self._ring)
        await self._tick.wait()

    def _ring(self) -> None:
        tick, self._tick = self._tick, None
        if tick is not None:
            tick.set()
