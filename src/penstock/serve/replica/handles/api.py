"""Calls by handle: requests as objects, sent through the same app as HTTP requests, and their responses.

`LLMServer` has a method for each path; this is what they share.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import BaseModel
from ray import serve

from penstock.asgi import ASGIApp
from penstock.asgi_client import batched, call, events
from penstock.config import LLMConfig
from penstock.config.derive import names
from penstock.engine import Delta, Engine, Prompt
from penstock.errors import BadRequest
from penstock.layers.adapters import Store, asking_for
from penstock.openai.errors import form
from penstock.request_context import current_replica
from penstock.serve.replica.handles import multipart
from penstock.transport import headers

if TYPE_CHECKING:
    from penstock.serve.replica.handles.models import RawRequestInfo

Request = BaseModel | Mapping[str, Any]
Responses = AsyncGenerator[Any, None]


class HandleAPI:
    """For one replica. admit: waits for the engine, and counts a request. replica_id: "" outside of Serve."""

    def __init__(
        self,
        config: LLMConfig,
        engine: Engine,
        adapters: Store | None,
        admit: Callable[[], Awaitable[None]],
        app: Callable[[], ASGIApp],
        replica_id: Callable[[], str],
    ) -> None:
        self._config = config
        self._engine = engine
        self._adapters = adapters
        self._admit = admit
        self._app = app
        self._replica_id = replica_id

    async def ask(self, path: str, request: Request, raw: RawRequestInfo | None) -> Responses:
        """The response, or with `stream` its events in groups; errors are yielded as `ErrorResponse`."""
        from penstock.serve.replica.handles.models import RESPONSES, ErrorResponse  # takes half a second

        body = request.model_dump(exclude_unset=True) if isinstance(request, BaseModel) else dict(request)
        if body.get("model") is None:
            body["model"] = self._config.model_id  # Anthropic's endpoints require one
        fields = headers.of_handle(raw.headers or {}) if raw else {}
        try:
            if adapter := self._adapter(body.get("model")):
                fields |= asking_for(adapter)
            content_type, content = await multipart.encode(body) if path in multipart.PATHS else _json(body)
        except BadRequest as error:
            refusal = ErrorResponse.model_validate_json(form(path).envelope(error))
            yield [refusal] if body.get("stream") else refusal
            return
        await self._admit()
        if replica_id := self._replica_id():
            current_replica.set(replica_id)
        reply = await call(self._app(), path, content, fields, content_type)
        try:
            if reply.status >= 400:
                error = ErrorResponse.model_validate_json(await reply.read())
                yield [error] if body.get("stream") else error
            elif "text/event-stream" in reply.headers.get("content-type", ""):
                async for batch in batched(events(reply.body), self._config.stream_batching_interval_ms):
                    yield batch
            elif "octet-stream" in reply.headers.get("content-type", ""):
                yield await reply.read()
            elif "text/plain" in reply.headers.get("content-type", ""):
                yield (await reply.read()).decode()
            else:
                yield RESPONSES[path].model_validate_json(await reply.read())
        finally:
            await reply.body.aclose()

    async def generate(
        self, prompt: Prompt, params: Mapping[str, Any], request_id: str | None
    ) -> AsyncGenerator[Delta, None]:
        """The engine's own stream, with the adapter that the call names."""
        await self._admit()
        adapter = self._adapter(None)
        if not adapter:
            return self._engine.generate(prompt, params, request_id=request_id)
        return self._generate_with(adapter, prompt, params, request_id)

    async def _generate_with(
        self, adapter: str, prompt: Prompt, params: Mapping[str, Any], request_id: str | None
    ) -> AsyncGenerator[Delta, None]:
        async with self.adapters().use(adapter) as key:
            stream = self._engine.generate(prompt, params, request_id=request_id, adapter=key)
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    yield delta

    def adapters(self) -> Store:
        """Raises: BadRequest when the model's config has no adapters."""
        if self._adapters is None:
            raise BadRequest(
                f"Model '{self._config.model_id}' takes no adapters: its config has no lora_config.",
                param="model",
            )
        return self._adapters

    def _adapter(self, model: object) -> str:
        """The adapter named by the call's `multiplexed_model_id`, else by `model`; "" for none.

        Raises: BadRequest when this model takes none.
        """
        chosen, named = serve.get_multiplexed_model_id(), model if isinstance(model, str) else ""
        if not chosen:
            chosen = names.adapter_in(self._config, named)
        if chosen in ("", self._config.model_id):
            return ""  # the base model, or an unknown one: the engine refuses it
        self.adapters()
        return names.adapter_in(self._config, chosen) or chosen


def _json(body: Mapping[str, Any]) -> tuple[str, bytes]:
    return "application/json", msgspec.json.encode(body)
