"""Whole answers of ASGI apps: a JSON value, or an error in the form that clients of the path read."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.asgi import Send
from penstock.errors import Error
from penstock.openai.errors import CONTENT_TYPE, form, headers


async def send_error(send: Send, error: Error, path: str) -> None:
    """Answers with `error`, in the form that clients of `path` read."""
    body = form(path).envelope(error)
    await send({"type": "http.response.start", "status": error.status, "headers": headers(error, body)})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, value: Any) -> None:
    """Answers with `value` as JSON."""
    await send_body(send, msgspec.json.encode(value))


async def send_body(send: Send, body: bytes) -> None:
    """Answers with `body`, which is JSON."""
    fields = [(b"content-type", CONTENT_TYPE), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": fields})
    await send({"type": "http.response.body", "body": body})
