"""`POST /v1/generate`: the engine's own `generate` over HTTP, token ids or text in, token ids and text out.

A layer before the engine's app that knows no engine: sampling parameters pass unchanged, and a delta becomes
an event by one encoding. Images, videos and audio go by chats, or by handle.
"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from penstock import asgi
from penstock.asgi import ASGIApp, Receive, Scope, Send
from penstock.engine import Delta, Engine, Logprob, Prompt
from penstock.errors import BadRequest, Error
from penstock.openai.asgi_response import Answer, send_answer, send_error
from penstock.openai.errors import unreadable
from penstock.request_context import prepared_prompt, record_tokens

PATH = "/v1/generate"


class GenerateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request. sampling_params: by the engine's own names, with the engine's own defaults.

    prompt_cache_key, user: for routing, as elsewhere.
    """

    model: str | None = None
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    cache_salt: str | None = None
    sampling_params: dict[str, Any] = {}
    stream: bool = False
    prompt_cache_key: str | None = None
    user: str | None = None

    def engine_prompt(self) -> Prompt:
        """Raises: BadRequest unless exactly one of the two is given."""
        if (self.prompt is None) == (self.prompt_token_ids is None):
            raise BadRequest(f"{PATH} wants either `prompt`, a text, or `prompt_token_ids`.", param="prompt")
        given: dict[str, Any] = {"cache_salt": self.cache_salt} if self.cache_salt else {}
        if self.prompt is not None:
            return {"prompt": self.prompt} | given
        return {"prompt_token_ids": self.prompt_token_ids} | given


class GenerateOutput(msgspec.Struct):
    """One output, or what a step added to it. logprobs: for each token the token itself, then the likeliest
    others.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None
    logprobs: list[tuple[Logprob, ...]] | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs


class GenerateUsage(msgspec.Struct):
    """Counts of tokens; cached ones are part of the prompt."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    cached_tokens: int = 0

    def add(self, delta: Delta) -> None:
        self.prompt_tokens, self.cached_tokens = delta.prompt_tokens, delta.cached_tokens
        self.completion_tokens += len(delta.token_ids)
        self.total_tokens = self.prompt_tokens + self.completion_tokens


class GenerateResponse(msgspec.Struct):
    """A whole response; at a stream's end one without outputs."""

    id: str
    outputs: list[GenerateOutput]
    usage: GenerateUsage


_decode = msgspec.json.Decoder(GenerateRequest).decode
_encode = msgspec.json.Encoder().encode


class GenerateAnswer(Answer[Delta]):
    """Collects the outputs of one request, or writes an event for each delta."""

    def __init__(self, id: str) -> None:
        self.id = id
        self._outputs: dict[int, GenerateOutput] = {}
        self._usage = GenerateUsage()

    def add(self, delta: Delta) -> None:
        self._usage.add(delta)
        self._outputs.setdefault(delta.index, GenerateOutput(delta.index)).add(delta)

    def event(self, delta: Delta) -> bytes:
        self._usage.add(delta)
        output = GenerateOutput(delta.index)
        output.add(delta)
        return b"data: " + _encode(output) + b"\n\n"

    def closing(self) -> bytes:
        return b"data: " + _encode(self.body()) + b"\n\ndata: [DONE]\n\n"

    def body(self) -> GenerateResponse:
        return GenerateResponse(self.id, [self._outputs[i] for i in sorted(self._outputs)], self._usage)


class Generation:
    """ASGI before `app`."""

    def __init__(self, app: ASGIApp, engine: Engine) -> None:
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != PATH or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        try:
            body = await asgi.read_body(receive)
            return await asgi.while_connected(receive, self._answer(scope, body, send))
        except asgi.ClientGone:
            return None
        except Error as error:
            return await send_error(send, error, PATH)

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        """Raises: Error, before the first byte only."""
        asked = _read(body)
        ours = prepared_prompt.get()
        prompt = asked.engine_prompt() if ours is None else ours.take()
        request_id = asgi.header(scope, b"x-request-id").decode("latin-1")  # the gateway has set it
        answer = GenerateAnswer(f"gen-{request_id or uuid.uuid4().hex}")
        if not asked.stream:
            record_tokens.set(None)
        deltas = self._engine.generate(prompt, asked.sampling_params, request_id=answer.id)
        await send_answer(send, PATH, answer, deltas, stream=asked.stream)


def _read(body: bytes) -> GenerateRequest:
    """Raises: BadRequest that names the field at fault."""
    try:
        asked = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise unreadable(error) from error
    if "prompt_logprobs" in asked.sampling_params:
        raise BadRequest(
            f"{PATH} gives no prompt_logprobs; /v1/completions does.", param="sampling_params.prompt_logprobs"
        )
    return asked
