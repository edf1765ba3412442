"""Calls by handle: requests as objects, sent through the same app as HTTP requests, and their responses.

`LLMServer` has a method for each path; this is what they share.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import BaseModel
from ray import serve

from penstock import tiers
from penstock.asgi import ASGIApp
from penstock.asgi_client import AppResponse, batched, call, events
from penstock.config import LLMConfig
from penstock.config.derive import names
from penstock.engine import Delta, Engine, Prompt
from penstock.errors import BadRequest
from penstock.layers.adapters import Store, asking_for
from penstock.openai.errors import form
from penstock.request_context import tier
from penstock.serve.replica.handles import multipart
from penstock.serve.replica.tiers.layer import Turns
from penstock.tiers import DEFAULT, FLEX, PRIORITY, Tier
from penstock.transport import headers

if TYPE_CHECKING:
    from penstock.serve.replica.handles.models import RawRequestInfo

_RESPONSES = "/v1/responses"

Request = BaseModel | Mapping[str, Any]
Responses = AsyncGenerator[Any, None]


@dataclass(frozen=True, slots=True)
class HandleAPI:
    """For one replica. admit: waits for the engine, and counts the request that runs."""

    config: LLMConfig
    engine: Engine
    store: Store | None
    turns: Turns
    admit: Callable[[], Awaitable[None]]
    app: Callable[[], ASGIApp]

    async def ask(self, path: str, request: Request, raw: RawRequestInfo | None) -> Responses:
        """The response, or with `stream` its events in groups; errors are yielded as `ErrorResponse`."""
        body = as_body(request, self.config.model_id)
        fields = headers.of_handle(raw.headers or {}) if raw else {}
        try:
            work = _take_tier(path, body, raw)
            if adapter := self._adapter(body.get("model")):
                fields |= asking_for(adapter)
            content_type, content = await encoded(path, body)
        except BadRequest as error:
            yield refusal(error, path, body)
            return
        await self.admit()
        tier.set(work)
        reply = await call(self.app(), path, content, fields, content_type)
        interval_ms = self.config.stream_batching_interval_ms
        async with aclosing(answers(reply, path, body, work, interval_ms)) as found:
            async for one in found:
                yield one

    async def generate(
        self, prompt: Prompt, params: Mapping[str, Any], request_id: str | None
    ) -> AsyncGenerator[Delta, None]:
        """The engine's own stream, with the adapter that the call names; `service_tier` among the params is
        the call's class.
        """
        await self.admit()
        own = dict(params)
        work = _take_tier("", own, None)
        return self._generate(work, self._adapter(None), prompt, own, request_id)

    async def _generate(
        self, work: Tier, adapter: str, prompt: Prompt, params: Mapping[str, Any], request_id: str | None
    ) -> AsyncGenerator[Delta, None]:
        """Begins when it is its turn, and holds the adapter, if there is one."""
        tier.set(work)
        async with AsyncExitStack() as held:
            if work == FLEX:
                await held.enter_async_context(self.turns.batch())
            else:
                held.enter_context(self.turns.online())
            key = await held.enter_async_context(self.adapters().use(adapter)) if adapter else None
            stream = self.engine.generate(prompt, params, request_id=request_id, adapter=key)
            async for delta in await held.enter_async_context(aclosing(stream)):
                yield delta

    def adapters(self) -> Store:
        """Raises: BadRequest when the model's config has no adapters."""
        if self.store is None:
            raise BadRequest(
                f"Model '{self.config.model_id}' takes no adapters: its config has no lora_config.",
                param="model",
            )
        return self.store

    def _adapter(self, model: object) -> str:
        """The adapter named by the call's `multiplexed_model_id`, else by `model`; "" for none.

        Raises: BadRequest when this model takes none.
        """
        chosen, named = serve.get_multiplexed_model_id(), model if isinstance(model, str) else ""
        if not chosen:
            chosen = names.adapter_in(self.config, named)
        if chosen in ("", self.config.model_id):
            return ""  # the base model, or an unknown one: the engine refuses it
        self.adapters()
        return names.adapter_in(self.config, chosen) or chosen


def as_body(request: Request, model_id: str) -> dict[str, Any]:
    """A request's own fields, and its model: Anthropic's endpoints require one."""
    body = request.model_dump(exclude_unset=True) if isinstance(request, BaseModel) else dict(request)
    if body.get("model") is None:
        body["model"] = model_id
    return body


async def encoded(path: str, body: Mapping[str, Any]) -> tuple[str, bytes]:
    """Content type and content. Raises: BadRequest."""
    if path in multipart.PATHS:
        return await multipart.encode(body)
    return "application/json", msgspec.json.encode(body)


def refusal(error: BadRequest, path: str, body: Mapping[str, Any]) -> Any:
    """What a call yields in place of an answer."""
    from penstock.serve.replica.handles.models import ErrorResponse  # takes half a second

    made = ErrorResponse.of(error.status, form(path).envelope(error))
    return [made] if body.get("stream") else made


async def answers(
    reply: AppResponse, path: str, body: Mapping[str, Any], work: Tier | None = None, interval_ms: float = 0
) -> Responses:
    """What a call yields of `reply`, which this closes.

    work: the class to report, where `reply` does not. interval_ms: in which events are joined.
    """
    from penstock.serve.replica.handles.models import RESPONSES, ErrorResponse  # as above

    told = work is None or not tiers.is_reported(path)
    try:
        kind = reply.headers.get("content-type", "")
        if reply.status >= 400:
            error = ErrorResponse.of(reply.status, await reply.read())
            yield [error] if body.get("stream") else error
        elif "text/event-stream" in kind:
            async for batch in batched(events(reply), interval_ms):
                if work is not None and not told:
                    batch[0], told = tiers.reported_event(batch[0].encode(), work, path).decode(), True
                yield batch
        elif "octet-stream" in kind:
            yield await reply.read()
        elif "text/plain" in kind:
            yield (await reply.read()).decode()
        else:
            answer = await reply.read()
            if work is not None and not told:
                answer = tiers.reported(answer, work, path)
            yield RESPONSES[path].model_validate_json(answer)
    finally:
        await reply.aclose()


def _take_tier(path: str, body: dict[str, Any], raw: RawRequestInfo | None) -> Tier:
    """The class that the call names, as a gateway reads it; the engine sees no `priority`.

    Raises: BadRequest.
    """
    given = {name.lower(): value for name, value in ((raw.headers if raw else None) or {}).items()}
    header, named = given.get(tiers.HEADER), body.pop(tiers.FIELD, None)
    body.pop("priority", None)
    work = tiers.of_header(header.encode("latin-1", "replace") if header is not None else None)
    work = work or tiers.of_body(msgspec.json.encode(named), path) or DEFAULT
    if work == PRIORITY:  # gateways let it in, where their config does
        work = DEFAULT
    if path == _RESPONSES:
        body[tiers.FIELD] = work
    return work
