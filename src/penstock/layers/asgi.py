"""One HTTP exchange as layers before the engine's app see it: its body read, put back, or answered here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

import msgspec

from penstock.engine import Message, Receive, Scope, Send
from penstock.errors import Error
from penstock.openai.errors import CONTENT_TYPE, form, headers

_Result = TypeVar("_Result")

_decode = msgspec.json.Decoder().decode


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def read(receive: Receive) -> bytes:
    """The whole body. Raises: ClientGone."""
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


def parsed(body: bytes) -> dict[str, Any] | None:
    """The JSON object in `body`; None when it is none.

    Whatever engines take as one is read here, too (NaN, UTF-16): else a request could pass unseen.
    """
    try:
        value = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def with_body(scope: Scope, receive: Receive, body: bytes) -> tuple[Scope, Receive]:
    """The same exchange with this body, for the next app."""
    length = (b"content-length", b"%d" % len(body))
    fields = [field for field in scope["headers"] if field[0] != b"content-length"]
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return pending.pop() if pending else await receive()

    return {**scope, "headers": [*fields, length]}, again


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """What `work` gives; it is cancelled when the client goes. The body must have been read.

    Raises: ClientGone.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.wait({task})  # what it holds is free only then
        if not task.cancelled():
            task.exception()


async def refuse(send: Send, error: Error, path: str) -> None:
    """Answers with `error`, in the form that clients of `path` read."""
    body = form(path).envelope(error)
    await send({"type": "http.response.start", "status": error.status, "headers": headers(error, body)})
    await send({"type": "http.response.body", "body": body})


async def answer(send: Send, value: Any) -> None:
    """Answers with `value` as JSON."""
    body = msgspec.json.encode(value)
    fields = [(b"content-type", CONTENT_TYPE), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": fields})
    await send({"type": "http.response.body", "body": body})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
