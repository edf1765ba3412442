"""Loads the adapter that a request needs before the engine's app runs, and holds it until the response has
ended.

A header names it: the gateway sets it, and so do handle methods.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from urllib.parse import quote, unquote_to_bytes

from penstock import asgi
from penstock.asgi import ASGIApp, Receive, Scope, Send
from penstock.errors import Error
from penstock.layers.adapters.store import Store
from penstock.openai.asgi_response import send_error
from penstock.request_context import adapter_stamp, tokens_before, tokens_so_far, using_adapter
from penstock.transport.link import ADAPTER


class Layer:
    """ASGI app around `app`, which finds the engine's name of the adapter in `using_adapter`."""

    def __init__(self, app: ASGIApp, store: Store) -> None:
        self._app = app
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = adapter_of(scope)
        if not name:
            return await self._app(scope, receive, send)
        async with AsyncExitStack() as held:
            using = self._store.use(name)
            try:
                if self._store.has(name):
                    key = await held.enter_async_context(using)
                else:  # the body comes first, so that the client's end is seen while the adapter is loaded
                    body = await asgi.read_body(receive)
                    key = await asgi.while_connected(receive, held.enter_async_context(using))
                    scope, receive = asgi.with_body(scope, receive, body)
            except Error as error:
                return await send_error(send, error, scope["path"])
            except asgi.ClientGone:
                return None
            adapter_stamp.set(stamp := self._store.stamp(name, key))
            probe = tokens_so_far.get()
            if tokens_before.get() and probe is not None and not probe.is_by(key, stamp):
                probe.forget()
            before = using_adapter.set(key)
            try:
                await self._app(scope, receive, send)
            finally:
                using_adapter.reset(before)


def asking_for(adapter: str) -> dict[str, str]:
    """The header by which a request names its adapter."""
    return {ADAPTER.decode(): quote(adapter, safe="")}


def adapter_of(scope: Scope) -> str:
    """The name of a request's adapter, "" for the base model."""
    return unquote_to_bytes(asgi.header(scope, ADAPTER)).decode(errors="replace")
