"""Reads on after the head of a request that asks for an upgrade, which `protocol` answers as any other.

The parser stops there. A new one is fed a head with the same framing, so that it finds the end of the body.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_FRAMING = (b"content-length", b"transfer-encoding")


def parser_after_head(protocol: HttpToolsProtocol) -> httptools.HttpRequestParser:
    """A parser for `protocol`, which has read a head already: feed it the `framing` of that first."""
    is_known = True

    def unless_known(callback: Callable[..., None]) -> Callable[..., None]:
        return lambda *part: None if is_known else callback(*part)

    def headers_complete() -> None:
        nonlocal is_known
        if not is_known:
            protocol.on_headers_complete()
        is_known = False

    callbacks = SimpleNamespace(
        on_message_begin=unless_known(protocol.on_message_begin),
        on_url=unless_known(protocol.on_url),
        on_header=unless_known(protocol.on_header),
        on_headers_complete=headers_complete,
        on_body=protocol.on_body,
        on_message_complete=protocol.on_message_complete,
    )
    parser = httptools.HttpRequestParser(callbacks)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def framing(headers: list[tuple[bytes, bytes]]) -> bytes:
    """A head with nothing but the framing of the body in `headers`."""
    fields = [b"%b: %b\r\n" % field for field in headers if field[0] in _FRAMING]
    return b"".join([b"POST / HTTP/1.1\r\n", *fields, b"\r\n"])
