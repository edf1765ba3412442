"""A request's body: read within its limit, and looked into just far enough to know which model it means.

The body itself goes on to the replica byte for byte. It is kept until the answer has begun, so that another
replica can be asked.
"""

from __future__ import annotations

import re

import msgspec

from penstock.engine import Receive
from penstock.errors import BadRequest, TooLarge
from penstock.serve.reply import ClientGone

_MODEL_FIELD = re.compile(rb'[ ;]name="?model"?(;|\r|$)')
_MOST_PART_HEADERS = 1024
_MOST_NAME = 512


_NONE = msgspec.Raw()


class Fields(msgspec.Struct, frozen=True, gc=False):
    """All that the gateway looks at; msgspec skips the rest without building it.

    The raw ones are pieces of the body's own bytes, not looked into here: whatever is wrong with them is the
    engine's to say.
    """

    model: str | None = None
    tools: msgspec.Raw = _NONE
    system: msgspec.Raw = _NONE
    instructions: msgspec.Raw = _NONE
    messages: msgspec.Raw = _NONE
    prompt: msgspec.Raw = _NONE
    input: msgspec.Raw = _NONE
    cache_salt: msgspec.Raw = _NONE
    prompt_cache_key: msgspec.Raw = _NONE
    user: msgspec.Raw = _NONE


_decode = msgspec.json.Decoder(Fields).decode


async def read(receive: Receive, content_length: bytes | None, limit: int) -> bytes:
    """The whole body. limit: in bytes.

    Raises: TooLarge as soon as it is known, ClientGone.
    """
    if content_length is not None and content_length.isdigit() and int(content_length) > limit:
        raise _too_large(limit)
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise _too_large(limit)
        pieces.append(piece)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def fields(body: bytes, content_type: bytes) -> Fields:
    """What a JSON object or a multipart form says; of a form, its `model` alone.

    Raises: BadRequest when the body is no JSON object or `model` no text.
    """
    if not body:
        return Fields()
    if content_type.lower().startswith(b"multipart/form-data"):
        return Fields(_form_model(body, content_type))
    try:
        return _decode(body)
    except msgspec.ValidationError as error:
        raise BadRequest(f"The request body does not fit: {error}.", param="model") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"The request body is not valid JSON: {error}.") from None


def _form_model(body: bytes, content_type: bytes) -> str | None:
    """Skips from boundary to boundary, so that megabytes of audio cost nothing."""
    _, found, rest = content_type.partition(b"boundary=")
    delimiter = b"--" + rest.split(b";")[0].strip().strip(b'"')
    if not found or delimiter == b"--":
        raise BadRequest("The content type multipart/form-data names no boundary.")
    start = body.find(delimiter)
    while start >= 0:
        start += len(delimiter)
        end = body.find(b"\r\n\r\n", start, start + _MOST_PART_HEADERS)
        if end >= 0 and _MODEL_FIELD.search(body[start:end]):
            value = body[end + 4 : end + 4 + _MOST_NAME].split(b"\r\n")[0]
            return value.decode(errors="replace") or None
        start = body.find(delimiter, start)
    return None


def _too_large(limit: int) -> TooLarge:
    return TooLarge(
        f"The request body is larger than {limit} bytes, the limit of this server (max_body_bytes)."
    )
