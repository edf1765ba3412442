"""The simulator's HTTP: a plain ASGI app over the engine's own `generate` and `pool`.

It routes each request to its method, turns errors into envelopes, and ends a request when its client
disconnects.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import math
import random
import struct
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import mul
from typing import Any, Protocol

import msgspec

from penstock import asgi
from penstock.asgi import Receive, Scope, Send
from penstock.engine import Engine
from penstock.engines.sim import metrics, tokenizer, wire
from penstock.engines.sim.batch import Counts
from penstock.engines.sim.events import ChatAnswer, CompletionAnswer, SimAnswer
from penstock.engines.sim.messages import MessageAnswer, SimMessage
from penstock.engines.sim.options import SimOptions
from penstock.engines.sim.responses import ResponseAnswer, SimResponse
from penstock.errors import BadRequest, Error, MethodNotAllowed, ModelNotFound, NotFound
from penstock.openai.asgi_response import send_answer, send_body, send_error, send_json
from penstock.request_context import prepared_prompt, record_tokens, using_adapter

log = logging.getLogger(__name__)

Endpoint = Callable[["Call"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request, and how to answer it."""

    path: str
    body: bytes
    headers: Mapping[bytes, bytes]
    send: Send


class Simulated(Engine, Protocol):
    """What the endpoints need from their engine."""

    model_id: str
    aliases: Sequence[str]
    options: SimOptions

    async def pool(self, prompts: Sequence[Sequence[int]], adapter: str | None) -> None: ...

    def counts(self) -> Counts: ...


_Generating = wire.Chat | wire.Completion | SimResponse | SimMessage
_GENERATING: Mapping[str, tuple[type[_Generating], Callable[..., SimAnswer[Any]]]] = {
    "/v1/chat/completions": (wire.Chat, ChatAnswer),
    "/v1/completions": (wire.Completion, CompletionAnswer[wire.Completion]),
    "/v1/responses": (SimResponse, ResponseAnswer),
    "/v1/messages": (SimMessage, MessageAnswer),
}
_BODIES: Mapping[str, type[msgspec.Struct]] = {
    **{path: body for path, (body, _) in _GENERATING.items()},
    "/v1/embeddings": wire.Embed,
    "/v1/score": wire.Score,
    "/score": wire.Score,
    "/tokenize": wire.Tokenize,
    "/detokenize": wire.Detokenize,
}


