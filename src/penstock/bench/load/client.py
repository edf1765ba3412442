"""HTTP/1.1 as a load generator needs it: an answer's bytes go from the socket to their reader in one call.

No task wakes up for a piece of an answer, only for its end, so that many streams cost little. Time is read
once for each read of the socket, before anything is parsed. Connections are kept alive, as usual clients do.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from typing import cast

import httptools

from penstock.bench.load.stream import Stream
from penstock.bench.load.target import Target, tls_context

_CONNECT_S = 10.0
_KINDS: list[tuple[type[OSError], str]] = [
    (ConnectionRefusedError, "refused"),
    (TimeoutError, "connect timeout"),
    (socket.gaierror, "unknown host"),
    (ssl.SSLError, "TLS"),
    (OSError, "unreachable"),
]


class NotHTTP(ConnectionError):
    """The response is not HTTP."""


class Unreachable(OSError):
    """No connection. `str` is the kind of failure, the cause says more."""


class LoadConnection(asyncio.Protocol):
    """One connection; one exchange at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._reader: Stream | None = None
        self._over: asyncio.Future[None] | None = None
        self._content_type = b""
        self._sized = False
        self._at = 0.0
        self.heard = False
        self.open = True

    def exchange(self, request: bytes, reader: Stream) -> asyncio.Future[None]:
        """Sends `request`; done when the answer has ended.

        Raises: ConnectionError when the connection ends before the answer does.
        """
        assert self._transport is not None
        self._over, self._reader = self._loop.create_future(), reader
        self._content_type, self._sized, self.heard = b"", False, False
        self._transport.write(request)
        return self._over

    def abort(self) -> None:
        """Ends it at once; the service takes an unfinished request for abandoned."""
        self.open = False
        self._reader = self._over = None
        if self._transport is not None:
            self._transport.abort()

    # -- for the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._at = time.monotonic()
        self.heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(NotHTTP(f"The response is not HTTP: {error}."))
        except httptools.HttpParserUpgrade:
            self._fail(NotHTTP("The service wants another protocol than HTTP."))

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self._over is None:
            return
        if self.heard and not self._sized and exc is None and self._content_type:
            self._at = time.monotonic()
            self.on_message_complete()  # an answer without a length ends with its connection
        else:
            self._fail(ConnectionResetError(str(exc) if exc else "The service closed the connection."))

    def _fail(self, error: ConnectionError) -> None:
        over = self._over
        self.abort()
        if over is not None and not over.done():
            over.set_exception(error)

    # -- for the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._content_type = value.lower()
        elif name in (b"content-length", b"transfer-encoding"):
            self._sized = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._reader is not None and status >= 200:
            self._reader.head(status, self._content_type)

    def on_body(self, body: bytes) -> None:
        if self._reader is not None:
            self._reader.piece(body, self._at)

    def on_message_complete(self) -> None:
        if self._reader is None or self._over is None or self._parser.get_status_code() < 200:
            return
        self._reader.end(self._at)
        if not self._parser.should_keep_alive():
            self.open = False
        over, self._reader, self._over = self._over, None, None
        if not over.done():
            over.set_result(None)


class Client:
    """Requests to one target over as many connections as there are requests at the same time."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._tls = tls_context(verify=target.verify) if target.tls else None
        self._idle: list[LoadConnection] = []

    async def ask(self, head: bytes, body: bytes, reader: Stream) -> None:
        """Sends and reads until the answer's end. head: from `Target.head`.

        Raises: Unreachable without a connection; ConnectionError when the answer breaks off.
        Cancelled, it hangs up.
        """
        request = b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body) if body else head + b"\r\n"
        while True:
            connection = self._idle_connection()
            used = connection is not None
            connection = connection or await self._connect()
            try:
                await connection.exchange(request, reader)
            except ConnectionError:
                if used and not connection.heard:
                    continue  # the service ended an idle connection as we took it, which is no failure
                raise
            except BaseException:
                connection.abort()
                raise
            if connection.open:
                self._idle.append(connection)
            else:
                connection.abort()
            return

    def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def _idle_connection(self) -> LoadConnection | None:
        while self._idle:
            if (connection := self._idle.pop()).open:
                return connection
        return None

    async def _connect(self) -> LoadConnection:
        loop, target = asyncio.get_running_loop(), self._target
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, connection = await loop.create_connection(
                    LoadConnection, target.host, target.port, ssl=self._tls
                )
        except OSError as error:
            raise Unreachable(next(kind for errors, kind in _KINDS if isinstance(error, errors))) from error
        return connection
