"""Which requests are plain: one prompt of text or token ids, one output, parameters that only the core reads.

A list of what is allowed, read strictly: an unknown field, a value of another type or beyond these bounds is
left to vLLM's application, which knows what to say of it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

MOST_BYTES = 100_000
"""Of a body. Larger ones are counted item by item first, see `frontend/limits.py`."""

Whole = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of both endpoints. null is unset, as in `openai.requests`."""

    model: str | None = None
    user: str | None = None
    n: Literal[1] | None = None
    max_tokens: Whole | None = None
    min_tokens: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Seed | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """Of text alone."""

    role: Literal["system", "user", "assistant"]
    content: str


class PlainChat(_Request):
    """A chat without tools."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Whole | None = None


class PlainCompletion(_Request):
    """A completion of one prompt."""

    prompt: str | Annotated[list[TokenId], Meta(min_length=1)]


Plain = PlainChat | PlainCompletion

_DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    CHAT: msgspec.json.Decoder(PlainChat),
    COMPLETIONS: msgspec.json.Decoder(PlainCompletion),
}
_INPUTS = ("model", "user", "messages", "prompt")


def read(path: str, body: bytes) -> Plain | None:
    """The request, if it is plain."""
    decoder = _DECODERS.get(path)
    if decoder is None or len(body) > MOST_BYTES:
        return None
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def parameters(request: Plain) -> dict[str, Any]:
    """The fields that it sets, without its input."""
    found = {name: getattr(request, name) for name in request.__struct_fields__ if name not in _INPUTS}
    return {name: value for name, value in found.items() if value is not None}