class App:
    """ASGI over one simulated engine."""

    def __init__(self, engine: Simulated) -> None:
        self._engine = engine
        self._created = int(time.time())
        self._routes: dict[tuple[str, str], Endpoint] = {
            **{("POST", path): self.generate for path in _GENERATING},
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asgi.ClientGone):
            body = await asgi.read_body(receive)
            await asgi.while_connected(receive, self._answer(scope, body, send))

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        call = Call(scope["path"], body, dict(scope["headers"]), send)
        try:
            await self._endpoint(scope["method"], scope["path"])(call)
        except Error as error:
            await send_error(send, error, scope["path"])
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            await send_error(send, Error(), scope["path"])

    def _endpoint(self, method: str, path: str) -> Endpoint:
        if endpoint := self._routes.get((method, path)):
            return endpoint
        methods = [known for known, known_path in self._routes if known_path == path]
        if methods:
            raise MethodNotAllowed(f"{path} takes {' and '.join(methods)}, not {method}.")
        raise NotFound(f"The simulator has no {path}; it has {', '.join(sorted(_BODIES))}.")

    async def generate(self, call: Call) -> None:
        body, answers = _GENERATING[call.path]
        request = wire.read(call.path, call.body, body)
        chat = request if isinstance(request, wire.Generate) else request.chat()
        adapter = self._adapter(request.model)
        ours = prepared_prompt.get()
        asked = chat.asked() if ours is None else ours.take()
        request_id = call.headers.get(b"x-request-id", b"").decode("latin-1") or uuid.uuid4().hex
        model, options = request.model or self._engine.model_id, self._engine.options
        answer = answers(request, chat, request_id, model, len(wire.each(asked)), options)
        if not request.stream:
            record_tokens.set(None)
        deltas = self._engine.generate(asked, chat.sampling(), request_id=request_id, adapter=adapter)
        await send_answer(call.send, call.path, answer, deltas, stream=bool(request.stream))

    async def embeddings(self, call: Call) -> None:
        request = wire.read(call.path, call.body, wire.Embed)
        size = self._engine.options.embedding_size
        if request.dimensions not in (None, size):
            raise BadRequest(
                f"The simulator's embeddings have {size} numbers; its option embedding_size sets how many.",
                param="dimensions",
            )
        prompts = wire.several(request.input, "input")
        texts = [one if isinstance(one, str) else tokenizer.decode(one) for one in prompts]
        usage = await self._pooled(request.model, texts)
        made: Sequence[object] = [embed(text, size) for text in texts]
        if request.encoding_format == "base64":  # 32-bit floats, the least significant byte first
            made = [base64.b64encode(struct.pack(f"<{size}f", *embed(text, size))).decode() for text in texts]
        await send_json(call.send, self._listed(request.model, "embedding", made, usage))

    async def score(self, call: Call) -> None:
        request = wire.read(call.path, call.body, wire.Score)
        size, pairs = self._engine.options.embedding_size, request.pairs()
        usage = await self._pooled(request.model, [left + right for left, right in pairs])
        scores = [sum(map(mul, embed(left, size), embed(right, size))) for left, right in pairs]
        await send_json(call.send, self._listed(request.model, "score", scores, usage))

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
        request = wire.read(call.path, call.body, wire.Tokenize)
        self._adapter(request.model)
        if request.messages:
            tokens = wire.chat(request.messages).token_ids
        elif request.prompt is not None:
            tokens = tokenizer.encode(request.prompt)
        else:
            raise BadRequest("Tokenize wants `prompt` or `messages`.", param="prompt")
        limit = self._engine.options.max_model_len
        await send_json(call.send, {"count": len(tokens), "max_model_len": limit, "tokens": tokens})

    async def detokenize(self, call: Call) -> None:
        request = wire.read(call.path, call.body, wire.Detokenize)
        self._adapter(request.model)
        await send_json(call.send, {"prompt": tokenizer.decode(request.tokens)})

    async def models(self, call: Call) -> None:
        card = {
            "id": self._engine.model_id,
            "object": "model",
            "created": self._created,
            "owned_by": "penstock",
            "max_model_len": self._engine.options.max_model_len,
        }
        await send_json(call.send, {"object": "list", "data": [card]})

    async def openapi(self, call: Call) -> None:
        schemas, components = msgspec.json.schema_components(
            _BODIES.values(), ref_template="#/components/schemas/{name}"
        )
        bodies = {
            path: {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}
            for path, schema in zip(_BODIES, schemas, strict=True)
        }
        paths: dict[str, dict[str, Any]] = {}
        for method, path in self._routes:
            paths.setdefault(path, {})[method.lower()] = {"responses": {}, **bodies.get(path, {})}
        info = {"title": "Simulator", "version": "1"}
        await send_json(
            call.send,
            {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}},
        )

    async def health(self, call: Call) -> None:
        await self._engine.check_health()
        await send_body(call.send, b"")

    async def metrics(self, call: Call) -> None:
        engine = self._engine
        text = metrics.exposition(engine.model_id, engine.load(), engine.counts())
        await send_body(call.send, text, metrics.CONTENT_TYPE)

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


def embed(text: str, size: int) -> list[float]:
    """A vector of length 1 without a model: the sum of a random one per word, always the same for a word.
    Texts that share words are closer.
    """
    total = [0.0] * size
    for word in text.lower().split() or [""]:
        draw = random.Random(hashlib.blake2b(word.encode(errors="replace")).digest())
        total = [value + draw.gauss(0.0, 1.0) for value in total]
    length = math.hypot(*total)
    return [value / length for value in total]
