"""Sends requests of a gateway or of batch, which are checked, to vLLM's endpoints past FastAPI's routing.

A short answer costs the front-end some 3 ms, a fifth of it FastAPI's: matching 44 routes, solving
dependencies, a second set of HTTP metrics. The endpoint gets and returns the same here. A body that fails
validation goes through FastAPI and is rejected there.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic_core import from_json, to_json
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock import asgi
from penstock.asgi import TRUSTED, ASGIApp, Message, Receive, Scope, Send
from penstock.engines.vllm.continued import answer
from penstock.engines.vllm.frontend import limits, request_models
from penstock.engines.vllm.tokenizing import turns
from penstock.errors import BadRequest
from penstock.openai import requests
from penstock.openai.response_items import new_id
from penstock.request_context import Pixels, current_replica, id_seed, pixels, response_id

log = logging.getLogger(__name__)

_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/classify",
    "/score",
)
"""The busy endpoints: JSON in, a `Response` out."""

_RESPONSES = "/v1/responses"

_HTTP_ONLY = {
    "starlette.middleware.cors.CORSMiddleware",
    "vllm.entrypoints.serve.elastic_ep.middleware.ScalingMiddleware",
    "prometheus_fastapi_instrumentator.middleware.PrometheusInstrumentatorMiddleware",
    "vllm.entrypoints.speech_to_text.realtime.metrics.WebSocketMetricsMiddleware",
}
"""Middleware that our own requests do not need. With any other, all requests go through vLLM's app."""

_PARSED = "penstock.parsed"
_FAILED = 500
_CLIENT_GONE = 499  # nobody reads it

Endpoint = Callable[..., Awaitable[Response]]


class DirectRoutes:
    """ASGI before vLLM's `app`."""

    def __init__(self, app: FastAPI) -> None:
        self._app: ASGIApp = app
        found = {route.path: route for route in app.routes if isinstance(route, APIRoute)}
        self._all = {path: route.endpoint for path, route in found.items() if "POST" in route.methods}
        endpoints = {path: found[path].endpoint for path in _PATHS if path in found}
        if others := foreign_middleware(app):
            log.warning(
                "Requests take the long way through vLLM's app, for the sake of %s", ", ".join(others)
            )
            endpoints = {}
        responses = getattr(app.state, "openai_serving_responses", None)
        self._hosted_tools = getattr(responses, "tool_server", None) is not None
        self._forms = {path: request_models.of(endpoint) for path, endpoint in endpoints.items()}
        self._short = Starlette(
            routes=[
                Route(path, partial(_answer, _handler(one)), methods=["POST"])
                for path, one in endpoints.items()
            ],
            exception_handlers=app.exception_handlers,
        )
        self._short.state = app.state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_json(scope):
            return await self._long(scope, receive, send)
        try:
            body = await asgi.read_body(receive)
        except asgi.ClientGone:
            return None
        if not body:
            return await self._long(*asgi.with_body(scope, receive, body), send)
        try:
            request = from_json(body)
        except ValueError as error:  # includes lone surrogates, which Python's own parser accepts
            raise BadRequest(f"The request body is not valid JSON: {error}.") from None
        if len(body) > 2 * limits.MOST_ITEMS:  # each takes two bytes at least
            limits.check_items(scope["path"], request)
        if isinstance(request, dict):
            given = cast("requests.Request", request)
            request = requests.prepared(scope["path"], given, nulls=b"null" in body)
            requests.refuse_not_done(scope["path"], request, hosted_tools=self._hosted_tools)
            body = body if request is given else to_json(request, inf_nan_mode="constants")
        turns.account.set(turns.Account())
        pixels.set(Pixels())
        answer.begin()
        if scope["path"] == _RESPONSES:
            response_id.set(new_id(current_replica.get(), id_seed.get()))
        form = self._forms.get(scope["path"]) if _is_checked(scope) else None
        if form is not None:
            try:
                scope[_PARSED] = form.validate_python(request)
            except Exception:  # whatever vLLM's validators raise
                form = None
        if form is None:
            return await self._long(*asgi.with_body(scope, receive, body), send)
        return await self._short(scope, receive, send)

    async def _long(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Goes through vLLM's app, which answers 500 where its own validation crashes on the input.

        Raises: BadRequest in place of such a 500.
        """
        endpoint = self._all.get(scope["path"])
        if endpoint is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body, failed = bytearray(), list[Message]()

        async def heard() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def said(message: Message) -> None:
            if failed or (message["type"] == "http.response.start" and message["status"] == _FAILED):
                failed.append(message)
            else:
                await send(message)

        try:
            await self._app(scope, heard, said)
        except Exception:
            if failed:
                request_models.blame(endpoint, bytes(body))
            raise
        if failed:
            request_models.blame(endpoint, bytes(body))
        for message in failed:
            await send(message)


def _is_json(scope: Scope) -> bool:
    if scope["method"] != "POST":
        return False
    kind, _, _ = dict(scope["headers"]).get(b"content-type", b"").partition(b";")
    return kind.strip().lower() == b"application/json"


def _is_checked(scope: Scope) -> bool:
    """Whether the request needs none of those layers: a browser's needs CORS headers."""
    return TRUSTED in scope.get("extensions", ()) and b"origin" not in dict(scope["headers"])


def foreign_middleware(app: FastAPI) -> set[str]:
    """Names of what a user has put before vLLM's endpoints; it sees all requests."""
    kinds: list[Any] = [layer.cls for layer in app.user_middleware]
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds} - _HTTP_ONLY


def _handler(endpoint: Any) -> Endpoint:
    """The endpoint without vLLM's watch for the end of its client: where the request itself is cancelled, as
    batch's rows are, that leaves the handler, and its request in the engine, running.
    """
    inner: Endpoint | None = getattr(endpoint, "__wrapped__", None)
    watched = inner is not None and endpoint.__code__.co_qualname.startswith("with_cancellation.")
    return inner if watched and inner is not None else endpoint


async def _answer(handler: Endpoint, request: Request) -> Response:
    handling: Any = handler(request.scope[_PARSED], raw_request=request)
    try:
        return await asgi.while_connected(request.receive, handling)
    except asgi.ClientGone:
        return Response(status_code=_CLIENT_GONE)
