"""Runs the user's preprocessor before the engine's app; only models with one have this layer.

An edited request replaces the client's. A prompt for the engine travels beside the request, as the user's own
objects (`request_context.prepared_prompt`), and the request then holds a placeholder where its input was.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import msgspec

from penstock import asgi
from penstock.asgi import ASGIApp, Receive, Scope, Send
from penstock.config import LLMConfig
from penstock.engine import Prompt
from penstock.errors import BadRequest, Error, OwnCodeFailed
from penstock.hooks.hook import Context, authors_ask
from penstock.hooks.result import Meant, meant
from penstock.layers import generation
from penstock.openai.asgi_response import send_error
from penstock.openai.paths import ENGINE_PATHS
from penstock.request_context import PreparedPrompt, prepared_prompt

log = logging.getLogger(__name__)

HookCall = Callable[[Any, Context], Awaitable[Any]]
"""A hook, wherever it runs."""

_KEY = "penstock.context"

GENERATING: Mapping[str, str] = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/v1/responses/input_tokens": "input",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    generation.PATH: "prompt",
}
"""Paths where an engine prompt may stand in for the request's own input, and the field that holds that."""

_NO_PROMPT = ("tokenize", "render", "/audio/transcriptions", "/audio/translations")
PATHS = frozenset({*GENERATING, *(path for path in ENGINE_PATHS if not path.endswith(_NO_PROMPT))})
"""Paths where a request can be edited; at those that are not in `GENERATING` the engine makes the prompt."""

_OWN_NAMES: Mapping[str, Mapping[str, str]] = {
    "/v1/responses": {"max_tokens": "max_output_tokens"},
    "/v1/messages": {"stop": "stop_sequences"},
}
"""Endpoints with other names for a sampling parameter than chat completions."""


def context_of(scope: Scope, config: LLMConfig) -> Context:
    """The context of a request, shared by all layers."""
    if _KEY not in scope:
        fields = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        scope[_KEY] = Context(config, scope["path"], fields.get("x-request-id", ""), fields)
    return scope[_KEY]


class Preprocessing:
    """ASGI before `app`."""

    def __init__(self, app: ASGIApp, ask: HookCall, config: LLMConfig) -> None:
        self._app = app
        self._ask = ask
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in PATHS or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        try:
            body = await asgi.read_body(receive)
            request = asgi.parsed(body)
            if request is not None:  # otherwise the engine's app reports the fault
                found = await asgi.while_connected(receive, self._meant(scope, request))
                body = _encoded(found, context_of(scope, self._config))
        except asgi.ClientGone:
            return None
        except Error as error:
            return await send_error(send, error, scope["path"])
        return await self._app(*asgi.with_body(scope, receive, body), send)

    async def _meant(self, scope: Scope, request: Mapping[str, Any]) -> Meant:
        context = context_of(scope, self._config)
        returned = await self._ask(dict(request), context)  # a copy: the user's code may change its argument
        try:
            found = meant(returned, request, engine=self._config.engine_name)
            if found.prompt is not None and scope["path"] not in GENERATING:
                raise TypeError(
                    f"The preprocessor returned an engine prompt for {scope['path']}, which takes none."
                )
        except TypeError as error:
            raise _useless(error, context) from error
        if found.prompt is not None and request.get("previous_response_id"):
            raise BadRequest(
                "This model's preprocessor makes the whole prompt, so `previous_response_id` adds nothing to "
                "it. Send the conversation in `input`.",
                param="previous_response_id",
            )
        return found


def _encoded(found: Meant, context: Context) -> bytes:
    """The request for the engine's app. Sets `prepared_prompt` for the running task if there is a prompt."""
    try:
        return msgspec.json.encode(found.request if found.prompt is None else _replaced(found, context.path))
    except Exception as error:  # whatever the user's code returned
        raise _useless(error, context) from error


def _replaced(found: Meant, path: str) -> Mapping[str, Any]:
    ours = PreparedPrompt(cast("Prompt", found.prompt))
    prepared_prompt.set(ours)
    names = _OWN_NAMES.get(path, {})
    request = found.request
    sampling = {names.get(name, name): value for name, value in found.sampling.items()}
    if path == generation.PATH and sampling:
        sampling = {"sampling_params": {**(request.get("sampling_params") or {}), **sampling}}
    return {**request, **sampling, **stand_in(ours, path)}


def stand_in(ours: PreparedPrompt, path: str) -> dict[str, Any]:
    """The field of a request to `path` that holds the placeholder. path: one of `GENERATING`."""
    field, sign = GENERATING[path], ours.placeholder
    return {field: [{"role": "user", "content": sign}] if field == "messages" else sign}


def _useless(error: Exception, context: Context) -> OwnCodeFailed:
    if authors_ask.get():
        return OwnCodeFailed(str(error))
    log.error("What the preprocessor made of request %s cannot be used: %s", context.request_id, error)
    return OwnCodeFailed(
        "The preprocessor of this model returned what cannot be used; the log of its replica says why."
    )
