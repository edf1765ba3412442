"""Errors as clients read them: one envelope, as a body or as the last event of a stream.

The gateway and every engine write through here, so a client sees one form whatever failed: OpenAI's, and on
the paths of Anthropic's Messages that one's. `code` is always a string that a program can compare; only
`str(error)`, which is public by contract, leaves the process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from penstock import errors
from penstock.errors import BadRequest, Error

CONTENT_TYPE = b"application/json"
SHOULD_RETRY = b"x-should-retry"
ERROR_EVENTS = (b'data: {"error"', b"event: error")
"""With which an event of a stream begins that is an error."""

_FACTS = {"should_retry": SHOULD_RETRY, "allow": b"allow", "www_authenticate": b"www-authenticate"}
"""Of an error, the header fields that say them."""

_FIELD = re.compile(r"`\$\.([^`]+)`|field `([^`]+)`")
_MESSAGES = "/v1/messages"
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    501: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's word for each status; all others are `api_error`."""


def _kinds(of: type[Error] = Error) -> Iterator[type[Error]]:
    yield of
    for kind in of.__subclasses__():
        yield from _kinds(kind)


_OURS = [kind for kind in _kinds() if kind.__module__ == errors.__name__]
BY_CODE = {kind.code: kind for kind in reversed(_OURS)}
"""Errors of `penstock.errors`, by code."""


class Detail(msgspec.Struct, frozen=True):
    """What went wrong: a sentence, a class of fault, the field at fault, a code."""

    message: str
    type: str
    param: str | None
    code: str


class Envelope(msgspec.Struct, frozen=True):
    """The body of every answer with a status of 400 and more."""

    error: Detail


class AnthropicEnvelope(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """The same where Anthropic's clients ask."""

    error: Detail


_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Form:
    """How clients read errors: as a body, and as a stream's last event, after which no `[DONE]` follows."""

    envelope: Callable[[Error], bytes]
    event_start: bytes

    def event(self, error: Error) -> bytes:
        return self.event_start + self.envelope(error) + b"\n\n"


def form(path: str) -> Form:
    """That of a request's path."""
    return _ANTHROPIC if path.startswith(_MESSAGES) else _OPENAI


def envelope(error: Error) -> bytes:
    """JSON body for `error`. Fact `param` names the field of the request that is at fault."""
    return _encode(Envelope(_detail(error, error.type)))


def parsed(body: bytes) -> Error:
    """The error whose `envelope` is `body`; one that says nothing for another body."""
    try:
        detail = msgspec.json.decode(body, type=Envelope).error
    except msgspec.DecodeError:
        return Error()
    kind = BY_CODE.get(detail.code, Error)
    return kind(detail.message, **({"param": detail.param} if detail.param else {}))


def headers(error: Error, body: bytes) -> list[tuple[bytes, bytes]]:
    """ASGI headers for an answer of `body`, with Retry-After and those of `_FACTS` where the error has them.

    OpenAI's and Anthropic's clients obey X-Should-Retry, and would send a 503 again without it.
    """
    fields = [(b"content-type", CONTENT_TYPE), (b"content-length", str(len(body)).encode())]
    wait_s = error.facts.get("retry_after_s")
    if wait_s is not None:
        fields.append((b"retry-after", str(max(1, round(float(wait_s)))).encode()))
    return fields + [(_FACTS[name], str(error.facts[name]).encode()) for name in _FACTS & error.facts.keys()]


def unreadable(error: msgspec.DecodeError | UnicodeDecodeError) -> BadRequest:
    """The refusal of a request that msgspec cannot read. Its message names fields and types, never values."""
    if isinstance(error, UnicodeDecodeError):
        return BadRequest("The request cannot be read: it is not UTF-8.")
    field = _FIELD.search(str(error))
    facts = {"param": field[1] or field[2]} if field else {}
    return BadRequest(f"The request cannot be read: {error}.", **facts)


def _detail(error: Error, kind: str) -> Detail:
    param = error.facts.get("param")
    return Detail(str(error), kind, None if param is None else str(param), error.code)


def _anthropic(error: Error) -> bytes:
    """Their `type` and `message`; our `param` and `code` stand beside them, as everywhere."""
    return _encode(AnthropicEnvelope(_detail(error, _KINDS.get(error.status, "api_error"))))


_OPENAI = Form(envelope, b"data: ")
_ANTHROPIC = Form(_anthropic, b"event: error\ndata: ")
