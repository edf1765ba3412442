"""Answers of ASGI apps: a JSON value, a stream, or an error in the form that clients of the path read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.asgi import Send
from penstock.errors import Error
from penstock.openai.errors import CONTENT_TYPE, form, headers

_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]


async def send_error(send: Send, error: Error, path: str, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """Answers with `error`, in the form that clients of `path` read. more: header fields."""
    body = form(path).envelope(error)
    fields = [*headers(error, body), *more]
    await send({"type": "http.response.start", "status": error.status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


class EventStream:
    """A response of events. Nothing is sent before the first one, so that an earlier failure has a status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def add(self, events: bytes, more: bool = True) -> None:
        """more: whether others follow."""
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        await self._send({"type": "http.response.body", "body": events, "more_body": more})


async def send_json(send: Send, value: Any) -> None:
    """Answers with `value` as JSON."""
    await send_body(send, msgspec.json.encode(value))


async def send_body(send: Send, body: bytes, content_type: bytes = CONTENT_TYPE) -> None:
    """Answers with `body`, which is JSON unless `content_type` says otherwise."""
    fields = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": fields})
    await send({"type": "http.response.body", "body": body})
