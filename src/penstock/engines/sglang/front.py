"""ASGI before the relay: adapts requests to SGLang, and the few responses that differ from vLLM's.

It rejects what SGLang would ignore, translates the model's name, inserts prepared prompts, and aborts in
SGLang what a client gave up. It exposes a model's endpoints; SGLang's control endpoints stay internal.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Protocol, cast

import msgspec

from penstock import asgi
from penstock.asgi import ASGIApp, Message, Receive, Scope, Send
from penstock.engines.process import completion, forced_tools
from penstock.errors import NotFound
from penstock.on_thread import completed
from penstock.openai import requests
from penstock.openai.asgi_response import send_body, send_json
from penstock.request_context import PreparedPrompt, prepared_prompt, using_adapter

_CHAT = "/v1/chat/completions"
_IDS = {_CHAT: "chatcmpl-", completion.PATH: "cmpl-"}
_SERVED = frozenset(
    {"/health", "/metrics", "/ping", "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"}
)
_PUBLIC = "/v1/"
_NOT_PUBLIC = frozenset({"/v1/loads", "/v1/systemone"})
_PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"


class FrontTarget(Protocol):
    """What it needs from the engine."""

    def obeyed(self, path: str, fields: Mapping[str, Any]) -> dict[str, Any]: ...

    def adapter_of(self, model: str) -> str | None: ...

    def max_model_len(self) -> int | None: ...

    async def abort(self, ids: list[str]) -> None: ...

    async def ask(self, path: str, fields: Mapping[str, Any]) -> dict[str, Any]: ...

    async def metrics(self) -> bytes: ...


class SGLangFront:
    """ASGI around the relay `app`."""

    def __init__(self, app: ASGIApp, engine: FrontTarget) -> None:
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path not in _SERVED and (not path.startswith(_PUBLIC) or path in _NOT_PUBLIC):
            raise NotFound(f"There is no endpoint {path}.")
        if path == "/metrics":
            return await send_body(send, await self._engine.metrics(), _PROMETHEUS)
        if scope["method"] != "POST":
            return await self._app(scope, receive, send)
        try:
            body = await asgi.read_body(receive)
        except asgi.ClientGone:
            return None
        fields = asgi.parsed(body)
        if fields is None:  # an upload, or what SGLang refuses in its own words
            return await self._app(*asgi.with_body(scope, receive, body), send)
        requests.refuse_not_done(path, fields, hosted_tools=True)
        adapter = using_adapter.get()
        if isinstance(model := fields.get("model"), str):
            adapter = self._engine.adapter_of(model)
        if path.endswith("tokenize"):
            return await send_json(send, await self._tokens(path, fields))
        before = using_adapter.set(adapter)
        try:
            await self._post(scope, fields, receive, send)
        finally:
            using_adapter.reset(before)
        return None

    async def _post(self, scope: Scope, fields: dict[str, Any], receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        ids: list[str] = []
        gone = False

        async def listened() -> Message:
            nonlocal gone
            message = await receive()
            gone = gone or message["type"] == "http.disconnect"
            return message

        if path in _IDS:
            ours = prepared_prompt.get()
            if path == _CHAT and ours is not None:
                fields = await self._with_prompt(fields, ours)
            fields = self._engine.obeyed(path, forced_tools.strict(fields))
            ids = [f"{_IDS[path]}{uuid.uuid4().hex}" for _ in range(_prompts(fields))]
            fields["rid"] = ids[0] if len(ids) == 1 else ids
        try:
            await self._app(*asgi.with_body(scope, listened, msgspec.json.encode(fields)), send)
        finally:
            if gone and ids:
                await completed(self._engine.abort(ids))

    async def _with_prompt(self, fields: dict[str, Any], ours: PreparedPrompt) -> dict[str, Any]:
        """The chat with the preprocessor's prompt in place of its messages. Raises: Unsupported."""
        prompt: Any = completion.prompt_fields(ours.take())["prompt"]
        prepared_prompt.set(None)
        if isinstance(prompt, str):
            prompt = (await self._engine.ask("/tokenize", {"prompt": prompt}))["tokens"]
        return {**fields, "input_ids": prompt}

    async def _tokens(self, path: str, fields: dict[str, Any]) -> dict[str, Any]:
        """SGLang's answer about tokens, in vLLM's format."""
        said = await self._engine.ask(path, {name: fields[name] for name in fields if name != "model"})
        if "text" in said:
            said["prompt"] = said.pop("text")
        if "max_model_len" in said:
            said["max_model_len"] = self._engine.max_model_len()
        return said


def _prompts(fields: Mapping[str, Any]) -> int:
    """How many prompts a request has."""
    prompt = fields.get("prompt")
    many = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return len(cast("list[Any]", prompt)) if many else 1
