"""Wraps an engine's HTTP application: its errors leave in our envelope.

It looks at statuses and at the first bytes of each piece of a stream, never into an event that is not an
error: it costs less than a microsecond per token. Knows ASGI, and no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from penstock.asgi import ASGIApp, Message, Receive, Scope, Send
from penstock.engines import foreign
from penstock.errors import EngineDead, Error
from penstock.openai.errors import form, headers

log = logging.getLogger(__name__)

_ERROR_EVENTS = (b'data: {"error"', b"event: error")
_LOGGED_BYTES = 2000
_KEPT = (b"allow", b"x-request-id")
_NOT_FOUND = 404

Absent = Callable[[str], Error | None]
Heard = Callable[[bytes, int | None], Error]


class Edge:
    """ASGI around `app`.

    death: the reason once the engine has died; every failure is reported as that.
    absent: from a path that was not found to a better error, if there is one.
    heard: the error that a response with this body and status means; without a status, an error event.
    """

    def __init__(
        self,
        app: ASGIApp,
        death: Callable[[], str | None],
        absent: Absent = lambda path: None,
        heard: Heard = foreign.heard,
    ) -> None:
        self._app = app
        self.death = death
        self.absent = absent
        self.heard = heard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        answer = _Answer(self, send, scope["path"])
        try:
            await self._app(scope, receive, answer.send)
        except Error as error:
            await answer.fail(error)
        except Exception:
            log.exception("%s %s failed in the engine's application", scope["method"], scope["path"])
            await answer.fail(Error())
        return None


class _Answer:
    """One response on its way out."""

    def __init__(self, edge: Edge, send: Send, path: str) -> None:
        self._edge = edge
        self._send = send
        self._form = form(path)
        self._path = path
        self._begun = False
        self._start_held: Message | None = None
        self._ended = False
        self._refusal: Message | None = None
        self._pieces: list[bytes] = []

    async def send(self, message: Message) -> None:
        if self._begun and not self._ended:
            if message.get("body", b"").startswith(_ERROR_EVENTS):
                error = self._edge.heard(message["body"], None)
                _log_failure(error.status, message["body"])
                await self._break_off(error)
            else:
                await self._pass(message)
        elif message["type"] == "http.response.start":
            await self._start(message)
        elif self._refusal is not None:
            await self._collect(message)

    async def fail(self, error: Error) -> None:
        """The app raised: ends the response, unless it has ended."""
        if self._begun and not self._ended:
            await self._break_off(error)
        elif not self._begun and not self._ended:
            await self._refuse(error, [])

    async def _start(self, message: Message) -> None:
        if message["status"] < 400:
            self._begun, self._start_held = True, message
        else:
            self._refusal = message

    async def _pass(self, message: Message) -> None:
        """Holds the start until the first bytes: a stream that begins with an error can still become a
        status.
        """
        if self._start_held is not None:
            start, self._start_held = self._start_held, None
            await self._send(start)
        await self._send(message)

    async def _collect(self, message: Message) -> None:
        self._pieces.append(message.get("body", b""))
        if self._refusal is not None and not message.get("more_body"):
            start, self._refusal = self._refusal, None
            kept = [(name, value) for name, value in start["headers"] if name.lower() in _KEPT]
            body = b"".join(self._pieces)
            _log_failure(start["status"], body)
            better = self._edge.absent(self._path) if start["status"] == _NOT_FOUND else None
            await self._refuse(better or self._edge.heard(body, start["status"]), kept)

    async def _refuse(self, error: Error, kept: list[tuple[bytes, bytes]]) -> None:
        self._ended = True
        error = self._named(error)
        body = self._form.envelope(error)
        fields = [*kept, *headers(error, body)]
        await self._send({"type": "http.response.start", "status": error.status, "headers": fields})
        await self._send({"type": "http.response.body", "body": body})

    async def _break_off(self, error: Error) -> None:
        """After the first byte: the error is the stream's last event; ignores the rest from the app."""
        if self._start_held is not None:
            return await self._refuse(error, [])
        self._ended = True
        return await self._send({"type": "http.response.body", "body": self._form.event(self._named(error))})

    def _named(self, error: Error) -> Error:
        reason = self._edge.death() if error.status >= 500 else None
        return EngineDead(reason) if reason else error


def _log_failure(status: int, body: bytes) -> None:
    """Logs what clients do not get to see."""
    if status >= 500:
        log.error(
            "The engine answered with status %d: %s", status, body[:_LOGGED_BYTES].decode(errors="replace")
        )
