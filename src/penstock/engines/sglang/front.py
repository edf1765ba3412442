"""ASGI before the relay: adapts requests to SGLang, and the few responses that differ from vLLM's.

It rejects what SGLang would ignore, translates the model's name, inserts prepared prompts, and aborts in
SGLang what a client gave up. It exposes a model's endpoints; SGLang's control endpoints stay internal.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any, Protocol, cast

import msgspec

from penstock import asgi
from penstock.asgi import ASGIApp, Message, Receive, Scope, Send
from penstock.engines.sglang import deltas, parameters
from penstock.errors import NotFound, Unsupported
from penstock.request_context import PreparedPrompt, prepared_prompt, using_adapter

_CHAT, _COMPLETIONS, _TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
_IDS = {_CHAT: "chatcmpl-", _COMPLETIONS: "cmpl-"}
_SERVED = frozenset(
    {"/health", "/metrics", "/ping", "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"}
)
_PUBLIC = "/v1/"
_NOT_PUBLIC = frozenset({"/v1/loads", "/v1/systemone"})


class FrontTarget(Protocol):
    """What it needs from the engine."""

    seeds: bool

    def known(self, path: str) -> frozenset[str]: ...

    def adapter_of(self, model: str) -> str | None: ...

    def max_model_len(self) -> int | None: ...

    async def abort(self, ids: list[str]) -> None: ...

    async def tokens(self, text: str) -> list[int]: ...

    async def metrics(self) -> bytes: ...


class SGLangFront:
    """ASGI around the relay `app`."""

    def __init__(self, app: ASGIApp, engine: FrontTarget) -> None:
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path: str = scope["path"]
        if path not in _SERVED and (not path.startswith(_PUBLIC) or path in _NOT_PUBLIC):
            raise NotFound(f"There is no endpoint {path}.")
        if path == "/metrics" and scope["method"] == "GET":
            return await _answer(
                send, await self._engine.metrics(), b"text/plain; version=0.0.4; charset=utf-8"
            )
        if scope["method"] != "POST":
            return await self._app(scope, receive, send)
        try:
            body = await asgi.read_body(receive)
        except asgi.ClientGone:
            return None
        return await self._post(scope, body, receive, send)

    async def _post(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        fields = _fields(body)
        if fields is None:  # an upload, or what SGLang refuses in its own words
            return await self._app(scope, _Once(body, receive), send)
        adapter = using_adapter.get()
        if isinstance(model := fields.get("model"), str):
            adapter = self._engine.adapter_of(model)
        ids: list[str] = []
        if path in _IDS:
            ours = prepared_prompt.get()
            if ours is not None:
                fields = await self._with_prompt(path, fields, ours)
            fields = parameters.in_body(fields, self._engine.known(path), seeds=self._engine.seeds)
            ids = _ids(path, fields)
            fields["rid"] = ids[0] if len(ids) == 1 else ids
            body = msgspec.json.encode(fields)
        elif path.endswith("tokenize"):
            send = _Tokens(send, self._engine.max_model_len())
        replayed = _Once(body, receive)
        before = prepared_prompt.set(None), using_adapter.set(adapter)
        try:
            await self._app(scope, replayed, send)
        finally:
            prepared_prompt.reset(before[0])
            using_adapter.reset(before[1])
            if replayed.gone and ids:
                await asyncio.shield(self._engine.abort(ids))
        return None

    async def _with_prompt(self, path: str, fields: dict[str, Any], ours: PreparedPrompt) -> dict[str, Any]:
        """The request with the preprocessor's prompt in place of its own. Raises: Unsupported."""
        prompt = deltas.prompt_fields(ours.take())
        if prompt.keys() - {"text", "input_ids"}:
            raise Unsupported("SGLang takes prepared prompts of text or token ids only.")
        if path == _COMPLETIONS:
            return {**fields, "prompt": prompt.get("input_ids", prompt.get("text"))}
        token_ids = prompt.get("input_ids") or await self._engine.tokens(prompt["text"])
        return {**fields, "input_ids": token_ids}


class _Once:
    """`receive` of a request whose body has been read."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive
        self.gone = False
        """Whether its client disconnected before the response's end."""

    async def __call__(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body}
        message = await self._receive()
        self.gone = self.gone or message["type"] == "http.disconnect"
        return message


class _Tokens:
    """`send` that rewrites responses about tokens in vLLM's format."""

    def __init__(self, send: Send, window: int | None) -> None:
        self._send = send
        self._window = window
        self._start: Message | None = None
        self._pieces: list[bytes] = []

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._pieces.append(message.get("body", b""))
        if message.get("more_body") or self._start is None:
            return
        body = b"".join(self._pieces)
        if self._start["status"] == 200 and (said := _fields(body)) is not None:
            if "text" in said:
                said["prompt"] = said.pop("text")
            if "max_model_len" in said:
                said["max_model_len"] = self._window
            body = msgspec.json.encode(said)
        headers = [(name, value) for name, value in self._start["headers"] if name != b"content-length"]
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _fields(body: bytes) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _ids(path: str, fields: Mapping[str, Any]) -> list[str]:
    """One for each prompt."""
    prompt = fields.get("prompt")
    many = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    count = len(cast("list[Any]", prompt)) if many else 1
    return [f"{_IDS[path]}{uuid.uuid4().hex}" for _ in range(count)]


async def _answer(send: Send, body: bytes, content_type: bytes) -> None:
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
