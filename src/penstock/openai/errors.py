"""Errors as OpenAI clients read them: one envelope, as a body or as the last event of a stream.

The gateway and every engine write through here, so a client sees one form whatever failed. `code` is always a
string that a program can compare; only `str(error)`, which is public by contract, leaves the process.
"""

from __future__ import annotations

import msgspec

from penstock.errors import Error

CONTENT_TYPE = b"application/json"


class Detail(msgspec.Struct, frozen=True):
    """What went wrong: a sentence, a class of fault, the field at fault, a code."""

    message: str
    type: str
    param: str | None
    code: str


class Envelope(msgspec.Struct, frozen=True):
    """The body of every answer with a status of 400 and more."""

    error: Detail


_encode = msgspec.json.Encoder().encode


def envelope(error: Error) -> bytes:
    """JSON body for `error`. Fact `param` names the field of the request that is at fault."""
    param = error.facts.get("param")
    return _encode(
        Envelope(Detail(str(error), error.type, None if param is None else str(param), error.code))
    )


def error_event(error: Error) -> bytes:
    """The event that ends a stream that failed after its first byte; no `[DONE]` follows it."""
    return b"data: " + envelope(error) + b"\n\n"


def headers(error: Error, body: bytes) -> list[tuple[bytes, bytes]]:
    """ASGI headers for an answer of `body`, with Retry-After where the error says how long to wait."""
    fields = [(b"content-type", CONTENT_TYPE), (b"content-length", str(len(body)).encode())]
    wait_s = error.facts.get("retry_after_s")
    if wait_s is not None:
        fields.append((b"retry-after", str(max(1, round(float(wait_s)))).encode()))
    return fields
