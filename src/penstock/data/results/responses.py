"""The JSON that engines answer, as far as columns need it: vLLM's, the simulator's, OpenAI's and others'.

A field that one of them leaves out is None.
"""

from __future__ import annotations

import base64
from array import array
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from penstock.data.results.outcome import NO_BODY, Outcome, bad_answer
from penstock.data.rows.request import CHAT, COMPLETIONS, POOLING_PATHS

Item = TypeVar("Item")

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""An integer that a column can hold."""


class PromptTokensDetails(Struct):
    cached_tokens: Int64 | None = None


class ResponseUsage(Struct):
    prompt_tokens: Int64 | None = None
    completion_tokens: Int64 | None = None
    prompt_tokens_details: PromptTokensDetails | None = None
    input_tokens_details: PromptTokensDetails | None = None
    cached_tokens: Int64 | None = None
    input_tokens: Int64 | None = None
    output_tokens: Int64 | None = None
    cache_read_input_tokens: Int64 | None = None
    cache_creation_input_tokens: Int64 | None = None

    def counts(self) -> tuple[Int64 | None, Int64 | None, Int64 | None]:
        """Tokens of the prompt, those of them that were cached, and generated ones."""
        details = self.prompt_tokens_details or self.input_tokens_details
        cached = details.cached_tokens if details else self.cached_tokens
        prompt = self.input_tokens if self.prompt_tokens is None else self.prompt_tokens
        if self.prompt_tokens is None and self.input_tokens is not None:  # Anthropic's leave these out
            read, created = self.cache_read_input_tokens, self.cache_creation_input_tokens
            prompt, cached = (
                self.input_tokens + (read or 0) + (created or 0),
                cached if read is None else read,
            )
        generated = self.output_tokens if self.completion_tokens is None else self.completion_tokens
        return prompt, cached, generated


class FunctionCall(Struct):
    name: str | None = None
    arguments: Any = None


class ToolCall(Struct):
    id: str | None = None
    function: FunctionCall | None = None


class ResponseMessage(Struct):
    content: Any = None  # some servers give parts
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None


class TopLogprob(Struct):
    token: str | None = None
    logprob: float | None = None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] | None = None


class Logprobs(Struct):
    """content: of a chat; the lists: of a completion."""

    content: list[TokenLogprob] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float | None] | None] | None = None


class PromptToken(Struct):
    logprob: float | None = None
    rank: Int64 | None = None
    decoded_token: str | None = None


class ResponseChoice(Struct):
    index: Int64 = 0
    message: ResponseMessage | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[Int64] | None = None
    prompt_token_ids: list[Int64] | None = None
    prompt_logprobs: list[dict[Int64, PromptToken] | None] | None = None
    logprobs: Logprobs | None = None


class GenerationResult(Struct):
    choices: list[ResponseChoice]
    usage: ResponseUsage | None = None
    prompt_token_ids: list[Int64] | None = None
    prompt_logprobs: list[dict[Int64, PromptToken] | None] | None = None


class PooledResult(Struct, Generic[Item]):
    data: list[Item]
    usage: ResponseUsage | None = None


class Embedding(Struct):
    embedding: list[float] | str

    def numbers(self) -> list[float]:
        if isinstance(self.embedding, list):
            return self.embedding
        found = array("f")
        found.frombytes(base64.b64decode(self.embedding))
        return found.tolist()


class Classification(Struct):
    label: str | None = None
    probs: list[float] = field(default_factory=list[float])


class PairScore(Struct):
    score: float


DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    "generate": msgspec.json.Decoder(GenerationResult),
    "embed": msgspec.json.Decoder(PooledResult[Embedding]),
    "classify": msgspec.json.Decoder(PooledResult[Classification]),
    "score": msgspec.json.Decoder(PooledResult[PairScore]),
}
"""By task. Raises: msgspec.DecodeError, also for a response of another kind."""

_KINDS = {CHAT: "generate", COMPLETIONS: "generate", **{path: kind for kind, path in POOLING_PATHS.items()}}


def checked(path: str, outcome: Outcome) -> Outcome:
    """The outcome; failed where its body is not a response of the endpoint `path`."""
    if outcome.state != "ok" or (kind := _KINDS.get(path)) is None:
        return outcome
    name = "choices" if kind == "generate" else "data"
    try:
        if getattr(DECODERS[kind].decode(outcome.body), name):
            return outcome
        fault = f"The response has no {name}."
    except (ValueError, RecursionError) as error:
        fault = f"The response is not one of this endpoint: {error}."
    failure = bad_answer(fault, outcome.attempts)
    return msgspec.structs.replace(outcome, state="failed", body=NO_BODY, failure=failure)
