"""The response to one client: ASGI's send, and how much has been sent.

Before the first byte a failure is a status. After it a stream ends with an error event and without `[DONE]`,
and any other body is cut off, so that no client mistakes half a response for a whole one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable

from penstock.asgi import Send
from penstock.errors import Error
from penstock.metrics import RouteMetrics
from penstock.openai import errors as openai_errors
from penstock.serve.gateway.telemetry.timing import Timing
from penstock.serve.http.direct_writer import DirectWriter
from penstock.transport.connection import Headers

_LAST_WORD_S = 5.0  # for the error event, when the client reads slowly or not at all
_ONE_PIECE_S = 0.0005  # pieces closer together come from the same engine step
_TIMING = b"server-timing"
_MODEL = b"x-penstock-model"
_STREAM = (b"content-type", b"text/event-stream")
_UNBUFFERED = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]  # for proxies before us


class ClientResponse:
    """One response to a client."""

    def __init__(
        self, send: Send, request_id: str, timing: Timing, writer: DirectWriter | None = None, path: str = ""
    ) -> None:
        """timing: reported in the headers. writer: the direct writer, where there is one.

        path: of the request; it decides the format of errors.
        """
        self._form = openai_errors.form(path)
        self._send = send
        self.writer = writer
        self._request_id = (b"x-request-id", request_id.encode())
        self.answered_by = ""  # the fallback or version that answers; "" for the model that was asked for
        self.has_fallback = False  # another model can answer where this one says that it cannot now
        self.timing = timing
        self.metrics: RouteMetrics | None = None  # of a client's request to a model: count a stream's times
        self.last: deque[bytes] | None = None  # the last pieces, where traces need them
        self.meter: Callable[[bytes], bytes] | None = None  # reads the body, and may take something out
        self.more: Headers = []  # header fields to add
        self.status: int | None = None
        self.streaming = False
        self.broken = False
        self._piece_at = 0.0

    @property
    def started(self) -> bool:
        return self.status is not None

    async def start(self, status: int, headers: Headers) -> None:
        """Sends status and headers; the first byte must follow at once."""
        self.timing.answer(next((value for name, value in headers if name == _TIMING), None))
        self._piece_at = self.timing.first_byte_at or 0.0
        self.status = status
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        self.streaming = kind.startswith(_STREAM[1])
        if self.streaming and self.metrics is not None and self.timing.first_byte_s is not None:
            self.metrics.first_token.observe(self.timing.first_byte_s)
        timing = (_TIMING, self.timing.header())
        more = [*(_UNBUFFERED if self.streaming else ()), timing, self._request_id, *self.more]
        if self.answered_by:
            more.append((_MODEL, self.answered_by.encode("ascii", "backslashreplace")))
        names = dict(more)
        passing = [field for field in headers if field[0] not in names]
        await self._send({"type": "http.response.start", "status": status, "headers": [*passing, *more]})

    async def piece(self, body: bytes, more: bool = True) -> None:
        """Sends bytes of the body, of a stream whole events; waits while the client is slow."""
        if more and self.streaming:
            self._count_gap()
        if self.meter is not None and not (body := self.meter(body)) and more:
            return
        if self.last is not None:
            self.last.append(body)
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    def event_now(self, body: bytes) -> bool:
        """The same through the direct writer, which must exist. False when the client falls behind."""
        assert self.writer is not None
        self._count_gap()
        if self.meter is not None and not (body := self.meter(body)):
            return True
        if self.last is not None:
            self.last.append(body)
        return self.writer.chunk(body)

    def _count_gap(self) -> None:
        now = time.monotonic()
        if self.metrics is not None and now - self._piece_at > _ONE_PIECE_S:
            self.metrics.inter_token.observe(now - self._piece_at)
        self._piece_at = now

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Sends a complete response. A 204 has no length: RFC 9110, 8.6."""
        fields = [field for field in headers if field[0] != b"content-length"]
        if status != 204:
            fields.append((b"content-length", b"%d" % len(body)))
        await self.start(status, fields)
        await self.piece(body, more=False)

    async def fail(self, error: Error) -> None:
        """Reports that the request failed, in whatever form is still possible."""
        self.broken = self.started
        if not self.started:
            body = self._form.envelope(error)
            await self.whole(error.status, openai_errors.headers(error, body), body)
        elif self.streaming:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORD_S):
                    await self.piece(self._form.event(error), more=False)
        # Otherwise the server closes the connection when we return: clients see that the body is incomplete.
