"""The replica's side of the connection that carries a batch job's rows, see `transport.rows`.

Between the listener, which runs each row as it runs a request of HTTP, and the port. It knows no engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from penstock import asgi
from penstock.asgi import Receive, Scope, Send
from penstock.asgi_client import WholeResponse, post_scope
from penstock.errors import Error
from penstock.layers.adapters import asking_for
from penstock.openai.asgi_response import send_error
from penstock.transport import continuation, headers, link, rows
from penstock.transport.continuation import Continuation, Group
from penstock.transport.rows import RESUMABLE_NAME, RowCall, RowCancel, RowResponse

log = logging.getLogger(__name__)

_PASSING = {link.RETRY.decode(), "retry-after", "retry-after-ms", RESUMABLE_NAME}
_INTERRUPTED = {link.RETRY.decode(): link.INTERRUPTED.decode()}
_MOST_WAITING_BYTES = 1 << 20
"""Of responses that the job has not taken; above it, no more rows are read."""

HandOver = Callable[[bytes, Sequence[Group]], None]
"""Sends tokens of an answer that has not begun, the first ones with the value of `RESUMABLE`, later ones with
b"".
"""
Run = Callable[[Scope, Receive, Send, Continuation | None, HandOver | None], Awaitable[None]]


class RowReceiver:
    """One connection.

    run: answers one row, given what it goes on with, the tokens behind its body, and what takes its tokens;
    cancelled when the row is not wanted any more.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._frames: list[bytes] = []
        self._waiting_bytes = 0
        self._pending = asyncio.Event()
        self._sent = asyncio.Event()
        self._closing = False

    async def serve(self, receive: Receive, send: Send) -> None:
        """Until the job ends it, or after `close`, when the last row has ended."""
        reading = asyncio.create_task(self._read(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            while self._tasks or self._frames or not self._closing:
                await self._pending.wait()
                self._pending.clear()
                frames, self._frames = b"".join(self._frames), []
                if frames:
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
                    self._waiting_bytes -= len(frames)
                    self._sent.set()
            await send({"type": "http.response.body", "body": b""})
        finally:
            reading.cancel()
            for task in self._tasks.values():
                task.cancel()

    def close(self) -> None:
        """Ends it once its rows have ended."""
        self._closing = True
        self._pending.set()

    async def _read(self, receive: Receive) -> None:
        data = bytearray()
        try:
            while (message := await receive())["type"] == "http.request":
                for frame in rows.messages(data, message.get("body", b""), rows.decode_frame):
                    self._take(frame)
                while self._waiting_bytes > _MOST_WAITING_BYTES:
                    self._sent.clear()
                    await self._sent.wait()
        except msgspec.DecodeError as error:
            log.warning("A batch job sent what is no row: %s", error)
        for task in self._tasks.values():
            task.cancel()
        self.close()

    def _take(self, frame: RowCall | RowCancel) -> None:
        if isinstance(frame, RowCall):
            self._tasks[frame.number] = task = asyncio.create_task(self._answer(frame))
            task.add_done_callback(lambda _: self._ended(frame.number))
        elif (task := self._tasks.get(frame.number)) is not None:
            task.cancel()

    def _ended(self, number: int) -> None:
        del self._tasks[number]
        if self._closing:
            self._pending.set()

    async def _answer(self, row: RowCall) -> None:
        response, given, body = WholeResponse(), None, row.body
        take = partial(self._hand_over, row.number) if row.made is not None else None
        try:
            if row.made is not None and row.made[0]:
                given = Continuation.of(row.made)
                body += row.made[1][len(row.made[1]) - given.size :]
            await self._run(_scope(row, len(body)), asgi.replay(body, asgi.stay), response.send, given, take)
        except Exception:
            log.exception("A row to %s failed.", row.path)
            if not response.begun:
                await send_error(response.send, Error(), row.path)
        if response.ended:
            passing = {name: value for name, value in response.headers.items() if name in _PASSING}
            answer = RowResponse(row.number, response.status, response.body, passing)
        else:  # as a connection of HTTP that breaks off
            answer = RowResponse(row.number, 503, b"", _INTERRUPTED)
        self._send(answer)

    def _hand_over(self, number: int, origin: bytes, made: Sequence[Group]) -> None:
        fields = {RESUMABLE_NAME: origin.decode()} if origin else {}
        self._send(RowResponse(number, rows.UNFINISHED, continuation.handed(made), fields))

    def _send(self, response: RowResponse) -> None:
        frame = rows.framed(response)
        self._frames.append(frame)
        self._waiting_bytes += len(frame)
        self._pending.set()


def _scope(row: RowCall, length: int) -> Scope:
    path, _, query = row.path.partition("?")
    fields = {headers.REQUEST_ID.decode(): headers.request_id(None)}
    if row.adapter:
        fields |= asking_for(row.adapter)
    scope = post_scope(path, length, fields, query=query.encode())
    scope["extensions"][asgi.CANCELLED] = {}
    return scope
