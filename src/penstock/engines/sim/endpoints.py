"""The simulator's endpoints, between `app`, which routes to them, and the engine."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from penstock.asgi import Send
from penstock.engine import Delta, Load, Prompt
from penstock.engines.sim import metrics, prompt, tokenizer, tools, vectors, wire
from penstock.engines.sim.events import CHAT, COMPLETION, DONE, EventForm, SimOutput, SimResponse, calling
from penstock.engines.sim.options import SimOptions
from penstock.engines.sim.scheduler import Counts
from penstock.errors import BadRequest, Error, ModelNotFound
from penstock.openai.errors import CONTENT_TYPE, error_event
from penstock.request_context import prepared_prompt, using_adapter

Endpoint = Callable[["Call"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request, and methods to answer it."""

    body: bytes
    headers: Mapping[bytes, bytes]
    send: Send

    async def answer(self, body: bytes, content_type: bytes = CONTENT_TYPE) -> None:
        length = str(len(body)).encode()
        await self._begin([(b"content-type", content_type), (b"content-length", length)])
        await self.send({"type": "http.response.body", "body": body})

    async def answer_json(self, value: object) -> None:
        await self.answer(msgspec.json.encode(value))

    async def stream(self, events: AsyncGenerator[bytes, None]) -> None:
        """Sends the events of a stream; sends nothing before the first one has arrived."""
        async with aclosing(events):
            first = await anext(events)
            await self._begin([(b"content-type", b"text/event-stream; charset=utf-8")])
            await self._piece(first)
            async for event in events:
                await self._piece(event)
            await self.send({"type": "http.response.body", "body": b""})

    async def _begin(self, headers: list[tuple[bytes, bytes]]) -> None:
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _piece(self, piece: bytes) -> None:
        await self.send({"type": "http.response.body", "body": piece, "more_body": True})


class Simulated(Protocol):
    """What the endpoints need from their engine."""

    model_id: str
    aliases: Sequence[str]
    options: SimOptions

    def answer(
        self,
        prompts: Sequence[Prompt],
        params: wire.Params,
        *,
        arguments: str | None = None,
        adapter: str | None = None,
    ) -> AsyncGenerator[Delta, None]: ...

    async def pool(self, prompts: Sequence[Sequence[int]], adapter: str | None = None) -> None: ...

    async def check_health(self) -> None: ...

    def adapters(self) -> frozenset[str]: ...

    def load(self) -> Load: ...

    def counts(self) -> Counts: ...


_BODIES: Mapping[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": wire.Chat,
    "/v1/completions": wire.Completion,
    "/v1/embeddings": wire.Embed,
    "/v1/score": wire.Score,
    "/score": wire.Score,
    "/tokenize": wire.Tokenize,
    "/detokenize": wire.Detokenize,
}


