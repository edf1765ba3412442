"""uvicorn's HTTP protocol with bounds: on heads, trailers, chunks, requests sent ahead, work at a time, time.

Neither the parser nor uvicorn limits what a client may send before its request is accepted. `limits` has the
figures, `connection_limits` counts by address.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import socket
import termios
from collections.abc import Callable
from types import SimpleNamespace
from typing import NoReturn, cast

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.serve.http import limits
from penstock.serve.http.connection_limits import Connections, Peer, WorkLimiter
from penstock.serve.http.direct_writer import EXTENSION, DirectWriter
from penstock.serve.http.sockets import UNSENT_BYTES, is_own
from penstock.serve.http.tls import Certificate

_LINE_BYTES, _FIELD_BYTES, _CHUNK_BYTES = 12, 4, 12  # about what stands around an URL, a field, a chunk
_SLICE_BYTES = 64 * 1024  # of a plain body, which the parser hands on in one piece
_CHUNKED_SLICE_BYTES = 16 * 1024  # of anything else: at most some 2,700 callbacks
_UNACCEPTED_SLICE_BYTES = 1024  # of chunks before the request is accepted
_BAD_REQUEST = b"400 Bad Request"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_END_OF_HEAD = b"\r\n\r\n"
_FRAMING = (b"content-length", b"transfer-encoding")
_TOO_MANY_CHUNKS = (
    f"The body has more than {limits.CHUNKS} chunks, of less than {limits.CHUNK_BYTES} bytes each."
)
_TOO_LARGE = f"The request's headers are larger than {limits.HEAD_BYTES} bytes, or more than {limits.FIELDS}."


class Config(uvicorn.Config):
    draining = False
    is_shared = False  # several processes listen to the socket
    head_bytes, fields = limits.HEAD_BYTES, limits.FIELDS
    connections: Connections | None = None  # None where clients are trusted
    certificate: Certificate | None = None
    work: WorkLimiter


class _Flow(FlowControl):
    """Keeps a connection paused while uvicorn wants it, or bytes that were read from it wait to be parsed."""

    _wanted = _unparsed = False

    def pause_reading(self) -> None:
        self._wanted = True
        super().pause_reading()

    def resume_reading(self) -> None:
        self._wanted = False
        self.parsed(not self._unparsed)

    def parsed(self, all_of_it: bool) -> None:
        """Whether all that was read has been parsed."""
        self._unparsed = not all_of_it
        if self._unparsed:
            super().pause_reading()
        elif not self._wanted:
            super().resume_reading()


class _Refused(Exception):
    """Raised in the parser's callbacks to stop it: what a client sends is over a limit."""


