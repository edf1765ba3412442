"""Asks a router of Ray Serve's kind for each request's replica, by a call that lasts as long as the request.

The bytes go from the gateway to that replica as all others. It costs a call by handle for each request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec

from penstock.serve.gateway.body import Fields

log = logging.getLogger(__name__)

_READ = ("messages", "prompt", "input")


class HandleRouter:
    """Of one model."""

    def __init__(self, handle: Callable[[], Any], wait_s: float) -> None:
        """handle: to the deployment that answers now. wait_s: for a replica; the gateway then picks one."""
        self._handle = handle
        self._wait_s = wait_s
        self._streaming: tuple[Any, Any] = (None, None)
        self._logged: set[str] = set()

    @asynccontextmanager
    async def chosen(self, fields: Fields, session: str) -> AsyncGenerator[str]:
        """The id of the replica; "" when the router failed, or found none in time."""
        with ExitStack() as calls:
            yield await self._ask(fields, session, calls)

    async def _ask(self, fields: Fields, session: str, calls: ExitStack) -> str:
        try:
            handle = self._stream()
            if session:
                handle = handle.options(session_id=session)
            call = handle.routed.remote(_request(fields))
            calls.callback(call.cancel)
            async with asyncio.timeout(self._wait_s):
                return await anext(call)
        except Exception as error:  # the router is the user's code; the rest is Serve's and Ray's
            if (kind := type(error).__name__) not in self._logged:
                self._logged.add(kind)
                log.warning("The request router failed; the gateway picks instead.", exc_info=error)
            return ""

    def _stream(self) -> Any:
        """A handle for streams, made once for each deployment: every new one costs Serve a little."""
        handle = self._handle()
        if self._streaming[0] is not handle:
            self._streaming = handle, handle.options(stream=True)
        return self._streaming[1]


def _request(fields: Fields) -> SimpleNamespace:
    """What routers read of a request: an object with `messages` or `prompt`."""
    found: dict[str, Any] = {"model": fields.model}
    for name in _READ:
        if raw := bytes(getattr(fields, name)):
            found["prompt" if name == "input" else name] = msgspec.json.decode(raw)
    return SimpleNamespace(**found)
