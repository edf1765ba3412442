"""Reads on after the head of a request that asks for an upgrade, which `protocol` answers as any other.

The parser stops there. A new one is fed a head with the same framing, so that it finds the end of the body.
"""

from __future__ import annotations

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_FRAMING = (b"content-length", b"transfer-encoding")


def parser_after_head(protocol: HttpToolsProtocol) -> httptools.HttpRequestParser:
    """A parser for `protocol`, which has read a head already: feed it the `framing` of that first."""
    parser = httptools.HttpRequestParser(_AfterHead(protocol))
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def framing(headers: list[tuple[bytes, bytes]]) -> bytes:
    """A head with nothing but the framing of the body in `headers`."""
    fields = [b"%b: %b\r\n" % field for field in headers if field[0] in _FRAMING]
    return b"".join([b"POST / HTTP/1.1\r\n", *fields, b"\r\n"])


class _AfterHead:
    """Parser callbacks after a head that is parsed again for its framing alone."""

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol
        self._known = True

    def on_message_begin(self) -> None:
        if not self._known:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._known:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._known:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._known:
            self._protocol.on_headers_complete()
        self._known = False

    def on_body(self, body: bytes) -> None:
        self._protocol.on_body(body)

    def on_message_complete(self) -> None:
        self._protocol.on_message_complete()