class Endpoints:
    """The endpoints of one engine."""

    def __init__(self, engine: Simulated) -> None:
        self._engine = engine
        self._created = int(time.time())

    def routes(self) -> dict[tuple[str, str], Endpoint]:
        return {
            ("POST", "/v1/chat/completions"): self.chat,
            ("POST", "/v1/completions"): self.completions,
            ("POST", "/v1/embeddings"): self.embeddings,
            ("POST", "/v1/score"): self.score,
            ("POST", "/score"): self.score,
            ("POST", "/tokenize"): self.tokenize,
            ("POST", "/detokenize"): self.detokenize,
            ("GET", "/v1/models"): self.models,
            ("GET", "/openapi.json"): self.openapi,
            ("GET", "/health"): self.health,
            ("GET", "/metrics"): self.metrics,
        }

    async def chat(self, call: Call) -> None:
        request = wire.read(call.body, wire.Chat)
        request.max_tokens = request.max_completion_tokens or request.max_tokens
        function = tools.forced(request.tools or [], request.tool_choice)
        arguments = None if function is None else tools.arguments(function)
        form = CHAT if function is None else calling(function.name, request.tool_choice == "required")
        await self._generate(call, request, [{"messages": request.messages}], form, arguments)

    async def completions(self, call: Call) -> None:
        request = wire.read(call.body, wire.Completion)
        request.max_tokens = request.max_tokens or 16  # OpenAI's default
        await self._generate(call, request, request.prompts(), COMPLETION)

    async def _generate(
        self,
        call: Call,
        request: wire.Generate,
        prompts: Sequence[Prompt],
        form: EventForm,
        arguments: str | None = None,
    ) -> None:
        adapter = self._adapter(request.model)
        request_id = call.headers.get(b"x-request-id", b"").decode("latin-1") or uuid.uuid4().hex
        ours = prepared_prompt.get()
        prompts = prompts if ours is None else [ours.take()]
        answer = SimResponse(
            form,
            request_id,
            request.model or self._engine.model_id,
            [SimOutput() for _ in range(len(prompts) * (request.n or 1))],
            len(prompts),
            self._engine.options.enable_prompt_tokens_details,
        )
        deltas = self._engine.answer(prompts, request, arguments=arguments, adapter=adapter)
        if request.stream:
            with_usage = bool(request.stream_options and request.stream_options.include_usage)
            return await call.stream(_events(answer, deltas, with_usage))
        async with aclosing(deltas):
            async for delta in deltas:
                answer.add(delta)
        return await call.answer(answer.body())

    async def embeddings(self, call: Call) -> None:
        request = wire.read(call.body, wire.Embed)
        size = self._engine.options.embedding_size
        if request.dimensions not in (None, size):
            raise BadRequest(
                f"The simulator's embeddings have {size} numbers; its option embedding_size sets how many.",
                param="dimensions",
            )
        texts = [one if isinstance(one, str) else tokenizer.decode(one) for one in request.prompts()]
        usage = await self._pooled(request.model, texts)
        made: Sequence[object] = [vectors.embed(text, size) for text in texts]
        if request.encoding_format == "base64":
            made = [vectors.packed(vectors.embed(text, size)) for text in texts]
        await call.answer_json(self._listed(request.model, "embedding", made, usage))

    async def score(self, call: Call) -> None:
        request = wire.read(call.body, wire.Score)
        size, pairs = self._engine.options.embedding_size, request.pairs()
        usage = await self._pooled(request.model, [left + right for left, right in pairs])
        scores = [vectors.similarity(left, right, size) for left, right in pairs]
        await call.answer_json(self._listed(request.model, "score", scores, usage))

    async def _pooled(self, model: str | None, texts: Sequence[str]) -> dict[str, int]:
        """The usage of these texts, after the time that reading them takes."""
        prompts = [tokenizer.encode(text) for text in texts]
        await self._engine.pool(prompts, self._adapter(model))
        tokens = sum(map(len, prompts))
        return {"prompt_tokens": tokens, "total_tokens": tokens}

    def _listed(
        self, model: str | None, kind: str, values: Sequence[object], usage: Mapping[str, int]
    ) -> dict[str, object]:
        """The body of a response with a value for each input."""
        return {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": model or self._engine.model_id,
            "data": [{"index": i, "object": kind, kind: value} for i, value in enumerate(values)],
            "usage": usage,
        }

    async def tokenize(self, call: Call) -> None:
        request = wire.read(call.body, wire.Tokenize)
        self._adapter(request.model)
        if request.messages:
            tokens = prompt.chat(request.messages).token_ids
        elif request.prompt is not None:
            tokens = tokenizer.encode(request.prompt)
        else:
            raise BadRequest("Tokenize wants `prompt` or `messages`.", param="prompt")
        limit = self._engine.options.max_model_len
        await call.answer_json({"count": len(tokens), "max_model_len": limit, "tokens": tokens})

    async def detokenize(self, call: Call) -> None:
        request = wire.read(call.body, wire.Detokenize)
        self._adapter(request.model)
        await call.answer_json({"prompt": tokenizer.decode(request.tokens)})

    async def models(self, call: Call) -> None:
        card = {
            "id": self._engine.model_id,
            "object": "model",
            "created": self._created,
            "owned_by": "penstock",
            "max_model_len": self._engine.options.max_model_len,
        }
        await call.answer_json({"object": "list", "data": [card]})

    async def openapi(self, call: Call) -> None:
        schemas, components = msgspec.json.schema_components(
            _BODIES.values(), ref_template="#/components/schemas/{name}"
        )
        bodies = {
            path: {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}
            for path, schema in zip(_BODIES, schemas, strict=True)
        }
        paths: dict[str, dict[str, Any]] = {}
        for method, path in self.routes():
            paths.setdefault(path, {})[method.lower()] = {"responses": {}, **bodies.get(path, {})}
        info = {"title": "Simulator", "version": "1"}
        await call.answer_json(
            {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}
        )

    async def health(self, call: Call) -> None:
        await self._engine.check_health()
        await call.answer(b"")

    async def metrics(self, call: Call) -> None:
        engine = self._engine
        text = metrics.exposition(engine.model_id, engine.load(), engine.counts())
        await call.answer(text, metrics.CONTENT_TYPE)

    def _adapter(self, model: str | None) -> str | None:
        """The adapter set for the request, or else the one that it names. Raises: ModelNotFound."""
        base = self._engine.model_id
        using = using_adapter.get()
        if using is not None or model in (None, "", base, *self._engine.aliases):
            return using
        named = model.removeprefix(f"{base}:")
        if named == model or named not in self._engine.adapters():
            raise ModelNotFound(f"Model '{model}' is not served here; '{base}' is.", param="model")
        return named


async def _events(
    answer: SimResponse, deltas: AsyncGenerator[Delta, None], with_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The response's events, one per delta; an error after the first event becomes the last one."""
    head = answer.head()
    opening = answer.opening(head)
    begun = False
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                answer.add(delta)
                event = answer.event(head, delta)
                yield event if begun else opening + event
                begun = True
    except Error as error:
        if not begun:
            raise
        yield error_event(error)
        return
    yield (answer.usage_event(head) if with_usage else b"") + DONE
