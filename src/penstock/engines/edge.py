"""Wraps an engine's HTTP application: its errors leave in our envelope.

It looks at statuses and at the first bytes of each piece of a stream, never into an event that is not an
error: it costs less than a microsecond per token. Knows ASGI, and no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.asgi import ASGIApp, Message, Receive, Scope, Send
from penstock.engines import foreign
from penstock.errors import EngineDead, Error
from penstock.openai.asgi_response import is_event_stream, send_error
from penstock.openai.errors import ERROR_EVENTS, form

log = logging.getLogger(__name__)

_LOGGED_BYTES = 2000
_KEPT = (b"allow", b"x-request-id")
_NOT_FOUND = 404

Absent = Callable[[str], Error | None]
Heard = Callable[[bytes, int | None], Error]


@dataclass(eq=False)
class Edge:
    """ASGI around `app`.

    death: the reason once the engine has died; every failure is reported as that.
    absent: from a path that was not found to a better error, if there is one.
    heard: the error that a response with this body and status means; without a status, an error event.
    """

    _app: ASGIApp
    death: Callable[[], str | None]
    absent: Absent = lambda path: None
    heard: Heard = foreign.heard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer(self, send, scope["path"])
        try:
            await self._app(scope, receive, answer.send)
        except Error as error:
            await answer.fail(error)
        except Exception:
            log.exception("%s %s failed in the engine's application", scope["method"], scope["path"])
            await answer.fail(Error())


class _Answer:
    """One response on its way out. Its start is held until the first bytes: a stream that begins with an
    error can still become a status.
    """

    def __init__(self, edge: Edge, send: Send, path: str) -> None:
        self._edge = edge
        self._send = send
        self._path = path
        self._start: Message = {}
        self._begun = False
        self._ended = False
        self._refusal: list[bytes] = []

    async def send(self, message: Message) -> None:
        body = message.get("body", b"")
        if self._ended:
            return  # the app goes on after its error
        if message["type"] == "http.response.start":
            self._start = message
        elif self._start["status"] >= 400:
            self._refusal.append(body)
            if not message.get("more_body"):
                await self._refuse(b"".join(self._refusal))
        elif body.startswith(ERROR_EVENTS):
            error = self._edge.heard(body, None)
            _log_failure(error.status, body)
            await self.fail(error)
        else:
            if not self._begun:
                self._begun = True
                await self._send(self._start)
            await self._send(message)

    async def _refuse(self, body: bytes) -> None:
        status = self._start["status"]
        kept = [(name, value) for name, value in self._start["headers"] if name.lower() in _KEPT]
        _log_failure(status, body)
        better = self._edge.absent(self._path) if status == _NOT_FOUND else None
        await self.fail(better or self._edge.heard(body, status), kept)

    async def fail(self, error: Error, kept: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Ends the response, unless it has ended: with a status, or after its first bytes with an event.

        What is no stream of events is left without its end, so that nobody takes it for whole.
        """
        if self._ended:
            return
        self._ended = True
        if error.status >= 500 and (reason := self._edge.death()):
            error = EngineDead(reason)
        if not self._begun:
            await send_error(self._send, error, self._path, kept)
        elif is_event_stream(self._start):
            await self._send({"type": "http.response.body", "body": form(self._path).event(error)})


def _log_failure(status: int, body: bytes) -> None:
    """Logs what clients do not get to see."""
    if status >= 500:
        log.error(
            "The engine answered with status %d: %s", status, body[:_LOGGED_BYTES].decode(errors="replace")
        )
