"""Engines' JSON answers, as far as columns are made of them: vLLM's, the simulator's, OpenAI's and others'.

What one of them leaves out is None here; what none of the columns needs is not read.
"""

from __future__ import annotations

import base64
from array import array
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from penstock.data.rows.request import CHAT, COMPLETIONS, POOLING_PATHS

Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""One that a column can hold."""


class Details(Struct):
    cached_tokens: Whole | None = None


class Usage(Struct):
    prompt_tokens: Whole | None = None
    completion_tokens: Whole | None = None
    prompt_tokens_details: Details | None = None
    cached_tokens: Whole | None = None
    input_tokens: Whole | None = None
    output_tokens: Whole | None = None

    def counts(self) -> tuple[Whole | None, Whole | None, Whole | None]:
        """Of the prompt, cached ones of it, generated."""
        details = self.prompt_tokens_details
        cached = details.cached_tokens if details else self.cached_tokens
        prompt = self.input_tokens if self.prompt_tokens is None else self.prompt_tokens
        made = self.output_tokens if self.completion_tokens is None else self.completion_tokens
        return prompt, cached, made


class Function(Struct):
    name: str | None = None
    arguments: Any = None


class ToolCall(Struct):
    id: str | None = None
    function: Function | None = None


class Message(Struct):
    content: Any = None  # some servers give parts
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None


class Likely(Struct):
    token: str | None = None
    logprob: float | None = None


class Token(Struct):
    token: str | None = None
    logprob: float | None = None
    top_logprobs: list[Likely] | None = None


class Logprobs(Struct):
    """content: of a chat; the three lists: of a completion."""

    content: list[Token] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float | None] | None] | None = None


class PromptToken(Struct):
    logprob: float | None = None
    rank: Whole | None = None
    decoded_token: str | None = None


class Choice(Struct):
    index: Whole = 0
    message: Message | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[Whole] | None = None
    prompt_token_ids: list[Whole] | None = None
    prompt_logprobs: list[dict[Whole, PromptToken] | None] | None = None
    logprobs: Logprobs | None = None


class Generated(Struct):
    choices: list[Choice]
    usage: Usage | None = None
    prompt_token_ids: list[Whole] | None = None
    prompt_logprobs: list[dict[Whole, PromptToken] | None] | None = None


class Vector(Struct):
    embedding: list[float] | str

    def numbers(self) -> list[float]:
        if isinstance(self.embedding, list):
            return self.embedding
        found = array("f")
        found.frombytes(base64.b64decode(self.embedding))
        return found.tolist()


class Embedded(Struct):
    data: list[Vector]
    usage: Usage | None = None


class Judged(Struct):
    label: str | None = None
    probs: list[float] = field(default_factory=list[float])


class Classified(Struct):
    data: list[Judged]
    usage: Usage | None = None


class Scored(Struct):
    score: float


class Scores(Struct):
    data: list[Scored]
    usage: Usage | None = None


FORMS: dict[str, msgspec.json.Decoder[Any]] = {
    "generate": msgspec.json.Decoder(Generated),
    "embed": msgspec.json.Decoder(Embedded),
    "classify": msgspec.json.Decoder(Classified),
    "score": msgspec.json.Decoder(Scores),
}
"""By task. Raises: msgspec.DecodeError, which includes what has another form."""

_KINDS = {CHAT: "generate", COMPLETIONS: "generate", **{path: kind for kind, path in POOLING_PATHS.items()}}


def answers_nothing(path: str, body: bytes) -> str | None:
    """Why a body is no answer to a request at `path`, though its status says so; None where it is one."""
    if (kind := _KINDS.get(path)) is None:
        return None
    try:
        found = FORMS[kind].decode(body)
    except (ValueError, RecursionError) as error:
        return f"The answer is not what the endpoint was asked for: {error}."
    name = "choices" if kind == "generate" else "data"
    return None if getattr(found, name) else f"The answer has no {name}."
