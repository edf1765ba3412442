"""ASGI: its types, and what Penstock's apps do with one HTTP exchange.

They read its body, pass it to the next app with another body, and end their work when the client disconnects.
Knows no server and no engine.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, MutableMapping
from typing import Any, TypeVar, cast

import msgspec

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

TRUSTED = "penstock.inside"
"""Extension in the scope of a request from Penstock's own code, in this process or at the gateway:
authentication and other HTTP-level checks have already been done."""

CANCELLED = "penstock.cancelled"
"""Extension in the scope of a request without a connection of its own: the app is cancelled when its client
goes, and need not watch for that."""

OWN = b"x-penstock-"
"""Begins the names of header fields between Penstock's own processes."""
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer"
    b" transfer-encoding upgrade".split()
)

_Result = TypeVar("_Result")

_decode = msgspec.json.Decoder().decode
_EVENT_END = re.compile(rb"\n\n|\r\n\r\n")


class ClientGone(Exception):
    """The client has closed its connection: there is nobody to answer."""


async def read_body(receive: Receive) -> bytes:
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
    """The JSON object in `body`; None when it is not one.

    Accepts all that engines accept (NaN, UTF-16): otherwise a request could pass unchecked.
    """
    try:
        value = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def header(scope: Scope, name: bytes) -> bytes:
    """The value of the request's field of this name; empty without it."""
    return next((value for field, value in scope["headers"] if field == name), b"")


def passing(fields: Iterable[tuple[bytes, bytes]], never: Collection[bytes]) -> list[tuple[bytes, bytes]]:
    """The header fields that go on to the next server, of names in lower case: not those in `never`, nor
    those that `connection` names for this hop, nor Penstock's own.
    """
    fields = list(fields)
    hops = [value.lower().split(b",") for name, value in fields if name == b"connection"]
    here = {name.strip() for names in hops for name in names}
    return [
        field
        for field in fields
        if field[0] not in never and field[0] not in here and not field[0].startswith(OWN)
    ]


def with_body(scope: Scope, receive: Receive, body: bytes) -> tuple[Scope, Receive]:
    """The same exchange with this body, for the next app."""
    length = (b"content-length", b"%d" % len(body))
    fields = [field for field in scope["headers"] if field[0] != b"content-length"]
    return {**scope, "headers": [*fields, length]}, replay(body, receive)


def replay(body: bytes, receive: Receive) -> Receive:
    """An ASGI `receive` that gives `body`, and then what `receive` gives."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return pending.pop() if pending else await receive()

    return again


async def stay() -> Message:
    """The `receive` of a client that has sent everything and does not go."""
    return await asyncio.Future[Message]()


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone; what it still sends is dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(
    receive: Receive,
    work: Awaitable[_Result],
    on_disconnect: Callable[[Callable[[], None]], Callable[[], object]] | None = None,
) -> _Result:
    """The result of `work`, which is cancelled, and ends, when the client goes. The body must have been read.

    on_disconnect: in place of `receive`: registers what to call then, and returns what removes that.
    Raises: ClientGone; what `work` raises.
    """
    task, is_gone = asyncio.current_task(), False
    assert task is not None
    cancels = task.cancelling()

    def leave() -> None:
        nonlocal is_gone
        is_gone = True
        task.cancel()

    async def watch() -> None:
        await disconnected(receive)
        leave()

    stop = on_disconnect(leave) if on_disconnect is not None else asyncio.create_task(watch()).cancel
    try:
        return await work
    except asyncio.CancelledError:
        if not is_gone or task.uncancel() > cancels:  # somebody else cancels it, too
            raise
        raise ClientGone from None
    finally:
        stop()


async def lifespan(receive: Receive, send: Send) -> None:
    """Says that startup and shutdown are complete, for an app without steps of its own."""
    while True:
        event = (await receive())["type"]
        await send({"type": f"{event}.complete"})
        if event == "lifespan.shutdown":
            return


def split_events(data: bytes) -> tuple[list[bytes], bytes]:
    """The whole SSE events at the start of `data`, without the blank line that ends each, and the rest."""
    *whole, rest = _EVENT_END.split(data)
    return whole, rest
