"""Loads the adapter that a request needs before the engine's app runs, and holds it until the response has
ended.

A header names it: the gateway sets it, and so do handle methods.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from penstock import asgi
from penstock.asgi import ASGIApp, Message, Receive, Scope, Send
from penstock.errors import Error
from penstock.layers.adapters.store import Store
from penstock.openai.asgi_response import send_error
from penstock.request_context import using_adapter
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
            early = _Early(receive)
            using = held.enter_async_context(self._store.use(name))
            try:
                key = await (using if self._store.has(name) else early.unless_gone(using))
            except Error as error:
                return await send_error(send, error, scope["path"])
            except asgi.ClientGone:
                return None
            before = using_adapter.set(key)
            try:
                await self._app(scope, early if early.messages else receive, send)
            finally:
                using_adapter.reset(before)


class _Early:
    """ASGI receive that first replays what arrived while the adapter was loaded."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.messages: deque[Message] = deque()

    async def __call__(self) -> Message:
        return self.messages.popleft() if self.messages else await self._receive()

    async def unless_gone(self, using: Coroutine[Any, Any, str]) -> str:
        """Enters `using`; cancels it when the client disconnects. Raises: ClientGone."""
        task = asyncio.create_task(using)
        reading = asyncio.create_task(self._read(task))
        try:
            return await task
        except asyncio.CancelledError:
            if reading.done() and not asyncio.current_task().cancelling():  # pyright: ignore[reportOptionalMemberAccess]
                raise asgi.ClientGone from None
            raise
        finally:
            reading.cancel()

    async def _read(self, task: asyncio.Task[str]) -> None:
        while not self.messages or self.messages[-1]["type"] != "http.disconnect":
            self.messages.append(await self._receive())
        task.cancel()


def asking_for(adapter: str) -> dict[str, str]:
    """The header by which a request names its adapter."""
    return {ADAPTER.decode(): quote(adapter, safe="")}


def adapter_of(scope: Scope) -> str:
    """The name of a request's adapter, "" for the base model."""
    if scope["type"] == "http":
        for field, value in scope["headers"]:
            if field == ADAPTER:
                return unquote_to_bytes(value).decode(errors="replace")
    return ""