class BoundedProtocol(HttpToolsProtocol):
    """Bounds what a client may send before its request is accepted.

    Gives each response its `DirectWriter`. While the port closes, an answer that begins is its connection's
    last one.
    """

    since = math.inf  # see `WaitingConnection`
    _in_message = _in_head = False
    _head_bytes = _fields = 0  # of the head that is being read, with its trailer: of fields that are complete
    _parsed = 0  # of the bytes that are being fed: at least so many are of complete parts
    _unparsed = 0  # bytes of a part that is not complete
    _queued = 0  # heads of requests that are not accepted, as they take memory
    _held = 0  # bytes counted at the peer
    _body_bytes = 0  # of an accepted request, since `since`
    _discarded = 0
    _unread = b""  # what was read and is not parsed, from `_at` on
    _at = 0
    _chunked = False  # the body that comes
    _hosts = 0  # fields of that name in the head
    _pieces = _piece_bytes = 0  # of that body so far
    _bounds_body = True  # until the app accepts a request whose body may go on for as long as it likes
    _fault: tuple[str, str, bytes] | None = None  # why the parser was stopped: for the count, for the client
    _deaf = False  # what still comes is dropped
    _received = False  # by the client, of a connection that closes: everything, when last looked at
    _accepted = True  # the request whose answer is under way
    _connections: Connections
    _peer: Peer | None = None  # None where clients are trusted
    _writers: tuple[DirectWriter, ...] = ()  # of the answer under way, and of those that are due after it

    @property
    def is_answering(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        return cycle is not None and not cycle.response_complete

    # -- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self.flow = self._flow = _Flow(transport)
        config = cast(Config, self.config)
        self._work, self._most_bytes, self._most_fields = config.work, config.head_bytes, config.fields
        sock = transport.get_extra_info("socket")
        if sock.family == socket.AF_UNIX:
            if not is_own(sock):
                self._deaf = True  # what has come already is read before the end
                transport.abort()
                return
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT_BYTES)
        connections = config.connections
        if connections is not None and self.client is not None:
            self._accepted, self.since = False, self.loop.time()
            self._connections = connections
            self._peer = connections.join(self.client[0], self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        if self._peer is not None:
            self._release(self._peer)
            self._connections.leave(self._peer, self)
        for writer in self._writers:
            writer.lost()

    def pause_writing(self) -> None:
        """Closes the connection of a client that does not read its refusals."""
        super().pause_writing()
        if not self._accepted:
            self.cut("not_reading")

    def resume_writing(self) -> None:
        super().resume_writing()
        for writer in self._writers:
            writer.resume()

    def cut(self, reason: str) -> None:
        """Ends the connection at once, whatever is still unsent."""
        if self._peer is not None:
            self._connections.counts[reason] += 1
        if self._accepted and self.since != math.inf and not self.transport.is_closing():
            self.transport.write(_TOO_SLOW)
            self.close()
        else:
            self.since = math.inf
            self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection when what is unsent has left, or the time for it is over."""
        if self._peer is not None:
            self.since = self.loop.time()
        self.transport.close()

    def finish(self) -> None:
        """The same after an answer: a reset would take it from a client still sending. RFC 9112, 9.6."""
        if self._deaf or self.cycle.more_body:
            if self._peer is not None:
                self._forget()
                self._release(self._peer)
            self.linger()
        else:
            self.close()

    def linger(self) -> None:
        """Ends our side; discards what the client sends until it ends its side or a limit passes.

        TLS has no half-closed connections (asyncio's): there the answer alone says that it is the last one.
        """
        if self._peer is None or self.transport.is_closing():
            self.transport.close()
            return
        self._deaf, self.since = True, self.loop.time()
        if self._unread:
            self._work.take(self._read)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def end_if_received(self) -> None:
        """Ends a connection that closes, once two looks have found that its client has received everything:
        at the first one, what is encrypted may be on its way to the kernel.

        Under TLS the connection would wait for the client's answer. A synchronous client reads what comes on
        an idle connection with its next request only.
        """
        if not self.transport.is_closing() or self.transport.get_write_buffer_size():
            return
        if (sock := self.transport.get_extra_info("socket")) is None:  # under TLS, where it has just ended
            return
        with contextlib.suppress(OSError, ValueError):  # it has just ended
            unsent = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
            before, self._received = self._received, not any(unsent)  # nor is anything not acknowledged
            if before and self._received:
                self.transport.abort()

    # -- what comes

    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The client has ended its side: whatever it asked, it does not wait for the answer."""
        if self._peer is None or not self.transport.can_write_eof():
            return False
        self._work.take(self.transport.close)
        return True

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._unread:
            self._unread = self._unread[self._at :] + data
            self._at = 0
        elif self._peer is None and self.is_answering:
            self._take(data)  # trusted, of a request that the app has
        else:
            self._unread = data
            self._read()

    def _read(self) -> None:
        """Parses what was read, slice by slice; what is too much at once waits for a later iteration."""
        if self._peer is not None and not self._accepted and not self.transport.is_closing():
            self._connections.wait(self._peer, self)
        while self._at < len(self._unread):
            if self._deaf or self.transport.is_closing():
                self._discard(len(self._unread) - self._at)
                break
            if self._is_held:
                return self._flow.parsed(False)
            if not self._work.has_room():
                if self._peer is not None:
                    self._connections.accept(self._peer, self)  # it waits for us
                self._work.later(self._pieces, self._read)
                return self._flow.parsed(False)
            start, self._at = self._at, self._slice_end()
            self._take(memoryview(self._unread)[start : self._at])
        self._unread, self._at = b"", 0
        return self._flow.parsed(True)

    @property
    def _is_held(self) -> bool:
        """Whether chunks wait until their request is accepted: each takes a call of Python."""
        many = self._chunked and self._pieces >= limits.CHUNKS_BEFORE_ACCEPTED
        return many and self._in_message and not self._accepted

    def _slice_end(self) -> int:
        """Where the next slice of `_unread` ends: a head is parsed by itself."""
        if self._in_head or not self._in_message:
            found = self._unread.find(_END_OF_HEAD, self._at, self._at + _CHUNKED_SLICE_BYTES)
            return found + len(_END_OF_HEAD) if found >= 0 else self._at + _CHUNKED_SLICE_BYTES
        if not self._chunked:
            return self._at + _SLICE_BYTES
        return self._at + (_CHUNKED_SLICE_BYTES if self._accepted else _UNACCEPTED_SLICE_BYTES)

    def _take(self, data: bytes | memoryview) -> None:
        if self._deaf:
            self._discard(len(data))
            return
        self._parsed = 0
        self._work.left -= len(data) >> 10
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._reject(*(self._fault or ("invalid", "Invalid HTTP request received.", _BAD_REQUEST)))
            return
        if self._in_message:
            self._unparsed = max(0, len(data) - self._parsed + (0 if self._parsed else self._unparsed))
            if self._unparsed > self._most_bytes:
                self._reject("head_too_large", _TOO_LARGE)
                return
        if self._peer is not None and not self._accepted:
            self._account(self._peer)
        elif self.since != math.inf:
            self._time_body(len(data))

    def _time_body(self, size: int) -> None:
        self._body_bytes += size
        if not self.cycle.more_body or self.cycle.response_started:
            self.since = math.inf
        elif self._body_bytes >= limits.BODY_PROGRESS_BYTES:
            self._body_bytes, self.since = 0, self.loop.time()

    def _discard(self, size: int) -> None:
        self._discarded += size
        if self._discarded > limits.DISCARDED_BYTES:
            self.cut("discarded")

    def _feed(self, data: bytes | memoryview) -> None:
        """An upgrade is not ours to make: its request is answered as any other. RFC 9110, 7.8.

        Raises: HttpParserError.
        """
        while True:
            try:
                return self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as stop:
                data = data[stop.args[0] :]
                self._read_on_after_head()

    def _read_on_after_head(self) -> None:
        """Replaces the parser, which stops there, by one that has read a head with the same framing, so that
        it finds the end of the body.
        """
        is_known = True

        def unless_known(callback: Callable[..., None]) -> Callable[..., None]:
            return lambda *part: None if is_known else callback(*part)

        def headers_complete() -> None:
            nonlocal is_known
            if not is_known:
                self.on_headers_complete()
            is_known = False

        callbacks = SimpleNamespace(
            on_message_begin=unless_known(self.on_message_begin),
            on_url=unless_known(self.on_url),
            on_header=unless_known(self.on_header),
            on_headers_complete=headers_complete,
            on_body=self.on_body,
            on_message_complete=self.on_message_complete,
        )
        self.parser = httptools.HttpRequestParser(callbacks)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        framing = [b"%b: %b\r\n" % field for field in self.headers if field[0] in _FRAMING]
        self.parser.feed_data(b"".join([b"POST / HTTP/1.1\r\n", *framing, b"\r\n"]))

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= limits.PIPELINED:
            self._stop("pipeline", f"More than {limits.PIPELINED} requests were sent ahead of their answers.")
        self._in_head = self._in_message = True
        self._head_bytes = self._fields = self._pieces = self._piece_bytes = 0
        self._chunked = False
        self._hosts = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._parsed += len(url) + _LINE_BYTES
        self._head_bytes += len(url)
        if self._head_bytes > self._most_bytes:
            self._stop("head_too_large", _TOO_LARGE)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Fields of a trailer are dropped: they must not become a request's headers. RFC 9110, 6.5.1."""
        size = len(name) + len(value)
        self._parsed += size + _FIELD_BYTES
        self._head_bytes += size
        self._fields += 1
        self._work.left -= 1
        if self._head_bytes > self._most_bytes or self._fields > self._most_fields:
            self._stop("head_too_large", _TOO_LARGE)
        if self._in_head:  # as uvicorn does it; a call for each field would cost as much again
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True
            elif name == b"transfer-encoding":
                self._chunked = True
                if value.lower() != b"chunked":
                    self._stop("invalid", "The transfer coding is not 'chunked'.", b"501 Not Implemented")
            elif name == b"host":
                self._hosts += 1
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._hosts != 1 and (self._hosts or self.parser.get_http_version() == "1.1"):
            self._stop("invalid", "A request has one host field.")
        self._in_head = False
        self._work.left -= self._work.request
        self._queued += self._head_bytes + self._fields * limits.FIELD_COST_BYTES
        super().on_headers_complete()
        if cast(Config, self.config).draining:
            self.cycle.keep_alive = False
        writer = DirectWriter(self.cycle, self.transport, self.loop, self.accept, self.finish)
        self.cycle.transport = cast(asyncio.Transport, writer)
        self.scope["extensions"] = {EXTENSION: writer}  # pyright: ignore[reportGeneralTypeIssues]
        waiting = tuple(writer for writer in self._writers if not writer.over) if self.pipeline else ()
        self._writers = (*waiting, writer)

    def on_body(self, body: bytes) -> None:
        self._parsed += len(body) + _CHUNK_BYTES
        self._work.left -= 1
        self._pieces += 1
        self._piece_bytes += len(body)
        if self._pieces > limits.CHUNKS + self._piece_bytes // limits.CHUNK_BYTES and self._bounds_body:
            self._stop("chunks", _TOO_MANY_CHUNKS)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # its body is still to come, see `_feed`
        self._in_message = False
        super().on_message_complete()

    def _stop(self, reason: str, text: str, status: bytes = _BAD_REQUEST) -> NoReturn:
        """Out of a callback of the parser."""
        self._fault = reason, text, status
        raise _Refused(text)

    def _reject(self, reason: str, text: str, status: bytes = _BAD_REQUEST) -> None:
        """Reads no further. Answers under way are finished; a request that cannot be is answered `status`."""
        if self._peer is not None:
            self._connections.counts[reason] += 1
        self._deaf = True
        if not self.is_answering or not (self._in_head or self.pipeline or self.cycle.response_started):
            if self.is_answering:  # the app learns that its client is gone
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self._refuse(text, status)
        elif self._in_head or not self.cycle.more_body:
            self.cycle.keep_alive = False
        else:
            self.transport.abort()

    def _refuse(self, text: str, status: bytes) -> None:
        head = b"HTTP/1.1 %b\r\ncontent-type: text/plain; charset=utf-8\r\n" % status
        self.transport.write(
            head + b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(text), text.encode())
        )
        self.linger()

    # -- what it may hold

    def accept(self, bounds_body: bool) -> None:
        """See `DirectWriter.accept`."""
        self._bounds_body = bounds_body
        if self._peer is None:
            return
        self._accepted, self.since = True, math.inf
        self._release(self._peer)
        self._connections.accept(self._peer, self)
        if self._unread:
            self._work.take(self._read)
        if bounds_body and self._in_message and not self._in_head and not self.pipeline:
            self._body_bytes, self.since = 0, self.loop.time()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._peer is None:
            return
        self._accepted = False
        self._connections.wait(self._peer, self)
        if self._deaf or self.transport.is_closing():
            return
        self._release(self._peer)
        self.since = math.inf
        if self.is_answering or self._in_head:
            self._account(self._peer)
        else:
            self._forget()

    def _account(self, peer: Peer) -> None:
        """Counts what has come at its address, and from when it must come to an end."""
        held = self._queued + (self._unparsed if self._in_message else 0)
        if self._in_head:
            held += self._head_bytes + self._fields * limits.FIELD_COST_BYTES
        peer.head_bytes += held - self._held
        self._held = held
        if self.since == math.inf:
            self.since = self.loop.time()
        if peer.head_bytes > limits.HEADS_PER_ADDRESS_BYTES:
            self.cut("too_many_heads")

    def _release(self, peer: Peer) -> None:
        peer.head_bytes -= self._held
        self._held = self._queued = 0

    def _forget(self) -> None:
        """An idle connection keeps nothing of its last request."""
        self.scope.clear()  # pyright: ignore[reportAttributeAccessIssue]
        self.headers, self.url, self._writers = [], b"", ()
        self.cycle.body = bytearray()
