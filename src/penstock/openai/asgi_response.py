"""Answers of ASGI apps: a JSON value, a stream, or an error in the form that clients of the path read."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import msgspec

from penstock.asgi import Message, Send
from penstock.errors import Error
from penstock.openai.errors import CONTENT_TYPE, form, headers

log = logging.getLogger(__name__)

T = TypeVar("T")
TIn = TypeVar("TIn", contravariant=True)

_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]


def is_event_stream(start: Message) -> bool:
    """Whether the message begins a stream of events."""
    kinds = [value for name, value in start["headers"] if name.lower() == b"content-type"]
    return bool(kinds) and kinds[0].startswith(b"text/event-stream")


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


class Answer(Protocol[TIn]):
    """What an engine's deltas add up to, in the form of one endpoint.

    event: adds a delta; the events of a stream for it. closing: those at its end. body: all of it, as JSON.
    """

    id: str

    def add(self, delta: TIn, /) -> None: ...
    def event(self, delta: TIn, /) -> bytes: ...
    def closing(self) -> bytes: ...
    def body(self) -> Any: ...


async def send_answer(
    send: Send, path: str, answer: Answer[T], deltas: AsyncGenerator[T, None], *, stream: bool
) -> None:
    """Answers with what `deltas`, which it closes, add to `answer`: at once, or in events.

    An error after the first event is the last one. Raises: Error before it.
    """
    events = EventStream(send)
    async with aclosing(deltas):
        try:
            async for delta in deltas:
                if stream:
                    await events.add(answer.event(delta))
                else:
                    answer.add(delta)
        except Error as error:
            if not events.begun:
                raise
            log.warning("request %s failed in its stream: %s", answer.id, error)
            return await events.add(form(path).event(error), more=False)
    if stream:
        return await events.add(answer.closing(), more=False)
    return await send_json(send, answer.body())


async def send_json(send: Send, value: Any) -> None:
    """Answers with `value` as JSON."""
    await send_body(send, msgspec.json.encode(value))


async def send_body(send: Send, body: bytes, content_type: bytes = CONTENT_TYPE) -> None:
    """Answers with `body`, which is JSON unless `content_type` says otherwise."""
    fields = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": fields})
    await send({"type": "http.response.body", "body": body})
