"""Calls to a model through a gateway in the caller's process, so that answers survive their replica.

A call by handle ends with the replica that answers it: Ray Serve knows nothing of tokens.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray.serve.handle import DeploymentHandle

from penstock.asgi_client import call
from penstock.config import GatewayConfig
from penstock.errors import BadRequest
from penstock.openai.paths import METHODS, UPLOADS
from penstock.serve.fleet import membership
from penstock.serve.fleet.table import Table
from penstock.serve.gateway.app import Gateway
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.replica.handles.api import Request, Responses, answers, as_body, encoded, refusal
from penstock.transport import headers

if TYPE_CHECKING:
    from penstock.serve.replica.handles.models import RawRequestInfo

_PATHS = METHODS | UPLOADS


class _Opened(NamedTuple):
    gateway: Gateway
    model_id: str
    handle: Any


class ModelClient:
    """Asks a model as its gateway does, from Python: `async for answer in client.chat({"messages": [...]})`.

    It has those methods of `LLMServer` that ask an endpoint, with the same arguments; each returns an async
    generator of what they yield by handle. A stream whose replica dies goes on at another one. Use it on one
    event loop.
    """

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        """handle: to the model's deployment. The first call connects."""
        self._handle = handle
        self._opening: asyncio.Task[_Opened] | None = None

    def __getattr__(self, name: str) -> Callable[..., Responses]:
        if name not in _PATHS:
            raise AttributeError(f"A ModelClient has no '{name}', only {', '.join(_PATHS)} and close.")
        return partial(self._ask, _PATHS[name])

    async def _ask(
        self, path: str, request: Request, raw_request_info: RawRequestInfo | None = None
    ) -> Responses:
        opened = await self._opened()
        body = as_body(request, opened.model_id)
        try:
            content_type, content = await encoded(path, body)
        except BadRequest as error:
            yield refusal(error, path, body)
            return
        fields = headers.of_handle(raw_request_info.headers or {}) if raw_request_info else {}
        reply = await call(opened.gateway, path, content, fields, content_type)
        async with aclosing(answers(reply, path, body)) as found:
            async for one in found:
                yield one

    async def close(self) -> None:
        """Ends its connections, and with them open answers. The next call connects anew."""
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
            (opened,) = await asyncio.gather(opening, return_exceptions=True)
            if not isinstance(opened, BaseException):
                membership.unfollow(opened.model_id, opened.handle)
                await opened.gateway.close()

    async def _opened(self) -> _Opened:
        """Raises: what Serve raises when the model cannot be asked."""
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.create_task(self._open())
        return await asyncio.shield(self._opening)

    async def _open(self) -> _Opened:
        handle: Any = copy.copy(self._handle).options(stream=False)  # with a router of its own
        card: ServedModel = await handle.served_model.remote()
        table = Table(ray.get_runtime_context().get_node_id())
        keyless = GatewayConfig(api_key=None, admin_key=None)  # its only client is this process

        async def listen_on_network(_: str) -> None:
            await handle.broadcast("listen_on_network").results_async()

        async def start_one(_: str) -> None:
            if not table.members(card.id):
                await handle.is_sleeping.remote()

        gateway = Gateway(keyless, [card], table, unreachable=listen_on_network, wake=start_one)
        await gateway.start()
        membership.follow(card.id, handle, partial(table.set_members, card.id))
        return _Opened(gateway, card.id, handle)
