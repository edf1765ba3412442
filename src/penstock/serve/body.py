"""A request's body: read within its limits, and looked into just far enough to know which model it means.

The body itself goes on to the replica byte for byte, once all of it is here: `model` may stand at its end,
and does with OpenAI's own client. It is kept until the answer has begun, in case another replica must be
asked.
"""

from __future__ import annotations

import re

import msgspec

from penstock.engine import Receive
from penstock.errors import BadRequest, Overloaded, TooLarge
from penstock.serve.reply import ClientGone

_MODEL_FIELD = re.compile(rb'[ ;]name="?model"?(;|\r|$)')
_MOST_PART_HEADERS = 1024
_MOST_NAME = 512
_RETRY_AFTER_S = 1


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
    prompt_token_ids: msgspec.Raw = _NONE
    input: msgspec.Raw = _NONE
    cache_salt: msgspec.Raw = _NONE
    prompt_cache_key: msgspec.Raw = _NONE
    user: msgspec.Raw = _NONE
    previous_response_id: msgspec.Raw = _NONE


_decode = msgspec.json.Decoder(Fields).decode


class Room:
    """Memory for the bodies of all open requests of one gateway. Units: bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def take(self, size: int) -> None:
        """Raises: Overloaded when there is no room for `size` more."""
        if self.used + size > self.limit:
            raise Overloaded(
                f"The bodies of all open requests would be larger than {self.limit} bytes, the limit of this "
                "server (max_bodies_bytes). Try again later.",
                retry_after_s=_RETRY_AFTER_S,
            )
        self.used += size


class Body:
    """One request's body, from `read` to `drop`, and what it says."""

    __slots__ = ("_room", "_taken", "content", "fields")

    def __init__(self, room: Room) -> None:
        self._room = room
        self._taken = 0
        self.content: bytes | bytearray = b""
        self.fields = Fields()

    async def read(self, receive: Receive, content_length: bytes | None, limit: int) -> None:
        """All of it. limit: in bytes.

        Raises: TooLarge and Overloaded as soon as they are known, ClientGone.
        """
        limit = min(limit, self._room.limit)
        if content_length is not None and content_length.isdigit():
            self._take(int(content_length), limit)
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientGone
            piece: bytes = message.get("body", b"")
            more = message.get("more_body", False)
            self._take(len(self.content) + len(piece), limit)
            if self.content:
                self.content += piece
            else:  # grows in place: pieces that are kept to be joined would take the memory twice
                self.content = bytearray(piece) if more else piece

    def drop(self) -> None:
        """Nobody needs it any more; its fields are views of it. Safe to call twice."""
        self.content, self.fields = b"", Fields()
        self._room.used -= self._taken
        self._taken = 0

    def _take(self, size: int, limit: int) -> None:
        if size > limit:
            raise TooLarge(
                f"The request body is larger than {limit} bytes, the limit of this server (max_body_bytes)."
            )
        if size > self._taken:
            self._room.take(size - self._taken)
            self._taken = size


def fields(body: bytes | bytearray, content_type: bytes, free: bool = False) -> Fields:
    """What a JSON object or a multipart form says; of a form, its `model` alone.

    free: a body of another content type may be anything, and says nothing.
    Raises: BadRequest when the body is no JSON object or `model` no text.
    """
    if not body:
        return Fields()
    if content_type.lower().startswith(b"multipart/form-data"):
        return Fields(_form_model(body, content_type))
    if free and content_type and b"json" not in content_type.lower():
        return Fields()
    try:
        return _decode(body)
    except msgspec.ValidationError as error:
        raise BadRequest(f"The request body does not fit: {error}.", param="model") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"The request body is not valid JSON: {error}.") from None


def _form_model(body: bytes | bytearray, content_type: bytes) -> str | None:
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
