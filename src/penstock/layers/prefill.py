"""The layer of a decode replica before its engine: prefill replicas compute long prompts.

A prefill replica gets the same request with one token to make, so that both build the same prompt. Its
response says where the prompt's KV cache lies, and this replica's engine fetches it. If anything fails there,
the prompt is computed here.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import msgspec

from penstock import asgi
from penstock.asgi import ASGIApp, Receive, Scope, Send
from penstock.transport.link import BYTES_PER_TOKEN

log = logging.getLogger(__name__)

WHERE = "kv_transfer_params"
"""The field of requests and responses that locates a KV cache: vLLM's name."""

_ASKING: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
_ONE_TOKEN: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 1, "max_completion_tokens": 1},
    "/v1/completions": {"max_tokens": 1},
    "/v1/responses": {"max_output_tokens": 1, "store": False, "background": False},
    "/v1/messages": {"max_tokens": 1},
}
_ONLY_HERE = ("stream_options", "min_tokens")
"""They do not fit a non-streaming response of one token."""
_PARAMETERS = ("sampling_params", "extra_args", "vllm_xargs")
"""Nested fields of requests that reach the engine unchanged."""

Ask = Callable[[Scope, bytes], Awaitable[bytes | None]]
"""Has a prefill replica answer this body, in place of the scope's own, with the same adapter and class; None
when none can."""


class Prefill:
    """ASGI before `app`. Without `ask` it only removes what clients say of KV caches."""

    def __init__(self, app: ASGIApp, ask: Ask | None = None, min_prompt_tokens: int = 0) -> None:
        self._app = app
        self._ask = ask
        self._least_tokens = min_prompt_tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            return await self._app(scope, receive, send)
        try:
            body = await asgi.read_body(receive)
            request = asgi.parsed(body)
            if request is not None:
                changed = forget(request)
                if self._ask and scope["path"] in _ONE_TOKEN and self._pays(request, len(body)):
                    where = await asgi.while_connected(receive, self._where(self._ask, scope, request))
                    if where is not None:
                        changed, request[WHERE] = True, where
                body = msgspec.json.encode(request) if changed else body
        except asgi.ClientGone:
            return None
        return await self._app(*asgi.with_body(scope, receive, body), send)

    def _pays(self, request: Mapping[str, Any], body_bytes: int) -> bool:
        """Whether the prompt is long enough, and read by only one sequence: a cache is fetched once."""
        prompt = request.get("prompt")
        if isinstance(prompt, list):
            tokens = cast("list[Any]", prompt)
            if len(tokens) < self._least_tokens or not isinstance(tokens[0], int):
                return False
        elif body_bytes < self._least_tokens * BYTES_PER_TOKEN:
            return False
        return (
            request.get("n", 1) == 1
            and not request.get("use_beam_search")
            and request.get("prompt_logprobs") is None
            and not request.get("echo")
            and request.get("previous_response_id") is None
        )

    async def _where(self, ask: Ask, scope: Scope, request: Mapping[str, Any]) -> dict[str, Any] | None:
        body = msgspec.json.encode(for_prefill(scope["path"], request))
        answer = asgi.parsed(await ask(scope, body) or b"")
        where = (answer or {}).get(WHERE)
        if where is None and answer is not None:
            log.warning("a prefill replica answered without %s", WHERE)
        return where


def forget(request: dict[str, Any]) -> bool:
    """Removes a client's own KV cache location, which an engine would fetch. Whether there was one."""
    said = False
    for name in list(request):
        if name == WHERE:
            del request[name]
            said = True
        elif name in _PARAMETERS and isinstance(request[name], dict):
            said |= forget(request[name])
    return said


def for_prefill(path: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """The request that computes and stores the prompt's KV cache. path: an endpoint's."""
    rest = {name: value for name, value in request.items() if name not in _ONLY_HERE}
    return {**rest, **_ONE_TOKEN[path], "stream": False, WHERE: _ASKING}
