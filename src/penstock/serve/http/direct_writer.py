"""Writes a response past ASGI, straight to the client's socket: fewer writes, and no task to wake.

Stands between uvicorn's response and the socket. Apps find it as the ASGI extension `EXTENSION`; behind
another server there is none, and everything goes through ASGI. It knows HTTP's chunks, not what is in them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.asgi import Scope

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

EXTENSION = "penstock.direct_writer"
_INTERIM = b"HTTP/1.1 100"
_CHUNKED = b"transfer-encoding: chunked\r\n"


def of(scope: Scope) -> DirectWriter | None:
    """The direct writer of a request that came to our own port."""
    return scope.get("extensions", {}).get(EXTENSION)


@dataclass(eq=False, slots=True)
class DirectWriter:
    """For one response. uvicorn uses it as its transport; the head waits for the first bytes of the body.

    A write to a socket costs more than all of our Python around it, and wakes the client.
    accept: see the method. finish: ends the connection after the answer.
    """

    _cycle: RequestResponseCycle
    _transport: asyncio.Transport
    _loop: asyncio.AbstractEventLoop
    _accept: Callable[[bool], None]
    _finish: Callable[[], None]
    _begun: bool = False
    _unchunks: bool = False  # for HTTP/1.0, where a body without a length lasts to the connection's end
    _head: bytes | None = None
    _gone: Callable[[], None] | None = None
    drained: Callable[[], None] | None = None  # called when the client has caught up

    # -- for the app

    def accept(self, *, bounds_body: bool = False) -> None:
        """The app accepts the request: its connection no longer counts as one that waits.

        bounds_body: a body that arrives more slowly, or in smaller chunks, than `limits` allow ends the
        connection. The bodies that Penstock's own processes send each other go on for as long as they live.
        """
        self._accept(bounds_body)

    @property
    def takes_chunks(self) -> bool:
        """Whether `chunk` may follow: the answer has begun, in chunks, and has not ended."""
        cycle = self._cycle
        return (
            bool(cycle.chunked_encoding) and not cycle.response_complete and cycle.scope["method"] != "HEAD"
        )

    def chunk(self, body: bytes) -> bool:
        """Sends bytes of the body now, as `send` would. False when the client is behind: see `drained`."""
        if self._cycle.disconnected:
            return True
        self.write(b"%x\r\n%b\r\n" % (len(body), body))
        return not self._cycle.flow.write_paused

    def on_disconnect(self, gone: Callable[[], None]) -> Callable[[], None]:
        """Calls `gone` when the client disconnects after its request was read. Returns a function to cancel
        that.
        """
        if self._cycle.disconnected:
            return self._loop.call_soon(gone).cancel
        self._cycle.flow.resume_reading()  # else its end would not be seen
        self._gone = gone
        return self._forget

    def _forget(self) -> None:
        self._gone = None

    def abort(self) -> None:
        """Ends the connection at once, and with it the answer; drops what is unsent."""
        self._cycle.disconnected = True
        self._transport.abort()

    @property
    def over(self) -> bool:
        """Whether the answer has ended."""
        return self._cycle.response_complete

    # -- for the port

    def lost(self) -> None:
        """The connection has ended. uvicorn notifies only the latest request."""
        if not self.over:
            self._cycle.disconnected = True
            self._cycle.message_event.set()
        if self._gone is not None:
            self._gone()

    def resume(self) -> None:
        """The client has caught up."""
        if self.drained is not None:
            self.drained()

    # -- for uvicorn

    def write(self, data: bytes) -> None:
        """The first is the answer's head: it leaves with the second, or when the loop comes round."""
        if self._transport.is_closing():  # uvloop raises where asyncio drops it
            return
        if self._unchunks:
            size, _, data = data.partition(b"\r\n")
            data = data[: int(size or b"0", 16)]
        if self._head is not None:
            head, self._head = self._head, None
            self._transport.writelines([head, data])
        elif self._begun or data.startswith(_INTERIM):
            self._transport.write(data)
        else:
            if self._cycle.more_body and self._cycle.keep_alive:  # answered before all of the request is here
                self._cycle.keep_alive = False
                data = data[:-2] + b"connection: close\r\n\r\n"
            if self._cycle.chunked_encoding and self._cycle.scope["http_version"] == "1.0":
                self._unchunks, data = True, data.replace(_CHUNKED, b"", 1)
            self._begun, self._head = True, data
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        self._flush()
        self._finish()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _flush(self) -> None:
        if self._head is not None and not self._transport.is_closing():
            head, self._head = self._head, None
            self._transport.write(head)
